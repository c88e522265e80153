"""Preference objectives: one number per pair of a chosen and a rejected answer.

In pairs, rows alternate, chosen (even) then rejected (odd): logprobs and ``ref_logprobs`` ``[B, T]`` → values
``[B / 2]``, under ``aggregate: unit_mean``. In the equations y_w is the chosen answer, y_l the rejected
one, ``log π(y)`` the sum of its trained tokens' log-probabilities (prompt excluded, end token
included), and ``Δ = log π(y_w)/π_ref(y_w) − log π(y_l)/π_ref(y_l)``.

Metrics of every objective over pairs: ``chosen_reward``, ``rejected_reward`` (β times the log-ratio; reference-free
objectives define their own), ``margin`` (their difference), ``pair_accuracy`` (margin > 0; a tie, which is a
difference below a millionth of the log-probabilities, counts one half), ``chosen_logprob``,
``rejected_logprob`` (``log π(y)``, sums).

Nothing is clamped but ORPO's log(1 − p): no other objective takes the exponential of a log-ratio outside of a
sigmoid. A pair with an answer that the policy or the reference finds impossible (log-probability −inf)
has the value NaN, for every objective, and so has an empty answer where a mean is taken; the loop
refuses such an update.
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
    """Direct preference optimization; with label smoothing cDPO, with means per token DPO-normalized.

    ``values = −(1 − ε) log σ(βΔ) − ε log σ(−βΔ)``

    Rafailov et al. (2023), "Direct preference optimization" (arXiv 2305.18290), eq. 7. ε > 0: Mitchell (2023), "A
    note on DPO with noisy preferences and relationship to IPO": the minimum moves to a finite margin, σ(βΔ) = 1 − ε.
    Normalized: each log-ratio is divided by its own number of tokens; as in Tulu 3 (Lambert et al. 2024).

    What goes wrong: The log-probability of chosen answers may fall with that of rejected ones. Add a likelihood
    term (``rpo``) or lower the learning rate.

    Args:
        beta: β; with ``length_normalized`` about 2 to 5 is right, for a mean is as much smaller as the answer is long.
        label_smoothing: ε, the assumed share of pairs whose labels are swapped.
        length_normalized: means over tokens in place of sums.
    """
    chosen, rejected = _log_ratios(outputs, batch, length_normalized)
    logit = beta * (chosen - rejected)
    values = -(1.0 - label_smoothing) * logsigmoid(logit) - label_smoothing * logsigmoid(-logit)
    per_nat = _per_nat(beta, batch, length_normalized)
    return _with_metrics(values, beta * chosen, beta * rejected, outputs, batch, per_nat)


@register("objective", level="pair", needs=("ref_logprobs", "transport_shift"), vanishes=())
def aot(outputs: Outputs, batch: Batch, *, beta: Positive = 0.1, label_smoothing: FlipRate = 0.0) -> Loss:
    """Alignment via optimal transport: margins of the policy are compared with the reference's of equal rank.

    ``values = −(1 − ε) log σ(β(u − v)) − ε log σ(−β(u − v))``, with u the pair's ``log π(y_w) − log π(y_l)`` and v the
    margin of the reference that has the same rank among all pairs of the optimizer batch.

    Melnyk et al. (2024), "Distributional preference alignment of LLMs via optimal transport" (arXiv 2406.05882), the
    paired form. ``transport_shift`` ``[B]`` holds the pair's own margin of the reference minus v, from ranks under the
    weights before the update. Departure: ranks are of the whole optimizer batch, so that no split changes them.

    What goes wrong: With one pair a batch it is ``dpo``. Large batches are what it needs.

    Args:
        beta, label_smoothing: β and ε, as in ``dpo``.
    """
    chosen, rejected = _log_ratios(outputs, batch)
    logit = beta * (chosen - rejected + batch.field("transport_shift")[0::2])
    values = -(1.0 - label_smoothing) * logsigmoid(logit) - label_smoothing * logsigmoid(-logit)
    return _with_metrics(values, beta * chosen, beta * rejected, outputs, batch, beta)


@register("objective", level="pair", needs=("ref_logprobs",), vanishes=())
def robust_dpo(outputs: Outputs, batch: Batch, *, beta: Positive = 0.1, flip_rate: FlipRate = 0.1) -> Loss:
    """Robust DPO: unbiased for DPO's loss on clean labels when a share ε of the labels is swapped.

    ``values = (−(1 − ε) log σ(βΔ) + ε log σ(−βΔ)) / (1 − 2ε)``

    Chowdhury et al. (2024), "Provably robust DPO" (arXiv 2403.00409), section 3.1. Where cDPO mixes both labels in,
    this takes the swapped one out; the value can be negative and has no lower bound (its slope tends to −ε / (1 − 2ε)
    per unit of βΔ).

    What goes wrong: A flip rate near 0.5 divides by almost zero; the loss is then mostly noise.

    Args:
        beta: β.
        flip_rate: ε, the known share of swapped labels; 0.1 is the paper's.
    """
    chosen, rejected = _log_ratios(outputs, batch)
    logit = beta * (chosen - rejected)
    values = (-(1.0 - flip_rate) * logsigmoid(logit) + flip_rate * logsigmoid(-logit)) / (1.0 - 2.0 * flip_rate)
    return _with_metrics(values, beta * chosen, beta * rejected, outputs, batch, beta)


@register("objective", level="pair", needs=("ref_logprobs",), vanishes=())
def ipo(outputs: Outputs, batch: Batch, *, beta: Positive = 0.1, length_normalized: bool = False) -> Loss:
    """Identity preference optimization: regression of the log-ratio difference on a finite target.

    ``values = (Δ − 1/(2β))²``; the minimum lies at Δ = 1/(2β).

    Azar et al. (2023), "A general theoretical paradigm to understand learning from human preferences" (arXiv
    2310.12036), eq. 17, where β is called τ. The paper writes probabilities of whole answers, so sums are the
    default; its authors later told the writers of a widely used trainer to take means per token, so that the target
    does not depend on the length. That is ``length_normalized``.

    What goes wrong: β has another meaning than in DPO: the margin goes to 1 / (2β). The same value is not
    comparable.

    Args:
        beta: β, the strength of the regularization.
        length_normalized: means over tokens in place of sums; the target then is a difference per token.
    """
    chosen, rejected = _log_ratios(outputs, batch, length_normalized)
    values = (chosen - rejected - 1.0 / (2.0 * beta)).square()
    per_nat = _per_nat(beta, batch, length_normalized)
    return _with_metrics(values, beta * chosen, beta * rejected, outputs, batch, per_nat)


@register("objective", level="pair", needs=("ref_logprobs",), vanishes=())
def hinge(outputs: Outputs, batch: Batch, *, beta: Positive = 0.1, margin: Positive = 1.0) -> Loss:
    """Hinge loss on log-ratios: SLiC's loss with DPO's reward.

    ``values = max(0, δ − βΔ)``

    Zhao et al. (2023), "SLiC-HF" (arXiv 2305.10425), calibrate with ``max(0, δ − log π(y_w) + log π(y_l))`` plus a
    cross-entropy term that keeps the model near the supervised one. Departure: as in Liu et al. (2023),
    "Statistical rejection sampling improves preference optimization" (hinge-norm), the ratio to the
    reference does that, and there is no such term; hence the other name.

    What goes wrong: Once all pairs pass the margin the gradient is 0 and the loss stops.

    Args:
        beta: β (the second paper's γ).
        margin: δ; a pair beyond it has no gradient.
    """
    chosen, rejected = _log_ratios(outputs, batch)
    values = torch.relu(margin - beta * (chosen - rejected))
    return _with_metrics(values, beta * chosen, beta * rejected, outputs, batch, beta)


@register("objective", level="pair", needs=(), vanishes=())
def simpo(outputs: Outputs, batch: Batch, *, beta: Positive = 2.0, gamma: NotNegative = 1.0) -> Loss:
    """Simple preference optimization: no reference, means per token, a target margin.

    ``values = −log σ(β/|y_w| · log π(y_w) − β/|y_l| · log π(y_l) − γ)``

    Meng et al. (2024), "SimPO" (arXiv 2405.14734), eq. 6. The reward is ``β/|y| · log π(y)``; ``margin`` does not
    subtract γ.

    What goes wrong: There is no reference to hold the policy. Small changes of β and γ matter; watch ``kl_ref`` and
    held-out accuracy.

    Args:
        beta: β; the paper's are 2.0 to 2.5.
        gamma: γ, absolute as in the paper's equation (the authors' code takes the ratio γ/β). The default
            is half of the default β; change both together.
    """
    logprobs = nan_unless_finite(_row_means(outputs.logprobs, batch.mask))
    chosen, rejected = beta * logprobs[0::2], beta * logprobs[1::2]
    values = -logsigmoid(chosen - rejected - gamma)
    return _with_metrics(values, chosen, rejected, outputs, batch, _per_nat(beta, batch, True))


@register("objective", level="pair", needs=(), vanishes=())
def orpo(outputs: Outputs, batch: Batch, *, odds_weight: NotNegative = 0.1) -> Loss:
    """Odds-ratio preference optimization: likelihood of the chosen answer plus a log-odds-ratio term.

    ``values = −(1/|y_w|) log π(y_w) − λ log σ(log odds(y_w) − log odds(y_l))``, with
    ``odds(y) = p / (1 − p)`` and ``log p = (1/|y|) log π(y)``.

    Hong et al. (2024), "ORPO" (arXiv 2403.07691), eq. 6 and 7. Means per token, as in the paper: with sums 1 − p is 1
    to the last digit. The reward is ``log odds(y)``, without a β; it is finite, for log(1 − p) takes log p to be at
    most −1e-6. Departure: the likelihood term is a mean over the answer, then over pairs, not over all tokens of a
    batch.

    What goes wrong: With summed log-probabilities it explodes; means are used here. Its imitation term decides most
    of what happens on good chosen answers.

    Args:
        odds_weight: λ; the paper's are 0.1 to 0.25.
    """
    logprobs = nan_unless_finite(_row_means(outputs.logprobs, batch.mask))
    log_odds = logprobs - log1mexp(logprobs)
    chosen, rejected = log_odds[0::2], log_odds[1::2]
    nll = -logprobs[0::2]
    values = nll - odds_weight * logsigmoid(chosen - rejected)
    slope = -1.0 / torch.expm1(logprobs.detach().clamp(max=MAX_LOGPROB))  # of the log odds in log p
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
    """Contrastive preference optimization: DPO with a uniform reference, plus the chosen answer's likelihood.

    ``values = −log σ(β log π(y_w) − β log π(y_l)) − α/|y_w| · log π(y_w)``

    Xu et al. (2024), "Contrastive preference optimization" (arXiv 2401.08417). The reward is ``β log π(y)``. The
    paper writes the second term without the division; as a sum it outweighs the first by two orders of
    magnitude on long answers, so the mean is the default here.

    What goes wrong: The likelihood term outweighs the other if it is summed over long answers. Leave
    ``nll_length_normalized`` on.

    Args:
        beta: β.
        nll_weight: α; 1 is the paper's.
        nll_length_normalized: False for the sum, as printed in the paper.
    """
    logprobs = nan_unless_finite(row_sum(outputs.logprobs, batch.mask))
    chosen, rejected = beta * logprobs[0::2], beta * logprobs[1::2]
    nll = -(_row_means(outputs.logprobs, batch.mask) if nll_length_normalized else logprobs)[0::2]
    return _with_metrics(-logsigmoid(chosen - rejected) + nll_weight * nll, chosen, rejected, outputs, batch, beta, nll)


@register("objective", level="pair", needs=("ref_logprobs",), vanishes=())
def rpo(outputs: Outputs, batch: Batch, *, beta: Positive = 0.1, nll_weight: NotNegative = 1.0) -> Loss:
    """DPO plus the likelihood of the chosen answer, so that it does not become less likely.

    ``values = −log σ(βΔ) − α/|y_w| · log π(y_w)``

    Pang et al. (2024), "Iterative reasoning preference optimization" (arXiv 2404.19733), eq. 1 (sums in Δ, a mean in
    the likelihood term).

    What goes wrong: A large likelihood weight turns it into SFT on the chosen answers.

    Args:
        beta: β; 0.1 is the paper's.
        nll_weight: α; 1 is the paper's.
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
    """Efficient exact optimization on preferences: the KL that DPO takes, in the other direction.

    ``values = KL(p‖q) = σ(βΔ) log(σ(βΔ)/(1 − ε)) + σ(−βΔ) log(σ(−βΔ)/ε)``, with p = (σ(βΔ), σ(−βΔ)) the
    policy's distribution over the pair and q = (1 − ε, ε) the smoothed label. Zero at σ(βΔ) = 1 − ε; at
    most −log ε, with a gradient that vanishes for a pair that is far wrong.

    Ji et al. (2024), "Towards efficient exact optimization of language model alignment" (arXiv 2402.00856), section
    3.2, eq. 16 (EXO-pref with two answers).

    What goes wrong: Near the reference it equals DPO. Differences appear only after many updates.

    Args:
        beta: β (the paper's β_π).
        label_smoothing: ε; the KL to an unsmoothed label is infinite. The paper leaves the value open;
            1e-3 is common.
    """
    chosen, rejected = _log_ratios(outputs, batch)
    logit = beta * (chosen - rejected)
    smooth = torch.tensor(label_smoothing, dtype=logit.dtype, device=logit.device)
    values = logit.sigmoid() * (logsigmoid(logit) - torch.log1p(-smooth))
    values = values + (-logit).sigmoid() * (logsigmoid(-logit) - smooth.log())
    return _with_metrics(values, beta * chosen, beta * rejected, outputs, batch, beta)


