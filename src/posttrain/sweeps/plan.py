"""The plan of a sweep: trials, each a process of its own, and what each needs before it.

A trial is an ordinary run or an ordinary evaluation in a folder of its own: it can be looked at, or repeated by hand.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from posttrain.errors import DataError, PosttrainError, RecipeError, RunConflict, UsageError
from posttrain.recipes.recipe import Recipe
from posttrain.recipes.sections import Word
from posttrain.runs.directory import RunDirectory, RunStatus, refuse_live_folder, wait_for_end
from posttrain.store.durable import refuse_links, storage_errors
from posttrain.store.metrics import MAX_BYTES, MetricsLog, MetricsRow, evaluation_points
from posttrain.store.reading import read_json, read_record
from posttrain.strict_yaml import write_yaml
from posttrain.sweeps.file import AnswersSection, BestOfN, HeadToHead

State = Literal["new", "unfinished", "finished"]
ITEMS, RESULTS = "items.jsonl", "results.json"  # of an evaluation; the latter is written last
PLAN_FILE = "sweep.yaml"
NUM_CONFLICTS_SHOWN = 3
_DAMAGE = (FileNotFoundError, KeyError, TypeError, AttributeError, ValueError, RecursionError)


@dataclass(frozen=True, kw_only=True)
class Trial(ABC):
    """One process of a sweep.

    ``row``: the name in the sweep's file. ``needs``: names of the trials whose files it reads.
    """

    name: str
    row: str
    seed: int
    folder: Path
    needs: tuple[str, ...] = ()

    @property
    @abstractmethod
    def state(self) -> State: ...

    @property
    @abstractmethod
    def settings(self) -> tuple[Path, str]:
        """The text of what makes it, and the file next to its folder that keeps it."""

    @abstractmethod
    def words(self, resume: bool) -> list[str]:
        """The words after ``posttrain`` that make it, or continue it."""

    @abstractmethod
    def conflict(self) -> str | None:
        """The reason why what lies in its folder may not be continued, if there is one."""

    @property
    def is_start(self) -> bool:
        """Made before all others, with all cores; without it none of them is begun."""
        return self.row == "start"

    @property
    def status(self) -> RunStatus | None:
        """The status of a run that has begun; evaluations have none."""
        return RunDirectory(self.folder).read_status()

    @property
    def result(self) -> str:
        """The primary metric of a run at its last evaluation, as text; empty where there is none."""
        status = self.status
        if status is None or status.headline is None:
            return ""
        return status.headline.tell(status.headline.only(status.held_out))

    def complete(self) -> str | None:
        """Do what remains when its process has ended well; returns what went wrong, if anything did."""
        return None


@dataclass(frozen=True, kw_only=True)
class Training(Trial):
    """A run. Its resolved recipe makes it."""

    recipe: Recipe

    def __post_init__(self) -> None:
        if self.recipe.train.steps is None:
            raise RecipeError(
                f"{self.name}: train.passes: what follows a trial names its last step beforehand; give train.steps"
            )
        from posttrain.train.checks import words_of

        try:  # before the first trial is trained, not when this one's turn has come
            words_of(self.recipe.resolve())
        except UsageError as error:
            raise RecipeError(f"{self.name}: {error}") from None

    @property
    def weights(self) -> str:
        """The weights that it ends with."""
        return str(self.folder / "checkpoints" / f"step-{self.recipe.train.steps:06d}")

    def metrics(self) -> list[MetricsRow]:
        """The recorded metrics."""
        return MetricsLog(self.folder / "metrics.jsonl").read()

    @property
    def state(self) -> State:
        if not RunDirectory(self.folder).recipe_path.is_file():
            return "new"
        status = self.status
        return "finished" if status is not None and status.state == "finished" else "unfinished"

    @property
    def settings(self) -> tuple[Path, str]:
        return self.folder.with_name(f"{self.name}.yaml"), self.recipe.to_yaml()

    def words(self, resume: bool) -> list[str]:
        words = ["train", str(self.settings[0]), "--runs-dir", str(self.folder.parent), "--run", self.name, "--quiet"]
        return [*words, "--resume"] if resume else words

    def conflict(self) -> str | None:
        changed = RunDirectory(self.folder).changed_keys(self.recipe)
        shown = ", ".join(f"{key} ({old!r} there, {new!r} now)" for key, (old, new) in sorted(changed.items()))
        if changed:
            return f"{self.folder}: made by another recipe; it differs in {shown}"
        return self._damage() if self.state == "finished" else None

    def _damage(self) -> str | None:
        """Where the metrics of a finished run are not all that it recorded, or another run's.

        Its last checkpoint has the number of lines, and its status the results of the last evaluation.
        """
        path, rows, status = self.folder / "metrics.jsonl", self.metrics(), self.status
        try:
            expected = json.loads(read_record(Path(self.weights) / "state.json"))["records"]["metrics"]  # may have NaN
        except _DAMAGE:  # pruned, or of an earlier version
            expected = len(rows)
        if len(rows) != expected:
            return f"{path}: {len(rows)} lines, and {expected} stood there when the run ended"
        if status is None or status.evaluation is None:
            return None
        points = [point.results for point in evaluation_points(rows) if point.name == status.evaluation]
        numbers = {key: value for key, value in status.held_out.items() if value == value}  # NaN equals no other NaN
        wrong = [key for key, value in numbers.items() if not points or points[-1].get(key) != value]
        return f"{path}: its last evaluation is not that of status.json; they differ in {wrong[0]}" if wrong else None


@dataclass(frozen=True, kw_only=True)
class Evaluation(Trial):
    """Answers of some weights, scored. ``command``, the words after ``posttrain``, makes it.

    ``section``: the key of the sweep's file that asks for it.
    """

    command: tuple[str, ...]
    section: str

    @property
    def last_file(self) -> Path:
        """The file that is written last of all."""
        return self.folder / RESULTS

    @property
    def state(self) -> State:
        return "new" if not self.folder.exists() else "finished" if self.last_file.is_file() else "unfinished"

    @property
    def settings(self) -> tuple[Path, str]:
        return self.folder.with_name(f"{self.folder.name}.command.json"), json.dumps(self.command, indent=1) + "\n"

    def words(self, resume: bool) -> list[str]:
        return list(self.command)

    def conflict(self) -> str | None:
        try:
            before = read_json(self.settings[0])
        except (FileNotFoundError, DataError):
            before = None
        if before != list(self.command):
            return f"{self.folder}: made with other settings of {self.section}"
        return self._damage() if self.last_file.name == RESULTS and self.state == "finished" else None

    def _damage(self) -> str | None:
        """Where the files of a finished evaluation do not belong together, or to another evaluation."""
        path = self.folder / RESULTS
        try:
            content = json.loads(read_record(path))  # of what does not exist it has NaN
            num_items = read_record(self.folder / ITEMS, MAX_BYTES).count(b"\n")
            stored = {str(key): value for key, value in content.get("settings", {}).items()}
            if content["results"]["n"] != num_items:
                return f"{path}: of {content['results']['n']} items, and {ITEMS} has {num_items}"
        except _DAMAGE as error:
            return f"{path}: damaged ({type(error).__name__}: {error})"
        wanted = dict(zip(self.command, self.command[1:], strict=False))
        there = {"evaluate": stored.get("a", stored.get("checkpoint")), "--best-of": stored.get("best_of")}
        for word, value in (there | {"--seed": stored.get("seed")}).items():
            if value is not None and word in wanted and Path(str(value)).parts[-3:] != Path(wanted[word]).parts[-3:]:
                return f"{path}: of {value}, where {wanted[word]} was asked for"
        return None


@dataclass(frozen=True, kw_only=True)
class Labelling(Evaluation):
    """Answers to at most ``n`` problems of a task, which become ``target``, a file of labelled steps."""

    target: Path
    task: Word
    n: int
    template: Word

    @property
    def last_file(self) -> Path:
        return self.target

    def complete(self) -> str | None:
        from posttrain.render.template import build_template
        from posttrain.sweeps.labelling import write_labelled
        from posttrain.tasks.base import build_task

        try:
            task, template = build_task(self.task, "labelled.task"), build_template(self.template)
            write_labelled(self.folder / ITEMS, task, self.n, template, self.target)
        except PosttrainError as error:
            return str(error)
        return None


@dataclass(frozen=True)
class Row:
    """A row of the sweep: its resolved recipe with seed 0, where it is from, and what it changes.

    ``differs``: dotted keys outside of the method in which it differs from the base, as (base, here). ``needs``: the
    names of rows, or ``labelled``.
    """

    name: str
    recipe: Recipe
    source: str
    differs: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A checked sweep: its trials in an order in which none stands before what it needs.

    ``base``: the recipe that the rows share, if there is one. ``start_source``: where the initial model is from.
    """

    folder: Path
    description: str
    rows: list[Row]
    trials: list[Trial]
    num_seeds: int
    resolved: dict[str, Any]
    base: Recipe | None
    start_source: str
    best_of_n: BestOfN | None
    head_to_head: HeadToHead | None

    def __post_init__(self) -> None:
        twice = [name for name, count in Counter(trial.name for trial in self.trials).items() if count > 1]
        if twice:
            raise RecipeError(f"sweep: two trials would be called {twice[0]}; give their rows other names")

    @property
    def start(self) -> Training | None:
        """The run whose weights the others begin with, trained first and once."""
        return next((t for t in self.trials if t.is_start and isinstance(t, Training)), None)

    @property
    def trainings(self) -> list[Training]:
        """The runs of the rows, seed by seed, without the start."""
        return [trial for trial in self.trials if isinstance(trial, Training) and not trial.is_start]

    @property
    def scorers(self) -> list[Training]:
        """The runs that train reward models."""
        return [trial for trial in self.trainings if trial.recipe.trains_scorer]

    @property
    def policies(self) -> list[Training]:
        """The runs that train policies."""
        return [trial for trial in self.trainings if not trial.recipe.trains_scorer]

    def evaluations(self, section: str) -> list[Evaluation]:
        """The evaluations that a section of the file asks for, seed by seed."""
        return [trial for trial in self.trials if isinstance(trial, Evaluation) and trial.section == section]

    def to_yaml(self) -> str:
        """The file with everything resolved; it makes the same sweep again."""
        return write_yaml(self.resolved)

    def environment(self) -> dict[str, Any]:
        """Versions and hardware of the first run that was started, at its newest start."""
        for run in (RunDirectory(trial.folder) for trial in self.trainings):
            if starts := run.read_environment().get("starts", []):
                return {
                    key: starts[-1][key] for key in ("started", "versions", "hardware", "git") if starts[-1].get(key)
                }
        return {}


