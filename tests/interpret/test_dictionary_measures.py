"""FVU, L0 and densities by hand; the matching of directions."""

from __future__ import annotations

import pytest
import torch
from planted import TensorRows, match

from posttrain.interpret.dictionaries.dictionary import Dictionary
from posttrain.interpret.dictionaries.measures import Quality, in_batches, measure


def test_fvu_has_one_mean_for_all_rows() -> None:
    """A dictionary that keeps the first coordinate (when positive) and gives the mean of the second."""
    dictionary = Dictionary(2, 1, kind="l1")
    with torch.no_grad():
        dictionary.W_enc.copy_(torch.tensor([[[1.0], [0.0]]]))
        dictionary.W_dec.copy_(torch.tensor([[[1.0, 0.0]]]))
        dictionary.b_dec.copy_(torch.tensor([[0.0, 3.0]]))
    x = torch.tensor([[2.0, 3.0], [4.0, 5.0], [0.0, 1.0], [-2.0, 3.0]])
    # errors: 0, 2² (second), 2² (second), 2² (first) = 12; about the mean (1, 3): 1+9+1+9 and 0+4+4+0 = 28
    quality = measure(dictionary, [x[:1], x[1:]])
    assert quality.fvu == pytest.approx(12 / 28)
    assert quality.l0 == 0.5
    assert quality.density.tolist() == [0.5]
    assert quality.silent == 0.0
    assert quality.rows == 4
    assert measure(dictionary, [x]).fvu == pytest.approx(quality.fvu)


def test_fvu_far_from_the_origin_keeps_its_digits() -> None:
    x = torch.randn(400, 8, generator=torch.Generator().manual_seed(0)).double() + 1e4
    dictionary = Dictionary(8, 4, kind="l1")
    with torch.no_grad():
        dictionary.b_dec.copy_(x.float().double().mean(0, keepdim=True))
        dictionary.W_dec.zero_()
    assert measure(dictionary, x.float().split(100)).fvu == pytest.approx(1.0, rel=1e-4)


def test_each_source_has_its_own_fvu() -> None:
    x = torch.randn(50, 2, 3) * torch.tensor([1.0, 10.0])[:, None]
    dictionary = Dictionary(3, 4, 2, kind="l1")
    with torch.no_grad():
        dictionary.b_dec.copy_(x.mean(0))
        dictionary.b_dec[0] = 0
        dictionary.W_dec.zero_()
    quality = measure(dictionary, [x])
    variance = (x - x.mean(0)).double().square().sum((0, 2))
    raw = torch.stack([x[:, 0].double().square().sum(), variance[1]])
    assert quality.fvu_by_source == pytest.approx((raw / variance).tolist(), rel=1e-5)
    assert quality.fvu == pytest.approx(float(raw.sum() / variance.sum()), rel=1e-5)
    assert quality.numbers()["fvu_0"] == quality.fvu_by_source[0]


def test_the_histogram_leaves_silent_features_out() -> None:
    quality = Quality(1000, 0.1, (0.1,), 2.0, 0.25, torch.tensor([0.0, 0.001, 0.002, 1.0]))
    histogram = quality.histogram(bins=6)
    assert histogram["edges"] == pytest.approx([-6, -5, -4, -3, -2, -1, 0])
    assert histogram["counts"] == [0, 0, 0, 2, 0, 1]
    assert quality.numbers()["dense"] == 0.25


def test_directions_are_matched_one_to_one() -> None:
    planted = torch.eye(3)
    found = torch.tensor([[0.0, -2.0, 0.0], [5.0, 0.1, 0.0], [4.0, 0.0, 0.0], [0.0, 3.0, 4.0]])
    mean, each = match(found, planted)  # the second of the two near (1, 0, 0) gets nothing
    assert each.tolist() == pytest.approx([1.0, 1.0, 0.8])
    assert mean == pytest.approx(2.8 / 3)
    assert match(found[:1], planted)[0] == pytest.approx(1 / 3)


def test_rows_come_in_their_order() -> None:
    x = torch.arange(20.0).view(10, 2)
    batches = list(in_batches(TensorRows(x), 3, 10, size=4))
    assert [len(batch) for batch in batches] == [4, 3]
    assert torch.equal(torch.cat(batches)[:, 0], x[3:])
