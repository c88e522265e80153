"""Advantages per token: values by hand, the identities of GAE, an independent recursion, edges."""

from __future__ import annotations

import math

import pytest
import torch

from closeness import allclose, approx
from posttrain.algorithms.advantages import gae, return_to_go, whitened
from posttrain.algorithms.objectives.policy_gradient import ppo, reinforce
from posttrain.types import Batch, Outputs
from refusing import refuses

F64 = torch.float64


def row(values: list[float]) -> torch.Tensor:
    return torch.tensor([[0.0, *values]], dtype=F64)


MASK3 = torch.tensor([[False, True, True, True]])


def random_case(seed: int, rows: int = 5, width: int = 8):
    """Masks with holes; one row that was cut off, the others ended."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, width, generator=generator) > 0.35
    mask[:, 0] = False
    mask[:, 1] = True
    rewards = torch.randn(rows, width, generator=generator, dtype=F64) * mask
    values = torch.randn(rows, width, generator=generator, dtype=F64)  # not 0 outside of the mask: never read there
    final_values = torch.zeros(rows, dtype=F64)
    final_values[0] = 0.7
    return rewards, mask, values, final_values


def reference(rewards, mask, values, final_values, gamma, gae_lambda):
    """Per row, over the list of trained positions: the sum of discounted TD errors, no recursion."""
    advantages = torch.zeros_like(rewards)
    for b in range(len(rewards)):
        places = [t for t in range(rewards.shape[1]) if mask[b, t]]
        states = [values[b, t].item() for t in places] + [final_values[b].item()]
        errors = [rewards[b, t].item() + gamma * states[i + 1] - states[i] for i, t in enumerate(places)]
        for i, t in enumerate(places):
            advantages[b, t] = sum((gamma * gae_lambda) ** (j - i) * errors[j] for j in range(i, len(places)))
    return advantages


def test_gae_by_hand():
    """Rewards 0, 0, 1; values 0.5, 0.4, 0.8; γ = 0.9, λ = 0.5. δ = −0.14, 0.32, 0.2."""
    advantages, returns = gae(
        row([0, 0, 1]), MASK3, row([0.5, 0.4, 0.8]), torch.zeros(1, dtype=F64), gamma=0.9, gae_lambda=0.5, whiten=False
    )
    third = 1 - 0.8
    second = (0.9 * 0.8 - 0.4) + 0.45 * third
    first = (0.9 * 0.4 - 0.5) + 0.45 * second
    assert (third, second, first) == approx((0.2, 0.41, 0.0445))
    assert advantages[0].tolist() == approx([0.0, 0.0445, 0.41, 0.2], abs=1e-15)
    assert returns[0].tolist() == approx([0.0, 0.5445, 0.81, 1.0], abs=1e-15)


def test_return_to_go_by_hand():
    advantages, returns = return_to_go(
        row([-0.1, -0.2, 1.0]), MASK3, row([9, 9, 9]), torch.tensor([9.0], dtype=F64), gamma=0.5, whiten=False
    )
    assert returns[0].tolist() == approx([0.0, -0.1 + 0.5 * (-0.2 + 0.5), 0.3, 1.0], abs=1e-15)
    assert torch.equal(advantages, returns)


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.5), (0.99, 0.0), (0.0, 1.0)])
def test_gae_against_an_independent_reference(gamma: float, gae_lambda: float):
    for seed in range(4):
        case = random_case(seed)
        advantages, returns = gae(*case, gamma=gamma, gae_lambda=gae_lambda, whiten=False, bootstrap=True)
        expected = reference(*case, gamma, gae_lambda)
        ended = gae(*case, gamma=gamma, gae_lambda=gae_lambda, whiten=False)[0]
        assert allclose(ended, reference(*case[:3], torch.zeros_like(case[3]), gamma, gae_lambda), atol=1e-12)
        assert allclose(advantages, expected, atol=1e-12)
        assert allclose(returns, torch.where(case[1], expected + case[2], torch.zeros_like(expected)), atol=1e-12)


def test_gae_of_one_is_return_minus_value():
    rewards, mask, values, final_values = random_case(1)
    advantages, returns = gae(rewards, mask, values, torch.zeros_like(final_values), gae_lambda=1.0, whiten=False)
    to_go, _ = return_to_go(rewards, mask, values, final_values, whiten=False)
    assert allclose(returns, to_go, atol=1e-12)
    assert allclose(advantages, torch.where(mask, to_go - values, torch.zeros_like(values)), atol=1e-12)


def test_what_is_not_trained_takes_no_step():
    """A row with a hole equals the row without it."""
    dense = gae(row([0.1, 0.2, 1]), MASK3, row([0.5, 0.4, 0.8]), torch.tensor([0.3], dtype=F64), gamma=0.9)
    mask = torch.tensor([[False, True, False, True, False, True, False]])
    holes = gae(
        torch.tensor([[0, 0.1, 0, 0.2, 0, 1, 0]], dtype=F64),
        mask,
        torch.tensor([[7, 0.5, math.nan, 0.4, 7, 0.8, 7]], dtype=F64),
        torch.tensor([0.3], dtype=F64),
        gamma=0.9,
    )
    for compact, spread in zip(dense, holes, strict=True):
        assert allclose(compact[MASK3], spread[mask], atol=1e-14)
        assert spread[~mask].abs().max() == 0.0


@pytest.mark.parametrize("word", [gae, return_to_go])
def test_whitening_is_over_the_whole_batch(word):
    case = random_case(5)
    advantages, returns = word(*case)
    trained = advantages[case[1]]
    assert trained.mean().item() == approx(0.0, abs=1e-12)
    assert trained.std(correction=0).item() == approx(1.0, abs=1e-7)
    assert advantages[~case[1]].abs().max() == 0.0
    raw, same_returns = word(*case, whiten=False)
    assert torch.equal(returns, same_returns)  # the value function learns what was really paid
    flat = [raw[b, t].item() for b in range(5) for t in range(8) if case[1][b, t]]
    mean = sum(flat) / len(flat)
    std = math.sqrt(sum((x - mean) ** 2 for x in flat) / len(flat))
    assert trained.tolist() == approx([(x - mean) / (std + 1e-8) for x in flat], abs=1e-12)
    in_pieces = torch.cat([word(*(x[rows] for x in case))[0] for rows in (slice(0, 2), slice(2, 5))])
    assert (in_pieces - advantages).abs().max() > 0.05  # per micro-batch it would be something else


def test_whitening_of_equal_values_is_zero():
    mask = torch.ones(1, 7, dtype=torch.bool)
    assert whitened(torch.full((1, 7), 0.7, dtype=F64), mask).tolist() == [[0.0] * 7]
    assert whitened(row([5.0]), torch.tensor([[False, True]])).tolist() == [[0.0, 0.0]]  # one token
    assert whitened(row([5.0]), torch.zeros(1, 2, dtype=torch.bool)).tolist() == [[0.0, 0.0]]  # none
    broken = whitened(row([math.nan, 1.0]), torch.tensor([[False, True, True]]))
    assert broken[0, 1:].isnan().all()  # not hidden


@pytest.mark.parametrize("word", [gae, return_to_go])
def test_a_reward_that_nobody_would_get_is_refused(word):
    rewards = torch.tensor([[0.0, 0.0, 1.0]], dtype=F64)
    mask = torch.tensor([[False, True, False]])
    with refuses(ValueError, "0, token 2"):
        word(rewards, mask, torch.zeros_like(rewards), torch.zeros(1, dtype=F64))


def test_inputs_are_left_alone():
    case = random_case(6)
    before = [x.clone() for x in case]
    gae(*case)
    return_to_go(*case)
    assert all(torch.equal(x, y) for x, y in zip(before, case, strict=True))


def test_ppo_with_lambda_one_and_no_values_is_reinforce_with_the_return():
    rewards, mask, values, _ = random_case(7)
    nothing = torch.zeros_like(values)
    advantages, returns = gae(rewards, mask, nothing, nothing[:, 0], gae_lambda=1.0, whiten=False)
    old = torch.randn(5, 8, generator=torch.Generator().manual_seed(1), dtype=F64) - 2
    zeros = torch.zeros(5, dtype=torch.long)
    gradients = []
    for objective, advantage_estimator, options in ((ppo, advantages, {"value_weight": 0.0}), (reinforce, returns, {})):
        fields = {"advantages": advantage_estimator, "old_logprobs": old, "returns": returns, "old_values": nothing}
        batch = Batch(zeros[:, None].expand(5, 8), zeros + 8, mask, zeros, zeros, fields)
        logprobs = old.clone().requires_grad_()
        loss = objective(Outputs(logprobs=logprobs, scores=nothing), batch, **options)
        torch.where(mask, loss.values, nothing).sum().backward()
        gradients.append(logprobs.grad)
    assert torch.equal(*gradients)
    assert allclose(gradients[0], -returns, atol=1e-12)
