"""Call a loss under test: value, and gradient by every leaf."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.conformance.cases import LEAVES, Config, FieldTensors, MicroBatches
from posttrain.conformance.findings import BadResult, check_tensor, in_one_line
from posttrain.conformance.reference import reference_loss
from posttrain.errors import PosttrainError, RunFailure
from posttrain.registry import call

LossFunction = Callable[[FieldTensors, Config, MicroBatches], Any]


@dataclass(frozen=True, slots=True)
class LossResult:
    """A loss and its gradients ``[B, T, ...]`` by leaf; 0 for unreachable leaves."""

    value: Tensor
    gradients: dict[str, Tensor]

    @property
    def gradient(self) -> Tensor:
        """All gradients as a flat vector."""
        return torch.cat([one.flatten() for one in self.gradients.values()])

    def of_rows(self, rows: Sequence[int]) -> LossResult:
        """Select gradients for some rows, in order."""
        return LossResult(self.value, {name: one[list(rows)] for name, one in self.gradients.items()})

    def of_columns(self, columns: Sequence[int]) -> LossResult:
        """Select gradients for some columns, in order."""
        return LossResult(self.value, {name: one[:, list(columns)] for name, one in self.gradients.items()})

    def scaled(self, factor: float) -> LossResult:
        """Scale value and gradients."""
        return LossResult(self.value * factor, {name: one * factor for name, one in self.gradients.items()})

    def __add__(self, other: LossResult) -> LossResult:
        summed = {name: one + other.gradients[name] for name, one in self.gradients.items()}
        return LossResult(self.value + other.value, summed)


def call_safely(function: Callable[..., Any], *arguments: object) -> Any:
    """Call a third-party function.

    Raises:
        BadResult: it raised.
    """
    try:
        return call("conformance", function, *arguments)
    except RunFailure as failure:
        cause = failure.__cause__
        if cause is None:
            raise BadResult(in_one_line(str(failure))) from None
        raise BadResult(in_one_line(f"raised {type(cause).__name__}: {cause}")) from cause
    except PosttrainError as error:
        raise BadResult(in_one_line(f"raised {type(error).__name__}: {error}")) from error


def run_loss(
    loss: LossFunction, batch: FieldTensors, config: Config, micro_batches: MicroBatches | None = None
) -> LossResult:
    """Evaluate a loss under test with gradients. By default all rows form one micro-batch.

    Raises:
        BadResult: it raised, or did not return a scalar.
        Declined: unsupported configuration.
    """
    if micro_batches is None:
        micro_batches = [range(len(batch["mask"]))]
    split = [list(one) for one in micro_batches]
    leaves = {name: batch[name].clone().requires_grad_() for name in LEAVES}
    given = {name: x.clone() for name, x in batch.items()} | leaves
    value = check_tensor(call_safely(loss, given, config, split), (), "one number, a tensor of shape ()")
    return LossResult(value.detach(), _gradients(value, leaves))


def run_reference(batch: FieldTensors, config: Config) -> LossResult:
    """Evaluate the reference with gradients."""
    leaves = {name: batch[name].clone().requires_grad_() for name in LEAVES}
    value = reference_loss(dict(batch) | leaves, config)
    return LossResult(value.detach(), _gradients(value, leaves))


def _gradients(value: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    if not value.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    try:
        found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    except RuntimeError as error:
        raise BadResult(f"cannot be differentiated: {in_one_line(str(error))}") from error
    gradients = {}
    for (name, leaf), gradient in zip(leaves.items(), found, strict=True):
        gradients[name] = gradient
        if gradient is None:
            gradients[name] = torch.zeros_like(leaf)
    return gradients
