"""Statistics of a comparison: golden values of rliable 1.2 and scipy, values by hand, coverage by simulation."""

from __future__ import annotations

import numpy as np
import pytest

from closeness import approx
from posttrain.evaluation.comparisons import (
    crossed_difference,
    crossed_mean,
    detectable_difference,
    holm,
    improvement_interval,
    interquartile_interval,
    interquartile_mean,
    mean_height,
    pooled_deviation,
    power_of_two_samples,
    probability_of_improvement,
    seed_difference,
    steps_to,
    usable_rates,
)

# Scores [runs, tasks], and what rliable 1.2.0 (numpy 1.26, scipy 1.17, an environment of its own) made of them.
ONE = [
    [0.844, 0.599, 0.691, 0.755],
    [0.712, 0.783, 0.857, 0.807],
    [0.414, 0.358, 0.769, 0.788],
    [0.769, 0.656, 0.447, 0.515],
    [0.888, 0.767, 0.81, 0.507],
    [0.616, 0.883, 0.825, 0.48],
    [0.643, 0.62, 0.713, 0.877],
    [0.77, 0.845, 0.698, 0.738],
    [0.76, 0.569, 0.724, 0.671],
    [0.599, 0.851, 0.537, 0.626],
]
OTHER = [
    [0.64, 0.798, 0.481, 0.278],
    [0.394, 0.681, 0.792, 0.472],
    [0.547, 0.679, 0.588, 0.347],
    [0.643, 0.768, 0.908, 0.517],
    [0.764, 0.352, 0.778, 0.463],
    [0.572, 0.542, 0.745, 0.676],
    [0.569, 0.651, 0.448, 0.736],
]
IQM = (0.71345, 0.6087142857142858)
IQM_OF_FIRST_TASK = {3: 0.6566666666666666, 5: 0.775, 9: 0.7308, 10: 0.7116666666666667}
IQM_INTERVALS = ((0.66149875, 0.7599), (0.5411428571428571, 0.6752875))  # 50,000 resamples
IMPROVEMENT = 0.6767857142857143
IMPROVEMENT_INTERVAL = (0.5428571428571429, 0.8)  # 20,000 resamples


def test_interquartile_mean_is_rliables() -> None:
    assert (interquartile_mean(ONE), interquartile_mean(OTHER)) == approx(IQM)
    for num_runs, expected in IQM_OF_FIRST_TASK.items():
        assert interquartile_mean([[row[0]] for row in ONE[:num_runs]]) == approx(expected)
    assert interquartile_mean([0.0, 1.0, 2.0, 99.0]) == approx(1.5)  # one of four is cut off on either side
    with pytest.raises(ValueError, match="at least one score"):
        interquartile_mean([])


def test_interquartile_interval_is_rliables_within_the_noise_of_resampling() -> None:
    # an end is a quantile of some 50,000 draws: its own deviation is about 0.0006 here, that of rliable's as much
    for scores, expected in zip((ONE, OTHER), IQM_INTERVALS, strict=True):
        assert interquartile_interval(scores, num_resamples=50_000) == approx(expected, abs=0.003)
    assert interquartile_interval([[0.5], [0.5]]) == (0.5, 0.5)
    assert interquartile_interval(ONE, seed=1) == interquartile_interval(ONE, seed=1)


def test_strata_are_resampled_apart() -> None:
    """Two tasks in which the runs mirror one another: the mean of whole runs is constant, of strata it is not."""
    low, high = interquartile_interval([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    assert high - low > 0.5


def test_probability_of_improvement_is_rliables() -> None:
    assert probability_of_improvement(ONE, OTHER) == approx(IMPROVEMENT)
    assert probability_of_improvement(OTHER, ONE) == approx(1 - IMPROVEMENT)
    assert probability_of_improvement([[0.5], [0.5], [0.7]], [[0.5], [0.6], [0.4], [0.5]]) == approx(2 / 3)  # ties
    found = improvement_interval(ONE, OTHER, num_resamples=20_000)
    assert found == approx(IMPROVEMENT_INTERVAL, abs=0.006)  # the statistic moves in steps of 1/280
    with pytest.raises(ValueError, match="the same tasks"):
        probability_of_improvement([[0.5]], [[0.5, 0.5]])


def test_holm_by_hand() -> None:
    # sorted 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1; none below the one before it
    assert holm([0.04, 0.01, 0.03, 0.02]) == approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, 0.9]).tolist() == [1.0, 1.0]
    assert holm([]).tolist() == []


@pytest.mark.parametrize(
    ("n", "one", "twelve"),
    [(2, 5.654, None), (3, 3.071, 6.041), (5, 2.025, 3.168), (10, 1.325, 1.874), (20, 0.909, 1.240)],
)
def test_detectable_difference_has_the_power_that_scipy_computes(n: int, one: float, twelve: float | None) -> None:
    """At these differences ``scipy.stats.nct`` gives a power of 0.800, with three digits after the point."""
    assert detectable_difference(n) == approx(one, abs=0.001)
    if twelve is not None:
        assert detectable_difference(n, num_comparisons=12) == approx(twelve, abs=0.001)


@pytest.mark.parametrize("options", [{"power": 1.0}, {"power": 0.01}, {"level": 0.0}, {"num_comparisons": 0}])
def test_power_that_no_difference_has_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="0 < level < power < 1"):
        detectable_difference(5, **options)  # type: ignore[arg-type]


