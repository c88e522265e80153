"""``report.html`` of a comparison: table, picture, what is the same and what differs, on one page."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from posttrain.reports.charts.charts import draw_interval
from posttrain.reports.charts.comparison import draw_comparison
from posttrain.reports.charts.style import draw_page
from posttrain.reports.comparison_table import (
    NOTHING,
    Table,
    describe_differences,
    make_table,
    show_seconds,
    show_share,
    to_data,
    to_markdown,
)
from posttrain.store.durable import replace_file
from posttrain.sweeps.comparison import Comparison, MethodResult
from posttrain.untrusted import harmless

_STYLE = """
.comparison td, .comparison th { padding-right: 18px; }
.comparison td + td, .comparison th + th { text-align: right; }
.comparison tr.start td { color: var(--soft); }
.comparison .bar { display: inline-block; width: 110px; margin: 0 10px 0 0; vertical-align: middle; }
.picture { background: #ffffff; padding: 14px; } .picture img { width: 100%; height: auto; display: block; }
.notes { color: var(--soft); font-size: 0.9rem; padding-left: 1.2rem; } .notes li { margin: 3px 0; max-width: 60rem; }
main { max-width: 1280px; }
"""


def render_comparison(comparison: Comparison, picture: bytes | None) -> str:
    """The whole page as HTML; ``picture`` is the PNG, which becomes part of the page."""
    table = make_table(comparison)
    parts = [f"<h1>{escape(comparison.title)}</h1>"]
    if comparison.description:
        parts.append(f'<p class="lead">{escape(comparison.description)}</p>')
    parts.append(_draw_table(comparison, table))
    parts.append(_list(table.notes))
    if picture is not None:
        data = base64.b64encode(picture).decode("ascii")
        image = (
            f'<img alt="learning curves, reward against KL, accuracy against time" src="data:image/png;base64,{data}"/>'
        )
        parts.append(f'<h2>How they learn</h2><div class="card picture">{image}</div>')
    parts.append(f"<h2>The same for all</h2>{_facts(comparison.common)}")
    parts.append(f"<h2>What differs</h2>{_list(describe_differences(comparison))}")
    parts.append(f"<h2>Every cell</h2>{_draw_cells(comparison.rows)}")
    command = f'<div class="card commands"><pre>{escape(comparison.command)}</pre></div>'
    parts.append(f"<h2>Make it again</h2>{command}")
    if comparison.environment:
        parts.append(f"<h2>Where it ran</h2>{_facts(_flatten(comparison.environment))}")
    return draw_page(comparison.title, "".join(parts), _STYLE)


def _draw_table(comparison: Comparison, table: Table) -> str:
    head = "".join(f"<th>{escape(label)}</th>" for label in table.header)
    body = []
    for index, line in enumerate(table.lines):
        is_method = index < len(comparison.rows)
        bar = _method_bar(comparison.rows[index]) if is_method else _baseline_bar(comparison)
        name, seeds, accuracy, *others = (escape(text) for text in line)
        cells = [f"<td><strong>{name}</strong></td>" if is_method else f"<td>{name}</td>"]
        cells.append(f'<td class="number">{seeds}</td><td class="number">{bar}{accuracy}</td>')
        cells += [f'<td class="number">{text}</td>' for text in others]
        body.append(f"<tr{'' if is_method else ' class=' + chr(34) + 'start' + chr(34)}>{''.join(cells)}</tr>")
    return (
        f'<div class="card scroll"><table class="comparison"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _method_bar(row: MethodResult) -> str:
    summary = row.summaries.get("accuracy")
    if summary is None:
        return ""
    half = summary.half_width or 0.0
    return draw_interval(summary.mean, max(0.0, summary.mean - half), min(1.0, summary.mean + half))


def _baseline_bar(comparison: Comparison) -> str:
    baseline = comparison.baseline
    return "" if baseline is None else draw_interval(baseline.results["accuracy"], baseline.low, baseline.high)


def _draw_cells(rows: Sequence[MethodResult]) -> str:
    labels = ("cell", "state", "steps", "right", "in format", "cut off", "training", "evaluation")
    head = "".join(f"<th>{label}</th>" for label in labels)
    body = []
    for row in rows:
        for cell in row.cells:
            facts = cell.facts
            texts = [f"{cell.method}, seed {cell.seed}", cell.problem or cell.state, str(cell.step)]
            texts += [_show(facts, key, show_share) for key in ("accuracy", "format", "truncated")]
            texts += [_show(facts, key, show_seconds) for key in ("train_seconds", "evaluation_seconds")]
            body.append(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in texts)}</tr>")
    return (
        f'<details class="card scroll"><summary>{len(body)} runs</summary><table class="comparison"><thead><tr>{head}'
        f"</tr></thead><tbody>{''.join(body)}</tbody></table></details>"
    )


def _show(facts: Mapping[str, float], key: str, show: Any) -> str:
    return show(facts[key]) if key in facts else NOTHING


def _list(lines: Sequence[str]) -> str:
    return f'<ul class="notes">{"".join(f"<li>{escape(line)}</li>" for line in lines)}</ul>'


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


def write_comparison(comparison: Comparison, folder: Path) -> Path:
    """``results.json``, ``table.md``, ``comparison.png`` (once a cell has finished) and ``report.html``.

    Returns the report's path.

    Raises:
        StorageError: the disk is full or not writable.
    """
    content = json.dumps(to_data(comparison), indent=1, allow_nan=False)
    replace_file(folder / "results.json", content.encode() + b"\n", durable=False)
    replace_file(folder / "table.md", harmless(to_markdown(comparison)).encode(), durable=False)
    picture = None
    if any(cell.curve for row in comparison.rows for cell in row.finished):
        picture = draw_comparison(comparison, folder / "comparison.png")
    report = folder / "report.html"
    page = render_comparison(comparison, picture.read_bytes() if picture is not None else None)
    replace_file(report, page.encode(), durable=False)
    return report
