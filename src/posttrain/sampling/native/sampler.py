"""Inverse-CDF sampling: one uniform number per row and token, nothing else decides.

The cumulative distribution is summed in 64-bit integers (probabilities in units of 2^-40), so it is monotone and the
same on every device; a token of probability zero (truncated, or below 2^-40) is never drawn.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from posttrain.sampling.base import Sampling
from posttrain.types import with_float64

UNIT = float(2**40)
BLOCK = 128  # columns; a divisor of most vocabularies
LEAST_COLUMNS_IN_BLOCKS = 8192


def draw(logits: Tensor, uniforms: Tensor | None, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    Args:
        logits: ``[R, V]`` of any floating dtype.
        uniforms: ``float64 [R, 1]`` in [0, 1), on the CPU where the logits' device has no float64; None when greedy.
        sampling: temperature and truncation.

    Returns:
        ids ``int64 [R]`` and the probability ``float32 [R]`` (float64 where the logits are) of each in the full
        distribution at the sampling temperature (1 when greedy).
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if sampling.temperature not in (0.0, 1.0):
        logits = logits / sampling.temperature
    is_truncated = sampling.top_k is not None or sampling.top_p < 1.0
    size = logits.shape[-1] if sampling.num_tokens is None else min(sampling.num_tokens, logits.shape[-1])
    probabilities = logits.softmax(-1)
    if uniforms is None:
        ids = logits[:, :size].argmax(-1, keepdim=True)
    else:
        kept = probabilities[:, :size]
        if is_truncated:
            kept = truncate(kept, sampling.top_k, sampling.top_p)
        ids = first_beyond(kept.mul(UNIT).long(), uniforms)
    return ids.squeeze(1), probabilities.gather(1, ids).squeeze(1)


def first_beyond(units: Tensor, uniforms: Tensor) -> Tensor:
    """Return the first column ``int64 [R, 1]`` whose cumulative sum exceeds the share ``uniforms [R, 1]`` of the total.

    Of a large vocabulary, ``units int64 [R, V]``, blocks are summed first, and one block is summed up column by column:
    the same sums, for integers have no order, and a seventh of the memory traffic of all cumulative sums.
    """
    rows, size = units.shape
    if size < LEAST_COLUMNS_IN_BLOCKS:
        cumulative = units.cumsum(-1)
        threshold = (uniforms * cumulative[:, -1:].to(uniforms.device)).long().to(units.device)
        # The clamp matters only for a model whose logits are NaN; the caller reports that.
        return torch.searchsorted(cumulative, threshold, right=True).clamp_(max=size - 1)
    blocks = F.pad(units, (0, -size % BLOCK)).view(rows, -1, BLOCK) if size % BLOCK else units.view(rows, -1, BLOCK)
    cumulative = blocks.sum(-1).cumsum(-1)
    threshold = (uniforms * cumulative[:, -1:].to(uniforms.device)).long().to(units.device)
    block = torch.searchsorted(cumulative, threshold, right=True).clamp_(max=blocks.shape[1] - 1)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK)).squeeze(1).cumsum(-1)
    before = cumulative.gather(1, block) - inside[:, -1:]
    column = torch.searchsorted(inside, threshold - before, right=True)
    return (block * BLOCK + column).clamp_(max=size - 1)


def truncate(probabilities: Tensor, top_k: int | None, top_p: float) -> Tensor:
    """Set ``probabilities [R, V]`` to 0 outside the ``top_k`` most probable and the nucleus (Holtzman et al. 2020).

    The nucleus: the smallest set of most probable tokens, at least one, whose mass reaches ``top_p``; with both, of the
    renormalized top k. Ties are broken by the smaller id. The result is not renormalized.
    """
    size = probabilities.shape[-1]
    values, order = probabilities.sort(dim=-1, descending=True, stable=True)
    if top_k is not None and top_k < size:
        values, order = values[:, :top_k], order[:, :top_k]
    if top_p < 1.0:
        wide = with_float64(values).double()
        before = wide.cumsum(-1)
        before = (before - wide) / before[:, -1:]
        values = values.masked_fill((before >= top_p).to(values.device), 0.0)
    return torch.zeros_like(probabilities).scatter_(-1, order, values)
