"""Advantages per token from the rewards of completions and their KL penalty."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posttrain import registry
from posttrain.algorithms.objectives.primitives import KL_ESTIMATORS, log_ratio
from posttrain.errors import RunFailure, UsageError
from posttrain.recipes.reference_sections import KLInRewardSection
from posttrain.types import Batch, Rollout

if TYPE_CHECKING:
    from posttrain.training.checks import Components


def build_advantage_estimator(components: Components) -> AdvantageEstimator:
    """Return the estimator of the recipe's ``advantage``; without one it estimates nothing."""
    recipe = components.recipe
    if recipe.advantage is None or components.advantage is None:
        return AdvantageEstimator(None, keeps_unscored=False)
    options = recipe.advantage.options
    return AdvantageEstimator(
        components.advantage.bind(options, "advantage"),
        per_token=components.per_token,
        per_turn=components.per_turn,
        of_parts=components.of_parts,
        keeps_unscored=components.keeps_unscored,
        bootstrap=bool(options.get("bootstrap", False)),
        kl=recipe.kl_in_reward,
        drops_rounding=recipe.train.skip_zero_rows,
    )


def call_advantage(advantage: Callable[..., Any], expected: tuple[int, ...], num_results: int, *inputs: Tensor) -> Any:
    """Call an advantage and check its result: one tensor of the expected shape, or a tuple of ``num_results``.

    Raises:
        RunFailure: the function raised.
        UsageError: it returned something else.
    """
    returned = registry.call("advantage", advantage, *inputs)
    is_tuple = isinstance(returned, tuple)
    results = returned if is_tuple else (returned,)
    shapes = [registry.describe_result(x) for x in results]
    wants_tuple = num_results > 1
    if is_tuple != wants_tuple or shapes != [f"shape {expected}"] * num_results:
        wanted = "one number per completion"
        if wants_tuple:
            wanted = f"advantages and returns, both of shape {expected}"
        raise UsageError(
            f"advantage: the function returned {', '.join(shapes) or 'nothing'} for rewards of shape {expected}; "
            f"it must give {wanted}"
        )
    return returned


