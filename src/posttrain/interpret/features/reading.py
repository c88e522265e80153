"""The features of a dictionary read over recorded rows: which rows, which site, which model their tokens are of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from posttrain.errors import UsageError
from posttrain.interpret.activations.shards import INDEX, ActivationStore
from posttrain.interpret.activations.sites import tokenizer_hash
from posttrain.interpret.dictionaries.exchange import load_dictionary, read_metadata
from posttrain.interpret.dictionaries.recipe import load_sae_recipe
from posttrain.interpret.dictionaries.recording import recorded_for
from posttrain.interpret.dictionaries.rows import StoreRows
from posttrain.interpret.features.features import FeatureReport, check_features, describe_features
from posttrain.interpret.features.logit_lens import Lens, load_lens
from posttrain.models.load import load_tokenizer
from posttrain.recipes.sections import ModelSection


@dataclass(frozen=True)
class FeaturesRequest:
    """Which dictionary, over which rows, and what is shown of it (see ``describe_features``).

    ``name``: what the dictionary is called, ``folder`` where it is, ``activations`` the folder of the rows. ``site``,
    ``source``, ``model``: None is the dictionary's own. ``lens``: with the logit lens, for which the model is loaded.
    """

    name: str
    folder: Path
    activations: str
    model: str | None = None
    site: str | None = None
    source: str | None = None
    features: Sequence[int] | None = None
    contexts: int = 10
    tokens: int = 10
    lens: bool = True


def read_features(
    asked: FeaturesRequest,
    resolve: Callable[[str], str],
    observe: Callable[[int, int], None] | None = None,
) -> FeatureReport:
    """One pass over all rows; ``about["notices"]`` says what a reader should know of rows of another model.

    Args:
        resolve: what is loaded for the name of a model.
        observe: told how many rows are read, of how many.

    Raises:
        UsageError: no such feature, site, source or model, or one with other tokens than the rows'.
    """
    dictionary, metadata = load_dictionary(asked.folder), read_metadata(asked.folder)
    check_features(dictionary, asked.features)
    store = ActivationStore.open(asked.activations)
    own_site = metadata.get("site")
    site = asked.site if asked.site is not None else own_site if own_site in store.sites else None
    source = asked.source or _own_source(metadata, store, site)
    if source is None and len(store.sources) > 1:
        raise UsageError(
            f"--source is needed: {store.folder} has {', '.join(store.sources)}, their difference and both"
        )
    model = asked.model or _model_name(metadata)
    notices = _notices(metadata, store, source, model)
    lens, tokenizer = _load(model, store, resolve, with_lens=asked.lens)
    about = {
        "dictionary": asked.name,
        "model": model or "",
        "site": site or store.sites[0],
        "source": source or store.sources[0],
        "activations": str(store.folder),
        "data": store.index.data,
        "layer_convention": store.index.layer_convention,
        "notices": notices,
    }
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return describe_features(
        dictionary.to(device),
        store,
        site=site,
        source=source,
        features=asked.features,
        contexts=asked.contexts,
        tokens=asked.tokens,
        lens=None if lens is None else lens.to(device),
        tokenizer=tokenizer,
        about=about,
        observe=observe,
    )


def default_activations(folder: Path, run: Path | None) -> str:
    """What the run of a dictionary was trained on: recorded for it, or the folder that its recipe names.

    Raises:
        UsageError: neither is there.
    """
    remedy = "give --activations FOLDER, made by `posttrain activations`"
    if run is None:
        raise UsageError(f"{folder}: which rows are meant? No run trained this dictionary here; {remedy}")
    place = recorded_for(run)
    if place is not None:
        return str(place)
    recorded = load_sae_recipe(str(run / "recipe.yaml")).activations.folder
    if recorded is None or not (Path(recorded) / INDEX).is_file():
        missing = "its activations were deleted" if recorded is None else f"its activations are no more in {recorded}"
        raise UsageError(f"{run}: {missing}; {remedy}")
    return recorded


def _own_source(metadata: dict[str, Any], store: ActivationStore, site: str | None) -> str | None:
    own = metadata.get("source")
    try:
        return StoreRows(store, site, own).source
    except UsageError:
        return None  # rows of other models than it was trained on: the only source there is, or the user says which


def _model_name(metadata: dict[str, Any]) -> str | None:
    models = metadata.get("models")  # of a dictionary of differences their names alone
    last = models[-1] if models else metadata.get("model_name")
    name = last.get("model") if isinstance(last, dict) else last
    return str(name) if name else None


def _notices(metadata: dict[str, Any], store: ActivationStore, source: str | None, model: str | None) -> list[str]:
    """What a reader should know of rows that are not those the dictionary was trained on."""
    notices = []
    known = [entry for entry in metadata.get("models") or [] if isinstance(entry, dict)]
    trained = {str(entry.get("weights_hash")) for entry in known}
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
