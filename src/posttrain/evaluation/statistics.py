"""Statistics of held-out numbers: intervals, several samples per item, paired tests, voting, ranking by score.

Samples of one item depend on one another, so an interval counts items. Averages over all ways to take k of an item's
samples are exact. A tie counts one half, or is shared; an answer without a score has −inf.
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

# numpy is imported by the functions that compute with it: the others take the standard library alone.
if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

Z_95 = 1.959963984540054  # standard normal quantile at 0.975
_ROUNDING = 1e-9  # by which a proportion may be off 0 or 1
NUM_RESAMPLES = 10_000
_CHUNK_VALUES = 4_000_000  # resampled counts in memory at a time


def wilson_interval(successes: float, n: float, z: float = Z_95) -> tuple[float, float]:
    """The Wilson score interval of a proportion (Wilson 1927, eq. 4), 95 % by default.

    Raises:
        ValueError: ``n`` is 0, or ``successes`` are not 0 to ``n``.
    """
    if n == 0:
        raise ValueError("no interval for a proportion of nothing")
    if not -_ROUNDING <= successes / n <= 1 + _ROUNDING:
        raise ValueError(f"{successes} of {n} is no proportion: give successes from 0 to n")
    share = successes / n
    denominator = 1.0 + z * z / n
    centre = (share + z * z / (2 * n)) / denominator
    half = z * math.sqrt(max(0.0, share * (1.0 - share)) / n + z * z / (4 * n * n)) / denominator
    # the interval holds the share itself; rounding may not push a bound past it
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


def item_interval(values: Sequence[float], draws: float = 1.0) -> tuple[float, float]:
    """Compute the 95 % interval of the mean of ``values``, one share in 0..1 per item; the items are the clusters.

    Wilson's interval with the effective number of observations ``n* = p (1 − p) / SE²``, where
    ``SE² = Σ (x_i − p)² / n²`` is the clustered variance of the mean; n where every value is 0 or 1. With several
    samples per item it grows with what they add, up to ``n · draws``.

    Args:
        draws: how many independent draws an item's value can at most stand for: samples per item, or the number of
            disjoint groups of k in them.

    Source: Korn & Graubard (1998), with Wilson's interval in place of Clopper and Pearson's (Franco et al. 2019).
    Departure: no Student factor; it covers the truth as often as a t interval does (``tests/evaluation``).

    Raises:
        ValueError: no value.
    """
    n = len(values)
    if n == 0:
        raise ValueError("no interval for a proportion of nothing")
    if all(value in (0.0, 1.0) for value in values):  # one sample each, or nothing shows that samples differ at all
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
    """The standard error of the mean of one value per item: ``s / √n`` with s² over n − 1; 0 for one item.

    With several samples per item and their mean as the value, it is the clustered one.

    Source: Miller (2024), "Adding Error Bars to Evals", sections 2.1 and 2.2.
    """
    n = len(values)
    if n < 2:
        return 0.0
    mean = math.fsum(values) / n
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)


def _check_drawn(k: int, n: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(f"{k} samples cannot be taken out of {n}: give k from 1 to n")


def pass_at_k(n: int, num_correct: int, k: int) -> float:
    """The chance that k of an item's n samples, taken without replacement, hold a right one.

    ``1 − C(n − c, k) / C(n, k)`` as the product ``1 − Π_{i = n−c+1..n} (1 − k / i)``: unbiased for the chance
    that one of k fresh samples is right, where ``1 − (1 − c/n)^k`` is not.

    Source: Chen et al. (2021), "Evaluating Large Language Models Trained on Code", equation 1.

    Examples:
        >>> pass_at_k(n=10, num_correct=3, k=2)
        0.5333333333333332
    """
    if not 0 <= num_correct <= n:
        raise ValueError(f"{num_correct} right samples of {n}: give num_correct from 0 to n")
    _check_drawn(k, n)
    if n - num_correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - num_correct + 1, n + 1))


@dataclass(frozen=True, slots=True)
class Difference:
    """B minus A, over the same items: their means, the 95 % interval of the difference, a two-sided p.

    ``is_constant``: every item differs by the same amount, so that the interval is a point and says nothing.
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
    """Compare two means over the same items, by resampling items with what both got on them.

    The interval holds the middle 95 % of the resampled differences. ``p`` is twice the smaller share of resamples on
    either side of 0 (one is added to each count), at most 1. The order of the items does not matter. Where all items
    differ by the same amount the interval is a point (``is_constant``), and ``p`` at least 2 · 2⁻ⁿ.

    Source: Efron & Tibshirani (1993), chapters 13 and 15.3; pairing as in Koehn (2004).

    Raises:
        ValueError: no item.
    """
    n = len(a)
    if len(b) != n:
        raise ValueError(f"{n} values of a and {len(b)} of b: give both over the same items")
    if n == 0:
        raise ValueError("no difference over no item")
    import numpy as np

    from posttrain.randomness import generator

    # Resampling n items is a multinomial draw over the distinct differences, of which there are few.
    distinct, counts = np.unique(np.round(np.subtract(b, a), 12), return_counts=True)
    random = generator(seed, "paired bootstrap")
    chunk = max(1, _CHUNK_VALUES // len(distinct))
    sizes = [min(chunk, num_resamples - start) for start in range(0, num_resamples, chunk)]
    means = np.concatenate([random.multinomial(n, counts / n, size=size) @ distinct / n for size in sizes])
    means = np.round(means, 12)  # what is 0 must not be a rounding error away from it
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
    """The exact two-sided p of as lopsided a split of the items that just one side got right.

    ``min(1, 2 · P(X ≤ min(b, c)))`` for X binomial with b + c trials of chance ½; 1 where the two never differ.

    Source: McNemar (1947), in its exact (sign test) form.

    Raises:
        ValueError: a count below 0.
    """
    if only_a < 0 or only_b < 0:
        raise ValueError(f"{min(only_a, only_b)} items: give counts from 0 on")
    trials = only_a + only_b
    tail = 0
    ways = 1
    for i in range(min(only_a, only_b) + 1):
        tail += ways
        ways = ways * (trials - i) // (i + 1)  # C(trials, i + 1)
    return min(1.0, 2 * tail / 2**trials)


# Means over seeds with their intervals; Student's t.

MAX_TERMS = 2000  # of the continued fraction; 200 are more than any number of degrees of freedom asks for


@dataclass(frozen=True, slots=True)
class Summary:
    """A mean over ``n`` seeds; ``half_width`` of its 95 % interval, None for one seed."""

    mean: float
    half_width: float | None
    n: int


def student_t_tail(t: ArrayLike, freedom: ArrayLike) -> NDArray[np.float64]:
    """Compute P(|T| > |t|) of Student's t entry by entry, to 12 digits for 1 and more degrees of freedom.

    ``I_x(ν/2, 1/2)`` with x = ν/(ν + t²), the incomplete beta function (Abramowitz and Stegun, 26.5.2 and 26.7.1),
    computed as the tail itself, so that a p of 1e-30 is right too.
    """
    import numpy as np

    size, nu = np.broadcast_arrays(np.abs(np.asarray(t, dtype=np.float64)), np.asarray(freedom, dtype=np.float64))
    assert bool(np.all(nu >= 1)), "an interval needs two values"
    u = size / np.sqrt(nu)  # x = 1/(1 + u²), with its logarithm right for small u and for huge ones
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        log_x = np.where(u < 1.0, -np.log1p(u * u), -2.0 * np.log(np.hypot(1.0, u)))
        x = np.exp(log_x)
        y = 1.0 / (1.0 + 1.0 / (u * u))
        front = np.exp(nu / 2 * log_x + np.log(y) / 2) * _gamma_ratio(nu / 2) / math.sqrt(math.pi)
        excess = (nu / 2 + 0.5) * y - 0.5  # how far x stands below the mean of the beta distribution
        far = excess >= 0.0
        a = np.where(far, nu / 2, 0.5)
        b = np.where(far, 0.5, nu / 2)
        part = front * _beta_fraction(a, b, np.where(far, x, y), np.abs(excess))
    return np.where(np.isnan(size), np.nan, np.clip(np.where(far, part, 1.0 - part), 0.0, 1.0))


def _gamma_ratio(a: NDArray[np.float64]) -> NDArray[np.float64]:
    """Γ(a + 1/2) / Γ(a): Stirling's series for large a, carried down by Γ(a + 1) = a Γ(a) to small ones."""
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
    """The continued fraction ``I_x(a, b) · B(a, b) / (x^a (1 − x)^b)``; ``excess`` = a − (a + b) x, not negative.

    Didonato and Morris (1992), "Algorithm 708", equation 9, evaluated from the front (Lentz). It never takes the
    difference of large numbers, as the plain fraction does where a is large.
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
    """The t with P(|T| < t) = ``share``; 4.303 for 2 degrees of freedom and 95 %."""
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
    """Half of the 95 % Student-t interval of a mean: ``t · s / √n`` with s² over n − 1; 0 for one value.

    With several samples per item and their mean as the value, ``s / √n`` is the clustered standard error.

    Source: Miller (2024), "Adding Error Bars to Evals", sections 2.1 and 2.2, with t in the place of 1.96.
    """
    n = len(values)
    if n > 1:
        return student_t_quantile(n - 1) * statistics.stdev(values) / math.sqrt(n)
    return 0.0


def summarize_seeds(values: Sequence[float]) -> Summary | None:
    """Mean and 95 % Student-t interval of the mean: ``t · s / √n`` with s² over n − 1; None for no value."""
    if not values:
        return None
    interval = None
    if len(values) > 1:
        interval = half_width(values)
    return Summary(statistics.fmean(values), interval, len(values))


def sigmoid(logit: float) -> float:
    """``1 / (1 + e^(−x))``, without overflow."""
    if logit >= 0:
        return 1.0 / (1.0 + math.exp(-logit))
    return math.exp(logit) / (1.0 + math.exp(logit))


def vote_key(answer: str) -> str:
    """Return what an answer votes for: its exact value if it is a number (without % and unit, but for a unit of one
    letter, which may be a variable), else its cleaned text.
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
    """Compute the chance that the most frequent answer among k of an item's samples is right, over all subsets.

    Votes are counted by ``vote_key``; a sample without an answer has none. A tie counts as the mean over the tied
    answers; samples that vote alike but were graded apart make their answer worth the share that was right.

    Source: Wang et al. (2023), "Self-Consistency Improves Chain of Thought Reasoning in Language Models".
    """
    n = len(answers)
    if len(is_correct) != n:
        raise ValueError(f"{n} answers have {len(is_correct)} verdicts: give one each")
    _check_drawn(k, n)
    verdicts: dict[str, list[bool]] = {}
    for answer, correct in zip(answers, is_correct, strict=True):
        if answer is not None:
            verdicts.setdefault(vote_key(answer), []).append(correct)
    votes = [(len(own), Fraction(sum(own), len(own))) for own in verdicts.values()]  # count, share that was right
    if not any(worth for _, worth in votes):
        return 0.0
    top = max(count for count, _ in votes)
    silent = n - sum(count for count, _ in votes)
    if k == n:
        worths = [worth for count, worth in votes if count == top]
        return float(sum(worths) / len(worths))
    # By (samples taken, votes of the top answers, number of these): the ways to take so many samples with an
    # answer, and the summed worth of the top answers over all of these ways.
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
    """For each pair 1 where the chosen answer has the higher score, 1/2 at a tie, else 0."""
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
    """The area under the ROC curve: the share of all positive-negative pairs in the right order, ties one half.

    The Mann-Whitney statistic over n·m (Hanley and McNeil 1982), counted in whole numbers. O((n + m) log m).

    Raises:
        ValueError: no positive or no negative score.
    """
    if not positive or not negative:
        raise ValueError("an area under the curve needs positive and negative scores")
    ordered = sorted(negative)
    halves = sum(bisect_left(ordered, score) + bisect_right(ordered, score) for score in positive)
    return halves / (2 * len(positive) * len(negative))


def best_of_n(scores: Sequence[float], correct: Sequence[float], k: int) -> float:
    """Compute how often the top-scored of ``k`` answers is right: the exact mean over all subsets of k of n answers.

    With the answers in falling order of score, a group of m tied ones behind b better ones is the top of
    ``C(n − b, k) − C(n − b − m, k)`` subsets and gains its mean correctness there. Unbiased for k fresh answers.

    Args:
        correct: their worth, 1 or 0, or any number whose mean is wanted.

    Raises:
        ValueError: ``k`` is not in 1..n, or unequal lengths.
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
    """Return the first step (from 0) whose probability of being good is below one half; None where there is none."""
    for index, probability in enumerate(probabilities):
        if probability < 0.5:
            return index
    return None


def score_first_errors(predicted: Sequence[int | None], actual: Sequence[int | None]) -> dict[str, float]:
    """Rate how well the first wrong step of solutions is found; None says that a solution has no error.

    ``accuracy_erroneous`` over those with an error (its place must be hit), ``accuracy_correct`` over those without;
    ``error_f1`` is their harmonic mean. A rate over no solution is left out. Zheng et al. (2024), "ProcessBench".

    Raises:
        ValueError: no solution.
    """
    if not actual:
        raise ValueError("no solution to find errors in")
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
