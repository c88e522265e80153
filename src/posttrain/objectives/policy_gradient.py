"""Policy-gradient objectives: per-token values whose gradient improves the expected reward.

All take advantages that were computed outside (``advantages.py``), so credit assignment and loss
are two small steps. Shapes: logprobs, streams and values ``[B, T]``; values mean something where
``batch.mask`` is True.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from posttrain.objectives.primitives import KL_ESTIMATORS, kl_k3, log_ratio, row_mean
from posttrain.registry import register
from posttrain.types import Batch, Loss, Outputs

NotNegative = Annotated[float, Field(ge=0)]


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
    clip_low: NotNegative = 0.2,
    clip_high: NotNegative = 0.2,
    kl: NotNegative = 0.0,
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
    loss = _clipped_surrogate(log_rho.exp(), advantages, clip_low, clip_high)
    values, metrics = loss.values, loss.metrics
    if kl != 0.0:
        to_reference = log_ratio(outputs.logprobs, batch.stream("ref_logprobs"), batch.mask)
        values = values + kl * KL_ESTIMATORS[kl_estimator](to_reference)
        metrics["kl_ref"] = kl_k3(to_reference.detach())
    values, more = _with_entropy_bonus(values, outputs, entropy_bonus)
    return Loss(values, metrics | more)


@register("objective", level="token", needs=("advantages", "old_logprobs"))
def gspo(outputs: Outputs, batch: Batch, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> Loss:
    """Group sequence policy optimization: one importance ratio for a whole sequence.

    ``values = −min(s A, clip(s, 1 − ε_low, 1 + ε_high) A)`` at every token of the sequence, with
    ``s = exp(mean_t(log π(a_t | s_t) − log μ(a_t | s_t)))``, the geometric mean of the token ratios.

    Zheng et al. (2025), "Group sequence policy optimization"; the clip range is theirs
    (section 5.1): the ratio of a sequence moves far less than that of a token, and PPO's 0.2 would
    never clip. As published: ``advantage: normalized``, ``aggregate: sequence_mean``.

    Args:
        clip_low, clip_high: ε_low and ε_high.
    """
    advantages = batch.stream("advantages")
    log_rho = log_ratio(outputs.logprobs, batch.stream("old_logprobs"), batch.mask)
    ratio = row_mean(log_rho, batch.mask).exp()[:, None].expand_as(log_rho)
    return _clipped_surrogate(ratio, advantages, clip_low, clip_high)


@register("objective", level="token", needs=("advantages", "old_logprobs"))
def gspo_token(outputs: Outputs, batch: Batch, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> Loss:
    """GSPO's token variant: the sequence's ratio in value, each token's own gradient.

    ``values = −min(s_t A_t, clip(s_t, 1 − ε_low, 1 + ε_high) A_t)`` with
    ``s_t = sg[s] · π(a_t | s_t) / sg[π(a_t | s_t)]`` and s as in ``gspo``. With one advantage per
    sequence, value and gradient (under ``sequence_mean``) equal those of ``gspo``; it allows
    advantages that differ by token.

    Zheng et al. (2025), "Group sequence policy optimization", the section on GSPO-token.

    Args:
        clip_low, clip_high: ε_low and ε_high.
    """
    advantages = batch.stream("advantages")
    log_rho = log_ratio(outputs.logprobs, batch.stream("old_logprobs"), batch.mask)
    sequence = row_mean(log_rho, batch.mask)[:, None].detach()
    own = torch.where(batch.mask, outputs.logprobs - outputs.logprobs.detach(), torch.zeros_like(log_rho))
    return _clipped_surrogate((sequence + own).exp(), advantages, clip_low, clip_high)


@register("objective", level="token", needs=("advantages", "old_logprobs"))
def cispo(outputs: Outputs, batch: Batch, *, clip_low: float = 1.0, clip_high: float = 4.0) -> Loss:
    """Clipped importance sampling: the weight is clipped, so every token keeps a gradient.

    ``values = −sg[clip(ρ, 1 − ε_low, 1 + ε_high)] · A · log π(a_t | s_t)``

    MiniMax-M1 (2025): no lower bound (``clip_low: 1``) and a tuned upper one that the paper
    does not print; 1 + 4 is within the range that later studies found flat. As published:
    ``advantage: normalized``, ``aggregate: token_mean`` (over the tokens of the whole batch).

    Args:
        clip_low, clip_high: ε_low and ε_high; the cap of the weight is 1 + ε_high.
    """
    log_rho = log_ratio(outputs.logprobs, batch.stream("old_logprobs"), batch.mask).detach()
    ratio = log_rho.exp()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    values = -weight * batch.stream("advantages") * outputs.logprobs
    return Loss(values, {"ratio": ratio, "clip_share": (weight != ratio).to(ratio.dtype)})


@register("objective", level="token", needs=("advantages", "old_logprobs"))
def sapo(outputs: Outputs, batch: Batch, *, tau_positive: float = 1.0, tau_negative: float = 1.05) -> Loss:
    """Soft adaptive policy optimization: a smooth gate in place of the clip.

    ``values = −A · (4 / τ) · σ(τ (ρ − 1))`` with τ = τ_positive where A > 0, else τ_negative. At ρ = 1
    the gradient is REINFORCE's; it falls off smoothly on both sides, faster for negative advantages.

    Gao et al. (2025), "Soft adaptive policy optimization"; the temperatures are theirs. As
    published: ``advantage: normalized``, ``aggregate: sequence_mean``.

    Args:
        tau_positive, tau_negative: the temperatures of the gate.
    """
    advantages = batch.stream("advantages")
    log_rho = log_ratio(outputs.logprobs, batch.stream("old_logprobs"), batch.mask)
    ratio = log_rho.exp()
    tau = torch.where(advantages > 0, tau_positive, tau_negative).to(ratio.dtype)
    values = -advantages * (4.0 / tau) * torch.sigmoid(tau * (ratio - 1.0))
    return Loss(values, {"ratio": ratio.detach()})


@register("objective", level="token", needs=("advantages", "old_logprobs"))
def gmpo(outputs: Outputs, batch: Batch, *, clip: float = 0.4) -> Loss:
    """Geometric-mean policy optimization: token ratios clipped in the log, then their geometric mean.

    ``values = −A · exp(mean_t c_t)`` at every token of the sequence, where
    ``c_t = min(log ρ_t, ε)`` for A > 0 and ``max(log ρ_t, −ε)`` for A < 0: the pessimistic side of
    clipping ρ_t to (e^−ε, e^ε).

    Zhao et al. (2025), "Geometric-mean policy optimization"; ε = 0.4 is theirs. As
    published: ``advantage: normalized``, ``aggregate: sequence_mean``.

    Args:
        clip: ε, in nats.
    """
    advantages = batch.stream("advantages")
    log_rho = log_ratio(outputs.logprobs, batch.stream("old_logprobs"), batch.mask)
    clipped = torch.where(advantages > 0, log_rho.clamp(max=clip), log_rho.clamp(min=-clip))
    ratio = row_mean(clipped, batch.mask).exp()[:, None].expand_as(log_rho)
    is_clipped = (clipped != log_rho) & (advantages != 0)
    return Loss(-advantages * ratio, {"ratio": log_rho.detach().exp(), "clip_share": is_clipped.to(ratio.dtype)})


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Loss:
    """``−min(ρ A, clip(ρ) A)`` with its metrics."""
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    is_clipped = ((ratio < 1.0 - clip_low) & (advantages < 0)) | ((ratio > 1.0 + clip_high) & (advantages > 0))
    metrics = {"ratio": ratio.detach(), "clip_share": is_clipped.to(ratio.dtype)}
    return Loss(-torch.minimum(ratio * advantages, clipped * advantages), metrics)


def _with_entropy_bonus(values: Tensor, outputs: Outputs, entropy_bonus: float) -> tuple[Tensor, dict[str, Tensor]]:
    if outputs.entropy is None:
        assert entropy_bonus == 0.0, "the forward pass was not asked for the entropy"
        return values, {}
    if entropy_bonus != 0.0:
        values = values - entropy_bonus * outputs.entropy
    return values, {"entropy": outputs.entropy.detach()}
