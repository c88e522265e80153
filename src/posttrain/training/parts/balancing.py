"""Router load balancing over all tokens in the optimizer batch, independent of micro-batches."""

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
from posttrain.models.forward.routing.routers import Routers, RouterSums, configured_coefficient, find_routers
from posttrain.types import LEFT_OUT, Batch

AUXILIARY_LOSS = "router_aux_loss"


@dataclass(frozen=True, slots=True)
class RouterBalancing:
    """Policy routers with an auxiliary loss coefficient."""

    policy: Forward
    routers: Routers
    coefficient: float

    @contextmanager
    def over(self, batch: Batch, micro_batches: MicroBatching) -> Iterator[BalancedBatch]:
        """Track routers in every forward pass inside the block, after computing f over the whole batch.

        This requires a separate forward pass (no gradients, no adapter dropout), unless a single process handles the
        batch in one micro-batch. Rows that count only in denominators take no part.
        """
        if LEFT_OUT in batch.fields:
            batch = batch.select(torch.where(batch.fields[LEFT_OUT] == 0)[0].tolist())
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
        if whole is None:  # all rows belong to other processes
            assert routed is not None, "a process without rows passes one that does not count"
            whole = RouterSums(*(torch.zeros_like(x) for x in (routed.counts, routed.probabilities, routed.num_tokens)))
        tensors = [whole.counts.cpu(), whole.probabilities.cpu(), whole.num_tokens.cpu()]
        micro_batches.process_group.add(tensors, "routers' choices")
        return RouterSums(*(x.to(whole.counts.device) for x in tensors))


@dataclass(slots=True)
class BalancedBatch:
    """Auxiliary loss for one optimizer batch; ``whole``: sums over the batch."""

    balancing: RouterBalancing
    whole: RouterSums | None = None

    def add_to(self, loss: Tensor, *, counts: bool) -> Tensor:
        """Add the auxiliary loss for the latest micro-batch."""
        routed = self.balancing.policy.routed
        assert routed is not None, "routers are read"
        if self.whole is None:
            self.whole = RouterSums(routed.counts, routed.probabilities.detach(), routed.num_tokens)
        own = routed.auxiliary_loss(self.whole)
        if not counts:
            own = 0.0 * own
        return loss + self.balancing.coefficient * own.to(loss.dtype)

    def metrics(self) -> dict[str, float]:
        """Compute the auxiliary loss over the whole batch, and maximum expert load relative to the mean."""
        whole = self.whole
        if whole is None:
            return {}
        load = whole.counts / whole.counts.mean()
        return {AUXILIARY_LOSS: float(whole.auxiliary_loss(whole)), "router_max_load": float(load.amax())}


def build_balancing(
    coefficient: float | None, forward: Forward | ActorCritic, *, sharding: str = "none"
) -> RouterBalancing | None:
    """Build router balancing; ``coefficient`` comes from the recipe, or None for the model default.

    Raises:
        RecipeError: balancing requested without supported routers, or with sharded weights.
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
            f"scale.sharding: the routers of {type(base).__name__} cannot be balanced with sharded weights; use "
            "none, or set train.router_aux_loss_coef: 0"
        )
    if routers is not None:
        return RouterBalancing(policy, routers, wanted)
    if coefficient is None:
        return None
    raise RecipeError(f"train.router_aux_loss_coef: {type(base).__name__} has no supported routers; remove the key")
