"""Dictionaries as files: SAELens's layout, so that its tools load ours and ours load theirs.

A folder holds ``sae_weights.safetensors`` (``W_enc`` [d, F], ``W_dec`` [F, d], ``b_enc`` [F], ``b_dec`` [d], and for
jumprelu ``threshold`` [F]) and ``cfg.json``. The architectures are standard, topk and jumprelu, which a BatchTopK
dictionary becomes. A tensor that is not used, or a setting that would change the result, is refused.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, PositiveInt, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from posttrain.errors import DataError
from posttrain.interpret.activations.sites import layer_of
from posttrain.interpret.dictionaries.dictionary import Dictionary
from posttrain.interpret.dictionaries.fitting import StoreRows
from posttrain.interpret.dictionaries.recipe import DIFFERENCE, SaeRecipe
from posttrain.store.durable import replace_file, storage_errors
from posttrain.untrusted import first_fault

WEIGHTS, CONFIG = "sae_weights.safetensors", "cfg.json"
LAYOUT_VERSION = "6.0.0"  # SAELens refuses older ones
_MISSING = "there is no such file; a dictionary is a folder with cfg.json and weights"
_KINDS = {"standard": "l1", "topk": "topk", "jumprelu": "batchtopk"}
_HOOK = re.compile(r"blocks\.([0-9]{1,6})\.hook_resid_(pre|post)")


def hook_name(site: str) -> str:
    """Return SAELens's name of a site: ``resid.20`` is ``blocks.19.hook_resid_post``."""
    return f"blocks.{layer_of(site) - 1}.hook_resid_post"


def site_of_hook(hook: str | None) -> str | None:
    """Return ``resid.20`` for ``blocks.19.hook_resid_post`` and ``blocks.20.hook_resid_pre``; None for another hook."""
    match = _HOOK.fullmatch(hook or "")
    layer = int(match[1]) + (match[2] == "post") if match else 0
    return f"resid.{layer}" if layer else None


def save_dictionary(dictionary: Dictionary, folder: str | Path, metadata: Mapping[str, Any] | None = None) -> Path:
    """Write a dictionary that takes raw activations (``input_scale`` folded into the weights), and return its folder.

    ``metadata``: what it was trained on, as plain data. Other tools look for ``model_name`` and ``hook_name``.
    """
    place = Path(folder)
    folded = copy.deepcopy(dictionary).to("cpu", torch.float32).fold()
    with storage_errors("the dictionary", place):
        place.mkdir(parents=True, exist_ok=True)
    tensors = {name: getattr(folded, name).detach().contiguous() for name in _shapes(folded)}
    replace_file(place / WEIGHTS, save(tensors))
    configuration: dict[str, Any] = {
        "architecture": folded.architecture,
        "d_in": folded.d,
        "d_sae": folded.features,
        "dtype": "float32",
        "device": "cpu",
        "apply_b_dec_to_input": True,
        "normalize_activations": "none",
        "reshape_activations": "none",
    }
    if folded.architecture == "topk":
        configuration |= {"k": int(folded.options["k"]), "rescale_acts_by_decoder_norm": False}
    own = {"sae_lens_version": LAYOUT_VERSION, "kind": folded.kind, "options": folded.options}
    defaults = {"model_name": None, "hook_name": None, "context_size": None, "prepend_bos": False}
    configuration["metadata"] = defaults | dict(metadata or {}) | own
    replace_file(place / CONFIG, json.dumps(configuration, indent=2, ensure_ascii=False).encode() + b"\n")
    return place


def _shapes(dictionary: Dictionary) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in a dictionary's file."""
    d, features = dictionary.d, dictionary.features
    shapes: dict[str, tuple[int, ...]] = {"W_enc": (d, features), "W_dec": (features, d), "b_enc": (features,)}
    return shapes | {"b_dec": (d,)} | ({"threshold": (features,)} if dictionary.architecture == "jumprelu" else {})


class Metadata(BaseModel, extra="allow"):
    """The part of ``cfg.json`` about what a dictionary was trained on; all of it may be missing."""

    models: list[dict[str, Any]] | None = None
    model_name: str | None = None
    hook_name: str | None = None
    site: str | None = None
    source: str | None = None


class _Configuration(BaseModel):
    """The settings of ``cfg.json``; those that would change the result have the only values that can be used."""

    architecture: Literal["standard", "topk", "jumprelu"] = "standard"
    d_in: PositiveInt
    d_sae: PositiveInt
    k: PositiveInt | None = None
    apply_b_dec_to_input: bool = True
    rescale_acts_by_decoder_norm: bool = False
    normalize_activations: Literal["none"] | None = None
    reshape_activations: Literal["none"] | None = None
    activation_fn: Literal["relu"] | None = None
    activation_fn_str: Literal["relu"] | None = None
    finetuning_scaling_factor: Literal[False] | None = None
    metadata: Metadata | None = None
    hook_name: str | None = None  # SAELens before version 6 has it here


