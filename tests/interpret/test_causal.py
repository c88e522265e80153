"""The causal test: what doses of features do, and when changed and random ones count as told apart."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from posttrain.interpret.causal import Change, Trial, judge, scale_features, try_doses
from posttrain.interpret.dictionary import Dictionary


@pytest.fixture
def made() -> Dictionary:
    dictionary = Dictionary(16, 8, kind="l1", seed=0).requires_grad_(False)
    dictionary.b_dec.normal_(generator=torch.Generator().manual_seed(1))
    return dictionary


def states() -> torch.Tensor:
    return torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(2))


def test_a_dose_of_one_is_the_model_itself(made: Dictionary) -> None:
    x = states()
    assert torch.equal(scale_features(made, {0: 1.0, 5: 1.0})(x), x)


def test_doses_scale_a_feature_along_its_direction(made: Dictionary) -> None:
    x = states()
    features = made.encode(x.reshape(-1, 16)).reshape(3, 5, 8)
    expected = x - features[..., 2:3] * made.W_dec[2, 0] + 1.5 * features[..., 6:7] * made.W_dec[6, 0]
    assert torch.allclose(scale_features(made, {2: 0.0, 6: 2.5})(x), expected, atol=1e-5)
    assert float((expected - x).abs().max()) > 0.1


def test_large_activations_stay_as_they_are(made: Dictionary) -> None:
    x = states()
    x[1, 2] *= 1000
    changed = scale_features(made, dict.fromkeys(range(8), 0.0), limit=100.0)(x)
    assert torch.equal(changed[1, 2], x[1, 2])
    assert not torch.equal(changed[0], x[0])


def test_the_dtype_stays(made: Dictionary) -> None:
    assert scale_features(made, {0: 0.0})(states().bfloat16()).dtype == torch.bfloat16


class FakeTrial:
    """Its outcome: the mean of coordinate 0 of fixed activations after the change."""

    def outcome(self, change: Change | None = None) -> float:
        x = torch.ones(4, 16)
        return float((x if change is None else change(x))[:, 0].mean())


def test_doses_of_changed_and_random_features_side_by_side() -> None:
    """Feature j of this dictionary is coordinate j itself."""
    plain = Dictionary(16, 16, kind="l1").requires_grad_(False)
    plain.W_enc.copy_(torch.eye(16)[None])
    plain.W_dec.copy_(torch.eye(16)[:, None])
    trial = cast(Trial, FakeTrial())
    found = try_doses(trial, plain, [0, 1], [[2, 3], [4, 5]], [(1, 0.0), (2, 3.0), (9, 0.5)])
    assert [(d.num_features, d.dose) for d in found] == [(1, 0.0), (2, 3.0), (2, 0.5)]
    assert [d.changed for d in found] == [0.0, 3.0, 0.5]
    assert [d.others for d in found] == [(1.0, 1.0)] * 3
    assert [d.difference for d in found] == [-1.0, 2.0, -0.5]


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
    assert verdict.summary.half_width == (None if half_width is None else pytest.approx(half_width, abs=1e-4))
    assert verdict.separates is separates
