"""Exact answers: numbers as exact fractions, anything else as text. Nothing is evaluated."""

from __future__ import annotations

import re
from typing import Annotated

from posttrain.graders.answers import parse_quantity, same_answer, same_text
from posttrain.graders.grading import Submission, Verdict, is_blank
from posttrain.graders.signs import fold_signs
from posttrain.registry import register
from posttrain.signatures import Range

_INTRODUCTION = re.compile(
    r"(?:(?:so|thus|hence|therefore)\b,?\s*)?(?:(?:the|my)\s+)?(?:(?:final|correct)\s+)?(?:answer|result)\s*(?:is\b|[:=])\s*:?\s*",
    re.IGNORECASE,
)
_MAX_NAMED_CHARS = 500  # longer texts cannot be a name with a number
_NAMED = re.compile(r"\\?[(\[$]*\s*([A-Za-z][A-Za-z0-9_{}']{0,20}(?:\([A-Za-z]\))?)\s*=(?=[^=<>]*$)")


@register("grader")
def numeric(submission: Submission, *, tolerance: Annotated[float, Range(ge=0)] = 0.0) -> Verdict:
    """Correct if the extracted answer equals the gold number: ``|x − y| ≤ tolerance``.

    Both sides are parsed into exact fractions (thousands separators, currency signs, %, units in words, ``a/b``,
    mixed numbers; see ``graders.answers``), optionally following "the answer is" or a name (``x = 12``). Non-numeric
    gold answers are compared as text. Fast: linear in text length.

    Args:
        tolerance: largest absolute difference still accepted.
    """
    if submission.answer is None:
        return Verdict("ungraded")
    if submission.extracted is None or is_blank(submission.extracted):
        return Verdict("no_answer")
    extracted = fold_signs(submission.extracted)
    candidates = [extracted]
    introduced = _INTRODUCTION.match(extracted)
    if introduced:
        candidates.append(extracted[introduced.end() :])
    if parse_quantity(submission.answer) is not None:
        candidates.append(_without_name(candidates[-1]))
    if any(same_answer(submission.answer, candidate, tolerance) for candidate in candidates):
        return Verdict("right")
    return Verdict("wrong")


def _without_name(text: str) -> str:
    """Strip a name: ``12`` from ``x = 12`` or ``$x = 12$``. Other text is unchanged."""
    named = _NAMED.match(text[:_MAX_NAMED_CHARS])
    if named:
        return text[named.end() :].rstrip().removesuffix("\\)").removesuffix("\\]").rstrip("$")
    return text


@register("grader")
def exact(submission: Submission) -> Verdict:
    """Correct if the extracted answer equals the gold answer as text, ignoring markup and letter case.

    See ``graders.answers.same_text``.
    """
    if submission.answer is None:
        return Verdict("ungraded")
    if submission.extracted is None or is_blank(submission.extracted):
        return Verdict("no_answer")
    return Verdict("right" if same_text(submission.answer, submission.extracted) else "wrong")


@register("reward")
def is_number(extracted: str | None) -> float:
    """1 if the extracted answer is a single number (units allowed), else 0.

    ``r = 1[extracted is a quantity]``. Teaches the answer type before any answer is correct.

    Source: integer reward from widely shared GSM8K GRPO notebooks, without their weight of 0.5.
    """
    if extracted is not None and parse_quantity(extracted) is not None:
        return 1.0
    return 0.0
