"""Start, continue and finish a run in its directory; training itself is in ``training/loop.py``."""

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
# Writes the summary files: curves, results, report (``reports.summary.write_summary``).
Summarize = Callable[[Path], object]


@dataclass(frozen=True, slots=True)
class RunResult:
    """Outcome of a run. ``reason``: ``finished``, ``interrupted`` or ``stopped``. Evaluations are by name."""

    folder: Path
    step: int
    reason: str
    evaluations: dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True)
class RunStart:
    """Location and start options of a run.

    root: folder containing run directories. name: run name; default: ``recipe_name`` plus a counter, or with
    ``resume`` the newest run with this name. recipe_name: recipe as given on the command line. resume: continue an
    existing run. accept_changes: continue although recipe or records differ from the newest checkpoint. notes: extra
    startup notices.
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
    """Train ``recipe`` in ``start.root/start.name``, or continue the run there.

    Args:
        observer: receives events (``training/files.py``).
        should_stop: ends the run after the current step, with a checkpoint and state ``stopped``.
        train: training loop; default: ``posttrain.training.loop.run_training``.
        summarize: writes the run summary before the state becomes ``finished``, so a run killed in between continues.

    Raises:
        RunConflict: the directory is taken, or belongs to a different recipe or process. Nothing was changed.
        UsageError: nothing to resume, or the recipe is invalid.
        RunFailure: training failed. Saved checkpoints are intact, and the run can be resumed.
    """
    recipe = recipe.resolve()
    if isinstance(recipe, Recipe):  # sparse autoencoders train in a single process
        check_scale(recipe.scale)
    if start.accept_changes and not start.resume:
        raise UsageError("--accept-changes only applies with --resume; add --resume, or omit it")
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
        before = None
        if start.resume:
            before = directory.read_status()
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
    """Remove a run that never started, so that the corrected command can reuse the name."""
    shutil.rmtree(folder, ignore_errors=True)
    if is_new_root:
        with suppress(OSError):  # other runs may have been created meanwhile
            folder.parent.rmdir()


def _train(recipe: RunRecipe, directory: RunDirectory, resume: bool, record: _Record, train: Train | None) -> RunResult:
    with storage_errors("run", directory.folder):
        files = RunFiles.within(directory.folder)
    leftovers = [*remove_leftovers(directory.folder), *clean_leftovers(files.checkpoints)]
    if leftovers:
        record.notice(f"removed leftovers from a killed write: {', '.join(leftovers)}")
    loop: Any = train or import_module("posttrain.training.loop").run_training
    with stop_on_signals() as was_signalled:

        def should_stop() -> bool:
            return was_signalled() or record.should_stop()

        about: dict[str, object] = {"resume": resume, "observer": record, "should_stop": should_stop}
        if not isinstance(recipe, Recipe):  # sparse autoencoder: single process
            result = loop(recipe, files, **about)
        elif recipe.scale.launcher == "ray":  # all ranks run on a cluster; this process keeps status and log
            if importlib.util.find_spec("ray") is None:
                raise MissingExtra("ray", "ray", "scale.launcher: ray")
            cluster = import_module("posttrain.runs.ray")
            result = cluster.train_on_cluster(task_of(recipe, directory.folder, resume), recipe, record, should_stop)
        else:
            with join_processes(recipe, directory.folder, resume) as process_group:
                result = loop(recipe, files, process_group=process_group, **about)
    if result.reason == "interrupted":
        what = f"stopped and saved after step {result.step} of {record.status.steps}"
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
    """Find a finished run with exactly this resolved recipe under ``root``. Otherwise continue or start one.

    Returns its folder, and the training outcome if it trained. ``say`` receives messages; ``observing`` opens the
    training observer.

    Raises:
        RunConflict: another process is training this recipe.
    """
    finished, unfinished = find_runs(recipe, root)
    if finished is not None:
        say(f"{recipe_name}: found a finished run, {finished}")
        return finished, None
    name = None
    if unfinished is None:
        say(f"{recipe_name}: no finished run; training one")
    else:
        say(f"{recipe_name}: continuing {unfinished}")
        name = unfinished.name
    with observing() as observer:
        start = RunStart(root, name, recipe_name, resume=name is not None)
        result = launch(recipe, start, observer=observer, summarize=summarize)
    return result.folder, result


def find_runs(recipe: RunRecipe, root: Path) -> tuple[Path | None, Path | None]:
    """Find the newest finished run and the newest resumable run with exactly this recipe."""
    finished, unfinished = runs_by_recipe(recipe, root)
    return next(iter(finished), None), next(iter(unfinished), None)


def runs_by_recipe(recipe: RunRecipe, root: Path) -> tuple[list[Path], list[Path]]:
    """List finished and resumable runs with exactly this recipe, newest first."""
    finished = []
    unfinished = []
    for name in run_names(root):
        run = RunDirectory(root / name)
        with suppress(DataError):  # skip damaged runs; `posttrain runs` reports them
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
    """Build the command that resumes a run, including options for code that was allowed."""
    words = ["posttrain", "runs", "resume", folder.name]
    root = str(folder.parent)
    if root != DEFAULT_ROOT:
        words += ["--runs-dir", root]
    return shlex.join([*words, *allow_code_options(os.getcwd())])


def _new_folder(start: RunStart, recipe: RunRecipe) -> Path:
    """Create the run directory. An existing one must be empty."""
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
    other = "Nothing was changed. Choose a different name with --run NAME"
    if not folder.exists() or (folder.is_dir() and directory.is_empty):
        return
    if not directory.recipe_path.is_file():
        raise RunConflict(f"{folder}: this is not a run. {other}")
    refuse_live_folder(folder)
    status = directory.read_status()
    changed = directory.changed_keys(recipe)
    where = "has no status"
    if status is not None:  # no process holds the lock, so "running" means killed
        state: str = status.state
        if state == "running":
            state = "killed"
        where = f"is at step {status.step} of {status.steps} ({state})"
    what = f"with the same recipe already exists and {where}. Continue it with --resume. {other}"
    if hard_changes(changed):
        what = f"belongs to a different recipe and {where}. {describe_changes(changed)}\n{other}"
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
    problem = f"nothing to continue in {root}: no run {base!r}. {list_names(known)}. Name the run with --run NAME; to"
    if name is not None:
        problem = f"no run {name!r} in {root}.{suggest(name, known)} {list_names(known)}. To"
    raise UsageError(f"--resume: {problem} start a new run, omit --resume")


def _age(run: Path) -> tuple[float, str]:
    return RunDirectory(run).recipe_path.stat().st_mtime, run.name


def _claim(directory: RunDirectory, recipe: RunRecipe, start: RunStart) -> tuple[RunRecipe, list[str]]:
    """Claim the locked directory, or refuse. Returns the recipe to use, and notices to show."""
    if start.resume:
        recipe = directory.as_it_began(recipe)
        warnings = claim_to_resume(directory, recipe, start.accept_changes)
        status = directory.read_status()
        if not warnings and status is not None and status.state == "finished":
            return recipe, ["this run is already finished; checking it and showing the results"]
        return recipe, warnings
    if not directory.is_empty:
        raise RunConflict(
            f"{directory.folder}: another process claimed this name first. Choose a different name with --run NAME"
        )
    directory.write_recipe(recipe)
    return recipe, []


def start_text(info: Mapping[str, Any]) -> str:
    """Describe a start: steps, examples, dropped and repeated rows, trained parameters."""
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
        parts.append(f"{info['num_repeated']:,} duplicate rows, which are kept")
    if info.get("trained"):
        parts.append(info["trained"])
    if info.get("resumed_from"):
        parts.append(f"resumed after step {info['resumed_from']}")
    return "; ".join(parts)


class _Record:
    """Observer that writes status and log, and forwards all events."""

    def __init__(
        self, directory: RunDirectory, status: RunStatus, observer: Observer, should_stop: Callable[[], bool]
    ) -> None:
        self.directory = directory
        self.status = status
        self.observer = observer
        self.should_stop = should_stop
        self.started = False
        self.reason: State = "finished"
        self.finish: dict[str, Any] | None = None  # held back until everything is written

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
            if primary is not None and primary.name in results:  # additional tasks may lack the first task's metric
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
        """Write the initial status and show startup notices."""
        self.update()
        for message in notices:
            self.notice(message)

    def tell_finish(self) -> None:
        """Forward the held-back finish event."""
        if self.finish is not None:
            self.observer("finish", self.finish)

    def notice(self, message: str) -> None:
        """Log a message and forward it to the observer."""
        self("notice", {"message": message})

    def update(self, **changes: Any) -> None:
        """Update and write the status."""
        self.status = replace(self.status, updated=time.time(), **changes)
        self.directory.write_status(self.status)

    def conclude(self, summarize: Summarize | None) -> None:
        """Write the summary and final state. ``finished`` is written last, after everything else."""
        is_finished = self.reason == "finished"
        if not is_finished:
            self.end(None)
        if summarize is not None:
            summarize(self.directory.folder)
        if is_finished:
            self.end(None)

    def end(self, error: BaseException | None, *, goes: bool = False) -> None:
        """Write the final state. After an error, log how to continue unless the run is removed (``goes``)."""
        state = self.reason
        message = None
        end = state
        if error is not None:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                state = "interrupted"
                message = "stopped immediately"
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
                kept = "no checkpoint was saved yet"
                if saved:
                    kept = f"the newest checkpoint is step {saved[-1]}"
                made = f"{end} after step {self.status.step} of {self.status.steps}"
                self.notice(f"{made}; {kept}; continue with: {resume_command(self.directory.folder)}")
        except (StorageError, OSError) as failure:  # report the original error first
            if error is None:
                raise
            error.add_note(str(failure))
