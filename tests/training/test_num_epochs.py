"""Length of a training in epochs: its number of steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import RecipeError
from posttrain.recipes.recipe import load_recipe, validate_recipe
from posttrain.training.sources import num_batches
from posttrain.training.step import learning_rate
from refusing import refuses
from small_runs import Events, one_layer_recipe, steps_of, watched


@pytest.mark.parametrize(
    ("num_epochs", "examples", "batch", "expected"),
    [(3, 1000, 32, 94), (1, 64, 32, 2), (1, 65, 32, 3), (0.3, 10, 3, 1), (0.1, 30, 3, 1), (1 / 3, 30, 5, 2)],
)
def test_num_batches_of_num_epochs(num_epochs: float, examples: int, batch: int, expected: int) -> None:
    assert num_batches(num_epochs, examples, batch) == expected


def epochs_over(num_epochs: float, kind: str = "sft", **train: Any) -> Any:
    """A small recipe that counts passes over 7 stories."""
    plain = one_layer_recipe(kind, train={"schedule": "linear", **train}).dump()
    plain["train"] |= {"steps": None, "num_epochs": num_epochs}
    plain["task"] |= {"size": 7}
    return validate_recipe(plain).resolve()


def test_epochs_over_rows_are_that_many_steps_with_their_rates(tmp_path: Path) -> None:
    recipe = epochs_over(2)
    assert recipe.data is not None
    steps, events = -(-2 * 7 // recipe.data.batch_size), Events()
    assert watched(tmp_path / "epochs", recipe, events).step == steps
    (start,) = events.of("start")
    assert (start["steps"], start["length"]) == (
        steps,
        f"2 passes over 7 rows = {steps} steps of {recipe.data.batch_size}",
    )
    options = one_layer_recipe("sft", train={"schedule": "linear", "steps": steps}).train
    rates = [learning_rate(options, step) for step in range(1, steps + 1)]
    assert [row["lr"] for row in steps_of(tmp_path / "epochs")] == rates


def test_epochs_over_prompts_count_every_update(tmp_path: Path) -> None:
    recipe, events = epochs_over(1, "grpo", ppo_epochs=2), Events()
    assert recipe.rollout is not None
    batches = -(-7 // recipe.rollout.num_prompts)
    assert watched(tmp_path, recipe, events).step == 2 * batches
    of = f"{batches} rollout batches of {recipe.rollout.num_prompts}, 2 steps each: {2 * batches} steps"
    assert events.of("start")[0]["length"] == f"1 pass over 7 prompts = {of}"


def test_exactly_one_of_the_two(tmp_path: Path) -> None:
    with refuses(RecipeError, "train", "'steps'", "'num_epochs'"):
        validate_recipe(one_layer_recipe("sft").dump() | {"train": {"steps": 3, "num_epochs": 1}})
    with refuses(RecipeError, "'steps'", "'num_epochs'"):
        validate_recipe(one_layer_recipe("sft").dump() | {"train": {"steps": None}})
    with refuses(RecipeError, "command line: train.num_epochs", "train.steps"):
        load_recipe("tiny/sft", [("train.num_epochs", "1"), ("train.steps", "3")])
