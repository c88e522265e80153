"""The results of a pass over an optimizer batch at each token, of all its micro-batches and processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from posttrain.process_group import ProcessGroup
from posttrain.types import Batch, Loss, Outputs, with_float64

WATCHED = ("logprobs", "entropy", "scores")


@dataclass(frozen=True, slots=True)
class Captured:
    """Float64 on the CPU: ``values`` of the objective ``[B, T]`` or ``[U]``, times the correction; ``outputs`` by name
    ``[B, T]`` (scores of C classes ``[B, T, C]``); ``slopes``, the derivatives of the loss by them; computed ``bool
    [B]``: rows that a pass had.
    """

    values: Tensor
    outputs: dict[str, Tensor]
    slopes: dict[str, Tensor]
    computed: Tensor


@dataclass(slots=True)
class Capture:
    """Keeps results of micro-batches on their device until ``collect``."""

    _parts: list[tuple[list[int], dict[str, Tensor]]] = field(default_factory=list)

    def watch(self, outputs: Outputs) -> None:
        """Ask for the derivatives of the loss by the outputs; called before ``backward``."""
        for name in WATCHED:
            tensor: Tensor | None = getattr(outputs, name)
            if tensor is not None and tensor.requires_grad and not tensor.is_leaf:
                tensor.retain_grad()

    def add(self, rows: Sequence[int], outputs: Outputs, values: Tensor) -> None:
        """Keep the results of a micro-batch of these rows of the optimizer batch; called after ``backward``."""
        kept = {"values": values.detach()}
        for name in WATCHED:
            tensor: Tensor | None = getattr(outputs, name)
            if tensor is None:
                continue
            kept[name] = tensor.detach()
            if tensor.requires_grad and not tensor.is_leaf and tensor.grad is not None:
                kept[f"d_{name}"] = tensor.grad
        self._parts.append((list(rows), kept))

    def collect(self, batch: Batch, level: str, process_group: ProcessGroup) -> Captured:
        """Return the results of all micro-batches of all processes; every process has to call it."""
        names = dict.fromkeys(name for _, kept in self._parts for name in kept)
        shapes = {name: kept[name].shape[2:] for _, kept in self._parts for name in kept}
        for shared in process_group.gather([{name: tuple(shapes[name]) for name in names}], "names of results"):
            shapes |= {name: torch.Size(shape) for name, shape in shared.items()}
        size = (batch.num_rows, batch.mask.shape[1])
        computed = torch.zeros(batch.num_rows, dtype=torch.float64)
        tensors: dict[str, Tensor] = {}
        for name in sorted(shapes):
            lead: tuple[int, ...] = size
            if name == "values" and level != "token":
                lead = (batch.num_rows // batch.rows_per_unit,)
            tensors[name] = torch.zeros((*lead, *shapes[name]), dtype=torch.float64)
        for rows, kept in self._parts:
            computed[rows] = 1.0
            for name, part in kept.items():
                self._fill(tensors[name], rows, part, batch.rows_per_unit)
        process_group.add([computed, *tensors.values()], "results of rows")
        slopes = {name.removeprefix("d_"): x for name, x in tensors.items() if name.startswith("d_")}
        outputs = {name: x for name, x in tensors.items() if name in WATCHED}
        return Captured(tensors["values"], outputs, slopes, computed > 0)

    def _fill(self, whole: Tensor, rows: Sequence[int], part: Tensor, each: int) -> None:
        """Put the results of some rows, or of their units, to where they belong."""
        part = with_float64(part).to("cpu", torch.float64)
        if whole.ndim == 1:
            whole[[row // each for row in rows[::each]]] = part
            return
        whole[list(rows), : part.shape[1]] = part


class _NoCapture(Capture):
    """Keeps nothing."""

    def watch(self, outputs: Outputs) -> None:
        """Ask for nothing."""

    def add(self, rows: Sequence[int], outputs: Outputs, values: Tensor) -> None:
        """Keep nothing."""


NO_CAPTURE = _NoCapture()


def kept_values(result: Loss, part: Batch, level: str) -> Tensor:
    """Return the values of trained tokens, with the mismatch correction where there is one; of units as they are."""
    if level != "token":
        return result.values
    values = torch.where(part.mask, result.values, torch.zeros_like(result.values))
    if "correction" in part.fields:
        values = values * part.fields["correction"].to(values.dtype)
    return values
