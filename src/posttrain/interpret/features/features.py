"""Feature descriptions for a dictionary: contexts, density, promoted tokens.

Contexts come from one exact pass over recorded activations. Each document contributes only the token with the
strongest activation, and documents sharing the text up to this token count once: activations depend only on earlier
tokens, so later copies are redundant.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttrain.errors import UsageError
from posttrain.interpret.activations.shards import INDEX, ActivationStore
from posttrain.interpret.activations.sites import tokenizer_hash
from posttrain.interpret.features.lens import CONVENTION, Lens, Likely, build_lens, show_tokens
from posttrain.interpret.saes.fitting import StoreRows
from posttrain.interpret.saes.sae import Metadata, SparseAutoencoder, load_sae, read_metadata
from posttrain.interpret.saes.sae_recipe import ACTIVATIONS, DIFFERENCE, load_sae_recipe
from posttrain.models.load import load_model, load_tokenizer
from posttrain.recipes.sections import ModelSection
from posttrain.store.durable import replace_file
from posttrain.types import Tokenizer

NUM_BINS = 32
MAX_ELEMENTS = 1 << 26  # activations per chunk: 256 MiB in fp32, unless a single document is larger
ENCODED_ROWS = 1024
CONTEXT_CONVENTION = (
    "strongest activations over all recorded rows: one token per document, and one document per distinct prefix"
)
FeatureReport = dict[str, Any]  # ``about`` and ``features``, see ``features.json``


class FeatureStatistics:
    """Statistics for S features over ``rows`` rows, collected in one pass.

    ``active`` int64 [S]: number of rows with activation above 0; ``total`` float64 [S]: summed activation;
    ``maximum`` float32 [S]. ``counts`` int64 [S, NUM_BINS]: histogram of activations starting at 0; ``exponents``
    int64 [S]: bins are 2**exponent / NUM_BINS wide. ``top`` float32 [K, S]: strongest activation per context,
    descending (0: no further contexts); ``top_rows`` int64 [K, S]: row index (-1: none); ``windows`` float32 [K, S,
    before + 1 + after]: activations at surrounding tokens, NaN outside the document or for dropped rows.
    """

    def __init__(
        self, sae: SparseAutoencoder, source: StoreRows, chosen: Tensor, contexts: int, before: int, after: int
    ) -> None:
        self.dictionary = sae
        self.source = source
        self.before = before
        self.rows = 0
        self.device = sae.b_dec.device
        device = self.device
        self.chosen = chosen.to(device)
        size = len(chosen)
        width = before + 1 + after
        self.active = torch.zeros(size, dtype=torch.int64, device=device)
        self.exponents = torch.zeros(size, dtype=torch.int64, device=device)
        self.total = torch.zeros(size, dtype=torch.float64, device=device)
        self.maximum = torch.zeros(size, device=device)
        self.counts = torch.zeros((size, NUM_BINS), dtype=torch.int64, device=device)
        self.keys = torch.zeros((contexts, size), dtype=torch.int64, device=device)
        self.top = torch.zeros((contexts, size), device=device)
        self.top_rows = torch.full((contexts, size), -1, dtype=torch.int64, device=device)
        self.windows = torch.full((contexts, size, width), torch.nan, device=device)

    def _encode(self, rows: Tensor) -> Tensor:
        """Encode rows to float32 [n, S]."""
        parts = []
        for part in rows.split(ENCODED_ROWS):
            x = self.source.gather(part).to(self.device)
            parts.append(self.dictionary.encode(x)[:, self.chosen])
        return torch.cat(parts)

    def read(self, start: int, end: int) -> None:
        """Add rows ``start`` … ``end``, which must be whole documents."""
        values = self._encode(torch.arange(start, end))
        is_active = values > 0
        self.rows += len(values)
        self.active += is_active.sum(0)
        self.total += values.sum(0, dtype=torch.float64)
        self.maximum = torch.maximum(self.maximum, values.amax(0))
        self._widen(torch.frexp(self.maximum).exponent.long())
        places, features = is_active.nonzero(as_tuple=True)
        shifts = -self.exponents[features]
        scaled = torch.ldexp(values[places, features], shifts) * NUM_BINS
        slots = features * NUM_BINS + scaled.long()
        added = torch.bincount(slots, minlength=self.counts.numel())
        self.counts += added.view_as(self.counts)
        self._keep_strongest(values, start, end)

    def _widen(self, exponents: Tensor) -> None:
        """Extend histograms up to 2**exponents by merging neighboring bins."""
        self.exponents = torch.where(self.counts.sum(1) == 0, exponents, self.exponents)
        grows = self.exponents < exponents
        while bool(grows.any()):
            joined = torch.zeros_like(self.counts)
            pairs = self.counts.view(-1, NUM_BINS // 2, 2)
            joined[:, : NUM_BINS // 2] = pairs.sum(2)
            self.counts = torch.where(grows[:, None], joined, self.counts)
            self.exponents = self.exponents + grows.long()
            grows = self.exponents < exponents

    def _keep_strongest(self, values: Tensor, start: int, end: int) -> None:
        """Merge each document's strongest row into ``top``, keeping one row per distinct prefix."""
        size = len(self.top)
        store = self.source.store
        rows = torch.arange(start, end)
        documents, counts = store.documents(rows).unique_consecutive(return_counts=True)
        prefixes = [hash_prefixes(store.document_tokens(int(number))) for number in documents.tolist()]
        ends = torch.tensor([0, *map(len, prefixes)]).cumsum(0)
        first_tokens = ends[:-1].repeat_interleave(counts)
        hashes = torch.cat(prefixes)[first_tokens + store.positions(rows)].to(self.device)
        strongest = [part.max(0) for part in values.split(counts.tolist())]
        maxima = torch.stack([value for value, _ in strongest])
        places = torch.stack([place for _, place in strongest])
        starts = (counts.cumsum(0) - counts).to(self.device)
        local = places + starts[:, None]
        top = torch.cat([self.top, maxima])
        keys = torch.cat([self.keys, hashes[local]])
        top_rows = torch.cat([self.top_rows, local + start])
        falling = top.argsort(dim=0, descending=True, stable=True)
        is_twin = _later_twins(keys.gather(0, falling))
        twins_last = is_twin.long().argsort(dim=0, stable=True)
        kept = falling.gather(0, twins_last)[:size]
        self.top = top.gather(0, kept)
        self.keys = keys.gather(0, kept)
        self.top_rows = top_rows.gather(0, kept).masked_fill(self.top <= 0, -1)

    def look_around(self, before: int, after: int) -> None:
        """Fill ``windows`` by rereading the documents containing contexts."""
        store = self.source.store
        rank, feature = (self.top_rows >= 0).nonzero(as_tuple=True)
        rows, order = self.top_rows[rank, feature].cpu().sort()
        documents, counts = store.documents(rows).unique_consecutive(return_counts=True)
        sizes = counts.tolist()
        parts = zip(documents.tolist(), rows.split(sizes), order.split(sizes), strict=True)
        for number, those, contexts in parts:
            start = max(0, int(those[0]) - before)
            end = min(int(those[-1]) + after + 1, self.source.num_rows)
            near = torch.arange(start, end)
            near = near[store.documents(near) == number]
            offsets = store.positions(near) - store.positions(those)[:, None]
            places = offsets + before
            is_inside = (places >= 0) & (places <= before + after)
            which, column = is_inside.nonzero(as_tuple=True)
            chosen = contexts[which].to(rank.device)
            features = feature[chosen]
            values = self._encode(near)[column.to(rank.device), features]
            slots = places[which, column].to(rank.device)
            self.windows[rank[chosen], features, slots] = values


