"""Another CPU, made out of this one: kernels whose rounding depends on the machine round by one ulp differently.

Adding, multiplying, dividing and roots are the same to the bit on every machine (IEEE 754). Sums, products of matrices
and functions such as exp are not: the order of their additions and their polynomials depend on the width of a vector,
the shape and the number of threads. So the numbers that such a sum reads (weights too) are moved by one ulp up or down,
which is what rounding does to a sum (backward error), and so is what such a function returns.

Which way is a function of (seed, operation, shapes of a sum, the number itself). As on a CPU, the same computation
gives the same bits again, so that what resumes to the bit does so here too; another computation of the number gives
others.
Numbers of few digits (0, 1, 0.5, counts) stay as they are: their sums and products are exact anywhere.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any

import torch
from torch import Tensor

# Products: of two factors the one with fewer numbers is moved, which moves the sums as much as the other would.
PRODUCTS = (
    "mm", "mm.out", "addmm", "addmm.out", "addmm_", "bmm", "bmm.out", "baddbmm", "baddbmm.out", "baddbmm_", "mv",
    "mv.out", "addmv", "addmv.out", "dot",
)  # fmt: skip
# Other sums: what they read is moved.
SUMS = (
    "sum", "sum.dim_IntList", "sum.IntList_out", "mean", "mean.dim", "mean.out", "cumsum", "cumsum.out", "cumprod",
    "prod", "native_layer_norm", "native_layer_norm_backward",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_softmax_backward_data", "_log_softmax_backward_data", "linalg_vector_norm", "std.correction", "var.correction",
    "var_mean.correction", "embedding_dense_backward", "index_add", "scatter_add",
)  # fmt: skip
# Functions: what they return is moved.
FUNCTIONS = (
    "_softmax", "_log_softmax", "logsumexp", "exp", "exp_", "exp.out", "log", "log_", "log.out", "log1p", "log1p_",
    "expm1", "expm1_", "tanh", "tanh_", "tanh.out", "sigmoid", "sigmoid_", "sigmoid.out", "silu", "silu.out",
    "silu_backward", "gelu", "gelu_backward", "erf", "sin", "cos", "rsqrt", "softplus", "softplus_backward",
    "log_sigmoid_forward", "log_sigmoid_backward", "logaddexp", "atan2",
)  # fmt: skip
_INTEGERS = {
    torch.float64: (torch.int64, 0x3FFFFFF, 0x1F3D5B79A7C15A35, 63),
    torch.float32: (torch.int32, 0xFFF, 0x1F3D5B79, 31),
}
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_kept: list[torch.library.Library] = []  # kernels live as long as their library


def install(seed: int) -> None:
    """Replace the kernels of this process, in all of its threads."""
    for names, change in ((PRODUCTS, _product_of_moved), (SUMS, _sum_of_moved), (FUNCTIONS, _moved_result)):
        for name in names:
            _replace("aten", name, seed, change)
    if torch.backends.mkldnn.is_available():
        _replace("mkldnn", "_linear_pointwise", seed, _product_of_moved)


def _replace(namespace: str, name: str, seed: int, change: Callable[[Any, str], Callable[..., Any]]) -> None:
    library = torch.library.Library(namespace, "IMPL")
    _kept.append(library)
    kernel = torch.library.get_kernel(f"{namespace}::{name}", "CPU")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is replaced is the purpose, and a program's output is tested
        library.impl(name, change(kernel, f"{seed} {name}"), "CPU", allow_override=True)


def _product_of_moved(kernel: Any, name: str) -> Callable[..., Any]:
    first = 1 if "add" in name else 0  # addmm(bias, x, weight)

    def compute(*args: Any, **options: Any) -> Any:
        if args[first].shape[-1] == 1:  # one product and no sum, as of positions with the frequencies of a rotation
            return kernel.call_boxed(_KEYS, *args, **options)
        salt = _salt(name, args)
        moved = list(args)
        smaller = min(first, first + 1, key=lambda i: args[i].numel())
        moved[smaller] = move(args[smaller], salt)
        return _moved_coarse(kernel.call_boxed(_KEYS, *moved, **options), salt)

    return compute


def _sum_of_moved(kernel: Any, name: str) -> Callable[..., Any]:
    def compute(*args: Any, **options: Any) -> Any:
        salt = _salt_of(name, args[0].shape[-1]) if _is_by_row(name, args) else _salt(name, args)
        moved = [move(x, salt) if isinstance(x, Tensor) else x for x in args]
        return _moved_coarse(kernel.call_boxed(_KEYS, *moved, **options), salt)

    return compute


def _moved_result(kernel: Any, name: str) -> Callable[..., Any]:
    is_in_place = name.endswith(("_", ".out"))

    def compute(*args: Any, **options: Any) -> Any:
        out = kernel.call_boxed(_KEYS, *args, **options)
        salt = _salt_of(name, ())
        if isinstance(out, tuple):
            return (_moved_coarse(move(out[0], salt), salt), *out[1:])
        moved = _moved_coarse(move(out, salt), salt)
        return out.copy_(moved) if is_in_place else moved

    return compute


def _is_by_row(name: str, args: tuple[Any, ...]) -> bool:
    """Return True for a sum over the last dimension, which is the same however many rows there are."""
    if name.endswith(" native_layer_norm"):
        return True
    last = ([-1], [args[0].ndim - 1])
    return name.endswith((" mean.dim", " sum.dim_IntList")) and args[1] in last


def _salt(name: str, args: tuple[Any, ...]) -> int:
    shapes = tuple(x.shape for x in args if isinstance(x, Tensor))
    return _salt_of(name, shapes)


@cache
def _salt_of(name: str, shapes: Hashable) -> int:
    return zlib.crc32(f"{name} {shapes}".encode()) >> 1


def move(x: Tensor, salt: int) -> Tensor:
    """``x`` with each number one ulp up or down; other types, and numbers of few digits, as they are."""
    if x.dtype not in _INTEGERS or x.layout != torch.strided:
        return x
    integer, digits, odd, top = _INTEGERS[x.dtype]
    bits = x.view(integer)
    step = (bits ^ salt).mul_(odd).bitwise_right_shift_(top).bitwise_or_(1)
    has_digits = (bits + 1).bitwise_and_(digits) > 1  # not all 0, nor all 1: the largest float is a mask's
    return (bits + step.mul_(has_digits)).view(x.dtype)


def _moved_coarse(out: Any, salt: int) -> Any:
    """Sixteen bits are added in 32 and rounded at the end: one number of 1024 is rounded the other way.

    A sum that is off by 30 ulps of fp32 (2^-24 of its size each) crosses the middle of two bf16 numbers (2^-8 apart)
    about so often.
    """
    if not isinstance(out, Tensor) or out.dtype not in (torch.bfloat16, torch.float16):
        return out
    bits = out.view(torch.int16)
    chosen = (bits ^ (salt & 0x7FFF)).mul_(0x5A35).bitwise_right_shift_(6) == 0
    has_digits = (bits + 1).bitwise_and_(7) > 1
    return (bits + (chosen & has_digits)).view(out.dtype)
