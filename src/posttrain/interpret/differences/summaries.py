"""Summaries of changed features for ``diff.json``: statistics, contexts, agreement between seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from posttrain.interpret.activations.shards import ActivationStore
from posttrain.interpret.differences.changes import MEASURES, Changes, DictionaryChanges
from posttrain.interpret.features.features import rounded
from posttrain.interpret.features.lens import show_token, show_tokens, strongest_tokens
from posttrain.interpret.saes.sae import SparseAutoencoder
from posttrain.types import Model, Tokenizer

LEAST_COSINE = 0.7  # minimum similarity for matching features
MAX_POINTS = 4096  # plotted features
WINDOW = 14  # tokens shown before and after


def finite_number(value: float) -> float | None:
    """Round to 5 significant digits; None if not finite."""
    if math.isfinite(value):
        return rounded(value)
    return None


def plain_numbers(values: Tensor) -> list[float | None]:
    """Convert the first ``MAX_POINTS`` values to plain numbers."""
    return [finite_number(value) for value in values[:MAX_POINTS].double().tolist()]


def count_changes(changes: Changes) -> dict[str, int]:
    """Count tested, significant and changed features, and how many rose or fell."""
    rose = int((changes.changed & (changes.change[1] > 0)).sum())
    return {
        "features": len(changes.tested),
        "tested": int(changes.tested.sum()),
        "significant": int(changes.significant.sum()),
        "changed": changes.num_changed,
        "rose": rose,
        "fell": changes.num_changed - rose,
    }


def describe_dictionary_changes(seen: DictionaryChanges, sae: SparseAutoencoder) -> dict[str, object]:
    """Describe one dictionary: quality, change counts, null tests, and per-feature numbers."""
    changes = seen.changes
    ratio = changes.ratio[0][changes.tested]
    is_within = (ratio < 1.2) & (ratio > 1 / 1.2)
    within = float(is_within.double().mean())  # nan if none was tested
    rates = {
        "base": plain_numbers(changes.base[0]),
        "post": plain_numbers(changes.post[0]),
        "mean_base": plain_numbers(changes.base[1]),
        "mean_post": plain_numbers(changes.post[1]),
        "changed": changes.changed[:MAX_POINTS].tolist(),
        "tested": changes.tested[:MAX_POINTS].tolist(),
    }
    return {
        "features": sae.features,
        "kind": sae.kind,
        "quality": seen.quality,
        "counts": count_changes(changes),
        "rate_within_a_fifth": finite_number(within),
        "null": {name: count_changes(null) for name, null in seen.nulls.items()},
        "scaling": {"energy": plain_numbers(seen.energy), "amplification": plain_numbers(seen.amplification)},
        "rates": rates,
    }


def describe_changed_features(
    store: ActivationStore,
    site: str,
    sae: SparseAutoencoder,
    seen: DictionaryChanges,
    model: Model,
    tokenizer: Tokenizer,
    count: int,
) -> list[dict[str, object]]:
    """Describe the most changed features: intervals, promoted tokens, and contexts."""
    changes = seen.changes
    num_chosen = min(count, max(1, changes.num_changed))
    chosen = changes.ranking()[:num_chosen].tolist()
    lens = strongest_tokens(model, sae.W_dec[chosen], tokenizer, 6)
    contexts = feature_contexts(store, site, sae, chosen, tokenizer)
    entries = []
    for index, feature in enumerate(chosen):
        entry: dict[str, object] = {"feature": feature, "documents": int(changes.documents[feature])}
        for row, name in enumerate(MEASURES):
            for key in ("base", "post", "change", "error", "ratio", "low", "high", "adjusted"):
                value = getattr(changes, key)[row, feature]
                entry[f"{name}_{key}"] = finite_number(float(value))
        entry["amplification"] = finite_number(float(seen.amplification[feature]))
        entry["changed"] = bool(changes.changed[feature])
        entry["promotes"] = lens[index]
        entries.append(entry | contexts[index])
    return entries


@torch.no_grad()
def mean_differences(store: ActivationStore, site: str, places: int = 4) -> tuple[list[str], Tensor]:
    """Average post − base over prompts, answers, and single answer positions: (names, [n, d])."""
    names = ["prompts", "answers"]
    names += [f"answers, token {i + 1}" for i in range(places)]
    totals = torch.zeros((len(names), store.width(site)), dtype=torch.float64)
    counts = torch.zeros(len(names), dtype=torch.float64)
    for rows in torch.arange(store.num_rows).split(8192):
        base = store.gather(rows, site, "base").double()
        post = store.gather(rows, site, "post").double()
        delta = post - base
        lengths = store.prompt_lengths(store.documents(rows))
        place = store.positions(rows) - lengths
        masks = [place < 0, place >= 0]
        masks += [place == i for i in range(places)]
        for index, mask in enumerate(masks):
            totals[index] += delta[mask].sum(0)
            counts[index] += int(mask.sum())
    kept = [i for i in range(len(names)) if counts[i] > 0]
    means = totals[kept] / counts[kept, None]
    return [names[i] for i in kept], means.float()


@torch.no_grad()
def feature_contexts(
    store: ActivationStore,
    site: str,
    sae: SparseAutoencoder,
    features: Sequence[int],
    tokenizer: Tokenizer,
    *,
    count: int = 4,
) -> list[dict[str, Any]]:
    """Collect ``tokens`` [text, fraction of change, average change] and most changed ``contexts``, per feature.

    Contexts are distinct up to the changed token: ``tokens`` as texts, activations in ``base`` and ``post``, and
    ``at``, the changed position.
    """
    chosen = torch.tensor(list(features), dtype=torch.long, device=sae.b_dec.device)
    every = torch.arange(store.num_rows)
    documents = store.documents(every)
    tokens = store.tokens(every)
    sides = []
    for side in ("base", "post"):
        parts = []
        for rows in every.split(8192):
            x = store.gather(rows, site, side).float().to(chosen.device)
            parts.append(sae.encode(x)[:, chosen].cpu())
        sides.append(torch.cat(parts))
    values = torch.stack(sides)  # [2, n, S]
    entries = []
    for column in range(len(features)):
        delta = values[1, :, column] - values[0, :, column]
        sign = 1.0
        if float(delta.sum()) < 0:
            sign = -1.0
        entry: dict[str, list[object]] = {"tokens": _where_changed(delta, tokens, tokenizer), "contexts": []}
        seen: set[tuple[str, ...]] = set()  # answers to a prompt often begin alike
        num_looked_at = min(len(delta), 50 * count)
        for row in (delta * sign).topk(num_looked_at).indices.tolist():
            context = _context(store, documents, values[:, :, column], row, tokenizer)
            texts = tuple(context["tokens"][: context["at"] + 1])
            if texts not in seen and len(seen) < count:
                seen.add(texts)
                entry["contexts"].append(context)
        entries.append(entry)
    return entries


def _where_changed(delta: Tensor, tokens: Tensor, tokenizer: Tokenizer) -> list[object]:
    """Find the five tokens contributing most to a feature's change: [text, fraction of Σ|Δ|, average Δ]."""
    counts = torch.bincount(tokens)
    exact = delta.double()
    signed = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, tokens, exact)
    amount = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, tokens, exact.abs())
    total = float(amount.sum())
    strongest = amount.topk(min(5, len(counts))).indices
    changed: list[object] = []
    for i in strongest.tolist():
        if amount[i] > 0:
            share = float(amount[i]) / total
            mean = float(signed[i] / counts[i])
            changed.append([show_token(tokenizer, i), share, mean])
    return changed


