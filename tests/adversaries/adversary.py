"""The adversary of the graders: what it asks, what it calls a failure, and what it found.

A grader with golds fails for an answer that is right for two golds that mean different things, or right for one gold
although it means another thing, or although it takes back or joins what it says. Which means what is decided by
``equivalents``, which knows nothing of the graders; what it cannot decide is counted.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import empty_answers
import equivalents
import grader_answers
from equivalents import DIFFERENT, SAME, UNKNOWN

from posttrain.graders.grading import Submission, grade_submissions

Pairs = Sequence[tuple[str, str]]  # (gold, answer)
GradePairs = Callable[[Pairs], list[bool]]


@dataclass(frozen=True)
class Failure:
    """An answer that is right for golds for which it must not be; ``why`` says what is wrong about it."""

    why: str
    answer: str
    golds: tuple[str, ...]


@dataclass
class Report:
    """What an attack found. ``counts``: answers, golds, comparisons, right, undecided, conventions."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    undecided: list[tuple[str, str]] = field(default_factory=list)

    def add(self, other: Report) -> Report:
        """This report with another one's numbers."""
        self.counts += other.counts
        self.failures += other.failures
        self.undecided += other.undecided
        return self

    def summary(self, shown: int = 20) -> str:
        """For a message: how many failures by reason, and some of them."""
        kinds = Counter(failure.why for failure in self.failures)
        lines = [f"{dict(self.counts)}; failures: {dict(kinds)}"]
        by_kind = {why: [failure for failure in self.failures if failure.why == why] for why in kinds}
        for why, found in by_kind.items():
            lines += [f"  {why}: {failure.answer!r} is right for {list(failure.golds)}" for failure in found[:shown]]
        return "\n".join(lines)


def submission(answer: str, gold: str | None, **meta: object) -> Submission:
    """An answer as a template with tags hands it over."""
    return Submission(f"<think> So be it. </think> <answer> {answer} </answer>", answer.strip() or None, gold, meta)


def with_grader(name: str) -> GradePairs:
    """Pairs graded by the grader of that name, in batches."""

    def grade_pairs(pairs: Pairs) -> list[bool]:
        found: list[bool] = []
        for start in range(0, len(pairs), 20_000):
            batch = [submission(answer, gold) for gold, answer in pairs[start : start + 20_000]]
            found += [verdict.outcome == "right" for verdict in grade_submissions(name, batch)]
        return found

    return grade_pairs


def attack_with_constants(grade_pairs: GradePairs, answers: Iterable[str], golds: Sequence[str]) -> Report:
    """Every answer against every gold."""
    answers = list(answers)
    report = Report(Counter(answers=len(answers), golds=len(golds), comparisons=len(answers) * len(golds)))
    pairs = [(gold, answer) for answer in answers for gold in golds]
    correct: dict[str, list[str]] = {}
    for (gold, answer), is_correct in zip(pairs, grade_pairs(pairs), strict=True):
        if is_correct:
            correct.setdefault(answer, []).append(gold)
    blank = frozenset((*empty_answers.invisible_texts(), *empty_answers.empty_marks()))
    for answer, own in correct.items():
        report.counts["right"] += len(own)
        _judge_alone(report, answer, own, answer in blank)
        _judge_pairs(report, answer, own)
    return report


def _judge_alone(report: Report, answer: str, golds: Sequence[str], reports_nothing: bool) -> None:
    for gold in golds:
        message = equivalents.compare(answer, gold)
        if message == DIFFERENT or (message == UNKNOWN and reports_nothing):
            report.failures.append(
                Failure("says nothing" if reports_nothing else "means another thing", answer, (gold,))
            )
        elif message == UNKNOWN:
            report.counts["undecided"] += 1
            report.undecided.append((gold, answer))


def _judge_pairs(report: Report, answer: str, golds: Sequence[str]) -> None:
    for one, other in combinations(golds, 2):
        message = equivalents.golds_differ(one, other, answer)
        if message == DIFFERENT and equivalents.is_percentage(answer):
            report.counts["conventions"] += 1  # 50 % is 50, and it is 0.5: both are asked for in these words
        elif message == DIFFERENT:
            report.failures.append(Failure("right for two golds", answer, (one, other)))
            return
        elif message == UNKNOWN:
            report.counts["undecided"] += 1
            report.undecided.append((one, other))


def _bare(answer: str) -> str:
    """Without blanks: the last of 111, \\! 111, \\! 111 put first is the same number."""
    return "".join(answer.replace("\\!", "").split())


def attack_with_own(grade_pairs: GradePairs, golds: Sequence[str], rng: random.Random, num_golds: int) -> Report:
    """Hedges and mutations of some of the golds, against the gold that they were made from."""
    chosen = rng.sample(list(golds), min(num_golds, len(golds)))
    report = Report(Counter(golds=len(chosen)))
    pairs: list[tuple[str, str]] = []
    kinds: list[str] = []
    for gold in chosen:
        others = [other for other in rng.sample(list(golds), 4) if equivalents.compare(gold, other) == DIFFERENT]
        for answer in dict.fromkeys(grader_answers.hedges(gold, others[0]) if others else ()):
            if equivalents.compare(answer, gold) != SAME:
                pairs.append((gold, answer))
                kinds.append("hedges")
        equations = grader_answers.chains(gold, others[0]) if others else ()
        for answer in dict.fromkeys([*grader_answers.mutations(gold, rng), *equations]):
            message = equivalents.compare(answer, gold)
            if message == DIFFERENT and _bare(answer) != _bare(gold):
                pairs.append((gold, answer))
                kinds.append("mutated")
            else:
                report.counts[f"mutations_{message}"] += 1
    return _judge_wrong_ones(report, grade_pairs, pairs, kinds)


def attack_with_near_golds(grade_pairs: GradePairs, golds: Sequence[str], rng: random.Random, num_pairs: int) -> Report:
    """Golds against other golds of the same digits and letters, and against golds at random."""
    pairs = list(grader_answers.near(golds))
    pairs = rng.sample(pairs, min(num_pairs, len(pairs)))
    pairs += [(rng.choice(golds), rng.choice(golds)) for _ in range(num_pairs // 4)]
    report = Report(Counter(golds=len({gold for gold, _ in pairs})))
    decided: list[tuple[str, str]] = []
    for gold, other in dict.fromkeys(pairs):
        message = equivalents.compare(other, gold)
        report.counts["undecided_pairs"] += message == UNKNOWN
        if message == DIFFERENT:
            decided.append((gold, other))
    return _judge_wrong_ones(report, grade_pairs, decided, ["another gold"] * len(decided))


def _judge_wrong_ones(report: Report, grade_pairs: GradePairs, pairs: Pairs, kinds: Sequence[str]) -> Report:
    report.counts["answers"] += len({answer for _, answer in pairs})
    report.counts["comparisons"] += len(pairs)
    for (gold, answer), kind, is_correct in zip(pairs, kinds, grade_pairs(pairs), strict=True):
        if is_correct:
            report.counts["right"] += 1
            report.failures.append(Failure(kind, answer, (gold,)))
    return report
