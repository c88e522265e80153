"""A sweep: parts that are trained or sampled, each a process of its own, and what each needs before it.

A comparison and a study are two kinds of file that make such a plan. A part is an ordinary run or an ordinary
evaluation in a folder of its own: any of them can be looked at, or repeated by hand.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from posttrain.errors import DataError, PosttrainError, RecipeError, RunConflict, UsageError
from posttrain.option_types import Tokens
from posttrain.recipes.recipe import Recipe
from posttrain.recipes.sections import Section, Word
from posttrain.runs.directory import RunDirectory, RunStatus, refuse_live_folder, wait_for_end
from posttrain.store.durable import refuse_links, storage_errors
from posttrain.store.metrics import MAX_BYTES, MetricsLog, MetricsRow, evaluation_points
from posttrain.store.reading import read_json, read_record
from posttrain.strict_yaml import write_yaml

Standing = Literal["new", "unfinished", "finished"]
ITEMS, RESULTS = "items.jsonl", "results.json"  # of an evaluation; the latter is written last


@dataclass(frozen=True, kw_only=True)
class Part(ABC):
    """One process of a sweep.

    ``group`` is the key of the sweep's file that asks for it, ``method`` its name there. ``needs`` are the names of
    the parts whose files it reads. A part that stands ``alone`` is made before all others, with all cores; without
    it none of them is begun.
    """

    name: str
    group: str
    method: str
    seed: int
    folder: Path
    needs: tuple[str, ...] = ()
    alone: bool = False

    @property
    @abstractmethod
    def standing(self) -> Standing: ...

    @property
    @abstractmethod
    def settings(self) -> tuple[Path, str]:
        """The text of what makes it, and where that is kept: beside its folder."""

    @abstractmethod
    def words(self, resume: bool) -> list[str]:
        """The words behind ``posttrain`` that make it, or go on with it."""

    @abstractmethod
    def conflict(self) -> str | None:
        """Why what lies in its folder may not be continued, if anything speaks against it."""

    @property
    @abstractmethod
    def whereabouts(self) -> str:
        """How far it is, as a user reads it."""

    @property
    def status(self) -> RunStatus | None:
        """Of a run that has begun; evaluations have none."""
        return RunDirectory(self.folder).read_status()

    def metrics(self) -> list[MetricsRow]:
        """What a run has recorded; evaluations have nothing of the kind."""
        return MetricsLog(self.folder / "metrics.jsonl").read()

    def complete(self) -> str | None:
        """Do what remains to be done when its process has ended well; says what went wrong, if anything did."""
        return None


@dataclass(frozen=True, kw_only=True)
class Training(Part):
    """A run. What makes it is its resolved recipe."""

    recipe: Recipe

    def __post_init__(self) -> None:
        if self.recipe.train.steps is None:
            raise RecipeError(
                f"{self.name}: train.passes: what follows a part names its last step beforehand; give train.steps"
            )
        from posttrain.train.checks import words_of

        try:  # before the first part is trained, and not when this one's turn has come
            words_of(self.recipe.resolve())
        except UsageError as error:
            raise RecipeError(f"{self.name}: {error}") from None

    @property
    def weights(self) -> str:
        """The weights that it ends with."""
        return str(self.folder / "checkpoints" / f"step-{self.recipe.train.steps:06d}")

    @property
    def standing(self) -> Standing:
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
        return self._damage() if self.standing == "finished" else None

    def _damage(self) -> str | None:
        """Where the metrics of a finished run are not all that it recorded, or another run's.

        Its last checkpoint says how many lines there were, and its status what the last evaluation gave.
        """
        path, rows, status = self.folder / "metrics.jsonl", self.metrics(), self.status
        try:
            expected = json.loads(read_record(Path(self.weights) / "state.json"))["records"]["metrics"]  # may say NaN
        except (FileNotFoundError, KeyError, TypeError, ValueError, RecursionError):  # pruned, or of an earlier version
            expected = len(rows)
        if len(rows) != expected:
            return f"{path}: {len(rows)} lines, and {expected} stood there when the run ended"
        points = [p.results for p in evaluation_points(rows) if status is not None and p.name == status.evaluation]
        told = status.held_out if status is not None and status.evaluation is not None else {}
        numbers = {key: value for key, value in told.items() if value == value}  # NaN is no other number than NaN
        wrong = [key for key, value in numbers.items() if not points or points[-1].get(key) != value]
        return f"{path}: its last evaluation is not that of status.json; they differ in {wrong[0]}" if wrong else None

    @property
    def whereabouts(self) -> str:
        status = self.status
        return f"{self.name} at step {status.step if status is not None else 0}/{self.recipe.train.steps}"


@dataclass(frozen=True, kw_only=True)
class Sampling(Part):
    """An evaluation: answers of some weights. What makes it is ``command``, the words behind ``posttrain``."""

    command: tuple[str, ...]

    @property
    def last_file(self) -> Path:
        """What is written last of all."""
        return self.folder / RESULTS

    @property
    def standing(self) -> Standing:
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
            return f"{self.folder}: made with other settings of {self.group}"
        return self._damage() if self.last_file.name == RESULTS and self.standing == "finished" else None

    def _damage(self) -> str | None:
        """Where the files of a finished evaluation are not of one piece, or of another evaluation."""
        path = self.folder / RESULTS
        try:
            content = json.loads(read_record(path))  # of what does not exist it says NaN
            num_items = read_record(self.folder / ITEMS, MAX_BYTES).count(b"\n")
            stated = {str(key): value for key, value in content.get("settings", {}).items()}
            if content["results"]["n"] != num_items:
                return f"{path}: of {content['results']['n']} items, and {ITEMS} beside it has {num_items}"
        except (FileNotFoundError, KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            return f"{path}: damaged ({type(error).__name__}: {error})"
        asked = dict(zip(self.command, self.command[1:], strict=False))
        told = {"evaluate": stated.get("a", stated.get("checkpoint")), "--best-of": stated.get("best_of")}
        for word, value in (told | {"--seed": stated.get("seed")}).items():
            if value is not None and word in asked and Path(str(value)).parts[-3:] != Path(asked[word]).parts[-3:]:
                return f"{path}: of {value}, where {asked[word]} was asked for"
        return None

    @property
    def whereabouts(self) -> str:
        return f"{self.name} samples and scores"


@dataclass(frozen=True, kw_only=True)
class Labelling(Sampling):
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


class AskedSection(Section):
    """A task of which some models are asked, and how they answer."""

    task: Word
    n: int = Field(default=256, ge=2)
    samples: int = Field(default=1, ge=1)
    max_tokens: Tokens = 128
    temperature: float = Field(default=1.0, gt=0)

    @property
    def task_words(self) -> list[str]:
        """The options of ``posttrain evaluate`` that name the task."""
        options = ((f"--task.{key}", json.dumps(value)) for key, value in self.task.options.items())
        return ["--task", self.task.name, *(word for option in options for word in option)]

    @property
    def drawing_words(self) -> list[str]:
        """Those that say how answers are drawn, but for their seed."""
        words = ["--n", str(self.n), "--samples", str(self.samples), "--max-tokens", str(self.max_tokens)]
        return [*words, "--temperature", f"{self.temperature:g}"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A checked sweep: its parts in an order in which none stands before what it needs.

    Of the kind of sweep: what it and its parts are called, the name of its file, and whether all counted parts are
    the same amount of work, so that the time that remains can be told.
    """

    what: ClassVar[str]
    file_name: ClassVar[str]
    verb: ClassVar[str]
    parts_are: ClassVar[str]
    is_even: ClassVar[bool]

    folder: Path
    description: str
    parts: list[Part]
    num_seeds: int
    resolved: dict[str, Any]

    def __post_init__(self) -> None:
        twice = [name for name, count in Counter(part.name for part in self.parts).items() if count > 1]
        if twice:
            raise RecipeError(
                f"{self.what}: two parts would be called {twice[0]}; give what they are made by other names"
            )

    @property
    def start(self) -> Training | None:
        """What is trained first and once, whose weights the others begin with."""
        return next(iter(self.trainings("start")), None)

    def trainings(self, group: str) -> list[Training]:
        """The runs that a key of the file asks for, seed by seed."""
        return [part for part in self.parts if isinstance(part, Training) and part.group == group]

    def to_yaml(self) -> str:
        """The file with everything resolved; it makes the same sweep again."""
        return write_yaml(self.resolved)

    def environment(self) -> dict[str, Any]:
        """Versions and hardware of the first counted run that was started, as its newest start says."""
        runs = [RunDirectory(part.folder) for part in self.parts if isinstance(part, Training) and not part.alone]
        newest: dict[str, Any] = next(
            (starts[-1] for run in runs if (starts := run.read_environment().get("starts", []))), {}
        )
        return {key: newest[key] for key in ("started", "versions", "hardware", "git") if newest.get(key)}


