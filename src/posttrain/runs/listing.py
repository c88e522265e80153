"""What has been run: functions over run directories that read and never write."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from posttrain.errors import DataError, UsageError
from posttrain.recipes.document import flatten
from posttrain.registry import suggest
from posttrain.runs.directory import RunDirectory, RunStatus, is_live, read_tags, run_names
from posttrain.runs.paths import CELLS, PLAN, cell_names, every_run_name, fits
from posttrain.store.checkpoint_files import best_step, checkpoint_steps, step_folder
from posttrain.store.headline import Headline
from posttrain.store.metrics import MetricsLog, MetricsRow, evaluation_points, is_evaluation
from posttrain.store.reading import read_text, read_yaml
from posttrain.store.rollouts import RolloutStore

NAMES = ("model.name", "teacher.name")  # `tiny` and hub names stand here too
_MAX_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class RecipeFacts:
    """Of ``recipe.yaml``; ``leads``: the values by dotted key that may lead to another run."""

    steps: int = 0
    objective: str = "?"
    model: str = "?"
    leads: dict[str, str] = field(default_factory=dict)


def recipe_facts(folder: Path) -> RecipeFacts:
    """Read what lists show of a run's recipe.

    Raises:
        DataError: it cannot be read.
    """
    directory = RunDirectory(folder)
    try:
        recipe = directory.read_recipe()
    except OSError as error:
        raise DataError(directory.recipe_path, f"the run's recipe cannot be read ({error.strerror})") from None
    steps = _section(recipe, "train").get("steps") or 0  # null where passes are counted, and the status knows
    if not isinstance(steps, int):
        raise DataError(directory.recipe_path, "train.steps is no whole number")
    leads = {
        key: value
        for key, value in flatten(recipe).items()
        if isinstance(value, str) and value and (key in NAMES or "/" in value or names_run(key))
    }
    objective = _word(recipe, "objective" if "objective" in recipe else "dictionary")
    return RecipeFacts(steps, objective[:_MAX_CHARACTERS], _model(recipe)[:_MAX_CHARACTERS], leads)


def names_run(key: str) -> bool:
    """Whether the value of a dotted key of a recipe is a run."""
    return key.endswith(".run")


def _section(recipe: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = recipe.get(key)
    return value if isinstance(value, Mapping) else {}


def _word(recipe: Mapping[str, Any], key: str) -> str:
    value = recipe.get(key)
    return value if isinstance(value, str) else str(_section(recipe, key).get("name", "?"))


def _model(recipe: Mapping[str, Any]) -> str:
    """Of a dictionary's run, whose activations it is of: a model, or a folder that holds them."""
    activations = _section(recipe, "activations")
    return str(activations["folder"]) if "folder" in activations else _word(activations or recipe, "model")


RunState = Literal["running", "finished", "failed", "interrupted", "dead", "damaged"]
T = TypeVar("T")
_MAX_CELLS = 100_000


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run at a glance.

    ``state`` is ``running`` only while a process holds the run's lock; a run that says so without
    one was killed and is ``dead``. ``damaged`` runs have files that cannot be read: ``problem`` says
    which. ``metrics`` are those of the last step, ``headline`` what the run is told by and ``held_out`` its
    numbers in the last held-out evaluation, ``disk_bytes`` what the directory holds, ``created`` the first start (ISO
    8601, UTC), ``updated`` the last change of its status (seconds since 1970). ``name`` is relative to the runs folder.
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
    headline: Headline | None = None
    held_out: dict[str, float] = field(default_factory=dict)
    disk_bytes: int = 0
    created: str | None = None
    problem: str | None = None
    updated: float | None = None
    tags: tuple[str, ...] = ()

    @property
    def value(self) -> float | None:
        """That of the headline in the last held-out evaluation."""
        return None if self.headline is None else self.headline.value(self.held_out)

    @property
    def standing(self) -> tuple[str, float] | None:
        """To sort runs by: the headline's metric, and a number that is larger for what is better."""
        value = self.value
        return None if self.headline is None or value is None else (self.headline.metric, self.headline.goodness(value))

    @property
    def told(self) -> str:
        """Its headline for a column of a list; empty where it was not evaluated."""
        return "" if self.headline is None else self.headline.brief(self.held_out)


