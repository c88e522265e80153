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
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("studio")


@pytest.fixture(scope="module")
def address(root: Path) -> Iterator[str]:
    """A served studio over one short run."""
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


def test_the_opening_is_shown_and_a_problem_covers_nothing(page: object) -> None:
    page.fill("#question textarea", QUESTION)
    page.click("#send")
    page.wait_for_selector("#talk-left .facts", timeout=60_000)
    assert "<think>" in page.inner_text("#talk-left")
    page.click("text=steered by features of a dictionary")
    page.fill("#find-features textarea, #find-features input", "Eva")
    page.keyboard.press("Enter")
    page.wait_for_selector("#features p:has-text('choose a dictionary')", timeout=60_000)
    page.fill("#steering textarea, #steering input", "12=8")
    page.fill("#question textarea", "How many cups?")
    page.click("#send")
    page.wait_for_selector("#problem .problem", timeout=60_000)
    assert "name the dictionary" in page.inner_text("#problem")
    assert QUESTION in page.inner_text("#talk-left")
    assert page.input_value("#question textarea") == "How many cups?"
    assert page.locator(".toast-body").count() == 0
    page.fill("#steering textarea, #steering input", "")
    page.click("#clear")
    page.wait_for_selector("#problem .problem", state="detached")


def test_curves_and_rollouts_of_the_newest_run_are_there_at_once(page: object) -> None:
    page.get_by_role("tab", name="Runs").click()
    page.wait_for_selector("#curves svg")
    page.get_by_role("tab", name="Rollouts").click()
    page.wait_for_selector("#rollouts .group")
    assert page.locator("#rollouts .group").count() == 2
    page.fill("#rollout-low input, #rollout-low textarea", "99")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=no rollout fits")
    page.fill("#rollout-low input, #rollout-low textarea", "much")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=reward at least: a number is needed, not 'much'")


def test_a_run_that_comes_later_is_in_the_menus(page: object, root: Path) -> None:
    shutil.copytree(root / "runs" / "rl", root / "runs" / "later")
    page.get_by_role("tab", name="Runs").click()
    page.click("#runs input")
    page.get_by_role("option", name="later").click()
    page.keyboard.press("Escape")
    page.get_by_role("tab", name="Chat").click()
    page.click("#left input")
    page.get_by_role("option", name="later").click()
    page.fill("#question textarea", QUESTION)
    page.click("#send")
    page.wait_for_selector("#talk-left .facts", timeout=60_000)
    assert page.inner_text("#problem").strip() == ""
