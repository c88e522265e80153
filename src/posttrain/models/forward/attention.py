"""Attention over a packed stream, for the modules of transformers as they are.

It is a registered implementation of transformers' attention interface, so that the modules of every architecture that
uses the interface run unchanged. On a GPU runs in 16 bits attend as they are (``varlen.py``). Elsewhere they do so in
rectangles: short runs behind a prefix under a mask; on a CPU a long run, whose mask would be the square of its length
for every layer, attends to its prefix and to itself apart.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from posttrain.models.forward.packing import Bucket, Packing

if TYPE_CHECKING:
    from posttrain.models.forward.varlen import Kernel

ATTENTION_NAME = "posttrain_packed"
# From this width on two calls without a mask are as fast as one with it (one core of an AMD EPYC: 16 runs of 256 slots
# 50 and 50 ms, of 512 slots 219 and 201, 8 of 1,024 slots 396 and 265), and need no memory for it.
APART_FROM = 384

_used = "mask"


class _Active:
    """The packing that attention follows now: one for all threads of the trainer, autograd's among them, or an own one
    of a thread that computes beside the trainer."""

    def __init__(self) -> None:
        self.shared: Packing | None = None
        self.own = threading.local()

    def get(self) -> Packing | None:
        packing: Packing | None = getattr(self.own, "packing", self.shared)
        return packing

    def put(self, packing: Packing | None) -> None:
        if hasattr(self.own, "packing"):
            self.own.packing = packing
        else:
            self.shared = packing


_active = _Active()


def in_own_thread() -> None:
    """Let what this thread computes from now on (a reward model's scores) follow no packing of the trainer's."""
    _active.own.packing = None


class packed_attention:
    """Context in which the model's attention follows a packing. Backward must run inside it too,
    where activations are recomputed. cuDNN's attention is off in it: it makes a plan for every shape, which takes
    some 100 ms, and hardly two batches have one shape."""

    def __init__(self, packing: Packing) -> None:
        self.packing = packing

    def __enter__(self) -> None:
        assert _active.get() is None, "packings do not nest"
        _active.put(self.packing)
        self.cudnn = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(False)

    def __exit__(self, *_: Any) -> None:
        _active.put(None)
        torch.backends.cuda.enable_cudnn_sdp(self.cudnn)


def install_packed_attention(model: Any) -> None:
    """Let ``model`` (a transformers causal LM) attend through this module; outside a packing it is SDPA."""
    # here, not above: who only checks a recipe reads this module, and transformers takes seconds
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, _mask)
    model.config._attn_implementation = ATTENTION_NAME


def attention_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention as transformers' modules ask for it: by the active packing, else SDPA."""
    packing = _active.get()
    if packing is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [N, H, D]
    window = kwargs.get("sliding_window")
    return attend(packing, q, k, v, kwargs.get("scaling"), kwargs.get("dropout", 0.0), window), None


def note_kernel(name: str) -> None:
    """Say what attends to a packed stream now."""
    global _used
    _used = name


def kernel_used() -> str:
    """Return what the last packed stream attended with: ``varlen``, ``varlen_repeated`` or ``mask``."""
    return _used


def active_packing() -> Packing | None:
    """The packing that attention follows now."""
    return _active.get()


def attend(
    packing: Packing, q: Tensor, k: Tensor, v: Tensor, scaling: float | None, dropout: float, window: int | None
) -> Tensor:
    """Attention of streams ``[N, H, D]`` under ``packing``: ``[1, N, H, D]``."""
    check_window(packing, window)
    kernel = unmasked_kernel(q, k, v, dropout)
    note_kernel("mask" if kernel is None else kernel.__name__)
    if kernel is not None:
        dtype = _computed_in(q)
        return kernel(packing, q.to(dtype), k.to(dtype), v.to(dtype), scaling)[None]
    parts = [q[:0]]  # for a stream that holds nothing
    for bucket in packing.buckets:
        own = _attend(bucket, q, k, v, scaling, dropout)
        parts.append(own.transpose(1, 2).flatten(0, 1).index_select(0, bucket.filled))
    joined = torch.cat(parts)
    return _filled(joined if packing.order is None else joined.index_select(0, packing.order), q)


def check_window(packing: Packing, window: int | None) -> None:
    """A sliding window must hold every sequence whole."""
    if window is not None and packing.longest > window:
        raise AssertionError("sequences longer than the attention window take the padded path")


def unmasked_kernel(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Kernel | None:
    """What attends to the stream without a mask; None on a CPU or a Mac, and where nothing that this GPU has does."""
    if q.device.type in ("cpu", "mps") or dropout or q.shape[-1] != v.shape[-1] or not len(q):
        return None
    from posttrain.models.forward.varlen import kernel_for

    return kernel_for(q, k, _computed_in(q))


def _computed_in(q: Tensor) -> torch.dtype:
    """The type that torch's own attention computes in: autocast's, where that is on."""
    kind = q.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else q.dtype


def _attend(bucket: Bucket, q: Tensor, k: Tensor, v: Tensor, scaling: float | None, dropout: float) -> Tensor:
    """What the slots of ``bucket`` read: ``[S, H, W, D]``, from the whole streams ``[N, H, D]``."""
    own_q = _rows(q, bucket.queries, bucket.num_runs)
    if bucket.prefix is not None and bucket.width >= APART_FROM and q.device.type == "cpu" and not dropout:
        sides = [_rows(x, at, bucket.num_runs) for at in (bucket.prefix, bucket.queries) for x in (k, v)]
        assert bucket.is_prefix is not None
        own_q, *sides = (x.to(_computed_in(q)) for x in (own_q, *sides))  # rotated in fp32, values in autocast's type
        out: Tensor = ApartAttention.apply(own_q, *sides, bucket.is_prefix, scaling)
        return out
    keys = bucket.queries if bucket.keys is None else bucket.keys
    own_k, own_v = (_rows(x, keys, bucket.num_runs) for x in (k, v))
    return _sdpa(own_q, own_k, own_v, bucket.allowed, scaling, dropout)


class ApartAttention(torch.autograd.Function):
    """Attention to a prefix and causally to oneself, in two calls without a mask of W × (P + W).

    With the log-sums ``l1, l2`` of either side's exponentiated scores, and ``l = log(e^l1 + e^l2)``, attention to both
    is ``e^(l1 - l) o1 + e^(l2 - l) o2``; and given ``l`` and that output, the backward pass of either side gives
    its part of the gradients (Dao 2023, FlashAttention-2, sections 2.3 and 3.1).

    q ``[S, H, W, D]``; the prefixes' keys and values ``[S, K, P, D]`` (K divides H), of which ``is_prefix`` ``bool
    [S, 1, 1, P]`` are real; those of the runs ``[S, K, W, D]``. On a CPU only.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        prefix_k: Tensor,
        prefix_v: Tensor,
        own_k: Tensor,
        own_v: Tensor,
        is_prefix: Tensor,
        scaling: float | None,
    ) -> Tensor:
        bias = torch.zeros(is_prefix.shape, dtype=q.dtype).masked_fill_(~is_prefix, -torch.inf)
        forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        before, before_sum = forward(q, prefix_k, prefix_v, 0.0, False, attn_mask=bias, scale=scaling)
        own, own_sum = forward(q, own_k, own_v, 0.0, True, scale=scaling)
        total = torch.logaddexp(before_sum, own_sum)
        out = before * (before_sum - total).exp()[..., None] + own * (own_sum - total).exp()[..., None]
        out = out.to(q.dtype)
        ctx.save_for_backward(q, prefix_k, prefix_v, own_k, own_v, bias, out, total)
        ctx.scaling = scaling
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, prefix_k, prefix_v, own_k, own_v, bias, out, total = ctx.saved_tensors
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        shared = (out, total, 0.0)
        by_prefix = backward(gradient, q, prefix_k, prefix_v, *shared, False, attn_mask=bias, scale=ctx.scaling)
        by_own = backward(gradient, q, own_k, own_v, *shared, True, scale=ctx.scaling)
        return by_prefix[0] + by_own[0], *by_prefix[1:], *by_own[1:], None, None


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
    if q.device.type != "cpu":  # memory-efficient attention takes a mask, and no heads that share keys
        from posttrain.models.forward.varlen import each_query_its_keys

        k, v = each_query_its_keys(q, k, v)
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
    from transformers.masking_utils import sdpa_mask

    return None if _active.get() is not None else sdpa_mask(*args, **kwargs)
