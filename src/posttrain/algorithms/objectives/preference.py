"""Preference objectives: one value per pair of chosen and rejected answers.

Rows alternate between chosen (even) and rejected (odd): logprobs and ``ref_logprobs`` ``[B, T]`` → values ``[B / 2]``,
aggregated by ``unit_mean``. Notation: y_w is chosen, y_l rejected, ``log π(y)`` sums log-probabilities over trained
tokens (without the prompt, with the end token), and ``Δ = log π(y_w)/π_ref(y_w) − log π(y_l)/π_ref(y_l)``.

All pair objectives report ``chosen_reward`` and ``rejected_reward`` (β × log-ratio; reference-free objectives define
their own), ``margin`` (their difference), ``pair_accuracy`` (margin > 0; ties count one half, which includes
differences below a millionth of the log-probabilities), ``chosen_logprob`` and ``rejected_logprob`` (``log π(y)``,
sums).

Only ORPO's log(1 − p) and the exponents in ``discopop`` and ``f_dpo`` are clamped. Other objectives exponentiate
log-ratios only inside a sigmoid. If policy or reference assign log-probability −inf to an answer, its pair gets NaN
under every objective. Empty answers also give NaN under objectives that average over tokens. The loop rejects such
updates.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from posttrain.acting.methods import if_option_is, unless_zero
from posttrain.algorithms.objectives.primitives import (
    MAX_LOG_RATIO,
    MAX_LOGPROB,
    log1mexp,
    nan_unless_finite,
    row_sum,
    wins,
)
from posttrain.algorithms.objectives.surrogate import NotNegative, Positive
from posttrain.registry import register
from posttrain.signatures import Range
from posttrain.types import Batch, Loss, Outputs

FlipRate = Annotated[float, Range(ge=0, lt=0.5)]


@register("objective", level="pair", needs=("ref_logprobs",), vanishes=())
def dpo(
    outputs: Outputs,
    batch: Batch,
    *,
    beta: Positive = 0.1,
    label_smoothing: FlipRate = 0.0,
    length_normalized: bool = False,
) -> Loss:
    """Direct preference optimization. With label smoothing: cDPO; with means per token: DPO-normalized.

    ``values = −(1 − ε) log σ(βΔ) − ε log σ(−βΔ)``

    Rafailov et al. (2023), "Direct preference optimization" (arXiv 2305.18290), eq. 7. ε > 0: Mitchell (2023), "A
    note on DPO with noisy preferences and relationship to IPO": its minimum is at a finite margin, σ(βΔ) = 1 − ε.
    Normalized: log-ratios are divided by token counts, as in Tulu 3 (Lambert et al. 2024).

    What goes wrong: Chosen answers may become less likely along with rejected ones. Add a likelihood term (``rpo``) or
    lower the learning rate.

    Args:
        beta: β; with ``length_normalized``, use about 2 to 5, since means are smaller than sums by a factor of answer
            length.
        label_smoothing: ε, assumed fraction of pairs with swapped labels.
        length_normalized: use means over tokens instead of sums.
    """
    chosen, rejected = _log_ratios(outputs, batch, length_normalized)
    logit = beta * (chosen - rejected)
    values = -(1.0 - label_smoothing) * logsigmoid(logit) - label_smoothing * logsigmoid(-logit)
    per_nat = _per_nat(beta, batch, length_normalized)
    return _with_metrics(values, beta * chosen, beta * rejected, outputs, batch, per_nat)


@register("objective", level="pair", needs=("ref_logprobs", "transport_shift"), vanishes=())
def aot(outputs: Outputs, batch: Batch, *, beta: Positive = 0.1, label_smoothing: FlipRate = 0.0) -> Loss:
    """Alignment via optimal transport: compare policy margins with reference margins of equal rank.

    ``values = −(1 − ε) log σ(β(u − v)) − ε log σ(−β(u − v))``, where u is the policy margin ``log π(y_w) − log π(y_l)``
    and v the reference margin with the same rank among all pairs in the optimizer batch.

    Melnyk et al. (2024), "Distributional preference alignment of LLMs via optimal transport" (arXiv 2406.05882), paired
    form. ``transport_shift`` ``[B]`` holds a pair's reference margin minus v, with ranks under the weights before the
    update. Departure: ranks span the whole optimizer batch, so splitting does not change them.

    What goes wrong: With one pair per batch, this is ``dpo``. It needs large batches.

    Args:
        beta, label_smoothing: β and ε, as in ``dpo``.
    """
    chosen, rejected = _log_ratios(outputs, batch)
    logit = beta * (chosen - rejected + batch.field("transport_shift")[0::2])
    values = -(1.0 - label_smoothing) * logsigmoid(logit) - label_smoothing * logsigmoid(-logit)
    return _with_metrics(values, beta * chosen, beta * rejected, outputs, batch, beta)


@register("objective", level="pair", needs=("ref_logprobs",), vanishes=())
def robust_dpo(outputs: Outputs, batch: Batch, *, beta: Positive = 0.1, flip_rate: FlipRate = 0.1) -> Loss:
    """Robust DPO: an unbiased estimate of DPO's loss on clean labels, given a fraction ε of swapped labels.

    ``values = (−(1 − ε) log σ(βΔ) + ε log σ(−βΔ)) / (1 − 2ε)``

    Chowdhury et al. (2024), "Provably robust DPO" (arXiv 2403.00409), section 3.1. While cDPO mixes both labels, this
    subtracts the swapped label. Values can be negative and are unbounded below (the slope tends to −ε / (1 − 2ε) per
    unit of βΔ).

    What goes wrong: Flip rates near 0.5 divide by almost zero, and the loss becomes mostly noise.

    Args:
        beta: β.
        flip_rate: ε, known fraction of swapped labels (paper: 0.1).
    """
    chosen, rejected = _log_ratios(outputs, batch)
    logit = beta * (chosen - rejected)
    values = (-(1.0 - flip_rate) * logsigmoid(logit) + flip_rate * logsigmoid(-logit)) / (1.0 - 2.0 * flip_rate)
    return _with_metrics(values, beta * chosen, beta * rejected, outputs, batch, beta)


@register("objective", level="pair", needs=("ref_logprobs",), vanishes=())
def ipo(outputs: Outputs, batch: Batch, *, beta: Positive = 0.1, length_normalized: bool = False) -> Loss:
    """Identity preference optimization: regress log-ratio differences on a finite target.

    ``values = (Δ − 1/(2β))²``, with its minimum at Δ = 1/(2β).

    Azar et al. (2023), "A general theoretical paradigm to understand learning from human preferences" (arXiv
    2310.12036), eq. 17, where β is called τ. The paper uses probabilities of whole answers, so sums are the default.
    Its authors later recommended means per token to TRL, so that the target does not depend on length; set
    ``length_normalized`` for this.

    What goes wrong: β differs from DPO's: margins go to 1 / (2β). Equal values are not comparable.

    Args:
        beta: β, regularization strength.
        length_normalized: use means over tokens instead of sums; the target is then a difference per token.
    """
    chosen, rejected = _log_ratios(outputs, batch, length_normalized)
    values = (chosen - rejected - 1.0 / (2.0 * beta)).square()
    per_nat = _per_nat(beta, batch, length_normalized)
    return _with_metrics(values, beta * chosen, beta * rejected, outputs, batch, per_nat)


@register("objective", level="pair", needs=("ref_logprobs",), vanishes=())
def hinge(outputs: Outputs, batch: Batch, *, beta: Positive = 0.1, margin: Positive = 1.0) -> Loss:
    """Hinge loss on log-ratios: SLiC's loss with DPO's implicit reward.

    ``values = max(0, δ − βΔ)``

    Zhao et al. (2023), "SLiC-HF" (arXiv 2305.10425), calibrate with ``max(0, δ − log π(y_w) + log π(y_l))`` plus
    cross-entropy, which keeps the model near its supervised start. Departure: ratios to the reference replace that
    term, as in hinge-norm (Liu et al. 2023, "Statistical rejection sampling improves preference optimization"); hence
    the different name.

    What goes wrong: Once all pairs pass the margin, gradients are 0 and learning stops.

    Args:
        beta: β (the second paper's γ).
        margin: δ; pairs beyond it have no gradient.
    """
    chosen, rejected = _log_ratios(outputs, batch)
    values = torch.relu(margin - beta * (chosen - rejected))
    return _with_metrics(values, beta * chosen, beta * rejected, outputs, batch, beta)


@register("objective", level="pair", needs=(), vanishes=())
def simpo(outputs: Outputs, batch: Batch, *, beta: Positive = 2.0, gamma: NotNegative = 1.0) -> Loss:
    """Simple preference optimization: means per token and a target margin, without a reference.

    ``values = −log σ(β/|y_w| · log π(y_w) − β/|y_l| · log π(y_l) − γ)``

    Meng et al. (2024), "SimPO" (arXiv 2405.14734), eq. 6. Rewards are ``β/|y| · log π(y)``; the metric ``margin`` does
    not subtract γ.

    What goes wrong: Without a reference, nothing anchors the policy. Small changes in β and γ matter; watch
    ``kl_initial`` and held-out accuracy.

    Args:
        beta: β (paper: 2.0 to 2.5).
        gamma: γ, absolute as in the paper's equation (the authors' code takes the ratio γ/β). Defaults to half of the
            default β; change both together.
    """
    logprobs = nan_unless_finite(_row_means(outputs.logprobs, batch.mask))
    chosen, rejected = beta * logprobs[0::2], beta * logprobs[1::2]
    values = -logsigmoid(chosen - rejected - gamma)
    return _with_metrics(values, chosen, rejected, outputs, batch, _per_nat(beta, batch, True))


@register("objective", level="pair", needs=(), vanishes=())
def orpo(outputs: Outputs, batch: Batch, *, odds_weight: NotNegative = 0.1) -> Loss:
    """Odds-ratio preference optimization: likelihood of chosen answers plus a log-odds-ratio term.

    ``values = −(1/|y_w|) log π(y_w) − λ log σ(log odds(y_w) − log odds(y_l))``, with
    ``odds(y) = p / (1 − p)`` and ``log p = (1/|y|) log π(y)``.

    Hong et al. (2024), "ORPO" (arXiv 2403.07691), eq. 6 and 7. Means per token follow the paper; with sums, 1 − p would
    round to 1. Rewards are ``log odds(y)``, without β, and finite, because log(1 − p) clamps log p to at most −1e-6.
    Departure: the likelihood term averages over each answer, then over pairs, instead of over all tokens in a batch.

    What goes wrong: Summed log-probabilities would explode, so means are used. If chosen answers are good, the
    imitation term dominates.

    Args:
        odds_weight: λ (paper: 0.1 to 0.25).
    """
    logprobs = nan_unless_finite(_row_means(outputs.logprobs, batch.mask))
    log_odds = logprobs - log1mexp(logprobs)
    chosen, rejected = log_odds[0::2], log_odds[1::2]
    nll = -logprobs[0::2]
    values = nll - odds_weight * logsigmoid(chosen - rejected)
    slope = -1.0 / torch.expm1(logprobs.detach().clamp(max=MAX_LOGPROB))  # d(log odds) / d(log p)
    return _with_metrics(values, chosen, rejected, outputs, batch, slope * _per_nat(1.0, batch, True), nll)


@register("objective", level="pair", needs=(), vanishes=())
def cpo(
    outputs: Outputs,
    batch: Batch,
    *,
    beta: Positive = 0.1,
    nll_weight: NotNegative = 1.0,
    nll_length_normalized: Annotated[bool, unless_zero("nll_weight")] = True,
) -> Loss:
    """Contrastive preference optimization: DPO with a uniform reference, plus likelihood of chosen answers.

    ``values = −log σ(β log π(y_w) − β log π(y_l)) − α/|y_w| · log π(y_w)``

    Xu et al. (2024), "Contrastive preference optimization" (arXiv 2401.08417). Rewards are ``β log π(y)``. The paper's
    second term lacks the division. As a sum, it outweighs the first term by two orders of magnitude on long answers, so
    means are the default here.

    What goes wrong: If summed over long answers, the likelihood term dominates. Keep ``nll_length_normalized`` on.

    Args:
        beta: β.
        nll_weight: α (paper: 1).
        nll_length_normalized: false uses the sum, as printed in the paper.
    """
    logprobs = nan_unless_finite(row_sum(outputs.logprobs, batch.mask))
    chosen, rejected = beta * logprobs[0::2], beta * logprobs[1::2]
    nll = -(_row_means(outputs.logprobs, batch.mask) if nll_length_normalized else logprobs)[0::2]
    return _with_metrics(-logsigmoid(chosen - rejected) + nll_weight * nll, chosen, rejected, outputs, batch, beta, nll)


@register("objective", level="pair", needs=("ref_logprobs",), vanishes=())
def rpo(outputs: Outputs, batch: Batch, *, beta: Positive = 0.1, nll_weight: NotNegative = 1.0) -> Loss:
    """DPO plus likelihood of chosen answers, which keeps them from becoming less likely.

    ``values = −log σ(βΔ) − α/|y_w| · log π(y_w)``

    Pang et al. (2024), "Iterative reasoning preference optimization" (arXiv 2404.19733), eq. 1 (sums in Δ, means in the
    likelihood term).

    What goes wrong: Large likelihood weights turn it into SFT on chosen answers.

    Args:
        beta: β (paper: 0.1).
        nll_weight: α (paper: 1).
    """
    chosen, rejected = _log_ratios(outputs, batch)
    nll = -_row_means(outputs.logprobs, batch.mask)[0::2]
    values = -logsigmoid(beta * (chosen - rejected)) + nll_weight * nll
    return _with_metrics(values, beta * chosen, beta * rejected, outputs, batch, beta, nll)


@register("objective", level="pair", needs=("ref_logprobs",), vanishes=())
def exo(
    outputs: Outputs,
    batch: Batch,
    *,
    beta: Positive = 0.1,
    label_smoothing: Annotated[float, Range(gt=0, lt=0.5)] = 1e-3,
) -> Loss:
    """Efficient exact optimization on preferences: DPO's KL in the opposite direction.

    ``values = KL(p‖q) = σ(βΔ) log(σ(βΔ)/(1 − ε)) + σ(−βΔ) log(σ(−βΔ)/ε)``, where p = (σ(βΔ), σ(−βΔ)) is the policy's
    distribution over the pair and q = (1 − ε, ε) the smoothed label. Zero at σ(βΔ) = 1 − ε, and at most −log ε:
    gradients vanish for pairs that are badly misordered.

    Ji et al. (2024), "Towards efficient exact optimization of language model alignment" (arXiv 2402.00856), section
    3.2, eq. 16 (EXO-pref with two answers).

    What goes wrong: Near the reference it behaves like DPO. Differences appear only after many updates.

    Args:
        beta: β (β_π in the paper).
        label_smoothing: ε; unsmoothed labels give infinite KL. The paper does not state a value; 1e-3 is common.
    """
    chosen, rejected = _log_ratios(outputs, batch)
    logit = beta * (chosen - rejected)
    smooth = torch.tensor(label_smoothing, dtype=logit.dtype, device=logit.device)
    values = logit.sigmoid() * (logsigmoid(logit) - torch.log1p(-smooth))
    values = values + (-logit).sigmoid() * (logsigmoid(-logit) - smooth.log())
    return _with_metrics(values, beta * chosen, beta * rejected, outputs, batch, beta)


@register("objective", level="pair", needs=("ref_logprobs",), vanishes=())
def nca(outputs: Outputs, batch: Batch, *, beta: Positive = 0.01) -> Loss:
    """Noise contrastive alignment, pair form: optimizes absolute likelihoods in addition to their order.

    ``values = −log σ(r_w) − ½ log σ(−r_w) − ½ log σ(−r_l)`` with ``r = β log π(y)/π_ref(y)``; its minimum over r_w is
    at log 2, so chosen answers become more likely by a finite ratio.

    Chen et al. (2024), "Noise contrastive alignment of language models with explicit rewards" (arXiv 2402.05369),
    section 4.1 (K = 2, hard labels).

    What goes wrong: Each answer is pulled to an absolute value, so badly scaled β matters even if pairs are ordered
    correctly.

    Args:
        beta: β (paper: 0.01).
    """
    chosen, rejected = (beta * ratio for ratio in _log_ratios(outputs, batch))
    values = -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)
    return _with_metrics(values, chosen, rejected, outputs, batch, beta)


@register("objective", level="pair", needs=("ref_logprobs",), vanishes=())
def apo_zero(outputs: Outputs, batch: Batch, *, beta: Positive = 0.1) -> Loss:
    """Anchored preference optimization, zero: raises chosen and lowers rejected answers, each from zero.

    ``values = (1 − σ(r_w)) + σ(r_l)`` with ``r = β log π(y)/π_ref(y)``: between 0 and 2, and 1 at the reference. Suits
    chosen answers that are better than model samples.

    D'Oosterlinck et al. (2024), "Anchored preference optimization and contrastive revisions" (arXiv 2408.06266),
    section 4. The constant only shifts the minimum to 0.

    What goes wrong: It raises chosen answers even if model samples are better. In that case, use ``apo_down``.

    Args:
        beta: β (paper: 0.1).
    """
    chosen, rejected = (beta * ratio for ratio in _log_ratios(outputs, batch))
    values = torch.sigmoid(-chosen) + torch.sigmoid(rejected)
    return _with_metrics(values, chosen, rejected, outputs, batch, beta)


@register("objective", level="pair", needs=("ref_logprobs",), vanishes=())
def apo_down(outputs: Outputs, batch: Batch, *, beta: Positive = 0.1) -> Loss:
    """Anchored preference optimization, down: lowers both answers, and rejected ones more.

    ``values = σ(r_w) + (1 − σ(r_w − r_l))`` with ``r = β log π(y)/π_ref(y)``: between 0 and 2, and 1 at the reference.
    Suits chosen answers that are worse than model samples.

    D'Oosterlinck et al. (2024), "Anchored preference optimization and contrastive revisions" (arXiv 2408.06266),
    section 4. The constant only shifts the minimum to 0.

    What goes wrong: It also lowers chosen answers. If they are good, other methods reach higher accuracy.

    Args:
        beta: β (paper: 0.1).
    """
    chosen, rejected = (beta * ratio for ratio in _log_ratios(outputs, batch))
    values = torch.sigmoid(chosen) + torch.sigmoid(rejected - chosen)
    return _with_metrics(values, chosen, rejected, outputs, batch, beta)


@register("objective", level="pair", needs=("ref_logprobs",), vanishes=())
def sppo(outputs: Outputs, batch: Batch, *, beta: Positive = 0.1) -> Loss:
    """Self-play preference optimization with hard labels: regress log-ratios on a positive or negative target.

    ``values = (z_w − 1/(2β))² + (z_l + 1/(2β))²`` with ``z = log π(y)/π_ref(y)``.

    Wu et al. (2024), "Self-play preference optimization for language model alignment" (arXiv 2405.00675), eq. 4.7, with
    η = 1/β and chosen answers winning with probability 1. Unlike ``ipo``, targets apply to single answers instead of
    their difference.

    What goes wrong: Squares grow with answer length, since z is a sum. Small β means large targets and huge first
    updates; lower the learning rate along with β.

    Args:
        beta: β, in 1 / nats (paper: 1e-3, which is η = 1e3).
    """
    chosen, rejected = _log_ratios(outputs, batch)
    target = 1.0 / (2.0 * beta)
    values = (chosen - target).square() + (rejected + target).square()
    return _with_metrics(values, beta * chosen, beta * rejected, outputs, batch, beta)


@register("objective", level="pair", needs=("ref_logprobs",), vanishes=())
def bco(outputs: Outputs, batch: Batch, *, beta: Positive = 0.1) -> Loss:
    """Binary classifier optimization over pairs: classify each answer as good or bad by its reward.

    ``values = −log σ(r_w) − log σ(−r_l)`` with ``r = β log π(y)/π_ref(y)``

    Jung et al. (2024), "Binary classifier optimization for large language model alignment" (arXiv 2404.04656), eq. 9.

    Departure: to balance the classifier, the paper shifts rewards by their running mean δ. Here δ = 0, as in the pair
    form in common trainers.

    What goes wrong: Without a shift, zero is absolute. If both answers of a pair are on the same side, likelihoods of
    chosen answers rise or fall together.

    Args:
        beta: β.
    """
    chosen, rejected = (beta * ratio for ratio in _log_ratios(outputs, batch))
    values = -logsigmoid(chosen) - logsigmoid(-rejected)
    return _with_metrics(values, chosen, rejected, outputs, batch, beta)


@register("objective", level="pair", needs=("ref_logprobs",), vanishes=())
def discopop(outputs: Outputs, batch: Batch, *, beta: Positive = 0.05, temperature: Positive = 0.05) -> Loss:
    """Discovered preference optimization: a blend of logistic and exponential losses, found by search.

    ``values = (1 − m) (−log σ(l)) + m e^(−l)`` with ``l = βΔ`` and ``m = σ(l / τ)``.

    Lu et al. (2024), "Discovering preference optimization algorithms with and for large language models"
    (arXiv 2406.08414), eq. 5 (log-ratio modulated loss). It is not convex: a local minimum exists below l = 0.

    Departure: in e^(−l), l is clamped to at least −20. There m is below e^(−20/τ), which is negligible for small τ.

    What goes wrong: For τ below (1 − log 2) / 3 = 0.10 the slope at l = 0 has the wrong sign. Pairs start there, and
    training moves them into the local minimum, where rejected answers are likelier. Long answers can jump over it, if
    their Δ changes by nats in one update; raise τ for short ones.

    Args:
        beta: β (paper: 0.05).
        temperature: τ (paper: 0.05).
    """
    chosen, rejected = _log_ratios(outputs, batch)
    logit = beta * (chosen - rejected)
    blend = torch.sigmoid(logit / temperature)
    exponential = torch.exp(-logit.clamp(min=-MAX_LOG_RATIO))
    values = -(1.0 - blend) * logsigmoid(logit) + blend * exponential
    return _with_metrics(values, beta * chosen, beta * rejected, outputs, batch, beta)


@register("objective", level="pair", needs=("ref_logprobs",), vanishes=())
def f_dpo(
    outputs: Outputs,
    batch: Batch,
    *,
    beta: Positive = 0.1,
    divergence: Literal["forward_kl", "jensen_shannon", "alpha"] = "jensen_shannon",
    alpha: Annotated[float, Range(gt=0, lt=1), if_option_is("divergence", "alpha")] = 0.5,
) -> Loss:
    """DPO derived from divergences other than reverse KL.

    ``values = −log σ(β f'(u_w) − β f'(u_l))`` with ``u = π(y)/π_ref(y)``. Up to a constant, with ``z = log u``: ``f' =
    −e^(−z)`` (forward KL), ``log 2 + log σ(z)`` (Jensen–Shannon), or ``(1 − e^(−αz)) / α`` (α-divergence, which
    interpolates between reverse KL at α → 0, equal to ``dpo``, and forward KL at α = 1).

    Wang et al. (2023), "Beyond reverse KL: generalizing direct preference optimization with diverse divergence
    constraints" (arXiv 2309.16240), table 1 and eq. 10.

    Reward metrics are β f'(u), shifted to 0 at the reference.

    Departure: exponents are clamped to ±20; beyond that, an answer contributes no gradient.

    What goes wrong: Under forward KL and Jensen–Shannon, f' flattens as answers become likelier, so chosen answers soon
    give no gradient. Forward KL explodes as answers become much less likely; lower the learning rate.

    Args:
        beta: β.
        divergence: choice of f.
        alpha: α, for the α-divergence.
    """
    log_ratios = _log_ratios(outputs, batch)
    chosen, rejected = (beta * _divergence_slope(ratio, divergence, alpha) for ratio in log_ratios)
    return _with_metrics(-logsigmoid(chosen - rejected), chosen, rejected, outputs, batch, beta)


def _divergence_slope(log_ratio: Tensor, divergence: str, alpha: float) -> Tensor:
    """Compute f'(u) from ``log u``, up to a constant that cancels within pairs."""
    if divergence == "jensen_shannon":
        return math.log(2.0) + logsigmoid(log_ratio)
    power = 1.0
    if divergence == "alpha":
        power = alpha
    exponent = (-power * log_ratio).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return -torch.expm1(exponent) / power


