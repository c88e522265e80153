"""Run the futures in a plan, in this process or in several that share the work."""

from __future__ import annotations

import itertools
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from posttrain.activity import phase
from posttrain.errors import DataError, RunConflict, UsageError
from posttrain.graders.sandbox.workers import count_cpus
from posttrain.registry import session_functions
from posttrain.runs.children import Child, end_children, start_child, stop_on_signals, threads_per_child
from posttrain.runs.directory import RunDirectory, RunStatus, lock_run, new_status
from posttrain.runs.what_if.plan import START, Future, Planned, WhatIfPlan, explain_change, future_folder, write_plan
from posttrain.store.durable import remove_tree, storage_errors
from posttrain.untrusted import allow_code_options

PLAY = "__futures"  # command for a process that plays futures
POLL_SECONDS = 0.2
STOPPING = "stopping after this step; the futures that ended are kept"
Say = Callable[[str, bool], object]  # prints a progress line; the flag marks failures


def new_folder(root: Path, run: str, at: int, name: str | None) -> Path:
    """Create the results folder; default name: ``what-if-RUN-at-STEP`` plus a counter.

    Raises:
        RunConflict: the name is taken.
    """
    with storage_errors("the results", root):
        root.mkdir(parents=True, exist_ok=True)
        if name is not None:
            folder = root / name
            try:
                folder.mkdir()
            except FileExistsError:
                raise RunConflict(f"{folder}: already exists. Choose a different name with --run NAME") from None
            return folder
        base = f"what-if-{Path(run).name[:150]}-at-{at}"
        for count in itertools.count(1):
            folder = root / base
            if count > 1:
                folder = root / f"{base}-{count}"
            with suppress(FileExistsError):
                folder.mkdir()
                return folder
    raise AssertionError


def choose_jobs(planned: Planned, jobs: int | None) -> int:
    """Choose the number of processes: as many as the cores allow, or one on a GPU.

    Raises:
        UsageError: several processes requested, but the recipe uses a function defined in this session.
    """
    recipe = planned.recipe
    own = session_functions(recipe.to_yaml())
    if own and jobs is not None and jobs > 1:
        raise UsageError(f"jobs: {', '.join(own)} is defined only in this session, not in worker processes. Use jobs=1")
    if own:
        return 1
    if jobs is None:
        jobs = 1
        if _is_on_cpu(recipe.model.device):
            threads = planned.plan.num_threads or threads_per_child(1)
            jobs = max(1, count_cpus() // threads)
    return min(jobs, len(planned.plan.futures))


def _is_on_cpu(device: str) -> bool:
    if device != "auto":
        return device == "cpu"
    import torch

    return not torch.cuda.is_available()


def run_futures(folder: Path, planned: Planned, jobs: int, say: Say) -> None:
    """Play all futures in a plan, ``jobs`` at a time, until done or interrupted by a signal.

    Raises:
        PosttrainError: the starting state cannot be created.
    """
    from posttrain.runs.what_if.play import make_start, play_all

    plan = planned.plan
    with lock_run(folder):
        for future in plan.futures:
            run = future_folder(folder, future)
            with storage_errors("the futures", run):
                run.mkdir(parents=True)
            RunDirectory(run).write_recipe(planned.recipes[future.name])
        write_plan(folder, plan)
        say(_beginning(plan, jobs), False)
        try:
            with phase(f"replaying steps {plan.checkpoint + 1} to {plan.at}"):
                make_start(folder, plan, planned.recipe)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)  # nothing was played, so no results exist
            raise
        try:
            with stop_on_signals(STOPPING) as should_stop:
                if jobs == 1:
                    play_all(folder, should_stop, lambda future, status: say(*_end_line(plan, future, status)))
                else:
                    _Players(folder, plan, say).run(jobs, should_stop)
        finally:
            remove_tree(folder / START)


def _beginning(plan: WhatIfPlan, jobs: int) -> str:
    replay = f"from its checkpoint of step {plan.checkpoint}"
    if plan.checkpoint < plan.at:
        replay = f"{replay}, replayed to step {plan.at}"
    together = ""
    if jobs > 1:
        together = f", {jobs} at a time"
    threads = plan.num_threads or "default"
    return (
        f"{len(plan.futures)} futures of {plan.steps} steps after step {plan.at} of {Path(plan.run).name}, "
        f"{replay}{together}; threads per future: {threads}"
    )


def _end_line(plan: WhatIfPlan, future: Future, status: RunStatus) -> tuple[str, bool]:
    label = explain_change(future)
    if status.state == "failed":
        return f"{label}: {status.message}", True
    return f"{label}: played to step {status.step} of {plan.end}", False


class _Players:
    """Child processes that play the futures in a folder, monitored by this process."""

    def __init__(self, folder: Path, plan: WhatIfPlan, say: Say) -> None:
        self.folder = folder
        self.plan = plan
        self.say = say
        self.told: set[str] = set()

    def run(self, jobs: int, should_stop: Callable[[], bool]) -> None:
        """Start the children, report each completed future, and wait for all of them."""
        children: list[Child] = []
        ends: list[str] = []
        try:
            for number in range(jobs):
                children.append(self._start(number))
            working = list(children)
            with phase(f"playing {len(self.plan.futures)} futures"):
                while working:
                    if should_stop():
                        for child in working:
                            child.interrupt()
                        self._wait(working)
                    time.sleep(POLL_SECONDS)
                    self._tell()
                    for child in list(working):
                        code = child.poll()
                        if code is None:
                            continue
                        working.remove(child)
                        if code:
                            ends.append(child.describe_end(code))
        finally:
            end_children(children, 0.0)
        self._close(ends, is_interrupted=should_stop())
        self._tell()

    def _start(self, number: int) -> Child:
        threads = self.plan.num_threads or threads_per_child(1)
        settings = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        command = [sys.executable, "-m", "posttrain", PLAY, str(self.folder), *allow_code_options()]
        return start_child(command, self.folder / f"log-{number}.txt", f"player {number}", threads, settings)

    def _wait(self, working: Sequence[Child]) -> None:
        """Wait for interrupted processes, which first complete their current step."""
        for child in working:
            child.process.wait()

    def _tell(self) -> None:
        for future in self.plan.futures:
            if future.name in self.told:
                continue
            with suppress(DataError):
                status = RunDirectory(future_folder(self.folder, future)).read_status()
                if status is not None and status.state != "running":
                    self.told.add(future.name)
                    self.say(*_end_line(self.plan, future, status))

    def _close(self, ends: Sequence[str], *, is_interrupted: bool) -> None:
        """Set a final status for futures whose process ended early."""
        for future in self.plan.futures:
            directory = RunDirectory(future_folder(self.folder, future))
            status = directory.read_status()
            if status is not None and status.state != "running":
                continue
            if status is None:
                status = replace(new_status(self.plan.end, None), step=self.plan.at)
            if is_interrupted:
                directory.write_status(replace(status, state="interrupted"))
            else:
                reason = "; ".join(ends) or "no process played this future"
                directory.write_status(replace(status, state="failed", message=reason))