@torch.no_grad()
def find_contexts(
    sae: SparseAutoencoder,
    rows: StoreRows,
    *,
    features: Tensor | None = None,
    contexts: int = 10,
    before: int = 20,
    after: int = 10,
    chunk_rows: int = 8192,
) -> FeatureStatistics:
    """Collect statistics in a single ordered pass over all rows, on the dictionary's device.

    ``features`` int64 [S] (None: all). ``contexts``: K per feature, each with activations for ``before`` and ``after``
    surrounding tokens. ``chunk_rows``: approximate rows per chunk; results do not depend on it.
    """
    if features is None:
        features = torch.arange(sae.features)
    limit = max(1, min(chunk_rows, MAX_ELEMENTS // sae.features))
    found = FeatureStatistics(sae, rows, features, contexts, before, after)
    for start, end in rows.whole_documents(limit):
        found.read(start, end)
    found.look_around(before, after)
    return found


def hash_prefixes(ids: list[int]) -> Tensor:
    """Hash each token's prefix, including the token: int64 [T]."""
    tokens = np.asarray(ids, dtype=np.uint64)
    mixed = tokens + (np.arange(1, len(ids) + 1, dtype=np.uint64) << np.uint64(32))
    with np.errstate(over="ignore"):  # splitmix64, modulo 2**64
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        mixed ^= mixed >> np.uint64(31)
        return torch.from_numpy(np.cumsum(mixed, dtype=np.uint64).view(np.int64))


def _later_twins(keys: Tensor) -> Tensor:
    """Mark repeated keys within each column, except the first: bool [m, S]."""
    order = keys.argsort(dim=0, stable=True)
    ranked = keys.gather(0, order)
    same = torch.zeros_like(ranked, dtype=torch.bool)
    same[1:] = ranked[1:] == ranked[:-1]
    return torch.zeros_like(same).scatter(0, order, same)


def check_features(sae: SparseAutoencoder, features: Sequence[int] | None) -> Tensor:
    """Validate feature numbers and drop duplicates, int64 [S]; None selects all features."""
    if features is None:
        return torch.arange(sae.features)
    for number in features:
        if not 0 <= number < sae.features:
            raise UsageError(f"feature {number}: this dictionary has {sae.features}, from 0 to {sae.features - 1}")
    return torch.tensor(list(dict.fromkeys(features)), dtype=torch.long)


def describe_features(
    sae: SparseAutoencoder,
    rows: StoreRows,
    *,
    features: Sequence[int] | None = None,
    contexts: int = 10,
    tokens: int = 10,
    lens: Lens | None = None,
    tokenizer: Tokenizer | None = None,
    about: dict[str, object] | None = None,
) -> FeatureReport:
    """Describe a dictionary's features on raw activations, in one pass over rows.

    Per feature: ``density`` (fraction of active rows); ``mean`` over active rows, and ``max``; a ``histogram``
    starting at 0; ``promoted`` and ``suppressed`` tokens [text, id, logit]; ``contexts`` with ``tokens`` beginning at
    ``start`` in ``document``, per-token ``activations`` (null: row dropped), and the strongest at ``position``.
    Without a lens, promoted tokens are missing; without a tokenizer, token ids are shown.
    """
    store = rows.store
    if rows.d != sae.d:
        raise UsageError(
            f"{store.folder}: width {rows.d}, but the dictionary expects {sae.d}; give its training "
            "activations, or compatible ones"
        )
    chosen = check_features(sae, features)
    found = find_contexts(sae, rows, features=chosen, contexts=contexts)
    ends = None
    convention = ""
    if lens is not None:
        ends = lens.extremes(sae.W_dec[chosen.to(sae.W_dec.device)], tokens)
        convention = CONVENTION
    described: dict[str, object] = {}
    if about is not None:
        described |= about
    described |= {
        "rows": found.rows,
        "documents": store.num_documents,
        "dictionary_features": sae.features,
        "features_shown": len(chosen),
        "active_per_row": float(found.active.sum()) / max(1, found.rows),
        "silent": int((found.active == 0).sum()),
        "contexts": CONTEXT_CONVENTION,
        "logit_lens": convention,
    }
    return {"about": described, "features": _describe(found, store, ends, tokenizer)}


def _describe(
    found: FeatureStatistics,
    store: ActivationStore,
    ends: tuple[list[list[Likely]], list[list[Likely]]] | None,
    tokenizer: Tokenizer,
) -> list[FeatureReport]:
    def texts(tokens: Sequence[int]) -> list[str]:
        if tokenizer is None:
            return [f"<{token}>" for token in tokens]
        return show_tokens(tokenizer, tokens)

    active = found.active.tolist()
    totals = found.total.tolist()
    maxima = found.maximum.tolist()
    around = _contexts(found, store, texts)
    described = []
    for i, number in enumerate(found.chosen.tolist()):
        counts = found.counts[i].tolist()
        last = max((place for place, count in enumerate(counts) if count), default=-1)
        width = math.ldexp(1.0, int(found.exponents[i])) / NUM_BINS
        mean = 0.0
        if active[i]:
            mean = totals[i] / active[i]
        promoted: list[list[object]] = []
        suppressed: list[list[object]] = []
        if ends is not None:
            for shown, likely in zip((promoted, suppressed), ends, strict=True):
                for token, logit in likely[i]:
                    shown.append([*texts([token]), token, rounded(logit)])
        described.append(
            {
                "feature": number,
                "active": active[i],
                "density": rounded(active[i] / max(1, found.rows)),
                "mean": rounded(mean),
                "max": rounded(maxima[i]),
                "histogram": {"bin_width": width, "counts": counts[: last + 1]},
                "promoted": promoted,
                "suppressed": suppressed,
                "contexts": around[i],
            }
        )
    return described


def _contexts(
    found: FeatureStatistics, store: ActivationStore, texts: Callable[[Sequence[int]], list[str]]
) -> list[list[FeatureReport]]:
    """Build each feature's contexts, ordered like the columns."""
    rows = found.top_rows.T.cpu()  # [S, K]
    flat = rows.reshape(-1).clamp(min=0)
    documents = store.documents(flat).view_as(rows).tolist()
    positions = store.positions(flat).view_as(rows).tolist()
    values = found.top.T.tolist()
    windows = found.windows.transpose(0, 1).tolist()
    contexts: list[list[FeatureReport]] = [[] for _ in values]
    for i, column in enumerate(values):
        for value, document, position, window in zip(column, documents[i], positions[i], windows[i], strict=True):
            if value <= 0:
                break
            start = max(0, position - found.before)
            inside = window[start - (position - found.before) :]
            shown = store.document_tokens(document)[start : start + len(inside)]
            activations: list[float | None] = []
            for x in inside[: len(shown)]:
                if math.isnan(x):
                    activations.append(None)
                else:
                    activations.append(rounded(x))
            contexts[i].append(
                {
                    "activation": rounded(value),
                    "document": document,
                    "position": position,
                    "start": start,
                    "tokens": texts(shown),
                    "activations": activations,
                }
            )
    return contexts


def write_features(report: FeatureReport, path: str | Path) -> Path:
    """Write ``features.json``: ``about``, followed by one feature per line including its page address."""
    place = Path(path)
    page = place.with_suffix(".html").name
    lines = []
    for feature in report["features"]:
        address = f"{page}#feature-{feature['feature']}"
        lines.append(json.dumps({"address": address} | feature))
    listed = ",\n".join(lines)
    replace_file(place, f'{{"about": {json.dumps(report["about"])},\n"features": [\n{listed}\n]}}\n'.encode())
    return place


def rounded(value: float) -> float:
    """Round to five significant digits for display."""
    return float(f"{value:.5g}")


def read_features(
    name: str,
    folder: Path,
    activations: str | Path,
    resolve: Callable[[str], str],
    *,
    model: str | None = None,
    source: str | None = None,
    features: Sequence[int] | None = None,
    contexts: int = 10,
    with_lens: bool = True,
) -> FeatureReport:
    """Describe a stored dictionary's features; ``about["notices"]`` warns if rows come from a different model.

    ``resolve`` maps a model name to a loadable name; ``model`` and ``source`` default to the dictionary's training
    data.

    Raises:
        UsageError: no such feature, source or model, or a model whose tokenizer differs from the recording.
    """
    sae = load_sae(folder)
    metadata = read_metadata(folder)
    check_features(sae, features)
    store = ActivationStore(activations)
    rows = _choose_rows(store, metadata, source)
    if not model:
        if metadata.models:
            model = metadata.models[-1].get("model")
        else:
            model = metadata.model_name
    lens, tokenizer = _load_lens(model, store, resolve, with_lens=with_lens)
    about: dict[str, object] = {
        "dictionary": name,
        "model": model or "",
        "site": rows.site,
        "source": rows.source,
        "activations": str(store.folder),
        "data": store.index.data,
        "layer_convention": store.index.layer_convention,
        "notices": _warnings(metadata, rows, model),
    }
    device = "cpu"
    if torch.cuda.is_available():
        device = "cuda"
    return describe_features(
        sae.to(device),
        rows,
        features=features,
        contexts=contexts,
        lens=lens,
        tokenizer=tokenizer,
        about=about,
    )


def _choose_rows(store: ActivationStore, metadata: Metadata, source: str | None) -> StoreRows:
    """Select rows for the dictionary's site and ``source``, defaulting to its training source."""
    known = store.sources
    if len(known) > 1:
        known = (*known, DIFFERENCE)
    if not source and metadata.source in known:
        source = metadata.source
    if not source and len(known) > 1:
        raise UsageError(f"--source: required, because {store.folder} has {', '.join(store.sources)} and difference")
    site = None
    if metadata.site in store.sites:
        site = metadata.site
    return StoreRows(store, site, source or None)


def default_activations(folder: Path, run: Path | None) -> Path:
    """Find a dictionary's training activations: recorded inside its run, or the folder given in its recipe."""
    remedy = "give --activations FOLDER, made by `posttrain activations`"
    if run is None:
        raise UsageError(f"{folder}: unknown training activations, because this dictionary is outside a run; {remedy}")
    recorded = load_sae_recipe(str(run / "recipe.yaml")).activations.folder
    if recorded is None:
        place = run / ACTIVATIONS
    else:
        place = Path(recorded)
    if not (place / INDEX).is_file():
        raise UsageError(f"{run}: activations missing from {place}; {remedy}")
    return place


def _warnings(metadata: Metadata, rows: StoreRows, model: str | None) -> list[str]:
    trained = set()
    if metadata.models:
        trained = {entry.get("weights_hash") for entry in metadata.models}
    warnings = []
    for entry in rows.store.index.sources:
        is_used = rows.source in (entry.name, DIFFERENCE)
        if is_used and trained and entry.weights_hash and entry.weights_hash not in trained:
            warnings.append(f"the dictionary was trained on a different model than these activations ({entry.model})")
    if model is None:
        warnings.append("unknown model: showing token ids, without a logit lens (give --model NAME)")
    return warnings


def _load_lens(
    name: str | None, store: ActivationStore, resolve: Callable[[str], str], *, with_lens: bool
) -> tuple[Lens | None, Tokenizer | None]:
    """Load a model's lens and tokenizer; None if unknown or disabled."""
    if name is None:
        return None, None
    section = ModelSection(name=resolve(name), dtype=store.index.sources[-1].dtype)
    try:
        if with_lens:
            loaded = load_model(section, seed=0)
            lens = build_lens(loaded.model)
            tokenizer = loaded.tokenizer
        else:
            lens = None
            tokenizer = load_tokenizer(section.name)
    except UsageError as error:
        raise UsageError(f"{error} (choose a model with --model, or skip the logit lens with --no-lens)") from error
    if store.index.tokenizer and tokenizer_hash(tokenizer) != store.index.tokenizer:
        raise UsageError(f"{name}: tokenizer differs from the recording in {store.folder}; give --model")
    return lens, tokenizer
