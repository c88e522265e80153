"""Starting, continuing and ending a run in its directory; the training itself is ``training/loop.py``."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from posttrain.errors import DataError, MissingExtra, RunConflict, StorageError, UsageError
from posttrain.recipes.recipe import Recipe
from posttrain.registry import suggest
from posttrain.runs.children import stop_on_signals
from posttrain.runs.directory import (
    RunDirectory,
    RunRecipe,
    RunStatus,
    State,
    check_run_name,
    list_names,
    lock_run,
    name_of_recipe,
    new_status,
    refuse_live_folder,
    run_names,
)
from posttrain.runs.processes import check_scale, join_processes, task_of
from posttrain.runs.resume import claim_to_resume, describe_changes, hard_changes
from posttrain.store.checkpoint_files import checkpoint_steps, clean_leftovers
from posttrain.store.durable import remove_leftovers, storage_errors
from posttrain.training.files import Observer, RunFiles
from posttrain.untrusted import allow_code_options

DEFAULT_ROOT = "runs"
# training/loop.py: run_training(recipe, files, *, resume, observer, should_stop, ...) -> TrainResult
Train = Callable[..., Any]
# Writes the files that show a run: curves, results, report (``reports.summary.write_summary``).
Summarize = Callable[[Path], object]


@dataclass(frozen=True, slots=True)
class RunResult:
    """The end of a run: ``reason`` is ``finished``, ``interrupted`` or ``stopped``; the last evaluation by name."""

    folder: Path
    step: int
    reason: str
    evaluations: dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True)
class RunStart:
    """The place of a run, and how it begins there.

    root: the folder that holds run directories. name: the run's name; by default ``recipe_name`` with a counter, or
    with ``resume`` the newest run of that name. recipe_name: the recipe's name on the command line. resume: continue
    instead of starting. accept_changes: continue although recipe or records are others than those of the newest
    checkpoint. notes: further notices at the start.
    """

    root: str | Path
    name: str | None = None
    recipe_name: str = "run"
    resume: bool = False
    accept_changes: bool = False
    notes: Sequence[str] = ()


def launch(
    recipe: RunRecipe,
    start: RunStart,
    *,
    observer: Observer = lambda event, info: None,
    should_stop: Callable[[], bool] = lambda: False,
    train: Train | None = None,
    summarize: Summarize | None = None,
) -> RunResult:
    """Train by ``recipe`` in ``start.root/start.name``, or continue the run there.

    Args:
        observer: receives events (``training/files.py``).
        should_stop: ends the run after a step, with a checkpoint and the state ``stopped``.
        train: the loop, if another than ``posttrain.training.loop.run_training``.
        summarize: writes the run's summary, before the state ``finished``: a run that is killed in between goes on.

    Raises:
        RunConflict: the directory is taken, or belongs to another recipe or process; it is unchanged.
        UsageError: nothing there to resume, or the recipe cannot be run.
        RunFailure: the work failed; what had been saved is intact and can be resumed.
    """
    recipe = recipe.resolve()
    if isinstance(recipe, Recipe):  # a sparse autoencoder is trained by one process
        check_scale(recipe.scale)
    if start.accept_changes and not start.resume:
        raise UsageError("--accept-changes is about a run that goes on; give --resume as well, or leave it out")
    if start.name is not None:
        check_run_name(start.name)
    is_new_root = not Path(start.root).exists()
    if start.resume:
        folder = _folder_to_resume(Path(start.root), start.name, start.recipe_name)
    else:
        folder = _new_folder(start, recipe)
    directory = RunDirectory(folder)
    with lock_run(folder):
        recipe, notices = _claim(directory, recipe, start)
        directory.write_environment(start.recipe_name, recipe.fingerprint())
        before = directory.read_status() if start.resume else None
        record = _Record(directory, new_status(recipe.train.steps or 0, before), observer, should_stop)
        try:
            record.begin([*notices, *start.notes])
            result = _train(recipe, directory, start.resume, record, train)
            record.conclude(summarize)
        except BaseException as error:
            is_refusal = not start.resume and isinstance(error, UsageError) and record.status.step == 0
            record.end(error, goes=is_refusal)
            if is_refusal:
                _take_back(folder, is_new_root)
            raise
        record.tell_finish()
        return result


def _take_back(folder: Path, is_new_root: bool) -> None:
    """Remove a run that never began: the same command, once corrected, finds the name free."""
    shutil.rmtree(folder, ignore_errors=True)
    if is_new_root:
        with suppress(OSError):  # other runs may have come into it
            folder.parent.rmdir()


def _train(recipe: RunRecipe, directory: RunDirectory, resume: bool, record: _Record, train: Train | None) -> RunResult:
    with storage_errors("run", directory.folder):
        files = RunFiles.within(directory.folder)
    leftovers = [*remove_leftovers(directory.folder), *clean_leftovers(files.checkpoints)]
    if leftovers:
        record.notice(f"removed what a killed write left behind: {', '.join(leftovers)}")
    loop: Any = train or import_module("posttrain.training.loop").run_training
    with stop_on_signals() as was_signalled:

        def should_stop() -> bool:
            return was_signalled() or record.should_stop()

        about: dict[str, object] = {"resume": resume, "observer": record, "should_stop": should_stop}
        if not isinstance(recipe, Recipe):  # of a sparse autoencoder, which one process trains
            result = loop(recipe, files, **about)
        elif recipe.scale.launcher == "ray":  # all processes are on a cluster; this one keeps status and log
            if importlib.util.find_spec("ray") is None:
                raise MissingExtra("ray", "ray", "scale.launcher: ray")
            cluster = import_module("posttrain.runs.ray")
            result = cluster.train_on_cluster(task_of(recipe, directory.folder, resume), recipe, record, should_stop)
        else:
            with join_processes(recipe, directory.folder, resume) as process_group:
                result = loop(recipe, files, process_group=process_group, **about)
    if result.reason == "interrupted":
        what = f"stopped after step {result.step} of {record.status.steps}, which is saved"
        record.notice(f"{what}; continue with: {resume_command(directory.folder)}")
        reason = record.reason
    else:
        reason = result.reason
    return RunResult(directory.folder, result.step, reason, dict(result.evaluations))


def find_or_train(
    recipe: RunRecipe,
    *,
    root: Path,
    recipe_name: str,
    observing: Callable[[], AbstractContextManager[Observer]],
    say: Callable[[str], object],
    summarize: Summarize | None = None,
) -> tuple[Path, RunResult | None]:
    """Find a finished run of exactly this resolved recipe under ``root``; without one, continue or make it.

    Returns its folder, and how its training ended if there was one. ``say`` is given a message, ``observing`` opens the
    observer of a training.

    Raises:
        RunConflict: another process is training the recipe.
    """
    finished, unfinished = find_runs(recipe, root)
    if finished is not None:
        say(f"{recipe_name}: a finished run is there, {finished}")
        return finished, None
    name = None
    if unfinished is None:
        say(f"{recipe_name}: no finished run; training one")
    else:
        say(f"{recipe_name}: going on with {unfinished}")
        name = unfinished.name
    with observing() as observer:
        start = RunStart(root, name, recipe_name, resume=name is not None)
        result = launch(recipe, start, observer=observer, summarize=summarize)
    return result.folder, result


def find_runs(recipe: RunRecipe, root: Path) -> tuple[Path | None, Path | None]:
    """Return the newest finished run of exactly this recipe, and the newest that could go on."""
    finished, unfinished = runs_by_recipe(recipe, root)
    return next(iter(finished), None), next(iter(unfinished), None)


def runs_by_recipe(recipe: RunRecipe, root: Path) -> tuple[list[Path], list[Path]]:
    """Return the finished runs of exactly this recipe, and those that could go on, the newest first."""
    finished = []
    unfinished = []
    for name in run_names(root):
        run = RunDirectory(root / name)
        with suppress(DataError):  # a damaged run is not this one; `posttrain runs` reports it
            if "model" in run.read_recipe() and not run.changed_keys(recipe):
                status = run.read_status()
                if status is not None and status.state == "finished":
                    finished.append(run.folder)
                else:
                    unfinished.append(run.folder)
    finished.sort(key=_age, reverse=True)
    unfinished.sort(key=_age, reverse=True)
    return finished, unfinished


def resume_command(folder: Path) -> str:
    """Return the command that continues a run here, where the code that it named was allowed to run."""
    words = ["posttrain", "runs", "resume", folder.name]
    root = str(folder.parent)
    if root != DEFAULT_ROOT:
        words += ["--runs-dir", root]
    return shlex.join([*words, *allow_code_options(os.getcwd())])


def _new_folder(start: RunStart, recipe: RunRecipe) -> Path:
    """Make a directory to start in; an existing one is only taken if it is empty."""
    root = Path(start.root)
    name = start.name
    with storage_errors("runs", root):
        root.mkdir(parents=True, exist_ok=True)
        if name is not None:
            _refuse_taken(RunDirectory(root / name), recipe)
            (root / name).mkdir(exist_ok=True)
            return root / name
        base = name_of_recipe(start.recipe_name)
        folder = root / base
        for count in itertools.count(2):
            with suppress(FileExistsError):
                folder.mkdir()
                return folder
            folder = root / f"{base}-{count}"
    raise AssertionError


def _refuse_taken(directory: RunDirectory, recipe: RunRecipe) -> None:
    folder = directory.folder
    other = "Nothing was changed. Choose another name with --run NAME"
    if not folder.exists() or (folder.is_dir() and directory.is_empty):
        return
    if not directory.recipe_path.is_file():
        raise RunConflict(f"{folder}: this is no run. {other}")
    refuse_live_folder(folder)
    status = directory.read_status()
    changed = directory.changed_keys(recipe)
    where = "has no status"
    if status is not None:  # no process works in it: "running" is the state of a killed one
        state: str = status.state
        if state == "running":
            state = "killed"
        where = f"is at step {status.step} of {status.steps} ({state})"
    what = f"of the same recipe exists already and {where}. Continue it with --resume. {other}"
    if hard_changes(changed):
        what = f"belongs to another recipe and {where}. {describe_changes(changed)}\n{other}"
    raise RunConflict(f"{folder}: this run {what}")


def _folder_to_resume(root: Path, name: str | None, recipe_name: str) -> Path:
    known = run_names(root)
    base = name_of_recipe(recipe_name)
    pattern = rf"{re.escape(base)}(-\d+)?"
    if name is not None:
        pattern = re.escape(name)
    candidates = [one for one in known if re.fullmatch(pattern, one)]
    if candidates:
        return max((root / one for one in candidates), key=_age)
    problem = f"nothing to continue in {root}: no {base!r} there. {list_names(known)}. Name the run with --run NAME; to"
    if name is not None:
        problem = f"there is no run {name!r} in {root}.{suggest(name, known)} {list_names(known)}. To"
    raise UsageError(f"--resume: {problem} start a new run, leave out --resume")


def _age(run: Path) -> tuple[float, str]:
    return RunDirectory(run).recipe_path.stat().st_mtime, run.name


def _claim(directory: RunDirectory, recipe: RunRecipe, start: RunStart) -> tuple[RunRecipe, list[str]]:
    """Make the locked directory ours, or refuse; returns the recipe to go by, and notices to show."""
    if start.resume:
        recipe = directory.as_it_began(recipe)
        warnings = claim_to_resume(directory, recipe, start.accept_changes)
        status = directory.read_status()
        if not warnings and status is not None and status.state == "finished":
            return recipe, ["this run had finished; it is only checked, and its results shown again"]
        return recipe, warnings
    if not directory.is_empty:
        raise RunConflict(f"{directory.folder}: another process was faster. Choose another name with --run NAME")
    directory.write_recipe(recipe)
    return recipe, []


def start_text(info: Mapping[str, Any]) -> str:
    """Describe what begins: steps, examples, what was dropped and why, repeated rows, trained parameters."""
    size = info.get("size") or f"{info['num_examples']:,} examples"
    length = info.get("length") or f"{info['steps']} steps on {size}"
    if info.get("origin"):
        length += f", from {info['origin']}"
    parts = [length]
    dropped = info.get("dropped")
    if dropped:
        counts = [f"{count:,} {reason}" for reason, count in dropped.items() if count]
        if counts:
            parts.append(f"dropped: {', '.join(counts)}")
    if info.get("num_repeated"):
        parts.append(f"{info['num_repeated']:,} rows of the data repeat an earlier one, and count again")
    if info.get("trained"):
        parts.append(info["trained"])
    if info.get("resumed_from"):
        parts.append(f"resumed after step {info['resumed_from']}")
    return "; ".join(parts)


class _Record:
    """An observer that keeps status and log, and passes every event on."""

    def __init__(
        self, directory: RunDirectory, status: RunStatus, observer: Observer, should_stop: Callable[[], bool]
    ) -> None:
        self.directory = directory
        self.status = status
        self.observer = observer
        self.should_stop = should_stop
        self.started = False
        self.reason: State = "finished"
        self.finish: dict[str, Any] | None = None  # the event, which is passed on when everything is written

    def __call__(self, event: str, info: dict[str, Any]) -> None:
        if event == "start":
            self.started = True
            self.update(step=info.get("resumed_from") or 0, steps=info.get("steps", self.status.steps))
            self.directory.log(f"started: {start_text(info)}")
        elif event == "step":
            self.update(step=info["step"])
        elif event == "evaluation":
            primary = info["primary_metric"]
            results = info["results"]
            result = "evaluated"
            if primary is not None and primary.name in results:  # a further task may lack what the first one has
                self.update(primary_metric=primary.name, held_out=primary.numbers(results), evaluation=info["name"])
                result = f"{primary.name} {results[primary.name]}"
            self.directory.log(f"step {info['step']}: {info['name']}: {result}")
        elif event == "checkpoint":
            best = ""
            if info.get("best"):
                best = ", the best so far"
            self.directory.log(f"step {info['step']}: saved {info['path']}{best}")
        elif event == "notice":
            self.directory.log(str(info["message"]))
        elif event == "finish":
            if info["reason"] != "finished":
                reason = "interrupted"
                if self.should_stop():
                    reason = "stopped"
                info = info | {"reason": reason}
            self.reason = info["reason"]
            self.finish = info
            self.update(step=info["step"])
            return
        self.observer(event, info)

    def begin(self, notices: Sequence[str]) -> None:
        """Write the status of a run that starts, and tell what is to be known about it."""
        self.update()
        for message in notices:
            self.notice(message)

    def tell_finish(self) -> None:
        """Pass on that the run has ended."""
        if self.finish is not None:
            self.observer("finish", self.finish)

    def notice(self, message: str) -> None:
        """Write a message to the log, and give it to the observer."""
        self("notice", {"message": message})

    def update(self, **changes: Any) -> None:
        """Change the status."""
        self.status = replace(self.status, updated=time.time(), **changes)
        self.directory.write_status(self.status)

    def conclude(self, summarize: Summarize | None) -> None:
        """Write the summary and the final state; ``finished`` comes last, and says that everything is there."""
        is_finished = self.reason == "finished"
        if not is_finished:
            self.end(None)
        if summarize is not None:
            summarize(self.directory.folder)
        if is_finished:
            self.end(None)

    def end(self, error: BaseException | None, *, goes: bool = False) -> None:
        """Set the final state; after an error, write how to continue unless the run ``goes`` away."""
        state = self.reason
        message = None
        end = state
        if error is not None:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                state = "interrupted"
                message = "stopped at once"
                end = "stopped"
            else:
                state = "failed"
                message = f"{type(error).__name__}: {error}"
                end = "failed"
            message = "; ".join([message, *getattr(error, "__notes__", [])])
        try:
            self.update(state=state, message=message)
            line: str = state
            if message:
                line = f"{state}: {message}"
            self.directory.log(line)
            if error is not None and self.started and not goes:
                saved = checkpoint_steps(self.directory.folder / "checkpoints")
                kept = "no checkpoint had been saved yet"
                if saved:
                    kept = f"the newest checkpoint is of step {saved[-1]}"
                made = f"{end} after step {self.status.step} of {self.status.steps}"
                self.notice(f"{made}; {kept}; continue with: {resume_command(self.directory.folder)}")
        except (StorageError, OSError) as failure:  # the first error is the one to show
            if error is None:
                raise
            error.add_note(str(failure))
