"""The causal test: what doses of features do, and when changed and random ones count as told apart."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from posttrain.interpret.dictionaries.dictionary import Dictionary
from posttrain.interpret.differences.causal import (
    Added,
    Trial,
    judge,
    leave,
    move_features,
    replace_all,
    scale_features,
    try_doses,
)


@pytest.fixture
def made() -> Dictionary:
    dictionary = Dictionary(16, 8, kind="l1", seed=0).requires_grad_(False)
    dictionary.b_dec.normal_(generator=torch.Generator().manual_seed(1))
    return dictionary


def states(seed: int = 2) -> torch.Tensor:
    return torch.randn(15, 16, generator=torch.Generator().manual_seed(seed))


def test_a_factor_of_one_and_a_dose_of_nothing_leave_the_model_itself(made: Dictionary) -> None:
    x, donor = states(), states(3)
    zero = torch.zeros_like(x)
    assert torch.equal(scale_features(made, [0, 5], 1.0)(x, donor), zero)
    assert torch.equal(move_features(made, [0, 5], 0.0)(x, donor), zero)
    assert torch.equal(leave(x, donor), zero)
    assert torch.allclose(x + replace_all(x, donor), donor, atol=1e-6)


def test_factors_scale_a_feature_along_its_direction(made: Dictionary) -> None:
    x = states()
    features = made.encode(x)
    expected = 1.5 * (features[:, 2:3] * made.W_dec[2] + features[:, 6:7] * made.W_dec[6])
    assert torch.allclose(scale_features(made, [2, 6], 2.5)(x, x), expected, atol=1e-5)
    assert float(expected.abs().max()) > 0.1


def test_moving_a_feature_brings_it_to_where_the_donor_has_it(made: Dictionary) -> None:
    x, donor = states(), states(3)
    change = made.encode(donor) - made.encode(x)
    for dose in (1.0, 0.5):
        expected = dose * (change[:, [1, 4]] @ made.W_dec[[1, 4]])
        assert torch.allclose(move_features(made, [1, 4], dose)(x, donor), expected, atol=1e-5)
    assert float(expected.abs().max()) > 0.1


def test_large_activations_stay_as_they_are(made: Dictionary) -> None:
    x, donor = states(), states(3)
    x[4] *= 1000
    donor[6] *= 1000
    scaled = scale_features(made, range(8), 0.0, limit=100.0)(x, donor)
    moved = move_features(made, range(8), 1.0, limit=100.0)(x, donor)
    assert not scaled[4].any()
    assert scaled[6].any()  # the donor plays no part here
    assert not moved[4].any()
    assert not moved[6].any()
    assert moved[5].any()


class FakeTrial:
    """Its outcome: the mean of coordinate 0 of fixed activations after each treatment."""

    def outcomes(self, treatments: list[Added]) -> list[float]:
        x = torch.ones(4, 16)
        return [float((x + treat(x, x))[:, 0].mean()) for treat in treatments]


def test_doses_of_changed_and_random_features_side_by_side() -> None:
    """Feature j of this dictionary is coordinate j itself."""
    plain = Dictionary(16, 16, kind="l1").requires_grad_(False)
    plain.W_enc.copy_(torch.eye(16))
    plain.W_dec.copy_(torch.eye(16))

    def treat(features: Any, dose: float) -> Added:
        return scale_features(plain, features, dose)

    trial = cast(Trial, FakeTrial())
    found = try_doses(trial, treat, [0, 1], [[2, 3], [4, 5]], [(1, 0.0), (2, 3.0), (9, 0.5)])
    assert [(d["features"], d["dose"]) for d in found] == [(1, 0.0), (2, 3.0), (2, 0.5)]
    assert [d["changed"] for d in found] == [0.0, 3.0, 0.5]
    assert [d["random"] for d in found] == [[1.0, 1.0]] * 3
    assert [d["difference"] for d in found] == [-1.0, 2.0, -0.5]


@pytest.mark.parametrize(
    ("differences", "half_width", "separates"),
    [
        ([0.1, 0.2, 0.3], 4.3027 * 0.1 / 3**0.5, False),
        ([-0.19, -0.2, -0.21], 4.3027 * 0.01 / 3**0.5, True),
        ([0.0, 0.0, 0.0], 0.0, False),
        ([0.4], None, None),
    ],
)
def test_the_verdict_is_students(differences: list[float], half_width: Any, separates: bool | None) -> None:
    verdict = judge(differences)
    assert verdict["half_width"] == (None if half_width is None else pytest.approx(half_width, abs=1e-4))
    assert verdict["separates"] is separates
