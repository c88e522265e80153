"""Packing: concatenate rows into a padding-free stream, storing shared prompts once.

B rows become a stream with N positions: distinct prompts (*prefixes*) come first, followed by each row's remaining
tokens. Linear layers see ``[1, N, d]``; only attention knows how positions are grouped.

A *run* is a contiguous causal segment, optionally attending to a prefix elsewhere in the stream. Variable-length
attention consumes runs directly (``Spans``); otherwise, similarly long runs are padded into buckets
(``attention.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from posttrain.types import Batch

# Buckets accept further runs while rectangular work stays below this multiple of necessary work ...
MAX_WASTE = 1.25
# ... or while holding fewer tokens than this, since every attention call has fixed overhead.
MIN_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Bucket:
    """Runs padded to a common rectangle.

    queries ``int64 [S * W]``: stream index per slot (padding repeats valid indices); keys ``int64 [S * (P + W)]``:
    prefix then run indices; allowed ``bool [S, 1, W, P + W]``: attention mask, None without prefixes (plain causal);
    filled ``int64``: slots holding real tokens.
    """

    num_runs: int
    queries: Tensor
    keys: Tensor
    allowed: Tensor | None
    filled: Tensor


@dataclass(frozen=True, slots=True)
class PackedRun:
    """``length`` tokens from ``start`` on, after the ``prefix_length`` tokens from ``prefix_start`` on."""

    start: int
    length: int
    prefix_start: int = 0
    prefix_length: int = 0

    @property
    def work(self) -> int:
        """Pairs of slots of a rectangle of this run alone."""
        return self.length * (self.prefix_length + self.length)


def plan_buckets(runs: Sequence[PackedRun], device: Any = None) -> tuple[tuple[Bucket, ...], Tensor | None]:
    """Group nonempty runs, contiguous in the stream, into buckets.

    Also gives each position's index into concatenated bucket outputs, ``int64 [N]``; None if order is unchanged.
    """
    ordered = sorted((r for r in runs if r.length > 0), key=lambda r: (r.prefix_length > 0, -r.work, r.start))
    pieces: list[list[PackedRun]] = []
    for run in ordered:
        if not pieces or not _fits(pieces[-1], run):
            pieces.append([])
        pieces[-1].append(run)
    pieces = [sorted(piece, key=lambda r: r.start) for piece in pieces]
    joined = [run for piece in pieces for run in piece]
    buckets = tuple(_bucket(piece, device) for piece in pieces)
    if all(a.start < b.start for a, b in pairwise(joined)):
        return buckets, None
    stream = np.concatenate([np.arange(r.start, r.start + r.length) for r in joined])
    order = np.empty_like(stream)
    order[stream] = np.arange(len(stream))
    return buckets, torch.from_numpy(order).to(device)


@dataclass(frozen=True)
class Spans:
    """Runs for variable-length attention, without padding or masks.

    Run r covers stream positions ``query_starts[r]`` to ``query_starts[r + 1]``, and ``keys`` entries
    ``key_starts[r]`` to ``key_starts[r + 1]`` (``int32 [R + 1]`` each): prefix plus run. Attention is causal,
    bottom-right aligned. keys ``int64 [K]``: stream indices; None means all positions in order.
    """

    query_starts: Tensor
    key_starts: Tensor
    keys: Tensor | None
    most_queries: int
    most_keys: int


def plan_spans(runs: Sequence[PackedRun], device: Any = None) -> Spans:
    """Build spans for nonempty runs, contiguous in the stream."""
    filled = [r for r in runs if r.length > 0]
    lengths = np.array([r.length for r in filled], dtype=np.int32)
    before = np.array([r.prefix_length for r in filled], dtype=np.int32)
    keys = None
    if before.any():
        sides = [(a, a + n) for r in filled for a, n in ((r.prefix_start, r.prefix_length), (r.start, r.length))]
        keys = torch.from_numpy(np.concatenate([np.arange(a, b) for a, b in sides])).to(device)
    seen = lengths + before
    return Spans(
        query_starts=_starts(lengths, device),
        key_starts=_starts(seen, device),
        keys=keys,
        most_queries=int(lengths.max(initial=0)),
        most_keys=int(seen.max(initial=0)),
    )


def _starts(lengths: np.ndarray, device: Any) -> Tensor:
    """Sum up lengths: where each of R runs starts, then the end, ``int32 [R + 1]``."""
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return torch.from_numpy(starts).to(device)


def _fits(runs: list[PackedRun], run: PackedRun) -> bool:
    if (runs[0].prefix_length > 0) != (run.prefix_length > 0):
        return False
    if sum(r.length for r in runs) < MIN_TOKENS:
        return True
    together = [*runs, run]
    width = max(r.length for r in together)
    prefix = max(r.prefix_length for r in together)
    return len(together) * width * (prefix + width) <= MAX_WASTE * sum(r.work for r in together)


def _bucket(runs: list[PackedRun], device: Any) -> Bucket:
    starts = np.array([r.start for r in runs], dtype=np.int64)
    lengths = np.array([r.length for r in runs], dtype=np.int64)
    prefix_starts = np.array([r.prefix_start for r in runs], dtype=np.int64)
    prefix_lengths = np.array([r.prefix_length for r in runs], dtype=np.int64)
    width = int(lengths.max())
    prefix = int(prefix_lengths.max())
    slots = np.arange(width)
    before = np.arange(prefix)
    allowed = None
    queries = starts[:, None] + np.minimum(slots, lengths[:, None] - 1)
    places = prefix_starts[:, None] + np.minimum(before, np.maximum(prefix_lengths[:, None] - 1, 0))
    if prefix:
        is_prefix = torch.from_numpy(before < prefix_lengths[:, None]).to(device)[:, None, None]
        causal = torch.ones((width, width), dtype=torch.bool, device=device).tril()
        shape = (len(runs), 1, width, -1)
        allowed = torch.cat([is_prefix.expand(shape), causal.expand(shape)], dim=3)
    filled = np.nonzero((slots < lengths[:, None]).reshape(-1))[0]
    keys = np.concatenate([places, queries], axis=1)
    return Bucket(
        num_runs=len(runs),
        queries=torch.from_numpy(queries.reshape(-1)).to(device),
        keys=torch.from_numpy(keys.reshape(-1)).to(device),
        allowed=allowed,
        filled=torch.from_numpy(filled).to(device),
    )


# For trained token t, heads read state t - 1, state t, or the row's final trained token.
Reads = Literal["before", "at", "last"]

# After attention, the last layer computes only positions being read, if these are at most this fraction of the stream.
# Otherwise gathering costs more than it saves.
MOST_READ = 0.9
# Streams are filled up to a multiple of this, so that their sizes recur: kernels are prepared per shape.
ROUND_TOKENS = 128


@dataclass(frozen=True, eq=False)
class Packing:
    """A packed batch plus its runs.

    tokens, positions ``int64 [N]``, the first ``num_tokens`` real; runs: distinct prompts, then row remainders, in
    stream order; predictors ``int64 [M]``: stream index predicting the m-th trained token, the first ``num_targets``
    real; targets ``int64 [M]``; where ``bool [B, T]``: trained positions. read ``int64 [K]``: every index in
    predictors and readers, plus filler; None if nearly everything is read. experts ``int16 [N, routers, k]``: expert
    choices to replay, -1 for filler; None without.
    """

    tokens: Tensor
    positions: Tensor
    num_tokens: int
    runs: tuple[PackedRun, ...]
    predictors: Tensor
    readers: Tensor | None
    targets: Tensor
    num_targets: int
    where: Tensor
    read: Tensor | None = None
    experts: Tensor | None = None

    def to(self, device: Any) -> Packing:
        """The same plan on another device."""
        moved: dict[str, Any] = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **moved)

    @cached_property
    def rectangles(self) -> tuple[tuple[Bucket, ...], Tensor | None]:
        """Runs in buckets (see ``plan_buckets``)."""
        return plan_buckets(self.runs, self.tokens.device)

    @property
    def filled_runs(self) -> list[PackedRun]:
        """Runs plus a filler run, because kernels write every output."""
        return [*self.runs, PackedRun(self.num_tokens, len(self.tokens) - self.num_tokens)]

    @cached_property
    def spans(self) -> Spans:
        """The spans of ``filled_runs``."""
        return plan_spans(self.filled_runs, self.tokens.device)

    @property
    def longest(self) -> int:
        """Length of the longest sequence, including its prefix."""
        return max((r.prefix_length + r.length for r in self.runs), default=0)

    @property
    def num_slots(self) -> int:
        """Slots that attention computed over, padding of rectangles included."""
        if "rectangles" not in vars(self):
            return self.num_tokens
        return sum(bucket.queries.numel() for bucket in self.rectangles[0])


def pack(batch: Batch, reads: Reads = "before", *, keeps_last: bool = False) -> Packing:
    """Plan a packed stream, preferably on CPU, because planning reads values.

    Under ``reads="before"``, final tokens predict nothing; they are dropped unless ``keeps_last``. Other modes keep
    them, recording each trained position in ``readers``.
    """
    device = batch.tokens.device
    tokens, mask, lengths, prefixes = (x.cpu().numpy() for x in (batch.tokens, batch.mask, batch.lengths, batch.prefix))
    prompt_rows, parent = _shared_prompts(batch)
    own_start = np.where(parent >= 0, prefixes, 0)
    own_end = lengths - (reads == "before" and not keeps_last)  # could equal the start for one-token answers
    pieces = [(row, 0, int(prefixes[row])) for row in prompt_rows]  # row, first token, end
    pieces += zip(range(len(lengths)), own_start.tolist(), own_end.tolist(), strict=True)
    starts = np.cumsum([0, *(end - start for _, start, end in pieces)])
    runs: list[PackedRun] = []
    parents = [-1] * len(prompt_rows) + parent.tolist()
    for at, (_, start, end), above in zip(starts[:-1].tolist(), pieces, parents, strict=True):
        if above < 0:
            runs.append(PackedRun(at, end - start))
        else:
            runs.append(PackedRun(at, end - start, runs[above].start, runs[above].length))
    rows_at, columns_at = np.nonzero(mask)
    readers = starts[len(prompt_rows) : -1][rows_at] + columns_at - own_start[rows_at]
    is_behind_prompt = (parent[rows_at] >= 0) & (columns_at == own_start[rows_at])
    predictors = np.where(is_behind_prompt, starts[1:][parent[rows_at]] - 1, readers - 1)
    stream = _rounded(np.concatenate([tokens[row, start:end] for row, start, end in pieces]))
    if reads == "before":
        read = _read(predictors, len(stream))
    else:
        read = _read(np.concatenate([predictors, readers]), len(stream))

    def on_device(values: np.ndarray) -> Tensor:
        return torch.from_numpy(_rounded(values)).to(device)

    at_readers = None
    if reads != "before":
        at_readers = on_device(readers)
    at_read = None
    if read is not None:
        at_read = on_device(read)

    return Packing(
        tokens=on_device(stream),
        positions=on_device(np.concatenate([np.arange(start, end) for _, start, end in pieces])),
        num_tokens=int(starts[-1]),
        runs=tuple(runs),
        predictors=on_device(predictors),
        readers=at_readers,
        targets=on_device(tokens[rows_at, columns_at]),
        num_targets=len(rows_at),
        where=batch.mask,
        read=at_read,
        experts=_pack_experts(batch.experts, pieces, len(stream)),
    )


def _pack_experts(experts: Tensor | None, pieces: Sequence[tuple[int, int, int]], size: int) -> Tensor | None:
    """Concatenate expert choices ``[B, T, routers, k]`` for pieces (row, first token, end), filling with -1."""
    if experts is None:
        return None
    packed = torch.cat([experts[row, start:end] for row, start, end in pieces])
    filler = packed.new_full((size - len(packed), *packed.shape[1:]), -1)
    return torch.cat([packed, filler])


def _read(at: np.ndarray, size: int) -> np.ndarray | None:
    """The indices ``at`` of a stream, then others without a repetition up to a multiple of ``ROUND_TOKENS``."""
    is_unread = np.ones(size, dtype=bool)
    is_unread[at] = False
    count = len(_rounded(np.flatnonzero(~is_unread)))
    if not 0 < count <= MOST_READ * size:
        return None
    return np.argsort(is_unread, kind="stable")[:count]


def _shared_prompts(batch: Batch) -> tuple[list[int], np.ndarray]:
    """Find a representative row for every shared prompt, and each row's prompt index (-1: unshared)."""
    mask = batch.mask.cpu().numpy()
    lengths, groups, prefixes = (x.tolist() for x in (batch.lengths, batch.prompt_groups, batch.prefix))
    keys = list(zip(groups, prefixes, strict=True))
    counts = Counter(keys)
    sharing = [b for b, key in enumerate(keys) if 1 <= prefixes[b] < lengths[b] and counts[key] > 1]
    is_trained = any(mask[b, 1 : prefixes[b]].any() for b in sharing)
    assert not is_trained, "a shared prompt cannot be trained on: it would count once, not G times"
    rows = {keys[b]: b for b in reversed(sharing)}  # first row per prompt
    places = {row: place for place, row in enumerate(sorted(rows.values()))}
    parent = np.full(len(lengths), -1)
    parent[sharing] = [places[rows[keys[b]]] for b in sharing]
    return list(places), parent


def _rounded(values: np.ndarray) -> np.ndarray:
    """``values`` with zeros behind, up to a multiple of ``ROUND_TOKENS``."""
    return np.pad(values, (0, -len(values) % ROUND_TOKENS))
