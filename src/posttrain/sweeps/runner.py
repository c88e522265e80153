"""Making the parts of a sweep: each one a process of its own, begun as soon as what it needs is there.

A part is what `posttrain train` or `posttrain evaluate` makes of it. Finished parts are left as they are, unfinished
ones go on from where they were, and a part that fails stops only those that need it.
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
from posttrain.sweeps.plan import Part, Plan, Standing, Training, prepare_folder, standings
from posttrain.train.files import Observer

# (part, resume) -> the command that makes it
Command = Callable[[Part, bool], list[str]]
POLL_SECONDS = 0.3
TELL_SECONDS = 20.0
MIN_SHARE_DONE = 0.03
MAX_SAID = 2000  # characters of what a failed process said last


@dataclass(frozen=True)
class Outcome:
    """How a sweep went: by name, what each failed part said last, or what was missing to begin it."""

    failures: dict[str, str]
    interrupted: bool
    num_jobs: int
    num_threads: int


@dataclass
class _Work:
    """A part in progress. So many evaluations were told before it went on."""

    part: Part
    child: Child
    num_evaluations: int
    metrics_bytes: int = -1

    def new_evaluations(self) -> list[EvaluationPoint]:
        """Those that were recorded since it was last asked."""
        path = self.part.folder / "metrics.jsonl"
        size = path.stat().st_size if path.is_file() else -1
        if size == self.metrics_bytes:
            return []
        self.metrics_bytes = size
        points = evaluation_points(self.part.metrics())
        known = min(self.num_evaluations, len(points))  # a resumed run drops what it will repeat
        self.num_evaluations = len(points)
        return points[known:]


def part_command(part: Part, resume: bool) -> list[str]:
    """The command that makes a part, with the Python that runs now."""
    return [sys.executable, "-m", "posttrain.cli", *part.words(resume), *consent_options()]


def _default_jobs(plan: Plan) -> int:
    """One part per core; one at a time where a GPU trains."""
    devices = {part.recipe.model.device for part in plan.parts if isinstance(part, Training)}
    if devices <= {"cpu"}:
        return count_cpus()
    import torch

    return 1 if "mps" in devices or torch.cuda.is_available() else count_cpus()


def run_sweep(
    plan: Plan,
    *,
    jobs: int | None = None,
    observer: Observer = lambda event, facts: None,
    command: Command = part_command,
    poll_seconds: float = POLL_SECONDS,
) -> Outcome:
    """Make what is not finished yet, ``jobs`` parts at a time (one per core by default; one where a GPU trains).

    ``observer`` is told ``plan`` (num_parts and num_finished, without a part that stands alone; num_jobs,
    num_threads), then per part ``begin`` (resumed), ``end`` (seconds, told, remaining seconds), ``failure``
    (message, log) or ``dropped`` (message); ``evaluation`` (step, told, remaining) where parts are even, elsewhere
    now and then ``progress`` (a line per part at work); and ``stop`` (num_working).

    Raises:
        RunConflict: the directory belongs to something else; nothing was changed.
        RunFailure: a part that stands alone could not be made.
    """
    prepare_folder(plan)
    with lock_run(plan.folder):
        standing = standings(plan)
        remove_leftovers(plan.folder)
        counted = [part for part in plan.parts if not part.alone]
        todo = [part for part in counted if standing[part.name] != "finished"]
        num_jobs = max(1, min(jobs if jobs is not None else _default_jobs(plan), len(counted)))
        num_threads = threads_per_child(max(1, count_cpus() // num_jobs))
        replace_file(plan.folder / plan.file_name, plan.to_yaml().encode())
        counts = {"num_parts": len(counted), "num_finished": len(counted) - len(todo)}
        observer("plan", counts | {"num_jobs": num_jobs, "num_threads": num_threads})
        runner = _Runner(standing, plan.is_even, observer, command, poll_seconds)
        for part in plan.parts:
            if part.alone and todo and standing[part.name] != "finished":
                runner.run([part], 1, count_cpus())
                if runner.failures:
                    message = runner.failures[part.name]
                    raise RunFailure(f"the {part.name} of the {plan.what} failed: {message}")
        if not runner.interrupted:
            runner.run(todo, num_jobs, num_threads)
        return Outcome(runner.failures, runner.interrupted, num_jobs, num_threads)


class _Runner:
    """Starts, watches and ends the processes."""

    def __init__(
        self,
        standing: dict[str, Standing],
        is_even: bool,
        observer: Observer,
        command: Command,
        poll_seconds: float,
    ) -> None:
        self.standing, self.is_even, self.observer = standing, is_even, observer
        self.command, self.poll_seconds = command, poll_seconds
        self.failures: dict[str, str] = {}
        self.interrupted = False
        self.parts: Sequence[Part] = ()
        self.waiting: list[Part] = []
        self.working: list[_Work] = []
        self.shares: dict[str, float] = {}  # of each part of this round, what was done when it began
        self.started = self.told = time.monotonic()

    def run(self, parts: Sequence[Part], num_jobs: int, num_threads: int) -> None:
        """All parts, ``num_jobs`` at a time. After a signal none is begun, and those at work save and end."""
        self.waiting, self.parts, self.started = list(parts), parts, time.monotonic()
        self.shares = {part.name: _share_done(part) for part in parts}
        with stop_on_signals("stopping when what is at work has saved what it has") as should_stop:
            try:
                while self.waiting or self.working:
                    if should_stop() and not self.interrupted:
                        self._stop()
                    self._drop_hopeless()
                    while len(self.working) < num_jobs and (part := self._next_ready()) is not None:
                        self.working.append(self._begin(part, num_threads))
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
        """Waiting parts that need a failed one become failures themselves."""
        for part in list(self.waiting):
            lost = [name for name in part.needs if name in self.failures]
            if lost:
                self.waiting.remove(part)
                self.failures[part.name] = f"not begun, for {lost[0]} failed"
                self.observer("dropped", {"part": part, "message": self.failures[part.name]})

    def _next_ready(self) -> Part | None:
        """The first waiting part whose needs are finished; it waits no longer."""
        for index, part in enumerate(self.waiting):
            if all(self.standing[name] == "finished" for name in part.needs):
                return self.waiting.pop(index)
        return None

    def _begin(self, part: Part, num_threads: int) -> _Work:
        resume = self.standing[part.name] == "unfinished"
        path, settings = part.settings
        replace_file(path, settings.encode(), durable=False)
        log = path.with_name(f"{part.name}.log")
        child = start_child(self.command(part, resume), log, "a part", num_threads)
        evaluated = len(evaluation_points(part.metrics())) if resume else 0
        self.observer("begin", {"part": part, "resumed": resume})
        return _Work(part, child, evaluated)

    def _look(self) -> None:
        for work in list(self.working):
            code = work.child.poll()
            if self.is_even:
                self._tell_evaluations(work)
            if code is not None:
                self.working.remove(work)
                self._end(work, code)
        if not self.is_even and time.monotonic() - self.told > TELL_SECONDS:
            self.told = time.monotonic()
            self.observer("progress", {"lines": [work.part.whereabouts for work in self.working]})

    def _tell_evaluations(self, work: _Work) -> None:
        for point in work.new_evaluations():
            told = _told(work.part.status, point.results)
            facts = {"part": work.part, "step": point.step, "told": told}
            self.observer("evaluation", facts | {"remaining": self._remaining()})

    def _remaining(self) -> float | None:
        """Seconds, told from the shares of the parts that are done; None while that says too little."""
        total = len(self.parts) - sum(self.shares.values())
        done = sum(1.0 if part.name in self.failures else _share_done(part) for part in self.parts)
        done -= sum(self.shares.values())
        if not self.is_even or done <= MIN_SHARE_DONE * total:  # loading the first models would count for too much
            return None
        return (time.monotonic() - self.started) / done * (total - done)

    def _end(self, work: _Work, code: int) -> None:
        part = work.part
        message = last_error(work.child.log, work.child.log_start, code) if code != 0 else part.complete()
        if message is None and part.standing == "finished":
            self.standing[part.name] = "finished"
            status = part.status
            facts = {"part": part, "seconds": time.monotonic() - work.child.started, "remaining": self._remaining()}
            told = "" if status is None else _told(status, status.held_out)
            self.observer("end", facts | {"told": told})
        elif not self.interrupted:
            message = message or "its process ended well, and yet it is not finished"
            self.failures[part.name] = message
            self.observer("failure", {"part": part, "message": message, "log": work.child.log})


def _told(status: RunStatus | None, results: Mapping[str, float]) -> str:
    """Results of a part by its run's headline, without an interval."""
    headline = ACCURACY if status is None or status.headline is None else status.headline
    return headline.tell(headline.only(results))


def _share_done(part: Part) -> float:
    status = part.status
    return min(status.step / status.steps, 1.0) if status is not None and status.steps else 0.0


def last_error(log: Path, start: int, code: int) -> str:
    """What a process said last: its error message where there is one, else its last line."""
    content = log.read_bytes()[start:].decode(errors="replace")
    lines = [line.strip() for line in content.splitlines() if line.strip()]
    said = [line.removeprefix("posttrain: ") for line in lines if line.startswith("posttrain: ")]
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return f"ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    return (said or lines or [f"ended with exit code {code} and said nothing"])[-1][:MAX_SAID]
