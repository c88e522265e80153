"""One part of a sweep's report: tables, sentences, notes and data, whatever question it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from posttrain.evals.statistics import Summary
from posttrain.evals.tables import NOTHING, TextTable


@dataclass(frozen=True)
class Part:
    """What one function over the rows of a sweep found.

    ``findings``: what the numbers say, a sentence each. ``notes``: how to read them. ``data``: everything as plain
    data, for ``results.json``.
    """

    tables: list[TextTable]
    findings: list[str]
    notes: list[str]
    data: dict[str, Any] = field(default_factory=dict)


def show_summary(summary: Summary | None, *, is_share: bool = False, digits: int = 2) -> str:
    """Write ``0.61 ± 0.12``, or ``61.2 % ± 12.0`` of a share; without interval for one seed."""
    if summary is None:
        return NOTHING
    scale, places = (100.0, 1) if is_share else (1.0, digits)
    unit = " %" if is_share else ""
    mean = f"{summary.mean * scale:.{places}f}"
    return mean + (f" ± {summary.half_width * scale:.{places}f}" if summary.half_width is not None else "") + unit