@dataclass(frozen=True, slots=True)
class ComparisonSummary:
    """What `posttrain sweep` made, at a glance: ``num_finished`` of ``num_cells`` are done; ``runs`` are those there.

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


def list_runs(root: str | Path, *, with_cells: bool = False, newest: int | None = None) -> list[RunSummary]:
    """The runs under ``root``, oldest first; none where there is no such folder.

    Args:
        with_cells: those of comparisons as well.
        newest: only so many, those that were started last; the others are hardly looked at.
    """
    names = every_run_name(root) if with_cells else run_names(root)
    if newest is not None and len(names) > newest:
        read = {name: RunDirectory(Path(root) / name).read_environment for name in names}
        none: dict[str, Any] = {}
        started = {name: _read_or(read[name], none, []).get("created", "") for name in names}
        names = sorted(names, key=lambda name: (started[name], name))[-newest:]
    summaries = [replace(summarize_run(Path(root) / name), name=name) for name in names]
    return sorted(summaries, key=lambda run: (run.created or "", run.name))


def summarize_comparison(root: str | Path, name: str) -> ComparisonSummary:
    """One sweep at a glance. A plan that cannot be read makes it ``damaged``."""
    folder = Path(root) / name
    runs = tuple(replace(summarize_run(Path(root) / cell), name=cell) for cell in cell_names(root, name))
    methods: tuple[str, ...] = ()
    num_seeds, problem, plan = 0, None, folder / PLAN
    try:
        content = read_yaml(plan)
        methods, num_seeds = tuple(map(str, dict(content["rows"]))), int(content["seeds"])
        if len(methods) * num_seeds > _MAX_CELLS:
            raise ValueError("more cells than a comparison can have")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, DataError) as error:
        methods, num_seeds, problem = (), 0, f"{plan}: damaged ({type(error).__name__})"
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
    recipe: RecipeFacts = _read_or(lambda: recipe_facts(directory.folder), RecipeFacts(), problems)
    environment: dict[str, Any] = _read_or(directory.read_environment, {}, problems)
    status = _read_or(directory.read_status, None, problems)
    log = MetricsLog(directory.folder / "metrics.jsonl")
    last = _read_or(lambda: log.last(lambda row: not is_evaluation(row)), None, problems)
    tags: tuple[str, ...] = _read_or(lambda: read_tags(directory.folder), (), problems)
    state = _state(status, is_live(directory.folder))
    return RunSummary(
        name=directory.folder.name,
        path=directory.folder,
        state="damaged" if problems else state,
        step=status.step if status else 0,
        steps=status.steps if status else recipe.steps,
        recipe=environment.get("recipe", "?")[:_MAX_CHARACTERS],
        objective=recipe.objective,
        model=recipe.model,
        metrics=last.metrics if last is not None else {},
        headline=status.headline if status else None,
        held_out=status.held_out if status else {},
        disk_bytes=disk_bytes(directory.folder),
        created=environment.get("created"),
        problem="; ".join(problems) or None,
        updated=status.updated if status else None,
        tags=tags,
    )


def show_run(path: str | Path) -> dict[str, Any]:
    """Everything about one run as plain data.

    Keys: the fields of ``RunSummary``, ``recipe_text`` (YAML), ``environment`` (``env.json``),
    ``status`` (``status.json``), ``disk`` (bytes by kind), ``checkpoints``
    (step, path, disk_bytes, best), ``first_metrics``, ``evaluations`` (name, step, and results),
    ``rollouts`` (number by step), ``evaluation_rollouts`` (number by "name at step").
    """
    directory = RunDirectory(path)
    problems: list[str] = []
    environment: dict[str, Any] = _read_or(directory.read_environment, {}, problems)
    status = _read_or(directory.read_status, None, problems)
    rows: list[MetricsRow] = _read_or(MetricsLog(directory.folder / "metrics.jsonl").read, [], problems)
    trained = [row for row in rows if not is_evaluation(row)]
    nothing: dict[str, Any] = {"rollouts": {}, "evaluation_rollouts": {}}
    rollouts = _read_or(lambda: _rollout_counts(directory.folder / "rollouts.db"), nothing, problems)
    steps: list[dict[str, Any]] = _read_or(lambda: _checkpoints(directory.folder / "checkpoints"), [], problems)
    summary = summarize_run(path)
    stored = sum(item.stat().st_size for item in directory.folder.glob("rollouts.db*") if item.is_file())
    disk = {"checkpoints": disk_bytes(directory.folder / "checkpoints"), "rollouts": stored}
    all_problems = list(dict.fromkeys([*([summary.problem] if summary.problem else []), *problems]))
    text = partial(read_text, directory.recipe_path)
    new = [problem for problem in all_problems[1:] if problem not in all_problems[0]]
    if all_problems:
        summary = replace(summary, state="damaged", problem="; ".join([all_problems[0], *new]))
    return asdict(summary) | {
        "path": str(directory.folder),
        "recipe_text": _read_or(text, "", []),
        "environment": environment,
        "status": asdict(status) if status else {},
        "disk": disk | {"other": summary.disk_bytes - sum(disk.values())},
        "checkpoints": steps,
        "first_metrics": trained[0].metrics if trained else {},
        "evaluations": evaluations(rows),
        **rollouts,
    }


def evaluations(rows: list[MetricsRow]) -> list[dict[str, Any]]:
    """Held-out evaluations in the order in which they were done: ``name``, ``step`` and their results."""
    told = [({"name": point.name, "step": point.step}, point.results) for point in evaluation_points(rows)]
    return [about | results | about for about, results in told]  # whatever a result is called


def disk_bytes(folder: str | Path) -> int:
    """Bytes in all files under a folder; links count as nothing. Files that vanish meanwhile are left out."""
    total, folders = 0, [os.fspath(folder)]
    while folders:
        try:
            with os.scandir(folders.pop()) as items:
                for item in items:
                    if item.is_dir(follow_symlinks=False):
                        folders.append(item.path)
                    elif item.is_file(follow_symlinks=False):
                        total += item.stat(follow_symlinks=False).st_size
        except OSError:  # a live run prunes its checkpoints; or nobody may look into it
            continue
    return total


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


# Which runs, and in which order: filters and sorting of what ``listing`` found.

STATES = ("running", "finished", "failed", "interrupted", "dead", "damaged")
# name: (what is sorted by, whether the largest comes first)
SORT_KEYS: dict[str, tuple[Callable[[RunSummary], Any], bool]] = {
    "created": (lambda run: run.created, False),
    "updated": (lambda run: run.updated, True),
    "name": (lambda run: run.name, False),
    "state": (lambda run: run.state, False),
    "step": (lambda run: run.step, True),
    "accuracy": (lambda run: run.value if run.standing is not None and run.standing[0] == "accuracy" else None, True),
    "headline": (lambda run: run.standing, True),
    "size": (lambda run: run.disk_bytes, True),
}


@dataclass(frozen=True, slots=True)
class Filter:
    """Conditions of a run: in one of ``states``, with all of ``tags``, and a name that fits one of ``names``."""

    states: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self != Filter()

    def __call__(self, run: RunSummary) -> bool:
        """Whether the run passes."""
        return (
            (not self.states or run.state in self.states)
            and set(self.tags) <= set(run.tags)
            and (not self.names or any(fits(run.name, pattern) for pattern in self.names))
        )


def check_states(states: Sequence[str]) -> tuple[str, ...]:
    """The states, if there are such.

    Raises:
        UsageError: with a suggestion.
    """
    for state in states:
        if state not in STATES:
            raise UsageError(
                f"--state: there is no state {state!r}.{suggest(state, STATES)} States: {', '.join(STATES)}"
            )
    return tuple(states)


def sort_runs(runs: Sequence[RunSummary], key: str) -> list[RunSummary]:
    """Sorted by a key of ``SORT_KEYS``, or by a metric of the last step, largest first. Runs without it come last.

    Raises:
        UsageError: neither; the message lists both.
    """
    if key in SORT_KEYS:
        value, largest_first = SORT_KEYS[key]
    else:
        metrics = sorted({name for run in runs for name in run.metrics})
        if key not in metrics:
            known = list(dict.fromkeys([*SORT_KEYS, *metrics]))
            raise UsageError(f"--sort: there is no {key!r} to sort by.{suggest(key, known)} Known: {', '.join(known)}")
        value, largest_first = (lambda run: run.metrics.get(key)), True
    without = [run for run in runs if value(run) is None]
    return sorted((run for run in runs if run not in without), key=value, reverse=largest_first) + without


# Runs compared: the keys in which their recipes differ, and their results.


ABSENT = "not there"  # in place of the value of a key that a recipe does not have


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
    keys = [key for key in dict.fromkeys(key for recipe in recipes for key in recipe) if key != "description"]
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
