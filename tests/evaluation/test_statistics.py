"""Intervals, pass@k, paired tests, means over seeds: values by hand, definitions, brute force, simulation."""

from __future__ import annotations

import math
import statistics
from itertools import combinations, product
from math import sqrt

import numpy as np
import pytest

from closeness import approx
from posttrain.evaluation.statistics import (
    Z_95,
    item_interval,
    mcnemar_p,
    paired_bootstrap,
    pass_at_k,
    standard_error,
    student_t_quantile,
    student_t_tail,
    summarize_seeds,
    wilson_interval,
)
from refusing import refuses


def test_wilson_by_hand() -> None:
    # 8 of 10 at z = 1.96: (0.8 + 0.19208 ± 1.96 √(0.016 + 0.009604)) / 1.38416
    low, high = wilson_interval(8, 10, z=1.96)
    assert low == approx((0.99208 - 1.96 * sqrt(0.025604)) / 1.38416, abs=1e-12)
    assert (low, high) == (approx(0.4901, abs=1e-4), approx(0.9433, abs=1e-4))


@pytest.mark.parametrize(("successes", "n"), [(0, 1), (1, 1), (3, 7), (0, 500), (495, 500), (250, 500)])
def test_wilson_bounds_are_where_the_score_test_turns(successes: int, n: int) -> None:
    """By definition: at a bound p the observed share lies exactly z standard errors (of p) away."""
    share = successes / n
    low, high = wilson_interval(successes, n)
    assert 0.0 <= low <= share <= high <= 1.0
    for bound, inside in ((low, successes > 0), (high, successes < n)):
        if inside:
            assert abs(share - bound) == approx(Z_95 * sqrt(bound * (1 - bound) / n), rel=1e-9)
        else:
            assert bound == share  # 0 of n reaches down to 0, n of n up to 1
    mirrored = wilson_interval(n - successes, n)
    assert (1 - mirrored[1], 1 - mirrored[0]) == approx((low, high), abs=1e-12)


def test_no_interval_for_nothing() -> None:
    with refuses(ValueError, "no observations"):
        wilson_interval(0, 0)


def test_with_one_sample_per_item_the_interval_is_wilsons() -> None:
    values = [1.0] * 29 + [0.0] * 71
    assert item_interval(values) == wilson_interval(29, 100)
    assert item_interval(values, draws=8) == wilson_interval(29, 100)  # samples that always agree add nothing
    assert item_interval([0.0] * 5, draws=4) == wilson_interval(0, 5)
    assert item_interval([1.0] * 5, draws=4) == wilson_interval(5, 5)


def test_several_samples_count_as_much_as_they_differ() -> None:
    # p = 1/2 and spread 1/2, so n* = (1/4) 16 / (1/2) = 8: like 8 answers that know nothing of one another
    assert item_interval([0.0, 0.5, 0.5, 1.0], draws=2) == approx(wilson_interval(4, 8), abs=1e-12)
    # never more than there were: with 4 items of one half each, 4 × 2 answers
    assert item_interval([0.5] * 4, draws=2) == approx(wilson_interval(4, 8), abs=1e-12)
    assert item_interval([0.4, 0.6] * 2, draws=2) == approx(wilson_interval(4, 8), abs=1e-12)
    narrow, wide = item_interval([0.4, 0.5, 0.6] * 20, draws=10), item_interval([0.0, 0.5, 1.0] * 20, draws=10)
    assert narrow[1] - narrow[0] < wide[1] - wide[0]


