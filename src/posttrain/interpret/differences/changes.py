"""Changes of features between two models that read the same tokens: in firing rate and in mean activation.

Tokens of one document depend on each other, so documents are the units of chance. With bᵢ and pᵢ a feature's sum over
document i in the base and in the post model, nᵢ the document's tokens, and capitals for sums over the D documents, the
change δ = (P − B)/N and the ratio P/B have the variances

    Var δ = D/(D−1) · Σ (pᵢ − bᵢ − δ nᵢ)² / N²         Var log(P/B) = D/(D−1) · Σ (pᵢ/P − bᵢ/B)²

of ratio estimators by linearization (Cochran 1977, "Sampling Techniques", 6.3 and 6.4). The hypothesis δ = 0 is tested
with Student's t whose degrees of freedom are those of the documents that the feature fires in, not of all. Over all
features and both measures Holm's rule (1979) keeps the chance of a single false finding at 5 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from posttrain.evaluation.comparisons import holm
from posttrain.evaluation.statistics import student_t_quantile, student_t_tail
from posttrain.interpret.activations.shards import ActivationStore
from posttrain.interpret.saes.fitting import StoreRows, in_batches, measure_quality
from posttrain.interpret.saes.sae import SparseAutoencoder
from posttrain.randomness import generator

MEASURES = ("rate", "mean")
MIN_DOCUMENTS = 12  # a feature of fewer documents is not tested
MIN_CHANGE = 0.2  # a smaller change, however sure, does not count
ALPHA = 0.05
CHUNK_ROWS = 8192


@dataclass(frozen=True, slots=True)
class Changes:
    """Numbers of every feature, float64 [2, F] by measure (``rate``: share of tokens; ``mean`` activation).

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
        """Return features by how far their activations moved, those that count as changed first: int64 [F]."""
        size = self.moved
        return torch.argsort(size + self.changed * (size.max() + 1.0), descending=True, stable=True)


def sum_by_document(features: Tensor, documents: Tensor) -> Tensor:
    """Return float64 [2, D, F] on the CPU: rows on which a feature fires in a document, and its sum of activations.

    ``features`` [n, F] are of whole documents; ``documents`` int64 [n]: the document of each row.
    """
    place = documents.unique(return_inverse=True)[1].to(features.device)
    num_documents = int(place.max()) + 1
    shape = (2, num_documents, features.shape[1])
    out = torch.zeros(shape, dtype=torch.float64, device=features.device)
    out[0].index_add_(0, place, (features > 0).double())
    out[1].index_add_(0, place, features.double())
    return out.cpu()


def paired_changes(
    base: Tensor,
    post: Tensor,
    sizes: Tensor,
    moved: Tensor | None = None,
    *,
    min_documents: int = MIN_DOCUMENTS,
    min_change: float = MIN_CHANGE,
) -> Changes:
    """Return the changes between two models on the same documents.

    ``base``, ``post``: ``sum_by_document`` of both. ``sizes`` [D]: tokens of each document. ``moved`` float64 [F]:
    Σ (post − base)² over tokens.
    """
    n = sizes.double().sum()
    factor = len(sizes) / max(1, len(sizes) - 1)
    total_base = base.sum(1)
    total_post = post.sum(1)
    delta = (total_post - total_base) / n
    expected = delta[:, None] * sizes.double()[:, None]
    residual = (post - base - expected).square().sum(1)
    share_base = base / total_base[:, None]
    share_post = post / total_post[:, None]
    spread = (share_post - share_base).square().sum(1)
    error = (factor * residual).sqrt() / n
    log_error = (factor * spread).sqrt()
    fires = (base[0] > 0) | (post[0] > 0)
    seen = fires.sum(0)
    if moved is None:
        size = torch.zeros(base.shape[2], dtype=torch.float64)
    else:
        size = (moved / n).sqrt()
    return _judge(total_base / n, total_post / n, error, log_error, seen, size, min_documents, min_change)


