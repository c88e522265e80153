"""A model's layers through ``torch.compile`` (``train.compile``), while a packed batch is computed.

A layer at a time: all of them share what is compiled, so it takes as long for two layers as for forty. Attention stays
outside of it, for its plan is another one with every batch; sizes are dynamic, so that no batch compiles anew. Against
the plain path numbers differ by fp32 rounding. The functions of ``fused.py`` are not used beside it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from posttrain.errors import UsageError
from posttrain.models.forward.attention import ATTENTION_NAME, attention_forward
from posttrain.models.forward.gradient_checkpointing import checkpointed_layers

BACKEND = "inductor"


class CompiledLayers:
    """Context in which the layers of ``model`` are compiled; not those that ``gradient_checkpointing`` computes again,
    in which torch compiles nothing.

    Raises:
        UsageError: torch finds no compiler here, or the model has no layers that it knows.
    """

    def __init__(self, model: Any) -> None:
        parameter = next(model.parameters())
        _check_compiler(parameter.device)
        self.layers: list[tuple[Any, Callable[..., Any]]] = [
            (layer, torch.compile(type(layer).forward.__get__(layer), dynamic=True, backend=BACKEND))
            for layer in checkpointed_layers(model)
        ]
        if not self.layers:
            raise UsageError(f"train.compile: {type(model).__name__} has no layers that can be compiled; leave it out")
        self.outside = torch.compiler.disable(attention_forward)

    def __enter__(self) -> None:
        AttentionInterface.register(ATTENTION_NAME, self.outside)
        for layer, forward in self.layers:
            layer.__dict__["forward"] = forward

    def __exit__(self, *_: Any) -> None:
        AttentionInterface.register(ATTENTION_NAME, attention_forward)
        for layer, _forward in self.layers:
            layer.__dict__.pop("forward", None)


def _check_compiler(device: torch.device) -> None:
    """Compile something small, anew: what a cache holds says nothing of the compiler."""
    from torch._inductor import config

    def doubled(x: Tensor) -> Tensor:
        return x.sin() * 2

    try:
        with warnings.catch_warnings(), config.patch(force_disable_caches=True):
            warnings.filterwarnings("ignore", message="dynamo_pgo")
            torch.compile(doubled, backend=BACKEND)(torch.ones(8, device=device))
    except RuntimeError as error:
        says = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UsageError(
            f"train.compile: torch cannot compile for {device.type} here ({says.strip()[:200]}); install a C++ "
            "compiler such as g++, or leave train.compile out"
        ) from error
