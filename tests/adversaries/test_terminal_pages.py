"""Pages and files for people: what a model or a stranger wrote is text in them, whatever stands in it."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hostile_text import HOSTILE, RAW, leaks

from posttrain.evals.tables import TextTable
from posttrain.markdown import code
from posttrain.reports.charts.style import draw_page
from posttrain.reports.comparison import render_comparison
from posttrain.reports.evaluation import quoted
from posttrain.reports.run import Report, Transcript, render_report
from posttrain.reports.study import render_study
from posttrain.runs.directory import RunDirectory
from posttrain.runs.notes import Notes, Remark, change_tags, read_notes
from posttrain.sweeps.comparison import CellResult, Comparison, MethodResult
from posttrain.sweeps.study_results import StudyReport

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


def make_pages() -> dict[str, str]:
    cell = CellResult(EVIL, 0, "failed", 1, problem=EVIL, evaluation=EVIL)
    rows = [MethodResult(EVIL, [cell], {})]
    facts = [(EVIL, EVIL)]
    where = {EVIL: {EVIL: EVIL}}
    comparison = Comparison(EVIL, EVIL, rows, None, facts, {EVIL: [EVIL]}, {EVIL: EVIL}, EVIL, where)
    table = TextTable(EVIL, [EVIL], [[EVIL]])
    study = StudyReport(EVIL, EVIL, [table], [EVIL], [EVIL], facts, {}, EVIL, [EVIL], where)
    report = Report(EVIL, EVIL, transcripts=[Transcript(EVIL, EVIL, [])], environment=where, commands=facts)
    return {
        "comparison": render_comparison(comparison, b"png"),
        "study": render_study(study, b"png"),
        "report": render_report(report),
        "shell": draw_page(EVIL, ""),
    }


@pytest.mark.parametrize("name", ["comparison", "study", "report", "shell"])
def test_reports_hold_no_tag_that_is_not_ours(name: str) -> None:
    page = make_pages()[name]
    found = Tags(page)
    assert "script" not in found.tags
    assert found.tags.count("img") == (name in ("comparison", "study"))  # the picture
    assert not any(attribute.startswith("on") for attribute, _ in found.attributes)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    (policy,) = (v for k, v in found.attributes if k == "content" and v and v.startswith("default-src"))
    assert policy.startswith("default-src 'none'")
    assert "script-src" not in policy


def test_no_tick_ends_a_quotation() -> None:
    assert code("42") == "`42`"
    assert code("a`b") == "``a`b``"
    assert code("``\n# <b>") == "``` `` # <b> ```"
    assert quoted("```\nx") == "````\n```\nx\n````"


def test_the_log_and_the_notes_of_a_run_can_be_shown(tmp_path: Path) -> None:
    RunDirectory(tmp_path).log(f"reward failed: {HOSTILE} Grüße 漢字")
    text = (tmp_path / "log.txt").read_text(encoding="utf-8")
    assert leaks(text) == []
    assert "\\x1b[2J" in text
    assert text.endswith("Grüße 漢字\n")
    (tmp_path / "notes.json").write_text('{"tags": [], "remarks": [{"time": "t", "text": "\\u009b2J\\u202e 漢字"}]}')
    change_tags(tmp_path, ["+good"])
    text = (tmp_path / "notes.json").read_text(encoding="utf-8")
    assert RAW.search(text) is None
    assert "漢字" in text
    assert read_notes(tmp_path) == Notes(("good",), (Remark("t", "\x9b2J\u202e 漢字"),))


def test_every_page_is_drawn_by_the_one_shell() -> None:
    """A page that writes its own head would have no policy; the one with a script has a stricter one of its own."""
    package = Path(render_report.__code__.co_filename).parent.parent
    own = {
        path.name for path in package.rglob("*.py") if re.search("<!doctype html>", path.read_text(encoding="utf-8"))
    }
    assert own == {"style.py", "features.py"}
