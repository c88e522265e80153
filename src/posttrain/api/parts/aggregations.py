"""Loss aggregations on plain tensors: weights to sum with, ``posttrain.aggregations.token_mean(mask)``.

Compute weights over the whole optimizer batch first, then split rows and weights into micro-batches. Summing
``(values * weights).sum()`` over micro-batches gives the loss for any split, without further normalization.

``mask`` is ``[B, T]``, True for trained tokens. Weights are ``float64 [B, T]``, 0 outside the mask (float32 on Apple
GPUs, which lack float64). ``unit_mean`` takes one row per unit and returns ``[U]``.

Examples:
    >>> aggregations.token_mean(torch.tensor([[0, 1, 1], [0, 1, 0]]))
    tensor([[0.0000, 0.3333, 0.3333],
            [0.0000, 0.3333, 0.0000]], dtype=torch.float64)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache

from torch import Tensor

from posttrain.api.parts.part_arguments import bind_arguments, check_part_options, checked_mask, option_parameters
from posttrain.errors import UnknownComponent, UsageError
from posttrain.registry import find, names
from posttrain.types import with_float64


def __getattr__(name: str) -> Callable[..., Tensor]:
    if name.startswith("_"):
        raise AttributeError(f"module 'posttrain.aggregations' has no attribute {name!r}")
    return _aggregation(name)


def __dir__() -> list[str]:
    return names("aggregation")


@cache
def _aggregation(name: str) -> Callable[..., Tensor]:
    """Build the plain-tensor function for an aggregation.

    Raises:
        AttributeError: unknown aggregation.
    """
    try:
        entry = find("aggregation", name, "aggregations")
    except UnknownComponent as error:
        raise AttributeError(str(error)) from None
    where = f"aggregations.{name}"
    options = option_parameters(entry.function)
    first = inspect.Parameter("mask", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Tensor)
    signature = inspect.Signature([first, *options], return_annotation=Tensor)

    def aggregation(*given: object, **named: object) -> Tensor:
        arguments = bind_arguments(where, signature, given, named)
        mask = checked_mask(where, "mask", arguments["mask"])
        chosen = {one.name: arguments[one.name] for one in options}
        check_part_options(where, entry.function, chosen)
        try:
            weights: Tensor = entry.function(with_float64(mask), **chosen)
        except ValueError as error:
            raise UsageError(f"{where}: mask: {error}") from None
        if weights.device == mask.device:
            return weights
        return weights.float().to(mask.device)

    aggregation.__name__ = name
    aggregation.__qualname__ = name
    aggregation.__doc__ = entry.doc
    aggregation.__signature__ = signature  # type: ignore[attr-defined]
    return aggregation
