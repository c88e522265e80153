"""Where batches come from: a data set or rollouts; each a function of the step.

A source owns no state that would have to be saved: rows and random numbers are functions of (seed, step). That of
rollouts keeps the batch that it is in the middle of.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

from posttrain.types import Batch, Rollout


@dataclass(slots=True)
class TrainBatch:
    """What a source gives for one step.

    ``batch`` is None where nothing is to be trained on. ``fresh``: the batch was made for this step
    (and not kept from an earlier one). ``rollouts`` are those to record, ``metrics`` facts about them,
    ``timing`` seconds by phase.
    """

    batch: Batch | None
    fresh: bool = True
    rollouts: list[Rollout] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    timing: dict[str, float] = field(default_factory=dict)


def num_batches(passes: float, num_examples: int, batch: int) -> int:
    """Batches of ``batch`` examples that go ``passes`` times through ``num_examples``; the last may reach further."""
    return math.ceil(Fraction(passes).limit_denominator(10**6) * num_examples / batch)
