"""Your own rows: any file of prompts with answers, solutions, responses or whole conversations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from posttrain.errors import UsageError
from posttrain.graders.answers import parse_quantity
from posttrain.graders.grading import Outcome, Submission, grade
from posttrain.registry import find, register, suggest
from posttrain.render.rows import split_turns
from posttrain.render.words import split_response
from posttrain.tasks.base import Task
from posttrain.tasks.messages import REASONING_KEYS, add_system, read_variables
from posttrain.tasks.preferences.rows import read_instruction
from posttrain.tasks.reader import Collected, Share, Split, answer_text, choose_split, collect, opening_hash, reads_rows
from posttrain.tasks.reading import Row, read_file
from posttrain.types import Example, Message, Turn

# Where else the common layouts have the same: ShareGPT, Alpaca, prompts with completions.
ALIASES = {"messages": ("conversations",), "prompt": ("instruction",), "response": ("completion", "output")}


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
    ignore_keys: list[str] | None = None,
    grader: str | None = None,
    validation_share: Share = 0.05,
    strip_thinking: bool = False,
    correct_only: bool = False,
) -> Task:
    """Rows of a ``.jsonl``, ``.json``, ``.csv`` or ``.parquet`` file, in the layouts of TRL, ShareGPT and Alpaca.

    A row has a prompt or messages, and an answer (text or a number) with maybe a solution, or a response. A response
    is a whole text to imitate, and so is the assistant's message at the end of messages; such a row needs no answer.
    ``system`` and ``tools`` of a row go into its prompt, ``chat_template_kwargs`` to the chat template. Messages may
    use tools (``tool_calls``, then the role ``tool`` for each result) and have ``reasoning_content``; one with
    ``weight: 0`` or ``train: false`` is not trained. How the response is written is the template's affair: ``r1_zero``
    puts reasoning and answer between the tags, ``plain``, ``chat`` and ``as_is`` take it as it stands. Every other
    key is carried along in ``meta``; one that would change what is trained is refused.

    Args:
        split: ``validation`` is a part of the rows chosen by a hash of the prompt up to the user's first message, so
            that a conversation and one that goes on from it stand on the same side; ``test`` is the whole file.
        prompt_key: of a text or messages; else ``instruction`` with ``input``. A row with messages uses these.
        messages_key: of the conversation; else ``conversations``.
        answer_key: where the gold answer stands (maybe after a solution and ``####``); ``""`` if the data have none.
        solution_key: where the worked solution, without the answer, stands; rows may lack it.
        response_key: where the whole response stands, else ``completion`` or ``output``; rows may lack it.
        grader: what says whether an answer is right (``posttrain explain grader``). By default ``math`` where a gold
            answer is a formula, else ``numeric``, which compares words as text; a run says which, and why.
        correct_only: keep only the demonstrations that the grader finds right by the row's gold answer; how many went,
            and why, is counted.

    Raises:
        UnknownWord: no such grader.
        UsageError: ``correct_only``, and no row has a response with a gold answer.
    """
    if grader is not None:
        find("grader", grader, "task.grader")
    keys = Keys(prompt_key, messages_key, answer_key, solution_key, response_key)
    read = partial(read_example, keys=keys, strip_thinking=strip_thinking)
    collected = collect(read_file(path), read, path, name=f"jsonl/{split}", carries=True, ignored=ignore_keys or ())
    chosen_grader, notices = (grader, ()) if grader is not None else choose_grader(collected.examples)
    collected.examples = [replace(example, grader=chosen_grader) for example in collected.examples]
    examples = keep_correct(collected, chosen_grader, path) if correct_only else collected.examples
    chosen = choose_split(examples, split, validation_share, path, opening_hash)
    return Task("jsonl", split, chosen, dict(collected.dropped), keys=dict(collected.keys), notices=notices)


@dataclass(frozen=True)
class Keys:
    """Keys of the parts of a row: the names of the options, and their other names in the common layouts."""

    prompt: str = "prompt"
    messages: str = "messages"
    answer: str = "answer"
    solution: str = "solution"
    response: str = "response"

    def of(self, row: Row, part: str) -> str:
        """The key of a part in a row; another name counts only where the option is left at its default."""
        named: str = getattr(self, part)
        others = ALIASES.get(part, ()) if named == part and not row.has(named) else ()
        if part == "response":  # ``output`` is what is wanted only where Alpaca's instruction stands
            others = () if row.has(self.of(row, "messages")) else others if row.has("instruction") else others[:1]
        return next((key for key in others if row.has(key)), named)


# A formula: a command of LaTeX, a power, a symbol, an equation, a tuple, set or interval, a sum with a letter.
_FORMULA = re.compile(
    r"\\[A-Za-z]|[\^√π∞≤≥±∪∩]|\bsqrt\b|\b[a-z]\s*=|\A\s*[\[({][-+\w./ ]+(?:,[-+\w./ ]+)+[\])}]\s*\Z"
    r"|\b\d*[a-z]\s*[-+*/]\s*\d|\d\s*[-+*/]\s*\d*[a-z]\b"
)


def choose_grader(examples: Sequence[Example]) -> tuple[str, tuple[str, ...]]:
    """The grader that gold answers need, and a line that says so (none where there are no gold answers)."""
    golds = [(example.id, example.answer) for example in examples if example.answer is not None]
    if not golds:
        return "numeric", ()
    formulas = [(name, gold) for name, gold in golds if _FORMULA.search(gold) and parse_quantity(gold) is None]
    if not formulas:
        return "numeric", (f"task.grader: numeric, because all {len(golds):,} gold answers are numbers or words",)
    name, first = formulas[0]
    how_many = f"{len(formulas):,} of {len(golds):,} gold answers are formulas"
    return "math", (f"task.grader: math, because {how_many}, such as {first[:60]!r} ({name})",)


def read_example(row: Row, keys: Keys, *, strip_thinking: bool = False) -> Example:
    """One row as an example.

    Raises:
        DataError: a key is missing, of the wrong type or empty.
    """
    messages = add_system(row, _asked(row, keys))
    of_response = keys.of(row, "response")
    parts: dict[str, str] = {}
    if of_response in ALIASES["response"] and (row.has("label") or row.has("labels")):
        raise row.fail(
            f"{of_response!r} has a label, so it is a judged answer and none to imitate; use task preferences"
        )
    solution = row.text(keys.solution) if row.has(keys.solution) else None
    if solution is not None:
        parts[repr(keys.solution)] = solution
    if row.has(of_response) and not row.is_text(of_response):  # a completion in messages
        messages = (*messages, *row.messages(of_response))
    elif row.has(of_response):
        thoughts = [key for key in REASONING_KEYS if row.has(key) and str(row.data[key]).strip()]
        reasoning = next((row.text(key) for key in thoughts), None)
        parts[repr(of_response)] = Message("assistant", row.text(of_response), reasoning).text
    conversation: tuple[Message, ...] = ()
    turns: tuple[Turn, ...] = ()
    if messages[-1].role == "assistant":
        if len(messages) == 1:
            raise row.fail(f"{keys.messages!r} holds nothing but the assistant's message; a prompt must come before it")
        parts[f"an assistant's message at the end of {keys.of(row, 'messages')!r}"] = messages[-1].text
        conversation, (messages, turns) = messages, split_turns(messages[:-1])
    if len(parts) > 1:
        raise row.fail(f"both {' and '.join(parts)}: give one")
    demonstration = next((text for text in parts.values() if text is not solution), None)
    unread = next((key for key in REASONING_KEYS if row.has(key) and key not in row.used), None)
    if demonstration is not None and unread is not None:
        raise row.fail(f"the key {unread!r} of the row belongs to a response in text; put it into the last message")
    answer = _gold(row, keys.answer, needed=demonstration is None)
    working, _, result = (answer or "").rpartition("\n####")  # a solution with its result, as in GSM8K
    if working.strip() and result.strip():
        answer, solution = result.strip(), solution if parts else working.strip()
    example = Example(
        "",
        messages,
        answer=answer,
        solution=solution,
        demonstration=demonstration,
        turns=turns,
        conversation=conversation,
        variables=read_variables(row),
        meta=row.meta(),
    )
    return _without_thinking(example) if strip_thinking else example


def _asked(row: Row, keys: Keys) -> tuple[Message, ...]:
    """The messages of a row, or its prompt as messages."""
    of_messages, of_prompt = keys.of(row, "messages"), keys.of(row, "prompt")
    if row.has(of_messages):
        return row.messages(of_messages)
    if of_prompt == "instruction":
        return read_instruction(row)
    _require(row, of_prompt, f"task.prompt_key (a conversation: task.messages_key, now {keys.messages!r})")
    value = row.data[of_prompt]
    is_messages = isinstance(value, list) and bool(value) and all(isinstance(one, Mapping) for one in value)
    is_messages = is_messages or (isinstance(value, str) and not row.is_text(of_prompt))
    return row.messages(of_prompt) if is_messages else (Message("user", row.text(of_prompt)),)


def _gold(row: Row, key: str, *, needed: bool) -> str | None:
    if not key or not (needed or row.has(key)):
        return None
    otherwise = 'task.answer_key, or set it to "" if the data have no answers; a whole response is task.response_key'
    _require(row, key, otherwise)
    return row.answer(key)


def _require(row: Row, key: str, option: str) -> None:
    """Refuse a row without ``key``, which ``option`` can name."""
    if key not in row.data:
        there = ", ".join(row.data) or "no keys"
        guess = suggest(key, row.data)
        raise row.fail(f"the key {key!r} is missing.{guess} There are: {there}. Name the right one as {option}")


def _without_thinking(example: Example) -> Example:
    solution, response = (
        text and answer_text(text, strip_thinking=True) for text in (example.solution, example.demonstration)
    )
    conversation = tuple(
        replace(one, content=one.content and answer_text(one.content, strip_thinking=True), reasoning=None)
        if one.role == "assistant"
        else one
        for one in example.conversation
    )
    return replace(example, solution=solution, demonstration=response, conversation=conversation)


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
