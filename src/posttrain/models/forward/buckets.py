"""How the runs of a packed stream attend: in buckets of runs of like length, so that little is padded.

A *run* is a piece of the stream that attends to itself causally, behind a prefix elsewhere in the stream or behind
nothing. Attention wants rectangles; runs that are far apart in length would fill one mostly with padding, since its
work grows with the square of the length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

# A bucket takes another run while the work of its rectangle stays below this multiple of what its runs need ...
MAX_WASTE = 1.25
# ... or while it holds fewer tokens than this: a call to attention has a price of its own.
MIN_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Bucket:
    """Runs padded to one rectangle.

    queries ``int64 [S * W]``: stream index of each slot (padding repeats a valid index); keys
    ``int64 [S * (P + W)]``: that of each prefix and run, or None where no run has a prefix (then attention is causal
    over the queries); allowed ``bool [S, 1, W, P + W]``: which keys a slot sees, where there are ``keys``; filled
    ``int64``: the slots that hold tokens, of the runs in order.
    """

    num_runs: int
    queries: Tensor
    keys: Tensor | None
    allowed: Tensor | None
    filled: Tensor

    def to(self, device: Any) -> Bucket:
        """The same plan on another device."""
        moved = (x if x is None else x.to(device) for x in (self.queries, self.keys, self.allowed, self.filled))
        return Bucket(self.num_runs, *moved)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Run:
    """``length`` tokens from ``start`` on, behind the ``prefix_length`` tokens from ``prefix_start`` on."""

    start: int
    length: int
    prefix_start: int = 0
    prefix_length: int = 0

    @property
    def work(self) -> int:
        """Pairs of slots of a rectangle of this run alone."""
        return self.length * (self.prefix_length + self.length)


def plan_buckets(runs: Sequence[Run]) -> tuple[tuple[Bucket, ...], Tensor | None]:
    """The buckets of all runs, and where each token of the stream stands in their joined outputs ``int64 [N]``.

    Runs must follow one another in the stream without gaps. The second is None where the order is that of the
    stream already. Runs without tokens are in no bucket.
    """
    ordered = sorted((r for r in runs if r.length > 0), key=lambda r: (r.prefix_length > 0, -r.work, r.start))
    pieces: list[list[Run]] = []
    for run in ordered:
        if not pieces or not _fits(pieces[-1], run):
            pieces.append([])
        pieces[-1].append(run)
    joined = [run for piece in pieces for run in _in_stream_order(piece)]
    buckets = tuple(_bucket(_in_stream_order(piece)) for piece in pieces)
    if all(a.start < b.start for a, b in pairwise(joined)):
        return buckets, None
    stream = np.concatenate([np.arange(r.start, r.start + r.length) for r in joined])
    order = np.empty_like(stream)
    order[stream] = np.arange(len(stream))
    return buckets, torch.from_numpy(order)


def _in_stream_order(runs: list[Run]) -> list[Run]:
    return sorted(runs, key=lambda r: r.start)


def _fits(runs: list[Run], run: Run) -> bool:
    if (runs[0].prefix_length > 0) != (run.prefix_length > 0):
        return False
    if sum(r.length for r in runs) < MIN_TOKENS:
        return True
    together = [*runs, run]
    width, prefix = (max(r.length for r in together), max(r.prefix_length for r in together))
    return len(together) * width * (prefix + width) <= MAX_WASTE * sum(r.work for r in together)


def _bucket(runs: list[Run]) -> Bucket:
    starts, lengths, prefix_starts, prefix_lengths = (
        np.array([getattr(r, name) for r in runs], dtype=np.int64)
        for name in ("start", "length", "prefix_start", "prefix_length")
    )
    width, prefix = int(lengths.max()), int(prefix_lengths.max())
    slots = np.arange(width)
    queries = starts[:, None] + np.minimum(slots, lengths[:, None] - 1)
    filled = np.nonzero((slots < lengths[:, None]).reshape(-1))[0]
    keys = allowed = None
    if prefix:
        before = np.arange(prefix)
        behind = prefix_starts[:, None] + np.minimum(before, np.maximum(prefix_lengths[:, None] - 1, 0))
        keys = torch.from_numpy(np.concatenate([behind, queries], axis=1).reshape(-1))
        seen = np.broadcast_to((before < prefix_lengths[:, None])[:, None], (len(runs), width, prefix))
        causal = np.broadcast_to(np.tril(np.ones((width, width), dtype=bool)), (len(runs), width, width))
        allowed = torch.from_numpy(np.concatenate([seen, causal], axis=2)[:, None])
    return Bucket(len(runs), torch.from_numpy(queries.reshape(-1)), keys, allowed, torch.from_numpy(filled))