@register("objective", level="pair", needs=("ref_logprobs",), vanishes=())
def nca(outputs: Outputs, batch: Batch, *, beta: Positive = 0.01) -> Loss:
    """Noise contrastive alignment, pair form: the absolute likelihood of each answer, not only their order.

    ``values = −log σ(r_w) − ½ log σ(−r_w) − ½ log σ(−r_l)`` with ``r = β log π(y)/π_ref(y)``; the minimum
    over r_w lies at log 2, so the chosen answer becomes more likely, by a finite ratio.

    Chen et al. (2024), "Noise contrastive alignment of language models with explicit rewards" (arXiv 2402.05369),
    section 4.1 (K = 2, hard labels).

    What goes wrong: It pulls single answers, so a badly scaled score of an answer matters, not just the order of
    the pair.

    Args:
        beta: β; 0.01 is the paper's.
    """
    chosen, rejected = (beta * ratio for ratio in _log_ratios(outputs, batch))
    values = -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)
    return _with_metrics(values, chosen, rejected, outputs, batch, beta)


@register("objective", level="pair", needs=("ref_logprobs",), vanishes=())
def apo_zero(outputs: Outputs, batch: Batch, *, beta: Positive = 0.1) -> Loss:
    """Anchored preference optimization, zero: the chosen answer up, the rejected one down, each from zero.

    ``values = (1 − σ(r_w)) + σ(r_l)`` with ``r = β log π(y)/π_ref(y)``; between 0 and 2, 1 at the reference.
    For chosen answers that are better than the model's own.

    D'Oosterlinck et al. (2024), "Anchored preference optimization and contrastive revisions" (arXiv 2408.06266),
    section 4; the constant only moves the minimum to 0.

    What goes wrong: If chosen answers are worse than the model's own, it raises them nevertheless. Use ``apo-down``
    then.

    Args:
        beta: β; 0.1 is the paper's.
    """
    chosen, rejected = (beta * ratio for ratio in _log_ratios(outputs, batch))
    values = torch.sigmoid(-chosen) + torch.sigmoid(rejected)
    return _with_metrics(values, chosen, rejected, outputs, batch, beta)


