"""Distillation: a student learns, token by token, from a teacher's distribution.

The trainer fills the teacher's batch fields. Shapes: B rows, T tokens, K candidates: K token
ids per position (``teacher_ids``) with the teacher's log-probabilities of them
(``teacher_candidate_logprobs``) and the student's (``outputs.candidate_logprobs``).
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

# A probability of exactly 0 counts as e^−100, so that a divergence is large but finite.
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
    """The divergence of the student's next-token distribution q from the teacher's p, at every token.

    * ``forward_kl``: ``KL(p‖q) = Σ_v p (log p − log q)``; covers all that the teacher does.
    * ``reverse_kl``: ``KL(q‖p) = Σ_v q (log q − log p)``; seeks what the teacher finds likely.
    * ``jsd``: ``β KL(p‖m) + (1 − β) KL(q‖m)`` with ``m = β p + (1 − β) q``.

    Agarwal et al. (2024), "On-policy distillation of language models" (GKD, arXiv 2306.13649), eq. 1 for the
    generalized Jensen-Shannon divergence. On-policy distillation: rollouts of the student; supervised distillation:
    given answers. The gradient is that of the divergence at the given prefix; none flows through the choice of the
    tokens.

    The sum runs over the K candidates and, with ``tail``, over one more outcome, "any other token",
    whose probability is what is left: ``1 − Σ_K``. Merging outcomes never raises these divergences
    (data processing), so this is a lower bound; it is exact from K = V − 1 on. Under sampling replay, both
    distributions are over the kept set, which takes the place of V.

    What goes wrong: With ``forward_kl`` the student must cover all that the teacher may say, and a small student
    spreads too thin. With ``reverse_kl`` it may settle on one way of the teacher. Watch ``entropy``.

    Shapes: candidate_logprobs, teacher_candidate_logprobs ``[B, T, K]`` → values ``[B, T]``.

    Args:
        divergence: which; the student is the second argument of the forward KL.
        jsd_weight: β, the share of the teacher in the mixture.
        tail: with it the candidates' probabilities stand as they are; without it both distributions are
            renormalized over the candidates, and what lies outside of them is not seen.
    """
    return _divergence(outputs, batch, batch.mask, divergence, jsd_weight, tail)


@register("objective", level="token", needs=("old_logprobs", "teacher_logprobs"), vanishes=())
def on_policy_distillation(
    outputs: Outputs, batch: Batch, *, clip: Annotated[NotNegative | None, IF_RATIO_MOVES] = None
) -> Loss:
    """Reverse KL to the teacher by policy gradient, from the teacher's log-probability of each sampled token.

    ``values = −ρ A`` with ``A = log p(a_t | s_t) − log π_old(a_t | s_t)`` and ``ρ = π / π_old``; p is the
    teacher. At π = π_old the expected gradient over the student's own tokens is that of
    ``KL(π‖p)`` at each prefix: the reward of a token is its own, with discount 0.

    Lu and Thinking Machines Lab (2025), "On-policy distillation"
    (https://thinkingmachines.ai/blog/on-policy-distillation/). ``distillation`` with ``reverse_kl`` has the same
    expected gradient with less variance, but needs the teacher's distribution.

    Departure: A and log ρ are clamped to ±20.

    What goes wrong: Teacher and student must share a tokenizer. A teacher that never saw the student's mistakes
    scores them badly.

    Args:
        clip: ε of PPO's clip of ρ; none as published, for one update per rollout batch.
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
    """Self-distillation policy optimization: the teacher is the model itself, shown feedback on its attempt.

    ``values = f · sg[min(π / π_old, C)] · D(π(· | x, y_<t), p_t)`` with ``p_t = sg[π_T(· | x, feedback, y_<t)]``
    on the model's own answer y; D as in ``distillation``, f = 1 for rows that have feedback, else 0.

    Hübotter et al. (2026), "Reinforcement learning via self-distillation" (arXiv 2601.20802), eq. 1: the KL of the
    student from the self-teacher (``reverse_kl``). What the paper leaves to the code is as in the code that its
    authors published: candidates with a tail; the ratio's cap of 2. Its general configuration has ``jsd`` with
    β = 0.5 and K = 100, the one for rich feedback ``reverse_kl`` with K = 20; its teacher is an exponential moving
    average of the policy (rate 0.05, 0.01 with rich feedback). Feedback is what the environment says, or an answer of
    the same group that was right.

    Departures: the candidates are those of ``teacher_ids`` (in the authors' code the student's own
    K likeliest); a row without feedback gives 0 and stays in the denominator of the aggregation (there
    it does not count).

    What goes wrong: A small model does not use the shown answer, and its own teacher is no better than itself.

    Shapes: as ``distillation``; has_feedback ``[B]``.

    Args:
        divergence, jsd_weight, tail: as in ``distillation``.
        ratio_cap: C, which matters from the second update on a rollout batch; none for no ratio.
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
    """Divergences ``[B, T]``, and how much probability the candidates have; all 0 outside of ``mask``.

    What lies outside is replaced before anything is computed: a row without feedback may have no teacher,
    and a NaN that is masked afterwards still has a gradient of NaN.
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
    values = torch.where(mask, values, torch.zeros_like(values))  # of equal constants, 0 up to rounding
    metrics = {
        "divergence": values.detach(),
        "student_mass": student.detach().exp().sum(dim=-1) * mask,
        "teacher_mass": teacher.exp().sum(dim=-1) * mask,
    }
    return Loss(values, metrics)


def _finite(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Log-probabilities with −inf replaced, and a constant outside of the mask; NaN stays NaN."""
    trained = torch.where(mask[..., None], logprobs, torch.zeros_like(logprobs))
    return trained.nan_to_num(nan=math.nan, neginf=LOG_ZERO)
