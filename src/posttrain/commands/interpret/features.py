"""``posttrain sae features``: what the features of a dictionary stand for, as one page and as JSON."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from posttrain.commands.console import open_console
from posttrain.commands.interpret.steering import DictionaryPlace, find_dictionary
from posttrain.errors import UsageError
from posttrain.interpret.activations.loading import tokenizer_hash
from posttrain.interpret.activations.shards import ActivationStore
from posttrain.interpret.activations.store_index import INDEX
from posttrain.interpret.dictionaries.exchange import load_dictionary, read_metadata
from posttrain.interpret.dictionaries.recipe import load_sae_recipe
from posttrain.interpret.dictionaries.training_rows import StoreRows
from posttrain.interpret.features.features import FeatureReport, check_features, describe_features, write_features
from posttrain.interpret.features.logit_lens import Lens, load_lens
from posttrain.models.load import load_tokenizer
from posttrain.recipes.recipe import ModelSection
from posttrain.reports.interpret.features import write_page
from posttrain.runs.models import find_source
from posttrain.untrusted import guard_output

ACTIVATIONS, PAGE = "activations", "features.html"


def run_sae_features(arguments: argparse.Namespace) -> int:
    """Read all rows once, and write the page with its JSON beside it."""
    console = open_console()
    place = find_dictionary(arguments.dictionary, arguments.runs_dir)
    page = Path(arguments.out) if arguments.out else (place.run or place.folder) / PAGE
    if page.suffix != ".html":
        raise UsageError(
            f"--out {page}: this is the page, so give a name that ends in .html; the JSON stands beside it"
        )
    dictionary, metadata = load_dictionary(place.folder), read_metadata(place.folder)
    check_features(dictionary, arguments.features)
    store = ActivationStore.open(arguments.activations or default_activations(place))
    site = _choose(arguments.site, metadata.get("site"), store.sites)
    source = arguments.source or _own_source(metadata, store, site)
    if source is None and len(store.sources) > 1:
        raise UsageError(
            f"--source is needed: {store.folder} has {', '.join(store.sources)}, their difference and both"
        )
    model = arguments.model or _model_name(metadata)
    notices = _notices(metadata, store, source, model)
    lens, tokenizer = _load(model, store, arguments)
    about = {
        "dictionary": arguments.dictionary,
        "model": model or "",
        "site": site or store.sites[0],
        "source": source or store.sources[0],
        "activations": str(store.folder),
        "data": store.index.data,
        "layer_convention": store.index.layer_convention,
        "notices": notices,
    }
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with Progress(console=console, transient=True, disable=arguments.quiet or not console.is_terminal) as progress:
        guard_output()
        bar = progress.add_task("reading", total=store.num_rows)
        report = describe_features(
            dictionary.to(device),
            store,
            site=site,
            source=source,
            features=arguments.features,
            contexts=arguments.contexts,
            tokens=arguments.top,
            lens=None if lens is None else lens.to(device),
            tokenizer=tokenizer,
            about=about,
            observe=lambda done, total: progress.update(bar, completed=done, total=total),
        )
    written = write_features(report, page.with_suffix(".json"))
    write_page(report, page)
    if not arguments.quiet:
        for notice in notices:
            console.print(f"note: {notice}")
        console.print(_summary(report))
        console.print(f"page: {page}\njson: {written}", soft_wrap=True)
    return 0


def default_activations(place: DictionaryPlace) -> str:
    """What the run of a dictionary was trained on: recorded in it, or the folder that its recipe names.

    Raises:
        UsageError: neither is there.
    """
    remedy = "give --activations FOLDER, made by `posttrain activations`"
    if place.run is None:
        raise UsageError(f"{place.folder}: which rows are meant? No run trained this dictionary here; {remedy}")
    if (place.run / ACTIVATIONS / INDEX).is_file():
        return str(place.run / ACTIVATIONS)
    folder = load_sae_recipe(str(place.run / "recipe.yaml")).activations.folder
    if folder is None or not (Path(folder) / INDEX).is_file():
        missing = "its activations were deleted" if folder is None else f"its activations are no more in {folder}"
        raise UsageError(f"{place.run}: {missing}; {remedy}")
    return folder


def _choose(given: str | None, own: Any, known: tuple[str, ...]) -> str | None:
    """What was asked for, else the dictionary's own where it is there (None: the only one, or an error further on)."""
    return given if given is not None else own if own in known else None


def _own_source(metadata: dict[str, Any], store: ActivationStore, site: str | None) -> str | None:
    own = metadata.get("source")
    try:
        return StoreRows(store, site, own).source
    except UsageError:
        return None  # rows of other models than it was trained on: the only source there is, or the user says which


def _model_name(metadata: dict[str, Any]) -> str | None:
    models = metadata.get("models")
    name = models[-1].get("model") if isinstance(models, list) and models else metadata.get("model_name")
    return str(name) if name else None


def _notices(metadata: dict[str, Any], store: ActivationStore, source: str | None, model: str | None) -> list[str]:
    """What a reader should know of rows that are not those the dictionary was trained on."""
    found = []
    trained = {str(entry.get("weights_hash")) for entry in metadata.get("models") or []}
    used = [entry for entry in store.index.sources if source in (None, entry.name) or source not in store.sources]
    others = [entry.model for entry in used if trained and entry.weights_hash and entry.weights_hash not in trained]
    if others:
        found.append(f"the dictionary was trained on another model than the one whose rows these are ({others[0]})")
    if model is None:
        found.append("no model is known, so tokens are shown by their numbers, without a logit lens (--model NAME)")
    return found


def _load(name: str | None, store: ActivationStore, arguments: argparse.Namespace) -> tuple[Lens | None, Any]:
    """The lens and the tokenizer of the model; None where they are not known or not wanted.

    Raises:
        UsageError: no such model, or one with other tokens than the rows'.
    """
    if name is None:
        return None, None
    path = find_source(name, arguments.runs_dir).path
    dtype = (store.index.settings.get("weights") or ["float32"])[-1]
    try:
        if arguments.no_lens:
            lens, tokenizer = None, load_tokenizer(path)
        else:
            lens, tokenizer = load_lens(ModelSection(name=path, dtype=dtype))
    except UsageError as error:
        raise UsageError(f"{error} (--model names another one, --no-lens leaves the logit lens out)") from error
    if store.index.tokenizer and tokenizer_hash(tokenizer) != store.index.tokenizer:
        raise UsageError(f"{name}: its tokenizer is not the one that {store.folder} was recorded with; give --model")
    return lens, tokenizer


def _summary(report: FeatureReport) -> str:
    about = report.about
    return (
        f"{about['features_shown']:,} features over {about['rows']:,} rows: {about['active_per_row']:.3g} active at a "
        f"token, {about['silent']:,} silent"
    )
