"""Votes: which answers are the same, and the exact average over subsets."""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations

import pytest

from posttrain.evaluation.statistics import majority_at_k, vote_key

NUMBERS = [
    ("1/2", "0.5"),
    (".50", "\\frac{1}{2}"),
    ("1,000", "1000.0"),
    ("$5", "5 dollars"),
    ("50%", "50"),
    ("-3", "\u22123"),
]
TEXTS = [("Paris", " paris. "), ("x + 1", "x+1"), ("$\\text{yes}$", "Yes")]


@pytest.mark.parametrize(("left", "right"), [*NUMBERS, *TEXTS])
def test_vote_key_of_equal_answers_is_the_same(left: str, right: str) -> None:
    assert vote_key(left) == vote_key(right)


@pytest.mark.parametrize(("left", "right"), [("5", "5x"), ("a", "A"), ("0.5", "0.05"), ("x+1", "x-1"), ("3", "-3")])
def test_other_answers_vote_apart(left: str, right: str) -> None:
    assert vote_key(left) != vote_key(right)


def test_majority_by_hand() -> None:
    answers, correct = ["7", "7.0", "8", None], [True, True, False, False]
    assert majority_at_k(answers, correct, 4) == 1.0
    assert majority_at_k(answers, correct, 1) == 0.5  # no answer votes for nothing
    # pairs: 77 → 1, 78 → ½ twice, 7– → 1 twice, 8– → 0
    assert majority_at_k(answers, correct, 2) == pytest.approx((1 + 0.5 + 0.5 + 1 + 1 + 0) / 6)


def test_ties_are_shared() -> None:
    assert majority_at_k(["1", "2"], [True, False], 2) == 0.5
    assert majority_at_k(["1", "2", "3"], [True, False, False], 3) == pytest.approx(1 / 3)
    assert majority_at_k(["1", "2", "1", "2", "3"], [True, False, True, False, False], 5) == 0.5
    assert majority_at_k([None, None], [False, False], 2) == 0.0


def test_a_vote_that_was_graded_both_ways_is_worth_its_share() -> None:
    assert majority_at_k(["5", "5 kg", "6"], [True, False, False], 3) == 0.5


def brute_force(answers: list[str | None], correct: list[bool], k: int) -> float:
    total = []
    for subset in combinations(range(len(answers)), k):
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
            assert majority_at_k(answers, correct, k) == pytest.approx(brute_force(answers, correct, k), abs=1e-12)
