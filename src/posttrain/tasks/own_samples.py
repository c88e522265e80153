"""A model's own answers as rows of data: what ``posttrain evaluate --samples N`` leaves in its ``items.jsonl``.

A line there is a question with its sampled answers, each with the grader's word. It becomes one row per answer, or one
per pair of a right and a wrong answer. Rows of other files go through as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from posttrain.tasks.preferences.rows import is_blank
from posttrain.tasks.reading import Row

# What tells a line of ``items.jsonl`` (``evals/items.py``) from a row of any other file.
ITEM_KEYS = ("id", "index", "question", "samples")
RESPONSE_IDS = "response_ids"  # of an answer whose text encodes to other tokens than were sampled
# Whether an answer is right, by the grader's word; with any other word nobody knows.
VERDICTS = {"right": True, "wrong": False, "no_answer": False}
UNJUDGED = {"ungraded": "nothing to grade against", "timeout": "the grader took too long", "crash": "the grader died"}


def is_item(row: Row) -> bool:
    """Whether a row is an evaluated question with its samples."""
    return all(key in row.data for key in ITEM_KEYS)


def judged_rows(
    rows: Iterable[Row], problem_key: str, solution_key: str, verdict_key: str, dropped: Counter[str]
) -> Iterator[Row]:
    """One row per judged answer of an item, under these keys beside the item's meta.

    Raises:
        DataError: an item of another form than ``evaluate`` writes.
    """

    def judged(item: Row) -> Iterator[dict[str, Any]]:
        for text, is_right, ids in _judged(item, dropped):
            row = _meta(item) | {problem_key: item.data["question"], solution_key: text, verdict_key: is_right}
            yield row | ({RESPONSE_IDS: ids} if ids else {})

    return _taken_apart(rows, judged)


def paired_rows(rows: Iterable[Row], dropped: Counter[str]) -> Iterator[Row]:
    """Rows with ``prompt``, ``chosen`` and ``rejected``: of each item the n-th right answer with the n-th wrong one.

    So no answer is in two pairs; those that find no partner are dropped and counted.

    Raises:
        DataError: an item of another form than ``evaluate`` writes.
    """

    def pairs(item: Row) -> Iterator[dict[str, Any]]:
        judged = [(text, is_right) for text, is_right, _ in _judged(item, dropped) if not _drops_blank(text, dropped)]
        right, wrong = ([text for text, is_right in judged if is_right is kind] for kind in (True, False))
        for chosen, rejected in zip_longest(right, wrong):
            if rejected is None:
                dropped["a right answer without a wrong one to the same question"] += 1
            elif chosen is None:
                dropped["a wrong answer without a right one to the same question"] += 1
            else:
                yield {"prompt": item.data["question"], "chosen": chosen, "rejected": rejected}

    return _taken_apart(rows, pairs)


def _taken_apart(rows: Iterable[Row], parts_of: Callable[[Row], Iterator[dict[str, Any]]]) -> Iterator[Row]:
    """Every item as the rows that are made of it; rows that are no items as they are."""
    for row in rows:
        if not is_item(row):
            yield row
            continue
        for part, content in enumerate(parts_of(row), start=1):
            yield replace(row, data=content, part=part)


def _drops_blank(text: str, dropped: Counter[str]) -> bool:
    if is_blank(text):
        dropped["a blank answer"] += 1
    return is_blank(text)


def _meta(row: Row) -> dict[str, Any]:
    meta = row.plain("meta")
    return dict(meta) if isinstance(meta, Mapping) else {}


def _judged(row: Row, dropped: Counter[str]) -> list[tuple[str, bool, list[int]]]:
    """The answers of an item that were found right or not, with their ids where the item has them; others are counted.

    Raises:
        DataError: no list of answers, or one without its text or with an outcome that no grader has.
    """
    samples = row.data["samples"]
    if not isinstance(samples, list):
        raise row.fail("'samples' must be the list of answers that `posttrain evaluate` writes")
    if not samples:
        dropped["no answer was sampled (a prompt that did not fit)"] += 1
    judged = []
    for number, sample in enumerate(samples, start=1):
        stated = sample if isinstance(sample, Mapping) else {}
        text, outcome, ids = stated.get("text"), str(stated.get("outcome")), stated.get(RESPONSE_IDS)
        if not isinstance(text, str):
            raise row.fail(f"samples {number} has no 'text'; only evaluations of answers to questions can be read")
        if outcome in UNJUDGED:
            dropped[f"an answer that was not judged: {UNJUDGED[outcome]}"] += 1
        elif outcome in VERDICTS:
            judged.append((text, VERDICTS[outcome], ids if isinstance(ids, list) else []))
        else:
            known = ", ".join((*VERDICTS, *UNJUDGED))
            raise row.fail(f"samples {number}: 'outcome' must be one of {known}; got {outcome[:60]!r}")
    return judged
