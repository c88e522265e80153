"""The page of features as somebody searches it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from chromium import picture
from made_up_features import EVIL, report_of
from posttrain.reports.features_page import render_features
from posttrain.reports.page import write_html

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def opened(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    path = write_html(render_features(report_of(4096)), tmp_path_factory.mktemp("page") / "features.html")
    page = chromium.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text))
    page.goto(path.as_uri())
    page.wait_for_selector(".feature")
    picture(page, "features")
    yield page
    assert problems == []
    assert page.title() == "Features of <b>mine</b>"
    page.close()


def search(page: object, query: str, where: str = "any", sort: str = "density") -> list[str]:
    """The features on the screen, after ``shown`` says how many there are."""
    page.select_option("#where", where)
    page.select_option("#sort", sort)
    page.fill("#query", query)
    page.wait_for_timeout(300)
    return [name.removeprefix("#") for name in page.locator(".feature h2").all_text_contents()]


def test_the_page_in_a_browser(opened: object) -> None:
    page = opened
    assert 0 < page.locator(".feature").count() < 200  # of 4096: the rest is drawn when it is scrolled to
    before = page.locator(".feature").count()
    page.evaluate("window.scrollTo(0, document.body.scrollHeight)")
    page.wait_for_timeout(300)
    assert page.locator(".feature").count() > before
    assert search(page, "")[:3] == ["4095", "4094", "4093"]
    assert search(page, "", sort="rare")[:3] == ["0", "1", "2"]
    assert search(page, "#12 #4000") == ["4000", "12"]
    assert search(page, "onerror", sort="number")[:1] == ["2"]
    page.fill("#high", "0.001")
    page.evaluate("location.hash = '#feature-1234'")  # an address, whatever was searched for before
    page.wait_for_timeout(300)
    assert page.locator(".feature").evaluate_all("cards => cards.map(card => card.id)") == ["feature-1234"]
    assert page.locator("#feature-1234 h2 a").get_attribute("href") == "#feature-1234"
    assert search(page, "WORD77", "lens", "number")[:3] == ["77", "770", "771"]
    assert search(page, "word77", "active") == []
    assert page.inner_text("#shown") == "0 of 4096 features"
    assert search(page, "document.title", "active", "number")[:4] == ["0", "2", "5", "7"]
    first = page.locator(".feature").first
    assert EVIL[0] in first.inner_text()
    assert first.locator(".context").count() == 6
    first.locator(".more").click()
    assert first.locator(".context").count() == 9
    search(page, "")
    page.fill("#high", "0.001")
    page.wait_for_timeout(300)
    assert page.inner_text("#shown") == "10 of 4096 features"
    page.fill("#high", "")
    page.locator("#overview rect").last.click()
    page.wait_for_timeout(100)
    assert int(page.inner_text("#shown").split()[0]) < 4096


@pytest.mark.parametrize("width", [480, 1280])
def test_overview_is_drawn_for_the_width_of_the_page(opened: object, width: int) -> None:
    opened.set_viewport_size({"width": width, "height": 900})
    opened.wait_for_timeout(300)
    box = "document.getElementById('overview')"
    assert opened.evaluate(f"{box}.viewBox.baseVal.width - {box}.clientWidth") == 0
    assert opened.locator("#overview text").count() == 6
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
