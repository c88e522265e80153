"""Quality of a dictionary: the share of variance it misses, how many features it uses, what it costs in the model.

FVU = Σ‖x − x̂‖² / Σ‖x − μ‖², with one mean μ over all rows and sums in float64. A ratio per row, or to zero instead of
the mean, reads far better than it is.

CE recovered = (CE_without − CE_spliced) / (CE_without − CE), where ``spliced`` puts the reconstruction in the place of
the model's activations at the site, and ``without`` zeros (or the mean); KL recovered = 1 − KL(model ‖ spliced) /
KL(model ‖ without). 1: nothing is lost; 0: as bad as nothing there at all. Zeros are what published figures compare
with; the mean is the harder baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.errors import UsageError
from posttrain.interpret.activations.shards import column
from posttrain.interpret.activations.sites import read_sites, replaced
from posttrain.interpret.dictionaries.dictionary import Dictionary
from posttrain.interpret.dictionaries.recipe import SaeRecipe
from posttrain.interpret.dictionaries.rows import DIFFERENCE, Rows, StoreRows, first_held_out
from posttrain.models.load import load_model
from posttrain.recipes.sections import ModelSection


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
        """Return the numbers for ``metrics.jsonl``."""
        dense = float((self.density > 0.1).double().mean())
        return {"fvu": self.fvu, "l0": self.l0, "silent": self.silent, "dense": dense}


def in_batches(rows: Rows, start: int, end: int, size: int = 4096) -> Iterator[Tensor]:
    """Yield [n, d] of the rows ``start`` … ``end`` in their order."""
    for first in range(start, end, size):
        yield rows.gather(torch.arange(first, min(first + size, end)))


@torch.no_grad()
def measure(dictionary: Dictionary, batches: Iterable[Tensor]) -> Quality:
    """Measure quality on batches [n, d] of raw activations; on the dictionary's device."""
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


def recovered_by(
    rows: StoreRows, recipe: SaeRecipe, dictionary: Dictionary, notify: Callable[[str], None]
) -> dict[str, float] | None:
    """Put the dictionary into its model, on the last ``eval.documents`` held-out documents; None where that is 0.

    Raises:
        UsageError: the model cannot be loaded.
    """
    wanted, store = recipe.eval.documents, rows.store
    if not wanted:
        return None
    if rows.source == DIFFERENCE:
        notify("eval.documents: only a dictionary of one model can be put into it; this was left out")
        return None
    first = first_held_out(rows, recipe.eval.rows, recipe.train.batch)
    held_out = store.documents(torch.arange(first, store.num_rows)).unique().tolist()
    documents = [store.document_tokens(number) for number in held_out[-wanted:]]
    source = next(source for source in store.index.sources if source.name == rows.source)
    dtype = store.index.settings.get("weights", ["float32"])[0]
    model = load_model(recipe.activations.model or ModelSection(name=source.model, dtype=dtype), seed=0).model
    site = rows.site or store.sites[0]
    return recover(model, dictionary, site, documents, store.index.limits.get(column(site, source.name), float("inf")))


@torch.no_grad()
def recover(
    model: Any,
    dictionary: Dictionary,
    site: str,
    documents: Sequence[Sequence[int]],
    limit: float = float("inf"),
) -> dict[str, float]:
    """Measure what is recovered on documents (token ids), one at a time: means over the predicted tokens, in nats.

    ``tokens``: how many were predicted; ``ce``, and of each variant ``spliced``, ``zero``, ``mean`` ``ce_…`` and
    ``kl_…``; ``ce_recovered_zero`` and so on. Left as they are, in every variant, because a dictionary does not learn
    them: the first token of a document, and activations with a norm above ``limit``.

    Args:
        model: a causal LM in eval mode.
        dictionary: on raw activations of that site.

    Raises:
        UsageError: no document with two tokens.
    """
    device = next(model.parameters()).device
    texts = [torch.tensor([list(ids)], device=device) for ids in documents if len(ids) > 1]
    if not texts:
        raise UsageError("eval.documents: splicing takes a document of two tokens; none that is held out has them")
    dictionary = dictionary.to(device)
    mean = _mean_activation(model, site, texts)
    variants: dict[str, Callable[[Tensor], Tensor]] = {
        "spliced": dictionary,
        "zero": torch.zeros_like,
        "mean": lambda x: mean.expand_as(x),
    }
    sums = dict.fromkeys(("ce", *(f"{what}_{name}" for what in ("ce", "kl") for name in variants)), 0.0)
    for tokens in texts:
        clean = _log_probs(model, tokens)
        sums["ce"] += _cross_entropy(clean, tokens)
        for name, change in variants.items():
            with replaced(model, site, _but_for_outliers(change, limit)):
                changed = _log_probs(model, tokens)
            sums[f"ce_{name}"] += _cross_entropy(changed, tokens)
            sums[f"kl_{name}"] += float((clean.exp() * (clean - changed)).sum(dtype=torch.float64))
    count = sum(tokens.shape[1] - 1 for tokens in texts)
    metrics = {name: value / count for name, value in sums.items()}
    for base in ("zero", "mean"):
        lost, kl = metrics[f"ce_{base}"] - metrics["ce"], metrics[f"kl_{base}"]
        kept = metrics[f"ce_{base}"] - metrics["ce_spliced"]
        metrics[f"ce_recovered_{base}"] = kept / lost if lost else float("nan")
        metrics[f"kl_recovered_{base}"] = 1 - metrics["kl_spliced"] / kl if kl else float("nan")
    return {"tokens": float(count), **metrics}


def _but_for_outliers(change: Callable[[Tensor], Tensor], limit: float) -> Callable[[Tensor], Tensor]:
    def changed(values: Tensor) -> Tensor:
        new = change(values.reshape(-1, values.shape[-1]).float()).reshape(values.shape).to(values.dtype)
        stays = values.float().norm(dim=-1, keepdim=True) > limit
        stays[:, 0] = True
        return torch.where(stays, values, new)

    return changed


def _log_probs(model: Any, tokens: Tensor) -> Tensor:
    """float32 [T − 1, V]: of the tokens after the first."""
    logits = model(input_ids=tokens, use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits.float(), dim=-1)


def _cross_entropy(log_probs: Tensor, tokens: Tensor) -> float:
    return -float(log_probs.gather(1, tokens[0, 1:, None]).sum(dtype=torch.float64))


def _mean_activation(model: Any, site: str, texts: Sequence[Tensor]) -> Tensor:
    """[d]: over all tokens but the first of each document."""
    seen = [read_sites(model, [site], input_ids=tokens, use_cache=False)[0][0, 1:].double() for tokens in texts]
    return (torch.stack([x.sum(0) for x in seen]).sum(0) / sum(map(len, seen))).float()