@register("objective", level="pair", needs=("ref_logprobs",), vanishes=())
def apo_down(outputs: Outputs, batch: Batch, *, beta: Positive = 0.1) -> Loss:
    """Anchored preference optimization, down: both answers less likely, the rejected one more so.

    ``values = σ(r_w) + (1 − σ(r_w − r_l))`` with ``r = β log π(y)/π_ref(y)``; between 0 and 2, 1 at the
    reference. For chosen answers that are worse than the model's own.

    D'Oosterlinck et al. (2024), "Anchored preference optimization and contrastive revisions" (arXiv 2408.06266),
    section 4; the constant only moves the minimum to 0.

    What goes wrong: It lowers chosen answers too. If they are good, accuracy falls behind other methods.

    Args:
        beta: β; 0.1 is the paper's.
    """
    chosen, rejected = (beta * ratio for ratio in _log_ratios(outputs, batch))
    values = torch.sigmoid(chosen) + torch.sigmoid(rejected - chosen)
    return _with_metrics(values, chosen, rejected, outputs, batch, beta)


@register("objective", level="pair", needs=("ref_logprobs",), vanishes=())
def sppo(outputs: Outputs, batch: Batch, *, beta: Positive = 0.1) -> Loss:
    """Self-play preference optimization with hard labels: each log-ratio goes to a target of its sign.

    ``values = (z_w − 1/(2β))² + (z_l + 1/(2β))²`` with ``z = log π(y)/π_ref(y)``.

    Wu et al. (2024), "Self-play preference optimization for language model alignment" (arXiv 2405.00675), eq. 4.7,
    where 1/β is η and the chosen answer wins with probability 1. Unlike ``ipo``, each answer has a target, not only
    their difference.

    What goes wrong: The squares grow with the length of an answer, since z is a sum. A small β makes the targets large
    and the first updates huge; lower the learning rate with β.

    Args:
        beta: β, in 1 / nats; the paper's is 1e-3 (η = 1e3).
    """
    chosen, rejected = _log_ratios(outputs, batch)
    target = 1.0 / (2.0 * beta)
    values = (chosen - target).square() + (rejected + target).square()
    return _with_metrics(values, beta * chosen, beta * rejected, outputs, batch, beta)


