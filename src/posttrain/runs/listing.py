"""What has been run: functions over run directories that read and never write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from posttrain.errors import DataError
from posttrain.runs.directory import RunDirectory, RunStatus, is_live, run_names
from posttrain.runs.notes import Notes, read_notes
from posttrain.runs.places import CELLS, cell_names, comparison_names, every_run_name, plan_of
from posttrain.store.metrics import MetricsLog, MetricsRow
from posttrain.store.rollouts import RolloutStore
from posttrain.train.checkpoint_files import best_step, checkpoint_steps, step_folder

RunState = Literal["running", "finished", "failed", "interrupted", "dead", "damaged"]
T = TypeVar("T")
_EVALUATION = "eval/"


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run at a glance.

    ``state`` is ``running`` only while a process holds the run's lock; a run that says so without
    one was killed and is ``dead``. ``damaged`` runs have files that cannot be read: ``problem`` says
    which. ``metrics`` are those of the last step, ``accuracy`` that of the last held-out evaluation,
    ``disk_bytes`` what the directory holds, ``created`` the first start (ISO 8601, UTC), ``updated`` the last
    change of its status (seconds since 1970). ``name`` is relative to the runs folder.
    """

    name: str
    path: Path
    state: RunState
    step: int
    steps: int
    recipe: str
    objective: str
    model: str
    metrics: dict[str, float] = field(default_factory=dict)
    accuracy: float | None = None
    disk_bytes: int = 0
    created: str | None = None
    problem: str | None = None
    updated: float | None = None
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ComparisonSummary:
    """What `posttrain compare` made, at a glance: ``num_finished`` of ``num_cells`` are done; ``runs`` are those there.

    ``num_cells`` and ``methods`` are those of the last command; cells of an earlier one count among the runs.
    """

    name: str
    path: Path
    state: Literal["running", "finished", "unfinished", "damaged"]
    methods: tuple[str, ...]
    num_cells: int
    num_finished: int
    runs: tuple[RunSummary, ...]
    disk_bytes: int
    problem: str | None = None


def list_runs(root: str | Path, *, with_cells: bool = False) -> list[RunSummary]:
    """All runs under ``root``, oldest first; none where there is no such folder. Runs of comparisons on request."""
    names = every_run_name(root) if with_cells else run_names(root)
    summaries = [replace(summarize_run(Path(root) / name), name=name) for name in names]
    return sorted(summaries, key=lambda run: (run.created or "", run.name))


def list_comparisons(root: str | Path) -> list[ComparisonSummary]:
    """All comparisons under ``root``, by name."""
    return [summarize_comparison(root, name) for name in comparison_names(root)]


def summarize_comparison(root: str | Path, name: str) -> ComparisonSummary:
    """One comparison or study at a glance. A plan that cannot be read makes it ``damaged``."""
    folder = Path(root) / name
    runs = tuple(replace(summarize_run(Path(root) / cell), name=cell) for cell in cell_names(root, name))
    methods: tuple[str, ...] = ()
    num_seeds, problem, plan = 0, None, plan_of(folder)
    try:
        content = yaml.safe_load(plan.read_text(encoding="utf-8"))
        parts = (content["methods"],) if "methods" in content else (content["reward_models"], content.get("policies"))
        methods, num_seeds = tuple(str(name) for part in parts for name in part or ()), int(content["seeds"])
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError) as error:
        problem = f"{plan}: damaged ({type(error).__name__})"
    wanted = {f"{name}/{CELLS}/{method}-seed{seed}" for method in methods for seed in range(num_seeds)}
    finished = sum(run.state == "finished" for run in runs if run.name in wanted)
    state: Literal["running", "finished", "unfinished", "damaged"]
    state = "damaged" if problem else "finished" if finished == len(wanted) else "unfinished"
    state = "running" if is_live(folder) else state
    return ComparisonSummary(name, folder, state, methods, len(wanted), finished, runs, disk_bytes(folder), problem)


def summarize_run(path: str | Path) -> RunSummary:
    """One run at a glance. What cannot be read makes it ``damaged``, with the reason."""
    directory = RunDirectory(path)
    problems: list[str] = []
    recipe, environment, status, rows = _read_all(directory, problems)
    notes = _read_or(lambda: read_notes(directory.folder), Notes(), problems)
    trained = [row for row in rows if not _is_evaluation(row)]
    state = _state(status, is_live(directory.folder))
    return RunSummary(
        name=directory.folder.name,
        path=directory.folder,
        state="damaged" if problems else state,
        step=status.step if status else 0,
        steps=status.steps if status else int(_section(recipe, "train").get("steps", 0)),
        recipe=str(environment.get("recipe", "?")),
        objective=_word(recipe, "objective" if "objective" in recipe else "dictionary"),
        model=_model(recipe),
        metrics=trained[-1].metrics if trained else {},
        accuracy=status.accuracy if status else None,
        disk_bytes=disk_bytes(directory.folder),
        created=environment.get("created"),
        problem="; ".join(problems) or None,
        updated=status.updated if status else None,
        tags=notes.tags,
    )


