"""A model's own answers as rows of data: the ``items.jsonl`` of ``posttrain evaluate --samples N``.

A line there is a question with its sampled answers, each with the grader's verdict. It becomes one row per answer, or
one per pair of a right and a wrong answer. Rows of other files go through as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import zip_longest

from posttrain.tasks.messages import is_blank
from posttrain.tasks.reading import Row

# The keys by which a line of ``items.jsonl`` (``evals/items.py``) differs from a row of any other file.
ITEM_KEYS = ("id", "index", "question", "samples")
RESPONSE_IDS = "response_ids"  # of an answer whose text encodes to other tokens than were sampled
# An answer is right or not by the grader's word; with any other word nobody knows.
VERDICTS = {"right": True, "wrong": False, "no_answer": False}
UNJUDGED = {"ungraded": "nothing to grade against", "timeout": "the grader took too long", "crash": "the grader died"}


def judged_rows(
    rows: Iterable[Row], problem_key: str, solution_key: str, verdict_key: str, dropped: Counter[str]
) -> Iterator[Row]:
    """One row per judged answer of an item, under these keys with the item's meta.

    Raises:
        DataError: an item of another form than ``evaluate`` writes.
    """
    for row in rows:
        if not all(key in row.data for key in ITEM_KEYS):
            yield row
            continue
        meta = row.plain("meta")
        shared = {**(meta if isinstance(meta, Mapping) else {}), problem_key: row.data["question"]}
        for part, (text, is_right, ids) in enumerate(_judged(row, dropped), start=1):
            data = {**shared, solution_key: text, verdict_key: is_right, **({RESPONSE_IDS: ids} if ids else {})}
            yield replace(row, data=data, part=part)


def paired_rows(rows: Iterable[Row], dropped: Counter[str]) -> Iterator[Row]:
    """Rows with ``prompt``, ``chosen`` and ``rejected``: of each item the n-th right answer with the n-th wrong one.

    So no answer is in two pairs; those that find no partner are dropped and counted.

    Raises:
        DataError: an item of another form than ``evaluate`` writes.
    """
    for row in rows:
        if not all(key in row.data for key in ITEM_KEYS):
            yield row
            continue
        judged = _judged(row, dropped)
        num_blank = sum(is_blank(text) for text, _, _ in judged)
        if num_blank:
            dropped["a blank answer"] += num_blank
        right, wrong = (
            [t for t, verdict, _ in judged if verdict is kind and not is_blank(t)] for kind in (True, False)
        )
        for part, (chosen, rejected) in enumerate(zip_longest(right, wrong), start=1):
            if chosen is None or rejected is None:
                kinds = ("right", "wrong") if rejected is None else ("wrong", "right")
                dropped["a {} answer without a {} one to the same question".format(*kinds)] += 1
            else:
                data = {"prompt": row.data["question"], "chosen": chosen, "rejected": rejected}
                yield replace(row, data=data, part=part)


def _judged(row: Row, dropped: Counter[str]) -> list[tuple[str, bool, list[int]]]:
    """The answers of an item that were found right or not, with their ids if it has them; others are counted."""
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
