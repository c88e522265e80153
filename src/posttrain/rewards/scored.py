"""Tasks that bring their own scorer: as a reward with partial credit, and as a grader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.errors import UsageError
from posttrain.registry import register
from posttrain.rewards.grading import Submission, Verdict


@register("reward")
def task_score(extracted: str | None, meta: Mapping[str, Any]) -> float:
    """The task's own score of the extracted answer, usually in [0, 1]; 0 without an answer.

    ``r = meta["score"](extracted)``. For tasks whose questions have several right answers; the
    task ``reasoning_gym`` puts the scorer of its data set there.

    Source: reasoning-gym (Stojanovski et al. 2025), ``score_answer``.

    Raises:
        UsageError: the task brings no scorer.
    """
    score = meta.get("score")
    if score is None:
        raise UsageError("reward task_score: this task brings no scorer of its own; use the reward 'correct'")
    return 0.0 if extracted is None else float(score(extracted))


@register("grader")
def scored(submission: Submission) -> Verdict:
    """Right if the task's own scorer gives the extracted answer its full score, 1.

    ``meta["score"]`` is the scorer. The score is recorded as the fact ``task_score``.

    Source: reasoning-gym (Stojanovski et al. 2025), ``score_answer``.
    """
    score = submission.meta.get("score")
    if score is None:
        return Verdict("ungraded", facts={"task_score": 0.0})
    if submission.extracted is None:
        return Verdict("no_answer", facts={"task_score": 0.0})
    value = float(score(submission.extracted))
    return Verdict("right" if value >= 1.0 else "wrong", facts={"task_score": value})
