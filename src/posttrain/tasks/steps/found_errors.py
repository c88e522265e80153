"""Test sets for process reward models: solutions of which it is known where they go wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator

from posttrain.registry import register
from posttrain.tasks.base import Task
from posttrain.tasks.reader import Collected, Dropped, collect, reads_rows
from posttrain.tasks.reading import Row, read_source
from posttrain.tasks.steps.labelled_steps import first_error, read_step_texts, stepwise
from posttrain.types import Example, Message


@register("task")
@reads_rows
def mr_gsm8k(
    *,
    path: str | None = None,
    hub: str = "Randolphzeng/Mr-GSM8K",
    step_separator: str = "\n",
) -> Task:
    """MR-GSM8K from the hub, or from a local file in its layout: a test set for process reward models.

    Zeng et al. (2023), "MR-GSM8K: a meta-reasoning benchmark for large language model evaluation". Keys: ``question``,
    ``model_output_steps``, ``model_output_solution_correctness`` (``correct`` or ``wrong``) and
    ``model_output_solution_first_error_step`` (from 1). Steps before the first error are good (class 1), the error
    is bad (class 0), and those behind it have no label, as nobody judged them. ``meta["first_error"]`` counts from 0
    and is None for a solution without an error; ``meta["question_type"]`` is ``original``, ``POT`` or ``reversed``.

    Dropped and counted: blank steps, and wrong solutions whose error step is not named or not there. The questions
    are made from GSM8K's test questions. There is one split.

    Args:
        step_separator: stands between two steps.
    """
    rows, place = read_source(path, hub, None, "train")
    return collect(rows, lambda row: read_mr_gsm8k(row, step_separator), place).as_task("mr_gsm8k", place)


def read_mr_gsm8k(row: Row, separator: str) -> Example:
    """One row as a solution that is labelled up to its first error.

    Raises:
        Dropped: the row cannot be used.
        DataError: a key is missing or of the wrong type.
    """
    steps = read_step_texts(row, "model_output_steps")
    verdict = row.text("model_output_solution_correctness").strip().lower()
    if verdict not in ("correct", "wrong"):
        raise row.fail(f"'model_output_solution_correctness' must be 'correct' or 'wrong'; got {verdict!r}")
    error = None if verdict == "correct" else _first_error(row, len(steps))
    labels = [1 if error is None or index < error else 0 if index == error else None for index in range(len(steps))]
    kind = {"question_type": row.text("question_type")} if row.has("question_type") else {}
    return Example(
        id=f"mr_gsm8k/{row.line}",
        messages=(Message("user", row.text("question").strip()),),
        responses=(stepwise(steps, labels, separator),),
        meta={"first_error": error, **kind},
    )


def _first_error(row: Row, num_steps: int) -> int:
    """The index, from 0, of the step that is named from 1; a text of digits will do."""
    named = row.data.get("model_output_solution_first_error_step")
    if re.fullmatch(r"\d{1,9}", str(named)) and 1 <= int(str(named)) <= num_steps:
        return int(str(named)) - 1
    raise Dropped("a wrong solution whose first wrong step is not among its steps")


@register("task")
@reads_rows
def prmbench(
    *,
    path: str | None = None,
    hub: str = "hitsmy/PRMBench_Preview",
    originals: bool = False,
    step_separator: str = "\n",
) -> Task:
    """PRMBench from the hub, or from a local file in its layout: a test set for process reward models.

    Song et al. (2025), "PRMBench: a fine-grained and challenging benchmark for process-level reward models". Keys:
    ``modified_question``, ``modified_process`` (the steps), ``error_steps`` (from 1) and ``classification``. The steps
    named are bad (class 0), all others good (class 1), also those behind an error. ``meta["first_error"]`` counts
    from 0 and is None where there is none (all of ``multi_solutions``); ``meta["classification"]`` is the kind of
    error. The originals are right solutions of PRM800K, so a model that learnt from that has seen most steps.

    Dropped and counted: blank steps, and errors named that are not among the steps. There is one split.

    Args:
        originals: adds each ``original_process`` once, with its ``original_question``, all steps good, classification
            ``original``: a model that finds an error everywhere is caught.
        step_separator: stands between two steps.
    """
    rows, place = read_source(path, hub, None, "train")
    collected = Collected()
    seen: set[tuple[str, str]] = set()
    for row in rows:
        try:
            collected.examples += _examples(row, step_separator, seen if originals else None)
        except Dropped as reason:
            collected.dropped[str(reason)] += 1
    return collected.as_task("prmbench", place)


def _examples(row: Row, separator: str, seen: set[tuple[str, str]] | None) -> Iterator[Example]:
    example = read_prmbench(row, separator)
    original = None if seen is None else read_original(row, separator)
    yield example
    if seen is not None and original is not None:
        key = original.messages[0].content, original.responses[0].text
        if key not in seen:
            seen.add(key)
            yield original


def read_prmbench(row: Row, separator: str) -> Example:
    """One row as a solution, all of whose steps are labelled.

    Raises:
        Dropped: the row cannot be used.
        DataError: a key is missing or of the wrong type.
    """
    steps = read_step_texts(row, "modified_process")
    named = row.data.get("error_steps")
    if not isinstance(named, list) or any(isinstance(n, bool) or not isinstance(n, int) for n in named):
        raise row.fail(f"'error_steps' must be a list of step numbers from 1; got {named!r}"[:200])
    if any(not 1 <= number <= len(steps) for number in named):
        raise Dropped("an error in a step that is not there")
    labels = [int(index + 1 not in named) for index in range(len(steps))]
    return Example(
        id=f"prmbench/{row.line}",
        messages=(Message("user", row.text("modified_question").strip()),),
        responses=(stepwise(steps, labels, separator),),
        meta={"first_error": first_error(labels, wrong=0), "classification": row.text("classification")},
    )


def read_original(row: Row, separator: str) -> Example:
    """The solution before errors were put into it.

    Raises:
        Dropped: a blank step.
        DataError: a key is missing or of the wrong type.
    """
    steps = read_step_texts(row, "original_process")
    return Example(
        id=f"prmbench/{row.line}/original",
        messages=(Message("user", row.text("original_question").strip()),),
        responses=(stepwise(steps, [1] * len(steps), separator),),
        meta={"first_error": None, "classification": "original"},
    )
