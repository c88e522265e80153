"""Attention over packed streams, registered with transformers so unmodified modules can use it.

On GPUs, 16-bit runs use torch's variable-length flash attention, without masks or padding. Otherwise (fp32, float64,
dropout, GPUs without flash) runs are padded to rectangles, and prefixes are handled by masks.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from posttrain.models.forward.packing import ROUND_TOKENS, PackedRun, Packing
from posttrain.types import Model

# (packing, q [N, H, D], k and v [N, K, D], scale) -> [N, H, D], with K a divisor of H
Kernel = Callable[[Packing, Tensor, Tensor, Tensor, float | None], Tensor]
# Allowed kernel error relative to the largest magnitude: 16 bits and TF32, then fp32.
COARSE, EXACT = 0.05, 1e-4
ATTENTION_NAME = "posttrain_packed"


class _Active:
    """Current packing: shared by all trainer threads (including autograd), or thread-local.

    ``kernel``: used for the latest packed stream, ``varlen`` or ``mask``.
    """

    shared: Packing | None = None
    kernel = "mask"
    own = threading.local()

    @property
    def packing(self) -> Packing | None:
        """The packing that this thread's attention follows."""
        return getattr(self.own, "packing", self.shared)

    @packing.setter
    def packing(self, packing: Packing | None) -> None:
        if hasattr(self.own, "packing"):
            self.own.packing = packing
        else:
            self.shared = packing


active = _Active()


def in_own_thread() -> None:
    """Make this thread's packing independent from the trainer's."""
    active.own.packing = None


class packed_attention:
    """Route attention through a packing. Backward passes that recompute activations must run inside too.

    cuDNN attention is disabled, because planning each new shape takes some 100 ms.
    """

    def __init__(self, packing: Packing) -> None:
        self.packing = packing

    def __enter__(self) -> None:
        assert active.packing is None, "packings do not nest"
        active.packing = self.packing
        self.cudnn = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(False)

    def __exit__(self, *_: object) -> None:
        active.packing = None
        torch.backends.cuda.enable_cudnn_sdp(self.cudnn)


def install_packed_attention(model: Model) -> None:
    """Let ``model`` (a transformers causal LM) attend through this module; outside a packing it is SDPA."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, _mask)
    model.config._attn_implementation = ATTENTION_NAME


def attention_forward(
    module: object, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Transformers attention function: packed if a packing is active, else SDPA.

    Raises:
        ValueError: during packing, a module passes a mask or bias, even if it currently is zero.
    """
    packing = active.packing
    if packing is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    biases = [attention_mask, kwargs.get("position_bias"), kwargs.get("s_aux"), kwargs.get("softcap")]
    if any(bias is not None for bias in biases):
        raise ValueError("a mask, bias, sink or cap of the module's own has no place in a packed stream")
    q = query[0].transpose(0, 1)  # [N, H, D]
    k = key[0].transpose(0, 1)
    v = value[0].transpose(0, 1)
    window = kwargs.get("sliding_window")
    return attend(packing, q, k, v, kwargs.get("scaling"), kwargs.get("dropout", 0.0), window), None


def attend(
    packing: Packing, q: Tensor, k: Tensor, v: Tensor, scaling: float | None, dropout: float, window: int | None
) -> Tensor:
    """Attention of streams ``[N, H, D]`` under ``packing``: ``[1, N, H, D]``."""
    if window is not None and packing.longest > window:
        raise AssertionError("sequences longer than the attention window take the padded path")
    kernel = unmasked_kernel(q, k, v, dropout)
    if kernel is None:
        active.kernel = "mask"
        return in_rectangles(packing, q, k, v, scaling, dropout)[None]
    active.kernel = "varlen"
    dtype = _computed_in(q)
    return kernel(packing, q.to(dtype), k.to(dtype), v.to(dtype), scaling)[None]


def in_rectangles(
    packing: Packing, q: Tensor, k: Tensor, v: Tensor, scaling: float | None, dropout: float = 0.0
) -> Tensor:
    """Compute masked attention per bucket: ``[N, H, D]``, zeros at filler positions."""
    parts = [q[:0]]  # for a stream that holds nothing
    buckets, order = packing.rectangles
    for bucket in buckets:
        own_q = _rows(q, bucket.queries, bucket.num_runs)
        own_k = _rows(k, bucket.keys, bucket.num_runs)
        own_v = _rows(v, bucket.keys, bucket.num_runs)
        own = _sdpa(own_q, own_k, own_v, bucket.allowed, scaling, dropout)  # [S, H, W, D]
        parts.append(own.transpose(1, 2).flatten(0, 1).index_select(0, bucket.filled))
    outputs = torch.cat(parts)
    if order is not None:
        outputs = outputs.index_select(0, order)
    missing = q.shape[0] - outputs.shape[0]
    return torch.cat([outputs, q.new_zeros((missing, *outputs.shape[1:]))], dim=0)


