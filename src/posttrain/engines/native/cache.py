"""A preallocated key/value cache whose rows share one write column.

Every row of the batch writes its next key and value into the same column (``cursor``); a row's
prompt is placed so that it *ends* at the cursor of the moment when it is admitted, and ``starts``
remembers where. So a decode step writes one slice per layer instead of scattering, prompts of
different lengths need no padding, and the mask changes only when the membership of the batch does.
Positions (rotary or absolute) are the caller's and independent of the column.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from posttrain.engines.native.prefixes import LayerShape, Prefix, SharedPrefixes

GROWTH = 1.5  # a full cache is rebuilt this much larger, or shifted when its left part is unused
ALIGNMENT = 16  # columns; rows of a matrix product then begin on a cache line
VALUE_AXIS = 2  # of the columns of values ``[slots, heads, columns, dim]``


class SlotCache:
    """Keys and values of up to ``num_slots`` rows; the rows in use are always the first ``count``.

    Args:
        shapes: one entry per layer.
        capacity: columns to begin with; grows when needed.
        transposed: keys are laid out ``[slots, heads, dim, columns]`` (for plain batched matrix
            products) instead of ``[slots, heads, columns, dim]``, as values always are.
        shared: where prompts are kept once for all their rows; without it every row has a copy of
            its prompt in columns of its own.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        num_slots: int,
        capacity: int,
        *,
        device: torch.device,
        transposed: bool = False,
        shared: SharedPrefixes | None = None,
    ) -> None:
        self.shapes = list(shapes)
        self.capacity = _aligned(capacity)
        self.device = device
        self.dtype = self.shapes[0].dtype
        self.shared = shared
        self.key_axis = 3 if transposed else 2  # of the columns
        self.count = 0
        self.cursor = 0  # the column that the next step writes
        self.generation = 0  # of the tensors and columns: a cache that grows or shifts has others
        self.first = 0  # the leftmost column that any row uses
        self.starts = np.zeros(num_slots, dtype=np.int64)
        # Zeros, because a masked column is still multiplied: its content must be finite.
        self.keys = [self._empty(num_slots, s.heads, s.key_dim, self.key_axis) for s in self.shapes]
        self.values = [self._empty(num_slots, s.heads, s.value_dim, VALUE_AXIS) for s in self.shapes]
        self.key_rows: list[Tensor] = []
        self.value_rows: list[Tensor] = []
        self._bias: Tensor | None = None

    @property
    def width(self) -> int:
        """Columns that a step reads, the one being written included."""
        return self.cursor + 1 - self.first

    def bias(self) -> Tensor | None:
        """Return ``[count, width]``: 0 where a row may look, -inf before its start; None when all may look anywhere."""
        return None if self._bias is None else self._bias.narrow(1, self.first, self.width)

    def mask(self) -> Tensor | None:
        """Return ``bias`` as attention takes it, ``[count, 1, 1, width]``; aligned on a GPU."""
        bias = self.bias()
        mask = None if bias is None else bias[:, None, None, :]
        return mask if mask is None or mask.device.type == "cpu" else aligned(mask)

    def reserve(self, length: int) -> None:
        """Make prefixes of up to ``length`` tokens fit before the cursor."""
        if self.shared is not None:
            length = 0
        if self.count == 0:
            self.cursor = self.first = length
        elif length > self.cursor:
            shift = length - self.cursor
            self._rebuild(shift, max(self.capacity, self.cursor + shift + 1))
        if self.cursor >= self.capacity:
            self._rebuild(0, self.cursor + 1)

    def place(self, prefix: Prefix, names: Sequence[int], prompt_of_row: Sequence[int]) -> None:
        """Admit ``len(prompt_of_row)`` rows, each continuing from prompt ``prompt_of_row[i]`` of ``prefix``.

        ``names`` tell prompts apart over the cache's life. ``reserve`` has made room. The caller
        ends a round of placements with ``refresh``.
        """
        rows = slice(self.count, self.count + len(prompt_of_row))
        if self.shared is not None:
            self.shared.admit(prefix, names, rows, prompt_of_row)
            self.starts[rows] = self.cursor
            self.count = rows.stop
            return
        lengths = np.array([prefix.lengths[p] for p in prompt_of_row], dtype=np.int64)
        self.starts[rows] = self.cursor - lengths
        self.count = rows.stop
        longest = int(lengths.max())
        if longest == 0:
            return
        prompts = torch.as_tensor(list(prompt_of_row), device=self.device)[:, None]
        # Column c of the window holds token c - (longest - length) of the prompt; before that,
        # token 0 stands in as a finite value under the mask.
        offsets = np.arange(longest)[None, :] - (longest - lengths)[:, None]
        times = torch.as_tensor(np.maximum(offsets, 0), device=self.device)
        for (tensors, axis), sources in zip(self._by_kind(), (prefix.keys, prefix.values), strict=True):
            for tensor, source in zip(tensors, sources, strict=True):
                window = tensor[rows].narrow(axis, self.cursor - longest, longest)
                window.copy_(source[prompts, times].movedim(1, axis))

    def move(self, targets: Sequence[int], sources: Sequence[int]) -> None:
        """Copy rows ``sources`` over rows ``targets`` (disjoint)."""
        target = torch.as_tensor(list(targets), device=self.device)
        source = torch.as_tensor(list(sources), device=self.device)
        used = self.cursor - self.first
        for tensors, axis in self._by_kind():
            for tensor in tensors:
                window = tensor.narrow(axis, self.first, used)
                window[target] = window[source]
        self.starts[list(targets)] = self.starts[list(sources)]
        if self.shared is not None:
            self.shared.entry_of_row[list(targets)] = self.shared.entry_of_row[list(sources)]

    def refresh(self, count: int) -> None:
        """Take the first ``count`` rows as the batch: views, leftmost column, mask."""
        self.count = count
        if self.shared is not None:
            self.shared.refresh(count)
        self._view_rows()

    def _view_rows(self) -> None:
        count = self.count
        if count == 0:
            return
        starts = self.starts[:count]
        self.first = int(starts.min())
        self.key_rows = [k[:count] for k in self.keys]
        self.value_rows = [v[:count] for v in self.values]
        if int(starts.max()) == self.first:
            self._bias = None
            return
        hidden = torch.arange(self.capacity, device=self.device) < torch.as_tensor(starts, device=self.device)[:, None]
        self._bias = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, -torch.inf)

    def advance(self) -> None:
        """The column at the cursor is written; go to the next, making room where there is none."""
        self.cursor += 1
        if self.cursor < self.capacity:
            return
        if self.first * 2 >= self.capacity:
            self._rebuild(-self.first, self.capacity)
        else:
            self._rebuild(0, int(self.capacity * GROWTH) + 1)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write ``[count, heads, dim]`` at the cursor; return views of all that the rows may look at.

        They are ``[count, heads, width, dim]``, of keys ``[count, heads, dim, width]`` if transposed.
        """
        axis, key_rows, value_rows = self.key_axis, self.key_rows[layer], self.value_rows[layer]
        key_rows.select(axis, self.cursor).copy_(keys)
        value_rows.select(VALUE_AXIS, self.cursor).copy_(values)
        width = self.width
        return key_rows.narrow(axis, self.first, width), value_rows.narrow(VALUE_AXIS, self.first, width)

    def _by_kind(self) -> tuple[tuple[list[Tensor], int], tuple[list[Tensor], int]]:
        """Return the layers' keys and values, each with the axis of its columns."""
        return (self.keys, self.key_axis), (self.values, VALUE_AXIS)

    def _empty(self, num_slots: int, heads: int, dim: int, axis: int) -> Tensor:
        shape = [num_slots, heads, dim]
        shape.insert(axis, self.capacity)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def _rebuild(self, shift: int, capacity: int) -> None:
        """Move all used columns by ``shift`` into tensors of ``capacity`` columns, layer by layer."""
        used = self.cursor - self.first
        self.generation += 1
        self.capacity = _aligned(capacity)
        for tensors, axis in self._by_kind():
            for i, old in enumerate(tensors):
                new = self._empty(old.shape[0], old.shape[1], old.shape[5 - axis], axis)
                new.narrow(axis, self.first + shift, used).copy_(old.narrow(axis, self.first, used))
                tensors[i] = new
        self.starts[: self.count] += shift
        self.first += shift
        self.cursor += shift
        self._view_rows()


