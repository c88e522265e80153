"""What was measured of features, as plain data for ``diff.json``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from posttrain.interpret.activations.shards import ActivationStore
from posttrain.interpret.dictionaries.dictionary import Dictionary
from posttrain.interpret.dictionaries.measures import Quality
from posttrain.interpret.differences.changes import MEASURES, Changes, Scaling, Seen, feature_contexts
from posttrain.interpret.features.logit_lens import strongest_tokens

MAX_LATENTS = 64  # latents of the difference that are listed
LEAST_COSINE = 0.7  # partners that are less similar do not count
MAX_POINTS = 4096  # features of the scatter


def number(value: float, digits: int = 5) -> float | None:
    """Rounded to so many significant digits; None for what is no finite number."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def numbers(values: Tensor, digits: int = 5) -> list[float | None]:
    """A vector as plain numbers."""
    return [number(value, digits) for value in values.double().tolist()]


def count_changes(changes: Changes) -> dict[str, int]:
    """How many features were tested, changed for sure, and by more than the least change; of these how many rose."""
    rose = changes.changed & (changes.change[1] > 0)
    return {
        "features": len(changes.tested),
        "tested": int(changes.tested.sum()),
        "significant": int(changes.significant.sum()),
        "changed": changes.num_changed,
        "rose": int(rose.sum()),
        "fell": changes.num_changed - int(rose.sum()),
    }


def describe_seen(seen: Seen, dictionary: Dictionary) -> dict[str, Any]:
    """One dictionary: its quality, the counts, the null tests, and every feature's numbers."""
    changes = seen.changes
    ratio = changes.ratio[0][changes.tested]
    within = ((ratio < 1.2) & (ratio > 1 / 1.2)).double().mean() if len(ratio) else torch.tensor(float("nan"))
    return {
        "features": dictionary.features,
        "kind": dictionary.kind,
        "quality": seen.quality,
        "counts": count_changes(changes),
        "rate_within_a_fifth": number(float(within)),
        "null": {name: count_changes(null) for name, null in seen.nulls.items()},
        "scaling": {
            "energy": numbers(seen.scaling.energy[:MAX_POINTS]),
            "amplification": numbers(seen.amplification[:MAX_POINTS]),
        },
        "rates": {
            "base": numbers(changes.base[0][:MAX_POINTS]),
            "post": numbers(changes.post[0][:MAX_POINTS]),
            "mean_base": numbers(changes.base[1][:MAX_POINTS]),
            "mean_post": numbers(changes.post[1][:MAX_POINTS]),
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
    """The most changed features, with intervals, what they promote, and where they changed."""
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
    cosine, partner = (unit[0] @ unit[1].T).max(dim=1)
    is_chosen = torch.zeros(len(unit[1]), dtype=torch.bool, device=partner.device)
    is_chosen[chosen[1]] = True
    same = is_chosen[partner] & (cosine >= LEAST_COSINE) & ((signs[0] > 0) == (signs[1] > 0)[partner])
    share, similar = (x[chosen[0]].double().mean() for x in (same, cosine))  # of no features: nan
    found = {"share": share, "by_chance": same.double().mean(), "cosine": similar, "count": len(chosen[0])}
    return {name: float(value) for name, value in found.items()}


def describe_overlap(dictionaries: Sequence[Dictionary], seen: Sequence[Seen]) -> dict[str, Any]:
    """How far the changed features of every two seeds are the same."""
    pairs = []
    for a, b in permutations(range(len(dictionaries)), 2):
        chosen = [seen[i].changes.changed.nonzero()[:, 0] for i in (a, b)]
        shared = overlap(
            (dictionaries[a].W_dec, dictionaries[b].W_dec),
            (chosen[0], chosen[1]),
            (seen[a].changes.change[1], seen[b].changes.change[1]),
        )
        pairs.append(
            {"first": a, "second": b, **{k: number(v) for k, v in shared.items()}, "count": int(shared["count"])}
        )
    shares = [pair["share"] for pair in pairs if pair["share"] is not None]
    return {"pairs": pairs, "share": sum(shares) / len(shares) if shares else None, "least_cosine": LEAST_COSINE}


def describe_difference(
    dictionary: Dictionary, scaling: Scaling, quality: Quality, model: Any, tokenizer: Any
) -> dict[str, Any]:
    """A dictionary of the difference: its latents by their share of all activations."""
    share = scaling.energy.cpu() * dictionary.W_dec.double().square().sum(1).cpu()
    total = float(share.sum())
    chosen = share.argsort(descending=True)[:MAX_LATENTS]
    chosen = chosen[share[chosen] > 0]
    lens = strongest_tokens(model, dictionary.W_dec[chosen], tokenizer, 5)
    latents = [
        {
            "latent": int(latent),
            "share": number(float(share[latent]) / total),
            "beta_base": number(float(scaling.beta[0, latent])),
            "beta_post": number(float(scaling.beta[1, latent])),
            "nu": number(float(scaling.beta[0, latent] / scaling.beta[1, latent])),
            "density": number(float(quality.density[latent])),
            "promotes": lens[index],
        }
        for index, latent in enumerate(chosen.tolist())
    ]
    return {"features": dictionary.features, "quality": quality.numbers(), "latents": latents}
