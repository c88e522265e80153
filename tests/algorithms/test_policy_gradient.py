"""Policy-gradient objectives: values by hand, identities, float64 references, edges."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from closeness import approx
from posttrain import registry
from posttrain.algorithms.objectives import policy_gradient
from posttrain.algorithms.objectives.policy_gradient import grpo, reinforce
from posttrain.algorithms.objectives.surrogate import with_regularizers
from posttrain.types import Batch, Outputs

ALL = ("reinforce", "grpo", "gspo", "gspo_token", "cispo", "sapo", "gmpo")


def make_batch(mask: torch.Tensor, **fields: torch.Tensor) -> Batch:
    rows, width = mask.shape
    return Batch(
        tokens=torch.zeros(rows, width, dtype=torch.long),
        lengths=torch.full((rows,), width),
        mask=mask,
        group=torch.arange(rows),
        prefix=torch.zeros(rows, dtype=torch.long),
        fields=fields,
    )


def one_token(new: float, old: float, advantage: float, **fields: float) -> tuple[Outputs, Batch]:
    batch = make_batch(
        torch.tensor([[False, True]]),
        advantages=torch.tensor([[0.0, advantage]], dtype=torch.float64),
        old_logprobs=torch.tensor([[0.0, old]], dtype=torch.float64),
        **{k: torch.tensor([[0.0, v]], dtype=torch.float64) for k, v in fields.items()},
    )
    return Outputs(logprobs=torch.tensor([[0.0, new]], dtype=torch.float64, requires_grad=True)), batch


def test_reinforce_by_hand():
    outputs, batch = one_token(math.log(0.25), 0.0, 2.0)
    values = reinforce(outputs, batch).values
    assert values[0, 1].item() == approx(-2.0 * math.log(0.25), abs=1e-15)
    values.sum().backward()
    assert outputs.logprobs.grad[0].tolist() == [0.0, -2.0]


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient", "clipped"),
    [
        (1.1, 2.0, -2.2, -2.2, 0.0),  # inside the range: −ρA, and d(−ρA)/dlogπ = −ρA
        (1.5, 2.0, -2.56, 0.0, 1.0),  # above 1 + 0.28 with A > 0: clipped, no gradient
        (1.5, -2.0, 3.0, 3.0, 0.0),  # above, A < 0: the minimum is the unclipped term
        (0.5, 2.0, -1.0, -1.0, 0.0),  # below, A > 0: unclipped
        (0.5, -2.0, 1.6, 0.0, 1.0),  # below 1 − 0.2 with A < 0: clipped
    ],
)
def test_grpo_clip_by_hand(ratio: float, advantage: float, value: float, gradient: float, clipped: float):
    outputs, batch = one_token(math.log(ratio), 0.0, advantage)
    loss = grpo(outputs, batch, clip_low=0.2, clip_high=0.28)
    assert loss.values[0, 1].item() == approx(value, abs=1e-12)
    assert loss.metrics["clip_fraction"][0, 1].item() == clipped
    loss.values.sum().backward()
    assert outputs.logprobs.grad[0, 1].item() == approx(gradient, abs=1e-12)


def test_grpo_against_a_plain_python_reference():
    generator = torch.Generator().manual_seed(2)
    new, old, ref, adv = (torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(4))
    mask = torch.ones(3, 4, dtype=torch.bool)
    batch = make_batch(mask, advantages=adv, old_logprobs=old, ref_logprobs=ref)
    clipped = partial(grpo, clip_low=0.1, clip_high=0.3)
    got = with_regularizers(clipped, kl_coef=0.05)(Outputs(logprobs=new), batch).values
    for b in range(3):
        for t in range(4):
            rho = math.exp(new[b, t] - old[b, t])
            surrogate = min(rho * adv[b, t], min(max(rho, 0.9), 1.3) * adv[b, t])
            r = new[b, t] - ref[b, t]
            assert got[b, t].item() == approx(float(-surrogate + 0.05 * (math.exp(-r) - 1 + r)), abs=1e-12)


@pytest.mark.parametrize("name", ALL)
def test_entropy_coef_lowers_the_value_by_the_entropy(name: str):
    outputs, batch = one_token(-0.5, -0.5, 1.0)
    outputs.entropy = torch.tensor([[0.0, 1.5]], dtype=torch.float64, requires_grad=True)
    objective = getattr(policy_gradient, name)
    plain = objective(outputs, batch).values[0, 1].item()
    loss = with_regularizers(objective, entropy_coef=0.2)(outputs, batch)
    assert loss.values[0, 1].item() == approx(plain - 0.3, abs=1e-12)
    assert loss.metrics["entropy"].tolist() == [[0.0, 1.5]]
    assert not loss.metrics["entropy"].requires_grad
    assert torch.autograd.grad(loss.values[0, 1], outputs.entropy)[0].tolist() == [[0.0, -0.2]]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("name", ALL)
def test_every_objective_takes_the_same_kl(name: str, estimator: str):
    """The option adds β · k(r), with its own gradient, to every objective."""
    outputs, batch = one_token(math.log(0.5), math.log(0.4), 1.5, ref_logprobs=math.log(0.25))
    objective = getattr(policy_gradient, name)
    plain = objective(outputs, batch)
    with_kl = with_regularizers(objective, kl_coef=0.1, kl_estimator=estimator)(outputs, batch)
    r = math.log(2.0)
    value = {"k1": r, "k2": r * r / 2, "k3": 0.5 - 1 + r}[estimator]
    slope = {"k1": 1.0, "k2": r, "k3": 1 - 0.5}[estimator]  # dk/dr
    assert (with_kl.values - plain.values)[0, 1].item() == approx(0.1 * value, abs=1e-12)
    added = torch.autograd.grad((with_kl.values - plain.values)[0, 1], outputs.logprobs)[0][0, 1].item()
    assert added == approx(0.1 * slope, abs=1e-12)
    assert with_kl.metrics["kl_ref"][0, 1].item() == approx(0.5 - 1 + r, abs=1e-12)
    assert "kl_ref" not in plain.metrics
    assert registry.find("objective", name).traits["policy_term"] is True


def test_a_token_that_both_policies_find_impossible_is_not_hidden():
    """−inf − (−inf) has no value; it stays NaN, so that the loop refuses the update (both_impossible)."""
    outputs, batch = one_token(-math.inf, -math.inf, 1.0)
    assert math.isnan(grpo(outputs, batch).values[0, 1].item())
