"""Running the trials of a sweep: each one a process of its own, begun as soon as what it needs is there.

Finished trials are left as they are, unfinished ones go on from where they were, and a trial that fails stops only
those that need it.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.consent import consent_options
from posttrain.errors import RunFailure
from posttrain.graders.sandbox.workers import count_cpus
from posttrain.runs.children import Child, end_children, start_child, threads_per_child
from posttrain.runs.directory import RunStatus, lock_run
from posttrain.runs.launch import stop_on_signals
from posttrain.store.durable import remove_leftovers, replace_file
from posttrain.store.headline import ACCURACY
from posttrain.store.metrics import EvaluationPoint, evaluation_points
from posttrain.sweeps.plan import PLAN_FILE, Plan, State, Training, Trial, prepare_folder, read_states
from posttrain.train.files import Observer

# (trial, resume) -> the command that makes it
Command = Callable[[Trial, bool], list[str]]
POLL_SECONDS = 0.3
REPORT_SECONDS = 20.0
MIN_SHARE_DONE = 0.03
MAX_MESSAGE = 2000  # characters of what a failed process said last


@dataclass(frozen=True)
class Outcome:
    """How a sweep went: by name, the last message of each failed trial, or what was missing to begin it."""

    failures: dict[str, str]
    interrupted: bool
    num_jobs: int
    num_threads: int


@dataclass
class _Work:
    """A trial in progress; ``num_evaluations`` were reported before it went on."""

    trial: Trial
    child: Child
    num_evaluations: int
    metrics_bytes: int = -1

    def new_evaluations(self) -> list[EvaluationPoint]:
        """Those that were recorded since the last call."""
        path = self.trial.folder / "metrics.jsonl"
        size = path.stat().st_size if path.is_file() else -1
        if size == self.metrics_bytes:
            return []
        self.metrics_bytes = size
        points = evaluation_points(self.trial.metrics())
        known = min(self.num_evaluations, len(points))  # a resumed run drops what it will repeat
        self.num_evaluations = len(points)
        return points[known:]

    def progress(self) -> str:
        if not isinstance(self.trial, Training):
            return f"{self.trial.name} samples and scores"
        status = self.trial.status
        return f"{self.trial.name} at step {status.step if status is not None else 0}/{self.trial.recipe.train.steps}"


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
    ``begin`` (resumed), ``evaluation`` (step, result, remaining), ``end`` (seconds, result, remaining seconds),
    ``failure`` (message, log) or ``dropped`` (message); where trials are uneven, from time to time ``progress`` (a line
    per trial at work); and ``stop`` (num_working).

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
        runner = _Runner(states, plan.is_even, observer, command, poll_seconds)
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

    def __init__(
        self, states: dict[str, State], is_even: bool, observer: Observer, command: Command, poll_seconds: float
    ) -> None:
        self.states, self.is_even, self.observer = states, is_even, observer
        self.command, self.poll_seconds = command, poll_seconds
        self.failures: dict[str, str] = {}
        self.interrupted = False
        self.trials: Sequence[Trial] = ()
        self.waiting: list[Trial] = []
        self.working: list[_Work] = []
        self.shares: dict[str, float] = {}  # of each trial of this round, the share that was done when it began
        self.started = self.reported = time.monotonic()

    def run(self, trials: Sequence[Trial], num_jobs: int, num_threads: int) -> None:
        """All trials, ``num_jobs`` at a time. After a signal none is begun, and those at work save and end."""
        self.waiting, self.trials, self.started = list(trials), trials, time.monotonic()
        self.shares = {trial.name: _share_done(trial) for trial in trials}
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
                end_children(work.child for work in self.working)  # on the way out by an error or a second signal
                self.working.clear()

    def _stop(self) -> None:
        self.interrupted = True
        self.waiting.clear()
        for work in self.working:
            work.child.interrupt()
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

    def _begin(self, trial: Trial, num_threads: int) -> _Work:
        resume = self.states[trial.name] == "unfinished"
        path, settings = trial.settings
        replace_file(path, settings.encode(), durable=False)
        log = path.with_name(f"{trial.name}.log")
        child = start_child(self.command(trial, resume), log, "a trial", num_threads)
        evaluated = len(evaluation_points(trial.metrics())) if resume else 0
        self.observer("begin", {"trial": trial, "resumed": resume})
        return _Work(trial, child, evaluated)

    def _look(self) -> None:
        for work in list(self.working):
            code = work.child.poll()
            for point in work.new_evaluations():
                facts = {"trial": work.trial, "step": point.step, "result": _result(work.trial.status, point.results)}
                self.observer("evaluation", facts | {"remaining": self._remaining()})
            if code is not None:
                self.working.remove(work)
                self._end(work, code)
        if not self.is_even and time.monotonic() - self.reported > REPORT_SECONDS:
            self.reported = time.monotonic()
            self.observer("progress", {"lines": [work.progress() for work in self.working]})

    def _remaining(self) -> float | None:
        """Seconds, estimated from the shares of the trials that are done; None while that says too little."""
        total = len(self.trials) - sum(self.shares.values())
        done = sum(1.0 if trial.name in self.failures else _share_done(trial) for trial in self.trials)
        done -= sum(self.shares.values())
        if not self.is_even or done <= MIN_SHARE_DONE * total:  # loading the first models would count for too much
            return None
        return (time.monotonic() - self.started) / done * (total - done)

    def _end(self, work: _Work, code: int) -> None:
        trial = work.trial
        message = last_error(work.child.log, work.child.log_start, code) if code != 0 else trial.complete()
        if message is None and trial.state == "finished":
            self.states[trial.name] = "finished"
            status = trial.status
            facts = {"trial": trial, "seconds": time.monotonic() - work.child.started, "remaining": self._remaining()}
            self.observer("end", facts | {"result": "" if status is None else _result(status, status.held_out)})
        elif not self.interrupted:
            message = message or "its process ended well, and yet it is not finished"
            self.failures[trial.name] = message
            self.observer("failure", {"trial": trial, "message": message, "log": work.child.log})


def _result(status: RunStatus | None, results: Mapping[str, float]) -> str:
    """Results of a trial by its run's primary metric, without an interval."""
    headline = ACCURACY if status is None or status.headline is None else status.headline
    return headline.tell(headline.only(results))


def _share_done(trial: Trial) -> float:
    status = trial.status
    return min(status.step / status.steps, 1.0) if status is not None and status.steps else 0.0


def last_error(log: Path, start: int, code: int) -> str:
    """The last message of a process: its error message where there is one, else its last line."""
    content = log.read_bytes()[start:].decode(errors="replace")
    lines = [line.strip() for line in content.splitlines() if line.strip()]
    said = [line.removeprefix("posttrain: ") for line in lines if line.startswith("posttrain: ")]
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return f"ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    return (said or lines or [f"ended with exit code {code} and said nothing"])[-1][:MAX_MESSAGE]
