"""Sweeps for people: a comparison's table as Markdown, as plain data and on one page; a study's or pipeline's page."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from posttrain.evals import tables
from posttrain.evals.statistics import Summary, student_t_quantile
from posttrain.evals.tables import NOTHING, TextTable
from posttrain.reports.charts.comparison import draw_comparison
from posttrain.reports.charts.study import draw_best_of_n, draw_overoptimization, draw_pipeline
from posttrain.reports.page import render, write_html
from posttrain.store.durable import replace_file
from posttrain.store.headline import Headline
from posttrain.sweeps.compare import LEARNS_FROM
from posttrain.sweeps.comparison import Baseline, CellResult, Comparison, MethodResult
from posttrain.sweeps.study import StudyReport, StudyResults, to_json, to_page
from posttrain.untrusted import bullets, harmless, paragraph, plain

# A comparison for people: its table as Markdown, as plain data, and on one page with the picture.


def show_share(value: float) -> str:
    return f"{value:.1%}"


def show_gain(value: float) -> str:
    return f"{value * 100:+.1f}"


def show_count(value: float) -> str:
    """``950``, ``12.3k``, ``4.56M``."""
    if value < 1000:
        return f"{value:.0f}"
    return f"{value / 1e3:.1f}k" if value < 1e6 else f"{value / 1e6:.2f}M"


def show_seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 10 else f"{value:.1f} s"


@dataclass(frozen=True)
class Column:
    """A fact as a column. ``has_interval``: the mean is shown with its interval."""

    key: str
    label: str
    show: Callable[[float], str]
    is_optional: bool = False
    has_interval: bool = False
    is_share: bool = True


def headline_columns(headline: Headline) -> list[Column]:
    """What the methods are ranked by: at the end, over the run, and how much better it is than at the start."""
    told: dict[str, Any] = {"show": headline.show, "has_interval": True, "is_share": headline.is_share}
    gain = ("gain, points", show_gain) if headline.is_share else ("gain", lambda v: f"{v:+.3f}")
    return [
        Column(headline.metric, headline.label, **told),
        Column(f"mean_{headline.metric}", "over the run", **told),
        Column("gain", *gain),
    ]


COLUMNS = (
    Column("reward", "reward", lambda v: f"{v:.3f}"),
    Column("train_seconds", "training", show_seconds),
    Column("sampled_tokens", "sampled", show_count),
    Column("trained_tokens", "trained on", show_count),
    Column("kl_from_start", "KL from start", lambda v: f"{v:.3f}"),
    Column("entropy", "entropy", lambda v: f"{v:.3f}"),
    Column("num_tokens", "length", lambda v: f"{v:.1f}"),
    Column("margin_last", "margin", lambda v: f"{v:.3f}", is_optional=True),
    Column("pair_accuracy_last", "pairs right", show_share, is_optional=True),
)


def make_table(comparison: Comparison) -> TextTable:
    """One line per method, best first, and the start model's."""
    headline = comparison.headline
    columns = [c for c in COLUMNS if not c.is_optional or any(c.key in row.summaries for row in comparison.rows)]
    columns = [*headline_columns(headline), *(c for c in columns if c.key != headline.metric)]
    lines = [_method_line(row, columns) for row in comparison.rows]
    if comparison.baseline is not None:
        lines.append(_baseline_line(comparison.baseline, columns, headline))
    return TextTable("", ["method", "seeds", *(column.label for column in columns)], lines)


def _method_line(row: MethodResult, columns: Sequence[Column]) -> list[str]:
    done, asked = len(row.finished), len(row.cells)
    seeds = str(done) if done == asked else f"{done} of {asked}"
    if not done:
        state = "failed" if any(cell.state == "failed" for cell in row.cells) else "unfinished"
        return [row.name, seeds, state, *([NOTHING] * (len(columns) - 1))]
    return [row.name, seeds, *(show_summary(row.summaries.get(c.key), c) for c in columns)]


def show_summary(summary: Summary | None, column: Column) -> str:
    """A mean, with the half-width of its interval where the column has one and there are several seeds."""
    if summary is None:
        return NOTHING
    text = column.show(summary.mean)
    if not column.has_interval or summary.half_width is None:
        return text
    return f"{text} ± {summary.half_width * 100:.1f}" if column.is_share else f"{text} ± {summary.half_width:.3f}"


