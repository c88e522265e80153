"""The reward for a right answer, by the grader of the task. Verifiable rewards as in DeepSeek-R1 (section 2.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from posttrain.graders.grading import Submission, Verdict, grade
from posttrain.registry import register


@register("reward", batched=True, words={"mode": "grader"})
def correct(
    text: Sequence[str],
    extracted: Sequence[str | None],
    answer: Sequence[str | None],
    grader: Sequence[str],
    meta: Sequence[Mapping[str, Any]],
    *,
    mode: str | dict[str, Any] = "auto",
    tolerance: Annotated[float, Field(ge=0)] = 0.0,
) -> list[Verdict]:
    """1 if the answer equals the gold answer, else 0.

    ``r = 1[grader(completion, gold) = right]``. No answer, a grader that had to be stopped, and an example
    without gold give 0.

    Args:
        mode: the grader: ``auto`` is the one that the task names (``numeric`` for GSM8K, ``math`` for MATH, ...);
            or a grader's name; or a mapping with its ``name`` and options, such as
            ``{name: multiple_choice}``. `posttrain explain grader` lists them.
        tolerance: for graders of numbers, the largest absolute difference that still counts as equal.

    Source: the accuracy reward of DeepSeek-R1 (Guo et al. 2025), section 2.2.2.

    Raises:
        RecipeError: a tolerance, and a grader that has none.
    """
    options = {} if isinstance(mode, str) else {key: value for key, value in mode.items() if key != "name"}
    if tolerance:
        options = {"tolerance": tolerance} | options
    fixed = mode if isinstance(mode, str) else str(mode["name"])
    names = list(grader) if fixed == "auto" else [fixed] * len(grader)
    submissions = [Submission(*parts) for parts in zip(text, extracted, answer, meta, strict=True)]
    verdicts: dict[int, Verdict] = {}
    for name in dict.fromkeys(names):
        places = [i for i, own in enumerate(names) if own == name]
        graded = grade(name, [submissions[i] for i in places], options)
        verdicts.update(zip(places, graded, strict=True))
    return [verdicts[i] for i in range(len(submissions))]
