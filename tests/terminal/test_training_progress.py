from __future__ import annotations

import io
import math
import re
import sys
from typing import Any

import pytest
from rich.console import Console

from posttrain.store.metric_names import ACCURACY, REWARD
from posttrain.terminal.console import open_console
from posttrain.terminal.training_progress import (
    LiveProgress,
    NotebookProgress,
    PlainProgress,
    Progress,
    choose_progress,
    show_evaluation,
    sparkline,
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def start(steps: int = 40, **more: Any) -> dict[str, Any]:
    return {"recipe": None, "steps": steps, "resumed_from": None, "num_examples": 5000, "dropped": {}} | more


def step(k: int, seconds: float = 0.3) -> dict[str, Any]:
    timing = {"generate_seconds": 0.6 * seconds, "update_seconds": 0.4 * seconds, "step_seconds": seconds}
    timing |= {"generate_tokens_per_second": 12000.0, "update_tokens_per_second": 30000.0}
    return {"step": k, "metrics": {"reward": k / 100, "accuracy": k / 200}, "timing": timing}


def drive(progress: Progress, clock: Clock, steps: int = 40) -> None:
    progress("start", start(steps))
    for k in range(1, steps + 1):
        clock.now += 0.5
        progress("step", step(k, seconds=0.5))
    progress("finish", {"step": steps, "reason": "finished"})


@pytest.mark.parametrize(
    ("values", "width", "drawn"),
    [
        ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 32, "▁▂▃▄▅▆▇█"),
        ([2.0, 2.0, 2.0], 32, "▁▁▁"),
        ([], 32, ""),
        ([1e308, -1e308, 0.0], 32, "█▁▅"),
        ([1.7e308] * 40, 2, "▁▁"),
        ([0.0, 0.0, 10.0, 10.0], 2, "▁█"),  # means of equal stretches
        ([0.0, math.nan, 8.0, math.inf], 32, "▁█"),
    ],
)
def test_sparkline_scales_means_of_stretches(values: list[float], width: int, drawn: str) -> None:
    assert sparkline(values, width) == drawn


INTERVAL = {"n": 256.0, "accuracy": 0.5, "accuracy_low": 0.439, "accuracy_high": 0.561, "format": 1.0}
REWARDED = {"n": 64.0, "reward": 0.731, "reward_low": 0.6, "reward_high": 0.862, "kl_initial": 2.31, "format": 1.0}


@pytest.mark.parametrize(
    ("primary", "results", "line"),
    [
        (ACCURACY, INTERVAL, "accuracy 50.0% [43.9%, 56.1%] · format 100.0% (n = 256)"),
        (REWARD, REWARDED, "reward 0.731 [0.600, 0.862] · KL from initial model 2.310 · format 100.0% (n = 64)"),
        (None, {"completion_length": 9.0}, "completion length 9.0"),
        (ACCURACY, {"accuracy": 0.5, "loss": 1.25}, "accuracy 50.0% · loss 1.250"),
    ],
)
def test_evaluation_line_has_the_primary_metric(primary: Any, results: dict[str, float], line: str) -> None:
    payload = {"step": 20, "name": "x/test", "primary_metric": primary, "results": results}
    assert show_evaluation(payload) == f"held-out x/test after 20 steps: {line}"


def test_plain_progress_prints_about_twenty_lines() -> None:
    out, clock = io.StringIO(), Clock()
    progress = PlainProgress(Console(file=out, width=80), clock)
    progress("notice", {"message": "[bold]x[/bold]"})  # no markup
    drive(progress, clock, steps=401)
    note, *lines = out.getvalue().splitlines()
    assert (note, len(lines)) == ("note: [bold]x[/bold]", 1 + 21 + 1)
    assert lines[0] == "401 steps on 5,000 examples"
    assert lines[1] == (
        "step 20/401 | reward 0.200 | accuracy 10.0% | tokens/s: generate 12,000 · update 30,000 | 3m 10s left"
    )
    assert "step 401/401" in lines[-2]
    dropped = start(dropped={"longer than the context": 7, "without an answer": 0}, resumed_from=12)
    line = "40 steps on 5,000 examples; dropped: 7 longer than the context; resumed after step 12"
    assert progress.line_of("start", dropped) == line
    assert lines[-1] == "finished after step 401, 3m 20s; steps: generate 60% · update 40%"


def test_live_progress_shows_numbers_curves_and_where_the_time_goes() -> None:
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, width=100, force_terminal=True, color_system=None)
    progress = LiveProgress(console, "tiny/grpo", clock)
    with progress:
        progress("start", start(40))
        for k in range(1, 21):
            clock.now += 0.5
            progress("step", step(k))
        shown = Console(file=io.StringIO(), width=100, record=True)
        shown.print(progress.render())
        text = shown.export_text()
    assert "step 20/40" in text
    assert "10s left" in text
    assert re.search(r"reward +0\.200  ▁▁▁▂▂▃▃▃▄▄▅▅▆▆▆▇▇███ ", text)
    assert "generate 12,000 · update 30,000 — generate 60% · update 40%" in text
    assert "tiny/grpo" in out.getvalue()


class CellStream(io.StringIO):
    """The standard output of a notebook's cell, which calls itself a terminal."""

    def isatty(self) -> bool:
        return True


CellStream.__module__ = "ipykernel.iostream"


def test_choose_progress_notebook_rewrites_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = CellStream()
    monkeypatch.setattr(sys, "stdout", stream)
    progress = choose_progress("tiny/grpo", quiet=False, console=open_console())
    assert isinstance(progress, NotebookProgress)
    progress("start", start())
    for k in range(1, 41):
        progress("step", step(k))
        if k == 20:
            progress("evaluation", {"name": "test", "step": k, "results": INTERVAL, "primary_metric": ACCURACY})
    progress("finish", {"step": 40, "reason": "finished"})
    shown = [line.split("\r")[-1] for line in stream.getvalue().split("\n")]
    assert [line[:8] for line in shown] == ["40 steps", "held-out", "finished", ""]
    assert stream.getvalue().count("step 20/40") == 2  # once as a step, once below the evaluation
    assert "\x1b" not in stream.getvalue()


def test_notebook_progress_shorter_line_covers_the_longer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = CellStream()
    monkeypatch.setattr(sys, "stdout", stream)
    progress = NotebookProgress(open_console())
    progress("start", start())
    for metrics in ({"reward": 0.5, "accuracy": 0.25}, {"reward": 0.5}):
        progress("step", step(1) | {"metrics": metrics})
    first, second = stream.getvalue().split("\r")[-2:]
    assert len(second) == len(first)
    assert second != second.rstrip()


def test_choose_progress_command_in_a_cell_rewrites_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    monkeypatch.setenv("TERM", "xterm-color")
    assert isinstance(choose_progress("tiny/grpo", quiet=False), LiveProgress)
    monkeypatch.setenv("JPY_PARENT_PID", "1")  # as kernels set it for the processes that they start
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert isinstance(choose_progress("tiny/grpo", quiet=False), NotebookProgress)
