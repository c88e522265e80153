"""Masks: tokens whose term of the policy is left out of an update, chosen over the whole optimizer batch. Pure.

A mask is called once before the first micro-batch, with detached numbers of all rows, so that neither micro-batches nor
processes change it. Its positional parameters are batch fields by name, ``[B, T]``: ``policy_logprobs`` and
``policy_entropy`` are of the weights before this update, ``sampler_logprobs`` of the sampler; ``mask`` is ``bool
[B, T]``, True where trained. It returns ``bool [B, T]``, True of the tokens that keep their term.

What a mask takes out is the objective's own value. A KL or an entropy bonus of ``regularize`` is still taken at every
token. ``divisor`` in a recipe says what the means of the loss divide by: all tokens and rows, or those that are kept.

The choices by covariance, for the objectives ``clip_cov`` and ``kl_cov``, and the ranks of ``aot`` are here, too.
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
    """Leaves out answers with a negative advantage that have become unlikely under the policy.

    ``M_i = 0`` if ``A_i < 0`` and ``mean_t(log μ(a_t) − log π(a_t)) > δ``, else 1, with μ the sampler.

    DeepSeek-AI (2025), "DeepSeek-V3.2" (arXiv 2512.02556), section 3.1, off-policy sequence masking. The model learns
    from its own mistakes, and not from those that it would not make. δ is not printed; 1e-4 is slime's default.
    In the paper the masked answers stay in the denominator (``divisor: all``).

    With advantages per token, a token is left out if its own is negative.

    What goes wrong: With a δ below the mismatch of sampler and trainer, all wrong answers are left out. Watch
    ``masked_tokens`` next to ``kl_sampler``.

    Args:
        threshold: δ, in nats per token.
    """
    drift = row_mean(sampler_logprobs - policy_logprobs, mask)
    return ~((advantages < 0) & (drift > threshold)[:, None])


@register("mask")
def top_entropy(
    policy_entropy: Tokens, mask: Mask, *, share: Annotated[float, Range(gt=0, le=1), IF_SOME_ARE_LEFT_OUT] = 0.2
) -> Mask:
    """Keeps the tokens with the highest entropy: those at which the answer could take another course.

    ``m_t = 1`` if ``H_t ≥ q``, where q is the ``1 − ρ`` quantile (interpolated linearly) of the entropies of all
    trained tokens of the optimizer batch, else 0.

    Wang et al. (2025), "Beyond the 80/20 rule: high-entropy minority tokens drive effective reinforcement learning for
    LLM reasoning" (arXiv 2506.01939), section 5; ρ is 0.2 there. In the paper all tokens stay in the denominator
    (``divisor: all``).

    Departure: the paper's quantile is over a micro-batch; here it is over the whole optimizer batch, as in TRL across
    processes, so that no split changes it.

    What goes wrong: In short answers to easy problems a fifth of the tokens may be one token. Raise ``share``.

    Args:
        share: ρ, the share of the tokens that are kept.
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
    2505.22617), section 4.2: its mean is the covariance by which a step of the policy gradient lowers the entropy.
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
    """``bool [B, T]``: the ``number`` trained tokens with the largest covariance; of equal ones the first."""
    places = mask.flatten().nonzero().flatten()
    order = covariance.flatten()[places].argsort(descending=True, stable=True)[:number]
    return _marked(places[order], covariance)


def shift_by_rank(policy: Tensor, reference: Tensor) -> Tensor:
    """``[U]``: each pair's margin of the reference minus the one that has the rank of its margin of the policy."""
    ranks = policy.argsort(stable=True).argsort()
    return reference - reference.sort().values[ranks]


def _marked(places: Tensor, like: Tokens) -> Mask:
    chosen = torch.zeros(like.numel(), dtype=torch.bool, device=like.device)
    chosen[places] = True
    return chosen.view(like.shape)
