"""The page of features: one file, and nothing that a text in it could do."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shutil
from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from posttrain.interpret.features.features import Report, show_token, show_tokens
from posttrain.reports.features import render_features
from posttrain.reports.page import write_html

EVIL = [
    "</script><script>document.title='taken'</script>",
    "<!--<script>",
    "<img src=x onerror=\"document.title='taken'\">",
    "&lt;b&gt;\u2028'\"\\",
    "\ud800",
]


def report_of(count: int) -> Report:
    """Features 0 … count − 1; feature i is active on token i % 5 and has density (i + 1) / 10000."""
    context = {"activation": 2.0, "position": 1, "start": 0, "activations": [0.0, 2.0, None]}
    features = [
        {
            "feature": i,
            "active": i + 1,
            "density": (i + 1) / 10_000,
            "mean": 1.0,
            "max": 2.0,
            "histogram": {"bin_width": 0.25, "counts": [0, 3, 5]},
            "promoted": [[f"word{i}", 100 + i, 1.5]],
            "suppressed": [[" left\n", 7, -1.0]],
            "contexts": [context | {"document": i, "tokens": [" left\n", EVIL[i % 5], "right"]}] * 9,
        }
        for i in range(count)
    ]
    return {"about": {"dictionary": "<b>mine</b>", "rows": 10_000, "documents": 3}, "features": features}


def data_of(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_no_text_becomes_markup() -> None:
    page = render_features(report_of(5))
    assert page.count("<script") == page.count("</script") == 2
    assert "<img" not in page
    assert "<b>" not in page
    assert "<h1>Features of &lt;b&gt;mine&lt;/b&gt;</h1>" in page
    data = data_of(page)
    assert {text for text in data["texts"] if text in EVIL} == set(EVIL)
    number, active, density, mean, largest, width, counts, promoted, suppressed, contexts = data["features"][3]
    assert (number, active, density, mean, largest, width, counts) == (3, 4, 0.0004, 1.0, 2.0, 0.25, [0, 3, 5])
    assert data["texts"][promoted[0][0]] == "word3"
    assert (data["texts"][suppressed[0][0]], suppressed[0][1]) == (" left\n", -1.0)
    activation, document, position, peak, tokens, levels = contexts[0]
    assert (activation, document, position, peak, levels) == (2.0, 3, 1, 1, [0, 255, -1])
    assert [data["texts"][token] for token in tokens] == [" left\n", EVIL[3], "right"]


def test_only_its_own_script_runs_and_nothing_is_loaded() -> None:
    page = render_features(report_of(2))
    script = re.search(r"<script>(.*)</script>", page, re.DOTALL)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert html.unescape(policy[1]).startswith("default-src 'none'; ")
    assert f"script-src 'sha256-{digest}';" in html.unescape(policy[1])
    assert "innerHTML" not in script[1]
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", page) == []
    assert "src=" not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium")
    path = write_html(render_features(report_of(4096)), tmp_path_factory.mktemp("page") / "features.html")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text))
        page.goto(path.as_uri())
        page.wait_for_selector(".feature")
        yield page
        assert problems == []
        assert page.title() == "Features of <b>mine</b>"
        browser.close()


def search(page: object, query: str, where: str = "any", sort: str = "density") -> list[str]:
    """The features on the screen, after ``shown`` says how many there are."""
    page.select_option("#where", where)
    page.select_option("#sort", sort)
    page.fill("#query", query)
    page.wait_for_timeout(300)
    return [name.removeprefix("#") for name in page.locator(".feature h2").all_text_contents()]


@pytest.mark.slow
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


def test_show_tokens_puts_a_character_of_several_tokens_with_the_last_of_them() -> None:
    letters = pre_tokenizers.ByteLevel.alphabet()
    plain = Tokenizer(models.BPE({letter: n for n, letter in enumerate(sorted(letters))}, []))
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain)
    ids = tokenizer("a é—").input_ids
    assert [show_token(tokenizer, token) for token in ids[:4]] == ["a", " ", r"\xc3", r"\xa9"]
    assert show_tokens(tokenizer, ids) == ["a", " ", r"\xc3", "é", r"\xe2", r"\x80", "—"]
    assert show_tokens(tokenizer, ids[3:]) == [r"\xa9", r"\xe2", r"\x80", "—"]
