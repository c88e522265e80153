"""Reward models: head scores per answer, token or step.

All read ``outputs.scores`` (``[B, T]``, or ``[B, T, C]`` for C classes), the head's output *at* a token, which depends
on this token and all earlier ones.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from posttrain.algorithms.objectives.primitives import nan_unless_finite, row_last, wins
from posttrain.errors import UsageError
from posttrain.registry import register
from posttrain.signatures import Range
from posttrain.types import Batch, Loss, Outputs


@register(
    "objective",
    level="pair",
    needs=(),
    vanishes=(),
    head="score",
    scores="preference",
    optional_needs={"margin": "margins"},
)
def bradley_terry(
    outputs: Outputs, batch: Batch, *, margin: bool = False, centering: Annotated[float, Range(ge=0)] = 0.0
) -> Loss:
    """Pairwise reward model: probability that the chosen answer beats the rejected one.

    ``values = −log σ(r_w − r_l − m) + c (r_w + r_l)²``, where r is the score at an answer's last trained token.

    Bradley and Terry (1952); as reward-model loss: Ouyang et al. (2022), "Training language
    models to follow instructions with human feedback" (arXiv 2203.02155), eq. 1. m: Touvron et al. (2023), "Llama 2"
    (arXiv 2307.09288), eq. 2, a margin that grows with the rated difference. c: Eisenstein et al. (2023), "Helping or
    herding?", eq. 2. Pairs determine only differences; this term pulls their mean to 0. A common value is 0.01.

    What goes wrong: Training accuracy rises while held-out accuracy does not. Stop at the best checkpoint.

    Shapes: scores ``[B, T]``, margins ``[B]`` (equal in both rows of a pair) → values ``[B / 2]``. Infinite scores, and
    answers without trained tokens, give NaN, which the loop rejects.

    Metrics: ``margin`` (r_w − r_l), ``pair_accuracy`` (margin > 0, independent of m; ties count one half),
    ``chosen_score``, ``rejected_score``.

    Args:
        margin: subtract batch field ``margins``.
        centering: c.
    """
    scores = nan_unless_finite(row_last(_scores(outputs, 2), batch.mask))
    chosen, rejected = scores[0::2], scores[1::2]
    difference = chosen - rejected
    required = batch.field("margins")[0::2] if margin else torch.zeros_like(difference)
    values = -logsigmoid(difference - required)
    if centering != 0.0:
        values = values + centering * (chosen + rejected).square()
    metrics = {
        "margin": difference.detach(),
        "pair_accuracy": wins(difference),
        "chosen_score": chosen.detach(),
        "rejected_score": rejected.detach(),
    }
    return Loss(values, metrics)


def accuracy_at_the_end(means: dict[str, float]) -> dict[str, float]:
    """Add ``answer_accuracy``, the accuracy of scores at last tokens."""
    correct, last = means.pop("final_token_right"), means.pop("final_token")
    return means | {"answer_accuracy": correct / last}


@register(
    "objective",
    level="token",
    needs=("labels",),
    vanishes=(),
    head="score",
    scores="outcome",
    derive=accuracy_at_the_end,
)
def outcome(outputs: Outputs, batch: Batch, *, positions: Literal["all", "last"] = "all") -> Loss:
    """Outcome reward model: per token, the probability that the answer will be correct.

    ``values = −z log σ(s_t) − (1 − z) log σ(−s_t)``, where z labels the whole answer.

    Cobbe et al. (2021), "Training verifiers to solve math word problems" (arXiv 2110.14168), section 4: a verifier that
    scores after every token. Departures: binary cross-entropy on scores of a linear head, without an auxiliary
    language-modeling loss. Answers are ranked by the score at their last token.

    What goes wrong: If few answers are correct, scores stay near the base rate. Balance the rows.

    Shapes: scores ``[B, T]``, labels ``[B]`` (1 correct, 0 wrong; soft labels in between) → values ``[B, T]``.

    Metrics: ``outcome_accuracy`` (the score's sign agrees with the label, over all trained tokens; 0 counts one half),
    ``final_token`` (1 at an answer's last token, else 0) and ``final_token_right`` (1 if that token's score also
    agrees). Dividing the mean of ``final_token_right`` by the mean of ``final_token`` gives the accuracy of final
    scores.

    Args:
        positions: ``all`` tokens, or only the ``last`` one. The last value is then scaled by |y| and others are 0, so
            that ``aggregate: sequence_mean`` averages over answers; ``token_mean`` would weight long answers more.
    """
    scores = _zero_outside(_scores(outputs, 2), batch.mask)
    labels = batch.field("labels").to(scores.dtype)[:, None].expand_as(scores)
    values = binary_cross_entropy_with_logits(scores, labels, reduction="none")
    later = batch.mask.flip(1).cumsum(dim=1).flip(1)  # trained tokens from this position on
    final = (batch.mask & (later == 1)).to(scores.dtype)
    correct = wins(scores * (2.0 * labels - 1.0))
    if positions == "last":
        values = values * final * batch.mask.sum(dim=1, keepdim=True)
    metrics = {"outcome_accuracy": correct, "final_token": final, "final_token_right": final * correct}
    return Loss(values, metrics)


@register(
    "objective",
    level="token",
    needs=("step_labels",),
    vanishes=(),
    head="score",
    scores="process",
    head_outputs="num_classes",
)
def process(outputs: Outputs, batch: Batch, *, num_classes: Literal[2, 3] = 2) -> Loss:
    """Process reward model: scores each step of a solution at its last token.

    Two classes: ``values = −z log σ(s) − (1 − z) log σ(−s)``, z = 1 for a good step. Three:
    ``values = −log softmax(s)[z]``, z = 0 negative, 1 neutral, 2 positive.

    Lightman et al. (2023), "Let's verify step by step" (arXiv 2305.20050, PRM800K; three classes). Two classes from
    automatic labels: Wang et al. (2023), "Math-Shepherd" (arXiv 2312.08935). Departure: a separate head instead of
    log-probabilities of label tokens.

    What goes wrong: Steps after a mistake are labeled wrong, so models may learn a step's position instead of its
    content.

    Shapes: the mask is True only at step ends; scores ``[B, T]`` for two classes, ``[B, T, 3]`` for
    three; ``step_labels`` ``[B, T]`` → values ``[B, T]``. With two classes, labels between 0 and 1 are soft labels
    (Math-Shepherd's soft estimation).

    Metrics: ``step_accuracy`` (two classes: the score's sign agrees with the label's side of 1/2, ties count one half;
    three classes: the most probable class is the label), ``positive_share`` (fraction of steps whose label is
    the highest class, or above 1/2 with two classes: the accuracy of always predicting "good").

    Args:
        num_classes: 2 or 3.

    Raises:
        UsageError: invalid label.
    """
    mask = batch.mask
    labels = _zero_outside(batch.field("step_labels"), mask)
    _refuse_wrong_labels(labels, num_classes)
    if num_classes == 2:
        scores = _zero_outside(_scores(outputs, 2), mask)
        labels = labels.to(scores.dtype)
        values = binary_cross_entropy_with_logits(scores, labels, reduction="none")
        correct = wins(scores * (2.0 * labels - 1.0))
    else:
        scores = _zero_outside(_scores(outputs, 3), mask[:, :, None])
        assert scores.shape[2] == num_classes, f"{scores.shape[2]} head outputs for {num_classes} classes"
        chosen = labels.long()[:, :, None]
        values = -scores.log_softmax(dim=2).gather(2, chosen).squeeze(2)
        correct = (scores.detach().argmax(dim=2) == chosen.squeeze(2)).to(scores.dtype)
    positive = (labels == num_classes - 1).to(values.dtype)
    if num_classes == 2:
        positive = wins(2.0 * labels - 1.0)
    return Loss(values, {"step_accuracy": correct, "positive_share": positive})


def _scores(outputs: Outputs, num_dimensions: int) -> Tensor:
    assert outputs.scores is not None, "the forward pass gives no scores; the objective declares its head"
    assert outputs.scores.ndim == num_dimensions, f"scores of shape {tuple(outputs.scores.shape)}"
    return outputs.scores


def _zero_outside(values: Tensor, mask: Tensor) -> Tensor:
    """Replace values outside the mask with 0 (even NaN), without gradients there."""
    return torch.where(mask, values, torch.zeros_like(values))


def _refuse_wrong_labels(labels: Tensor, num_classes: int) -> None:
    """Reject labels outside the classes; synchronizes the device once."""
    known = (labels >= 0) & (labels <= num_classes - 1)
    if num_classes > 2:
        known &= labels == labels.round()
    if not bool(known.all()):
        wrong = sorted({float(x) for x in labels[~known].tolist()})[:5]
        raise UsageError(
            f"objective process: step_labels hold {wrong}; with num_classes: {num_classes} they are "
            f"{'between 0 and 1' if num_classes == 2 else '0 (negative), 1 (neutral) and 2 (positive)'}"
        )
