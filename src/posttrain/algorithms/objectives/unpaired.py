"""Preference objectives for single answers labeled desirable or undesirable: one value per row."""

from __future__ import annotations

import torch

from posttrain.algorithms.objectives.primitives import nan_unless_finite, row_sum, wins
from posttrain.algorithms.objectives.surrogate import NotNegative, Positive
from posttrain.registry import register
from posttrain.types import Batch, Loss, Outputs


def divide_rewards(means: dict[str, float]) -> dict[str, float]:
    """Add ``desirable_reward`` and ``undesirable_reward``, means over rows of each kind if present.

    ``margin`` is their difference.
    """
    if "desirable" not in means:  # mixture parts only measure loss and accuracy
        return means
    share, wrong = means["desirable"], means.pop("undesirable_reward_part")
    correct = means.pop("desirable_reward_part")
    means |= {"desirable_reward": correct / share} if share > 0.0 else {}
    means |= {"undesirable_reward": wrong / (1.0 - share)} if share < 1.0 else {}
    if 0.0 < share < 1.0:
        means["margin"] = means["desirable_reward"] - means["undesirable_reward"]
    return means


@register(
    "objective",
    level="row",
    needs=("ref_logprobs", "labels", "kl_baseline"),
    vanishes=(),
    derive=divide_rewards,
    weights=("desirable_weight", "undesirable_weight"),
)
def kto(
    outputs: Outputs,
    batch: Batch,
    *,
    beta: Positive = 0.1,
    desirable_weight: NotNegative = 1.0,
    undesirable_weight: NotNegative = 1.0,
) -> Loss:
    """Kahneman–Tversky optimization: gains and losses relative to a reference point, without pairs.

    ``values = λ_D (1 − σ(β(r − z₀)))`` for a desirable answer and ``λ_U (1 − σ(β(z₀ − r)))`` for an
    undesirable one, where ``r = log π(y)/π_ref(y)`` (summed over tokens) and z₀ estimates KL(π‖π_ref).

    Ethayarajh et al. (2024), "KTO: model alignment as prospect theoretic optimization" (arXiv 2402.01306), section
    4.1. z₀ has no gradient. Batch field ``kl_baseline`` contains it: nonnegative, estimated from mismatched prompts and
    answers across the whole optimizer batch. If classes are unbalanced, keep λ_D × (number of desirable answers) near
    λ_U × (number of undesirable answers).

    What goes wrong: If ratings are read as labels, it trains on bad answers. Set the threshold for desirable answers.

    Shapes: logprobs, ``ref_logprobs`` ``[B, T]``, labels (1 desirable, 0 not), ``kl_baseline`` ``[B]`` → values
    ``[B]``. Labels between 0 and 1 mix both losses. Rows with an impossible token (log-probability −inf) have value
    NaN, which the loop rejects; nothing is clamped.

    Metrics: ``implicit_reward`` (βr), ``kl_baseline`` (z₀), ``answer_accuracy`` (βr is on the label's side of βz₀; ties
    count one half), ``logprob``. Averaged over all rows, so that micro-batches combine: ``desirable`` (fraction of
    desirable rows), ``desirable_reward_part`` and ``undesirable_reward_part`` (βr on rows of this kind, else 0;
    dividing by the kind's fraction gives its mean reward).

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
