"""Evaluation progress: a bar in a terminal, occasional lines elsewhere."""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from posttrain.activity import heartbeat
from posttrain.evaluation.generation import Advance
from posttrain.evaluation.plan import EvaluationProgress
from posttrain.terminal.console import say
from posttrain.untrusted import guard_output

SECONDS_BETWEEN_LINES = 15.0


class View(EvaluationProgress):
    """A progress bar per trial; outside a terminal, a line every few seconds."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.title = ""
        self.began = 0.0
        self.printed = 0.0
        columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=28), MofNCompleteColumn())
        info = TextColumn("{task.fields[info]}", markup=False)
        self.bars = Progress(*columns, TimeRemainingColumn(), info, console=console, transient=True)

        self.heartbeat = heartbeat("evaluation", console.file, is_on=not console.is_terminal)

    def __enter__(self) -> Self:
        self.heartbeat.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.heartbeat.__exit__(None, None, None)
        self.close()

    def begin(self, title: str) -> None:
        self.title = title
        self.began = time.monotonic()
        self.printed = self.began
        if self.console.is_terminal:
            for bar in self.bars.task_ids:
                self.bars.remove_task(bar)
            self.bars.add_task(title, total=None, info="")
            self.bars.start()
            guard_output()

    def observe(self, advance: Advance) -> None:
        now = time.monotonic()
        done = advance.num_done
        total = advance.num_items
        seconds = now - self.began
        facts = []
        if done and advance.num_correct is not None:
            facts.append(f"{advance.num_correct / done:.1%} right")
        if seconds > 0 and advance.num_tokens:
            facts.append(f"{advance.num_tokens / seconds:,.0f} tokens/s")
        info = " · ".join(facts)
        if self.console.is_terminal:
            title = self.title
            if advance.phase != "sampling":
                title = f"{title} ({advance.phase})"
            self.bars.update(self.bars.task_ids[0], description=title, total=total, completed=done, info=info)
        elif now - self.printed >= SECONDS_BETWEEN_LINES and done < total:
            self.printed = now
            self.tell(f"{self.title}: {advance.phase} {done}/{total} · {info}")

    def tell(self, line: str) -> None:
        say(self.console, line)

    def close(self) -> None:
        if self.console.is_terminal:
            self.bars.stop()


def choose_evaluation_progress(console: Console, quiet: bool) -> EvaluationProgress:
    """Choose a progress view; silent if ``quiet``."""
    if quiet:
        return EvaluationProgress()
    return View(console)
