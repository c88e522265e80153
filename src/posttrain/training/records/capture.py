"""Capture token-level results over an optimizer batch, across micro-batches and processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from posttrain.models.forward.routing.routers import RouterSums
from posttrain.process_group import ProcessGroup
from posttrain.types import Batch, Loss, Outputs, with_float64

WATCHED = ("logprobs", "entropy", "scores")


@dataclass(frozen=True, slots=True)
class Captured:
    """Captured results, float64 on CPU.

    ``values``: objective values ``[B, T]`` or ``[U]``, multiplied by the correction; ``outputs``: tensors by name
    ``[B, T]`` (``[B, T, C]`` for C-class scores); ``slopes``: loss derivatives for these; computed: ``bool [B]``,
    rows with a forward pass; routing: sums of routers under an auxiliary loss.
    """

    values: Tensor
    outputs: dict[str, Tensor]
    slopes: dict[str, Tensor]
    computed: Tensor
    routing: RouterSums | None = None


@dataclass(slots=True)
class Capture:
    """Stores micro-batch results on device until ``collect``."""

    _parts: list[tuple[list[int], dict[str, Tensor]]] = field(default_factory=list)
    routing: RouterSums | None = None

    def watch(self, outputs: Outputs) -> None:
        """Request loss derivatives for outputs. Call before ``backward``."""
        for name in WATCHED:
            tensor: Tensor | None = getattr(outputs, name)
            if tensor is not None and tensor.requires_grad and not tensor.is_leaf:
                tensor.retain_grad()

    def add(self, rows: Sequence[int], outputs: Outputs, values: Tensor) -> None:
        """Store results for the given optimizer batch rows. Call after ``backward``."""
        kept = {"values": values.detach()}
        for name in WATCHED:
            tensor: Tensor | None = getattr(outputs, name)
            if tensor is None:
                continue
            kept[name] = tensor.detach()
            if tensor.requires_grad and not tensor.is_leaf and tensor.grad is not None:
                kept[f"d_{name}"] = tensor.grad
        self._parts.append((list(rows), kept))

    def note_routing(self, whole: RouterSums | None) -> None:
        """Store sums over the whole batch for its routers."""
        self.routing = whole

    def collect(self, batch: Batch, level: str, process_group: ProcessGroup) -> Captured:
        """Gather results across micro-batches and processes. Must be called by every process."""
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
        return Captured(tensors["values"], outputs, slopes, computed > 0, self.routing)

    def _fill(self, whole: Tensor, rows: Sequence[int], part: Tensor, each: int) -> None:
        """Write row or unit results at their batch positions."""
        part = with_float64(part).to("cpu", torch.float64)
        if whole.ndim == 1:
            whole[[row // each for row in rows[::each]]] = part
            return
        whole[list(rows), : part.shape[1]] = part


class _NoCapture(Capture):
    """Captures nothing."""

    def watch(self, outputs: Outputs) -> None:
        """Does nothing."""

    def add(self, rows: Sequence[int], outputs: Outputs, values: Tensor) -> None:
        """Does nothing."""

    def note_routing(self, whole: RouterSums | None) -> None:
        """Does nothing."""


NO_CAPTURE = _NoCapture()


def kept_values(result: Loss, part: Batch, level: str) -> Tensor:
    """Mask token values and apply the mismatch correction, if any; unit values stay unchanged."""
    if level != "token":
        return result.values
    values = torch.where(part.mask, result.values, torch.zeros_like(result.values))
    if "correction" in part.fields:
        values = values * part.fields["correction"].to(values.dtype)
    return values
