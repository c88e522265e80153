"""Your own rows: any file of prompts with answers, solutions, responses or whole conversations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from posttrain.errors import UsageError
from posttrain.graders.grading import Outcome, Submission, grade
from posttrain.registry import find, register, suggest
from posttrain.render.words import split_response
from posttrain.tasks.base import Task
from posttrain.tasks.reader import Collected, Split, answer_text, choose_split, collect, opening_hash, reads_rows
from posttrain.tasks.reading import Row, read_file
from posttrain.types import Call, Example, Message, Turn

# Conversations in which tools are used, as OpenAI's API and most data sets write them.


def uses_tools(row: Row, key: str) -> bool:
    """Whether a message under ``key`` is a tool's, or calls one."""
    items = row.data.get(key)
    return isinstance(items, Sequence) and any(isinstance(item, Mapping) and _is_about_tools(item) for item in items)


def read_transcript(row: Row, key: str) -> tuple[tuple[Message, ...], tuple[Turn, ...]]:
    """The messages without those about tools, and the turns in which these were used; the last message answers.

    An assistant's message with ``tool_calls`` (``{"function": {"name": ..., "arguments": ...}}``, the arguments as an
    object or as its text) is followed by one message of the role ``tool`` for each, in their order.

    Raises:
        DataError: calls without results or results without calls, tools before the last message of the user, or no
            answer after them.
    """
    items: Sequence[Any] = row.data[key]
    about = [i for i, item in enumerate(items) if isinstance(item, Mapping) and _is_about_tools(item)]
    first, last = about[0], about[-1]
    turns, at = [], first
    while at <= last:
        calls = _calls(row, key, at, items[at])
        results = [_result(row, key, at + 1 + n, items) for n in range(len(calls))]
        content = items[at].get("content")
        text = "" if content in (None, "") else row.checked(content, f"{key} {at + 1} content")
        told = (replace(call, result=result) for call, result in zip(calls, results, strict=True))
        turns.append(Turn(text, tuple(told)))
        at += 1 + len(calls)
    rest = row.data[key][last + 1 :]
    if len(rest) != 1 or not isinstance(rest[0], Mapping) or rest[0].get("role") != "assistant":
        raise row.fail(
            f"{key!r}: after its tools the assistant answers, in one last message; leave out what follows, or write a "
            "row for each answer"
        )
    messages = replace(row, data={**row.data, key: [*items[:first], rest[0]]}).messages(key)
    if len(messages) < 2 or messages[-2].role != "user":
        raise row.fail(f"{key!r}, message {first + 1}: tools are used in answer to a message of the user")
    return messages, tuple(turns)


def _is_about_tools(item: Mapping[str, Any]) -> bool:
    return item.get("role") == "tool" or bool(item.get("tool_calls"))


def _calls(row: Row, key: str, at: int, item: Any) -> list[Call]:
    if isinstance(item, Mapping) and item.get("tool_calls") and not isinstance(item["tool_calls"], list):
        raise row.fail(f"{key!r}, message {at + 1}: 'tool_calls' is a list of calls")
    if not isinstance(item, Mapping) or item.get("role") != "assistant" or not item.get("tool_calls"):
        what = "a result of a tool that was not called" if _role(item) == "tool" else "a message amid the use of tools"
        raise row.fail(
            f"{key!r}, message {at + 1}: {what}; an assistant's message with 'tool_calls' comes before results"
        )
    return [_call(row, f"{key} {at + 1} tool_calls {n}", one) for n, one in enumerate(item["tool_calls"], start=1)]


def _call(row: Row, place: str, stated: Any) -> Call:
    function = stated.get("function", stated) if isinstance(stated, Mapping) else {}
    arguments = function.get("arguments", {}) if isinstance(function, Mapping) else None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise row.fail(f'{place!r}: a call is {{"function": {{"name": "...", "arguments": {{...}}}}}}')
    name = row.checked(function.get("name"), f"{place} name")
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise row.fail(f"{place!r}: its arguments hold a number that JSON has not (NaN, Infinity)") from None
    return Call(name, row.checked(written, f"{place} arguments"), "", "ok")


def _result(row: Row, key: str, at: int, items: Sequence[Any]) -> str:
    if at >= len(items) or _role(items[at]) != "tool":
        raise row.fail(
            f"{key!r}, message {at + 1}: a call has no result; a message of the role tool follows for each call"
        )
    content = items[at].get("content")
    return "" if content in (None, "") else row.checked(content, f"{key} {at + 1} content")


def _role(item: Any) -> Any:
    return item.get("role") if isinstance(item, Mapping) else None


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
        UnknownWord: no such grader.
        UsageError: ``correct_only``, and no row has a response with a gold answer.
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
        _require(row, prompt_key, f"task.prompt_key (a conversation: task.messages_key, now {messages_key!r})")
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
        otherwise = (
            'task.answer_key, or set it to "" if the data have no answers; a whole response is task.response_key'
        )
        _require(row, answer_key, otherwise)
        answer = row.answer(answer_key)
    example_id = f"jsonl/{split}/{row.line}"
    return Example(example_id, messages, answer=answer, solution=solution, demonstration=demonstration, turns=turns)


def _require(row: Row, key: str, option: str) -> None:
    """Refuse a row without ``key``, which ``option`` can name."""
    if key not in row.data:
        there = ", ".join(row.data) or "no keys"
        guess = suggest(key, row.data)
        raise row.fail(f"the key {key!r} is missing.{guess} There are: {there}. Name the right one as {option}")


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