def drawing_words(section: AnswersSection) -> list[str]:
    """The options of ``posttrain evaluate`` for the task and for how answers are sampled, but for their seed."""
    words = ["--task", section.task.name]
    for key, value in section.task.options.items():
        words += [f"--task.{key}", json.dumps(value)]
    words += ["--n", str(section.n), "--samples", str(section.samples), "--max-tokens", str(section.max_tokens)]
    return [*words, "--temperature", f"{section.temperature:g}"]


# Where the trials of a sweep stand, and whether its folder may be continued.


def read_states(plan: Plan) -> dict[str, State]:
    """The state of each trial, by name.

    Raises:
        RunConflict: some belong to another recipe, or to a process that does not end, or depend on weights that are
            gone; the message says which.
    """
    working = wait_for_end(trial.folder for trial in plan.trials)
    states = {trial.name: trial.state for trial in plan.trials}
    begun = [trial for trial in plan.trials if states[trial.name] != "new"]
    conflicts = [conflict for trial in begun if (conflict := trial.conflict()) is not None]
    for trial in begun:
        lost = [name for name in trial.needs if states[name] != "finished"]
        if lost:
            conflicts.append(f"{trial.folder}: made from an earlier {lost[0]}, which is gone or not finished")
    busy = [f"{folder}: another process is working in it ({process})" for folder, process in working.items()]
    problems = busy or conflicts
    if not problems:
        return states
    more = len(problems) - NUM_CONFLICTS_SHOWN
    shown = "\n".join(problems[:NUM_CONFLICTS_SHOWN]) + (f"\nand {more} more." if more > 0 else "")
    remedy = "Wait for it or stop it; the same command then goes on. Or: " if busy else ""
    otherwise = "" if busy else ", or delete these trials first"
    raise RunConflict(
        f"{shown}\nNothing was changed. {remedy}Run the sweep under another name with --run NAME{otherwise}"
    )