@register("objective", level="pair", needs=("ref_logprobs",), vanishes=())
def ld_dpo(
    outputs: Outputs, batch: Batch, *, beta: Positive = 0.1, alpha: Annotated[float, Range(ge=0, le=1)] = 0.5
) -> Loss:
    """Length-desensitized DPO: downweights tokens beyond the shorter answer's length.

    ``values = −log σ(βΔ')``, where Δ' is DPO's Δ with token log-ratios multiplied by α beyond the first ``min(|y_w|,
    |y_l|)`` tokens.

    Liu et al. (2024), "Length desensitization in direct preference optimization" (arXiv 2409.06411), eq. 9 and 10.
    With α = 1 this is ``dpo``.

    What goes wrong: With α = 0, the end of the longer answer is not trained, including its end token. The model may
    learn not to stop.

    Args:
        beta: β.
        alpha: α, weight for tokens beyond the common length (paper: 0.3 to 0.6).
    """
    mask = batch.mask
    lengths = mask.sum(dim=1)
    shorter = torch.minimum(lengths[0::2], lengths[1::2]).repeat_interleave(2)
    position = mask.cumsum(dim=1)
    weights = torch.full_like(outputs.logprobs, alpha).masked_fill(position <= shorter[:, None], 1.0)
    difference = weights * (outputs.logprobs - batch.field("ref_logprobs"))
    rewards = beta * nan_unless_finite(row_sum(difference, mask))
    chosen, rejected = rewards[0::2], rewards[1::2]
    return _with_metrics(-logsigmoid(chosen - rejected), chosen, rejected, outputs, batch, beta)


