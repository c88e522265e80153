"""Linear layers through oneDNN, forward and backward, on the CPUs where it is faster than MKL, which torch takes.

With one core, an AMD EPYC with AVX-512 reaches 110 GFLOP/s by MKL and 255 by oneDNN (4352 × 384 × 128); with AVX2 only
89 and 82; an Intel Xeon takes 51 microseconds by MKL and 73 by oneDNN (64 × 128 × 384). The choice is by the kind of
CPU, not by a measurement, so that two runs on one machine do not differ.
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

# The operator takes (x, weight, bias, activation, its arguments, its algorithm). It is not part of
# torch's public interface: where a torch has it no more, everything falls back to F.linear.
ONEDNN_LINEAR = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None
# Its own overhead of some 10 microseconds pays from this many multiplications on.
ONEDNN_LEAST = 1_200_000


def _is_faster(vendor: str | None, capability: str) -> bool:
    """Return True if oneDNN is the faster library for this ``vendor_id`` and torch's name for the widest vectors."""
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
    """Return True if a product with this weight goes to oneDNN: fp32 on a CPU where that is the faster library."""
    return IS_FASTER and weight.device.type == "cpu" and weight.dtype == torch.float32


def onednn_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x W^T + b`` for x ``[..., in]``, weight ``[out, in]``; both fp32 on the CPU."""
    assert ONEDNN_LINEAR is not None
    return ONEDNN_LINEAR(x, weight, bias, "none", [], "")


class OneDnnLinear(torch.autograd.Function):
    """``F.linear`` with all three products (output, input gradient, weight gradient) through oneDNN."""

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
            # oneDNN copies its first operand when that is transposed, so the smaller one goes first.
            if rows.shape[1] <= inputs.shape[1]:
                for_weight = onednn_product(rows.t(), inputs.t())
            else:
                for_weight = onednn_product(inputs.t(), rows.t()).t().contiguous()
        if ctx.needs_input_grad[2]:
            for_bias = gradient.flatten(0, -2).sum(dim=0)
        return for_x, for_weight, for_bias


class fast_linear(TorchFunctionMode):
    """Context in which ``F.linear`` takes the faster product; a recomputation in backward is inside it by ``again``."""

    _depth = 0

    def __enter__(self) -> object:
        fast_linear._depth += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        fast_linear._depth -= 1
        super().__exit__(*error)

    @staticmethod
    def again() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """For ``torch.utils.checkpoint``: around what is computed now (nothing), and around its recomputation."""
        return nullcontext(), fast_linear() if fast_linear._depth else nullcontext()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.linear and not kwargs and _pays(args[0], args[1]):
            return OneDnnLinear.apply(args[0], args[1], args[2] if len(args) > 2 else None)
        return func(*args, **(kwargs or {}))


def _pays(x: Tensor, weight: Tensor) -> bool:
    large = (x.numel() // max(1, x.shape[-1])) * weight.numel() >= ONEDNN_LEAST
    return large and takes_onednn(weight) and x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
