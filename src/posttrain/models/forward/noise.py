"""NEFTune: uniform embedding noise during training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from posttrain.models.forward.packing import Packing
from posttrain.randomness import generator


@dataclass(frozen=True, slots=True)
class EmbeddingNoise:
    """``e ← e + α / √(L d) · U(−1, 1)`` at each position and dimension; L row length, d width.

    Depends only on (seed, step, row), where ``row`` indexes the optimizer batch. Micro-batching and packing therefore
    never change it.

    Source: Jain et al. (2024), "NEFTune", Algorithm 1. Departure from transformers' hook, whose L is the padded batch
    length.
    """

    alpha: float
    seed: int
    step: int

    def of_row(self, row: int, length: int, width: int) -> Tensor:
        """Draw noise ``float32 [length, width]`` for a row."""
        drawn = generator(self.seed, "embedding noise", self.step, row).uniform(-1.0, 1.0, (length, width))
        return torch.from_numpy((drawn * (self.alpha / np.sqrt(length * width))).astype(np.float32))


@dataclass(frozen=True, slots=True)
class NoisyRows:
    """Noise for a forward pass. ``rows``: optimizer-batch indices; ``lengths``: row lengths."""

    noise: EmbeddingNoise
    rows: Sequence[int]
    lengths: Sequence[int]

    def stream(self, packing: Packing, width: int) -> Tensor:
        """``float32 [N, width]``: noise along a packed stream without shared prompts, 0 at filler positions."""
        out = torch.zeros(len(packing.tokens), width)
        for row, length, run in zip(self.rows, self.lengths, packing.runs, strict=True):
            out[run.start : run.start + run.length] = self.noise.of_row(row, length, width)[: run.length]
        return out

    def rectangle(self, columns: int, width: int) -> Tensor:
        """``float32 [B, columns, width]``: noise on padded rows, 0 at padding."""
        out = torch.zeros(len(self.rows), columns, width)
        for place, (row, length) in enumerate(zip(self.rows, self.lengths, strict=True)):
            filled = min(length, columns)
            out[place, :filled] = self.noise.of_row(row, length, width)[:filled]
        return out


@contextmanager
def added_to(embedding: Module, noise: Tensor) -> Iterator[None]:
    """Add noise to embedding outputs in this block."""

    def add(_module: Module, _inputs: Any, output: Tensor) -> Tensor:
        return output + noise.to(output.device, output.dtype).view(output.shape)

    hook = embedding.register_forward_hook(add)
    try:
        yield
    finally:
        hook.remove()
