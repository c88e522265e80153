"""A run's report in headless Chromium: at any width, in print, and whatever was written into it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from posttrain.reports.charts import Panel, Series
from posttrain.reports.page import write_html
from posttrain.reports.run_page import Chapter, ReportStage, RunReport, Transcript, TranscriptAnswer, render_report

pytestmark = pytest.mark.browser
EVIL = "a\x1b[31mred\x00\u202egnp.exe" + "x" * 900 + "<img src=http://127.0.0.1:9/x>"
ARABIC = "\u0643\u0645 \u062a\u0641\u0627\u062d\u0629\u061f " * 30


@pytest.fixture
def opened(chromium: Browser, tmp_path: Path) -> Iterator[object]:
    """A report of hostile texts; it asks the network for nothing and reports no problem."""
    results = {"accuracy": 0.5, "accuracy_low": 0.4, "accuracy_high": 0.6, "format": 1.0, "shows_reasoning": 0.5}
    results |= {"completion_length": 96.0, "truncated": 0.1}
    answers = [
        TranscriptAnswer("before", ARABIC, False, ARABIC, 900, True),
        TranscriptAnswer("after", EVIL, True, "3", 1),
    ]
    panel = Panel("Reward", "mean", [Series("training", [1.0, 2.0], [1e-13, 2e-13])])
    report = RunReport(
        "A" * 200,
        "b" * 400,
        stages=[ReportStage("before training", "stories/validation, n = 32", results)],
        transcripts=[Transcript(ARABIC, "m" * 300, answers), Transcript(EVIL, "3", answers, (("user", EVIL),))],
        chapters=[Chapter("Training", EVIL, [panel], EVIL, [("name", EVIL)])],
        environment={"command": "y" * 300},
        commands=[("ask", "z" * 300)],
    )
    path, problems = write_html(render_report(report), tmp_path / "report.html"), []
    page = chromium.new_page()
    page.on("console", lambda message: problems.append(message.text))
    page.on("request", lambda request: problems.append(request.url) if request.url != path.as_uri() else None)
    page.goto(path.as_uri())
    yield page
    page.close()
    assert problems == []


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_page(opened: object, width: int) -> None:
    opened.set_viewport_size({"width": width, "height": 900})
    assert opened.evaluate("document.documentElement.scrollWidth") == width
    assert opened.locator("img").count() == 0
    assert "a\\x1b[31mred\\x00\\u202egnp.exe" in opened.locator("pre:visible", has_text="gnp.exe").first.inner_text()


@pytest.mark.parametrize(("width", "least"), [(390, 300), (1280, 900)])
def test_a_fact_has_room_next_to_its_name_or_below_it(opened: object, width: int, least: int) -> None:
    """On a telephone a name took most of the row, and its value five letters a line."""
    opened.set_viewport_size({"width": width, "height": 900})
    value = opened.locator('th[scope="row"] + td', has_text="y" * 300)
    assert value.bounding_box()["width"] > least


def test_text_runs_the_way_of_its_letters(opened: object) -> None:
    ends = """e => { const range = document.createRange(); range.selectNodeContents(e);
        const last = [...range.getClientRects()].at(-1), box = e.getBoundingClientRect();
        return [last.left - box.left, box.right - last.right]; }"""
    shown = opened.locator("pre:visible")
    arabic, latin = (shown.filter(has_text=text).first.evaluate(ends) for text in ("\u0643", "gnp.exe"))
    assert arabic[1] < arabic[0]  # the last line of the one ends at the right, of the other begins at the left
    assert latin[0] < 1


def test_a_table_is_whole_in_print(opened: object) -> None:
    opened.emulate_media(media="print")
    opened.set_viewport_size({"width": 718, "height": 1000})  # A4 between margins of 1 cm, in CSS pixels
    assert opened.evaluate("document.documentElement.scrollWidth") == 718
    last = opened.locator("th", has_text="truncated").last.bounding_box()
    assert last["x"] + last["width"] <= 718
