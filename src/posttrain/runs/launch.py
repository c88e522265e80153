"""Starting, continuing and ending a run in its directory; the training itself is ``training/loop.py``.

A checkpoint records what decided it (``settings``: the recipe without its keys of place) and the number of records.
Before a run goes on, changes of the recipe and missing records are named, and it goes on with them only where that is
accepted; nothing was changed before.
"""

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

from posttrain import __version__
from posttrain.errors import DataError, MissingExtra, RunConflict, StorageError, UsageError
from posttrain.recipes.recipe import Recipe
from posttrain.recipes.sections import ScaleSection
from posttrain.registry import suggest
from posttrain.runs.children import stop_on_signals
from posttrain.runs.directory import (
    RunDirectory,
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
from posttrain.store.checkpoint_files import checkpoint_steps, clean_leftovers, newest_state
from posttrain.store.durable import remove_leftovers, storage_errors
from posttrain.store.metrics import MetricsLog
from posttrain.store.rollouts import RolloutStore
from posttrain.training.files import Observer, RunFiles
from posttrain.untrusted import allow_code_options

DEFAULT_ROOT = "runs"
# training/loop.py: train(recipe, files, *, resume, observer, should_stop, ...), with .step, .reason, .evaluations
Train = Callable[..., Any]
# Writes the files that show a run: curves, results, report (``commands.summary.write_summary``).
Summarize = Callable[[Path], object]


@dataclass(frozen=True, slots=True)
class RunResult:
    """The end of a run: ``reason`` is ``finished``, ``interrupted`` or ``stopped``; the last evaluation by name."""

    folder: Path
    step: int
    reason: str
    evaluations: dict[str, dict[str, float]]


def launch(
    recipe: Recipe,
    *,
    root: str | Path,
    name: str | None = None,
    recipe_name: str = "run",
    resume: bool = False,
    accept_changes: bool = False,
    observer: Observer = lambda event, info: None,
    notes: Sequence[str] = (),
    should_stop: Callable[[], bool] = lambda: False,
    train: Train | None = None,
    summarize: Summarize | None = None,
) -> RunResult:
    """Train by ``recipe`` in ``root/name``, or continue the run there.

    Args:
        root: the folder that holds run directories.
        name: the run's name; by default ``recipe_name`` with a counter, or with ``resume`` the newest run of that name.
        recipe_name: what the recipe was called on the command line.
        resume: continue instead of starting.
        accept_changes: continue although recipe or records are others than those of the newest checkpoint.
        observer: receives events (``training/files.py``); notes: further notices at the start.
        should_stop: ends the run after a step, with a checkpoint and the state ``stopped``.
        train: the loop, if another than ``posttrain.training.loop.train``.
        summarize: writes the run's summary, before the state ``finished``: a run that is killed in between goes on.

    Raises:
        RunConflict: the directory is taken, or belongs to another recipe or process; it is unchanged.
        UsageError: nothing there to resume, or the recipe cannot be run.
        RunFailure: the work failed; what had been saved is intact and can be resumed.
    """
    recipe = recipe.resolve()
    check_scale(recipe.scale if isinstance(recipe, Recipe) else ScaleSection())
    if accept_changes and not resume:
        raise UsageError("--accept-changes is about a run that goes on; give --resume as well, or leave it out")
    if name is not None:
        check_run_name(name)
    place, is_new_root = Path(root), not Path(root).exists()
    folder = _folder_to_resume(place, name, recipe_name) if resume else _new_folder(place, name, recipe, recipe_name)
    directory = RunDirectory(folder)
    with lock_run(folder):
        if resume:
            recipe = directory.as_it_began(recipe)
        warnings = _claim(directory, recipe, resume, accept_changes)
        directory.write_environment(recipe_name, recipe.fingerprint())
        status = new_status(recipe.train.steps or 0, directory.read_status() if resume else None)
        record = _Record(directory, status, observer, should_stop)
        try:
            record.update()
            for message in [*warnings, *notes]:
                record.notice(message)
            result = _train(recipe, directory, resume, record, train)
            record.conclude(summarize)
        except BaseException as error:
            is_refusal = not resume and isinstance(error, UsageError) and record.status.step == 0
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


def _train(recipe: Recipe, directory: RunDirectory, resume: bool, record: _Record, train: Train | None) -> RunResult:
    with storage_errors("run", directory.folder):
        files = RunFiles.within(directory.folder)
    leftovers = [*remove_leftovers(directory.folder), *clean_leftovers(files.checkpoints)]
    if leftovers:
        record.notice(f"removed what a killed write left behind: {', '.join(leftovers)}")
    loop: Any = train or import_module("posttrain.training.loop").train
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
    reason = record.reason if result.reason == "interrupted" else result.reason
    return RunResult(directory.folder, result.step, reason, dict(result.evaluations))


def find_or_train(
    recipe: Recipe,
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
    say(f"{recipe_name}: {f'going on with {unfinished}' if unfinished else 'no finished run; training one'}")
    name = unfinished.name if unfinished else None
    with observing() as observer:
        result = launch(
            recipe,
            root=root,
            name=name,
            recipe_name=recipe_name,
            resume=name is not None,
            observer=observer,
            summarize=summarize,
        )
    return result.folder, result


def find_runs(recipe: Recipe, root: Path) -> tuple[Path | None, Path | None]:
    """Return the newest finished run of exactly this recipe, and the newest that could go on."""
    finished, unfinished = (next(iter(runs), None) for runs in runs_of(recipe, root))
    return finished, unfinished


def runs_of(recipe: Recipe, root: Path) -> tuple[list[Path], list[Path]]:
    """Return the finished runs of exactly this recipe, and those that could go on, the newest first."""
    found: dict[bool, list[Path]] = {True: [], False: []}
    for name in run_names(root):
        run = RunDirectory(root / name)
        with suppress(DataError):  # a damaged run is not this one; `posttrain runs` reports it
            if "model" in run.read_recipe() and not run.changed_keys(recipe):
                status = run.read_status()
                found[status is not None and status.state == "finished"].append(run.folder)
    for runs in found.values():
        runs.sort(key=_age, reverse=True)
    return found[True], found[False]


def resume_command(folder: Path) -> str:
    """Return the command that continues a run here, where the code that it named was allowed to run."""
    words, root = ["posttrain", "runs", "resume", folder.name], str(folder.parent)
    words += [] if root == DEFAULT_ROOT else ["--runs-dir", root]
    return shlex.join([*words, *allow_code_options(os.getcwd())])


def _new_folder(root: Path, name: str | None, recipe: Recipe, recipe_name: str) -> Path:
    """Make a directory to start in; an existing one is only taken if it is empty."""
    with storage_errors("runs", root):
        root.mkdir(parents=True, exist_ok=True)
        if name is not None:
            _refuse_taken(RunDirectory(root / name), recipe)
            (root / name).mkdir(exist_ok=True)
            return root / name
        base = name_of_recipe(recipe_name)
        for count in itertools.count(1):
            folder = root / (base if count == 1 else f"{base}-{count}")
            with suppress(FileExistsError):
                folder.mkdir()
                return folder
    raise AssertionError


def _refuse_taken(directory: RunDirectory, recipe: Recipe) -> None:
    folder, other = directory.folder, "Nothing was changed. Choose another name with --run NAME"
    if not folder.exists() or (folder.is_dir() and directory.is_empty):
        return
    if not directory.recipe_path.is_file():
        raise RunConflict(f"{folder}: this is no run. {other}")
    refuse_live_folder(folder)
    status, changed = directory.read_status(), directory.changed_keys(recipe)
    where = "has no status"
    if status is not None:  # no process works in it: "running" is the state of a killed one
        state = "killed" if status.state == "running" else status.state
        where = f"is at step {status.step} of {status.steps} ({state})"
    what = f"of the same recipe exists already and {where}. Continue it with --resume. {other}"
    if hard_changes(changed):
        what = f"belongs to another recipe and {where}. {describe_changes(changed)}\n{other}"
    raise RunConflict(f"{folder}: this run {what}")


def _folder_to_resume(root: Path, name: str | None, recipe_name: str) -> Path:
    known, base = run_names(root), name_of_recipe(recipe_name)
    pattern = re.escape(name) if name is not None else rf"{re.escape(base)}(-\d+)?"
    candidates = [one for one in known if re.fullmatch(pattern, one)]
    if candidates:
        return max((root / one for one in candidates), key=_age)
    problem = f"nothing to continue in {root}: no {base!r} there. {list_names(known)}. Name the run with --run NAME; to"
    if name is not None:
        problem = f"there is no run {name!r} in {root}.{suggest(name, known)} {list_names(known)}. To"
    raise UsageError(f"--resume: {problem} start a new run, leave out --resume")


def _age(run: Path) -> tuple[float, str]:
    return RunDirectory(run).recipe_path.stat().st_mtime, run.name


def _claim(directory: RunDirectory, recipe: Recipe, resume: bool, accept_changes: bool) -> list[str]:
    """Make the locked directory ours, or refuse; returns notices to show."""
    if resume:
        warnings, status = claim_to_resume(directory, recipe, accept_changes), directory.read_status()
        if not warnings and status is not None and status.state == "finished":
            return ["this run had finished; it is only checked, and its results shown again"]
        return warnings
    if not directory.is_empty:
        raise RunConflict(f"{directory.folder}: another process was faster. Choose another name with --run NAME")
    directory.write_recipe(recipe)
    return []


def start_text(info: Mapping[str, Any]) -> str:
    """Describe what begins: steps, examples, what was dropped and why, repeated rows, trained parameters."""
    size = info.get("size") or f"{info['num_examples']:,} examples"
    length = info.get("length") or f"{info['steps']} steps on {size}"
    dropped = ", ".join(f"{n:,} {reason}" for reason, n in (info.get("dropped") or {}).items() if n)
    parts = (
        length + (f", from {info['origin']}" if info.get("origin") else ""),
        f"dropped: {dropped}" if dropped else "",
        f"{n:,} rows of the data repeat an earlier one, and count again" if (n := info.get("num_repeated")) else "",
        info.get("trained"),
        f"resumed after step {info['resumed_from']}" if info.get("resumed_from") else "",
    )
    return "; ".join(part for part in parts if part)


class _Record:
    """An observer that keeps status and log, and passes every event on."""

    def __init__(
        self, directory: RunDirectory, status: RunStatus, observer: Observer, should_stop: Callable[[], bool]
    ) -> None:
        self.directory, self.status, self.observer, self.should_stop = directory, status, observer, should_stop
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
            primary, results = info["primary_metric"], info["results"]
            result = "evaluated"
            if primary is not None and primary.name in results:  # a further task may lack what the first one has
                self.update(primary_metric=primary.name, held_out=primary.numbers(results), evaluation=info["name"])
                result = f"{primary.name} {results[primary.name]}"
            self.directory.log(f"step {info['step']}: {info['name']}: {result}")
        elif event == "checkpoint":
            best = ", the best so far" if info.get("best") else ""
            self.directory.log(f"step {info['step']}: saved {info['path']}{best}")
        elif event == "notice":
            self.directory.log(str(info["message"]))
        elif event == "finish":
            if info["reason"] != "finished":
                info = info | {"reason": "stopped" if self.should_stop() else "interrupted"}
            self.reason = info["reason"]
            self.finish = info
            self.update(step=info["step"])
            return
        self.observer(event, info)

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
        state, message = self.reason, None
        stopped = isinstance(error, KeyboardInterrupt | SystemExit)
        if error is not None:
            state = "interrupted" if stopped else "failed"
            message = "stopped at once" if stopped else f"{type(error).__name__}: {error}"
            message = "; ".join([message, *getattr(error, "__notes__", [])])
        try:
            self.update(state=state, message=message)
            self.directory.log(f"{state}: {message}" if message else state)
            if error is not None and self.started and not goes:
                saved = checkpoint_steps(self.directory.folder / "checkpoints")
                kept = f"the newest checkpoint is of step {saved[-1]}" if saved else "no checkpoint had been saved yet"
                made = f"{'stopped' if stopped else 'failed'} after step {self.status.step} of {self.status.steps}"
                self.notice(f"{made}; {kept}; continue with: {resume_command(self.directory.folder)}")
        except (StorageError, OSError) as failure:  # the first error is the one to show
            if error is None:
                raise
            error.add_note(str(failure))


ACCEPT = "--accept-changes"
LENGTHS = ("train.steps", "train.num_epochs")
_FILES = {
    "metrics": "metrics.jsonl: {} of {} lines",
    "rollouts": "rollouts.db: {} of {} rollouts",
    "evaluation_rollouts": "rollouts.db: {} of {} evaluation rollouts",
}
Changes = dict[str, tuple[object, object]]


def claim_to_resume(directory: RunDirectory, recipe: Recipe, accept_changes: bool = False) -> list[str]:
    """Check that the locked run may go on by ``recipe``, and store that; returns notices to show.

    Args:
        accept_changes: go on although the recipe or the records are others than the checkpoint's.

    Raises:
        RunConflict: they are, and it is not accepted; nothing was changed.
    """
    step, state = newest_state(directory.folder / "checkpoints") or (0, {})
    saved = step or max(checkpoint_steps(directory.folder / "checkpoints"), default=0)
    settings = state.get("settings")
    changed = directory.changed_keys(recipe, *([settings] if isinstance(settings, Mapping) else []))
    missing = _missing_records(directory.folder, step, state) if saved else _missing_checkpoints(directory, recipe)
    new = recipe.train.steps if "train.steps" in changed else None
    is_short = new is not None and new <= saved
    problem = hard_changes(changed)
    if is_short:
        problem = f"train.steps {new} is not above the newest checkpoint's step {saved}."
    elif changed and not problem and recipe.train.schedule != "constant":
        keys = " and ".join(sorted(changed))
        problem = f"{keys} changes the learning rates of train.schedule {recipe.train.schedule!r}."
    differing = _lines(changed) if problem else []
    if is_short or ((problem or missing) and not accept_changes):
        raise RunConflict(_refusal(directory, differing, missing, problem))
    warnings: list[str] = []
    if missing or differing:
        what = "; ".join([*missing, *differing])
        warnings.append(f"{ACCEPT}: goes on after step {saved}, although it is not as it was then: {what}")
    elif changed:
        now = "; ".join(f"{key} is now {new} instead of {old}" for key, (old, new) in sorted(changed.items()))
        warnings.append(f"{now}; the steps up to {saved} are kept as they are")
    elsewhere = {key: both for key, both in directory.changed_keys(recipe, places=True).items() if key != "description"}
    if elsewhere:
        warnings.append(f"another place than at the last start: {'; '.join(_lines(elsewhere))}")
    edited = {key: both for key, both in directory.changed_keys(recipe).items() if key not in changed}
    if edited and not differing:
        warnings.append(
            f"recipe.yaml had been changed, and is again what was trained with: {'; '.join(_lines(edited))}"
        )
    if changed or elsewhere or edited:
        directory.write_recipe(recipe)
    return warnings


def hard_changes(changed: Changes) -> str:
    """Return why a run cannot go on with these changes; empty if it may (``train.steps`` or ``num_epochs`` alone)."""
    hard = [key for key in changed if key not in LENGTHS]
    length = " or ".join(LENGTHS)
    return f"Only {length} may change when a run is resumed, not {', '.join(hard)}." if hard else ""


def describe_changes(changed: Changes) -> str:
    """Return a line for each key: the value in the run, and the new one."""
    return "The recipes differ in:\n" + "\n".join(f"  {line}" for line in _lines(changed))


def _missing_records(folder: Path, step: int, state: Mapping[str, object]) -> list[str]:
    """Name the files that have fewer lines or rows than when the checkpoint was saved."""
    records = state.get("records")
    expected = {name: n for name, n in (records if isinstance(records, Mapping) else {}).items() if isinstance(n, int)}
    if not expected:
        return []
    there = {"metrics": sum(row.step <= step for row in MetricsLog(folder / "metrics.jsonl").read())}
    path = folder / "rollouts.db"
    if expected.keys() - there.keys() and path.is_file():
        there |= RolloutStore(path, read_only=True).num_rows(step)
    return [
        f"{_FILES[name].format(count - there.get(name, 0), count)} up to step {step} are missing"
        for name, count in expected.items()
        if name in _FILES and there.get(name, 0) < count
    ]


def _missing_checkpoints(directory: RunDirectory, recipe: Recipe) -> list[str]:
    """Tell of a run without any checkpoint whose status or metrics show that it had one."""
    status = directory.read_status()
    last = max((row.step for row in MetricsLog(directory.folder / "metrics.jsonl").read()), default=0)
    if status is not None and status.state in ("finished", "interrupted", "stopped"):  # both save a checkpoint
        last = max(last, status.step)
    elif last <= (recipe.train.save_every or last):
        return []
    if not last:
        return []
    folder = directory.folder / "checkpoints"
    return [f"checkpoints: there is none, and {last} steps were made; is the disk with {folder} mounted?"]


def _refusal(directory: RunDirectory, differing: list[str], missing: list[str], problem: str) -> str:
    parts = []
    if differing:
        recipes = "this run belongs to another recipe. The recipes differ in:"
        parts.append("\n  ".join([recipes, *differing]) + f"\n{problem}")
    if missing:
        parts.append("\n  ".join(["what was there when its newest checkpoint was saved is gone:", *missing]))
    back = ["with the run's own recipe" if differing else "", "with the files put back" if missing else ""]
    made_by = directory.made_by()
    version = "" if made_by in (None, __version__) else f" It was made by posttrain {made_by}; this is {__version__}."
    return (
        f"{directory.folder}: {'; and '.join(parts)}\nNothing was changed.{version} Resume "
        f"{' and '.join(filter(None, back))}, go on with it as it is now with {ACCEPT} (log.txt keeps what was "
        "different), or start under another name with --run NAME"
    )


def _lines(changed: Changes) -> list[str]:
    def shown(value: object) -> str:
        return "nothing" if value is None else repr(value)

    return [f"{key}: {shown(old)} in the run, {shown(new)} now" for key, (old, new) in sorted(changed.items())]
