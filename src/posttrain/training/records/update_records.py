"""Record every update, check its balances, and store it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from posttrain.balances.advantages import expected_advantages, following_kl_weight, own_logprobs
from posttrain.balances.checks import check_balances
from posttrain.balances.findings import Imbalance
from posttrain.balances.of_answers import criterion_weights, surprise_of
from posttrain.balances.of_routing import summed_routing
from posttrain.balances.of_updates import NUM_STEPS
from posttrain.balances.record import (
    Before,
    RoutingRecord,
    RowSums,
    SampledAnswer,
    StepRecord,
    TokenRecord,
    UpdateFacts,
)
from posttrain.errors import Unbalanced
from posttrain.models.forward.actor_critic import ActorCritic
from posttrain.models.forward.forward import Forward
from posttrain.process_group import ProcessGroup
from posttrain.store.rollouts import RolloutStore
from posttrain.store.updates import RecordedUpdate
from posttrain.training.build import TrainerState
from posttrain.training.files import NoRecords
from posttrain.training.records.capture import Captured
from posttrain.training.records.stored_records import is_left_out, recorded_answer
from posttrain.training.records.weights import WatchedWeights
from posttrain.training.sources import TrainBatch
from posttrain.types import Batch, Rollout

LARGEST_RATIO = 20.0
NUM_DIGITS = 10  # for recorded numbers
NUM_SCORED_AGAIN = 2  # number of rows to check if trainer and sampler temperatures differ
# Fields over all batch rows, which determine advantages and sampler mismatch.
OF_WHOLE_BATCHES = ("ref_logprobs", "old_values", "final_values", "old_logprobs", "sampler_logprobs")
# Update and batch metrics included in records.
KEPT_METRICS = ("clip_fraction", "kl_weight", "kl_in_reward", "router_aux_loss", "router_max_load")


def open_records(
    parts: TrainerState, store: RolloutStore | NoRecords, process_group: ProcessGroup, *, ends_run: bool
) -> UpdateRecords:
    """Open update records for a run; ``ends_run``: stop on a violated balance."""
    own, _ = parts.split_parameters()
    optimizer = parts.facts.optimizer
    assert optimizer is not None, "a run has one"
    weights = WatchedWeights(own, parts.optimizer, optimizer.max_grad_norm)
    if optimizer.name == "adamw":
        weights.decay = optimizer.options["weight_decay"]
        weights.betas = tuple(optimizer.options["betas"])
        weights.eps = optimizer.options["eps"]
    return UpdateRecords(parts.facts, weights, store, process_group, ends_run)


def sampled_answer(rollout: Rollout, keeps_unscored: bool = True, rubric_key: str | None = None) -> SampledAnswer:
    """Convert a graded rollout; ``keeps_unscored``: see ``SamplingFacts``; ``rubric_key``: criteria in its row."""
    completion = rollout.completion
    criteria: tuple[float, ...] = ()
    if rubric_key is not None:
        criteria = criterion_weights(rollout.example.meta.get(rubric_key))
    return SampledAnswer(
        rollout.prompt_index,
        rollout.epoch,
        rollout.rollout_index,
        rollout.prompt_ids,
        completion.ids,
        completion.own,
        completion.logprobs,
        rollout.parts,
        rollout.reward,
        rollout.advantage,
        completion.finish,
        completion.version,
        rollout.outcome,
        tuple(turn.reward for turn in rollout.turns),
        takes_part=not is_left_out(rollout.failures) and (rollout.is_scored or keeps_unscored),
        skipped=rollout.skipped,
        is_scored=rollout.is_scored,
        kept=completion.kept,
        criteria=criteria,
        replaced=rollout.replaced,
    )


@dataclass(slots=True)
class UpdateRecords:
    """Update records for one run. ``open_record`` runs before each weight change and ``close_record`` after.

    All processes make the same calls; the main process checks and stores. ends_run: stop on a violated balance
    (``train.strict``).
    """

    facts: UpdateFacts
    weights: WatchedWeights
    store: RolloutStore | NoRecords
    process_group: ProcessGroup
    ends_run: bool = False
    before: Before = field(default_factory=Before)
    _answers: Sequence[SampledAnswer] = ()
    _advantages: Sequence[list[float] | None] | None = None
    _kl_weight: dict[str, float] = field(default_factory=dict)
    _record: StepRecord | None = None
    _leftover: int = 0
    _is_changed: bool = False

    def forget(self) -> None:
        """Discard state from earlier updates after weights, optimizer and batch have changed."""
        self.weights.forget()
        self.before = Before()
        self._answers = ()
        self._advantages = None

    def resume(self, step: int) -> None:
        """Continue after ``step`` updates, reloading state from stored records."""
        self.forget()
        if isinstance(self.store, NoRecords):
            return
        sampling = self.facts.sampling
        last = self.store.last_update()
        if last is not None:
            self.before = replace(self.before, moved=last.measured.get("moved_so_far", 0.0))
        if sampling is None:
            return
        if not sampling.redraws:
            self.before.seen.update(self.store.epochs_of_prompts())
        if step % self.facts.updates:
            first = step - step % self.facts.updates + 1
            self._answers = [recorded_answer(row) for row in self.store.training(first)]
            done = step % self.facts.updates % self.facts.num_minibatches
            taken = set[int]()
            for update in self.store.updates(since=step - done + 1):
                taken.update(int(place) for place in update.rows.get("answers", ()))
            self.before = replace(self.before, taken=frozenset(taken))

    def begin(self) -> None:
        """Check for leftover gradients before computing new ones."""
        self._leftover = self.weights.num_leftover()

    def open_record(
        self,
        draw: TrainBatch,
        step: int,
        loss: float,
        metrics: Mapping[str, float],
        captured: Captured,
        forward: Forward | ActorCritic,
    ) -> list[Imbalance]:
        """Record a pending update; returns violated balances in the main process."""
        self._record = None
        found: list[Imbalance] = []
        again = self._score_again(draw, step, forward)
        knows_answers = self.facts.sampling is None or bool(draw.rollouts or self._answers)
        if self.process_group.is_main and draw.batch is not None and draw.batch.answers is not None and knows_answers:
            self._record = self._build(draw, draw.batch, step, captured)
            measured = {"loss": loss, "leftover": float(self._leftover), **again, **self._kl_weight}
            measured |= {name: metrics[name] for name in KEPT_METRICS if name in metrics}
            measured |= self._surprise(self._record)
            if self._record.routing is not None:
                measured |= summed_routing(self._record.routing)
            if self._record.facts != self.facts:
                measured["changed"] = 1.0
            self._record = replace(self._record, measured=measured)
            self._record = self._with_advantages(self._record)
            found = check_balances(self._record)
        return found

    def end_if_strict(self, found: Sequence[Imbalance]) -> None:
        """Stop strict runs in all processes if any balance is violated.

        Raises:
            Unbalanced: with all violated balances.
        """
        if not self.ends_run or not self.process_group.agree(bool(found), "balances"):
            return
        messages = " ".join(f"{one.message}." for one in found)
        raise Unbalanced(f"{messages or 'Rank 0 lists the violated balances.'} train.strict ends the run here")

    def close_record(self, lr: float, norm: float) -> tuple[float, list[Imbalance]]:
        """Record weight changes; returns relative movement and balances violated by the step itself.

        Raises:
            Unbalanced: violated balance in a strict run.
        """
        moved = self.weights.after_update(lr, norm)
        record = self._record
        if record is None:
            return moved["moved"], []
        measured = {**record.measured, "lr": lr, "grad_norm": norm, **moved}
        if self.facts.optimizer is not None and self.facts.optimizer.steps is not None:
            measured[NUM_STEPS] = float(self.facts.optimizer.steps)
        measured = {name: float(f"{x:.{NUM_DIGITS}g}") for name, x in measured.items()}
        of_step = replace(record, rows=None, answers=(), given=(), measured=measured)
        found = check_balances(of_step)
        self.before = replace(record, measured=measured).following()
        self.before = replace(self.before, moved=float(f"{self.before.moved:.{NUM_DIGITS}g}"))
        measured["moved_so_far"] = self.before.moved
        self._record = replace(record, measured=measured)
        self.end_if_strict(found)
        return moved["moved"], found

    def keep(self, found: Sequence[Imbalance]) -> None:
        """Store the last update record with the names of violated balances."""
        record = self._record
        if record is None or isinstance(self.store, NoRecords):
            return
        rows: dict[str, list[int] | list[float]] = {}
        if record.rows is not None:
            is_first_pass = record.update < self.facts.num_minibatches
            rows = stored_rows(record.rows, is_first_pass=is_first_pass, moves=self.facts.reference is not None)
        violated = tuple(dict.fromkeys(one.check for one in found))
        finite = {name: x for name, x in record.measured.items() if math.isfinite(x)}
        self.store.record_update(RecordedUpdate(record.step, record.update, finite, violated, rows))

    def _build(self, draw: TrainBatch, batch: Batch, step: int, captured: Captured) -> StepRecord:
        update = 0
        if self.facts.sampling is not None:
            update = (step - 1) % self.facts.updates
        if draw.rollouts:
            sampling = self.facts.sampling
            keeps = sampling is None or sampling.keeps_unscored
            key = None
            if sampling is not None:
                key = sampling.rubric_key
            self._answers = [sampled_answer(rollout, keeps, key) for rollout in draw.rollouts]
            self._advantages = None
            self._is_changed = draw.is_changed
            self._kl_weight = {name: x for name, x in draw.metrics.items() if name in ("kl_weight", "kl_in_reward")}
        fields = {name: x.cpu() for name, x in batch.fields.items()}
        whole: dict[str, Tensor] = {}
        whole_answers: Tensor | None = None
        if draw.whole is not None and draw.whole.answers is not None:
            whole = {name: draw.whole.fields[name] for name in OF_WHOLE_BATCHES if name in draw.whole.fields}
            whole_answers = draw.whole.answers
        assert batch.weights is not None
        assert batch.answers is not None
        tokens = TokenRecord(
            mask=batch.mask,
            answers=batch.answers,
            weights=batch.weights,
            values=captured.values,
            logprobs=captured.outputs["logprobs"],
            fields=fields,
            slopes=captured.slopes,
            entropy=captured.outputs.get("entropy"),
            scores=captured.outputs.get("scores"),
            whole=whole,
            whole_answers=whole_answers,
            lengths=batch.lengths,
        )
        rows = self._sum_rows(tokens, captured.computed, batch.rows_per_unit)
        facts = self.facts
        if self._is_changed and facts.sampling is not None:  # rewards or prompts were changed on purpose
            facts = replace(facts, sampling=replace(facts.sampling, rewards=None, takes_all=False))
        elif draw.is_changed:
            facts = replace(facts, num_given=None)
        return StepRecord(
            step,
            update,
            facts,
            {},
            rows,
            self._answers,
            draw.given,
            tokens,
            self.before,
            self._advantages,
            _routing_of(captured),
        )

    def _with_advantages(self, record: StepRecord) -> StepRecord:
        """Compute expected advantages once per batch, and the next penalty weight."""
        if not record.answers:
            return record
        if self._advantages is None:
            self._advantages = expected_advantages(record)
        measured = dict(record.measured)
        assert record.facts.sampling is not None
        penalty = record.facts.sampling.penalty
        if penalty is not None and record.is_first and "kl_weight" in measured:
            measured["next_kl_weight"] = measured["kl_weight"]
            if penalty.target is not None and "kl_in_reward" in measured:
                played = sum(answer.advantage is not None for answer in record.answers)
                measured["next_kl_weight"] = following_kl_weight(
                    measured["kl_weight"], measured["kl_in_reward"], penalty.target, played, penalty.horizon
                )
        return replace(record, measured=measured, advantages=self._advantages)

    def _sum_rows(self, tokens: TokenRecord, computed: Tensor, rows_per_unit: int) -> RowSums:
        """Sum values over each row's trained tokens."""
        mask = tokens.mask
        columns = torch.arange(mask.shape[1])
        counts = mask.sum(dim=1)
        old = tokens.fields.get("old_logprobs")
        if self.facts.sampling is not None and not self.facts.sampling.old_from_trainer:
            old = tokens.fields.get("sampler_logprobs")
        weights, values = tokens.weights, tokens.values
        if weights.ndim == 1:
            values = _at_first_rows(values * weights, rows_per_unit)
            weights = _at_first_rows(weights, rows_per_unit)
        else:
            values = _total(values * weights, mask)
            weights = _total(weights, mask)
        advantage, uneven = _mean_and_spread(tokens.fields.get("advantages"), mask, counts)
        return RowSums(
            answers=tokens.answers,
            tokens=counts,
            places=(mask * columns).sum(dim=1),
            weight=weights,
            value=values,
            logprob=_total(tokens.logprobs, mask),
            advantage=advantage,
            uneven=uneven,
            old=_total_or_nan(old, mask),
            reference=_total_or_nan(tokens.fields.get("ref_logprobs"), mask),
            kl_sampler=_divergence(self._recorded_sampler(tokens), tokens.logprobs, mask),
            kl_reference=_divergence(tokens.logprobs, tokens.fields.get("ref_logprobs"), mask),
            computed=computed,
        )

    def _recorded_sampler(self, tokens: TokenRecord) -> Tensor | None:
        """Collect sampler log-probabilities at trained tokens from answer records."""
        sampler = tokens.fields.get("sampler_logprobs")
        if sampler is None or not self._answers:
            return None
        flat: list[float] = []
        counts = tokens.mask.sum(dim=1).tolist()
        for place, count in zip(tokens.answers.tolist(), counts, strict=True):
            if not 0 <= place < len(self._answers) or self._answers[place].logprobs is None:
                return sampler.double()
            own = own_logprobs(self._answers[place])
            if len(own) != count:
                own = [*own, *[0.0] * count][:count]
            flat += own
        result = torch.zeros(tokens.mask.shape, dtype=torch.float64)
        return result.masked_scatter(tokens.mask, torch.tensor(flat, dtype=torch.float64))

    def _surprise(self, record: StepRecord) -> dict[str, float]:
        """Sum ``−log p − H``, if every freshly sampled row was computed."""
        tokens, rows, sampling = record.tokens, record.rows, record.facts.sampling
        if tokens is None or rows is None or sampling is None or tokens.entropy is None:
            return {}
        is_whole = bool(rows.computed.all()) and sampling.takes_all and not sampling.masks_truncated
        if not is_whole or sampling.redraws or not record.is_first or self.facts.has_dropout:
            return {}
        return surprise_of(tokens, rows.computed)

    def _score_again(self, draw: TrainBatch, step: int, forward: Forward | ActorCritic) -> dict[str, float]:
        """Score two answers at the sampling temperature, if the trainer uses a different one."""
        sampling = self.facts.sampling
        if sampling is None or sampling.at_scored_temperature or sampling.ignores_rules or draw.batch is None:
            return {}
        if (step - 1) % self.facts.updates:
            return {}
        batch = draw.batch
        policy = forward
        if isinstance(policy, ActorCritic):
            policy = policy.policy
        rows = list(range(min(batch.num_rows, NUM_SCORED_AGAIN * batch.rows_per_unit)))
        part = batch.select(rows)
        scored = policy.temperature
        policy.temperature = sampling.temperature
        try:
            with torch.no_grad():
                logprobs = policy(part, "none").logprobs.cpu().double()
        finally:
            policy.temperature = scored
        sums = _divergence(part.field("sampler_logprobs").double(), logprobs, part.mask)
        return {"kl_resampled": float(sums.sum() / part.mask.sum())}


