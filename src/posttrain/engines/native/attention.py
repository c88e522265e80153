"""Calls of the native kernel: from rotary embedding to mixed values of one layer, in one operation."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_float, c_int64, c_void_p

import numpy as np
import torch
from torch import Tensor

from posttrain.engines.native.cache import SlotCache
from posttrain.models.kernel.build import is_kernel_used, library


class _Step(ctypes.Structure):
    """``Step`` of ``attention.cpp``."""

    _fields_ = (
        *((name, c_int64) for name in ("rows", "num_queries", "num_keys", "dim")),
        ("scale", c_float),
        *((name, c_void_p) for name in ("cos", "sin")),
        *((name, c_int64) for name in ("capacity", "cursor")),
        *((name, c_void_p) for name in ("starts", "holes", "entries", "lengths")),
        ("width", c_int64),
    )


# (layer, [R, (queries + 2 keys) * dim], head norms [queries + keys, dim], their eps) -> [R, queries * dim]
AttendLayer = Callable[[int, Tensor, Tensor | None, float], Tensor]


class NativeAttention:
    """Attention of decode steps over a ``SlotCache`` whose rows are ``[heads, columns, dim]``, in float32 on a CPU."""

    def __init__(self, num_queries: int, num_keys: int, dim: int, scale: float) -> None:
        self.num_queries, self.num_keys, self.dim, self.scale = num_queries, num_keys, dim, scale
        self._attend = library().posttrain_attend
        self._attend.argtypes = (c_void_p, c_void_p, c_void_p, c_float, *([c_void_p] * 5))
        self._attend.restype = None

    @staticmethod
    def make(num_queries: int, num_keys: int, dim: int, scale: float) -> NativeAttention | None:
        """None where the kernel of this process is ``off``."""
        return NativeAttention(num_queries, num_keys, dim, scale) if is_kernel_used() else None

    def begin(self, cos: Tensor, sin: Tensor, cache: SlotCache) -> AttendLayer:
        """What computes the layers of one decode step at the cache's cursor, which it writes.

        Args:
            cos, sin: ``[R, 1, dim]``, of the rows' positions; the sign of the half turn is in ``sin``.
        """
        rows, shared, holes = len(cos), cache.shared, cache.holes
        cos, sin = cos.contiguous(), sin.contiguous()
        lengths = np.array([] if shared is None else shared.lengths, dtype=np.int64)
        assert (rows, cos.shape[-1], cache.key_axis) == (cache.count, self.dim, 2)
        assert shared is None or (shared.axis == 2 and all(x.is_contiguous() for x in (*shared.keys, *shared.values)))
        step = _Step(rows, self.num_queries, self.num_keys, self.dim, self.scale, cos.data_ptr(), sin.data_ptr())
        step.capacity, step.cursor, step.starts = cache.capacity, cache.cursor, cache.starts.ctypes.data
        step.alive = cos, sin, holes, lengths  # as long as the step points there
        step.holes = None if holes is None else holes.ctypes.data
        if shared is not None:
            step.entries, step.lengths = shared.entry_of_row.ctypes.data, lengths.ctypes.data
            step.width = shared.keys[0].shape[2]

        def attend(layer: int, x: Tensor, head_norm: Tensor | None, eps: float) -> Tensor:
            out = torch.empty((rows, self.num_queries * self.dim), dtype=x.dtype)
            self._attend(
                ctypes.byref(step),
                x.data_ptr(),
                None if head_norm is None else head_norm.data_ptr(),
                eps,
                cache.keys[layer].data_ptr(),
                cache.values[layer].data_ptr(),
                None if shared is None else shared.keys[layer].data_ptr(),
                None if shared is None else shared.values[layer].data_ptr(),
                out.data_ptr(),
            )
            return out

        return attend
