"""Matrix products and norms of the lean path, over the model's own parameters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from posttrain.models.forward.linear import ONEDNN_LEAST, onednn_product, takes_onednn
from posttrain.models.lora import LowRank, low_rank_terms


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x W^T + b`` for x ``[N, in]``, weight ``[out, in]``: ``[N, out]``, a new tensor."""
    if x.shape[0] * weight.numel() >= ONEDNN_LEAST and takes_onednn(weight):
        return onednn_product(x, weight, bias)
    return F.linear(x, weight, bias)


@dataclass(slots=True)
class Projection:
    """``x W^T + b`` plus the active adapters' ``scale (x A^T) B^T``."""

    weight: Tensor
    bias: Tensor | None
    adapters: list[LowRank]

    @classmethod
    def bind(cls, module: Any) -> Projection:
        """The parameters of a linear layer, or of a LoRA around one, by reference."""
        terms = low_rank_terms(module)
        assert terms is not None, "the caller has checked that the module is plain"
        linear, adapters = terms
        return cls(linear.weight.detach(), None if linear.bias is None else linear.bias.detach(), adapters)

    @property
    def size(self) -> int:
        return int(self.weight.shape[0])

    def into(self, x: Tensor, out: Tensor) -> None:
        """Write the product into ``out`` ``[N, size]``, which may be a part of a wider buffer."""
        if self.bias is None:
            torch.mm(x, self.weight.t(), out=out)
        else:
            torch.addmm(self.bias, x, self.weight.t(), out=out)
        self._adapt(x, out)

    def apply(self, x: Tensor) -> Tensor:
        """``[N, size]``, a new tensor."""
        out = multiply(x, self.weight, self.bias)
        self._adapt(x, out)
        return out

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """``residual + projection(x)``, in place."""
        if x.shape[0] * self.weight.numel() >= ONEDNN_LEAST and takes_onednn(self.weight):
            residual.add_(multiply(x, self.weight, self.bias))
        else:
            residual.addmm_(x, self.weight.t())
            if self.bias is not None:
                residual.add_(self.bias)
        self._adapt(x, residual)
        return residual

    def _adapt(self, x: Tensor, out: Tensor) -> None:
        for term in self.adapters:
            inner = torch.mm(x.to(term.down.dtype), term.down.t())
            if term.up.dtype == out.dtype:
                out.addmm_(inner, term.up.t(), alpha=term.scale)
            else:  # adapters kept in fp32 over a half-precision base
                out.copy_(out.to(term.up.dtype).addmm_(inner, term.up.t(), alpha=term.scale))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension (Zhang & Sennrich 2019), in fp32, or in float64 where x is."""
    if x.dtype.itemsize < 4:
        return F.rms_norm(x.float(), (x.shape[-1],), None, eps).to(x.dtype) * weight
    if x.device.type == "cuda" and weight.ndim == 1 and x.dtype == weight.dtype:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)  # one kernel; of half precision the modules round in between
    if x.device.type != "cpu" or x.dtype == torch.float64:
        return F.rms_norm(x, (x.shape[-1],), None, eps) * weight
    # F.rms_norm is composed of slower steps on a CPU (8.2 against 5.7 microseconds).
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return (x * torch.addcmul(_constant(eps), size, size, value=1.0 / x.shape[-1]).rsqrt_()).mul_(weight)


@lru_cache(maxsize=16)
def _constant(value: float) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(value)
