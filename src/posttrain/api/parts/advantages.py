"""Advantage estimators on plain tensors: ``posttrain.advantages.normalized(rewards)``.

Per completion, ``rewards`` is ``[N, G]`` (N prompts, G samples each), or ``[B]`` with the prompt index of each row as
``group``, in any order, with any group sizes. The output has the same shape. ``gae`` and ``return_to_go`` take
``(rewards, mask, values, final_values)`` per token, ``turn_normalized`` takes ``(rewards, taken)`` per turn, and
``gdpo`` takes ``(rewards, group, weights)`` with separate rewards ``[B, K]``, NaN if a reward does not apply.

Computed in float64. The output has the input's floating-point dtype, or float32 for integer rewards.

Examples:
    >>> advantages.centered(torch.tensor([1.0, 0.0, 0.0, 5.0, 7.0]), group=torch.tensor([0, 0, 0, 1, 1]))
    tensor([ 0.6667, -0.3333, -0.3333, -1.0000,  1.0000])
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from posttrain.api.parts.part_arguments import (
    bind_arguments,
    check_part_options,
    checked_mask,
    checked_numbers,
    option_parameters,
)
from posttrain.api.parts.part_arguments import checked_tensor as checked
from posttrain.errors import UnknownComponent, UsageError
from posttrain.registry import Entry, find, names
from posttrain.types import with_float64


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("_"):
        raise AttributeError(f"module 'posttrain.advantages' has no attribute {name!r}")
    return _advantage(name)


def __dir__() -> list[str]:
    return names("advantage")


@cache
def _advantage(name: str) -> Callable[..., Any]:
    """Build the plain-tensor function for an advantage estimator.

    Raises:
        AttributeError: unknown estimator.
    """
    try:
        entry = find("advantage", name, "advantages")
    except UnknownComponent as error:
        raise AttributeError(str(error)) from None
    level = entry.traits.get("level")
    signature = _signature(entry)
    compute = {"token": _per_token, "turn": _per_turn, "parts": _per_part}.get(str(level), _per_completion)

    def advantage(*given: object, **named: object) -> Any:
        where = f"advantages.{name}"
        arguments = bind_arguments(where, signature, given, named)
        options = {one.name: arguments[one.name] for one in option_parameters(entry.function)}
        check_part_options(where, entry.function, options)
        try:
            return compute(where, entry, arguments, options)
        except ValueError as error:
            raise UsageError(f"{where}: rewards: {error}") from None

    advantage.__name__ = name
    advantage.__qualname__ = name
    advantage.__doc__ = entry.doc
    advantage.__signature__ = signature  # type: ignore[attr-defined]
    return advantage


def _signature(entry: Entry) -> inspect.Signature:
    either = inspect.Parameter.POSITIONAL_OR_KEYWORD
    level = entry.traits.get("level")
    parameters = [inspect.Parameter("rewards", either, annotation=Tensor)]
    if level == "token":
        parameters.append(inspect.Parameter("mask", either, annotation=Tensor))
        for name in ("values", "final_values"):
            parameters.append(inspect.Parameter(name, either, default=None, annotation=Tensor | None))
    elif level == "parts":
        parameters.append(inspect.Parameter("group", either, annotation=Tensor))
        parameters.append(inspect.Parameter("weights", either, default=None, annotation=Tensor | None))
    elif level == "turn":
        parameters.append(inspect.Parameter("taken", either, annotation=Tensor))
    else:
        parameters.append(inspect.Parameter("group", either, default=None, annotation=Tensor | None))
    return inspect.Signature([*parameters, *option_parameters(entry.function)])


def _returned(values: Tensor, like: Tensor) -> Tensor:
    dtype = like.dtype if like.is_floating_point() else torch.float32
    return values.to(dtype).to(like.device)


def _per_completion(where: str, entry: Entry, arguments: dict[str, Any], options: dict[str, Any]) -> Tensor:
    given = checked(where, "rewards", arguments["rewards"], (1, 2), "[N, G], or [B] with group")
    rewards = with_float64(given.detach()).double()
    least = least_group(entry, options)
    group = arguments["group"]
    if given.ndim == 2:
        if group is not None:
            raise UsageError(
                f"{where}: group: rewards [N, G] are already grouped by row. Omit group, or give rewards [B]"
            )
        if given.shape[1] < least:
            raise UsageError(f"{where}: rewards: {given.shape[1]} answers for a prompt. Give at least {least}")
        return _returned(entry.function(rewards, **options), given)
    if group is None:
        raise UsageError(f"{where}: group: rewards [B] need a prompt index per row. Give group, or rewards [N, G]")
    numbers = checked(where, "group", group, (1,), "[B]").tolist()
    if len(numbers) != given.shape[0]:
        raise UsageError(
            f"{where}: group: {len(numbers)} indices for {given.shape[0]} rewards. Give one index per reward"
        )
    return _returned(_by_group(where, entry, rewards, numbers, least, options), given)


def least_group(entry: Entry, options: dict[str, Any]) -> int:
    """Smallest group that an advantage compares, with these options."""
    least = int(entry.traits.get("min_group", 1))
    for option, sizes in entry.traits.get("min_group_if", {}).items():
        least = max(least, sizes.get(options.get(option), 1))
    return least


def _per_part(where: str, entry: Entry, arguments: dict[str, Any], options: dict[str, Any]) -> Tensor:
    given = checked(where, "rewards", arguments["rewards"], (2,), "[B, K]")
    size, number = given.shape
    group = checked_numbers(where, "group", arguments["group"], (size,), given.device, "[B]")
    if arguments["weights"] is None:
        arguments["weights"] = torch.ones(number, device=given.device)
    weights = checked_numbers(where, "weights", arguments["weights"], (number,), given.device, "[K]")
    least = int(entry.traits.get("min_group", 1))
    numbers, counts = group.unique(return_counts=True)
    if size and int(counts.min()) < least:
        few = numbers[counts.argmin()].item()
        raise UsageError(f"{where}: group: group {few} has {int(counts.min())} answer. Give at least {least} of each")
    inputs = [with_float64(one.detach()).double() for one in (given, weights)]
    return _returned(entry.function(*inputs, with_float64(group), **options), given)


def _by_group(
    where: str, entry: Entry, rewards: Tensor, numbers: list[Any], least: int, options: dict[str, Any]
) -> Tensor:
    places: dict[Any, list[int]] = {}
    for row, number in enumerate(numbers):
        places.setdefault(number, []).append(row)
    for number, rows in places.items():
        if len(rows) < least:
            raise UsageError(
                f"{where}: group: group {number} has {len(rows)} answer. Give at least {least} of each prompt"
            )
    result = torch.empty_like(rewards)
    sizes = {len(rows) for rows in places.values()}
    if len(sizes) == 1:
        order = torch.tensor(list(places.values()))
        result[order] = entry.function(rewards[order], **options)
    elif entry.traits.get("spans_groups"):
        padded = pad_sequence([rewards[own] for own in places.values()], batch_first=True, padding_value=math.nan)
        for own, values in zip(places.values(), entry.function(padded, **options), strict=True):
            result[own] = values[: len(own)]
    elif least > 1:  # computed within each group
        for rows in places.values():
            result[rows] = entry.function(rewards[rows][None], **options)[0]
    else:
        result = entry.function(rewards[None], **options)[0]
    return result


def _per_token(where: str, entry: Entry, arguments: dict[str, Any], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    mask = checked_mask(where, "mask", arguments["mask"])
    shape, device = tuple(mask.shape), mask.device
    given = checked_numbers(where, "rewards", arguments["rewards"], shape, device, "[B, T]")
    if arguments["values"] is None:
        if "old_values" in entry.traits.get("needs", ()):
            raise UsageError(f"{where}: values: missing. Give critic values [B, T]")
        arguments["values"] = torch.zeros_like(given)
    if arguments["final_values"] is None:
        if options.get("bootstrap"):
            raise UsageError(f"{where}: final_values: missing, but bootstrap=True requires them. Give values [B]")
        arguments["final_values"] = torch.zeros(shape[0], device=device)
    values = checked_numbers(where, "values", arguments["values"], shape, device, "[B, T]")
    final = checked_numbers(where, "final_values", arguments["final_values"], shape[:1], device, "[B]")
    trained = with_float64(mask)
    inputs = [with_float64(one.detach()).double() for one in (given, values, final)]
    inputs[1] = torch.where(trained, inputs[1], torch.zeros_like(inputs[1]))
    advantages, returns = entry.function(inputs[0], trained, inputs[1], inputs[2], **options)
    return _returned(advantages, given), _returned(returns, given)


def _per_turn(where: str, entry: Entry, arguments: dict[str, Any], options: dict[str, Any]) -> Tensor:
    taken = checked_mask(where, "taken", arguments["taken"], "[G, K]")
    given = checked_numbers(where, "rewards", arguments["rewards"], taken.shape, taken.device, "[G, K]")
    rewards = with_float64(given.detach()).double()
    return _returned(entry.function(rewards, with_float64(taken), **options), given)