def test_the_interval_covers_where_items_differ() -> None:
    """Beta-binomial items, chances near 0: closer to 95 % than Student's t over item means, which can be empty."""
    random = np.random.default_rng(1)
    alpha, beta, samples, n, trials = 0.1, 0.9, 8, 40, 1500
    truth = alpha / (alpha + beta)
    own = students = 0
    t = student_t_quantile(n - 1)
    for _ in range(trials):
        values = list(random.binomial(samples, random.beta(alpha, beta, n)) / samples)
        low, high = item_interval(values, samples)
        assert 0.0 <= low < high <= 1.0
        own += low <= truth <= high
        mean, half = sum(values) / n, t * standard_error(values)
        students += mean - half <= truth <= mean + half
    assert own / trials == approx(0.93, abs=0.02)
    assert own > students


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_sample(n: int) -> None:
    for correct in range(n + 1):
        samples = [True] * correct + [False] * (n - correct)
        for k in range(1, n + 1):
            subsets = list(combinations(samples, k))
            assert pass_at_k(n, correct, k) == approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def all_resamples(a: list[float], b: list[float]) -> list[float]:
    """Every way to draw as many items with replacement, with the difference of the means."""
    n = len(a)
    return [sum(b[i] - a[i] for i in drawn) / n for drawn in product(range(n), repeat=n)]


def test_the_bootstrap_is_that_of_all_resamples() -> None:
    a, b = [1.0, 0.0, 0.0, 1.0, 0.5, 0.0], [1.0, 1.0, 0.0, 1.0, 1.0, 1.0]
    found = paired_bootstrap(a, b, num_resamples=200_000)
    exact = all_resamples(a, b)
    assert (found.a, found.b, found.n) == (approx(2.5 / 6), approx(5 / 6), 6)
    assert found.difference == approx(2.5 / 6)
    low, high = np.quantile(exact, (0.025, 0.975))
    assert (found.low, found.high) == (approx(low, abs=0.01), approx(high, abs=0.01))
    below = sum(d <= 1e-12 for d in exact) / len(exact)
    assert below == approx(0.5**6)  # none of the three items that differ is drawn
    assert found.p == approx(2 * below, rel=0.1)


def test_the_bootstrap_pairs_items() -> None:
    """Ten items of a hundred flip, all the same way: sure, although the two shares alone would not be."""
    a = [1.0] * 40 + [0.0] * 60
    b = [1.0] * 50 + [0.0] * 50
    found = paired_bootstrap(a, b)
    assert found.low > 0.03
    assert found.p < 0.001
    swapped = paired_bootstrap(b, a)
    assert (swapped.difference, swapped.p < 0.001) == (-found.difference, True)
    apart = paired_bootstrap(a, b[::-1])  # the same two accuracies, on other items
    assert apart.low < 0 < apart.high
    assert apart.p > 0.2


def test_the_bootstrap_is_deterministic_and_knows_no_order() -> None:
    random = np.random.default_rng(0)
    a, b = (list(random.integers(0, 5, 50) / 4) for _ in range(2))
    found = paired_bootstrap(a, b, seed=3)
    assert found == paired_bootstrap(a, b, seed=3)
    assert found != paired_bootstrap(a, b, seed=4)
    turned = paired_bootstrap(a[::-1], b[::-1], seed=3)
    assert (turned.low, turned.high, turned.p) == (found.low, found.high, found.p)


def test_no_difference_is_none() -> None:
    same = paired_bootstrap([1.0, 0.0, 1.0], [1.0, 0.0, 1.0])
    assert (same.difference, same.low, same.high, same.p) == (0.0, 0.0, 0.0, 1.0)
    with refuses(ValueError, "at least one item"):
        paired_bootstrap([], [])


def test_the_p_of_the_bootstrap_is_small_as_often_as_it_states() -> None:
    random = np.random.default_rng(2)
    ps = []
    for _ in range(400):
        base = random.random(200)
        a, b = (list((random.random(200) < base).astype(float)) for _ in range(2))
        ps.append(paired_bootstrap(a, b, num_resamples=2000).p)
    assert np.mean([p <= 0.05 for p in ps]) == approx(0.05, abs=0.03)
    assert np.mean([p <= 0.5 for p in ps]) == approx(0.5, abs=0.08)


def test_mcnemar_by_hand() -> None:
    assert mcnemar_p(1, 5) == approx(2 * (1 + 6) / 64)
    assert mcnemar_p(5, 1) == mcnemar_p(1, 5)
    assert mcnemar_p(3, 3) == 1.0  # 2 · 42/64, at most 1
    assert mcnemar_p(0, 0) == 1.0
    assert mcnemar_p(0, 10) == approx(2 / 1024)
    assert mcnemar_p(4000, 4200) == approx(0.0279, abs=5e-4)  # exact in whole numbers, however many


