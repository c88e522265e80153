"""What a study has found, as data: tables, sentences, notes and facts, whatever its kind."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from posttrain.evals.statistics import Summary
from posttrain.evals.tables import NOTHING, TextTable, to_markdown
from posttrain.sweeps.study import Kind
from posttrain.untrusted import paragraph, plain


@dataclass(frozen=True)
class Answer:
    """What one model answered, and its score, if it has one."""

    who: str
    text: str
    score: float | None


@dataclass(frozen=True)
class Answers:
    """A prompt with the answers of several models."""

    question: str
    answers: list[Answer]


@dataclass(frozen=True)
class StudyReport:
    """All that is told about a study, or a pipeline.

    ``findings``: what the numbers say, a sentence each. ``notes``: what must be known to read them.
    ``common``: (what, value). ``data``: everything as plain data, for ``results.json``. ``samples``: answers side by
    side, for the page.
    """

    title: str
    description: str
    tables: list[TextTable]
    findings: list[str]
    notes: list[str]
    common: list[tuple[str, str]]
    data: dict[str, Any]
    command: str
    problems: list[str] = field(default_factory=list)
    environment: Mapping[str, Any] = field(default_factory=dict)
    samples: list[Answers] = field(default_factory=list)


@dataclass(frozen=True)
class StudyResults:
    """The report of a study or pipeline, and what its picture shows, as its kind's drawing takes it."""

    kind: Kind | Literal["pipeline"]
    report: StudyReport
    shown: tuple[Any, ...]


def show_summary(summary: Summary | None, *, is_share: bool = False, digits: int = 2) -> str:
    """``0.61 ± 0.12``, or ``61.2 % ± 12.0`` of a share; without interval for one seed."""
    if summary is None:
        return NOTHING
    scale, places = (100.0, 1) if is_share else (1.0, digits)
    unit = " %" if is_share else ""
    mean = f"{summary.mean * scale:.{places}f}"
    return mean + (f" ± {summary.half_width * scale:.{places}f}" if summary.half_width is not None else "") + unit


def to_page(report: StudyReport) -> str:
    """``table.md``."""
    parts = [f"# {plain(report.title)}\n"]
    parts += [f"{paragraph(report.description)}\n"] if report.description else []
    parts += ["\n".join(f"- {plain(line)}" for line in (*report.problems, *report.findings)) + "\n"]
    parts += [to_markdown(table) for table in report.tables]
    parts += ["\n".join(f"- {plain(note)}" for note in report.notes) + "\n"] if report.notes else []
    parts += ["\n".join(f"- {what}: {plain(value)}" for what, value in report.common) + "\n"]
    parts += [f"```bash\n{report.command}\n```\n"]
    return "\n".join(parts)


def to_json(report: StudyReport) -> str:
    """``results.json``; a number that is not finite is null."""
    content = {name: value for name, value in vars(report).items() if name not in ("tables", "data", "samples")}
    return json.dumps(_finite(content | {"common": dict(report.common)} | report.data), indent=1, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
