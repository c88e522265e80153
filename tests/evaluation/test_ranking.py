"""Ranking by scores, and votes: hand-worked numbers, identities, and brute force over every subset."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Sequence

import pytest

from closeness import approx
from posttrain.evaluation.statistics import (
    area_under_curve,
    best_of_n,
    first_error,
    majority_at_k,
    pair_wins,
    score_first_errors,
    vote_key,
)
from refusing import refuses


def rough_scores(rng: random.Random, n: int) -> list[float]:
    """Scores of which many are tied."""
    return [float(rng.randint(0, 4)) for _ in range(n)]


def test_pairs_by_hand() -> None:
    assert pair_wins([2.0, 1.0, 0.5, -3.0], [1.0, 2.0, 0.5, -math.inf]) == [1.0, 0.0, 0.5, 1.0]


def test_the_area_by_hand() -> None:
    assert area_under_curve([0.9, 0.4], [0.5, 0.1]) == 0.75
    assert area_under_curve([0.5], [0.5, 0.5, 0.1]) == approx(2 / 3)
    assert area_under_curve([1.0], [0.0]) == 1.0
    with refuses(ValueError, "positive and negative"):
        area_under_curve([], [0.0])


def test_the_area_is_the_pair_accuracy_over_all_pairs() -> None:
    rng = random.Random(1)
    for _ in range(30):
        correct, wrong = rough_scores(rng, rng.randint(1, 9)), rough_scores(rng, rng.randint(1, 9))
        pairs = list(itertools.product(correct, wrong))
        assert area_under_curve(correct, wrong) == statistics.fmean(pair_wins(*zip(*pairs, strict=True)))
        assert area_under_curve(correct, wrong) + area_under_curve(wrong, correct) == approx(1.0, abs=1e-15)
        assert area_under_curve(correct, correct) == 0.5


def brute_best(scores: Sequence[float], correct: Sequence[float], k: int) -> float:
    """The mean over every subset of k, in each of which one of the best is drawn."""
    gained = []
    for subset in itertools.combinations(range(len(scores)), k):
        top = max(scores[i] for i in subset)
        gained.append(statistics.fmean(correct[i] for i in subset if scores[i] == top))
    return statistics.fmean(gained)


def test_best_of_n_by_hand() -> None:
    scores, correct = [3.0, 2.0, 1.0], [0.0, 1.0, 1.0]
    assert best_of_n(scores, correct, 1) == approx(2 / 3)
    assert best_of_n(scores, correct, 2) == approx(1 / 3)  # only the pair without the best one is right
    assert best_of_n(scores, correct, 3) == 0.0
    assert best_of_n([1.0, 1.0, 0.0], [1.0, 0.0, 1.0], 3) == 0.5
    assert best_of_n([-math.inf, -math.inf, 0.0], [1.0, 1.0, 0.0], 2) == approx(1 / 3)
    assert best_of_n([-math.inf, -math.inf], [1.0, 0.0], 2) == 0.5


def test_best_of_n_equals_the_mean_over_all_subsets() -> None:
    rng = random.Random(2)
    for _ in range(40):
        n = rng.randint(1, 8)
        scores, correct = rough_scores(rng, n), [float(rng.random() < 0.4) for _ in range(n)]
        for k in range(1, n + 1):
            assert best_of_n(scores, correct, k) == approx(brute_best(scores, correct, k), abs=1e-12)


def test_best_of_many_neither_overflows_nor_depends_on_the_order() -> None:
    rng = random.Random(3)
    scores, correct = rough_scores(rng, 2000), [float(rng.random() < 0.4) for _ in range(2000)]
    order = rng.sample(range(2000), 2000)
    found = best_of_n(scores, correct, 1000)
    top = [r for s, r in zip(scores, correct, strict=True) if s == 4.0]
    assert found == approx(statistics.fmean(top))  # some top answer is in every half
    assert best_of_n([scores[i] for i in order], [correct[i] for i in order], 1000) == approx(found, abs=1e-12)


@pytest.mark.parametrize("k", [0, 3])
def test_more_answers_than_there_are_cannot_be_chosen_from(k: int) -> None:
    with refuses(ValueError, "1 to 2"):
        best_of_n([0.0, 1.0], [0.0, 1.0], k)


def test_the_first_error_is_the_first_below_one_half() -> None:
    assert first_error([0.9, 0.4, 0.1]) == 1
    assert first_error([0.5, 0.6]) is None
    assert first_error([]) is None


def test_errors_by_hand() -> None:
    actual = [0, 1, 2, None, None]
    predicted = [0, 0, None, None, 3]
    found = score_first_errors(predicted, actual)
    assert found["accuracy_erroneous"] == approx(1 / 3)
    assert found["accuracy_correct"] == 0.5
    assert found["error_f1"] == approx(0.4)  # 2 · (1/3) · (1/2) / (5/6)


def test_rates_over_nothing_are_left_out() -> None:
    assert score_first_errors([None], [None]) == {"accuracy_correct": 1.0}
    assert score_first_errors([None], [0]) == {"accuracy_erroneous": 0.0}
    with refuses(ValueError, "at least one solution"):
        score_first_errors([], [])


# Votes: which answers are the same, and the exact average over subsets.

SAME_VOTES = [
    ("1/2", "0.5"), (".50", "\\frac{1}{2}"), ("1,000", "1000.0"), ("$5", "5 dollars"), ("50%", "50"), ("-3", "\u22123"),
    ("Paris", " paris. "), ("x + 1", "x+1"), ("$\\text{yes}$", "Yes"),
]  # fmt: skip
OTHER_VOTES = [("5", "5x"), ("a", "A"), ("0.5", "0.05"), ("x+1", "x-1"), ("3", "-3")]


@pytest.mark.parametrize(("left", "right"), [*SAME_VOTES, *OTHER_VOTES])
def test_vote_key_is_the_same_of_equal_answers_alone(left: str, right: str) -> None:
    assert (vote_key(left) == vote_key(right)) is ((left, right) in SAME_VOTES)


def test_majority_by_hand() -> None:
    answers, correct = ["7", "7.0", "8", None], [True, True, False, False]
    assert majority_at_k(answers, correct, 4) == 1.0
    assert majority_at_k(answers, correct, 1) == 0.5  # no answer votes for nothing
    # pairs: 77 → 1, 78 → ½ twice, 7– → 1 twice, 8– → 0
    assert majority_at_k(answers, correct, 2) == approx((1 + 0.5 + 0.5 + 1 + 1 + 0) / 6)


def test_ties_are_shared() -> None:
    assert majority_at_k(["1", "2"], [True, False], 2) == 0.5
    assert majority_at_k(["1", "2", "3"], [True, False, False], 3) == approx(1 / 3)
    assert majority_at_k(["1", "2", "1", "2", "3"], [True, False, True, False, False], 5) == 0.5
    assert majority_at_k([None, None], [False, False], 2) == 0.0


def test_a_vote_that_was_graded_both_ways_is_worth_its_share() -> None:
    assert majority_at_k(["5", "5 kg", "6"], [True, False, False], 3) == 0.5


def brute_majority(answers: list[str | None], correct: list[bool], k: int) -> float:
    total = []
    for subset in itertools.combinations(range(len(answers)), k):
        counts = Counter(answers[i] for i in subset if answers[i] is not None)
        top = max(counts.values(), default=0)
        tied = [a for a, count in counts.items() if count == top]
        worths = [[correct[i] for i in range(len(answers)) if answers[i] == a] for a in tied]
        total.append(sum(sum(w) / len(w) for w in worths) / len(worths) if worths else 0.0)
    return sum(total) / len(total)


def test_majority_is_the_mean_over_all_subsets() -> None:
    draw = random.Random(0)
    for _ in range(150):
        n = draw.randint(1, 8)
        answers = [draw.choice(["1", "2", "3", "4", None]) for _ in range(n)]
        correct = [a == "2" or (a == "3" and draw.random() < 0.5) for a in answers]
        for k in range(1, n + 1):
            assert majority_at_k(answers, correct, k) == approx(brute_majority(answers, correct, k), abs=1e-12)
