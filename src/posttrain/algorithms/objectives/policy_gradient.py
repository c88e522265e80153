"""Policy-gradient objectives: per-token values whose gradient improves the expected reward.

All take advantages that were computed outside (``advantages.py``), so credit assignment and loss
are two small steps. Shapes: logprobs, batch fields and values ``[B, T]``; values mean something where
``batch.mask`` is True.

To all of them the loop may add the same regularizers, a KL to the reference and an entropy bonus: ``regularize`` in
``surrogate.py``, the section ``regularize`` of a recipe.
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

RATIO_NOISE = 1e-4  # nats: sampler and trainer of equal weights differ by less in fp32


@register("objective", level="token", needs=("advantages",), vanishes=("advantages",), policy_term=True)
def reinforce(outputs: Outputs, batch: Batch) -> Loss:
    """The score-function estimator.

    ``values = −A · log π(a_t | s_t)``

    Williams (1992), "Simple statistical gradient-following algorithms for connectionist reinforcement
    learning" (https://doi.org/10.1007/BF00992696). The advantage subtracts the baseline (``raw``, ``centered``,
    ``leave_one_out`` ...).

    There is no importance ratio: with several optimizer steps per rollout batch
    (``train.ppo_epochs`` × ``train.num_minibatches`` > 1) the later steps are off-policy.
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

    Shao et al. (2024), "DeepSeekMath" (arXiv 2402.03300), eq. 3–4; the asymmetric clip is DAPO's (Yu et al. 2025,
    arXiv 2503.14476, eq. 8; 0.2 and 0.28 in section 4.1). GRPO as published: ``advantage: normalized``,
    ``aggregate: sequence_mean``. Dr. GRPO: ``advantage: centered``, ``aggregate: constant``. DAPO: ``normalized``,
    ``token_mean``, ``clip_high: 0.28``. With ``clip_max`` (c) the dual clip of Ye et al. (2020), "Mastering complex
    control in MOBA games with deep reinforcement learning", eq. 3: the value is at most ``−c A`` where A < 0.

    Departure: the log-ratio is clamped to ±20 before the exponential.

    Args:
        clip_low, clip_high: ε_low and ε_high.
        clip_max: c, the largest ratio that counts where A < 0; 3 is the paper's. None for no bound.
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
    """Divergence PPO with the total variation of a token: the trust region is in probabilities, not in ratios.

    ``values = −m ρ A`` with ``ρ = π(a_t | s_t) / μ(a_t | s_t)`` and μ the sampler's probability. The mask m is 0 if
    ``A > 0`` and ``π − μ > δ_high``, or if ``A < 0`` and ``μ − π > δ_low``, else 1.

    Qi et al. (2026), "Rethinking the trust region in LLM reinforcement learning" (arXiv 2602.04879), eq. 13 with the
    binary total variation ``|π − μ|``. A rare token may change by a large factor, a likely one only by a little.
    The sampler's probabilities are the anchor, so a separate correction of the sampler's mismatch is not needed.

    Departure: the log-ratio is clamped to ±20 before the exponential.

    What goes wrong: A token below the threshold has no bound on its ratio. Rare tokens with a large ratio dominate the
    gradient; watch ``ratio`` and ``grad_norm``.

    Args:
        clip_low, clip_high: δ_low and δ_high, in probability; 0.15 is used in the authors' runs.
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
    """Divergence PPO with the KL divergence of "this token or any other".

    ``values = −m ρ A`` as in ``dppo_tv``, with ``D = μ log(μ/π) + (1 − μ) log((1 − μ)/(1 − π))``. The mask m is 0 if
    ``A > 0``, ``π > μ`` and ``D > δ_high``, or if ``A < 0``, ``π < μ`` and ``D > δ_low``, else 1.

    Qi et al. (2026), "Rethinking the trust region in LLM reinforcement learning" (arXiv 2602.04879), eq. 14.

    Departures: the log-ratio is clamped to ±20 before the exponential, and a probability of "any other" to at least
    1e-6.

    What goes wrong: Near probability 1 the divergence is steep: tokens that the sampler was sure of are masked after a
    small step. Watch ``clip_fraction``.

    Args:
        clip_low, clip_high: δ_low and δ_high, in nats; 0.05 is used in the authors' runs.
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
    """Return the probabilities ``[B, T]`` of the tokens under the policy and under the sampler, detached."""
    return outputs.logprobs.detach().exp(), batch.field("sampler_logprobs").exp()


def _masked_surrogate(outputs: Outputs, batch: Batch, is_outside: Tensor) -> Loss:
    """``−ρ A`` with the sampler's ratio, and 0 where the token has left the trust region."""
    ratio = log_ratio(outputs.logprobs, batch.field("sampler_logprobs"), batch.mask).exp()
    values = -ratio * batch.field("advantages")
    values = torch.where(is_outside, torch.zeros_like(values), values)
    return Loss(values, {"ratio": ratio.detach(), "clip_fraction": is_outside.to(ratio.dtype)})


