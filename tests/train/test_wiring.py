"""How a recipe's parts are put together: what is shared, what is kept apart, what two keys may not contradict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_runs import make_recipe, run, save_perturbed

from posttrain.errors import UsageError
from posttrain.train.setup import prepare

PPO: dict[str, Any] = {"objective": {"name": "ppo"}, "advantage": {"name": "gae"}}


def test_a_critic_shares_the_weights_that_nothing_trains() -> None:
    parts = prepare(make_recipe("grpo", model={"adapter": {"rank": 2}}, **PPO))
    own = {id(p) for p in parts.model.parameters()}
    trained = [p for p in parts.companions["critic"].parameters() if p.requires_grad]
    frozen = [p for p in parts.companions["critic"].parameters() if not p.requires_grad]
    assert frozen
    assert all(id(p) in own for p in frozen)
    assert trained
    assert not any(id(p) in own for p in trained)


@pytest.mark.parametrize(("trunk", "num_apart"), [("separate", True), ("shared", False)])
def test_only_a_critic_of_its_own_is_clipped_apart(trunk: str, num_apart: bool) -> None:
    parts = prepare(make_recipe("grpo", head={"trunk": trunk}, **PPO))
    own, apart = parts.split_parameters()
    assert len(own) + len(apart) == len(parts.parameters)
    assert bool(apart) is num_apart
    model = {id(p) for p in parts.model.parameters()}
    if num_apart:  # the critic's trunk and its head
        assert {id(p) for p in own} <= model
        assert not {id(p) for p in apart} & model


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {
                "objective": {"name": "kto"},
                "advantage": None,
                "rollout": {"select": {"name": "balanced", "threshold": 0.2}, "label_above": 0.1},
            },
            r"rollout\.select\.threshold: 0\.2 decides .*label_above 0\.1 .*the same number",
        ),
        (
            {"advantage": {"name": "mean_scaled"}, "kl_in_reward": {"weight": 0.1}},
            r"kl_in_reward: a penalty makes rewards negative, and advantage 'mean_scaled'",
        ),
        (
            {"rollout": {"drop_uniform_groups": True, "uniform_by": "corect"}},
            r"rollout\.uniform_by: there is no reward part 'corect'\. Did you mean 'correct'\?",
        ),
    ],
)
def test_two_opinions_about_one_thing_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        prepare(make_recipe("grpo", **changes))


def test_a_teacher_that_has_become_another_is_refused_on_resume(tmp_path: Path) -> None:
    """The teacher is a folder here; of a run, the name of its best checkpoint would be compared."""
    teacher = tmp_path / "step-000001"
    save_perturbed(teacher)
    recipe = make_recipe(
        "grpo", objective={"name": "on_policy_distillation"}, advantage=None, teacher={"name": str(teacher)}
    )
    recipe.train.steps = 2
    run(tmp_path / "run", recipe)
    other = tmp_path / "step-000002"
    teacher.rename(other)
    recipe.teacher.name = str(other)
    recipe.train.steps = 4
    with pytest.raises(UsageError, match=r"teacher\.name: .* stood for step-000001 when this run began"):
        run(tmp_path / "run", recipe, resume=True)


def test_groups_are_uniform_by_the_part_that_is_named() -> None:
    """A coin beside the answer makes every group differ; by `correct` those without a right answer are uniform."""
    rollout = {"drop_uniform_groups": True, "max_rounds": 2}
    by_reward = prepare(make_recipe("grpo", rollout=rollout)).source(1)
    by_part = prepare(make_recipe("grpo", rollout=rollout | {"uniform_by": "correct"})).source(1)
    assert by_reward.metrics["accepted_groups"] > 0.5
    assert by_part.metrics["accepted_groups"] < by_reward.metrics["accepted_groups"]