def prepare_folder(plan: Plan) -> None:
    """Make the sweep's directory, or accept the one that is there.

    Raises:
        RunConflict: the folder holds something else, or a trial of another sweep; nothing was changed.
    """
    folder = plan.folder
    if folder.exists() and not folder.is_dir():
        raise RunConflict(f"{folder}: this is a file, not a folder. Choose another name with --run NAME")
    if folder.is_dir() and not (folder / PLAN_FILE).is_file():
        others = [item.name for item in folder.iterdir() if not item.name.startswith((".lock", ".tmp-"))]
        if others:
            raise RunConflict(
                f"{folder}: this folder holds something else than a sweep. Nothing was changed; choose another "
                "name with --run NAME"
            )
    refuse_live_folder(folder)
    read_states(plan)
    refuse_links(folder)
    with storage_errors("sweep", folder):
        for trial in plan.trials:
            trial.folder.parent.mkdir(parents=True, exist_ok=True)


def find_problems(plan: Plan, failures: Mapping[str, str]) -> dict[str, str]:
    """The reasons why trials are not finished, by name: from now (``failures``), or from an earlier attempt."""
    reasons = dict(failures)
    for trial in plan.trials:
        status = trial.status
        if status is not None and status.state == "failed":
            reasons.setdefault(trial.name, status.message or "no reason was recorded")
    return reasons
