from __future__ import annotations

import math
import statistics

import pytest

from posttrain.evaluation.statistics import student_t_quantile, student_t_tail, summarize_seeds

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
    assert student_t_tail(t, freedom) == pytest.approx(tail, rel=1e-12, abs=0)
    assert student_t_tail(-t, freedom) == student_t_tail(t, freedom)


def test_tails_come_in_any_shape_and_at_the_ends() -> None:
    found = student_t_tail([row[0] for row in TAILS], [row[1] for row in TAILS])
    assert found.tolist() == pytest.approx([row[2] for row in TAILS], rel=1e-12, abs=0)
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
    assert student_t_quantile(freedom) == pytest.approx(quantile, rel=1e-12, abs=0)


def test_student_t_quantile_of_another_share() -> None:
    assert student_t_quantile(2, 0.9) == pytest.approx(2.919986, abs=1e-6)


def test_a_summary_by_hand() -> None:
    summary = summarize_seeds([0.5, 0.6, 0.7])
    assert summary is not None
    assert summary.n == 3
    assert summary.mean == pytest.approx(0.6)
    assert summary.half_width == pytest.approx(4.302653 * 0.1 / math.sqrt(3), abs=1e-6)
    two = summarize_seeds([0.25, 0.75])
    assert two is not None
    assert two.half_width == pytest.approx(12.706205 * statistics.stdev([0.25, 0.75]) / math.sqrt(2), abs=1e-5)


def test_one_seed_has_no_interval_and_none_no_summary() -> None:
    one = summarize_seeds([0.5])
    assert one is not None
    assert (one.mean, one.half_width, one.n) == (0.5, None, 1)
    assert summarize_seeds([]) is None
    same = summarize_seeds([0.5, 0.5, 0.5])
    assert same is not None
    assert same.half_width == 0.0
