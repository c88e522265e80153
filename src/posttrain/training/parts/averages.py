"""Exponential moving averages for trained weights, and teachers that use them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

from posttrain.errors import CheckpointError
from posttrain.models.forward.forward import Forward
from posttrain.models.trained_heads import copy_tensors

AVERAGES = "averages.safetensors"  # file in checkpoints
EMA = "ema"  # use name for ``train.ema_decay``


@dataclass(slots=True)
class WeightAverage:
    """Weight average ``a ← d a + (1 − d) w`` after each update, starting from a = w (Polyak and Juditsky 1992).

    forward: forward pass for the averaged model. parameters: by name. decay: d. Averages keep the weight dtype (fp32
    or fp64). Unlike torch's ``get_ema_multi_avg_fn``, which copies the first update entirely, averaging starts from
    the initial weights.
    """

    forward: Forward
    parameters: Sequence[tuple[str, Parameter]]
    decay: float
    values: dict[str, Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for name, parameter in self.parameters:
            self.values[name] = parameter.detach().clone()

    @torch.no_grad()
    def update(self) -> None:
        """Update averages with current weights."""
        for name, parameter in self.parameters:
            self.values[name].lerp_(parameter.detach(), 1.0 - self.decay)

    @contextmanager
    def open(self) -> Iterator[Forward]:
        """Swap averaged weights into the model inside the block and yield its forward pass."""
        current = {name: parameter.detach().clone() for name, parameter in self.parameters}
        try:
            self._fill(self.values)
            yield self.forward
        finally:
            self._fill(current)

    @torch.no_grad()
    def _fill(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self.parameters:
            parameter.detach().copy_(values[name])


@dataclass(frozen=True, slots=True)
class Teacher:
    """Teacher forward pass, available inside ``open``; ``average``: averaged weights, if used."""

    open: Callable[[], AbstractContextManager[Forward]]
    average: WeightAverage | None = None


def average_tensors(averages: Mapping[str, WeightAverage]) -> dict[str, Tensor]:
    """Collect all averages for a checkpoint, keyed ``<use>.<weight>``, without copying."""
    tensors: dict[str, Tensor] = {}
    for whose, average in averages.items():
        for name, value in average.values.items():
            tensors[f"{whose}.{name}"] = value
    return tensors


def restore_averages(averages: Mapping[str, WeightAverage], stored: Mapping[str, Tensor], path: Path) -> None:
    """Restore averages from a checkpoint bit for bit.

    Raises:
        CheckpointError: missing or different averages.
    """
    live = average_tensors(averages)
    missing = sorted(live.keys() - stored.keys())
    if missing:
        raise CheckpointError(
            f"{path / AVERAGES}: {len(missing)} weight averages are missing, such as {missing[0]}. Resume with the "
            "checkpoint's recipe (recipe.yaml in the run folder)"
        )
    copy_tensors(dict(stored), live, path)
