"""GRPO, GSPO, CISPO, SAPO, GMPO: values by hand, identities, references."""

from __future__ import annotations

import math

import pytest
import torch

from closeness import allclose, approx
from posttrain.algorithms.objectives.policy_gradient import cispo, gmpo, grpo, gspo, gspo_token, reinforce, sapo
from posttrain.types import Batch, Loss, Outputs

ALL = {"grpo": grpo, "gspo": gspo, "gspo_token": gspo_token, "cispo": cispo, "sapo": sapo, "gmpo": gmpo}


def make(new: list[list[float]], old: list[list[float]], advantages: list[float], lengths: list[int] | None = None):
    """Rows of log-probabilities from position 1 on; position 0 is never trained."""
    rows, width = len(new), len(new[0]) + 1
    pad = torch.zeros(rows, 1, dtype=torch.float64)
    mask = torch.ones(rows, width, dtype=torch.bool)
    mask[:, 0] = False
    for b, n in enumerate(lengths or [width - 1] * rows):
        mask[b, n + 1 :] = False
    logprobs = torch.cat([pad, torch.tensor(new, dtype=torch.float64)], 1).requires_grad_()
    fields = {
        "advantages": torch.tensor(advantages, dtype=torch.float64)[:, None].expand(rows, width),
        "old_logprobs": torch.cat([pad, torch.tensor(old, dtype=torch.float64)], 1),
    }
    zeros = torch.zeros(rows, dtype=torch.long)
    batch = Batch(zeros[:, None].expand(rows, width), zeros + width, mask, zeros, zeros, fields)
    return Outputs(logprobs=logprobs), batch


def sequence_mean_gradient(outputs: Outputs, batch: Batch, loss: Loss) -> torch.Tensor:
    weights = batch.mask / batch.mask.sum(1, keepdim=True) / len(batch.mask)
    total = torch.where(batch.mask, loss.values * weights, torch.zeros_like(loss.values)).sum()
    return torch.autograd.grad(total, outputs.logprobs)[0]


def random_case(seed: int, width: int = 4, scale: float = 0.3):
    generator = torch.Generator().manual_seed(seed)
    old = torch.randn(4, width, generator=generator, dtype=torch.float64) - 2
    new = old + scale * torch.randn(4, width, generator=generator, dtype=torch.float64)
    return make(new.tolist(), old.tolist(), [1.0, -1.0, 0.7, -0.2], [width, width - 1, width, 1])


@pytest.mark.parametrize("name", ALL)
def test_on_policy_gradient_is_reinforce(name: str):
    """At ρ = 1 every surrogate has REINFORCE's gradient (sequence variants: under the mean over a sequence)."""
    outputs, batch = random_case(0, scale=0.0)
    expected = sequence_mean_gradient(outputs, batch, reinforce(outputs, batch))
    got = sequence_mean_gradient(outputs, batch, ALL[name](outputs, batch))
    assert allclose(got, expected, atol=1e-12)


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
def test_gspo_on_one_token_is_grpo(name: str):
    outputs, batch = random_case(1, width=1)
    batch.mask[:, 1] = True
    ours = ALL[name](outputs, batch, clip_low=0.2, clip_high=0.2)
    theirs = grpo(outputs, batch, clip_low=0.2, clip_high=0.2)
    assert allclose(ours.values[:, 1], theirs.values[:, 1], atol=1e-12)
    gradients = [sequence_mean_gradient(outputs, batch, loss) for loss in (ours, theirs)]
    assert allclose(*gradients, atol=1e-12)


def test_gspo_by_hand():
    outputs, batch = make([[0.4, 0.0]], [[0.0, 0.0]], [2.0])
    ratio = math.exp(0.2)
    assert gspo(outputs, batch, clip_high=0.5).values[0, 1].item() == approx(-2 * ratio, abs=1e-12)
    loss = gspo(outputs, batch)  # the published range clips it
    assert loss.values[0, 1].item() == approx(-2 * 1.0004, abs=1e-12)
    assert loss.metrics["clip_fraction"][0, 1:].tolist() == [1.0, 1.0]
    assert sequence_mean_gradient(outputs, batch, loss).abs().max() == 0.0
    less, batch_of_less = make([[-0.4, 0.0]], [[0.0, 0.0]], [-2.0])
    assert gspo(less, batch_of_less).values[0, 1].item() == approx(2 * 0.9997, abs=1e-12)
    gradient = sequence_mean_gradient(outputs, batch, gspo(outputs, batch, clip_high=0.5))
    assert gradient[0, 1:].tolist() == approx([-ratio, -ratio], abs=1e-12)  # −A · s / |y| with A = 2


