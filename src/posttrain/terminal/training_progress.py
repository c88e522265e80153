"""Training progress: a live panel, plain lines, or nothing.

A progress display is an observer (``training/files.py``), called with an event and payload. It never affects training.
"""

from __future__ import annotations

import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table

from posttrain.activity import heartbeat
from posttrain.runs.launch import start_text
from posttrain.store.metric_names import ACCURACY, METRICS
from posttrain.terminal.console import Text, is_notebook, open_console, say
from posttrain.untrusted import guard_output, harmless, note_output

BARS = "▁▂▃▄▅▆▇█"
NUM_PLAIN_LINES = 20
# Shown in this order, if reported.
SHOWN = (
    "reward", "accuracy", "format", "completion_length", "truncated", "masked", "loss", "nll", "margin",
    "pair_accuracy", "answer_accuracy", "step_accuracy", "divergence", "value_explained_variance", "entropy", "kl_ref",
    "kl_sampler", "effective_sample_size", "clip_fraction", "uniform_groups", "grad_norm",
)  # fmt: skip
PLAIN = (
    "reward", "accuracy", "completion_length", "loss", "margin", "pair_accuracy", "answer_accuracy", "step_accuracy",
    "entropy", "kl_ref", "clip_fraction",
)  # fmt: skip
# Displayed events and terminal styles.
STYLES = {"start": "dim", "evaluation": "bold", "notice": "yellow", "finish": "dim"}
PHASES = ("generate", "score", "fill", "update")


