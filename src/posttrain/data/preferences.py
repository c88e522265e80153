"""Given answers with their worth, from any file: pairs, judged answers, solutions with labelled steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
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
from posttrain.option_types import shorten, shown_with_type
from posttrain.registry import register, suggest
from posttrain.types import Example, Message, Response

# The keys by which a line of ``items.jsonl`` (``evaluation/items.py``) differs from a row of any other file.
ITEM_KEYS = ("id", "index", "question", "samples")
RESPONSE_IDS = "response_ids"  # of an answer whose text encodes to other tokens than were sampled
# An answer is right or not by the grader's word; with any other word nobody knows.
OUTCOMES = {"right": True, "wrong": False, "no_answer": False}
UNJUDGED = {"ungraded": "nothing to grade against", "timeout": "the grader took too long", "crash": "the grader died"}


Judged = tuple[str, bool, list[int]]  # an answer, whether it is right, and its ids


def _rows_of_items(
    rows: Iterable[Row], dropped: Counter[str], split_up: Callable[[Row, list[Judged]], Iterable[Mapping[str, Any]]]
) -> Iterator[Row]:
    """The rows that are made of each item; rows that are no items as they are.

    Raises:
        DataError: an item of another form than ``evaluate`` writes.
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
    """One row per judged answer of an item, under these keys with the item's meta."""

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
    """Rows with ``prompt``, ``chosen`` and ``rejected``: of each item the n-th right answer with the n-th wrong one.

    So no answer is in two pairs; those that find no partner are dropped and counted.
    """

    def split_up(row: Row, answers: list[Judged]) -> list[Mapping[str, object]]:
        correct = list[str]()
        wrong = list[str]()
        for text, is_correct, _ in answers:
            if is_only_space(text):
                dropped["a blank answer"] += 1
            elif is_correct:
                correct.append(text)
            else:
                wrong.append(text)
        surplus = len(correct) - len(wrong)
        if surplus > 0:
            dropped["a right answer without a wrong one to the same question"] += surplus
        elif surplus < 0:
            dropped["a wrong answer without a right one to the same question"] -= surplus
        question = row.data["question"]
        pairs = zip(correct, wrong, strict=False)
        return [{"prompt": question, "chosen": good, "rejected": bad} for good, bad in pairs]

    return _rows_of_items(rows, dropped, split_up)


