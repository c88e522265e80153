"""Features of a dictionary: where they are active, how often, and which tokens they promote.

Contexts come from one exact pass over recorded activations. In each document only the token at which a feature is
strongest counts, and of documents that agree up to that token only the first: activations depend on earlier tokens
alone, so the others would repeat it.

The logit lens (nostalgebraist 2020): a direction u of norm 1 gives each token the logit ``W_U (γ ⊙ u)``, minus the mean
over the vocabulary. γ is the gain of the final norm; where that norm subtracts the mean (LayerNorm), u loses its own
first. The norm's division by the size of the residual stream scales all logits alike and is left out, as are biases,
soft caps and the layers in between.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from posttrain.data.render.encoding import TextStream, decode_behind
from posttrain.errors import UsageError
from posttrain.interpret.activations.shards import INDEX, ActivationStore
from posttrain.interpret.activations.sites import backbone_of, tokenizer_hash
from posttrain.interpret.saes.fitting import StoreRows
from posttrain.interpret.saes.recipe import ACTIVATIONS, DIFFERENCE, load_sae_recipe
from posttrain.interpret.saes.sae import Metadata, SparseAutoencoder, load_sae, read_metadata
from posttrain.models.forward.forward import causal_lm
from posttrain.models.load import load_model, load_tokenizer
from posttrain.recipes.sections import ModelSection
from posttrain.store.durable import replace_file
from posttrain.types import Model, Tokenizer

NUM_BINS = 32
MAX_ELEMENTS = 1 << 26  # activations at a time: 256 MiB in fp32, unless one document has more
ENCODED_ROWS = 1024
CONTEXT_CONVENTION = (
    "the strongest activations of all recorded rows: of each document the strongest token, and of documents that agree "
    "up to that token the first"
)
Report = dict[str, Any]  # ``about``, and ``features``, each as in ``features.json``


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
        self.dictionary, self.source, self.before, self.rows = sae, source, before, 0
        self.device = device = sae.b_dec.device
        self.chosen = chosen.to(device)
        size, width = len(chosen), before + 1 + after
        self.active, self.exponents = torch.zeros((2, size), dtype=torch.int64, device=device)
        self.total = torch.zeros(size, dtype=torch.float64, device=device)
        self.maximum = torch.zeros(size, device=device)
        self.counts = torch.zeros((size, NUM_BINS), dtype=torch.int64, device=device)
        self.keys = torch.zeros((contexts, size), dtype=torch.int64, device=device)
        self.top = torch.zeros((contexts, size), device=device)
        self.top_rows = torch.full((contexts, size), -1, dtype=torch.int64, device=device)
        self.windows = torch.full((contexts, size, width), torch.nan, device=device)

    def _encode(self, rows: Tensor) -> Tensor:
        """Return activations float32 [n, S]."""
        parts = (self.source.gather(part).to(self.device) for part in rows.split(ENCODED_ROWS))
        return torch.cat([self.dictionary.encode(x)[:, self.chosen] for x in parts])

    def read(self, start: int, end: int) -> None:
        """Take in the rows ``start`` … ``end``, which are whole documents."""
        values = self._encode(torch.arange(start, end))
        self.rows += len(values)
        self.active += (values > 0).sum(0)
        self.total += values.sum(0, dtype=torch.float64)
        self.maximum = torch.maximum(self.maximum, values.amax(0))
        self._widen(torch.frexp(self.maximum).exponent.long())
        places, features = (values > 0).nonzero(as_tuple=True)
        scaled = torch.ldexp(values[places, features], -self.exponents[features]) * NUM_BINS
        slots = features * NUM_BINS + scaled.long()
        self.counts += torch.bincount(slots, minlength=self.counts.numel()).view_as(self.counts)
        self._keep_strongest(values, start, end)

    def _widen(self, exponents: Tensor) -> None:
        """Let the bins reach up to 2**exponents, by joining pairs of them."""
        self.exponents = torch.where(self.counts.sum(1) == 0, exponents, self.exponents)
        while bool((grows := self.exponents < exponents).any()):
            joined = torch.zeros_like(self.counts)
            joined[:, : NUM_BINS // 2] = self.counts.view(-1, NUM_BINS // 2, 2).sum(2)
            self.counts = torch.where(grows[:, None], joined, self.counts)
            self.exponents = self.exponents + grows.long()

    def _keep_strongest(self, values: Tensor, start: int, end: int) -> None:
        size, store = len(self.top), self.source.store
        rows = torch.arange(start, end)
        documents, counts = store.documents(rows).unique_consecutive(return_counts=True)
        prefixes = [hash_prefixes(store.document_tokens(int(number))) for number in documents.tolist()]
        first_tokens = torch.tensor([0, *map(len, prefixes)]).cumsum(0)[:-1].repeat_interleave(counts)
        hashes = torch.cat(prefixes)[first_tokens + store.positions(rows)].to(self.device)
        strongest = [part.max(0) for part in values.split(counts.tolist())]
        local = torch.stack([place for _, place in strongest]) + (counts.cumsum(0) - counts).to(self.device)[:, None]
        top = torch.cat([self.top, torch.stack([value for value, _ in strongest])])
        keys = torch.cat([self.keys, hashes[local]])
        kept = top.argsort(dim=0, descending=True, stable=True)
        kept = kept.gather(0, _later_twins(keys.gather(0, kept)).long().argsort(dim=0, stable=True))[:size]
        self.top, self.keys = top.gather(0, kept), keys.gather(0, kept)
        self.top_rows = torch.cat([self.top_rows, local + start]).gather(0, kept).masked_fill(self.top <= 0, -1)

    def look_around(self, before: int, after: int) -> None:
        """Fill ``windows``: read the documents of the contexts once more."""
        store = self.source.store
        rank, feature = (self.top_rows >= 0).nonzero(as_tuple=True)
        rows, order = self.top_rows[rank, feature].cpu().sort()
        documents, counts = store.documents(rows).unique_consecutive(return_counts=True)
        parts = zip(documents.tolist(), rows.split(counts.tolist()), order.split(counts.tolist()), strict=True)
        for number, those, contexts in parts:
            start, end = max(0, int(those[0]) - before), min(int(those[-1]) + after + 1, self.source.num_rows)
            near = torch.arange(start, end)
            near = near[store.documents(near) == number]
            places = store.positions(near) - store.positions(those)[:, None] + before
            which, column = ((places >= 0) & (places <= before + after)).nonzero(as_tuple=True)
            chosen = contexts[which].to(rank.device)
            values = self._encode(near)[column.to(rank.device), feature[chosen]]
            self.windows[rank[chosen], feature[chosen], places[which, column].to(rank.device)] = values


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
    chosen = torch.arange(sae.features) if features is None else features
    limit = max(1, min(chunk_rows, MAX_ELEMENTS // sae.features))
    found = FeatureStatistics(sae, rows, chosen, contexts, before, after)
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
) -> Report:
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
    ends = None if lens is None else lens.extremes(sae.W_dec[chosen.to(sae.W_dec.device)], tokens)
    summary = {
        "rows": found.rows,
        "documents": store.num_documents,
        "dictionary_features": sae.features,
        "features_shown": len(chosen),
        "active_per_row": float(found.active.sum()) / max(1, found.rows),
        "silent": int((found.active == 0).sum()),
        "contexts": CONTEXT_CONVENTION,
        "logit_lens": CONVENTION if lens is not None else "",
    }
    return {"about": (about or {}) | summary, "features": _describe(found, store, ends, tokenizer)}


def _describe(
    found: FeatureStatistics,
    store: ActivationStore,
    ends: tuple[list[list[Likely]], list[list[Likely]]] | None,
    tokenizer: Tokenizer,
) -> list[Report]:
    def texts(tokens: Sequence[int]) -> list[str]:
        return [f"<{token}>" for token in tokens] if tokenizer is None else show_tokens(tokenizer, tokens)

    active, totals, maxima = found.active.tolist(), found.total.tolist(), found.maximum.tolist()
    around = _contexts(found, store, texts)
    described = []
    for i, number in enumerate(found.chosen.tolist()):
        counts = found.counts[i].tolist()
        last = max((place for place, count in enumerate(counts) if count), default=-1)
        width = math.ldexp(1.0, int(found.exponents[i])) / NUM_BINS
        likely = [[[*texts([token]), token, rounded(x)] for token, x in side[i]] for side in ends or ()] or [[], []]
        described.append(
            {
                "feature": number,
                "active": active[i],
                "density": rounded(active[i] / max(1, found.rows)),
                "mean": rounded(totals[i] / active[i] if active[i] else 0.0),
                "max": rounded(maxima[i]),
                "histogram": {"bin_width": width, "counts": counts[: last + 1]},
                "promoted": likely[0],
                "suppressed": likely[1],
                "contexts": around[i],
            }
        )
    return described


def _contexts(
    found: FeatureStatistics, store: ActivationStore, texts: Callable[[Sequence[int]], list[str]]
) -> list[list[Report]]:
    """Return the contexts of each feature, in the order of the columns."""
    rows = found.top_rows.T.cpu()  # [S, K]
    flat = rows.reshape(-1).clamp(min=0)
    documents, positions = (x.view_as(rows).tolist() for x in (store.documents(flat), store.positions(flat)))
    values, windows = found.top.T.tolist(), found.windows.transpose(0, 1).tolist()
    contexts: list[list[Report]] = [[] for _ in values]
    for i, column in enumerate(values):
        for value, document, position, window in zip(column, documents[i], positions[i], windows[i], strict=True):
            if value <= 0:
                break
            start = max(0, position - found.before)
            inside = window[start - (position - found.before) :]
            shown = store.document_tokens(document)[start : start + len(inside)]
            activations = [None if math.isnan(x) else rounded(x) for x in inside[: len(shown)]]
            info = {"document": document, "position": position, "start": start}
            tokens = texts(shown)
            contexts[i].append({"activation": rounded(value), **info, "tokens": tokens, "activations": activations})
    return contexts


def write_features(report: Report, path: str | Path) -> Path:
    """Write ``features.json``: ``about``, then one feature on each line with its address on the page."""
    place = Path(path)
    page = place.with_suffix(".html").name
    features = ({"address": f"{page}#feature-{x['feature']}"} | x for x in report["features"])
    lines = ",\n".join(map(json.dumps, features))
    replace_file(place, f'{{"about": {json.dumps(report["about"])},\n"features": [\n{lines}\n]}}\n'.encode())
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
) -> Report:
    """Describe the features of a stored dictionary; ``about["notices"]`` has notes on rows of another model.

    ``resolve`` returns what is loaded for the name of a model; ``model`` and ``source`` are by default the dictionary's
    own.

    Raises:
        UsageError: no such feature, source or model, or one with other tokens than the rows'.
    """
    sae, metadata = load_sae(folder), read_metadata(folder)
    check_features(sae, features)
    store = ActivationStore(activations)
    known = (*store.sources, DIFFERENCE) if len(store.sources) > 1 else store.sources
    source = source or (metadata.source if metadata.source in known else None)
    if source is None and len(known) > 1:
        raise UsageError(f"--source is needed: {store.folder} has {', '.join(store.sources)}, and their difference")
    rows = StoreRows(store, metadata.site if metadata.site in store.sites else None, source)
    model = model or (metadata.models[-1].get("model") if metadata.models else metadata.model_name)
    lens, tokenizer = _load_lens(model, store, resolve, with_lens=with_lens)
    about = {
        "dictionary": name,
        "model": model or "",
        "site": rows.site,
        "source": rows.source,
        "activations": str(store.folder),
        "data": store.index.data,
        "layer_convention": store.index.layer_convention,
        "notices": _warnings(metadata, rows, model),
    }
    return describe_features(
        sae.to("cuda" if torch.cuda.is_available() else "cpu"),
        rows,
        features=features,
        contexts=contexts,
        lens=lens,
        tokenizer=tokenizer,
        about=about,
    )


def default_activations(folder: Path, run: Path | None) -> Path:
    """Return the rows that a dictionary was trained on: its run's recording, or the folder that its recipe names."""
    remedy = "give --activations FOLDER, made by `posttrain activations`"
    if run is None:
        raise UsageError(f"{folder}: which rows are meant? No run trained this dictionary here; {remedy}")
    recorded = load_sae_recipe(str(run / "recipe.yaml")).activations.folder
    place = run / ACTIVATIONS if recorded is None else Path(recorded)
    if not (place / INDEX).is_file():
        raise UsageError(f"{run}: its activations are no more in {place}; {remedy}")
    return place