def test_gspo_token_equals_gspo_for_one_advantage_a_sequence():
    for seed in range(5):
        outputs, batch = random_case(seed, scale=0.02)
        a, b = (
            gspo(outputs, batch, clip_low=0.01, clip_high=0.01),
            gspo_token(outputs, batch, clip_low=0.01, clip_high=0.01),
        )
        assert allclose(a.values[batch.mask], b.values[batch.mask], atol=1e-12)
        gradients = [sequence_mean_gradient(outputs, batch, loss) for loss in (a, b)]
        assert allclose(*gradients, atol=1e-12)


def test_cispo_by_hand():
    outputs, batch = make([[math.log(0.9), math.log(0.9)]], [[math.log(0.1), math.log(0.8)]], [1.5])
    loss = cispo(outputs, batch, clip_high=2.0)
    expected = [-3.0 * 1.5 * math.log(0.9), -1.125 * 1.5 * math.log(0.9)]  # ρ = 9 is capped at 3; 1.125 is not
    assert loss.values[0, 1:].tolist() == approx(expected, abs=1e-12)
    assert loss.metrics["clip_fraction"][0, 1:].tolist() == [1.0, 0.0]
    gradient = torch.autograd.grad(loss.values[0, 1:].sum(), outputs.logprobs)[0]
    assert gradient[0, 1:].tolist() == approx([-4.5, -1.6875], abs=1e-12)  # clipped tokens keep their gradient


def test_sapo_by_hand():
    outputs, batch = make([[math.log(2.0)], [math.log(2.0)]], [[0.0], [0.0]], [1.0, -1.0])
    values = sapo(outputs, batch, tau_positive=1.0, tau_negative=2.0).values[:, 1]
    assert values.tolist() == approx([-4 / (1 + math.exp(-1)), 2 / (1 + math.exp(-2))], abs=1e-12)


def test_gmpo_by_hand():
    outputs, batch = make([[1.0, 0.2], [-1.0, 0.2], [-1.0, 0.2]], [[0.0, 0.0]] * 3, [1.0, 1.0, -1.0])
    loss = gmpo(outputs, batch)
    values = loss.values[:, 1]
    # A > 0 caps from above: (0.4 + 0.2)/2 and (−1 + 0.2)/2; A < 0 from below: (−0.4 + 0.2)/2
    assert values.tolist() == approx([-math.exp(0.3), -math.exp(-0.4), math.exp(-0.1)], abs=1e-12)
    assert loss.metrics["clip_fraction"][:, 1:].tolist() == [[1.0, 0.0], [0.0, 0.0], [1.0, 0.0]]


@pytest.mark.parametrize("name", ["grpo", "gspo", "sapo", "gmpo"])
def test_gradient_by_finite_differences(name: str):
    """The others stop gradients, so theirs is not the derivative of their value; identities hold them."""
    outputs, batch = random_case(3)
    point = outputs.logprobs.detach()
    options = {"clip_low": 0.5, "clip_high": 0.5} if name in ("grpo", "gspo") else {}

    def total(logprobs: torch.Tensor) -> torch.Tensor:
        return ALL[name](Outputs(logprobs=logprobs), batch, **options).values[batch.mask].sum()

    assert torch.autograd.gradcheck(total, (point.requires_grad_(),), eps=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("new", "old"), [(0.0, -1e6), (-1e6, 0.0), (-0.1, -math.inf)])
def test_finite_at_absurd_ratios(name: str, new: float, old: float):
    outputs, batch = make([[new, -1.0]], [[old, -1.0]], [1.0])
    loss = ALL[name](outputs, batch)
    assert torch.isfinite(loss.values[batch.mask]).all()
    assert torch.isfinite(sequence_mean_gradient(outputs, batch, loss)).all()