def read_metadata(folder: str | Path) -> Metadata:
    """Read what a dictionary was trained on; a missing site is filled in from the hook's name."""
    configuration = _read_configuration(Path(folder) / CONFIG)
    metadata = configuration.metadata or Metadata()
    site = metadata.site or site_of_hook(metadata.hook_name or configuration.hook_name)
    return metadata.model_copy(update={"site": site})


def load_dictionary(folder: str | Path) -> Dictionary:
    """Load a dictionary on raw activations in fp32, from a folder that this package or SAELens wrote.

    Raises:
        DataError: no such folder, damaged files, shapes that do not fit, or a dictionary that cannot be used here
            (another architecture, or activations that have to be normalized first).
    """
    place = Path(folder)
    configuration = _read_configuration(place / CONFIG)
    architecture = configuration.architecture
    if architecture == "topk" and configuration.k is None:
        raise DataError(place / CONFIG, "says nothing of k, which a topk dictionary needs; add it")
    options = {"k": configuration.k} if architecture == "topk" else {}
    dictionary = Dictionary(configuration.d_in, configuration.d_sae, _KINDS[architecture], options)
    tensors = _read_weights(place / WEIGHTS, _shapes(dictionary), architecture)
    if architecture == "topk" and configuration.rescale_acts_by_decoder_norm:
        norms = tensors["W_dec"].norm(dim=1)  # its features are those of a dictionary with rows of norm 1
        tensors["W_enc"], tensors["b_enc"] = tensors["W_enc"] * norms, tensors["b_enc"] * norms
        tensors["W_dec"] = tensors["W_dec"] / norms[:, None]
    if not configuration.apply_b_dec_to_input:
        tensors["b_enc"] = tensors["b_enc"] + tensors["b_dec"] @ tensors["W_enc"]
    with torch.no_grad():
        for name, values in tensors.items():
            getattr(dictionary, name).copy_(values)
    return dictionary.requires_grad_(False)


def _read_configuration(path: Path) -> _Configuration:
    try:
        return _Configuration.model_validate_json(path.read_bytes(), strict=True)
    except FileNotFoundError:
        raise DataError(path, _MISSING) from None
    except ValidationError as error:
        fault = first_fault(error)
        raise DataError(path, f"this dictionary cannot be used here ({fault}); convert it with SAELens") from None
    except OSError as error:
        raise DataError(path, f"cannot be read ({error})") from None


def _read_weights(path: Path, shapes: Mapping[str, tuple[int, ...]], architecture: str) -> dict[str, Tensor]:
    """Read the tensors of a file, and refuse one that is missing, has another shape, or is not used here."""
    try:
        tensors = {name: value.float() for name, value in load_file(path).items()}
    except FileNotFoundError:
        raise DataError(path, _MISSING) from None
    except (OSError, SafetensorError) as error:
        raise DataError(path, f"cannot be read ({error})") from None
    scale = tensors.get("scaling_factor")  # files of SAELens before version 6 hold ones, which scale nothing
    if scale is not None and bool((scale == 1).all()):
        del tensors["scaling_factor"]
    if missing := [name for name in shapes if name not in tensors]:
        raise DataError(path, f"has no tensor {', '.join(missing)}; there are: {', '.join(sorted(tensors))}")
    if unused := sorted(tensors.keys() - shapes.keys()):
        raise DataError(
            path,
            f"has tensors that a {architecture} dictionary does not use: {', '.join(unused)}. It is of another "
            f"architecture than cfg.json says; here are {', '.join(_KINDS)}",
        )
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise DataError(path, f"{name} has the shape {tuple(tensors[name].shape)}, but cfg.json means {shape}")
    return tensors


def describe_training(rows: StoreRows, recipe: SaeRecipe, step: int) -> dict[str, Any]:
    """Return metadata for ``save_dictionary``: the model, the place in it, and the training."""
    index, site = rows.store.index, rows.site
    used = [source for source in index.sources if rows.source in (source.name, DIFFERENCE)]
    return {
        "model_name": used[-1].model,
        "hook_name": hook_name(site),
        "context_size": index.data.get("context_tokens"),
        "site": site,
        "layer": layer_of(site),
        "layer_convention": index.layer_convention,
        "source": rows.source,
        "models": [source.model_dump() for source in used],
        "tokenizer": index.tokenizer,
        "activations": {"data": index.data, "rows": index.rows, "dropped": index.dropped, "dtype": index.dtype},
        "training": {"recipe": recipe.fingerprint(), "steps": step, "rows": step * recipe.train.batch},
    }
