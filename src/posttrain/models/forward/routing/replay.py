"""Router replay: a trainer uses the experts that the sampler chose (R3, Ma et al. 2025, arXiv:2510.11370).

At each router and position of prompt and answer, expert ids come from the sampler. Gate weights are the trainer's own:
its softmax (or sigmoid) over all experts, gathered at these ids and renormalized if the model does. They are computed
from logits, so gradients reach the router. Probabilities after top-k would be 0 for ids outside the trainer's choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from posttrain.errors import RecipeError
from posttrain.types import Model

Gate = Callable[[Any, Tensor, Tensor], Tensor]  # router, logits [N, E], ids [N, k] -> weights [N, k]
KEY = "rollout.router_replay"
PROBED_POSITIONS = 16


def softmax_gate(router: Any, logits: Tensor, ids: Tensor) -> Tensor:
    """Softmax over all experts, gathered; renormalized unless ``norm_topk_prob`` is False."""
    weights = logits.softmax(dim=-1, dtype=torch.float32).gather(-1, ids)
    if getattr(router, "norm_topk_prob", True):
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights


def chosen_softmax_gate(router: Any, logits: Tensor, ids: Tensor) -> Tensor:
    """Softmax over the chosen experts' logits."""
    return logits.gather(-1, ids).softmax(dim=-1)


def sigmoid_gate(router: Any, logits: Tensor, ids: Tensor) -> Tensor:
    """Sigmoid of each logit, gathered, renormalized if ``norm_topk_prob``, and scaled."""
    weights = logits.sigmoid().gather(-1, ids)
    if router.norm_topk_prob:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * router.routed_scaling_factor


# Router classes in transformers whose forward pass returns (logits, weights, ids).
GATES: dict[str, Gate] = {
    "MixtralTopKRouter": softmax_gate,
    "OlmoeTopKRouter": softmax_gate,
    "Qwen2MoeTopKRouter": softmax_gate,
    "Qwen3MoeTopKRouter": softmax_gate,
    "GptOssTopKRouter": chosen_softmax_gate,
    "GraniteMoeTopKRouter": chosen_softmax_gate,
    "DeepseekV3TopkRouter": sigmoid_gate,
    "Glm4MoeTopkRouter": sigmoid_gate,
}
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # in configurations


@dataclass(slots=True)
class ReplayedPass:
    """Choices in one forward pass, per router: experts used ``int64 [N, k]``, and where the model's own choice
    differs ``bool [N]``.
    """

    chosen: list[Tensor] = field(default_factory=list)
    differs: list[Tensor] = field(default_factory=list)

    def rerouted(self) -> Tensor:
        """Compute the fraction of routers whose own choice differs, ``float32 [N]``."""
        return torch.stack(self.differs).float().mean(dim=0)


@dataclass(frozen=True, slots=True)
class RouterReplay:
    """A model's routers, in layer order, each with its gate."""

    routers: Sequence[Module]
    gates: Sequence[Gate]
    num_experts: int
    top_k: int

    @contextmanager
    def replaying(self, ids: Tensor) -> Iterator[ReplayedPass]:
        """Route each position to experts ``ids`` (``int16 [N, routers, k]``) in forward passes inside the block.

        Positions with -1 keep the model's choice. Backward passes that recompute layers also need this.
        """
        used = ReplayedPass()
        hooks = []
        for place, (router, gate) in enumerate(zip(self.routers, self.gates, strict=True)):
            hook = _ReplayHook(gate, ids[:, place].long(), used)
            hooks.append(router.register_forward_hook(hook))
        try:
            yield used
        finally:
            for one in hooks:
                one.remove()

    def check(self, experts: Tensor) -> None:
        """Check choices from a checkpoint, which may be untrusted: ``int16 [..., routers, k]``.

        Raises:
            ValueError: other dtype, sizes, or ids out of range.
        """
        if experts.dtype != torch.int16 or experts.shape[-2:] != (len(self.routers), self.top_k):
            raise ValueError("other experts")
        if experts.numel() and not (int(experts.min()) >= -1 and int(experts.max()) < self.num_experts):
            raise ValueError("other experts")


@dataclass(frozen=True, slots=True)
class _ReplayHook:
    """Forward hook for a router, given its ids ``int64 [N, k]``."""

    gate: Gate
    ids: Tensor
    used: ReplayedPass

    def __call__(self, router: Module, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        logits, weights, own = output
        is_known = self.ids[:, :1] >= 0
        chosen = torch.where(is_known, self.ids, own)
        with torch.no_grad():
            differs = (chosen.sort(dim=-1).values != own.sort(dim=-1).values).any(dim=-1)
        self.used.chosen.append(chosen)
        self.used.differs.append(differs)
        return logits, self.gate(router, logits, chosen).to(weights.dtype), chosen


class ExpertRecorder:
    """Records experts chosen in the latest forward pass inside ``recording``."""

    def __init__(self, routers: Sequence[Module]) -> None:
        self.routers = routers
        self._latest: list[Tensor] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Observe all forward passes inside the block."""

        def keep(_module: Module, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
            self._latest.append(output[2])

        hooks = [router.register_forward_hook(keep) for router in self.routers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def take(self) -> Tensor:
        """Return ids ``int16 [N, routers, k]`` for N positions in the pass since the last call."""
        assert len(self._latest) == len(self.routers), "each router runs once per pass"
        ids = torch.stack(self._latest, dim=1).to(torch.int16)
        self._latest.clear()
        return ids


def refuse_without_experts(config: Any) -> None:
    """Refuse router replay for configurations without experts, before loading the model.

    Raises:
        RecipeError: names the architecture.
    """
    settings = config.get_text_config()
    if not any(getattr(settings, name, None) for name in EXPERT_COUNTS):
        raise RecipeError(f"{KEY}: {config.model_type} models have no experts, so nothing is routed; remove it")


def find_replay(base: Model) -> RouterReplay:
    """Find a causal LM's routers, and check that their gate weights are reproduced to the bit.

    Raises:
        RecipeError: no supported routers; names their class.
    """
    routers = [module for module in base.modules() if type(module).__name__ in GATES]
    if not routers:
        unknown = sorted({type(m).__name__ for m in base.modules() if "router" in type(m).__name__.lower()})
        named = ", ".join(unknown) or type(base).__name__
        raise RecipeError(f"{KEY}: not supported for {named}. Supported: {', '.join(GATES)}; remove it")
    gates = [GATES[type(router).__name__] for router in routers]
    first: Any = routers[0]
    replay = RouterReplay(routers, gates, int(first.num_experts), int(first.top_k))
    for router, gate in zip(routers, gates, strict=True):
        if not _is_reproduced(router, gate):
            raise RecipeError(
                f"{KEY}: {type(router).__name__} computes gate weights differently in this version of transformers; "
                "remove it, or install a tested version"
            )
    return replay


@torch.no_grad()
def _is_reproduced(router: Any, gate: Gate) -> bool:
    """Check if ``gate`` gives a router's own weights for its own choice, on random states."""
    numbers = torch.Generator().manual_seed(0)
    width = router.weight.shape[-1]
    states = torch.randn((PROBED_POSITIONS, width), generator=numbers).to(router.weight)
    output = router(states)
    if not isinstance(output, tuple) or len(output) != 3:
        return False
    logits, weights, ids = output
    if ids.dtype != torch.long or ids.shape != (PROBED_POSITIONS, router.top_k):
        return False
    return torch.equal(gate(router, logits, ids).to(weights.dtype), weights)