def _warnings(metadata: Metadata, rows: StoreRows, model: str | None) -> list[str]:
    trained = {entry.get("weights_hash") for entry in metadata.models or []}
    used = [entry for entry in rows.store.index.sources if rows.source in (entry.name, DIFFERENCE)]
    others = [entry.model for entry in used if trained and entry.weights_hash and entry.weights_hash not in trained]
    warnings = [f"the dictionary was trained on another model than the one whose rows these are ({x})" for x in others]
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
        loaded = load_model(section, seed=0) if with_lens else None
        lens = None if loaded is None else build_lens(loaded.model)
        tokenizer = load_tokenizer(section.name) if loaded is None else loaded.tokenizer
    except UsageError as error:
        raise UsageError(f"{error} (--model names another one, --no-lens leaves the logit lens out)") from error
    if store.index.tokenizer and tokenizer_hash(tokenizer) != store.index.tokenizer:
        raise UsageError(f"{name}: its tokenizer is not the one that {store.folder} was recorded with; give --model")
    return lens, tokenizer


# The logit lens.

CONVENTION = (
    "logit of a token = W_U (gain of the final norm * unit decoder row), minus the mean over the vocabulary; without "
    "the norm's division by the size of the residual stream, without biases and soft caps"
)
_MAX_LOGITS = 1 << 24
_FINAL_NORMS = ("norm", "ln_f", "final_layernorm", "final_layer_norm")


