"""Distillation: a student learns a teacher's token distributions.

The trainer fills the teacher's batch fields. Shapes: B rows, T tokens, K candidates per position: token ids
(``teacher_ids``) with log-probabilities of teacher (``teacher_candidate_logprobs``) and student
(``outputs.candidate_logprobs``).
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from torch import Tensor

from posttrain.acting.methods import IF_RATIO_MOVES, IF_RATIO_REACHES_CAP, if_option_is
from posttrain.algorithms.objectives.primitives import categorical_kl, log_ratio, with_tail
from posttrain.algorithms.objectives.surrogate import NotNegative, Positive, clipped_surrogate
from posttrain.registry import register
from posttrain.signatures import Range
from posttrain.types import Batch, Loss, Outputs

Divergence = Literal["forward_kl", "reverse_kl", "jsd"]
Inside = Annotated[float, Range(gt=0, lt=1)]
CANDIDATES = ("teacher_ids", "teacher_candidate_logprobs")

# Zero probabilities count as e^−100, which keeps divergences large but finite.
LOG_ZERO = -100.0


@register("objective", level="token", needs=CANDIDATES, vanishes=())
def distillation(
    outputs: Outputs,
    batch: Batch,
    *,
    divergence: Divergence = "reverse_kl",
    jsd_weight: Annotated[Inside, if_option_is("divergence", "jsd")] = 0.5,
    tail: bool = True,
) -> Loss:
    """Divergence between next-token distributions of student (q) and teacher (p), per token.

    * ``forward_kl``: ``KL(p‖q) = Σ_v p (log p − log q)``; mode-covering.
    * ``reverse_kl``: ``KL(q‖p) = Σ_v q (log q − log p)``; mode-seeking.
    * ``jsd``: ``β KL(p‖m) + (1 − β) KL(q‖m)`` with ``m = β p + (1 − β) q``.

    Agarwal et al. (2024), "On-policy distillation of language models" (GKD, arXiv 2306.13649), eq. 1 for the
    generalized Jensen-Shannon divergence. On-policy distillation uses student rollouts, supervised distillation uses
    given answers. Gradients hold prefixes fixed; none flows through token sampling.

    Sums run over K candidates and, with ``tail``, one extra outcome, "any other token", with the remaining probability
    ``1 − Σ_K``. Merging outcomes never increases these divergences (data processing inequality), so this is a lower
    bound, and exact for K ≥ V − 1. Under sampling replay, both distributions cover the kept set instead of V.

    What goes wrong: Under ``forward_kl``, small students spread too thin, since they must cover every teacher mode.
    Under ``reverse_kl``, they may collapse to a single mode. Watch ``entropy``.

    Shapes: candidate_logprobs, teacher_candidate_logprobs ``[B, T, K]`` → values ``[B, T]``.

    Args:
        divergence: the student is the second argument of the forward KL.
        jsd_weight: β, teacher weight in the mixture.
        tail: keep candidate probabilities unchanged and add an outcome for all other tokens. Otherwise both
            distributions are renormalized over the candidates, ignoring other tokens.
    """
    return _divergence(outputs, batch, batch.mask, divergence, jsd_weight, tail)


@register("objective", level="token", needs=("old_logprobs", "teacher_logprobs"), vanishes=())
def on_policy_distillation(
    outputs: Outputs, batch: Batch, *, clip: Annotated[NotNegative | None, IF_RATIO_MOVES] = None
) -> Loss:
    """Policy gradient on reverse KL, using the teacher's log-probability of each sampled token.

    ``values = −ρ A`` with ``A = log p(a_t | s_t) − log π_old(a_t | s_t)`` and ``ρ = π / π_old`` for teacher p. At π =
    π_old, the expected gradient over student samples equals the gradient of ``KL(π‖p)`` at each prefix: tokens are
    rewarded individually, with discount 0.

    Lu and Thinking Machines Lab (2025), "On-policy distillation"
    (https://thinkingmachines.ai/blog/on-policy-distillation/). ``distillation`` with ``reverse_kl`` has the same
    expected gradient at lower variance, but needs the teacher's distribution.

    Departure: A and log ρ are clamped to ±20.

    What goes wrong: Teacher and student must share a tokenizer. Teachers score unfamiliar student mistakes unreliably.

    Args:
        clip: ε for PPO's clipping of ρ; null as published, for one update per rollout batch.
    """
    old = batch.field("old_logprobs")
    advantages = log_ratio(batch.field("teacher_logprobs"), old, batch.mask)
    ratio = log_ratio(outputs.logprobs, old, batch.mask).exp()
    if clip is None:
        loss = Loss(-ratio * advantages, {"ratio": ratio.detach()})
    else:
        loss = clipped_surrogate(ratio, advantages, clip, clip)
    return Loss(loss.values, loss.metrics | {"kl_teacher": -advantages})


@register(
    "objective",
    level="token",
    needs=(*CANDIDATES, "has_feedback"),
    optional_needs={"ratio_cap": "old_logprobs"},
    vanishes=("has_feedback",),
)
def sdpo(
    outputs: Outputs,
    batch: Batch,
    *,
    divergence: Divergence = "reverse_kl",
    jsd_weight: Annotated[Inside, if_option_is("divergence", "jsd")] = 0.5,
    tail: bool = True,
    ratio_cap: Annotated[Positive | None, IF_RATIO_REACHES_CAP] = 2.0,
) -> Loss:
    """Self-distillation policy optimization: the model, shown feedback on its attempt, is its own teacher.

    ``values = f · sg[min(π / π_old, C)] · D(π(· | x, y_<t), p_t)`` with ``p_t = sg[π_T(· | x, feedback, y_<t)]``
    for model answer y; D as in ``distillation``, f = 1 for rows with feedback, else 0.

    Hübotter et al. (2026), "Reinforcement learning via self-distillation" (arXiv 2601.20802), eq. 1: KL of student from
    self-teacher (``reverse_kl``). Details missing in the paper follow the authors' code: candidates with a tail, and
    ratios capped at 2. Its general configuration uses ``jsd`` with β = 0.5 and K = 100, and for rich feedback
    ``reverse_kl`` with K = 20. Its teacher is an exponential moving average of the policy (rate 0.05, or 0.01 with rich
    feedback). Feedback comes from the environment, or is a correct answer from the same group.

    Departures: candidates are ``teacher_ids`` (authors' code: the student's top K). Rows without feedback contribute 0
    but count in the aggregation's denominator (authors' code: they do not count).

    What goes wrong: Small models ignore the shown answer, so their self-teacher is no better.

    Shapes: as in ``distillation``; has_feedback ``[B]``.

    Args:
        divergence, jsd_weight, tail: as in ``distillation``.
        ratio_cap: C, which acts from the second update per rollout batch; null drops the ratio.
    """
    has_feedback = (batch.field("has_feedback") > 0)[:, None].expand_as(batch.mask)
    loss = _divergence(outputs, batch, batch.mask & has_feedback, divergence, jsd_weight, tail)
    metrics = loss.metrics | {"feedback_share": has_feedback.to(loss.values.dtype)}
    if ratio_cap is None:
        return Loss(loss.values, metrics)
    ratio = log_ratio(outputs.logprobs.detach(), batch.field("old_logprobs"), batch.mask).exp()
    return Loss(loss.values * ratio.clamp(max=ratio_cap), metrics | {"ratio": ratio})


def _divergence(
    outputs: Outputs, batch: Batch, mask: Tensor, divergence: Divergence, jsd_weight: float, tail: bool
) -> Loss:
    """Compute divergences ``[B, T]`` and total candidate probabilities, all 0 outside ``mask``.

    Inputs outside the mask are replaced first: rows without feedback may lack a teacher, and masking NaN afterwards
    would still give NaN gradients.
    """
    assert outputs.candidate_logprobs is not None, "the candidates' log-probabilities were not asked for"
    student = _finite(outputs.candidate_logprobs, mask)
    teacher = _finite(batch.field("teacher_candidate_logprobs").detach(), mask).to(student.dtype)
    q, p = (with_tail(x) if tail else x.log_softmax(dim=-1) for x in (student, teacher))
    if divergence == "forward_kl":
        values = categorical_kl(p, q)
    elif divergence == "reverse_kl":
        values = categorical_kl(q, p)
    else:
        mixture = torch.logaddexp(p + math.log(jsd_weight), q + math.log(1.0 - jsd_weight))
        values = jsd_weight * categorical_kl(p, mixture) + (1.0 - jsd_weight) * categorical_kl(q, mixture)
    values = torch.where(mask, values, torch.zeros_like(values))  # equal constants give 0 up to rounding
    metrics = {
        "divergence": values.detach(),
        "student_mass": student.detach().exp().sum(dim=-1) * mask,
        "teacher_mass": teacher.exp().sum(dim=-1) * mask,
    }
    return Loss(values, metrics)


def _finite(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Replace −inf, and use a constant outside the mask; NaN is kept."""
    trained = torch.where(mask[..., None], logprobs, torch.zeros_like(logprobs))
    return trained.nan_to_num(nan=math.nan, neginf=LOG_ZERO)
