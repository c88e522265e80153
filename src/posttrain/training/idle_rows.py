"""Find optimizer batch rows that cannot affect the gradient, regardless of model outputs.

Objectives declare vanishing fields at registration: ``vanishes=("advantages",)`` means that a token's value and
gradient are 0 if its advantage is 0. A row is idle if every trained token has a zero vanishing field, zero weight or
zero correction, or is masked out. Weights are computed over the whole batch, so summing only the remaining rows gives
the same gradient.
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

# Treatment of idle rows in an update: forward and backward, forward only (for metrics), or skipped.
IdleRows = Literal["train", "measure", "skip"]
UNSCORED = "unscored"  # batch field, 1 for rows without computed log-probabilities
SHIFTS = (0.0, 0.3)  # nats


def choose_idle_rows(options: TrainSection, step: int, last_step: int | None) -> IdleRows:
    """Choose how to treat idle rows in update ``step``.

    All rows are measured in the first and last update and before ``train.save_every`` checkpoints. Only metrics are
    affected: idle rows never contribute gradients, so weights do not depend on checkpoint timing.
    """
    if not options.skip_zero_rows:
        return "train"
    is_saved = options.save_every > 0 and step % options.save_every == 0
    if step == 1 or is_saved or step == last_step:
        return "measure"
    return "skip"


def find_idle_rows(batch: Batch, vanishes: Sequence[str]) -> Tensor:
    """Find rows that cannot affect the gradient, ``bool [B]``. Rows in a unit are idle together.

    ``vanishes``: fields whose zeros make the objective 0. NaN counts as nonzero.
    """
    idle = ~batch.mask
    factors = [batch.fields[name] for name in vanishes if name in batch.fields]
    if "correction" in batch.fields:
        factors.append(batch.fields["correction"])
    if UNMASKED in batch.fields and vanishes:  # only if no other term applies at the token, such as a KL
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
    """Split row indices into (used for gradients, idle).

    At least one unit with a trained token (the shortest) is always used, so every parameter gets a zero gradient and
    the optimizer behaves normally.
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
    """Reject objectives with nonzero value or gradient at declared vanishing fields.

    The objective is called on a micro-batch with one field set to 0, using real log-probabilities and shifted ones,
    because some terms vanish only at ratio 1.

    Args:
        label: objective name in the recipe.

    Raises:
        UsageError: with the field and the largest value and derivative.
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
    """Create leaf outputs, lowering log-probabilities at every second token by ``shift`` nats."""
    columns = torch.arange(outputs.logprobs.shape[1], device=outputs.logprobs.device)
    lower = shift * (columns % 2).to(outputs.logprobs.dtype)
    return Outputs(
        logprobs=(outputs.logprobs.detach() - lower).requires_grad_(True),
        entropy=_leaf(outputs.entropy),
        scores=_leaf(outputs.scores),
        candidate_logprobs=_leaf(outputs.candidate_logprobs),
    )


def _sizes(objective: Callable[[Outputs, Batch], Loss], outputs: Outputs, part: Batch) -> tuple[float, float]:
    """Compute the largest absolute objective value at trained tokens, and the largest derivative of their sum."""
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
    """Compute the largest finite magnitude in ``x``. A log-probability of −inf times 0 gives NaN."""
    finite = x.detach()[x.detach().isfinite()]
    if finite.numel() == 0:
        return 0.0
    return float(finite.abs().max())
