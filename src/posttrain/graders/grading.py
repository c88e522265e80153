"""Input and output types for graders.

A grader maps a ``Submission`` to a verdict; keyword-only parameters are its options. Graders registered with
``batched=True`` map a sequence of submissions to verdicts in order. Each example names its task's grader.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from posttrain.registry import find, register

# ``ungraded``: nothing to grade against. ``timeout`` and ``crash``: the grader was killed or died on this submission.
# These count as incorrect and are reported separately.
Outcome = Literal["right", "wrong", "no_answer", "ungraded", "timeout", "crash"]
FAILURES: tuple[Outcome, ...] = ("timeout", "crash")


@dataclass(frozen=True, slots=True)
class Submission:
    """A completion to be graded.

    ``text`` is the template's opening plus the completion, without the prompt. ``extracted`` is the answer found by
    the template's rule, or None. ``answer`` is the gold answer, or None. ``meta`` holds further example fields.
    """

    text: str
    extracted: str | None
    answer: str | None
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A grader's result.

    ``extracted``: the graded answer, if found by the grader's own rule (None: use the submission's). ``info``: further
    numbers recorded with rewards; a grader always reports the same names.
    """

    outcome: Outcome
    extracted: str | None = None
    info: Mapping[str, float] = field(default_factory=dict)

    @property
    def value(self) -> float:
        """1 if correct, else 0."""
        return float(self.outcome == "right")

    def __bool__(self) -> bool:
        """Check if the answer is correct."""
        return self.outcome == "right"


@dataclass(frozen=True, slots=True)
class MeasuredReward:
    """A numeric reward, with further numbers as in ``Verdict.info``.

    ``failure``: measuring failed; becomes the outcome if no other grader ran.
    """

    value: float
    info: Mapping[str, float] = field(default_factory=dict)
    failure: Literal["timeout", "crash"] | None = None


def grade_submissions(
    name: str, submissions: Sequence[Submission], options: Mapping[str, object] | None = None
) -> list[Verdict]:
    """Grade submissions with grader ``name``, in order.

    Raises:
        UnknownComponent: no such grader.
        RecipeError: unknown option.
    """
    entry = find("grader", name, "grader")
    function = entry.bind(options or {}, "grader")
    if entry.traits.get("batched"):
        verdicts = list(function(submissions))
    else:
        verdicts = [function(submission) for submission in submissions]
    assert len(verdicts) == len(submissions), f"grader {name!r}: one verdict for each submission"
    return verdicts


# Categories of characters without ink: controls, formats (zero-width space, byte order mark), surrogates, private and
# unassigned characters, separators; marks, which are seen only on a letter.
_UNSEEN = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zs", "Zl", "Zp", "Mn", "Mc", "Me"))
# Invisible characters from other categories: Hangul fillers, the empty Braille cell, a null notehead, object and byte
# placeholders.
_WITHOUT_INK = frozenset("\u115f\u1160\u3164\uffa0\u2800\U0001d159\ufffc\ufffd")


def is_blank(text: str) -> bool:
    """Check if a text is blank: empty, or only spaces, control characters, marks and fillers."""
    return all(letter in _WITHOUT_INK or unicodedata.category(letter) in _UNSEEN for letter in text)


def texts_of(listed: object) -> tuple[str, ...] | None:
    """Parse a list of texts or numbers, given directly or as JSON. None if it is neither."""
    if isinstance(listed, str) and listed.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):
            listed = json.loads(listed)
    if isinstance(listed, str | int | float):
        listed = [listed]
    if not isinstance(listed, list | tuple) or not all(isinstance(one, str | int | float) for one in listed):
        return None
    return tuple(map(str, listed))


def _gold_answers(submission: Submission) -> tuple[str | None, ...]:
    listed = submission.meta.get("answers")
    if listed:
        return texts_of(listed) or (None,)
    return (submission.answer,)


@register("grader", batched=True)
def any_answer(submissions: Sequence[Submission], *, mode: str = "math") -> list[Verdict]:
    """Correct if the answer matches any gold answer in ``meta["answers"]``.

    ``right = max_k 1[mode(completion, gold_k) = right]``. If nothing matches, aborted gradings are reported as such.
    Without ``meta["answers"]``, falls back to the single gold answer. Accepts a list of texts or numbers, its JSON
    text, or a single value; anything else is ungraded.

    Args:
        mode: grader used for each comparison.
    """
    golds = [_gold_answers(submission) for submission in submissions]
    to_grade = []
    for submission, own in zip(submissions, golds, strict=True):
        to_grade += [replace(submission, answer=gold) for gold in own]
    verdicts = iter(grade_submissions(mode, to_grade))
    found = []
    for own in golds:
        several = [next(verdicts) for _ in own]
        correct = [verdict for verdict in several if verdict.outcome == "right"]
        failed = [verdict for verdict in several if verdict.outcome in FAILURES]
        best = correct or failed or several
        found.append(best[0])
    return found