@register("objective", level="token", needs=("advantages", "old_logprobs"), vanishes=(), policy_term=True)
def dro(outputs: Outputs, batch: Batch, *, beta: Annotated[NotNegative, IF_RATIO_VARIES] = 0.05) -> Loss:
    """Direct reward optimization: REINFORCE with a quadratic penalty on the log-ratio in place of a clip.

    ``values = −(A · log π(a_t | s_t) − β/2 · (log π(a_t | s_t) − log μ(a_t | s_t))²)``

    Richemond et al. (2024), "Offline regularised reinforcement learning for large language models alignment"
    (arXiv 2405.19107), per token as trainers of 2026 use it. At the optimum ``log π − log μ = A/β``: the advantage is
    distributed over the tokens as a log-ratio. Tokens with A = 0 are pulled back to μ.

    Departures: the paper has one square per answer and learns a value; here the square is per token and the advantage
    is computed outside. The log-ratio is clamped to ±20.

    What goes wrong: The penalty is 0 at the first update on a batch. With one update per batch β does nothing.

    Args:
        beta: β, the weight of the penalty.
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
    """GRPO in which some tokens that would lower the entropy most get no gradient.

    ``values = −min(ρ A, clip(ρ, 1 − ε_low, 1 + ε_high) A)``, and 0 at the drawn tokens. Drawn are ``max(1, ⌊r N⌋)`` of
    the N trained tokens of the optimizer batch, uniformly among those with
    ``ω_low < (A_t − mean A)(log π_t − mean log π) < ω_high`` whose ratio is not clipped. All tokens stay in the
    denominator.

    Cui et al. (2025), "The entropy mechanism of reinforcement learning for reasoning language models" (arXiv
    2505.22617), section 4.2. The covariance is over the whole optimizer batch under the weights before the update,
    and the draw is a function of (seed, step, row), so that no split changes either. The defaults and the clip of the
    other tokens are those of the authors' code.

    Departure: in the authors' code mean and draw are of a micro-batch.

    What goes wrong: In a small batch no token may have a covariance in the range, and this is ``grpo``. Watch
    ``cov_fraction`` and lower ``cov_low``.

    Args:
        clip_low, clip_high: ε_low and ε_high.
        share: r.
        cov_low, cov_high: ω_low and ω_high, in nats times the advantage.
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
    """Policy gradient with a ratio, and a penalty at the tokens that would lower the entropy most.

    ``values = −ρ A``, and ``−ρ A + c |log ρ|`` at the ``max(1, ⌊r N⌋)`` of the N trained tokens of the optimizer batch
    with the largest ``(A_t − mean A)(log π_t − mean log π)``. There is no clip.

    Cui et al. (2025), "The entropy mechanism of reinforcement learning for reasoning language models" (arXiv
    2505.22617), section 4.2; the defaults and the form of the penalty are those of the authors' code. The covariance
    is over the whole optimizer batch under the weights before the update, so that no split changes the choice.

    Departures: in the authors' code mean and choice are of a micro-batch. The penalty is 0 where ``|log ρ| < 1e-4``:
    that is rounding between sampler and trainer, and its sign would decide the gradient.

    What goes wrong: The other tokens have no bound on their ratio. Keep few updates a batch, and watch ``ratio``.

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
    """Group sequence policy optimization: one importance ratio for a whole sequence.

    ``values = −min(s A, clip(s, 1 − ε_low, 1 + ε_high) A)`` at every token of the sequence, with
    ``s = exp(mean_t(log π(a_t | s_t) − log μ(a_t | s_t)))``, the geometric mean of the token ratios.

    Zheng et al. (2025), "Group sequence policy optimization" (arXiv 2507.18071), eq. 5 and 7; the clip range is theirs
    (section 5.1): the ratio of a sequence moves far less than that of a token, and PPO's 0.2 would
    never clip. As published: ``advantage: normalized``, ``aggregate: sequence_mean``, no KL.

    What goes wrong: With a token's clip range (0.2) nothing is ever clipped. With the published range (3e-4) short
    answers are clipped almost always.

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
    """GSPO's token variant: the sequence's ratio in value, each token's own gradient.

    ``values = −min(s_t A_t, clip(s_t, 1 − ε_low, 1 + ε_high) A_t)`` with
    ``s_t = sg[s] · π(a_t | s_t) / sg[π(a_t | s_t)]`` and s as in ``gspo``. With one advantage per
    sequence, value and gradient (under ``sequence_mean``) equal those of ``gspo``; it allows
    advantages that differ by token.

    Zheng et al. (2025), "Group sequence policy optimization" (arXiv 2507.18071), eq. 13–14.

    What goes wrong: As with GSPO: the published clip range is too narrow for short answers.

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
    """Clipped importance sampling: the weight is clipped, so every token keeps a gradient.

    ``values = −sg[clip(ρ, 1 − ε_low, 1 + ε_high)] · A · log π(a_t | s_t)``

    MiniMax-M1 (2025, arXiv 2506.13585), eq. 4–5, section 3.1: no lower bound (``clip_low: 1``) and a tuned upper one
    that the paper does not print. The cap of 1 + 4 is the one that TRL's recipe for ScaleRL (Khatri
    et al. 2025, "The art of scaling reinforcement learning compute for LLMs") gives. As published:
    ``advantage: normalized``, ``aggregate: token_mean`` (over the tokens of the whole batch).

    What goes wrong: The weight has no lower bound, so very old samples still pull. Keep few updates a batch.

    Args:
        clip_low, clip_high: ε_low and ε_high; the cap of the weight is 1 + ε_high.
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
    """Soft adaptive policy optimization: a smooth gate in place of the clip.

    ``values = −A · (4 / τ) · σ(τ (ρ − 1))`` with τ = τ_positive where A > 0, else τ_negative. At ρ = 1
    the gradient is REINFORCE's; it falls off smoothly on both sides, faster for negative advantages.

    Gao et al. (2025), "Soft adaptive policy optimization" (arXiv 2511.20347), eq. 5; the temperatures are theirs. As
    published: ``advantage: normalized``, ``aggregate: sequence_mean``, no KL.

    What goes wrong: Temperatures far below 1 make the gate flat: the ratio no longer limits the update.

    Args:
        tau_positive, tau_negative: the temperatures of the gate.
    """
    advantages = batch.field("advantages")
    ratio = log_ratio(outputs.logprobs, batch.field("old_logprobs"), batch.mask).exp()
    tau = torch.full_like(ratio, tau_negative).masked_fill(advantages > 0, tau_positive)
    values = -advantages * (4.0 / tau) * torch.sigmoid(tau * (ratio - 1.0))
    return Loss(values, {"ratio": ratio.detach()})


