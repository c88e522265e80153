"""Rows of an optimizer batch that cannot change its gradient, whatever the model computes on them.

An objective declares in its registration which batch fields make it vanish: ``vanishes=("advantages",)`` says that
value and gradient of a token are 0 where its advantage is 0. A row is idle if all its trained tokens have such a field
at 0, a weight of 0 or a correction of 0. Weights come from the whole batch, so the sum over the other rows is the
gradient of the whole batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from posttrain import registry
from posttrain.errors import UsageError
from posttrain.recipes.sections import TrainSection
from posttrain.types import UNMASKED, Batch, Loss, Outputs

# What an update does with idle rows: forward and backward pass, a forward pass for the metrics, or nothing.
IdleRows = Literal["train", "measure", "skip"]
UNSCORED = "unscored"  # the batch field that is 1 for rows whose log-probabilities were not computed
SHIFTS = (0.0, 0.3)  # nats


def choose_idle_rows(options: TrainSection, step: int, last_step: int | None) -> IdleRows:
    """Return what update number ``step`` does with idle rows.

    The first update, those that ``train.save_every`` follows with a checkpoint, and the last one measure every row.
    This changes metrics only: idle rows take no part in the gradient at any step, so that weights do not depend on
    where checkpoints are.
    """
    if not options.skip_zero_rows:
        return "train"
    is_saved = options.save_every > 0 and step % options.save_every == 0
    if step == 1 or is_saved or step == last_step:
        return "measure"
    return "skip"


def find_idle_rows(batch: Batch, vanishes: Sequence[str]) -> Tensor:
    """Return ``bool [B]``: True for rows that cannot change the gradient; a unit's rows are idle together.

    ``vanishes``: the fields at whose 0 the objective is 0. NaN is not 0.
    """
    idle = ~batch.mask
    factors = [batch.fields[name] for name in vanishes if name in batch.fields]
    if "correction" in batch.fields:
        factors.append(batch.fields["correction"])
    if UNMASKED in batch.fields and vanishes:  # without another term at the token, such as a KL
        factors.append(batch.fields[UNMASKED])
    if batch.weights is not None and batch.weights.ndim == 2:
        factors.append(batch.weights)
    for factor in factors:
        is_zero = factor == 0
        if factor.ndim == 1:
            is_zero = is_zero[:, None]
        idle = idle | is_zero
    units = idle.all(dim=1).unflatten(0, (-1, batch.rows_per_unit)).all(dim=1)
    if batch.weights is not None and batch.weights.ndim == 1:
        units = units | (batch.weights == 0)
    return units.repeat_interleave(batch.rows_per_unit)


def split_idle_rows(batch: Batch, vanishes: Sequence[str]) -> tuple[list[int], list[int]]:
    """Return the rows that the gradient is computed from, and the idle ones.

    The gradient always has at least one unit with a trained token, the shortest: with it every parameter gets a
    gradient of zeros, and the optimizer does what it does with those.
    """
    idle = find_idle_rows(batch, vanishes)
    if bool(idle.all()):
        each = batch.rows_per_unit
        lengths = batch.lengths.unflatten(0, (-1, each)).sum(dim=1).tolist()
        trained = batch.unit_mask.any(dim=1).tolist()
        units = [unit for unit in range(len(lengths)) if trained[unit]]
        if not units:
            return list(range(batch.num_rows)), []
        shortest = min(units, key=lambda unit: (lengths[unit], unit))
        idle[shortest * each : (shortest + 1) * each] = False
    rows = range(batch.num_rows)
    is_idle = idle.tolist()
    return [row for row in rows if not is_idle[row]], [row for row in rows if is_idle[row]]


def check_vanishing(
    label: str, objective: Callable[[Outputs, Batch], Loss], vanishes: Sequence[str], outputs: Outputs, part: Batch
) -> None:
    """Refuse an objective whose value or gradient is not 0 where it says that it vanishes.

    The function is called with the outputs of a micro-batch and one of the fields at 0 everywhere: with the model's
    log-probabilities, and with others, because a term may be 0 where the ratio to the sampler is 1.

    Args:
        label: the objective's name in the recipe.

    Raises:
        UsageError: with the field, and the largest value and derivative.
    """
    for name, shift in itertools.product(vanishes, SHIFTS):
        zeros = replace(part, fields=part.fields | {name: torch.zeros_like(part.field(name))})
        value, slope = _sizes(objective, _shifted(outputs, shift), zeros)
        if value > 0 or slope > 0:
            raise UsageError(
                f"objective: {label!r} is registered with vanishes={tuple(vanishes)!r}, but where {name} is 0 its "
                f"value reaches {value:.3g} and its derivative {slope:.3g}. Register it without {name!r} there, "
                "or set train.skip_zero_rows: false"
            )


def _shifted(outputs: Outputs, shift: float) -> Outputs:
    """Return the outputs as leaves of a graph; log-probabilities ``shift`` nats lower at every second token."""
    columns = torch.arange(outputs.logprobs.shape[1], device=outputs.logprobs.device)
    lower = shift * (columns % 2).to(outputs.logprobs.dtype)
    return Outputs(
        logprobs=(outputs.logprobs.detach() - lower).requires_grad_(True),
        entropy=_leaf(outputs.entropy),
        scores=_leaf(outputs.scores),
        candidate_logprobs=_leaf(outputs.candidate_logprobs),
    )


def _sizes(objective: Callable[[Outputs, Batch], Loss], outputs: Outputs, part: Batch) -> tuple[float, float]:
    """Return the largest value of an objective at trained tokens, and the largest derivative of their sum."""
    with torch.enable_grad():
        values = registry.call("objective", objective, outputs, part).values
        if values.ndim == 2:
            values = torch.where(part.mask, values, torch.zeros_like(values))
    inputs = [outputs.logprobs, outputs.entropy, outputs.scores, outputs.candidate_logprobs]
    slopes: Sequence[Tensor | None] = []
    if values.requires_grad:
        known = [x for x in inputs if x is not None]
        slopes = torch.autograd.grad(values.sum(), known, allow_unused=True)
    slope = max([_largest(x) for x in slopes if x is not None], default=0.0)
    return _largest(values), slope


def _leaf(x: Tensor | None) -> Tensor | None:
    if x is None:
        return None
    return x.detach().clone().requires_grad_(True)


def _largest(x: Tensor) -> float:
    """Return the largest size of the finite numbers in ``x``; a log-probability of −inf times 0 is NaN."""
    finite = x.detach()[x.detach().isfinite()]
    if finite.numel() == 0:
        return 0.0
    return float(finite.abs().max())
