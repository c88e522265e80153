"""What is shown while an evaluation runs."""

from __future__ import annotations

import io

from rich.console import Console

from posttrain.commands.evaluate.progress import PlainLines
from posttrain.evals.generation import Advance


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_line_every_few_seconds() -> None:
    clock, stream = Clock(), io.StringIO()
    with PlainLines(Console(file=stream, width=100), clock) as progress:
        progress.begin("stories/test · tiny · plain", 4)
        for done, seconds in ((10, 5), (20, 12), (30, 2), (40, 20)):
            clock.now += seconds
            progress.observe(Advance("sampling", done, 40, done / 2, done * 10))
    assert stream.getvalue().splitlines() == [
        "stories/test · tiny · plain: goes on after 4 items",
        "stories/test · tiny · plain: sampling 20/40 · 50.0% right · 12 tokens/s",
    ]
