"""Ranking by scores: hand-worked numbers, identities, and brute force over every subset."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Sequence

import pytest

from posttrain.evaluation.statistics import area_under_curve, best_of_n, first_error, pair_wins, score_first_errors


def rough_scores(rng: random.Random, n: int) -> list[float]:
    """Scores of which many are tied."""
    return [float(rng.randint(0, 4)) for _ in range(n)]


# --- pairs ---


def test_pairs_by_hand() -> None:
    assert pair_wins([2.0, 1.0, 0.5, -3.0], [1.0, 2.0, 0.5, -math.inf]) == [1.0, 0.0, 0.5, 1.0]


# --- area under the curve ---


def test_the_area_by_hand() -> None:
    assert area_under_curve([0.9, 0.4], [0.5, 0.1]) == 0.75
    assert area_under_curve([0.5], [0.5, 0.5, 0.1]) == pytest.approx(2 / 3)
    assert area_under_curve([1.0], [0.0]) == 1.0
    with pytest.raises(ValueError, match="positive and negative"):
        area_under_curve([], [0.0])


def test_the_area_is_the_pair_accuracy_over_all_pairs() -> None:
    rng = random.Random(1)
    for _ in range(30):
        correct, wrong = rough_scores(rng, rng.randint(1, 9)), rough_scores(rng, rng.randint(1, 9))
        pairs = list(itertools.product(correct, wrong))
        assert area_under_curve(correct, wrong) == statistics.fmean(pair_wins(*zip(*pairs, strict=True)))
        assert area_under_curve(correct, wrong) + area_under_curve(wrong, correct) == pytest.approx(1.0, abs=1e-15)
        assert area_under_curve(correct, correct) == 0.5


# --- best of n ---


def brute_best(scores: Sequence[float], correct: Sequence[float], k: int) -> float:
    """The mean over every subset of k, in each of which one of the best is drawn."""
    gained = []
    for subset in itertools.combinations(range(len(scores)), k):
        top = max(scores[i] for i in subset)
        gained.append(statistics.fmean(correct[i] for i in subset if scores[i] == top))
    return statistics.fmean(gained)


def test_best_of_n_by_hand() -> None:
    scores, correct = [3.0, 2.0, 1.0], [0.0, 1.0, 1.0]
    assert best_of_n(scores, correct, 1) == pytest.approx(2 / 3)
    assert best_of_n(scores, correct, 2) == pytest.approx(1 / 3)  # only the pair without the best one is right
    assert best_of_n(scores, correct, 3) == 0.0
    assert best_of_n([1.0, 1.0, 0.0], [1.0, 0.0, 1.0], 3) == 0.5
    assert best_of_n([-math.inf, -math.inf, 0.0], [1.0, 1.0, 0.0], 2) == pytest.approx(1 / 3)
    assert best_of_n([-math.inf, -math.inf], [1.0, 0.0], 2) == 0.5


def test_best_of_n_equals_the_mean_over_all_subsets() -> None:
    rng = random.Random(2)
    for _ in range(40):
        n = rng.randint(1, 8)
        scores, correct = rough_scores(rng, n), [float(rng.random() < 0.4) for _ in range(n)]
        for k in range(1, n + 1):
            assert best_of_n(scores, correct, k) == pytest.approx(brute_best(scores, correct, k), abs=1e-12)


def test_best_of_many_neither_overflows_nor_depends_on_the_order() -> None:
    rng = random.Random(3)
    scores, correct = rough_scores(rng, 2000), [float(rng.random() < 0.4) for _ in range(2000)]
    order = rng.sample(range(2000), 2000)
    found = best_of_n(scores, correct, 1000)
    top = [r for s, r in zip(scores, correct, strict=True) if s == 4.0]
    assert found == pytest.approx(statistics.fmean(top))  # some top answer is in every half
    assert best_of_n([scores[i] for i in order], [correct[i] for i in order], 1000) == pytest.approx(found, abs=1e-12)


@pytest.mark.parametrize("k", [0, 3])
def test_more_answers_than_there_are_cannot_be_chosen_from(k: int) -> None:
    with pytest.raises(ValueError, match="needs 1 to 2"):
        best_of_n([0.0, 1.0], [0.0, 1.0], k)


# --- steps ---


def test_the_first_error_is_the_first_below_one_half() -> None:
    assert first_error([0.9, 0.4, 0.1]) == 1
    assert first_error([0.5, 0.6]) is None
    assert first_error([]) is None


def test_errors_by_hand() -> None:
    actual = [0, 1, 2, None, None]
    predicted = [0, 0, None, None, 3]
    found = score_first_errors(predicted, actual)
    assert found["accuracy_erroneous"] == pytest.approx(1 / 3)
    assert found["accuracy_correct"] == 0.5
    assert found["error_f1"] == pytest.approx(0.4)  # 2 · (1/3) · (1/2) / (5/6)


def test_rates_over_nothing_are_left_out() -> None:
    assert score_first_errors([None], [None]) == {"accuracy_correct": 1.0}
    assert score_first_errors([None], [0]) == {"accuracy_erroneous": 0.0}
    with pytest.raises(ValueError, match="no solution"):
        score_first_errors([], [])
