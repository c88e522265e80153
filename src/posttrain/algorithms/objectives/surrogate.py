"""Clipped surrogate and regularizers for policy objectives. Pure, per token.

Shapes: B rows, T tokens. Nothing here reduces over tokens or rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import torch
from torch import Tensor

from posttrain.algorithms.objectives.primitives import KL_ESTIMATORS, kl_k3, log_ratio
from posttrain.signatures import Range
from posttrain.types import UNMASKED, Batch, Loss, Outputs

NotNegative = Annotated[float, Range(ge=0)]
Positive = Annotated[float, Range(gt=0)]
KlEstimator = Literal["k1", "k2", "k3"]
PenaltyEstimator = Literal["k1", "k2", "k3", "k3_weighted"]  # for a penalty in the loss
ClipMax = Annotated[float, Range(gt=1)]


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, clip_max: float | None = None
) -> Loss:
    """Compute ``−min(ρ A, clip(ρ, 1 − ε_low, 1 + ε_high) A)`` and metrics ``ratio`` and ``clip_fraction``.

    ``clip_max`` (c) adds dual clipping: if A < 0, values are at most ``−c A``, so tokens that became far likelier do
    not dominate updates.
    """
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    is_clipped = ((ratio < 1.0 - clip_low) & (advantages < 0)) | ((ratio > 1.0 + clip_high) & (advantages > 0))
    values = -torch.minimum(ratio * advantages, clipped * advantages)
    if clip_max is not None:
        is_bounded = (ratio > clip_max) & (advantages < 0)
        values = torch.where(is_bounded, -clip_max * advantages, values)
        is_clipped = is_clipped | is_bounded
    metrics = {"ratio": ratio.detach(), "clip_fraction": is_clipped.to(ratio.dtype)}
    return Loss(values, metrics)


def with_masks(objective: Callable[[Outputs, Batch], Loss]) -> Callable[[Outputs, Batch], Loss]:
    """Wrap an objective to return 0 at tokens excluded by masks (``unmasked``)."""

    def masked(outputs: Outputs, batch: Batch) -> Loss:
        loss = objective(outputs, batch)
        if not isinstance(loss, Loss):
            return loss  # from a user's function; the loop reports what is wrong
        kept = batch.field(UNMASKED) > 0
        return Loss(torch.where(kept, loss.values, torch.zeros_like(loss.values)), loss.metrics)

    return masked


def with_regularizers(
    objective: Callable[[Outputs, Batch], Loss],
    *,
    kl_coef: float = 0.0,
    kl_estimator: PenaltyEstimator = "k3",
    entropy_coef: float = 0.0,
) -> Callable[[Outputs, Batch], Loss]:
    """Wrap an objective to add regularizers."""

    def regularized(outputs: Outputs, batch: Batch) -> Loss:
        loss = objective(outputs, batch)
        if not isinstance(loss, Loss):
            return loss  # from a user's function; the loop reports what is wrong
        return add_regularizers(
            loss, outputs, batch, kl_coef=kl_coef, kl_estimator=kl_estimator, entropy_coef=entropy_coef
        )

    return regularized


def add_regularizers(
    loss: Loss, outputs: Outputs, batch: Batch, *, kl_coef: float, kl_estimator: PenaltyEstimator, entropy_coef: float
) -> Loss:
    """Compute ``values + β · kl − c_H · H`` for objectives with a policy term and values per token, ``[B, T]``.

    Adds metrics ``kl_ref`` (k3, if β > 0) and ``entropy``. ``kl_coef`` is β, ``entropy_coef`` is c_H, in nats.

    In a loss, only an estimator's gradient matters, and unbiased KL estimators may have biased gradients. For tokens
    sampled from the current policy (Tang & Munos 2025, "On a
    few pitfalls in KL divergence gradient estimation for RL", section 3; Liu et al. 2025, "Rethinking
    KL regularization in RLHF"):

    * k1: zero expected gradient. It adds noise and regularizes nothing; use k1 in the reward instead.
    * k2: gradient of KL(π‖π_ref), as intended.
    * k3: gradient of KL(π_ref‖π), a different regularizer with the same minimum. Published GRPO uses it.

    In later updates on the same rollouts, tokens no longer come from the current policy, and these three do not correct
    for it. ``k3_weighted`` does: ``ρ · k3`` with ρ = π/μ, where μ is the policy of ``old_logprobs``, with gradients
    through ρ as well (DeepSeek-V3.2 2025, section 3.1; arXiv 2512.02556). Its values and gradients are unbiased for
    KL(π‖π_ref) at every token, also in later updates.
    """
    values, metrics = loss.values, dict(loss.metrics)
    if kl_coef != 0.0:
        to_reference = log_ratio(outputs.logprobs, batch.field("ref_logprobs"), batch.mask)
        if kl_estimator == "k3_weighted":
            log_rho = log_ratio(outputs.logprobs, batch.field("old_logprobs"), batch.mask)
            penalty = log_rho.exp() * kl_k3(to_reference)
        else:
            penalty = KL_ESTIMATORS[kl_estimator](to_reference)
        values = values + kl_coef * penalty
        metrics["kl_ref"] = kl_k3(to_reference.detach())
    if outputs.entropy is None:
        assert entropy_coef == 0.0, "the forward pass was not asked for the entropy"
        return Loss(values, metrics)
    if entropy_coef != 0.0:
        values = values - entropy_coef * outputs.entropy
    return Loss(values, metrics | {"entropy": outputs.entropy.detach()})
