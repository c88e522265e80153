"""Attention over a packed stream, registered in transformers' attention interface, so that its modules run unchanged.

On a GPU runs in 16 bits attend as they are (``varlen.py``). Elsewhere they attend in rectangles, after a prefix under a
mask.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from posttrain.models.config import Model
from posttrain.models.forward.packing import Packing

if TYPE_CHECKING:
    from posttrain.models.forward.varlen import Kernel

ATTENTION_NAME = "posttrain_packed"
_used = "mask"


class _Active:
    """The current packing: one for all threads of the trainer, autograd's among them, or one of a thread of its own."""

    def __init__(self) -> None:
        self.shared: Packing | None = None
        self.own = threading.local()

    def get(self) -> Packing | None:
        return getattr(self.own, "packing", self.shared)

    def put(self, packing: Packing | None) -> None:
        if hasattr(self.own, "packing"):
            self.own.packing = packing
        else:
            self.shared = packing


_active = _Active()


def in_own_thread() -> None:
    """Let this thread, which computes next to the trainer, have a packing of its own."""
    _active.own.packing = None


class packed_attention:
    """Context in which the model's attention follows a packing; backward runs inside it too, where activations are
    recomputed. cuDNN's attention is off in it, since it plans each new shape for some 100 ms."""

    def __init__(self, packing: Packing) -> None:
        self.packing = packing

    def __enter__(self) -> None:
        assert _active.get() is None, "packings do not nest"
        _active.put(self.packing)
        self.cudnn = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(False)

    def __exit__(self, *_: object) -> None:
        _active.put(None)
        torch.backends.cuda.enable_cudnn_sdp(self.cudnn)


def install_packed_attention(model: Model) -> None:
    """Let ``model`` (a transformers causal LM) attend through this module; outside a packing it is SDPA."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, _mask)
    model.config._attn_implementation = ATTENTION_NAME


def attention_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention in transformers' interface: by the active packing, else SDPA."""
    packing = _active.get()
    if packing is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [N, H, D]
    window = kwargs.get("sliding_window")
    return attend(packing, q, k, v, kwargs.get("scaling"), kwargs.get("dropout", 0.0), window), None


def kernel_used() -> str:
    """The kernel of the last packed stream: ``varlen`` or ``mask``."""
    return _used


def active_packing() -> Packing | None:
    """The current packing."""
    return _active.get()


def attend(
    packing: Packing, q: Tensor, k: Tensor, v: Tensor, scaling: float | None, dropout: float, window: int | None
) -> Tensor:
    """Attention of streams ``[N, H, D]`` under ``packing``: ``[1, N, H, D]``."""
    global _used
    if window is not None and packing.longest > window:
        raise AssertionError("sequences longer than the attention window take the padded path")
    kernel = unmasked_kernel(q, k, v, dropout)
    _used = "mask" if kernel is None else "varlen"
    if kernel is not None:
        dtype = _computed_in(q)
        return kernel(packing, q.to(dtype), k.to(dtype), v.to(dtype), scaling)[None]
    parts = [q[:0]]  # for a stream that holds nothing
    buckets, order = packing.rectangles
    for bucket in buckets:
        own_q = _rows(q, bucket.queries, bucket.num_runs)
        own_k, own_v = (_rows(x, bucket.keys, bucket.num_runs) for x in (k, v))
        own = _sdpa(own_q, own_k, own_v, bucket.allowed, scaling, dropout)  # [S, H, W, D]
        parts.append(own.transpose(1, 2).flatten(0, 1).index_select(0, bucket.filled))
    joined = torch.cat(parts)
    outputs = joined if order is None else joined.index_select(0, order)
    missing = q.shape[0] - outputs.shape[0]
    return torch.cat([outputs, q.new_zeros((missing, *outputs.shape[1:]))], dim=0)[None]


def unmasked_kernel(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Kernel | None:
    """The kernel without a mask; None on a CPU or a Mac, and where this GPU has none."""
    if q.device.type in ("cpu", "mps") or dropout or q.shape[-1] != v.shape[-1] or not len(q):
        return None
    from posttrain.models.forward.varlen import kernel_for

    return kernel_for(q.device, _computed_in(q), q.shape[1], k.shape[1], q.shape[2])


def _computed_in(q: Tensor) -> torch.dtype:
    """The type of torch's own attention: autocast's, where that is on."""
    kind = q.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else q.dtype


def _rows(stream: Tensor, at: Tensor, num_runs: int) -> Tensor:
    """``[S, H, W, D]``: the given places of ``stream [N, H, D]``.

    ``stream[at]`` would be slower, and its backward adds up in another order each time where there are two threads.
    """
    return stream.index_select(0, at).unflatten(0, (num_runs, -1)).transpose(1, 2)


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
