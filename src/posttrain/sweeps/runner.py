"""Running the trials of a sweep: each one a process of its own, begun as soon as what it needs is there.

Finished trials are left as they are, unfinished ones go on from where they were, and a trial that fails stops only
those that need it.
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
from posttrain.runs.directory import lock_run, refuse_live_folder, wait_for_end
from posttrain.runs.paths import PLAN
from posttrain.store.durable import refuse_links, remove_leftovers, replace_file, storage_errors
from posttrain.sweeps.file import LABELLED
from posttrain.sweeps.labelling import write_labelled
from posttrain.sweeps.plan import SweepPlan, SweepTrial, Training, TrialState
from posttrain.untrusted import allow_code_options

MakeCommand = Callable[[SweepTrial, bool], list[str]]  # (trial, resume) -> the command that makes it
Say = Callable[[str, bool], None]  # a line about the progress, and whether it tells of a failure
POLL_SECONDS = 0.3
NUM_CONFLICTS_SHOWN = 3


@dataclass
class SweepOutcome:
    """The end of a sweep: by name, the last message of each failed trial, or the reason why it was not begun."""

    failures: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False


def read_states(plan: SweepPlan) -> dict[str, TrialState]:
    """The state of each trial, by name.

    Raises:
        RunConflict: some belong to another recipe, or to a process that does not end, or depend on weights that are
            gone; the message says which.
    """
    working = wait_for_end(trial.folder for trial in plan.trials)
    states = {trial.name: trial.state for trial in plan.trials}
    if working:
        problems = [f"{folder}: another process is working in it ({process})" for folder, process in working.items()]
        raise _conflict(problems, "Wait for it or stop it; the same command then goes on")
    problems = []
    for trial in plan.trials:
        if states[trial.name] == "new":
            continue
        conflict = trial.conflict()
        if conflict is not None:
            problems.append(conflict)
        for name in trial.needs:
            if states[name] != "finished":
                problems.append(f"{trial.folder}: made from an earlier {name}, which is gone or not finished")
    if problems:
        raise _conflict(problems, "Delete these trials first")
    return states


def _conflict(problems: list[str], remedy: str) -> RunConflict:
    shown = problems[:NUM_CONFLICTS_SHOWN]
    more = len(problems) - len(shown)
    if more > 0:
        shown.append(f"and {more} more.")
    what = "\n".join(shown)
    return RunConflict(f"{what}\nNothing was changed. {remedy}. Or run it under another name with --run NAME")


def trial_command(trial: SweepTrial, resume: bool) -> list[str]:
    """The command that makes a trial, or continues it, with the Python that runs now."""
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
    """Make what is not finished yet, ``jobs`` trials at a time (one per core by default; one where a GPU trains).

    Raises:
        RunConflict: the directory belongs to something else; nothing was changed.
        RunFailure: the start could not be made.
    """
    folder = plan.folder
    if _holds_something_else(folder):
        raise RunConflict(f"{folder}: something else than a sweep is there. Choose another name with --run NAME")
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
        line = f"{len(plan.trials)} trials, {num_jobs} at a time, threads of each: {num_threads}"
        if done:
            line = f"{line}; {done} finished already"
        say(line, False)
        return _Runner(plan, states, say, command, num_jobs, num_threads, todo).run(poll_seconds)


def _holds_something_else(folder: Path) -> bool:
    """Return whether a folder, or a file in its place, is neither a sweep's nor what a killed start left."""
    if not folder.exists() or (folder / PLAN).is_file():
        return False
    if not folder.is_dir():
        return True
    return any(not item.name.startswith((".lock", ".tmp-")) for item in folder.iterdir())


def _default_jobs(plan: SweepPlan) -> int:
    """One trial per core; one at a time where a GPU trains."""
    devices = {trial.recipe.model.device for trial in plan.trials if isinstance(trial, Training)}
    if devices <= {"cpu"}:
        return count_cpus()
    import torch

    if "mps" in devices or torch.cuda.is_available():
        return 1
    return count_cpus()


@dataclass
class _Runner:
    """Starts, watches and ends the processes."""

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
        """All trials. After a signal none is begun, and those at work save and end."""
        stop = stop_on_signals("stopping when what is at work has saved what it has")
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
                end_children(child for _, child in self.working)  # on the way out by an error or a second signal
        return self.outcome

    def _describe(self) -> str:
        at_work = ", ".join(trial.name for trial, _ in self.working) or "none"
        num_finished = sum(state == "finished" for state in self.states.values())
        return f"{num_finished} of {len(self.states)} trials are finished, at work: {at_work}"

    def _begin(self) -> None:
        """Begin those waiting trials whose needs are finished; those that need a failed one become failures."""
        for trial in list(self.waiting):
            lost = [name for name in trial.needs if name in self.outcome.failures]
            if lost:
                self.waiting.remove(trial)
                self._fail(trial, f"not begun, because {lost[0]} failed")
            elif len(self.working) < self.num_jobs and all(self.states[name] == "finished" for name in trial.needs):
                self.waiting.remove(trial)
                self._start(trial)

    def _start(self, trial: SweepTrial) -> None:
        path, settings = trial.settings
        replace_file(path, settings.encode(), durable=False)
        threads = self.num_threads
        if trial.row == "start":  # nothing else runs before it
            threads = count_cpus()
        resume = self.states[trial.name] == "unfinished"
        begun = "started"
        if resume:
            begun = "goes on"
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
            self._fail(trial, message or "its process ended well, and yet it is not finished")

    def _fail(self, trial: SweepTrial, message: str) -> None:
        self.outcome.failures[trial.name] = message
        self.say(f"{trial.name}: failed: {message}", True)

    def _label(self, trial: SweepTrial) -> str | None:
        """Turn the answers of an evaluation for ``labelled`` into steps; returns what went wrong."""
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
