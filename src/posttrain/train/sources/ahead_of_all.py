"""Sampling ahead of several processes that train: rank 0 has it done, and tells the others what was sampled.

What is sampled follows from the recipe and the weights, so it is what one process would train on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from posttrain.train.sources.ahead import GATHERED, Ahead
from posttrain.train.sources.messages import read_drawn, write_drawn
from posttrain.train.sources.rollouts import Drawn
from posttrain.world import World


class AheadOfAll:
    """As ``Ahead``, whose one of rank 0 has the process, the ledger, and what a checkpoint keeps.

    Where the model lies in parts the others give theirs whenever rank 0 copies the weights.
    """

    def __init__(self, ahead: Ahead, world: World) -> None:
        self.ahead, self.world = ahead, world

    def draw(self, step: int, cycle: int) -> Drawn:
        """See ``Ahead.draw``."""
        what = "the batch that was sampled ahead"
        if self.world.is_main:
            drawn = self.ahead.draw(step, cycle)
            self.world.tell(write_drawn(drawn), what)
            return drawn
        while (told := self.world.tell(None, what)) == GATHERED:
            self.ahead.gather()
        stated: Any = told
        return read_drawn(stated, self.ahead.source)

    def describe(self, cycle: int, drawn: Drawn) -> dict[str, float]:
        """See ``Ahead.describe``."""
        return self.ahead.describe(cycle, drawn)

    def take_notices(self) -> list[str]:
        """See ``Ahead.take_notices``."""
        return self.ahead.take_notices()

    def held(self, step: int) -> dict[str, Tensor]:
        """See ``Ahead.held``; of the others nothing."""
        return self.ahead.held(step) if self.world.is_main else {}

    def restore(self, rollout_buffer: Mapping[str, Tensor], vocabulary: int) -> None:
        """See ``Ahead.restore``."""
        if self.world.is_main:
            self.ahead.restore(rollout_buffer, vocabulary)

    def close(self) -> None:
        """See ``Ahead.close``."""
        self.ahead.close()
