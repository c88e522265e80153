"""Read-only queries over run directories: lists, summaries, comparisons and run families.

A recipe may refer to other runs by path (``model.name: runs/demo-sft``, ``teacher.name``, ``rewards[].run``, or a
checkpoint inside). If a recipe value leads into a run in the same runs folder, that run is a parent.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from posttrain.errors import DataError, UsageError
from posttrain.recipes.overriding import flatten
from posttrain.recipes.sections import EMBEDDED_MODELS
from posttrain.registry import suggest
from posttrain.runs.directory import RunDirectory, is_live, run_names
from posttrain.runs.paths import every_run_name, fits, trial_names
from posttrain.store.checkpoint_files import STEP_FOLDER, best_step, checkpoint_steps, newest_state
from posttrain.store.metric_names import metric_of
from posttrain.store.metrics import MetricsLog, MetricsRow, evaluation_points, is_evaluation, learning_warnings
from posttrain.store.rollouts import RolloutStore

RunState = Literal["running", "finished", "failed", "interrupted", "stopped", "dead", "damaged"]
T = TypeVar("T")
ABSENT = "absent"  # replaces the value if a recipe lacks the key
_MAX_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Summary of one run.

    ``state``: ``running`` requires a process holding the run's lock. If the status is ``running`` without a lock, the
    run was killed and is ``dead``. ``damaged``: files are unreadable, see ``problem``. ``metrics``: from the last
    training step. ``primary_metric``: ranks the run; ``held_out``: its numbers in the last held-out evaluation.
    ``disk_bytes``: directory size. ``created``: first start (ISO 8601, UTC). ``name``: relative to the runs folder.
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
    primary_metric: str | None = None
    held_out: dict[str, float] = field(default_factory=dict)
    disk_bytes: int = 0
    created: str | None = None
    problem: str | None = None

    @property
    def result(self) -> str:
        """The primary metric as text; empty if never evaluated."""
        metric = metric_of(self.primary_metric or "")
        return metric.describe(metric.brief(self.held_out))

    @property
    def goodness(self) -> tuple[str, float] | None:
        """Primary metric, and a number that increases with quality; None if never evaluated."""
        metric = metric_of(self.primary_metric or "")
        value = metric.value(self.held_out)
        if value is None:
            return None
        return (metric.name, metric.goodness(value))


@dataclass(frozen=True, slots=True)
class SweepSummary:
    """Summary of one folder created by ``posttrain sweep``."""

    name: str
    path: Path
    is_running: bool
    num_runs: int
    num_finished: int
    disk_bytes: int


# Sort orders. Runs without a value come last.
SORT_KEYS: dict[str, tuple[Callable[[RunSummary], Any], bool]] = {
    "created": (lambda run: run.created, False),
    "name": (lambda run: run.name, False),
    "metric": (lambda run: run.goodness, True),
    "size": (lambda run: run.disk_bytes, True),
}


def list_runs(
    root: str | Path, *, patterns: Sequence[str] = (), states: Sequence[str] = (), sort: str = "created"
) -> list[RunSummary]:
    """List runs under ``root``, oldest first; empty if the folder is missing.

    Args:
        patterns: shell patterns for run names; ``sweep-x/cells/*`` matches the runs of a sweep.
        states: run states to include.
        sort: a key of ``SORT_KEYS``.

    Raises:
        UsageError: unknown state or sort key.
    """
    for state in states:
        _refuse_unknown("--state", state, get_args(RunState))
    _refuse_unknown("--sort", sort, list(SORT_KEYS))
    names = run_names(root)
    if patterns:
        names = [name for name in every_run_name(root) if any(fits(name, pattern) for pattern in patterns)]
    runs = [summarize_run(Path(root) / name, name) for name in names]
    if states:
        runs = [run for run in runs if run.state in states]
    value, largest_first = SORT_KEYS[sort]
    ranked = [run for run in runs if value(run) is not None]
    unranked = [run for run in runs if value(run) is None]
    return sorted(ranked, key=value, reverse=largest_first) + unranked


def _refuse_unknown(option: str, given: str, known: Sequence[str]) -> None:
    if given not in known:
        raise UsageError(f"{option}: unknown value {given!r}.{suggest(given, known)} Known: {', '.join(known)}")


def summarize_sweep(root: str | Path, name: str) -> SweepSummary:
    """Summarize one sweep."""
    folder = Path(root) / name
    states = [summarize_run(Path(root) / trial).state for trial in trial_names(root, name)]
    return SweepSummary(name, folder, is_live(folder), len(states), states.count("finished"), disk_bytes(folder))


def summarize_run(path: str | Path, name: str | None = None) -> RunSummary:
    """Summarize one run. If anything is unreadable, it is ``damaged``, with the reason."""
    directory = RunDirectory(path)
    problems: list[str] = []
    recipe: dict[str, Any] = _read_or(directory.read_recipe, {}, problems)
    environment: dict[str, Any] = _read_or(directory.read_environment, {}, problems)
    status = _read_or(directory.read_status, None, problems)
    log = MetricsLog(directory.folder / "metrics.jsonl")
    last = _read_or(lambda: log.last(lambda row: not is_evaluation(row)), None, problems)
    steps = _section(recipe, "train").get("steps") or 0  # null if epochs are counted; the status has the number
    if not isinstance(steps, int):
        problems.append(f"{directory.recipe_path}: train.steps is not a whole number")
        steps = 0
    state: RunState
    if problems:
        state = "damaged"
    elif is_live(directory.folder):
        state = "running"
    elif status is None or status.state == "running":
        state = "dead"
    else:
        state = status.state
    activations = _section(recipe, "activations")  # sparse autoencoder
    if "folder" in activations:
        model = str(activations["folder"])
    else:
        model = _name_at(activations or recipe, "model")
    if "objective" in recipe:
        objective = _name_at(recipe, "objective")
    else:
        objective = _name_at(recipe, "dictionary")
    summary = RunSummary(
        name=name or directory.folder.name,
        path=directory.folder,
        state=state,
        step=0,
        steps=steps,
        recipe=environment.get("recipe", "?")[:_MAX_CHARACTERS],
        objective=objective[:_MAX_CHARACTERS],
        model=model[:_MAX_CHARACTERS],
        disk_bytes=disk_bytes(directory.folder),
        created=environment.get("created"),
        problem="; ".join(problems) or None,
    )
    if last is not None:
        summary = replace(summary, metrics=last.metrics)
    if status is not None:
        summary = replace(
            summary,
            step=status.step,
            steps=status.steps,
            primary_metric=status.primary_metric,
            held_out=status.held_out,
        )
    return summary


def show_run(path: str | Path) -> dict[str, object]:
    """Collect everything about one run as plain data.

    Keys: the fields of ``RunSummary``, ``message`` (failure reason), ``checkpoints`` (step, disk_bytes, best),
    ``warnings`` (why it cannot learn), ``evaluations`` (name, step, results), ``rollouts`` (count by step).
    """
    directory = RunDirectory(path)
    summary = summarize_run(path)
    unread: list[str] = []
    rows: list[MetricsRow] = _read_or(MetricsLog(directory.folder / "metrics.jsonl").read, [], unread)
    status = _read_or(directory.read_status, None, [])
    rollouts: dict[int, int] = {}
    database = directory.folder / "rollouts.db"
    if database.is_file():
        rollouts = _read_or(lambda: RolloutStore(database, read_only=True).count_training(), {}, unread)
    saved: list[dict[str, int | bool]] = _read_or(lambda: _checkpoints(directory.folder / "checkpoints"), [], unread)
    problems = []
    if summary.problem:
        problems.append(summary.problem)
    problems += [problem for problem in unread if problem not in (summary.problem or "")]
    state = summary.state
    if problems:
        state = "damaged"
    message = None
    if status is not None:
        message = status.message
    return asdict(summary) | {
        "path": str(directory.folder),
        "state": state,
        "problem": "; ".join(problems) or None,
        "message": message,
        "checkpoints": saved,
        "warnings": list(learning_warnings(rows).values()),
        "evaluations": evaluations(rows),
        "rollouts": rollouts,
    }


def evaluations(rows: list[MetricsRow]) -> list[dict[str, Any]]:
    """List held-out evaluations in chronological order: ``name``, ``step`` and results."""
    found = []
    for point in evaluation_points(rows):
        about = {"name": point.name, "step": point.step}
        found.append(about | point.results | about)  # name and step take precedence over results
    return found


def disk_bytes(folder: str | Path) -> int:
    """Sum file sizes under a folder. Links count as zero, and files that vanish meanwhile are skipped."""
    total = 0
    folders = [os.fspath(folder)]
    while folders:
        try:
            with os.scandir(folders.pop()) as items:
                for item in items:
                    if item.is_dir(follow_symlinks=False):
                        folders.append(item.path)
                    elif item.is_file(follow_symlinks=False):
                        total += item.stat(follow_symlinks=False).st_size
        except OSError:  # a live run may delete checkpoints, or the folder is unreadable
            continue
    return total


def _read_or(read: Callable[[], T], instead: T, problems: list[str]) -> T:
    try:
        return read()
    except DataError as error:
        problems.append(str(error))
        return instead


def _section(recipe: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = recipe.get(key)
    if isinstance(value, Mapping):
        return value
    return {}


def _name_at(recipe: Mapping[str, object], key: str) -> str:
    value = recipe.get(key)
    if isinstance(value, str):
        return value
    return str(_section(recipe, key).get("name", "?"))


def _checkpoints(folder: Path) -> list[dict[str, int | bool]]:
    best = best_step(folder)
    return [
        {"step": step, "disk_bytes": disk_bytes(folder / f"step-{step:06d}"), "best": step == best}
        for step in checkpoint_steps(folder)
    ]


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Several runs compared. Every list has one entry per run, in the given order.

    ``last``: last results by evaluation, with their ``step``; None if a run lacks this evaluation. ``seconds``: time
    in steps and evaluations. ``recipe``: dotted keys whose values differ (``ABSENT`` for a missing key).
    ``num_equal_keys``: number of keys with equal values in all runs.
    """

    runs: list[RunSummary]
    last: dict[str, list[dict[str, Any] | None]]
    seconds: list[float]
    recipe: dict[str, list[object]]
    num_equal_keys: int


def put_side_by_side(folders: Sequence[str | Path]) -> SideBySide:
    """Load runs and find their differences.

    Raises:
        DataError: a record is damaged.
    """
    directories = [RunDirectory(folder) for folder in folders]
    values = _values_by_key([flatten(directory.read_recipe()) for directory in directories])
    differing = {key: row for key, row in values.items() if any(value != row[0] for value in row)}
    rows = [MetricsLog(directory.folder / "metrics.jsonl").read() for directory in directories]
    last_by_name = [{item["name"]: item for item in evaluations(own)} for own in rows]
    names = dict.fromkeys(name for own in last_by_name for name in own)
    for directory in directories:
        directory.read_status()  # raises if damaged
    return SideBySide(
        runs=[summarize_run(directory.folder) for directory in directories],
        last={name: [own.get(name) for own in last_by_name] for name in names},
        seconds=[seconds_of(own) for own in rows],
        recipe=differing,
        num_equal_keys=len(values) - len(differing),
    )


def seconds_of(rows: Iterable[MetricsRow]) -> float:
    """Sum the seconds spent in steps and evaluations over all starts."""
    return sum(row.timing.get(name, 0.0) for row in rows for name in ("step_seconds", "evaluation_seconds"))


def _values_by_key(recipes: Sequence[Mapping[str, object]]) -> dict[str, list[object]]:
    """Collect values for each dotted key across recipes, except the description.

    Sections are not keys. A section appears as an empty list or mapping if other recipes have values in it.
    """
    keys = dict.fromkeys(key for recipe in recipes for key in recipe if key != "description")
    sections = set()
    for key in keys:
        sections.add(key.rpartition(".")[0])
        if "." in key:
            sections.add(key.partition(".")[0])
    return {key: [recipe.get(key, ABSENT) for recipe in recipes] for key in keys if key not in sections}


# Maps the section of the referring key to the parent's role.
ROLES = {"model": "start", "teacher": "teacher", "rewards": "reward", "task": "data", "eval": "evaluation"}
_NAMES = ("model.name", "teacher.name")  # their values may also be `tiny` or hub names


@dataclass(frozen=True, slots=True)
class Link:
    """A dependency between two runs. Names are relative to the runs folder.

    ``step``: the parent's checkpoint, if known. ``is_there``: the parent still exists.
    """

    child: str
    role: str
    parent: str
    step: int | None = None
    is_there: bool = True


def find_links(root: str | Path) -> list[Link]:
    """Find all links from runs under ``root``, including sweeps, to parents in the same folder.

    Runs with unreadable recipes have no links.
    """
    folder = Path(root)
    links: list[Link] = []
    known = every_run_name(folder)
    for name in sorted(known):
        try:
            values = flatten(RunDirectory(folder / name).read_recipe())
        except DataError:
            continue
        for key, value in values.items():
            links += _find_parent(folder, known, name, key, value)
    return links


def steps_in_use(root: str | Path, parent: str, links: Iterable[Link]) -> dict[int, str]:
    """Map checkpoints of ``parent`` in use by other runs to the name of one such run.

    A child that names the entire run uses its best checkpoint, else its newest, unless the child's checkpoints record
    which one was used.
    """
    folder = Path(root) / parent / "checkpoints"
    default = best_step(folder) or max(checkpoint_steps(folder), default=None)
    used: dict[int, str] = {}
    for link in links:
        step = link.step
        if step is None:
            step = default
        if link.parent == parent and step is not None:
            used.setdefault(step, link.child)
    return used


def _find_parent(root: Path, known: Sequence[str], child: str, key: str, value: object) -> Iterator[Link]:
    is_run = key.endswith(".run")
    is_name = key in _NAMES
    if not isinstance(value, str) or (is_name and value in ("self", *EMBEDDED_MODELS)):
        return
    if not (is_run or is_name or "/" in value):
        return
    real = root.resolve()
    bases = [Path.cwd(), *real.parents]  # base folders for relative paths
    if is_run:
        bases.append(real)
    for base in bases:
        path = Path(os.path.normpath(base / os.path.expanduser(value)))
        if path == real or not path.is_relative_to(real):
            continue
        parts = path.relative_to(real).parts
        end = _length_of_name(parts, known)
        parent = "/".join(parts[:end])
        if parent not in ("", child) and (parent in known or is_run or is_name):
            section = key.partition(".")[0]
            step = _step_of(root, child, parent, section, value, parts[end:])
            yield Link(child, ROLES.get(section, key), parent, step, parent in known)
        return


def _length_of_name(parts: Sequence[str], known: Sequence[str]) -> int:
    """Count the path parts that form a run name. For deleted runs, use the parts before ``checkpoints``."""
    for end in range(1, len(parts) + 1):
        if "/".join(parts[:end]) in known:
            return end
    if "checkpoints" in parts:
        return parts.index("checkpoints")
    return len(parts)


def _step_of(root: Path, child: str, parent: str, section: str, value: str, rest: Sequence[str]) -> int | None:
    """Find the parent's checkpoint from the path, else from the child's newest checkpoint."""
    if len(rest) > 1 and rest[0] == "checkpoints":
        match = STEP_FOLDER.fullmatch(rest[1])
        if match:
            return int(match[1])
        return best_step(root / parent / "checkpoints")
    _, state = newest_state(root / child / "checkpoints") or (0, {})
    recorded = state.get(section)
    if isinstance(recorded, dict):
        recorded = recorded.get(value)
    match = re.fullmatch(STEP_FOLDER, str(recorded))
    if not match:
        return None
    return int(match[1])