def unpaired_changes(
    base: tuple[Tensor, Tensor],
    post: tuple[Tensor, Tensor],
    *,
    min_documents: int = MIN_DOCUMENTS,
    min_change: float = MIN_CHANGE,
) -> Changes:
    """Return the same between different documents: (``sum_by_document``, tokens of each) of both sides."""
    means = []
    variances = []  # of the means
    log_variances = []
    counts = []
    for sums, sizes in (base, post):
        n = sizes.double().sum()
        factor = len(sizes) / max(1, len(sizes) - 1)
        total = sums.sum(1)
        mean = total / n
        expected = mean[:, None] * sizes.double()[:, None]
        residual = (sums - expected).square().sum(1) * factor
        means.append(mean)
        variances.append(residual / n**2)
        log_variances.append(residual / total.square())
        counts.append((sums[0] > 0).sum(0))
    error = (variances[0] + variances[1]).sqrt()
    log_error = (log_variances[0] + log_variances[1]).sqrt()
    seen = torch.minimum(counts[0], counts[1])
    moved = (means[1] - means[0])[1].abs()
    return _judge(means[0], means[1], error, log_error, seen, moved, min_documents, min_change)


def two_sided_p(t: Tensor, freedom: Tensor) -> Tensor:
    """Return P(|T| > |t|) of Student's t, entry by entry, float64; ``freedom`` has the shape of ``t``."""
    tail = student_t_tail(t.numpy(), freedom.clamp_min(1).numpy())
    return torch.from_numpy(tail)


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
    ratio = post / base
    tested = seen >= min_documents
    # a change without any spread over documents is rounding or nothing; it is never a finding
    t = torch.where(error > 0, change / error.clamp_min(1e-300), torch.zeros_like(change))
    p = torch.ones_like(change)
    adjusted = torch.ones_like(change)
    if bool(tested.any()):
        p[:, tested] = two_sided_p(t[:, tested], (seen[tested] - 1).expand(2, -1))
        adjusted[:, tested] = torch.from_numpy(holm(p[:, tested].flatten().numpy())).view(2, -1)
    counts, places = (seen - 1).clamp_min(1).unique(return_inverse=True)
    by_count = [student_t_quantile(count) for count in counts.tolist()]
    quantiles = torch.tensor(by_count, dtype=p.dtype)[places]
    low = ratio * torch.exp(-quantiles * log_error)
    high = ratio * torch.exp(quantiles * log_error)
    sure = adjusted < ALPHA
    large = (ratio > 1 + min_change) | (ratio < 1 / (1 + min_change))
    significant = sure.any(0)
    changed = (sure & large).any(0)
    return Changes(
        base=base,
        post=post,
        change=change,
        error=error,
        ratio=ratio,
        low=low,
        high=high,
        p=p,
        adjusted=adjusted,
        tested=tested,
        significant=significant,
        changed=changed,
        documents=seen,
        moved=moved,
    )


