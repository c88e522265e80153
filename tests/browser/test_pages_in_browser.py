"""The pages that commands leave: reports of a run, a sweep, and of the differences of two models."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from chromium import picture
from posttrain.cli import main

pytestmark = pytest.mark.browser
SWEEP = """\
description: A <b>small</b> one.
start: {recipe: tiny/sft, task: {size: 40}, train: {steps: 1, warmup_steps: 0}, eval: {every: 0}}
base:
  recipe: tiny/grpo
  task: {size: 40}
  rollout: {num_prompts: 2, group_size: 2, max_tokens: 8}
  train: {steps: 2, warmup_steps: 0}
  eval: {every: 1, num_examples: 4, num_kl_prompts: 4, max_tokens: 8}
rows: {grpo: rl/grpo, rloo: rl/rloo}
seeds: 2
"""
LITTLE = {
    "prompts": "12",
    "samples": "1",
    "max_tokens": "16",
    "seeds": "2",
    "dictionary.features": "64",
    "dictionary.k": "6",
    "train.steps": "6",
    "train.batch": "256",
    "kl_documents": "6",
    "show": "3",
    "min_documents": "3",
    "patching.documents": "2",
    "patching.counts": "[1, 8]",
    "causal.measure": "accuracy",
    "causal.prompts": "2",
    "causal.counts": "[2]",
    "causal.features": "2",
    "causal.steering_factors": "[0.5, 1.0]",
    "causal.factors": "[2.0]",
    "causal.draws": "1",
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def look(page: Page, path: Path, name: str) -> None:
    """Open a page: at no width does it run over, its pictures are there, and every part of it opens."""
    page.goto(path.as_uri())
    expect(page.locator("h1")).to_have_count(1)
    for width in (480, 1280):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    for detail in page.locator("details > summary").all():
        if detail.is_visible():
            detail.click()
    for inner in page.locator("a[href^='#']").all():
        assert page.locator(inner.get_attribute("href") or "").count() == 1, "a link leads nowhere"
    for file in page.locator("a[href$='.html'], a[href$='.json']").all():
        assert (path.parent / (file.get_attribute("href") or "")).is_file(), "a link leads nowhere"
    assert page.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
    picture(page, name)


def test_report_of_a_run_opens_whole(page: Page, place: Path) -> None:
    small = "--rollout.num_prompts 2 --rollout.group_size 2 --rollout.max_tokens 8 --eval.num_examples 4 --task.size 40"
    words = f"train tiny/grpo --train.steps 3 --eval.every 1 --run it --quiet {small}"
    assert main(words.split()) == 0
    look(page, place / "runs" / "it" / "report.html", "run")
    assert page.locator("svg").count() >= 2


def test_report_of_a_sweep_opens_whole(page: Page, place: Path) -> None:
    (place / "mine.yaml").write_text(SWEEP)
    assert main(["sweep", "mine.yaml", "--quiet"]) == 0
    look(page, place / "runs" / "sweep-mine" / "report.html", "sweep")
    expect(page.locator("body")).to_contain_text("A <b>small</b> one.")
    expect(page.locator("body")).to_contain_text("rloo")


def test_report_of_differences_opens_whole(page: Page, place: Path) -> None:
    options = [word for key, value in LITTLE.items() for word in (f"--changes.{key}", value)]
    assert main(["sae", "diff", "tiny", "tiny-sft", "--task", "stories", "--run", "two", "--quiet", *options]) == 0
    look(page, place / "runs" / "two" / "report.html", "differences")
