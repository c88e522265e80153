"""Dual clip, DPPO, DRO, the weighted KL and DFT: values and gradients worked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from closeness import approx
from posttrain.algorithms.objectives import policy_gradient, supervised, surrogate
from posttrain.registry import entries
from posttrain.types import Batch, Loss, Outputs


def make_case(new: list[float], old: list[float], advantages: list[float]) -> tuple[Outputs, Batch]:
    """One row of tokens whose probabilities are given, after a prompt of one token."""
    width = 1 + len(new)
    mask = torch.ones(1, width, dtype=torch.bool)
    mask[0, 0] = False

    def row(values: list[float]) -> Tensor:
        return torch.tensor([[0.0, *values]], dtype=torch.float64)

    old_logprobs = row([math.log(p) for p in old])
    fields = {"old_logprobs": old_logprobs, "sampler_logprobs": old_logprobs, "advantages": row(advantages)}
    batch = Batch(
        tokens=torch.zeros(1, width, dtype=torch.long),
        lengths=torch.tensor([width]),
        mask=mask,
        group=torch.zeros(1, dtype=torch.long),
        prefix=torch.ones(1, dtype=torch.long),
        fields=fields,
    )
    return Outputs(logprobs=row([math.log(p) for p in new]).requires_grad_()), batch


def values_and_gradients(loss: Loss, outputs: Outputs) -> tuple[list[float], list[float]]:
    (gradient,) = torch.autograd.grad(loss.values.sum(), outputs.logprobs)
    return loss.values[0, 1:].tolist(), gradient[0, 1:].tolist()


def test_grpo_dual_clip_bounds_only_negative_advantages():
    # ratios 4 and 2.5 below and above c = 3, with both signs
    outputs, batch = make_case([0.4, 0.25, 0.4], [0.1, 0.1, 0.1], [-2.0, -2.0, 2.0])
    loss = policy_gradient.grpo(outputs, batch, clip_max=3.0)
    values, gradients = values_and_gradients(loss, outputs)
    assert values == approx([6.0, 5.0, -2.4], rel=1e-12)  # c·|A|; ρ·|A|; the upper clip 1.2 as before
    assert gradients == approx([0.0, 5.0, 0.0], rel=1e-12)
    assert loss.metrics["clip_fraction"][0, 1:].tolist() == [1.0, 0.0, 1.0]
    without = policy_gradient.grpo(outputs, batch)
    assert without.values[0, 1].item() == approx(8.0, rel=1e-12)


def test_dppo_tv_masks_by_the_difference_of_probabilities():
    # +0.2 and −0.2 in probability against thresholds of 0.15; +0.05 at a ratio of 6 stays
    outputs, batch = make_case([0.7, 0.3, 0.06, 0.7], [0.5, 0.5, 0.01, 0.5], [1.0, -1.0, 1.0, -1.0])
    loss = policy_gradient.dppo_tv(outputs, batch)
    values, gradients = values_and_gradients(loss, outputs)
    assert values == approx([0.0, 0.0, -6.0, 1.4], rel=1e-12)
    assert gradients == approx([0.0, 0.0, -6.0, 1.4], rel=1e-12)
    assert loss.metrics["clip_fraction"][0, 1:].tolist() == [1.0, 1.0, 0.0, 0.0]


def test_dppo_kl_masks_by_the_divergence_of_one_token():
    outputs, batch = make_case([0.7, 0.55, 0.3], [0.5, 0.5, 0.5], [1.0, 1.0, 1.0])
    far = 0.5 * math.log(0.5 / 0.7) + 0.5 * math.log(0.5 / 0.3)  # 0.0872, above 0.05
    near = 0.5 * math.log(0.5 / 0.55) + 0.5 * math.log(0.5 / 0.45)  # 0.0050
    assert near < 0.05 < far
    values, _ = values_and_gradients(policy_gradient.dppo_kl(outputs, batch), outputs)
    assert values == approx([0.0, -1.1, -0.6], rel=1e-12)  # the last is far, but moves against its advantage
    loose = policy_gradient.dppo_kl(outputs, batch, clip_high=1.001 * far)
    tight = policy_gradient.dppo_kl(outputs, batch, clip_high=0.999 * far)
    assert loose.values[0, 1].item() == approx(-1.4, rel=1e-12)
    assert tight.values[0, 1].item() == 0.0


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_dppo_reads_the_sampler_and_not_the_old_policy(name: str):
    outputs, batch = make_case([0.5], [0.4], [1.0])
    batch.fields["old_logprobs"] = torch.full_like(batch.fields["old_logprobs"], math.nan)
    loss = entries("objective")[name].function(outputs, batch)
    assert loss.values[0, 1].item() == approx(-1.25, rel=1e-12)


def test_dro_by_hand():
    outputs, batch = make_case([0.4, 0.2], [0.2, 0.2], [1.5, 0.0])
    loss = policy_gradient.dro(outputs, batch, beta=0.5)
    values, gradients = values_and_gradients(loss, outputs)
    doubled = math.log(2.0)
    assert values == approx([-1.5 * math.log(0.4) + 0.25 * doubled**2, 0.0], rel=1e-12)
    assert gradients == approx([-1.5 + 0.5 * doubled, 0.0], rel=1e-12)


def test_weighted_k3_has_the_gradient_of_the_kl_off_policy():
    """Expectation over tokens of μ, exactly: value KL(π‖π_ref) and its gradient, where plain k3 has neither."""
    generator = torch.Generator().manual_seed(0)
    logits, old, reference = torch.randn(3, 7, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    policy = logits.log_softmax(0)
    exact = (policy.exp() * (policy - reference.log_softmax(0))).sum()
    (wanted,) = torch.autograd.grad(exact, logits, retain_graph=True)
    sampled_from = old.log_softmax(0)
    found = {}
    for estimator in ("k3_weighted", "k3"):
        outputs, batch = make_case([1.0] * 7, [1.0] * 7, [0.0] * 7)
        zero = torch.zeros(1, dtype=torch.float64)
        batch.fields["old_logprobs"] = torch.cat([zero, sampled_from])[None]
        batch.fields["ref_logprobs"] = torch.cat([zero, reference.log_softmax(0)])[None]
        outputs = Outputs(logprobs=torch.cat([zero, policy])[None])
        nothing = Loss(torch.zeros(1, 8, dtype=torch.float64))
        loss = surrogate.add_regularizers(
            nothing, outputs, batch, kl_coef=1.0, kl_estimator=estimator, entropy_coef=0.0
        )
        mean = (sampled_from.exp() * loss.values[0, 1:]).sum()
        (gradient,) = torch.autograd.grad(mean, logits, retain_graph=True)
        found[estimator] = (mean.item(), gradient)
    assert found["k3_weighted"][0] == approx(exact.item(), rel=1e-12)
    assert (found["k3_weighted"][1] - wanted).abs().max().item() == approx(0.0, abs=1e-13)
    assert abs(found["k3"][0] - exact.item()) > 0.1
    assert (found["k3"][1] - wanted).abs().max().item() > 0.1


def test_dft_weighs_the_likelihood_by_the_probability():
    outputs, batch = make_case([0.5, 0.01], [1.0, 1.0], [0.0, 0.0])
    loss = supervised.dft(outputs, batch)
    values, gradients = values_and_gradients(loss, outputs)
    assert values == approx([0.5 * math.log(2.0), 0.01 * math.log(100.0)], rel=1e-12)
    assert gradients == approx([-0.5, -0.01], rel=1e-12)  # that of the probability itself
    assert loss.metrics["nll"][0, 1:].tolist() == approx([math.log(2.0), math.log(100.0)], rel=1e-12)
