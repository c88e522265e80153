"""Scored responses from any file: preference pairs, labeled responses, solutions with step labels."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from posttrain.data.base import Task
from posttrain.data.columns import PROMPT, FormatText, PromptFormat, read_format, refuse_unknown
from posttrain.data.messages import (
    QUESTION_KEYS,
    add_system,
    read_instruction,
    read_messages,
    read_prompt,
    read_variables,
    refuse_two_replies,
)
from posttrain.data.reader import FileSplit, Share, collect_examples, drop_if, reads_rows, row_task
from posttrain.data.reading import Row, is_only_space, read_file
from posttrain.data.repeats import RepeatedPrompts, question_text
from posttrain.option_types import shorten, shown_with_type
from posttrain.registry import register, suggest
from posttrain.types import Example, Message, Response

# Keys that identify lines of ``items.jsonl`` (``evaluation/items.py``).
ITEM_KEYS = ("id", "index", "question", "samples")
RESPONSE_IDS = "response_ids"  # set if re-encoding the text would not reproduce the sampled tokens
# Grading outcomes with a clear verdict. All others are unknown.
OUTCOMES = {"right": True, "wrong": False, "no_answer": False}
UNJUDGED = {"ungraded": "nothing to grade against", "timeout": "grader timeout", "crash": "grader crash"}


Judged = tuple[str, bool, list[int]]  # response, whether it is correct, token ids


def _rows_of_items(
    rows: Iterable[Row], dropped: Counter[str], split_up: Callable[[Row, list[Judged]], Iterable[Mapping[str, Any]]]
) -> Iterator[Row]:
    """Expand evaluation items into rows, leaving ordinary rows unchanged.

    Raises:
        DataError: the item was not written by ``evaluate``.
    """
    for row in rows:
        if all(key in row.data for key in ITEM_KEYS):
            made = split_up(row, _judged(row, dropped))
            yield from (replace(row, data=data, part=part) for part, data in enumerate(made, start=1))
        else:
            yield row


def judged_rows(
    rows: Iterable[Row], problem_key: str, solution_key: str, verdict_key: str, dropped: Counter[str]
) -> Iterator[Row]:
    """Expand items into one row per graded response, containing the item's meta and the given keys."""

    def split_up(row: Row, answers: list[Judged]) -> Iterator[Mapping[str, object]]:
        shared: dict[str, object] = {}
        meta = row.plain("meta")
        if isinstance(meta, Mapping):
            shared |= meta
        shared[problem_key] = row.data["question"]
        for text, is_correct, ids in answers:
            made = {**shared, solution_key: text, verdict_key: is_correct}
            if ids:
                made[RESPONSE_IDS] = ids
            yield made

    return _rows_of_items(rows, dropped, split_up)


def paired_rows(rows: Iterable[Row], dropped: Counter[str]) -> Iterator[Row]:
    """Expand items into pairs: the n-th correct response with the n-th incorrect one.

    Each response is used at most once; unpaired responses are dropped and counted.
    """

    def split_up(row: Row, answers: list[Judged]) -> list[Mapping[str, object]]:
        correct = list[str]()
        wrong = list[str]()
        for text, is_correct, _ in answers:
            if is_only_space(text):
                dropped["blank answer"] += 1
            elif is_correct:
                correct.append(text)
            else:
                wrong.append(text)
        surplus = len(correct) - len(wrong)
        if surplus > 0:
            dropped["correct answer without an incorrect counterpart"] += surplus
        elif surplus < 0:
            dropped["incorrect answer without a correct counterpart"] -= surplus
        question = row.data["question"]
        pairs = zip(correct, wrong, strict=False)
        return [{"prompt": question, "chosen": good, "rejected": bad} for good, bad in pairs]

    return _rows_of_items(rows, dropped, split_up)


