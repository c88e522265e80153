"""Solutions whose steps were judged by how often they lead to the right answer: Math-Shepherd (Wang et al. 2023)."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

from posttrain.registry import register
from posttrain.tasks.base import Task
from posttrain.tasks.reader import Dropped, Split, collect, reads_rows
from posttrain.tasks.reading import Row, read_source
from posttrain.tasks.steps.judged_solutions import strip_calculations
from posttrain.tasks.steps.labelled_steps import first_error, stepwise
from posttrain.types import Example, Message

TAG = "ки"  # ends a step in ``input``, where ``label`` has + or −
_SIGNS = {"+": 1, "-": 0}
_FIRST_STEP = "Step 1:"


@register("task", held_out="validation")
@reads_rows
def math_shepherd(
    *,
    split: Split = "train",
    path: str | None = None,
    hub: str = "peiyi9979/Math-Shepherd",
    validation_share: Annotated[float, Field(ge=0, lt=1)] = 0.02,
    step_separator: str = "\n",
) -> Task:
    """Math-Shepherd from the hub, or from a local file with the keys ``input``, ``label`` and maybe ``task``.

    Wang et al. (2023), "Math-Shepherd: verify and reinforce LLMs step-by-step without human annotations". ``input``
    is the problem and its solution from ``Step 1:`` on, with ``ки`` at the end of each step; ``label`` is the same
    text with ``+`` (class 1: a continuation from here reached the right answer) or ``-`` (class 0) in its
    place. A solution has the score of its last step: whether its answer is right. In rows of GSM8K the calculator notes
    (``<<48/2=24>>``) are removed. ``meta["first_error"]`` is the first step (from 0) with ``-``, or None.

    Dropped and counted: texts that differ in more than the tags, no step, a blank step or problem.

    Args:
        split: upstream there is one split: ``validation`` is a part of the problems chosen by a hash, and ``train`` is
            the rest. ``test`` of a local file is the whole file.
        validation_share: share of the problems that is held out.
        step_separator: stands between two steps.
    """
    rows, place = read_source(path, hub, None, "test" if split == "test" else "train")
    collected = collect(rows, lambda row: read_example(row, split, step_separator), place)
    return collected.as_task("math_shepherd", place, split, validation_share)


def read_example(row: Row, split: str, separator: str) -> Example:
    """One row as a solution with labelled steps.

    Raises:
        Dropped: the row cannot be used.
        DataError: a key is missing or of the wrong type.
    """
    pieces, labels = align(row.text("input"), row.text("label"))
    problem, mark, first = pieces[0].rpartition(_FIRST_STEP)
    if not mark:
        raise Dropped(f"no {_FIRST_STEP!r} behind the problem")
    kind = row.text("task") if row.has("task") else None
    steps = [mark + first, *pieces[1:]]
    if kind == "GSM8K":
        problem, *steps = (strip_calculations(text) for text in (problem, *steps))
    steps = [step.strip() for step in steps]
    if not problem.strip():
        raise Dropped("a blank problem")
    if not all(re.sub(r"\AStep \d+:", "", step).strip() for step in steps):
        raise Dropped("a blank step")
    return Example(
        id=f"math_shepherd/{split}/{row.line}",
        messages=(Message("user", problem.strip()),),
        responses=(stepwise(steps, labels, separator, score=float(labels[-1])),),
        meta={"first_error": first_error(labels, wrong=0)} | ({} if kind is None else {"task": kind}),
    )


def align(tagged: str, signed: str) -> tuple[list[str], list[int]]:
    """The pieces of a text that end with a tag, and the signs that stand in place of the tags in the other text.

    The texts between are compared, so that a plus or minus of the mathematics is never taken for a sign.

    Raises:
        Dropped: no tag, text behind the last one, or another text between the signs.
    """
    *pieces, rest = tagged.split(TAG)
    if not pieces:
        raise Dropped("no step tag in 'input'")
    if rest.strip():
        raise Dropped("text behind the last step tag")
    labels = []
    position = 0
    for piece in pieces:
        end = position + len(piece)
        if signed[position:end] != piece or signed[end : end + 1] not in _SIGNS:
            raise Dropped("'label' is not 'input' with signs for the step tags")
        labels.append(_SIGNS[signed[end]])
        position = end + 1
    if signed[position:].strip():
        raise Dropped("'label' is not 'input' with signs for the step tags")
    return pieces, labels