def plan_start(folder: Path, recipe: Recipe, *, alone: bool) -> Training:
    """What is trained once, in a sweep's ``folder``, for the others to begin with."""
    seed, place = recipe.train.seed, folder / "start"
    return Training(name="start", group="start", method="start", seed=seed, folder=place, alone=alone, recipe=recipe)


def plan_run(
    folder: Path, group: str, method: str, seed: int, recipe: Recipe, role: str, needs: Sequence[str] = ()
) -> Training:
    """A run under ``cells/`` of a sweep's ``folder``, by a copy of the method's recipe. ``role``: what it is there."""
    own, name = recipe.model_copy(deep=True), f"{method}-seed{seed}"
    own.train.seed = seed
    own.description = f"{method} with seed {seed}, a {role} {folder.name}."
    place, needs = folder / "cells" / name, tuple(needs)
    return Training(name=name, group=group, method=method, seed=seed, folder=place, needs=needs, recipe=own)


# Where the parts of a sweep stand, and whether its folder may be gone on with.

NUM_CONFLICTS_SHOWN = 3


def standings(plan: Plan) -> dict[str, Standing]:
    """Where each part stands, by name.

    Raises:
        RunConflict: some belong to another recipe, or to a process that does not end, or stand on weights that are
            gone; the message says which.
    """
    working = wait_for_end(part.folder for part in plan.parts)
    standing = {part.name: part.standing for part in plan.parts}
    begun = [part for part in plan.parts if standing[part.name] != "new"]
    conflicts = [conflict for part in begun if (conflict := part.conflict()) is not None]
    for part in begun:
        lost = [name for name in part.needs if standing[name] != "finished"]
        if lost:
            conflicts.append(f"{part.folder}: made from an earlier {lost[0]}, which is gone or not finished")
    busy = [f"{folder}: another process is working in it ({process})" for folder, process in working.items()]
    _refuse(plan, busy, conflicts)
    return standing