def _judged(row: Row, dropped: Counter[str]) -> list[Judged]:
    """The answers of an item that were found right or not, with their ids if it has them; others are counted."""
    samples = row.data["samples"]
    row.refuse_if(
        not isinstance(samples, list), "'samples' must be the list of answers that `posttrain evaluate` writes"
    )
    if not samples:
        dropped["no answer was sampled (a prompt that did not fit)"] += 1
    judged = []
    for number, sample in enumerate(samples, start=1):
        if not isinstance(sample, Mapping) or not isinstance(sample.get("text"), str):
            raise row.fail(f"samples {number} has no 'text'; only evaluations of answers to questions can be read")
        outcome = str(sample.get("outcome"))
        if outcome in UNJUDGED:
            dropped[f"an answer that was not judged: {UNJUDGED[outcome]}"] += 1
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
VERDICTS = {"true": 1, "false": 0, "1": 1, "0": 0, "1.0": 1, "0.0": 0}  # as a table of texts has them
RATING_KEYS = ("rating", "score")  # of a judged answer; ``data.label_above`` makes a label of it
PROMPT_KEYS = ("prompt", "conversations", "instruction", *QUESTION_KEYS)  # the first of these that a row has
PreferenceLayout = Literal["pair", "judged", "steps"]
# The keys of each layout next to the prompt; the messages of a judged conversation hold the prompt as well.
LAYOUTS: dict[PreferenceLayout, tuple[tuple[str, str], ...]] = {
    "pair": (("chosen", "rejected"),),
    "judged": (("completion", "label"), ("messages", "label")),
    "steps": (("completions", "labels"),),
}
OPENAI_KEYS = ("input", "preferred_output", "non_preferred_output")
PromptAndResponses = tuple[tuple[Message, ...], tuple[Response, ...]]
ReadParts = Callable[[Row], PromptAndResponses]  # of a row, in the layout of its file
NumClasses = Literal[2, 3]
# From a rating of a step in the data to a class, by the number of classes.
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
    """Rows of a file (``.jsonl``, ``.json``, ``.csv``, ``.parquet``) in one of three layouts, by the first row's keys.

    The prompt is ``prompt``, ``question``, ``problem`` or ``query`` (text or messages), ``conversations`` (ShareGPT) or
    ``instruction`` with ``input`` (Alpaca).

    Pairs: a prompt, ``chosen`` and ``rejected``, each text, a message or messages; conversations that share their first
    turns need no prompt. OpenAI's ``input``, ``preferred_output`` and ``non_preferred_output`` are such a pair. Scores
    may come with them (``score_chosen`` and ``score_rejected``, or ``chosen_score``, ``chosen_rating``,
    ``rating_chosen``), in every row or in none; their difference, or a ``margin``, is the pair's margin. Without scores
    these are 1 and 0.

    Judged answers (KTO): a prompt and ``completion``, or ``messages`` whose last is the answer; and ``label`` (true or
    1: desirable; false or 0: not), or a ``rating`` (or ``score``), of which ``data.label_above`` makes a label.

    Steps: a prompt, ``completions`` (a list of steps) and ``labels`` (one for each): with two classes true and 1 are
    good, false and 0 bad; with three −1 is negative, 0 neutral and 1 positive (true and false are the outer two).

    ``system`` and ``tools`` of a row go into its prompt, ``chat_template_kwargs`` to the chat template. A row with a
    part that is missing or blank, or that could teach nothing, is dropped and counted. All other keys are carried along
    in ``meta``; a line names the texts that the prompt does not show. In an evaluation's ``items.jsonl`` the n-th right
    and the n-th wrong answer to a question are a pair.

    Args:
        split: parts chosen by a hash of the prompt up to the user's first message; ``all`` is the whole file.
        validation_share, test_share: shares of these beginnings that are held out.
        num_classes: of steps; the same as that of the objective ``process``.
        step_separator: stands between two steps.
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
    task = collected.as_task("preferences", path, split, validation_share, by_opening=True, test_share=test_share)
    return replace(task, warnings=(*task.warnings, *collected.unshown.describe(PROMPT)))


@dataclass(slots=True)
class _FileReader:
    """Reads the rows of a file as examples; the first row decides about the layout, and about margins, of all."""

    classes: Mapping[int, int]
    separator: str
    form: PromptFormat | None
    read_parts: ReadParts | None = None
    has_margin: bool = False

    def read(self, row: Row) -> Example:
        if OPENAI_KEYS[1] in row.data:
            row = _from_openai(row)
        if self.read_parts is None:
            self.read_parts = _reader_of(row, self.classes, self.separator)
            self.has_margin = row.has("margin")
        messages, responses = self.read_parts(row)
        if self.form is not None:
            messages = self.form.rewrite(row, messages, PROMPT_KEYS)
        margin = None
        if self.has_margin and len(responses) == 2:
            margin = read_score(row, "margin")
            drop_if(margin < 0, "'margin' is below 0, so the rejected answer is the better one")
        return Example("", messages, responses=responses, meta=row.meta(), variables=read_variables(row), margin=margin)


@register("task", held_out="validation")
@row_task("HuggingFaceH4/ultrafeedback_binarized", train="train_prefs", test="test_prefs", share=0.02)
def ultrafeedback(row: Row) -> Example:
    """Pairs of UltraFeedback in the binarized layout: two answers to an instruction, compared by GPT-4.

    Keys: ``prompt``; ``chosen`` and ``rejected`` (text, or the whole conversation); ``score_chosen`` and
    ``score_rejected``, from 1 to 10, of which the difference is the margin. Dropped and counted: equal scores (about
    one pair in ten), equal answers, and whatever is blank or missing.

    Source: Cui et al. 2023 (arXiv 2310.01377).
    """
    for key in SCORE_KEYS[0]:
        require(row, key)
    messages, responses = _read_pair(row, SCORE_KEYS[0])
    return Example("", messages, responses=responses)


def _reader_of(first: Row, classes: Mapping[int, int], separator: str) -> ReadParts:
    """The reader of all rows of a file that begins with ``first``."""
    layout = _detect_layout(first)
    rating_key = _label_key(first)
    scores = next((keys for keys in SCORE_KEYS if all(first.has(key) for key in keys)), None)
    known = {key for keys in LAYOUTS[layout] for key in keys}
    if layout == "judged":
        known.update(RATING_KEYS)

    def read(row: Row) -> PromptAndResponses:
        drop_if(known.isdisjoint(row.data), "a row of another layout than the first")
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
            # the messages of a judged conversation hold the prompt as well
            shown_layouts.append(keys if "messages" in keys else ("prompt", *keys))
    wanted = "; ".join(", ".join(keys) for keys in (*shown_layouts, OPENAI_KEYS))
    hints = (suggest(key, known) for key in row.data if key not in known)
    near = next(filter(None, hints), "")
    what = "of no known layout"
    if found:
        what = f"of more than one layout ({', '.join(found)})"
    raise row.fail(f"the row is {what}. It has the keys {', '.join(row.data) or 'none'}.{near} Known layouts: {wanted}")


def _has_layout(row: Row, layout: PreferenceLayout) -> bool:
    """Return whether a row has all keys of one of the ways to write a layout."""
    return any(all(key in row.data for key in keys) for keys in LAYOUTS[layout])


def _from_openai(row: Row) -> Row:
    """The row of OpenAI's layout of preferences under the keys of a pair."""
    for key in OPENAI_KEYS:
        require(row, key)
    given = row.nested("input")
    inside: dict[str, object] = {}
    if isinstance(given, Mapping):
        inside = {key: value for key, value in given.items() if key not in row.ignored}
    known = {"messages", "tools", "parallel_tool_calls"}  # the last says nothing about these answers
    row.refuse_if(
        "messages" not in inside or not inside.keys() <= known,
        f"'input' must be an object with 'messages' and maybe 'tools'; got {shown_with_type(given)}",
    )
    pair = {
        "prompt": inside.get("messages"),
        "tools": inside.get("tools"),
        "chosen": row.data["preferred_output"],
        "rejected": row.data["non_preferred_output"],
    }
    for key in pair:
        row.refuse_if(row.has(key), f"{key!r} stands next to {', '.join(OPENAI_KEYS)}, which say the same; give one")
    others = {key: value for key, value in row.data.items() if key not in OPENAI_KEYS}
    return replace(row, data={**others, **pair})


