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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.evals.seeds import student_t_quantile, student_t_tail

MEASURES = ("rate", "mean")
# A feature of fewer documents is not tested: its t would rest on a handful of numbers.
MIN_DOCUMENTS = 12
# A change smaller than this, however sure, is not called one.
MIN_CHANGE = 0.2
ALPHA = 0.05


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


def document_batches(documents: Tensor, size: int = 8192) -> Iterator[Tensor]:
    """Row numbers int64, whole documents together, about ``size`` at a time; ``documents`` [n] are in order."""
    if not len(documents):
        return
    ends = [*((documents[1:] != documents[:-1]).nonzero()[:, 0] + 1).tolist(), len(documents)]
    start = 0
    for i, end in enumerate(ends):
        following = ends[i + 1] if i + 1 < len(ends) else None
        if following is None or following - start > size:
            yield torch.arange(start, end)
            start = end


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
