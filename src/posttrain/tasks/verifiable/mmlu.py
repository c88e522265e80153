"""Multiple choice over 57 subjects: MMLU (Hendrycks et al. 2021)."""

from __future__ import annotations

from typing import Literal

from posttrain.graders.choice import LETTERS
from posttrain.registry import register
from posttrain.tasks.reader import row_task
from posttrain.tasks.reading import Row
from posttrain.types import Example, Message


@register("task", held_out="validation")
@row_task("cais/mmlu:all", share=None, splits=Literal["validation", "test"], split="test")
def mmlu(row: Row) -> Example:
    """Questions with choices A to D (MMLU); the answer is a letter, read by the grader ``multiple_choice``.

    Keys: ``subject``, ``question``, ``choices`` (two to ten texts), and ``answer``, a letter or the index of a choice
    (from 0). meta holds ``subject`` and ``choices``.

    Args:
        split: for evaluation; a local file is taken whole. There is no training split.

    Source: Hendrycks et al. 2021 (arXiv 2009.03300). Departure: no solved questions come before; the instruction asks
    for the letter and names the subject.
    """
    subject, value = row.text("subject"), row.entries("choices", f"of 2 to {len(LETTERS)} texts")
    if not 2 <= len(value) <= len(LETTERS):
        raise row.fail(f"'choices' must be a list of 2 to {len(LETTERS)} texts; got {value!r}")
    choices = tuple(row.checked(item, f"choice {LETTERS[i]}").strip() for i, item in enumerate(value))
    opening = (
        f"Answer the following multiple-choice question about {subject.replace('_', ' ')} "
        "with the letter of the right choice."
    )
    lines = [row.text("question").strip(), *(f"{m}. {choice}" for m, choice in zip(LETTERS, choices, strict=False))]
    letters, answer = LETTERS[: len(choices)], row.data.get("answer")
    if type(answer) is int and 0 <= answer < len(letters):
        answer = letters[answer]
    if not isinstance(answer, str) or answer.strip() not in tuple(letters):
        raise row.fail(f"'answer' must be a letter from A to {letters[-1]} or 0 to {len(letters) - 1}; got {answer!r}")
    return Example(
        "",
        (Message("user", "\n".join([opening, "", *lines])),),
        answer=answer.strip(),
        meta={"subject": subject, "choices": choices},
        grader="multiple_choice",
    )
