"""Single optimizer step: weighted-sum gradients, metrics, clipping and update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from posttrain import registry
from posttrain.errors import NonFiniteLoss, RunFailure, UsageError
from posttrain.models.forward.actor_critic import ActorCritic
from posttrain.models.forward.forward import Forward
from posttrain.models.forward.micro import MicroBatching
from posttrain.models.forward.predictions import Entropy
from posttrain.process_group import SINGLE_PROCESS, ProcessGroup, whole
from posttrain.recipes.sections import TrainSection
from posttrain.training.idle_rows import UNSCORED, IdleRows, check_vanishing, split_idle_rows
from posttrain.training.mismatch import derive_sample_size, measure_ratios
from posttrain.training.parts.balancing import AUXILIARY_LOSS, BalancedBatch, RouterBalancing
from posttrain.training.records.capture import NO_CAPTURE, Capture, kept_values
from posttrain.types import COUNTED, LEFT_OUT, UNMASKED, Batch, Loss, Outputs, with_float64

if TYPE_CHECKING:
    from posttrain.models.forward.noise import EmbeddingNoise

Objective = Callable[[Outputs, Batch], Loss]
Derive = Callable[[dict[str, float]], dict[str, float]]
Level = Literal["token", "row", "pair"]


@dataclass(frozen=True, slots=True)
class Method:
    """Loss definition: objective values weighted by an aggregation.

    forward: policy forward pass, including a head if any. level: unit for objective values. entropy: compute entropy,
    and with gradients or not. derive: adds metrics derived from means. vanishes: fields whose zeros make values 0
    (see ``idle_rows``); None trains every row. name: objective name in the recipe. balancing: router balancing loss.
    noise: embedding noise for this update.
    """

    forward: Forward | ActorCritic
    objective: Objective
    aggregate: Callable[[Tensor], Tensor]
    level: Level = "token"
    entropy: Entropy = "detached"
    derive: Derive = dict
    vanishes: tuple[str, ...] | None = None
    name: str = ""
    balancing: RouterBalancing | None = None
    noise: EmbeddingNoise | None = None

    def balancing_loss(self, metrics: Mapping[str, float]) -> float:
        """Compute the router loss contribution from an update's metrics."""
        if self.balancing is None:
            return 0.0
        return self.balancing.coefficient * metrics[AUXILIARY_LOSS]


