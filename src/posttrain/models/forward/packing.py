"""Packing: rows of a batch as one stream of tokens without padding, shared prompts once.

A batch of B rows becomes a stream of N tokens: first every distinct prompt (*prefix*) once, then
each row's own tokens. Linear layers see the stream ``[1, N, d]``; only attention knows which
tokens belong together. A prompt shared by G rows costs its tokens once, not G times.

Attention is a registered implementation of transformers' attention interface, so that the modules
of every architecture that uses the interface run unchanged. The runs of the stream attend in buckets
of like length, so that little is padded: a *run* is a piece of the stream that attends to itself causally,
behind a prefix elsewhere in the stream or behind nothing. Attention wants rectangles; runs that are far
apart in length would fill one mostly with padding, since its work grows with the square of the length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from posttrain.types import Batch

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


ATTENTION_NAME = "posttrain_packed"

# Where a head reads for the trained token t: the state before it (token t - 1), or at t itself.
Reads = Literal["before", "at"]

# Streams are filled up to a multiple of this, so that their sizes recur from batch to batch: kernels
# that are prepared per shape are found again, and freed memory fits the next batch.
ROUND_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Packing:
    """The stream of a batch and how its parts attend.

    tokens, positions ``int64 [N]``, of which the first ``num_tokens`` are real; buckets: the distinct
    prompts and each row's own tokens, as attention sees them; order: where each token of the stream stands in
    the joined outputs of the buckets (see ``plan_buckets``); predictors ``int64 [M]``: stream index whose output
    predicts the m-th trained token, the first ``num_targets`` real; targets ``int64 [M]``; where:
    ``bool [B, T]`` the trained positions in row-major order.
    """

    tokens: Tensor
    positions: Tensor
    num_tokens: int
    buckets: tuple[Bucket, ...]
    order: Tensor | None
    predictors: Tensor
    readers: Tensor | None
    targets: Tensor
    num_targets: int
    where: Tensor

    def to(self, device: Any) -> Packing:
        """The same plan on another device."""

        def moved(part: Any) -> Any:
            if isinstance(part, tuple):
                return tuple(bucket.to(device) for bucket in part)
            return part.to(device) if hasattr(part, "to") else part

        return Packing(**{field.name: moved(getattr(self, field.name)) for field in fields(self)})

    @property
    def num_slots(self) -> int:
        """Slots that attention computes over, padding included."""
        return sum(bucket.queries.numel() for bucket in self.buckets)


def pack(batch: Batch, share_prefixes: bool = True, reads: Reads = "before") -> Packing:
    """Plan the stream of ``batch``.

    With ``reads="before"`` the last token of a row is left out: it predicts nothing, and the state
    before it is its predecessor's. With ``"at"`` it is kept, and ``readers`` says where every trained
    token itself stands.

    The plan is made from values, so a batch on a GPU costs a wait per tensor: pack on the CPU, then
    move the plan.
    """
    device = batch.tokens.device
    tokens, mask = batch.tokens.cpu().numpy(), batch.mask.cpu().numpy()
    lengths, prefixes = batch.lengths.cpu().numpy(), batch.prefix.cpu().numpy()
    prefix_rows, parent = _shared_prompts(batch) if share_prefixes else ([], np.full(len(lengths), -1))
    own_start = np.where(parent >= 0, prefixes, 0)
    prefix_lengths = prefixes[prefix_rows].astype(np.int64)
    unread = 1 if reads == "before" else 0
    own_lengths = (lengths - unread - own_start).astype(np.int64)  # may be 0: a one-token answer
    prefix_offsets = np.concatenate([[0], np.cumsum(prefix_lengths)])
    row_offsets = prefix_offsets[-1] + np.concatenate([[0], np.cumsum(own_lengths)])
    pieces = [tokens[r, :n] for r, n in zip(prefix_rows, prefix_lengths, strict=True)]
    pieces += [tokens[b, s : s + n] for b, (s, n) in enumerate(zip(own_start, own_lengths, strict=True))]
    places = [np.arange(n) for n in prefix_lengths]
    places += [np.arange(s, s + n) for s, n in zip(own_start, own_lengths, strict=True)]
    rows_at, columns_at = np.nonzero(mask)
    first = columns_at == own_start[rows_at]
    readers = row_offsets[:-1][rows_at] + columns_at - own_start[rows_at]
    predictors = readers - 1
    if len(prefix_rows):
        last_of_prefix = prefix_offsets[1:][parent[rows_at]] - 1
        predictors = np.where(first & (parent[rows_at] >= 0), last_of_prefix, predictors)
    runs = [Run(start, n) for start, n in zip(prefix_offsets.tolist(), prefix_lengths.tolist(), strict=False)]
    for start, n, above in zip(row_offsets.tolist(), own_lengths.tolist(), parent.tolist(), strict=False):
        runs.append(Run(start, n) if above < 0 else Run(start, n, runs[above].start, runs[above].length))
    buckets, order = plan_buckets(runs)
    return Packing(
        tokens=torch.from_numpy(_rounded(np.concatenate(pieces))).to(device),
        positions=torch.from_numpy(_rounded(np.concatenate(places).astype(np.int64))).to(device),
        num_tokens=int(row_offsets[-1]),
        buckets=tuple(bucket.to(device) for bucket in buckets),
        order=None if order is None else order.to(device),
        predictors=torch.from_numpy(_rounded(predictors.astype(np.int64))).to(device),
        readers=None if reads == "before" else torch.from_numpy(_rounded(readers.astype(np.int64))).to(device),
        targets=torch.from_numpy(_rounded(tokens[rows_at, columns_at])).to(device),
        num_targets=len(rows_at),
        where=batch.mask,
    )


def _shared_prompts(batch: Batch) -> tuple[list[int], np.ndarray]:
    """One row of each prompt that several rows share, and for each row which of these it has (-1: none)."""
    mask = batch.mask.cpu().numpy()
    lengths, groups, prefixes = (x.tolist() for x in (batch.lengths, batch.group, batch.prefix))
    keys = list(zip(groups, prefixes, strict=True))
    counts = Counter(keys)
    shared: dict[tuple[int, int], int] = {}
    prefix_rows: list[int] = []
    parent = np.full(len(lengths), -1)
    for b, key in enumerate(keys):
        if prefixes[b] < 1 or prefixes[b] >= lengths[b] or counts[key] < 2:
            continue
        if key not in shared:
            shared[key] = len(prefix_rows)
            prefix_rows.append(b)
        parent[b] = shared[key]
        assert not mask[b, 1 : prefixes[b]].any(), (
            "a shared prompt cannot be trained on: it would count once, not G times"
        )
    return prefix_rows, parent


def _rounded(values: np.ndarray) -> np.ndarray:
    """``values`` with zeros behind, up to a multiple of ``ROUND_TOKENS``."""
    return np.pad(values, (0, -len(values) % ROUND_TOKENS))


_active: Packing | None = None


class packed_attention:
    """Context in which the model's attention follows a packing. Backward must run inside it too,
    where activations are recomputed."""

    def __init__(self, packing: Packing) -> None:
        self.packing = packing

    def __enter__(self) -> None:
        global _active
        assert _active is None, "packings do not nest"
        _active = self.packing

    def __exit__(self, *_: Any) -> None:
        global _active
        _active = None


def install_packed_attention(model: Any) -> None:
    """Let ``model`` (a transformers causal LM) attend through this module; outside a packing it is SDPA."""
    model.config._attn_implementation = ATTENTION_NAME


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    packing = _active
    if packing is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    scaling, dropout = kwargs.get("scaling"), kwargs.get("dropout", 0.0)
    window = kwargs.get("sliding_window")
    if window is not None and int(packing.positions.max()) >= window:
        raise AssertionError("sequences longer than the attention window take the padded path")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [N, H, D]
    parts = [q[:0]]  # for a stream that holds nothing
    for bucket in packing.buckets:
        keys = bucket.queries if bucket.keys is None else bucket.keys
        own_q = _rows(q, bucket.queries, bucket.num_runs)
        own_k, own_v = (_rows(x, keys, bucket.num_runs) for x in (k, v))
        own = _sdpa(own_q, own_k, own_v, bucket.allowed, scaling, dropout)
        parts.append(own.transpose(1, 2).flatten(0, 1).index_select(0, bucket.filled))
    joined = torch.cat(parts)
    return _filled(joined if packing.order is None else joined.index_select(0, packing.order), q), None


def _rows(stream: Tensor, at: Tensor, num_runs: int) -> Tensor:
    """``[S, H, W, D]``: the given places of ``stream [N, H, D]``.

    ``stream[at]`` would be slower, and its backward adds up in another order each time where there are two threads.
    """
    return stream.index_select(0, at).unflatten(0, (num_runs, -1)).transpose(1, 2)


def _filled(outputs: Tensor, stream: Tensor) -> Tensor:
    """The outputs with zeros behind them, up to the length of ``stream``: ``[1, N, H, D]``."""
    missing = stream.shape[0] - outputs.shape[0]
    return torch.cat([outputs, stream.new_zeros((missing, *outputs.shape[1:]))], dim=0)[None]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None, dropout: float) -> Tensor:
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=k.shape[1] != q.shape[1],
    )


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    return None if _active is not None else sdpa_mask(*args, **kwargs)


AttentionInterface.register(ATTENTION_NAME, _attention)
AttentionMaskInterface.register(ATTENTION_NAME, _mask)
