"""The clipped surrogate and the regularizers of policy objectives. Pure, per token.

Shapes: B rows, T tokens. Nothing here reduces over tokens or rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import torch
from torch import Tensor

from posttrain.algorithms.objectives.primitives import KL_ESTIMATORS, kl_k3, log_ratio
from posttrain.signatures import Range
from posttrain.types import Batch, Loss, Outputs

NotNegative = Annotated[float, Range(ge=0)]
Positive = Annotated[float, Range(gt=0)]
KlEstimator = Literal["k1", "k2", "k3"]


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Loss:
    """``−min(ρ A, clip(ρ, 1 − ε_low, 1 + ε_high) A)`` with the metrics ``ratio`` and ``clip_fraction``."""
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    is_clipped = ((ratio < 1.0 - clip_low) & (advantages < 0)) | ((ratio > 1.0 + clip_high) & (advantages > 0))
    metrics = {"ratio": ratio.detach(), "clip_fraction": is_clipped.to(ratio.dtype)}
    return Loss(-torch.minimum(ratio * advantages, clipped * advantages), metrics)


def with_regularizers(
    objective: Callable[[Outputs, Batch], Loss],
    *,
    kl_coef: float = 0.0,
    kl_estimator: KlEstimator = "k3",
    entropy_coef: float = 0.0,
) -> Callable[[Outputs, Batch], Loss]:
    """Return the objective followed by ``regularize``."""

    def regularized(outputs: Outputs, batch: Batch) -> Loss:
        loss = objective(outputs, batch)
        if not isinstance(loss, Loss):
            return loss  # of a user's own function; the loop says what is wrong with it
        return regularize(loss, outputs, batch, kl_coef=kl_coef, kl_estimator=kl_estimator, entropy_coef=entropy_coef)

    return regularized


def regularize(
    loss: Loss, outputs: Outputs, batch: Batch, *, kl_coef: float, kl_estimator: KlEstimator, entropy_coef: float
) -> Loss:
    """``values + β · kl − c_H · H`` of an objective with a policy term, whose values are per token, ``[B, T]``.

    The metrics ``kl_ref`` (k3, if β > 0) and ``entropy`` are added. ``kl_coef`` is β, ``entropy_coef`` c_H in nats.

    What counts of an estimator in the loss is its gradient, and an unbiased estimator of the KL need
    not have an unbiased gradient. With tokens drawn from the policy itself (Tang & Munos 2025, "On a
    few pitfalls in KL divergence gradient estimation for RL", section 3; Liu et al. 2025, "Rethinking
    KL regularization in RLHF"):

    * k1: the gradient has expectation 0. It adds noise and regularizes nothing; k1 belongs in the reward.
    * k2: the gradient of KL(π‖π_ref), the one that is meant.
    * k3: the gradient of KL(π_ref‖π), another regularizer with the same minimum. Published GRPO uses it.

    In later updates on the same rollouts the tokens are no longer the policy's own; none of the three is
    reweighted for that.
    """
    values, metrics = loss.values, dict(loss.metrics)
    if kl_coef != 0.0:
        to_reference = log_ratio(outputs.logprobs, batch.field("ref_logprobs"), batch.mask)
        values = values + kl_coef * KL_ESTIMATORS[kl_estimator](to_reference)
        metrics["kl_ref"] = kl_k3(to_reference.detach())
    if outputs.entropy is None:
        assert entropy_coef == 0.0, "the forward pass was not asked for the entropy"
        return Loss(values, metrics)
    if entropy_coef != 0.0:
        values = values - entropy_coef * outputs.entropy
    return Loss(values, metrics | {"entropy": outputs.entropy.detach()})
