"""Two steps of every recipe on CUDA, in the recipe's own number format."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from closeness import approx
from posttrain.recipes.recipe import load_recipe
from posttrain.runs.launch import RunStart, launch
from posttrain.store.metrics import MetricsLog
from test_recipes import NAMES, NUM_STEPS, judge, local_data, random_models, small, with_coin  # as the CPU test has it

__all__ = ["judge", "local_data", "random_models"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_trains_two_steps_on_cuda(
    name: str,
    random_models: dict[str, Path],
    local_data: dict[str, Path],
    judge: Path,
    tmp_path: Path,
) -> None:
    recipe = with_coin(small(name, random_models, local_data), judge)
    recipe.model.device = "cuda"
    recipe.model.dtype = load_recipe(name).model.dtype
    result = launch(recipe, RunStart(root=tmp_path, name="run"))
    assert (result.step, result.reason) == (NUM_STEPS, "finished")
    rows = [row for row in MetricsLog(result.folder / "metrics.jsonl").read() if "loss" in row.metrics]
    assert [row.step for row in rows] == [1, 2]
    assert all(math.isfinite(value) for row in rows for value in row.metrics.values())
    assert rows[-1].timing["peak_memory_bytes"] > 0
    if recipe.rollout is not None and recipe.model.dtype == "fp32":
        assert rows[0].metrics["kl_sampler"] == approx(0.0, abs=1e-6)