def _judged(row: Row, dropped: Counter[str]) -> list[Judged]:
    """List an item's graded responses with token ids, if any. All others are counted as dropped."""
    samples = row.data["samples"]
    row.refuse_if(not isinstance(samples, list), "'samples' must be a list of answers written by `posttrain evaluate`")
    if not samples:
        dropped["nothing sampled (prompt too long)"] += 1
    judged = []
    for number, sample in enumerate(samples, start=1):
        if not isinstance(sample, Mapping) or not isinstance(sample.get("text"), str):
            raise row.fail(f"samples {number} lacks 'text'; only question answering evaluations are supported")
        outcome = str(sample.get("outcome"))
        if outcome in UNJUDGED:
            dropped[f"ungraded answer: {UNJUDGED[outcome]}"] += 1
        elif outcome in OUTCOMES:
            ids = sample.get(RESPONSE_IDS)
            if not isinstance(ids, list):
                ids = []
            judged.append((sample["text"], OUTCOMES[outcome], ids))
        else:
            known = ", ".join((*OUTCOMES, *UNJUDGED))
            raise row.fail(f"samples {number}: 'outcome' must be one of {known}; got {shorten(outcome)}")
    return judged


SCORE_KEYS = (
    ("score_chosen", "score_rejected"),
    ("chosen_score", "rejected_score"),
    ("rating_chosen", "rating_rejected"),
    ("chosen_rating", "rejected_rating"),
    ("chosen-rating", "rejected-rating"),
    ("chosen_reward", "rejected_reward"),
    ("chosen_avg_rating", "rejected_avg_rating"),
)
VERDICTS = {"true": 1, "false": 0, "1": 1, "0": 0, "1.0": 1, "0.0": 0}  # string values in tables
RATING_KEYS = ("rating", "score")  # of scored responses; ``data.label_above`` converts them to labels
PROMPT_KEYS = ("prompt", "conversations", "instruction", *QUESTION_KEYS)  # in order of precedence
PreferenceLayout = Literal["pair", "judged", "steps"]
# Keys of each layout besides the prompt. Conversations with labels also contain the prompt.
LAYOUTS: dict[PreferenceLayout, tuple[tuple[str, str], ...]] = {
    "pair": (("chosen", "rejected"),),
    "judged": (("completion", "label"), ("messages", "label")),
    "steps": (("completions", "labels"),),
}
ANSWER_KEYS = ("chosen", "rejected", "completion", "completions")
OPENAI_KEYS = ("input", "preferred_output", "non_preferred_output")
PromptAndResponses = tuple[tuple[Message, ...], tuple[Response, ...]]
ReadParts = Callable[[Row], PromptAndResponses]  # reads a row in the file's layout
NumClasses = Literal[2, 3]
# Step ratings -> classes, by number of classes.
CLASSES: dict[int, dict[int, int]] = {2: {0: 0, 1: 1}, 3: {-1: 0, 0: 1, 1: 2}}


