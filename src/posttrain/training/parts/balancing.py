"""The routers' auxiliary loss in an update: over all tokens of the optimizer batch, however it is divided."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.errors import RecipeError
from posttrain.models.forward.actor_critic import ActorCritic
from posttrain.models.forward.forward import Forward, causal_lm
from posttrain.models.forward.micro import MicroBatching, split_rows
from posttrain.models.forward.routers import Routers, RouterSums, configured_coefficient, find_routers
from posttrain.types import Batch

AUXILIARY_LOSS = "router_aux_loss"


@dataclass(frozen=True, slots=True)
class RouterBalancing:
    """The routers of the policy's model, and the weight of their auxiliary loss."""

    policy: Forward
    routers: Routers
    coefficient: float

    @contextmanager
    def over(self, batch: Batch, micro_batches: MicroBatching) -> Iterator[BalancedBatch]:
        """Read the routers in every pass inside the block; f is taken over the whole batch first.

        That is a pass of its own, without gradients and without an adapter's dropout, unless the batch is one
        micro-batch of one process.
        """
        balanced = BalancedBatch(self)
        self.policy.routers = self.routers
        try:
            options = (micro_batches.max_tokens, micro_batches.max_rows)
            if micro_batches.process_group.size > 1 or len(split_rows(batch, *options)) > 1:
                balanced.whole = self._measure(batch, micro_batches)
            yield balanced
        finally:
            self.policy.routers = None
            self.policy.routed = None

    @torch.no_grad()
    def _measure(self, batch: Batch, micro_batches: MicroBatching) -> RouterSums:
        whole: RouterSums | None = None
        for micro in micro_batches.over(batch, self.policy):
            self.policy(micro.part, "none")
            routed = self.policy.routed
            assert routed is not None, "routers are read"
            if not micro.counts:
                continue
            whole = routed if whole is None else whole.added(routed)
        if whole is None:  # of another process are all rows
            assert routed is not None, "a process without rows passes one that does not count"
            whole = RouterSums(*(torch.zeros_like(x) for x in (routed.counts, routed.probabilities, routed.num_tokens)))
        tensors = [whole.counts.cpu(), whole.probabilities.cpu(), whole.num_tokens.cpu()]
        micro_batches.process_group.add(tensors, "routers' choices")
        return RouterSums(*(x.to(whole.counts.device) for x in tensors))


@dataclass(slots=True)
class BalancedBatch:
    """The auxiliary loss of one optimizer batch; ``whole``: its sums."""

    balancing: RouterBalancing
    whole: RouterSums | None = None

    def add_to(self, loss: Tensor, *, counts: bool) -> Tensor:
        """Return the loss of a micro-batch that was just passed, with its part of the auxiliary loss."""
        routed = self.balancing.policy.routed
        assert routed is not None, "routers are read"
        if self.whole is None:
            self.whole = RouterSums(routed.counts, routed.probabilities.detach(), routed.num_tokens)
        own = routed.auxiliary_loss(self.whole)
        if not counts:
            own = 0.0 * own
        return loss + self.balancing.coefficient * own.to(loss.dtype)

    def metrics(self) -> dict[str, float]:
        """Return the auxiliary loss of the whole batch, and the load of the busiest expert over the mean load."""
        whole = self.whole
        if whole is None:
            return {}
        load = whole.counts / whole.counts.mean()
        return {AUXILIARY_LOSS: float(whole.auxiliary_loss(whole)), "router_max_load": float(load.amax())}


def build_balancing(
    coefficient: float | None, forward: Forward | ActorCritic, *, sharding: str = "none"
) -> RouterBalancing | None:
    """Return the balancing of a run; ``coefficient``: of the recipe, None for the model's own.

    Raises:
        RecipeError: the recipe asks for it, and the model has no routers whose auxiliary loss is known; or weights are
            sharded.
    """
    policy = forward
    if isinstance(policy, ActorCritic):
        policy = policy.policy
    base = causal_lm(policy.model)
    wanted = coefficient
    if wanted is None:
        wanted = configured_coefficient(base)
    if not wanted:
        return None
    routers = find_routers(base)
    if routers is not None and sharding != "none":
        raise RecipeError(
            f"scale.sharding: the routers of {type(base).__name__} are not balanced where weights are sharded; use "
            "none, or set train.router_aux_loss_coef: 0"
        )
    if routers is not None:
        return RouterBalancing(policy, routers, wanted)
    if coefficient is None:
        return None
    raise RecipeError(
        f"train.router_aux_loss_coef: {type(base).__name__} has no routers with an auxiliary loss that is known; leave "
        "it out"
    )
