"""KTO: limits, values by hand, a plain Python reference, finite differences, broken rows."""

from __future__ import annotations

import math

import pytest
import torch
from preference_cases import make_rows, random_rows, sigmoid

from closeness import approx
from posttrain.algorithms.objectives.unpaired import kto
from posttrain.types import Batch, Outputs


def one_row(ratio: float, label: float, baseline: float = 0.0) -> tuple[Outputs, Batch]:
    return make_rows([[-5.0 + ratio]], [[-5.0]], labels=[label], kl_baseline=[baseline])


def random_case(seed: int, outside: float = 0.0) -> tuple[Outputs, Batch]:
    policy, reference = random_rows(seed, num_rows=6, scale=2.0)
    labels = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    return make_rows(policy, reference, outside=outside, labels=labels, kl_baseline=[0.7] * 6)


@pytest.mark.parametrize(("nats", "accuracy"), [(0.02, 1.0), (-0.02, 0.0), (0.002, 0.5), (-0.002, 0.5)])
def test_a_tie_is_one_in_log_probabilities(nats: float, accuracy: float):
    """An answer of 2,500 nats: a millionth is 0.0025, whatever β makes of it."""
    outputs, batch = make_rows([[-2500.0 + nats]], [[-2500.0]], labels=[1.0], kl_baseline=[0.0])
    assert kto(outputs, batch, beta=0.1).metrics["answer_accuracy"].tolist() == [accuracy]


@pytest.mark.parametrize(("label", "weight"), [(1.0, 2.0), (0.0, 3.0)])
def test_limits(label: float, weight: float):
    """Far on its own side of the baseline a row costs nothing, far on the other its weight, at it half."""
    sign = 1.0 if label == 1.0 else -1.0
    for ratio, expected in ((1e4 * sign, 0.0), (-1e4 * sign, weight), (0.5, weight / 2)):
        outputs, batch = one_row(ratio, label, baseline=0.5)
        loss = kto(outputs, batch, desirable_weight=2.0, undesirable_weight=3.0)
        assert loss.values.item() == approx(expected, abs=1e-12)
    assert loss.metrics["answer_accuracy"].item() == 0.5


def test_by_hand():
    """β(r − z₀) = 0.5 · (ln 9 · 2 + 1 − 1) = ln 9."""
    ratio = 2 * math.log(9.0) + 1.0
    for label, expected in ((1.0, 0.1), (0.0, 0.9)):
        outputs, batch = one_row(ratio, label, baseline=1.0)
        loss = kto(outputs, batch, beta=0.5)
        assert loss.values.item() == approx(expected, abs=1e-14)
        loss.values.sum().backward()
        slope = -0.5 * 0.09 if label == 1.0 else 0.5 * 0.09  # ∓β σ(1 − σ)
        assert outputs.logprobs.grad.sum().item() == approx(slope, abs=1e-14)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_against_plain_python(seed: int):
    policy, reference = random_rows(seed, num_rows=6, scale=2.0)
    outputs, batch = random_case(seed)
    loss = kto(outputs, batch, beta=0.8, desirable_weight=1.3, undesirable_weight=0.4)
    labels = batch.field("labels").tolist()
    for b, label in enumerate(labels):
        reward = 0.8 * (sum(policy[b]) - sum(reference[b]))
        gain = reward - 0.8 * 0.7
        value = 1.3 - 1.3 * sigmoid(gain) if label == 1.0 else 0.4 - 0.4 * sigmoid(-gain)
        got = {name: metric[b].item() for name, metric in loss.metrics.items()}
        assert loss.values[b].item() == approx(value, abs=1e-12)
        assert got["implicit_reward"] == approx(reward, abs=1e-12)
        assert got["logprob"] == approx(sum(policy[b]), abs=1e-12)
        assert got["answer_accuracy"] == float((gain > 0) == (label == 1.0))
        assert got["kl_baseline"] == 0.7
        assert got["desirable"] == label
    assert all(m.shape == (6,) and not m.requires_grad for m in loss.metrics.values())


def test_parts_give_the_mean_reward_of_each_kind():
    """Averaged over any micro-batches, the parts divided by the shares are the means per kind."""
    outputs, batch = random_case(4)
    metrics = kto(outputs, batch).metrics
    mean = {name: float(metric.mean()) for name, metric in metrics.items()}
    is_desirable = batch.field("labels") == 1.0
    assert mean["desirable_reward_part"] / mean["desirable"] == approx(
        float(metrics["implicit_reward"][is_desirable].mean()), abs=1e-14
    )
    assert mean["undesirable_reward_part"] / (1 - mean["desirable"]) == approx(
        float(metrics["implicit_reward"][~is_desirable].mean()), abs=1e-14
    )


def test_gradient_by_finite_differences_and_no_gradient_into_the_baseline():
    outputs, batch = random_case(5)
    batch.fields["kl_baseline"] = batch.fields["kl_baseline"].clone()

    def values(logprobs: torch.Tensor) -> torch.Tensor:
        return kto(Outputs(logprobs=logprobs), batch, beta=0.6, desirable_weight=1.5).values

    assert torch.autograd.gradcheck(values, (outputs.logprobs.detach().requires_grad_(),), eps=1e-6, atol=1e-8)


def test_what_stands_outside_the_mask_does_not_count():
    results = []
    for outside in (0.0, math.nan, -math.inf):
        outputs, batch = random_case(6, outside)
        loss = kto(outputs, batch)
        loss.values.sum().backward()
        results.append((loss.values, outputs.logprobs.grad))
        assert (outputs.logprobs.grad[~batch.mask] == 0.0).all()
    for values, gradient in results[1:]:
        assert torch.equal(values, results[0][0])
        assert torch.equal(gradient, results[0][1])


def test_a_soft_label_mixes_both_losses():
    hard = [kto(*one_row(0.9, label, 0.2)).values.item() for label in (1.0, 0.0)]
    assert kto(*one_row(0.9, 0.25, 0.2)).values.item() == approx(0.25 * hard[0] + 0.75 * hard[1], abs=1e-15)


@pytest.mark.parametrize("whose", ["policy", "reference", "both"])
@pytest.mark.parametrize("label", [0.0, 1.0])
def test_an_impossible_token_is_refused(whose: str, label: float):
    """The loss is bounded, so an infinite ratio would pass silently; it is NaN instead."""
    policy = [[-1.0, -math.inf if whose != "reference" else -1.0], [-1.0]]
    reference = [[-1.0, -math.inf if whose != "policy" else -1.0], [-1.0]]
    values = kto(*make_rows(policy, reference, labels=[label, 1.0], kl_baseline=[0.0, 0.0])).values
    assert math.isnan(values[0].item())
    assert values[1].item() == 0.5


@pytest.mark.parametrize("ratio", [1e6, -1e6])
@pytest.mark.parametrize("label", [0.0, 1.0])
def test_huge_ratios_are_finite(ratio: float, label: float):
    outputs, batch = one_row(ratio, label, baseline=3.0)
    values = kto(outputs, batch).values
    values.sum().backward()
    assert 0.0 <= values.item() <= 1.0
    assert outputs.logprobs.grad.isfinite().all()
