"""The functions of ``models/forward/fused.py`` by the native kernel, in float32 on a CPU: each is one pass over memory.

The formulas, and what is kept between the passes, are those written there; roundings are not.
"""

from __future__ import annotations

from ctypes import c_float, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from posttrain.models.kernel.build import library

# What each function of layers.cpp takes behind the number of threads: sizes n, tensors or nothing p, numbers f.
_SIGNATURES = {
    "rms_norm": "nnppfpp",
    "rms_norm_backward": "nnpppppp",
    "rotate": "nnnppfpppp",
    "rotate_backward": "nnnpppppppp",
    "swiglu": "nppp",
    "swiglu_backward": "nppppp",
    "packed_attention": "nnnnnfpppppp",
    "packed_attention_backward": "nnnnnfpppppppppp",
    "draw": "nnppppp",
    "token_scores": "nnnppppp",
    "token_scores_backward": "nnnpppp",
}
_TYPES = {"n": c_int64, "p": c_void_p, "f": c_float}


@cache
def _function(name: str) -> Any:
    function = getattr(library(), f"posttrain_{name}")
    function.argtypes, function.restype = [c_int64, *(_TYPES[kind] for kind in _SIGNATURES[name])], None
    return function


def _call(name: str, *arguments: Any) -> None:
    """Tensors are contiguous; the caller holds them."""
    addresses = [x.data_ptr() if isinstance(x, Tensor) else x for x in arguments]
    _function(name)(torch.get_num_threads(), *addresses)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``w x / sqrt(mean(x^2) + eps)`` over the last dimension, without gradients."""
    x, size = x.contiguous(), x.shape[-1]
    out = torch.empty_like(x)
    _call("rms_norm", x.numel() // size, size, x, weight.contiguous(), eps, out, None)
    return out


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) up``, without gradients; ``gate`` is overwritten if it is contiguous."""
    gate = gate.contiguous()
    _call("swiglu", gate.numel(), gate, up.contiguous(), gate)
    return gate


def draw(logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row of ``logits [R, V]`` by uniform numbers ``float64 [R, 1]``, as the native engine's ``draw``.

    Returns ids ``int64 [R]`` and the probability ``float32 [R]`` of each, which is NaN where the logits are.
    """
    logits, uniforms = logits.contiguous(), uniforms.contiguous()
    ids, probabilities = torch.empty(len(logits), dtype=torch.int64), logits.new_empty(len(logits))
    _call("draw", *logits.shape, logits, uniforms, logits.new_empty(logits.shape[1]), ids, probabilities)
    return ids, probabilities


class RmsNorm(torch.autograd.Function):
    """As ``fused.RmsNorm``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        out, factor = torch.empty_like(x), x.new_empty(x.shape[:-1])
        _call("rms_norm", factor.numel(), x.shape[-1], x, weight, eps, out, factor)
        ctx.save_for_backward(x, weight, factor)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, factor = ctx.saved_tensors
        gradient = gradient.contiguous()
        for_x, for_weight = (torch.empty_like(t) if ctx.needs_input_grad[i] else None for i, t in ((0, x), (1, weight)))
        sizes = (factor.numel(), x.shape[-1])
        _call("rms_norm_backward", *sizes, gradient, x, weight, factor, for_x, for_weight)
        return for_x, for_weight, None


class Rotate(torch.autograd.Function):
    """As ``fused.Rotate`` of ``fused.RmsNorm`` of x ``[N, H, D]`` by weight ``[D]``; of x itself without a weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
        out, factor = torch.empty_like(x), None
        if weight is not None:
            weight, factor = weight.contiguous(), x.new_empty(x.shape[:-1])
        _call("rotate", *x.shape, x, weight, eps, cos, sin, out, factor)
        ctx.shape = x.shape
        ctx.save_for_backward(cos, sin, *(() if weight is None else (x, weight, factor)))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, *of_norm = ctx.saved_tensors
        x, weight, factor = of_norm or (None, None, None)
        gradient = gradient.contiguous()
        for_x = torch.empty_like(gradient)
        for_weight = torch.empty_like(weight) if weight is not None and ctx.needs_input_grad[3] else None
        _call("rotate_backward", *ctx.shape, gradient, x, weight, factor, cos, sin, for_x, for_weight)
        return for_x, None, None, for_weight, None


class SwiGlu(torch.autograd.Function):
    """As ``fused.SwiGlu``."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        _call("swiglu", gate.numel(), gate, up, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        for_gate, for_up, gradient = torch.empty_like(gate), torch.empty_like(up), gradient.contiguous()
        _call("swiglu_backward", gate.numel(), gradient, gate, up, for_gate, for_up)
        return for_gate, for_up


class PackedAttention(torch.autograd.Function):
    """Causal attention of streams q ``[N, H, D]``, k, v ``[N, K, D]`` by runs (``Packing.table``): ``[N, H, D]``.

    D is a multiple of 32, and K divides H. 0 behind the first ``num_tokens``.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, runs: Tensor, num_tokens: int, scaling: float) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out, log_sums = torch.empty_like(q), q.new_empty(q.shape[:-1])
        out[num_tokens:] = 0
        sizes = (len(runs), *q.shape[:2], *k.shape[1:])
        _call("packed_attention", *sizes, scaling, runs, q, k, v, out, log_sums)
        ctx.save_for_backward(q, k, v, runs, out, log_sums)
        ctx.num_tokens, ctx.scaling = num_tokens, scaling
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, runs, out, log_sums = ctx.saved_tensors
        gradient, for_q = gradient.contiguous(), torch.empty_like(q)
        for_q[ctx.num_tokens :] = 0
        for_k, for_v = torch.zeros_like(k), torch.zeros_like(v)
        sizes = (len(runs), *q.shape[:2], *k.shape[1:])
        kept = (runs, gradient, q, k, v, out, log_sums)
        _call("packed_attention_backward", *sizes, ctx.scaling, *kept, for_q, for_k, for_v)
        return for_q, for_k, for_v, None, None, None


class TokenScores(torch.autograd.Function):
    """As ``fused.TokenScores``."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        logits, ids = logits.contiguous(), ids.contiguous()
        if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < logits.shape[1]):
            raise IndexError(f"token ids from {int(ids.min())} to {int(ids.max())}, of {logits.shape[1]} logits each")
        probabilities, logprobs = torch.empty_like(logits), logits.new_empty(ids.shape)
        entropy = logits.new_empty(len(logits)) if with_entropy else None
        _call("token_scores", *logits.shape, ids.shape[1], logits, ids, probabilities, logprobs, entropy)
        if entropy is not None:
            ctx.mark_non_differentiable(entropy)
        ctx.save_for_backward(probabilities, ids)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor, None, None]:
        probabilities, ids = ctx.saved_tensors
        gradient, for_logits = gradient.contiguous(), torch.empty_like(probabilities)
        sizes = (*probabilities.shape, ids.shape[1])
        _call("token_scores_backward", *sizes, gradient, probabilities, ids, for_logits)
        return for_logits, None, None
