"""Evaluation statistics: intervals, several samples per item, paired tests, voting, ranking by score.

Samples within an item are dependent, so intervals use items as clusters. Averages over k-subsets of samples are exact.
Ties count ½ or are averaged; unscored answers rank at −inf.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING

from posttrain.graders.answers import clean_answer, parse_quantity

# numpy is imported inside the functions using it: the rest need only the standard library.
if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

Z_95 = 1.959963984540054  # standard normal quantile at 0.975
_ROUNDING = 1e-9  # tolerance for proportions outside [0, 1]
NUM_RESAMPLES = 10_000
_CHUNK_VALUES = 4_000_000  # limits memory for resampled counts


def wilson_interval(successes: float, n: float, z: float = Z_95) -> tuple[float, float]:
    """Compute the Wilson score interval for a proportion (Wilson 1927, eq. 4), 95 % by default.

    Raises:
        ValueError: ``n`` is 0, or ``successes`` is outside 0..n.
    """
    if n == 0:
        raise ValueError("no observations: give at least one")
    if not -_ROUNDING <= successes / n <= 1 + _ROUNDING:
        raise ValueError(f"{successes} of {n} is not a proportion: give successes from 0 to n")
    share = successes / n
    denominator = 1.0 + z * z / n
    centre = (share + z * z / (2 * n)) / denominator
    half = z * math.sqrt(max(0.0, share * (1.0 - share)) / n + z * z / (4 * n * n)) / denominator
    # The interval contains the proportion; rounding must not push a bound past it.
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


def item_interval(values: Sequence[float], draws: float = 1.0) -> tuple[float, float]:
    """Compute a 95 % interval for the mean over items, given one fraction in [0, 1] per item (items are clusters).

    Wilson's interval with effective sample size ``n* = p (1 − p) / SE²``, where ``SE² = Σ (x_i − p)² / n²`` is the
    clustered variance; n* = n if every value is 0 or 1. Several samples per item raise n* by their added information,
    up to ``n · draws``.

    Args:
        draws: maximum independent draws per item: samples per item, or the number of disjoint k-subsets.

    Source: Korn & Graubard (1998), with Wilson's interval in place of Clopper and Pearson's (Franco et al. 2019).
    Departure: no Student factor; coverage matches a t interval (``tests/evaluation``).

    Raises:
        ValueError: empty ``values``.
    """
    n = len(values)
    if n == 0:
        raise ValueError("no observations: give at least one")
    if all(value in (0.0, 1.0) for value in values):  # one sample per item, or no within-item variation
        return wilson_interval(math.fsum(values), n)
    mean = math.fsum(values) / n
    spread = math.fsum((value - mean) ** 2 for value in values)
    most = n * max(1.0, draws)
    if spread == 0.0:
        effective = most
    else:
        effective = min(most, mean * (1.0 - mean) * n * n / spread)
    return wilson_interval(mean * effective, effective)


def standard_error(values: Sequence[float]) -> float:
    """Compute the standard error for a mean over items: ``s / √n`` with s² over n − 1; 0 for one item.

    If values are per-item averages over samples, this is the clustered standard error.

    Source: Miller (2024), "Adding Error Bars to Evals", sections 2.1 and 2.2.
    """
    n = len(values)
    if n < 2:
        return 0.0
    mean = math.fsum(values) / n
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)


def _check_drawn(k: int, n: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(f"cannot draw {k} of {n} samples: give k from 1 to n")


def pass_at_k(n: int, num_correct: int, k: int) -> float:
    """Compute pass@k: the chance that k of n samples, drawn without replacement, include a correct one.

    ``1 − C(n − c, k) / C(n, k)`` as the product ``1 − Π_{i = n−c+1..n} (1 − k / i)``: an unbiased estimate for k fresh
    samples, unlike ``1 − (1 − c/n)^k``.

    Source: Chen et al. (2021), "Evaluating Large Language Models Trained on Code", equation 1.

    Raises:
        ValueError: ``num_correct`` is outside 0..n, or ``k`` outside 1..n.

    Examples:
        >>> pass_at_k(n=10, num_correct=3, k=2)
        0.5333333333333332
    """
    if not 0 <= num_correct <= n:
        raise ValueError(f"{num_correct} correct samples of {n}: give num_correct from 0 to n")
    _check_drawn(k, n)
    if n - num_correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - num_correct + 1, n + 1))


@dataclass(frozen=True, slots=True)
class Difference:
    """Paired difference B − A on shared items: both means, 95 % interval, two-sided p.

    ``is_constant``: all items differ by the same amount, so the interval collapses to a point and is uninformative.
    """

    a: float
    b: float
    difference: float
    low: float
    high: float
    p: float
    n: int
    is_constant: bool = False


def paired_bootstrap(
    a: Sequence[float], b: Sequence[float], *, seed: int = 0, num_resamples: int = NUM_RESAMPLES
) -> Difference:
    """Compare two means on shared items by bootstrap, resampling (a, b) pairs.

    The interval spans the middle 95 % of resampled differences. ``p`` is twice the smaller fraction of resamples on
    either side of 0 (adding 1 to each count), capped at 1. Item order does not matter. If all items differ by the
    same amount, the interval collapses to a point (``is_constant``), and ``p`` for a nonzero difference is at least
    ``2 · 2⁻ⁿ``.

    Source: Efron & Tibshirani (1993), chapters 13 and 15.3; pairing as described by Koehn (2004).

    Raises:
        ValueError: no items, or unequal lengths.
    """
    n = len(a)
    if len(b) != n:
        raise ValueError(f"a has {n} values, b has {len(b)}: give one per item in both")
    if n == 0:
        raise ValueError("a and b are empty: give at least one item")
    import numpy as np

    from posttrain.randomness import generator

    # Resampling n items is a multinomial draw over distinct differences, usually few.
    distinct, counts = np.unique(np.round(np.subtract(b, a), 12), return_counts=True)
    random = generator(seed, "paired bootstrap")
    chunk = max(1, _CHUNK_VALUES // len(distinct))
    sizes = [min(chunk, num_resamples - start) for start in range(0, num_resamples, chunk)]
    means = np.concatenate([random.multinomial(n, counts / n, size=size) @ distinct / n for size in sizes])
    means = np.round(means, 12)  # remove rounding noise around 0
    low, high = (float(q) for q in np.quantile(means, (0.025, 0.975)))
    tail = min(int((means <= 0).sum()), int((means >= 0).sum()))
    mean_a = math.fsum(a) / n
    mean_b = math.fsum(b) / n
    p = min(1.0, 2.0 * (tail + 1) / (num_resamples + 1))
    is_constant = len(distinct) == 1
    if is_constant and distinct[0] != 0:
        p = max(p, mcnemar_p(0, n))
    return Difference(mean_a, mean_b, mean_b - mean_a, low, high, p, n, is_constant)


def mcnemar_p(only_a: int, only_b: int) -> float:
    """Compute McNemar's exact two-sided p, given the numbers of items only A or only B answered correctly.

    ``min(1, 2 · P(X ≤ min(b, c)))`` for X binomial with b + c trials and chance ½; 1 if both counts are 0.

    Source: McNemar (1947), in exact (sign test) form.

    Raises:
        ValueError: a negative count.
    """
    if only_a < 0 or only_b < 0:
        raise ValueError(f"negative count {min(only_a, only_b)}: give counts from 0")
    trials = only_a + only_b
    tail = 0
    ways = 1
    for i in range(min(only_a, only_b) + 1):
        tail += ways
        ways = ways * (trials - i) // (i + 1)  # C(trials, i + 1)
    return min(1.0, 2 * tail / 2**trials)


# Means over seeds with intervals; Student's t.

MAX_TERMS = 2000  # for the continued fraction; 200 suffice for any degrees of freedom


@dataclass(frozen=True, slots=True)
class Summary:
    """Mean over ``n`` seeds; ``half_width``: half the 95 % interval, None if n is 1."""

    mean: float
    half_width: float | None
    n: int


def student_t_tail(t: ArrayLike, freedom: ArrayLike) -> NDArray[np.float64]:
    """Compute P(|T| > |t|) for Student's t, elementwise, to 12 digits, for at least 1 degree of freedom.

    ``I_x(ν/2, 1/2)`` with x = ν/(ν + t²), the incomplete beta function (Abramowitz and Stegun, 26.5.2 and 26.7.1).
    The tail is computed directly, so even p near 1e-30 is accurate.
    """
    import numpy as np

    size, nu = np.broadcast_arrays(np.abs(np.asarray(t, dtype=np.float64)), np.asarray(freedom, dtype=np.float64))
    assert bool(np.all(nu >= 1)), "an interval needs two values"
    u = size / np.sqrt(nu)  # x = 1/(1 + u²); the logarithm stays accurate for tiny and huge u
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        log_x = np.where(u < 1.0, -np.log1p(u * u), -2.0 * np.log(np.hypot(1.0, u)))
        x = np.exp(log_x)
        y = 1.0 / (1.0 + 1.0 / (u * u))
        front = np.exp(nu / 2 * log_x + np.log(y) / 2) * _gamma_ratio(nu / 2) / math.sqrt(math.pi)
        excess = (nu / 2 + 0.5) * y - 0.5  # distance of x below the beta distribution's mean
        far = excess >= 0.0
        a = np.where(far, nu / 2, 0.5)
        b = np.where(far, 0.5, nu / 2)
        part = front * _beta_fraction(a, b, np.where(far, x, y), np.abs(excess))
    return np.where(np.isnan(size), np.nan, np.clip(np.where(far, part, 1.0 - part), 0.0, 1.0))


def _gamma_ratio(a: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute Γ(a + 1/2) / Γ(a): Stirling's series for large a, reduced to small a by Γ(a + 1) = a Γ(a)."""
    import numpy as np

    carried = a.copy()
    factor = np.ones_like(a)
    small = carried < 24.0
    while bool(small.any()):
        factor = np.where(small, factor * carried / (carried + 0.5), factor)
        carried = np.where(small, carried + 1.0, carried)
        small = carried < 24.0
    series = -1 / 8 / carried + 1 / 192 / carried**3 - 1 / 640 / carried**5 + 17 / 14336 / carried**7
    return factor * np.sqrt(carried) * np.exp(series)


