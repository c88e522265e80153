"""Dictionaries as files: SAELens's layout, so that its tools load ours and ours load theirs.

A folder holds ``sae_weights.safetensors`` and ``cfg.json``. With one source the tensors are ``W_enc`` [d, F],
``W_dec`` [F, d], ``b_enc`` [F], ``b_dec`` [d], and for jumprelu ``threshold`` [F]; the architectures are standard,
topk and jumprelu (which a BatchTopK dictionary becomes). A crosscoder, which SAELens has no name for, is the same file
with a leading axis of sources (``W_enc`` [M, d, F], ``W_dec`` [M, F, d], ``b_dec`` [M, d]) and ``architecture:
crosscoder``. A transcoder is ``transcoder`` or ``jumprelu_transcoder``, with ``W_skip`` [d, d] (written · read)
``skip_transcoder`` or ``jumprelu_skip_transcoder``; one of kind topk, which SAELens cannot name, ``topk_transcoder``.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, PositiveInt, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from posttrain.errors import DataError
from posttrain.interpret.activations.sites import read_site
from posttrain.interpret.dictionaries.dictionary import Dictionary
from posttrain.interpret.dictionaries.recipe import SaeRecipe
from posttrain.interpret.dictionaries.rows import BOTH, DIFFERENCE, StoreRows
from posttrain.store.durable import replace_file, storage_errors
from posttrain.untrusted import first_fault

# What other tools call a place in the block with index n, and ours: the layer is n, or n + 1 for what a block gives.
_THEIR_HOOKS = {
    "hook_resid_pre": ("resid", 0),
    "hook_resid_post": ("resid", 1),
    "hook_mlp_out": ("mlp", 1),
    "hook_attn_out": ("attn", 1),
    "hook_mlp_in": ("mlp_in", 1),
    "ln2.hook_normalized": ("mlp_in", 1),
}
_HOOK = re.compile(r"blocks\.([0-9]{1,6})\.(.+)")
_MODULE = re.compile(r"(?:model\.|transformer\.|gpt_neox\.)?(?:layers|h)\.([0-9]{1,6})(?:\.output)?")


def site_of_hook(hook: object) -> str | None:
    """``blocks.19.hook_resid_post`` and the module ``model.layers.19`` are ``resid.20``; None for what is no site here.

    ``blocks.20.hook_resid_pre``, what that block reads, is ``resid.20`` too.
    """
    if not isinstance(hook, str):
        return None
    if module := _MODULE.fullmatch(hook):
        return f"resid.{int(module[1]) + 1}"
    match = _HOOK.fullmatch(hook)
    if match is None or match[2] not in _THEIR_HOOKS:
        return None
    place, offset = _THEIR_HOOKS[match[2]]
    return f"{place}.{int(match[1]) + offset}"


WEIGHTS, CONFIG = "sae_weights.safetensors", "cfg.json"
# Which layout the files follow; readers of SAELens refuse what is older than 6.
LAYOUT_VERSION = "6.0.0"
_KINDS = {"standard": "l1", "topk": "topk", "jumprelu": "jumprelu"}


def save_dictionary(dictionary: Dictionary, folder: str | Path, metadata: Mapping[str, Any] | None = None) -> Path:
    """Write a dictionary that takes raw activations: its ``input_scale`` is folded into the weights.

    Args:
        dictionary: unchanged.
        folder: made if it is not there; both files are replaced in one step each.
        metadata: what it was trained on, as plain data. ``model_name`` and ``hook_name`` are what other tools look for;
            ``layer`` counts blocks from 1, as in ``hidden_states[layer]``.

    Returns:
        the folder.

    Raises:
        StorageError: the disk is full or not writable.
    """
    place = Path(folder)
    folded = copy.deepcopy(dictionary).to("cpu", torch.float32).fold()
    tensors = {name: value.detach() for name, value in zip(_NAMES, _weights(folded), strict=True)}
    if folded.architecture == "jumprelu":
        tensors["threshold"] = folded.threshold.detach()
    if folded.W_skip is not None:
        tensors["W_skip"] = folded.W_skip.detach().T
    if folded.sources == 1:
        tensors |= {name: tensors[name].squeeze(0) for name in ("W_enc", "W_dec", "b_dec")}
    with storage_errors("the dictionary", place):
        place.mkdir(parents=True, exist_ok=True)
    replace_file(place / WEIGHTS, save({name: value.contiguous() for name, value in tensors.items()}))
    content = json.dumps(_configuration(folded, metadata or {}), indent=2, ensure_ascii=False)
    replace_file(place / CONFIG, content.encode() + b"\n")
    return place


_NAMES = ("W_enc", "W_dec", "b_enc", "b_dec")


def _weights(dictionary: Dictionary) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """In the order and the shapes of the file, always with the axis of sources."""
    return dictionary.W_enc, dictionary.W_dec.transpose(0, 1), dictionary.b_enc, dictionary.b_dec


def _configuration(dictionary: Dictionary, metadata: Mapping[str, Any]) -> dict[str, Any]:
    own = {"kind": dictionary.kind, "options": dictionary.options, "matryoshka": list(dictionary.prefixes[:-1])}
    architecture = dictionary.architecture if dictionary.sources == 1 else "crosscoder"
    if dictionary.transcoder:
        skip = "skip_" if dictionary.W_skip is not None else ""
        architecture = f"{architecture}_{skip}transcoder".removeprefix("standard_")
    configuration = {
        "architecture": architecture,
        "d_in": dictionary.d,
        "d_sae": dictionary.features,
        "dtype": "float32",
        "device": "cpu",
        "apply_b_dec_to_input": not dictionary.transcoder,
        "normalize_activations": "none",
        "reshape_activations": "none",
    }
    if dictionary.transcoder:
        configuration |= {"d_out": dictionary.d}
    if dictionary.architecture == "topk":
        configuration |= {"k": int(dictionary.options["k"]), "rescale_acts_by_decoder_norm": False}
    if architecture == "crosscoder":
        configuration |= {"sources": dictionary.sources, "activation": dictionary.architecture}
    fixed = {"sae_lens_version": LAYOUT_VERSION, "posttrain": own}
    defaults = {"model_name": None, "hook_name": None, "context_size": None, "prepend_bos": False}
    return configuration | {"metadata": defaults | dict(metadata) | fixed}


def read_metadata(folder: str | Path) -> dict[str, Any]:
    """What a dictionary's ``cfg.json`` says it was trained on (model, hook, layer ...); empty where it says nothing.

    Files of others say it beside ``metadata`` too, and name hooks: ``site`` and ``target`` are filled in from them.

    Raises:
        DataError: there is no such file, or it is damaged.
    """
    configuration = _read_configuration(Path(folder) / CONFIG)
    beside = {key: configuration[key] for key in ("model_name", "hook_name", "hook_name_out") if key in configuration}
    metadata = beside | dict(configuration.get("metadata") or {})
    hooks = {"site": metadata.get("hook_name") or configuration.get("hook_point")}
    if _is_transcoder(configuration):
        hooks["target"] = metadata.get("hook_name_out")
    places = {key: site for key, hook in hooks.items() if (site := site_of_hook(hook)) is not None}
    return places | metadata


def load_dictionary(folder: str | Path) -> Dictionary:
    """A dictionary on raw activations in fp32, from a folder that this package or SAELens wrote.

    Raises:
        DataError: no such folder, damaged files, shapes that do not fit, or a dictionary that cannot be used here
            (another architecture, or activations that have to be normalized first).
    """
    place = Path(folder)
    configuration = _read_configuration(place / CONFIG)
    tensors = _read_weights(place / WEIGHTS)
    architecture = _architecture(configuration, place / CONFIG)
    sources = int(configuration.get("sources", 1))
    if sources == 1:
        tensors |= {name: tensors[name].unsqueeze(0) for name in ("W_enc", "W_dec", "b_dec")}
    _check_tensors(tensors, architecture, place / WEIGHTS)
    _check_shapes(tensors, configuration, sources, place / WEIGHTS)
    kind, options, prefixes = _own_words(configuration, architecture)
    transcoder = _is_transcoder(configuration)
    dictionary = Dictionary(
        int(configuration["d_in"]), int(configuration["d_sae"]), sources, kind, options, prefixes or None,
        transcoder=transcoder, skip="W_skip" in tensors,
    )  # fmt: skip
    if dictionary.architecture != architecture:
        raise DataError(
            place / CONFIG, f"metadata.posttrain.kind: {kind!r} is no dictionary of the architecture {architecture!r}"
        )
    if not transcoder:
        _convert(tensors, configuration)
    with torch.no_grad():
        dictionary.W_enc.copy_(tensors["W_enc"])
        dictionary.W_dec.copy_(tensors["W_dec"].transpose(0, 1))
        dictionary.b_enc.copy_(tensors["b_enc"])
        dictionary.b_dec.copy_(tensors["b_dec"])
        dictionary.threshold.copy_(tensors.get("threshold", torch.zeros(dictionary.features)))
        if dictionary.W_skip is not None:
            dictionary.W_skip.copy_(tensors["W_skip"].T)
    return dictionary.requires_grad_(False)


class _Own(BaseModel):
    """What of ``metadata`` only this package writes."""

    kind: str | None = None
    options: dict[str, float] = {}
    matryoshka: list[PositiveInt] | None = None


class _Metadata(BaseModel):
    models: list[dict[str, Any] | str] | None = None
    model_name: str | None = None
    hook_name: str | None = None
    hook_name_out: str | None = None
    site: str | None = None
    target: str | None = None
    source: str | None = None
    posttrain: _Own | None = None


class _Configuration(BaseModel):
    """What ``cfg.json`` says that is read here; ours, SAELens's or a stranger's."""

    d_in: PositiveInt
    d_sae: PositiveInt
    sources: PositiveInt = 1
    k: PositiveInt | None = None
    hook_point: str | None = None
    metadata: _Metadata | None = None


def _read_configuration(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(path, "there is no such file; a dictionary is a folder with cfg.json and weights") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(path, f"cannot be read ({error})") from None
    if not isinstance(content, dict):
        raise DataError(path, "not the configuration of a dictionary")
    missing = [key for key in ("d_in", "d_sae") if not isinstance(content.get(key), int)]
    if missing:
        raise DataError(path, f"says nothing of {', '.join(missing)}")
    try:
        _Configuration.model_validate(content, strict=True)
    except ValidationError as error:
        raise DataError(path, f"not the configuration of a dictionary ({first_fault(error)})") from None
    if content.get("architecture", "standard") == "standard" and content.get("activation_fn_str") == "topk":
        # SAELens before version 6; a k that is missing is refused as the function
        chosen = content.get("activation_fn_kwargs")
        k = chosen.get("k") if isinstance(chosen, dict) else None
        content |= {"architecture": "topk", "k": k, "activation_fn_str": None if isinstance(k, int) else "topk"}
    return content


def _read_weights(path: Path) -> dict[str, Tensor]:
    try:
        tensors = {name: value.float() for name, value in load_file(path).items()}
    except FileNotFoundError:
        raise DataError(path, "there is no such file; a dictionary is a folder with cfg.json and weights") from None
    except (OSError, SafetensorError) as error:
        raise DataError(path, f"cannot be read ({error})") from None
    missing = [name for name in _NAMES if name not in tensors]
    if missing:
        raise DataError(path, f"has no tensor {', '.join(missing)}; there are: {', '.join(sorted(tensors))}")
    return tensors


def _architecture(configuration: Mapping[str, Any], path: Path) -> str:
    architecture = str(configuration.get("architecture", "standard"))
    if configuration.get("finetuning_scaling_factor"):
        raise DataError(path, "a finetuning_scaling_factor cannot be used here")
    function = configuration.get("activation_fn_str", configuration.get("activation_fn"))
    if function not in (None, "relu"):
        raise DataError(path, f"activation function {function!r}; here are relu, topk (with k) and jumprelu")
    activation = str(configuration.get("activation", "?")) if architecture == "crosscoder" else architecture
    if _is_transcoder(configuration):
        activation = activation.removesuffix("transcoder").removesuffix("skip_").removesuffix("_") or "standard"
        if configuration.get("d_out", configuration["d_in"]) != configuration["d_in"]:
            raise DataError(path, "a transcoder that writes another width (d_out) than it reads cannot be used here")
    if activation not in _KINDS:
        raise DataError(path, f"architecture {activation!r} is not one of {', '.join(_KINDS)}, crosscoder, transcoder")
    if activation == "topk" and not configuration.get("k"):
        raise DataError(path, "says nothing of k, which a topk dictionary needs; add it")
    for key, wanted in (("normalize_activations", "none"), ("reshape_activations", "none")):
        if configuration.get(key) not in (None, wanted):
            raise DataError(path, f"{key}: {configuration[key]!r}; only {wanted!r} can be used here. Fold it first")
    return activation


def _is_transcoder(configuration: Mapping[str, Any]) -> bool:
    return str(configuration.get("architecture")).endswith("transcoder")


def _check_tensors(tensors: dict[str, Tensor], architecture: str, path: Path) -> None:
    """Refuse a file with a tensor that is not used here, or without one that its architecture reads.

    Raises:
        DataError: with the names of the tensors.
    """
    scale = tensors.get("scaling_factor")  # files of SAELens before version 6 hold ones, which scale nothing
    if scale is not None and bool((scale == 1).all()):
        del tensors["scaling_factor"]
    if architecture == "jumprelu" and "threshold" not in tensors:
        raise DataError(path, "has no tensor threshold, which a jumprelu dictionary needs; copy the whole dictionary")
    used = {*_NAMES, "W_skip", *(["threshold"] if architecture == "jumprelu" else [])}
    unused = sorted(tensors.keys() - used)
    if unused:
        raise DataError(
            path,
            f"has tensors that a {architecture} dictionary does not use: {', '.join(unused)}. It is of another "
            f"architecture than cfg.json says; here are {', '.join(_KINDS)}, crosscoder, transcoder",
        )


def _check_shapes(tensors: Mapping[str, Tensor], configuration: Mapping[str, Any], sources: int, path: Path) -> None:
    d, features = int(configuration["d_in"]), int(configuration["d_sae"])
    wanted = {
        "W_enc": (sources, d, features),
        "W_dec": (sources, features, d),
        "b_enc": (features,),
        "b_dec": (sources, d),
        "threshold": (features,),
        "W_skip": (d, d),
    }
    needs_skip = "skip_transcoder" in str(configuration.get("architecture"))
    if needs_skip != ("W_skip" in tensors):
        raise DataError(path, f"{'has no' if needs_skip else 'has a'} tensor W_skip, unlike cfg.json's architecture")
    for name, shape in wanted.items():
        if name in tensors and tuple(tensors[name].shape) != shape:
            raise DataError(path, f"{name} has the shape {tuple(tensors[name].shape)}, but cfg.json means {shape}")


def _own_words(configuration: Mapping[str, Any], architecture: str) -> tuple[str, dict[str, Any], list[int]]:
    """The kind with its options and prefixes: as written by us, else what the architecture amounts to."""
    own = dict(configuration.get("metadata") or {}).get("posttrain")
    if isinstance(own, Mapping) and "kind" in own:
        return str(own["kind"]), dict(own.get("options", {})), list(own.get("matryoshka") or [])
    options = {"k": int(configuration["k"])} if architecture == "topk" else {}
    return _KINDS[architecture], options, []


def _convert(tensors: dict[str, Tensor], configuration: Mapping[str, Any]) -> None:
    """Other conventions of SAELens, brought to ours in place."""
    if configuration.get("architecture") == "topk" and configuration.get("rescale_acts_by_decoder_norm"):
        norms = tensors["W_dec"].norm(dim=-1)  # [1, F]; its features are those of a dictionary with rows of norm 1
        tensors["W_enc"] = tensors["W_enc"] * norms[:, None]
        tensors["b_enc"] = tensors["b_enc"] * norms[0]
        tensors["W_dec"] = tensors["W_dec"] / norms[..., None]
    if not configuration.get("apply_b_dec_to_input", True):
        shift = torch.einsum("md,mdf->f", tensors["b_dec"], tensors["W_enc"])
        tensors["b_enc"] = tensors["b_enc"] + shift


# What other tools call the output of the block with this index.
_HOOKS = {"resid": "blocks.{}.hook_resid_post", "mlp": "blocks.{}.hook_mlp_out", "attn": "blocks.{}.hook_attn_out",
          "mlp_in": "blocks.{}.ln2.hook_normalized"}  # fmt: skip


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
        **({} if rows.target is None else {"hook_name_out": hook_name(rows.target), "target": rows.target}),
        "layer": read_site(site).layer,
        "layer_convention": index.layer_convention,
        "source": rows.source,
        "models": [{"name": x.name, "model": x.model, "weights_hash": x.weights_hash} for x in used],
        "tokenizer": index.tokenizer,
        "activations": {"data": index.data, "rows": index.rows, "dropped": index.dropped, "dtype": index.dtype},
        "training": {"recipe": recipe.fingerprint(), "steps": step, "rows": step * recipe.train.batch},
    }
