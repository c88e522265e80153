"""Latent scaling against least squares, and what it says of latents that one model has alone."""

from __future__ import annotations

import torch

from posttrain.interpret.differences.changes import LatentScaling

torch.manual_seed(0)
FEATURES = torch.relu(torch.randn(300, 6))
DIRECTIONS = torch.randn(6, 16)
OWN = torch.stack([torch.randn(6, 16), DIRECTIONS])
RECONSTRUCTIONS = torch.randn(300, 2, 16)
ERRORS = torch.randn(300, 2, 16)


def least_squares(feature: torch.Tensor, direction: torch.Tensor, y: torch.Tensor) -> float:
    """The β of min Σ ‖β f d − y‖², by a solver."""
    column = (feature[:, None] * direction).reshape(-1, 1).double()
    return float(torch.linalg.lstsq(column, y.reshape(-1, 1).double()).solution)


def test_both_factors_are_those_of_least_squares() -> None:
    scaling = LatentScaling(DIRECTIONS, OWN)
    for part in (slice(0, 100), slice(100, 300)):
        scaling.add(FEATURES[part], RECONSTRUCTIONS[part], ERRORS[part])
    found = scaling.result()
    for j in range(6):
        for m in range(2):
            f = FEATURES[:, j]
            on_reconstruction = least_squares(f, DIRECTIONS[j], RECONSTRUCTIONS[:, m])
            without = ERRORS[:, m] + f[:, None] * OWN[m, j]
            assert abs(float(found.reconstruction[m, j]) - on_reconstruction) < 1e-5
            assert abs(float(found.error[m, j]) - least_squares(f, DIRECTIONS[j], without)) < 1e-5
    assert torch.allclose(found.nu_error, found.error[0] / found.error[1])
    assert torch.allclose(found.nu_reconstruction, found.reconstruction[0] / found.reconstruction[1])


def test_one_model_alone_both_alike_and_a_silent_latent() -> None:
    """Latent 0 is in the post model alone, latent 1 in both, latent 2 twice as much in post, latent 3 never fires."""
    features = torch.zeros(100, 4)
    for j in range(3):
        features[j * 30 : j * 30 + 20, j] = 1.0 + torch.arange(20) / 10
    directions = torch.eye(4, 8)
    scales = torch.tensor([[0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 2.0, 0.0]])
    given = torch.stack([(features * scale) @ directions for scale in scales], dim=1)
    scaling = LatentScaling(directions, torch.zeros(2, 4, 8))
    scaling.add(features, given, torch.zeros_like(given))
    found = scaling.result()
    assert found.nu_reconstruction[:3].tolist() == [0.0, 1.0, 0.5]
    assert torch.isnan(found.nu_reconstruction[3])
    assert torch.isnan(found.error[:, 3]).all()