def _refuse(plan: Plan, busy: Sequence[str], conflicts: Sequence[str]) -> None:
    """Raises RunConflict if there is any of it. Nobody is told to delete what is at work."""
    problems = busy or conflicts
    if not problems:
        return
    more = len(problems) - NUM_CONFLICTS_SHOWN
    shown = "\n".join(problems[:NUM_CONFLICTS_SHOWN]) + (f"\nand {more} more." if more > 0 else "")
    remedy = "Wait for it or stop it; the same command then goes on. Or: " if busy else ""
    otherwise = "" if busy else f", or delete these {plan.parts_are} first"
    raise RunConflict(
        f"{shown}\nNothing was changed. {remedy}{plan.verb} under another name with --run NAME{otherwise}"
    )


def prepare_folder(plan: Plan) -> None:
    """Make the sweep's directory, or accept the one that is there.

    Raises:
        RunConflict: the folder holds something else, or a part of another sweep; nothing was changed.
    """
    folder = plan.folder
    if folder.exists() and not folder.is_dir():
        raise RunConflict(f"{folder}: this is a file, not a folder. Choose another name with --run NAME")
    if folder.is_dir() and not (folder / plan.file_name).is_file():
        others = [item.name for item in folder.iterdir() if not item.name.startswith((".lock", ".tmp-"))]
        if others:
            raise RunConflict(
                f"{folder}: this folder holds something else than a {plan.what}. Nothing was changed; choose another "
                "name with --run NAME"
            )
    refuse_live_folder(folder)
    standings(plan)
    refuse_links(folder)
    with storage_errors(plan.what, folder):
        for part in plan.parts:
            part.folder.parent.mkdir(parents=True, exist_ok=True)


def problems(plan: Plan, failures: Mapping[str, str]) -> dict[str, str]:
    """Why parts are not finished, by name: from now (``failures``), or from an earlier attempt."""
    told = dict(failures)
    for part in plan.parts:
        status = part.status
        if status is not None and status.state == "failed":
            told.setdefault(part.name, status.message or "no reason was recorded")
    return told
