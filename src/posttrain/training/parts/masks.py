"""Apply recipe masks to an optimizer batch before its first micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain import registry
from posttrain.errors import UsageError
from posttrain.recipes.sections import MaskComponent
from posttrain.types import COUNTED, UNMASKED, Batch


@dataclass(frozen=True, slots=True)
class BoundMask:
    """Mask with bound options.

    reads: batch fields, or ``mask``. is_counted: exclude masked tokens from loss denominators.
    """

    function: Callable[..., Any]
    reads: tuple[str, ...]
    is_counted: bool


def fields_of_masks(masks: Sequence[MaskComponent]) -> frozenset[str]:
    """List batch fields used by recipe masks."""
    names: set[str] = set()
    for number, one in enumerate(masks):
        names.update(registry.find("mask", one.name, f"masks.{number}").provided)
    return frozenset(names - {"mask"})


def bind_masks(masks: Sequence[MaskComponent]) -> list[BoundMask]:
    """Bind options for all recipe masks."""
    bound: list[BoundMask] = []
    for number, one in enumerate(masks):
        key = f"masks.{number}"
        entry = registry.find("mask", one.name, key)
        bound.append(BoundMask(entry.bind(one.options, key), entry.provided, one.divisor == "all"))
    return bound


def apply_masks(masks: Sequence[BoundMask], batch: Batch) -> dict[str, Tensor]:
    """Compute ``unmasked`` ``[B, T]`` (1 for tokens kept by all masks), and ``counted`` if some tokens are not
    counted.

    Raises:
        UsageError: a mask function did not return a boolean per token.
    """
    trained = batch.trained_mask
    kept = torch.ones_like(trained)
    counted = torch.ones_like(trained)
    for one in masks:
        arguments = [trained if name == "mask" else batch.field(name) for name in one.reads]
        result = registry.call("masks", one.function, *arguments)
        if getattr(result, "shape", None) != trained.shape or result.dtype != torch.bool:
            raise UsageError(
                f"masks: the function returned {registry.describe_result(result)} for a batch of shape "
                f"{tuple(trained.shape)}; it must return one boolean (torch.bool) per token"
            )
        kept &= result | ~trained
        if not one.is_counted:
            counted &= result | ~trained
    fields = {UNMASKED: kept.float()}
    if not all(one.is_counted for one in masks):
        fields[COUNTED] = counted.float()
    return fields
