"""Agreement of scores with labels, and the gain of voting and of choosing by score.

Pure functions of numbers. A tie counts one half, or is shared by those who are tied. An answer without a score has
−inf: it is chosen last.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import groupby

from posttrain.graders.answers import clean_answer, parse_quantity

# Majority voting: which answers count as the same, and what a vote among k samples is worth.
# Source: Wang et al. (2023), "Self-Consistency Improves Chain of Thought Reasoning in Language Models".


def vote_key(answer: str) -> str:
    """Return what an answer votes for: equal keys are the same vote.

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
    verdicts: dict[str, list[bool]] = {}
    for answer, right in zip(answers, is_right, strict=True):
        if answer is not None:
            verdicts.setdefault(vote_key(answer), []).append(right)
    votes = [(len(own), Fraction(sum(own), len(own))) for own in verdicts.values()]  # count, share that was right
    if not any(worth for _, worth in votes):
        return 0.0
    top, silent = max(count for count, _ in votes), n - sum(count for count, _ in votes)
    if k == n:
        tied = [worth for count, worth in votes if count == top]
        return float(sum(tied) / len(tied))
    total = Fraction(0)
    for most in range(1, min(k, top) + 1):
        for (taken, num_tied), worth in _worth_by_top(votes, most, k).items():
            if num_tied:
                total += worth * math.comb(silent, k - taken) / num_tied
    return float(total / math.comb(n, k))


def _worth_by_top(votes: Sequence[tuple[int, Fraction]], most: int, k: int) -> dict[tuple[int, int], Fraction]:
    """Over the ways to take at most k samples so that no answer stands more than ``most`` times.

    By (samples taken, answers that stand exactly ``most`` times): the summed worth of these answers, over all ways.
    """
    state = {(0, 0): (1, Fraction(0))}  # ways, summed worth
    for count, share in votes:
        following: dict[tuple[int, int], tuple[int, Fraction]] = {}
        for (taken, tied), (ways, worth) in state.items():
            for i in range(min(count, most, k - taken) + 1):
                combinations, is_top = math.comb(count, i), i == most
                gained = worth + share * ways if is_top else worth
                before_ways, before_worth = following.get((taken + i, tied + is_top), (0, Fraction(0)))
                following[taken + i, tied + is_top] = (
                    before_ways + ways * combinations,
                    before_worth + gained * combinations,
                )
        state = following
    return {key: worth for key, (_, worth) in state.items()}


def pair_wins(chosen: Sequence[float], rejected: Sequence[float]) -> list[float]:
    """For each pair 1 where the chosen answer has the higher score, 1/2 at a tie, else 0."""
    return [0.5 + 0.5 * ((c > r) - (c < r)) for c, r in zip(chosen, rejected, strict=True)]


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


def best_of_n(scores: Sequence[float], right: Sequence[float], k: int) -> float:
    """Return how often the top-scored of ``k`` answers is right: the exact mean over all subsets of k of the n answers.

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
        ValueError: ``k`` out of range, or unequal lengths.
    """
    n = len(scores)
    if not 1 <= k <= n:
        raise ValueError(f"best of {k} needs 1 to {n} answers to choose from")
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
    """Rate how well the first wrong step of solutions is found; None says that a solution has no error.

    ``accuracy_erroneous`` over those with an error (its place must be hit), ``accuracy_correct`` over those without;
    ``error_f1``, their harmonic mean: neither calling every solution wrong nor none pays. Zheng et al. (2024),
    "ProcessBench". A rate over no solution is left out.

    Raises:
        ValueError: no solution.
    """
    if not actual:
        raise ValueError("no solution to find errors in")
    hits = [float(p == a) for p, a in zip(predicted, actual, strict=True)]
    erroneous = [hit for hit, a in zip(hits, actual, strict=True) if a is not None]
    correct = [hit for hit, a in zip(hits, actual, strict=True) if a is None]
    rates: dict[str, float] = {}
    if erroneous:
        rates["accuracy_erroneous"] = statistics.fmean(erroneous)
    if correct:
        rates["accuracy_correct"] = statistics.fmean(correct)
    if erroneous and correct:
        left, right = rates["accuracy_erroneous"], rates["accuracy_correct"]
        rates["error_f1"] = 2.0 * left * right / (left + right) if left + right else 0.0
    return rates
