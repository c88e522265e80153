"""Gradient checkpointing: the layers' activations are computed again in the backward pass instead of being kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from posttrain.models.forward.linear import fast_linear
from posttrain.types import Model

_KEPT = ("gradient_checkpointing", "_gradient_checkpointing_func", "training")


def checkpointed_layers(model: Model) -> list[Any]:
    """Find a transformers model's checkpointable layers."""
    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]


@contextmanager
def gradient_checkpointing(models: Sequence[Model]) -> Iterator[None]:
    """Enable gradient checkpointing for ``models`` in this block: only layer inputs are stored.

    Chen et al. (2016), "Training deep nets with sublinear memory cost". Recomputation repeats random numbers (adapter
    dropout). Only each layer's training flag is set: setting submodules' flags would enable dropout.
    """
    layers = [layer for model in models for layer in checkpointed_layers(model)]
    before = [{name: value for name, value in vars(layer).items() if name in _KEPT} for layer in layers]
    try:
        for layer in layers:
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False, context_fn=fast_linear.again)
            layer.training = True
        yield
    finally:
        for layer, kept in zip(layers, before, strict=True):
            for name in _KEPT:
                vars(layer).pop(name)
            vars(layer).update(kept)
