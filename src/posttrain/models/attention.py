"""Which of torch's kernels computes attention (``model.attention``), wherever a model of a run attends.

On a GPU the trainer's packed streams attend without masks (``forward/varlen.py``), flash by its variable-length kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from posttrain.errors import UsageError
from posttrain.models.forward.varlen import usable
from posttrain.models.load import choose_device, stated_config
from posttrain.recipes.sections import Attention, ModelSection

# What each may use: the first for causal attention; a mask (of a shared prompt, of padding) may need another.
_KERNELS: dict[Attention, list[SDPBackend]] = {
    "eager": [SDPBackend.MATH],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
    "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION],
}
USUAL_HEAD_DIM = 64  # of a model whose configuration is not at hand before it is loaded


@contextmanager
def chosen_attention(section: ModelSection, products: torch.dtype | None = None) -> Iterator[None]:
    """Inside, every model of this process attends with the kernel that ``section`` names.

    Args:
        products: the type that the trainer's products are computed in, where that is not the weights'.

    Raises:
        UsageError: this machine, or this dtype or head size, has no such kernel; it is tried out before anything is.
    """
    if section.attention == "sdpa":
        yield
        return
    device, head_dim = choose_device(section.device), _head_dim(section)
    weights: torch.dtype = getattr(torch, section.dtype)
    trained = weights if products is None else products
    if not _computes(section.attention, device, weights, trained, head_dim):
        kind = str(trained).removeprefix("torch.")
        raise UsageError(
            f"model.attention: {section.attention!r} cannot compute {kind} attention with heads of {head_dim} "
            f"numbers on {device.type} here; use sdpa, which takes the fastest kernel that can, or another model.dtype"
        )
    with sdpa_kernel(_KERNELS[section.attention]):
        yield


def _computes(name: Attention, device: torch.device, weights: torch.dtype, trained: torch.dtype, head_dim: int) -> bool:
    """Whether the kernel does, in the trainer (``trained``) and where the model samples in its weights' own type."""
    if name == "flash" and device.type != "cpu" and usable(device, trained, 4, 2, head_dim) is None:
        return False
    kernels = _KERNELS[name]
    return _serves(kernels[:1], device, trained, head_dim) and _serves(kernels, device, weights, head_dim, True)


def _head_dim(section: ModelSection) -> int:
    config = stated_config(section)
    if config is None:
        return USUAL_HEAD_DIM
    text = config.get_text_config()
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def _serves(
    kernels: list[SDPBackend], device: torch.device, dtype: torch.dtype, head_dim: int, masked: bool = False
) -> bool:
    """Whether one of the kernels computes attention, with or without a mask, and its gradients."""
    shape = (1, 2, 8, head_dim)
    q, k, v = (torch.zeros(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    mask = torch.ones(8, 8, dtype=torch.bool, device=device).tril() if masked else None
    try:
        with torch.enable_grad(), sdpa_kernel(kernels):
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None).sum().backward()
    except RuntimeError:
        return False
    return True
