"""The embedded models are what their recipes make."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from posttrain.models.sources import EMBEDDED
from posttrain.recipes.recipe import load_recipe
from posttrain.runs.launch import RunStart, launch
from posttrain.store.metrics import MetricsLog, evaluation_points

pytestmark = pytest.mark.slow


def test_tiny_sft_is_what_its_recipe_makes(tmp_path: Path) -> None:
    run = launch(load_recipe("tiny/sft"), RunStart(root=tmp_path, name="sft")).folder
    made, embedded = (
        load_file(folder / "model.safetensors") for folder in (run / "checkpoints" / "best", EMBEDDED["tiny-sft"])
    )
    base = load_file(EMBEDDED["tiny"] / "model.safetensors")
    assert made.keys() == embedded.keys() == base.keys()
    for name, weight in embedded.items():
        moved = (weight - base[name]).norm()
        assert (made[name] - weight).norm() <= 0.05 * moved, name  # the rounding of another kind of CPU
    last = evaluation_points(MetricsLog(run / "metrics.jsonl").read())[-1].results
    assert last["format"] == 1.0
    assert last["accuracy"] < 0.15


def test_grpo_from_tiny_sft_learns(tmp_path: Path) -> None:
    """The first training command of the README does what its description promises."""
    changes = [("train.steps", "40"), ("eval.num_examples", "200"), ("eval.every", "40")]
    run = launch(load_recipe("tiny/grpo", changes), RunStart(root=tmp_path, name="grpo")).folder
    first, *_, last = (point.results for point in evaluation_points(MetricsLog(run / "metrics.jsonl").read()))
    assert first["format"] == 1.0
    assert last["accuracy"] > first["accuracy"] + 0.5
    assert last["completion_length"] > 2 * first["completion_length"]


def test_grpo_under_top_p_learns_and_its_ratio_begins_at_one(tmp_path: Path) -> None:
    changes = [("train.steps", "40"), ("eval.num_examples", "200"), ("eval.every", "40")]
    run = launch(load_recipe("tiny/grpo-top-p", changes), RunStart(root=tmp_path, name="grpo")).folder
    log = MetricsLog(run / "metrics.jsonl").read()
    first, *_, last = (point.results for point in evaluation_points(log))
    assert last["accuracy"] > first["accuracy"] + 0.5
    steps = [json.loads(line)["metrics"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    distances = [step["ratio_distance"] for step in steps if "ratio_distance" in step]
    assert len(distances) == 40
    assert max(distances) < 1e-6, "one update per batch: the ratio is 1 at every update"