def _baseline_line(baseline: Baseline, columns: Sequence[Column], headline: Headline) -> list[str]:
    shown = []
    for column in columns:
        value = baseline.results.get(column.key)
        text = NOTHING if value is None else column.show(value)
        if column.key == headline.metric and baseline.interval is not None:
            text += f" [{', '.join(map(headline.show, baseline.interval))}]"
        shown.append(text)
    return ["start", NOTHING, *shown]


def make_notes(comparison: Comparison) -> list[str]:
    """How the numbers were made, and what went wrong."""
    notes = [
        "Held-out results after the last update, mean over seeds; best mean first. Over the run: the mean height of "
        "the learning curve, so that who learns faster stands higher."
    ]
    of, points = comparison.headline.of, ", in points" if comparison.headline.is_share else ""
    counts = sorted({len(row.finished) for row in comparison.rows if len(row.finished) > 1})
    if counts:
        quantiles = ", ".join(f"{student_t_quantile(n - 1):.3f} for {n} seeds" for n in counts)
        notes.append(
            f"± is the half-width{points}, of the 95 % Student-t interval of the mean over seeds (t = {quantiles}). "
            f"It covers sampling and training, not the choice of the {of}, which are the same in every evaluation."
        )
    if any(len(row.finished) == 1 for row in comparison.rows):
        notes.append("A method with one finished seed has no interval.")
    if comparison.baseline is not None:
        notes.append(_baseline_note(comparison.baseline, comparison.headline))
    notes.append(
        "Training time is that of the updates, sampling included and evaluation excluded. KL from start is in "
        f"nats per answer, entropy in nats per token, length in tokens. {NOTHING}: not recorded."
    )
    for row in comparison.rows:
        for cell in row.cells:
            if cell.state == "failed":
                notes.append(f"{row.name}, seed {cell.seed}: failed after {cell.step} steps: {cell.problem}")
            elif cell.state == "unfinished":
                notes.append(f"{row.name}, seed {cell.seed}: unfinished after {cell.step} steps")
    return notes


def _baseline_note(baseline: Baseline, headline: Headline) -> str:
    n = baseline.results["n"]
    note = f"start: {baseline.label}, before the first update"
    if baseline.interval is not None:
        kind = "Wilson's" if headline.is_share else "the"
        note += f", with {kind} 95 % interval for {n:.0f} {headline.of}"
    note += "."
    if baseline.varies is not None:
        low, high = map(headline.show, baseline.varies)
        note += f" The cells measured it between {low} and {high}; the first is shown."
    return note


def to_markdown(comparison: Comparison) -> str:
    """``table.md``."""
    parts = [f"# {plain(comparison.title)}\n"]
    if comparison.description:
        parts.append(f"{paragraph(comparison.description)}\n")
    parts += [tables.to_markdown(make_table(comparison)), bullets(make_notes(comparison))]
    parts += ["## The same for all\n", bullets(f"{name}: {value}" for name, value in comparison.common)]
    parts += ["## What differs\n", bullets(describe_differences(comparison))]
    parts.append(f"## Make it again\n\n```\n{comparison.command}\n```\n")
    return "\n".join(parts)


def describe_differences(comparison: Comparison) -> list[str]:
    """One line per method that has more of its own than its method, and one for all others."""
    lines = []
    for name, changes in comparison.differs.items():
        if changes:
            lines.append(f"{name} ({comparison.sources[name]}) differs from the base in: {'; '.join(changes)}")
    if any(line.startswith(LEARNS_FROM) for changes in comparison.differs.values() for line in changes):
        lines.append(
            "methods that learn from data stand beside methods that learn from their own answers: model, start, "
            "template, optimizer steps, learning rate, evaluation and seeds are equal but for what is named above; "
            "computing time and the number of examples are not"
        )
    rest = [f"{name} ({comparison.sources[name]})" for name, changes in comparison.differs.items() if not changes]
    if rest:
        what = "objective, advantage, aggregation, selection and what belongs to them"
        lines.append(f"in the method alone ({what}): {', '.join(rest)}")
    return lines


