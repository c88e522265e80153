"""Reference models: the initial policy, sharing weights where possible, or a moving average."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

from posttrain.models.forward.forward import Forward
from posttrain.models.lora import has_adapter
from posttrain.models.trained_heads import copy_tensors
from posttrain.process_group import own_part, whole
from posttrain.types import with_float64


class Reference:
    """The model when this object is made, which is before training (and before a checkpoint is restored).

    With a new adapter it is the base with the adapter off, with a loaded adapter a copy of the adapter alone;
    otherwise one frozen copy of the model in memory.
    """

    def __init__(self, forward: Forward) -> None:
        self._live = forward
        self._frozen: Forward | None = None
        self._initial: list[tuple[Parameter, Tensor]] = []
        if not has_adapter(forward.model):
            self._frozen = forward.alike(copy.deepcopy(forward.model).eval().requires_grad_(False))
            return
        ups = [p for n, p in forward.model.named_parameters() if ".lora_B." in n]
        if not ups or any(bool(p.any()) for p in ups):  # B = 0: the adapter changes nothing yet
            self._keep()

    def _keep(self) -> None:
        trained = [p for p in self._live.model.parameters() if p.requires_grad]
        self._initial = [(p, own_part(p.detach()).clone()) for p in trained]

    def shard(self, part: Callable[[Forward], object]) -> None:
        """Shard a copy of the model by ``part``, as the live one was."""
        if self._frozen is not None:
            part(self._frozen)
        elif self._initial:
            self._keep()

    @torch.no_grad()
    def move(self, mixing: float) -> None:
        """``ref ← α π + (1 − α) ref`` for every weight, with α = ``mixing``."""
        live = dict(self._live.model.named_parameters())
        for name, own in self.tensors().items():
            own.mul_(1.0 - mixing).add_(live[name], alpha=mixing)

    def tensors(self) -> dict[str, Tensor]:
        """Collect a moving reference's weights by parameter name."""
        assert self._frozen is not None, "a reference that moves has weights of its own"
        return {name: own.detach() for name, own in self._frozen.model.named_parameters()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore tensors saved by ``tensors``.

        Raises:
            CheckpointError: saved from another model.
        """
        copy_tensors(tensors, self.tensors(), Path("reference.safetensors"))

    @torch.no_grad()
    def fingerprint(self) -> str:
        """Hash weight sums, including adapters."""
        with self.open() as reference:
            sums = [float(with_float64(whole(p)).sum(dtype=torch.float64)) for p in reference.model.parameters()]
        return hashlib.sha256(repr(sums).encode()).hexdigest()

    @contextmanager
    def open(self) -> Iterator[Forward]:
        """The reference's forward pass, inside the block."""
        if self._frozen is not None:
            yield self._frozen
        elif self._initial:
            current = [(p, own_part(p.detach()).clone()) for p, _ in self._initial]
            try:
                _fill(self._initial)
                yield self._live
            finally:
                _fill(current)
        else:
            with self._live.model.disable_adapter():
                yield self._live


@torch.no_grad()
def _fill(values: list[tuple[Parameter, Tensor]]) -> None:
    for parameter, value in values:
        own_part(parameter.detach()).copy_(value)