@register("task", held_out="validation", splits_file=True)
@reads_rows
def preferences(
    *,
    path: str,
    split: FileSplit = "train",
    validation_share: Share = 0.05,
    test_share: Share = 0.1,
    num_classes: NumClasses = 2,
    step_separator: str = "\n",
    prompt_format: FormatText | None = None,
    meta: list[str] | None = None,
    ignore_keys: list[str] | None = None,
) -> Task:
    """Files (``.jsonl``, ``.json``, ``.csv``, ``.parquet``) in any of three layouts, detected from the first row's
    keys.

    Prompts are ``prompt``, ``question``, ``problem`` or ``query`` (text or messages), ``conversations`` (ShareGPT), or
    ``instruction`` with ``input`` (Alpaca).

    Pairs: a prompt, ``chosen`` and ``rejected``, each text, a message or messages. Conversations with common first
    turns need no prompt. OpenAI's ``input``, ``preferred_output`` and ``non_preferred_output`` are supported too.
    Answers that repeat the prompt are cut after it: message lists always, texts if every row's answers begin with the
    prompt's complete text (whitespace after it stays in the answer). A startup line says so.

    Scores are optional (``score_chosen`` and ``score_rejected``, or ``chosen_score``, ``chosen_rating``,
    ``rating_chosen``), but must be in every row or none, and default to 1 and 0. The margin is ``margin`` if given,
    else the score difference.

    Labeled responses (KTO): a prompt and ``completion``, or ``messages`` ending with the response; plus ``label``
    (true or 1: desirable; false or 0: undesirable), or a ``rating`` (or ``score``), which ``data.label_above``
    converts to labels.

    Steps: a prompt, ``completions`` (list of steps) and ``labels`` (one per step). With two classes, true and 1 are
    good, false and 0 bad. With three, −1 is negative, 0 neutral and 1 positive; true and false are positive and
    negative.

    ``system`` and ``tools`` are added to the prompt, ``chat_template_kwargs`` are passed to the chat template. Rows
    with missing or blank parts, or without a training signal, are dropped and counted. All other keys are kept in
    ``meta``; a startup line lists text columns missing from the prompt. From an evaluation's ``items.jsonl``, each
    question's n-th correct and n-th incorrect response form a pair.

    Args:
        split: parts are selected by hashing the prompt through the first user message; ``all`` is the complete file.
        validation_share, test_share: fractions of distinct hashes to hold out.
        num_classes: number of step classes. Must match the objective ``process``.
        step_separator: text between steps.
    """
    reader = _FileReader(CLASSES[num_classes], step_separator, read_format(prompt_format))
    dropped = Counter[str]()
    rows = paired_rows(read_file(path), dropped)
    name = f"preferences/{split}"
    ignored = ignore_keys or ()
    silenced = meta or ()
    collected = collect_examples(
        rows, reader.read, path, dropped, name=name, carries=True, ignored=ignored, silenced=silenced
    )
    refuse_unknown(silenced, (key for key, _ in collected.keys), path, "task.meta")
    collected.examples = reader.repeats.remove(collected.examples, dropped)
    task = collected.as_task("preferences", path, split, validation_share, by_opening=True, test_share=test_share)
    warnings = (*task.warnings, *reader.repeats.describe(), *collected.unshown.describe(PROMPT))
    return replace(task, warnings=warnings)


@dataclass(slots=True)
class _FileReader:
    """Converts rows to examples. The first row determines the layout, and whether margins are read."""

    classes: Mapping[int, int]
    separator: str
    form: PromptFormat | None
    read_parts: ReadParts | None = None
    has_margin: bool = False
    repeats: RepeatedPrompts = field(default_factory=RepeatedPrompts)

    def read(self, row: Row) -> Example:
        if OPENAI_KEYS[1] in row.data:
            row = _from_openai(row)
        if self.read_parts is None:
            self.read_parts = _reader_of(row, self.classes, self.separator)
            self.has_margin = row.has("margin")
        messages, responses = self.read_parts(row)
        question = question_text(messages)
        if self.form is not None:
            messages = self.form.rewrite(row, messages, PROMPT_KEYS)
        margin = None
        if self.has_margin and len(responses) == 2:
            margin = read_score(row, "margin")
            drop_if(margin < 0, "negative 'margin', so rejected would be better")
        keys = [key for key in ANSWER_KEYS if row.has(key)]
        self.repeats.count(question, keys, in_messages=_repeats_messages(row))
        return Example("", messages, responses=responses, meta=row.meta(), variables=read_variables(row), margin=margin)


@register("task", held_out="validation")
@row_task("HuggingFaceH4/ultrafeedback_binarized", train="train_prefs", test="test_prefs", share=0.02)
def ultrafeedback(row: Row) -> Example:
    """UltraFeedback (binarized): pairs of responses to instructions, compared by GPT-4.

    Keys: ``prompt``; ``chosen`` and ``rejected`` (text, or the complete conversation); ``score_chosen`` and
    ``score_rejected``, from 1 to 10, whose difference is the margin. Dropped and counted: equal scores (about one
    pair in ten), identical responses, blank or missing values.

    Source: Cui et al. 2023 (arXiv 2310.01377).
    """
    for key in SCORE_KEYS[0]:
        require(row, key)
    messages, responses = _read_pair(row, SCORE_KEYS[0])
    return Example("", messages, responses=responses)