def _beta_fraction(
    a: NDArray[np.float64], b: NDArray[np.float64], x: NDArray[np.float64], excess: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Evaluate the continued fraction ``I_x(a, b) · B(a, b) / (x^a (1 − x)^b)``; ``excess`` = a − (a + b) x ≥ 0.

    Didonato and Morris (1992), "Algorithm 708", equation 9, evaluated forward (Lentz). It avoids subtracting large
    numbers, unlike the plain fraction for large a.
    """
    import numpy as np

    value = c = a * (excess + 1.0) / (a + 1.0)
    d = np.zeros_like(a)
    for n in range(1, MAX_TERMS):
        top = (a + n - 1) * (a + b + n - 1) * n * (b - n) * x * x / (a + 2 * n - 1) ** 2
        bottom = n + n * (b - n) * x / (a + 2 * n - 1) + (a + n) / (a + 2 * n + 1) * (excess + 1.0 + n * (2.0 - x))
        c = bottom + top / c
        d = 1.0 / (bottom + top * d)
        last = value
        value = value * c * d
        if not bool((np.abs(value - last) > 2**-50 * np.abs(value)).any()):
            return 1.0 / value
    raise AssertionError("the continued fraction converges")


@lru_cache(maxsize=4096)
def student_t_quantile(freedom: int, share: float = 0.95) -> float:
    """Find t with P(|T| < t) = ``share``; 4.303 for 2 degrees of freedom and 95 %."""
    low = 0.0
    high = 1.0
    while float(student_t_tail(high, freedom)) > 1.0 - share:
        high *= 2.0
    middle = (low + high) / 2.0
    while middle not in (low, high):
        if float(student_t_tail(middle, freedom)) > 1.0 - share:
            low = middle
        else:
            high = middle
        middle = (low + high) / 2.0
    return middle


def half_width(values: Sequence[float]) -> float:
    """Compute half the 95 % Student-t interval for a mean: ``t · s / √n`` with s² over n − 1; 0 for one value.

    If values are per-item averages over samples, ``s / √n`` is the clustered standard error.

    Source: Miller (2024), "Adding Error Bars to Evals", sections 2.1 and 2.2, using t instead of 1.96.
    """
    n = len(values)
    if n > 1:
        return student_t_quantile(n - 1) * statistics.stdev(values) / math.sqrt(n)
    return 0.0


def summarize_seeds(values: Sequence[float]) -> Summary | None:
    """Compute mean and 95 % Student-t interval: ``t · s / √n`` with s² over n − 1; None if empty."""
    if not values:
        return None
    interval = None
    if len(values) > 1:
        interval = half_width(values)
    return Summary(statistics.fmean(values), interval, len(values))


def sigmoid(logit: float) -> float:
    """Compute ``1 / (1 + e^(−x))`` without overflow."""
    if logit >= 0:
        return 1.0 / (1.0 + math.exp(-logit))
    return math.exp(logit) / (1.0 + math.exp(logit))


def vote_key(answer: str) -> str:
    """Normalize an answer for voting: exact value if numeric (dropping % and unit, except single letters, which may be
    variables), else cleaned text.
    """
    quantity = parse_quantity(answer)
    if quantity is not None:
        if len(quantity.unit) == 1 and quantity.unit != "°":
            variable = quantity.unit
        else:
            variable = ""
        return f"{quantity.value}{variable}"
    text = clean_answer(answer)
    letters = "".join(text.split())
    is_words = len(letters) > 1 and letters.isalpha()
    if is_words:
        return " ".join(text.casefold().split())
    return letters


def majority_at_k(answers: Sequence[str | None], is_correct: Sequence[bool], k: int) -> float:
    """Compute the chance that majority voting over k of n samples is correct, averaged over all k-subsets.

    Votes are counted by ``vote_key``; samples without an answer do not vote. Tied answers are averaged; if matching
    votes were graded differently, their answer is worth the fraction graded correct.

    Source: Wang et al. (2023), "Self-Consistency Improves Chain of Thought Reasoning in Language Models".

    Raises:
        ValueError: unequal lengths, or ``k`` outside 1..n.
    """
    n = len(answers)
    if len(is_correct) != n:
        raise ValueError(f"{n} answers have {len(is_correct)} verdicts: give one each")
    _check_drawn(k, n)
    verdicts: dict[str, list[bool]] = {}
    for answer, correct in zip(answers, is_correct, strict=True):
        if answer is not None:
            verdicts.setdefault(vote_key(answer), []).append(correct)
    votes = [(len(own), Fraction(sum(own), len(own))) for own in verdicts.values()]  # count, fraction correct
    if not any(worth for _, worth in votes):
        return 0.0
    top = max(count for count, _ in votes)
    silent = n - sum(count for count, _ in votes)
    if k == n:
        worths = [worth for count, worth in votes if count == top]
        return float(sum(worths) / len(worths))
    # Dynamic program over (samples taken, top vote count, number of tied answers): the number of ways to draw these
    # samples, and the top answers' summed worth across them.
    state = {(0, 0, 0): (1, Fraction(0))}
    for count, share in votes:
        following: dict[tuple[int, int, int], tuple[int, Fraction]] = {}
        for (taken, most, tied), (ways, worth) in state.items():
            for i in range(min(count, k - taken) + 1):
                if 0 < i == most:
                    key = (taken + i, most, tied + 1)
                    gained = share * ways + worth
                elif i > most:
                    key = (taken + i, i, 1)
                    gained = share * ways
                else:
                    key = (taken + i, most, tied)
                    gained = worth
                before_ways, before_worth = following.get(key, (0, Fraction(0)))
                combinations = math.comb(count, i)
                following[key] = before_ways + ways * combinations, before_worth + gained * combinations
        state = following
    total = Fraction(0)
    for (taken, _, tied), (_, worth) in state.items():
        if tied:
            total += worth * math.comb(silent, k - taken) / tied
    return float(total / math.comb(n, k))


def pair_wins(chosen: Sequence[float], rejected: Sequence[float]) -> list[float]:
    """Compare scores pairwise: 1 if the chosen answer scores higher, ½ if tied, else 0."""
    wins = []
    for c, r in zip(chosen, rejected, strict=True):
        if c > r:
            wins.append(1.0)
        elif c < r:
            wins.append(0.0)
        else:
            wins.append(0.5)
    return wins


def area_under_curve(positive: Sequence[float], negative: Sequence[float]) -> float:
    """Compute the area under the ROC curve: the fraction of positive-negative pairs in the right order (ties ½).

    The Mann-Whitney statistic over n·m (Hanley and McNeil 1982), counted in integers. O((n + m) log m).

    Raises:
        ValueError: no positive scores, or no negative ones.
    """
    if not positive or not negative:
        raise ValueError("ROC AUC needs positive and negative scores")
    ordered = sorted(negative)
    halves = sum(bisect_left(ordered, score) + bisect_right(ordered, score) for score in positive)
    return halves / (2 * len(positive) * len(negative))


def best_of_n(scores: Sequence[float], correct: Sequence[float], k: int) -> float:
    """Compute best-of-k accuracy: the exact average over all k-subsets of n answers, choosing by highest score.

    Sort answers by descending score. A group of m ties, ranked after b better answers, is on top in
    ``C(n − b, k) − C(n − b − m, k)`` subsets, each contributing the group's average correctness. Unbiased for k fresh
    answers.

    Args:
        correct: 1 or 0 per answer, or any value to average.

    Raises:
        ValueError: ``k`` is outside 1..n, or unequal lengths.
    """
    n = len(scores)
    if not 1 <= k <= n:
        raise ValueError(f"best of {k} needs 1 to {n} answers to choose from")
    ordered = sorted(zip(scores, correct, strict=True), key=lambda pair: -pair[0])
    remaining = n
    total = 0.0
    subsets = math.comb(n, k)
    for _, tied in groupby(ordered, key=lambda pair: pair[0]):
        worths = [worth for _, worth in tied]
        topped = math.comb(remaining, k) - math.comb(remaining - len(worths), k)
        total += topped / subsets * statistics.fmean(worths)
        remaining -= len(worths)
    return total


def first_error(probabilities: Sequence[float]) -> int | None:
    """Find the first step (from 0) with P(good) < ½; None if all pass."""
    for index, probability in enumerate(probabilities):
        if probability < 0.5:
            return index
    return None


def score_first_errors(predicted: Sequence[int | None], actual: Sequence[int | None]) -> dict[str, float]:
    """Measure first-error localization; None means no error.

    ``accuracy_erroneous`` covers solutions with an error (the index must match), ``accuracy_correct`` those without;
    ``error_f1`` is their harmonic mean. Rates without any solutions are omitted. Zheng et al. (2024), "ProcessBench".

    Raises:
        ValueError: no solutions.
    """
    if not actual:
        raise ValueError("empty input: give at least one solution")
    pairs = list(zip(predicted, actual, strict=True))
    hits = {
        "accuracy_erroneous": [float(p == a) for p, a in pairs if a is not None],
        "accuracy_correct": [float(p == a) for p, a in pairs if a is None],
    }
    rates = {name: statistics.fmean(values) for name, values in hits.items() if values}
    if len(rates) == 2:
        left, right = rates.values()
        if left + right:
            rates["error_f1"] = 2.0 * left * right / (left + right)
        else:
            rates["error_f1"] = 0.0
    return rates
