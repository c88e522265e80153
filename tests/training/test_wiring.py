"""Construction of a run's components: what is shared, what is separate, and which keys exclude one another."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from closeness import OF_EMBEDDED, approx
from posttrain.errors import UsageError
from posttrain.models.sources import TINY
from posttrain.training.build import prepare
from posttrain.training.step import accumulate
from refusing import refuses
from small_runs import one_layer_recipe, run, save_perturbed

PPO: dict[str, Any] = {"objective": {"name": "ppo"}, "advantage": {"name": "gae"}}


def test_a_critic_shares_the_weights_that_nothing_trains() -> None:
    parts = prepare(one_layer_recipe("grpo", model={"adapter": {"rank": 2}}, **PPO))
    own = {id(p) for p in parts.model.parameters()}
    trained = [p for p in parts.heads["critic"].parameters() if p.requires_grad]
    frozen = [p for p in parts.heads["critic"].parameters() if not p.requires_grad]
    assert frozen
    assert all(id(p) in own for p in frozen)
    assert trained
    assert not any(id(p) in own for p in trained)


@pytest.mark.parametrize(("trunk", "num_apart"), [("separate", True), ("shared", False)])
def test_only_a_critic_of_its_own_is_clipped_apart(trunk: str, num_apart: bool) -> None:
    parts = prepare(one_layer_recipe("grpo", head={"trunk": trunk}, **PPO))
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
            "rollout.select.threshold: 0.2 selects",
        ),
        ({"advantage": {"name": "mean_scaled"}, "kl_in_reward": {"weight": 0.1}}, "kl_in_reward"),
        ({"rollout": {"drop_uniform_groups": True, "uniform_by": "corect"}}, "rollout.uniform_by"),
    ],
)
def test_two_opinions_about_one_thing_are_refused(changes: dict[str, Any], message: str) -> None:
    with refuses(UsageError, message):
        prepare(one_layer_recipe("grpo", **changes))


def test_prepare_rows_with_answers_where_the_model_samples_says_so() -> None:
    pairs: dict[str, Any] = {"objective": {"name": "dpo"}, "advantage": None, "aggregate": "unit_mean"}
    pairs["rollout"] = {"select": {"name": "right_and_wrong", "threshold": 1.0}, "label_above": 1.0}
    told = [
        "are ignored" in " ".join(prepare(one_layer_recipe("grpo", **pairs, task=task)).warnings)
        for task in ({"responses": "pair"}, {})
    ]
    assert told == [True, False]


def test_a_teacher_that_has_become_another_is_refused_on_resume(tmp_path: Path) -> None:
    """The teacher is a folder here; of a run, the name of its best checkpoint would be compared."""
    teacher = tmp_path / "step-000001"
    save_perturbed(teacher)
    recipe = one_layer_recipe(
        "grpo", objective={"name": "on_policy_distillation"}, advantage=None, teacher={"name": str(teacher)}
    )
    recipe.train.steps = 2
    run(tmp_path / "run", recipe)
    other = tmp_path / "step-000002"
    teacher.rename(other)
    recipe.teacher.name = str(other)
    recipe.train.steps = 4
    with refuses(UsageError, "teacher.name"):
        run(tmp_path / "run", recipe, resume=True)


def test_groups_are_uniform_by_the_part_that_is_named() -> None:
    """A random reward makes every group differ; by `correct` those without a correct answer are uniform."""
    rollout = {"drop_uniform_groups": True, "max_rounds": 2}
    by_reward = prepare(one_layer_recipe("grpo", rollout=rollout)).source(1)
    by_part = prepare(one_layer_recipe("grpo", rollout=rollout | {"uniform_by": "correct"})).source(1)
    assert by_reward.metrics["accepted_groups"] > 0.5
    assert by_part.metrics["accepted_groups"] < by_reward.metrics["accepted_groups"]


DPO = {"objective": {"name": "dpo"}, "advantage": None}
EXPERTS = {"objective": {"name": "cross_entropy"}, "advantage": None}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (PPO, 1.5),
        ({"objective": {"name": "on_policy_distillation"}, "advantage": None, "teacher": {"name": "tiny"}}, 1.5),
        (DPO, 1.0),
        ({"objective": {"name": "distillation"}, "advantage": None, "teacher": {"name": "tiny"}}, 1.0),
    ],
)
def test_likelihoods_of_own_samples_are_taken_at_temperature_1(changes: dict[str, Any], expected: float) -> None:
    """Sampling is at 1.5 here: a policy gradient improves the policy that sampled, a likelihood the model itself."""
    parts = prepare(one_layer_recipe("grpo", **changes))
    assert parts.policy.temperature == parts.method.forward.temperature == expected
    assert parts.source.sampling.temperature == 1.5
    if parts.reference is not None:
        with parts.reference.open() as reference:
            assert reference.temperature == expected


def test_expert_iteration_has_the_loss_of_the_model_itself() -> None:
    recipe = one_layer_recipe("grpo", **EXPERTS, rollout={"temperature": 2.0})
    parts = prepare(recipe)
    batch = parts.source(1).batch
    assert batch is not None
    loss, metrics = accumulate(parts.method, batch, recipe.train, learns=False)
    nll = []
    for b in range(batch.num_rows):
        ids = batch.tokens[b : b + 1, : int(batch.lengths[b])]
        with torch.no_grad():
            table = parts.model(ids).logits[0].double().log_softmax(-1)
        nll += [-float(table[t - 1, ids[0, t]]) for t in range(ids.shape[1]) if batch.mask[b, t]]
    assert loss == approx(sum(nll) / len(nll), abs=OF_EMBEDDED)
    assert metrics["nll"] == approx(loss, abs=OF_EMBEDDED)


@pytest.mark.parametrize(
    ("template", "has_chat_template", "expected"),
    [("r1_zero", True, True), ("chat", True, False), ("r1_zero", False, False)],
)
def test_prepare_of_a_chat_model_under_another_template_says_so(
    tmp_path: Path, template: str, has_chat_template: bool, expected: bool
) -> None:
    shutil.copytree(TINY, tmp_path / "mine")
    if not has_chat_template:
        (tmp_path / "mine" / "chat_template.jinja").unlink()
    parts = prepare(one_layer_recipe("sft", model={"name": str(tmp_path / "mine")}, prompt={"template": template}))
    assert any("--prompt.template chat" in line for line in parts.warnings) is expected
