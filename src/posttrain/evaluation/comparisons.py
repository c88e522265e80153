"""Compare methods over seeds and problems: aggregates, intervals, tests, power.

A method has scores ``[runs, tasks]`` and outcomes ``[seeds, problems]``, 1 if correct. Methods use independent seeds
and share the problems.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from posttrain.evaluation.statistics import standard_error, student_t_quantile, student_t_tail

# numpy is imported inside the functions using it: the rest need only the standard library.
if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

NUM_RESAMPLES = 5_000
USABLE = 0.05  # learning rates within this accuracy of the best are usable
_SPAN = 10.0  # integration range, in standard deviations of a chi variable
_NUM_NODES = 4001


def interquartile_mean(scores: ArrayLike) -> float:
    """Compute the interquartile mean of scores of any shape: drop ``⌊n/4⌋`` at both ends, average the rest.

    Source: Agarwal et al. (2021), "Deep Reinforcement Learning at the Edge of the Statistical Precipice", and their
    library rliable 1.2 (``scipy.stats.trim_mean`` with 0.25).

    Raises:
        ValueError: no score.
    """
    import numpy as np

    values = np.asarray(scores, dtype=np.float64)
    if values.size == 0:
        raise ValueError("scores: empty. Give at least one score")
    return float(_interquartile_means(values[None])[0])


def _interquartile_means(samples: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute interquartile means ``[samples]`` from ``[samples, ...]``."""
    import numpy as np

    flat = np.sort(samples.reshape(len(samples), -1), axis=1)
    cut = flat.shape[1] // 4
    middle: NDArray[np.float64] = flat[:, cut : flat.shape[1] - cut].mean(axis=1)
    return middle


def _resample(scores: NDArray[np.float64], random: np.random.Generator, num: int) -> NDArray[np.float64]:
    """Draw ``[num, runs, tasks]``: runs with replacement, independently per task (stratum)."""
    import numpy as np

    runs, tasks = scores.shape
    drawn = random.integers(0, runs, size=(num, runs, tasks))
    return scores[drawn, np.arange(tasks)]


def interquartile_interval(
    scores: ArrayLike, *, seed: int = 0, num_resamples: int = NUM_RESAMPLES
) -> tuple[float, float]:
    """Compute the 95 % interval of the interquartile mean: stratified bootstrap, percentile method.

    Args:
        scores: ``[runs, tasks]``. Runs are resampled within every task.

    Source: Agarwal et al. (2021), section 4.1; rliable 1.2, ``get_interval_estimates`` with the percentile method.

    Raises:
        ValueError: empty scores, or a wrong shape.
    """
    import numpy as np

    from posttrain.randomness import generator

    values = _as_scores(scores)
    samples = _resample(values, generator(seed, "stratified bootstrap"), num_resamples)
    low, high = np.quantile(_interquartile_means(samples), (0.025, 0.975))
    return float(low), float(high)


def _as_scores(scores: ArrayLike) -> NDArray[np.float64]:
    import numpy as np

    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 2 or values.size == 0:
        raise ValueError("scores: not an array [runs, tasks] with at least one run and task")
    return values


def probability_of_improvement(scores: ArrayLike, baseline: ArrayLike) -> float:
    """Estimate the chance that a method beats a baseline: ``P(X > Y) + P(X = Y) / 2``, averaged over tasks.

    Args:
        scores, baseline: ``[runs, tasks]`` with the same tasks.

    Source: Agarwal et al. (2021), section 4.3; rliable 1.2 (the Mann-Whitney statistic over n·m).

    Raises:
        ValueError: empty scores, or different numbers of tasks.
    """
    x = _as_scores(scores)
    y = _as_scores(baseline)
    if x.shape[1] != y.shape[1]:
        raise ValueError("scores and baseline must have the same tasks")
    return float(_improvements(x[None], y[None])[0])


def _improvements(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute the probability of improvement per sample: two ``[samples, runs, tasks]`` give ``[samples]``."""
    import numpy as np

    left = x[:, :, None, :]
    right = y[:, None, :, :]
    wins: NDArray[np.float64] = np.mean((left > right) + 0.5 * (left == right), axis=(1, 2, 3))
    return wins


def improvement_interval(
    scores: ArrayLike, baseline: ArrayLike, *, seed: int = 0, num_resamples: int = NUM_RESAMPLES
) -> tuple[float, float]:
    """Compute the 95 % interval of ``probability_of_improvement``, resampling both methods independently per task.

    Source: rliable 1.2, ``StratifiedIndependentBootstrap``.

    Raises:
        ValueError: empty scores, or a wrong shape.
    """
    import numpy as np

    from posttrain.randomness import generator

    random = generator(seed, "stratified bootstrap")
    x = _resample(_as_scores(scores), random, num_resamples)
    y = _resample(_as_scores(baseline), random, num_resamples)
    low, high = np.quantile(_improvements(x, y), (0.025, 0.975))
    return float(low), float(high)


def holm(p_values: ArrayLike) -> NDArray[np.float64]:
    """Adjust p values ``[m]`` for multiple comparisons, bounding the family-wise error rate.

    ``max over j up to i of min(1, (m − j + 1) p_(j))`` for the i-th smallest. Source: Holm (1979).
    """
    import numpy as np

    values = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(values, kind="stable")
    adjusted = np.empty_like(values)
    factors = np.arange(len(values), 0, -1)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(values[order] * factors))
    return adjusted


@dataclass(frozen=True, slots=True)
class CrossedEstimate:
    """Mean or difference of means, with a 95 % interval over seeds and problems.

    ``p``: two-sided, against a true value of 0. ``seed_share``: fraction of variance due to seeds.
    """

    value: float
    low: float
    high: float
    p: float
    seed_share: float


@dataclass(frozen=True, slots=True)
class _Variances:
    """Variance estimates for averages over ``[seeds, problems]``: between seeds, and residual (interaction)."""

    by_seeds: float
    left: float
    freedom: int


def _variances(outcomes: NDArray[np.float64]) -> _Variances:
    import numpy as np

    seeds, problems = outcomes.shape
    of_seed = outcomes.mean(axis=1, keepdims=True)
    of_problem = outcomes.mean(axis=0, keepdims=True)
    left = outcomes - of_seed - of_problem + outcomes.mean()
    freedom = (seeds - 1) * (problems - 1)
    return _Variances(
        by_seeds=float(np.var(of_seed, ddof=1)) / seeds,
        left=float(np.square(left).sum()) / freedom / (seeds * problems),
        freedom=seeds - 1,
    )


def _as_outcomes(outcomes: ArrayLike) -> NDArray[np.float64]:
    import numpy as np

    values = np.asarray(outcomes, dtype=np.float64)
    if values.ndim != 2 or min(values.shape) < 2:
        raise ValueError("outcomes: not an array [seeds, problems] with at least 2 seeds and 2 problems")
    return values


def crossed_mean(outcomes: ArrayLike) -> CrossedEstimate:
    """Average ``[seeds, problems]``, with a 95 % interval for new seeds and new problems.

    Uses the variances of a two-way layout without repetition: ``V = V_seeds + V_problems − V_left``. Each is a mean
    square divided by its sample size; subtracting the residual ``V_left`` avoids counting it twice. The interval uses
    Student's t with Satterthwaite's degrees of freedom.

    Source: Cameron, Gelbach and Miller (2011), "Robust Inference With Multiway Clustering", for the sum; Satterthwaite
    (1946). Departure: V is at least ``max(V_seeds, V_problems)``, because sampling noise can push the sum below.

    Raises:
        ValueError: fewer than 2 seeds or 2 problems.
    """
    import numpy as np

    values = _as_outcomes(outcomes)
    own = _variances(values)
    by_problems = float(np.var(values.mean(axis=0), ddof=1)) / values.shape[1]
    return _estimate(float(values.mean()), [own], by_problems, values.shape[1] - 1)


def crossed_difference(outcomes: ArrayLike, baseline: ArrayLike) -> CrossedEstimate:
    """Compute a method's mean minus a baseline's, given independent seeds and shared problems; see ``crossed_mean``.

    Problems are paired: ``V_problems`` is the variance of per-problem differences.

    Args:
        outcomes, baseline: ``[seeds, problems]``; the numbers of seeds may differ.

    Raises:
        ValueError: fewer than 2 seeds or 2 problems, or different numbers of problems.
    """
    import numpy as np

    a = _as_outcomes(outcomes)
    b = _as_outcomes(baseline)
    if a.shape[1] != b.shape[1]:
        raise ValueError("outcomes and baseline must have the same problems")
    apart = a.mean(axis=0) - b.mean(axis=0)
    by_problems = float(np.var(apart, ddof=1)) / a.shape[1]
    return _estimate(float(apart.mean()), [_variances(a), _variances(b)], by_problems, a.shape[1] - 1)


def _estimate(value: float, sides: Sequence[_Variances], by_problems: float, problem_freedom: int) -> CrossedEstimate:
    by_seeds = math.fsum(side.by_seeds for side in sides)
    left = math.fsum(side.left for side in sides)
    variance = max(by_seeds + by_problems - left, by_seeds, by_problems)
    if variance == 0.0:  # no variance: only a permutation test over seeds can give p
        p = 1.0
        if value != 0.0:
            seeds = [side.freedom + 1 for side in sides]
            p = min(1.0, 2.0 / math.comb(sum(seeds), seeds[0]))
        return CrossedEstimate(value, value, value, p, 0.0)
    parts = [(side.by_seeds, side.freedom) for side in sides]
    parts.append((by_problems, problem_freedom))
    total = math.fsum(part for part, _ in parts)
    freedom = total**2 / math.fsum(part**2 / number for part, number in parts)
    error = math.sqrt(variance)
    half = student_t_quantile(max(1, math.floor(freedom))) * error
    p = float(student_t_tail(value / error, freedom))
    return CrossedEstimate(value, value - half, value + half, p, by_seeds / total)


def seed_difference(values: Sequence[float], baseline: Sequence[float]) -> CrossedEstimate:
    """Compute a method's mean minus a baseline's, with a 95 % interval over seeds: Welch's t test (1947).

    For scalars per seed, such as a curve's mean height.

    Raises:
        ValueError: fewer than 2 seeds.
    """
    if min(len(values), len(baseline)) < 2:
        raise ValueError("estimating a variance needs at least 2 seeds")
    sides = [_Variances(standard_error(side) ** 2, 0.0, len(side) - 1) for side in (values, baseline)]
    value = math.fsum(values) / len(values) - math.fsum(baseline) / len(baseline)
    return _estimate(value, sides, 0.0, 1)


def pooled_deviation(groups: Sequence[Sequence[float]]) -> float | None:
    """Compute the pooled within-group standard deviation; None unless some group has two seeds."""
    squares = []
    freedom = 0
    for group in groups:
        squares.append(standard_error(group) ** 2 * len(group) * (len(group) - 1))
        freedom += max(0, len(group) - 1)
    if freedom == 0:
        return None
    return math.sqrt(math.fsum(squares) / freedom)


def power_of_two_samples(difference: float, n: int, level: float = 0.05) -> float:
    """Compute the power of Student's two-sided two-sample t test with ``n`` runs per side.

    ``P(|T| > t)`` for noncentral T with 2 n − 2 degrees of freedom and noncentrality ``δ √(n / 2)``: normal tail
    probabilities, averaged over the distribution of the estimated standard deviation.

    Args:
        difference: true difference, in standard deviations over seeds.

    Raises:
        ValueError: fewer than 2 runs.
    """
    if n < 2:
        raise ValueError("estimating a variance needs at least 2 runs")
    import numpy as np

    freedom = 2 * n - 2
    limit = student_t_quantile(freedom, 1.0 - level)
    shift = difference * math.sqrt(n / 2)
    width = _SPAN / math.sqrt(2 * freedom)
    ratios = np.linspace(max(0.0, 1.0 - width), 1.0 + width, _NUM_NODES)  # estimated / true standard deviation
    with np.errstate(divide="ignore"):
        log_density = (freedom - 1) * np.log(ratios) - freedom * ratios**2 / 2
    density = np.exp(log_density - log_density.max())
    density /= density.sum()
    finds = [_normal_tail(limit * ratio - shift) + _normal_tail(limit * ratio + shift) for ratio in ratios]
    return float(np.dot(density, finds))


def _normal_tail(z: float) -> float:
    return 0.5 * math.erfc(z / math.sqrt(2.0))


def detectable_difference(n: int, *, num_comparisons: int = 1, power: float = 0.8, level: float = 0.05) -> float:
    """Find the smallest detectable difference for ``n`` runs per side, in standard deviations over seeds.

    Args:
        num_comparisons: divides the level (Bonferroni, equal to Holm's strictest threshold).

    Raises:
        ValueError: fewer than 2 runs, no comparison, or not ``0 < level < power < 1``.
    """
    if not 0.0 < level < power < 1.0 or num_comparisons < 1:
        raise ValueError("give 0 < level < power < 1, and num_comparisons from 1")
    own_level = level / num_comparisons
    low = 0.0
    high = 1.0
    while power_of_two_samples(high, n, own_level) < power:
        high *= 2.0
    while high - low > 1e-4 * high:
        middle = (low + high) / 2.0
        if power_of_two_samples(middle, n, own_level) < power:
            low = middle
        else:
            high = middle
    return high


def mean_height(curve: Sequence[tuple[float, float]]) -> float:
    """Compute the mean height of a (step, value) curve: trapezoidal area divided by width.

    Raises:
        ValueError: fewer than 2 points.
    """
    if len(curve) < 2:
        raise ValueError("a curve needs at least 2 points")
    areas = [(right - left) * (low + high) / 2 for (left, low), (right, high) in pairwise(curve)]
    return math.fsum(areas) / (curve[-1][0] - curve[0][0])


def steps_to(curve: Sequence[tuple[float, float]], threshold: float) -> float | None:
    """Find where a (step, value) curve first reaches ``threshold``, interpolating linearly.

    None if never reached.
    """
    if curve and curve[0][1] >= threshold:
        return curve[0][0]
    for (left, low), (right, high) in pairwise(curve):
        if high >= threshold:
            return left + (right - left) * (threshold - low) / (high - low)
    return None


def usable_rates(results: Mapping[float, float], within: float = USABLE) -> list[float]:
    """Select learning rates whose result is within ``within`` of the best, in ascending order."""
    if not results:
        return []
    best = max(results.values())
    # Tolerance: rounding can push a difference of exactly ``within`` slightly above.
    return sorted(rate for rate, value in results.items() if best - value <= within + 1e-9)