def match_rates(
    chosen: Sequence[int], rates: Tensor, sizes: Tensor, forbidden: Tensor, draws: Sequence[float]
) -> list[int]:
    """Return for each chosen feature another one that fires about as often and as strongly, none twice.

    There are fewer where no more are left. ``rates``, ``sizes`` [F]: shares of tokens, and mean activations where
    active. Chosen, ``forbidden`` (bool [F]) and silent features are not taken. ``draws``: for each a number in [0, 1)
    that chooses one of the 8 nearest.
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
        num_near = min(8, len(left))
        nearest = left[distance.argsort()[:num_near]]
        taken = int(nearest[int(draw * num_near)])
        free[taken] = False
        matched.append(taken)
    return matched


def random_features(changes: Changes, ranked: Sequence[int], seed: int, draw: int) -> list[int]:
    """Return features that did not change, one for each of ``ranked``, that fire about as often and as strongly."""
    rates, means = changes.post
    sizes = torch.where(rates > 0, means / rates.clamp_min(1e-12), torch.zeros_like(rates))
    uniform = generator(seed, "what changed: random features", draw).random(len(ranked)).tolist()
    forbidden = changes.changed
    num_free = int((~forbidden & (rates > 0)).sum())
    if num_free < len(ranked):  # nearly everything changed: then any other will do
        forbidden = torch.zeros_like(forbidden)
    return match_rates(ranked, rates, sizes, forbidden, uniform)


@dataclass(frozen=True, slots=True)
class Seen:
    """Two models through one dictionary of the base.

    ``nulls``: the same measurement where nothing can have changed, by name: ``itself`` (the base twice), ``swapped``
    (base and post exchanged in a random half of the documents), ``halves`` (the base on two halves of the documents).
    ``energy`` [F]: Σf² in the base. ``amplification`` [F]: by latent scaling (Minder et al. 2025), the factor by which
    the post model has a feature's direction where the base has the feature; nan where it never fires. ``quality``: FVU,
    L0 and silent share by model on held-out documents.
    """

    changes: Changes
    nulls: dict[str, Changes]
    energy: Tensor
    amplification: Tensor
    quality: dict[str, dict[str, float]]


def scale_latents(features: Tensor, errors: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
    """Return sums for latent scaling over tokens: Σf² [F], and Σ f·⟨d, y⟩ + Σf²·‖d‖² [F], float64.

    The second over Σf²·‖d‖² is β, the factor with which f·d explains best the activations whose reconstruction error,
    with features f [n, F] and directions d [F, width] of the base, is y [n, width].
    """
    energy = features.double().square().sum(0)
    products = (features * (errors @ directions.T)).sum(0, dtype=torch.float64)
    norms = directions.double().square().sum(1)
    return energy.cpu(), (products + energy * norms).cpu()


@torch.no_grad()
def see_changes(
    store: ActivationStore,
    site: str,
    sae: SparseAutoencoder,
    *,
    held_out_start: int,
    seed: int,
    min_documents: int = MIN_DOCUMENTS,
    min_change: float = MIN_CHANGE,
) -> Seen:
    """Measure the changes of one dictionary's features in a paired store, in one pass."""
    device = sae.b_dec.device
    directions = sae.W_dec.detach()
    base_rows = StoreRows(store, site, "base")
    post_rows = StoreRows(store, site, "post")
    documents = store.documents(torch.arange(store.num_rows))
    numbers, sizes = documents.unique(return_counts=True)
    sums: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])  # of the base, the post model, the base again
    moved = torch.zeros(sae.features, dtype=torch.float64)
    energy = torch.zeros(sae.features, dtype=torch.float64)
    present = torch.zeros((2, sae.features), dtype=torch.float64)
    for start, end in base_rows.whole_documents(CHUNK_ROWS):
        rows = torch.arange(start, end)
        base = base_rows.gather(rows).to(device)
        post = post_rows.gather(rows).to(device)
        before = sae.encode(base)
        after = sae.encode(post)
        again = sae.encode(base)
        for parts, features in zip(sums, (before, after, again), strict=True):
            parts.append(sum_by_document(features, documents[rows]))
        moved += (after - before).square().sum(0, dtype=torch.float64).cpu()
        reconstruction = sae.decode(before)
        for side, x in enumerate((base, post)):
            squares, scaled = scale_latents(before, x - reconstruction, directions)
            present[side] += scaled
        energy += squares
    b, p, same = (torch.cat(parts, dim=1) for parts in sums)
    paired = partial(paired_changes, sizes=sizes, min_documents=min_documents, min_change=min_change)
    is_swapped = generator(seed, "what changed: swapped").random(store.num_documents) < 0.5
    swap = torch.from_numpy(is_swapped)[numbers][:, None]
    is_even = numbers % 2 == 0
    even = (b[:, is_even], sizes[is_even])
    odd = (b[:, ~is_even], sizes[~is_even])
    nulls = {
        "itself": paired(b, same),
        "swapped": paired(torch.where(swap, p, b), torch.where(swap, b, p)),
        "halves": unpaired_changes(even, odd, min_documents=min_documents, min_change=min_change),
    }
    quality = {}
    for name, rows_of_side in (("base", base_rows), ("post", post_rows)):
        held_out = in_batches(rows_of_side, held_out_start, store.num_rows)
        quality[name] = measure_quality(sae, held_out).numbers()
    amplification = torch.where(energy > 0, present[1] / present[0], torch.nan)
    return Seen(paired(b, p, moved=moved), nulls, energy, amplification, quality)
