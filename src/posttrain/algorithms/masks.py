"""Token masks for the policy term, computed over a whole optimizer batch. Pure.

Masks are called once before the first micro-batch, with detached values for all rows, so micro-batches and processes
cannot change them. Positional parameters name batch fields ``[B, T]``: ``policy_logprobs`` and ``policy_entropy`` use
weights before this update, ``sampler_logprobs`` come from the sampler; ``mask`` is ``bool [B, T]``, True if trained.
Returns ``bool [B, T]``, True for tokens that keep their policy term.

Masking only removes the objective's own value. KL and entropy terms from ``regularize`` still apply to every token. In
recipes, ``divisor`` selects the loss denominator: all tokens and rows, or kept ones only.

Also contains covariance-based selections for ``clip_cov`` and ``kl_cov``, and rank matching for ``aot``.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from posttrain.acting.methods import IF_SEQUENCES_DRIFT, IF_SOME_ARE_LEFT_OUT
from posttrain.algorithms.objectives.primitives import row_mean
from posttrain.registry import register
from posttrain.signatures import Bool, Float, Range

Tokens = Float[Tensor, "B T"]
Mask = Bool[Tensor, "B T"]


@register("mask")
def off_policy_sequence(
    policy_logprobs: Tokens,
    sampler_logprobs: Tokens,
    advantages: Tokens,
    mask: Mask,
    *,
    threshold: Annotated[float, Range(ge=0), IF_SEQUENCES_DRIFT] = 1e-4,
) -> Mask:
    """Mask answers with negative advantage that have become unlikely under the policy.

    ``M_i = 0`` if ``A_i < 0`` and ``mean_t(log μ(a_t) − log π(a_t)) > δ``, else 1, with μ the sampler.

    DeepSeek-AI (2025), "DeepSeek-V3.2" (arXiv 2512.02556), section 3.1, off-policy sequence masking. The model learns
    from its current mistakes, not from ones it would no longer make. The paper does not print δ; slime defaults to
    1e-4. Masked answers stay in the paper's denominator (``divisor: all``).

    With per-token advantages, tokens are masked according to their own sign.

    What goes wrong: If δ is below the sampler-trainer mismatch, all wrong answers are masked. Watch ``masked_tokens``
    and ``kl_sampler``.

    Args:
        threshold: δ, in nats per token.
    """
    drift = row_mean(sampler_logprobs - policy_logprobs, mask)
    return ~((advantages < 0) & (drift > threshold)[:, None])


@register("mask")
def top_entropy(
    policy_entropy: Tokens, mask: Mask, *, share: Annotated[float, Range(gt=0, le=1), IF_SOME_ARE_LEFT_OUT] = 0.2
) -> Mask:
    """Keep only high-entropy tokens, where the answer could branch.

    ``m_t = 1`` if ``H_t ≥ q``, else 0, where q is the ``1 − ρ`` quantile (linearly interpolated) of entropies over all
    trained tokens in the optimizer batch.

    Wang et al. (2025), "Beyond the 80/20 rule: high-entropy minority tokens drive effective reinforcement learning
    for LLM reasoning" (arXiv 2506.01939), section 5, with ρ = 0.2. All tokens stay in the paper's denominator
    (``divisor: all``).

    Departure: the paper computes quantiles per micro-batch. Here they cover the whole optimizer batch, as in TRL
    across processes, so splitting cannot change them.

    What goes wrong: In short answers to easy problems, a fifth of all tokens may be a single token. Raise ``share``.

    Args:
        share: ρ, the fraction of tokens to keep.
    """
    entropies = policy_entropy[mask].double().sort().values
    if len(entropies) == 0:
        return mask
    place = (1.0 - share) * (len(entropies) - 1)
    below = int(place)
    above = min(below + 1, len(entropies) - 1)
    limit = entropies[below] + (place - below) * (entropies[above] - entropies[below])
    return policy_entropy.double() >= limit


def token_covariance(policy_logprobs: Tokens, advantages: Tokens, mask: Mask) -> Tokens:
    """``(A_t − mean A) · (log π_t − mean log π)`` over all trained tokens, float64 ``[B, T]``; 0 elsewhere.

    Cui et al. (2025), "The entropy mechanism of reinforcement learning for reasoning language models" (arXiv
    2505.22617), section 4.2: its mean is the covariance through which policy gradient steps lower entropy.
    """
    if not bool(mask.any()):
        return torch.zeros_like(advantages, dtype=torch.float64)
    values = advantages.double()
    logprobs = policy_logprobs.double()
    product = (values - values[mask].mean()) * (logprobs - logprobs[mask].mean())
    return torch.where(mask, product, torch.zeros_like(product))


def number_of(share: float, mask: Mask) -> int:
    """``max(1, ⌊share · N⌋)`` of the N trained tokens."""
    return max(1, int(share * int(mask.sum())))


def draw_in_range(covariance: Tokens, eligible: Mask, draws: Tokens, number: int, low: float, high: float) -> Mask:
    """``bool [B, T]``: up to ``number`` of the eligible tokens with a covariance between ``low`` and ``high``.

    ``draws``: a uniform number for each token; the smallest are chosen, so that each choice is equally likely.
    """
    candidates = eligible & (covariance > low) & (covariance < high)
    places = candidates.flatten().nonzero().flatten()
    order = draws.flatten()[places].argsort()[:number]
    return _marked(places[order], covariance)


def largest(covariance: Tokens, mask: Mask, number: int) -> Mask:
    """Select ``number`` trained tokens with largest covariance, as ``bool [B, T]``. Ties go to earlier tokens."""
    places = mask.flatten().nonzero().flatten()
    order = covariance.flatten()[places].argsort(descending=True, stable=True)[:number]
    return _marked(places[order], covariance)


def shift_by_rank(policy: Tensor, reference: Tensor) -> Tensor:
    """Reference margins ``[U]`` minus the reference margin of equal rank to each policy margin."""
    ranks = policy.argsort(stable=True).argsort()
    return reference - reference.sort().values[ranks]


def _marked(places: Tensor, like: Tokens) -> Mask:
    chosen = torch.zeros(like.numel(), dtype=torch.bool, device=like.device)
    chosen[places] = True
    return chosen.view(like.shape)
