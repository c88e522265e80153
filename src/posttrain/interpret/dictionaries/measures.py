"""How good a dictionary is: the share of variance it misses, how many features it uses, what it finds of planted ones.

FVU = Σ‖x − x̂‖² / Σ‖x − μ‖², with one mean μ over all rows and sums in float64. A ratio per row, or to zero instead of
the mean, reads far better than it is.

Planted activations have known features: a row is a sum of few of T random directions of norm 1. How often these are
active falls off as Zipf's law (Pⱼ ∝ 1/j), so that a few are common and most are rare, as in language models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttrain.interpret.activations.shards import column
from posttrain.interpret.dictionaries.dictionary import Dictionary
from posttrain.interpret.dictionaries.recipe import SaeRecipe
from posttrain.interpret.dictionaries.rows import BOTH, DIFFERENCE, Rows, StoreRows, first_held_out
from posttrain.interpret.features.splice import Recovered, recover
from posttrain.models.load import load_model
from posttrain.randomness import generator
from posttrain.recipes.sections import ModelSection

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
        metrics = {
            "fvu": self.fvu,
            "l0": self.l0,
            "silent": self.silent,
            "dense": float((self.density > 0.1).double().mean()),
        }
        if len(self.fvu_by_source) > 1:
            metrics |= {f"fvu_{i}": value for i, value in enumerate(self.fvu_by_source)}
        return metrics

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
    """Quality on batches [n, M, d] of raw activations; on the dictionary's device.

    Of a transcoder the batches are pairs [n, 2, d], and FVU is that of what it is to write.
    """
    device = dictionary.b_dec.device
    total = torch.zeros((dictionary.sources, dictionary.d), dtype=torch.float64, device=device)
    squares, errors = (torch.zeros(dictionary.sources, dtype=torch.float64, device=device) for _ in range(2))
    active = torch.zeros(dictionary.features, dtype=torch.int64, device=device)
    count = 0
    shift: Tensor | None = None
    for batch in batches:
        read, x = dictionary.sides(batch.to(device).reshape(len(batch), -1, dictionary.d))
        features = dictionary.encode(read)
        errors += (dictionary.decode(features, read).reshape(x.shape) - x).double().square().sum((0, 2))
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


def match(learned: Tensor, planted: Tensor) -> tuple[float, Tensor]:
    """How well directions [F, d] find planted ones [T, d]: mean |cosine| of a one-to-one assignment, and each one's.

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

    ``noise``: standard deviation of what is added to every coordinate, beside active features of about 1.
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


def recovered_by(
    rows: StoreRows, recipe: SaeRecipe, dictionary: Dictionary, notify: Callable[[str], None]
) -> Recovered | None:
    """The dictionary put into its model, on the last ``eval.documents`` held-out documents; None where that is 0.

    Raises:
        UsageError: the model cannot be loaded.
    """
    wanted, store = recipe.eval.documents, rows.store
    if not wanted:
        return None
    if rows.source in (BOTH, DIFFERENCE):
        notify("eval.documents: only a dictionary of one model can be put into it; this was left out")
        return None
    first = first_held_out(rows, recipe.eval.rows, recipe.train.batch)
    held_out = store.documents(torch.arange(first, store.num_rows)).unique().tolist()
    documents = [store.document_tokens(number) for number in held_out[-wanted:]]
    source = next(source for source in store.index.sources if source.name == rows.source)
    dtype = store.index.settings.get("weights", ["float32"])[0]
    section = recipe.activations.model or ModelSection(name=source.model, dtype=dtype)
    if source.name == "post":
        section = section.model_copy(update={"name": source.model})
    model = load_model(section, seed=0).model
    site = rows.site or store.sites[0]
    limit = store.index.limits.get(column(rows.target or site, source.name), float("inf"))
    return recover(model, dictionary, site, documents, limit, target=rows.target)


def results_of(quality: Quality, recovered: Recovered | None) -> dict[str, Any]:
    """Plain data: the numbers on the rows held out, the histogram of densities, and what was recovered."""
    measured: dict[str, Any] = {"held_out": quality.numbers() | {"rows": quality.rows}, "density": quality.histogram()}
    return measured if recovered is None else measured | {"recovered": recovered.numbers()}
