"""Argument checks for the plain-tensor functions: tensor shapes, option types and ranges.

No pydantic here: these functions need only torch, and grading not even that.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from posttrain.errors import UsageError, nearest
from posttrain.signatures import Range

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_SHOWN_CHARS = 80
_PHRASES = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}


def bind_arguments(where: str, signature: inspect.Signature, given: Sequence[object], named: Mapping[str, Any]) -> Any:
    """Bind call arguments by name and apply defaults.

    Raises:
        UsageError: a missing, unknown or repeated argument.
    """
    parameters = signature.parameters
    for name in named:
        if name not in parameters:
            near = nearest(name, parameters)
            hint = f" Did you mean {near!r}?" if near else ""
            raise UsageError(f"{where}: unknown argument {name!r}.{hint} Known arguments: {', '.join(parameters)}")
    try:
        bound = signature.bind(*given, **named)
    except TypeError as error:
        raise UsageError(f"{where}: {error}. Arguments: {', '.join(parameters)}") from None
    bound.apply_defaults()
    return bound.arguments


def option_parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """List keyword-only parameters, which are the component's options."""
    parameters = inspect.signature(function).parameters.values()
    return [one for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY]


def check_part_options(where: str, function: Callable[..., Any], options: Mapping[str, object]) -> None:
    """Check option types and ranges.

    Raises:
        UsageError: includes the option name, allowed values and the given value.
    """
    hints = get_type_hints(function, include_extras=True)
    for name, value in options.items():
        fault = find_fault(hints.get(name, Any), value)
        if fault is not None:
            raise UsageError(f"{where}: {name}: must be {fault}, not {_shown(value)}")


def _shown(value: object) -> str:
    """Format a short plain value with ``repr``. Other objects show only their type, because ``repr`` may run code."""
    if value is None or type(value) in (bool, int, float, str, bytes):
        text = repr(value)
        if len(text) <= _SHOWN_CHARS:
            return text
    return f"<{type(value).__name__}>"


def find_fault(annotation: Any, value: object) -> str | None:
    """Describe the required value if it does not match an annotation; None if it matches."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *marks = get_args(annotation)
        fault = find_fault(inner, value)
        ranges = [mark for mark in marks if isinstance(mark, Range)]
        if fault is None and ranges:
            fault = _outside(ranges[0], value)
        return fault
    if origin in (Union, types.UnionType):
        faults = [find_fault(one, value) for one in get_args(annotation)]
        if None in faults:
            return None
        return " or ".join(fault for fault in faults if fault is not None)
    if origin is Sequence:
        return _fault_of_items(get_args(annotation)[0], value)
    if origin is Literal:
        choices = get_args(annotation)
        is_choice = type(value) in {type(choice) for choice in choices} and value in choices
        return None if is_choice else f"one of {', '.join(map(repr, choices))}"
    return _wrong_type(annotation, value)


def _fault_of_items(annotation: Any, value: object) -> str | None:
    """Describe the required sequence. In number lists, True and False count as 1 and 0, and infinity is allowed."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return "a list"
    for item in value:
        if annotation is float and isinstance(item, int | float):
            fault = "a number" if item != item else None
        else:
            fault = find_fault(annotation, item)
        if fault is not None:
            return f"a list, each item {fault}"
    return None


def _wrong_type(annotation: Any, value: object) -> str | None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if annotation is type(None):
        return None if value is None else "None"
    if annotation is bool:
        return None if isinstance(value, bool) else "True or False"
    if annotation is int:
        return None if is_whole else "a whole number"
    if annotation is str:
        return None if isinstance(value, str) else "a text"
    if annotation is float:
        is_number = is_whole or isinstance(value, float)
        is_finite = isinstance(value, int | float) and value - value == 0
        return None if is_number and is_finite else "a finite number"
    return None


def _outside(limits: Range, value: object) -> str | None:
    if not isinstance(value, int | float):
        return None
    is_inside = (
        (limits.ge is None or value >= limits.ge)
        and (limits.gt is None or value > limits.gt)
        and (limits.le is None or value <= limits.le)
        and (limits.lt is None or value < limits.lt)
    )
    if is_inside:
        return None
    bounds = {key: getattr(limits, key) for key in _PHRASES}
    return " and ".join(f"{_PHRASES[key]} {bound:g}" for key, bound in bounds.items() if bound is not None)


def checked_tensor(where: str, name: str, value: object, num_dimensions: tuple[int, ...], shape_text: str) -> Tensor:
    """Check a tensor argument and its number of dimensions.

    Raises:
        UsageError: not a tensor, or the wrong number of dimensions.
    """
    import torch

    if not isinstance(value, torch.Tensor):
        raise UsageError(f"{where}: {name}: {type(value).__name__} is not a tensor. Give a tensor {shape_text}")
    if value.ndim not in num_dimensions:
        raise UsageError(f"{where}: {name}: the shape is {tuple(value.shape)}. Give {shape_text}")
    return value


def checked_numbers(
    where: str, name: str, value: object, expected: Sequence[int], device: torch.device, shape_text: str
) -> Tensor:
    """Check a tensor argument with real numbers on the given device.

    The shape must be ``expected``. If ``shape_text`` lists more dimensions, they can have any size.

    Raises:
        UsageError: not a tensor, or wrong shape, dtype or device.
    """
    tensor = checked_tensor(where, name, value, (shape_text.count(",") + 1,), shape_text)
    if tuple(tensor.shape[: len(expected)]) != tuple(expected):
        raise UsageError(
            f"{where}: {name}: the shape is {tuple(tensor.shape)}, but the mask needs "
            f"{tuple(expected)}. Give {shape_text}"
        )
    if tensor.is_complex():
        raise UsageError(f"{where}: {name}: the dtype is {tensor.dtype}. Give real numbers")
    if tensor.device != device:
        raise UsageError(
            f"{where}: {name}: the tensor is on {tensor.device}, the mask on {device}. Move both to the same device"
        )
    return tensor


def checked_mask(where: str, name: str, value: object, shape_text: str = "[B, T]") -> Tensor:
    """Convert a mask to ``bool [B, T]``. Other dtypes with values 0 and 1 are accepted.

    Raises:
        UsageError: not a mask tensor, or values other than 0 and 1.
    """
    import torch

    mask = checked_tensor(where, name, value, (2,), shape_text)
    if mask.dtype == torch.bool:
        return mask
    if bool(((mask != 0) & (mask != 1)).any()):
        raise UsageError(f"{where}: {name}: contains values other than 0 and 1. Give a mask, True for trained tokens")
    return mask != 0
