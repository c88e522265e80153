"""Given answers with their worth, from any file: pairs, judged answers, solutions with labelled steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from posttrain.errors import UsageError
from posttrain.registry import register, suggest
from posttrain.tasks.base import Task
from posttrain.tasks.messages import read_variables
from posttrain.tasks.own_samples import paired_rows
from posttrain.tasks.preferences.rows import (
    PROMPT_KEYS,
    RATING_KEYS,
    SCORE_KEYS,
    is_blank,
    read_judged,
    read_pair,
    read_prompt,
    read_score,
    require,
    score_keys,
    verdict_key,
)
from posttrain.tasks.reader import Dropped, Share, Split, collect, opening_hash, reads_rows, row_task
from posttrain.tasks.reading import Row, read_file
from posttrain.tasks.steps.labelled_steps import Neutral, NumClasses, step_classes, stepwise
from posttrain.types import Example, Message, Response

Layout = Literal["pair", "judged", "steps"]
# What a row of each layout has beside the prompt; the messages of a judged conversation hold the prompt as well.
LAYOUTS: dict[Layout, tuple[tuple[str, str], ...]] = {
    "pair": (("chosen", "rejected"),),
    "judged": (("completion", "label"), ("messages", "label")),
    "steps": (("completions", "labels"),),
}
ANSWER_KEYS = ("completion", "messages")  # of a judged answer, which may have a rating in place of a label
Parts = tuple[tuple[Message, ...], tuple[Response, ...]]


@register("task", held_out="validation")
@reads_rows
def preferences(
    *,
    path: str,
    split: Split = "train",
    validation_share: Share = 0.05,
    num_classes: NumClasses = 2,
    neutral: Neutral | None = None,
    step_separator: str = "\n",
    strip_thinking: bool = False,
    ignore_keys: list[str] | None = None,
) -> Task:
    """Rows of a file (``.jsonl``, ``.json``, ``.csv``, ``.parquet``) in one of three layouts, by the first row's keys.

    The prompt is ``prompt`` (text or a list of messages), ``conversations`` (ShareGPT: ``from`` and ``value``) or
    ``instruction`` with or without ``input`` (Alpaca).

    Pairs: a prompt, ``chosen`` and ``rejected``, each text, a message or a list of messages. Conversations that share
    their first turns need no prompt: those turns are the prompt. Scores may come with them
    (``score_chosen`` and ``score_rejected``, or ``chosen_score``, ``chosen_rating``, ``rating_chosen``): if the first
    row has them, every row must, and their difference is the pair's margin. Without scores these are 1 and 0. A
    ``margin`` of a row is taken in place of the difference, and every row must then have one.

    Judged answers (KTO): a prompt and ``completion``, or ``messages`` whose last is the answer; and ``label`` (true
    or 1: desirable; false or 0: not), or a ``rating`` (or ``score``), of which ``data.label_above`` makes a label.

    Steps: a prompt, ``completions`` (a list of steps) and ``labels`` (one for each). With two classes true and 1
    are good (class 1), false and 0 are bad (class 0). With three, −1 is negative (class 0), 0 neutral (class 1) and
    1 positive (class 2); true and false are then the outer two.

    ``system`` and ``tools`` of a row go into its prompt, ``chat_template_kwargs`` to the chat template. A row with a
    part that is missing or blank, or that could teach nothing, is dropped and counted by its reason. Its ``meta`` and
    all other keys are carried along: results are broken down by them.

    Of an evaluation's ``items.jsonl`` the n-th right and the n-th wrong answer to a question are a pair; others drop.

    Args:
        split: ``validation`` is a part of the prompts chosen by a hash of all up to the user's first message, and
            ``train`` is the rest, so that conversations that begin alike stand on one side; ``test`` is the whole file.
        validation_share: share of these beginnings that is held out.
        num_classes: of steps; the same as that of the objective ``process``.
        neutral: reads labels −1, 0, 1 as two classes: 1 is good, −1 is bad, and 0 is what is said here.
        step_separator: stands between two steps.

    Raises:
        UsageError: ``neutral`` with three classes, or ``strip_thinking`` with steps.
    """
    classes = step_classes(num_classes, neutral)
    choose = partial(choose_reader, classes=classes, separator=step_separator, strip_thinking=strip_thinking)
    rows, name = paired_rows(read_file(path), dropped := Counter[str]()), f"preferences/{split}"
    collected = collect(rows, _as_examples(choose), path, dropped, name=name, carries=True, ignored=ignore_keys or ())
    return collected.as_task("preferences", path, split, validation_share, opening_hash)


@register("task", held_out="validation")
@row_task("HuggingFaceH4/ultrafeedback_binarized", train="train_prefs", test="test_prefs", share=0.02)
def ultrafeedback(row: Row, *, strip_thinking: bool = False) -> Example:
    """Pairs of UltraFeedback in the binarized layout: two answers to an instruction, compared by a model.

    Keys: ``prompt``; ``chosen`` and ``rejected`` (text, or the whole conversation as a list of messages);
    ``score_chosen`` and ``score_rejected``, from 1 to 10. Cui et al. (2023), "UltraFeedback: boosting language models
    with high-quality feedback". GPT-4 gave the scores: the chosen answer is the best of four, the rejected
    one of the others. The difference of the scores is the pair's margin.

    Dropped and counted: equal scores (about one pair in ten), equal answers, and whatever is blank or missing.
    """
    for key in SCORE_KEYS[0]:
        require(row, key)
    messages, responses = read_pair(row, scores=SCORE_KEYS[0], strip_thinking=strip_thinking)
    return Example("", messages, responses=responses)


def _as_examples(choose: Callable[[Row], Callable[[Row], Parts]]) -> Callable[[Row], Example]:
    """Return the reader of all rows; the first row decides how, and whether every row has a margin."""
    chosen: list[tuple[Callable[[Row], Parts], bool]] = []

    def read_example(row: Row) -> Example:
        if not chosen:
            chosen.append((choose(row), row.has("margin")))
        read, has_margin = chosen[0]
        messages, responses = read(row)
        return Example(
            "",
            messages,
            responses=responses,
            meta=row.meta(),
            variables=read_variables(row),
            margin=_read_margin(row) if has_margin and len(responses) == 2 else None,
        )

    return read_example


def _read_margin(row: Row) -> float:
    margin = read_score(row, "margin")
    if margin < 0:
        raise Dropped("'margin' is below 0, so the rejected answer is the better one")
    return margin


def choose_reader(
    first: Row, classes: dict[int, int], separator: str, *, strip_thinking: bool = False
) -> Callable[[Row], Parts]:
    """What reads all rows of a file that begins with ``first``."""
    layout, scores, verdict = detect_layout(first), score_keys(first), verdict_key(first)
    if layout == "steps" and strip_thinking:
        raise UsageError("task preferences: strip_thinking is for pairs and judged answers; these rows have steps")

    def read(row: Row) -> Parts:
        known = {key for keys in LAYOUTS[layout] for key in keys} | (set(RATING_KEYS) if layout == "judged" else set())
        if known.isdisjoint(row.data):
            raise Dropped("a row of another layout than the first")
        if layout == "pair":
            return read_pair(row, scores=scores, strip_thinking=strip_thinking)
        if layout == "judged":
            return read_judged(row, key=verdict, strip_thinking=strip_thinking)
        return read_steps(row, classes=classes, separator=separator)

    return read


def detect_layout(row: Row) -> Layout:
    """The layout whose keys the row has.

    Raises:
        DataError: none, or more than one.
    """
    layouts = [layout for layout, ways in LAYOUTS.items() if any(all(key in row.data for key in keys) for keys in ways)]
    if not layouts and any(key in row.data for key in RATING_KEYS) and any(one in row.data for one in ANSWER_KEYS):
        return "judged"
    if len(layouts) == 1:
        return layouts[0]
    every = [keys for ways in LAYOUTS.values() for keys in ways]
    wanted = "; ".join(", ".join(keys if "messages" in keys else ("prompt", *keys)) for keys in every)
    known = {*PROMPT_KEYS, *(key for keys in every for key in keys)}
    near = next((hint for key in row.data if key not in known and (hint := suggest(key, known))), "")
    what = "of no known layout" if not layouts else f"of more than one layout ({', '.join(layouts)})"
    raise row.fail(f"the row is {what}. It has the keys {', '.join(row.data) or 'none'}.{near} Known layouts: {wanted}")


def read_steps(row: Row, *, classes: dict[int, int], separator: str) -> Parts:
    """A prompt with one solution in steps, each with its class. The score is 1 where no step is in the lowest class."""
    messages = read_prompt(row)
    steps, labels = (_read_list(row, key) for key in ("completions", "labels"))
    if len(steps) != len(labels):
        raise row.fail(f"{len(steps)} 'completions' and {len(labels)} 'labels'; each step has one label")
    texts: list[str] = []
    step_labels: list[int] = []
    for number, (step, label) in enumerate(zip(steps, labels, strict=True), start=1):
        if step is None or is_blank(step):
            raise Dropped("a blank step")
        if label is None:
            raise Dropped("a step without a label")
        texts.append(row.checked(step, f"completions {number}"))
        step_labels.append(_class_of(row, label, number, classes))
    return messages, (stepwise(texts, step_labels, separator),)


def _class_of(row: Row, label: Any, number: int, classes: dict[int, int]) -> int:
    if isinstance(label, bool):
        return classes[1] if label else min(classes.values())
    if isinstance(label, int | float) and label in classes:
        return classes[int(label)]
    hint = ""
    if label == -1:
        hint = (
            ". For −1, 0 and 1 set task.num_classes to 3 (and objective.num_classes), or say by task.neutral what 0 is"
        )
    raise row.fail(f"'labels' {number} must be true, false or one of {sorted(classes)}; got {label!r}{hint}")


def _read_list(row: Row, key: str) -> Sequence[Any]:
    if not row.has(key):
        raise Dropped(f"{key!r} is missing")
    value = row.nested(key)
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise row.fail(f"{key!r} must be a list; got {value!r}"[:200])
    if not value:
        raise Dropped(f"{key!r} is empty")
    return value
