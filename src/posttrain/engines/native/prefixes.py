"""Prompts' keys and values kept once, however many rows continue from them.

At a decode step the queries of all rows of a prompt meet its keys in one matrix product, so the
prompt is read once per group and not once per row (as in Hydragen, Juravsky et al. 2024). The
scores go back to row order, where one softmax spans the prompt and the row's own columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Key/value heads of one layer, the size of a key and of a value, and their dtype."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Prefix:
    """Keys and values of P prompts, per layer ``[P, L, heads, dim]``, valid up to ``lengths[p]``."""

    keys: list[Tensor]
    values: list[Tensor]
    lengths: list[int]

    def select(self, index: int) -> Prefix:
        """Return one prompt alone, in memory of its own."""
        one = slice(index, index + 1)
        return Prefix([k[one].clone() for k in self.keys], [v[one].clone() for v in self.values], [self.lengths[index]])


class SharedPrefixes:
    """E prompts in use, and which row of the batch continues from which.

    Per layer: keys ``[E, heads, dim, L]``, values ``[E, heads, L, dim]``, zeros past a prompt's length. All layers must
    have the same number of key/value heads H.

    After ``refresh``, with R rows and at most G of them per prompt: ``to_groups`` ``int64
    [E*H*G]`` picks from rows ``[R*H]`` (places that no row takes repeat row 0), ``to_rows``
    ``int64 [R*H]`` picks back; ``bias`` ``[E*H, 1, L]`` masks what lies past a shorter prompt.
    """

    def __init__(self, shapes: Sequence[LayerShape], num_slots: int, device: torch.device) -> None:
        self.heads = shapes[0].heads
        assert all(shape.heads == self.heads for shape in shapes), "one index serves all layers"
        self.device = device
        self.names: list[int] = []
        self.lengths: list[int] = []
        self.keys = [torch.zeros((0, s.heads, s.key_dim, 0), dtype=s.dtype, device=device) for s in shapes]
        self.values = [torch.zeros((0, s.heads, 0, s.value_dim), dtype=s.dtype, device=device) for s in shapes]
        self.entry_of_row = np.zeros(num_slots, dtype=np.int64)
        self.to_groups = self.to_rows = torch.zeros(0, dtype=torch.long, device=device)
        self.bias: Tensor | None = None

    @property
    def width(self) -> int:
        """Length of the longest prompt in use."""
        return max(self.lengths, default=0)

    def admit(self, prefix: Prefix, names: Sequence[int], rows: slice, prompt_of_row: Sequence[int]) -> None:
        """Keep the prompts of ``prefix``, known from now on by ``names``, and point ``rows`` to them."""
        fresh = [p for p, name in enumerate(names) if name not in self.names]
        if fresh:
            self._append(prefix, fresh)
            self.names += [names[p] for p in fresh]
        self.entry_of_row[rows] = [self.names.index(names[p]) for p in prompt_of_row]

    def refresh(self, count: int) -> None:
        """Forget prompts that none of the first ``count`` rows uses; index the others."""
        used, entries = np.unique(self.entry_of_row[:count], return_inverse=True)
        if len(used) < len(self.names):
            self._keep(used.tolist())
            self.entry_of_row[:count] = entries
        if count == 0:
            return
        sizes = np.bincount(entries, minlength=len(used))
        most = int(sizes.max())
        order = np.argsort(entries, kind="stable")
        place = np.empty(count, dtype=np.int64)  # each row's place within its group
        place[order] = np.arange(count) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        to_rows = (entries[:, None] * self.heads + np.arange(self.heads)) * most + place[:, None]
        to_groups = np.zeros(len(used) * self.heads * most, dtype=np.int64)
        to_groups[to_rows.ravel()] = np.arange(count * self.heads)
        self.to_rows = torch.from_numpy(to_rows.ravel()).to(self.device)
        self.to_groups = torch.from_numpy(to_groups).to(self.device)
        self.bias = None
        if min(self.lengths) < self.width:
            lengths = torch.tensor(self.lengths, device=self.device).repeat_interleave(self.heads)
            past = torch.arange(self.width, device=self.device) >= lengths[:, None]
            zeros = torch.zeros(past.shape, dtype=self.keys[0].dtype, device=self.device)
            self.bias = zeros.masked_fill_(past, -torch.inf)[:, None]

    def _append(self, prefix: Prefix, fresh: Sequence[int]) -> None:
        old, count = len(self.names), len(fresh)
        self.lengths += [prefix.lengths[p] for p in fresh]
        width = self.width
        index = torch.tensor(list(fresh), device=self.device)
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            before, heads = values.shape[2], values.shape[1]
            new_keys = keys.new_zeros((old + count, heads, keys.shape[2], width))
            new_values = values.new_zeros((old + count, heads, width, values.shape[3]))
            new_keys[:old, :, :, :before] = keys
            new_values[:old, :, :before] = values
            # What the prefill computed for its padding is finite and stays under the mask.
            filled = min(width, prefix.keys[layer].shape[1])
            new_keys[old:, :, :, :filled] = prefix.keys[layer][index, :filled].permute(0, 2, 3, 1)
            new_values[old:, :, :filled] = prefix.values[layer][index, :filled].permute(0, 2, 1, 3)
            self.keys[layer], self.values[layer] = new_keys, new_values

    def _keep(self, entries: Sequence[int]) -> None:
        self.names = [self.names[e] for e in entries]
        self.lengths = [self.lengths[e] for e in entries]
        index, width = torch.tensor(list(entries), dtype=torch.long, device=self.device), self.width
        self.keys = [k[index, :, :, :width] for k in self.keys]
        self.values = [v[index, :, :width] for v in self.values]
