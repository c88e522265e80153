"""The native engine over a copy of the trained model (for weights that go on changing, or lie in pieces, elsewhere), or
of the matrices in its blocks alone (so that an adapter costs nothing, and a step takes fewer products).

A copy can be stale, in part or whole, and nothing in it would say so. So every ``sync`` ends with a comparison: both
sides score a fixed batch, and a difference ends the work before the next update.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from posttrain.engines.native.engine import NativeEngine, sampling_mode
from posttrain.engines.native.lean import LeanDecoder
from posttrain.engines.native.probe import probe
from posttrain.engines.native.projection import Projection
from posttrain.errors import EngineMismatch
from posttrain.models.stated_sizes import context_length
from posttrain.world import whole

# Nats, of the full distribution. In fp32 the same weights differ by some 3e-5 in two ways to compute, a layer of the
# embedded model that missed one update of AdamW at a rate of 1e-5 by 0.1, and its last norm by 0.002. In half precision
# other weights are told apart, but not one update from none.
TOLERANCE, HALF_TOLERANCE = 5e-4, 0.2


class CopiedEngine(NativeEngine):
    """See ``native``. ``source`` is the model that is trained; ``model`` the copy that samples.

    ``options`` are those of ``NativeEngine``.
    """

    def __init__(self, source: Any, **options: Any) -> None:
        super().__init__(copy.deepcopy(source).requires_grad_(False), **options)
        self.source = source
        self.version = -1  # not compared with anything yet

    def sync(self, version: int) -> None:
        """See ``Engine.sync``."""
        if version == self.version:
            return
        self.score()  # what a cache kept of the weights before would show below
        self.fill()
        _check(self.score(), self.source, version)
        self.version = version

    @torch.no_grad()
    def fill(self) -> None:
        """Every parameter and buffer of the source into the copy."""
        for tensors in ("named_parameters", "named_buffers"):
            own = dict(getattr(self.model, tensors)())
            for name, tensor in getattr(self.source, tensors)():
                own[name].copy_(whole(tensor))

    def score(self) -> float:
        """By how much the copy's log-probabilities of a fixed batch differ from the source's own, in nats."""
        context = context_length(self.model.config)
        with sampling_mode(self.model), sampling_mode(self.source):
            return probe(self.source, self._bind(min(context, 64)), context)[0]


class MergedEngine(NativeEngine):
    """See ``native``: products with matrices of its own, of the lean path alone.

    They are filled again, in place, when what they are made of is elsewhere or was changed since (as torch counts it),
    and at every ``sync``, which compares as ``CopiedEngine``'s does.
    """

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        self.needs_lean = ("weights", "merged")
        self.version = -1
        self._merged: dict[tuple[int, str], tuple[object, Projection]] = {}

    def sync(self, version: int) -> None:
        """See ``Engine.sync``."""
        if version == self.version:
            return
        self.version = version
        context = context_length(self.model.config)
        with sampling_mode(self.model):
            difference = probe(self.model, self._bind(min(context, 64)), context)[0]
        _check(difference, self.model, version)

    def close(self) -> None:
        """See ``Engine.close``."""
        super().close()
        self._merged.clear()

    def _bind_lean(self, reach: int) -> LeanDecoder | None:
        decoder = super()._bind_lean(reach)
        for index, layer in enumerate([] if decoder is None else decoder.layers):
            layer.qkv = self._product(index, "qkv", layer.q, layer.k, layer.v)
            layer.gate_up = self._product(index, "gate_up", layer.gate, layer.up)
            layer.o = self._product(index, "o", layer.o) if layer.o.adapters else layer.o
            layer.down = self._product(index, "down", layer.down) if layer.down.adapters else layer.down
        return decoder

    def _product(self, index: int, name: str, *parts: Projection) -> Projection:
        made_of = (self.version, *(part.state() for part in parts))
        before, kept = self._merged.get((index, name), (None, None))
        if kept is not None and before == made_of:
            return kept
        own = parts[0].weight
        if kept is not None and (kept.weight.dtype, kept.weight.device) != (own.dtype, own.device):
            kept = None
        product = Projection.merged(parts, kept)
        self._merged[index, name] = made_of, product
        return product


def _check(difference: float, model: Any, version: int) -> None:
    """Refuse a copy whose log-probabilities differ by more than rounding does."""
    tolerance = HALF_TOLERANCE if next(model.parameters()).dtype == torch.bfloat16 else TOLERANCE
    if difference > tolerance:
        raise EngineMismatch(
            f"the engine's copy of the weights is not the trained model after {version} updates: log-probabilities "
            f"of a fixed batch differ by {difference:.2g} nats (at most {tolerance:g} is allowed)"
        )
