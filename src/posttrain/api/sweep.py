"""Sweeps: rows x seeds, with each trial in a separate process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.activity import heartbeat
from posttrain.api.arguments import check_flag, plain_names, plain_path, reading
from posttrain.api.inputs import (
    Data,
    Model,
    Place,
    Rewards,
    check_inputs,
    overrides_of,
    refuse_repeats,
    without_command_line,
)
from posttrain.api.run import Run
from posttrain.api.training import given, session_notes
from posttrain.errors import RecipeError, RunFailure
from posttrain.option_types import shorten
from posttrain.registry import session_functions, stop_import, suggest
from posttrain.reports.sweep_page import write_sweep
from posttrain.runs.directory import check_run_name, name_of_recipe
from posttrain.sweeps.comparison.plan import ComparisonPlan, describe_design, load_comparison, names_comparison
from posttrain.sweeps.comparison.report import collect_comparison
from posttrain.sweeps.comparison.runner import load_records, make_comparison
from posttrain.sweeps.file import Overrides
from posttrain.sweeps.plan import SweepPlan, load_sweep
from posttrain.sweeps.report import SweepResults, collect_sweep
from posttrain.sweeps.runner import run_trials
from posttrain.terminal.console import open_console, teller

KEYS = ("recipe", "over", "rows", "seeds")


@dataclass(frozen=True)
class Sweep:
    """A completed or interrupted sweep.

    ``results``: tables and findings, None if nothing finished. ``report``: path to the HTML page. ``runs``: finished
    runs (empty for comparisons, which store records). ``failures``: error message by trial name. ``is_interrupted``:
    stopped early; repeat the same call to continue.
    """

    folder: Path
    results: SweepResults | None
    report: Path | None
    runs: list[Run]
    failures: dict[str, str] = field(default_factory=dict)
    is_interrupted: bool = False


def sweep(
    spec: Place | Mapping[str, object],
    *,
    over: Mapping[str, Sequence[object]] | None = None,
    rows: Sequence[str] | None = None,
    seeds: int | None = None,
    data: Data | None = None,
    eval_data: Data | None = None,
    rewards: Rewards | None = None,
    model: Model | Mapping[str, object] | None = None,
    jobs: int | None = None,
    run: str | None = None,
    runs_dir: Place = "runs",
    progress: bool = True,
    **keys: object,
) -> Sweep:
    """Train rows x seeds and compare them, like ``posttrain sweep``. Trials finished by an earlier call are reused.

    Args:
        spec: a shipped sweep or recipe, a file, or a mapping with ``recipe`` and optionally ``over``, ``rows`` and
            ``seeds``. These can also be passed as arguments.
        over: one key and a list of values, for a recipe that describes a single run. Each value becomes a row.
        rows: names of rows to train. Default: all.
        seeds: number of runs per row. Default: set in the file.
        data: same as in ``pt.train``, applied to every row, as are ``eval_data``, ``rewards``, ``model`` and ``keys``.
        jobs: number of concurrent trials. Default: one per core, or one on a GPU.
        run: folder name. Default: ``sweep-`` plus the recipe name.

    Raises:
        UsageError: a trial cannot be trained. Checked before anything starts.

    Examples:
        >>> done = pt.sweep("tiny/grpo", over={"train.lr": [1e-5, 1e-4]}, seeds=2)
        >>> print(done.report)
        runs/sweep-tiny-grpo-over-train.lr/report.html
    """
    stop_import()
    runs_dir = plain_path("runs_dir", runs_dir)
    check_flag("progress", progress)
    content = _read_spec(spec, {"over": over, "rows": rows, "seeds": seeds})
    only = content.get("rows")
    if only is not None:
        only = plain_names("rows", only)
    repeats = content.get("seeds")
    row_key = _read_over(content.get("over"))
    check_inputs({}, {"seeds": repeats, "jobs": jobs})
    varied = None
    if row_key is not None:
        varied = row_key[0]
    folder = folder_of(run, str(content["recipe"]), varied, runs_dir)
    with without_command_line():
        overrides = [*given(runs_dir, data, eval_data, rewards, model), *overrides_of(keys)]
        given_keys = list(overrides)
        if row_key is not None:
            given_keys.append((row_key[0], ""))
        refuse_repeats(given_keys)
        plan = load_plan(content["recipe"], overrides, folder=folder, rows=only, num_seeds=repeats, over=row_key)
    for row in plan.rows:
        session_notes(session_functions(row.recipe.to_yaml()), None)
    return make_sweep(plan, f"pt.sweep({json.dumps(content, default=str)})", jobs, quiet=not progress)


def load_plan(
    name_or_path: str,
    overrides: Overrides,
    *,
    folder: Path,
    rows: Sequence[str] | None,
    num_seeds: int | None,
    over: tuple[str, Sequence[str]] | None,
) -> SweepPlan | ComparisonPlan:
    """Load and check a sweep, or a comparison if the file declares one. Arguments match ``load_sweep``."""
    if names_comparison(name_or_path, overrides, over):
        return load_comparison(name_or_path, overrides, folder=folder, rows=rows, num_seeds=num_seeds)
    return load_sweep(name_or_path, overrides, folder=folder, rows=rows, num_seeds=num_seeds, over=over)


def _read_spec(spec: Place | Mapping[str, object], named: Mapping[str, object]) -> dict[str, Any]:
    """Collect sweep keys from the first argument and from ``named`` arguments.

    Raises:
        RecipeError: an unknown key, a key given twice, or no recipe.
    """
    content: dict[str, Any] = {}
    if isinstance(spec, Mapping):
        with reading("spec"):
            content = dict(spec)
    else:
        content["recipe"] = plain_path("spec", spec)
    for key, value in named.items():
        if value is not None and content.get(key) is not None:
            raise RecipeError(f"{key}: given twice, as a keyword and inside the first argument. Give it once")
        if value is not None:
            content[key] = value
    for key in content:
        if not isinstance(key, str):
            raise RecipeError(f"spec: the key {shorten(key)} is not a string. Known keys: {', '.join(KEYS)}")
        if key not in KEYS:
            raise RecipeError(f"{key}: unknown sweep key.{suggest(key, KEYS)} Known keys: {', '.join(KEYS)}")
    if not isinstance(content.get("recipe"), str):
        raise RecipeError("recipe: missing. Give a recipe name such as tiny/grpo, or a path")
    return content


def _read_over(over: object) -> tuple[str, list[str]] | None:
    if over is None:
        return None
    problem = 'over: invalid. Give one key and a list of values, such as {"train.lr": [1e-5, 1e-4]}'
    if not isinstance(over, Mapping) or len(over) != 1:
        raise RecipeError(problem)
    ((name, values),) = over.items()
    if not isinstance(name, str) or not isinstance(values, list | tuple) or not values:
        raise RecipeError(problem)
    pairs = []
    for value in values:
        pairs += overrides_of({name: value})
    keys = sorted({key for key, _ in pairs})
    if len(keys) > 1 or len(pairs) > len(values):
        raise RecipeError(f"over: the values of {name!r} set several keys: {', '.join(keys)}. Give values of one key")
    return keys[0], [text for _, text in pairs]


def folder_of(run: str | None, recipe: str, over: str | None, runs_dir: Place) -> Path:
    """Choose the sweep folder: ``run`` if given, otherwise ``sweep-`` plus the recipe name."""
    if run is not None:
        return Path(runs_dir) / check_run_name(run)
    name = name_of_recipe(recipe)
    if over is not None:
        name = f"{name}-over-{over}"
    if not name.startswith("sweep"):
        name = f"sweep-{name}"
    return Path(runs_dir) / name


def make_sweep(plan: SweepPlan | ComparisonPlan, command: str, jobs: int | None, *, quiet: bool) -> Sweep:
    """Run unfinished trials, then write results, tables, plot and HTML page. ``quiet``: print failures only."""
    console = open_console()
    tell = teller(console, quiet=quiet)
    runs: list[Run] = []
    results = None
    page = None
    if isinstance(plan, ComparisonPlan):
        for line in describe_design(plan, load_records(plan)):
            tell(line, False)
    with heartbeat("sweep", console.file, is_on=not quiet and not console.is_terminal):
        if isinstance(plan, ComparisonPlan):
            outcome = make_comparison(plan, jobs=jobs, say=tell)
        else:
            outcome = run_trials(plan, jobs=jobs, say=tell)
    try:
        if isinstance(plan, ComparisonPlan):
            results = collect_comparison(plan, load_records(plan), outcome, command)
        else:
            results = collect_sweep(plan, outcome, command)
            runs = [Run(trial.folder) for trial in plan.trainings if trial.state == "finished"]
    except RunFailure as failure:
        tell(str(failure), True)
    else:
        page = write_sweep(results, plan.folder)
    if outcome.interrupted:
        tell("stopped; everything so far is saved. Repeat the command to continue", True)
    return Sweep(plan.folder, results, page, runs, outcome.failures, outcome.interrupted)