@dataclass(slots=True)
class AdvantageEstimator:
    """Computes advantages from rewards.

    advantage: the function, or None where the objective reads no advantages. per_token: it takes rewards and values per
    token; per_turn: rewards per turn; of_parts: each reward of a completion. bootstrap: an answer that was cut off has
    the value of its last state in place of its score (it keeps the rewards of its turns); both would count the future
    twice. kl: the penalty in the reward; ``kl_weight`` is its current weight, which adapts where there is a target.
    keeps_unscored: see ``Components.keeps_unscored``. drops_rounding: in a group of equal rewards, an advantage that is
    rounding of their mean becomes 0.
    """

    advantage: Callable[..., Any] | None
    per_token: bool = False
    per_turn: bool = False
    of_parts: bool = False
    keeps_unscored: bool = True
    bootstrap: bool = False
    kl: KLInRewardSection | None = None
    kl_weight: float = 0.0
    drops_rounding: bool = False

    def __post_init__(self) -> None:
        self.kl_weight = 0.0
        if self.kl is not None:
            self.kl_weight = self.kl.weight

    @property
    def needs_batch(self) -> bool:
        """True if advantages need a batch with its fields, not the rewards alone."""
        return self.per_token or self.per_turn or self.kl is not None

    def from_groups(self, groups: Sequence[Tensor]) -> list[Tensor] | None:
        """Return the ``[G]`` advantages of the ``float64 [G]`` rewards of each group.

        Groups of one size are computed together: all at once where none has lost a completion. A reward that is NaN
        (no reward function scored the answer) is not compared with the others, and its advantage is 0; so are those of
        a group in which fewer than two of several are scored.
        """
        if self.advantage is None:
            return None
        advantages = [torch.zeros_like(group) for group in groups]
        compared = [group[~group.isnan()] for group in groups]
        for places in same_sizes(compared):
            places = [n for n in places if len(compared[n]) >= min(2, len(groups[n]))]
            if not places or not len(compared[places[0]]):
                continue
            rewards = torch.stack([compared[n] for n in places])
            rows = call_advantage(self.advantage, tuple(rewards.shape), 1, rewards)
            if self.drops_rounding:
                rows = without_rounding(rows, rewards)
            for n, row in zip(places, rows, strict=True):
                advantages[n] = advantages[n].to(row.dtype).masked_scatter(~groups[n].isnan(), row)
        return advantages

    def from_parts(
        self, groups: Sequence[Sequence[Rollout]], rewards: Sequence[tuple[str, float]]
    ) -> list[Tensor] | None:
        """Return the ``[G]`` advantages of each group, from the rewards by name with their weights.

        With ``of_parts`` the function reads each reward by itself; otherwise their sum.
        """
        if not self.of_parts:
            return self.from_groups([rewards_of(group) for group in groups])
        assert self.advantage is not None
        parts = torch.tensor(
            [[value_of_part(r, name) for name, _ in rewards] for group in groups for r in group], dtype=torch.float64
        )
        sizes = [len(group) for group in groups]
        if not sizes:
            return []
        weights = torch.tensor([weight for _, weight in rewards], dtype=torch.float64)
        numbers = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        rows = call_advantage(self.advantage, (len(parts),), 1, parts, weights, numbers)
        return list(rows.split(sizes))

    def from_batch(
        self,
        batch: Batch,
        groups: Sequence[Tensor],
        truncated: Tensor,
        needs: Collection[str],
        of_turns: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """Return per-token advantages ``float64 [B, T]`` of all rows, and metrics.

        groups: the rewards of each, ``float64 [G]``, in the order of the rows; truncated ``bool [B]``. of_turns: the
        part of these rewards that is of turns, ``float64 [B, T]``, at their last tokens. Reads the fields
        ``old_values`` with ``final_values``, and ``ref_logprobs``, where there are any; sets ``advantages``, and
        ``returns`` where that is in ``needs``.
        """
        assert self.advantage is not None
        penalty, metrics = self._penalty(batch)
        rewards = torch.cat(list(groups))
        sizes = [len(group) for group in groups]
        if of_turns is None:
            of_turns = torch.zeros_like(penalty)
        if self.per_turn:
            paid = pay_at_the_end(rewards - of_turns.sum(dim=1), batch.mask) + of_turns - penalty
            advantages = self._from_turns(paid, batch.mask, sizes)
        elif not self.per_token:
            adjusted = rewards - penalty.sum(dim=1)
            of_groups = self.from_groups(adjusted.split(sizes))
            assert of_groups is not None
            advantages = torch.where(batch.mask, torch.cat(of_groups)[:, None], torch.zeros_like(penalty))
        else:
            unpaid = truncated & self.bootstrap
            scores = torch.where(unpaid, 0.0, rewards - of_turns.sum(dim=1))
            paid = pay_at_the_end(scores, batch.mask) + of_turns - penalty
            values = torch.zeros_like(paid)
            final = torch.zeros_like(scores)
            if "old_values" in batch.fields:
                values = batch.field("old_values").to(paid.dtype)
                final = torch.where(unpaid, batch.field("final_values").to(paid.dtype), final)
                if "final_values" not in needs:  # then nobody else reads them, and no checkpoint keeps them
                    del batch.fields["final_values"]
            advantages, returns = call_advantage(
                self.advantage, tuple(batch.mask.shape), 2, paid, batch.mask, values, final
            )
            if "returns" in needs:
                batch.fields["returns"] = returns.to(torch.float32)
                metrics["return_mean"] = float(returns[batch.mask].mean())
        batch.fields["advantages"] = advantages.to(torch.float32)
        return advantages, metrics

    def _from_turns(self, paid: Tensor, mask: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return advantages ``[B, T]`` of the rewards of tokens ``[B, T]``, for groups of these sizes."""
        assert self.advantage is not None
        numbers = number_turns(mask)
        places = numbers.clamp(min=0)
        shape = (len(mask), int(numbers.max()) + 1)
        rewards = torch.zeros(shape, dtype=paid.dtype).scatter_add(1, places, torch.where(mask, paid, 0.0))
        taken = torch.arange(shape[1]) < (numbers.amax(dim=1) + 1)[:, None]
        groups = zip(rewards.split(list(sizes)), taken.split(list(sizes)), strict=True)
        of_groups = [call_advantage(self.advantage, tuple(one.shape), 1, one, its) for one, its in groups]
        return torch.where(mask, torch.cat(of_groups).gather(1, places), 0.0)

    def _penalty(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """``weight · KL`` at each token, float64; the weight adapts after it was used."""
        if self.kl is None:
            return torch.zeros(batch.mask.shape, dtype=torch.float64), {}
        ratio = log_ratio(batch.field("sampler_logprobs").double(), batch.field("ref_logprobs").double(), batch.mask)
        kl = torch.where(batch.mask, KL_ESTIMATORS[self.kl.estimator](ratio), torch.zeros_like(ratio))
        observed = float(kl.sum(dim=1).mean())
        metrics = {"kl_in_reward": observed, "kl_weight": self.kl_weight}
        penalty = self.kl_weight * kl
        if self.kl.target is not None:
            from posttrain.algorithms.kl_control import adapt_kl_weight

            try:
                self.kl_weight = adapt_kl_weight(
                    self.kl_weight, observed, self.kl.target, num_samples=batch.num_rows, horizon=self.kl.horizon
                )
            except ValueError as error:  # a KL that is no number
                raise RunFailure(f"kl_in_reward: {error}") from error
        return penalty, metrics


def rewards_of(group: Sequence[Rollout]) -> Tensor:
    """``float64 [G]``: NaN for an answer that no reward scored."""
    rewards = []
    for rollout in group:
        if rollout.is_scored:
            rewards.append(rollout.reward)
        else:
            rewards.append(math.nan)
    return torch.tensor(rewards, dtype=torch.float64)


def value_of_part(rollout: Rollout, name: str) -> float:
    """Return the unweighted value of a reward; NaN if it says nothing of the answer."""
    if name in rollout.skipped:
        return math.nan
    return rollout.parts[name]


def without_rounding(advantages: Tensor, rewards: Tensor) -> Tensor:
    """Return ``[N, G]`` advantages with 0 where all rewards of a group are equal and its advantages are rounding.

    The mean of six rewards of 0.1 is not 0.1. An advantage counts as rounding up to 64 units of it.
    """
    largest = rewards.abs().amax(dim=1)
    is_uniform = rewards.amax(dim=1) == rewards.amin(dim=1)
    is_rounding = advantages.abs().amax(dim=1) <= 64 * torch.finfo(rewards.dtype).eps * largest
    return torch.where((is_uniform & is_rounding)[:, None], torch.zeros_like(advantages), advantages)


def same_sizes(groups: Sequence[Sequence[object] | Tensor]) -> list[list[int]]:
    """Return the places of groups of the same size, in order of their first occurrence."""
    places: dict[int, list[int]] = {}
    for place, group in enumerate(groups):
        places.setdefault(len(group), []).append(place)
    return list(places.values())


def number_turns(mask: Tensor) -> Tensor:
    """``int64 [B, T]``: the number of the turn of each trained token, from 0; elsewhere that of the one before.

    A turn is a run of trained tokens.
    """
    begins = mask & ~torch.nn.functional.pad(mask[:, :-1], (1, 0))
    return begins.cumsum(dim=1) - 1


def pay_at_the_end(rewards: Tensor, mask: Tensor) -> Tensor:
    """``[B]`` rewards as ``[B, T]``: each at the last trained token of its row, 0 elsewhere."""
    columns = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, columns, torch.full_like(columns, -1)).amax(dim=1)
    return torch.where(columns == last[:, None], rewards[:, None], torch.zeros_like(rewards)[:, None])