@register("objective", level="pair", needs=("ref_logprobs",), vanishes=())
def bco(outputs: Outputs, batch: Batch, *, beta: Positive = 0.1) -> Loss:
    """Binary classifier optimization over pairs: each answer is classified as good or bad by its reward.

    ``values = −log σ(r_w) − log σ(−r_l)`` with ``r = β log π(y)/π_ref(y)``

    Jung et al. (2024), "Binary classifier optimization for large language model alignment" (arXiv 2404.04656), eq. 9.

    Departure: the paper shifts both rewards by δ, a running mean of all rewards, so that the classifier is balanced;
    here δ = 0, as in the pair form that trainers ship.

    What goes wrong: Without the shift the reward has an absolute zero. Both answers of a pair may end on one side of
    it, and the likelihood of chosen answers then falls or rises as a whole.

    Args:
        beta: β.
    """
    chosen, rejected = (beta * ratio for ratio in _log_ratios(outputs, batch))
    values = -logsigmoid(chosen) - logsigmoid(-rejected)
    return _with_metrics(values, chosen, rejected, outputs, batch, beta)


@register("objective", level="pair", needs=("ref_logprobs",), vanishes=())
def discopop(outputs: Outputs, batch: Batch, *, beta: Positive = 0.05, temperature: Positive = 0.05) -> Loss:
    """Discovered preference optimization: a blend of the logistic and the exponential loss, found by search.

    ``values = (1 − m) (−log σ(l)) + m e^(−l)`` with ``l = βΔ`` and ``m = σ(l / τ)``.

    Lu et al. (2024), "Discovering preference optimization algorithms with and for large language models"
    (arXiv 2406.08414), eq. 5 (log-ratio modulated loss). The loss is not convex: it has a local minimum below l = 0.

    Departure: e^(−l) is taken at l of at least −20; m is 0 there to the last digit.

    What goes wrong: A pair that is far wrong can rest in the local minimum. Start from a model that orders most pairs
    rightly.

    Args:
        beta: β; 0.05 is the paper's.
        temperature: τ; 0.05 is the paper's.
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
    """DPO derived from another divergence to the reference than the reverse KL.

    ``values = −log σ(β f'(u_w) − β f'(u_l))`` with ``u = π(y)/π_ref(y)``. Up to a constant, with ``z = log u``:
    ``f' = −e^(−z)`` (forward KL), ``log 2 + log σ(z)`` (Jensen–Shannon), ``(1 − e^(−αz)) / α`` (α-divergence, between
    the reverse KL, which is ``dpo`` and the limit α → 0, and the forward KL, α = 1).

    Wang et al. (2023), "Beyond reverse KL: generalizing direct preference optimization with diverse divergence
    constraints" (arXiv 2309.16240), table 1 and eq. 10.

    The rewards in the metrics are β f'(u), shifted to 0 at the reference.

    Departure: exponents are clamped to ±20, beyond which a pair has no gradient from this answer.

    What goes wrong: For answers that became likelier, f' of the forward KL and of Jensen–Shannon flattens, so a chosen
    answer soon gives no gradient. For answers that became much less likely the forward KL explodes; lower the
    learning rate.

    Args:
        beta: β.
        divergence: which f.
        alpha: α of the α-divergence.
    """
    log_ratios = _log_ratios(outputs, batch)
    chosen, rejected = (beta * _divergence_slope(ratio, divergence, alpha) for ratio in log_ratios)
    return _with_metrics(-logsigmoid(chosen - rejected), chosen, rejected, outputs, batch, beta)


def _divergence_slope(log_ratio: Tensor, divergence: str, alpha: float) -> Tensor:
    """Return f'(u) at ``log u``, up to a constant that is the same for both answers of a pair."""
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
    """Length-desensitized DPO: what an answer has beyond the length of the other one counts less.

    ``values = −log σ(βΔ')``, where Δ' is DPO's Δ with every log-ratio beyond the first ``min(|y_w|, |y_l|)`` tokens of
    an answer multiplied by α.

    Liu et al. (2024), "Length desensitization in direct preference optimization" (arXiv 2409.06411), eq. 9 and 10.
    α = 1 is ``dpo``.

    What goes wrong: With α = 0 the end of the longer answer is not trained, its end token included. The model may
    learn to go on.

    Args:
        beta: β.
        alpha: α, the weight of the tokens beyond the common length; the paper's are 0.3 to 0.6.
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


@register("objective", level="pair", needs=("ref_logprobs",), vanishes=())
def mpo(
    outputs: Outputs,
    batch: Batch,
    *,
    beta: Positive = 0.1,
    preference_weight: NotNegative = 0.8,
    quality_weight: NotNegative = 0.2,
    nll_weight: NotNegative = 1.0,
) -> Loss:
    """Mixed preference optimization: a weighted sum of a preference, a quality and a generation loss.

    ``values = w_p (−log σ(βΔ)) + w_q (−log σ(r_w) − log σ(−r_l)) − w_g/|y_w| · log π(y_w)``: ``dpo``, ``bco`` and the
    likelihood of the chosen answer.

    Wang et al. (2024), "Enhancing the reasoning ability of multimodal large language models via mixed preference
    optimization" (arXiv 2411.10442), eq. 1; the weights 0.8, 0.2 and 1 are theirs.

    Departure: the quality loss has no shift δ of the rewards, as in ``bco``.

    What goes wrong: The likelihood term is the largest at the start. The gradient is then mostly SFT on chosen answers.

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
    """``[B]``: the mean over a row's trained tokens; NaN for an empty answer, which has none."""
    return row_sum(values, mask) / mask.sum(dim=1)


def _log_ratios(outputs: Outputs, batch: Batch, mean: bool = False) -> tuple[Tensor, Tensor]:
    """``[U]`` each: ``log π(y)/π_ref(y)`` of the chosen and of the rejected answers, or its mean per token."""
    difference = outputs.logprobs - batch.field("ref_logprobs")
    rows = nan_unless_finite((_row_means if mean else row_sum)(difference, batch.mask))
    return rows[0::2], rows[1::2]


def _per_nat(beta: float, batch: Batch, mean: bool) -> float | Tensor:
    """Return the reward of one nat of an answer's log-probability: β, or β over its tokens, ``[B]``."""
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
    """Return the loss with the metrics of every pair objective; ``chosen`` and ``rejected`` are rewards, ``[U]``.

    ``per_nat``: what one nat of an answer's log-probability adds to its reward, of all or of each ``[B]``. A tie is one
    in log-probabilities, whatever β makes of them.
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
