"""Exponential moving averages of the trained weights, and a teacher that may have them."""

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

AVERAGES = "averages.safetensors"  # of a checkpoint
EMA = "ema"  # the average of ``train.ema_decay``, by its use


@dataclass(slots=True)
class WeightAverage:
    """``a ← d a + (1 − d) w`` after each update, for each trained weight w; a begins as w (Polyak and Juditsky 1992).

    forward: the pass over the model that has the weights. parameters: by name. decay: d. The average has the weights'
    own type, which is fp32 or fp64. Departure from torch's ``get_ema_multi_avg_fn``: there the first update is taken
    over whole, here the weights of the start are.
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
        """Take the weights of this update in."""
        for name, parameter in self.parameters:
            self.values[name].lerp_(parameter.detach(), 1.0 - self.decay)

    @contextmanager
    def open(self) -> Iterator[Forward]:
        """The forward pass with the averaged weights in the model, inside the block."""
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
    """The forward pass of a teacher, inside the block of ``open``; ``average``: its weights, if they are averaged."""

    open: Callable[[], AbstractContextManager[Forward]]
    average: WeightAverage | None = None


def average_tensors(averages: Mapping[str, WeightAverage]) -> dict[str, Tensor]:
    """Return all averages for a checkpoint, keyed ``<whose>.<weight>``; the tensors are not copied."""
    tensors: dict[str, Tensor] = {}
    for whose, average in averages.items():
        for name, value in average.values.items():
            tensors[f"{whose}.{name}"] = value
    return tensors


def restore_averages(averages: Mapping[str, WeightAverage], stored: Mapping[str, Tensor], path: Path) -> None:
    """Copy the averages of a checkpoint back, bit for bit.

    Raises:
        CheckpointError: it has others, or none.
    """
    live = average_tensors(averages)
    missing = sorted(live.keys() - stored.keys())
    if missing:
        raise CheckpointError(
            f"{path / AVERAGES}: {len(missing)} averages of weights are missing, such as {missing[0]}. Resume with the "
            "recipe that wrote the checkpoint (recipe.yaml in the run's directory)"
        )
    copy_tensors(dict(stored), live, path)
