"""``posttrain.grade``, to compare an answer with the gold answer. Does not import torch."""

from __future__ import annotations

from typing import Literal

from posttrain.api.parts.part_arguments import check_part_options
from posttrain.errors import UsageError
from posttrain.graders.grading import Submission, Verdict
from posttrain.registry import find

Grader = Literal["math", "numeric", "exact"]


def grade(answer: str | None, gold: str | float, *, grader: Grader = "math", **options: object) -> Verdict:
    """Grade an answer against the gold answer.

    ``math`` accepts a whole response (it looks for the last box, "the answer is", or the last formula) or a bare
    answer. It compares numbers, expressions, sets, intervals and equations. Numbers and identical texts are compared
    directly. Other expressions need sympy and latex2sympy2-extended, and are compared in subprocesses with a timeout.
    ``numeric`` compares single numbers exactly, ``exact`` compares texts. Answers are never evaluated as code.

    Args:
        answer: model output; None if missing.
        gold: gold answer, a text or a number.
        options: grader options, such as ``relative_tolerance`` for ``math`` or ``tolerance`` for ``numeric``.

    Returns:
        A verdict, true if correct. ``outcome`` is ``right``, ``wrong``, ``no_answer``, or ``timeout`` or ``crash`` if
        the comparison was aborted. ``value`` is 1.0 or 0.0.

    Raises:
        UsageError: an argument with the wrong type, an unknown grader or option, or a missing package.

    Examples:
        >>> pt.grade("so it is \\\\boxed{\\\\frac{1}{2}}", 0.5).outcome, bool(pt.grade("x = 3", "4"))
        ('right', False)
    """
    check_part_options("grade", grade, {"grader": grader})
    if answer is not None and not isinstance(answer, str):
        raise UsageError(f"grade: answer: {type(answer).__name__} is not a string. Give the model's response")
    if isinstance(gold, bool) or not isinstance(gold, str | int | float):
        raise UsageError(f"grade: gold: {type(gold).__name__} is neither a string nor a number. Give the gold answer")
    entry = find("grader", grader, "grade")
    known = entry.function.__kwdefaults__ or {}
    for name in options:
        if name not in known:
            listed = ", ".join(known) or "none"
            raise UsageError(f"grade: {name}: unknown option for grader {grader!r}. Known options: {listed}")
    check_part_options("grade", entry.function, options)
    extracted = answer if grader != "math" else None
    submission = Submission(answer or "", extracted, str(gold))
    if entry.traits.get("batched"):
        return entry.function([submission], **options)[0]
    verdict: Verdict = entry.function(submission, **options)
    return verdict
