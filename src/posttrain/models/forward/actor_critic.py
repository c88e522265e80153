"""A policy and a separate critic as one forward pass, and the values of the states that a head reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from posttrain.models.forward.forward import Forward
from posttrain.models.forward.predictions import Entropy
from posttrain.types import Batch, Outputs


class ActorCritic:
    """A policy and a separate critic as one forward pass: the policy's outputs with the critic's scores.

    Both read the same batch under one plan; where either cannot pack it, both take the padded path.
    """

    def __init__(self, policy: Forward, critic: Forward) -> None:
        assert critic.scores_only, "a critic gives values, not log-probabilities"
        assert critic.reads == "before", "a critic values the state before a token"
        assert policy.head is None, "a policy with a critic has no scores of its own"
        self.policy, self.critic = policy, critic
        self.model, self.temperature = policy.model, policy.temperature

    @property
    def path(self) -> Literal["packed", "padded"]:
        """``packed`` where both models are."""
        return "packed" if self.policy.path == self.critic.path == "packed" else "padded"

    @property
    def is_sharded(self) -> bool:
        """Return whether both are; it is both or neither."""
        return self.policy.is_sharded

    @property
    def last_slots(self) -> int:
        """Positions that the last pass computed over, in both models."""
        return self.policy.last_slots + self.critic.last_slots

    @property
    def last_tokens(self) -> int:
        """Those of ``last_slots`` that hold a token."""
        return self.policy.last_tokens + self.critic.last_tokens

    def __call__(self, batch: Batch, entropy: Entropy = "detached", with_candidates: bool = False) -> Outputs:
        """See ``Forward.__call__``."""
        packing = self.policy.plan(batch) if self.critic.packs(batch) else None
        outputs = self.policy.run(batch, packing, entropy, with_candidates)
        return replace(outputs, scores=self.critic.run(batch, packing, "none").scores)

    @contextmanager
    def backward_context(self) -> Iterator[None]:
        """See ``Forward.backward_context``; the plan is the same for both models."""
        with self.policy.backward_context(), nullcontext() if self.policy.last_packing is None else self.critic.layers:
            yield


@torch.no_grad()
def state_values(forward: Forward | ActorCritic, batch: Batch) -> tuple[Tensor, Tensor]:
    """Values of states without gradient: ``[B, T]`` before each trained token, ``[B]`` after the last one of each row.

    For a head with one output that reads ``before``. Each row gets one more token, to which nothing attends; the state
    before it is that after the row's last one.
    """
    reader = forward.critic if isinstance(forward, ActorCritic) else forward
    assert reader.reads == "before", "a head that reads at a token gives no value of the state before it"
    columns = torch.arange(batch.tokens.shape[1] + 1, device=batch.lengths.device)
    added = columns[None, :] == batch.lengths[:, None]
    longer = replace(
        batch,
        tokens=F.pad(batch.tokens, (0, 1)),
        mask=F.pad(batch.mask, (0, 1)) | added,
        lengths=batch.lengths + 1,
        fields={},
        weights=None,
    )
    scores = reader.read_scores(longer)
    assert scores.ndim == 2, "a value is one number per token"
    final = scores.gather(1, batch.lengths.to(scores.device)[:, None])[:, 0]
    return scores[:, :-1].masked_fill(~batch.mask.to(scores.device), 0.0), final