def _reader_of(first: Row, classes: Mapping[int, int], separator: str) -> ReadParts:
    """Choose a row reader given the file's first row."""
    layout = _detect_layout(first)
    rating_key = _label_key(first)
    scores = next((keys for keys in SCORE_KEYS if all(first.has(key) for key in keys)), None)
    known = {key for keys in LAYOUTS[layout] for key in keys}
    if layout == "judged":
        known.update(RATING_KEYS)

    def read(row: Row) -> PromptAndResponses:
        drop_if(known.isdisjoint(row.data), "layout differs from the first row")
        if layout == "pair":
            return _read_pair(row, scores)
        if layout == "judged":
            return _read_judged(row, rating_key)
        return _read_steps(row, classes, separator)

    return read


def _detect_layout(row: Row) -> PreferenceLayout:
    found = [layout for layout in LAYOUTS if _has_layout(row, layout)]
    has_answer = "completion" in row.data or "messages" in row.data
    if not found and has_answer and any(key in row.data for key in RATING_KEYS):
        found = ["judged"]
    if len(found) == 1:
        return found[0]
    known = set(PROMPT_KEYS)
    shown_layouts = []
    for ways in LAYOUTS.values():
        for keys in ways:
            known.update(keys)
            # labeled conversations also contain the prompt
            shown_layouts.append(keys if "messages" in keys else ("prompt", *keys))
    wanted = "; ".join(", ".join(keys) for keys in (*shown_layouts, OPENAI_KEYS))
    hints = (suggest(key, known) for key in row.data if key not in known)
    near = next(filter(None, hints), "")
    what = "unknown layout"
    if found:
        what = f"ambiguous layout ({', '.join(found)})"
    raise row.fail(f"{what}. The row's keys are {', '.join(row.data) or 'none'}.{near} Known layouts: {wanted}")


def _has_layout(row: Row, layout: PreferenceLayout) -> bool:
    """Check if a row contains all keys for a layout, in any variant."""
    return any(all(key in row.data for key in keys) for keys in LAYOUTS[layout])


def _from_openai(row: Row) -> Row:
    """Rename OpenAI's preference keys to those of a pair."""
    for key in OPENAI_KEYS:
        require(row, key)
    given = row.nested("input")
    inside: dict[str, object] = {}
    if isinstance(given, Mapping):
        inside = {key: value for key, value in given.items() if key not in row.ignored}
    known = {"messages", "tools", "parallel_tool_calls"}  # the last does not affect given responses
    row.refuse_if(
        "messages" not in inside or not inside.keys() <= known,
        f"'input' must be an object with 'messages' and optionally 'tools'; got {shown_with_type(given)}",
    )
    pair = {
        "prompt": inside.get("messages"),
        "tools": inside.get("tools"),
        "chosen": row.data["preferred_output"],
        "rejected": row.data["non_preferred_output"],
    }
    for key in pair:
        row.refuse_if(row.has(key), f"{key!r} duplicates {', '.join(OPENAI_KEYS)}; keep only one form")
    others = {key: value for key, value in row.data.items() if key not in OPENAI_KEYS}
    return replace(row, data={**others, **pair})


def _read_pair(row: Row, scores: tuple[str, str] | None) -> PromptAndResponses:
    """Read a prompt with chosen and rejected responses. ``scores`` are the score keys, if any."""
    prompt, (chosen, rejected) = _read_answers(row, ("chosen", "rejected"))
    if scores is None:
        unread = next((key for keys in SCORE_KEYS for key in keys if row.has(key)), None)
        row.refuse_if(
            unread is not None,
            f"{unread!r} is not read, because the first row lacks two scores, and scores must be in every row. Remove "
            "it from the row, or add it to task.ignore_keys",
        )
    drop_if(chosen == rejected, "'chosen' and 'rejected' are identical")
    better = 1.0
    worse = 0.0
    if scores is not None:
        better = read_score(row, scores[0])
        worse = read_score(row, scores[1])
    drop_if(better == worse, "chosen and rejected have equal scores")
    drop_if(better < worse, "chosen has a lower score than rejected")
    return prompt, (Response(chosen, better), Response(rejected, worse))


def _read_prompt(row: Row) -> tuple[Message, ...]:
    """Read ``prompt`` (text becomes a user message), ShareGPT's ``conversations``, or Alpaca's ``instruction``."""
    key = next((key for key in PROMPT_KEYS if row.has(key)), "prompt")
    require(row, key)
    if key == "instruction":
        messages = read_instruction(row)
    else:
        messages = read_prompt(row, key)
    return add_system(row, messages)


