"""Sample trained weights, gradients and optimizer moments before and after each update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Parameter

from posttrain.balances.of_updates import (
    OF_GRADIENTS,
    OF_STEPS,
    AdamShadow,
    along_directions,
    clip_scale,
    sampled,
    update_gap,
)
from posttrain.process_group import own_part
from posttrain.types import with_float64

NOISE = 1e-4  # relative to the update; moments reloaded on resume are rounded to fp32


def sample_evenly(tensors: Sequence[Tensor]) -> Tensor:
    """Take evenly spaced values from every tensor, float64 on CPU. Sharded tensors contribute local values only."""
    parts = []
    for tensor in tensors:
        parts.append(sampled(own_part(tensor.detach()).reshape(-1)))
    if not parts:
        return torch.zeros(0, dtype=torch.float64)
    if len({(part.dtype, part.device) for part in parts}) == 1:
        return with_float64(torch.cat(parts)).to("cpu", torch.float64)
    return torch.cat([with_float64(part).to("cpu", torch.float64) for part in parts])


@dataclass(slots=True)
class WatchedWeights:
    """Weight samples for one run. ``parameters``: parameters clipped by a shared norm, excluding a separate critic.

    With AdamW, each update is recomputed on the sample. Moments are read from the optimizer once (at start or resume)
    and tracked here afterwards.
    """

    parameters: Sequence[Parameter]
    optimizer: torch.optim.Optimizer
    max_grad_norm: float | None
    decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    _shadow: AdamShadow | None = None
    _before: Tensor = field(default_factory=lambda: torch.zeros(0))
    _gradients: Tensor = field(default_factory=lambda: torch.zeros(0))
    _present: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    _sizes: Tensor | None = None

    def num_leftover(self) -> int:
        """Count tensors with nonzero gradients before gradients are computed."""
        return sum(bool(sample_evenly([p.grad]).any()) for p in self.parameters if p.grad is not None)

    def before_update(self) -> None:
        """Sample weights and gradients (summed over processes, not yet clipped)."""
        self._before = sample_evenly(self.parameters)
        if not isinstance(self.optimizer, torch.optim.AdamW):
            return
        if self._shadow is None:
            self._shadow = self._read_moments()
        if self._sizes is None:
            self._sizes = torch.tensor([len(sample_evenly([p])) for p in self.parameters])
        present = torch.tensor([p.grad is not None for p in self.parameters])
        self._present = present.repeat_interleave(self._sizes)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        self._gradients = torch.zeros(len(self._before), dtype=torch.float64)
        self._gradients[self._present] = sample_evenly(gradients)

    def after_update(self, lr: float, norm: float) -> dict[str, float]:
        """Compute ``moved`` (|Δw| / |w|) and ``step_size`` (root mean square step) on the sample.

        AdamW also gives ``update_gap`` (``balances.of_updates.update_gap``), plus projections of gradients and steps
        onto a few directions, so audits can compare them with recomputed values.
        """
        after = sample_evenly(self.parameters)
        steps = after - self._before
        moving = steps[steps != 0]
        measured = {"moved": 0.0, "step_size": 0.0}
        if len(moving):
            measured["step_size"] = float(moving.square().mean().sqrt())
            measured["moved"] = float(steps.norm() / self._before.norm().clamp(min=1e-30))
        if self._shadow is not None:
            measured |= along_directions(OF_GRADIENTS, self._gradients) | along_directions(OF_STEPS, steps)
            scale = clip_scale(norm, self.max_grad_norm)
            expected = self._shadow.step(self._before, self._gradients, self._present, lr, scale)
            gap = update_gap(self._before, after, expected)
            if gap > NOISE:
                measured["update_gap"] = gap
            else:
                measured["update_gap"] = 0.0
        return measured

    def forget(self) -> None:
        """Reload moments after optimizer state was replaced."""
        self._shadow = None

    def _read_moments(self) -> AdamShadow:
        """Read moments from the optimizer. Only matrices decay."""
        firsts: list[Tensor] = []
        seconds: list[Tensor] = []
        counts: list[Tensor] = []
        decays: list[Tensor] = []
        rates: list[Tensor] = []
        ratios: Mapping[int, float] = {
            id(p): group.get("lr_ratio", 1.0) for group in self.optimizer.param_groups for p in group["params"]
        }
        for parameter in self.parameters:
            state = self.optimizer.state.get(parameter, {})
            zeros = torch.zeros_like(sample_evenly([parameter]))
            firsts.append(zeros)
            seconds.append(zeros)
            if state:
                firsts[-1] = sample_evenly([state["exp_avg"]])
                seconds[-1] = sample_evenly([state["exp_avg_sq"]])
            counts.append(torch.full_like(zeros, float(state.get("step", 0.0))))
            decays.append(zeros)
            if parameter.ndim >= 2:
                decays[-1] = torch.full_like(zeros, self.decay)
            rates.append(torch.full_like(zeros, ratios[id(parameter)]))
        return AdamShadow(
            torch.cat(firsts),
            torch.cat(seconds),
            torch.cat(counts),
            torch.cat(decays),
            torch.cat(rates),
            self.betas,
            self.eps,
        )
