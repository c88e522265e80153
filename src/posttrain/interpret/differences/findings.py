"""Features as plain data for ``diff.json``: their numbers, where they changed, and how dictionaries agree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from posttrain.interpret.activations.shards import ActivationStore
from posttrain.interpret.dictionaries.dictionary import Dictionary
from posttrain.interpret.differences.changes import MEASURES, Changes, Seen
from posttrain.interpret.features.logit_lens import show_token, strongest_tokens

LEAST_COSINE = 0.7  # partners that are less similar do not count
MAX_POINTS = 4096  # features of the scatter
WINDOW = 14  # tokens shown on either side


def number(value: float, digits: int = 5) -> float | None:
    """Return a number rounded to so many significant digits; None for one that is not finite."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def numbers(values: Tensor) -> list[float | None]:
    """Return the first ``MAX_POINTS`` of a vector as plain numbers."""
    return [number(value) for value in values[:MAX_POINTS].double().tolist()]


def count_changes(changes: Changes) -> dict[str, int]:
    """Count the features that were tested, that changed significantly, and that count as changed (rose, fell)."""
    rose = int((changes.changed & (changes.change[1] > 0)).sum())
    return {
        "features": len(changes.tested),
        "tested": int(changes.tested.sum()),
        "significant": int(changes.significant.sum()),
        "changed": changes.num_changed,
        "rose": rose,
        "fell": changes.num_changed - rose,
    }


def describe_seen(seen: Seen, dictionary: Dictionary) -> dict[str, Any]:
    """Describe one dictionary: its quality, the counts, the null tests, and every feature's numbers."""
    changes = seen.changes
    ratio = changes.ratio[0][changes.tested]
    within = float(((ratio < 1.2) & (ratio > 1 / 1.2)).double().mean())  # nan where none is tested
    return {
        "features": dictionary.features,
        "kind": dictionary.kind,
        "quality": seen.quality,
        "counts": count_changes(changes),
        "rate_within_a_fifth": number(within),
        "null": {name: count_changes(null) for name, null in seen.nulls.items()},
        "scaling": {"energy": numbers(seen.energy), "amplification": numbers(seen.amplification)},
        "rates": {
            "base": numbers(changes.base[0]),
            "post": numbers(changes.post[0]),
            "mean_base": numbers(changes.base[1]),
            "mean_post": numbers(changes.post[1]),
            "changed": changes.changed[:MAX_POINTS].tolist(),
            "tested": changes.tested[:MAX_POINTS].tolist(),
        },
    }


def describe_features(
    store: ActivationStore,
    site: str,
    dictionary: Dictionary,
    seen: Seen,
    model: Any,
    tokenizer: Any,
    count: int,
) -> list[dict[str, Any]]:
    """Describe the most changed features: with intervals, what they promote, and where they changed."""
    changes = seen.changes
    chosen = changes.ranking()[: min(count, max(1, changes.num_changed))].tolist()
    lens = strongest_tokens(model, dictionary.W_dec[chosen], tokenizer, 6)
    contexts = feature_contexts(store, site, dictionary, chosen, tokenizer)
    entries = []
    for index, feature in enumerate(chosen):
        entry: dict[str, Any] = {"feature": feature, "documents": int(changes.documents[feature])}
        for row, name in enumerate(MEASURES):
            for key in ("base", "post", "change", "error", "ratio", "low", "high", "adjusted"):
                entry[f"{name}_{key}"] = number(float(getattr(changes, key)[row, feature]))
        entry["amplification"] = number(float(seen.amplification[feature]))
        entries.append(entry | {"changed": bool(changes.changed[feature]), "promotes": lens[index], **contexts[index]})
    return entries


@torch.no_grad()
def mean_differences(store: ActivationStore, site: str, places: int = 4) -> tuple[list[str], Tensor]:
    """Return (names, [n, d]): the mean of post − base over prompts, answers, and single places of the answers."""
    names = ["prompts", "answers", *(f"answers, token {i + 1}" for i in range(places))]
    totals = torch.zeros((len(names), store.width(site)), dtype=torch.float64)
    counts = torch.zeros(len(names), dtype=torch.float64)
    for rows in torch.arange(store.num_rows).split(8192):
        delta = store.gather(rows, site, "post").double() - store.gather(rows, site, "base").double()
        place = store.positions(rows) - store.prompt_lengths(store.documents(rows))
        for index, mask in enumerate([place < 0, place >= 0, *(place == i for i in range(places))]):
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
    """Return for each feature where it changed: ``tokens`` [text, share of the change, mean change], and ``contexts``.

    A context is where the feature changed most, one for each beginning of a text: ``tokens`` as texts, its activation
    at each in ``base`` and ``post``, and ``at``, the place of the change.
    """
    chosen = torch.tensor(list(features), dtype=torch.long, device=dictionary.b_dec.device)
    every = torch.arange(store.num_rows)
    documents, tokens = store.documents(every), store.tokens(every)
    sides = []
    for side in ("base", "post"):
        parts = (store.gather(rows, site, side).float().to(chosen.device) for rows in every.split(8192))
        sides.append(torch.cat([dictionary.encode(x)[:, chosen].cpu() for x in parts]))
    values = torch.stack(sides)  # [2, n, S]
    entries = []
    for column in range(len(features)):
        delta = values[1, :, column] - values[0, :, column]
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


