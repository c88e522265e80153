"""Solutions whose steps were judged by how often they lead to the right answer: Math-Shepherd (Wang et al. 2023)."""

from __future__ import annotations

import re

from posttrain.registry import register
from posttrain.tasks.reader import Dropped, row_task, strip_calculations
from posttrain.tasks.reading import Row
from posttrain.tasks.steps.labelled_steps import first_error, stepwise
from posttrain.types import Example, Message

TAG = "ки"  # ends a step in ``input``, where ``label`` has + or −
_SIGNS = {"+": 1, "-": 0}
_FIRST_STEP = "Step 1:"


@register("task", held_out="validation")
@row_task("peiyi9979/Math-Shepherd", share=0.02)
def math_shepherd(row: Row) -> Example:
    """Math-Shepherd, with the keys ``input``, ``label`` and maybe ``task``.

    Wang et al. (2023), "Math-Shepherd: verify and reinforce LLMs step-by-step without human annotations". ``input``
    is the problem and its solution from ``Step 1:`` on, with ``ки`` at the end of each step; ``label`` is the same
    text with ``+`` (class 1: a continuation from here reached the right answer) or ``-`` (class 0) in its
    place. A solution has the score of its last step: whether its answer is right. In rows of GSM8K the calculator notes
    (``<<48/2=24>>``) are removed. ``meta["first_error"]`` is the first step (from 0) with ``-``, or None.

    Dropped and counted: texts that differ in more than the tags, no step, a blank step or problem.
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
        "",
        (Message("user", problem.strip()),),
        responses=(stepwise(steps, labels, score=float(labels[-1])),),
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
