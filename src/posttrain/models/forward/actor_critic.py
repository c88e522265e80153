"""Policy plus separate critic as a single forward pass, and critic values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from posttrain.models.forward.forward import Forward
from posttrain.models.forward.predictions import Entropy
from posttrain.types import Batch, Outputs


class ActorCritic:
    """A combined forward pass: policy outputs, critic scores.

    Both models read each batch under a shared plan; if either cannot pack it, both use the padded path.
    """

    def __init__(self, policy: Forward, critic: Forward) -> None:
        assert critic.scores_only, "a critic gives values, not log-probabilities"
        assert critic.reads == "before", "a critic values the state before a token"
        assert policy.head is None, "a policy with a critic has no scores of its own"
        self.policy, self.critic = policy, critic
        self.model, self.temperature = policy.model, policy.temperature

    @property
    def path(self) -> Literal["packed", "padded"]:
        """``packed`` only if policy and critic both pack."""
        if self.policy.path == "packed":
            return self.critic.path
        return "padded"

    @property
    def is_sharded(self) -> bool:
        """Check sharding; policy and critic always match."""
        return self.policy.is_sharded

    @property
    def last_slots(self) -> int:
        """Positions computed during the latest pass, summed over policy and critic."""
        return self.policy.last_slots + self.critic.last_slots

    @property
    def last_tokens(self) -> int:
        """Positions among ``last_slots`` holding a token."""
        return self.policy.last_tokens + self.critic.last_tokens

    def __call__(self, batch: Batch, entropy: Entropy = "detached", with_candidates: bool = False) -> Outputs:
        """See ``Forward.__call__``."""
        packing = None
        if self.critic.packs(batch):
            packing = self.policy.plan(batch)
        outputs = self.policy.run(batch, packing, entropy, with_candidates)
        return replace(outputs, scores=self.critic.run(batch, packing, "none").scores)

    @contextmanager
    def backward_context(self) -> Iterator[None]:
        """See ``Forward.backward_context``; policy and critic share a plan."""
        with ExitStack() as around:
            around.enter_context(self.policy.backward_context())
            if self.policy.last_packing is not None:
                around.enter_context(self.critic.layers)
            yield


@torch.no_grad()
def state_values(forward: Forward | ActorCritic, batch: Batch) -> tuple[Tensor, Tensor]:
    """Compute detached state values: ``[B, T]`` before each trained token, ``[B]`` after every row's final token.

    Requires a single-output head reading ``before``. Rows are extended by a dummy token, invisible to attention, whose
    preceding state is the row's final state.
    """
    reader = forward
    if isinstance(reader, ActorCritic):
        reader = reader.critic
    assert reader.reads == "before", "a head that reads at a token gives no value of the state before it"
    columns = torch.arange(batch.tokens.shape[1] + 1, device=batch.lengths.device)
    added = columns[None, :] == batch.lengths[:, None]
    experts = batch.experts
    if experts is not None:
        experts = F.pad(experts, (0, 0, 0, 0, 0, 1), value=-1)
    longer = replace(
        batch,
        tokens=F.pad(batch.tokens, (0, 1)),
        mask=F.pad(batch.mask, (0, 1)) | added,
        lengths=batch.lengths + 1,
        fields={},
        weights=None,
        experts=experts,
    )
    scores = reader.read_scores(longer)
    assert scores.ndim == 2, "a value is one number per token"
    final = scores.gather(1, batch.lengths.to(scores.device)[:, None])[:, 0]
    return scores[:, :-1].masked_fill(~batch.mask.to(scores.device), 0.0), final
