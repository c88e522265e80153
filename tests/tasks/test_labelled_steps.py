"""Ratings to classes, steps joined to a solution, where the first error stands."""

from __future__ import annotations

import pytest

from posttrain.errors import UsageError
from posttrain.tasks.steps.labelled_steps import classes_of, first_error, rating_classes, step_classes, stepwise
from posttrain.types import Response


def test_classes() -> None:
    assert step_classes(2, None) == {0: 0, 1: 1}
    assert step_classes(2, "good") == rating_classes(2, None) == rating_classes(2, "good") == {-1: 0, 0: 1, 1: 1}
    assert step_classes(2, "bad") == rating_classes(2, "bad") == {-1: 0, 0: 0, 1: 1}
    assert step_classes(3, None) == rating_classes(3, None) == {-1: 0, 0: 1, 1: 2}
    for classes in (step_classes, rating_classes):
        with pytest.raises(UsageError, match="with num_classes 3 leave it out"):
            classes(3, "good")
    assert classes_of([1, None, 0, -1], rating_classes(3, None)) == [2, None, 1, 0]


@pytest.mark.parametrize(
    ("labels", "score"),
    [((1, 1), 1.0), ((1, 0), 0.0), ((None, 0), 0.0), ((None, 1), 1.0), ((None, None), 1.0), ((2, 1), 1.0)],
)
def test_a_solution_of_steps(labels: tuple[int | None, ...], score: float) -> None:
    assert stepwise(("a", "b"), labels, "\n") == Response("a\nb", score, ("a", "\nb"), labels)


def test_a_given_score() -> None:
    assert stepwise(("a", "b"), (1, 0), " ", score=1.0) == Response("a b", 1.0, ("a", " b"), (1, 0))
    assert stepwise(("a", "b"), (1, 1), " ", score=0.0).score == 0.0


def test_first_error() -> None:
    assert first_error([1, 0, None, -1, -1]) == 3
    assert first_error([-1]) == 0
    assert first_error([1, 0, None]) is None  # neutral, and not judged: no errors
    assert first_error([1, 0, 1], wrong=0) == 1
