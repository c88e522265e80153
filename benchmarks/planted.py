"""Rows in memory, activations whose features are known, and how well directions find them.

A row is a sum of few of T random directions of norm 1. How often these are active falls off as Zipf's law (Pⱼ ∝ 1/j),
so that a few are common and most are rare, as in language models.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from posttrain.randomness import generator


class TensorRows:
    """Rows of a tensor [n, d]."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.num_rows, self.d = x.shape

    def gather(self, rows: Tensor) -> Tensor:
        return self.x[rows].float()

    def boundary(self, row: int) -> int:
        return row


def match(learned: Tensor, planted: Tensor) -> tuple[float, Tensor]:
    """Measure how well directions [F, d] match planted ones [T, d]: mean |cosine| of the best assignment, and each.

    The mean correlation coefficient (MCC) of the literature. Pairs are assigned from the most similar downwards,
    which is never above the best assignment. With F < T, the planted directions that are left count as 0.
    """
    unit = [x.double() / x.double().norm(dim=1, keepdim=True).clamp_min(1e-12) for x in (learned, planted)]
    similarity = (unit[0] @ unit[1].T).abs()
    best = torch.zeros(len(planted), dtype=torch.float64)
    for _ in range(min(similarity.shape)):
        row, column = divmod(int(similarity.argmax()), len(planted))
        best[column] = similarity[row, column]
        similarity[row] = -1.0
        similarity[:, column] = -1.0
    return float(best.mean()), best


@dataclass(frozen=True, slots=True)
class Planted:
    """``directions`` [T, d] of norm 1; ``rates`` [T], how often each is active; ``seed`` of everything drawn.

    ``noise``: standard deviation of what is added to every coordinate, next to active features of about 1.
    """

    directions: Tensor
    rates: Tensor
    noise: float
    seed: int

    def codes(self, count: int, part: int = 0) -> Tensor:
        """True features [count, T] of block ``part``; where active, 1 + a quarter of a normal draw, at least 0.1."""
        draws = generator(self.seed, "planted codes", part)
        shape = (count, len(self.rates))
        active = draws.random(shape, dtype=np.float32) < self.rates.numpy()
        sizes = np.maximum(1 + 0.25 * draws.standard_normal(shape, dtype=np.float32), 0.1)
        return torch.from_numpy(np.where(active, sizes, 0).astype(np.float32))

    def rows(self, codes: Tensor, part: int = 0, directions: Tensor | None = None) -> Tensor:
        """Activations [n, d] of true features, by these directions or others."""
        draws = generator(self.seed, "planted noise", part)
        where = self.directions if directions is None else directions
        noise = draws.standard_normal((len(codes), where.shape[1]), dtype=np.float32) * self.noise
        return codes @ where + torch.from_numpy(noise)


def plant(d: int = 128, features: int = 512, l0: float = 12.0, noise: float = 0.05, seed: int = 0) -> Planted:
    """``features`` random directions with Zipf's rates that sum to ``l0``, none above one half."""
    directions = torch.from_numpy(
        generator(seed, "planted directions").standard_normal((features, d), dtype=np.float32)
    )
    directions /= directions.norm(dim=1, keepdim=True)
    rates = 1.0 / np.arange(1, features + 1)
    scale = l0 / rates.sum()
    for _ in range(64):  # what the cap takes is spread over the others
        scale *= l0 / np.minimum(rates * scale, 0.5).sum()
    return Planted(directions, torch.from_numpy(np.minimum(rates * scale, 0.5).astype(np.float32)), noise, seed)


@dataclass(frozen=True, slots=True)
class PlantedChange:
    """Two models' activations [n, d] on the same tokens, and which features differ by how much.

    ``factors`` [T]: what training multiplied each feature by; 0 removed it, 1 left it alone. ``added``: features that
    only the trained model has.
    """

    base: Tensor
    post: Tensor
    factors: Tensor
    added: Tensor


def plant_change(
    planted: Planted, count: int, *, amplified: int = 8, removed: int = 8, added: int = 8, factor: float = 1.8
) -> PlantedChange:
    """Activations before and after a training that amplified, removed and added features of middling rates."""
    size = len(planted.rates)
    middling = np.arange(size // 16, size // 2)
    drawn = generator(planted.seed, "planted change").permutation(middling)[: amplified + removed + added]
    factors = torch.ones(size)
    factors[torch.from_numpy(drawn[:amplified])] = factor
    factors[torch.from_numpy(drawn[amplified : amplified + removed])] = 0.0
    new = torch.from_numpy(drawn[amplified + removed :])
    codes = planted.codes(count)
    before = codes.clone()
    before[:, new] = 0.0
    # the noise is what both models share: the same tokens, and a training that changed little
    return PlantedChange(planted.rows(before), planted.rows(codes * factors), factors, new)