@register("objective", level="token", needs=("advantages", "old_logprobs"), vanishes=("advantages",), policy_term=True)
def gmpo(outputs: Outputs, batch: Batch, *, clip: Annotated[NotNegative, IF_RATIO_MOVES] = 0.4) -> Loss:
    """Geometric-mean policy optimization: token ratios clipped in the log, then their geometric mean.

    ``values = −A · exp(mean_t c_t)`` at every token of the sequence, where
    ``c_t = min(log ρ_t, ε)`` for A > 0 and ``max(log ρ_t, −ε)`` for A < 0: the pessimistic side of
    clipping ρ_t to (e^−ε, e^ε).

    Zhao et al. (2025), "Geometric-mean policy optimization" (arXiv 2507.20673); the range (e^−0.4, e^0.4) is theirs
    (section 4). As published: ``advantage: normalized``, ``aggregate: sequence_mean``, no KL.

    What goes wrong: The geometric mean hides single extreme tokens. Watch ``kl_sampler`` if sampler and trainer
    differ.

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
    """Add ``value_explained_variance``, 1 − Var(R − V) / Var(R), in place of the moments that it is made of."""
    if "returns_squared" not in means:  # of a part of a mixture loss and accuracies alone are measured
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
    """Proximal policy optimization: the clipped surrogate and a value function with a clipped loss.

    ``values = −min(ρ A, clip(ρ, 1 − ε_low, 1 + ε_high) A) + c_V · L_V``, with
    ``L_V = ½ max((V − R)², (clip(V, V_old − ε_V, V_old + ε_V) − R)²)``.

    Schulman et al. (2017), "Proximal policy optimization algorithms" (arXiv 1707.06347), eq. 7 (surrogate). The paper
    has a plain squared error; its clip is that of the authors' code. As in RLHF: ``advantage: gae``,
    ``aggregate: token_mean``, and the KL in the reward (``kl_in_reward``), not in the loss (``regularize``).

    Shapes: logprobs, scores (V, the value of the state before token t), advantages, returns and
    old_values ``[B, T]``. The metrics ``value_error`` (R − V), ``value_error_squared``, ``returns`` and
    ``returns_squared`` are for the explained variance ``1 − (E[e²] − E[e]²) / Var(R)`` over the whole
    optimizer batch; V in them is the current value.

    Departures: the ½ is explicit; the log-ratio is clamped to ±20 before the exponential.

    Args:
        clip_low, clip_high: ε_low and ε_high.
        clip_max: c of the dual clip, as in ``grpo``: the largest ratio that counts where A < 0. None for no bound.
        value_weight: c_V.
        value_clip: ε_V, in units of the return; none for the plain squared error.
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
    """Half the squared error, the worse of clipped and not; and where the clipped one is the worse."""
    plain = 0.5 * (values - returns).square()
    if clip is None:
        return plain, torch.zeros_like(plain, dtype=torch.bool)
    clipped = 0.5 * (old + (values - old).clamp(-clip, clip) - returns).square()
    # inside the range the two differ by rounding only, which is no clipping
    return torch.maximum(plain, clipped), (clipped > plain) & ((values - old).abs() > clip)
