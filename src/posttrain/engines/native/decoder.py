"""What the scheduler asks of a decoding path: two forward passes and the shape of its cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from posttrain.engines.native.cache import SlotCache
from posttrain.engines.native.prefixes import LayerShape, Prefix


class Decoder(Protocol):
    """The model as sampling sees it, over the weights of the moment."""

    name: str
    shapes: list[LayerShape]
    device: torch.device
    transposed: bool
    can_share: bool  # decode attends to ``cache.shared``

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Prefix:
        """Keys and values of P prompts (ragged, none empty)."""
        ...

    def decode(self, tokens: Tensor, positions: Tensor, cache: SlotCache) -> Tensor:
        """One step: ``int64 [R]`` tokens at their positions ``int64 [R]``; logits ``[R, V]``.

        Writes every layer's keys and values at the cache's cursor and does not advance it.
        """
        ...


def pad_right(prompts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """``int64 [P, L]``, each row padded with its own last token.

    Padding on the right is never seen by a causal model's earlier positions, so any id will do.
    """
    width = max(len(p) for p in prompts)
    return torch.tensor([[*p, *[p[-1]] * (width - len(p))] for p in prompts], dtype=torch.long, device=device)
