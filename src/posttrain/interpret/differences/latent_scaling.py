"""Latent scaling: how much of each latent is there in one model, how much in the other (Minder et al. 2025).

For a latent with activations f and direction d, β = Σ f·⟨d, y⟩ / (Σf²·‖d‖²) is the factor with which f·d explains y
best. With y the reconstruction x̂ₘ of model m, the latent's share of it (β_recon); with y = eₘ + f·dₘ, the error without
that latent's own part, what the latent would have to explain (β_error). ν = β_base/β_post: 0 for what only the post
model has, 1 for what both have alike. Three sums over the tokens for each latent are enough, so all take one pass:

    C = Σf²      a_m = Σ f·⟨d, x̂ₘ⟩      e_m = Σ f·⟨d, eₘ⟩
    β_recon = a_m / (C‖d‖²)             β_error = (e_m + C⟨dₘ, d⟩) / (C‖d‖²)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Scaling:
    """float64 [M, F] by model (base, post), nan for latents that never fire; ``energy`` [F] is C."""

    reconstruction: Tensor
    error: Tensor
    energy: Tensor

    @property
    def nu_reconstruction(self) -> Tensor:
        """β_base/β_post of the reconstructions, [F]."""
        return self.reconstruction[0] / self.reconstruction[1]

    @property
    def nu_error(self) -> Tensor:
        """β_base/β_post of the errors, [F]."""
        return self.error[0] / self.error[1]


class LatentScaling:
    """Sums for all latents of a dictionary.

    Args:
        directions: d [F, width].
        own: dₘ [M, F, width], the latent's direction in each model's reconstruction; None: d in both.
    """

    def __init__(self, directions: Tensor, own: Tensor | None = None) -> None:
        self.directions = directions.detach()
        own = self.directions.expand(2, -1, -1) if own is None else own.detach()
        self.overlap = torch.einsum("mfd,fd->mf", own.double(), self.directions.double())
        self.energy = torch.zeros(len(directions), dtype=torch.float64, device=directions.device)
        self.on_reconstruction = torch.zeros_like(self.overlap)
        self.on_error = torch.zeros_like(self.overlap)

    @torch.no_grad()
    def add(self, features: Tensor, reconstructions: Tensor, errors: Tensor) -> None:
        """Latents [n, F], and for each model x̂ₘ and eₘ: [n, M, width]."""
        self.energy += features.double().square().sum(0)
        for m in range(len(self.overlap)):
            for total, y in ((self.on_reconstruction, reconstructions), (self.on_error, errors)):
                total[m] += (features * (y[:, m] @ self.directions.T)).sum(0, dtype=torch.float64)

    def result(self) -> Scaling:
        """The factors so far."""
        norms = self.energy * self.directions.double().square().sum(1)
        norms = torch.where(norms > 0, norms, torch.full_like(norms, float("nan")))
        return Scaling(
            self.on_reconstruction / norms, (self.on_error + self.energy * self.overlap) / norms, self.energy.clone()
        )
