"""Sweep results: sections with tables, findings, notes and data."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

from posttrain.evaluation import tables as text
from posttrain.evaluation.statistics import Summary
from posttrain.evaluation.tables import NOTHING, TextTable
from posttrain.store.durable import sayable
from posttrain.untrusted import bullets, paragraph, plain

ShownAnswer = tuple[str, str, float | None]  # author, text, score
ShownPrompt = tuple[str, list[ShownAnswer]]  # prompt and answers


@dataclass(frozen=True)
class SweepPart:
    """A results section about a sweep's rows.

    ``findings``: one sentence each. ``notes``: help with reading the numbers. ``data``: plain data for
    ``results.json``. ``drawn``: arguments for the plotting function in ``reports.sweeps``. ``samples``: prompts with
    answers.
    """

    tables: list[TextTable]
    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    drawn: tuple[Any, ...] = ()
    samples: list[ShownPrompt] = field(default_factory=list)


@dataclass(frozen=True)
class SweepResults:
    """Everything reported about a sweep.

    ``parts`` by name: ``rows``, ``best_of_n``, ``overoptimization``, ``head_to_head``, and learning of reward models
    and policies. ``file``: text of ``sweep.yaml`` with complete recipes. ``runs``: name, state, result and report
    link for each run. ``made``: work done by each row's runs.
    """

    title: str
    description: str
    command: str
    parts: dict[str, SweepPart]
    file: str = ""
    differences: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    made: list[str] = field(default_factory=list)
    runs: list[tuple[str, str, str, str]] = field(default_factory=list)

    @property
    def tables(self) -> list[TextTable]:
        return [table for part in self.parts.values() for table in part.tables]

    @property
    def findings(self) -> list[str]:
        return [line for part in self.parts.values() for line in part.findings]

    @property
    def notes(self) -> list[str]:
        return list(dict.fromkeys(line for part in self.parts.values() for line in part.notes))

    def to_markdown(self) -> str:
        """Render ``table.md``."""
        parts = [f"# {plain(self.title)}\n"]
        if self.description:
            parts.append(f"{paragraph(self.description)}\n")
        parts.append(bullets([*self.problems, *self.findings]))
        parts += [text.to_markdown(table) for table in self.tables]
        parts.append(bullets(self.notes))
        if self.made:
            parts.append(f"## What was run\n\n{bullets(self.made)}")
        if self.differences:
            parts.append(f"## What differs\n\n{bullets(self.differences)}")
        parts.append(f"## Reproduce\n\n```\n{self.command}\n```\n")
        return "\n".join(part for part in parts if part)

    def to_json(self) -> str:
        """Render ``results.json``: all results, unrounded; non-finite numbers become null."""
        names = ("title", "description", "command", "problems", "findings", "notes", "made", "differences")
        content = {name: getattr(self, name) for name in names}
        for part in self.parts.values():
            content |= part.data
        return json.dumps(sayable(content), indent=1, allow_nan=False)


def scale_of(*, is_share: bool, digits: int = 2) -> tuple[float, int, str]:
    """Choose factor, decimals and unit for showing a number, or a fraction in percent."""
    if is_share:
        return 100.0, 1, "%"
    return 1.0, digits, ""


def show_summary(summary: Summary | None, *, is_share: bool = False, digits: int = 2) -> str:
    """Format as ``0.61 ± 0.12``, or ``61.2 ± 12.0%`` for a fraction; ``61.2%`` without any spread."""
    if summary is None:
        return NOTHING
    scale, places, unit = scale_of(is_share=is_share, digits=digits)
    if not summary.half_width:
        return f"{summary.mean * scale:.{places}f}{unit}"
    places = max(places, min(9, -math.floor(math.log10(summary.half_width * scale))))  # never ± 0.0
    return f"{summary.mean * scale:.{places}f} ± {summary.half_width * scale:.{places}f}{unit}"
