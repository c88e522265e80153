"""Features of a dictionary: where they are active, how often, and which tokens they promote.

Contexts come from one exact pass over recorded activations. In each document only the token at which a feature is
strongest counts, and of documents that agree up to that token only the first: activations depend on earlier tokens
alone, so the others would repeat it.
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
MAX_ELEMENTS = 1 << 26  # activations at a time: 256 MiB in fp32, unless one document has more
ENCODED_ROWS = 1024
CONTEXT_CONVENTION = (
    "the strongest activations of all recorded rows: of each document the strongest token, and of documents that agree "
    "up to that token the first"
)
FeatureReport = dict[str, Any]  # ``about``, and ``features``, each as in ``features.json``


class FeatureStatistics:
    """Statistics of S features over ``rows`` rows, from one pass.

    ``active`` int64 [S]: rows at which each is above 0; ``total`` float64 [S]: the sum of its activations; ``maximum``
    float32 [S]. ``counts`` int64 [S, NUM_BINS]: how many of its activations lie in each bin, the first of which begins
    at 0; ``exponents`` int64 [S]: a bin is 2**exponent / NUM_BINS wide. ``top`` float32 [K, S]: the strongest
    activation of each context, falling (0: there are no more); ``top_rows`` int64 [K, S]: its row (-1: none);
    ``windows`` float32 [K, S, before + 1 + after]: activations at the tokens around it, NaN where there is no token or
    its row was dropped.
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
        """Return activations float32 [n, S]."""
        parts = []
        for part in rows.split(ENCODED_ROWS):
            x = self.source.gather(part).to(self.device)
            parts.append(self.dictionary.encode(x)[:, self.chosen])
        return torch.cat(parts)

    def read(self, start: int, end: int) -> None:
        """Take in the rows ``start`` … ``end``, which are whole documents."""
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
        """Let the bins reach up to 2**exponents, by joining pairs of them."""
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
        """Merge the strongest row of each document into ``top``; of rows with the same text before them one stays."""
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
        """Fill ``windows``: read the documents of the contexts once more."""
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
    """Read all rows once, in order, on the dictionary's device.

    ``features`` int64 [S] (None: all). ``contexts``: K for each feature, with the activations of ``before`` and
    ``after`` tokens around the strongest one. ``chunk_rows``: rows at a time, about; the result does not depend on it.
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
    """Return for each token a hash of the document up to it: int64 [T]."""
    tokens = np.asarray(ids, dtype=np.uint64)
    mixed = tokens + (np.arange(1, len(ids) + 1, dtype=np.uint64) << np.uint64(32))
    with np.errstate(over="ignore"):  # splitmix64, modulo 2**64
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        mixed ^= mixed >> np.uint64(31)
        return torch.from_numpy(np.cumsum(mixed, dtype=np.uint64).view(np.int64))


def _later_twins(keys: Tensor) -> Tensor:
    """Return bool [m, S]: whether the same key is further up in its column."""
    order = keys.argsort(dim=0, stable=True)
    ranked = keys.gather(0, order)
    same = torch.zeros_like(ranked, dtype=torch.bool)
    same[1:] = ranked[1:] == ranked[:-1]
    return torch.zeros_like(same).scatter(0, order, same)


def check_features(sae: SparseAutoencoder, features: Sequence[int] | None) -> Tensor:
    """Return the features named, each once, int64 [S]; all of them for None."""
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
    """Describe the features of a dictionary on raw activations, from one pass over rows.

    For each feature: ``density``, the share of rows at which it is active; ``mean`` of its activations there, and
    ``max``; a ``histogram`` of them that begins at 0; ``promoted`` and ``suppressed`` tokens [text, id, logit];
    ``contexts`` with the ``tokens`` from ``start`` of a ``document`` on and its ``activations`` at each (null: the row
    was dropped), the strongest at ``position``. Without a lens no token is promoted; without a tokenizer ids are shown.
    """
    store = rows.store
    if rows.d != sae.d:
        raise UsageError(
            f"{store.folder}: {rows.d} numbers at a token, but the dictionary is for {sae.d}; give the "
            "activations that it was trained on, or others like them"
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
    """Return the contexts of each feature, in the order of the columns."""
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
    """Write ``features.json``: ``about``, then one feature on each line with its address on the page."""
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
    """Return a number to five digits, to be read."""
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
    """Describe the features of a stored dictionary; ``about["notices"]`` has notes on rows of another model.

    ``resolve`` returns what is loaded for the name of a model; ``model`` and ``source`` are by default the dictionary's
    own.

    Raises:
        UsageError: no such feature, source or model, or one with other tokens than the rows'.
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
    """Return the rows of the dictionary's site and of ``source``, by default the dictionary's own."""
    known = store.sources
    if len(known) > 1:
        known = (*known, DIFFERENCE)
    if not source and metadata.source in known:
        source = metadata.source
    if not source and len(known) > 1:
        raise UsageError(f"--source is needed: {store.folder} has {', '.join(store.sources)}, and their difference")
    site = None
    if metadata.site in store.sites:
        site = metadata.site
    return StoreRows(store, site, source or None)


def default_activations(folder: Path, run: Path | None) -> Path:
    """Return the rows that a dictionary was trained on: its run's recording, or the folder that its recipe names."""
    remedy = "give --activations FOLDER, made by `posttrain activations`"
    if run is None:
        raise UsageError(f"{folder}: which rows are meant? No run trained this dictionary here; {remedy}")
    recorded = load_sae_recipe(str(run / "recipe.yaml")).activations.folder
    if recorded is None:
        place = run / ACTIVATIONS
    else:
        place = Path(recorded)
    if not (place / INDEX).is_file():
        raise UsageError(f"{run}: its activations are no more in {place}; {remedy}")
    return place


def _warnings(metadata: Metadata, rows: StoreRows, model: str | None) -> list[str]:
    trained = set()
    if metadata.models:
        trained = {entry.get("weights_hash") for entry in metadata.models}
    warnings = []
    for entry in rows.store.index.sources:
        is_used = rows.source in (entry.name, DIFFERENCE)
        if is_used and trained and entry.weights_hash and entry.weights_hash not in trained:
            warnings.append(
                f"the dictionary was trained on another model than the one whose rows these are ({entry.model})"
            )
    if model is None:
        warnings.append("no model is known, so tokens are shown by their numbers, without a logit lens (--model NAME)")
    return warnings


def _load_lens(
    name: str | None, store: ActivationStore, resolve: Callable[[str], str], *, with_lens: bool
) -> tuple[Lens | None, Tokenizer | None]:
    """Return the lens and the tokenizer of a model; None where they are not known or not wanted."""
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
        raise UsageError(f"{error} (--model names another one, --no-lens leaves the logit lens out)") from error
    if store.index.tokenizer and tokenizer_hash(tokenizer) != store.index.tokenizer:
        raise UsageError(f"{name}: its tokenizer is not the one that {store.folder} was recorded with; give --model")
    return lens, tokenizer
