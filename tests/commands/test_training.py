"""`posttrain train`, its summary and `posttrain runs`, on the embedded model with little work."""

from __future__ import annotations

import html
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from posttrain.cli import main
from posttrain.commands.summary import answer_of, chapter_of, note_on, write_summary
from posttrain.recipes.recipe import load_recipe
from posttrain.render.template import build_template
from posttrain.store.headline import ACCURACY
from posttrain.store.metrics import EvaluationPoint
from posttrain.store.rollouts import RecordedRollout

RECIPE = """\
description: a run of three steps for the tests
model: {name: tiny}
task: {name: stories, size: 40, max_steps: 2}
prompt: {template: {name: r1_zero, preamble: ""}}
rewards: [{name: correct, weight: 1.0}, {name: xml_format, weight: 0.2}]
rollout: {prompts: 2, group: 2, max_tokens: 8}
objective: grpo
train: {steps: 3, lr: 1.0e-4, save_every: 1}
eval: {every: 3, n: 5}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe and one run of it, made on the command line."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "mine.yaml").write_text(RECIPE)
    assert main(["train", str(folder / "mine.yaml"), "--runs-dir", str(folder / "runs")]) == 0
    return folder


def test_a_run_leaves_records_curves_results_and_report(place: Path) -> None:
    run = place / "runs" / "mine"
    assert (run / "curves.png").read_bytes()[:4] == b"\x89PNG"
    results = json.loads((run / "results.json").read_text())
    assert (results["state"], results["step"]) == ("finished", 3)
    evaluation = results["evaluations"]["stories/validation"]
    assert (evaluation["first"]["step"], evaluation["last"]["step"]) == (0, 3)
    assert evaluation["last"]["n"] == 5.0
    assert results["fingerprint"] == load_recipe(str(place / "mine.yaml")).resolve().fingerprint()
    report = (run / "report.html").read_text()
    assert "a run of three steps for the tests" in report
    assert report.count('class="card transcript"') == 5
    assert report.count("before training</span>") == 5
    assert f"posttrain generate {run}" in report
    assert "Held-out problems, never trained on. Before the first update and after the last." in report
    points = [EvaluationPoint(step, f"nim/{split}", {}) for step in (0, 2) for split in ("validation", "train")]
    assert note_on(points, ACCURACY).startswith("Held-out problems, but nim/train: of the split that was trained on.")


def test_commands_of_a_report_can_be_typed(place: Path) -> None:
    folder = place / "runs" / "two words"
    shutil.copytree(place / "runs" / "mine", folder)
    report = html.unescape(write_summary(folder).read_text())
    assert f"posttrain generate '{folder}'" in report
    assert f"posttrain train '{folder}/recipe.yaml' --run 'two words-again'" in report
    shutil.rmtree(folder)


def test_the_end_of_a_run_says_where_it_is(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = str(place / "runs")
    assert main(["train", str(place / "mine.yaml"), "--runs-dir", runs, "--run", "other", "--quiet"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"run:    {place / 'runs' / 'other'}\n"
    assert captured.err == ""


def test_runs_are_listed_and_shown(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--runs-dir", str(place / "runs")]) == 0
    listing = capsys.readouterr().out
    line = next(line for line in listing.splitlines() if line.startswith("mine "))
    assert line.split()[1:5] == ["finished", "3/3", "tiny", "grpo"]
    assert main(["runs", "show", "mine", "--runs-dir", str(place / "runs")]) == 0
    shown = capsys.readouterr().out
    assert "12 in 3 steps" in shown  # 2 prompts × 2 answers × 3 steps
    assert "held-out stories/validation after 3 steps" in shown


def test_a_chapter_reads_the_runs_own_records(place: Path) -> None:
    chapter = chapter_of(place / "runs" / "mine", "Title", "Text")
    assert chapter.facts[0] == ("steps", "3")
    reward = next(panel for panel in chapter.panels if panel.title == "Reward")
    assert reward.series[0].xs == [1.0, 2.0, 3.0]
    assert "a run of three steps" in chapter.recipe


def test_a_recorded_answer_is_judged_by_its_parts() -> None:
    extract = build_template(load_recipe("grpo-math").prompt.template).extract
    row = RecordedRollout(
        1, 0, 0, 0, 0, "x", "question", "<think> a </think> <answer> 7 </answer>", "8", {"correct": 0.0}, 0.0, None, 9,
        "length", -0.5, "7", "wrong", (), 0,
    )  # fmt: skip
    answer = answer_of("base", row, extract)
    assert (answer.is_right, answer.extracted, answer.num_tokens, answer.is_cut) == (False, "7", 9, True)
    free = answer_of("base", replace(row, outcome="ungraded", reward=0.25), extract, True)
    assert (free.is_right, free.verdict) == (None, "reward 0.250")
