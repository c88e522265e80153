"""Masks over a batch and tokens chosen by their covariance: by hand, and equal to TRL's code."""

from __future__ import annotations

import pytest
import torch

from closeness import approx
from posttrain.algorithms.masks import (
    draw_in_range,
    largest,
    number_of,
    off_policy_sequence,
    token_covariance,
    top_entropy,
)
from posttrain.algorithms.objectives.policy_gradient import clip_cov, grpo, kl_cov
from posttrain.algorithms.objectives.surrogate import with_masks, with_regularizers
from posttrain.types import Batch, Loss, Outputs

MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]).bool()
LOGPROBS = torch.tensor(
    [
        [-2.5, -2.75, -2.125, -2.625],
        [-3.875, -2.25, -3.625, -3.125],
        [-2.5, -3.125, -3.75, -2.25],
        [-4.125, -3.625, -3.25, -3.5],
        [-3.625, -2.375, -3.5, -3.625],
    ],
    dtype=torch.float64,
)
SAMPLER = torch.tensor(
    [
        [-2.525, -2.76875, -2.103125, -2.603125],
        [-3.85625, -2.225, -3.65, -3.1],
        [-2.496875, -3.128125, -3.759375, -2.23125],
        [-4.121875, -3.646875, -3.2375, -3.528125],
        [-3.640625, -2.375, -3.5125, -3.64375],
    ],
    dtype=torch.float64,
)
ADVANTAGES = torch.tensor([-1.0, 0.5, -0.25, 0.0, -2.0], dtype=torch.float64)[:, None].expand(5, 4)
ENTROPY = torch.tensor(
    [
        [2.875, 2.375, 2.5, 2.5],
        [3.125, 2.25, 2.25, 1.125],
        [1.125, 2.0, 1.5, 1.25],
        [1.375, 2.5, 2.75, 1.5],
        [2.875, 2.75, 1.25, 3.125],
    ],
    dtype=torch.float64,
)


def test_off_policy_sequence_is_equal_to_trl() -> None:
    """``GRPOTrainer.get_off_policy_mask`` of TRL 1.16.0 gives 1, 1, 0, 1, 1 for these rows at 0.002.

    By hand: the drift of row 2 is 0.003125 at its one token, with A < 0; row 1 drifts more, with A > 0.
    """
    kept = off_policy_sequence(LOGPROBS, SAMPLER, ADVANTAGES, MASK, threshold=0.002)
    assert [bool(row[mask].all()) for row, mask in zip(kept, MASK, strict=True)] == [True, True, False, True, True]
    assert not bool((kept & MASK)[2].any())
    all_kept = off_policy_sequence(LOGPROBS, SAMPLER, ADVANTAGES, MASK, threshold=0.01)
    assert bool(all_kept.all())


def test_off_policy_sequence_takes_an_advantage_of_each_token() -> None:
    advantages = torch.tensor([[-1.0, 1.0]], dtype=torch.float64)
    sampler, policy = torch.zeros(1, 2).double(), torch.full((1, 2), -1.0).double()
    kept = off_policy_sequence(policy, sampler, advantages, torch.ones(1, 2).bool(), threshold=0.5)
    assert kept.tolist() == [[False, True]]


def test_top_entropy_is_equal_to_trl() -> None:
    """``GRPOTrainer.get_high_entropy_mask`` of TRL 1.16.0 on these entropies with ``top_entropy_quantile: 0.3``."""
    kept = top_entropy(ENTROPY, MASK, share=0.3) & MASK
    assert kept.int().tolist() == [[1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 1]]
    assert torch.equal(top_entropy(ENTROPY, MASK, share=1.0) & MASK, MASK)


