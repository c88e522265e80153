"""``report.html`` of a study or pipeline: findings, picture, tables, what was done, on one page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from posttrain.reports.charts.study import draw_best_of_n, draw_overoptimization, draw_pipeline
from posttrain.reports.page import render, write_html
from posttrain.store.durable import replace_file
from posttrain.sweeps.study_results import StudyReport, StudyResults, to_json, to_page
from posttrain.untrusted import harmless

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
