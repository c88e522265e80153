"""Statistics of methods that are compared over seeds and problems: aggregates, intervals, tests, power.

Scores of a method are ``[runs, tasks]``, outcomes are ``[seeds, problems]`` with 1 where an answer was right. Different
methods have seeds of their own and answer the same problems.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from posttrain.evaluation.statistics import standard_error, student_t_quantile, student_t_tail

# numpy is imported by the functions that compute with it: the others take the standard library alone.
if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

NUM_RESAMPLES = 5_000
USABLE = 0.05  # a learning rate this close to the best one, in accuracy, is usable
_SPAN = 10.0  # standard deviations of a chi variable around its mean that hold all of its mass
_NUM_NODES = 4001

Statistic = Callable[["NDArray[np.float64]"], "NDArray[np.float64]"]


def interquartile_mean(scores: ArrayLike) -> float:
    """The mean of the middle half of all scores, of whatever shape: ``⌊n/4⌋`` are cut off on either side.

    Source: Agarwal et al. (2021), "Deep Reinforcement Learning at the Edge of the Statistical Precipice", and their
    library rliable 1.2 (``scipy.stats.trim_mean`` with 0.25).

    Raises:
        ValueError: no score.
    """
    import numpy as np

    values = np.asarray(scores, dtype=np.float64)
    if values.size == 0:
        raise ValueError("no interquartile mean of nothing")
    return float(_interquartile_means(values[None])[0])


def _interquartile_means(samples: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the interquartile mean of each of ``[samples, ...]``."""
    import numpy as np

    flat = np.sort(samples.reshape(len(samples), -1), axis=1)
    cut = flat.shape[1] // 4
    middle: NDArray[np.float64] = flat[:, cut : flat.shape[1] - cut].mean(axis=1)
    return middle


def _resample(scores: NDArray[np.float64], random: np.random.Generator, num: int) -> NDArray[np.float64]:
    """Draw ``[num, runs, tasks]``: within each task (a stratum), runs with replacement."""
    import numpy as np

    runs, tasks = scores.shape
    drawn = random.integers(0, runs, size=(num, runs, tasks))
    return scores[drawn, np.arange(tasks)]


def interquartile_interval(
    scores: ArrayLike, *, seed: int = 0, num_resamples: int = NUM_RESAMPLES
) -> tuple[float, float]:
    """The 95 % interval of the interquartile mean by the stratified bootstrap: percentiles over resampled runs.

    Args:
        scores: ``[runs, tasks]``. Runs are drawn anew within every task.

    Source: Agarwal et al. (2021), section 4.1; rliable 1.2, ``get_interval_estimates`` with the percentile method.

    Raises:
        ValueError: no run.
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
        raise ValueError("scores of a method are an array [runs, tasks] with a run or more")
    return values


def probability_of_improvement(scores: ArrayLike, baseline: ArrayLike) -> float:
    """The chance that a run of a method beats one of the baseline: the mean over tasks of ``P(X > Y) + P(X = Y) / 2``.

    Args:
        scores, baseline: ``[runs, tasks]``, of as many tasks.

    Source: Agarwal et al. (2021), section 4.3; rliable 1.2 (the Mann-Whitney statistic over n·m).

    Raises:
        ValueError: no run, or other tasks.
    """
    x = _as_scores(scores)
    y = _as_scores(baseline)
    if x.shape[1] != y.shape[1]:
        raise ValueError("a method and its baseline have the same tasks")
    return float(_improvements(x[None], y[None])[0])


def _improvements(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the probability of improvement of each pair of samples ``[samples, runs, tasks]``."""
    import numpy as np

    left = x[:, :, None, :]
    right = y[:, None, :, :]
    wins: NDArray[np.float64] = np.mean((left > right) + 0.5 * (left == right), axis=(1, 2, 3))
    return wins