@register(
    "objective",
    level="pair",
    needs=("ref_logprobs",),
    vanishes=(),
    weights=("preference_weight", "quality_weight", "nll_weight"),
)
def mpo(
    outputs: Outputs,
    batch: Batch,
    *,
    beta: Annotated[Positive, unless_zero("preference_weight", "quality_weight")] = 0.1,
    preference_weight: NotNegative = 0.8,
    quality_weight: NotNegative = 0.2,
    nll_weight: NotNegative = 1.0,
) -> Loss:
    """Mixed preference optimization: a weighted sum of preference, quality and generation losses.

    ``values = w_p (−log σ(βΔ)) + w_q (−log σ(r_w) − log σ(−r_l)) − w_g/|y_w| · log π(y_w)``: ``dpo``, ``bco`` and
    likelihood of chosen answers.

    Wang et al. (2024), "Enhancing the reasoning ability of multimodal large language models via mixed preference
    optimization" (arXiv 2411.10442), eq. 1, with the paper's weights 0.8, 0.2 and 1.

    Departure: as in ``bco``, the quality loss does not shift rewards by δ.

    What goes wrong: Initially the likelihood term is largest, so gradients are mostly SFT on chosen answers.

    Args:
        beta: β.
        preference_weight: w_p.
        quality_weight: w_q.
        nll_weight: w_g.
    """
    preference = dpo(outputs, batch, beta=beta)
    quality = bco(outputs, batch, beta=beta)
    nll = -_row_means(outputs.logprobs, batch.mask)[0::2]
    values = preference_weight * preference.values + quality_weight * quality.values + nll_weight * nll
    return Loss(values, preference.metrics | {"chosen_nll": nll.detach()})


