"""Tasks that bring their own scorer: as a reward with partial credit, and as a grader.

A scorer of a library (``WorkerScorer``) runs in processes that can be killed, since a model may write anything. A plain
function, ``meta["score"]`` of a user's own task, is called as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.errors import UsageError
from posttrain.graders.grading import Outcome, Submission, Verdict, is_blank
from posttrain.graders.sandbox.workers import Limits, WorkerResult, count_cpus, shared_pool
from posttrain.registry import register

MAX_WORKERS = 4


@dataclass(frozen=True, slots=True)
class WorkerScorer:
    """A scorer in a worker process: ``target``, a ``module:function``, scores ``[subject, answer]``."""

    target: str
    subject: Any
    limits: Limits


GoldScorer = WorkerScorer | Callable[[str], float]


@register("reward", batched=True)
def task_score(extracted: Sequence[str | None], meta: Sequence[Mapping[str, Any]]) -> list[float]:
    """The task's own score of the extracted answer, usually in [0, 1]; 0 without an answer.

    ``r = meta["score"](extracted)``. For tasks whose questions have several right answers; the
    task ``reasoning_gym`` puts the scorer of its data set there. A scorer that raises or has to be stopped gives 0;
    the grader ``scored`` records which of both.

    Source: reasoning-gym (Stojanovski et al. 2025), ``score_answer``.

    Raises:
        UsageError: the task brings no scorer.
    """
    if any(one.get("score") is None for one in meta):
        raise UsageError("reward task_score: this task brings no scorer of its own; use the reward 'correct'")
    results = score_answers([(one["score"], answer) for one, answer in zip(meta, extracted, strict=True)])
    return [_score(result) for result in results]


@register("grader", batched=True)
def scored(submissions: Sequence[Submission]) -> list[Verdict]:
    """Right if the task's own scorer gives the extracted answer its full score, 1.

    ``meta["score"]`` is the scorer. The score is recorded as the fact ``task_score``. A scorer that raises is a
    ``crash``, one that has to be stopped a ``timeout``; both count as not right.

    Source: reasoning-gym (Stojanovski et al. 2025), ``score_answer``.
    """
    results = score_answers([(one.meta.get("score"), one.extracted) for one in submissions])
    verdicts = []
    for one, result in zip(submissions, results, strict=True):
        if one.meta.get("score") is None:
            outcome: Outcome = "ungraded"
        else:
            outcome = "no_answer"
        if result is not None:
            if result.kind != "value":
                outcome = result.kind
            elif result.value >= 1.0:
                outcome = "right"
            else:
                outcome = "wrong"
        verdicts.append(Verdict(outcome, info={"task_score": _score(result)}))
    return verdicts


def _score(result: WorkerResult | None) -> float:
    if result is not None and result.kind == "value":
        return result.value
    return 0.0


def score_answers(to_score: Sequence[tuple[GoldScorer | None, str | None]]) -> list[WorkerResult | None]:
    """The result of scoring each answer, in order: its ``value`` is the score, a float.

    None of a blank answer, and without a scorer. Equal answers to the same question are scored once. A plain function
    may raise what it likes.
    """
    outcomes: list[WorkerResult | None] = [None] * len(to_score)
    pooled: dict[tuple[str, Limits], dict[tuple[int, str], list[int]]] = {}
    for place, (scorer, answer) in enumerate(to_score):
        if scorer is None or answer is None or is_blank(answer):
            continue
        if isinstance(scorer, WorkerScorer):
            places = pooled.setdefault((scorer.target, scorer.limits), {})
            places.setdefault((id(scorer.subject), answer), []).append(place)
        else:
            outcomes[place] = WorkerResult("value", value=float(scorer(answer)))
    for (target, limits), places in pooled.items():
        pool = shared_pool(target, min(count_cpus(), MAX_WORKERS), limits)
        scorers = [to_score[own[0]][0] for own in places.values()]
        items = [[one.subject, answer] for one, (_, answer) in zip(scorers, places, strict=True)]  # type: ignore[union-attr]
        for own, result in zip(places.values(), pool.run(items), strict=True):
            for place in own:
                outcomes[place] = result
    return outcomes
