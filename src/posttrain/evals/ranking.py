"""What scores are worth: how often the better answer comes first, and what choosing by score gains.

Pure functions of numbers. Everywhere a tie counts one half, or is shared by those who are tied: the order in
which answers happen to stand says nothing. An answer without a score has −inf: it is chosen last.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby

from posttrain.evals.statistics import Z_95
from posttrain.graders.answers import clean_answer, parse_quantity

# Majority voting: which answers count as the same, and what a vote among k samples is worth.
# Source: Wang et al. (2023), "Self-Consistency Improves Chain of Thought Reasoning in Language Models".


@dataclass(frozen=True, slots=True)
class Vote:
    """An answer that ``count`` samples gave; ``worth`` is the share of them that was right (a whole 0 or 1 as int)."""

    count: int
    worth: int | Fraction


def vote_key(answer: str) -> str:
    """What an answer votes for: equal keys are the same vote.

    Numbers vote for their value, exactly (``1/2``, ``0.5`` and ``.50`` alike), whatever unit or % sign stands
    behind it; a unit of one letter may be a variable and stays (``5x`` is not ``5``). Anything else votes for its
    text, cleaned as by ``graders.answers.same_text``. The gold answer plays no part: a vote does not know it.
    """
    quantity = parse_quantity(answer)
    if quantity is not None:
        variable = quantity.unit if len(quantity.unit) == 1 and quantity.unit != "°" else ""
        return f"{quantity.value}{variable}"
    text = clean_answer(answer)
    letters = "".join(text.split())
    is_words = len(letters) > 1 and letters.isalpha()
    return " ".join(text.casefold().split()) if is_words else letters


def majority_at_k(answers: Sequence[str | None], is_right: Sequence[bool], k: int) -> float:
    """The chance that the most frequent answer among k of an item's samples is right.

    The average over all subsets of size k, exactly. Answers are counted by ``vote_key``; a sample without an
    answer has no vote, and where nobody votes the outcome is wrong. A tie counts as the mean over the tied
    answers, as if one were drawn. Samples that vote alike but were graded apart (``5`` and ``5 kg`` where the
    unit matters) make their answer worth the share of them that was right.
    """
    n = len(answers)
    assert len(is_right) == n, "one verdict per sample"
    assert 1 <= k <= n, "k samples are taken out of n"
    votes = count_votes(answers, is_right)
    if all(vote.worth == 0 for vote in votes):
        return 0.0
    top = max(vote.count for vote in votes)
    if k == n:
        tied = [vote.worth for vote in votes if vote.count == top]
        return float(Fraction(sum(tied)) / len(tied))
    silent = n - sum(vote.count for vote in votes)
    total = Fraction(0)
    for most in range(1, min(k, top) + 1):
        for (taken, tied_answers), worth in _worth_by_top(votes, most, k).items():
            if tied_answers:
                total += Fraction(worth * math.comb(silent, k - taken), tied_answers)
    return float(total / math.comb(n, k))


def count_votes(answers: Sequence[str | None], is_right: Sequence[bool]) -> list[Vote]:
    """The different answers among samples, in order of their first appearance."""
    verdicts: dict[str, list[bool]] = {}
    for answer, right in zip(answers, is_right, strict=True):
        if answer is not None:
            verdicts.setdefault(vote_key(answer), []).append(right)
    shares = [(len(votes), Fraction(sum(votes), len(votes))) for votes in verdicts.values()]
    return [Vote(count, int(share) if share.denominator == 1 else share) for count, share in shares]


def _worth_by_top(votes: Sequence[Vote], most: int, k: int) -> dict[tuple[int, int], int | Fraction]:
    """Over the ways to take at most k samples so that no answer stands more than ``most`` times.

    By (samples taken, answers that stand exactly ``most`` times): the summed worth of these answers, over all ways.
    """
    state: dict[tuple[int, int], tuple[int, int | Fraction]] = {(0, 0): (1, 0)}  # (ways, summed worth)
    for vote in votes:
        choices = [(i, math.comb(vote.count, i)) for i in range(min(vote.count, most) + 1)]
        following: dict[tuple[int, int], tuple[int, int | Fraction]] = {}
        for (taken, tied), (ways, worth) in state.items():
            for i, combinations in choices:
                if taken + i > k:
                    break
                is_top = i == most
                key = (taken + i, tied + is_top)
                gained = worth + vote.worth * ways if is_top else worth
                before_ways, before_worth = following.get(key, (0, 0))
                following[key] = (before_ways + ways * combinations, before_worth + gained * combinations)
        state = following
    return {key: worth for key, (_, worth) in state.items()}


def pair_wins(chosen: Sequence[float], rejected: Sequence[float]) -> list[float]:
    """Of each pair 1 where the chosen answer has the higher score, 1/2 at a tie, else 0.

    Raises:
        ValueError: a score that is NaN.
    """
    _refuse_nan([*chosen, *rejected])
    return [0.5 + 0.5 * ((c > r) - (c < r)) for c, r in zip(chosen, rejected, strict=True)]


def area_under_curve(positive: Sequence[float], negative: Sequence[float]) -> float:
    """The area under the ROC curve: the share of all positive-negative pairs in the right order, ties one half.

    The Mann-Whitney statistic over n·m (Hanley and McNeil 1982), counted in whole numbers. O((n + m) log m).

    Raises:
        ValueError: no positive or no negative score, or a NaN.
    """
    if not positive or not negative:
        raise ValueError("an area under the curve needs positive and negative scores")
    _refuse_nan([*positive, *negative])
    ordered = sorted(negative)
    halves = sum(bisect_left(ordered, score) + bisect_right(ordered, score) for score in positive)
    return halves / (2 * len(positive) * len(negative))


def curve_area_interval(
    positive: Sequence[tuple[float, Hashable]], negative: Sequence[tuple[float, Hashable]]
) -> tuple[float, float]:
    """The interval of the area under the curve, where scores come in clusters (answers to one problem).

    ``A ± 1.96 √V`` within 0..1, with ``V = G/(G−1) Σ_g ψ_g²`` over the G clusters and
    ``ψ_g = Σ_{i∈g} (a_i − A)/n + Σ_{j∈g} (b_j − A)/m``; a_i is the share of the m negatives that the positive i beats
    (ties one half), b_j the share of the n positives that beat the negative j. Obuchowski (1997), "Nonparametric
    analysis of clustered ROC curve data", in the form that lets scores of one cluster go together; with clusters
    of one it is that of DeLong et al. (1988) but for factors of n/(n−1).

    Args:
        positive, negative: scores with their clusters.

    Raises:
        ValueError: no positive or no negative score, or a NaN.
    """
    ups, downs = sorted(s for s, _ in positive), sorted(s for s, _ in negative)
    area = area_under_curve(ups, downs)
    shifts: dict[Hashable, float] = {}
    for score, cluster in positive:
        beaten = (bisect_left(downs, score) + bisect_right(downs, score)) / (2 * len(downs))
        shifts[cluster] = shifts.get(cluster, 0.0) + (beaten - area) / len(ups)
    for score, cluster in negative:
        beating = 1.0 - (bisect_left(ups, score) + bisect_right(ups, score)) / (2 * len(ups))
        shifts[cluster] = shifts.get(cluster, 0.0) + (beating - area) / len(downs)
    if len(shifts) < 2:
        return 0.0, 1.0
    variance = len(shifts) / (len(shifts) - 1) * math.fsum(shift * shift for shift in shifts.values())
    half = Z_95 * math.sqrt(variance)
    return max(0.0, area - half), min(1.0, area + half)


def best_of_n(scores: Sequence[float], right: Sequence[float], k: int) -> float:
    """How often the top-scored of ``k`` answers is right: the exact mean over all subsets of k of the n answers.

    A subset's best answers are those of the highest score in it; where several are tied, each is chosen equally
    often. With the answers in falling order of score, the tied group g of m_g answers, behind b_g better ones, is
    the top of ``C(n − b_g, k) − C(n − b_g − m_g, k)`` subsets, and by symmetry its mean correctness is what is
    gained there. Unbiased for k fresh answers, as pass@k is (Chen et al. 2021); for k = n it is the correctness
    of the top-scored answer, for k = 1 the mean.

    Args:
        scores: of n answers to one problem.
        right: their worth, 1 or 0 (or any number whose mean is wanted).
        k: 1 to n.

    Raises:
        ValueError: ``k`` out of range, unequal lengths, or a score that is NaN.
    """
    n = len(scores)
    if not 1 <= k <= n:
        raise ValueError(f"best of {k} needs 1 to {n} answers to choose from")
    _refuse_nan(scores)
    ordered = sorted(zip(scores, right, strict=True), key=lambda pair: -pair[0])
    remaining, total = n, 0.0
    subsets = math.comb(n, k)
    for _, tied in groupby(ordered, key=lambda pair: pair[0]):
        worths = [worth for _, worth in tied]
        topped = math.comb(remaining, k) - math.comb(remaining - len(worths), k)
        total += topped / subsets * statistics.fmean(worths)
        remaining -= len(worths)
    return total


def first_error(probabilities: Sequence[float], threshold: float = 0.5) -> int | None:
    """The first step (from 0) whose probability of being good is below ``threshold``; None where there is none."""
    return next((index for index, p in enumerate(probabilities) if p < threshold), None)


def score_first_errors(predicted: Sequence[int | None], actual: Sequence[int | None]) -> dict[str, float]:
    """How well the first wrong step of solutions is found; None says that a solution has no error.

    ``first_error_accuracy`` over all solutions; ``accuracy_erroneous`` over those with an error (its place must be
    hit), ``accuracy_correct`` over those without; ``error_f1``, the harmonic mean of the latter two: neither
    always crying nor never crying wolf pays. Zheng et al. (2024), "ProcessBench". A rate over no solution is left out.

    Raises:
        ValueError: no solution.
    """
    if not actual:
        raise ValueError("no solution to find errors in")
    hits = [float(p == a) for p, a in zip(predicted, actual, strict=True)]
    erroneous = [hit for hit, a in zip(hits, actual, strict=True) if a is not None]
    correct = [hit for hit, a in zip(hits, actual, strict=True) if a is None]
    rates = {"first_error_accuracy": statistics.fmean(hits)}
    if erroneous:
        rates["accuracy_erroneous"] = statistics.fmean(erroneous)
    if correct:
        rates["accuracy_correct"] = statistics.fmean(correct)
    if erroneous and correct:
        left, right = rates["accuracy_erroneous"], rates["accuracy_correct"]
        rates["error_f1"] = 2.0 * left * right / (left + right) if left + right else 0.0
    return rates


def _refuse_nan(scores: Sequence[float]) -> None:
    if any(math.isnan(score) for score in scores):
        raise ValueError("a score is NaN: it has no place in an order")