@pytest.mark.parametrize("share", [0.05, 0.2, 0.33, 0.5, 0.9])
def test_top_entropy_is_the_quantile_of_all_trained_tokens(share: float) -> None:
    entropies = torch.rand(7, 9, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    mask = torch.rand(7, 9, generator=torch.Generator().manual_seed(3)) < 0.6
    limit = torch.quantile(entropies[mask], 1.0 - share)
    assert torch.equal(top_entropy(entropies, mask, share=share) & mask, (entropies >= limit) & mask)


def test_token_covariance_by_hand() -> None:
    mask = torch.tensor([[True, True], [True, False]])
    advantages = torch.tensor([[1.0, 1.0], [-2.0, 9.0]])
    logprobs = torch.tensor([[-1.0, -3.0], [-5.0, 9.0]])  # their mean is -3, that of the advantages 0
    assert token_covariance(logprobs, advantages, mask).tolist() == [[2.0, 0.0], [4.0, 0.0]]
    assert not bool(token_covariance(logprobs, advantages, mask & False).any())


def test_choices_by_covariance_by_hand() -> None:
    mask = torch.tensor([[True, True, True], [True, True, False]])
    covariance = torch.tensor([[5.0, 2.0, 2.0], [3.0, 0.5, 9.0]])
    assert largest(covariance, mask, 2).int().tolist() == [[1, 0, 0], [1, 0, 0]]
    assert largest(covariance, mask, 3).int().tolist() == [[1, 1, 0], [1, 0, 0]]  # of equal ones the first
    draws = torch.tensor([[0.1, 0.9, 0.2], [0.4, 0.0, 0.0]])
    within = draw_in_range(covariance, mask, draws, 2, 1.0, 5.0)  # 2, 2 and 3 are candidates
    assert within.int().tolist() == [[0, 0, 1], [1, 0, 0]]
    assert int(draw_in_range(covariance, mask, draws, 9, 1.0, 5.0).sum()) == 3
    assert not bool(draw_in_range(covariance, mask, draws, 2, 6.0, 8.0).any())
    assert [number_of(share, mask) for share in (2e-4, 0.4, 0.5, 1.0)] == [1, 2, 2, 5]


# --- the objectives ---


def one_row(**fields: list[float]) -> Batch:
    tokens = {name: torch.tensor([values], dtype=torch.float64) for name, values in fields.items()}
    width = len(next(iter(fields.values())))
    zeros = torch.zeros(1, dtype=torch.long)
    mask = torch.ones(1, width).bool()
    return Batch(torch.zeros(1, width).long(), torch.tensor([width]), mask, zeros, zeros, tokens)


def outputs_of(*logprobs: float) -> Outputs:
    return Outputs(torch.tensor([logprobs], dtype=torch.float64, requires_grad=True))


def test_clip_cov_is_grpo_but_at_the_drawn_tokens() -> None:
    fields = {"advantages": [1.0, -1.0, 2.0, 1.0], "old_logprobs": [-1.0, -2.0, -1.5, -3.0]}
    outputs = outputs_of(-0.5, -2.1, -1.4, -3.0)
    batch = one_row(**fields, clip_cov_tokens=[0.0, 1.0, 0.0, 1.0])
    loss, plain = clip_cov(outputs, batch, clip_high=0.3), grpo(outputs, one_row(**fields), clip_high=0.3)
    assert loss.values[0, [0, 2]].tolist() == plain.values[0, [0, 2]].tolist()
    assert loss.values[0, [1, 3]].tolist() == [0.0, 0.0]
    assert loss.metrics["cov_fraction"].tolist() == [[0.0, 1.0, 0.0, 1.0]]
    slopes = torch.autograd.grad(loss.values.sum(), outputs.logprobs)[0]
    assert slopes[0].tolist() == approx([0.0, 0.0, -2.0 * 2.718281828459045**0.1, 0.0])


def test_kl_cov_by_hand() -> None:
    """−ρ A, and −ρ A + c |log ρ| at the chosen tokens; no penalty where log ρ is rounding."""
    fields = {"advantages": [1.0, 1.0, -2.0, 1.0], "old_logprobs": [-1.0, -1.0, -1.0, -1.0]}
    outputs = outputs_of(-0.5, -0.5, -1.5, -1.00001)
    loss = kl_cov(outputs, one_row(**fields, kl_cov_tokens=[0.0, 1.0, 1.0, 1.0]), penalty=3.0)
    up, down = 1.6487212707001282, 0.6065306597126334
    rounded = 2.718281828459045 ** (-1e-5)
    assert loss.values[0].tolist() == approx([-up, -up + 1.5, 2 * down + 1.5, -rounded])
    slopes = torch.autograd.grad(loss.values.sum(), outputs.logprobs)[0]
    assert slopes[0].tolist() == approx([-up, -up + 3.0, 2 * down - 3.0, -rounded])


def test_masked_objective_keeps_its_regularizers() -> None:
    """The KL of ``regularize`` counts at masked tokens, too (DeepSeek-V3.2, eq. 9)."""
    fields = {"advantages": [1.0, 1.0], "old_logprobs": [-1.0, -1.0], "ref_logprobs": [-1.25, -1.25]}
    batch = one_row(**fields, unmasked=[1.0, 0.0])
    loss = with_regularizers(with_masks(grpo), kl_coef=0.5, kl_estimator="k1")(outputs_of(-1.0, -1.0), batch)
    assert isinstance(loss, Loss)
    assert loss.values.tolist() == [[-1.0 + 0.125, 0.125]]
