"""``report.html`` of a study: findings, picture, tables, what was done, on one page."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from posttrain.evals.tables import TextTable
from posttrain.reports.charts.study import draw_best_of_n, draw_overoptimization
from posttrain.reports.charts.style import draw_page
from posttrain.store.durable import replace_file
from posttrain.sweeps.study import Kind
from posttrain.sweeps.study_results import StudyFound, StudyReport, to_json, to_page
from posttrain.untrusted import harmless

PICTURE = "study.png"
_DRAW: Mapping[Kind, Callable[..., Path]] = {
    "overoptimization": draw_overoptimization,
    "best_of_n": draw_best_of_n,
}

_STYLE = """
.study td, .study th { padding-right: 18px; }
.study .right { text-align: right; }
.picture { background: #ffffff; padding: 14px; } .picture img { width: 100%; height: auto; display: block; }
.notes { color: var(--soft); font-size: 0.9rem; padding-left: 1.2rem; } .notes li { margin: 3px 0; max-width: 60rem; }
.findings { padding-left: 1.2rem; } .findings li { margin: 5px 0; max-width: 60rem; }
main { max-width: 1280px; }
"""


def render_study(report: StudyReport, picture: bytes) -> str:
    """The whole page as HTML; ``picture`` is the PNG, which becomes part of the page."""
    parts = [f"<h1>{escape(report.title)}</h1>"]
    if report.description:
        parts.append(f'<p class="lead">{escape(report.description)}</p>')
    parts.append(_list([*report.problems, *report.findings], "findings"))
    data = base64.b64encode(picture).decode("ascii")
    image = f'<img alt="{escape(report.title)}" src="data:image/png;base64,{data}"/>'
    parts.append(f'<div class="card picture">{image}</div>')
    parts += [f"<h2>{escape(table.title)}</h2>{_table(table)}" for table in report.tables]
    parts.append(f"<h2>How to read it</h2>{_list(report.notes, 'notes')}")
    parts.append(f"<h2>What was done</h2>{_facts(report.common)}")
    command = f'<div class="card commands"><pre>{escape(report.command)}</pre></div>'
    parts.append(f"<h2>Make it again</h2>{command}")
    if report.environment:
        parts.append(f"<h2>Where it ran</h2>{_facts(_flatten(report.environment))}")
    return draw_page(report.title, "".join(parts), _STYLE)


def _table(table: TextTable) -> str:
    def cell(kind: str, index: int, text: str) -> str:
        side = "" if index < table.num_labels else ' class="number right"'
        return f"<{kind}{side}>{escape(text)}</{kind}>"

    head = "".join(cell("th", i, text) for i, text in enumerate(table.header))
    body = "".join(f"<tr>{''.join(cell('td', i, text) for i, text in enumerate(line))}</tr>" for line in table.lines)
    inner = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="card scroll"><table class="study">{inner}</table></div>'


def _list(lines: Sequence[str], kind: str) -> str:
    return f'<ul class="{kind}">{"".join(f"<li>{escape(line)}</li>" for line in lines)}</ul>'


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    rows = "".join(f'<tr><td class="name">{escape(name)}</td><td>{escape(value)}</td></tr>' for name, value in facts)
    return f'<div class="card scroll"><table>{rows}</table></div>'


def _flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            found += _flatten(value, f"{prefix}{name}: ")
        elif value is not None:
            found.append((f"{prefix}{name}", str(value)))
    return found


def write_study(found: StudyFound, folder: Path) -> Path:
    """``results.json``, ``table.md``, ``study.png`` and ``report.html``; returns the report's path.

    Raises:
        StorageError: the disk is full or not writable.
    """
    replace_file(folder / "results.json", to_json(found.report).encode() + b"\n", durable=False)
    replace_file(folder / "table.md", harmless(to_page(found.report)).encode(), durable=False)
    picture = _DRAW[found.kind](*found.shown, found.report.title, folder / PICTURE)
    report = folder / "report.html"
    replace_file(report, render_study(found.report, picture.read_bytes()).encode(), durable=False)
    return report
