"""Which features changed between two models that read the same tokens: how often they fire, how strongly on average.

Tokens of one document hang together, so documents are the units of chance. Everything is kept as sums over documents
(of a feature's count of tokens, of its activations, of their squares and products), so the size of the data does not
matter. With bᵢ and pᵢ a feature's sum over document i in the base and in the post model, nᵢ the document's tokens, and
capitals for sums over the D documents, the change δ = (P − B)/N and the ratio P/B have the variances

    Var δ = D/(D−1) · Σ (pᵢ − bᵢ − δ nᵢ)² / N²         Var log(P/B) = D/(D−1) · Σ (pᵢ/P − bᵢ/B)²

of ratio estimators by linearization (Cochran 1977, "Sampling Techniques", 6.3 and 6.4). The hypothesis δ = 0 is tested
with Student's t whose degrees of freedom are those of the documents that the feature fires in, not of all: a rare
feature is judged by the few documents that know it. Over all features and both measures Holm's rule (1979) keeps the
chance of a single false finding at 5 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttrain.evals.statistics import student_t_quantile, student_t_tail
from posttrain.interpret.activations.shards import ActivationStore
from posttrain.interpret.dictionaries.dictionary import Dictionary
from posttrain.interpret.dictionaries.measures import in_batches, measure
from posttrain.interpret.dictionaries.rows import StoreRows
from posttrain.interpret.features.logit_lens import show_token
from posttrain.randomness import generator

MEASURES = ("rate", "mean")
# A feature of fewer documents is not tested: its t would rest on a handful of numbers.
MIN_DOCUMENTS = 12
# A change smaller than this, however sure, is not called one.
MIN_CHANGE = 0.2
ALPHA = 0.05
CHUNK_ROWS = 8192


class ChangeSums:
    """Sums over documents for one feature each; ``add`` takes whole documents.

    ``documents`` D, ``tokens`` N; by measure (tokens where the feature fires; activations) ``base`` B, ``post`` P,
    and Σb², Σp², Σbp, Σbn, Σpn, all float64 [2, F]. ``seen`` [F]: documents in which it fires in either model;
    ``moved`` [F]: Σ (post − base)² over tokens.
    """

    def __init__(self, num_features: int, device: torch.device | str = "cpu") -> None:
        zeros = torch.zeros((2, num_features), dtype=torch.float64, device=device)
        self.base, self.post = zeros.clone(), zeros.clone()
        self.base_squared, self.post_squared, self.product = zeros.clone(), zeros.clone(), zeros.clone()
        self.base_tokens, self.post_tokens = zeros.clone(), zeros.clone()
        self.seen = torch.zeros(num_features, dtype=torch.int64, device=device)
        self.moved = torch.zeros(num_features, dtype=torch.float64, device=device)
        self.documents, self.tokens, self.tokens_squared = 0, 0, 0.0

    def add(self, base: Tensor, post: Tensor, documents: Tensor) -> None:
        """Features [n, F] of both models at the same tokens; ``documents`` int64 [n] says of which each row is."""
        place, sizes = number_documents(documents.to(base.device))
        self.enter(sum_by_document(base, place, sizes), sum_by_document(post, place, sizes), sizes)
        self.moved += (post - base).square().sum(0, dtype=torch.float64)

    def enter(self, b: Tensor, p: Tensor, sizes: Tensor) -> None:
        """The same from sums by document [2, D, F] and the tokens of each [D]; ``moved`` stays as it is."""
        n = sizes[:, None]
        self.base += b.sum(1)
        self.post += p.sum(1)
        self.base_squared += b.square().sum(1)
        self.post_squared += p.square().sum(1)
        self.product += (b * p).sum(1)
        self.base_tokens += (b * n).sum(1)
        self.post_tokens += (p * n).sum(1)
        self.seen += ((b[0] > 0) | (p[0] > 0)).sum(0)
        self.documents += len(sizes)
        self.tokens += int(sizes.sum())
        self.tokens_squared += float(sizes.square().sum())


@dataclass(frozen=True, slots=True)
class Changes:
    """What is known of every feature, float64 [2, F] by measure (``rate``: share of tokens; ``mean`` activation).

    ``change`` = post − base with its standard ``error``; ``ratio`` post/base with its 95 % interval ``low`` to
    ``high`` (inf or nan where the base has none). ``p``: two-sided, 1 where the feature is not tested; ``adjusted``
    by Holm's rule. bool [F]: ``tested``, ``significant`` (an adjusted p below 5 %) and ``changed`` (significant in a
    measure in which it also changed by more than 20 %). ``documents`` [F]: in how many it fires.
    ``moved`` [F]: the root mean square, over tokens, of how far its activation moved.
    """

    base: Tensor
    post: Tensor
    change: Tensor
    error: Tensor
    ratio: Tensor
    low: Tensor
    high: Tensor
    p: Tensor
    adjusted: Tensor
    tested: Tensor
    significant: Tensor
    changed: Tensor
    documents: Tensor
    moved: Tensor

    @property
    def num_changed(self) -> int:
        return int(self.changed.sum())

    def ranking(self) -> Tensor:
        """Features by how far their activations moved, those that count as changed first: int64 [F]."""
        size = self.moved
        return torch.argsort(size + self.changed * (size.max() + 1.0), descending=True, stable=True)


def paired_changes(sums: ChangeSums, *, min_documents: int = MIN_DOCUMENTS, min_change: float = MIN_CHANGE) -> Changes:
    """The changes between two models on the same documents."""
    d, n = sums.documents, float(max(1, sums.tokens))
    factor = d / max(1, d - 1)
    delta = (sums.post - sums.base) / n
    squares = sums.post_squared - 2 * sums.product + sums.base_squared
    residual = squares - 2 * delta * (sums.post_tokens - sums.base_tokens) + delta.square() * sums.tokens_squared
    error = (factor * residual.clamp_min(0)).sqrt() / n
    relative = sums.post_squared / sums.post.square() + sums.base_squared / sums.base.square()
    relative = relative - 2 * sums.product / (sums.post * sums.base)
    log_error = (factor * relative.clamp_min(0)).sqrt()
    moved = (sums.moved / n).sqrt()
    return _judge(sums.base / n, sums.post / n, error, log_error, sums.seen, moved, min_documents, min_change)


def unpaired_changes(
    base: ChangeSums, post: ChangeSums, *, min_documents: int = MIN_DOCUMENTS, min_change: float = MIN_CHANGE
) -> Changes:
    """The same between different documents: of ``base`` its base side is read, of ``post`` its post side."""
    sides = []
    for sums, total, squared, crossed in (
        (base, base.base, base.base_squared, base.base_tokens),
        (post, post.post, post.post_squared, post.post_tokens),
    ):
        n, factor = float(max(1, sums.tokens)), sums.documents / max(1, sums.documents - 1)
        mean = total / n
        residual = (squared - 2 * mean * crossed + mean.square() * sums.tokens_squared).clamp_min(0) * factor
        sides.append((mean, residual / n**2, residual / total.square()))
    error = (sides[0][1] + sides[1][1]).sqrt()
    log_error = (sides[0][2] + sides[1][2]).sqrt()
    seen = torch.minimum(base.seen, post.seen)
    moved = (sides[1][0] - sides[0][0])[1].abs()  # tokens of different documents have no pairs
    return _judge(sides[0][0], sides[1][0], error, log_error, seen, moved, min_documents, min_change)


def holm(p: Tensor) -> Tensor:
    """Holm's adjusted p of every entry [n]: the running maximum of (n − i)·p₍ᵢ₎, at most 1."""
    order = p.argsort()
    factors = torch.arange(len(p), 0, -1, dtype=p.dtype, device=p.device)
    adjusted = torch.empty_like(p)
    adjusted[order] = (p[order] * factors).cummax(0).values.clamp_max(1.0) if len(p) else p
    return adjusted


