"""Feature changes between two models on the same tokens: firing rate and mean activation.

Tokens within a document are dependent, so documents are the sampling units. Let bᵢ and pᵢ be a feature's sums over
document i in the base and post model, nᵢ the document's tokens, and capitals the sums over D documents. The change
δ = (P − B)/N and the ratio P/B have variances

    Var δ = D/(D−1) · Σ (pᵢ − bᵢ − δ nᵢ)² / N²         Var log(P/B) = D/(D−1) · Σ (pᵢ/P − bᵢ/B)²

from linearized ratio estimators (Cochran 1977, "Sampling Techniques", 6.3 and 6.4). The hypothesis δ = 0 is tested
with Student's t; degrees of freedom count only documents where the feature fires. Holm's method (1979), applied across
features and both measures, keeps the family-wise error rate at 5 %.
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
MIN_DOCUMENTS = 12  # features firing in fewer documents are not tested
MIN_CHANGE = 0.2  # smaller changes never count, even if significant
ALPHA = 0.05
CHUNK_ROWS = 8192


@dataclass(frozen=True, slots=True)
class Changes:
    """Per-feature statistics, float64 [2, F], by measure (``rate``: fraction of tokens; ``mean`` activation).

    ``change`` = post − base with standard ``error``; ``ratio`` post/base with 95 % interval ``low`` to ``high`` (inf
    or nan if the base never fires). ``p``: two-sided, 1 if untested; ``adjusted`` by Holm's method. bool [F]:
    ``tested``, ``significant`` (adjusted p below 5 %) and ``changed`` (for some measure both significant and larger
    than ``min_change``, 20 % by default). ``documents`` [F]: number of documents where it fires. ``moved`` [F]: RMS
    change in activation over tokens; for unpaired documents, the absolute change in mean activation.
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
        """Rank features by ``moved``, with ``changed`` features first: int64 [F]."""
        size = self.moved
        return torch.argsort(size + self.changed * (size.max() + 1.0), descending=True, stable=True)


def sum_by_document(features: Tensor, documents: Tensor) -> Tensor:
    """Sum per document on the CPU, float64 [2, D, F]: rows where a feature fires, and activations.

    ``features`` [n, F] must cover whole documents; ``documents`` int64 [n]: each row's document.
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
    """Compute changes between two models on the same documents.

    ``base``, ``post``: from ``sum_by_document``. ``sizes`` [D]: document lengths. ``moved`` float64 [F]: Σ (post −
    base)² over tokens.
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
    """Compute changes on different documents: (``sum_by_document``, document lengths) for each model."""
    means = []
    variances = []  # for the averages
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
    """Compute P(|T| > |t|) for Student's t, elementwise, float64; ``freedom`` is shaped like ``t``."""
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
    # zero spread over documents means rounding noise or no change; never significant
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
    """Match each chosen feature with a different one of similar rate and strength, without duplicates.

    Returns fewer if none remain. ``rates``, ``sizes`` [F]: fraction of active tokens, and average activation when
    active. Chosen, ``forbidden`` (bool [F]) and silent features are excluded. ``draws``: numbers in [0, 1), each
    choosing among the 8 nearest.
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
    """Draw an unchanged feature for every entry in ``ranked``, matched by rate and strength."""
    rates, means = changes.post
    sizes = torch.where(rates > 0, means / rates.clamp_min(1e-12), torch.zeros_like(rates))
    uniform = generator(seed, "what changed: random features", draw).random(len(ranked)).tolist()
    forbidden = changes.changed
    num_free = int((~forbidden & (rates > 0)).sum())
    if num_free < len(ranked):  # too few unchanged: allow any feature
        forbidden = torch.zeros_like(forbidden)
    return match_rates(ranked, rates, sizes, forbidden, uniform)


@dataclass(frozen=True, slots=True)
class DictionaryChanges:
    """Feature changes between two models, measured with one base dictionary.

    ``nulls``: comparisons without true changes: ``itself`` (base twice), ``swapped`` (base and post exchanged in a
    random half of documents), ``halves`` (base on two halves). ``energy`` [F]: Σf² in the base. ``amplification``
    [F]: latent scaling ratio β_post / β_base (Minder et al. 2025), comparing how strongly both models use a feature's
    direction where it fires in the base; nan if it never fires. ``quality``: FVU, L0, silent and dense fractions by
    model on held-out documents.
    """

    changes: Changes
    nulls: dict[str, Changes]
    energy: Tensor
    amplification: Tensor
    quality: dict[str, dict[str, float]]


def scale_latents(features: Tensor, errors: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
    """Sum latent-scaling terms over tokens: Σf² [F], and Σ f·⟨d, y⟩ + Σf²·‖d‖² [F], float64.

    Dividing the second by Σf²·‖d‖² gives β, the least-squares factor for explaining activations by f·d. Inputs: base
    features f [n, F], directions d [F, width], and reconstruction errors y [n, width].
    """
    energy = features.double().square().sum(0)
    products = (features * (errors @ directions.T)).sum(0, dtype=torch.float64)
    norms = directions.double().square().sum(1)
    return energy.cpu(), (products + energy * norms).cpu()


@torch.no_grad()
def measure_changes(
    store: ActivationStore,
    site: str,
    sae: SparseAutoencoder,
    *,
    held_out_start: int,
    seed: int,
    min_documents: int = MIN_DOCUMENTS,
    min_change: float = MIN_CHANGE,
) -> DictionaryChanges:
    """Measure one dictionary's feature changes on a paired store, in a single pass."""
    device = sae.b_dec.device
    directions = sae.W_dec.detach()
    base_rows = StoreRows(store, site, "base")
    post_rows = StoreRows(store, site, "post")
    documents = store.documents(torch.arange(store.num_rows))
    numbers, sizes = documents.unique(return_counts=True)
    sums: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])  # base, post, base again
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
    return DictionaryChanges(paired(b, p, moved=moved), nulls, energy, amplification, quality)
