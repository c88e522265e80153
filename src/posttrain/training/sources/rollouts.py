"""Reinforcement learning source: sample with current weights, grade, select, and compute advantages.

Each rollout batch serves multiple updates. A single batch for the whole run gives preference learning or rejection
sampling on model answers.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from posttrain.algorithms.selection import Place, Units, choose_units
from posttrain.data.base import num_repeated
from posttrain.data.render import stop_ids
from posttrain.errors import CheckpointError, RunFailure
from posttrain.randomness import permutation
from posttrain.recipes.sections import RolloutSection, TrainSection
from posttrain.sampling.base import Engine, Sampling
from posttrain.sampling.rollout import RolloutRequest, Sampler, collect
from posttrain.training.advantages import AdvantageEstimator, number_turns, rewards_of, same_sizes
from posttrain.training.batch_fields import BatchFields, follows_rules, replays_experts, replays_sets
from posttrain.training.idle_rows import choose_idle_rows
from posttrain.training.sources import RowOrder, Source, TrainBatch, num_batches
from posttrain.training.sources.descriptions import describe_choice, describe_rollouts
from posttrain.training.sources.prompts import Prompts
from posttrain.training.sources.stored import START_AGAIN, Drawn, Groups, read_batch, write_batch
from posttrain.types import LEFT_OUT, Batch, LogitRules, Rollout, Sample, collate

if TYPE_CHECKING:
    from posttrain.training.sources.feedback import Feedback

NO_GOLD = "no example in this batch has a gold answer, so the reward 'correct' is always 0"
NOTHING_SELECTED = (
    "nothing in this rollout batch is selected for training (rollout.select), so its updates change nothing"
)
ALL_MASKED = (
    "every answer in this rollout batch was truncated, and rollout.mask_truncated excludes these. Its updates "
    "change nothing. Raise rollout.max_tokens"
)
NOTHING_PLAYED = (
    "in this rollout batch, no group has two answers without environment failures, so its updates change nothing"
)
UNSCORED = (
    "every reward returned None for some answers in a batch. These are excluded from group comparisons, and "
    "their advantage is 0 (metric no_reward)"
)
NOTHING_SHOWN = (
    "no row in this rollout batch has the extra information for its teacher (teacher.sees), or enough room for it, so"
    " teacher and student read the same prompts"
)
OF_A_PART = ("reward", "accuracy", "completion_length", "num_calls")  # metrics per mixture part


@dataclass(frozen=True, slots=True)
class UnitSelection:
    """Selection of training units: ``select`` maps rewards to units with ``rows_per_unit`` answers each."""

    select: Callable[[Tensor], Units]
    rows_per_unit: int = 1


@dataclass(frozen=True, slots=True)
class LearningInputs:
    """Values that updates read besides tokens.

    ``feedback`` rewrites prompts for self-teaching. ``turn_weight``: weight of rewards per turn.
    """

    advantage_estimator: AdvantageEstimator
    fields: BatchFields
    feedback: Feedback | None = None
    turn_weight: float = 0.0


class RolloutSource(Source):
    """Rollout source. Each batch serves ``train.ppo_epochs`` × ``train.num_minibatches`` updates.

    Prompts are split into minibatches in an order that depends only on (seed, rollout batch, epoch).

    Args:
        options: sampling settings.
        train: number of updates per batch, run length and seed.
        prompts: prompts to draw from.
        sampler: engine and grader, limited to ``rollout.max_total_tokens``.
        selection: answers to train on.
        learning: advantages and batch fields.
    """

    def __init__(
        self,
        options: RolloutSection,
        train: TrainSection,
        prompts: Prompts,
        sampler: Sampler,
        selection: UnitSelection,
        learning: LearningInputs,
    ) -> None:
        self.options = options
        self.train = train
        self.seed = train.seed
        self.minibatches = train.num_minibatches
        self.updates = train.updates_per_batch
        self.prompts = prompts
        self.sampler = sampler
        self.grader = sampler.grader
        self.select = selection.select
        self.rows_per_unit = selection.rows_per_unit
        self.advantage_estimator = learning.advantage_estimator
        self.batch_fields = learning.fields
        self.feedback = learning.feedback
        self.weighted_rewards = [(name, weight) for name, weight, _ in self.grader.rewards if weight]
        self.turn_weight = learning.turn_weight
        self.dropped = prompts.dropped
        self.num_repeated = num_repeated(prompts.task.examples)
        self.trained = ""
        self.origin = prompts.task.origin
        self.num_examples = len(prompts.indices)
        parts = prompts.task.parts
        self.parts = tuple(part.name for part in parts)
        self.order = RowOrder(self.seed, "prompts", options.num_prompts, parts, prompts.parts, options.max_rounds - 1)
        self._tell_length()
        self.sampling = self._build_sampling()
        self.rules = self._followed_rules()
        self._batch: Batch | None = None
        self._warnings: dict[str, bool] = {}  # message -> already shown

    @property
    def engine(self) -> Engine:
        """Rollout engine."""
        return self.sampler.engine

    def _tell_length(self) -> None:
        """Tell rewards the run length."""
        length = self.grader.run_extent
        length.steps_per_epoch = self.num_examples / self.options.num_prompts * self.updates
        if self.train.steps is not None:
            length.max_steps = self.train.steps
        else:
            length.num_epochs = self.train.num_epochs or 0.0
            length.max_steps, _ = self.length_of(length.num_epochs)

    def _build_sampling(self) -> Sampling:
        """Build sampling settings."""
        return Sampling(
            max_tokens=self.options.max_tokens,
            temperature=self.options.temperature,
            top_k=self.options.top_k,
            top_p=self.options.top_p,
            stop_ids=stop_ids(self.sampler.tokenizer, self.grader.template),
            max_total_tokens=self.sampler.context_tokens,
            max_turn_tokens=self.options.max_turn_tokens,
            min_p=self.options.min_p,
            keeps_sets=replays_sets(self.options, self.batch_fields.needs),
            keeps_experts=replays_experts(self.options, self.batch_fields.needs),
            min_tokens=self.options.min_tokens,
            repetition_penalty=self.options.repetition_penalty,
            stop=tuple(self.options.stop),
        )

    def _followed_rules(self) -> LogitRules | None:
        """Find sampling rules that also apply to trainer log-probabilities."""
        if not follows_rules(self.options, self.batch_fields.needs):
            return None
        return self.sampling.rules

    def __call__(self, step: int) -> TrainBatch:
        """Build the batch for update ``step`` (1-based), sampling a new rollout batch if due."""
        cycle, update = divmod(step - 1, self.updates)
        if update == 0:
            draw = self._collect(step, cycle)
            self._batch = draw.batch
        else:
            draw = TrainBatch(self._batch, fresh=False)
        draw.whole = self._batch
        if self.minibatches > 1 and draw.batch is not None:
            draw.batch = self._minibatch(draw.batch, cycle, *divmod(update, self.minibatches))
        if draw.batch is not None:
            started = time.perf_counter()
            draw.batch = self.batch_fields.before_step(draw.batch, step)
            if draw.timing:
                draw.timing["fill_seconds"] += time.perf_counter() - started
        return draw

    def length_of(self, epochs: float) -> tuple[int, str]:
        """Compute the number of steps for ``epochs`` passes over all prompts, rounded up, with a description."""
        batches = num_batches(epochs, self.num_examples, self.options.num_prompts)
        steps = batches * self.updates
        passes = "pass" if epochs == 1 else "passes"
        over = f"{epochs:g} {passes} over {self.num_examples:,} prompts"
        if self.updates == 1:
            return steps, f"{over} = {batches:,} steps of {self.options.num_prompts}"
        of_batches = f"{batches:,} rollout batches of {self.options.num_prompts}"
        return steps, f"{over} = {of_batches}, {self.updates} steps each: {steps:,} steps"

    def rollout_buffer(self, step: int) -> dict[str, Tensor] | None:
        if step % self.updates == 0 or self._batch is None:
            return None
        return write_batch(self._batch)

    def state(self) -> dict[str, float]:
        return {"kl_weight": self.advantage_estimator.kl_weight}

    def restore(
        self, rollout_buffer: dict[str, Tensor] | None, state: dict[str, float], vocabulary: int = sys.maxsize
    ) -> None:
        self.advantage_estimator.kl_weight = state.get("kl_weight", self.advantage_estimator.kl_weight)
        if rollout_buffer is None or "tokens" not in rollout_buffer:
            return
        try:
            self._batch = read_batch(rollout_buffer, self.rows_per_unit, vocabulary)
            self._batch.rules = self.rules
            self.check_experts(self._batch.experts)
        except (ValueError, KeyError) as error:
            what = "the checkpoint's rollout_buffer.safetensors does not contain the current rollout batch"
            raise CheckpointError(f"{what} ({error}); {START_AGAIN}") from None

    def check_experts(self, experts: Tensor | None) -> None:
        """Check expert choices from a checkpoint.

        Raises:
            ValueError: missing, or for other routers.
        """
        replay = self.batch_fields.policy.replay
        if replay is None:
            return
        if experts is None:
            raise ValueError("no experts")
        replay.check(experts)

    def take_warnings(self) -> list[str]:
        if self.prompts.replaced:
            self._warnings.setdefault(self.prompts.describe_replaced(), False)
        unreported = [message for message, is_reported in self._warnings.items() if not is_reported]
        self._warnings |= dict.fromkeys(unreported, True)
        return unreported

    def _minibatch(self, batch: Batch, cycle: int, epoch: int, part: int) -> Batch | None:
        """Select one minibatch of prompts with selected completions."""
        groups = sorted(set(batch.group.tolist()))
        order = permutation(self.seed, f"minibatch {epoch}", cycle, len(groups))
        start = len(groups) * part // self.minibatches
        end = len(groups) * (part + 1) // self.minibatches
        chosen = {groups[int(i)] for i in order[start:end]}
        rows = [b for b, group in enumerate(batch.group.tolist()) if group in chosen]
        if not rows or not bool(batch.trained_mask[rows].any()):
            return None
        return batch.select(rows)

    def _collect(self, step: int, cycle: int) -> TrainBatch:
        drawn = self.take(step, cycle)
        sampled = drawn.sampled
        kept = drawn.chosen
        if self.intervention is not None:
            self.intervention.set_rewards(step, sampled)  # also for batches sampled before the change
            kept = self.intervention.keep(step, sampled, kept)
        chosen = self._played(kept)
        scored = time.perf_counter()
        rewards = [rewards_of(group) for group in chosen]
        units = self._choose(rewards)
        if not self.advantage_estimator.needs_batch:
            _record_advantages(chosen, self.advantage_estimator.from_parts(chosen, self.weighted_rewards))
        trained = self._unmasked(chosen, units)
        # token-level advantages use all completions, including masked ones
        reads_all = self.advantage_estimator.needs_batch or self.options.truncated_divisor == "all"
        rows = units if reads_all else trained
        batch: Batch | None = None
        if rows:
            batch = self.batch_of(chosen, rows)
            batch.answers = _places(sampled, chosen, rows)
        grading = drawn.timing["score_seconds"] + time.perf_counter() - scored
        scored = time.perf_counter()
        metrics = describe_rollouts(sampled, self.grader.format_part)
        if "no_reward" in metrics:
            self._warnings.setdefault(UNSCORED, False)
        rewards_correctness = any(name == "correct" and weight for name, weight, _ in self.grader.rewards)
        if rewards_correctness and "accuracy" not in metrics:
            self._warnings.setdefault(NO_GOLD, False)
        if batch is not None:
            metrics |= self._fill_batch_fields(batch, chosen, rows, rewards, step)
            if len(trained) < len(rows):
                batch = self._without_truncated(batch, rows, set(trained))
        if batch is None:
            self._warnings.setdefault(_why_empty(chosen, units), False)
        metrics |= describe_choice(chosen, trained, self.options.drop_uniform_groups, drawn.accepted)
        if self.options.mask_truncated:
            metrics["masked"] = (len(units) - len(trained)) / max(1, len(units))
        if self.parts:
            metrics |= self._describe_parts(sampled, chosen, trained)
        if self.options.staleness:
            metrics["staleness"] = float(cycle - drawn.version)
        everything = [r for group in sampled for r in group]
        timing = {"sync_seconds": 0.0} | drawn.timing
        timing |= {"score_seconds": grading, "fill_seconds": time.perf_counter() - scored}
        timing["generated_tokens"] = float(sum(r.completion.num_own for r in everything))
        return TrainBatch(batch, True, everything, metrics, timing, is_changed=self._is_changed(step))

    def _without_truncated(self, batch: Batch, units: Units, kept: Collection[tuple[Place, ...]]) -> Batch | None:
        """Keep rows for kept units; with ``truncated_divisor: all``, mark other rows instead."""
        each = self.rows_per_unit
        is_kept = [unit in kept for unit in units for _ in range(each)]
        places = [place for place, kept_here in enumerate(is_kept) if kept_here]
        if not places:
            return None
        if self.options.truncated_divisor == "kept":
            return batch.select(places)
        batch.fields[LEFT_OUT] = 1.0 - torch.tensor(is_kept, dtype=torch.float32)
        return batch

    def _describe_parts(self, sampled: Groups, chosen: Groups, units: Units) -> dict[str, float]:
        """Compute metrics per mixture part, including ``prompts`` and how many of them are ``trained`` on."""
        places = {place for unit in units for place, _ in unit}
        trained = Counter(chosen[place][0].example.meta["part"] for place in places)
        info: dict[str, float] = {}
        for name in self.parts:
            own = [group for group in sampled if group[0].example.meta["part"] == name]
            about = {"prompts": float(len(own)), "trained": float(trained[name])}
            if any(not r.has_failed for group in own for r in group):
                means = describe_rollouts(own, self.grader.format_part)
                about |= {key: means[key] for key in OF_A_PART if key in means}
            info |= {f"{name}:{key}": value for key, value in about.items()}
        return info

    def take(self, step: int, cycle: int) -> Drawn:
        """Sample rollout batch ``cycle`` with current weights."""
        started = time.perf_counter()
        self.engine.sync(step - 1)
        syncing = time.perf_counter() - started
        drawn = self.draw(step, cycle)
        drawn.timing["sync_seconds"] = syncing
        self.engine.rest()
        return drawn

    def draw(self, step: int, cycle: int) -> Drawn:
        """Sample and grade groups for rollout batch ``cycle`` (from 0), first used in update ``step``."""
        started = time.perf_counter()
        grading = 0.0
        sampled: Groups = []
        drawn: Drawn | None = None
        while drawn is None:
            attempt = len(sampled) // self.options.num_prompts
            wanted = self.order.round_of(cycle, attempt)
            prompts = [self.prompts.draw(place) for place in wanted.places]
            request = RolloutRequest(
                [prompt.example for prompt in prompts],
                [prompt.ids for prompt in prompts],
                self.sampling,
                key=(self.seed, f"rollout {attempt}", step),
                group=self.options.group_size,
                step=step,
                num_updates=step - 1,
                prompt_indices=[prompt.index for prompt in prompts],
                epochs=wanted.epochs,
                replaced=[prompt.replaced for prompt in prompts],
            )
            groups, seconds = collect(self.sampler, request)
            grading += seconds
            sampled += groups
            if self.intervention is not None:
                self.intervention.set_rewards(step, sampled)
            drawn = self._choose_groups(sampled, cycle)
        generating = time.perf_counter() - started - grading
        drawn.timing |= {"generate_seconds": generating, "score_seconds": grading}
        return drawn

    def _choose_groups(self, sampled: Groups, cycle: int) -> Drawn | None:
        """Choose groups for the batch; None if another round is needed."""
        options = self.options
        fitting = [g for g in sampled if self._fits(g)]
        rest: Groups = []
        if options.drop_uniform_groups and len(fitting) < options.num_prompts:
            if len(sampled) < options.max_rounds * options.num_prompts:
                return None
            # limit reached: fill up, mostly with uniform groups
            rest = [g for g in sampled if not self._fits(g)]
        chosen = (fitting + rest)[: options.num_prompts]
        accepted = len(fitting) / len(sampled)
        return Drawn(sampled, chosen, accepted, cycle, {})

    def _fits(self, group: Sequence[Rollout]) -> bool:
        """Check if a group can be used; with ``drop_uniform_groups``, it must vary and yield a unit."""
        if not self.options.drop_uniform_groups:
            return True
        played = [r for r in group if self._takes_part(r)]
        part = self.options.uniform_by
        seen: set[object] = {r.reward for r in played if r.is_scored}
        if part != "reward":
            seen = {r.parts[part] for r in played if part in r.parts}
        elif self.advantage_estimator.of_parts:  # different components may have equal sums
            seen = {tuple(r.parts.get(name) for name, _ in self.weighted_rewards) for r in played if r.is_scored}
        units = self._choose([rewards_of(played)])
        return len(seen) > 1 and bool(self._unmasked([played], units))

    def _takes_part(self, rollout: Rollout) -> bool:
        """Check if a completion can be trained on: no environment failure, and scored if required."""
        return not rollout.has_failed and (rollout.is_scored or self.advantage_estimator.keeps_unscored)

    def _played(self, groups: Groups) -> Groups:
        """Drop unusable completions. Multi-answer groups need at least two remaining.

        Raises:
            RunFailure: no completion finished.
        """
        kept = []
        for group in groups:
            played = [r for r in group if self._takes_part(r)]
            if len(played) >= min(2, self.options.group_size):
                kept.append(played)
                continue
            for rollout in played:
                left_out = f"left out: {len(played)} of {len(group)} completions in this group finished"
                rollout.failures = (*rollout.failures, left_out)
        failures = [r.failures[0] for group in groups for r in group if r.has_failed]
        if failures and len(failures) == sum(map(len, groups)):
            raise RunFailure(
                f"environment: failed in every completion, including all retries "
                f"(rollout.retries: {self.options.retries}). First failure: {failures[0]}"
            )
        return kept

    def _choose(self, rewards: Sequence[Tensor]) -> Units:
        """Select units from groups with these rewards, in prompt order."""
        units: Units = []
        for places in same_sizes(rewards):
            chosen = choose_units(self.select, torch.stack([rewards[n] for n in places]), self.rows_per_unit)
            units += [tuple((places[n], g) for n, g in unit) for unit in chosen]
        return sorted(units, key=lambda unit: unit[0][0])

    def _unmasked(self, groups: Groups, units: Units) -> Units:
        """Filter units to train on. With ``mask_truncated``, units with a truncated completion are dropped.

        Truncated completions get no loss weight, but their rewards count in the group (DAPO overlong filtering "masks
        the loss", Yu et al. 2025, section 3.4). In TRL's ``mask_truncated_completions``, masked rows still count in
        sequence means.
        """
        if not self.options.mask_truncated:
            return list(units)
        kept: Units = []
        for unit in units:
            is_cut_off = any(groups[n][g].completion.is_truncated for n, g in unit)
            if not is_cut_off:
                kept.append(unit)
        return kept

    def batch_of(self, groups: Sequence[Sequence[Rollout]], units: Units) -> Batch:
        """Build a batch from selected units, with rollout fields."""
        needs = self.batch_fields.needs
        samples = []
        for unit in units:
            rewards = [groups[n][g].reward for n, g in unit]
            row_fields = {"margins": rewards[0] - rewards[-1]}
            for (n, g), reward in zip(unit, rewards, strict=True):
                rollout = groups[n][g]
                row_fields |= {"rewards": reward, "labels": float(reward > self.options.label_above)}
                sample = _sample_of(rollout, n)
                if self.rules is not None and self.rules.barred_ids:
                    sample.fields["barred"] = _barred(sample.mask, self.options.min_tokens)
                if rollout.advantage is not None:
                    sample.fields["advantages"] = [rollout.advantage if own else 0.0 for own in sample.mask]
                sample.fields |= {name: x for name, x in row_fields.items() if name in needs}
                samples.append(sample)
        batch = collate(samples, rows_per_unit=self.rows_per_unit)
        batch.rules = self.rules
        return batch

    def _fill_batch_fields(
        self, batch: Batch, groups: Sequence[Sequence[Rollout]], units: Units, rewards: Sequence[Tensor], step: int
    ) -> dict[str, float]:
        """Fill batch fields for a rollout batch first used in update ``step``; returns advantage metrics."""
        teacher_batch = None
        if self.feedback is not None:
            rows = [(n, g) for unit in units for n, g in unit]
            teacher_batch, has_feedback = self.feedback.rewrite(groups, rows)
            batch.fields["has_feedback"] = has_feedback
            if not bool(has_feedback.any()):
                self._warnings.setdefault(NOTHING_SHOWN, False)
        self.batch_fields(batch, teacher_batch, every_row=self._reads_every_row(step))
        if not self.advantage_estimator.needs_batch:
            return {}
        flat = [r for g in groups for r in g]
        truncated = torch.tensor([r.completion.is_truncated for r in flat])
        of_turns: Tensor | None = None
        if self.turn_weight:
            of_turns = pay_turns(batch, flat, self.turn_weight)
        advantages, metrics = self.advantage_estimator.from_batch(
            batch, rewards, truncated, self.batch_fields.needs, of_turns
        )
        self.batch_fields(batch, teacher_batch)  # fields that depend on advantages
        counts = batch.mask.sum(dim=1).clamp(min=1)
        means = advantages.sum(dim=1) / counts
        _record_advantages(groups, means.split([len(group) for group in rewards]))
        return metrics

    def _reads_every_row(self, step: int) -> bool:
        """Check if log-probabilities are needed even for idle rows.

        This applies to advantages computed from the batch, and to metrics in some updates.
        """
        options = self.train
        last_step = options.steps
        if options.num_epochs is not None:
            last_step, _ = self.length_of(options.num_epochs)
        updates = range(step, step + self.updates)
        modes = {choose_idle_rows(options, update, last_step) for update in updates}
        return self.advantage_estimator.needs_batch or modes != {"skip"}


def _places(sampled: Groups, chosen: Groups, units: Units) -> Tensor:
    """Index each row's answer among all sampled answers (``int64 [B]``)."""
    numbers = {id(rollout): number for number, rollout in enumerate(r for group in sampled for r in group)}
    return torch.tensor([numbers[id(chosen[n][g])] for unit in units for n, g in unit])


def _why_empty(chosen: Groups, units: Units) -> str:
    """Choose a warning for an empty batch."""
    if units:
        return ALL_MASKED
    if chosen:
        return NOTHING_SELECTED
    return NOTHING_PLAYED


def pay_turns(batch: Batch, rollouts: Sequence[Rollout], weight: float) -> Tensor:
    """Place turn rewards times ``weight`` at each turn's last token (``float64 [B, T]``)."""
    numbers = number_turns(batch.mask)
    columns = torch.arange(batch.mask.shape[1])
    paid = torch.zeros(batch.mask.shape, dtype=torch.float64)
    for b, rollout in enumerate(rollouts):
        for k, turn in enumerate(rollout.turns):
            if turn.reward is not None:
                is_of_turn = batch.mask[b] & (numbers[b] == k)
                last = int(columns[is_of_turn].amax())
                paid[b, last] = weight * turn.reward
    return paid


def _sample_of(rollout: Rollout, group: int) -> Sample:
    """Build a row that trains on model tokens but not on environment tokens."""
    prompt = list(rollout.prompt_ids)
    answer = rollout.completion
    return Sample(
        ids=prompt + list(answer.ids),
        mask=[False] * len(prompt) + list(answer.written),
        group=group,
        prefix=len(prompt),
        fields={"sampler_logprobs": [0.0] * len(prompt) + list(answer.logprobs)},
        kept=answer.kept,
        experts=answer.experts,
    )


def _barred(mask: Sequence[bool], min_tokens: int) -> list[float]:
    """Mark the first ``min_tokens`` tokens in each turn, where ending is not allowed, with 1."""
    barred = list[float]()
    num_own = 0
    for is_own in mask:
        num_own = num_own + 1 if is_own else 0
        barred.append(float(0 < num_own <= min_tokens))
    return barred


def _record_advantages(groups: Sequence[Sequence[Rollout]], advantages: Sequence[Tensor] | None) -> None:
    """Store each completion's advantage in its record (averaged over tokens, if these differ)."""
    if advantages is None:
        return
    for group, row in zip(groups, advantages, strict=True):
        for rollout, value in zip(group, row.tolist(), strict=True):
            rollout.advantage = value