def show_run(path: str | Path) -> dict[str, Any]:
    """Everything about one run as plain data.

    Keys: the fields of ``RunSummary``, ``recipe_text`` (YAML), ``environment`` (``env.json``),
    ``status`` (``status.json``), ``remarks`` (time, text), ``disk`` (bytes by kind), ``checkpoints``
    (step, path, disk_bytes, best), ``first_metrics``, ``evaluations`` (name, step, and results),
    ``rollouts`` (number by step), ``evaluation_rollouts`` (number by "name at step").
    """
    directory = RunDirectory(path)
    _, environment, status, rows = _read_all(directory, [])
    trained = [row for row in rows if not _is_evaluation(row)]
    summary = asdict(summarize_run(path))
    return summary | {
        "path": str(directory.folder),
        "recipe_text": directory.recipe_path.read_text(encoding="utf-8", errors="replace"),
        "environment": environment,
        "status": asdict(status) if status else {},
        "remarks": [asdict(remark) for remark in _read_or(lambda: read_notes(path), Notes(), []).remarks],
        "disk": disk_use(directory.folder),
        "checkpoints": _checkpoints(directory.folder / "checkpoints"),
        "first_metrics": trained[0].metrics if trained else {},
        "evaluations": evaluations(rows),
        **_rollout_counts(directory.folder / "rollouts.db"),
    }


def evaluations(rows: list[MetricsRow]) -> list[dict[str, Any]]:
    """Held-out evaluations in the order in which they were done: ``name``, ``step`` and their results."""
    found: list[dict[str, Any]] = []
    for row in rows:
        by_name: dict[str, dict[str, float]] = {}
        for key, value in row.metrics.items():
            if key.startswith(_EVALUATION):
                name, _, result = key.removeprefix(_EVALUATION).rpartition("/")
                by_name.setdefault(name, {})[result] = value
        found += [{"name": name, "step": row.step, **results} for name, results in by_name.items()]
    return found


def disk_bytes(folder: str | Path) -> int:
    """Bytes in all files under a folder; links count as nothing. Files that vanish meanwhile are left out."""
    total = 0
    for item in Path(folder).rglob("*"):
        try:
            if item.is_file() and not item.is_symlink():
                total += item.stat().st_size
        except FileNotFoundError:  # a live run prunes its checkpoints
            continue
    return total


def disk_use(folder: Path) -> dict[str, int]:
    """Bytes of a run by what they are: checkpoints, rollouts, and everything else."""
    checkpoints = disk_bytes(folder / "checkpoints")
    rollouts = sum(item.stat().st_size for item in folder.glob("rollouts.db*") if item.is_file())
    return {"checkpoints": checkpoints, "rollouts": rollouts, "other": disk_bytes(folder) - checkpoints - rollouts}


def _read_all(
    directory: RunDirectory, problems: list[str]
) -> tuple[dict[str, Any], dict[str, Any], RunStatus | None, list[MetricsRow]]:
    metrics = MetricsLog(directory.folder / "metrics.jsonl")
    return (
        _read_or(directory.read_recipe, {}, problems),
        _read_or(directory.read_environment, {}, problems),
        _read_or(directory.read_status, None, problems),
        _read_or(metrics.read, [], problems),
    )


def _read_or(read: Callable[[], T], instead: T, problems: list[str]) -> T:
    try:
        return read()
    except DataError as error:
        problems.append(str(error))
        return instead


def _state(status: RunStatus | None, live: bool) -> RunState:
    if live:
        return "running"
    if status is None or status.state == "running":
        return "dead"
    return status.state


def _is_evaluation(row: MetricsRow) -> bool:
    return bool(row.metrics) and all(key.startswith(_EVALUATION) for key in row.metrics)


def _section(recipe: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = recipe.get(key)
    return value if isinstance(value, Mapping) else {}


def _word(recipe: Mapping[str, Any], key: str) -> str:
    value = recipe.get(key)
    if isinstance(value, str):
        return value
    return str(_section(recipe, key).get("name", "?"))


def _model(recipe: Mapping[str, Any]) -> str:
    """Of a dictionary's run, whose activations it is of: a model, or a folder that holds them."""
    activations = _section(recipe, "activations")
    return str(activations["folder"]) if "folder" in activations else _word(activations or recipe, "model")


def _checkpoints(folder: Path) -> list[dict[str, Any]]:
    best = best_step(folder)
    steps = [(step, step_folder(folder, step)) for step in checkpoint_steps(folder)]
    return [
        {"step": step, "path": str(path), "disk_bytes": disk_bytes(path), "best": step == best} for step, path in steps
    ]


def _rollout_counts(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {"rollouts": {}, "evaluation_rollouts": {}}
    store = RolloutStore(path, read_only=True)
    evaluated = store.count_evaluations()
    return {
        "rollouts": store.count_training(),
        "evaluation_rollouts": {f"{name} at {step}": count for (name, step), count in evaluated.items()},
    }