def _row_means(values: Tensor, mask: Tensor) -> Tensor:
    """Average each row over its trained tokens, ``[B]``; NaN for empty answers."""
    return row_sum(values, mask) / mask.sum(dim=1)


def _log_ratios(outputs: Outputs, batch: Batch, mean: bool = False) -> tuple[Tensor, Tensor]:
    """Compute ``log π(y)/π_ref(y)`` for chosen and rejected answers, ``[U]`` each, optionally as means per token."""
    difference = outputs.logprobs - batch.field("ref_logprobs")
    rows = nan_unless_finite((_row_means if mean else row_sum)(difference, batch.mask))
    return rows[0::2], rows[1::2]


def _per_nat(beta: float, batch: Batch, mean: bool) -> float | Tensor:
    """Convert one nat of an answer's log-probability to reward: β, or β / tokens, ``[B]``."""
    return beta / batch.mask.sum(dim=1) if mean else beta


def _with_metrics(
    values: Tensor,
    chosen: Tensor,
    rejected: Tensor,
    outputs: Outputs,
    batch: Batch,
    per_nat: float | Tensor,
    nll: Tensor | None = None,
) -> Loss:
    """Add the metrics common to all pair objectives; ``chosen`` and ``rejected`` are rewards, ``[U]``.

    ``per_nat``: reward per nat of log-probability, a scalar or ``[B]``. Ties are defined on log-probabilities,
    independent of β.
    """
    margin = (chosen - rejected).detach()
    logprobs = row_sum(outputs.logprobs.detach(), batch.mask)
    size = logprobs.abs() * per_nat
    metrics = {
        "margin": margin,
        "pair_accuracy": wins(margin, size[0::2] + size[1::2]),
        "chosen_reward": chosen.detach(),
        "rejected_reward": rejected.detach(),
        "chosen_logprob": logprobs[0::2],
        "rejected_logprob": logprobs[1::2],
    }
    if nll is not None:
        metrics["chosen_nll"] = nll.detach()
    return Loss(values, metrics)
