"""Small parts of a comparison's page: tables, tokens in colour, lines over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from posttrain.evals.seeds import summarize_seeds
from posttrain.reports.interpret.diff_charts import Line


def over_seeds(label: str, xs: list[float], rows: Sequence[Sequence[float]], color: str) -> Line:
    """The mean over seeds (rows) at each x, with its 95 % Student-t band where there are several."""
    summaries = [summarize_seeds(list(column)) for column in zip(*rows, strict=True)]
    means = [s.mean for s in summaries if s is not None]
    halves = [s.half_width for s in summaries if s is not None]
    if any(half is None for half in halves):
        return Line(label, xs, means, color=color)
    low = [m - (h or 0.0) for m, h in zip(means, halves, strict=True)]
    high = [m + (h or 0.0) for m, h in zip(means, halves, strict=True)]
    return Line(label, xs, means, low, high, color)


def decades(values: Sequence[float]) -> tuple[float, float]:
    """The powers of ten around positive values."""
    return 10.0 ** math.floor(math.log10(min(values))), 10.0 ** math.ceil(math.log10(max(values)) + 1e-9)


def draw_token(text: str, share: float, is_at: bool, note: str = "") -> str:
    """A token of a text, the deeper in colour the larger ``share`` (0 to 1)."""
    strength = max(0, min(100, round(100 * share)))
    style = f' style="background: color-mix(in srgb, var(--c1) {strength * 7 // 10}%, transparent)"' if strength else ""
    title = f' title="{escape(note)}"' if note else ""
    return f'<span class="tok{" at" if is_at else ""}"{style}{title}>{escape(text)}</span>'


def draw_chip(text: str) -> str:
    """A token by itself, spaces and line ends to be seen."""
    return f'<span class="chip">{escape(repr(text)[1:-1])}</span>'


def show_number(value: float | None) -> str:
    """Two decimals, or a dash."""
    return "—" if value is None else f"{value:.2f}"


def draw_table(head: Sequence[str], rows: Sequence[Sequence[str]], text_from: int = 99) -> str:
    """A table; the first column and those from ``text_from`` on are text, the others numbers."""

    def side(i: int) -> str:
        return "" if i == 0 or i >= text_from else ' class="right"'

    top = "".join(f"<th{side(i)}>{escape(text)}</th>" for i, text in enumerate(head))
    body = "".join(
        f"<tr>{''.join(f'<td{side(i)}>{escape(text)}</td>' for i, text in enumerate(row))}</tr>" for row in rows
    )
    return f'<div class="card scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