def _read_answers(row: Row, keys: Sequence[str]) -> tuple[tuple[Message, ...], list[str]]:
    """Read a prompt and responses: text, or conversations sharing all turns before the response."""
    for key in keys:
        require(row, key)
    names = " and ".join(map(repr, keys))
    are_texts = {row.is_text(key) for key in keys}
    has_prompt = any(row.has(key) for key in PROMPT_KEYS)
    is_dialogue = are_texts == {True} and row.text(keys[0]).lstrip().startswith("Human:")
    row.refuse_if(
        is_dialogue and len(keys) == 2 and not has_prompt,
        f"{names} contain complete dialogues (Human: ... Assistant: ...); use task hh_rlhf, which parses them",
    )
    row.refuse_if(len(are_texts) > 1, f"{names} must both be text, or both message lists")
    if are_texts == {True}:
        return _read_prompt(row), [row.text(key) for key in keys]
    conversations = {key: read_messages(row, key) for key in keys}
    for messages in conversations.values():
        refuse_two_replies(row, messages)
    turns = conversations[keys[0]][:-1]
    for messages in conversations.values():
        drop_if(messages[:-1] != turns, f"{names} differ before their last message")
    for messages in conversations.values():
        row.refuse_if(messages[-1].role != "assistant", f"{names} must end with an assistant message")
    if has_prompt or not turns:
        prompt = _prompt_before(row, turns)
    else:
        prompt = add_system(row, turns)
    return prompt, [_answer_of(row, key, messages[-1]) for key, messages in conversations.items()]


def _prompt_before(row: Row, turns: tuple[Message, ...]) -> tuple[Message, ...]:
    """Combine a row's prompt with turns shared by all conversations, returning whichever is longer.

    Raises:
        Dropped: the prompt neither ends with these turns nor occurs in them.
    """
    prompt = _read_prompt(row)
    if prompt[len(prompt) - len(turns) :] == turns:
        return prompt
    question = prompt
    if row.has("system") and turns[:1] != prompt[:1]:
        question = prompt[1:]
    starts = range(len(turns))
    is_in_turns = any(turns[start : start + len(question)] == question for start in starts)
    drop_if(not is_in_turns, "'prompt' differs from the conversations' beginning")
    return add_system(row, turns)


def _repeats_messages(row: Row) -> bool:
    """Check if answers are conversations beside a prompt, which they then repeat (``_prompt_before``)."""
    if not any(row.has(key) for key in PROMPT_KEYS):
        return False
    answers = [row.peek(key) for key in ("chosen", "completion")]
    return any(isinstance(answer, list) and len(answer) > 1 for answer in answers)


def _label_key(row: Row) -> str:
    """Find the label key for labeled responses, or else the rating key."""
    return next((key for key in ("label", *RATING_KEYS) if row.has(key)), "label")


def _read_judged(row: Row, key: str) -> PromptAndResponses:
    """Read a prompt with a single response (``completion``, or the last message) and its label."""
    if row.has("completion") or not row.has("messages"):
        messages, (text,) = _read_answers(row, ["completion"])
    else:
        require(row, "messages")
        conversation = read_messages(row, "messages")
        drop_if(
            conversation[-1].role != "assistant",
            "'messages' must end with the assistant message to label",
        )
        drop_if(len(conversation) == 1, "'messages' contains only an assistant message")
        messages = add_system(row, conversation[:-1])
        text = _answer_of(row, "messages", conversation[-1])
    row.refuse_if(
        not row.has(key) and row.has(_label_key(row)),
        f"got {_label_key(row)!r}, but the first row uses {key!r}; use the same key in every row",
    )
    if key == "label":
        score = read_verdict(row, key)
    else:
        score = read_score(row, key)
    return messages, (Response(text, score),)


def _answer_of(row: Row, key: str, message: Message) -> str:
    if message.calls or not message.is_trained:
        what = "calls tools" if message.calls else "has weight 0"
        raise row.fail(f"{key!r}: the response {what}, but responses must be trainable text. Remove the row")
    return message.text


