"""Objectives from outside the package: a function with the decorator, named in a recipe file, is all that it takes.

They are defined here, in a file that is no part of the package, and the recipes name them
``module:function``. Both train, and both learn.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
import yaml
from pydantic import Field

from posttrain.algorithms.objectives.primitives import row_sum
from posttrain.recipes.recipe import Recipe, load_recipe
from posttrain.registry import register
from posttrain.types import Batch, Loss, Outputs
from small_runs import BASE, run, steps_of

TOKENS = "test_toy_objective:bounded_reinforce"
PAIRS = "test_toy_objective:wanted_gap"


@register("objective", level="token", needs=("advantages",), optional_needs={"pull": "ref_logprobs"})
def bounded_reinforce(
    outputs: Outputs, batch: Batch, *, strength: Annotated[float, Field(gt=0)] = 1.0, pull: float = 0.0
) -> Loss:
    """A toy: REINFORCE with advantages squeezed into (−1, 1), and maybe a pull to the reference.

    ``values = −tanh(s A) log π + ½ p (log π − log π_ref)²``

    Args:
        strength: s.
        pull: p.
    """
    push = torch.tanh(strength * batch.field("advantages"))
    values = -push * outputs.logprobs
    if pull:
        values = values + 0.5 * pull * (outputs.logprobs - batch.field("ref_logprobs")).square()
    return Loss(values, {"push": push.abs()})


@register("objective", level="pair", needs=("margins",))
def wanted_gap(outputs: Outputs, batch: Batch, *, per_point: float = 4.0) -> Loss:
    """A toy over pairs: the log-probabilities of the two answers shall differ by their difference in score.

    ``values = ½ (log π(chosen) − log π(rejected) − m · margin)²``

    Args:
        per_point: m, in nats for a point of the score.
    """
    of_rows = row_sum(outputs.logprobs, batch.mask)
    gap = of_rows[0::2] - of_rows[1::2]
    wanted = per_point * batch.field("margins")[0::2]
    return Loss(0.5 * (gap - wanted).square(), {"gap": gap.detach(), "wanted": wanted})


def write_recipe(folder: Path, kind: str, objective: Any, **sections: Any) -> Path:
    """A recipe file as a user would write it."""
    data = {key: dict(value) if isinstance(value, dict) else value for key, value in BASE[kind].items()}
    for name, changes in sections.items():
        data[name] = data[name] | changes
    path = folder / "toy.yaml"
    path.write_text(yaml.safe_dump(data | {"objective": objective}))
    return path


def resolved(path: Path) -> Recipe:
    return load_recipe(str(path)).resolve()


# --- one value per token ---


def test_it_trains_from_a_recipe_file_and_learns(tmp_path: Path) -> None:
    """Digits pay. The reward of the last two of ten batches is 0.3 above that of the first two."""
    rollout = {"num_prompts": 4, "group_size": 8, "max_tokens": 12}
    settings = {"steps": 10, "lr": 1e-3}
    path = write_recipe(tmp_path, "grpo", {"name": TOKENS, "strength": 0.8}, train=settings, rollout=rollout)
    run(tmp_path, resolved(path))
    rows = steps_of(tmp_path)
    assert fmean(r["reward"] for r in rows[-2:]) - fmean(r["reward"] for r in rows[:2]) > 0.3
    assert 0.0 < rows[0]["push"] < 1.0  # its own metric, averaged over the tokens of the batch
    assert all("push" in row for row in rows)
    assert {"kl_sampler", "effective_sample_size", "advantage_std", "grad_norm"} <= rows[0].keys()


# --- one value per pair ---


def test_an_objective_over_pairs_learns_from_data(tmp_path: Path) -> None:
    """The right answer shall be 4 nats likelier than the wrong one: the error falls to less than a third."""
    path = write_recipe(
        tmp_path, "judged", PAIRS, data={"batch_size": 10}, train={"steps": 12, "lr": 3e-4, "micro_batch_rows": 6}
    )
    recipe = resolved(path)
    assert recipe.aggregate is not None
    assert recipe.aggregate.name == "unit_mean"
    run(tmp_path, recipe)
    rows = steps_of(tmp_path)
    assert all(row["wanted"] == 4.0 for row in rows)
    assert rows[0]["loss"] >= 0.5 * (rows[0]["gap"] - 4.0) ** 2  # a mean of squares over ten pairs
    assert abs(rows[0]["gap"] - 4.0) > 3.0
    assert fmean(abs(r["gap"] - 4.0) for r in rows[-2:]) < abs(rows[0]["gap"] - 4.0) / 3
    assert fmean(r["loss"] for r in rows[-2:]) < rows[0]["loss"] / 3
