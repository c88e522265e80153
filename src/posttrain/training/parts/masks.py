"""Masks of a recipe, applied to an optimizer batch before its first micro-batch."""

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
    """A mask with its options. reads: batch fields, or ``mask``. is_counted: the means divide by what it leaves out."""

    function: Callable[..., Any]
    reads: tuple[str, ...]
    is_counted: bool


def fields_of_masks(masks: Sequence[MaskComponent]) -> frozenset[str]:
    """Return the batch fields that the masks of a recipe read."""
    names: set[str] = set()
    for number, one in enumerate(masks):
        names.update(registry.find("mask", one.name, f"masks.{number}").provided)
    return frozenset(names - {"mask"})


def bind_masks(masks: Sequence[MaskComponent]) -> list[BoundMask]:
    """Return the masks of a recipe with their options."""
    bound: list[BoundMask] = []
    for number, one in enumerate(masks):
        key = f"masks.{number}"
        entry = registry.find("mask", one.name, key)
        bound.append(BoundMask(entry.bind(one.options, key), entry.provided, one.divisor == "all"))
    return bound


def apply_masks(masks: Sequence[BoundMask], batch: Batch) -> dict[str, Tensor]:
    """Return the field ``unmasked`` ``[B, T]``, 1 of tokens that no mask leaves out, and ``counted`` if it is not all.

    Raises:
        UsageError: a mask gives something else than one truth value per token.
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
                f"{tuple(trained.shape)}; it must give one truth value (torch.bool) per token"
            )
        kept &= result | ~trained
        if not one.is_counted:
            counted &= result | ~trained
    fields = {UNMASKED: kept.float()}
    if not all(one.is_counted for one in masks):
        fields[COUNTED] = counted.float()
    return fields