def improvement_interval(
    scores: ArrayLike, baseline: ArrayLike, *, seed: int = 0, num_resamples: int = NUM_RESAMPLES
) -> tuple[float, float]:
    """The 95 % interval of ``probability_of_improvement``; runs of both are drawn anew, independently, within tasks.

    Source: rliable 1.2, ``StratifiedIndependentBootstrap``.

    Raises:
        ValueError: no run.
    """
    import numpy as np

    from posttrain.randomness import generator

    random = generator(seed, "stratified bootstrap")
    x = _resample(_as_scores(scores), random, num_resamples)
    y = _resample(_as_scores(baseline), random, num_resamples)
    low, high = np.quantile(_improvements(x, y), (0.025, 0.975))
    return float(low), float(high)


def holm(p_values: ArrayLike) -> NDArray[np.float64]:
    """Adjust p values ``[m]`` so that the chance of any false finding is no more than the level they are compared with.

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
    """A mean, or a difference of two, with a 95 % interval over seeds and problems.

    ``p``: two-sided, of a difference; 1 of a mean. ``seed_share``: the part of the variance that is of the seeds.
    """

    value: float
    low: float
    high: float
    p: float
    seed_share: float


@dataclass(frozen=True, slots=True)
class _Variances:
    """Estimates of a mean over ``[seeds, problems]``: variance by seeds, and by what is left between the two."""

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
        raise ValueError("outcomes are an array [seeds, problems] with two seeds and two problems or more")
    return values


def crossed_mean(outcomes: ArrayLike) -> CrossedEstimate:
    """The mean of ``[seeds, problems]`` with a 95 % interval for other seeds and other problems.

    Variances of a two-way layout without repetition: ``V = V_seeds + V_problems − V_left``, each mean square over its
    number, so that what seeds and problems share is counted once. Student's t with Satterthwaite's degrees of freedom.

    Source: Cameron, Gelbach and Miller (2011), "Robust Inference With Multiway Clustering", for the sum; Satterthwaite
    (1946). Departure: V is never below the larger of the first two, which the difference may fall under by chance.

    Raises:
        ValueError: fewer than two seeds or problems.
    """
    import numpy as np

    values = _as_outcomes(outcomes)
    own = _variances(values)
    by_problems = float(np.var(values.mean(axis=0), ddof=1)) / values.shape[1]
    return _estimate(float(values.mean()), [own], by_problems, values.shape[1] - 1)


def crossed_difference(outcomes: ArrayLike, baseline: ArrayLike) -> CrossedEstimate:
    """The mean of a method minus a baseline's, over the same problems and seeds of their own; see ``crossed_mean``.

    Problems are paired: their part of the variance is that of each problem's difference.

    Args:
        outcomes, baseline: ``[seeds, problems]``; the numbers of seeds may differ.

    Raises:
        ValueError: fewer than two seeds or problems, or other problems.
    """
    import numpy as np

    a = _as_outcomes(outcomes)
    b = _as_outcomes(baseline)
    if a.shape[1] != b.shape[1]:
        raise ValueError("a method and its baseline answer the same problems")
    apart = a.mean(axis=0) - b.mean(axis=0)
    by_problems = float(np.var(apart, ddof=1)) / a.shape[1]
    return _estimate(float(apart.mean()), [_variances(a), _variances(b)], by_problems, a.shape[1] - 1)


def _estimate(value: float, sides: Sequence[_Variances], by_problems: float, problem_freedom: int) -> CrossedEstimate:
    by_seeds = math.fsum(side.by_seeds for side in sides)
    left = math.fsum(side.left for side in sides)
    variance = max(by_seeds + by_problems - left, by_seeds, by_problems)
    if variance == 0.0:  # nothing varies: all that is known is how few orders of the seeds there are
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
    """The mean of a method's seeds minus a baseline's, with a 95 % interval over seeds alone: Welch's t test (1947).

    For numbers of which each seed has one, such as the mean height of its curve.

    Raises:
        ValueError: fewer than two seeds.
    """
    if min(len(values), len(baseline)) < 2:
        raise ValueError("a spread needs two seeds or more")
    sides = [_Variances(standard_error(side) ** 2, 0.0, len(side) - 1) for side in (values, baseline)]
    value = math.fsum(values) / len(values) - math.fsum(baseline) / len(baseline)
    return _estimate(value, sides, 0.0, 1)


def pooled_deviation(groups: Sequence[Sequence[float]]) -> float | None:
    """The standard deviation within groups of seeds, pooled over the groups; None if none has two seeds."""
    squares = []
    freedom = 0
    for group in groups:
        squares.append(standard_error(group) ** 2 * len(group) * (len(group) - 1))
        freedom += max(0, len(group) - 1)
    if freedom == 0:
        return None
    return math.sqrt(math.fsum(squares) / freedom)


def power_of_two_samples(difference: float, n: int, level: float = 0.05) -> float:
    """The chance that Student's two-sample t test, ``n`` runs a side, finds a true difference.

    ``P(|T| > t)`` for T of the noncentral t distribution with 2 n − 2 degrees of freedom and ``δ √(n / 2)``: the normal
    probability, averaged over the distribution of the estimated standard deviation.

    Args:
        difference: in standard deviations over seeds.

    Raises:
        ValueError: fewer than two runs.
    """
    if n < 2:
        raise ValueError("a spread needs two runs or more")
    import numpy as np

    freedom = 2 * n - 2
    limit = student_t_quantile(freedom, 1.0 - level)
    shift = difference * math.sqrt(n / 2)
    width = _SPAN / math.sqrt(2 * freedom)
    ratios = np.linspace(max(0.0, 1.0 - width), 1.0 + width, _NUM_NODES)  # estimated over true deviation
    with np.errstate(divide="ignore"):
        log_density = (freedom - 1) * np.log(ratios) - freedom * ratios**2 / 2
    density = np.exp(log_density - log_density.max())
    density /= density.sum()
    finds = [_normal_tail(limit * ratio - shift) + _normal_tail(limit * ratio + shift) for ratio in ratios]
    return float(np.dot(density, finds))


def _normal_tail(z: float) -> float:
    return 0.5 * math.erfc(z / math.sqrt(2.0))


def detectable_difference(n: int, *, num_comparisons: int = 1, power: float = 0.8, level: float = 0.05) -> float:
    """The smallest true difference, in standard deviations over seeds, that ``n`` runs a side find with this power.

    Args:
        num_comparisons: the level is divided by it (Bonferroni; the first step of Holm's procedure).

    Raises:
        ValueError: fewer than two runs, no comparison, or not ``0 < level < power < 1``.
    """
    if not 0.0 < level < power < 1.0 or num_comparisons < 1:
        raise ValueError("0 < level < power < 1 and one comparison or more are needed")
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
    """The area under a curve of (step, value), by trapezoids, over its width: its mean height.

    Raises:
        ValueError: fewer than two points.
    """
    if len(curve) < 2:
        raise ValueError("no area under fewer than two points")
    areas = [(right - left) * (low + high) / 2 for (left, low), (right, high) in pairwise(curve)]
    return math.fsum(areas) / (curve[-1][0] - curve[0][0])


def steps_to(curve: Sequence[tuple[float, float]], threshold: float) -> float | None:
    """The first step at which a curve of (step, value) is at ``threshold``, between two points on their line.

    None if it never is.
    """
    if curve and curve[0][1] >= threshold:
        return curve[0][0]
    for (left, low), (right, high) in pairwise(curve):
        if high >= threshold:
            return left + (right - left) * (threshold - low) / (high - low)
    return None


def usable_rates(results: Mapping[float, float], within: float = USABLE) -> list[float]:
    """The learning rates whose result is within ``within`` of the best one, in rising order."""
    if not results:
        return []
    best = max(results.values())
    # half an answer in a million: a difference of exactly ``within`` may come out of rounding a little larger
    return sorted(rate for rate, value in results.items() if best - value <= within + 1e-9)
