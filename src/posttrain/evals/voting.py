"""Majority voting: which answers count as the same, and what a vote among k samples is worth.

Source: Wang et al. (2023), "Self-Consistency Improves Chain of Thought Reasoning in Language Models".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from posttrain.graders.answers import clean_answer, parse_quantity


@dataclass(frozen=True, slots=True)
class Vote:
    """An answer that ``count`` samples gave; ``worth`` is the share of them that was right (a whole 0 or 1 as int)."""

    count: int
    worth: int | Fraction


def vote_key(answer: str) -> str:
    """What an answer votes for: equal keys are the same vote.

    Numbers vote for their value, exactly (``1/2``, ``0.5`` and ``.50`` alike), whatever unit or % sign stands
    behind it; a unit of one letter may be a variable and stays (``5x`` is not ``5``). Anything else votes for its
    text, cleaned as by ``rewards.answers.same_text``. The gold answer plays no part: a vote does not know it.
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