def sparkline(values: Sequence[float], width: int = 32) -> str:
    """Draw a series in at most ``width`` characters, averaging over equal intervals, scaled to min and max.

    Non-finite values are skipped. A constant series is drawn with the lowest bar.
    """
    finite = [v for v in values if math.isfinite(v)]
    count = min(width, len(finite))
    edges = []
    if count:
        edges = [round(i * len(finite) / count) for i in range(count + 1)]
    largest = max(map(abs, finite), default=0.0) or 1.0  # normalized to avoid overflow in sums and differences
    means = [sum(value / largest for value in finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    low = min(means, default=0.0)
    span = max(means, default=0.0) - low or 1.0
    return "".join(BARS[min(len(BARS) - 1, int((v - low) / span * len(BARS)))] for v in means)


def show_duration(seconds: float) -> str:
    """``7s``, ``2m 05s``, ``1h 02m``."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    if minutes >= 60:
        return f"{minutes // 60}h {minutes % 60:02d}m"
    if minutes:
        return f"{minutes}m {rest:02d}s"
    return f"{rest}s"


def show_evaluation(payload: dict[str, Any]) -> str:
    """Summarize an evaluation: primary metric with 95 % interval, format, length."""
    results = payload["results"]
    primary = payload["primary_metric"]
    parts = []
    if primary is not None and primary.value(results) is not None:
        parts.append(primary.describe(results))
    further = ["format", "completion_length", "shows_reasoning"]
    if primary is ACCURACY:
        further.append("loss")
    parts += _shown(further, results)
    of = ""
    if "n" in results and results.get("repeated_prompts"):
        of = f" (n = {results['n']:.0f} distinct prompts)"
    elif "n" in results:
        of = f" (n = {results['n']:.0f})"
    return f"held-out {payload['name']} after {payload['step']} steps: {' · '.join(parts)}{of}"


def _shown(names: Iterable[str], results: Mapping[str, float]) -> list[str]:
    """Format label and value for each available metric."""
    return [f"{METRICS[name].label} {METRICS[name].show(results[name])}" for name in names if name in results]


def show_kinds(results: Mapping[str, float]) -> list[str]:
    """Format accuracy by category, one line per key: ``by level: 1 80.0% (n = 10) · 2 ...``."""
    parts: dict[str, list[str]] = {}
    for name, value in results.items():
        kind, _, measure = name.rpartition(":")
        if "=" in kind and measure.endswith("accuracy"):
            key, _, shown = kind.partition("=")
            count = results.get(f"{name}_n", 0.0)
            parts.setdefault(key, []).append(f"{shown} {METRICS[measure].show(value)} (n = {count:.0f})")
    return [f"by {key}: {' · '.join(values)}" for key, values in parts.items()]


class Progress:
    """Tracks run state for display. As a quiet view, it prints only notices, to stderr."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.steps = self.step = self.first_step = 0
        self.started = self.pace_started = clock()
        self.series: dict[str, list[float]] = defaultdict(list)
        self.timing: dict[str, float] = {}
        self.seconds: dict[str, float] = defaultdict(float)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to put away."""

    def __call__(self, event: str, payload: dict[str, Any]) -> None:
        if event == "start":
            self.steps = int(payload["steps"])
            self.step = self.first_step = int(payload.get("resumed_from") or 0)
            self.started = self.pace_started = self._clock()
        elif event == "step":
            self._add(payload)
        self.show(event, payload)

    def _add(self, payload: dict[str, Any]) -> None:
        self.step = int(payload["step"])
        self.timing = dict(payload["timing"])
        if self.step == self.first_step + 1:  # exclude loading and earlier evaluations from the pace
            self.pace_started = self._clock() - self.timing.get("step_seconds", 0.0)
        for name, value in payload["metrics"].items():
            self.series[name].append(float(value))
        for name, value in self.timing.items():
            self.seconds[name] += value

    def show(self, event: str, payload: dict[str, Any]) -> None:
        """Display an event after updating the state."""
        if event == "notice":
            print(self.line_of(event, payload), file=sys.stderr)

    def line_of(self, event: str, payload: dict[str, object]) -> str:
        """Return a line for an event: ``finished after step 40, 1m 49s; steps: generate 43% · update 57%``."""
        if event == "start":
            return start_text(payload)
        if event == "evaluation":
            return show_evaluation(payload)
        if event == "notice":
            return f"note: {payload['message']}"
        line = f"{payload['reason']} after step {payload['step']}, {show_duration(self.elapsed())}"
        phases = self.phases()
        if phases:
            line = f"{line}; steps: {phases}"
        return line

    def elapsed(self) -> float:
        """Seconds since start."""
        return self._clock() - self.started

    def remaining(self) -> float | None:
        """Estimate remaining seconds; None before any step finished."""
        done = self.step - self.first_step
        if not done:
            return None
        return (self._clock() - self.pace_started) / done * (self.steps - self.step)

    def phases(self) -> str:
        """``generate 62% · score 1% · update 37%``: fractions of step time, including a server that samples ahead."""
        spent = {name: self.seconds.get(f"{name}_seconds", 0.0) for name in PHASES}
        total = sum(spent.values()) or 1.0
        return " · ".join(f"{name} {used / total:.0%}" for name, used in spent.items() if used >= 0.005 * total)

    def rates(self) -> str:
        """Format tokens per second in the latest step: generated, updated."""
        parts = []
        for name in ("generate", "update"):
            rate = self.timing.get(f"{name}_tokens_per_second")
            if rate:
                parts.append(f"{name} {rate:,.0f}")
        if not parts and self.timing.get("tokens_per_second"):
            parts.append(f"{self.timing['tokens_per_second']:,.0f}")
        if not parts:
            return ""
        return f"tokens/s: {' · '.join(parts)}"


class PlainProgress(Progress):
    """About twenty lines for a whole run: for log files and pipes."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._console = console
        self._heartbeat = heartbeat("training", console.file)

    def __enter__(self) -> Self:
        self._heartbeat.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._heartbeat.__exit__(None, None, None)

    def show(self, event: str, payload: dict[str, Any]) -> None:
        every = max(1, self.steps // NUM_PLAIN_LINES)
        if event == "step" and (self.step % every == 0 or self.step == self.steps):
            say(self._console, self.step_line(payload["metrics"]))
        elif event in STYLES:
            say(self._console, self.line_of(event, payload))

    def step_line(self, metrics: Mapping[str, float]) -> str:
        """Format a step: ``step 3/40 | reward 0.41 | ... | 1m 20s left``."""
        parts = [f"step {self.step}/{self.steps}", *_shown(PLAIN, metrics), self.rates()]
        remaining = self.remaining()
        if remaining:
            parts.append(f"{show_duration(remaining)} left")
        return " | ".join(part for part in parts if part)


class NotebookProgress(PlainProgress):
    """One line in a cell's output, rewritten at every step; evaluations and notes are printed above it."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console, clock)
        self._line = ""

    def show(self, event: str, payload: dict[str, Any]) -> None:
        if event == "step":
            self._rewrite(harmless(self.step_line(payload["metrics"])))
        elif event in STYLES:
            line = self._line
            self._rewrite("")
            say(self._console, self.line_of(event, payload))
            if event != "finish":
                self._rewrite(line)

    def _rewrite(self, line: str) -> None:
        """Overwrite the current line, padding with spaces."""
        end = ""
        if not line:
            end = "\r"
        if line or self._line:
            note_output()
            print(f"\r{line:{len(self._line)}}", end=end, file=self._console.file, flush=True)
        self._line = line


class LiveProgress(Progress):
    """A panel updated in place: metrics, sparklines, and a time breakdown."""

    def __init__(self, console: Console, title: str, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._console = console
        self._title = title
        self._live = Live(console=console, refresh_per_second=8, transient=False, get_renderable=self.render)

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def show(self, event: str, payload: dict[str, Any]) -> None:
        if event == "finish":
            self._live.stop()
        if event in STYLES:
            self._console.print(Text(self.line_of(event, payload), style=STYLES[event]))
        if event == "start":
            self._live.start(refresh=True)
            guard_output()  # rich has put its own streams there, which would obey escape sequences
        elif self._live.is_started:
            self._live.refresh()

    def render(self) -> RenderableType:
        """Render the current panel."""
        head = Table.grid(padding=(0, 2))
        remaining = self.remaining()
        left = "starting"
        if remaining is not None:
            left = f"{show_duration(remaining)} left"
        head.add_row(
            Text(f"step {self.step}/{self.steps}", style="bold"),
            ProgressBar(total=max(1, self.steps), completed=self.step, width=28),
            Text(f"{show_duration(self.elapsed())} · {left}", style="dim"),
        )
        numbers = Table.grid(padding=(0, 2))
        for metric in map(METRICS.__getitem__, SHOWN):
            series = self.series.get(metric.name)
            if series:
                line = Text(sparkline(series), style="cyan")
                numbers.add_row(Text(metric.label, style="dim"), Text(metric.show(series[-1])), line)
        foot = Text(" — ".join(part for part in (self.rates(), self.phases()) if part), style="dim")
        return Panel(Group(head, numbers, foot), title=Text(self._title), title_align="left", expand=False)


def choose_progress(title: str, quiet: bool, console: Console | None = None) -> Progress:
    """Choose a view: silent if quiet, a panel in a terminal, one line in a notebook, otherwise plain lines."""
    if quiet:
        return Progress()
    target = console or open_console()
    if target.is_terminal:
        return LiveProgress(target, title)
    if is_notebook():
        return NotebookProgress(target)
    return PlainProgress(target)
