"""KL estimators against the exact KL of a categorical distribution, and log-ratios."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.objectives.primitives import KL_ESTIMATORS, MAX_LOG_RATIO, kl_k1, kl_k2, kl_k3, log_ratio


def test_values_by_hand():
    r = torch.tensor([[math.log(2.0), -math.log(2.0), 0.0]], dtype=torch.float64)
    assert kl_k1(r).tolist() == r.tolist()
    assert kl_k2(r)[0].tolist() == pytest.approx([math.log(2) ** 2 / 2] * 2 + [0.0], abs=1e-15)
    assert kl_k3(r)[0].tolist() == pytest.approx([0.5 - 1 + math.log(2), 2 - 1 - math.log(2), 0.0], abs=1e-15)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_unbiased_in_the_right_direction(name: str):
    policy = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    exact = float((policy * (policy / reference).log()).sum())
    reverse = float((reference * (reference / policy).log()).sum())
    r = (policy / reference).log()[None]
    expectation = float((policy * KL_ESTIMATORS[name](r)[0]).sum())  # exact expectation under the policy
    assert expectation == pytest.approx(exact, abs=1e-12)
    assert abs(expectation - reverse) > 0.05

    drawn = torch.multinomial(policy, 200_000, replacement=True, generator=torch.Generator().manual_seed(0))
    estimates = KL_ESTIMATORS[name](r)[0][drawn]
    standard_error = float(estimates.std() / math.sqrt(len(drawn)))
    assert float(estimates.mean()) == pytest.approx(exact, abs=4 * standard_error)


def test_k2_gradient_is_the_gradient_of_the_kl():
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    logp = logits.log_softmax(0)
    exact = torch.autograd.grad((logp.exp() * (logp - reference.log())).sum(), logits, retain_graph=True)[0]
    estimate = torch.autograd.grad((logp.exp().detach() * kl_k2((logp - reference.log())[None])[0]).sum(), logits)[0]
    assert torch.allclose(exact, estimate, atol=1e-12)


def test_log_ratio_is_clamped_and_masked():
    new = torch.tensor([[5.0, -1.0, 0.0, -2.0]])
    old = torch.tensor([[-90.0, -1.5, -math.inf, -math.inf]])
    mask = torch.tensor([[False, True, True, True]])
    assert log_ratio(new, old, mask).tolist() == [[0.0, 0.5, MAX_LOG_RATIO, MAX_LOG_RATIO]]
