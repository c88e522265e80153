"""Planted activations are what they say, and the same for the same seed."""

from __future__ import annotations

import pytest
import torch
from planted import plant, plant_change


def test_rates_are_zipfs_and_sum_to_the_l0() -> None:
    planted = plant(64, 512, 12.0)
    assert float(planted.rates.sum()) == pytest.approx(12, rel=1e-4)
    assert float(planted.rates.max()) <= 0.5
    free = planted.rates[planted.rates < 0.49]
    ranks = torch.arange(513 - len(free), 513)
    torch.testing.assert_close(free * ranks, (free * ranks)[:1].expand_as(free))
    torch.testing.assert_close(planted.directions.norm(dim=1), torch.ones(512))


def test_rows_are_sums_of_active_directions() -> None:
    planted = plant(16, 30, 3.0, noise=0.0, seed=4)
    codes = planted.codes(4000)
    assert float((codes > 0).sum() / 4000) == pytest.approx(3, rel=0.05)
    torch.testing.assert_close((codes > 0).float().mean(0), planted.rates, atol=0.03, rtol=0)
    assert float(codes[codes > 0].min()) >= 0.1
    assert float(codes[codes > 0].mean()) == pytest.approx(1, abs=0.02)
    torch.testing.assert_close(planted.rows(codes), codes @ planted.directions)
    assert torch.equal(plant(16, 30, 3.0, seed=4).codes(10, part=2), planted.codes(10, part=2))
    assert not torch.equal(planted.codes(10, part=1), planted.codes(10, part=2))
    noisy = plant(16, 30, 3.0, noise=0.3, seed=4)
    assert float((noisy.rows(codes) - planted.rows(codes)).std()) == pytest.approx(0.3, rel=0.02)


def test_a_planted_change() -> None:
    planted = plant(24, 64, 4.0, noise=0.1, seed=1)
    change = plant_change(planted, 3000, amplified=2, removed=3, added=4, factor=1.8)
    counts = [int((change.factors == factor).sum()) for factor in (torch.tensor(1.8), 0.0, 1.0)]
    assert counts == [2, 3, 59]
    assert len(set(change.added.tolist())) == 4
    assert bool((change.factors[change.added] == 1).all())
    codes = planted.codes(3000)
    expected = codes * change.factors
    expected[:, change.added] = codes[:, change.added]
    before = codes.clone()
    before[:, change.added] = 0
    torch.testing.assert_close(change.post - change.base, (expected - before) @ planted.directions, atol=1e-4, rtol=0)
