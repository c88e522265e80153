"""Compute token advantages from completion rewards and KL penalties."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from posttrain import registry
from posttrain.algorithms.objectives.primitives import KL_ESTIMATORS, log_ratio
from posttrain.errors import RunFailure, UsageError
from posttrain.recipes.reference_sections import KLInRewardSection
from posttrain.types import Batch, Rollout

if TYPE_CHECKING:
    from posttrain.training.checks import Components


def build_advantage_estimator(components: Components) -> AdvantageEstimator:
    """Build the recipe's advantage estimator. Without ``advantage``, the estimator returns None."""
    recipe = components.recipe
    if recipe.advantage is None or components.advantage is None:
        return AdvantageEstimator(None, keeps_unscored=False)
    options = recipe.advantage.options
    return AdvantageEstimator(
        components.advantage.bind(options, "advantage"),
        per_token=components.per_token,
        per_turn=components.per_turn,
        of_parts=components.of_parts,
        spans_groups=bool(components.advantage.traits.get("spans_groups")),
        keeps_unscored=components.keeps_unscored,
        bootstrap=bool(options.get("bootstrap", False)),
        kl=recipe.kl_in_reward,
        drops_rounding=recipe.train.skip_zero_rows,
    )


def call_advantage(advantage: Callable[..., Any], expected: tuple[int, ...], num_results: int, *inputs: Tensor) -> Any:
    """Call an advantage function and check for one tensor with the expected shape, or a tuple with ``num_results``.

    Raises:
        RunFailure: exception inside the function.
        UsageError: unexpected result.
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
    """Advantage estimator.

    advantage: advantage function; None if the objective uses no advantages. per_token: expects token rewards and
    values; per_turn: expects turn rewards; of_parts: expects reward components. spans_groups: normalizes over all
    groups, and takes NaN where a group is smaller than others. bootstrap: replace the score of
    truncated answers with the final state value (turn rewards are kept), because using both would count future reward
    twice. kl: KL penalty in the reward; ``kl_weight``: current weight, adapted if a target is set. keeps_unscored:
    see ``Components.keeps_unscored``. drops_rounding: zero out advantages caused by rounding in groups with equal
    rewards.
    """

    advantage: Callable[..., Any] | None
    per_token: bool = False
    per_turn: bool = False
    of_parts: bool = False
    spans_groups: bool = False
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
        """True if advantages depend on batch fields as well as rewards."""
        return self.per_token or self.per_turn or self.kl is not None

    def from_groups(self, groups: Sequence[Tensor]) -> list[Tensor] | None:
        """Compute ``[G]`` advantages for each group from ``float64 [G]`` rewards.

        Groups with equal sizes are batched together. NaN rewards (not scored by any reward function) are excluded
        from the comparison and get advantage 0. A multi-answer group with fewer than two scored answers gets 0
        everywhere.
        """
        if self.advantage is None:
            return None
        advantages = [torch.zeros_like(group) for group in groups]
        compared = [group[~group.isnan()] for group in groups]
        counted = [n for n, own in enumerate(compared) if len(own) >= max(1, min(2, len(groups[n])))]
        alike = [[counted[n] for n in places] for places in same_sizes([compared[n] for n in counted])]
        if self.spans_groups and counted:
            alike = [counted]
        for places in alike:
            rewards = pad_sequence([compared[n] for n in places], batch_first=True, padding_value=math.nan)
            rows = call_advantage(self.advantage, tuple(rewards.shape), 1, rewards)
            for n, row in zip(places, rows, strict=True):
                own = row[: len(compared[n])]
                if self.drops_rounding:
                    own = without_rounding(own[None], compared[n][None])[0]
                advantages[n] = advantages[n].to(own.dtype).masked_scatter(~groups[n].isnan(), own)
        return advantages

    def from_parts(
        self, groups: Sequence[Sequence[Rollout]], rewards: Sequence[tuple[str, float]]
    ) -> list[Tensor] | None:
        """Compute ``[G]`` advantages for each group from named rewards and weights.

        With ``of_parts``, the function receives individual rewards instead of their sum.
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
        """Compute per-token advantages ``float64 [B, T]`` and metrics.

        groups: ``float64 [G]`` rewards per group, in row order; truncated: ``bool [B]``. of_turns: turn rewards
        included in ``groups``, ``float64 [B, T]``, stored at each turn's last token. Reads ``old_values`` with
        ``final_values``, and ``ref_logprobs``, if present. Sets ``advantages``, and ``returns`` if listed in
        ``needs``.
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
                if "final_values" not in needs:  # no other reader, and not worth storing in checkpoints
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
        """Compute ``[B, T]`` advantages from ``[B, T]`` token rewards, for groups with the given sizes."""
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
        """Compute ``weight · KL`` per token in float64, then adapt the weight."""
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
            except ValueError as error:  # NaN or infinite KL
                raise RunFailure(f"kl_in_reward: {error}") from error
        return penalty, metrics


def rewards_of(group: Sequence[Rollout]) -> Tensor:
    """Collect ``float64 [G]`` rewards, with NaN for unscored answers."""
    rewards = []
    for rollout in group:
        if rollout.is_scored:
            rewards.append(rollout.reward)
        else:
            rewards.append(math.nan)
    return torch.tensor(rewards, dtype=torch.float64)


def value_of_part(rollout: Rollout, name: str) -> float:
    """Look up an unweighted reward; NaN if not applicable to this answer."""
    if name in rollout.skipped:
        return math.nan
    return rollout.parts[name]


def without_rounding(advantages: Tensor, rewards: Tensor) -> Tensor:
    """Zero out ``[N, G]`` advantages caused by rounding in groups with equal rewards.

    For example, six rewards of 0.1 do not average to exactly 0.1. The threshold is 64 eps times the largest reward.
    """
    largest = rewards.abs().amax(dim=1)
    is_uniform = rewards.amax(dim=1) == rewards.amin(dim=1)
    is_rounding = advantages.abs().amax(dim=1) <= 64 * torch.finfo(rewards.dtype).eps * largest
    return torch.where((is_uniform & is_rounding)[:, None], torch.zeros_like(advantages), advantages)


def same_sizes(groups: Sequence[Sequence[object] | Tensor]) -> list[list[int]]:
    """Group indices by group size, in order of first occurrence."""
    places: dict[int, list[int]] = {}
    for place, group in enumerate(groups):
        places.setdefault(len(group), []).append(place)
    return list(places.values())


def number_turns(mask: Tensor) -> Tensor:
    """Number each trained token's turn, ``int64 [B, T]``, from 0; other tokens repeat the previous number (-1 at the
    start).

    A turn is a contiguous span with trained tokens.
    """
    begins = mask & ~torch.nn.functional.pad(mask[:, :-1], (1, 0))
    return begins.cumsum(dim=1) - 1


def pay_at_the_end(rewards: Tensor, mask: Tensor) -> Tensor:
    """Place ``[B]`` rewards at the last trained token in each row, 0 elsewhere (``[B, T]``)."""
    columns = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, columns, torch.full_like(columns, -1)).amax(dim=1)
    return torch.where(columns == last[:, None], rewards[:, None], torch.zeros_like(rewards)[:, None])
