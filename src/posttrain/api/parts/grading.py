"""``posttrain.grade``: whether an answer means the same as the gold answer. It takes no torch."""

from __future__ import annotations

from typing import Literal

from posttrain.api.parts.part_arguments import check_part_options
from posttrain.errors import UsageError
from posttrain.graders.grading import Submission, Verdict
from posttrain.registry import find

Grader = Literal["math", "numeric", "exact"]


def grade(answer: str | None, gold: str | float, *, grader: Grader = "math", **options: object) -> Verdict:
    """Say whether an answer is right.

    ``math`` reads a whole response (its last box, "the answer is", its last formula) or a bare answer, and compares
    numbers, expressions, sets, intervals and equations. Numbers and equal texts are decided at once; other expressions
    are compared by processes that can be killed, and take sympy and latex2sympy2-extended. ``numeric`` compares one
    number with the gold number exactly, ``exact`` texts. Nothing that stands in an answer is evaluated as code.

    Args:
        answer: what the model wrote; None for no answer.
        gold: the right answer, a text or a number.
        options: of the grader, such as ``relative_tolerance`` of ``math`` or ``tolerance`` of ``numeric``.

    Returns:
        The verdict. It is true where the answer is right; ``outcome`` is ``right``, ``wrong``, ``no_answer``, or
        ``timeout`` and ``crash`` of a comparison that had to be stopped; ``value`` is 1.0 or 0.0.

    Raises:
        UsageError: an argument of another type, an unknown grader or option, or a package that is not installed.

    Examples:
        >>> pt.grade("so it is \\\\boxed{\\\\frac{1}{2}}", 0.5).outcome, bool(pt.grade("x = 3", "4"))
        ('right', False)
    """
    check_part_options("grade", grade, {"grader": grader})
    if answer is not None and not isinstance(answer, str):
        raise UsageError(f"grade: answer: {type(answer).__name__} is no text. Give what the model wrote")
    if isinstance(gold, bool) or not isinstance(gold, str | int | float):
        raise UsageError(f"grade: gold: {type(gold).__name__} is no text and no number. Give the right answer")
    entry = find("grader", grader, "grade")
    known = entry.function.__kwdefaults__ or {}
    for name in options:
        if name not in known:
            listed = ", ".join(known) or "none"
            raise UsageError(f"grade: {name}: the grader {grader!r} has no such option. Its options: {listed}")
    check_part_options("grade", entry.function, options)
    extracted = answer if grader != "math" else None
    submission = Submission(answer or "", extracted, str(gold))
    if entry.traits.get("batched"):
        return entry.function([submission], **options)[0]
    verdict: Verdict = entry.function(submission, **options)
    return verdict