def two_sided_p(t: Tensor, freedom: Tensor) -> Tensor:
    """P(|T| > |t|) of Student's t, entry by entry: float64 in the shape of ``t``; ``freedom`` of the same shape."""
    return torch.from_numpy(student_t_tail(t.numpy(), freedom.clamp_min(1).numpy()))


def number_documents(documents: Tensor) -> tuple[Tensor, Tensor]:
    """(int64 [n], float64 [D]): documents counted from 0 in their order, and how many rows each has."""
    _, place, sizes = documents.unique(return_inverse=True, return_counts=True)
    return place, sizes.double()


def sum_by_document(features: Tensor, place: Tensor, sizes: Tensor) -> Tensor:
    """float64 [2, D, F] of features [n, F]: rows on which each fires, and the sum of its activations."""
    out = torch.zeros((2, len(sizes), features.shape[1]), dtype=torch.float64, device=features.device)
    out[0].index_add_(0, place, (features > 0).double())
    out[1].index_add_(0, place, features.double())
    return out


def _judge(
    base: Tensor,
    post: Tensor,
    error: Tensor,
    log_error: Tensor,
    seen: Tensor,
    moved: Tensor,
    min_documents: int,
    min_change: float,
) -> Changes:
    change = post - base
    tested = seen >= min_documents
    # a change without any spread over documents is rounding or nothing; it is never a finding
    t = torch.where(error > 0, change / error.clamp_min(1e-300), torch.zeros_like(change))
    p = torch.ones_like(change)
    if bool(tested.any()):
        p[:, tested] = two_sided_p(t[:, tested].cpu(), (seen[tested] - 1).cpu().expand(2, -1)).to(p)
    adjusted = torch.ones_like(p)
    adjusted[:, tested] = holm(p[:, tested].flatten()).view(2, -1)
    ratio = post / base
    counts, places = (seen - 1).clamp_min(1).unique(return_inverse=True)
    quantiles = torch.tensor([student_t_quantile(count) for count in counts.tolist()], dtype=p.dtype).to(p.device)
    low, high = (ratio * torch.exp(sign * quantiles[places] * log_error) for sign in (-1, 1))
    sure = adjusted < ALPHA
    large = (ratio > 1 + min_change) | (ratio < 1 / (1 + min_change))
    return Changes(
        base,
        post,
        change,
        error,
        ratio,
        low,
        high,
        p,
        adjusted,
        tested,
        sure.any(0),
        (sure & large).any(0),
        seen,
        moved,
    )


