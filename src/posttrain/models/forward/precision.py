"""Settings affecting low-order bits: full precision on TF32 GPUs, deterministic kernels, thread count."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# By the names of recipes.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute products of fp32 numbers in fp32 inside, whatever a GPU may do (TF32, also in convolutions)."""
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


def keep_angles_exact(model: Any) -> None:
    """Force fp32 rotary angles even if other products may use TF32.

    transformers 5.17 computes angles by matrix multiplication; under TF32 (10 bits), position 5,000's angle is off by
    up to 2 radians. Module classes are replaced, so no hooks are needed.
    """
    for module in model.modules():
        if hasattr(module, "inv_freq") and not hasattr(module, "angles_are_exact"):
            module.__class__ = _exact(type(module))


def _exact(kind: type[Any]) -> type[Any]:
    def forward(self: Any, *inputs: Any, **options: Any) -> Any:
        with full_precision():
            return kind.forward(self, *inputs, **options)

    return type(kind.__name__, (kind,), {"forward": forward, "angles_are_exact": True, "__module__": kind.__module__})


def choose_kernels(device: str, deterministic: bool) -> None:
    """Request deterministic GPU kernels if ``device`` runs should be ``deterministic``."""
    if device in ("auto", "cuda") and torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs for it, read when it starts
        torch.use_deterministic_algorithms(deterministic)


@contextmanager
def with_threads(number: int) -> Iterator[None]:
    """Compute with so many threads, inside the block."""
    before = torch.get_num_threads()
    use_threads(number)
    try:
        yield
    finally:
        use_threads(before)


def use_threads(number: int) -> None:
    """Set the thread count. Even setting an unchanged count would alter MKL's threading, so that is skipped."""
    if number != torch.get_num_threads():
        torch.set_num_threads(number)
