"""Advantages: values by hand and the identities between them."""

from __future__ import annotations

import math

import pytest
import torch

from closeness import allclose, approx
from posttrain.algorithms.advantages import batch_normalized, centered, leave_one_out, mean_scaled, normalized, raw
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
