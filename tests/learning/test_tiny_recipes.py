"""Every shipped recipe of the embedded model does what its description promises: minutes each, so in the slow suite.

Tested elsewhere: ``tiny/grpo``, ``tiny/grpo-top-p`` and ``tiny/sft`` (``test_embedded_models``); ``tiny/grpo-demo``,
``tiny/sft-calculator`` and ``tiny/grpo-calculator`` (``commands/test_demo_learns``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from posttrain.cli import main
from posttrain.recipes.document import recipe_names
from posttrain.recipes.recipe import load_recipe
from posttrain.runs.launch import RunStart, launch
from posttrain.store.metrics import MetricsLog, evaluation_points

pytestmark = pytest.mark.slow
ELSEWHERE = {"grpo", "grpo-top-p", "grpo-demo", "grpo-calculator", "sft", "sft-calculator"}
HERE = {"lm-hh", "orm", "pretrain", "prm", "rm", "rm-hh", "sae", "what-did-rl-change"}


def train(name: str, root: Path, changes: Sequence[tuple[str, str]] = ()) -> tuple[Path, list[dict[str, float]]]:
    """Return the folder of a run of a recipe and the results of its evaluations."""
    folder = launch(load_recipe(name, changes), RunStart(root=root, name=name.replace("/", "-"))).folder
    return folder, [point.results for point in evaluation_points(MetricsLog(folder / "metrics.jsonl").read())]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def pairs(root: Path) -> tuple[Path, list[dict[str, float]]]:
    return train("tiny/rm", root)


def test_every_tiny_recipe_is_tested() -> None:
    assert {name.removeprefix("tiny/") for name in recipe_names() if name.startswith("tiny/")} == ELSEWHERE | HERE


def test_rm_learns_to_compare(pairs: tuple[Path, list[dict[str, float]]]) -> None:
    first, *_, last = pairs[1]
    assert first["pair_accuracy"] < 0.6
    assert last["pair_accuracy_low"] > 0.6  # 68 % [64, 72] of 500 pairs


def test_orm_from_rm_learns_to_judge_answers(pairs: tuple[Path, list[dict[str, float]]], root: Path) -> None:
    _, results = train("tiny/orm", root, [("model.name", str(pairs[0]))])
    assert results[-1]["answer_accuracy_low"] > 0.55  # 62 % [57, 66] of 500 answers


def test_prm_learns_to_judge_steps(root: Path) -> None:
    _, results = train("tiny/prm", root)
    assert results[-1]["step_accuracy"] > results[-1]["positive_share"] + 0.03


def test_pretrain_loss_falls_towards_that_of_the_embedded_model(root: Path) -> None:
    """The first tenth of the run; the embedded model is the end of it."""
    folder, _ = train("tiny/pretrain", root, [("train.steps", "160")])
    losses = [row.metrics["loss"] for row in MetricsLog(folder / "metrics.jsonl").read()]
    assert losses[0] > 6.0
    assert losses[-1] < 1.2
    held_out = {"name": "stories", "split": "validation", "style": "document", "max_steps": 6, "size": 64}
    once = [("model", "{name: tiny}"), ("train.steps", "1"), ("train.lr", "1e-30"), ("task", json.dumps(held_out))]
    folder, _ = train("tiny/pretrain", root / "embedded", once)
    (embedded,) = (row.metrics["loss"] for row in MetricsLog(folder / "metrics.jsonl").read())
    assert 0.5 < embedded < 0.7


def test_lm_hh_and_rm_hh_learn_from_dialogues(root: Path) -> None:
    if (data := os.environ.get("POSTTRAIN_DATA")) is None:
        pytest.skip("POSTTRAIN_DATA names no folder with hh_rlhf/train.jsonl.gz")
    rows = ("task.path", f"{data}/hh_rlhf/train.jsonl.gz")
    model, _ = train("tiny/lm-hh", root, [rows])
    losses = [row.metrics["loss"] for row in MetricsLog(model / "metrics.jsonl").read()]
    assert sum(losses[-20:]) / 20 < 3.4
    _, results = train("tiny/rm-hh", root, [rows, ("model.name", str(model))])
    assert max(result["pair_accuracy"] for result in results) > 0.52


def test_sae_explains_the_residual_stream(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    assert main(["sae", "train", "tiny/sae", "--run", "sae", "--runs-dir", str(root), "--track", "[]"]) == 0
    last = evaluation_points(MetricsLog(root / "sae" / "metrics.jsonl").read())[-1].results
    assert last["fvu"] < 0.1


def test_what_did_rl_change_finds_features(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    assert main(["sae", "diff", "tiny/what-did-rl-change", "--runs-dir", str(root)]) == 0
    assert list(root.rglob("*what-did-rl-change*/report.html"))
