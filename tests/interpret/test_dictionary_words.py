"""The kinds of dictionaries, worked by hand."""

from __future__ import annotations

import pytest
import torch

from posttrain.interpret.dictionaries.dictionary import batchtopk, jumprelu, keep_largest, l1, topk

PRE = torch.tensor([[3.0, -1.0, 0.5, 2.0], [1.0, 4.0, -2.0, 0.25]])
ZERO = torch.zeros(4)


def test_l1() -> None:
    codes = l1(PRE, ZERO, 1.0, coefficient=0.1)
    assert codes.features.tolist() == [[3, 0, 0.5, 2], [1, 4, 0, 0.25]]
    assert float(codes.penalty or 0) == pytest.approx(0.1 * (5.5 + 5.25) / 2)
    assert codes.threshold is None
    assert float(l1(PRE, ZERO, 0.01, coefficient=0.1, warmup=0.05).penalty or 0) == pytest.approx(0.1 * 5.375 / 5)
    assert float(l1(PRE, ZERO, 0.0, coefficient=0.1, warmup=0.0).penalty or 0) == pytest.approx(0.1 * 5.375)


def test_topk_keeps_so_many_of_each_row() -> None:
    assert topk(PRE, ZERO, 1.0, k=2).features.tolist() == [[3, 0, 0, 2], [1, 4, 0, 0]]
    assert keep_largest(PRE, 9).tolist() == torch.relu(PRE).tolist()


def test_batchtopk_keeps_so_many_of_the_batch() -> None:
    codes = batchtopk(PRE, ZERO, 1.0, k=1.5, sample=1.0)  # 3 of 8: 4, 3, 2; the next is 1
    assert codes.features.tolist() == [[3, 0, 0, 2], [0, 4, 0, 0]]
    assert codes.threshold is not None
    assert codes.threshold.tolist() == [1, 1, 1, 1]
    later = batchtopk(PRE, torch.full((4,), 2.0), 1.0, k=1.5, sample=1.0, average=0.25)
    assert later.threshold is not None
    assert later.threshold.tolist() == [1.75] * 4
    none = batchtopk(-PRE.abs(), ZERO, 1.0, k=1, sample=1.0)
    assert none.features.count_nonzero() == 0
    assert none.threshold is not None
    assert none.threshold.tolist() == [0] * 4


def test_the_threshold_of_a_sample_is_that_of_the_batch_but_for_noise() -> None:
    pre = torch.randn(4096, 256, generator=torch.Generator().manual_seed(0))
    sampled, exact = batchtopk(pre, ZERO[:1], 1.0, k=8), batchtopk(pre, ZERO[:1], 1.0, k=8, sample=1.0)
    assert int(exact.features.count_nonzero()) == 4096 * 8
    assert int(sampled.features.count_nonzero()) == pytest.approx(4096 * 8, rel=0.06)


def test_jumprelu_and_the_derivatives_that_are_estimated() -> None:
    pre = PRE.clone().requires_grad_()
    theta = torch.tensor([1.0, 0.5, 0.45, 1.9], requires_grad=True)
    codes = jumprelu(pre, theta, 1.0, coefficient=0.5, target=None, bandwidth=0.4, warmup=0.0)
    assert codes.features.tolist() == [[3, 0, 0.5, 2], [0, 4, 0, 0]]  # 1 is not above 1
    assert codes.penalty is not None
    assert codes.penalty.item() == 0.5 * 4 / 2
    weights = torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]])
    on_pre, on_theta = torch.autograd.grad((codes.features * weights).sum(), [pre, theta], retain_graph=True)
    assert on_pre.tolist() == [[1, 0, 3, 4], [0, 6, 0, 0]]
    # within 0.2 of its threshold: row 1 of feature 0 (1 beside 1), row 0 of features 2 (0.5) and 3 (2)
    torch.testing.assert_close(on_theta, torch.tensor([-5 * 1.0, 0.0, -3 * 0.45, -4 * 1.9]) / 0.4)
    (on_theta,) = torch.autograd.grad(codes.penalty, [theta])
    torch.testing.assert_close(on_theta, torch.tensor([-1.0, 0.0, -1.0, -1.0]) * 0.5 / (0.4 * 2))


def test_jumprelu_aims_at_an_l0() -> None:
    codes = jumprelu(PRE, torch.full((4,), 0.3), 1.0, coefficient=2.0, target=10.0)
    assert float(codes.penalty or 0) == pytest.approx(2 * (2.5 / 10 - 1) ** 2)
