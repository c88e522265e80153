"""Packing: rows of a batch as one stream of tokens without padding, shared prompts once.

A batch of B rows becomes a stream of N tokens: first every distinct prompt (*prefix*) once, then
each row's own tokens. Linear layers see the stream ``[1, N, d]``; only attention knows which
tokens belong together. A prompt shared by G rows costs its tokens once, not G times.

Attention is a registered implementation of transformers' attention interface, so that the modules
of every architecture that uses the interface run unchanged.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from posttrain.types import Batch

ATTENTION_NAME = "posttrain_packed"

# Where a head reads for the trained token t: the state before it (token t - 1), or at t itself.
Reads = Literal["before", "at"]

# Streams are filled up to a multiple of this, so that their sizes recur from batch to batch: kernels
# that are prepared per shape are found again, and freed memory fits the next batch.
ROUND_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Segments:
    """Runs of the stream that attend to themselves causally, padded to one width for attention.

    gather ``int64 [S, W]``: stream index of each slot (padding repeats a valid index); scatter
    ``int64 [tokens]``: flat slot of each token, in stream order; lengths ``int64 [S]``.
    """

    gather: Tensor
    scatter: Tensor
    lengths: Tensor

    def to(self, device: Any) -> Segments:
        """The same plan on another device."""
        return Segments(self.gather.to(device), self.scatter.to(device), self.lengths.to(device))


@dataclass(frozen=True, slots=True)
class Packing:
    """The stream of a batch and how its parts attend.

    tokens, positions ``int64 [N]``, of which the first ``num_tokens`` are real; prefixes: the distinct
    prompts; rows: each row's own tokens; parent ``int64 [R]``: the prefix of each row; predictors
    ``int64 [M]``: stream index whose output predicts the m-th trained token, the first ``num_targets``
    real; targets ``int64 [M]``; where: ``bool [B, T]`` the trained positions in row-major order;
    allowed ``bool [R, 1, W, P + W]``: which keys a row's slot sees (its prefix, then itself), or None
    when no row has a prefix.
    """

    tokens: Tensor
    positions: Tensor
    num_tokens: int
    prefixes: Segments | None
    rows: Segments
    parent: Tensor | None
    allowed: Tensor | None
    predictors: Tensor
    readers: Tensor | None
    targets: Tensor
    num_targets: int
    where: Tensor

    def to(self, device: Any) -> Packing:
        """The same plan on another device."""

        def moved(part: Any) -> Any:
            return part.to(device) if hasattr(part, "to") else part

        return Packing(**{field.name: moved(getattr(self, field.name)) for field in fields(self)})

    @property
    def num_slots(self) -> int:
        """Slots that attention computes over, padding included."""
        return self.rows.gather.numel() + (0 if self.prefixes is None else self.prefixes.gather.numel())


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
    has_prefix = len(prefix_rows) > 0
    row_segments = _segments(row_offsets[:-1], own_lengths, device)
    prefix_segments = _segments(prefix_offsets[:-1], prefix_lengths, device) if has_prefix else None
    return Packing(
        tokens=torch.from_numpy(_rounded(np.concatenate(pieces))).to(device),
        positions=torch.from_numpy(_rounded(np.concatenate(places).astype(np.int64))).to(device),
        num_tokens=int(row_offsets[-1]),
        prefixes=prefix_segments,
        rows=row_segments,
        parent=torch.from_numpy(np.maximum(parent, 0)).to(device) if has_prefix else None,
        allowed=_allowed(parent, prefix_lengths, row_segments) if has_prefix else None,
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


def _segments(offsets: np.ndarray, lengths: np.ndarray, device: torch.device) -> Segments:
    width = max(1, int(lengths.max()))
    slots = np.arange(width)[None, :]
    gather = offsets[:, None] + np.minimum(slots, np.maximum(lengths[:, None] - 1, 0))
    # A segment without tokens (possible at the stream's end) reads a token that nothing reads back.
    gather = np.minimum(gather, max(0, int((offsets + lengths).max()) - 1))
    scatter = np.nonzero((slots < lengths[:, None]).reshape(-1))[0]
    return Segments(
        gather=torch.from_numpy(gather.astype(np.int64)).to(device),
        scatter=torch.from_numpy(scatter.astype(np.int64)).to(device),
        lengths=torch.from_numpy(lengths).to(device),
    )


def _allowed(parent: np.ndarray, prefix_lengths: np.ndarray, rows: Segments) -> Tensor:
    width = rows.gather.shape[1]
    device = rows.gather.device
    longest = int(prefix_lengths.max())
    of_row = torch.from_numpy(np.where(parent >= 0, prefix_lengths[np.maximum(parent, 0)], 0)).to(device)
    sees_prefix = torch.arange(longest, device=device)[None, :] < of_row[:, None]
    causal = torch.ones(width, width, dtype=torch.bool, device=device).tril()
    rows_count = len(parent)
    return torch.cat(
        [
            sees_prefix[:, None, None, :].expand(rows_count, 1, width, longest),
            causal[None, None].expand(rows_count, 1, width, width),
        ],
        dim=-1,
    )


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
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)  # [N, H, D]
    rows = packing.rows
    row_q, row_k, row_v = (x[rows.gather].transpose(1, 2) for x in (q, k, v))  # [R, H, W, D]
    if packing.prefixes is None:
        own = _sdpa(row_q, row_k, row_v, None, scaling, dropout)
        return _filled([own.transpose(1, 2).flatten(0, 1)[rows.scatter]], q), None
    prefixes = packing.prefixes
    prefix_q, prefix_k, prefix_v = (x[prefixes.gather].transpose(1, 2) for x in (q, k, v))
    prompt = _sdpa(prefix_q, prefix_k, prefix_v, None, scaling, dropout)
    keys = torch.cat([prefix_k[packing.parent], row_k], dim=2)
    values = torch.cat([prefix_v[packing.parent], row_v], dim=2)
    own = _sdpa(row_q, keys, values, packing.allowed, scaling, dropout)
    flat = [part.transpose(1, 2).flatten(0, 1)[s.scatter] for part, s in ((prompt, prefixes), (own, rows))]
    return _filled(flat, q), None


def _filled(parts: list[Tensor], stream: Tensor) -> Tensor:
    """The parts behind one another, with zeros up to the length of ``stream``: ``[1, N, H, D]``."""
    missing = stream.shape[0] - sum(part.shape[0] for part in parts)
    return torch.cat([*parts, stream.new_zeros((missing, *parts[0].shape[1:]))], dim=0)[None]


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
