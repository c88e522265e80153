"""KL estimators against the exact KL of a categorical distribution, and log-ratios."""

from __future__ import annotations

import math

import pytest
import torch

from closeness import allclose, approx
from posttrain.algorithms.objectives.primitives import (
    KL_ESTIMATORS,
    MAX_LOG_RATIO,
    is_clamped,
    kl_k1,
    kl_k2,
    kl_k3,
    log_ratio,
)


def test_values_by_hand():
    r = torch.tensor([[math.log(2.0), -math.log(2.0), 0.0]], dtype=torch.float64)
    assert kl_k1(r).tolist() == r.tolist()
    assert kl_k2(r)[0].tolist() == approx([math.log(2) ** 2 / 2] * 2 + [0.0], abs=1e-15)
    assert kl_k3(r)[0].tolist() == approx([0.5 - 1 + math.log(2), 2 - 1 - math.log(2), 0.0], abs=1e-15)


def test_monte_carlo_against_the_exact_kl():
    """400 000 samples; every mean is within 4 standard errors of what it estimates (false alarm: 1 in 10 000).

    k1 and k3 estimate KL(π‖π_ref) itself, k2 its own expectation, which differs by its bias. Of a wrong
    direction (samples from π, but r of the other sign) k1 and k3 are hundreds of standard errors away.
    """
    policy = torch.tensor([0.45, 0.25, 0.2, 0.1], dtype=torch.float64)
    reference = torch.tensor([0.3, 0.3, 0.15, 0.25], dtype=torch.float64)
    r = (policy / reference).log()
    exact = float((policy * r).sum())
    drawn = torch.multinomial(policy, 400_000, replacement=True, generator=torch.Generator().manual_seed(7))

    def estimate(name: str, sign: float) -> tuple[float, float]:
        samples = KL_ESTIMATORS[name](sign * r[None])[0][drawn]
        return float(samples.mean()), float(samples.std()) / math.sqrt(len(drawn))

    expected = {"k1": exact, "k2": float((policy * r.square() / 2).sum()), "k3": exact}
    assert expected["k2"] - exact == approx(-0.0114, abs=1e-4)  # the bias of k2, of a KL of 0.1028
    for name, target in expected.items():
        mean, standard_error = estimate(name, 1.0)
        assert standard_error < 1e-3
        assert mean == approx(target, abs=4 * standard_error), name
    for name in ("k1", "k3"):
        wrong, standard_error = estimate(name, -1.0)
        assert abs(wrong - exact) > 20 * standard_error, name


def test_k2_bias_vanishes_near_the_reference():
    """The bias of k2 is of third order in r, the KL itself of second."""
    reference = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    relative = []
    for scale in (0.2, 0.02):
        policy = (reference.log() + scale * torch.tensor([1.0, -1.0, 0.5])).softmax(0)
        r = policy.log() - reference.log()
        relative.append(abs(float((policy * kl_k2(r[None])[0]).sum() / (policy * r).sum()) - 1))
    assert relative[1] < 0.01
    assert relative[0] / relative[1] == approx(10, rel=0.3)


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_expected_gradients_in_the_loss(name: str):
    """On the policy's own samples: k1's is 0, k2's that of KL(π‖π_ref), k3's that of KL(π_ref‖π)."""
    logits = torch.tensor([0.3, -0.2, 0.5, 1.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.3, 0.4, 0.1], dtype=torch.float64)
    logp = logits.log_softmax(0)
    wanted = {
        "k1": 0.0 * logits.sum(),
        "k2": (logp.exp() * (logp - reference.log())).sum(),
        "k3": (reference * (reference.log() - logp)).sum(),
    }[name]
    exact = torch.autograd.grad(wanted, logits, retain_graph=True)[0]
    surrogate = (logp.exp().detach() * KL_ESTIMATORS[name]((logp - reference.log())[None])[0]).sum()
    assert allclose(torch.autograd.grad(surrogate, logits)[0], exact, atol=1e-14)


def test_log_ratio_is_clamped_and_masked():
    new = torch.tensor([[5.0, -1.0, 0.0, -2.0]])
    old = torch.tensor([[-90.0, -1.5, -math.inf, -math.inf]])
    mask = torch.tensor([[False, True, True, True]])
    assert log_ratio(new, old, mask).tolist() == [[0.0, 0.5, MAX_LOG_RATIO, MAX_LOG_RATIO]]
    above = torch.tensor([[MAX_LOG_RATIO + 1.0, -MAX_LOG_RATIO, MAX_LOG_RATIO, -MAX_LOG_RATIO - 1.0]])
    assert is_clamped(above, torch.zeros(1, 4), mask).tolist() == [[0.0, 0.0, 0.0, 1.0]]