def _read_pair(row: Row, scores: tuple[str, str] | None) -> PromptAndResponses:
    """The prompt, and the chosen and the rejected answer with their scores, whose keys are ``scores``."""
    prompt, (chosen, rejected) = _read_answers(row, ("chosen", "rejected"))
    if scores is None:
        unread = next((key for keys in SCORE_KEYS for key in keys if row.has(key)), None)
        row.refuse_if(
            unread is not None,
            f"{unread!r} is not read: the first row has no two scores, and scores are for all rows. Take it out of the "
            "row, or name it in task.ignore_keys",
        )
    drop_if(chosen == rejected, "'chosen' and 'rejected' are the same")
    better = 1.0
    worse = 0.0
    if scores is not None:
        better = read_score(row, scores[0])
        worse = read_score(row, scores[1])
    drop_if(better == worse, "chosen and rejected have the same score")
    drop_if(better < worse, "chosen has a lower score than rejected")
    return prompt, (Response(chosen, better), Response(rejected, worse))


def _read_prompt(row: Row) -> tuple[Message, ...]:
    """``prompt`` (a text is the user's), ShareGPT's ``conversations``, or Alpaca's ``instruction``, as messages."""
    key = next((key for key in PROMPT_KEYS if row.has(key)), "prompt")
    require(row, key)
    if key == "instruction":
        messages = read_instruction(row)
    else:
        messages = read_prompt(row, key)
    return add_system(row, messages)