def _context(
    store: ActivationStore, documents: Tensor, values: Tensor, row: int, tokenizer: Tokenizer
) -> dict[str, Any]:
    document = int(documents[row])
    position = int(store.positions(torch.tensor([row]))[0])
    ids = store.document_tokens(document)
    start = max(0, position - WINDOW)
    end = min(len(ids), position + WINDOW + 1)
    first = max(0, row - WINDOW)
    last = min(len(documents), row + WINDOW + 1)
    near = torch.arange(first, last)
    near = near[documents[near] == document]
    places = store.positions(near) - start
    is_shown = (places >= 0) & (places < end - start)
    shown = torch.zeros((2, end - start))
    shown[:, places[is_shown]] = values[:, near[is_shown]]
    base, post = shown.tolist()
    return {
        "document": document,
        "tokens": show_tokens(tokenizer, ids[start:end]),
        "at": position - start,
        "base": [round(value, 3) for value in base],
        "post": [round(value, 3) for value in post],
    }


def overlap(
    directions: tuple[Tensor, Tensor], chosen: tuple[Tensor, Tensor], signs: tuple[Tensor, Tensor]
) -> dict[str, float]:
    """Measure agreement between two dictionaries' changed features.

    A feature agrees if its nearest feature in the second dictionary (by decoder cosine, at least ``LEAST_COSINE``) is
    also changed, in the same direction. ``share``: agreeing fraction of changed features; ``by_chance``: of all
    features. ``cosine``: average similarity between the first's changed features and their nearest; ``count``: number
    of them. Inputs are pairs: decoder rows [F, d], changed features, and ``signs`` [F], positive if activation rose.
    """
    first, second = (_unit_rows(x) for x in directions)
    best = (first @ second.T).max(dim=1)
    cosine = best.values.cpu()
    partner = best.indices.cpu()
    is_chosen = torch.zeros(len(second), dtype=torch.bool)
    is_chosen[chosen[1]] = True
    went_alike = (signs[0] > 0) == (signs[1] > 0)[partner]
    same = is_chosen[partner] & (cosine >= LEAST_COSINE) & went_alike
    of_chosen = same[chosen[0]].double()  # nan without changed features
    similarity = cosine[chosen[0]].double()
    return {
        "share": float(of_chosen.mean()),
        "by_chance": float(same.double().mean()),
        "cosine": float(similarity.mean()),
        "count": float(len(chosen[0])),
    }


def _unit_rows(directions: Tensor) -> Tensor:
    """Normalize rows to norm 1, float64."""
    exact = directions.double()
    return exact / exact.norm(dim=1, keepdim=True).clamp_min(1e-12)


def describe_overlap(saes: Sequence[SparseAutoencoder], seen: Sequence[DictionaryChanges]) -> dict[str, object]:
    """Measure agreement for every ordered pair of seeds."""
    pairs = []
    for a, b in permutations(range(len(saes)), 2):
        first = seen[a].changes
        second = seen[b].changes
        shared = overlap(
            (saes[a].W_dec, saes[b].W_dec),
            (first.changed.nonzero()[:, 0], second.changed.nonzero()[:, 0]),
            (first.change[1], second.change[1]),
        )
        pair: dict[str, Any] = {"first": a, "second": b}
        for name, value in shared.items():
            pair[name] = finite_number(value)
        pair["count"] = int(shared["count"])
        pairs.append(pair)
    summary: dict[str, object] = {"pairs": pairs, "share": None, "least_cosine": LEAST_COSINE}
    shares = [pair["share"] for pair in pairs if pair["share"] is not None]
    if shares:
        summary["share"] = sum(shares) / len(shares)
    return summary
