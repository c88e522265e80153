"""The weights of a trained model as an engine elsewhere takes them: whole, in one order, adapters merged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.errors import UsageError
from posttrain.models.load import quantized_bits
from posttrain.models.lora import has_adapter, merged_weights
from posttrain.world import whole


def checkpoint_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every weight under the name that it has in a checkpoint, always in the same order.

    A weight that stands in two places (a tied head) comes once. Adapters are merged into copies, one at a time.

    Raises:
        UsageError: weights of 4 or 8 bits, which cannot be merged exactly.
    """
    bits = quantized_bits(model)
    if bits is not None:
        raise UsageError(f"weights of {bits} bits cannot be handed to another engine; sample with the native one")
    named = merged_weights(model) if has_adapter(model) else model.named_parameters()
    with torch.no_grad():
        for name, tensor in named:
            yield name, whole(tensor.detach())


def save_without_weights(model: Any, tokenizer: Any, folder: Path) -> None:
    """Configuration and tokenizer alone, from which an engine elsewhere builds a model that is given weights later."""
    whole = model.get_base_model() if has_adapter(model) else model
    whole.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
