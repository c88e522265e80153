"""The features of a dictionary read over recorded rows: which rows, which site, which model their tokens are of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from posttrain.errors import UsageError
from posttrain.interpret.activations.shards import INDEX, ActivationStore
from posttrain.interpret.activations.sites import tokenizer_hash
from posttrain.interpret.dictionaries.exchange import Metadata, load_dictionary, read_metadata
from posttrain.interpret.dictionaries.recipe import load_sae_recipe
from posttrain.interpret.dictionaries.recording import ACTIVATIONS
from posttrain.interpret.dictionaries.rows import StoreRows
from posttrain.interpret.features.features import Report, check_features, describe_features
from posttrain.interpret.features.logit_lens import Lens, load_lens
from posttrain.models.load import load_tokenizer
from posttrain.recipes.sections import ModelSection


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
    observe: Callable[[int, int], None] | None = None,
) -> Report:
    """Read all rows in one pass; ``about["notices"]`` says what a reader should know of rows of another model.

    Args:
        name, folder: of the dictionary.
        activations: the folder of the rows.
        resolve: gives what is loaded for the name of a model.
        model, source: None is the dictionary's own.
        features, contexts: see ``describe_features``.
        with_lens: with the logit lens, for which the model is loaded.
        observe: gets how many rows are read, of how many.

    Raises:
        UsageError: no such feature, source or model, or one with other tokens than the rows'.
    """
    dictionary, metadata = load_dictionary(folder), read_metadata(folder)
    check_features(dictionary, features)
    store = ActivationStore.open(activations)
    site = metadata.site if metadata.site in store.sites else None
    source = source or _own_source(metadata, store, site)
    if source is None and len(store.sources) > 1:
        raise UsageError(f"--source is needed: {store.folder} has {', '.join(store.sources)}, and their difference")
    model = model or _model_name(metadata)
    lens, tokenizer = _load(model, store, resolve, with_lens=with_lens)
    about = {
        "dictionary": name,
        "model": model or "",
        "site": site or store.sites[0],
        "source": source or store.sources[0],
        "activations": str(store.folder),
        "data": store.index.data,
        "layer_convention": store.index.layer_convention,
        "notices": _notices(metadata, store, source, model),
    }
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return describe_features(
        dictionary.to(device),
        store,
        site=site,
        source=source,
        features=features,
        contexts=contexts,
        lens=None if lens is None else lens.to(device),
        tokenizer=tokenizer,
        about=about,
        observe=observe,
    )


def default_activations(folder: Path, run: Path | None) -> Path:
    """Return the rows that the run of a dictionary was trained on: its recording, or the folder that its recipe names.

    Raises:
        UsageError: neither is there.
    """
    remedy = "give --activations FOLDER, made by `posttrain activations`"
    if run is None:
        raise UsageError(f"{folder}: which rows are meant? No run trained this dictionary here; {remedy}")
    recorded = load_sae_recipe(str(run / "recipe.yaml")).activations.folder
    place = run / ACTIVATIONS if recorded is None else Path(recorded)
    if not (place / INDEX).is_file():
        raise UsageError(f"{run}: its activations are no more in {place}; {remedy}")
    return place


def _own_source(metadata: Metadata, store: ActivationStore, site: str | None) -> str | None:
    try:
        return StoreRows(store, site, metadata.source).source
    except UsageError:
        return None  # rows of other models than it was trained on: the only source there is, or the user says which


def _model_name(metadata: Metadata) -> str | None:
    last = metadata.models[-1] if metadata.models else metadata.model_name
    name = last.get("model") if isinstance(last, dict) else last  # of a dictionary of `sae diff` their names alone
    return str(name) if name else None


def _notices(metadata: Metadata, store: ActivationStore, source: str | None, model: str | None) -> list[str]:
    """Notes on rows that are not those the dictionary was trained on."""
    notices = []
    trained = {str(entry.get("weights_hash")) for entry in metadata.models or [] if isinstance(entry, dict)}
    used = [entry for entry in store.index.sources if source in (None, entry.name) or source not in store.sources]
    others = [entry.model for entry in used if trained and entry.weights_hash and entry.weights_hash not in trained]
    if others:
        notices.append(f"the dictionary was trained on another model than the one whose rows these are ({others[0]})")
    if model is None:
        notices.append("no model is known, so tokens are shown by their numbers, without a logit lens (--model NAME)")
    return notices


def _load(
    name: str | None, store: ActivationStore, resolve: Callable[[str], str], *, with_lens: bool
) -> tuple[Lens | None, Any]:
    """The lens and the tokenizer of the model; None where they are not known or not wanted.

    Raises:
        UsageError: no such model, or one with other tokens than the rows'.
    """
    if name is None:
        return None, None
    path = resolve(name)
    dtype = store.index.settings.get("weights", ["float32"])[-1]
    try:
        if with_lens:
            lens, tokenizer = load_lens(ModelSection(name=path, dtype=dtype))
        else:
            lens, tokenizer = None, load_tokenizer(path)
    except UsageError as error:
        raise UsageError(f"{error} (--model names another one, --no-lens leaves the logit lens out)") from error
    if store.index.tokenizer and tokenizer_hash(tokenizer) != store.index.tokenizer:
        raise UsageError(f"{name}: its tokenizer is not the one that {store.folder} was recorded with; give --model")
    return lens, tokenizer
