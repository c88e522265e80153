"""Routers of mixture-of-experts models: what they choose in a pass, and the auxiliary loss that balances it.

``L_aux = E Σ_e f_e P_e`` (Fedus et al. 2022, "Switch Transformers", eq. 4 to 6), with f_e the number of times that
expert e is among the k chosen of a token, and P_e its probability, both means over tokens and layers. No gradient flows
through f. It is a product of two means, so it is no sum over micro-batches: f is taken over the whole optimizer batch
before the first gradient.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from posttrain.models.forward.packing import Packing
from posttrain.types import Model


@dataclass(slots=True)
class RouterSums:
    """Sums over the tokens of some rows and over layers: how often each expert was chosen, and its probabilities
    (``[E]`` each, the latter with gradients), and the number of tokens times layers."""

    counts: Tensor
    probabilities: Tensor
    num_tokens: Tensor

    def added(self, other: RouterSums) -> RouterSums:
        """Return the sums over both, without gradients."""
        return RouterSums(
            self.counts + other.counts,
            self.probabilities.detach() + other.probabilities.detach(),
            self.num_tokens + other.num_tokens,
        )

    def auxiliary_loss(self, whole: RouterSums) -> Tensor:
        """Return the part of these rows in the loss of the ``whole`` batch: ``E Σ_e (F_e / N) (S_e / N)``.

        F and N are of the whole batch, S are these probabilities; over all parts it adds up to ``L_aux``.
        """
        num_experts = len(self.counts)
        shares = whole.counts / whole.num_tokens
        return num_experts * (shares * self.probabilities / whole.num_tokens).sum()


@dataclass(frozen=True, slots=True)
class Routers:
    """The routers of a model, one for each layer of experts; ``index``: of the logits among what they return.

    top_k: experts that a token is sent to.
    """

    modules: Sequence[Module]
    index: int
    top_k: int

    @contextmanager
    def reading(self, logits: list[Tensor]) -> Iterator[None]:
        """Append the logits ``[N, E]`` of each layer to ``logits``, of what is computed inside the block."""

        def keep(_module: Module, _inputs: Any, output: Any) -> None:
            logits.append(output[self.index].flatten(0, -2))

        hooks = [module.register_forward_hook(keep) for module in self.modules]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def sums(self, logits: Sequence[Tensor], weights: Tensor) -> RouterSums:
        """Return the sums over layers and tokens; ``weights`` ``[N]``: the number of rows that a token stands for."""
        dtype = torch.promote_types(logits[0].dtype, torch.float32)
        weights = weights.to(dtype)
        num_experts = logits[0].shape[-1]
        counts = torch.zeros(num_experts, dtype=dtype, device=weights.device)
        probabilities = torch.zeros_like(counts)
        for of_layer in logits:
            likely = of_layer.to(dtype).softmax(dim=-1)
            chosen = likely.detach().topk(self.top_k, dim=-1).indices
            counts.index_add_(0, chosen.flatten(), weights.repeat_interleave(self.top_k))
            probabilities = probabilities + (likely * weights[:, None]).sum(dim=0)
        return RouterSums(counts, probabilities, len(logits) * weights.sum())


def find_routers(base: Model) -> Routers | None:
    """Return the routers of a causal LM whose own library has the auxiliary loss for them; None of any other."""
    if not hasattr(sys.modules[type(base).__module__], "load_balancing_loss_func"):
        return None
    recorder: Any = None
    for module in base.modules():
        recorded = getattr(type(module), "_can_record_outputs", None) or {}
        recorder = recorder or recorded.get("router_logits")
    kind = getattr(recorder, "target_class", None)
    if kind is None:
        return None
    within = recorder.layer_name or ""
    modules = [module for name, module in base.named_modules() if isinstance(module, kind) and within in name]
    top_k = getattr(base, "num_experts_per_tok", None) or getattr(base.config, "num_experts_per_tok", None)
    if not modules or not isinstance(top_k, int):
        return None
    return Routers(modules, recorder.index, top_k)


def configured_coefficient(base: Model) -> float:
    """Return the weight of the auxiliary loss that the model's configuration asks for: 0 without
    ``output_router_logits``."""
    settings = base.config.get_text_config()
    if not getattr(settings, "output_router_logits", False):
        return 0.0
    return float(getattr(settings, "router_aux_loss_coef", 0.0))


def rows_of_tokens(packing: Packing) -> Tensor:
    """``int64 [N]``: the number of rows that each token of a stream stands for: several of a shared prompt, 0 of what
    fills it up."""
    sharing = Counter(run.prefix_start for run in packing.runs if run.prefix_length)
    counts = torch.zeros(len(packing.tokens), dtype=torch.long)
    for run in packing.runs:
        shared = 1
        if not run.prefix_length:
            shared = sharing.get(run.start, 1)
        counts[run.start : run.start + run.length] = shared
    return counts.to(packing.tokens.device)
