"""Input and output of graders.

A grader is a function of a ``Submission``; its keyword-only parameters are its options. One that is registered with
``batched=True`` takes a sequence and gives as many verdicts, in order. Each example names the grader of its task.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from posttrain.registry import find, register

# ``ungraded``: the example has nothing to grade against. ``timeout`` and ``crash``: the grader was stopped, or
# died, while it looked at this submission; both count as not right, and both are counted.
Outcome = Literal["right", "wrong", "no_answer", "ungraded", "timeout", "crash"]
FAILURES: tuple[Outcome, ...] = ("timeout", "crash")


@dataclass(frozen=True, slots=True)
class Submission:
    """One completion as a grader sees it.

    ``text`` is the template's opening and the completion, never the prompt; ``extracted`` the answer that the
    template's rule finds in it, or None; ``answer`` the gold answer, or None; ``meta`` the example's further facts.
    """

    text: str
    extracted: str | None
    answer: str | None
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The finding of a grader.

    ``extracted``: the graded answer, where the grader read the text by a rule of its own (None: that of the
    submission). ``info``: further numbers, recorded next to the rewards; a grader always gives the same names.
    """

    outcome: Outcome
    extracted: str | None = None
    info: Mapping[str, float] = field(default_factory=dict)

    @property
    def value(self) -> float:
        """1 for a right answer, else 0."""
        return float(self.outcome == "right")

    def __bool__(self) -> bool:
        """Return True for a right answer."""
        return self.outcome == "right"


@dataclass(frozen=True, slots=True)
class MeasuredReward:
    """A reward that is a number, with further numbers (as ``Verdict.info``).

    ``failure``: the answer could not be measured; it is the outcome of an answer that nothing else grades.
    ``has_value``: False if the reward says nothing of the answer; the value is then 0.
    """

    value: float
    info: Mapping[str, float] = field(default_factory=dict)
    failure: Literal["timeout", "crash"] | None = None
    has_value: bool = True


def grade(name: str, submissions: Sequence[Submission], options: Mapping[str, object] | None = None) -> list[Verdict]:
    """The verdicts of the grader ``name``, in order.

    Raises:
        UnknownComponent: no such grader.
        RecipeError: an option that it does not have.
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
# Of other categories and yet without ink: Hangul fillers, the Braille cell without dots, a note without a head, and
# what stands for an object or for bytes that are no text.
_WITHOUT_INK = frozenset("\u115f\u1160\u3164\uffa0\u2800\U0001d159\ufffc\ufffd")


def is_blank(text: str) -> bool:
    """Return whether nothing in the text can be seen: no characters, or only spaces, controls, marks and fillers."""
    return all(letter in _WITHOUT_INK or unicodedata.category(letter) in _UNSEEN for letter in text)


def texts_of(listed: object) -> tuple[str, ...] | None:
    """Return a list of texts or numbers as texts, also where it stands as JSON text; None where it is none."""
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
    """Right if the answer equals any of the gold answers in ``meta["answers"]``.

    ``right = max_k 1[mode(completion, gold_k) = right]``. Where none is equal, a grading that had to be stopped is
    what is reported, so that it is counted. Without ``meta["answers"]`` the one gold answer counts. Answers are a list
    of texts or numbers (or its JSON text), or one of them; anything else is ungraded.

    Args:
        mode: the grader that compares with each of them.
    """
    golds = [_gold_answers(submission) for submission in submissions]
    to_grade = []
    for submission, own in zip(submissions, golds, strict=True):
        to_grade += [replace(submission, answer=gold) for gold in own]
    verdicts = iter(grade(mode, to_grade))
    found = []
    for own in golds:
        several = [next(verdicts) for _ in own]
        correct = [verdict for verdict in several if verdict.outcome == "right"]
        failed = [verdict for verdict in several if verdict.outcome in FAILURES]
        best = correct or failed or several
        found.append(best[0])
    return found