def stored_rows(rows: RowSums, *, is_first_pass: bool, moves: bool = False) -> dict[str, list[int] | list[float]]:
    """Select columns to store. Later passes store only columns that differ from the first.

    ``moves``: moving reference.
    """
    names = ["value", "logprob"]
    if moves and not is_first_pass:
        names.append("reference")
    columns: dict[str, list[int] | list[float]] = {"answers": rows.answers.tolist()}
    if is_first_pass:
        columns["tokens"] = rows.tokens.tolist()
        columns["places"] = rows.places.tolist()
        names += ["weight", "advantage", "uneven", "old", "reference", "kl_sampler", "kl_reference"]
    for name in names:
        values: Tensor = getattr(rows, name)
        is_needed = not bool(values.isnan().all())
        if name == "uneven":
            is_needed = bool(values.any())
        if is_needed:
            columns[name] = values.tolist()
    if not bool(rows.computed.all()):
        columns["computed"] = rows.computed.long().tolist()
    return columns


def _total(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values.double(), 0.0).sum(dim=1)


def _total_or_nan(values: Tensor | None, mask: Tensor) -> Tensor:
    if values is None:
        return torch.full((len(mask),), math.nan, dtype=torch.float64)
    return _total(values, mask)


def _at_first_rows(values: Tensor, rows_per_unit: int) -> Tensor:
    """Expand ``[U]`` to ``[B]``: value at each unit's first row, 0 elsewhere."""
    result = torch.zeros(len(values) * rows_per_unit, dtype=torch.float64)
    result[::rows_per_unit] = values.double()
    return result