def test_differences_that_are_all_equal_have_the_p_of_the_sign_test() -> None:
    for n in (1, 3, 5):
        found = paired_bootstrap([0.0] * n, [1.0] * n)
        assert (found.low, found.high, found.is_constant) == (1.0, 1.0, True)
        assert found.p == paired_bootstrap([1.0] * n, [0.0] * n).p == 2 * 0.5**n
    assert paired_bootstrap([0.0] * 40, [1.0] * 40).p == approx(2 / 10_001)  # no less than resamples can tell
    assert paired_bootstrap([1.0, 0.0], [1.0, 0.0]).is_constant
    assert not paired_bootstrap([0.0, 0.0, 0.0], [1.0, 1.0, 0.0]).is_constant


# Student's t, and means over seeds.

TAILS = [
    (0.5, 1, 0.70483276469913345165),
    (1e200, 1, 6.3661977236758134308e-201),
    (2.0, 3, 0.13932596855884317685),
    (4.5, 11, 0.00090120900987378689151),
    (9.0, 29, 6.8099046257461777738e-10),
    (40.0, 50, 1.2412423784372705586e-39),
    (1.0, 299, 0.31811909747888440031),
    (3.5, 299, 0.00053609861377310295426),
    (1.0, 300, 0.31811640443062627692),
    (3.5, 300, 0.00053585186481407871572),
    (6.0, 301, 5.657969008131411669e-9),
    (12.0, 1000, 4.3240573867745274662e-31),
    (5.0, 9999, 5.8303364102283192452e-7),
    (5.5, 100000, 3.8071771989850312902e-8),
]


@pytest.mark.parametrize(("t", "freedom", "tail"), TAILS)
def test_tails_to_twelve_digits(t: float, freedom: int, tail: float) -> None:
    assert student_t_tail(t, freedom) == approx(tail, rel=1e-12, abs=0)
    assert student_t_tail(-t, freedom) == student_t_tail(t, freedom)


def test_tails_come_in_any_shape_and_at_the_ends() -> None:
    found = student_t_tail([row[0] for row in TAILS], [row[1] for row in TAILS])
    assert found.tolist() == approx([row[2] for row in TAILS], rel=1e-12, abs=0)
    assert student_t_tail([0.0, math.inf], [[1], [500]]).tolist() == [[1.0, 0.0], [1.0, 0.0]]
    assert math.isnan(student_t_tail(math.nan, 3))


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [
        (2, 4.3026527297494638523),
        (11, 2.2009851600916398679),
        (299, 1.967929669065669937),
        (300, 1.9679030112610870301),
        (1000, 1.962339080826408485),
        (100_000, 1.9599877075346096386),
    ],
)
def test_quantiles_to_twelve_digits(freedom: int, quantile: float) -> None:
    assert student_t_quantile(freedom) == approx(quantile, rel=1e-12, abs=0)


def test_student_t_quantile_of_another_share() -> None:
    assert student_t_quantile(2, 0.9) == approx(2.919986, abs=1e-6)


def test_a_summary_by_hand() -> None:
    summary = summarize_seeds([0.5, 0.6, 0.7])
    assert summary is not None
    assert summary.n == 3
    assert summary.mean == approx(0.6)
    assert summary.half_width == approx(4.302653 * 0.1 / math.sqrt(3), abs=1e-6)
    two = summarize_seeds([0.25, 0.75])
    assert two is not None
    assert two.half_width == approx(12.706205 * statistics.stdev([0.25, 0.75]) / math.sqrt(2), abs=1e-5)


def test_one_seed_has_no_interval_and_none_no_summary() -> None:
    one = summarize_seeds([0.5])
    assert one is not None
    assert (one.mean, one.half_width, one.n) == (0.5, None, 1)
    assert summarize_seeds([]) is None
    same = summarize_seeds([0.5, 0.5, 0.5])
    assert same is not None
    assert same.half_width == 0.0
