"""The studio in headless Chromium: real clicks on a served page."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("gradio", reason="the extra `studio` is not installed")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
CHROMIUM = shutil.which("chromium")
QUESTION = "A cup costs 3 coins. Eva buys 4 cups. How many coins does she pay?"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A served studio over one short run."""
    root = tmp_path_factory.mktemp("studio")
    train = ["train", "tiny/grpo", "--train.steps", "2", "--rollout.prompts", "2", "--eval.every", "0"]
    run = [sys.executable, "-m", "posttrain.cli"]
    subprocess.run([*run, *train, "--model.name", "tiny", "--run", "rl", "--quiet"], cwd=root, check=True, timeout=300)
    command = [*run, "studio", "tiny", "rl", "--port", "7889"]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as served:
        assert served.stdout is not None
        line = served.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found is not None, line
        yield found[0]
        served.terminate()


@pytest.fixture(scope="module")
def page(address: str) -> Iterator[object]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        opened = browser.new_page(viewport={"width": 1280, "height": 900})
        opened.goto(address)
        opened.wait_for_selector("#question textarea", timeout=60_000)
        yield opened
        browser.close()


def test_two_models_answer_token_by_token(page: object, tmp_path: Path) -> None:
    page.get_by_label("probability").check()
    page.fill("#question textarea", QUESTION)
    started = time.perf_counter()
    page.click("#send")
    page.wait_for_selector("#talk-left .tok", timeout=60_000)
    print(f"first token after {time.perf_counter() - started:.2f} s")
    page.wait_for_selector("#talk-left .facts")
    page.wait_for_selector("#talk-right .facts")
    assert QUESTION in page.inner_text("#talk-left")
    assert "mean log-probability" in page.inner_text("#talk-right")
    assert "background" in page.locator("#talk-left .tok").first.get_attribute("style")
    assert page.input_value("#question textarea") == ""
    page.screenshot(path=str(tmp_path / "chat.png"))
    page.click("#clear")
    page.wait_for_selector("#talk-left .tok", state="detached")


def test_what_is_typed_is_shown_as_it_is(page: object) -> None:
    evil = "<img src=x onerror=document.title='hacked'>${1+1}{{value}}"
    page.fill("#question textarea", evil)
    page.keyboard.press("Enter")
    page.wait_for_selector("#talk-left .facts", timeout=60_000)
    assert evil in page.inner_text("#talk-left")
    assert page.title() == "posttrain studio"
    page.click("#clear")


def test_curves_and_rollouts_of_a_run(page: object) -> None:
    page.get_by_role("tab", name="Runs").click()
    page.click("#runs input")
    page.get_by_role("option", name="rl").click()
    page.keyboard.press("Escape")
    page.wait_for_selector("#curves svg")
    page.get_by_role("tab", name="Rollouts").click()
    page.click("#rollout-run input")
    page.get_by_role("option", name="rl").click()
    page.wait_for_selector("#rollouts .group")
    assert page.locator("#rollouts .group").count() == 2
    page.fill("#rollout-low input, #rollout-low textarea", "99")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=no rollout fits")
