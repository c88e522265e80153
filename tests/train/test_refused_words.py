"""Words of a recipe that do not fit one another are refused before anything is trained, each with what would work."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.errors import RecipeError, UsageError
from posttrain.registry import register
from posttrain.train.build import prepare
from posttrain.types import Batch, Loss, Outputs
from small_runs import make_recipe


def refused(kind: str = "grpo", **changes: Any) -> str:
    """The message; nothing may be trained or sampled before it."""
    with pytest.raises(UsageError) as caught:
        prepare(make_recipe(kind, **changes))
    return str(caught.value)


@register("objective", level="token", needs=("advantages", "returns"), head="value")
def forgets_its_old_values(outputs: Outputs, batch: Batch) -> Loss:
    """An objective for this test: it has a value head, but does not ask for the values of the sampling policy."""
    raise AssertionError("it is never called")


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            "grpo",
            {"objective": "dpo", "advantage": "centered"},
            "advantage: objective 'dpo' reads no advantages; leave 'advantage' out",
        ),
        (
            "grpo",
            {"objective": "dpo", "kl_in_reward": {"weight": 0.1}},
            "kl_in_reward: objective 'dpo' reads no advantages, so it would see no penalty",
        ),
        ("grpo", {"head": {}}, "head: objective 'grpo' reads no scores or values; leave 'head' out"),
        (
            "judged",
            {"head": {"trunk": "shared"}},
            "head.trunk: a reward head always stands on the model that is trained",
        ),
        ("grpo", {"advantage": "gae"}, "advantage: 'gae' needs values, which objective 'grpo' does not learn; use"),
        (
            "grpo",
            {"objective": "ppo", "advantage": "normalized"},
            "advantage: objective 'ppo' learns returns, and 'normalized' gives none; use gae",
        ),
        ("judged", {"objective": "ppo"}, "which come from rollouts; give 'rollout', not 'data'"),
        (
            "grpo",
            {"objective": "distillation"},
            "teacher: objective 'distillation' learns from a teacher; give teacher.name",
        ),
        (
            "grpo",
            {"teacher": {"name": "tiny"}},
            "teacher: objective 'grpo' reads no teacher; leave 'teacher' out",
        ),
        (
            "grpo",
            {"objective": "process"},
            "objective: labels of steps come with data, not from rollouts; give 'data'",
        ),
        (
            "grpo",
            {
                "objective": "dpo",
                "correction": "token_tis",
                "rollout": {"old_logprobs": "trainer"},
            },
            "correction: it weighs tokens, but objective 'dpo' gives one value per pair",
        ),
        (
            "grpo",
            {"aggregate": "unit_mean"},
            "aggregate: 'unit_mean' weighs units, but objective 'grpo' gives one value per token",
        ),
        (
            "grpo",
            {"kl_in_reward": {"weight": 0.1, "target": 1.0, "horizon": 3}},
            "kl_in_reward.horizon=3 is too short for batches of 16 completions: it must be more than 3.2",
        ),
    ],
)
def test_words_that_do_not_fit(kind: str, changes: dict[str, Any], message: str) -> None:
    assert message in refused(kind, **changes)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("grpo", {"correction": "token_tis"}, "set rollout.old_logprobs to trainer"),
        ("judged", {"correction": "token_tis"}, "'correction' belongs to 'rollout'; a supervised recipe has none"),
        ("judged", {"train": {"epochs": 2}}, "count passes over a rollout batch; 'data' has none"),
        ("grpo", {"correction": {"name": "token_tis", "capp": 3}, "rollout": {"old_logprobs": "trainer"}}, "'cap'?"),
    ],
)
def test_sections_that_do_not_fit(kind: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        make_recipe(kind, **changes)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rollout": {"select": "best_and_worst"}},
            "rollout.select: 'best_and_worst' gives pairs, but objective 'grpo' wants single answers",
        ),
        (
            {"objective": {"name": "dpo"}, "rollout": {"select": "every"}},
            "rollout.select: 'every' gives rows, but objective 'dpo' wants pairs of answers",
        ),
        (
            {"objective": {"name": "dpo"}, "rollout": {"group": 1}},
            "rollout.select: a pair needs two answers; give rollout.group",
        ),
        (
            {"kl_in_reward": {"weight": 0.1}, "rollout": {"select": "best_of"}},
            "rollout.select: advantages per token and kl_in_reward are computed over every completion",
        ),
        (
            {"rollout": {"select": "best_offf"}},
            "rollout.select: there is no selection named 'best_offf'. Did you mean 'best_of'?",
        ),
    ],
)
def test_selections_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    assert message in refused(**changes)
