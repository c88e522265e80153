"""The weights of a trained model as an engine elsewhere takes them: whole, in one order, adapters merged."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from posttrain.errors import UsageError
from posttrain.models.load import quantized_bits
from posttrain.models.lora import has_adapter, merged_weights
from posttrain.world import ONE, Within, World, whole

Result = TypeVar("Result")
READING, WEIGHTS = "reading the model", "weights"


def checkpoint_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every weight under the name that it has in a checkpoint, always in the same order.

    A weight that stands in two places (a tied head) comes once. Adapters are merged into copies, one at a time.

    Raises:
        UsageError: weights of 4 or 8 bits, which cannot be merged exactly.
    """
    bits = quantized_bits(model)
    if bits is not None:
        raise UsageError(f"weights of {bits} bits cannot be handed to another engine; sample with the native one")
    named = merged_weights(model) if has_adapter(model) else model.named_parameters()
    with torch.no_grad():
        for name, tensor in named:
            yield name, whole(tensor.detach())


class Reader:
    """What an engine elsewhere reads of the model in training: its weights, and what it computes.

    Of a model that lies in parts (``take_parts``) every process has to give its own whenever one reads: what the main
    process reads inside ``by_main``, the others read with it.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.world = model, ONE
        self._within: Within | None = None
        self._begun: Iterator[Any] = iter(())

    def take_parts(self, within: Within, world: World) -> None:
        """The model lies in parts, which ``within`` gathers around what is computed."""
        self._within, self.world = within, world

    def by_main(self, world: World, work: Callable[[], object]) -> None:
        """``work`` in the main process of ``world``."""
        if world.is_main:
            try:
                work()
            finally:
                if self._within is not None:
                    self._end()
                    world.tell(None, READING)
        elif self._within is not None:
            self._read_along(self._within)

    def _read_along(self, within: Within) -> None:
        while (asked := self.world.tell(None, READING)) is not None:
            if asked == WEIGHTS:
                deque(checkpoint_weights(self.model), maxlen=0)
            else:
                asked(self.model, within)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See ``checkpoint_weights``."""
        if self._within is not None:
            self._end()
            self.world.tell(WEIGHTS, READING)
        self._begun = checkpoint_weights(self.model)
        return self._begun

    def compute(self, read: Callable[[Any, Within], Result]) -> Result:
        """``read`` of the model, and of what its passes have to be inside; a function that can be told to others."""
        if self._within is None:
            return read(self.model, lambda compute: compute())
        self._end()
        self.world.tell(read, READING)
        return read(self.model, self._within)

    def _end(self) -> None:
        """Weights that were asked for and not all taken: the others are still giving them."""
        deque(self._begun, maxlen=0)


def save_without_weights(model: Any, tokenizer: Any, folder: Path) -> None:
    """Configuration and tokenizer alone, from which an engine elsewhere builds a model that is given weights later."""
    base = model.get_base_model() if has_adapter(model) else model
    base.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
