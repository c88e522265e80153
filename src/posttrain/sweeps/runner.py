"""Running the trials of a sweep: each one a process of its own, begun as soon as what it needs is there.

Finished trials are left as they are, unfinished ones go on from where they were, and a trial that fails stops only
those that need it.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.errors import RunFailure
from posttrain.graders.sandbox.workers import count_cpus
from posttrain.runs.children import Child, end_children, start_child, threads_per_child
from posttrain.runs.directory import lock_run
from posttrain.runs.launch import stop_on_signals
from posttrain.store.durable import remove_leftovers, replace_file
from posttrain.sweeps.plan import PLAN_FILE, Plan, State, Training, Trial, prepare_folder, read_states
from posttrain.train.files import Observer
from posttrain.untrusted import consent_options

# (trial, resume) -> the command that makes it
Command = Callable[[Trial, bool], list[str]]
POLL_SECONDS = 0.3
REPORT_SECONDS = 20.0
MAX_MESSAGE = 2000  # characters of what a failed process said last


@dataclass(frozen=True)
class Outcome:
    """How a sweep went: by name, the last message of each failed trial, or what was missing to begin it."""

    failures: dict[str, str]
    interrupted: bool
    num_jobs: int
    num_threads: int


def _progress(trial: Trial) -> str:
    status = trial.status
    if status is None or not isinstance(trial, Training):
        return f"{trial.name} at work"
    line = f"{trial.name} at step {status.step}/{trial.recipe.train.steps}"
    return f"{line}, {trial.result}" if trial.result else line


def trial_command(trial: Trial, resume: bool) -> list[str]:
    """The command that makes a trial, with the Python that runs now."""
    return [sys.executable, "-m", "posttrain.cli", *trial.words(resume), *consent_options()]


def _default_jobs(plan: Plan) -> int:
    """One trial per core; one at a time where a GPU trains."""
    devices = {trial.recipe.model.device for trial in plan.trials if isinstance(trial, Training)}
    if devices <= {"cpu"}:
        return count_cpus()
    import torch

    return 1 if "mps" in devices or torch.cuda.is_available() else count_cpus()


def run_trials(
    plan: Plan,
    *,
    jobs: int | None = None,
    observer: Observer = lambda event, facts: None,
    command: Command = trial_command,
    poll_seconds: float = POLL_SECONDS,
) -> Outcome:
    """Make what is not finished yet, ``jobs`` trials at a time (one per core by default; one where a GPU trains).

    ``observer`` gets ``plan`` (num_trials and num_finished, without the start; num_jobs, num_threads), then per trial
    ``begin`` (resumed), ``end`` (seconds, result, remaining seconds), ``failure`` (message, log) or ``dropped``
    (message); from time to time ``progress`` (a line per trial at work); and ``stop`` (num_working).

    Raises:
        RunConflict: the directory belongs to something else; nothing was changed.
        RunFailure: the start could not be made.
    """
    prepare_folder(plan)
    with lock_run(plan.folder):
        states = read_states(plan)
        remove_leftovers(plan.folder)
        counted = [trial for trial in plan.trials if not trial.is_start]
        todo = [trial for trial in counted if states[trial.name] != "finished"]
        num_jobs = max(1, min(jobs if jobs is not None else _default_jobs(plan), len(counted)))
        num_threads = threads_per_child(max(1, count_cpus() // num_jobs))
        replace_file(plan.folder / PLAN_FILE, plan.to_yaml().encode())
        counts = {"num_trials": len(counted), "num_finished": len(counted) - len(todo)}
        observer("plan", counts | {"num_jobs": num_jobs, "num_threads": num_threads})
        runner = _Runner(states, observer, command, poll_seconds)
        start = plan.start
        if start is not None and todo and states[start.name] != "finished":
            runner.run([start], 1, count_cpus())
            if runner.failures:
                raise RunFailure(f"the start of the sweep failed: {runner.failures[start.name]}")
        if not runner.interrupted:
            runner.run(todo, num_jobs, num_threads)
        return Outcome(runner.failures, runner.interrupted, num_jobs, num_threads)


class _Runner:
    """Starts, watches and ends the processes."""

    def __init__(self, states: dict[str, State], observer: Observer, command: Command, poll_seconds: float) -> None:
        self.states, self.observer, self.command, self.poll_seconds = states, observer, command, poll_seconds
        self.failures: dict[str, str] = {}
        self.interrupted = False
        self.waiting: list[Trial] = []
        self.working: list[tuple[Trial, Child]] = []
        self.num_trials = 0
        self.started = self.reported = time.monotonic()

    def run(self, trials: Sequence[Trial], num_jobs: int, num_threads: int) -> None:
        """All trials, ``num_jobs`` at a time. After a signal none is begun, and those at work save and end."""
        self.waiting, self.num_trials, self.started = list(trials), len(trials), time.monotonic()
        with stop_on_signals("stopping when what is at work has saved what it has") as should_stop:
            try:
                while self.waiting or self.working:
                    if should_stop() and not self.interrupted:
                        self._stop()
                    self._drop_hopeless()
                    while len(self.working) < num_jobs and (trial := self._next_ready()) is not None:
                        self.working.append(self._begin(trial, num_threads))
                    if self.working:
                        time.sleep(self.poll_seconds)
                        self._look()
            finally:
                end_children(child for _, child in self.working)  # on the way out by an error or a second signal
                self.working.clear()

    def _stop(self) -> None:
        self.interrupted = True
        self.waiting.clear()
        for _, child in self.working:
            child.interrupt()
        self.observer("stop", {"num_working": len(self.working)})

    def _drop_hopeless(self) -> None:
        """Waiting trials that need a failed one become failures themselves."""
        for trial in list(self.waiting):
            lost = [name for name in trial.needs if name in self.failures]
            if lost:
                self.waiting.remove(trial)
                self.failures[trial.name] = f"not begun, because {lost[0]} failed"
                self.observer("dropped", {"trial": trial, "message": self.failures[trial.name]})

    def _next_ready(self) -> Trial | None:
        """Take the first waiting trial whose needs are finished."""
        for index, trial in enumerate(self.waiting):
            if all(self.states[name] == "finished" for name in trial.needs):
                return self.waiting.pop(index)
        return None

    def _begin(self, trial: Trial, num_threads: int) -> tuple[Trial, Child]:
        resume = self.states[trial.name] == "unfinished"
        path, settings = trial.settings
        replace_file(path, settings.encode(), durable=False)
        log = path.with_name(f"{trial.name}.log")
        child = start_child(self.command(trial, resume), log, "a trial", num_threads)
        self.observer("begin", {"trial": trial, "resumed": resume})
        return trial, child

    def _look(self) -> None:
        for trial, child in list(self.working):
            code = child.poll()
            if code is not None:
                self.working.remove((trial, child))
                self._end(trial, child, code)
        if self.working and time.monotonic() - self.reported > REPORT_SECONDS:
            self.reported = time.monotonic()
            self.observer("progress", {"lines": [_progress(trial) for trial, _ in self.working]})

    def _end(self, trial: Trial, child: Child, code: int) -> None:
        message = last_error(child.log, child.log_start, code) if code != 0 else trial.complete()
        if message is None and trial.state == "finished":
            self.states[trial.name] = "finished"
            left = len(self.waiting) + len(self.working)
            remaining = (
                (time.monotonic() - self.started) / (self.num_trials - left) * left
            )  # as if all took equally long
            seconds = time.monotonic() - child.started
            facts = {"trial": trial, "seconds": seconds, "remaining": remaining, "result": trial.result}
            self.observer("end", facts)
        elif not self.interrupted:
            message = message or "its process ended well, and yet it is not finished"
            self.failures[trial.name] = message
            self.observer("failure", {"trial": trial, "message": message, "log": child.log})


def last_error(log: Path, start: int, code: int) -> str:
    """The last message of a process: its error message where there is one, else its last line."""
    content = log.read_bytes()[start:].decode(errors="replace")
    lines = [line.strip() for line in content.splitlines() if line.strip()]
    said = [line.removeprefix("posttrain: ") for line in lines if line.startswith("posttrain: ")]
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return f"ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    return (said or lines or [f"ended with exit code {code} and said nothing"])[-1][:MAX_MESSAGE]
