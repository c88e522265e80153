"""Inverse-CDF sampling: one uniform number per row and token, nothing else decides.

The cumulative distribution is summed in 64-bit integers (probabilities in units of 2^-40), so it is
monotone and the same on every device and for every order of summation, and a token of probability
zero (truncated, or below 2^-40) is never drawn.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from posttrain.engines.base import Sampling
from posttrain.randomness import GOLDEN, MIX1, MIX2
from posttrain.types import with_float64

UNIT = float(2**40)


def draw(logits: Tensor, uniforms: Tensor | None, sampling: Sampling, native: bool = False) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    Args:
        logits: ``[R, V]`` of any floating dtype.
        uniforms: ``float64 [R, 1]`` in [0, 1), on the CPU where the logits' device has no float64; None when greedy.
        sampling: temperature and truncation.
        native: by the native kernel, which this process has, where nothing is truncated; logits are float32 on a CPU.

    Returns:
        ids ``int64 [R]`` and the probability ``float32 [R]`` (float64 where the logits are) of each in the full
        distribution at the sampling temperature (1 when greedy).
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if sampling.temperature not in (0.0, 1.0):
        logits = logits / sampling.temperature
    is_truncated = sampling.top_k is not None or sampling.top_p < 1.0
    if native and uniforms is not None and not is_truncated:
        from posttrain.models.kernel import layers

        return layers.draw(logits, uniforms)
    probabilities = logits.softmax(-1)
    if uniforms is None:
        ids = logits.argmax(-1, keepdim=True)
    else:
        kept = probabilities
        if is_truncated:
            kept = truncate(probabilities, sampling.top_k, sampling.top_p)
        cumulative = kept.mul(UNIT).long().cumsum(-1)
        threshold = (uniforms * cumulative[:, -1:].to(uniforms.device)).long().to(cumulative.device)
        # The clamp matters only for a model whose logits are NaN; the caller reports that.
        ids = torch.searchsorted(cumulative, threshold, right=True).clamp_(max=logits.shape[-1] - 1)
    return ids.squeeze(1), probabilities.gather(1, ids).squeeze(1)


def uniform_numbers(keys: Tensor, at: Tensor) -> Tensor:
    """``randomness.uniforms`` where the keys are: ``float64 [R]``, number ``at[r]`` of each key.

    ``keys`` are 64-bit keys read as ``int64 [R]``, whose products wrap around as those of unsigned numbers do.
    """
    golden, mix1, mix2 = (int(x.astype(np.int64)) for x in (GOLDEN, MIX1, MIX2))
    z = keys + (at + 1) * golden
    z = (z ^ _shifted(z, 30)) * mix1
    z = (z ^ _shifted(z, 27)) * mix2
    z = z ^ _shifted(z, 31)
    return _shifted(z, 11).double() * (1.0 / (1 << 53))


def _shifted(z: Tensor, bits: int) -> Tensor:
    """The bits of ``z`` moved right, zeros behind them."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def truncate(probabilities: Tensor, top_k: int | None, top_p: float) -> Tensor:
    """Zero outside the ``top_k`` most probable tokens and outside the nucleus (Holtzman et al. 2020).

    ``probabilities`` is ``[R, V]``. With both, the nucleus is taken of the renormalized top k. The
    nucleus is the smallest set of most probable tokens whose mass reaches ``top_p``; it always
    holds at least one token. Ties are broken by the smaller id. The result is not renormalized.
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
