"""Run the trials in a sweep, one process each, started as soon as their dependencies are available.

Finished trials are kept, unfinished ones continue, and a failed trial stops only its dependents.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from posttrain.activity import phase
from posttrain.data.base import build_task
from posttrain.data.render.template import build_template
from posttrain.errors import PosttrainError, RunConflict, RunFailure
from posttrain.evaluation.files import ITEMS
from posttrain.graders.sandbox.workers import count_cpus
from posttrain.runs.children import Child, end_children, start_child, stop_on_signals, threads_per_child
from posttrain.runs.directory import RunDirectory, lock_run, refuse_live_folder, wait_for_end
from posttrain.runs.paths import PLAN
from posttrain.store.durable import refuse_links, remove_leftovers, replace_file, storage_errors
from posttrain.sweeps.file import LABELLED
from posttrain.sweeps.labelling import write_labelled
from posttrain.sweeps.plan import SweepPlan, SweepTrial, Training, TrialState
from posttrain.untrusted import allow_code_options

MakeCommand = Callable[[SweepTrial, bool], list[str]]  # (trial, resume) -> command line
Say = Callable[[str, bool], None]  # prints a progress line; the flag marks failures
POLL_SECONDS = 0.3
NUM_CONFLICTS_SHOWN = 3


@dataclass
class SweepOutcome:
    """Outcome of a sweep: failed or skipped trials by name, with the error message or reason."""

    failures: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False


def read_states(plan: SweepPlan) -> dict[str, TrialState]:
    """Read the state of each trial, by name.

    Raises:
        RunConflict: trials belong to a different recipe or a live process, or depend on missing weights. The message
            lists them.
    """
    working = wait_for_end(trial.folder for trial in plan.trials)
    states = {trial.name: trial.state for trial in plan.trials}
    if working:
        problems = [f"{folder}: another process is using it ({process})" for folder, process in working.items()]
        raise _conflict(problems, "Wait for it or stop it; then repeat the same command to continue")
    problems = []
    for trial in plan.trials:
        if states[trial.name] == "new":
            continue
        conflict = trial.conflict()
        if conflict is not None:
            problems.append(conflict)
        for name in trial.needs:
            if states[name] != "finished":
                problems.append(f"{trial.folder}: built from an earlier {name}, which is missing or unfinished")
    if problems:
        raise _conflict(problems, "Delete these trials first")
    return states


def _conflict(problems: list[str], remedy: str) -> RunConflict:
    shown = problems[:NUM_CONFLICTS_SHOWN]
    more = len(problems) - len(shown)
    if more > 0:
        shown.append(f"and {more} more.")
    what = "\n".join(shown)
    return RunConflict(f"{what}\nNothing was changed. {remedy}. Or use a different name with --run NAME")


def trial_command(trial: SweepTrial, resume: bool) -> list[str]:
    """Build the command that starts or continues a trial with the current Python."""
    more = []
    if resume and isinstance(trial, Training):
        more = ["--resume"]
    return [sys.executable, "-m", "posttrain.cli", *trial.command, *more, *allow_code_options()]


def run_trials(
    plan: SweepPlan,
    *,
    jobs: int | None = None,
    say: Say = lambda line, is_failure: None,
    command: MakeCommand = trial_command,
    poll_seconds: float = POLL_SECONDS,
) -> SweepOutcome:
    """Run all unfinished trials, ``jobs`` at a time (default: one per core, or one on a GPU).

    Raises:
        RunConflict: the directory belongs to something else. Nothing was changed.
        RunFailure: the start trial failed.
    """
    folder = plan.folder
    refuse_other_folder(folder)
    refuse_live_folder(folder)
    read_states(plan)
    refuse_links(folder)
    with storage_errors("sweep", folder):
        for trial in plan.trials:
            trial.folder.parent.mkdir(parents=True, exist_ok=True)
    with lock_run(folder):
        states = read_states(plan)
        remove_leftovers(folder)
        replace_file(folder / PLAN, plan.to_yaml().encode())
        todo = [trial for trial in plan.trials if states[trial.name] != "finished"]
        if jobs is None:
            jobs = _default_jobs(plan)
        num_jobs = max(1, min(jobs, len(plan.trials)))
        num_threads = threads_per_child(max(1, count_cpus() // num_jobs))
        done = len(plan.trials) - len(todo)
        line = f"{len(plan.trials)} trials, {num_jobs} at a time, threads per trial: {num_threads}"
        if done:
            line = f"{line}; {done} already finished"
        say(line, False)
        return _Runner(plan, states, say, command, num_jobs, num_threads, todo).run(poll_seconds)


def refuse_other_folder(folder: Path) -> None:
    """Refuse a path that exists and is neither a sweep folder nor remains of a killed start.

    Raises:
        RunConflict: names the path.
    """
    if not folder.exists() or (folder / PLAN).is_file():
        return
    if not folder.is_dir() or not RunDirectory(folder).is_empty:
        raise RunConflict(f"{folder}: exists and is not a sweep. Choose a different name with --run NAME")


def _default_jobs(plan: SweepPlan) -> int:
    """One trial per core, or a single one on a GPU."""
    devices = {trial.recipe.model.device for trial in plan.trials if isinstance(trial, Training)}
    if devices <= {"cpu"}:
        return count_cpus()
    import torch

    if "mps" in devices or torch.cuda.is_available():
        return 1
    return count_cpus()


@dataclass
class _Runner:
    """Starts, monitors and ends trial processes."""

    plan: SweepPlan
    states: dict[str, TrialState]
    say: Say
    command: MakeCommand
    num_jobs: int
    num_threads: int
    waiting: list[SweepTrial]
    working: list[tuple[SweepTrial, Child]] = field(default_factory=list)
    outcome: SweepOutcome = field(default_factory=SweepOutcome)

    def run(self, poll_seconds: float) -> SweepOutcome:
        """Run all trials. After a signal, start no more, and let active trials save and exit."""
        stop = stop_on_signals("stopping after active trials have saved")
        with stop as should_stop, phase("sweep", describe=self._describe):
            try:
                while self.waiting or self.working:
                    if should_stop() and not self.outcome.interrupted:
                        self.outcome.interrupted = True
                        self.waiting.clear()
                        for _, child in self.working:
                            child.interrupt()
                    self._begin()
                    if self.working:
                        time.sleep(poll_seconds)
                    for trial, child in list(self.working):
                        code = child.poll()
                        if code is not None:
                            self.working.remove((trial, child))
                            self._end(trial, child, code)
            finally:
                end_children(child for _, child in self.working)  # after an error or a second signal
        return self.outcome

    def _describe(self) -> str:
        at_work = ", ".join(trial.name for trial, _ in self.working) or "none"
        num_finished = sum(state == "finished" for state in self.states.values())
        return f"{num_finished} of {len(self.states)} trials finished, running: {at_work}"

    def _begin(self) -> None:
        """Start waiting trials whose dependencies are finished; fail those whose dependencies failed."""
        for trial in list(self.waiting):
            lost = [name for name in trial.needs if name in self.outcome.failures]
            if lost:
                self.waiting.remove(trial)
                self._fail(trial, f"not started, because {lost[0]} failed")
            elif len(self.working) < self.num_jobs and all(self.states[name] == "finished" for name in trial.needs):
                self.waiting.remove(trial)
                self._start(trial)

    def _start(self, trial: SweepTrial) -> None:
        path, settings = trial.settings
        replace_file(path, settings.encode(), durable=False)
        threads = self.num_threads
        if trial.row == "start":  # it runs before all other trials
            threads = count_cpus()
        resume = self.states[trial.name] == "unfinished"
        begun = "started"
        if resume:
            begun = "continued"
        log = path.with_name(f"{trial.name}.log")
        self.working.append((trial, start_child(self.command(trial, resume), log, "a trial", threads)))
        self.say(f"{trial.name}: {begun}", False)

    def _end(self, trial: SweepTrial, child: Child, code: int) -> None:
        message: str | None
        if code != 0:
            message = child.describe_end(code)
        else:
            message = self._label(trial)
        if message is None and trial.state == "finished":
            self.states[trial.name] = "finished"
            took = timedelta(seconds=round(time.monotonic() - child.started))
            num_left = len(self.waiting) + len(self.working)
            finished = f"{trial.name}: finished in {took} {trial.result}".rstrip()
            self.say(f"{finished} ({num_left} left)", False)
        elif not self.outcome.interrupted:
            if trial.row == "start":
                raise RunFailure(f"the start of the sweep failed: {message}")
            self._fail(trial, message or "the process exited normally but left the trial unfinished")

    def _fail(self, trial: SweepTrial, message: str) -> None:
        self.outcome.failures[trial.name] = message
        self.say(f"{trial.name}: failed: {message}", True)

    def _label(self, trial: SweepTrial) -> str | None:
        """Convert a ``labelled`` evaluation to steps; returns an error message or None."""
        labelled = self.plan.content.labelled
        start = self.plan.start
        if trial.section != LABELLED or labelled is None or start is None:
            return None
        try:
            task = build_task(labelled.task, "labelled.task")
            template = build_template(start.recipe.prompt.template)
            write_labelled(trial.folder / ITEMS, task, labelled.n, template, trial.last_file)
            return None
        except PosttrainError as error:
            return str(error)
