"""Tasks with a custom scorer: as a reward with partial credit, and as a grader.

Library scorers (``WorkerScorer``) run in killable processes, since a model may write anything. A user task's plain
function, ``meta["score"]``, is called directly.
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
    """The task's score for the extracted answer, usually in [0, 1]. 0 without an answer.

    ``r = meta["score"](extracted)``. For questions with multiple correct answers; ``reasoning_gym`` stores its data
    set's scorer there. If scoring fails or is aborted, the score is 0; the grader ``scored`` records which.

    Source: reasoning-gym (Stojanovski et al. 2025, arXiv 2505.24760), ``score_answer``.

    Raises:
        UsageError: the task has no scorer.
    """
    if any(one.get("score") is None for one in meta):
        raise UsageError("reward task_score: this task brings no scorer of its own; use the reward 'correct'")
    results = score_answers([(one["score"], answer) for one, answer in zip(meta, extracted, strict=True)])
    return [_score(result) for result in results]


@register("grader", batched=True)
def scored(submissions: Sequence[Submission]) -> list[Verdict]:
    """Correct if the task's scorer gives the extracted answer full score, 1.

    ``meta["score"]`` is the scorer. Its score is recorded as ``task_score``. A scorer that raises gives ``crash``,
    one that must be killed gives ``timeout``; both count as incorrect.

    Source: reasoning-gym (Stojanovski et al. 2025, arXiv 2505.24760), ``score_answer``.
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
    """Score answers in order; ``value`` holds the score as a float.

    Blank answers and missing scorers give None. Identical answers to the same question are scored once. Plain
    functions may raise anything.
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
