"""``report.html``: one self-contained page that tells what a run, or a chain of runs, has done.

Pure: facts in, text out (``templates/run.jinja``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.reports.charts.panels import Panel
from posttrain.reports.page import render

_TAG = re.compile("(</?(?:think|answer|reasoning)>)")
# Results of a stage beside its accuracy, and what they are called.
_COLUMNS = (
    ("format", "in format"),
    ("worked", "shows its working"),
    ("num_tokens", "tokens"),
    ("truncated", "cut off"),
)


@dataclass(frozen=True)
class Stage:
    """One model of the story with its held-out results (``evals/generation.py``)."""

    label: str
    description: str
    results: Mapping[str, float]


@dataclass(frozen=True)
class Answer:
    """What one model wrote for a problem. ``extracted``: the answer found in it, None for none."""

    label: str
    text: str
    is_right: bool
    extracted: str | None
    num_tokens: int
    is_cut: bool = False

    @property
    def verdict(self) -> str:
        """``right``, ``no answer``, or what was answered instead."""
        if self.is_right:
            return "right"
        return "no answer" if self.extracted is None else f"wrong: {self.extracted[:24]}"

    @property
    def pieces(self) -> list[str]:
        """The text, split at the tags of reasoning; every second piece is one."""
        return _TAG.split(self.text)


@dataclass(frozen=True)
class Transcript:
    """The same problem, answered by each model."""

    question: str
    gold: str | None
    answers: Sequence[Answer]


@dataclass(frozen=True)
class Chapter:
    """One training run: its curves, what to look for, its recipe."""

    title: str
    text: str
    panels: Sequence[Panel]
    recipe: str
    facts: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Report:
    """All that the page tells. ``commands``: (what it does, command to type)."""

    title: str
    lead: str
    stages: Sequence[Stage] = ()
    stages_note: str = ""
    chapters: Sequence[Chapter] = ()
    transcripts: Sequence[Transcript] = ()
    transcripts_note: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict)
    commands: Sequence[tuple[str, str]] = ()


def render_report(report: Report) -> str:
    """The whole page as HTML."""
    columns = [column for column in _COLUMNS if any(column[0] in stage.results for stage in report.stages)]
    page = {"title": report.title, "lead": report.lead, "environment": report.environment}
    return render("run.jinja", report=report, columns=columns, **page)
