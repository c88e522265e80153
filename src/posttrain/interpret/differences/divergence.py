"""Where two models disagree, and how much of it the changed features explain: plain data for ``diff.json``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from posttrain.evals.statistics import standard_error
from posttrain.interpret.dictionaries.dictionary import Dictionary
from posttrain.interpret.differences.changes import match_rates
from posttrain.interpret.differences.features import Seen
from posttrain.interpret.differences.lens import show_token
from posttrain.interpret.differences.patching import Patcher, difference_patch, feature_patch, token_kl
from posttrain.interpret.differences.recipe import ChangesSection
from posttrain.randomness import generator

NUM_PLACES = 48
NUM_TOKENS = 12
NUM_SHOWN = 3


def locate_divergence(
    base: Any, post: Any, documents: Sequence[Sequence[int]], prompt_lengths: Sequence[int], tokenizer: Any
) -> dict[str, Any]:
    """KL(post ‖ base): its mean, how concentrated it is, at which places and tokens it sits, and whole answers."""
    every, moved = token_kl(base, post, documents, prompt_lengths)
    answers = [kl[length:] for kl, length in zip(every, prompt_lengths, strict=True)]
    prompts = torch.cat([kl[1:length] for kl, length in zip(every, prompt_lengths, strict=True)])
    flat = torch.cat(answers)
    ids = torch.tensor([t for d, n in zip(documents, prompt_lengths, strict=True) for t in d[n:]])
    before = torch.tensor([t for d, n in zip(documents, prompt_lengths, strict=True) for t in d[n - 1 : -1]])
    sums = [float(kl.sum()) for kl in answers]
    total = float(flat.sum())
    top = flat.sort(descending=True).values
    return {
        "documents": len(documents),
        "tokens": len(flat),
        "per_answer": fmean(sums),
        "per_answer_error": standard_error(sums),
        "per_token": total / len(flat),
        "per_prompt_token": float(prompts.mean()) if len(prompts) else 0.0,
        "share_of_top_tenth": float(top[: max(1, len(top) // 10)].sum()) / total if total > 0 else None,
        "share_of_top_hundredth": float(top[: max(1, len(top) // 100)].sum()) / total if total > 0 else None,
        "places": _by_place(answers),
        "tokens_at": _by_token(flat, ids, tokenizer),
        "tokens_after": _by_token(flat, before, tokenizer),
        "moved": _moved(moved / len(flat), tokenizer),
        "shown": _shown(documents, prompt_lengths, every, tokenizer),
    }


def _by_place(answers: Sequence[Tensor]) -> list[dict[str, float]]:
    """Mean KL at each place of the answers that reach it, with its standard error."""
    found = []
    for place in range(NUM_PLACES):
        here = [float(kl[place]) for kl in answers if len(kl) > place]
        if len(here) < max(2, len(answers) // 20):
            break
        found.append({"place": place, "kl": fmean(here), "error": standard_error(here), "answers": len(here)})
    return found


def _by_token(kl: Tensor, ids: Tensor, tokenizer: Any) -> list[dict[str, Any]]:
    """The tokens that carry most of the KL: their share of it, and the mean where they stand."""
    size = int(ids.max()) + 1
    sums = torch.zeros(size, dtype=torch.float64).index_add_(0, ids, kl)
    counts = torch.bincount(ids, minlength=size)
    total = float(kl.sum())
    best = sums.topk(min(NUM_TOKENS, size)).indices.tolist()
    return [
        {
            "token": show_token(tokenizer, i),
            "share": float(sums[i]) / total if total > 0 else 0.0,
            "mean": float(sums[i] / counts[i].clamp_min(1)),
            "count": int(counts[i]),
        }
        for i in best
        if counts[i] > 0
    ]


def _moved(moved: Tensor, tokenizer: Any) -> dict[str, list[list[Any]]]:
    """Tokens whose probability rose and fell most, on average over all tokens of the answers."""
    found = {}
    for name, sign in (("up", 1), ("down", -1)):
        values, ids = (moved * sign).topk(min(8, len(moved)))
        found[name] = [[show_token(tokenizer, i), sign * v] for v, i in zip(values.tolist(), ids.tolist(), strict=True)]
    return found


def _shown(
    documents: Sequence[Sequence[int]], prompt_lengths: Sequence[int], every: Sequence[Tensor], tokenizer: Any
) -> list[dict[str, Any]]:
    """The first answers, token by token."""
    return [
        {
            "prompt": tokenizer.decode(list(documents[i][: prompt_lengths[i]]), skip_special_tokens=False),
            "tokens": [show_token(tokenizer, t) for t in documents[i][prompt_lengths[i] :]],
            "kl": [round(float(v), 4) for v in every[i][prompt_lengths[i] :]],
        }
        for i in range(min(NUM_SHOWN, len(documents)))
    ]


def patch_curves(
    models: tuple[Any, Any],
    site: str,
    texts: tuple[Sequence[Sequence[int]], Sequence[int]],
    changes: ChangesSection,
    dictionaries: Sequence[Dictionary],
    seen: Sequence[Seen],
    *,
    frozen: tuple[Dictionary, Sequence[int]],
    difference: Dictionary | None,
    limit: float,
    observe: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """The share of KL recovered against the number of features patched into the base.

    ``changed``, ``random`` (rate-matched): one list per seed; ``frozen`` and ``difference``: one. For comparison the
    whole difference (``everything``), the mean difference vector, and all features of each dictionary.
    """
    assert changes.patching is not None
    patcher = Patcher(*models, site, *texts, limit=limit)
    mean = patcher.mean_difference()
    counts = changes.patching.counts
    found: dict[str, Any] = {
        "kl_per_token": patcher.kl,
        "tokens": patcher.tokens,
        "counts": counts,
        "everything": patcher.recovered(lambda base, post: post - base),
        "mean_vector": patcher.recovered(lambda base, post: mean.expand_as(base)),
        "changed": [],
        "random": [],
        "all_features": [],
    }
    for seed, (dictionary, view) in enumerate(zip(dictionaries, seen, strict=True)):
        ranked = view.changes.ranking().tolist()
        others = random_features(view, ranked[: max(counts)], changes.seed + seed, 0)
        for name, features in (("changed", ranked), ("random", others)):
            found[name].append([patcher.recovered(feature_patch(dictionary, features[:n])) for n in counts])
        found["all_features"].append(patcher.recovered(feature_patch(dictionary, None)))
        observe(f"patching, seed {seed}: {found['changed'][-1][-1]:.1%} by {counts[-1]} changed features")
    dictionary, ranking = frozen
    found["frozen"] = [patcher.recovered(feature_patch(dictionary, list(ranking[:n]))) for n in counts]
    if difference is not None:
        energy = _energy(difference, patcher)
        order = energy.argsort(descending=True).tolist()
        found["difference"] = [patcher.recovered(difference_patch(difference, order[:n])) for n in counts]
    return found


def random_features(view: Seen, ranked: Sequence[int], seed: int, draw: int) -> list[int]:
    """Features that did not change, one for each of ``ranked``, that fire about as often and as strongly in post."""
    changes = view.changes
    rates, means = changes.post
    sizes = torch.where(rates > 0, means / rates.clamp_min(1e-12), torch.zeros_like(rates))
    uniform = generator(seed, "what changed: random features", draw).random(len(ranked)).tolist()
    forbidden = changes.changed.clone()
    if int((~forbidden & (rates > 0)).sum()) < len(ranked):  # nearly everything changed: then any other will do
        forbidden = torch.zeros_like(forbidden)
    return match_rates(ranked, rates, sizes, forbidden, uniform)


def _energy(dictionary: Dictionary, patcher: Patcher) -> Tensor:
    """[F]: Σf² of the difference on the patched texts."""
    total = torch.zeros(dictionary.features, dtype=torch.float64)
    for text in patcher.texts:
        kept = text.real
        total += dictionary.encode((text.post - text.base)[kept]).double().square().sum(0).cpu()
    return total
