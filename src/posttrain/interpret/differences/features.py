"""Recorded activations of two models, seen through one dictionary: changes, null tests, scaling, contexts.

Latent scaling (Minder et al. 2025) says how much of each latent is there in one model, how much in the other. For a
latent with activations f and direction d, β = Σ f·⟨d, y⟩ / (Σf²·‖d‖²) is the factor with which f·d explains y best.
With y the reconstruction x̂ₘ of model m, the latent's share of it (β_recon); with y = eₘ + f·dₘ, the error without that
latent's own part, what the latent would have to explain (β_error). ν = β_base/β_post: 0 for what only the post model
has, 1 for what both have alike. Three sums over the tokens for each latent are enough, so all take one pass:

    C = Σf²      a_m = Σ f·⟨d, x̂ₘ⟩      e_m = Σ f·⟨d, eₘ⟩
    β_recon = a_m / (C‖d‖²)             β_error = (e_m + C⟨dₘ, d⟩) / (C‖d‖²)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttrain.interpret.activations.shards import ActivationStore
from posttrain.interpret.dictionaries.dictionary import Dictionary
from posttrain.interpret.dictionaries.measures import in_batches, measure
from posttrain.interpret.dictionaries.rows import StoreRows
from posttrain.interpret.differences.changes import (
    Changes,
    ChangeSums,
    document_batches,
    number_documents,
    paired_changes,
    sum_by_document,
    unpaired_changes,
)
from posttrain.interpret.features.logit_lens import show_token
from posttrain.randomness import generator


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


WINDOW = 14  # tokens shown on either side


@dataclass(frozen=True, slots=True)
class Seen:
    """Two models through one dictionary of the base.

    ``nulls``: the same measurement where nothing can have changed, by name: ``itself`` (the base beside itself),
    ``swapped`` (base and post exchanged in a random half of the documents), ``halves`` (the base on two halves of the
    documents). ``scaling``: of the base's features, whose own direction is looked for in both models' errors.
    ``quality``: FVU, L0 and silent share by model on held-out documents.
    """

    changes: Changes
    nulls: dict[str, Changes]
    scaling: Scaling
    quality: dict[str, dict[str, float]]

    @property
    def amplification(self) -> Tensor:
        """[F]: by what factor the post model has more of a feature than the base, where the base has it."""
        return self.scaling.error[1] / self.scaling.error[0]


@torch.no_grad()
def see_changes(
    store: ActivationStore,
    site: str,
    dictionary: Dictionary,
    *,
    held_out_start: int,
    seed: int,
    min_documents: int,
    min_change: float,
) -> Seen:
    """All measurements of one dictionary, in one pass over a paired store."""
    device = dictionary.b_dec.device
    documents = store.documents(torch.arange(store.num_rows))
    swap = torch.from_numpy(generator(seed, "what changed: swapped").random(store.num_documents) < 0.5)
    sums = {name: ChangeSums(dictionary.features, device) for name in ("real", "itself", "swapped", "even", "odd")}
    scaling = LatentScaling(dictionary.W_dec[:, 0])
    for rows in document_batches(documents):
        base, post = (store.gather(rows, site, source).float().to(device) for source in ("base", "post"))
        before, after = dictionary.encode(base), dictionary.encode(post)
        place, sizes = number_documents(documents[rows].to(device))
        b, p, again = (sum_by_document(x, place, sizes) for x in (before, after, dictionary.encode(base)))
        sums["real"].enter(b, p, sizes)
        sums["real"].moved += (after - before).square().sum(0, dtype=torch.float64)
        sums["itself"].enter(b, again, sizes)
        numbers = documents[rows].unique().to(device)
        exchanged = swap.to(device)[numbers][:, None]
        sums["swapped"].enter(torch.where(exchanged, p, b), torch.where(exchanged, b, p), sizes)
        for name, half in (("even", numbers % 2 == 0), ("odd", numbers % 2 == 1)):
            sums[name].enter(b[:, half], b[:, half], sizes[half])
        reconstruction = dictionary.decode(before)
        errors = torch.stack([base - reconstruction, post - reconstruction], dim=1)
        scaling.add(before, torch.stack([reconstruction, reconstruction], dim=1), errors)
    limits = {"min_documents": min_documents, "min_change": min_change}
    nulls = {
        "itself": paired_changes(sums["itself"], **limits),  # type: ignore[arg-type]
        "swapped": paired_changes(sums["swapped"], **limits),  # type: ignore[arg-type]
        "halves": unpaired_changes(sums["even"], sums["odd"], **limits),  # type: ignore[arg-type]
    }
    quality = {}
    for source in ("base", "post"):
        held_out = measure(dictionary, in_batches(StoreRows(store, site, source), held_out_start, store.num_rows))
        quality[source] = held_out.numbers()
    return Seen(paired_changes(sums["real"], **limits), nulls, scaling.result(), quality)  # type: ignore[arg-type]


@torch.no_grad()
def scale_latents(store: ActivationStore, site: str, dictionary: Dictionary, start: int = 0) -> Scaling:
    """Latent scaling of a dictionary of the difference (M = 1) or of both models (M = 2).

    A difference's latents are looked for in the models' activations about their means; a crosscoder's in its
    reconstructions and errors, with the post model's direction.
    """
    device = dictionary.b_dec.device
    is_pair = dictionary.sources == 2
    directions = dictionary.W_dec[:, -1]
    own = dictionary.W_dec.transpose(0, 1) if is_pair else torch.zeros_like(directions).expand(2, -1, -1)
    sums = LatentScaling(directions, own)
    documents = store.documents(torch.arange(store.num_rows))
    means = _means(store, site, device)
    for rows in document_batches(documents[start:]):
        at = rows + start
        x = torch.stack([store.gather(at, site, name).float() for name in ("base", "post")], dim=1).to(device)
        if is_pair:
            features = dictionary.encode(x)
            reconstruction = dictionary.decode(features)
            sums.add(features, reconstruction, x - reconstruction)
        else:
            features = dictionary.encode(x[:, 1] - x[:, 0])
            centred = x - means
            sums.add(features, centred, torch.zeros_like(centred))
    return sums.result()


def _means(store: ActivationStore, site: str, device: Any) -> Tensor:
    """[2, d]: the mean activation of base and post."""
    totals = [torch.zeros(store.width(site), dtype=torch.float64) for _ in range(2)]
    for start in range(0, store.num_rows, 8192):
        rows = torch.arange(start, min(start + 8192, store.num_rows))
        for total, name in zip(totals, ("base", "post"), strict=True):
            total += store.gather(rows, site, name).double().sum(0)
    return torch.stack([total / store.num_rows for total in totals]).float().to(device)


@torch.no_grad()
def mean_differences(store: ActivationStore, site: str, places: int = 4) -> tuple[list[str], Tensor]:
    """(names, [n, d]): the mean of post − base over prompts, over answers, and over single places of the answers."""
    names = ["prompts", "answers", *(f"answers, token {i + 1}" for i in range(places))]
    totals = torch.zeros((len(names), store.width(site)), dtype=torch.float64)
    counts = torch.zeros(len(names), dtype=torch.float64)
    for start in range(0, store.num_rows, 8192):
        rows = torch.arange(start, min(start + 8192, store.num_rows))
        delta = store.gather(rows, site, "post").double() - store.gather(rows, site, "base").double()
        place = store.positions(rows) - store.prompt_lengths(store.documents(rows))
        own = ~store.told(rows)
        masks = [place < 0, (place >= 0) & own, *((place == i) & own for i in range(places))]
        for index, mask in enumerate(masks):
            totals[index] += delta[mask].sum(0)
            counts[index] += int(mask.sum())
    kept = [i for i in range(len(names)) if counts[i] > 0]
    return [names[i] for i in kept], (totals[kept] / counts[kept, None]).float()


@torch.no_grad()
def feature_contexts(
    store: ActivationStore,
    site: str,
    dictionary: Dictionary,
    features: Sequence[int],
    tokenizer: Any,
    *,
    count: int = 4,
) -> list[dict[str, Any]]:
    """For each feature where it changed: ``tokens`` [text, share of the change, mean change], and ``contexts``.

    A context is where the feature changed most, one a document: ``tokens`` as texts, its activation at each in ``base``
    and ``post``, and ``at``, the place of the change.
    """
    device = dictionary.b_dec.device
    chosen = torch.tensor(list(features), dtype=torch.long, device=device)
    every = torch.arange(store.num_rows)
    documents, tokens = store.documents(every), store.tokens(every)
    deltas = torch.empty((store.num_rows, len(features)))
    values = torch.empty((store.num_rows, 2, len(features)), dtype=torch.float16)
    for start in range(0, store.num_rows, 8192):
        rows = every[start : start + 8192]
        pair = [dictionary.encode(store.gather(rows, site, s).float().to(device))[:, chosen] for s in ("base", "post")]
        deltas[rows] = (pair[1] - pair[0]).cpu()
        values[rows] = torch.stack(pair, dim=1).half().cpu()
    entries = []
    for column in range(len(features)):
        delta = deltas[:, column]
        sign = 1.0 if float(delta.sum()) >= 0 else -1.0
        entry: dict[str, list[Any]] = {"tokens": _where_changed(delta, tokens, tokenizer), "contexts": []}
        seen: set[tuple[str, ...]] = set()  # answers to one prompt begin alike
        for row in (delta * sign).topk(min(len(delta), 50 * count)).indices.tolist():
            context = _context(store, documents, values[:, :, column], row, tokenizer)
            texts = tuple(context["tokens"][: context["at"] + 1])
            if texts not in seen and len(seen) < count:
                seen.add(texts)
                entry["contexts"].append(context)
        entries.append(entry)
    return entries


def _where_changed(delta: Tensor, tokens: Tensor, tokenizer: Any, count: int = 5) -> list[list[Any]]:
    """The tokens that carry most of a feature's change: [text, share of Σ|Δ|, mean Δ there]."""
    size = int(tokens.max()) + 1
    amount = torch.zeros(size, dtype=torch.float64).index_add_(0, tokens, delta.double().abs())
    signed = torch.zeros(size, dtype=torch.float64).index_add_(0, tokens, delta.double())
    number = torch.bincount(tokens, minlength=size)
    total = float(amount.sum())
    best = amount.topk(min(count, size)).indices.tolist()
    return [
        [show_token(tokenizer, i), float(amount[i]) / total, float(signed[i] / number[i])]
        for i in best
        if total > 0 and float(amount[i]) > 0
    ]


def _context(store: ActivationStore, documents: Tensor, values: Tensor, row: int, tokenizer: Any) -> dict[str, Any]:
    document, position = int(documents[row]), int(store.positions(torch.tensor([row]))[0])
    ids = store.document_tokens(document)
    start, end = max(0, position - WINDOW), min(len(ids), position + WINDOW + 1)
    first, last = (int(np.searchsorted(documents.numpy(), document, side)) for side in ("left", "right"))
    rows = torch.arange(first, last)
    places = store.positions(rows)
    shown: dict[str, list[float]] = {"base": [0.0] * (end - start), "post": [0.0] * (end - start)}
    for at, place in zip(rows.tolist(), places.tolist(), strict=True):
        if start <= place < end:
            for index, name in enumerate(("base", "post")):
                shown[name][place - start] = round(float(values[at, index]), 3)
    texts = [show_token(tokenizer, i) for i in ids[start:end]]
    return {"document": document, "tokens": texts, "at": position - start, **shown}
