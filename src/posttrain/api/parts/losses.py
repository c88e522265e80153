"""Objectives on plain tensors: ``posttrain.losses.grpo(logprobs, old_logprobs=..., advantages=..., mask=...)``.

Each function is named after its objective, and returns ``Loss(values, metrics)`` without reduction: values ``[B, T]``
per token, or ``[U]`` per pair or row. Differentiate ``(loss.values * weights).sum()``, with weights from
``posttrain.aggregations``.

``x[b, t]`` describes the token at position t. ``mask`` is True for trained tokens. Other positions are ignored, even
if NaN: they receive zero loss and zero gradient. ``dir(posttrain.losses)`` lists all functions. ``help`` shows the
equation, options and paper.

Examples:
    >>> loss = losses.grpo(logprobs, old_logprobs=old, advantages=advantages, mask=mask, clip_high=0.28)
    >>> (loss.values * aggregations.token_mean(mask)).sum().backward()
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from posttrain.algorithms.objectives import surrogate
from posttrain.api.parts.part_arguments import (
    bind_arguments,
    check_part_options,
    checked_mask,
    checked_numbers,
    option_parameters,
)
from posttrain.errors import UnknownComponent, UsageError
from posttrain.registry import Entry, find, names
from posttrain.types import Batch, Loss, Outputs

# Batch fields with one value per row. ``advantages`` may be per row or per token.
ROW_FIELDS = ("labels", "margins", "kl_baseline", "has_feedback", "transport_shift")
# Batch fields read by the trainer, never by objectives.
NOT_READ = ("teacher_ids",)
_SHAPES = {"candidate_logprobs": "[B, T, K]", "teacher_candidate_logprobs": "[B, T, K]"}


def __getattr__(name: str) -> Callable[..., Loss]:
    if name.startswith("_"):
        raise AttributeError(f"module 'posttrain.losses' has no attribute {name!r}")
    return _loss(name)


def __dir__() -> list[str]:
    return sorted([*names("objective"), "kl", "regularize"])


@cache
def _loss(name: str) -> Callable[..., Loss]:
    """Build the plain-tensor function for an objective.

    Raises:
        AttributeError: unknown objective.
    """
    try:
        entry = find("objective", name, "losses")
    except UnknownComponent as error:
        raise AttributeError(str(error)) from None
    signature = _signature(entry)

    def loss(*given: object, **named: object) -> Loss:
        return _compute(entry, bind_arguments(f"losses.{name}", signature, given, named))

    loss.__name__ = name
    loss.__qualname__ = name
    loss.__doc__ = entry.doc
    loss.__signature__ = signature  # type: ignore[attr-defined]
    return loss


def _outputs_of(entry: Entry) -> tuple[str, ...]:
    """List forward-pass outputs that an objective reads."""
    head = entry.traits.get("head")
    needs = entry.traits.get("needs", ())
    if head == "score":
        return ("scores",)
    if "teacher_candidate_logprobs" in needs:
        return ("candidate_logprobs",)
    if head == "value":
        return ("logprobs", "scores")
    return ("logprobs",)


def _optional(entry: Entry) -> dict[str, str]:
    """Map each optional tensor to the option that requires it."""
    found = {field: option for option, field in entry.traits.get("optional_needs", {}).items()}
    if "old_logprobs" in found and "logprobs" not in _outputs_of(entry):
        found["logprobs"] = found["old_logprobs"]
    return found


def _fields_of(entry: Entry) -> tuple[str, ...]:
    return tuple(name for name in entry.traits.get("needs", ()) if name not in NOT_READ)


def _options_of(entry: Entry) -> list[inspect.Parameter]:
    """List function options, without options for token selection in a batch."""
    of_batch = entry.traits.get("of_batch", ())
    return [one for one in option_parameters(entry.function) if one.name not in of_batch]


def _signature(entry: Entry) -> inspect.Signature:
    either, keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, either, annotation=Tensor) for name in _outputs_of(entry)]
    parameters += [inspect.Parameter(name, keyword, annotation=Tensor) for name in (*_fields_of(entry), "mask")]
    for name in _optional(entry):
        parameters.append(inspect.Parameter(name, keyword, default=None, annotation=Tensor | None))
    parameters += _options_of(entry)
    return inspect.Signature(parameters, return_annotation=Loss)


def _compute(entry: Entry, arguments: Mapping[str, Any]) -> Loss:
    where = f"losses.{entry.name}"
    options = {one.name: arguments[one.name] for one in _options_of(entry)}
    check_part_options(where, entry.function, options)
    mask = checked_mask(where, "mask", arguments["mask"])
    rows_per_unit = 1
    if entry.traits["level"] == "pair":
        rows_per_unit = 2
        if mask.shape[0] % 2:
            raise UsageError(
                f"{where}: mask: {mask.shape[0]} is an odd number of rows. Give pairs: chosen, rejected, chosen, ..."
            )
    tensors = {}
    for name in (*_outputs_of(entry), *_fields_of(entry)):
        tensors[name] = _read(where, name, arguments[name], mask, int(options.get("num_classes", 1)))
    _check_candidates(where, tensors)
    for name, option in _optional(entry).items():
        is_read = bool(options[option])
        if is_read and arguments[name] is None:
            raise UsageError(f"{where}: {name}: required with {option}={options[option]!r}. Give it, or unset {option}")
        if arguments[name] is not None:
            tensors[name] = _read(where, name, arguments[name], mask)
    outputs = Outputs(
        logprobs=tensors.pop("logprobs", None),  # type: ignore[arg-type]
        scores=tensors.pop("scores", None),
        candidate_logprobs=tensors.pop("candidate_logprobs", None),
    )
    loss = entry.function(outputs, plain_batch(mask, tensors, rows_per_unit), **options)
    if entry.traits["level"] == "token":
        return Loss(torch.where(mask, loss.values, torch.zeros_like(loss.values)), loss.metrics)
    return loss


def _check_candidates(where: str, tensors: Mapping[str, Tensor]) -> None:
    student = tensors.get("candidate_logprobs")
    if student is None:
        return
    teacher = tensors["teacher_candidate_logprobs"]
    if student.shape != teacher.shape:
        raise UsageError(
            f"{where}: teacher_candidate_logprobs: the shape is {tuple(teacher.shape)}, but "
            f"candidate_logprobs has {tuple(student.shape)}. Give the same K candidates for both"
        )


def _read(where: str, name: str, value: object, mask: Tensor, num_classes: int = 1) -> Tensor:
    """Check a tensor and zero it outside the mask. Per-row ``advantages`` are expanded to all tokens."""
    rows = mask.shape[0]
    is_per_row = isinstance(value, Tensor) and value.ndim == 1
    if name in ROW_FIELDS or (name == "advantages" and is_per_row):
        numbers = checked_numbers(where, name, value, (rows,), mask.device, "[B]")
        if name in ROW_FIELDS:
            return numbers
        tokens = numbers[:, None].expand(mask.shape)
    else:
        shape_text = _SHAPES.get(name, "[B, T]")
        if name == "scores" and num_classes > 2:
            shape_text = "[B, T, C]"
        tokens = checked_numbers(where, name, value, mask.shape, mask.device, shape_text)
    inside = mask if tokens.ndim == 2 else mask[..., None]
    return torch.where(inside, tokens, torch.zeros_like(tokens))


def plain_batch(mask: Tensor, fields: dict[str, Tensor], rows_per_unit: int = 1) -> Batch:
    """Build a minimal batch with mask and fields, enough for any objective."""
    rows, width = mask.shape
    device = mask.device
    return Batch(
        tokens=torch.zeros(rows, width, dtype=torch.long, device=device),
        lengths=torch.full((rows,), width, device=device),
        mask=mask,
        group=torch.zeros(rows, dtype=torch.long, device=device),
        prefix=torch.zeros(rows, dtype=torch.long, device=device),
        fields=fields,
        rows_per_unit=rows_per_unit,
    )


def kl(logprobs: Tensor, ref_logprobs: Tensor, *, mask: Tensor, estimator: surrogate.KlEstimator = "k3") -> Tensor:
    """Estimate KL(π‖π_ref) at each sampled token: k1, k2 or k3 from Schulman (2020), log-ratio clamped to ±20.

    Shapes: logprobs, ref_logprobs, mask ``[B, T]`` → ``[B, T]``, 0 outside the mask. As a loss, only k2 has the
    gradient of KL(π‖π_ref); see ``regularize``.

    Raises:
        UsageError: a tensor with the wrong shape or device, or an unknown estimator.
    """
    where = "losses.kl"
    check_part_options(where, kl, {"estimator": estimator})
    trained = checked_mask(where, "mask", mask)
    policy = _read(where, "logprobs", logprobs, trained)
    reference = _read(where, "ref_logprobs", ref_logprobs, trained)
    return surrogate.KL_ESTIMATORS[estimator](surrogate.log_ratio(policy, reference, trained))


def regularize(
    loss: Loss,
    *,
    mask: Tensor,
    logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    old_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_estimator: surrogate.PenaltyEstimator = "k3",
    entropy_coef: float = 0.0,
) -> Loss:
    """Add ``β · kl − c_H · H`` to a per-token loss.

    Shapes: logprobs, ref_logprobs, old_logprobs, entropy, mask ``[B, T]``. ``kl_coef`` is β and requires logprobs and
    ref_logprobs, plus old_logprobs with ``k3_weighted``. ``entropy_coef`` is c_H and requires the entropy of each
    token distribution in nats, differentiable.

    The k1 gradient has expectation 0, k2 gives the gradient of KL(π‖π_ref), k3 the gradient of KL(π_ref‖π). Published
    GRPO uses k3.

    Raises:
        UsageError: a coefficient without required tensors, or a tensor with the wrong shape or device.
    """
    where = "losses.regularize"
    check_part_options(where, surrogate.with_regularizers, {"kl_coef": kl_coef, "kl_estimator": kl_estimator})
    check_part_options(where, surrogate.with_regularizers, {"entropy_coef": entropy_coef})
    trained = checked_mask(where, "mask", mask)
    if not isinstance(loss, Loss):
        raise UsageError(f"{where}: loss: {type(loss).__name__} is not a loss. Give the result of losses.NAME")
    fields: dict[str, Tensor] = {}
    policy = torch.zeros_like(loss.values)
    if kl_coef != 0.0:
        for name, value in (("logprobs", logprobs), ("ref_logprobs", ref_logprobs)):
            fields[name] = _read(where, name, value, trained)
        if kl_estimator == "k3_weighted":
            fields["old_logprobs"] = _read(where, "old_logprobs", old_logprobs, trained)
        policy = fields.pop("logprobs")
    of_entropy = None
    if entropy_coef != 0.0 or entropy is not None:
        of_entropy = _read(where, "entropy", entropy, trained)
    return surrogate.add_regularizers(
        loss,
        Outputs(logprobs=policy, entropy=of_entropy),
        plain_batch(trained, fields),
        kl_coef=kl_coef,
        kl_estimator=kl_estimator,
        entropy_coef=entropy_coef,
    )
