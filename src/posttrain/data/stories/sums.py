"""The ``sums`` task: a sum or difference of whole numbers, and demonstrations that may call a tool.

Item i is a pure function of (seed, split, i). Splits are disjoint, whatever the seeds: a hash of the two numbers and
their sign (summands in order of size) decides the one split that may hold them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from random import Random
from statistics import fmean
from typing import Annotated, Any

from pydantic import Field

from posttrain.data.base import ExamplesOnDemand, Task
from posttrain.data.stories.families import Equation
from posttrain.data.stories.task import Split, split_of
from posttrain.errors import UsageError
from posttrain.option_types import Seed
from posttrain.randomness import derive_key
from posttrain.registry import register
from posttrain.types import Call, Example, Message, Turn

MAX_DRAWS = 1000  # of one item: nine of ten belong to another split at most
Bound = Annotated[int, Field(ge=0, lt=10**15)]


@register("task", held_out="validation")
def sums(
    *,
    split: Split = "train",
    seed: Seed = 0,
    size: Annotated[int, Field(ge=1)] = 50_000,
    min_value: Bound = 2,
    max_value: Bound = 99,
    called: Annotated[float, Field(ge=0, le=1)] = 0.0,
) -> Task:
    """Sums and differences of two whole numbers, drawn on demand and the same for everyone: ``What is 19 + 12?``

    Evaluation reports the share of answers that ``called`` a tool.

    Args:
        split: ``train``, ``validation`` or ``test``; no two share a pair of numbers with its sign, whatever the seeds.
        seed: another seed, other sums.
        size: number of items (they cost nothing until they are read).
        min_value, max_value: of the two numbers, uniform between them; the larger comes first in a difference.
        called: share of items whose demonstration calls the tool ``calculator`` before it answers; the others write
            ``19 + 12 = 31.``

    Raises:
        UsageError: ``min_value`` is larger than ``max_value``, or no sum of the split fits the options.
    """
    if min_value > max_value:
        raise UsageError(f"task sums: min_value ({min_value}) is larger than max_value ({max_value})")
    name = f"sums/{split}"

    def make(item: int) -> Example:
        equation = _draw(Random(derive_key(seed, name, item)), split, min_value, max_value)
        calls = Random(derive_key(seed, f"{name}/called", item)).random() < called
        written, result = f"{equation.left} {equation.sign} {equation.right}", str(equation.result)
        call = Call("calculator", json.dumps({"expression": written}), result, "ok")
        return Example(
            id=f"{name}/{item}",
            messages=(Message("user", f"What is {written}?"),),
            answer=result,
            solution=None if calls else str(equation),
            meta={"digits": len(str(max(equation.left, equation.right)))},
            turns=(Turn("", (call,)),) if calls else (),
        )

    return Task("sums", split, ExamplesOnDemand(size, make), shares=_called)


def _called(items: Sequence[Any]) -> Mapping[str, Sequence[float]]:
    """The share of answers with a call of each item, where calls are counted (reward ``tool_calls``)."""
    counted = [[s.parts["tool_calls"] for s in item.samples if "tool_calls" in s.parts] for item in items]
    return {"called": [fmean(float(number > 0) for number in calls) for calls in counted if calls]}


def _draw(rng: Random, split: Split, min_value: int, max_value: int) -> Equation:
    for _ in range(MAX_DRAWS):
        left, right = (rng.randint(min_value, max_value) for _ in range(2))
        sign = rng.choice("+-")
        if sign == "-" and left < right:
            left, right = right, left
        equation = Equation(left, sign, right)
        if split_of(equation.key) == split:
            return equation
    raise UsageError(
        f"task sums: no sum of numbers from {min_value} to {max_value} belongs to the split {split}; raise max_value"
    )
