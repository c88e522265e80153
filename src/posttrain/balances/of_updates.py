"""Balances of the optimizer step: learning rate, leftover gradients, weight change."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from posttrain.balances.findings import Reading, compared, tally
from posttrain.balances.limits import UPDATE_LIMIT
from posttrain.balances.record import OptimizerFacts, StepRecord

LEAST_STEP, LARGEST_STEP = 1e-3, 30.0  # root mean square step per weight, in learning rates
NUM_EACH = 64  # sampled numbers of a tensor
NUM_DIRECTIONS = 4
NUM_STEPS = "steps"  # of the run, as recorded with each update
OF_GRADIENTS, OF_STEPS = "gradient_along", "step_along"


def read_update(record: StepRecord) -> Iterator[Reading]:
    """Yield balances of an optimizer step, as far as recorded."""
    optimizer, measured = optimizer_of(record), record.measured
    if "leftover" in measured:
        expected = "no gradient left of the update before"
        yield tally("leftover", measured["leftover"], expected, f"{measured['leftover']:g} tensors with one")
    if optimizer is None or "lr" not in measured:
        return
    rate = scheduled_rate(optimizer, record.step)
    yield compared("lr", measured["lr"], rate, rate, 1e-9)
    if "update_gap" in measured:
        found = f"one that differs by {measured['update_gap']:.2e} of its size"
        yield Reading("update", _size(measured["update_gap"]), UPDATE_LIMIT, "the step of its formula", found)
    if "step_size" in measured and rate > 0 and measured.get("grad_norm", 0.0) > 0:
        yield _moved(measured["step_size"] / rate)


def _size(gap: float) -> float:
    if math.isnan(gap):
        return math.inf
    return gap


def _moved(steps: float) -> Reading:
    """Weights change by a plausible multiple of the learning rate."""
    gap = math.inf
    if steps > 0:
        gap = max(LEAST_STEP / steps, steps / LARGEST_STEP)
    expected = f"weights that move by {LEAST_STEP:g} to {LARGEST_STEP:g} learning rates"
    return Reading("moved", gap, 1.0, expected, f"{steps:.2g}")


def optimizer_of(record: StepRecord) -> OptimizerFacts | None:
    """Optimizer settings for an update, with the schedule length in effect at that time.

    Resumed runs may become longer, and stored facts describe the latest start.
    """
    optimizer = record.facts.optimizer
    if optimizer is None or NUM_STEPS not in record.measured:
        return optimizer
    return replace(optimizer, steps=int(record.measured[NUM_STEPS]))


def scheduled_rate(optimizer: OptimizerFacts, step: int) -> float:
    """Learning rate for update number ``step`` (from 1), according to the recipe."""
    if step <= optimizer.warmup_steps:
        return optimizer.lr * step / optimizer.warmup_steps
    if optimizer.schedule == "constant" or optimizer.steps is None:
        return optimizer.lr
    left = max(1, optimizer.steps - optimizer.warmup_steps)
    done = min(1.0, (step - optimizer.warmup_steps - 1) / left)
    height = 1.0 - done
    if optimizer.schedule == "cosine":
        height = (1.0 + math.cos(math.pi * done)) / 2
    return optimizer.lr * (optimizer.min_lr_ratio + (1.0 - optimizer.min_lr_ratio) * height)


@dataclass(slots=True)
class AdamShadow:
    """AdamW over a sample of S weights, in float64, with independent moments fed by recorded gradients.

    decay, rates ``[S]``: weight decay, and learning rate multipliers. count ``[S]``: updates so far.
    """

    first: Tensor
    second: Tensor
    count: Tensor
    decay: Tensor
    rates: Tensor
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def step(self, weights: Tensor, gradients: Tensor, present: Tensor, lr: float, scale: float) -> Tensor:
        """Apply an update (Loshchilov & Hutter 2019). ``scale``: gradient clipping factor.

        ``present``: which weights have a gradient; others stay unchanged.
        """
        one, two = self.betas
        g = gradients * scale
        self.count = self.count + present
        self.first = torch.where(present, one * self.first + (1.0 - one) * g, self.first)
        self.second = torch.where(present, two * self.second + (1.0 - two) * g * g, self.second)
        times = self.count.clamp(min=1)
        mean = self.first / (1.0 - one**times)
        spread = (self.second / (1.0 - two**times)).sqrt()
        moved = lr * self.rates * (self.decay * weights + mean / (spread + self.eps))
        return torch.where(present, weights - moved, weights)


def clip_scale(norm: float, largest: float | None) -> float:
    """Clipping factor for gradients of this norm."""
    if largest is None:
        return 1.0
    return min(1.0, largest / (norm + 1e-6))


def update_gap(before: Tensor, found: Tensor, expected: Tensor) -> float:
    """Distance between found and expected weights, relative to step size, allowing for fp32 rounding."""
    rounded = before.abs() * 2.0**-22
    difference = ((found - expected).abs() - rounded).clamp(min=0.0)
    size = (expected - before).square().sum().sqrt()
    if float(size) == 0.0:
        return float(difference.sum() > 0)
    return float(difference.square().sum().sqrt() / size)


def sampled(flat: Tensor) -> Tensor:
    """Subsample a flat tensor for the record: about ``NUM_EACH`` evenly spaced entries."""
    return flat[:: max(1, flat.numel() // NUM_EACH)]


def along_directions(name: str, sample: Tensor) -> dict[str, float]:
    """Project S sampled numbers onto a few ±1 directions, each divided by √S, by name.

    If two samples differ by a vector d, each projection differs by about d / √S (Johnson & Lindenstrauss 1984): a few
    numbers suffice to tell whether a gradient matches the record.
    """
    scale = max(1, len(sample)) ** 0.5
    products: dict[str, float] = {}
    for number in range(NUM_DIRECTIONS):
        products[f"{name}_{number}"] = float((_signs(len(sample), number) * sample).sum()) / scale
    return products


@lru_cache(maxsize=2 * NUM_DIRECTIONS)  # samples have constant size within a run
def _signs(count: int, number: int) -> Tensor:
    """Pseudo-random ±1 vector, ``float64 [count]``, using MurmurHash3's integer mixing (Appleby 2011)."""
    mixed = torch.arange(1, count + 1) * 0x9E3779B1 + number * 0x85EBCA6B
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        mixed = mixed & 0xFFFFFFFF
        mixed = (mixed ^ (mixed >> 16)) * factor
    mixed = mixed & 0xFFFFFFFF
    return ((mixed ^ (mixed >> 13)) & 1).double() * 2.0 - 1.0


def distance_along(name: str, one: Mapping[str, float], other: Mapping[str, float]) -> float | None:
    """Root mean square difference over all directions. None if one is missing."""
    keys = [f"{name}_{number}" for number in range(NUM_DIRECTIONS)]
    if not all(key in one and key in other for key in keys):
        return None
    return math.sqrt(math.fsum((one[key] - other[key]) ** 2 for key in keys) / len(keys))
