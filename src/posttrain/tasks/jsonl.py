"""Your own rows: any file of prompts with answers, solutions, responses or whole conversations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from posttrain.errors import UsageError
from posttrain.graders.grading import Outcome, Submission, grade
from posttrain.registry import find, register, suggest
from posttrain.render.extraction import split_response
from posttrain.tasks.base import Task
from posttrain.tasks.collect import Collected, collect
from posttrain.tasks.reader import reads_rows
from posttrain.tasks.reading import Row, read_file
from posttrain.tasks.splits import Split, choose_split, opening_hash
from posttrain.tasks.thinking import answer_text
from posttrain.tasks.transcripts import read_transcript, uses_tools
from posttrain.types import Example, Message, Turn

# What is said of a response that a grader did not find right.
OUTCOMES: dict[Outcome, str] = {
    "wrong": "a wrong answer",
    "no_answer": "no answer in the response",
    "ungraded": "nothing to grade against",
    "timeout": "the grader took too long",
    "crash": "the grader died on it",
}


@register("task", held_out="validation")
@reads_rows
def jsonl(
    *,
    path: str,
    split: Split = "train",
    prompt_key: str = "prompt",
    messages_key: str = "messages",
    answer_key: str = "answer",
    solution_key: str = "solution",
    response_key: str = "response",
    meta_keys: list[str] | None = None,
    grader: str = "numeric",
    validation_share: Annotated[float, Field(ge=0, lt=1)] = 0.05,
    strip_thinking: bool = False,
    correct_only: bool = False,
) -> Task:
    """Rows of a ``.jsonl``, ``.jsonl.gz`` or ``.parquet`` file.

    A row has a prompt (text) or messages (a list of role and content), and an answer (text or a number) with maybe a
    solution, or a response. A response is a whole text to imitate, and so is the assistant's message at the end of
    messages; such a row needs no answer. Messages before it may use tools (``tool_calls``, then the role
    ``tool`` for each result): what is called is learnt, what is returned is only read. How the response is written is
    the template's affair: ``r1_zero`` puts its reasoning and its answer between the tags, ``plain``, ``chat`` and
    ``as_is`` take it as it stands.

    Args:
        path: the file, or ``hf:NAME`` for a data set of the hub (``hf:NAME:CONFIG@SPLIT``; ``#1000`` behind it streams
            its first rows and downloads no more).
        split: ``validation`` is a part of the rows chosen by a hash of the prompt up to the user's first message, so
            that a conversation and one that goes on from it stand on the same side; ``test`` is the whole file.
        prompt_key, messages_key: where the prompt stands; a row with both uses the messages.
        answer_key: where the gold answer stands; ``""`` if the data have none.
        solution_key: where the worked solution, without the answer, stands; rows may lack it.
        response_key: where the whole response stands; rows may lack it.
        meta_keys: further keys that every row has, kept: for breakdowns (``subject``), or for the grader (``choices``).
        grader: what says whether an answer is right (``posttrain explain grader``).
        validation_share: share of the rows that is held out.
        strip_thinking: leave ``<think>`` … ``</think>`` out of solutions and responses; a row whose thinking never
            closes, or that holds nothing else, is dropped and counted.
        correct_only: keep only the demonstrations that the grader finds right by the row's gold answer; how many went,
            and why, is counted.

    Raises:
        DataError: a missing or malformed file or row, with its line.
        UnknownWord: no such grader.
        UsageError: ``correct_only``, and no row has a response with a gold answer.
        MissingExtra: a parquet file, and ``pyarrow`` is not installed.
    """
    find("grader", grader, "task.grader")
    keys = (prompt_key, messages_key, answer_key, solution_key, response_key)

    def read(row: Row) -> Example:
        example = _without_thinking(read_example(row, split, *keys), strip_thinking)
        return replace(example, meta=_read_meta(row, meta_keys or ()), grader=grader)

    collected = collect(read_file(path), read, path)
    examples = keep_correct(collected, grader, path) if correct_only else collected.examples
    chosen = choose_split(examples, split, validation_share, path, opening_hash)
    return Task("jsonl", split, chosen, dict(collected.dropped))


def read_example(
    row: Row, split: str, prompt_key: str, messages_key: str, answer_key: str, solution_key: str, response_key: str
) -> Example:
    """One row as an example.

    Raises:
        DataError: a key is missing, of the wrong type or empty.
    """
    turns: tuple[Turn, ...] = ()
    if uses_tools(row, messages_key):
        messages, turns = read_transcript(row, messages_key)
    elif messages_key in row.data:
        messages = row.messages(messages_key)
    else:
        messages = (Message("user", row.text(prompt_key)),)
    solution = row.text(solution_key) if row.has(solution_key) else None
    parts = {} if solution is None else {repr(solution_key): solution}
    if row.has(response_key):
        parts[repr(response_key)] = row.text(response_key)
    if messages[-1].role == "assistant":
        if len(messages) == 1:
            raise row.fail(f"{messages_key!r} holds nothing but the assistant's message; a prompt must come before it")
        parts[f"an assistant's message at the end of {messages_key!r}"] = messages[-1].content
        messages = messages[:-1]
    if len(parts) > 1:
        raise row.fail(f"both {' and '.join(parts)}: give one")
    demonstration = next((text for text in parts.values() if text is not solution), None)
    answer = None
    if answer_key and (demonstration is None or row.has(answer_key)):
        if answer_key not in row.data:
            raise row.fail(
                f"the key {answer_key!r} is missing. There are: {', '.join(row.data)}. Name the right one as "
                'task.answer_key, or set it to "" if the data have no answers; a whole response is task.response_key'
            )
        answer = row.answer(answer_key)
    example_id = f"jsonl/{split}/{row.line}"
    return Example(example_id, messages, answer=answer, solution=solution, demonstration=demonstration, turns=turns)


def _without_thinking(example: Example, strip_thinking: bool) -> Example:
    solution, said = (
        text and answer_text(text, strip_thinking=strip_thinking) for text in (example.solution, example.demonstration)
    )
    return replace(example, solution=solution, demonstration=said)


def keep_correct(collected: Collected, grader: str, place: str) -> list[Example]:
    """The examples whose demonstration is right; the others are counted in ``collected`` by what the grader said.

    Raises:
        UsageError: no demonstration with a gold answer, so that nothing could be graded.
        DataError: none of them is right.
    """
    graded = [e for e in collected.examples if e.demonstration is not None and e.answer is not None]
    if not graded:
        raise UsageError(
            f"{place}: task.correct_only compares responses with gold answers, and no row has both; name their keys as "
            "task.response_key and task.answer_key"
        )
    submissions = [
        Submission(e.demonstration or "", split_response(e.demonstration or "")[1], e.answer, e.meta) for e in graded
    ]
    outcomes = [verdict.outcome for verdict in grade(grader, submissions)]
    collected.dropped.update(f"correct_only: {OUTCOMES[outcome]}" for outcome in outcomes if outcome != "right")
    left_over = len(collected.examples) - len(graded)
    if left_over:
        collected.dropped["correct_only: no response with a gold answer, so nothing to grade"] += left_over
    collected.examples = [e for e, outcome in zip(graded, outcomes, strict=True) if outcome == "right"]
    collected.require_examples(place)
    return collected.examples


def _read_meta(row: Row, keys: Sequence[str]) -> dict[str, Any]:
    for key in keys:
        if key not in row.data:
            there = ", ".join(row.data)
            raise row.fail(f"the key {key!r} of task.meta_keys is missing.{suggest(key, row.data)} There are: {there}")
    return {key: row.plain(key) for key in keys}
