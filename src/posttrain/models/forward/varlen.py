"""Attention over a packed stream on a GPU, without masks: torch's variable-length flash attention, for 16-bit numbers.

``kernel_for`` compares outputs and gradients of a small stream with attention under a mask in fp32. Where they are not
right (fp32, float64, dropout, a GPU without flash), rectangles under a mask are used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from posttrain.models.forward.packing import ROUND_TOKENS, Packing, Run

# (packing, q [N, H, D], k and v [N, K, D], scale) -> [N, H, D], with K a divisor of H
Kernel = Callable[[Packing, Tensor, Tensor, Tensor, float | None], Tensor]

# How far a kernel that is right may be off, as a share of the largest number: in 16 bits and TF32, and in fp32.
COARSE, EXACT = 0.05, 1e-4


class SharedKeys(torch.autograd.Function):
    """``stream[at]`` for a stream ``[N, K, D]``, whose places ``at`` several runs may share.

    The gradient of a place is the sum over all runs that see it, in fp32: G sums in bfloat16 would each be rounded.
    """

    @staticmethod
    def forward(ctx: Any, stream: Tensor, at: Tensor) -> Tensor:
        ctx.save_for_backward(at)
        ctx.length = len(stream)
        return stream.index_select(0, at)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (at,) = ctx.saved_tensors
        wide = gradient if gradient.dtype.itemsize >= 4 else gradient.float()
        total = wide.new_zeros((ctx.length, *gradient.shape[1:])).index_add_(0, at, wide)
        return total.to(gradient.dtype), None


def varlen(packing: Packing, q: Tensor, k: Tensor, v: Tensor, scaling: float | None) -> Tensor:
    """Attend by ``torch.nn.attention.varlen``: own tokens as queries, prefix and own tokens as keys.

    Its causal window (-1, 0) is aligned at the end of queries and keys, as flash attention's is since version 2.1.
    """
    from torch.nn.attention.varlen import varlen_attn

    spans = packing.spans
    grouped: dict[str, Any] = {"enable_gqa": k.shape[1] != q.shape[1]}
    if spans.keys is not None:
        k, v = SharedKeys.apply(k, spans.keys), SharedKeys.apply(v, spans.keys)
    if "enable_gqa" not in inspect.signature(varlen_attn).parameters:  # torch 2.11
        k, v, grouped = *each_query_its_keys(q, k, v), {}
    starts, most = (spans.query_starts, spans.key_starts), (spans.most_queries, spans.most_keys)
    out = varlen_attn(q, k, v, *starts, *most, scale=scaling, window_size=(-1, 0), **grouped)
    assert isinstance(out, Tensor), "log-sums were not asked for"
    return out


def each_query_its_keys(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with a head for each of q's, along dimension 1."""
    times = q.shape[1] // k.shape[1]
    return (k, v) if times == 1 else (k.repeat_interleave(times, 1), v.repeat_interleave(times, 1))


@cache
def kernel_for(device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, head_dim: int) -> Kernel | None:
    """``varlen`` where it is right on this device, else None."""
    return varlen if is_correct(varlen, device, dtype, heads, key_heads, head_dim) else None


def is_correct(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, head_dim: int
) -> bool:
    """Return True if ``kernel`` runs here with the outputs and gradients of attention under a mask in fp32."""
    runs = (Run(0, 40), Run(40, 130, 0, 40), Run(170, 3, 0, 40), Run(173, 30))
    nothing = torch.zeros(2 * ROUND_TOKENS, dtype=torch.long, device=device)
    packing = Packing(nothing, nothing, 203, runs, nothing, None, nothing, 0, nothing)
    coarse = dtype.itemsize < 4 or (device.type == "cuda" and torch.get_float32_matmul_precision() != "highest")
    # A caller may keep what is saved for its backward pass, and may be in autocast; neither holds here.
    own = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with own, torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        sides = [made_up(len(nothing), n, head_dim, device).to(dtype) for n in (heads, key_heads, key_heads)]
        expected = _outcome(under_mask, packing, [x.float() for x in sides])
        try:
            got = _outcome(kernel, packing, sides)
        except (RuntimeError, ValueError, TypeError, AttributeError, ImportError, OSError):
            return False  # this device, this dtype or this size of heads has none of it, or there is no compiler
    return all(
        bool(((a[:203] - b[:203]).abs().max() <= (COARSE if coarse else EXACT) * b[:203].abs().max()).item())
        for a, b in zip(got, expected, strict=True)
    )


def _outcome(kernel: Kernel, packing: Packing, sides: list[Tensor]) -> list[Tensor]:
    """Outputs and gradients, in fp32."""
    q, k, v = (x.clone().requires_grad_() for x in sides)
    out = kernel(packing, q, k, v, None)
    real = out[: packing.num_tokens].float()
    weights = made_up(len(q), q.shape[1], q.shape[2], q.device)[: len(real)]
    gradients = torch.autograd.grad((real * weights).sum(), (q, k, v))
    return [x.detach().float() for x in (out, *gradients)]


def made_up(rows: int, heads: int, head_dim: int, device: torch.device) -> Tensor:
    """Numbers like random ones, without a generator, so that a run's own stay as they are."""
    places = torch.arange(1, rows * heads * head_dim + 1, dtype=torch.float64)
    return (places * places * 0.6180339887).sin().float().view(rows, heads, head_dim).to(device)


def under_mask(packing: Packing, q: Tensor, k: Tensor, v: Tensor, scaling: float | None) -> Tensor:
    """Attention ``[N, H, D]`` with scores written out, for small streams."""
    k, v = each_query_its_keys(q, k, v)
    places = torch.arange(len(q), device=q.device)
    allowed = torch.zeros((len(q), len(q)), dtype=torch.bool, device=q.device)
    for run in packing.filled_runs:
        own = slice(run.start, run.start + run.length)
        allowed[own, run.prefix_start : run.prefix_start + run.prefix_length] = True
        allowed[own, own] = True
    allowed &= places <= places[:, None]
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~allowed, -torch.inf).softmax(-1), v)