def match_rates(
    chosen: Sequence[int], rates: Tensor, sizes: Tensor, forbidden: Tensor, draws: Sequence[float]
) -> list[int]:
    """For each chosen feature another one that fires about as often and as strongly, none twice.

    Args:
        chosen: features to be matched, in order; they are never taken themselves.
        rates, sizes: [F], shares of tokens and mean activations where active; features that never fire are not taken.
        forbidden: bool [F], further features that are not taken.
        draws: uniform numbers in [0, 1), one for each: which of the 8 nearest is taken.

    Returns:
        as many features as there are left to take.
    """
    free = (rates > 0) & ~forbidden
    free[list(chosen)] = False
    places = torch.stack([rates.clamp_min(1e-9).log(), sizes.clamp_min(1e-9).log()], dim=1).double()
    matched: list[int] = []
    for feature, draw in zip(chosen, draws, strict=True):
        left = free.nonzero()[:, 0]
        if not len(left):
            break
        distance = (places[left] - places[feature]).square().sum(1)
        nearest = left[distance.argsort()[: min(8, len(left))]]
        taken = int(nearest[int(draw * len(nearest))])
        free[taken] = False
        matched.append(taken)
    return matched


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


# Recorded activations of two models, seen through one dictionary: changes, null tests, scaling, contexts.


@dataclass(frozen=True, slots=True)
class Scaling:
    """``beta`` float64 [2, F] by model (base, post), nan for latents that never fire; ``energy`` [F] is Σf²."""

    beta: Tensor
    energy: Tensor


