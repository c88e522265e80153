"""What a trained dictionary is, and how good: for its ``cfg.json`` and the run's results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from posttrain.interpret.activations.sites import read_site
from posttrain.interpret.activations.store_index import column
from posttrain.interpret.dictionaries.dictionary import Dictionary
from posttrain.interpret.dictionaries.measures import Quality
from posttrain.interpret.dictionaries.recipe import SaeRecipe
from posttrain.interpret.dictionaries.training_rows import BOTH, DIFFERENCE, StoreRows, split_rows
from posttrain.interpret.features.splice import Recovered, recover
from posttrain.models.load import load_model
from posttrain.recipes.recipe import ModelSection

# What other tools call the output of the block with this index.
_HOOKS = {"resid": "blocks.{}.hook_resid_post", "mlp": "blocks.{}.hook_mlp_out", "attn": "blocks.{}.hook_attn_out"}


def hook_name(site: str) -> str:
    """``resid.20`` is ``blocks.19.hook_resid_post``; ``resid.0`` is ``blocks.0.hook_resid_pre``."""
    place = read_site(site)
    return "blocks.0.hook_resid_pre" if place.layer == 0 else _HOOKS[place.place].format(place.layer - 1)


def describe_training(rows: StoreRows, recipe: SaeRecipe, step: int) -> dict[str, Any]:
    """Plain data for ``save_dictionary``: the model, the place in it, and the training."""
    index = rows.store.index
    site = rows.site or rows.store.sites[0]
    used = [source for source in index.sources if rows.source in (source.name, BOTH, DIFFERENCE)]
    return {
        "model_name": used[-1].model,
        "hook_name": hook_name(site),
        "context_size": index.data.get("context_tokens"),
        "site": site,
        "layer": read_site(site).layer,
        "layer_convention": index.layer_convention,
        "source": rows.source,
        "models": [{"name": x.name, "model": x.model, "weights_hash": x.weights_hash} for x in used],
        "tokenizer": index.tokenizer,
        "activations": {"data": index.data, "rows": index.rows, "dropped": index.dropped, "dtype": index.dtype},
        "training": {"recipe": recipe.fingerprint(), "steps": step, "rows": step * recipe.train.batch},
    }


def recovered_by(
    rows: StoreRows, recipe: SaeRecipe, dictionary: Dictionary, notify: Callable[[str], None]
) -> Recovered | None:
    """The dictionary put into its model, on the last ``eval.documents`` held-out documents; None where that is 0.

    Raises:
        UsageError: the model cannot be loaded.
    """
    wanted, store = recipe.eval.documents, rows.store
    if not wanted:
        return None
    if rows.source in (BOTH, DIFFERENCE):
        notify("eval.documents: only a dictionary of one model can be put into it; this was left out")
        return None
    first = split_rows(rows, recipe.eval.rows, recipe.train.batch)
    held_out = store.documents(torch.arange(first, store.num_rows)).unique().tolist()
    documents = [store.document_tokens(number) for number in held_out[-wanted:]]
    source = next(source for source in store.index.sources if source.name == rows.source)
    dtype = (store.index.settings.get("weights") or ["float32"])[0]
    section = recipe.activations.model or ModelSection(name=source.model, dtype=dtype)
    if source.name == "post":
        section = section.model_copy(update={"name": source.model})
    model = load_model(section, seed=0).model
    site = rows.site or store.sites[0]
    limit = store.index.limits.get(column(site, source.name), float("inf"))
    return recover(model, dictionary, site, documents, limit)


def results_of(quality: Quality, recovered: Recovered | None) -> dict[str, Any]:
    """Plain data: the numbers on the rows held out, the histogram of densities, and what was recovered."""
    found: dict[str, Any] = {"held_out": quality.numbers() | {"rows": quality.rows}, "density": quality.histogram()}
    return found if recovered is None else found | {"recovered": recovered.numbers()}