def unmasked_kernel(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Kernel | None:
    """Choose a mask-free kernel; None on CPUs, Macs, or GPUs lacking support."""
    if q.device.type in ("cpu", "mps") or dropout or q.shape[-1] != v.shape[-1] or not len(q):
        return None
    return kernel_for(q.device, _computed_in(q), q.shape[1], k.shape[1], q.shape[2])


def _computed_in(q: Tensor) -> torch.dtype:
    """Resolve the dtype torch attention uses: autocast's if enabled."""
    kind = q.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return q.dtype


def _rows(stream: Tensor, at: Tensor, num_runs: int) -> Tensor:
    """Gather rows from ``stream [N, H, D]`` as ``[S, H, W, D]``.

    ``stream[at]`` is slower, and its multi-threaded backward accumulates in nondeterministic order.
    """
    return stream.index_select(0, at).unflatten(0, (num_runs, -1)).transpose(1, 2)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None, dropout: float) -> Tensor:
    if q.device.type != "cpu":  # memory-efficient attention takes a mask, and no heads that share keys
        k, v = each_query_its_keys(q, k, v)
    is_causal = mask is None
    shares = k.shape[1] != q.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=is_causal, scale=scaling, enable_gqa=shares
    )


def each_query_its_keys(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat keys and values along dimension 1 to match q's head count."""
    times = q.shape[1] // k.shape[1]
    if times == 1:
        return k, v
    return k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    from transformers.masking_utils import sdpa_mask

    if active.packing is not None:
        return None
    return sdpa_mask(*args, **kwargs)


class SharedKeys(torch.autograd.Function):
    """Index ``stream [N, K, D]`` at ``at``, where several runs may share positions.

    Gradients are summed over all sharing runs in fp32, avoiding G separate bfloat16 roundings.
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
        wide = gradient
        if gradient.dtype.itemsize < 4:
            wide = gradient.float()
        total = wide.new_zeros((ctx.length, *gradient.shape[1:])).index_add_(0, at, wide)
        return total.to(gradient.dtype), None


def varlen(packing: Packing, q: Tensor, k: Tensor, v: Tensor, scaling: float | None) -> Tensor:
    """Attend by ``torch.nn.attention.varlen``; keys are prefix plus queries.

    The causal window (-1, 0) is bottom-right aligned, like flash attention since version 2.1.
    """
    from torch.nn.attention.varlen import varlen_attn

    spans = packing.spans
    grouped: dict[str, Any] = {"enable_gqa": k.shape[1] != q.shape[1]}
    if spans.keys is not None:
        k = SharedKeys.apply(k, spans.keys)
        v = SharedKeys.apply(v, spans.keys)
    if "enable_gqa" not in inspect.signature(varlen_attn).parameters:  # torch 2.11
        k, v = each_query_its_keys(q, k, v)
        grouped = {}
    lengths = (spans.query_starts, spans.key_starts, spans.most_queries, spans.most_keys)
    out = varlen_attn(q, k, v, *lengths, scale=scaling, window_size=(-1, 0), **grouped)
    assert isinstance(out, Tensor), "log-sums were not asked for"
    return out


@cache
def kernel_for(device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, head_dim: int) -> Kernel | None:
    """Select ``varlen`` if correct on this device, else None."""
    if is_correct(varlen, device, dtype, heads, key_heads, head_dim):
        return varlen
    return None


def is_correct(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, head_dim: int
) -> bool:
    """Check that ``kernel`` runs here, with outputs and gradients matching masked fp32 attention."""
    runs = (PackedRun(0, 40), PackedRun(40, 130, 0, 40), PackedRun(170, 3, 0, 40), PackedRun(173, 30))
    nothing = torch.zeros(2 * ROUND_TOKENS, dtype=torch.long, device=device)
    packing = Packing(nothing, nothing, 203, runs, nothing, None, nothing, 0, nothing)
    coarse = dtype.itemsize < 4 or (device.type == "cuda" and torch.get_float32_matmul_precision() != "highest")
    # Override any saved-tensor hooks or autocast active in the caller.
    own = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with own, torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        sides = [made_up(len(nothing), n, head_dim, device).to(dtype) for n in (heads, key_heads, key_heads)]
        expected = _outcome(in_rectangles, packing, [x.float() for x in sides])
        try:
            got = _outcome(kernel, packing, sides)
        except (RuntimeError, ValueError, TypeError, AttributeError, ImportError, OSError):
            return False  # unsupported device, dtype or head size, or missing compiler
    bound = EXACT
    if coarse:
        bound = COARSE
    for own_tensor, wanted in zip(got, expected, strict=True):
        difference = (own_tensor[:203] - wanted[:203]).abs().max()
        if not bool((difference <= bound * wanted[:203].abs().max()).item()):
            return False
    return True


def _outcome(kernel: Kernel, packing: Packing, sides: list[Tensor]) -> list[Tensor]:
    """Outputs and gradients, in fp32."""
    q, k, v = (x.clone().requires_grad_() for x in sides)
    out = kernel(packing, q, k, v, None)
    real = out[: packing.num_tokens].float()
    weights = made_up(len(q), q.shape[1], q.shape[2], q.device)[: len(real)]
    gradients = torch.autograd.grad((real * weights).sum(), (q, k, v))
    return [x.detach().float() for x in (out, *gradients)]


def made_up(rows: int, heads: int, head_dim: int, device: torch.device) -> Tensor:
    """Deterministic pseudo-random numbers, leaving all generators untouched."""
    places = torch.arange(1, rows * heads * head_dim + 1, dtype=torch.float64)
    return (places * places * 0.6180339887).sin().float().view(rows, heads, head_dim).to(device)
