"""Annotation: fills exactly the streams that the objective needs, once per rollout batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from posttrain.errors import RecipeError
from posttrain.models.forward import Forward
from posttrain.models.lora import has_adapter, reference_mode
from posttrain.registry import Entry
from posttrain.train.micro import split_rows
from posttrain.types import Batch

KNOWN_STREAMS = ("advantages", "sampler_logprobs", "old_logprobs", "ref_logprobs")


def needed_streams(entry: Entry, options: dict[str, Any], has_rollouts: bool) -> frozenset[str]:
    """The streams that an objective reads, given its options.

    A function of a user's that was not registered states no needs; it gets what costs no extra
    forward pass.

    Raises:
        RecipeError: a supervised recipe with an objective that needs rollouts, or an unknown need.
    """
    default = ("advantages", "old_logprobs") if has_rollouts else ()
    needs = set(entry.traits.get("needs", default))
    needs |= {stream for option, stream in entry.traits.get("optional_needs", {}).items() if options.get(option)}
    unknown = needs - set(KNOWN_STREAMS)
    if unknown:
        raise RecipeError(
            f"objective {entry.name!r} needs {sorted(unknown)}, which nothing fills; known: {KNOWN_STREAMS}"
        )
    if needs and not has_rollouts:
        raise RecipeError(
            f"objective {entry.name!r} needs {sorted(needs)}, which come from rollouts; give 'rollout', not 'data'"
        )
    return frozenset(needs)


class Annotator:
    """Computes ``old_logprobs`` and ``ref_logprobs`` of a batch without gradients.

    The reference is the model as this object finds it, which is before training began also where a
    run is resumed (checkpoints are restored later). With a fresh adapter it is the base with the
    adapter off, with an adapter that was loaded a copy of the adapter alone; otherwise one frozen
    copy of the model in memory.
    """

    def __init__(
        self,
        forward: Forward,
        needs: frozenset[str],
        *,
        old_from: str,
        tokens_per_micro: int,
        rows_per_micro: int | None,
    ) -> None:
        self.forward, self.needs, self.old_from = forward, needs, old_from
        self.tokens_per_micro, self.rows_per_micro = tokens_per_micro, rows_per_micro
        self._reference: Callable[[], AbstractContextManager[Forward]] | None = None
        if "ref_logprobs" in needs:
            self._reference = self._reference_source()

    def _reference_source(self) -> Callable[[], AbstractContextManager[Forward]]:
        if has_adapter(self.forward.model):
            trained = [p for p in self.forward.model.parameters() if p.requires_grad]
            ups = [p for n, p in self.forward.model.named_parameters() if ".lora_B." in n]
            if ups and not any(bool(p.any()) for p in ups):  # B = 0: the adapter changes nothing yet
                return self._adapter_off
            initial = [p.detach().clone() for p in trained]
            return lambda: self._with_values(trained, initial)
        frozen = copy.deepcopy(self.forward.model).eval().requires_grad_(False)
        reference = Forward(frozen, self.forward.temperature)

        @contextmanager
        def provide() -> Iterator[Forward]:
            yield reference

        return provide

    @contextmanager
    def _adapter_off(self) -> Iterator[Forward]:
        with reference_mode(self.forward.model):
            yield self.forward

    @contextmanager
    def _with_values(self, parameters: list[Parameter], values: list[Tensor]) -> Iterator[Forward]:
        current = [p.data for p in parameters]
        try:
            for parameter, value in zip(parameters, values, strict=True):
                parameter.data = value
            yield self.forward
        finally:
            for parameter, value in zip(parameters, current, strict=True):
                parameter.data = value

    def __call__(self, batch: Batch) -> Batch:
        """``batch`` with its streams filled, in place."""
        if "old_logprobs" in self.needs:
            if self.old_from == "trainer":
                batch.streams["old_logprobs"] = self._score(self.forward, batch)
            else:
                batch.streams["old_logprobs"] = batch.stream("sampler_logprobs")
        if self._reference is not None:
            with self._reference() as reference:
                batch.streams["ref_logprobs"] = self._score(reference, batch)
        return batch

    @torch.no_grad()
    def _score(self, forward: Forward, batch: Batch) -> Tensor:
        scored = torch.zeros(batch.tokens.shape, dtype=torch.float32)
        for rows in split_rows(batch, self.tokens_per_micro, self.rows_per_micro):
            part = batch.select(rows)
            values = forward(part, "none").logprobs.cpu()
            scored[torch.as_tensor(list(rows)), : values.shape[1]] = values
        return scored
