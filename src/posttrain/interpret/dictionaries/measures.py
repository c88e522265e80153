"""Quality of a dictionary: the share of variance it misses, how many features it uses, what it costs in the model.

FVU = Σ‖x − x̂‖² / Σ‖x − μ‖², with one mean μ over all rows and sums in float64. A ratio per row, or to zero instead of
the mean, reads far better than it is.

CE recovered = (CE_zero − CE_spliced) / (CE_zero − CE), where ``spliced`` puts the reconstruction in the place of the
model's activations at the site, and ``zero`` zeros. 1: nothing is lost; 0: as bad as nothing there at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.errors import UsageError
from posttrain.interpret.activations.sites import device_of, replaced
from posttrain.interpret.dictionaries.dictionary import Dictionary
from posttrain.interpret.dictionaries.fitting import StoreRows


@dataclass(frozen=True, slots=True)
class Quality:
    """A dictionary on some rows.

    ``fvu``; ``l0`` features per row; ``silent`` the share of features that no row activates; ``density`` [F] the share
    of rows on which each is active.
    """

    rows: int
    fvu: float
    l0: float
    silent: float
    density: Tensor

    def numbers(self) -> dict[str, float]:
        """Return the numbers for ``metrics.jsonl``; ``dense`` is the share of features on more than a tenth of rows."""
        dense = float((self.density > 0.1).double().mean())
        return {"fvu": self.fvu, "l0": self.l0, "silent": self.silent, "dense": dense}


def in_batches(rows: StoreRows, start: int, end: int, size: int = 4096) -> Iterator[Tensor]:
    """Yield [n, d] of the rows ``start`` … ``end`` in their order."""
    for first in range(start, end, size):
        yield rows.gather(torch.arange(first, min(first + size, end)))


def median_norm(rows: StoreRows) -> float:
    """Return the median norm of all rows."""
    return float(torch.cat([x.norm(dim=1) for x in in_batches(rows, 0, rows.num_rows)]).double().median())


@torch.no_grad()
def measure(dictionary: Dictionary, batches: Iterable[Tensor]) -> Quality:
    """Measure quality on batches [n, d] of raw activations, on the dictionary's device."""
    device = dictionary.b_dec.device
    total = torch.zeros(dictionary.d, dtype=torch.float64, device=device)
    squares, errors = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(2))
    active = torch.zeros(dictionary.features, dtype=torch.int64, device=device)
    count = 0
    shift: Tensor | None = None
    for batch in batches:
        x = batch.to(device)
        features = dictionary.encode(x)
        errors += (dictionary.decode(features) - x).double().square().sum()
        # about a point near the mean, so that subtracting two large sums does not cost digits
        shift = x.double().mean(0) if shift is None else shift
        moved = x.double() - shift
        total += moved.sum(0)
        squares += moved.square().sum()
        active += (features > 0).sum(0)
        count += len(x)
    assert count > 0, "there are rows to measure on"
    variance = squares - total.square().sum() / count
    return Quality(
        rows=count,
        fvu=float(errors / variance),
        l0=float(active.sum()) / count,
        silent=float((active == 0).double().mean()),
        density=(active.double() / count).float().cpu(),
    )


@torch.no_grad()
def recover(
    model: Any, dictionary: Dictionary, site: str, documents: Sequence[Sequence[int]], limit: float = float("inf")
) -> dict[str, float]:
    """Measure what is recovered on documents (token ids), one at a time: means over the predicted tokens, in nats.

    Returns ``tokens`` (how many were predicted), ``ce``, ``ce_spliced``, ``ce_zero`` and ``ce_recovered``. The first
    token of a document, and activations with a norm above ``limit``, stay as they are: a dictionary does not learn
    them.

    Args:
        model: a causal LM in eval mode.
        dictionary: on raw activations of that site.

    Raises:
        UsageError: no document with two tokens.
    """
    device = device_of(model)
    texts = [torch.tensor([list(ids)], device=device) for ids in documents if len(ids) > 1]
    if not texts:
        raise UsageError("eval.documents: splicing takes a document of two tokens; none that is held out has them")

    def but_for_outliers(change: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
        new = change(values.reshape(-1, values.shape[-1]).float()).reshape(values.shape).to(values.dtype)
        stays = values.float().norm(dim=-1, keepdim=True) > limit
        stays[:, 0] = True
        return torch.where(stays, values, new)

    def cross_entropy(change: Callable[[Tensor], Tensor] | None) -> float:
        total = 0.0
        place = nullcontext() if change is None else replaced(model, site, lambda x: but_for_outliers(change, x))
        with place:
            for tokens in texts:
                log_probs = torch.log_softmax(model(input_ids=tokens, use_cache=False).logits[0, :-1].float(), dim=-1)
                total -= float(log_probs.gather(1, tokens[0, 1:, None]).sum(dtype=torch.float64))
        return total / count

    count = sum(tokens.shape[1] - 1 for tokens in texts)
    ce, spliced, zero = (cross_entropy(change) for change in (None, dictionary.to(device), torch.zeros_like))
    recovered = (zero - spliced) / (zero - ce) if zero != ce else float("nan")
    return {"tokens": float(count), "ce": ce, "ce_spliced": spliced, "ce_zero": zero, "ce_recovered": recovered}
