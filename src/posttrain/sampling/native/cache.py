"""Preallocated key/value cache whose rows share one write column.

Each step writes all rows at column ``cursor``. On admission, a row's prompt is placed to end at the cursor, beginning
at its entry in ``starts``. Decode steps therefore write one slice per layer, prompts need no padding, and masks
change only when the batch changes. Positions are managed by callers and independent of columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

GROWTH = 1.5  # a full cache is rebuilt this much larger, or shifted when its left part is unused
ALIGNMENT = 16  # columns; rows of a matrix product then begin on a cache line
VALUE_AXIS = 2  # of the columns of values ``[slots, heads, columns, dim]``


class SlotCache:
    """Keys and values for up to ``num_slots`` rows; the first ``count`` slots are in use.

    Args:
        capacity: initial columns; grows on demand.
        shared: stores each prompt once for all rows. Without it, every row holds a copy.
    """

    def __init__(self, decoder: Decoder, num_slots: int, capacity: int, shared: SharedPrefixes | None = None) -> None:
        self.capacity = _aligned(capacity)
        self.device, self.dtype, self.shared = decoder.device, decoder.shapes[0].dtype, shared
        # Of the columns: keys are ``[slots, heads, dim, columns]`` if transposed, else as values are.
        self.key_axis = 3 if decoder.transposed else VALUE_AXIS
        self.count = 0
        self.cursor = 0  # the column that the next step writes
        self.first = 0  # the leftmost column that any row uses
        self.starts = np.zeros(num_slots, dtype=np.int64)
        # Zeros, because a masked column is still multiplied: its content must be finite.
        self.keys = [self._empty(num_slots, s.heads, s.key_dim, self.key_axis) for s in decoder.shapes]
        self.values = [self._empty(num_slots, s.heads, s.value_dim, VALUE_AXIS) for s in decoder.shapes]
        self.key_rows: list[Tensor] = []
        self.value_rows: list[Tensor] = []
        self._bias: Tensor | None = None

    @property
    def width(self) -> int:
        """Columns read by a step, including the one being written."""
        return self.cursor + 1 - self.first

    def mask(self) -> Tensor | None:
        """Attention mask ``[count, 1, 1, width]``: 0 if visible, -inf before a row's start; aligned on GPU.

        None if every row sees all columns.
        """
        if self._bias is None:
            return None
        mask = self._bias.narrow(1, self.first, self.width)[:, None, None, :]
        return mask if mask.device.type == "cpu" else aligned(mask)

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

        ``names`` identify prompts. ``reserve`` comes before, ``refresh`` after a round of placements.
        """
        rows = slice(self.count, self.count + len(prompt_of_row))
        self.count = rows.stop
        if self.shared is not None:
            self.shared.admit(prefix, names, rows, prompt_of_row)
            self.starts[rows] = self.cursor
            return
        lengths = np.array([prefix.lengths[p] for p in prompt_of_row], dtype=np.int64)
        self.starts[rows] = self.cursor - lengths
        longest = int(lengths.max())
        if longest == 0:
            return
        prompts = torch.as_tensor(list(prompt_of_row), device=self.device)[:, None]
        # Column c of the window holds prompt token c - (longest - length). Earlier columns repeat token 0, a finite
        # value that the mask hides.
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
        if count == 0:
            return
        starts = self.starts[:count]
        self.first = int(starts.min())
        self.key_rows = [k[:count] for k in self.keys]
        self.value_rows = [v[:count] for v in self.values]
        self._bias = None
        if int(starts.max()) > self.first:
            columns = torch.arange(self.capacity, device=self.device)
            hidden = columns < torch.as_tensor(starts, device=self.device)[:, None]
            zeros = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
            self._bias = zeros.masked_fill_(hidden, -torch.inf)

    def advance(self) -> None:
        """Move to the next column after a write, growing if necessary."""
        self.cursor += 1
        if self.cursor < self.capacity:
            return
        if self.first * 2 >= self.capacity:
            self._rebuild(-self.first, self.capacity)
        else:
            self._rebuild(0, int(self.capacity * GROWTH) + 1)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write ``[count, heads, dim]`` at the cursor and return views of visible columns.

        Views are ``[count, heads, width, dim]``; transposed keys are ``[count, heads, dim, width]``.
        """
        axis, key_rows, value_rows = self.key_axis, self.key_rows[layer], self.value_rows[layer]
        key_rows.select(axis, self.cursor).copy_(keys)
        value_rows.select(VALUE_AXIS, self.cursor).copy_(values)
        width = self.width
        return key_rows.narrow(axis, self.first, width), value_rows.narrow(VALUE_AXIS, self.first, width)

    def _by_kind(self) -> tuple[tuple[list[Tensor], int], tuple[list[Tensor], int]]:
        """Pair keys and values with their column axis."""
        return (self.keys, self.key_axis), (self.values, VALUE_AXIS)

    def _empty(self, num_slots: int, heads: int, dim: int, axis: int) -> Tensor:
        shape = [num_slots, heads, dim]
        shape.insert(axis, self.capacity)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def _rebuild(self, shift: int, capacity: int) -> None:
        """Shift used columns by ``shift`` into new tensors with ``capacity`` columns, layer by layer."""
        used = self.cursor - self.first
        self.capacity = _aligned(capacity)
        for tensors, axis in self._by_kind():
            for i, old in enumerate(tensors):
                new = self._empty(old.shape[0], old.shape[1], old.shape[5 - axis], axis)
                new.narrow(axis, self.first + shift, used).copy_(old.narrow(axis, self.first, used))
                tensors[i] = new
        self.starts[: self.count] += shift
        self.first += shift
        self.cursor += shift
        self.refresh(self.count)


class Window:
    """Columns ``first`` to ``end`` of a cache as a step reads them, in the place of the cache in ``Decoder.decode``.

    Args:
        rows: slots that take part.
        column: ``int64 [1]``, the column that the step writes.
        starts: ``int64 [num_slots]``, the first column that each row sees.
    """

    shared = None

    def __init__(self, cache: SlotCache, rows: int, first: int, end: int, column: Tensor, starts: Tensor) -> None:
        self.cache, self.rows, self.first, self.width = cache, rows, first, end - first
        self.column, self.starts = column, starts[:rows, None]

    def mask(self) -> Tensor:
        """Return ``[rows, 1, 1, width]``: 0 where a row may look, -inf elsewhere."""
        columns = torch.arange(self.first, self.first + self.width, device=self.column.device)
        hidden = (columns < self.starts) | (columns > self.column)
        bias = torch.zeros(hidden.shape, dtype=self.cache.dtype, device=hidden.device)
        return bias.masked_fill_(hidden, -torch.inf)[:, None, None, :]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write ``[rows, heads, dim]`` at the column and return views of this window, like ``SlotCache.write``."""
        views = []
        sides = (self.cache.keys[layer], keys, self.cache.key_axis), (self.cache.values[layer], values, VALUE_AXIS)
        for whole, new, axis in sides:
            rows = whole[: self.rows]
            rows.index_copy_(axis, self.column, new.unsqueeze(axis))
            views.append(rows.narrow(axis, self.first, self.width))
        return views[0], views[1]