def _mean_and_spread(values: Tensor | None, mask: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Compute each row's mean and largest deviation."""
    if values is None:
        nothing = torch.full((len(mask),), math.nan, dtype=torch.float64)
        return nothing, torch.zeros_like(nothing)
    means = _total(values, mask) / counts.clamp(min=1)
    distances = torch.where(mask, (values.double() - means[:, None]).abs(), 0.0).amax(dim=1)
    return means, torch.where(distances > 1e-6 * means.abs().clamp(min=1.0), distances, 0.0)


def _divergence(one: Tensor | None, other: Tensor | None, mask: Tensor) -> Tensor:
    """Sum k3 (Schulman 2020) over tokens sampled from the first distribution; NaN if missing."""
    if one is None or other is None:
        return torch.full((len(mask),), math.nan, dtype=torch.float64)
    r = (one.double() - other.double()).clamp(-LARGEST_RATIO, LARGEST_RATIO)
    return _total(torch.expm1(-r) + r, mask)


def _routing_of(captured: Captured) -> RoutingRecord | None:
    """Convert router sums; None without an auxiliary loss."""
    sums = captured.routing
    if sums is None:
        return None
    return RoutingRecord(sums.counts.cpu(), sums.probabilities.detach().cpu(), float(sums.num_tokens))
