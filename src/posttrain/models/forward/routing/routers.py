"""Mixture-of-experts routers: recorded choices, auxiliary load-balancing loss.

``L_aux = E Σ_e f_e P_e`` (Fedus et al. 2022, "Switch Transformers", eq. 4 to 6), where f_e counts how often expert e
is chosen per token (top k), P_e is its probability; both are means over positions and layers. f is not
differentiated. Being a product of means, this does not split into micro-batch sums: f is computed over the whole
optimizer batch before any gradient.
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
    """Sums over positions and layers: expert choice counts and probabilities, ``[E]`` each.

    Probabilities are differentiable. ``num_tokens`` counts positions times layers.
    """

    counts: Tensor
    probabilities: Tensor
    num_tokens: Tensor

    def added(self, other: RouterSums) -> RouterSums:
        """Add both sums, detached."""
        return RouterSums(
            self.counts + other.counts,
            self.probabilities.detach() + other.probabilities.detach(),
            self.num_tokens + other.num_tokens,
        )

    def auxiliary_loss(self, whole: RouterSums) -> Tensor:
        """Compute these rows' contribution to the ``whole`` batch loss: ``E Σ_e (F_e / N) (S_e / N)``.

        F and N come from the whole batch, S from these rows; contributions sum to ``L_aux``.
        """
        num_experts = len(self.counts)
        shares = whole.counts / whole.num_tokens
        return num_experts * (shares * self.probabilities / whole.num_tokens).sum()


@dataclass(frozen=True, slots=True)
class Routers:
    """Model routers, one per expert layer; ``index``: position of logits in router outputs.

    top_k: experts chosen per token.
    """

    modules: Sequence[Module]
    index: int
    top_k: int

    @contextmanager
    def reading(self, logits: list[Tensor]) -> Iterator[None]:
        """Append router logits ``[N, E]`` to ``logits``, layer by layer, in this block."""

        def keep(_module: Module, _inputs: Any, output: Any) -> None:
            logits.append(output[self.index].flatten(0, -2))

        hooks = [module.register_forward_hook(keep) for module in self.modules]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def sums(self, logits: Sequence[Tensor], weights: Tensor, replayed: Sequence[Tensor] | None = None) -> RouterSums:
        """Sum over layers and positions; ``weights`` ``[N]``: rows represented by each position.

        ``replayed``: experts ``int64 [N, k]`` used in each layer, if not the likeliest ones.
        """
        dtype = torch.promote_types(logits[0].dtype, torch.float32)
        weights = weights.to(dtype)
        num_experts = logits[0].shape[-1]
        counts = torch.zeros(num_experts, dtype=dtype, device=weights.device)
        probabilities = torch.zeros_like(counts)
        for layer, of_layer in enumerate(logits):
            likely = of_layer.to(dtype).softmax(dim=-1)
            if replayed is None:
                chosen = likely.detach().topk(self.top_k, dim=-1).indices
            else:
                chosen = replayed[layer]
            counts.index_add_(0, chosen.flatten(), weights.repeat_interleave(self.top_k))
            probabilities = probabilities + (likely * weights[:, None]).sum(dim=0)
        return RouterSums(counts, probabilities, len(logits) * weights.sum())


def find_routers(base: Model) -> Routers | None:
    """Find routers in causal LMs for which transformers defines an auxiliary loss; None otherwise."""
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
    """Look up the configured auxiliary loss coefficient; 0 without ``output_router_logits``."""
    settings = base.config.get_text_config()
    if not getattr(settings, "output_router_logits", False):
        return 0.0
    return float(getattr(settings, "router_aux_loss_coef", 0.0))


def rows_of_tokens(packing: Packing) -> Tensor:
    """Count rows per stream position, ``int64 [N]``: several for shared prompts, 0 for filler."""
    sharing = Counter(run.prefix_start for run in packing.runs if run.prefix_length)
    counts = torch.zeros(len(packing.tokens), dtype=torch.long)
    for run in packing.runs:
        shared = 1
        if not run.prefix_length:
            shared = sharing.get(run.start, 1)
        counts[run.start : run.start + run.length] = shared
    return counts.to(packing.tokens.device)
