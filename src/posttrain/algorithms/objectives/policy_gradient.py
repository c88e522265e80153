"""Policy-gradient objectives: per-token values whose gradient improves the expected reward.

Advantages are computed beforehand (``advantages.py``), which separates credit assignment from the loss. Shapes:
logprobs, batch fields and values ``[B, T]``; only values under ``batch.mask`` are used.

The loop can add the same regularizers to any of them: a KL penalty and an entropy bonus (recipe section ``regularize``,
function ``add_regularizers`` in ``surrogate.py``).
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from posttrain.acting.methods import (
    IF_RATIO_FALLS,
    IF_RATIO_LEAVES_ONE,
    IF_RATIO_MOVES,
    IF_RATIO_REACHES_CAP,
    IF_RATIO_VARIES,
    IF_VALUES_MOVE,
)
from posttrain.algorithms.objectives.primitives import log1mexp, log_ratio, row_mean
from posttrain.algorithms.objectives.surrogate import ClipMax, NotNegative, Positive, clipped_surrogate
from posttrain.registry import register
from posttrain.signatures import Range
from posttrain.types import Batch, Loss, Outputs

RATIO_NOISE = 1e-4  # nats: in fp32, sampler and trainer differ by less if weights are equal


@register("objective", level="token", needs=("advantages",), vanishes=("advantages",), policy_term=True)
def reinforce(outputs: Outputs, batch: Batch) -> Loss:
    """The score-function estimator.

    ``values = −A · log π(a_t | s_t)``

    Williams (1992), "Simple statistical gradient-following algorithms for connectionist reinforcement
    learning" (https://doi.org/10.1007/BF00992696). Baselines are subtracted by the advantage (``raw``, ``centered``,
    ``leave_one_out`` ...).

    This estimator lacks an importance ratio. With several optimizer steps per rollout batch (``train.ppo_epochs`` ×
    ``train.num_minibatches`` > 1), later steps are off-policy.
    """
    return Loss(-batch.field("advantages") * outputs.logprobs)


@register("objective", level="token", needs=("advantages", "old_logprobs"), vanishes=("advantages",), policy_term=True)
def grpo(
    outputs: Outputs,
    batch: Batch,
    *,
    clip_low: Annotated[NotNegative, IF_RATIO_FALLS] = 0.2,
    clip_high: Annotated[NotNegative, IF_RATIO_MOVES] = 0.2,
    clip_max: Annotated[ClipMax | None, IF_RATIO_REACHES_CAP] = None,
) -> Loss:
    """Group-relative policy optimization: PPO's clipped surrogate with group advantages.

    ``values = −min(ρ A, clip(ρ, 1 − ε_low, 1 + ε_high) A)``,
    with ``ρ = π(a_t | s_t) / μ(a_t | s_t)``.

    Shao et al. (2024), "DeepSeekMath" (arXiv 2402.03300), eq. 3–4. Asymmetric clipping comes from DAPO (Yu et al. 2025,
    arXiv 2503.14476, eq. 8; 0.2 and 0.28 in section 4.1). GRPO as published: ``advantage: normalized``,
    ``aggregate: sequence_mean``. Dr. GRPO: ``advantage: centered``, ``aggregate: constant``. DAPO: ``normalized``,
    ``token_mean``, ``clip_high: 0.28``. ``clip_max`` (c) adds dual clipping (Ye et al. 2020, "Mastering complex control
    in MOBA games with deep reinforcement learning", eq. 3): if A < 0, values are at most ``−c A``.

    Departure: log-ratios are clamped to ±20 before exponentiation.

    Args:
        clip_low, clip_high: ε_low and ε_high.
        clip_max: c, upper bound on ratios if A < 0 (paper: 3); null disables it.
    """
    log_rho = log_ratio(outputs.logprobs, batch.field("old_logprobs"), batch.mask)
    return clipped_surrogate(log_rho.exp(), batch.field("advantages"), clip_low, clip_high, clip_max)


DPPO_NEEDS = ("advantages", "sampler_logprobs")


@register("objective", level="token", needs=DPPO_NEEDS, vanishes=("advantages",), policy_term=True)
def dppo_tv(
    outputs: Outputs,
    batch: Batch,
    *,
    clip_low: Annotated[NotNegative, IF_RATIO_MOVES] = 0.15,
    clip_high: Annotated[NotNegative, IF_RATIO_MOVES] = 0.15,
) -> Loss:
    """Divergence PPO with total variation per token: the trust region bounds probabilities instead of ratios.

    ``values = −m ρ A`` with ``ρ = π(a_t | s_t) / μ(a_t | s_t)`` and sampler μ. Mask m is 0 if ``A > 0`` and ``π − μ >
    δ_high``, or if ``A < 0`` and ``μ − π > δ_low``, else 1.

    Qi et al. (2026), "Rethinking the trust region in LLM reinforcement learning" (arXiv 2602.04879), eq. 13 with binary
    total variation ``|π − μ|``. Rare tokens may change by a large factor, likely tokens only slightly. Since sampler
    probabilities are the anchor, sampler mismatch needs no separate correction.

    Departure: log-ratios are clamped to ±20 before exponentiation.

    What goes wrong: Below the threshold, ratios are unbounded, so rare tokens can dominate gradients. Watch ``ratio``
    and ``grad_norm``.

    Args:
        clip_low, clip_high: δ_low and δ_high, in probability (authors' runs: 0.15).
    """
    policy, sampler = _token_probabilities(outputs, batch)
    advantages = batch.field("advantages")
    moved = policy - sampler
    is_outside = ((advantages > 0) & (moved > clip_high)) | ((advantages < 0) & (-moved > clip_low))
    return _masked_surrogate(outputs, batch, is_outside)


@register("objective", level="token", needs=DPPO_NEEDS, vanishes=("advantages",), policy_term=True)
def dppo_kl(
    outputs: Outputs,
    batch: Batch,
    *,
    clip_low: Annotated[NotNegative, IF_RATIO_MOVES] = 0.05,
    clip_high: Annotated[NotNegative, IF_RATIO_MOVES] = 0.05,
) -> Loss:
    """Divergence PPO with binary KL divergence: the sampled token versus all others.

    ``values = −m ρ A`` as in ``dppo_tv``, with ``D = μ log(μ/π) + (1 − μ) log((1 − μ)/(1 − π))``. Mask m is 0 if ``A >
    0``, ``π > μ`` and ``D > δ_high``, or if ``A < 0``, ``π < μ`` and ``D > δ_low``, else 1.

    Qi et al. (2026), "Rethinking the trust region in LLM reinforcement learning" (arXiv 2602.04879), eq. 14.

    Departures: log-ratios are clamped to ±20 before exponentiation, and ``1 − π`` and ``1 − μ`` to at least 1e-6.

    What goes wrong: Divergence is steep near probability 1, so tokens with confident sampler predictions are masked
    after small steps. Watch ``clip_fraction``.

    Args:
        clip_low, clip_high: δ_low and δ_high, in nats (authors' runs: 0.05).
    """
    policy, sampler = _token_probabilities(outputs, batch)
    advantages = batch.field("advantages")
    log_rho = log_ratio(outputs.logprobs.detach(), batch.field("sampler_logprobs"), batch.mask)
    others = log1mexp(batch.field("sampler_logprobs")) - log1mexp(outputs.logprobs.detach())
    divergence = -sampler * log_rho + (1.0 - sampler) * others
    rises = (advantages > 0) & (policy > sampler) & (divergence > clip_high)
    falls = (advantages < 0) & (policy < sampler) & (divergence > clip_low)
    return _masked_surrogate(outputs, batch, rises | falls)


def _token_probabilities(outputs: Outputs, batch: Batch) -> tuple[Tensor, Tensor]:
    """Compute detached token probabilities ``[B, T]`` under policy and sampler."""
    return outputs.logprobs.detach().exp(), batch.field("sampler_logprobs").exp()


def _masked_surrogate(outputs: Outputs, batch: Batch, is_outside: Tensor) -> Loss:
    """Compute ``−ρ A`` with ratios to the sampler; 0 outside the trust region."""
    ratio = log_ratio(outputs.logprobs, batch.field("sampler_logprobs"), batch.mask).exp()
    values = -ratio * batch.field("advantages")
    values = torch.where(is_outside, torch.zeros_like(values), values)
    return Loss(values, {"ratio": ratio.detach(), "clip_fraction": is_outside.to(ratio.dtype)})


@register("objective", level="token", needs=("advantages", "old_logprobs"), vanishes=(), policy_term=True)
def dro(outputs: Outputs, batch: Batch, *, beta: Annotated[NotNegative, IF_RATIO_VARIES] = 0.05) -> Loss:
    """Direct reward optimization: REINFORCE with a quadratic penalty on log-ratios instead of clipping.

    ``values = −(A · log π(a_t | s_t) − β/2 · (log π(a_t | s_t) − log μ(a_t | s_t))²)``

    Richemond et al. (2024), "Offline regularised reinforcement learning for large language models alignment"
    (arXiv 2405.19107), applied per token, as trainers in 2026 do. At the optimum, ``log π − log μ = A/β``. Tokens with
    A = 0 are pulled back to μ.

    Departures: the paper squares once per answer and learns a value function. Here squares are per token and advantages
    are given. Log-ratios are clamped to ±20.

    What goes wrong: On the first update per batch the penalty is 0. If that is the only update, β does nothing.

    Args:
        beta: β, penalty weight.
    """
    log_rho = log_ratio(outputs.logprobs, batch.field("old_logprobs"), batch.mask)
    values = -batch.field("advantages") * outputs.logprobs + 0.5 * beta * log_rho.square()
    return Loss(values, {"ratio": log_rho.detach().exp()})


CLIP_COV_NEEDS = ("advantages", "old_logprobs", "clip_cov_tokens")
KL_COV_NEEDS = ("advantages", "old_logprobs", "kl_cov_tokens")


@register(
    "objective",
    level="token",
    needs=CLIP_COV_NEEDS,
    vanishes=("advantages",),
    policy_term=True,
    of_batch=("share", "cov_low", "cov_high"),  # read by the batch field
)
def clip_cov(
    outputs: Outputs,
    batch: Batch,
    *,
    clip_low: Annotated[NotNegative, IF_RATIO_FALLS] = 0.2,
    clip_high: Annotated[NotNegative, IF_RATIO_MOVES] = 0.2,
    share: Annotated[float, Range(gt=0, le=1)] = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
) -> Loss:
    """GRPO without gradients on a few tokens that would reduce entropy most.

    ``values = −min(ρ A, clip(ρ, 1 − ε_low, 1 + ε_high) A)``, and 0 at drawn tokens. From N trained tokens in the
    optimizer batch, ``max(1, ⌊r N⌋)`` are drawn uniformly among unclipped tokens with ``ω_low < (A_t − mean A)(log π_t
    − mean log π) < ω_high``. Denominators still count every token.

    Cui et al. (2025), "The entropy mechanism of reinforcement learning for reasoning language models" (arXiv
    2505.22617), section 4.2. Covariances use the whole optimizer batch and the weights before the update; draws depend
    on (seed, step, row). Splitting a batch changes neither. Defaults, and the clip for other tokens, follow the
    authors' code.

    Departure: the authors' code computes means and draws per micro-batch.

    What goes wrong: Small batches may contain no token in the covariance range, which makes this ``grpo``. Watch
    ``cov_fraction``; lower ``cov_low`` if it stays 0.

    Args:
        clip_low, clip_high: ε_low and ε_high.
        share: r.
        cov_low, cov_high: ω_low and ω_high, in nats × advantage.
    """
    log_rho = log_ratio(outputs.logprobs, batch.field("old_logprobs"), batch.mask)
    loss = clipped_surrogate(log_rho.exp(), batch.field("advantages"), clip_low, clip_high)
    drawn = batch.field("clip_cov_tokens")
    values = torch.where(drawn > 0, torch.zeros_like(loss.values), loss.values)
    return Loss(values, loss.metrics | {"cov_fraction": drawn})


@register("objective", level="token", needs=KL_COV_NEEDS, vanishes=(), policy_term=True, of_batch=("share",))
def kl_cov(
    outputs: Outputs,
    batch: Batch,
    *,
    share: Annotated[float, Range(gt=0, le=1), IF_RATIO_LEAVES_ONE] = 2e-4,
    penalty: Annotated[NotNegative, IF_RATIO_LEAVES_ONE] = 1.0,
) -> Loss:
    """Importance-weighted policy gradient with a penalty on tokens that would reduce entropy most.

    ``values = −ρ A``, plus ``c |log ρ|`` at the ``max(1, ⌊r N⌋)`` of N trained tokens with the largest ``(A_t − mean
    A)(log π_t − mean log π)`` in the optimizer batch. Ratios are not clipped.

    Cui et al. (2025), "The entropy mechanism of reinforcement learning for reasoning language models" (arXiv
    2505.22617), section 4.2. Defaults and the form of the penalty follow the authors' code. Covariances use the whole
    optimizer batch and the weights before the update, so splitting a batch does not change which tokens are penalized.

    Departures: the authors' code computes means and selects tokens per micro-batch. Here the penalty is 0 if ``|log ρ|
    < 1e-4``: such values are rounding between sampler and trainer, and their sign would decide the gradient.

    What goes wrong: Ratios of other tokens are unbounded. Use few updates per batch, and watch ``ratio``.

    Args:
        share: r.
        penalty: c.
    """
    log_rho = log_ratio(outputs.logprobs, batch.field("old_logprobs"), batch.mask)
    ratio = log_rho.exp()
    values = -ratio * batch.field("advantages")
    chosen = batch.field("kl_cov_tokens")
    moved = (chosen > 0) & (log_rho.abs() >= RATIO_NOISE)
    values = torch.where(moved, values + penalty * log_rho.abs(), values)
    return Loss(values, {"ratio": ratio.detach(), "cov_fraction": chosen})


@register("objective", level="token", needs=("advantages", "old_logprobs"), vanishes=("advantages",), policy_term=True)
def gspo(
    outputs: Outputs,
    batch: Batch,
    *,
    clip_low: Annotated[NotNegative, IF_RATIO_FALLS] = 3e-4,
    clip_high: Annotated[NotNegative, IF_RATIO_MOVES] = 4e-4,
) -> Loss:
    """Group sequence policy optimization: one importance ratio per sequence.

    ``values = −min(s A, clip(s, 1 − ε_low, 1 + ε_high) A)`` at every token of the sequence, with
    ``s = exp(mean_t(log π(a_t | s_t) − log μ(a_t | s_t)))``, the geometric mean of the token ratios.

    Zheng et al. (2025), "Group sequence policy optimization" (arXiv 2507.18071), eq. 5 and 7, clip range from section
    5.1. Sequence ratios vary far less than token ratios; PPO's 0.2 would never clip. As published: ``advantage:
    normalized``, ``aggregate: sequence_mean``, no KL.

    What goes wrong: A clip range for tokens (0.2) never clips anything. The published range (3e-4) clips short answers
    almost always.

    Args:
        clip_low, clip_high: ε_low and ε_high.
    """
    log_rho = log_ratio(outputs.logprobs, batch.field("old_logprobs"), batch.mask)
    ratio = row_mean(log_rho, batch.mask).exp()[:, None].expand_as(log_rho)
    return clipped_surrogate(ratio, batch.field("advantages"), clip_low, clip_high)


@register("objective", level="token", needs=("advantages", "old_logprobs"), vanishes=("advantages",), policy_term=True)
def gspo_token(
    outputs: Outputs,
    batch: Batch,
    *,
    clip_low: Annotated[NotNegative, IF_RATIO_FALLS] = 3e-4,
    clip_high: Annotated[NotNegative, IF_RATIO_MOVES] = 4e-4,
) -> Loss:
    """GSPO's token variant: sequence ratios as values, with gradients per token.

    ``values = −min(s_t A_t, clip(s_t, 1 − ε_low, 1 + ε_high) A_t)`` with
    ``s_t = sg[s] · π(a_t | s_t) / sg[π(a_t | s_t)]`` and s as in ``gspo``. If each sequence has one advantage, values
    and gradients (under ``sequence_mean``) equal ``gspo``. Unlike ``gspo``, it supports advantages per token.

    Zheng et al. (2025), "Group sequence policy optimization" (arXiv 2507.18071), eq. 13–14.

    What goes wrong: The published clip range is too narrow for short answers, as in GSPO.

    Args:
        clip_low, clip_high: ε_low and ε_high.
    """
    log_rho = log_ratio(outputs.logprobs, batch.field("old_logprobs"), batch.mask)
    sequence = row_mean(log_rho, batch.mask)[:, None].detach()
    own = torch.where(batch.mask, outputs.logprobs - outputs.logprobs.detach(), torch.zeros_like(log_rho))
    return clipped_surrogate((sequence + own).exp(), batch.field("advantages"), clip_low, clip_high)


@register("objective", level="token", needs=("advantages", "old_logprobs"), vanishes=("advantages",), policy_term=True)
def cispo(
    outputs: Outputs,
    batch: Batch,
    *,
    clip_low: Annotated[NotNegative, IF_RATIO_FALLS] = 1.0,
    clip_high: Annotated[NotNegative, IF_RATIO_MOVES] = 4.0,
) -> Loss:
    """Clipped importance sampling: only weights are clipped, so every token keeps its gradient.

    ``values = −sg[clip(ρ, 1 − ε_low, 1 + ε_high)] · A · log π(a_t | s_t)``

    MiniMax-M1 (2025, arXiv 2506.13585), eq. 4–5, section 3.1: no lower bound (``clip_low: 1``); the paper tunes the
    upper bound without stating it. The cap 1 + 4 follows TRL's recipe for ScaleRL (Khatri et al. 2025, "The art of
    scaling reinforcement learning compute for LLMs"). As published:
    ``advantage: normalized``, ``aggregate: token_mean`` (over the whole batch).

    What goes wrong: Without a lower bound, very old samples still contribute. Use few updates per batch.

    Args:
        clip_low, clip_high: ε_low and ε_high; weights are capped at 1 + ε_high.
    """
    ratio = log_ratio(outputs.logprobs, batch.field("old_logprobs"), batch.mask).detach().exp()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    values = -weight * batch.field("advantages") * outputs.logprobs
    return Loss(values, {"ratio": ratio, "clip_fraction": (weight != ratio).to(ratio.dtype)})


@register("objective", level="token", needs=("advantages", "old_logprobs"), vanishes=("advantages",), policy_term=True)
def sapo(
    outputs: Outputs,
    batch: Batch,
    *,
    tau_positive: Annotated[Positive, IF_RATIO_VARIES] = 1.0,
    tau_negative: Annotated[Positive, IF_RATIO_VARIES] = 1.05,
) -> Loss:
    """Soft adaptive policy optimization: a smooth gate replaces clipping.

    ``values = −A · (4 / τ) · σ(τ (ρ − 1))`` with τ = τ_positive if A > 0, else τ_negative. At ρ = 1 its gradient equals
    REINFORCE; it decays smoothly on both sides, faster for negative advantages.

    Gao et al. (2025), "Soft adaptive policy optimization" (arXiv 2511.20347), eq. 5, with the paper's temperatures. As
    published: ``advantage: normalized``, ``aggregate: sequence_mean``, no KL.

    What goes wrong: Temperatures far below 1 flatten the gate, so ratios no longer limit updates.

    Args:
        tau_positive, tau_negative: gate temperatures by the sign of A.
    """
    advantages = batch.field("advantages")
    ratio = log_ratio(outputs.logprobs, batch.field("old_logprobs"), batch.mask).exp()
    tau = torch.full_like(ratio, tau_negative).masked_fill(advantages > 0, tau_positive)
    values = -advantages * (4.0 / tau) * torch.sigmoid(tau * (ratio - 1.0))
    return Loss(values, {"ratio": ratio.detach()})


@register("objective", level="token", needs=("advantages", "old_logprobs"), vanishes=("advantages",), policy_term=True)
def gmpo(outputs: Outputs, batch: Batch, *, clip: Annotated[NotNegative, IF_RATIO_MOVES] = 0.4) -> Loss:
    """Geometric-mean policy optimization: token ratios are clipped in log space, then averaged geometrically.

    ``values = −A · exp(mean_t c_t)`` at every token of the sequence, where
    ``c_t = min(log ρ_t, ε)`` for A > 0 and ``max(log ρ_t, −ε)`` for A < 0: pessimistic clipping of ρ_t to (e^−ε, e^ε).

    Zhao et al. (2025), "Geometric-mean policy optimization" (arXiv 2507.20673); the range (e^−0.4, e^0.4) is from
    section 4. As published: ``advantage: normalized``, ``aggregate: sequence_mean``, no KL.

    What goes wrong: Geometric means hide single extreme tokens. Watch ``kl_sampler`` if sampler and trainer differ.

    Args:
        clip: ε, in nats.
    """
    advantages = batch.field("advantages")
    log_rho = log_ratio(outputs.logprobs, batch.field("old_logprobs"), batch.mask)
    clipped = torch.where(advantages > 0, log_rho.clamp(max=clip), log_rho.clamp(min=-clip))
    ratio = row_mean(clipped, batch.mask).exp()[:, None].expand_as(log_rho)
    is_clipped = (clipped != log_rho) & (advantages != 0)
    metrics = {"ratio": log_rho.detach().exp(), "clip_fraction": is_clipped.to(ratio.dtype)}
    return Loss(-advantages * ratio, metrics)


def explain_variance(means: dict[str, float]) -> dict[str, float]:
    """Replace moments with ``value_explained_variance``, 1 − Var(R − V) / Var(R)."""
    if "returns_squared" not in means:  # mixture parts only measure loss and accuracy
        return means
    error = means.pop("value_error_squared") - means.pop("value_error") ** 2
    spread = means.pop("returns_squared") - means.pop("returns") ** 2
    return means | ({"value_explained_variance": 1.0 - error / spread} if spread > 0 else {})


@register(
    "objective",
    level="token",
    needs=("advantages", "old_logprobs", "returns", "old_values"),
    derive=explain_variance,
    vanishes=(),  # the critic learns from every row
    policy_term=True,
    head="value",
)
def ppo(
    outputs: Outputs,
    batch: Batch,
    *,
    clip_low: Annotated[NotNegative, IF_RATIO_FALLS] = 0.2,
    clip_high: Annotated[NotNegative, IF_RATIO_MOVES] = 0.2,
    clip_max: Annotated[ClipMax | None, IF_RATIO_REACHES_CAP] = None,
    value_weight: NotNegative = 0.5,
    value_clip: Annotated[NotNegative | None, IF_VALUES_MOVE] = 0.2,
) -> Loss:
    """Proximal policy optimization: a clipped surrogate plus a clipped value loss.

    ``values = −min(ρ A, clip(ρ, 1 − ε_low, 1 + ε_high) A) + c_V · L_V``, with
    ``L_V = ½ max((V − R)², (clip(V, V_old − ε_V, V_old + ε_V) − R)²)``.

    Schulman et al. (2017), "Proximal policy optimization algorithms" (arXiv 1707.06347), eq. 7 (surrogate). The paper's
    value loss is a plain squared error; clipping follows the authors' code. As in RLHF: ``advantage: gae``,
    ``aggregate: token_mean``, and the KL in the reward (``kl_in_reward``), not in the loss (``regularize``).

    Shapes: logprobs, scores (V, the value of the state before token t), advantages, returns and
    old_values ``[B, T]``. Metrics ``value_error`` (R − V, with current V), ``value_error_squared``, ``returns`` and
    ``returns_squared`` give the explained variance ``1 − (E[e²] − E[e]²) / Var(R)`` over the whole optimizer batch.

    Departures: the ½ is explicit; log-ratios are clamped to ±20 before exponentiation.

    Args:
        clip_low, clip_high: ε_low and ε_high.
        clip_max: c, upper bound on ratios if A < 0, as in ``grpo``; null disables it.
        value_weight: c_V.
        value_clip: ε_V, in units of the return; null uses a plain squared error.
    """
    assert outputs.scores is not None, "the value head was not asked for"
    log_rho = log_ratio(outputs.logprobs, batch.field("old_logprobs"), batch.mask)
    loss = clipped_surrogate(log_rho.exp(), batch.field("advantages"), clip_low, clip_high, clip_max)
    returns = batch.field("returns")
    value_loss, is_clipped = _value_loss(outputs.scores, batch.field("old_values"), returns, value_clip)
    error = returns - outputs.scores.detach()
    metrics = loss.metrics | {
        "value_loss": value_loss.detach(),
        "value_clip_fraction": is_clipped.to(value_loss.dtype),
        "value_error": error,
        "value_error_squared": error.square(),
        "returns": returns,
        "returns_squared": returns.square(),
    }
    return Loss(loss.values + value_weight * value_loss, metrics)


def _value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """Compute half the larger of clipped and plain squared errors, and a mask of where clipping acts."""
    plain = 0.5 * (values - returns).square()
    if clip is None:
        return plain, torch.zeros_like(plain, dtype=torch.bool)
    clipped = 0.5 * (old + (values - old).clamp(-clip, clip) - returns).square()
    # inside the range both differ only by rounding, which does not count as clipping
    return torch.maximum(plain, clipped), (clipped > plain) & ((values - old).abs() > clip)