def _read_steps(row: Row, classes: Mapping[int, int], separator: str) -> PromptAndResponses:
    """Read a prompt with a solution split into labeled steps."""
    messages = _read_prompt(row)
    steps = _read_list(row, "completions")
    labels = _read_list(row, "labels")
    row.refuse_if(
        len(steps) != len(labels),
        f"{len(steps)} 'completions' but {len(labels)} 'labels'; each step requires exactly one label",
    )
    texts = list[str]()
    step_labels = list[int]()
    for number, (step, label) in enumerate(zip(steps, labels, strict=True), start=1):
        drop_if(step is None or is_only_space(step), "blank step")
        drop_if(label is None, "step without label")
        texts.append(row.checked(step, f"completions {number}"))
        step_labels.append(_class_of(row, label, number, classes))
    return messages, (stepwise(texts, step_labels, separator),)


def _read_list(row: Row, key: str) -> Sequence[object]:
    """Read a list. Drops rows in which it is missing or empty."""
    drop_if(not row.has(key), f"{key!r} is missing")
    value = row.nested(key)
    drop_if(value == [], f"{key!r} is empty")
    if not isinstance(value, list | tuple):
        raise row.fail(f"{key!r} must be a list; got {shown_with_type(value)}")
    return value


def _class_of(row: Row, label: object, number: int, classes: Mapping[int, int]) -> int:
    """Convert a step's label (boolean or rating) to its class."""
    if isinstance(label, bool):
        if label:
            return classes[1]
        return min(classes.values())
    if isinstance(label, int | float) and label in classes:
        return classes[int(label)]
    hint = ""
    if label == -1:
        hint = ". To use −1, 0 and 1, set task.num_classes to 3 (and objective.num_classes)"
    raise row.fail(f"'labels' {number} must be true, false or one of {sorted(classes)}; got {label!r}{hint}")


def read_verdict(row: Row, key: str) -> float:
    """Convert true, false, 1 or 0 to float.

    Raises:
        Dropped: missing.
        DataError: any other value.
    """
    drop_if(not row.has(key), f"{key!r} is missing")
    value = row.data[key]
    if isinstance(value, str):
        value = VERDICTS.get(value.strip().lower(), value)
    if not isinstance(value, int | float) or value not in (0, 1):  # True and False are 1 and 0
        hint = ""
        if key == "label":
            hint = ". Store ratings under 'rating', and convert them with data.label_above"
        raise row.fail(f"{key!r} must be true, false, 1 or 0; got {value!r}{hint}")
    return float(value)


def read_score(row: Row, key: str) -> float:
    """Read a score, for files that require scores in every row.

    Raises:
        Dropped: missing.
        DataError: not a finite number.
    """
    drop_if(not row.has(key), f"{key!r} is missing, but every row requires a score")
    value = row.data[key]
    if isinstance(value, str):  # from a table of strings
        with suppress(ValueError):
            value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise row.fail(f"{key!r} must be a finite number; got {value!r}")
    return float(value)


def require(row: Row, key: str) -> None:
    """Drop rows whose ``key`` is missing, null, blank or empty, or contains a blank message."""
    value = row.data.get(key)
    drop_if(value is None, f"{key!r} is missing")
    drop_if(value == [] or is_only_space(value), f"{key!r} is blank")
    items = [value]
    if isinstance(value, list):
        items = value
    for item in items:
        if isinstance(item, Mapping) and not item.get("tool_calls") and item.get("role") != "tool":
            content = item.get("content", item.get("value"))
            drop_if(is_only_space(content), f"{key!r} contains a blank message")


def stepwise(
    steps: Sequence[str], labels: Sequence[int | None], separator: str = "\n", *, score: float | None = None
) -> Response:
    """Build a solution from steps, joined by ``separator``.

    Steps labeled None are not trained. ``score`` defaults to 1 if no label is the lowest class, else 0.
    """
    texts = (*steps[:1], *(separator + step for step in steps[1:]))
    if score is None:
        score = float(0 not in labels)
    return Response("".join(texts), score, texts, tuple(labels))