def aligned(mask: Tensor) -> Tensor:
    """Copy ``mask [R, 1, 1, W]`` to memory with strides divisible by 16.

    Memory-efficient attention requires this; otherwise it copies the mask in every layer, or fails within larger
    masks.
    """
    width = mask.shape[-1]
    return mask.new_empty((*mask.shape[:-1], _aligned(width)))[..., :width].copy_(mask)


def _aligned(columns: int) -> int:
    return max(1, -(-columns // ALIGNMENT)) * ALIGNMENT


class Decoder(Protocol):
    """A decoding path bound to the current weights, with two forward passes."""

    shapes: list[LayerShape]
    device: torch.device
    transposed: bool
    can_share: bool  # decode attends to ``cache.shared``

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Prefix:
        """Compute keys and values for P ragged, nonempty prompts."""

    def decode(self, tokens: Tensor, positions: Tensor, cache: SlotCache) -> Tensor:
        """Compute logits ``[R, V]`` for tokens ``int64 [R]`` at positions ``int64 [R]``.

        Writes keys and values at the cache's cursor without advancing it.
        """


def pad_right(prompts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Pad to ``int64 [P, L]`` with each row's last token, which earlier positions never attend to."""
    width = max(len(p) for p in prompts)
    return torch.tensor([[*p, *[p[-1]] * (width - len(p))] for p in prompts], dtype=torch.long, device=device)


# Prompt keys and values, stored once for all continuations. In each decode step, queries from all rows sharing a prompt
# are multiplied with its keys in one matrix product, so prompts are read once per group (as in Hydragen, Juravsky et
# al. 2024). Scores are then returned to row order, for one softmax over prompt and row columns.


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Key/value heads, key and value sizes, and dtype of one layer."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Prefix:
    """Keys and values for P prompts, per layer ``[P, L, heads, dim]``, valid up to ``lengths[p]``."""

    keys: list[Tensor]
    values: list[Tensor]
    lengths: list[int]

    def select(self, index: int) -> Prefix:
        """Copy out a single prompt."""
        one = slice(index, index + 1)
        return Prefix([k[one].clone() for k in self.keys], [v[one].clone() for v in self.values], [self.lengths[index]])


class SharedPrefixes:
    """E prompts in use, with a map from batch rows to prompts.

    Per layer: keys ``[E, heads, dim, L]``, values ``[E, heads, L, dim]``, zero beyond a prompt's length. All layers
    share the number of key/value heads H. After ``refresh`` with R rows and at most G per prompt: ``to_groups``
    ``int64 [E*H*G]`` gathers from rows ``[R*H]`` (free places repeat row 0), ``to_rows`` ``int64 [R*H]`` gathers
    back, and ``bias`` ``[E*H, 1, L]`` masks columns beyond shorter prompts.
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
        """Store new prompts from ``prefix`` under ``names``, and assign them to ``rows``."""
        fresh = [p for p, name in enumerate(names) if name not in self.names]
        if fresh:
            self._append(prefix, fresh)
            self.names += [names[p] for p in fresh]
        self.entry_of_row[rows] = [self.names.index(names[p]) for p in prompt_of_row]

    def refresh(self, count: int) -> None:
        """Drop prompts unused by the first ``count`` rows, and reindex."""
        used, entries = np.unique(self.entry_of_row[:count], return_inverse=True)
        if len(used) < len(self.names):
            self._keep(used.tolist())
            self.entry_of_row[:count] = entries
        if count == 0:
            return
        sizes = np.bincount(entries, minlength=len(used))
        most = int(sizes.max())
        order = np.argsort(entries, kind="stable")
        place = np.empty(count, dtype=np.int64)  # index within each group
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
        self.lengths += [prefix.lengths[p] for p in fresh]
        width, index = self.width, torch.tensor(list(fresh), device=self.device)
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            # Prefill output for padding is finite and stays masked.
            new_keys = prefix.keys[layer][index, :width].permute(0, 2, 3, 1)
            new_values = prefix.values[layer][index, :width].permute(0, 2, 1, 3)
            self.keys[layer] = torch.cat([pad(one, (0, width - one.shape[3])) for one in (keys, new_keys)])
            self.values[layer] = torch.cat([pad(one, (0, 0, 0, width - one.shape[2])) for one in (values, new_values)])

    def _keep(self, entries: Sequence[int]) -> None:
        self.names = [self.names[e] for e in entries]
        self.lengths = [self.lengths[e] for e in entries]
        index, width = torch.tensor(list(entries), dtype=torch.long, device=self.device), self.width
        self.keys = [k[index, :, :, :width] for k in self.keys]
        self.values = [v[index, :, :width] for v in self.values]
