"""A clip range that is as narrow as the rounding of ratios is said to clip rounding, before and after measuring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from posttrain.recipes.inert import ROOM, expected_narrow_bounds, narrow_bounds, ratio_bounds
from posttrain.recipes.recipe import load_recipe
from posttrain.sweeps.file import training_recipe_names
from small_runs import Events, one_layer_recipe, steps_of, watched

HALF = {"dtype": "bf16", "adapter": {"rank": 2}}
GSPO = {"objective": {"name": "gspo"}, "train": {"steps": 2, "lr": 1e-3}}


def notices(folder: Path, **changes: Any) -> list[str]:
    events = Events()
    watched(folder, one_layer_recipe("grpo", **changes), events)
    return [info["message"] for info in events.of("notice") if "rounding" in info["message"]]


def test_narrow_clip_of_bf16_is_named_with_measured_mismatch(tmp_path: Path) -> None:
    expected, measured = notices(tmp_path, model=HALF, **GSPO)
    first = steps_of(tmp_path)[0]
    assert first["ratio_distance"] * ROOM > 4e-4
    assert first["clip_fraction"] > 0
    for message in (expected, measured):
        assert "objective.clip_low 0.0003, objective.clip_high 0.0004" in message
        assert "rollout.old_logprobs: trainer" in message
    assert f"{first['ratio_distance']:.2g}" in measured


@pytest.mark.parametrize("changes", [{"model": HALF, "rollout": {"old_logprobs": "trainer"}}, {}])
def test_ratios_of_one_side_or_fp32_clip_no_rounding(changes: dict[str, Any], tmp_path: Path) -> None:
    assert notices(tmp_path, **changes, **GSPO) == []
    assert steps_of(tmp_path)[0]["clip_fraction"] == 0


def test_bounds_of_ratio_are_distances_from_one() -> None:
    recipe = one_layer_recipe("grpo", objective={"name": "grpo", "clip_low": 0.1, "clip_max": 3.0})
    assert ratio_bounds(recipe) == {"objective.clip_low": 0.1, "objective.clip_high": 0.2, "objective.clip_max": 2.0}
    assert narrow_bounds(ratio_bounds(recipe), 0.01) == ""
    assert narrow_bounds(ratio_bounds(recipe), 0.0101) == "objective.clip_low 0.1"


@pytest.mark.parametrize("name", training_recipe_names())
def test_shipped_recipe_clips_no_rounding(name: str) -> None:
    recipe = load_recipe(name).resolve()
    assert expected_narrow_bounds(ratio_bounds(recipe), recipe.model.dtype, recipe.rollout) == []
