"""Competition mathematics: MATH (Hendrycks et al. 2021)."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Field

from posttrain.graders.answers import last_boxed
from posttrain.graders.math.extraction import read_boxes
from posttrain.registry import register
from posttrain.tasks.base import Task
from posttrain.tasks.reader import Dropped, Split, collect, reads_rows
from posttrain.tasks.reading import Row, read_source
from posttrain.types import Example, Message

# "Enter only one of the foci, not both."
_ASKS_FOR_ONE = re.compile(r"\bonly one of\b|\bnot both\b", re.IGNORECASE)


@register("task", held_out="validation")
@reads_rows
def math(
    *,
    split: Split = "train",
    path: str | None = None,
    hub: str = "DigitalLearningGmbH/MATH-lighteval",
    validation_share: Annotated[float, Field(ge=0, lt=1)] = 0.05,
) -> Task:
    """MATH from the hub, or from a local file in its layout.

    Keys: ``problem``; ``solution`` (optional); ``answer`` (optional: otherwise the last ``\\boxed{}`` of the
    solution); ``level`` and ``subject`` or ``type`` (optional, kept in meta). Rows with neither an
    answer nor a box are dropped and counted. Where the solution ends in several boxes ("\\boxed{2} and \\boxed{1}")
    and ``answer`` is no more than the last of them, all of them are the answer; where the problem asks for only one,
    each of them is right (``meta["answers"]``).

    Args:
        split: ``validation`` is a part of the training rows chosen by a hash of the problem, and
            ``train`` is the rest. ``test`` of a local file is the whole file.
        validation_share: share of the training rows that is held out.
    """

    def read(row: Row) -> Example:
        example = read_example(row, split)
        if example.answer is None:
            raise Dropped("no answer and no \\boxed{} in the solution")
        return example

    rows, place = read_source(path, hub, None, "test" if split == "test" else "train")
    return collect(rows, read, place).as_task("math", place, split, validation_share)


def read_example(row: Row, split: str, name: str = "math") -> Example:
    """One row as an example of the task ``name``; its answer is None where the row gives none.

    Raises:
        DataError: the problem is missing, or a key has the wrong type or is empty.
    """
    solution = row.text("solution").strip() if row.has("solution") else None
    problem = row.text("problem").strip()
    boxed = last_boxed(solution or "") or None
    answer = row.answer("answer").strip() if row.has("answer") else boxed
    meta: dict[str, Any] = {}
    grader = "math"
    if answer is not None and answer == boxed and (boxes := read_boxes(solution or "")) is not None:
        if len(boxes.contents) > 1 and _ASKS_FOR_ONE.search(problem):
            meta["answers"], grader = (boxes.joined, *boxes.contents), "any_answer"
        answer = boxes.joined
    if row.has("level"):
        meta["level"] = _read_level(row)
    subject = next((row.text(key) for key in ("subject", "type") if row.has(key)), None)
    if subject is not None:
        meta["subject"] = subject
    place = f"{name}/{split}/{row.line}"
    message = Message("user", problem)
    return Example(place, (message,), answer=answer, solution=solution, meta=meta, grader=grader)


def _read_level(row: Row) -> int | None:
    """``Level 5`` or 5; ``Level ?`` stands in the original data."""
    level = row.data["level"]
    digits = level.removeprefix("Level").strip() if isinstance(level, str) else str(level)
    if digits == "?":
        return None
    if not (digits.isdecimal() and 1 <= int(digits[:9]) <= 5):
        raise row.fail(f"'level' must be 1 to 5 or 'Level 1' to 'Level 5'; got {level!r}")
    return int(digits)
