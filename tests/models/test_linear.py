"""Linear layers through oneDNN: the same values and gradients as F.linear."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from closeness import allclose
from posttrain.models.forward import linear
from posttrain.models.forward.linear import ONEDNN_LEAST, OneDnnLinear, fast_linear

pytestmark = pytest.mark.skipif(linear.ONEDNN_LINEAR is None, reason="this torch has no oneDNN linear")


@pytest.fixture(autouse=True)
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "IS_FASTER", True)


@pytest.mark.parametrize(
    ("vendor", "capability", "has_mkl", "is_faster"),
    [
        ("AuthenticAMD", "AVX512", True, True),
        ("AuthenticAMD", "AVX2", True, False),
        ("GenuineIntel", "AVX512", True, False),
        (None, "DEFAULT", False, True),
    ],
)
def test_the_library_is_a_function_of_the_kind_of_cpu(
    monkeypatch: pytest.MonkeyPatch, vendor: str | None, capability: str, has_mkl: bool, is_faster: bool
):
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: has_mkl)
    assert linear._is_faster(vendor, capability) == is_faster
    weight = torch.randn(64, 64)
    assert linear.takes_onednn(weight)
    monkeypatch.setattr(linear, "IS_FASTER", False)
    assert not linear.takes_onednn(weight)


def operands(rows: tuple[int, ...], out: int, inputs: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(*rows, inputs), (out, inputs), (out,), (*rows, out)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("rows", [(300,), (4, 75)])
@pytest.mark.parametrize(("out", "inputs"), [(64, 128), (128, 64), (96, 96)])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_against_float64(rows: tuple[int, ...], out: int, inputs: int, bias: bool):
    x, weight, offset, gradient = operands(rows, out, inputs)
    exact = [t.double().requires_grad_() for t in (x, weight, offset)]
    F.linear(exact[0], exact[1], exact[2] if bias else None).backward(gradient.double())
    ours = [t.requires_grad_() for t in (x, weight, offset)]
    result = OneDnnLinear.apply(ours[0], ours[1], ours[2] if bias else None)
    assert allclose(result.double(), F.linear(exact[0], exact[1], exact[2] if bias else None), atol=1e-4)
    result.backward(gradient)
    for got, expected in list(zip(ours, exact, strict=True))[: 3 if bias else 2]:
        assert got.grad.is_contiguous()
        assert allclose(got.grad.double(), expected.grad, atol=1e-3)


def test_only_large_fp32_products_take_it(monkeypatch: pytest.MonkeyPatch):
    taken = []
    real = linear.onednn_product
    monkeypatch.setattr(linear, "onednn_product", lambda *a: taken.append(a[0].dtype) or real(*a))
    rows = ONEDNN_LEAST // (64 * 64) + 1
    weight = torch.nn.Linear(64, 64)
    with fast_linear():
        weight(torch.randn(rows, 64))
        assert taken == [torch.float32]
        weight(torch.randn(2, 64))
        weight.double()(torch.randn(rows, 64, dtype=torch.float64))
    weight.float()(torch.randn(rows, 64))
    assert len(taken) == 1


def test_a_frozen_weight_gets_no_gradient():
    x, weight, _, gradient = operands((300,), 64, 128)
    x.requires_grad_()
    OneDnnLinear.apply(x, weight, None).backward(gradient)
    assert weight.grad is None
    assert allclose(x.grad, gradient @ weight, atol=1e-3)
