"""What a person sees while an evaluation runs: a bar that moves on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from posttrain.commands.console import say
from posttrain.evals.generation import Advance
from posttrain.evals.plan import EvaluationProgress
from posttrain.untrusted import guard_output

SECONDS_BETWEEN_LINES = 15.0


class Shown(EvaluationProgress):
    """The quiet view, and the base of the others: told how an evaluation goes on, and put away at its end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Put everything away."""


def describe(advance: Advance, seconds: float) -> str:
    """Share right so far and throughput, as far as there is something to tell."""
    parts = []
    if advance.num_done and advance.num_right is not None:
        parts.append(f"{advance.num_right / advance.num_done:.1%} right")
    if seconds > 0 and advance.num_tokens:
        parts.append(f"{advance.num_tokens / seconds:,.0f} tokens/s")
    return " · ".join(parts)


class PlainLines(Shown):
    """A line when a cell goes on from before, and one every few seconds of a long one: for log files and pipes."""

    def __init__(self, console: Console, clock: Any = time.monotonic) -> None:
        self.console, self.clock = console, clock
        self.title, self.began, self.told = "", clock(), clock()

    def begin(self, title: str, num_known: int = 0) -> None:
        self.title, self.began, self.told = title, self.clock(), self.clock()
        if num_known:
            self._print(f"{title}: goes on after {num_known} items")

    def observe(self, advance: Advance) -> None:
        now = self.clock()
        if now - self.told >= SECONDS_BETWEEN_LINES and advance.num_done < advance.num_items:
            self.told = now
            facts = describe(advance, now - self.began)
            self._print(f"{self.title}: {advance.phase} {advance.num_done}/{advance.num_items} · {facts}")

    def tell(self, line: str) -> None:
        self._print(line)

    def _print(self, line: str) -> None:
        say(self.console, line)


class LiveBar(Shown):
    """One bar, which starts again for each cell."""

    def __init__(self, console: Console, clock: Any = time.monotonic) -> None:
        self.clock, self.began = clock, clock()
        columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=28), MofNCompleteColumn())
        facts = TextColumn("{task.fields[facts]}", markup=False)
        self.progress = Progress(*columns, TimeRemainingColumn(), facts, console=console, transient=True)
        self.bar: TaskID | None = None
        self.title = ""

    def begin(self, title: str, num_known: int = 0) -> None:
        self.began, self.title = self.clock(), title
        if self.bar is not None:
            self.progress.remove_task(self.bar)
        self.bar = self.progress.add_task(title, total=None, completed=num_known, facts="")
        self.progress.start()
        guard_output()

    def observe(self, advance: Advance) -> None:
        assert self.bar is not None, "a cell was begun"
        facts = describe(advance, self.clock() - self.began)
        title = self.title if advance.phase == "sampling" else f"{self.title} ({advance.phase})"
        self.progress.update(
            self.bar, description=title, total=advance.num_items, completed=advance.num_done, facts=facts
        )

    def tell(self, line: str) -> None:
        say(self.progress.console, line)

    def close(self) -> None:
        self.progress.stop()


def choose_evaluation_progress(console: Console, quiet: bool) -> Shown:
    """The view that fits: nothing when quiet, a bar on a terminal, plain lines elsewhere."""
    if quiet:
        return Shown()
    return LiveBar(console) if console.is_terminal else PlainLines(console)