class LatentScaling:
    """By what factor the direction of each latent is there in the base, and in the post model (Minder et al. 2025).

    For a latent with activations f and direction d, β = Σ f·⟨d, y⟩ / (Σf²·‖d‖²) is the factor with which f·d explains
    y best. The sums take one pass over the tokens.

    Args:
        directions: d [F, width].
    """

    def __init__(self, directions: Tensor) -> None:
        self.directions = directions.detach()
        self.energy = torch.zeros(len(directions), dtype=torch.float64, device=directions.device)
        self.products = torch.zeros((2, len(directions)), dtype=torch.float64, device=directions.device)

    @torch.no_grad()
    def add(self, features: Tensor, base: Tensor, post: Tensor) -> None:
        """Take in latents f [n, F], and y [n, width] of both models."""
        self.energy += features.double().square().sum(0)
        for total, y in zip(self.products, (base, post), strict=True):
            total += (features * (y @ self.directions.T)).sum(0, dtype=torch.float64)

    def result(self, *, of_errors: bool = False) -> Scaling:
        """Return the factors so far; with ``of_errors`` y lacked f·d itself (errors of the reconstruction)."""
        norms = self.energy * self.directions.double().square().sum(1)
        norms = torch.where(norms > 0, norms, torch.full_like(norms, float("nan")))
        return Scaling((self.products + norms if of_errors else self.products) / norms, self.energy.clone())


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
        return self.scaling.beta[1] / self.scaling.beta[0]


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
    scaling = LatentScaling(dictionary.W_dec)
    for start, end in StoreRows(store, site, "base").whole_documents(CHUNK_ROWS):
        rows = torch.arange(start, end)
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
        scaling.add(before, base - reconstruction, post - reconstruction)
    paired = partial(paired_changes, min_documents=min_documents, min_change=min_change)
    halves = unpaired_changes(sums["even"], sums["odd"], min_documents=min_documents, min_change=min_change)
    nulls = {"itself": paired(sums["itself"]), "swapped": paired(sums["swapped"]), "halves": halves}
    quality = {}
    for source in ("base", "post"):
        held_out = measure(dictionary, in_batches(StoreRows(store, site, source), held_out_start, store.num_rows))
        quality[source] = held_out.numbers()
    return Seen(paired(sums["real"]), nulls, scaling.result(of_errors=True), quality)


@torch.no_grad()
def scale_difference(store: ActivationStore, site: str, dictionary: Dictionary) -> Scaling:
    """Scale the latents of a dictionary of the difference: look for them in both models' activations about the mean."""
    device = dictionary.b_dec.device
    sums = LatentScaling(dictionary.W_dec)
    sides = [StoreRows(store, site, name) for name in ("base", "post")]
    totals = torch.zeros((2, dictionary.d), dtype=torch.float64)
    for total, rows in zip(totals, sides, strict=True):
        for x in in_batches(rows, 0, store.num_rows):
            total += x.double().sum(0)
    means = (totals / store.num_rows).float()
    for pair in zip(*(in_batches(rows, 0, store.num_rows) for rows in sides), strict=True):
        x = torch.stack(pair).to(device)
        sums.add(dictionary.encode(x[1] - x[0]), *(x - means[:, None].to(device)))
    return sums.result()


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
        masks = [place < 0, place >= 0, *(place == i for i in range(places))]
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


def _where_changed(delta: Tensor, tokens: Tensor, tokenizer: Any) -> list[list[Any]]:
    """The five tokens that carry most of a feature's change: [text, share of Σ|Δ|, mean Δ there]."""
    size = int(tokens.max()) + 1
    amount = torch.zeros(size, dtype=torch.float64).index_add_(0, tokens, delta.double().abs())
    signed = torch.zeros(size, dtype=torch.float64).index_add_(0, tokens, delta.double())
    number = torch.bincount(tokens, minlength=size)
    total = float(amount.sum())
    best = amount.topk(min(5, size)).indices.tolist()
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
