"""How good a dictionary is: the share of variance it misses, and how many features it uses.

FVU = Σ‖x − x̂‖² / Σ‖x − μ‖², with one mean μ over all rows and sums in float64. A ratio per row, or to zero instead of
the mean, reads far better than it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.interpret.activations.shards import column
from posttrain.interpret.dictionaries.dictionary import Dictionary
from posttrain.interpret.dictionaries.recipe import SaeRecipe
from posttrain.interpret.dictionaries.rows import BOTH, DIFFERENCE, Rows, StoreRows, first_held_out
from posttrain.interpret.features.splice import Recovered, recover
from posttrain.models.load import load_model
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
