"""The reward for tasks that bring their own scorer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.errors import UsageError
from posttrain.registry import register


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
