"""Advantages: values by hand and the identities between them."""

from __future__ import annotations

import math

import pytest
import torch

from closeness import allclose, approx
from posttrain.algorithms.advantages import (
    batch_normalized,
    centered,
    gdpo,
    leave_one_out,
    mean_scaled,
    normalized,
    raw,
)
from posttrain.errors import RecipeError
from posttrain.recipes.recipe import validate_recipe
from refusing import refuses

REWARDS = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.5, 0.5, 0.5, 0.5], [4.0, 0.0, 0.0, 0.0]], dtype=torch.float64)


def test_by_hand():
    assert raw(REWARDS).tolist() == REWARDS.tolist()
    assert centered(REWARDS)[0].tolist() == [0.5, -0.5, -0.5, 0.5]
    assert leave_one_out(REWARDS)[2].tolist() == approx([4.0, -4 / 3, -4 / 3, -4 / 3])
    std = (4 * 0.25 / 3) ** 0.5  # ddof = 1
    assert normalized(REWARDS, epsilon=0.0)[0].tolist() == approx([0.5 / std, -0.5 / std, -0.5 / std, 0.5 / std])
    assert normalized(REWARDS, epsilon=0.1)[0, 0].item() == approx(0.5 / (std + 0.1))


def test_leave_one_out_is_the_mean_of_the_others():
    rewards = torch.randn(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for n in range(6):
        for g in range(5):
            others = [rewards[n, j].item() for j in range(5) if j != g]
            assert leave_one_out(rewards)[n, g].item() == approx(rewards[n, g].item() - sum(others) / 4, abs=1e-12)
    assert allclose(leave_one_out(rewards), centered(rewards) * 5 / 4, atol=1e-14)


def test_equal_rewards_give_zero():
    for word in (centered, leave_one_out, normalized):
        assert word(REWARDS)[1].tolist() == [0.0] * 4
    assert normalized(REWARDS, epsilon=0.0)[1].tolist() == [0.0] * 4


def test_mean_scaled_by_hand():
    assert mean_scaled(REWARDS)[2].tolist() == [3.0, -1.0, -1.0, -1.0]
    assert mean_scaled(REWARDS[:1] * 0).tolist() == [[0.0] * 4]
    with refuses(ValueError, "not negative"):
        mean_scaled(-REWARDS)


@pytest.mark.parametrize("group", [2, 3, 8])
def test_mean_scaled_has_the_gradient_of_the_truncated_likelihood(group: int):
    """Exactly, over all outcomes of a group of Bernoulli(p): Σ_{k<G} (1 − p)^(k − 1)."""
    p = 0.3
    expectation = 0.0
    for correct in range(group + 1):
        rewards = torch.tensor([[1.0] * correct + [0.0] * (group - correct)], dtype=torch.float64)
        score = rewards / p - (1 - rewards) / (1 - p)  # d log Bernoulli(p) / dp
        probability = math.comb(group, correct) * p**correct * (1 - p) ** (group - correct)
        expectation += probability * float((mean_scaled(rewards) * score).mean())
    assert expectation == approx(sum((1 - p) ** (k - 1) for k in range(1, group)), abs=1e-12)


def test_batch_normalized_by_hand():
    flat = REWARDS.flatten()
    expected = (REWARDS - flat.mean()) / flat.std(correction=0)
    assert allclose(batch_normalized(REWARDS, epsilon=0.0), expected, atol=1e-12)
    grouped = centered(REWARDS)
    expected = grouped / grouped.flatten().std(correction=0)
    assert allclose(batch_normalized(REWARDS, center="group", epsilon=0.0), expected, atol=1e-12)
    assert batch_normalized(torch.ones(2, 3, dtype=torch.float64)).abs().max() == 0.0


def test_equal_rewards_give_zero_also_where_their_mean_is_rounded():
    rewards = torch.full((1, 7), 0.7, dtype=torch.float64)
    assert float((rewards.mean(dim=1) - rewards[0, 0]).abs()) > 0  # the mean of equal numbers is another number
    assert normalized(rewards, epsilon=0.0).tolist() == [[0.0] * 7]
    assert batch_normalized(rewards, epsilon=0.0).tolist() == [[0.0] * 7]
    groups = torch.cat([rewards, torch.full((1, 7), 0.3, dtype=torch.float64)])
    groups[1, 5:] = math.nan
    assert batch_normalized(groups, center="group", epsilon=0.0).tolist() == [[0.0] * 7] * 2
    nothing = torch.full((1, 2), math.nan, dtype=torch.float64)
    assert batch_normalized(nothing).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("name", ["normalized", "batch_normalized", "gdpo", "turn_normalized"])
def test_epsilon_below_0_is_refused(name: str) -> None:
    with refuses(RecipeError, "advantage.epsilon", "-1"):
        recipe = {"task": "stories", "objective": "grpo", "rollout": {}, "rewards": ["correct"]}
        validate_recipe({**recipe, "advantage": {"name": name, "epsilon": -1}}).resolve()


# --- by parts of the reward ---

NAN = math.nan
# Three groups of four answers with two rewards; where one says nothing of an answer there is NaN.
PARTS = torch.tensor(
    [[1, 0.2], [0, 0.9], [0, 0.4], [1, 0.1], [0, 3], [0, NAN], [0, 5], [0, NAN], [1, NAN], [0, 1], [NAN, NAN], [0, 2]],
    dtype=torch.float64,
)
PART_WEIGHTS = torch.tensor([1.0, 0.5], dtype=torch.float64)
PROMPTS = torch.arange(3).repeat_interleave(4)


def test_gdpo_is_equal_to_trl() -> None:
    """The branch ``normalize_then_sum`` of TRL 1.16.0's GRPOTrainer, run on these tensors.

    Its factor n / (n − 1) of a variance is in fp32 (a quotient of whole numbers). A result has two, and the root halves
    the rounding of each.
    """
    of_trl = [0.9468747826150908, -0.2648649402127558, -1.401548010883314, 0.7195381684809791]
    of_trl += [-0.572238229029326, 0.0, 0.572238229029326, 0.0]
    of_trl += [1.8687307090191867, -1.5065631259072723, 0.0, -0.3621675831119141]
    assert gdpo(PARTS, PART_WEIGHTS, PROMPTS).tolist() == approx(of_trl, rel=2**-24, abs=1e-15)


def test_gdpo_tells_apart_what_the_sum_hides() -> None:
    """By hand: (1, 0) and (0, 1) have one sum, and (1, 1) another. ddof = 1, ε = 0."""
    parts = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    group = torch.zeros(4, dtype=torch.long)
    weights = torch.tensor([2.0, 1.0], dtype=torch.float64)
    each = 0.5 / (1 / 3) ** 0.5  # std of (1, 0, 1, 0)
    sums = [2 * each - each, -2 * each + each, 3 * each, -3 * each]
    std = (sum(x * x for x in sums) / 3) ** 0.5
    assert gdpo(parts, weights, group, epsilon=0.0).tolist() == approx([x / std for x in sums], abs=1e-15)
    assert normalized((parts * torch.ones(2)).sum(dim=1)[None])[0, 0] == normalized(parts.sum(dim=1)[None])[0, 1]


def test_gdpo_of_uniform_groups_is_exactly_zero() -> None:
    parts = torch.tensor([[0.1, 7.0]] * 6 + [[1.0, 0.3], [0.0, 0.3], [0.0, 0.3]], dtype=torch.float64)
    group = torch.tensor([4] * 6 + [1] * 3)
    found = gdpo(parts, torch.tensor([0.3, 1.0], dtype=torch.float64), group)
    assert found[:6].tolist() == [0.0] * 6
    assert found[6] > 0
    assert gdpo(parts[:6], torch.ones(2, dtype=torch.float64), group[:6], epsilon=0.0).tolist() == [0.0] * 6


def test_gdpo_takes_groups_of_any_size_in_any_order() -> None:
    order = torch.tensor([7, 2, 11, 0, 5, 9, 1, 4, 10, 3, 6])  # answer 8 was lost
    whole = gdpo(PARTS[order], PART_WEIGHTS, PROMPTS[order])
    rows = order.argsort()
    again = gdpo(PARTS[order[rows]], PART_WEIGHTS, PROMPTS[order[rows]])
    assert allclose(whole[rows], again, atol=1e-14)
    assert whole.sum().item() == approx(0.0, abs=1e-14)


def test_gdpo_leaves_out_answers_that_only_a_reward_of_weight_0_scores() -> None:
    """A reward of weight 0 is a metric, so an answer that no other reward scores is not in the spread of the batch."""
    parts = torch.tensor([[1.0, 7.0], [3.0, 7.0], [2.0, 9.0], [math.nan, 8.0]], dtype=torch.float64)
    weights = torch.tensor([1.0, 0.0], dtype=torch.float64)
    found = gdpo(parts, weights, torch.zeros(4, dtype=torch.long), epsilon=0.0)
    assert found.tolist() == approx([-1.0, 1.0, 0.0, 0.0], abs=1e-12)


def test_gdpo_with_one_reward_is_normalized_up_to_the_batch() -> None:
    """One reward: the group's normalization, divided by the std over the batch."""
    rewards = torch.randn(5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    within = normalized(rewards).flatten()
    found = gdpo(rewards.flatten()[:, None], torch.ones(1, dtype=torch.float64), torch.arange(5).repeat_interleave(4))
    assert allclose(found, within / (within.std(correction=1) + 1e-4), atol=1e-13)