def _read_answers(row: Row, keys: Sequence[str]) -> tuple[tuple[Message, ...], list[str]]:
    """The prompt and the answers under the keys: texts, or conversations with the same turns before the answer."""
    for key in keys:
        require(row, key)
    names = " and ".join(map(repr, keys))
    are_texts = {row.is_text(key) for key in keys}
    has_prompt = any(row.has(key) for key in PROMPT_KEYS)
    is_dialogue = are_texts == {True} and row.text(keys[0]).lstrip().startswith("Human:")
    row.refuse_if(
        is_dialogue and len(keys) == 2 and not has_prompt,
        f"{names} hold whole dialogues (Human: ... Assistant: ...); use task hh_rlhf, which takes them apart",
    )
    row.refuse_if(len(are_texts) > 1, f"{names} must both be text, or both lists of messages")
    if are_texts == {True}:
        return _read_prompt(row), [row.text(key) for key in keys]
    conversations = {key: read_messages(row, key) for key in keys}
    for messages in conversations.values():
        refuse_two_replies(row, messages)
    turns = conversations[keys[0]][:-1]
    for messages in conversations.values():
        drop_if(messages[:-1] != turns, f"{names} part before their last message")
    for messages in conversations.values():
        row.refuse_if(messages[-1].role != "assistant", f"{names} must end with the assistant's message")
    if has_prompt or not turns:
        prompt = _prompt_before(row, turns)
    else:
        prompt = add_system(row, turns)
    return prompt, [_answer_of(row, key, messages[-1]) for key, messages in conversations.items()]


def _prompt_before(row: Row, turns: tuple[Message, ...]) -> tuple[Message, ...]:
    """The prompt of conversations with these turns before the answer: the turns, or the row's prompt if it is longer.

    Raises:
        Dropped: the row's prompt neither ends with the turns nor is a part of them.
    """
    prompt = _read_prompt(row)
    if prompt[len(prompt) - len(turns) :] == turns:
        return prompt
    question = prompt
    if row.has("system") and turns[:1] != prompt[:1]:
        question = prompt[1:]
    starts = range(len(turns))
    is_in_turns = any(turns[start : start + len(question)] == question for start in starts)
    drop_if(not is_in_turns, "'prompt' is not what the conversations begin with")
    return add_system(row, turns)


def _label_key(row: Row) -> str:
    """The key under which a row of judged answers has its label or, without one, its rating."""
    return next((key for key in ("label", *RATING_KEYS) if row.has(key)), "label")


def _read_judged(row: Row, key: str) -> PromptAndResponses:
    """A prompt with one answer (``completion``, or the last of the ``messages``), and its label at ``key``."""
    if row.has("completion") or not row.has("messages"):
        messages, (text,) = _read_answers(row, ["completion"])
    else:
        require(row, "messages")
        conversation = read_messages(row, "messages")
        drop_if(
            conversation[-1].role != "assistant",
            "'messages' does not end with the assistant's message, which 'label' would be about",
        )
        drop_if(len(conversation) == 1, "'messages' holds nothing but the assistant's message")
        messages = add_system(row, conversation[:-1])
        text = _answer_of(row, "messages", conversation[-1])
    row.refuse_if(
        not row.has(key) and row.has(_label_key(row)),
        f"{_label_key(row)!r} stands where the first row has {key!r}; give every row the same",
    )
    if key == "label":
        score = read_verdict(row, key)
    else:
        score = read_score(row, key)
    return messages, (Response(text, score),)


def _answer_of(row: Row, key: str, message: Message) -> str:
    if message.calls or not message.is_trained:
        what = "calls tools" if message.calls else "has weight 0"
        raise row.fail(f"{key!r}: the answer {what}, and given answers are texts that are trained; leave the row out")
    return message.text


