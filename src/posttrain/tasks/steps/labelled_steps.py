"""Solutions in steps with a class for each step, as process supervision needs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from posttrain.errors import UsageError
from posttrain.types import Response

NumClasses = Literal[2, 3]
Neutral = Literal["good", "bad"]


def step_classes(num_classes: int, neutral: str | None) -> dict[int, int]:
    """From a rating in the data (−1, 0, 1; or 0 and 1) to a class.

    Raises:
        UsageError: ``neutral`` with three classes.
    """
    if num_classes == 3:
        if neutral is not None:
            raise UsageError(
                "task.neutral says what a rating of 0 is where there are two classes; with num_classes 3 leave it out"
            )
        return {-1: 0, 0: 1, 1: 2}
    return {0: 0, 1: 1} if neutral is None else {-1: 0, 0: int(neutral == "good"), 1: 1}


def stepwise(
    steps: Sequence[str], labels: Sequence[int | None], separator: str = "\n", *, score: float | None = None
) -> Response:
    """A solution of these steps, with ``separator`` in front of every step but the first.

    A label of None is no label: nothing is learnt at that step. Without a ``score`` it is 1 where no label is the
    lowest class, and otherwise 0.
    """
    assert len(steps) == len(labels), "one label, or None, per step"
    texts = tuple((separator if index else "") + step for index, step in enumerate(steps))
    if score is None:
        score = float(all(label != 0 for label in labels if label is not None))
    return Response("".join(texts), score, texts, tuple(labels))


def first_error(ratings: Sequence[int | None], wrong: int = -1) -> int | None:
    """The 0-based index of the first step rated ``wrong``; None where no step is."""
    return next((index for index, rating in enumerate(ratings) if rating == wrong), None)
