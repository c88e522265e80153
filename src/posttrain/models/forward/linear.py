"""Linear layers through oneDNN, forward and backward, on CPUs where it beats MKL (torch's default).

Single-core AVX-512 AMD EPYC: MKL 110 GFLOP/s, oneDNN 255 (4352 × 384 × 128); using AVX2 merely 89 versus 82. Intel
Xeon: MKL 51 microseconds, oneDNN 73 (64 × 128 × 384). CPU type decides rather than timing, so runs on the same
machine agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

# Operator arguments: x, weight, bias, activation, activation arguments, algorithm. This torch operator is private; if
# missing, everything falls back to F.linear.
ONEDNN_LINEAR = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None
# Its own overhead of some 10 microseconds pays from this many multiplications on.
ONEDNN_LEAST = 1_200_000


def _is_faster(vendor: str | None, capability: str) -> bool:
    """Check if oneDNN wins for this ``vendor_id`` and vector extension (torch's name)."""
    if ONEDNN_LINEAR is None:
        return False
    return not torch.backends.mkl.is_available() or (vendor != "GenuineIntel" and capability.startswith("AVX512"))


def _cpu_vendor() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # no Linux
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), None)


IS_FASTER = _is_faster(_cpu_vendor(), torch.backends.cpu.get_cpu_capability())


def takes_onednn(weight: Tensor) -> bool:
    """Check if products with this weight use oneDNN: fp32, on CPUs favoring oneDNN."""
    return IS_FASTER and weight.device.type == "cpu" and weight.dtype == torch.float32


def onednn_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x W^T + b`` for x ``[..., in]``, weight ``[out, in]``; both fp32 on the CPU."""
    assert ONEDNN_LINEAR is not None
    return ONEDNN_LINEAR(x, weight, bias, "none", [], "")


class OneDnnLinear(torch.autograd.Function):
    """``F.linear`` using oneDNN for output, input gradient and weight gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return onednn_product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        for_x = for_weight = for_bias = None
        if ctx.needs_input_grad[0]:
            for_x = onednn_product(gradient.contiguous(), weight.t())
        if ctx.needs_input_grad[1]:
            rows, inputs = gradient.flatten(0, -2), x.flatten(0, -2)
            # oneDNN copies transposed first operands, so the smaller operand goes first.
            if rows.shape[1] <= inputs.shape[1]:
                for_weight = onednn_product(rows.t(), inputs.t())
            else:
                for_weight = onednn_product(inputs.t(), rows.t()).t().contiguous()
        if ctx.needs_input_grad[2]:
            for_bias = gradient.flatten(0, -2).sum(dim=0)
        return for_x, for_weight, for_bias


class fast_linear(TorchFunctionMode):
    """Patch ``F.linear`` to use the faster product; ``again`` extends this to recomputation."""

    _depth = 0

    def __enter__(self) -> object:
        fast_linear._depth += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        fast_linear._depth -= 1
        super().__exit__(*error)

    @staticmethod
    def again() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Context pair for ``torch.utils.checkpoint``: nothing during forward, this patch during recomputation."""
        again: AbstractContextManager[Any] = nullcontext()
        if fast_linear._depth:
            again = fast_linear()
        return nullcontext(), again

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if kwargs:
            return func(*args, **kwargs)
        if func is F.linear and _pays(args[0], args[1]):
            bias = None
            if len(args) > 2:
                bias = args[2]
            return OneDnnLinear.apply(args[0], args[1], bias)
        return func(*args)


def _pays(x: Tensor, weight: Tensor) -> bool:
    large = (x.numel() // max(1, x.shape[-1])) * weight.numel() >= ONEDNN_LEAST
    return large and takes_onednn(weight) and x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