def _where_changed(delta: Tensor, tokens: Tensor, tokenizer: Any) -> list[list[Any]]:
    """Return the five tokens that carry most of a feature's change: [text, share of Σ|Δ|, mean Δ there]."""
    counts = torch.bincount(tokens)
    signed = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, tokens, delta.double())
    amount = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, tokens, delta.double().abs())
    best = [i for i in amount.topk(min(5, len(counts))).indices.tolist() if amount[i] > 0]
    total = float(amount.sum())
    return [[show_token(tokenizer, i), float(amount[i]) / total, float(signed[i] / counts[i])] for i in best]


def _context(store: ActivationStore, documents: Tensor, values: Tensor, row: int, tokenizer: Any) -> dict[str, Any]:
    document, position = int(documents[row]), int(store.positions(torch.tensor([row]))[0])
    ids = store.document_tokens(document)
    start, end = max(0, position - WINDOW), min(len(ids), position + WINDOW + 1)
    near = torch.arange(max(0, row - WINDOW), min(len(documents), row + WINDOW + 1))
    near = near[documents[near] == document]
    places = store.positions(near) - start
    near, places = near[(places >= 0) & (places < end - start)], places[(places >= 0) & (places < end - start)]
    shown = torch.zeros((2, end - start))
    shown[:, places] = values[:, near]
    base, post = ([round(value, 3) for value in side] for side in shown.tolist())
    texts = [show_token(tokenizer, i) for i in ids[start:end]]
    return {"document": document, "tokens": texts, "at": position - start, "base": base, "post": post}


def overlap(
    directions: tuple[Tensor, Tensor], chosen: tuple[Tensor, Tensor], signs: tuple[Tensor, Tensor]
) -> dict[str, float]:
    """Measure how far two dictionaries' changed features are the same ones.

    ``share``: of the first's, those whose most similar feature (by decoder cosine) of the second is one of the second's
    and went the same way. ``by_chance``: that share of all features of the first. ``cosine``: the mean similarity of
    the first's changed features to their partners; ``count`` of them.

    Args:
        directions: decoder rows [F, d] of both.
        chosen: int64, the changed features of each.
        signs: [F] of each, above 0 where a feature's mean activation rose.
    """
    unit = [x.double() / x.double().norm(dim=1, keepdim=True).clamp_min(1e-12) for x in directions]
    cosine, partner = (x.cpu() for x in (unit[0] @ unit[1].T).max(dim=1))
    is_chosen = torch.zeros(len(unit[1]), dtype=torch.bool)
    is_chosen[chosen[1]] = True
    same = is_chosen[partner] & (cosine >= LEAST_COSINE) & ((signs[0] > 0) == (signs[1] > 0)[partner])
    share, similar = (x[chosen[0]].double().mean() for x in (same, cosine))  # of no features: nan
    found = {"share": share, "by_chance": same.double().mean(), "cosine": similar, "count": len(chosen[0])}
    return {name: float(value) for name, value in found.items()}


def describe_overlap(dictionaries: Sequence[Dictionary], seen: Sequence[Seen]) -> dict[str, Any]:
    """Describe how far the changed features of every two seeds are the same."""
    pairs = []
    for a, b in permutations(range(len(dictionaries)), 2):
        changes = (seen[a].changes, seen[b].changes)
        shared = overlap(
            (dictionaries[a].W_dec, dictionaries[b].W_dec),
            (changes[0].changed.nonzero()[:, 0], changes[1].changed.nonzero()[:, 0]),
            (changes[0].change[1], changes[1].change[1]),
        )
        found = {name: number(value) for name, value in shared.items()}
        pairs.append({"first": a, "second": b, **found, "count": int(shared["count"])})
    shares = [pair["share"] for pair in pairs if pair["share"] is not None]
    return {"pairs": pairs, "share": sum(shares) / len(shares) if shares else None, "least_cosine": LEAST_COSINE}
