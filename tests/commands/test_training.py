"""`posttrain train`, its summary and `posttrain runs`, on the embedded model with little work."""

from __future__ import annotations

import html
import json
import shutil
import sys
from pathlib import Path

import pytest

from posttrain.cli import main
from posttrain.recipes.recipe import load_recipe
from posttrain.reports.summary import chapter_of, describe_settings, note_on, write_summary
from posttrain.store.metric_names import ACCURACY
from posttrain.store.metrics import EvaluationPoint

RECIPE = """\
description: a run of three steps for the tests
model: {name: tiny}
task: {name: stories, size: 40, max_steps: 2}
prompt: {template: {name: r1_zero, preamble: ""}}
rewards: [{name: correct, weight: 1.0}, {name: xml_format, weight: 0.2}]
rollout: {num_prompts: 2, group_size: 2, max_tokens: 8}
objective: grpo
train: {steps: 3, lr: 1.0e-4, save_every: 1}
eval: {every: 3, num_examples: 5}
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
    assert (
        '<p class="lead">tiny · 2 prompts × 2 answers of 8 tokens · 3 steps · learning rate 0.0001 · fp32 · seed 0'
        in report
    )
    assert report.count('class="card transcript"') == 5
    assert report.count("before training</span>") == 5
    assert f"posttrain generate {run}" in report
    assert "Held-out problems, never trained on. Before the first update and after the last." in report
    points = [EvaluationPoint(step, f"nim/{split}", {}) for step in (0, 2) for split in ("validation", "train")]
    assert note_on(points, ACCURACY).startswith("Held-out problems, but nim/train: of the split that was trained on.")


def test_describe_settings_names_the_model_that_was_trained_not_that_of_the_description() -> None:
    overrides = [("model.name", "/data/runs/small/checkpoints/step-000040"), ("model.adapter.rank", "8")]
    recipe = load_recipe("grpo-gsm8k", [*overrides, ("train.lr", "0.5"), ("rollout.engine.name", "native")])
    lead = describe_settings(recipe)
    assert lead.startswith("small, step-000040 · LoRA of rank 8 · ")
    assert "learning rate 0.5" in lead


@pytest.mark.usefixtures("no_curves")
def test_commands_of_a_report_can_be_typed(place: Path) -> None:
    folder = place / "runs" / "two words"
    shutil.copytree(place / "runs" / "mine", folder)
    report = html.unescape(write_summary(folder).read_text())
    assert f"posttrain generate '{folder}'" in report
    assert f"posttrain train '{folder}/recipe.yaml' --run 'two words-again'" in report
    shutil.rmtree(folder)


def test_a_chapter_reads_the_runs_own_records(place: Path) -> None:
    chapter = chapter_of(place / "runs" / "mine", "Title", "Text")
    assert chapter.info[0] == ("steps", "3")
    reward = next(panel for panel in chapter.panels if panel.title == "Reward")
    assert reward.series[0].xs == [1.0, 2.0, 3.0]
    assert "a run of three steps" in chapter.recipe


@pytest.mark.parametrize(
    ("options", "package"),
    [
        (["--track", "trackio"], "trackio"),
        (["--track", "swanlab"], "swanlab"),
        (["--track", "mlflow", "--track.uri", "http://127.0.0.1:1"], "mlflow"),
        (["--track", "wandb"], "wandb"),
        (["--track", "tensorboard"], "tensorboard"),
        (["--optimizer", "adamw_8bit"], "bitsandbytes"),
    ],
)
def test_a_dry_run_notices_a_missing_package(
    options: list[str], package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the run itself would, before a model is loaded."""
    for name in [name for name in sys.modules if name.partition(".")[0] in (package, "torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setattr("posttrain.commands.train.find_spec", lambda name: None)
    assert main(["train", "tiny/grpo", "--dry-run", *options]) == 2
    said = capsys.readouterr()
    assert repr(package) in said.err
    assert said.out == ""


def test_a_dry_run_refuses_a_tracker_that_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offlin")
    assert main(["train", "tiny/grpo", "--dry-run", "--track", "wandb"]) == 2
    assert "WANDB_MODE" in capsys.readouterr().err
