"""Solutions with errors put into them, eight kinds of them: PRMBench (Song et al. 2025)."""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.registry import register
from posttrain.tasks.base import Task
from posttrain.tasks.collect import Collected, Dropped
from posttrain.tasks.reader import reads_rows
from posttrain.tasks.reading import Row, read_file, read_hub
from posttrain.tasks.steps.labelled_steps import first_error, read_step_texts, stepwise
from posttrain.types import Example, Message


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
        path: a local ``.jsonl``, ``.jsonl.gz`` or ``.parquet`` file instead of the hub.
        hub: name of the data set on the hub.
        originals: adds each ``original_process`` once, with its ``original_question``, all steps good, classification
            ``original``: a model that finds an error everywhere is caught.
        step_separator: stands between two steps.

    Raises:
        DataError: a missing or malformed file or row, with its line; or no row that can be used.
        MissingExtra: ``datasets`` or ``pyarrow`` is needed and not installed.
    """
    rows = read_file(path) if path is not None else read_hub(hub, None, "train")
    collected = Collected()
    seen: set[tuple[str, str]] = set()
    for row in rows:
        try:
            collected.examples += _examples(row, step_separator, seen if originals else None)
        except Dropped as reason:
            collected.dropped[str(reason)] += 1
    place = path or f"hub:{hub}/train"
    collected.require_examples(place)
    return collected.as_task("prmbench", place)


def _examples(row: Row, separator: str, seen: set[tuple[str, str]] | None) -> Iterator[Example]:
    example = read_example(row, separator)
    original = None if seen is None else read_original(row, separator)
    yield example
    if seen is not None and original is not None:
        key = original.messages[0].content, original.responses[0].text
        if key not in seen:
            seen.add(key)
            yield original


def read_example(row: Row, separator: str) -> Example:
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
