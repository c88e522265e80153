"""The weights of a trained model as a server takes them: unsharded, in one order, adapters merged."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from posttrain.errors import UsageError
from posttrain.models.load import quantized_bits
from posttrain.models.lora import has_adapter, merged_weights
from posttrain.world import whole

FILE_BYTES = 1 << 30


def checkpoint_weights(model: Any, *, gathers: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of every weight under its name in a checkpoint, always in the same order.

    A tied head comes once. Adapters are merged into copies, one at a time. A sharded model (FSDP2) is gathered, in step
    by all processes; without ``gathers`` a weight is the shard, which has the shape of the whole, and each process may
    read them alone.

    Raises:
        UsageError: weights of 4 or 8 bits, which cannot be merged exactly.
    """
    bits = quantized_bits(model)
    if bits is not None:
        raise UsageError(f"weights of {bits} bits cannot be handed to another engine; sample with the native one")
    named = merged_weights(model) if has_adapter(model) else model.named_parameters()
    with torch.no_grad():
        for name, tensor in named:
            yield name, whole(tensor.detach()) if gathers else tensor.detach()


def save_without_weights(model: Any, tokenizer: Any, folder: Path, *, untie: bool = False) -> None:
    """Write configuration and tokenizer, from which a server builds the model. ``untie``: with a head of its own."""
    config = copy.deepcopy(_base(model).config)
    if untie:
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def untied(model: Any, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights, with a tied head once more under its own name."""
    first: dict[int, str] = {}
    again: dict[str, list[str]] = {}
    for name, weight in _base(model).named_parameters(remove_duplicate=False):
        if first.setdefault(id(weight), name) != name:
            again.setdefault(first[id(weight)], []).append(name)
    for name, tensor in weights:
        yield from ((one, tensor) for one in (name, *again.get(name, ())))


def save_weights(
    weights: Iterator[tuple[str, Tensor]], folder: Path | None, dtype: torch.dtype, bytes_per_file: int = FILE_BYTES
) -> None:
    """Write the weights as safetensors files of a folder. None: only gather them, as processes do that write none."""
    pending: dict[str, Tensor] = {}
    num_files = 0
    for name, tensor in weights:
        if folder is None:
            continue
        if sum(one.nbytes for one in pending.values()) >= bytes_per_file:
            num_files += 1
            save_file(pending, folder / f"model-{num_files:05d}.safetensors", metadata={"format": "pt"})
            pending.clear()
        pending[name] = tensor.to("cpu", dtype, copy=True).contiguous()
    if folder is not None and pending:
        save_file(pending, folder / f"model-{num_files + 1:05d}.safetensors", metadata={"format": "pt"})


def _base(model: Any) -> Any:
    return model.get_base_model() if has_adapter(model) else model