def test_power_is_the_level_without_a_difference_and_is_that_of_a_simulation() -> None:
    assert power_of_two_samples(0.0, 4) == approx(0.05, abs=1e-6)
    assert power_of_two_samples(50.0, 4) == approx(1.0, abs=1e-9)
    random = np.random.default_rng(0)
    runs = random.normal(size=(40_000, 2, 5))
    runs[:, 0] += 1.5
    spread = np.sqrt(runs.var(axis=2, ddof=1).mean(axis=1) * 2 / 5)
    share = (np.abs(runs.mean(axis=2) @ [1, -1]) > 2.306004 * spread).mean()  # t with 8 degrees of freedom
    assert power_of_two_samples(1.5, 5) == approx(float(share), abs=0.01)
    with pytest.raises(ValueError, match="2 runs"):
        power_of_two_samples(1.0, 1)


def test_crossed_variance_by_hand() -> None:
    # rows 1 1 0 0 and 1 0 0 0: means 1/2 and 1/4 (s² 1/32, over 2: 1/64); columns 1, 1/2, 0, 0 (s² 11/48, over 4)
    estimate = crossed_mean([[1, 1, 0, 0], [1, 0, 0, 0]])
    left = 2 * (3 * (1 / 8) ** 2 + (3 / 8) ** 2) / 3 / 8  # residuals: in each row ±1/8 three times, ±3/8 once
    variance = 1 / 64 + 11 / 192 - left
    assert estimate.value == approx(3 / 8)
    freedom = (1 / 64 + 11 / 192) ** 2 / ((1 / 64) ** 2 / 1 + (11 / 192) ** 2 / 3)
    assert 3 < freedom < 4
    assert estimate.high - estimate.value == approx(3.1824463053 * variance**0.5)  # t with 3 degrees of freedom
    assert estimate.seed_share == approx((1 / 64) / (1 / 64 + 11 / 192))


def draw(random: np.random.Generator, chances: np.ndarray, num_seeds: int) -> np.ndarray:
    """Outcomes whose problems have a chance each, moved by an effect of each seed."""
    moved = chances[None, :] + random.normal(0, 0.05, (num_seeds, 1))
    return (random.random((num_seeds, len(chances))) < moved).astype(float)


def test_crossed_interval_covers_other_seeds_and_other_problems() -> None:
    random = np.random.default_rng(3)
    covered = seeds_alone = false = 0
    trials = 600
    for _ in range(trials):
        chances = random.choice([0.1, 0.5, 0.9], 100)  # mean 1/2
        one = draw(random, chances, 5)
        other = draw(random, chances, 5)
        estimate = crossed_mean(one)
        covered += estimate.low <= 0.5 <= estimate.high
        only = seed_difference(list(one.mean(axis=1)), [0.5, 0.5])
        seeds_alone += only.low <= 0.0 <= only.high
        false += crossed_difference(one, other).p < 0.05
    assert covered / trials == approx(0.95, abs=0.025)
    assert seeds_alone < covered
    assert false / trials < 0.07


def test_crossed_difference_pairs_problems() -> None:
    random = np.random.default_rng(5)
    chances = np.repeat([0.05, 0.95], 100)
    one = (random.random((6, 200)) < chances).astype(float)
    other = (random.random((6, 200)) < chances - 0.04).astype(float)
    paired = crossed_difference(one, other)
    apart = crossed_difference(one, other[:, ::-1])
    assert paired.high - paired.low < 0.5 * (apart.high - apart.low)
    assert paired.value == approx(-crossed_difference(other, one).value)
    with pytest.raises(ValueError, match="the same problems"):
        crossed_difference(one, other[:, :5])


def test_outcomes_without_any_spread_are_no_more_certain_than_the_orders_of_their_seeds() -> None:
    assert crossed_difference([[1, 1]] * 3, [[0, 0]] * 3).p == approx(2 / 20)
    assert crossed_difference([[1, 1]] * 3, [[1, 1]] * 3).p == 1.0


def test_seed_difference_is_welchs() -> None:
    # means 2 and 5, variances over n 1/3 and 4/4: t = −3/√(4/3); freedom (4/3)² / (1/9/2 + 1/3) = 32/7
    found = seed_difference([1.0, 2.0, 3.0], [3.0, 5.0, 7.0, 5.0])
    other = ((3 - 5) ** 2 + (7 - 5) ** 2) / 3 / 4
    freedom = (1 / 3 + other) ** 2 / ((1 / 3) ** 2 / 2 + other**2 / 3)
    assert found.value == approx(-3.0)
    assert found.high - found.value == approx(2.7764451052 * (1 / 3 + other) ** 0.5)
    assert 4 < freedom < 5


def test_pooled_deviation_weighs_by_degrees_of_freedom() -> None:
    assert pooled_deviation([[1.0, 3.0], [0.0, 0.0, 3.0], [9.0]]) == approx(((2.0 + 6.0) / 3) ** 0.5)
    assert pooled_deviation([[1.0]]) is None


def test_curves() -> None:
    curve = [(0.0, 0.1), (10.0, 0.5), (40.0, 0.3)]
    assert mean_height(curve) == approx((10 * 0.3 + 30 * 0.4) / 40)
    assert steps_to(curve, 0.4) == approx(7.5)
    assert steps_to(curve, 0.1) == 0.0
    assert steps_to(curve, 0.6) is None
    with pytest.raises(ValueError, match="2 points"):
        mean_height(curve[:1])


def test_usable_rates_are_within_five_points_of_the_best() -> None:
    assert usable_rates({1e-4: 0.85, 1e-5: 0.7, 3e-5: 0.9}) == [3e-5, 1e-4]
    assert usable_rates({1e-4: 0.8499, 3e-5: 0.9}) == [3e-5]
    assert usable_rates({}) == []