def to_data(comparison: Comparison) -> dict[str, Any]:
    """``results.json``: everything, unrounded."""
    baseline = comparison.baseline
    return {
        "title": comparison.title,
        "headline": asdict(comparison.headline),
        "description": comparison.description,
        "command": comparison.command,
        "common": dict(comparison.common),
        "differs": comparison.differs,
        "start": asdict(baseline) if baseline is not None else None,
        "methods": {row.name: _row_data(row, comparison.sources[row.name]) for row in comparison.rows},
        "notes": make_notes(comparison),
    }


def _row_data(row: MethodResult, source: str) -> dict[str, Any]:
    return {
        "source": source,
        "summaries": {key: asdict(summary) for key, summary in row.summaries.items()},
        "cells": [asdict(cell) for cell in row.cells],
    }


def render_comparison(comparison: Comparison, picture: bytes | None) -> str:
    """The whole page as HTML; ``picture`` is the PNG, which becomes part of the page."""
    methods = make_table(comparison)
    return render(
        "comparison.jinja",
        title=comparison.title,
        lead=comparison.description,
        methods=methods,
        starts=range(len(comparison.rows), len(methods.lines)),
        bars=_bars(comparison),
        notes=make_notes(comparison),
        image=picture,
        metric=comparison.headline.metric.replace("_", " "),
        common=comparison.common,
        differences=describe_differences(comparison),
        cells=_cell_table(comparison.rows, comparison.headline),
        command=comparison.command,
        environment=comparison.environment,
    )


def _bars(comparison: Comparison) -> list[tuple[float, float, float] | None]:
    """A share with its interval for each line of the table; what is no share has no bar."""
    metric, baseline = comparison.headline.metric, comparison.baseline
    bars: list[tuple[float, float, float] | None] = []
    for summary in (row.summaries.get(metric) for row in comparison.rows):
        if summary is None:
            bars.append(None)
        else:
            half = summary.half_width or 0.0
            bars.append((summary.mean, max(0.0, summary.mean - half), min(1.0, summary.mean + half)))
    if baseline is None or baseline.interval is None:
        bars.append(None)
    else:
        bars.append((baseline.results[metric], *baseline.interval))
    return bars if comparison.headline.is_share else [None] * len(bars)


def _cell_table(rows: Sequence[MethodResult], headline: Headline) -> TextTable:
    def seconds_of(cell: CellResult, key: str) -> str:
        return show_seconds(cell.facts[key]) if key in cell.facts else NOTHING

    shares, seconds = ("format", "truncated"), ("train_seconds", "evaluation_seconds")
    lines = [
        [
            *(f"{cell.method}, seed {cell.seed}", cell.problem or cell.state, str(cell.step)),
            headline.show(cell.facts[headline.metric]) if headline.metric in cell.facts else NOTHING,
            *(tables.show_share(cell.facts, key) for key in shares),
            *(seconds_of(cell, key) for key in seconds),
        ]
        for row in rows
        for cell in row.cells
    ]
    header = ["cell", "state", "steps", headline.label, "in format", "cut off", "training", "evaluation"]
    return TextTable("", header, lines, num_labels=2)


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
        picture = draw_comparison(comparison, folder / "comparison.png").read_bytes()
    return write_html(render_comparison(comparison, picture), folder / "report.html")


# ``report.html`` of a study or pipeline: findings, picture, tables, what was done, on one page.

PICTURE = "study.png"
_DRAW: Mapping[str, Callable[..., Path]] = {
    "overoptimization": draw_overoptimization,
    "best_of_n": draw_best_of_n,
    "pipeline": draw_pipeline,
}


def render_study(report: StudyReport, picture: bytes) -> str:
    """The whole page as HTML; ``picture`` is the PNG, which becomes part of the page."""
    shell = {"title": report.title, "lead": report.description, "command": report.command}
    return render("study.jinja", report=report, image=picture, environment=report.environment, **shell)


def write_study(study: StudyResults, folder: Path) -> Path:
    """``results.json``, ``table.md``, ``study.png`` and ``report.html``; returns the report's path.

    Raises:
        StorageError: the disk is full or not writable.
    """
    replace_file(folder / "results.json", to_json(study.report).encode() + b"\n", durable=False)
    replace_file(folder / "table.md", harmless(to_page(study.report)).encode(), durable=False)
    picture = _DRAW[study.kind](*study.shown, study.report.title, folder / PICTURE)
    return write_html(render_study(study.report, picture.read_bytes()), folder / "report.html")
