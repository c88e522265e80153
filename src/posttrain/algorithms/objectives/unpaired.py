"""Preference objectives over single answers that are labelled as desirable or not: one number per row."""

from __future__ import annotations

import torch

from posttrain.algorithms.objectives.primitives import nan_unless_finite, row_sum, wins
from posttrain.algorithms.objectives.surrogate import NotNegative, Positive
from posttrain.registry import register
from posttrain.types import Batch, Loss, Outputs


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

    Ethayarajh et al. (2024), "KTO: model alignment as prospect theoretic optimization" (arXiv 2402.01306), section
    4.1. z₀ has no gradient; the batch field ``kl_baseline`` holds it, estimated from mismatched prompts and answers
    of the whole optimizer batch and at least 0. With unequal numbers of the two kinds of answers, keep λ_D times the
    number of desirable ones near λ_U times that of the others.

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