def _read_steps(row: Row, classes: Mapping[int, int], separator: str) -> PromptAndResponses:
    """A prompt with one solution in steps, each with its class."""
    messages = _read_prompt(row)
    steps = _read_list(row, "completions")
    labels = _read_list(row, "labels")
    row.refuse_if(
        len(steps) != len(labels), f"{len(steps)} 'completions' and {len(labels)} 'labels'; each step has one label"
    )
    texts = list[str]()
    step_labels = list[int]()
    for number, (step, label) in enumerate(zip(steps, labels, strict=True), start=1):
        drop_if(step is None or is_only_space(step), "a blank step")
        drop_if(label is None, "a step without a label")
        texts.append(row.checked(step, f"completions {number}"))
        step_labels.append(_class_of(row, label, number, classes))
    return messages, (stepwise(texts, step_labels, separator),)


def _read_list(row: Row, key: str) -> Sequence[object]:
    """The list under a key; a row in which it is missing or empty is dropped."""
    drop_if(not row.has(key), f"{key!r} is missing")
    value = row.nested(key)
    drop_if(value == [], f"{key!r} is empty")
    if not isinstance(value, list | tuple):
        raise row.fail(f"{key!r} must be a list; got {shown_with_type(value)}")
    return value


def _class_of(row: Row, label: object, number: int, classes: Mapping[int, int]) -> int:
    """The class of a step by its label: true, false or a rating."""
    if isinstance(label, bool):
        if label:
            return classes[1]
        return min(classes.values())
    if isinstance(label, int | float) and label in classes:
        return classes[int(label)]
    hint = ""
    if label == -1:
        hint = ". For −1, 0 and 1 set task.num_classes to 3 (and objective.num_classes)"
    raise row.fail(f"'labels' {number} must be true, false or one of {sorted(classes)}; got {label!r}{hint}")


def read_verdict(row: Row, key: str) -> float:
    """1 or 0 from true, false, 1 or 0.

    Raises:
        Dropped: missing.
        DataError: anything else.
    """
    drop_if(not row.has(key), f"{key!r} is missing")
    value = row.data[key]
    if isinstance(value, str):
        value = VERDICTS.get(value.strip().lower(), value)
    if not isinstance(value, int | float) or value not in (0, 1):  # True and False are 1 and 0
        hint = ""
        if key == "label":
            hint = ". A rating stands under 'rating', and data.label_above makes it a label"
        raise row.fail(f"{key!r} must be true, false, 1 or 0; got {value!r}{hint}")
    return float(value)


def read_score(row: Row, key: str) -> float:
    """A score of a file in which every row should have one.

    Raises:
        Dropped: missing.
        DataError: no finite number.
    """
    drop_if(not row.has(key), f"{key!r} is missing, and every row needs a score")
    value = row.data[key]
    if isinstance(value, str):  # of a table of texts
        with suppress(ValueError):
            value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise row.fail(f"{key!r} must be a finite number; got {value!r}")
    return float(value)


def require(row: Row, key: str) -> None:
    """Drop a row whose ``key`` is missing, null, blank or an empty list, or holds a blank message."""
    value = row.data.get(key)
    drop_if(value is None, f"{key!r} is missing")
    drop_if(value == [] or is_only_space(value), f"{key!r} is blank")
    items = [value]
    if isinstance(value, list):
        items = value
    for item in items:
        if isinstance(item, Mapping) and not item.get("tool_calls") and item.get("role") != "tool":
            content = item.get("content", item.get("value"))
            drop_if(is_only_space(content), f"{key!r} has a blank message")


def stepwise(
    steps: Sequence[str], labels: Sequence[int | None], separator: str = "\n", *, score: float | None = None
) -> Response:
    """A solution of these steps, with ``separator`` in front of every step but the first.

    Nothing is learnt at a step whose label is None. Without a ``score`` it is 1 if no label is the lowest class,
    and otherwise 0.
    """
    texts = (*steps[:1], *(separator + step for step in steps[1:]))
    if score is None:
        score = float(0 not in labels)
    return Response("".join(texts), score, texts, tuple(labels))
