"""Counter-based randomness: known outputs, independence of neighbours, coverage of epochs."""

from __future__ import annotations

import numpy as np

from posttrain.randomness import derive_key, permutation, uniforms


def splitmix64(state: int) -> int:
    mask = (1 << 64) - 1
    z = state & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_uniforms_are_splitmix64():
    key = 1234567
    expected = [(splitmix64(key + (t + 1) * 0x9E3779B97F4A7C15) >> 11) / 2**53 for t in range(5)]
    assert uniforms([key], 5)[0].tolist() == expected
    assert uniforms([99, key], 2, start=3)[1].tolist() == expected[3:]
    # First output of SplitMix64 seeded with 1234567, as published with the generator.
    assert splitmix64(key + 0x9E3779B97F4A7C15) == 6457827717110365317


def test_uniforms_look_uniform():
    drawn = uniforms([derive_key(0, "rollout", 1, row) for row in range(400)], 250)
    assert drawn.min() >= 0.0
    assert drawn.max() < 1.0
    counts, _ = np.histogram(drawn, bins=20, range=(0, 1))
    chi_square = float(((counts - 5000) ** 2 / 5000).sum())
    assert chi_square < 43.8  # 99.9 % quantile with 19 degrees of freedom
    assert abs(np.corrcoef(drawn[:, 0], drawn[:, 1])[0, 1]) < 0.2


def test_keys_differ_by_every_argument():
    keys = {derive_key(s, p, a, b) for s in (0, 1) for p in ("x", "y") for a in (0, 1) for b in (0, 1)}
    assert len(keys) == 16
    assert derive_key(3, "rollout", 5) == derive_key(3, "rollout", 5)


def test_permutation_of_each_epoch_has_every_item_once():
    first, second = (permutation(7, "data", epoch, 10).tolist() for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_any_whole_number_is_a_seed():
    seeds = [0, -1, 2**63 - 1, 2**63, 2**64, 10**40, -(10**40)]
    assert len({derive_key(seed, "data", 1) for seed in seeds}) == len(seeds)