def aligned(mask: Tensor) -> Tensor:
    """Copy ``mask [R, 1, 1, W]`` to memory whose strides are multiples of 16.

    Memory-efficient attention takes no other: it would be copied in every layer, or refused inside a larger one.
    """
    width = mask.shape[-1]
    return mask.new_empty((*mask.shape[:-1], _aligned(width)))[..., :width].copy_(mask)


def _aligned(columns: int) -> int:
    return max(1, -(-columns // ALIGNMENT)) * ALIGNMENT


class Decoder(Protocol):
    """A decoding path over the weights of the moment: two forward passes."""

    name: str
    shapes: list[LayerShape]
    device: torch.device
    transposed: bool
    can_share: bool  # decode attends to ``cache.shared``

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Prefix:
        """Return keys and values of P prompts (ragged, none empty)."""
        ...

    def decode(self, tokens: Tensor, positions: Tensor, cache: SlotCache) -> Tensor:
        """Return logits ``[R, V]`` of one step: ``int64 [R]`` tokens at their positions ``int64 [R]``.

        Writes every layer's keys and values at the cache's cursor and does not advance it.
        """
        ...


def pad_right(prompts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return ``int64 [P, L]``, each row padded with its own last token, which earlier positions never see."""
    width = max(len(p) for p in prompts)
    return torch.tensor([[*p, *[p[-1]] * (width - len(p))] for p in prompts], dtype=torch.long, device=device)
