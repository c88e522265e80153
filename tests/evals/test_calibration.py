"""Calibration: hand-worked bins, proper scores against their definitions, the temperature that was put in."""

from __future__ import annotations

import math
import random

import pytest

from posttrain.evals.statistics import (
    MAX_LOGIT,
    Bin,
    brier_score,
    calibration_error,
    fit_temperature,
    log_loss,
    logit,
    reliability_bins,
    sigmoid,
)


def test_bins_by_hand() -> None:
    bins = reliability_bins([0.05, 0.15, 0.15, 0.95, 1.0], [0.0, 1.0, 0.0, 1.0, 1.0])
    assert [(b.n, round(b.low, 9), round(b.high, 9)) for b in bins] == [(1, 0.0, 0.1), (2, 0.1, 0.2), (2, 0.9, 1.0)]
    assert [b.observed for b in bins] == [0.0, 0.5, 1.0]
    assert [b.predicted for b in bins] == pytest.approx([0.05, 0.15, 0.975])
    # (1 · 0.05 + 2 · 0.35 + 2 · 0.025) / 5
    assert calibration_error(bins) == pytest.approx(0.16)


def test_bins_may_begin_at_one_half() -> None:
    bins = reliability_bins([0.5, 0.74, 0.76, 1.0], [0.5, 1.0, 0.0, 1.0], num_bins=2, start=0.5)
    assert bins == [Bin(0.5, 0.75, 2, 0.62, 0.75), Bin(0.75, 1.0, 2, 0.88, 0.5)]


def test_scores_by_hand() -> None:
    assert brier_score([0.8, 0.4], [1.0, 0.0]) == pytest.approx((0.04 + 0.16) / 2)
    assert brier_score([0.5], [1.0]) == 0.25
    assert log_loss([0.0, 0.0], [1.0, 0.0]) == pytest.approx(math.log(2))
    assert log_loss([math.log(4)], [1.0]) == pytest.approx(-math.log(0.8))
    assert log_loss([math.log(4)], [0.25]) == pytest.approx(-0.25 * math.log(0.8) - 0.75 * math.log(0.2))
    assert log_loss([2 * math.log(4)], [0.0], temperature=2.0) == pytest.approx(-math.log(0.2))
    assert log_loss([-1e5, 1e5], [0.0, 1.0]) == 0.0  # no overflow
    assert log_loss([-1e5], [1.0]) == 1e5


def test_logit_and_sigmoid_are_inverse_and_bounded() -> None:
    for x in (-30.0, -2.0, 0.0, 0.5, 20.0):
        assert logit(sigmoid(x)) == pytest.approx(x, rel=1e-6)
    assert (logit(0.0), logit(1.0)) == (-MAX_LOGIT, MAX_LOGIT)
    assert sigmoid(-800.0) == 0.0
    assert sigmoid(800.0) == 1.0
    assert sigmoid(-math.inf) == 0.0


def test_the_temperature_that_was_put_in_is_found() -> None:
    rng = random.Random(0)
    true = [rng.gauss(0.0, 2.0) for _ in range(4000)]
    outcomes = [float(rng.random() < sigmoid(x)) for x in true]
    for factor in (0.5, 1.0, 3.0):
        found = fit_temperature([factor * x for x in true], outcomes)
        assert found is not None
        assert found == pytest.approx(factor, rel=0.08)


def test_no_other_temperature_has_a_smaller_loss() -> None:
    rng = random.Random(1)
    logits = [rng.gauss(0.3, 3.0) for _ in range(60)]
    outcomes = [float(rng.random() < sigmoid(0.4 * x)) for x in logits]
    best = fit_temperature(logits, outcomes)
    assert best is not None
    least = log_loss(logits, outcomes, best)
    for factor in (0.9, 0.99, 1.01, 1.1):
        assert log_loss(logits, outcomes, best * factor) > least


@pytest.mark.parametrize(
    ("logits", "outcomes"),
    [
        ([1.0, 2.0], [1.0, 1.0]),  # no mistake: ever sharper would be ever better
        ([1.0, -2.0], [0.0, 1.0]),  # the opposite of the truth
        ([0.0, 0.0], [1.0, 0.0]),  # nothing at all
    ],
)
def test_where_no_temperature_helps_there_is_none(logits: list[float], outcomes: list[float]) -> None:
    assert fit_temperature(logits, outcomes) is None
