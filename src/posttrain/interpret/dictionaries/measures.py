"""How good a dictionary is: the share of variance it misses, how many features it uses, how many never.

FVU = Σ‖x − x̂‖² / Σ‖x − μ‖², with one mean μ over all rows and sums in float64. A ratio per row, or to zero instead of
the mean, reads far better than it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.interpret.dictionaries.dictionary import Dictionary
from posttrain.interpret.dictionaries.training_rows import Rows

# Shares of rows on which a feature is active, in powers of ten: the last bin below 1, the first below this and never.
DENSITY_FROM = -6.0


@dataclass(frozen=True, slots=True)
class Quality:
    """What a dictionary does to some rows.

    ``fvu`` over all sources together, ``fvu_by_source`` alone; ``l0`` features per row; ``silent`` the share of
    features that no row activates; ``density`` [F] the share of rows on which each is active.
    """

    rows: int
    fvu: float
    fvu_by_source: tuple[float, ...]
    l0: float
    silent: float
    density: Tensor

    def numbers(self) -> dict[str, float]:
        """For ``metrics.jsonl``."""
        found = {
            "fvu": self.fvu,
            "l0": self.l0,
            "silent": self.silent,
            "dense": float((self.density > 0.1).double().mean()),
        }
        if len(self.fvu_by_source) > 1:
            found |= {f"fvu_{i}": value for i, value in enumerate(self.fvu_by_source)}
        return found

    def histogram(self, bins: int = 24) -> dict[str, list[float]]:
        """How many features have which density: ``edges`` (powers of ten) and ``counts``; silent ones are left out."""
        edges = torch.linspace(DENSITY_FROM, 0.0, bins + 1, dtype=torch.float64)
        active = self.density[self.density > 0].double().log10().clamp(DENSITY_FROM, 0.0)
        counts = torch.histogram(active, edges).hist
        return {"edges": edges.tolist(), "counts": counts.tolist()}


def in_batches(rows: Rows, start: int, end: int, size: int = 4096) -> Iterator[Tensor]:
    """[n, M, d] of the rows ``start`` … ``end`` in their order."""
    for first in range(start, end, size):
        yield rows.gather(torch.arange(first, min(first + size, end)))


@torch.no_grad()
def measure(dictionary: Dictionary, batches: Iterable[Tensor]) -> Quality:
    """Quality on batches [n, M, d] of raw activations; on the dictionary's device."""
    device = dictionary.b_dec.device
    total = torch.zeros((dictionary.sources, dictionary.d), dtype=torch.float64, device=device)
    squares, errors = (torch.zeros(dictionary.sources, dtype=torch.float64, device=device) for _ in range(2))
    active = torch.zeros(dictionary.features, dtype=torch.int64, device=device)
    count = 0
    shift: Tensor | None = None
    for batch in batches:
        x = batch.to(device).reshape(len(batch), dictionary.sources, dictionary.d)
        features = dictionary.encode(x)
        errors += (dictionary.decode(features).reshape(x.shape) - x).double().square().sum((0, 2))
        # about a point near the mean, so that subtracting two large sums does not cost digits
        shift = x.double().mean(0) if shift is None else shift
        moved = x.double() - shift
        total += moved.sum(0)
        squares += moved.square().sum((0, 2))
        active += (features > 0).sum(0)
        count += len(x)
    assert count > 0, "there are rows to measure on"
    variance = squares - total.square().sum(1) / count
    density = (active.double() / count).float().cpu()
    return Quality(
        rows=count,
        fvu=float(errors.sum() / variance.sum()),
        fvu_by_source=tuple((errors / variance).tolist()),
        l0=float(active.sum()) / count,
        silent=float((active == 0).double().mean()),
        density=density,
    )


def match(found: Tensor, planted: Tensor) -> tuple[float, Tensor]:
    """How well directions [F, d] find planted ones [T, d]: mean |cosine| of a one-to-one assignment, and each one's.

    The mean correlation coefficient (MCC) of the literature. Pairs are assigned from the most similar downwards,
    which is never above the best assignment. With F < T, the planted directions that are left count as 0.
    """
    unit = [x.double() / x.double().norm(dim=1, keepdim=True).clamp_min(1e-12) for x in (found, planted)]
    similarity = (unit[0] @ unit[1].T).abs()
    best = torch.zeros(len(planted), dtype=torch.float64)
    for _ in range(min(similarity.shape)):
        row, column = divmod(int(similarity.argmax()), len(planted))
        best[column] = similarity[row, column]
        similarity[row] = -1.0
        similarity[:, column] = -1.0
    return float(best.mean()), best