@dataclass(slots=True)
class MeanOverBatch:
    """Accumulates means over trained tokens (or units) across micro-batches, in float64."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, values: Tensor, mask: Tensor | None, count: float) -> None:
        """Add a metric over ``mask`` (``count`` tokens) or ``count`` units, without device synchronization."""
        kept = values.detach()
        if mask is not None:
            kept = torch.where(mask, kept, torch.zeros_like(kept))
        total = with_float64(kept).to(torch.float64).sum()
        if name in self.sums:
            total = self.sums[name] + total
        self.sums[name] = total
        self.counts[name] = self.counts.get(name, 0.0) + count

    def means(self, process_group: ProcessGroup = SINGLE_PROCESS, derive: Derive = dict) -> dict[str, float]:
        """Compute means across processes, adding derived metrics (``derive``)."""
        mine = {name: (float(total), self.counts[name]) for name, total in self.sums.items()}
        parts = process_group.gather([mine], "metrics")
        names = dict.fromkeys(name for part in parts for name in part)
        means: dict[str, float] = {}
        for name in names:
            known = [part[name] for part in parts if name in part]
            total = reduce(add, (its_total for its_total, _ in known))
            count = reduce(add, (its_count for _, its_count in known))
            means[name] = total / count
        if not means:
            return means
        return derive(derive_sample_size(means))


def noise_of(options: TrainSection, step: int) -> EmbeddingNoise | None:
    """Build embedding noise for an update; None without ``train.neftune_noise_alpha``."""
    if options.neftune_noise_alpha is None:
        return None
    from posttrain.models.forward.noise import EmbeddingNoise

    return EmbeddingNoise(options.neftune_noise_alpha, options.seed, step)


def learning_rate(options: TrainSection, step: int) -> float:
    """Compute the learning rate for update ``step`` (1-based): linear warmup, then schedule.

    ``linear`` and ``cosine`` decay from ``lr`` in the first update after warmup to ``lr * min_lr_ratio``, reached one
    update after the last, so no update uses a rate of 0.
    """
    if step <= options.warmup_steps:
        return options.lr * step / options.warmup_steps
    if options.schedule == "constant":
        return options.lr
    assert options.steps is not None, "a run knows how many steps its passes come to"
    span = max(1, options.steps - options.warmup_steps)
    done = min(1.0, (step - 1 - options.warmup_steps) / span)
    shape = 1.0 - done
    if options.schedule == "cosine":
        shape = 0.5 * (1.0 + math.cos(math.pi * done))
    return options.lr * (options.min_lr_ratio + (1.0 - options.min_lr_ratio) * shape)


def accumulate(
    method: Method,
    batch: Batch,
    options: TrainSection,
    *,
    learns: bool = True,
    process_group: ProcessGroup = SINGLE_PROCESS,
    idle_rows: IdleRows = "train",
    capture: Capture = NO_CAPTURE,
) -> tuple[float, dict[str, float]]:
    """Accumulate gradients for ``(values * weights).sum()`` over the whole batch into ``.grad``.

    Each process accumulates gradients for its micro-batches; ``add_gradients`` sums them. Returned loss and metrics
    cover the whole batch. Gradients do not depend on micro-batch splits, row order or padding. A ``correction`` field
    multiplies token objective values. With ``learns`` False, only metrics are computed, without gradients or dropout.
    ``idle_rows``: treatment for rows without gradient (``idle_rows.py``); if skipped, metrics cover only computed
    rows. ``capture`` receives results from each micro-batch.
    """
    batch.weights = _weigh(method.aggregate, batch, method.level)
    micro_batches = MicroBatching(options.micro_batch_tokens, options.micro_batch_rows, process_group)
    if not learns:
        method, idle_rows = replace(method, entropy="none", balancing=None, noise=None), "train"
    if method.balancing is None:
        return _accumulate(method, batch, options, micro_batches, idle_rows, capture, learns=learns)
    with method.balancing.over(batch, micro_batches) as balanced:
        loss, metrics = _accumulate(method, batch, options, micro_batches, idle_rows, capture, balanced=balanced)
    capture.note_routing(balanced.whole)
    found = balanced.metrics()
    return loss + method.balancing.coefficient * found[AUXILIARY_LOSS], metrics | found


def _accumulate(
    method: Method,
    batch: Batch,
    options: TrainSection,
    micro_batches: MicroBatching,
    idle_rows: IdleRows,
    capture: Capture,
    *,
    learns: bool = True,
    balanced: BalancedBatch | None = None,
) -> tuple[float, dict[str, float]]:
    """Accumulate over the given micro-batches; the returned loss excludes router losses."""
    forward, level = method.forward, method.level
    process_group = micro_batches.process_group
    device = next(forward.model.parameters()).device
    total = with_float64(torch.zeros((), device=device)).to(torch.float64)
    means = MeanOverBatch()
    slots = used = 0.0
    num_computed = 0
    is_checked = idle_rows != "measure"
    for chosen, places, is_trained in _divide(method, batch, idle_rows):
        num_computed += chosen.num_rows
        has_gradients = learns and is_trained
        for micro in micro_batches.over(chosen, forward):
            part = micro.part.to(device)
            own_places = [places[row] for row in micro.rows]
            with _learning(method, options, own_places, micro.part) if has_gradients else torch.no_grad():
                outputs = forward(micro.part, method.entropy, "teacher_ids" in batch.fields)
                capture.watch(outputs)
                result = _apply(method.objective, outputs, part, level)
                values = kept_values(result, part, level)
                loss = (values * _own_weights(part, values, micro.counts)).sum()
                if has_gradients:
                    whole = loss
                    if balanced is not None:
                        whole = balanced.add_to(loss, counts=micro.counts)
                    with forward.backward_context():
                        whole.backward()
            if not is_checked:
                check_vanishing(method.name, method.objective, method.vanishes or (), outputs, part)
                is_checked = True
            if not micro.counts:
                continue
            capture.add(own_places, outputs, values)
            total += with_float64(loss.detach()).to(torch.float64)
            _measure(means, result, outputs, part, level, float(micro.part.mask.sum()))
            slots += forward.last_slots
            used += forward.last_tokens
    whole_loss, slots, used = _add_up((float(total), float(slots), float(used)), process_group)
    metrics = means.means(process_group, method.derive) | {"padding_share": 1.0 - used / slots}
    metrics |= _measure_masks(batch)
    if idle_rows != "train" and (method.vanishes or num_computed < batch.num_rows):
        metrics["computed_rows"] = float(num_computed)
    return whole_loss, metrics


def _own_weights(part: Batch, values: Tensor, counts: bool) -> Tensor:
    """Convert micro-batch weights to the value dtype; zeros if the micro-batch does not count."""
    assert part.weights is not None
    if not counts:
        return torch.zeros_like(values)
    return part.weights.to(values.dtype)


def _add_up(mine: tuple[float, float, float], process_group: ProcessGroup) -> tuple[float, float, float]:
    """Sum over all processes."""
    first, second, third = zip(*process_group.gather([mine], "losses"), strict=True)
    return sum(first), sum(second), sum(third)


def _divide(method: Method, batch: Batch, idle_rows: IdleRows) -> Iterator[tuple[Batch, list[int], bool]]:
    """Yield (rows, indices, True) for gradients, then (rows, indices, False) for metrics only.

    Rows without computed log-probabilities are not measured. Rows that count only in denominators are skipped.
    """
    everywhere = list(range(batch.num_rows))
    if LEFT_OUT in batch.fields:
        everywhere = torch.where(batch.fields[LEFT_OUT] == 0)[0].tolist()
        present = batch.select(everywhere)
        del present.fields[LEFT_OUT]
        for part, places, is_trained in _divide(method, present, idle_rows):
            yield part, [everywhere[place] for place in places], is_trained
        return
    if method.vanishes is None or idle_rows == "train":
        yield batch, everywhere, True
        return
    trained, idle = split_idle_rows(batch, method.vanishes)
    if idle:
        yield batch.select(trained), trained, True
    else:
        yield batch, everywhere, True
    if idle_rows == "skip":
        return
    if UNSCORED in batch.fields:
        unscored = batch.fields[UNSCORED].tolist()
        idle = [row for row in idle if not unscored[row]]
    if idle:
        yield batch.select(idle), idle, False


def add_gradients(parameters: Sequence[Tensor], process_group: ProcessGroup) -> None:
    """Sum ``.grad`` over all processes; stays None if no process has a gradient."""
    if process_group.size == 1:
        return
    present = torch.tensor([float(p.grad is not None) for p in parameters])
    process_group.add([present], "presence of gradients")
    learnt = [p for p, count in zip(parameters, present.tolist(), strict=True) if count]
    for parameter in learnt:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    process_group.add([p.grad for p in learnt if p.grad is not None], "gradients")


def same_weights(parameters: Sequence[Tensor], process_group: ProcessGroup, when: str) -> None:
    """Check that all processes hold the same weights as rank 0 (see ``same_digest``)."""
    if process_group.size > 1:
        same_digest(weights_digest(parameters), process_group, when)


def same_digest(digest: list[int], process_group: ProcessGroup, when: str) -> None:
    """Check that all processes have the same digest as rank 0.

    Raises:
        RunFailure: with the first mismatched rank.
    """
    digests = process_group.gather([digest], "digests of the weights")
    for rank, other in enumerate(digests):
        if other != digests[0]:
            raise RunFailure(
                f"{when}: rank {rank} of {process_group.size} has different weights than rank 0, so sums would be "
                "wrong. All processes must load the same files and run on identical machines"
            )


def weights_digest(parameters: Sequence[Tensor]) -> list[int]:
    """Sum each tensor's bits as integers, which makes the result independent of summation order."""
    sums = []
    for parameter in parameters:
        flat = parameter.detach().reshape(-1)
        bits = flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
        sums.append(int(bits.sum(dtype=torch.int64)))
    return sums


