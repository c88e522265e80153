"""Running the cells of a comparison: each one a process of its own, several at a time.

A cell is what `posttrain train` makes of its recipe. Finished cells are left as they are, unfinished
ones go on from their newest checkpoint, and a cell that fails stops no other.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from posttrain.consent import consent_options
from posttrain.errors import RunConflict, RunFailure
from posttrain.runs.children import Child, end_children, start_child, threads_per_child
from posttrain.runs.directory import RunDirectory, lock_run, refuse_live_folder, wait_for_end
from posttrain.runs.launch import stop_on_signals
from posttrain.store.durable import remove_leftovers, replace_file, storage_errors
from posttrain.store.links import refuse_links
from posttrain.store.metrics import MetricsLog, evaluation_points
from posttrain.sweeps.compare import Cell, Plan
from posttrain.train.files import Observer

# (cell, resume) -> the command that trains it
Command = Callable[[Cell, bool], list[str]]
Standing = Literal["new", "unfinished", "finished"]
POLL_SECONDS = 0.5
INTERRUPTED = 130
NUM_CONFLICTS_SHOWN = 3
MIN_SHARE_DONE = 0.03


@dataclass(frozen=True)
class Outcome:
    """How a comparison went: what each failed cell said last, by name, and whether it was stopped."""

    failures: dict[str, str]
    interrupted: bool
    num_jobs: int
    num_threads: int


@dataclass
class _Work:
    """A cell in progress."""

    cell: Cell
    child: Child
    first_step: int
    num_evaluations: int
    metrics_bytes: int = -1
    told: bool = False


@dataclass
class _Pace:
    """How much of the work is done, in shares of a cell; from it the time that remains."""

    started: float = field(default_factory=time.monotonic)
    total: float = 1.0
    done: float = 0.0

    def remaining(self, in_progress: float) -> float | None:
        done = self.done + in_progress
        if done < MIN_SHARE_DONE * self.total:  # loading the first models would count for too much
            return None
        return (time.monotonic() - self.started) / done * (self.total - done)


def train_command(cell: Cell, resume: bool) -> list[str]:
    """`posttrain train` for one cell, with the Python that runs now."""
    command = [sys.executable, "-m", "posttrain.cli", "train", str(recipe_file(cell))]
    command += ["--runs-dir", str(cell.folder.parent), "--run", cell.name, "--quiet"]
    return [*command, *consent_options(), *(["--resume"] if resume else [])]


def recipe_file(cell: Cell) -> Path:
    """Where the recipe of a cell stands: beside its run."""
    return cell.folder.with_name(f"{cell.name}.yaml")


def num_cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_jobs(plan: Plan, num_cells: int) -> int:
    """One cell per core; one at a time where a GPU trains."""
    if plan.base.model.device != "cpu":
        import torch

        if torch.cuda.is_available():
            return 1
    return max(1, min(num_cores(), num_cells))


def prepare_folder(plan: Plan) -> None:
    """Make the comparison's directory, or accept the one that is there.

    Raises:
        RunConflict: the folder holds something else, or a cell of another recipe; nothing was changed.
    """
    folder = plan.folder
    if folder.exists() and not folder.is_dir():
        raise RunConflict(f"{folder}: this is a file, not a folder. Choose another name with --run NAME")
    if folder.is_dir() and not (folder / "compare.yaml").is_file():
        others = [item.name for item in folder.iterdir() if not item.name.startswith((".lock", ".tmp-"))]
        if others:
            raise RunConflict(
                f"{folder}: this folder holds something else than a comparison. Nothing was changed; "
                "choose another name with --run NAME"
            )
    refuse_live_folder(folder)
    standings(plan)
    refuse_links(folder)
    with storage_errors("comparison", folder):
        (folder / "cells").mkdir(parents=True, exist_ok=True)


def standings(plan: Plan) -> dict[str, Standing]:
    """Where the start and each cell stand, by name.

    Raises:
        RunConflict: some belong to another recipe, or to a process that does not end; the message says which.
    """
    found: dict[str, Standing] = {}
    conflicts = []
    cells = [*([plan.start] if plan.start is not None else []), *plan.cells]
    working = wait_for_end(cell.folder for cell in cells)
    for cell in cells:
        run = RunDirectory(cell.folder)
        if not run.recipe_path.is_file():
            found[cell.name] = "new"
            continue
        changed = run.changed_keys(cell.recipe)
        if changed:
            shown = ", ".join(f"{key} ({old!r} there, {new!r} now)" for key, (old, new) in sorted(changed.items()))
            conflicts.append(f"{cell.folder}: made by another recipe; it differs in {shown}")
        status = run.read_status()
        found[cell.name] = "finished" if status is not None and status.state == "finished" else "unfinished"
    made = [name for name, standing in found.items() if standing != "new" and name != "start"]
    if plan.start is not None and found.get("start") == "new" and made:
        conflicts.append(
            f"{plan.start.folder}: the start is gone or new, and {len(made)} cells were trained from an earlier one; "
            f"they are not comparable with what would follow: {', '.join(made[:3])}"
        )
    refuse_conflicts(working, conflicts, "Compare under another name with --run NAME", "runs")
    return found


def refuse_conflicts(working: Mapping[Path, str], conflicts: Sequence[str], otherwise: str, parts: str) -> None:
    """Refuse what is at work in ``working`` (by folder, the process), or else is in conflict.

    ``otherwise`` says what would work instead; ``parts`` what would have to be deleted.

    Raises:
        RunConflict: there is any of it. Nobody is told to delete what is at work.
    """
    busy = [f"{folder}: another process is working in it ({process})" for folder, process in working.items()]
    problems = busy or conflicts
    if not problems:
        return
    more = len(problems) - NUM_CONFLICTS_SHOWN
    shown = "\n".join(problems[:NUM_CONFLICTS_SHOWN]) + (f"\nand {more} more." if more > 0 else "")
    remedy = "Wait for it or stop it; the same command then goes on. Or: " if busy else ""
    raise RunConflict(
        f"{shown}\nNothing was changed. {remedy}{otherwise}{'' if busy else f', or delete these {parts} first'}"
    )


def run_cells(
    plan: Plan,
    *,
    jobs: int | None = None,
    observer: Observer = lambda event, facts: None,
    command: Command = train_command,
    poll_seconds: float = POLL_SECONDS,
) -> Outcome:
    """Train what is not finished yet; the start first.

    ``observer`` is told ``plan`` (num_cells, num_finished, num_jobs, num_threads), then per cell
    ``begin`` (resumed), ``evaluation`` (step, steps, accuracy), ``end`` (seconds, accuracy, remaining
    seconds) or ``failure`` (message), and ``stop``.

    Raises:
        RunConflict: the directory belongs to something else; nothing was changed.
        RunFailure: the start could not be trained.
    """
    prepare_folder(plan)
    with lock_run(plan.folder):
        standing = standings(plan)
        remove_leftovers(plan.folder)
        todo = [cell for cell in plan.cells if standing[cell.name] != "finished"]
        num_jobs = min(jobs, len(plan.cells)) if jobs is not None else default_jobs(plan, len(plan.cells))
        num_threads = threads_per_child(max(1, num_cores() // num_jobs))
        replace_file(plan.folder / "compare.yaml", plan.to_yaml().encode())
        counts = {"num_cells": len(plan.cells), "num_finished": len(plan.cells) - len(todo)}
        observer("plan", counts | {"num_jobs": num_jobs, "num_threads": num_threads})
        runner = _Runner(observer, command, poll_seconds)
        if todo and plan.start is not None and standing["start"] != "finished":
            runner.run([plan.start], 1, num_cores())
            if runner.failures:
                raise RunFailure(f"the start of the comparison failed: {runner.failures['start']}")
        if not runner.interrupted:
            runner.run(todo, num_jobs, num_threads)
        return Outcome(runner.failures, runner.interrupted, num_jobs, num_threads)


class _Runner:
    """Starts, watches and ends the processes."""

    def __init__(self, observer: Observer, command: Command, poll_seconds: float) -> None:
        self.observer, self.command, self.poll_seconds = observer, command, poll_seconds
        self.failures: dict[str, str] = {}
        self.interrupted = False
        self.working: list[_Work] = []
        self.pace = _Pace()

    def run(self, cells: Sequence[Cell], num_jobs: int, num_threads: int) -> None:
        """All cells, ``num_jobs`` at a time. After a signal none is begun, and those at work save and end."""
        queue = deque(cells)
        self.pace = _Pace(total=sum(_share_left(cell) for cell in cells))
        with stop_on_signals() as should_stop:
            try:
                while queue or self.working:
                    if should_stop() and not self.interrupted:
                        self._stop(queue)
                    while queue and len(self.working) < num_jobs:
                        self.working.append(self._begin(queue.popleft(), num_threads))
                    time.sleep(self.poll_seconds)
                    self._look()
            finally:
                self._abandon()

    def _stop(self, queue: deque[Cell]) -> None:
        self.interrupted = True
        queue.clear()
        for work in self.working:
            work.child.interrupt()
        self.observer("stop", {"num_working": len(self.working)})

    def _begin(self, cell: Cell, num_threads: int) -> _Work:
        path = recipe_file(cell)
        replace_file(path, cell.recipe.to_yaml().encode(), durable=False)
        resume = (cell.folder / "recipe.yaml").is_file()
        child = start_child(self.command(cell, resume), path.with_suffix(".log"), "a cell", num_threads)
        evaluated = len(evaluation_points(MetricsLog(cell.folder / "metrics.jsonl").read())) if resume else 0
        self.observer("begin", {"cell": cell, "resumed": resume})
        return _Work(cell, child, _step_of(cell), evaluated)

    def _look(self) -> None:
        for work in list(self.working):
            code = work.child.poll()
            self._tell_evaluations(work)
            if code is not None:
                self.working.remove(work)
                self._end(work, code)

    def _tell_evaluations(self, work: _Work) -> None:
        path = work.cell.folder / "metrics.jsonl"
        size = path.stat().st_size if path.is_file() else -1
        if size == work.metrics_bytes:
            return
        work.metrics_bytes = size
        points = evaluation_points(MetricsLog(path).read())
        work.num_evaluations = min(work.num_evaluations, len(points))  # a resumed run drops what it will repeat
        for point in points[work.num_evaluations :]:
            accuracy = point.results.get("accuracy")
            facts: dict[str, Any] = {"cell": work.cell, "step": point.step, "accuracy": accuracy}
            facts |= {"steps": work.cell.recipe.train.steps, "remaining": self._remaining()}
            self.observer("evaluation", facts)
        work.num_evaluations = len(points)

    def _remaining(self) -> float | None:
        return self.pace.remaining(sum(_share_done(work) for work in self.working))

    def _end(self, work: _Work, code: int) -> None:
        self.pace.done += 1 - work.first_step / work.cell.recipe.train.steps
        if code == 0:
            status = RunDirectory(work.cell.folder).read_status()
            accuracy = status.accuracy if status is not None else None
            facts = {"cell": work.cell, "seconds": time.monotonic() - work.child.started, "accuracy": accuracy}
            self.observer("end", facts | {"remaining": self._remaining()})
        elif not self.interrupted:
            message = last_error(work.child.log, work.child.log_start, code)
            self.failures[work.cell.name] = message
            self.observer("failure", {"cell": work.cell, "message": message, "log": work.child.log})

    def _abandon(self) -> None:
        """On the way out by an error or a second signal: end what still runs."""
        end_children(work.child for work in self.working)
        self.working.clear()


def _step_of(cell: Cell) -> int:
    status = RunDirectory(cell.folder).read_status()
    return min(status.step, cell.recipe.train.steps) if status is not None else 0


def _share_left(cell: Cell) -> float:
    return 1 - _step_of(cell) / cell.recipe.train.steps


def _share_done(work: _Work) -> float:
    return max(0, _step_of(work.cell) - work.first_step) / work.cell.recipe.train.steps


def last_error(log: Path, start: int, code: int) -> str:
    """What a process said last: its error message where there is one, else its last line."""
    content = log.read_bytes()[start:].decode(errors="replace")
    lines = [line.strip() for line in content.splitlines() if line.strip()]
    said = [line.removeprefix("posttrain: ") for line in lines if line.startswith("posttrain: ")]
    if code < 0:
        name = signal.Signals(-code).name
        return f"ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    return said[-1] if said else lines[-1] if lines else f"ended with exit code {code} and said nothing"
