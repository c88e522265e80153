"""PPO: the surrogate, the value loss and its clip, what the loop needs for the explained variance."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from closeness import approx
from posttrain.algorithms.objectives.policy_gradient import grpo, ppo
from posttrain.algorithms.objectives.surrogate import with_regularizers
from posttrain.types import Batch, Outputs

F64 = torch.float64


def make(new: list[float], old: list[float], advantages: list[float], values: list[float], old_values: list[float],
         returns: list[float]):  # fmt: skip
    """One row, trained from position 1 on."""

    def row(x: list[float]) -> torch.Tensor:
        return torch.tensor([[0.0, *x]], dtype=F64)

    mask = torch.ones(1, len(new) + 1, dtype=torch.bool)
    mask[0, 0] = False
    fields = {
        "advantages": row(advantages),
        "old_logprobs": row(old),
        "old_values": row(old_values),
        "returns": row(returns),
    }
    zeros = torch.zeros(1, dtype=torch.long)
    batch = Batch(zeros[:, None].expand(mask.shape), zeros + mask.shape[1], mask, zeros, zeros, fields)
    return Outputs(logprobs=row(new).requires_grad_(), scores=row(values).requires_grad_()), batch


def only_value(value: float, old: float, target: float, **options: float | None):
    outputs, batch = make([-1.0], [-1.0], [0.0], [value], [old], [target])
    loss = ppo(outputs, batch, value_weight=1.0, **options)
    gradient = torch.autograd.grad(loss.values[0, 1], outputs.scores)[0][0, 1].item()
    return loss.values[0, 1].item(), gradient, loss.metrics


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "gradient", "clipped"),
    [
        (1.1, 1.0, 2.0, 0.5 * 0.81, -0.9, 0.0),  # inside the range: the plain squared error
        (1.5, 1.0, 2.0, 0.5 * 0.64, 0.0, 1.0),  # moved towards R by more than 0.2: held at 1.2, no gradient
        (0.5, 1.0, 2.0, 0.5 * 2.25, -1.5, 0.0),  # moved away: the plain error is the worse one, full gradient
        (0.5, 1.0, 0.0, 0.5 * 0.64, 0.0, 1.0),  # the same from above: held at 0.8
        (2.0, 1.0, 0.0, 0.5 * 4.0, 2.0, 0.0),
        (1.2, 1.0, 2.0, 0.5 * 0.64, -0.8, 0.0),  # at the border both are equal: the whole gradient, not half
        (1.0, 1.0, 1.0, 0.0, 0.0, 0.0),
    ],
)
def test_value_loss_by_hand(value, old, target, loss, gradient, clipped):
    got, slope, metrics = only_value(value, old, target)
    assert got == approx(loss, abs=1e-12)
    assert slope == approx(gradient, abs=1e-12)
    assert metrics["value_loss"][0, 1].item() == approx(loss, abs=1e-12)
    assert metrics["value_clip_fraction"][0, 1].item() == clipped


def test_without_a_clip_it_is_half_the_squared_error():
    assert only_value(5.0, 1.0, 2.0, value_clip=None)[:2] == approx((4.5, 3.0))
    assert only_value(5.0, 1.0, 2.0, value_clip=100.0)[:2] == approx((4.5, 3.0))
    assert only_value(1.5, 1.0, 2.0, value_clip=None)[2]["value_clip_fraction"][0, 1].item() == 0.0


def test_the_policy_part_is_the_clipped_surrogate():
    """Without the value loss, value, gradient and metrics are those of grpo with the same options."""
    generator = torch.Generator().manual_seed(0)
    new, old, advantages, values, targets = (torch.randn(6, generator=generator).tolist() for _ in range(5))
    outputs, batch = make(new, old, advantages, values, values, targets)
    outputs.entropy = torch.rand(1, 7, generator=generator, dtype=F64)
    batch.fields["ref_logprobs"] = torch.randn(1, 7, generator=generator, dtype=F64)
    options = {"clip_low": 0.1, "clip_high": 0.3}
    objectives = (partial(ppo, value_weight=0.0, **options), partial(grpo, **options))
    regularizers = {"kl_coef": 0.05, "kl_estimator": "k2", "entropy_coef": 0.01}
    ours, theirs = (with_regularizers(each, **regularizers)(outputs, batch) for each in objectives)
    assert torch.equal(ours.values, theirs.values)
    for name, metric in theirs.metrics.items():
        assert torch.equal(ours.metrics[name], metric)
    gradients = [torch.autograd.grad(loss.values.sum(), outputs.logprobs)[0] for loss in (ours, theirs)]
    assert torch.equal(*gradients)
    assert float(gradients[0].abs().max()) > 0.1


def test_against_a_plain_python_reference():
    generator = torch.Generator().manual_seed(4)
    new, old, advantages, values, before, targets = (torch.randn(40, generator=generator).tolist() for _ in range(6))
    outputs, batch = make(new, old, advantages, values, before, targets)
    loss = ppo(outputs, batch, value_weight=0.7, value_clip=0.3)
    shares = []
    for t in range(40):
        rho = math.exp(new[t] - old[t])
        surrogate = -min(rho * advantages[t], min(max(rho, 0.8), 1.2) * advantages[t])
        held = min(max(values[t], before[t] - 0.3), before[t] + 0.3)
        plain, clipped = (values[t] - targets[t]) ** 2, (held - targets[t]) ** 2
        shares.append(float(clipped > plain + 1e-12))
        assert loss.values[0, t + 1].item() == approx(surrogate + 0.7 * 0.5 * max(plain, clipped), rel=1e-12, abs=1e-12)
    assert loss.metrics["value_clip_fraction"][0, 1:].tolist() == shares
    assert 0 < sum(shares) < 40


def test_metrics_give_the_explained_variance():
    """1 − (E[e²] − E[e]²) / Var(R) from means alone, with the current values: a perfect fit up to a shift is 1."""
    targets = [1.0, 3.0, 2.0, 6.0]
    for values, expected in (([2.0, 4.0, 3.0, 7.0], 1.0), ([5.0] * 4, 0.0), ([0.5, 1.5, 1.0, 3.0], 0.75)):
        outputs, batch = make([-1.0] * 4, [-1.0] * 4, [0.0] * 4, values, [0.0] * 4, targets)
        means = {name: metric[0, 1:].mean().item() for name, metric in ppo(outputs, batch).metrics.items()}
        spread = means["value_error_squared"] - means["value_error"] ** 2
        variance = means["returns_squared"] - means["returns"] ** 2
        assert 1 - spread / variance == approx(expected, abs=1e-12)
        assert means["value_error"] == approx(sum(targets) / 4 - sum(values) / 4)


@pytest.mark.parametrize(("new", "old"), [(0.0, -1e6), (-1e6, 0.0), (-0.1, -math.inf)])
def test_finite_at_absurd_ratios_and_values(new: float, old: float):
    for advantage in (1.0, -1.0, 0.0):
        outputs, batch = make([new], [old], [advantage], [1e6], [-1e6], [1.0])
        value = ppo(outputs, batch).values[0, 1]
        assert math.isfinite(value.item())
        for gradient in torch.autograd.grad(value, (outputs.logprobs, outputs.scores)):
            assert torch.isfinite(gradient).all()