def _weigh(aggregate: Callable[[Tensor], Tensor], batch: Batch, level: Level) -> Tensor:
    """Compute weights over the whole optimizer batch: one per token or per unit.

    Tokens excluded from the denominator by a mask get weight 0.
    """
    mask = batch.unit_mask
    expected = mask.shape[:1]
    if level == "token":
        mask = batch.mask
        expected = mask.shape
        if COUNTED in batch.fields:
            mask = mask & (batch.fields[COUNTED] > 0)
            if not bool(mask.any()):
                return torch.zeros(expected, dtype=torch.float64)
    weights: Tensor = registry.call("aggregate", aggregate, mask)
    if getattr(weights, "shape", None) != expected:
        raise UsageError(
            f"aggregate: the function returned {registry.describe_result(weights)} for a mask of shape "
            f"{tuple(mask.shape)}; it must return one weight per {level}"
        )
    return weights


def _measure(
    means: MeanOverBatch, result: Loss, outputs: Outputs, part: Batch, level: Level, num_tokens: float
) -> None:
    """Add micro-batch metrics: objective metrics and common ones."""
    over_tokens = (part.mask, num_tokens)
    over = over_tokens if level == "token" else (None, float(part.num_rows // part.rows_per_unit))
    for name, values in result.metrics.items():
        means.add(name, values, *over)
    if "ratio" in result.metrics:
        means.add("ratio_distance", (result.metrics["ratio"] - 1.0).abs(), *over)
    if outputs.entropy is not None and "entropy" not in result.metrics:
        means.add("entropy", outputs.entropy, *over_tokens)
    if outputs.rerouted is not None:
        means.add("routing_mismatch", outputs.rerouted, *over_tokens)
    for name, values in measure_ratios(outputs, part, level == "token").items():
        means.add(name, values, *over_tokens)


def _measure_masks(batch: Batch) -> dict[str, float]:
    """Compute ``masked_tokens`` over all rows, skipped ones too: a row that is masked as a whole is idle."""
    trained = batch.trained_mask
    if UNMASKED not in batch.fields or not bool(trained.any()):
        return {}
    return {"masked_tokens": 1.0 - float(batch.fields[UNMASKED][trained].double().mean())}


@contextmanager
def _learning(method: Method, options: TrainSection, places: Sequence[int], part: Batch) -> Iterator[None]:
    """Enable adapter dropout, noise and recomputation inside the block only; sampling and scoring never use them.

    ``places``: row indices of ``part`` in the optimizer batch.
    """
    forward = method.forward
    named = forward.model.named_modules()
    dropouts = [m for n, m in named if ".lora_dropout." in n and isinstance(m, torch.nn.Dropout)]
    recomputing: AbstractContextManager[None] = nullcontext()
    if options.gradient_checkpointing:
        from posttrain.models.forward.gradient_checkpointing import gradient_checkpointing

        models = [forward.model]
        if isinstance(forward, ActorCritic):
            models = [forward.policy.model, forward.critic.model]
        recomputing = gradient_checkpointing(models)
    try:
        for layer in dropouts:
            layer.train()
        if method.noise is not None and isinstance(forward, Forward):
            from posttrain.models.forward.noise import NoisyRows

            forward.noise = NoisyRows(method.noise, places, part.lengths.tolist())
        with recomputing:
            yield
    finally:
        if isinstance(forward, Forward):
            forward.noise = None
        for layer in dropouts:
            layer.eval()


def _apply(objective: Objective, outputs: Outputs, batch: Batch, level: Level) -> Loss:
    with registry.failures_of("objective"):
        result = objective(outputs, batch)
    if not isinstance(result, Loss):
        raise UsageError(f"objective: the function returned {type(result).__name__}; it must return a Loss")
    expected: tuple[int, ...] = (batch.num_rows // batch.rows_per_unit,)
    if level == "token":
        expected = tuple(batch.mask.shape)
    if tuple(result.values.shape) != expected:
        raise UsageError(
            f"objective: the function returned values of shape {tuple(result.values.shape)} for a batch of shape "
            f"{tuple(batch.mask.shape)}. It must return one value per {level} without summing"
        )
    return result


def apply_update(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[Tensor],
    lr: float,
    max_grad_norm: float | None,
    loss: float,
    step: int,
    apart: Sequence[Tensor] = (),
) -> float:
    """Clip by global norm, step, and clear gradients. Returns the gradient norm before clipping.

    ``apart``: independent parameters (a separate critic), clipped by a separate norm, so critic errors do not shorten
    policy steps.

    Raises:
        NonFiniteLoss: loss or norm is not finite. Weights are unchanged.
    """
    gradients = ([p.grad for p in group if p.grad is not None] for group in (parameters, apart))
    norm, norm_apart = (float(whole(torch.nn.utils.get_total_norm(of))) for of in gradients)
    if not (math.isfinite(loss) and math.isfinite(norm) and math.isfinite(norm_apart)):
        optimizer.zero_grad(set_to_none=True)
        critic = f", of the critic {norm_apart}" if apart else ""
        raise NonFiniteLoss(
            f"update {step}: loss {loss}, gradient norm {norm}{critic}. The weights were not changed. "
            "Usual causes: learning rate too high, or huge rewards"
        )
    if max_grad_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, torch.tensor(norm))
        if apart:
            torch.nn.utils.clip_grads_with_norm_(apart, max_grad_norm, torch.tensor(norm_apart))
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_ratio", 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm
