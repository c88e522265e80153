"""Runs compared: the keys in which their recipes differ, and their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.recipes.document import flatten
from posttrain.runs.directory import RunDirectory
from posttrain.runs.listing import RunSummary, evaluations, summarize_run
from posttrain.store.headline import Headline
from posttrain.store.metrics import MetricsLog

COMMENTS = ("description",)


class _Absent:
    """The value of a key that a recipe does not have."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Several runs; every list has one entry per run, in the order in which they were named.

    ``recipe``: dotted keys in which the stored recipes differ (``ABSENT`` where one has no such key);
    ``num_equal_keys`` have one value in all of them. ``headlines``: the metric by which each run is judged. ``last``:
    by evaluation, its last results with their ``step``; None for a run that was not so evaluated. ``metrics``: of the
    last step. ``seconds``: of steps and evaluations.
    """

    runs: list[RunSummary]
    recipe: dict[str, list[Any]]
    num_equal_keys: int
    headlines: list[Headline]
    last: dict[str, list[dict[str, Any] | None]]
    metrics: dict[str, list[float | None]]
    seconds: list[float]


def put_side_by_side(folders: Sequence[str | Path]) -> SideBySide:
    """Read the runs and find the differences.

    Raises:
        DataError: a record is damaged.
    """
    directories = [RunDirectory(folder) for folder in folders]
    recipes = [flatten(directory.read_recipe()) for directory in directories]
    keys = [key for key in dict.fromkeys(key for recipe in recipes for key in recipe) if key not in COMMENTS]
    sections = {key.rpartition(".")[0] for key in keys} | {key.partition(".")[0] for key in keys if "." in key}
    keys = [key for key in keys if key not in sections]  # an empty list or mapping where another recipe has something
    values = {key: [recipe.get(key, ABSENT) for recipe in recipes] for key in keys}
    differing = {key: row for key, row in values.items() if any(value != row[0] for value in row)}
    rows = [MetricsLog(directory.folder / "metrics.jsonl").read() for directory in directories]
    last = [{item["name"]: item for item in evaluations(own)} for own in rows]
    summaries = [summarize_run(directory.folder) for directory in directories]
    names = dict.fromkeys(name for summary in summaries for name in summary.metrics)
    timed = ("step_seconds", "evaluation_seconds")
    return SideBySide(
        runs=summaries,
        recipe=differing,
        num_equal_keys=len(values) - len(differing),
        headlines=[directory.headline() for directory in directories],
        last={name: [own.get(name) for own in last] for name in dict.fromkeys(name for own in last for name in own)},
        metrics={name: [summary.metrics.get(name) for summary in summaries] for name in names},
        seconds=[sum(row.timing.get(name, 0.0) for row in own for name in timed) for own in rows],
    )
