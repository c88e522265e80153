"""The progress of an evaluation: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from posttrain.commands.console import say
from posttrain.evaluation.generation import Advance
from posttrain.evaluation.plan import EvaluationProgress
from posttrain.untrusted import guard_output

SECONDS_BETWEEN_LINES = 15.0


def describe(advance: Advance, seconds: float) -> str:
    """The share of right answers so far and the throughput, where there is any."""
    has_correct = advance.num_done and advance.num_correct is not None
    correct = f"{(advance.num_correct or 0) / advance.num_done:.1%} right" if has_correct else ""
    rate = f"{advance.num_tokens / seconds:,.0f} tokens/s" if seconds > 0 and advance.num_tokens else ""
    return " · ".join(part for part in (correct, rate) if part)


class PlainLines(EvaluationProgress):
    """A line every few seconds of a long one: for log files and pipes."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.console, self.clock = console, clock
        self.title, self.began, self.printed = "", clock(), clock()

    def begin(self, title: str) -> None:
        self.title, self.began, self.printed = title, self.clock(), self.clock()

    def observe(self, advance: Advance) -> None:
        now = self.clock()
        if now - self.printed >= SECONDS_BETWEEN_LINES and advance.num_done < advance.num_items:
            self.printed = now
            info = describe(advance, now - self.began)
            self.tell(f"{self.title}: {advance.phase} {advance.num_done}/{advance.num_items} · {info}")

    def tell(self, line: str) -> None:
        say(self.console, line)


class LiveBar(EvaluationProgress):
    """One bar, which starts again for each cell."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock, self.began, self.title = clock, clock(), ""
        columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=28), MofNCompleteColumn())
        info = TextColumn("{task.fields[info]}", markup=False)
        self.progress = Progress(*columns, TimeRemainingColumn(), info, console=console, transient=True)

    def begin(self, title: str) -> None:
        self.began, self.title = self.clock(), title
        for bar in self.progress.task_ids:
            self.progress.remove_task(bar)
        self.progress.add_task(title, total=None, info="")
        self.progress.start()
        guard_output()

    def observe(self, advance: Advance) -> None:
        title = self.title if advance.phase == "sampling" else f"{self.title} ({advance.phase})"
        info = describe(advance, self.clock() - self.began)
        [bar] = self.progress.task_ids
        self.progress.update(bar, description=title, total=advance.num_items, completed=advance.num_done, info=info)

    def tell(self, line: str) -> None:
        say(self.progress.console, line)

    def close(self) -> None:
        self.progress.stop()


def choose_evaluation_progress(console: Console, quiet: bool) -> EvaluationProgress:
    """The view that fits: nothing when quiet, a bar on a terminal, plain lines elsewhere."""
    if quiet:
        return EvaluationProgress()
    return LiveBar(console) if console.is_terminal else PlainLines(console)
