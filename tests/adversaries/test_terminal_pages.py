"""Pages and files for people: what a model or a stranger wrote is text in them, whatever stands in it."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from unittest.mock import patch

import pytest
from hostile_text import HOSTILE, leaks

from posttrain.evaluation.tables import TextTable
from posttrain.reports.charts import Panel, Series
from posttrain.reports.page import render
from posttrain.reports.run_page import Chapter, ReportStage, RunReport, Transcript, TranscriptAnswer, render_report
from posttrain.reports.sweep_page import render_sweep
from posttrain.store.metric_names import Metric
from posttrain.sweeps.results import SweepPart, SweepResults

EVIL = "\"><img src=x onerror=alert(1)><script>alert(1)</script>' onload='x"


class Tags(HTMLParser):
    """The elements of a page and their attributes, as a browser would find them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


def make_pages(text: str) -> dict[str, str]:
    """Every page that has texts of others, with ``text`` wherever one can stand."""
    info = [(text, text)]
    where = {text: {text: text}}
    part = SweepPart([TextTable(text, [text], [[text]])], [text], [text], {text: text})
    primary = Metric("accuracy", "share", "higher", text, text, of=text)
    sweep = SweepResults(text, text, text, {"rows": part}, text, [text], [text])
    panel = Panel(text, text, [Series(text, [0.0], [1.0], mark=text)], x_label=text, y_label=text)
    chapter = Chapter(text, text, [panel], text, info)
    answer = TranscriptAnswer(text, f"<think>{text}</think>{text}", False, text, 1, is_cut=True)
    stage = ReportStage(text, text, {"accuracy": 0.5, "accuracy_low": 0.4, "accuracy_high": 0.6})
    free = TranscriptAnswer(text, text, None, text, 1, reward=0.5)
    transcripts = [Transcript(text, text, [answer]), Transcript(text, None, [free], [(text, text)])]
    report = RunReport(text, text, [stage], text, [chapter], transcripts, text, where, info, primary, transcripts)
    with patch("posttrain.reports.sweep_page._part_panels", return_value=[panel]):
        page_of_sweep = render_sweep(sweep)
    return {"sweep": page_of_sweep, "report": render_report(report), "shell": render("page.jinja", title=text)}


@pytest.mark.parametrize("name", ["sweep", "report", "shell"])
def test_reports_hold_no_tag_that_is_not_ours(name: str) -> None:
    page = make_pages(EVIL)[name]
    found = Tags(page)
    assert "script" not in found.tags
    assert "img" not in found.tags
    assert not any(attribute.startswith("on") for attribute, _ in found.attributes)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    (policy,) = (v for k, v in found.attributes if k == "content" and v and v.startswith("default-src"))
    assert policy.startswith("default-src 'none'")
    assert "script-src" not in policy


@pytest.mark.parametrize("name", ["sweep", "report", "shell"])
def test_control_and_hidden_characters_are_written_out_in_pages(name: str) -> None:
    page = make_pages(HOSTILE)[name]
    assert leaks(page) == []
    assert "\\x1b[2J" in page
    page.encode("utf-8")  # a lone surrogate would not be written


def test_every_page_is_drawn_by_the_one_shell() -> None:
    """A page that writes its own head would have no policy, a text that is called safe could be anything."""
    package = Path(render_report.__code__.co_filename).parent.parent
    files = [path for path in package.rglob("*") if path.suffix in (".py", ".jinja", ".js", ".css")]
    assert len(files) > 100
    texts = {str(path.relative_to(package)): path.read_text(encoding="utf-8") for path in files}
    assert [name for name, text in texts.items() if re.search("<!doctype|<html", text, re.IGNORECASE)] == [
        "reports/templates/page.jinja"
    ]
    assert [name for name, text in texts.items() if re.search(r"\|\s*safe\b|autoescape false", text)] == []
    marked = [name for name, text in texts.items() if "Markup" in text and name.endswith(".py")]
    assert marked == ["reports/page.py"]  # of charts alone, whose texts are escaped where they are drawn
    drawn = [name for name, text in texts.items() if "from html import" in text]
    assert drawn == []
