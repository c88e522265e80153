from __future__ import annotations

import math
import statistics

import pytest

from posttrain.evals.compare_statistics import student_t_quantile, student_t_share, summarize_seeds


# Two-sided 95 % quantiles as in every printed table of Student's t.
@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (5, 2.57058), (9, 2.26216), (30, 2.04227)],
)
def test_quantiles_are_those_of_the_tables(freedom: int, quantile: float) -> None:
    assert student_t_quantile(freedom) == pytest.approx(quantile, abs=1e-4)


def test_other_shares_and_the_normal_limit() -> None:
    assert student_t_quantile(2, 0.9) == pytest.approx(2.919986, abs=1e-6)
    assert student_t_quantile(10_000) == pytest.approx(1.960201, abs=1e-6)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 8])
def test_the_share_is_the_integral_of_the_density(freedom: int) -> None:
    """Simpson's rule over Student's density, written from its definition."""
    scale = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))

    def density(t: float) -> float:
        return scale * (1 + t * t / freedom) ** (-(freedom + 1) / 2)

    n, end = 2000, 1.7
    h = end / n
    inner = sum((4 if i % 2 else 2) * density(i * h) for i in range(1, n))
    integral = 2 * h / 3 * (density(0) + inner + density(end))
    assert student_t_share(end, freedom) == pytest.approx(integral, abs=1e-10)


def test_closed_forms_for_one_and_two_degrees_of_freedom() -> None:
    assert student_t_share(1.0, 1) == pytest.approx(0.5, abs=1e-15)  # 2/π · arctan 1
    assert student_t_share(2.0, 2) == pytest.approx(2 / math.sqrt(6), abs=1e-15)  # t / √(2 + t²)


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
