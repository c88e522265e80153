"""Runs on a mixture: shares and numbers by part in every kind of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from closeness import approx
from posttrain.errors import RecipeError, UsageError
from posttrain.recipes.recipe import Recipe
from posttrain.training.build import prepare
from refusing import refuses
from small_runs import one_layer_recipe, recorded, run, same_bits, saved_tensors, steps_of, untimed

pytestmark = pytest.mark.usefixtures("quick_stories")


def mixed(weights: dict[str, float], **options: Any) -> dict[str, Any]:
    """Stories of one step, two, ... under the names of the parts; 12 of each."""
    steps = {name: number for number, name in enumerate(weights, start=1)}
    parts = [
        {
            "name": name,
            "weight": weight,
            "task": {"name": "stories", "size": 12, "min_steps": n, "max_steps": n} | options,
        }
        for (name, weight), n in zip(weights.items(), steps.values(), strict=True)
    ]
    return {"name": "mixture", "parts": parts}


UPDATES = {"steps": 6, "lr": 1e-3, "ppo_epochs": 1, "num_minibatches": 2, "save_every": 1, "keep_checkpoints": 20}


def shares_of(folder: Path, *names: str) -> list[tuple[float, ...]]:
    """Prompts of each part in every rollout batch."""
    rows = [step for step in steps_of(folder) if f"{names[0]}:prompts" in step]
    return [tuple(row[f"{name}:prompts"] for name in names) for row in rows]


def test_prompts_by_part_in_rollouts_that_replace_groups_and_resume(tmp_path: Path) -> None:
    rollout = {"group_size": 2, "max_tokens": 4, "drop_uniform_groups": True, "max_rounds": 3, "staleness": 1}
    task = mixed({"one": 3, "two": 1})
    recipe = one_layer_recipe("grpo", task=task, train=UPDATES, rollout=rollout, rewards=["small_runs:many_vowels"])
    run(tmp_path / "whole", recipe)
    shares, training = shares_of(tmp_path / "whole", "one", "two"), recorded(tmp_path / "whole")[0]
    assert all(one == 3 * two for one, two in shares)
    assert any(one + two > 4 for one, two in shares), "groups were replaced"
    for step, row in enumerate(steps_of(tmp_path / "whole"), start=1):
        for name in ("one", "two") if "one:prompts" in row else ():
            rollouts = [r for r in training if r.step == step and r.example_id.startswith(f"{name}/")]
            assert row[f"{name}:prompts"] == len(rollouts) / 2 >= row[f"{name}:trained"]
            assert row[f"{name}:reward"] == approx(sum(r.reward for r in rollouts) / len(rollouts))
            assert row[f"{name}:completion_length"] == approx(sum(r.num_own for r in rollouts) / len(rollouts))
            assert row[f"{name}:accuracy"] == sum(r.outcome == "right" for r in rollouts) / len(rollouts)
    run(tmp_path / "cut", recipe, stop_after=3)
    run(tmp_path / "cut", recipe, resume=True)
    assert untimed(tmp_path / "cut") == untimed(tmp_path / "whole")
    assert same_bits(saved_tensors(tmp_path / "cut", 6), saved_tensors(tmp_path / "whole", 6))


def test_what_else_is_refused(tmp_path: Path) -> None:
    with refuses(RecipeError, "curriculum"):
        one_layer_recipe("sft", curriculum="stages")
    same = mixed({"one": 1, "two": 1}, split="validation")
    with refuses(RecipeError, "task.split", "'validation'", "'stories'"):
        prepare(one_layer_recipe("sft", task=same, eval={"every": 1}), tmp_path)
    short = one_layer_recipe("sft", task=mixed({"one": 1, "five": 1}, max_value=30), data={"max_length": 60})
    with refuses(UsageError, "task.parts", "'five'"):
        prepare(short.model_copy(update={"task": _long(short)}), tmp_path)


def _long(recipe: Recipe) -> Any:
    """The second part has stories of six steps, which are longer than the limit."""
    parts = [dict(part) for part in recipe.task.options["parts"]]
    parts[1]["task"] = parts[1]["task"] | {"min_steps": 6, "max_steps": 6}
    return recipe.task.model_copy(update={"parts": parts})
