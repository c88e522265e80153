"""Policy-gradient objectives: per-token values whose gradient improves the expected reward.

All take advantages that were computed outside (``advantages.py``), so credit assignment and loss
are two small steps. Shapes: logprobs, streams and values ``[B, T]``; values mean something where
``batch.mask`` is True.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from posttrain.objectives.primitives import KL_ESTIMATORS, kl_k3, log_ratio
from posttrain.registry import register
from posttrain.types import Batch, Loss, Outputs


@register("objective", level="token", needs=("advantages",))
def reinforce(outputs: Outputs, batch: Batch, *, entropy_bonus: float = 0.0) -> Loss:
    """The score-function estimator.

    ``values = −A · log π(a_t | s_t) − c_H · H(π(· | s_t))``

    Williams (1992), "Simple statistical gradient-following algorithms", eq. 4; the baseline is in
    the advantage (``raw``, ``centered``, ``leave_one_out`` ...).

    There is no importance ratio: with several optimizer steps per rollout batch
    (``train.epochs`` × ``train.minibatches`` > 1) the later steps are off-policy.

    Args:
        entropy_bonus: c_H, in nats.
    """
    advantages = batch.stream("advantages")
    values = -advantages * outputs.logprobs
    values, metrics = _with_entropy_bonus(values, outputs, entropy_bonus)
    return Loss(values, metrics)


@register("objective", level="token", needs=("advantages", "old_logprobs"), optional_needs={"kl": "ref_logprobs"})
def grpo(
    outputs: Outputs,
    batch: Batch,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl: float = 0.0,
    kl_estimator: Literal["k1", "k2", "k3"] = "k3",
    entropy_bonus: float = 0.0,
) -> Loss:
    """Group-relative policy optimization: PPO's clipped surrogate with group advantages.

    ``values = −min(ρ A, clip(ρ, 1 − ε_low, 1 + ε_high) A) + β · kl − c_H · H``,
    with ``ρ = π(a_t | s_t) / μ(a_t | s_t)``.

    Shao et al. (2024), "DeepSeekMath", eq. 3–4; the asymmetric clip is DAPO's (Yu et al. 2025,
    eq. 10). GRPO as published: ``advantage: normalized``, ``aggregate: sequence_mean``. Dr. GRPO:
    ``advantage: centered``, ``aggregate: constant``. DAPO: ``normalized``, ``token_mean``,
    ``clip_high: 0.28``.

    Departure: the log-ratio is clamped to ±20 before the exponential.

    Args:
        clip_low, clip_high: ε_low and ε_high.
        kl: β, the weight of the KL to the reference model; 0 loads no reference.
        kl_estimator: estimator of KL(π‖π_ref) from the sampled tokens.
        entropy_bonus: c_H, in nats.
    """
    advantages = batch.stream("advantages")
    log_rho = log_ratio(outputs.logprobs, batch.stream("old_logprobs"), batch.mask)
    ratio = log_rho.exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    is_clipped = ((ratio < 1.0 - clip_low) & (advantages < 0)) | ((ratio > 1.0 + clip_high) & (advantages > 0))
    metrics = {
        "ratio": ratio.detach(),
        "clip_share": is_clipped.to(ratio.dtype),
    }
    values = -surrogate
    if kl != 0.0:
        to_reference = log_ratio(outputs.logprobs, batch.stream("ref_logprobs"), batch.mask)
        values = values + kl * KL_ESTIMATORS[kl_estimator](to_reference)
        metrics["kl_ref"] = kl_k3(to_reference.detach())
    values, more = _with_entropy_bonus(values, outputs, entropy_bonus)
    return Loss(values, metrics | more)


def _with_entropy_bonus(values: Tensor, outputs: Outputs, entropy_bonus: float) -> tuple[Tensor, dict[str, Tensor]]:
    if outputs.entropy is None:
        assert entropy_bonus == 0.0, "the forward pass was not asked for the entropy"
        return values, {}
    if entropy_bonus != 0.0:
        values = values - entropy_bonus * outputs.entropy
    return values, {"entropy": outputs.entropy.detach()}
