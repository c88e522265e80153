"""What the features of a dictionary stand for: where they are active, how often, and which tokens they speak for."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.errors import UsageError
from posttrain.interpret.activations.shards import ActivationStore
from posttrain.interpret.dictionaries.dictionary import Dictionary
from posttrain.interpret.dictionaries.training_rows import StoreRows
from posttrain.interpret.features.contexts import NUM_BINS, FeatureStatistics, find_contexts
from posttrain.interpret.features.logit_lens import CONVENTION, Lens, Likely, show_tokens
from posttrain.store.durable import replace_file

CONTEXT_CONVENTION = (
    "the strongest activations of all recorded rows: of each document the strongest token, and of documents that agree "
    "up to that token the first"
)


@dataclass(frozen=True, slots=True)
class Context:
    """A place where a feature is active.

    ``activation`` is that at ``position`` of ``document``; ``ids`` are the tokens from ``start`` on, ``activations``
    the feature's at each of them (None: the row was dropped).
    """

    activation: float
    document: int
    position: int
    start: int
    ids: tuple[int, ...]
    activations: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Feature:
    """One feature over recorded rows.

    ``density``: the share of rows at which it is active; ``mean``: of its activations there; ``bin_width`` and
    ``counts``: a histogram of them that begins at 0. ``promoted`` and ``suppressed``: tokens with their logits, the
    strongest first (see ``logit_lens``).
    """

    number: int
    active: int
    density: float
    mean: float
    maximum: float
    bin_width: float
    counts: tuple[int, ...]
    contexts: tuple[Context, ...]
    promoted: tuple[Likely, ...] = ()
    suppressed: tuple[Likely, ...] = ()


@dataclass(frozen=True, slots=True)
class FeatureReport:
    """Features, the text of every token that they mention, and plain data about where all this comes from."""

    features: list[Feature]
    texts: dict[int, str]
    about: dict[str, Any] = field(default_factory=dict)


def describe_features(
    dictionary: Dictionary,
    store: ActivationStore,
    *,
    site: str | None = None,
    source: str | None = None,
    features: Sequence[int] | None = None,
    contexts: int = 10,
    tokens: int = 10,
    lens: Lens | None = None,
    tokenizer: Any | None = None,
    about: dict[str, Any] | None = None,
    observe: Callable[[int, int], None] | None = None,
) -> FeatureReport:
    """Everything about the features of a dictionary, from one pass over the rows of a store.

    Args:
        dictionary: on raw activations; the pass is made on its device.
        site, source: of the store, as for ``StoreRows``.
        features: which; None: all.
        contexts: of each feature at most.
        tokens: so many are named at each end of the logit lens.
        lens: of the model that the directions are read in; None: no token is named. A dictionary of two models is
            read by the rows of the second.
        tokenizer: for the texts of tokens; None: their ids stand for them.
        about: plain data that is kept in the report.

    Raises:
        UsageError: no such feature, site or source, or a store of another width.
    """
    rows = StoreRows(store, site, source)
    if (rows.d, rows.sources) != (dictionary.d, dictionary.sources):
        raise UsageError(
            f"{store.folder}: {rows.sources} x {rows.d} numbers at a token, but the dictionary is for "
            f"{dictionary.sources} x {dictionary.d}; give the activations that it was trained on, or others like them"
        )
    chosen = check_features(dictionary, features)
    found = find_contexts(dictionary, rows, features=chosen, contexts=contexts, observe=observe)
    ends: tuple[list[list[Likely]], list[list[Likely]]] | None = None
    if lens is not None:
        ends = lens.extremes(dictionary.W_dec[chosen.to(dictionary.W_dec.device), -1], tokens)
    described = list(_describe(found, chosen, store, ends))
    mentioned = [index for feature in described for context in feature.contexts for index in context.ids]
    mentioned += [index for feature in described for index, _ in (*feature.promoted, *feature.suppressed)]
    unique = list(dict.fromkeys(mentioned))
    texts = {i: f"<{i}>" for i in unique} if tokenizer is None else show_tokens(tokenizer, unique)
    summary = {
        "rows": found.rows,
        "documents": store.num_documents,
        "dictionary_features": dictionary.features,
        "features_shown": len(chosen),
        "active_per_row": float(found.active.sum()) / max(1, found.rows),
        "silent": int((found.active == 0).sum()),
        "contexts": CONTEXT_CONVENTION,
        "logit_lens": CONVENTION if lens is not None else "",
    }
    return FeatureReport(described, texts, (about or {}) | summary)


def check_features(dictionary: Dictionary, features: Sequence[int] | None) -> Tensor:
    """int64 [S]: the features named, each once; all of them for None.

    Raises:
        UsageError: there is no such feature.
    """
    if features is None:
        return torch.arange(dictionary.features)
    for number in features:
        if not 0 <= number < dictionary.features:
            raise UsageError(
                f"feature {number}: this dictionary has {dictionary.features}, from 0 to {dictionary.features - 1}"
            )
    return torch.tensor(list(dict.fromkeys(features)), dtype=torch.long)


def _describe(
    found: FeatureStatistics,
    chosen: Tensor,
    store: ActivationStore,
    ends: tuple[list[list[Likely]], list[list[Likely]]] | None,
) -> Iterator[Feature]:
    active, totals, maxima = found.active.tolist(), found.total.tolist(), found.maximum.tolist()
    exponents, counts = found.exponents.tolist(), found.counts.tolist()
    contexts = _contexts(found, store)
    for i, number in enumerate(chosen.tolist()):
        last = max((place for place, count in enumerate(counts[i]) if count), default=-1)
        yield Feature(
            number=number,
            active=active[i],
            density=active[i] / max(1, found.rows),
            mean=totals[i] / active[i] if active[i] else 0.0,
            maximum=maxima[i],
            bin_width=math.ldexp(1.0, exponents[i]) / NUM_BINS,
            counts=tuple(counts[i][: last + 1]),
            contexts=contexts[i],
            promoted=tuple(ends[0][i]) if ends is not None else (),
            suppressed=tuple(ends[1][i]) if ends is not None else (),
        )


def _contexts(found: FeatureStatistics, store: ActivationStore) -> list[tuple[Context, ...]]:
    """Of each feature, in the order of the columns."""
    rows = found.top_rows.T.cpu()  # [S, K]
    flat = rows.reshape(-1).clamp(min=0)
    documents = store.documents(flat).view_as(rows).tolist()
    positions = store.positions(flat).view_as(rows).tolist()
    values, windows = found.top.T.tolist(), found.windows.transpose(0, 1).tolist()
    texts: dict[int, list[int]] = {}
    result = []
    for i, column in enumerate(values):
        made = []
        for value, document, position, window in zip(column, documents[i], positions[i], windows[i], strict=True):
            if value <= 0:
                break
            if document not in texts:
                texts[document] = store.document_tokens(document)
            made.append(_cut(value, document, position, texts[document], window, found.before))
        result.append(tuple(made))
    return result


def _cut(value: float, document: int, position: int, ids: list[int], window: list[float], before: int) -> Context:
    """The part of a document around a position; ``window`` begins ``before`` tokens in front of it."""
    start = max(0, position - before)
    inside = window[start - (position - before) :]
    shown = ids[start : start + len(inside)]
    activations = tuple(None if math.isnan(x) else x for x in inside[: len(shown)])
    return Context(value, document, position, start, tuple(shown), activations)


def write_features(report: FeatureReport, path: str | Path) -> Path:
    """``features.json``: ``about``, then ``features`` with one feature on each line; tokens as texts.

    Raises:
        StorageError: the disk is full or not writable.
    """
    lines = ",\n".join(json.dumps(_plain(feature, report.texts)) for feature in report.features)
    content = f'{{"about": {json.dumps(report.about)},\n"features": [\n{lines}\n]}}\n'
    place = Path(path)
    replace_file(place, content.encode())
    return place


def _plain(feature: Feature, texts: dict[int, str]) -> dict[str, Any]:
    return {
        "feature": feature.number,
        "active": feature.active,
        "density": rounded(feature.density),
        "mean": rounded(feature.mean),
        "max": rounded(feature.maximum),
        "histogram": {"bin_width": feature.bin_width, "counts": list(feature.counts)},
        "promoted": [[texts[index], index, rounded(logit)] for index, logit in feature.promoted],
        "suppressed": [[texts[index], index, rounded(logit)] for index, logit in feature.suppressed],
        "contexts": [
            {
                "activation": rounded(context.activation),
                "document": context.document,
                "position": context.position,
                "start": context.start,
                "tokens": [texts[index] for index in context.ids],
                "activations": [None if x is None else rounded(x) for x in context.activations],
            }
            for context in feature.contexts
        ],
    }


def rounded(value: float) -> float:
    """To five digits: what is read, not what is computed with."""
    return float(f"{value:.5g}")
