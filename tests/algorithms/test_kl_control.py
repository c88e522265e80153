"""The KL controller: values by hand, its fixed point, what it refuses."""

from __future__ import annotations

import math

import pytest

from closeness import approx
from posttrain.algorithms.kl_control import adapt_kl_weight
from refusing import refuses


@pytest.mark.parametrize(
    ("observed", "factor"),
    [
        (6.0, 1.0),  # on target: nothing changes
        (6.6, 1.0 + 0.1 * 64 / 10_000),  # 10 % above
        (5.4, 1.0 - 0.1 * 64 / 10_000),  # 10 % below
        (60.0, 1.0 + 0.2 * 64 / 10_000),  # far above: clipped at 20 %
        (0.0, 1.0 - 0.2 * 64 / 10_000),  # far below: clipped
        (-1.0, 1.0 - 0.2 * 64 / 10_000),  # a k1 estimate may be negative
    ],
)
def test_values_by_hand(observed: float, factor: float):
    assert adapt_kl_weight(0.15, observed, 6.0, num_samples=64, horizon=10_000) == approx(0.15 * factor, rel=1e-14)


def test_a_responsive_policy_is_brought_to_its_target():
    """β settles at the target if the KL falls as 1/β."""
    weight = 0.01
    for _ in range(3000):
        weight = adapt_kl_weight(weight, 0.3 / weight, 6.0, num_samples=256, horizon=10_000)
    assert 0.3 / weight == approx(6.0, rel=1e-6)


@pytest.mark.parametrize("target", [0.0, -1.0, math.inf, math.nan])
def test_a_target_must_be_positive(target: float):
    with refuses(ValueError, "must be positive"):
        adapt_kl_weight(0.1, 1.0, target, num_samples=1, horizon=100)


def test_what_would_turn_the_weight_around_is_refused():
    with refuses(ValueError, "more than 20"):
        adapt_kl_weight(0.1, 0.0, 1.0, num_samples=100, horizon=20)
    assert adapt_kl_weight(0.1, 0.0, 1.0, num_samples=100, horizon=21) > 0
    with refuses(ValueError, "observed KL is"):
        adapt_kl_weight(0.1, math.nan, 1.0, num_samples=1, horizon=100)
