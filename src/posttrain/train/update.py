"""One optimizer step: the loop owns the sum, so that nothing downstream divides."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from posttrain.errors import NonFiniteLoss, RunFailure, UsageError
from posttrain.models.forward import Forward
from posttrain.objectives.primitives import kl_k3
from posttrain.recipe import TrainSection
from posttrain.train.micro import split_rows
from posttrain.types import Batch, Loss, Outputs

Objective = Callable[[Outputs, Batch], Loss]


@dataclass(slots=True)
class MeanOverBatch:
    """Means over all trained tokens (or units) of an optimizer batch, in float64, across micro-batches."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, values: Tensor, mask: Tensor, count: float) -> None:
        """Add a metric of shape ``[B, T]`` over ``mask``, which holds ``count`` tokens; waits for no device."""
        kept = torch.where(mask, values.detach(), torch.zeros_like(values))
        total = kept.to(torch.float64).sum()
        self.sums[name] = self.sums[name] + total if name in self.sums else total
        self.counts[name] = self.counts.get(name, 0.0) + count

    def means(self) -> dict[str, float]:
        """All means; the one place that waits for the device."""
        return {name: float(total) / self.counts[name] for name, total in self.sums.items()}


def learning_rate(options: TrainSection, step: int) -> float:
    """The learning rate of update number ``step`` (1-based): linear warm-up, then the schedule.

    ``linear`` and ``cosine`` fall from ``lr`` to ``lr * min_lr_ratio`` at the last step.
    """
    if step <= options.warmup_steps:
        return options.lr * step / options.warmup_steps
    if options.schedule == "constant":
        return options.lr
    span = max(1, options.steps - options.warmup_steps)
    done = min(1.0, (step - options.warmup_steps) / span)
    shape = 1.0 - done if options.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return options.lr * (options.min_lr_ratio + (1.0 - options.min_lr_ratio) * shape)


def accumulate(
    forward: Forward,
    objective: Objective,
    aggregate: Callable[[Tensor], Tensor],
    batch: Batch,
    options: TrainSection,
    *,
    entropy: Any = "detached",
) -> tuple[float, dict[str, float]]:
    """Gradients of ``(values * weights).sum()`` over the whole batch, added to ``.grad``.

    Returns the loss and the means of all metrics. The gradient does not depend on how the batch is
    split into micro-batches, on row order or on padding.
    """
    batch.weights = aggregate(batch.mask)
    device = next(forward.model.parameters()).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    means = MeanOverBatch()
    slots = used = 0
    for rows in split_rows(batch, options.tokens_per_micro, options.rows_per_micro):
        planned = batch.select(rows)
        count = float(planned.mask.sum())
        part = planned.to(device)
        with adapter_dropout(forward.model):
            outputs = forward(planned, entropy)
            result = _apply(objective, outputs, part)
            assert part.weights is not None
            masked = torch.where(part.mask, result.values, torch.zeros_like(result.values))
            loss = (masked * part.weights.to(masked.dtype)).sum()
            with forward.backward_context():
                loss.backward()
        total += loss.detach().to(torch.float64)
        for name, values in result.metrics.items():
            means.add(name, values, part.mask, count)
        if outputs.entropy is not None and "entropy" not in result.metrics:
            means.add("entropy", outputs.entropy, part.mask, count)
        if "sampler_logprobs" in part.streams:  # samples are from the sampler μ: this estimates KL(μ‖π)
            mismatch = kl_k3(part.streams["sampler_logprobs"] - outputs.logprobs.detach())
            means.add("kl_sampler", mismatch, part.mask, count)
        slots += forward.last_slots
        used += forward.last_tokens
    return float(total), means.means() | {"padding_share": 1.0 - used / slots}


@contextmanager
def adapter_dropout(model: Any) -> Iterator[None]:
    """LoRA's dropout (``model.adapter.dropout``) is active inside the block, and nowhere else.

    Sampling and scoring see the model without it.
    """
    layers = [m for n, m in model.named_modules() if ".lora_dropout." in n and isinstance(m, torch.nn.Dropout)]
    try:
        for layer in layers:
            layer.train()
        yield
    finally:
        for layer in layers:
            layer.eval()


def _apply(objective: Objective, outputs: Outputs, batch: Batch) -> Loss:
    try:
        result: Any = objective(outputs, batch)
    except Exception as error:  # a user's function may raise anything; the cause is kept
        raise RunFailure(f"objective: the function raised {type(error).__name__}: {error}") from error
    if not isinstance(result, Loss):
        raise UsageError(f"objective: the function returned {type(result).__name__}; it must return a Loss")
    if result.values.shape != batch.mask.shape:
        raise UsageError(
            f"objective: the function returned values of shape {tuple(result.values.shape)} for a batch of shape "
            f"{tuple(batch.mask.shape)}. It must give one value per token and leave the sum to the loop"
        )
    return result


def apply_update(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[Tensor],
    lr: float,
    max_grad_norm: float | None,
    loss: float,
    step: int,
) -> float:
    """Clip by global norm, step, clear gradients. Returns the gradient norm before clipping.

    Raises:
        NonFiniteLoss: loss or norm is not finite; the weights are as before.
    """
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
    if not (math.isfinite(loss) and math.isfinite(norm)):
        optimizer.zero_grad(set_to_none=True)
        raise NonFiniteLoss(
            f"update {step}: loss {loss}, gradient norm {norm}. The weights were not changed. "
            "Usual causes: a learning rate that is too high, or a reward of enormous size"
        )
    if max_grad_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, torch.tensor(norm))
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_ratio", 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm
