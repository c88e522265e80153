"""What is shown while an evaluation runs."""

from __future__ import annotations

import io

from rich.console import Console

from posttrain.commands.evaluate.progress import LiveBar, PlainLines, choose_evaluation_progress, describe
from posttrain.evals.generation import Advance


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_facts_by_hand() -> None:
    assert describe(Advance("sampling", 20, 100, 5.0, 3000), 2.0) == "25.0% right · 1,500 tokens/s"
    assert describe(Advance("sampling", 0, 100, 0.0, 0), 0.0) == ""


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


def test_a_bar_on_a_terminal_and_nothing_when_quiet() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=100, force_terminal=True)
    with choose_evaluation_progress(console, quiet=False) as progress:
        assert isinstance(progress, LiveBar)
        progress.begin("a [b] cell")
        progress.observe(Advance("sampling", 10, 40, 5.0, 100))
        progress.progress.refresh()
        progress.tell("it [is] replaced")
        progress.begin("another")
        progress.observe(Advance("scoring", 40, 40, 5.0, 100))
        progress.progress.refresh()
    shown = stream.getvalue()
    assert "a [b] cell" in shown
    assert "10/40" in shown
    assert "50.0% right" in shown
    assert "it [is] replaced" in shown
    assert "another (scoring)" in shown
    quiet = choose_evaluation_progress(console, quiet=True)
    assert not isinstance(quiet, LiveBar | PlainLines)
    assert isinstance(choose_evaluation_progress(Console(file=io.StringIO()), quiet=False), PlainLines)
