"""Runs beside one another: in what their recipes differ, and what came out of each."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.errors import PosttrainError
from posttrain.recipes.document import flatten
from posttrain.recipes.recipe import validate_recipe
from posttrain.runs.directory import RunDirectory
from posttrain.runs.listing import RunSummary, evaluations, summarize_run
from posttrain.store.headline import Headline
from posttrain.store.metrics import MetricsLog

COMMENTS = ("description",)
_ABOUT = ("posttrain", "torch", "transformers", "commit", "cpus", "gpus")


class _Absent:
    """The value of a key that a recipe does not have."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Several runs; every list has one entry per run, in the order in which they were named.

    ``recipe``: dotted keys in which the resolved recipes differ (``ABSENT`` where one has no such key);
    ``num_equal_keys`` have one value in all of them. ``headlines``: what each run is told by. ``last`` and ``best``: by
    the evaluation's name, its results with their ``step``, the best by that; None for a run that was not so evaluated.
    ``metrics``: of the last
    step. ``environment``: versions, commit and hardware in which the newest starts differ.
    """

    runs: list[RunSummary]
    recipe: dict[str, list[Any]]
    num_equal_keys: int
    headlines: list[Headline]
    last: dict[str, list[dict[str, Any] | None]]
    best: dict[str, list[dict[str, Any] | None]]
    metrics: dict[str, list[float | None]]
    seconds: list[float]
    environment: dict[str, list[str]]


def put_side_by_side(folders: Sequence[str | Path]) -> SideBySide:
    """Read the runs and find what differs.

    Raises:
        DataError: a record is damaged.
    """
    directories = [RunDirectory(folder) for folder in folders]
    starts = [_describe_start(directory) for directory in directories]
    environment = {key: [start.get(key, "?") for start in starts] for key in _ABOUT}
    environment = {key: values for key, values in environment.items() if len(set(values)) > 1}
    # Defaults differ between versions alone; filling them in imports the words, and torch with them.
    fill = bool({"posttrain", "commit"} & environment.keys())
    recipes = [flatten(_read_recipe(directory, fill)) for directory in directories]
    keys = [key for key in dict.fromkeys(key for recipe in recipes for key in recipe) if key not in COMMENTS]
    sections = {key.rpartition(".")[0] for key in keys} | {key.partition(".")[0] for key in keys if "." in key}
    keys = [key for key in keys if key not in sections]  # an empty list or mapping where another recipe has something
    values = {key: [recipe.get(key, ABSENT) for recipe in recipes] for key in keys}
    differing = {key: row for key, row in values.items() if any(value != row[0] for value in row)}
    rows = [MetricsLog(directory.folder / "metrics.jsonl").read() for directory in directories]
    evaluated = [evaluations(own) for own in rows]
    summaries = [summarize_run(directory.folder) for directory in directories]
    headlines = [directory.headline() for directory in directories]
    names = dict.fromkeys(name for summary in summaries for name in summary.metrics)
    timed = ("step_seconds", "evaluation_seconds")
    return SideBySide(
        runs=summaries,
        recipe=differing,
        num_equal_keys=len(values) - len(differing),
        headlines=headlines,
        last=_by_name(evaluated, headlines, best=False),
        best=_by_name(evaluated, headlines, best=True),
        metrics={name: [summary.metrics.get(name) for summary in summaries] for name in names},
        seconds=[sum(row.timing.get(name, 0.0) for row in own for name in timed) for own in rows],
        environment=environment,
    )


def _read_recipe(directory: RunDirectory, fill: bool) -> dict[str, Any]:
    stored = directory.read_recipe()
    if fill:
        with suppress(PosttrainError):  # a recipe that this version cannot read is compared as it stands
            return validate_recipe(stored, is_own=False).resolve(to_read=True).dump()
    return stored


def _by_name(
    evaluated: Sequence[Sequence[dict[str, Any]]], headlines: Sequence[Headline], *, best: bool
) -> dict[str, list[dict[str, Any] | None]]:
    names = dict.fromkeys(item["name"] for items in evaluated for item in items)
    table: dict[str, list[dict[str, Any] | None]] = {}
    for name in names:
        table[name] = []
        for items, headline in zip(evaluated, headlines, strict=True):
            own = [(headline.value(item), item) for item in items if item["name"] == name]
            measured = [(value, item) for value, item in own if value is not None]
            if best:  # the newest of equals, as ``checkpoints/best`` is
                measured.sort(key=lambda one: (headline.goodness(one[0]), one[1]["step"]))
            table[name].append(measured[-1][1] if measured else None)
    return table


def _describe_start(directory: RunDirectory) -> dict[str, str]:
    starts = directory.read_environment().get("starts") or [{}]
    newest = starts[-1]
    versions, hardware, git = (newest.get(key) or {} for key in ("versions", "hardware", "git"))
    return {
        **{name: str(versions.get(name, "?")) for name in ("posttrain", "torch", "transformers")},
        "commit": str(git.get("commit", "?"))[:10] + (" with changes" if git.get("changed_files") else ""),
        "cpus": str(hardware.get("cpus", "?")),
        "gpus": ", ".join(map(str, hardware.get("gpus") or [])) or "none",
    }
