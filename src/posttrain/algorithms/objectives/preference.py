"""Preference objectives: one number per pair of a chosen and a rejected answer, or (``kto``) per answer alone.

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

from typing import Annotated

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from posttrain.acting import unless_zero
from posttrain.algorithms.objectives.primitives import MAX_LOGPROB, log1mexp, nan_unless_finite, row_sum, wins
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

    Rafailov et al. (2023), "Direct preference optimization", eq. 7. ε > 0: Mitchell (2023), "A note on DPO
    with noisy preferences and relationship to IPO": the minimum moves to a finite margin, σ(βΔ) = 1 − ε.
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


@register("objective", level="pair", needs=("ref_logprobs",), vanishes=())
def robust_dpo(outputs: Outputs, batch: Batch, *, beta: Positive = 0.1, flip_rate: FlipRate = 0.1) -> Loss:
    """Robust DPO: unbiased for DPO's loss on clean labels when a share ε of the labels is swapped.

    ``values = (−(1 − ε) log σ(βΔ) + ε log σ(−βΔ)) / (1 − 2ε)``

    Chowdhury et al. (2024), "Provably robust DPO", section 3.1. Where cDPO mixes both labels in, this
    takes the swapped one out; the value can be negative and has no lower bound (its slope tends to
    −ε / (1 − 2ε) per unit of βΔ).

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

    Azar et al. (2023), "A general theoretical paradigm to understand learning from human preferences",
    eq. 17, where β is called τ. The paper writes probabilities of whole answers, so sums are the default;
    its authors later told the writers of a widely used trainer to take means per token, so that the
    target does not depend on the length. That is ``length_normalized``.

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

    Zhao et al. (2023), "SLiC-HF", calibrate with ``max(0, δ − log π(y_w) + log π(y_l))`` plus a
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

    Meng et al. (2024), "SimPO", eq. 6. The reward is ``β/|y| · log π(y)``; ``margin`` does not subtract γ.

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

    Hong et al. (2024), "ORPO", eq. 6 and 7. Means per token, as in the paper: with sums 1 − p is 1 to
    the last digit. The reward is ``log odds(y)``, without a β; it is finite, for log(1 − p) takes log p to
    be at most −1e-6. Departure: the likelihood term is a mean over the answer, then over pairs, not
    over all tokens of a batch.

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

    Xu et al. (2024), "Contrastive preference optimization". The reward is ``β log π(y)``. The
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

    Pang et al. (2024), "Iterative reasoning preference optimization", eq. 1 (sums in Δ, a mean in the
    likelihood term).

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

    Ji et al. (2024), "Towards efficient exact optimization of language model alignment", section 3.2, eq. 16
    (EXO-pref with two answers).

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

    Chen et al. (2024), "Noise contrastive alignment of language models with explicit rewards",
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

    D'Oosterlinck et al. (2024), "Anchored preference optimization and contrastive revisions", section 4;
    the constant only moves the minimum to 0.

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

    D'Oosterlinck et al. (2024), "Anchored preference optimization and contrastive revisions", section 4;
    the constant only moves the minimum to 0.

    What goes wrong: It lowers chosen answers too. If they are good, accuracy falls behind other methods.

    Args:
        beta: β; 0.1 is the paper's.
    """
    chosen, rejected = (beta * ratio for ratio in _log_ratios(outputs, batch))
    values = torch.sigmoid(chosen) + torch.sigmoid(rejected - chosen)
    return _with_metrics(values, chosen, rejected, outputs, batch, beta)


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


def divide_rewards(means: dict[str, float]) -> dict[str, float]:
    """Add ``desirable_reward`` and ``undesirable_reward``: means over the rows of either kind, where there are any.

    Their difference is the ``margin``.
    """
    if "desirable" not in means:  # of a part of a mixture loss and accuracies alone are measured
        return means
    share, wrong = means["desirable"], means.pop("undesirable_reward_part")
    correct = means.pop("desirable_reward_part")
    means |= {"desirable_reward": correct / share} if share > 0.0 else {}
    means |= {"undesirable_reward": wrong / (1.0 - share)} if share < 1.0 else {}
    if 0.0 < share < 1.0:
        means["margin"] = means["desirable_reward"] - means["undesirable_reward"]
    return means


@register("objective", level="row", needs=("ref_logprobs", "labels", "kl_baseline"), vanishes=(), derive=divide_rewards)
def kto(
    outputs: Outputs,
    batch: Batch,
    *,
    beta: Positive = 0.1,
    desirable_weight: NotNegative = 1.0,
    undesirable_weight: NotNegative = 1.0,
) -> Loss:
    """Kahneman–Tversky optimization: gains and losses against a reference point, without pairs.

    ``values = λ_D (1 − σ(β(r − z₀)))`` for a desirable answer and ``λ_U (1 − σ(β(z₀ − r)))`` for an
    undesirable one, with ``r = log π(y)/π_ref(y)`` (a sum over its tokens) and z₀ an estimate of KL(π‖π_ref).

    Ethayarajh et al. (2024), "KTO: model alignment as prospect theoretic optimization", section 4.1. z₀ has
    no gradient; the batch field ``kl_baseline`` holds it, estimated from mismatched prompts and answers of
    the whole optimizer batch and at least 0. With unequal numbers of the two kinds of answers, keep λ_D
    times the number of desirable ones near λ_U times that of the others.

    What goes wrong: A rating that is read as a label makes it train on bad answers. State the threshold of
    desirable answers.

    Shapes: logprobs, ``ref_logprobs`` ``[B, T]``, labels (1 desirable, 0 not), ``kl_baseline`` ``[B]`` → values
    ``[B]``. A label between 0 and 1 is a share: both losses are mixed. A row with an impossible token
    (log-probability −inf) has the value NaN, which the loop refuses; nothing is clamped.

    Metrics: ``implicit_reward`` (βr), ``kl_baseline`` (z₀), ``answer_accuracy`` (βr on the label's side of βz₀; a
    tie counts one half), ``logprob``. Over all rows, so that micro-batches can be averaged: ``desirable``
    (the share of such rows), ``desirable_reward_part`` and ``undesirable_reward_part`` (βr on rows of
    that kind, 0 on the other; divided by the share of the kind they are its mean reward).

    Args:
        beta: β.
        desirable_weight: λ_D.
        undesirable_weight: λ_U.
    """
    labels = batch.field("labels").to(outputs.logprobs.dtype)
    baseline = batch.field("kl_baseline").to(outputs.logprobs.dtype)
    reward = beta * nan_unless_finite(row_sum(outputs.logprobs - batch.field("ref_logprobs"), batch.mask))
    gain = reward - beta * baseline
    values = desirable_weight * labels * torch.sigmoid(-gain)
    values = values + undesirable_weight * (1.0 - labels) * torch.sigmoid(gain)
    detached = reward.detach()
    logprob = row_sum(outputs.logprobs.detach(), batch.mask)
    metrics = {
        "implicit_reward": detached,
        "kl_baseline": baseline,
        "answer_accuracy": wins((2.0 * labels - 1.0) * gain, beta * logprob.abs()),
        "logprob": logprob,
        "desirable": labels,
        "desirable_reward_part": labels * detached,
        "undesirable_reward_part": (1.0 - labels) * detached,
    }
    return Loss(values, metrics)
