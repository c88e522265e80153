"""Inverse-CDF sampling, determined by one uniform number per row and token.

Cumulative sums use 64-bit integers (probabilities in units of 2^-40), so they are monotone and identical on all
devices. Tokens with zero probability (truncated, or below 2^-40) are never drawn.
"""

from __future__ import annotations

import math
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from posttrain.sampling.base import MOST_KEPT, Conversation, Sampling
from posttrain.types import with_float64

UNIT = float(2**40)
BLOCK = 128  # columns; a divisor of most vocabularies
LEAST_COLUMNS_IN_BLOCKS = 8192


def draw(logits: Tensor, uniforms: Tensor | None, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    Args:
        logits: ``[R, V]``, any floating dtype.
        uniforms: ``float64 [R, 1]`` in [0, 1), on CPU if the logits' device lacks float64; None for greedy.
        sampling: temperature and truncation.

    Returns:
        ids ``int64 [R]`` and probabilities ``float32 [R]`` (float64 for float64 logits) under the full distribution at
        the sampling temperature (1 for greedy).
    """
    logits, size = _scaled(logits, sampling)
    probabilities = logits.softmax(-1)
    if uniforms is None:
        ids = logits[:, :size].argmax(-1, keepdim=True)
    else:
        kept = probabilities[:, :size]
        if sampling.is_truncated:
            kept = truncate(kept, sampling.top_k, sampling.top_p, sampling.min_p)
        ids = first_beyond(kept.mul(UNIT).long(), uniforms)
    return ids.squeeze(1), probabilities.gather(1, ids).squeeze(1)


def _scaled(logits: Tensor, sampling: Sampling) -> tuple[Tensor, int]:
    """Scale logits by temperature in fp32 or float64, and count eligible ids."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if sampling.temperature not in (0.0, 1.0):
        logits = logits / sampling.temperature
    size = logits.shape[-1]
    if sampling.num_tokens is not None:
        size = min(sampling.num_tokens, size)
    return logits, size


def largest_set(sampling: Sampling, size: int) -> int:
    """Maximum size of a kept set, given ``size`` eligible ids."""
    if sampling.num_tokens is not None:
        size = min(size, sampling.num_tokens)
    return min(sampling.top_k or MOST_KEPT, MOST_KEPT, size)


def draw_kept(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token per row from the kept set, and return this set. Arguments match ``draw``.

    Returns:
        ids ``int64 [R]``, probabilities ``[R]`` within the set, and sets ``int32 [R, 1 + K]``, where K is the maximum
        set size. Column 0 is 1 if only ``MOST_KEPT`` limited the set; ids follow in ascending order, padded with -1.
    """
    logits, size = _scaled(logits, sampling)
    logits = logits[:, :size]
    most = largest_set(sampling, size)
    values, order = logits.topk(most, dim=-1)
    lowest = torch.full_like(values[:, :1], -torch.inf)
    if sampling.min_p > 0.0:
        lowest = values[:, :1] + math.log(sampling.min_p)
    is_kept = values >= lowest
    is_kept[:, 0] = True
    values = values.masked_fill(~is_kept, -torch.inf)
    is_cut = torch.zeros_like(lowest, dtype=torch.bool)
    if sampling.top_k is None and most < size:  # top-p needs the full distribution, and ``values`` is only part of it
        wide = with_float64(logits.masked_fill(logits < lowest, -torch.inf)).double()
        shares = (with_float64(values).double() - wide.logsumexp(-1, keepdim=True)).exp()
        is_cut = (logits >= lowest).sum(-1, keepdim=True) > most
        if sampling.top_p < 1.0:
            is_cut &= (shares.sum(-1, keepdim=True) < sampling.top_p).to(values.device)
    else:
        shares = with_float64(values).double().softmax(-1)
    if sampling.top_p < 1.0:
        is_kept &= (shares.cumsum(-1) - shares < sampling.top_p).to(values.device)
        is_kept[:, 0] = True
    ids, places = order.masked_fill(~is_kept, size).sort(dim=-1)
    probabilities = values.masked_fill(~is_kept, -torch.inf).softmax(-1).gather(1, places)
    column = first_beyond(probabilities.mul(UNIT).long(), uniforms)
    members = ids.masked_fill(ids == size, -1).int()
    drawn = ids.gather(1, column).squeeze(1)
    return drawn, probabilities.gather(1, column).squeeze(1), torch.cat([is_cut.int(), members], dim=1)


class DrawnSets:
    """Kept sets for several steps, converted from ``draw_kept`` output ``int32 [S, R, 1 + K]``."""

    def __init__(self, sets: Tensor) -> None:
        members = sets[..., 1:].cpu()
        is_member = members >= 0
        self.num_rows = members.shape[1]
        self.counts: list[int] = is_member.sum(-1).flatten().tolist()
        self.ids: list[int] = members[is_member].tolist()
        self.starts = list(accumulate(self.counts, initial=0))
        self.cut: list[int] = sets[..., 0].flatten().tolist()

    def append_to(self, row: Conversation, step: int, place: int) -> None:
        """Append one step's set for the row at ``place``."""
        at = step * self.num_rows + place
        row.kept_ids += self.ids[self.starts[at] : self.starts[at + 1]]
        row.kept_counts.append(self.counts[at])
        row.num_cut += self.cut[at]


def first_beyond(units: Tensor, uniforms: Tensor) -> Tensor:
    """Find the first column ``int64 [R, 1]`` whose cumulative sum exceeds fraction ``uniforms [R, 1]`` of the total.

    For large vocabularies, ``units int64 [R, V]`` is summed by block, and only one block is summed by column. Integer
    sums do not depend on order, so the result is identical, with one seventh of the memory traffic.
    """
    rows, size = units.shape
    if size < LEAST_COLUMNS_IN_BLOCKS:
        cumulative = units.cumsum(-1)
        threshold = (uniforms * cumulative[:, -1:].to(uniforms.device)).long().to(units.device)
        # Only needed for NaN logits, which the caller reports.
        return torch.searchsorted(cumulative, threshold, right=True).clamp_(max=size - 1)
    if size % BLOCK:
        units = F.pad(units, (0, -size % BLOCK))
    blocks = units.view(rows, -1, BLOCK)
    cumulative = blocks.sum(-1).cumsum(-1)
    threshold = (uniforms * cumulative[:, -1:].to(uniforms.device)).long().to(units.device)
    block = torch.searchsorted(cumulative, threshold, right=True).clamp_(max=blocks.shape[1] - 1)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK)).squeeze(1).cumsum(-1)
    before = cumulative.gather(1, block) - inside[:, -1:]
    column = torch.searchsorted(inside, threshold - before, right=True)
    return (block * BLOCK + column).clamp_(max=size - 1)


def truncate(probabilities: Tensor, top_k: int | None, top_p: float, min_p: float = 0.0) -> Tensor:
    """Zero ``probabilities [R, V]`` outside the ``top_k`` most likely and the nucleus (Holtzman et al. 2020).

    First, entries below ``min_p`` times the maximum are zeroed (Nguyen et al. 2024, eq. 2). The nucleus is the
    smallest set of most likely tokens, at least one, whose mass reaches ``top_p`` of the remaining mass. Ties prefer
    smaller ids. The result is not renormalized.
    """
    size = probabilities.shape[-1]
    values, order = probabilities.sort(dim=-1, descending=True, stable=True)
    values = values.masked_fill(values < min_p * values[:, :1], 0.0)
    if top_k is not None and top_k < size:
        values = values[:, :top_k]
        order = order[:, :top_k]
    if top_p < 1.0:
        wide = with_float64(values).double()
        before = wide.cumsum(-1)
        before = (before - wide) / before[:, -1:]
        values = values.masked_fill((before >= top_p).to(values.device), 0.0)
    return torch.zeros_like(probabilities).scatter_(-1, order, values)
