"""Solutions of school problems whose first wrong step was found by people: MR-GSM8K (Zeng et al. 2023)."""

from __future__ import annotations

import re

from posttrain.registry import register
from posttrain.tasks.base import Task
from posttrain.tasks.collect import Dropped, collect
from posttrain.tasks.reader import reads_rows
from posttrain.tasks.reading import Row, read_file, read_hub
from posttrain.tasks.steps.labelled_steps import read_step_texts, stepwise
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
        path: a local ``.jsonl``, ``.jsonl.gz`` or ``.parquet`` file instead of the hub.
        hub: name of the data set on the hub.
        step_separator: stands between two steps.

    Raises:
        DataError: a missing or malformed file or row, with its line; or no row that can be used.
        MissingExtra: ``datasets`` or ``pyarrow`` is needed and not installed.
    """
    rows = read_file(path) if path is not None else read_hub(hub, None, "train")
    collected = collect(rows, lambda row: read_example(row, step_separator), path or f"hub:{hub}/train")
    return collected.as_task("mr_gsm8k", path or f"hub:{hub}/train")


def read_example(row: Row, separator: str) -> Example:
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
    if re.fullmatch(r"\d+", str(named)) and 1 <= int(str(named)) <= num_steps:
        return int(str(named)) - 1
    raise Dropped("a wrong solution whose first wrong step is not among its steps")
