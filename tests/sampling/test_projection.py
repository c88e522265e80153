"""The lean path's products, by both libraries, against float64."""

from __future__ import annotations

import pytest
import torch

from closeness import assert_close, rounding
from posttrain.models.forward import linear
from posttrain.models.lora import LowRank
from posttrain.sampling.native import fast_path
from posttrain.sampling.native.fast_path import Projection, multiply, rms_norm


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def expect(x, weight, bias, term):
    y = x.double() @ weight.double().T
    if bias is not None:
        y += bias.double()
    return (y + term.scale * (x.double() @ term.down.double().T) @ term.up.double().T).float()


@pytest.mark.parametrize("least", [0, 1 << 60])  # all by oneDNN where there is one, all by torch's own
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_a_projection_in_its_three_forms(monkeypatch, least, with_bias, rows):
    monkeypatch.setattr(fast_path, "ONEDNN_LEAST", least)
    monkeypatch.setattr(linear, "IS_FASTER", True)
    x, residual = draw(rows, 48), draw(rows, 80, seed=4)
    weight, bias = draw(80, 48, seed=1), draw(80, seed=2) if with_bias else None
    term = LowRank(draw(3, 48, seed=5), draw(80, 3, seed=6), 0.5)
    expected = expect(x, weight, bias, term)
    made = Projection(weight, bias, [term])
    # Partial sums of 48 products and three of the term's are about as large as the largest result.
    close = {"atol": rounding(torch.float32, size=float(expected.abs().max()), terms=51), "rtol": 0}
    assert_close(made.apply(x), expected, **close)
    buffer = torch.zeros(rows, 100)
    made.into(x, buffer[:, 10:90])
    assert_close(buffer[:, 10:90], expected, **close)
    assert buffer[:, :10].abs().sum() == buffer[:, 90:].abs().sum() == 0
    before = residual.clone()
    assert made.add_to(residual, x) is residual
    assert_close(residual, before + expected, **close)
    turned = weight.T.contiguous().T  # the same matrix in another layout
    assert_close(multiply(x, turned, bias), multiply(x, weight, bias), **close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(dtype):
    x, weight = draw(5, 3, 16).to(dtype), draw(16, seed=1).to(dtype)
    scaled = x.double() / (x.double().square().mean(-1, keepdim=True) + 0.1).sqrt() * weight.double()
    bound = rounding(dtype, size=float(scaled.abs().max()), terms=4)  # square, mean, root and product
    assert_close(rms_norm(x, weight, 0.1), scaled.to(dtype), atol=bound, rtol=0)
