"""Balances of the optimizer's step: the learning rate, leftover gradients, and by how much weights move."""

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

LEAST_STEP, LARGEST_STEP = 1e-3, 30.0  # root mean square of a step of a weight, in learning rates
NUM_EACH = 64  # sampled numbers of a tensor
NUM_DIRECTIONS = 4
NUM_STEPS = "steps"  # of the run, as a record of an update has it
OF_GRADIENTS, OF_STEPS = "gradient_along", "step_along"


def read_update(record: StepRecord) -> Iterator[Reading]:
    """Yield the balances of an optimizer step; those of numbers that the record has."""
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
    """Weights move by a sane share of the learning rate."""
    gap = math.inf
    if steps > 0:
        gap = max(LEAST_STEP / steps, steps / LARGEST_STEP)
    expected = f"weights that move by {LEAST_STEP:g} to {LARGEST_STEP:g} learning rates"
    return Reading("moved", gap, 1.0, expected, f"{steps:.2g}")


def optimizer_of(record: StepRecord) -> OptimizerFacts | None:
    """Return the optimizer of an update, whose course of the learning rate is of as many steps as the run had then.

    A run that is resumed may become longer, and its facts are those of the last start.
    """
    optimizer = record.facts.optimizer
    if optimizer is None or NUM_STEPS not in record.measured:
        return optimizer
    return replace(optimizer, steps=int(record.measured[NUM_STEPS]))


def scheduled_rate(optimizer: OptimizerFacts, step: int) -> float:
    """Return the learning rate of update number ``step`` (from 1), as the recipe says."""
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
    """AdamW over a sample of S weights, in float64: moments of its own, fed with the gradients of each update.

    decay, rates ``[S]``: weight decay, and multiples of the learning rate. count ``[S]``: updates of each.
    """

    first: Tensor
    second: Tensor
    count: Tensor
    decay: Tensor
    rates: Tensor
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def step(self, weights: Tensor, gradients: Tensor, present: Tensor, lr: float, scale: float) -> Tensor:
        """Return the weights after an update (Loshchilov & Hutter 2019); ``scale``: of gradients that are clipped.

        ``present``: where there is a gradient; the others are left as they are.
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
    """Return by what gradients of this norm are multiplied."""
    if largest is None:
        return 1.0
    return min(1.0, largest / (norm + 1e-6))


def update_gap(before: Tensor, found: Tensor, expected: Tensor) -> float:
    """Return how far found and expected weights are apart, next to the size of the step; fp32 rounds each weight."""
    rounded = before.abs() * 2.0**-22
    difference = ((found - expected).abs() - rounded).clamp(min=0.0)
    size = (expected - before).square().sum().sqrt()
    if float(size) == 0.0:
        return float(difference.sum() > 0)
    return float(difference.square().sum().sqrt() / size)


def sampled(flat: Tensor) -> Tensor:
    """Return the numbers of a flat tensor that a record is made of: about ``NUM_EACH``, evenly spaced."""
    return flat[:: max(1, flat.numel() // NUM_EACH)]


def along_directions(name: str, sample: Tensor) -> dict[str, float]:
    """Return the products of S sampled numbers with a few directions of ±1, each divided by √S, by name.

    Two samples that differ by a vector d differ in such a number by the size of d / √S, whatever d is (Johnson &
    Lindenstrauss 1984): a few numbers tell whether a gradient is the one that was recorded.
    """
    scale = max(1, len(sample)) ** 0.5
    products: dict[str, float] = {}
    for number in range(NUM_DIRECTIONS):
        products[f"{name}_{number}"] = float((_signs(len(sample), number) * sample).sum()) / scale
    return products


@lru_cache(maxsize=2 * NUM_DIRECTIONS)  # each update of a run has samples of one size
def _signs(count: int, number: int) -> Tensor:
    """``float64 [count]`` of ±1 that look random; whole numbers mixed as in MurmurHash3 (Appleby 2011)."""
    mixed = torch.arange(1, count + 1) * 0x9E3779B1 + number * 0x85EBCA6B
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        mixed = mixed & 0xFFFFFFFF
        mixed = (mixed ^ (mixed >> 16)) * factor
    mixed = mixed & 0xFFFFFFFF
    return ((mixed ^ (mixed >> 13)) & 1).double() * 2.0 - 1.0


def distance_along(name: str, one: Mapping[str, float], other: Mapping[str, float]) -> float | None:
    """Return the root mean square of the differences along all directions; None where one has none."""
    keys = [f"{name}_{number}" for number in range(NUM_DIRECTIONS)]
    if not all(key in one and key in other for key in keys):
        return None
    return math.sqrt(math.fsum((one[key] - other[key]) ** 2 for key in keys) / len(keys))
