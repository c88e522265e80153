"""Exact answers: numbers as exact fractions, anything else as text. Nothing is ever evaluated."""

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
_MAX_NAMED_CHARS = 500  # a longer text is no name and number
_NAMED = re.compile(r"\\?[(\[$]*\s*([A-Za-z][A-Za-z0-9_{}']{0,20}(?:\([A-Za-z]\))?)\s*=(?=[^=<>]*$)")


@register("grader")
def numeric(submission: Submission, *, tolerance: Annotated[float, Range(ge=0)] = 0.0) -> Verdict:
    """Right if the extracted answer states the gold number: ``|x − y| ≤ tolerance``.

    x and y are exact fractions read from the two texts (thousands separators, currency signs, %, units in
    words, ``a/b``, mixed numbers; see ``graders.answers``), maybe behind "the answer is" or a name (``x = 12``). A gold
    answer that is no number is compared as text. Fast, and linear in the length of the text.

    Args:
        tolerance: the largest absolute difference that still counts as equal.
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
    """``12`` of ``x = 12`` and ``$x = 12$``; other text as it stands."""
    named = _NAMED.match(text[:_MAX_NAMED_CHARS])
    if named:
        return text[named.end() :].rstrip().removesuffix("\\)").removesuffix("\\]").rstrip("$")
    return text


@register("grader")
def exact(submission: Submission) -> Verdict:
    """Right if the extracted answer is the gold answer as text: without outer dress, and for words without case.

    See ``graders.answers.same_text``.
    """
    if submission.answer is None:
        return Verdict("ungraded")
    if submission.extracted is None or is_blank(submission.extracted):
        return Verdict("no_answer")
    return Verdict("right" if same_text(submission.answer, submission.extracted) else "wrong")


@register("reward")
def is_number(extracted: str | None) -> float:
    """1 if there is an extracted answer and it states one number (a unit is allowed), else 0.

    ``r = 1[extracted is a quantity]``. It teaches the answer's kind before any answer is right.

    Source: the integer reward of the widely shared GSM8K GRPO notebooks, without its weight of 0.5.
    """
    if extracted is not None and parse_quantity(extracted) is not None:
        return 1.0
    return 0.0