@dataclass(frozen=True, slots=True)
class Lens:
    """Unembedding [V, d] and gain [d] of one model, fp32; ``centres``: its final norm subtracts the mean."""

    unembedding: Tensor
    gain: Tensor
    centres: bool

    def logits(self, directions: Tensor) -> Tensor:
        """Return logits [n, V] of directions [n, d] of any norm but 0; see the module for the convention."""
        unit = directions.float()
        unit = unit / unit.norm(dim=1, keepdim=True).clamp_min(1e-12)
        if self.centres:
            unit = unit - unit.mean(1, keepdim=True)
        logits = (unit * self.gain) @ self.unembedding.T
        return logits - logits.mean(1, keepdim=True)

    def extremes(self, directions: Tensor, count: int) -> tuple[list[list[Likely]], list[list[Likely]]]:
        """Return for each direction the ``count`` tokens with the highest logits, falling, and the lowest, rising."""
        size = max(1, _MAX_LOGITS // len(self.unembedding))
        count = min(count, len(self.unembedding))
        ends: tuple[list[list[Likely]], list[list[Likely]]] = ([], [])
        for part in directions.to(self.gain.device).split(size):
            logits = self.logits(part)
            for lists, largest in zip(ends, (True, False), strict=True):
                values, tokens = (x.tolist() for x in logits.topk(count, largest=largest))
                lists += [list(zip(*pair, strict=True)) for pair in zip(tokens, values, strict=True)]
        return ends


Likely = tuple[int, float]  # a token's id and its logit


@torch.no_grad()
def build_lens(model: Model) -> Lens:
    """Return the lens of a causal LM, or of a peft model around one; ``UsageError``: no known LM head or final norm."""
    plain, backbone = causal_lm(model), backbone_of(model)
    head = plain.get_output_embeddings()
    names = [name for name in _FINAL_NORMS if name in backbone._modules]
    if head is None or len(names) != 1:
        missing = "LM head" if head is None else "final norm"
        raise UsageError(f"{type(plain).__name__}: no {missing} that is known here, so there is no logit lens")
    weight = head.weight.detach().float()
    gain, centres = measure_norm(backbone._modules[names[0]], weight.shape[1], weight.device)
    return Lens(weight, gain, centres)


def measure_norm(norm: nn.Module, d: int, device: torch.device) -> tuple[Tensor, bool]:
    """Return (gain [d], whether it subtracts the mean), measured on a vector, so that any architecture will do.

    ``norm(x) − norm(−x)`` is free of a bias, and twice the normed x times the gain.
    """
    x = 1 + torch.rand(d, generator=torch.Generator().manual_seed(0))
    x[1::2] *= -1  # no entry near 0, with or without the mean subtracted
    x = x.to(device)
    exact = copy.deepcopy(norm).float()

    def respond(values: Tensor) -> Tensor:
        return torch.sub(exact(values[None]), exact(-values[None]))[0] / 2

    plain, moved = respond(x), respond(x + 3)
    centres = bool((plain - moved).norm() < 0.01 * plain.norm())
    centred = x - x.mean() if centres else x
    return plain * centred.square().mean().sqrt() / centred, centres


@lru_cache(maxsize=1 << 16)
def show_token(tokenizer: Tokenizer, token: int) -> str:
    """Return a token as text: bytes that are part of a character as ``\\xe2``, and for an empty one its name."""
    text = decode_behind(tokenizer, [token], [token])  # with the space in front of it
    if not text or "\ufffd" in text:
        text = str(tokenizer.convert_ids_to_tokens(token) or f"<{token}>")
        known = _byte_letters()
        if all(letter in known for letter in text):
            text = bytes(known[letter] for letter in text).decode("utf-8", "backslashreplace")
    return text


@cache
def _byte_letters() -> dict[str, int]:
    """Return the byte that each letter of byte-level tokenizers stands for: itself, or the n-th of the others."""
    from tokenizers.pre_tokenizers import ByteLevel

    own = {letter: ord(letter) for letter in ByteLevel.alphabet() if ord(letter) < 256}
    others = [byte for byte in range(256) if chr(byte) not in own]
    return own | {chr(256 + n): byte for n, byte in enumerate(others)}


def show_tokens(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """Return tokens that follow one another as text: a character of several tokens is with the last of them."""
    alone, stream = [show_token(tokenizer, token) for token in tokens], TextStream(tokenizer, tokens[:1])
    if not any("\\x" in text or "<0x" in text for text in alone):
        return alone
    return [text.strip("\ufffd") or own for text, own in zip(map(stream.push, tokens), alone, strict=True)]


@torch.no_grad()
def strongest_tokens(
    model: Model, directions: Tensor, tokenizer: Tokenizer, count: int = 8
) -> list[dict[str, list[list[object]]]]:
    """Return for each direction [n, d] the tokens with the largest and the smallest logits.

    ``{"up": [[text, logit], ...], "down": [...]}``.
    """
    if not len(directions):
        return []
    up, down = build_lens(model).extremes(directions, count)

    def texts(likely: list[Likely]) -> list[list[object]]:
        return [[show_token(tokenizer, token), round(float(logit), 3)] for token, logit in likely]

    return [{"up": texts(rising), "down": texts(falling)} for rising, falling in zip(up, down, strict=True)]
