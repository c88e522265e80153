"""Models for extraction: only the blocks that are needed are read from the disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import AutoConfig, AutoModel
from transformers.utils import logging as transformers_logging

from posttrain.errors import UsageError
from posttrain.interpret.activations.sites import read_site, shorten_config, truncate
from posttrain.models.load import LoadedModel, load_model, load_tokenizer, reading_model
from posttrain.models.sources import adapter_base, resolve_model_name
from posttrain.recipes.sections import ModelSection

_WEIGHTS = ("model*.safetensors", "adapter_model*.safetensors", "pytorch_model*.safetensors")
_MANIFEST = "manifest.json"


def load_layers(section: ModelSection, sites: Sequence[str]) -> LoadedModel:
    """The first blocks of a model, as many as the sites need, in eval mode, with its tokenizer.

    Of a plain model the blocks above and the LM head are never read. Of an adapter, or of quantized weights, the whole
    is loaded and then cut.

    Raises:
        UsageError: no such model, or it has fewer layers than a site says.
    """
    wanted = [read_site(name) for name in sites]
    layer = max([1, *(site.layer for site in wanted)])
    check_layers(section.name, sites)
    source = resolve_model_name(section.name)
    if adapter_base(source) is None and section.load_bits is None:
        model = _load_first_blocks(section, source, layer)
        if model is not None:
            tokenizer = load_tokenizer(section.name, trust_remote_code=section.runs_remote_code)
            return LoadedModel(model, tokenizer, source)
    loaded = load_model(section, seed=0)
    return LoadedModel(truncate(loaded.model, layer).eval(), loaded.tokenizer, loaded.source)


def _load_first_blocks(section: ModelSection, source: str, layer: int) -> Any | None:
    """A backbone of ``layer`` blocks without a final norm; None where the whole model has to be loaded."""
    try:
        with reading_model(section.name, source):
            config = AutoConfig.from_pretrained(source, trust_remote_code=section.runs_remote_code)
    except UsageError:
        return None
    text = config.get_text_config()
    if text is not config or getattr(config, "quantization_config", None) is not None:
        return None
    shorten_config(config, layer)
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()  # it would report the blocks above as left over
    transformers_logging.disable_progress_bar()
    try:
        with reading_model(section.name, source):
            model, loading_info = AutoModel.from_pretrained(
                source,
                config=config,
                dtype=getattr(torch, section.dtype),
                trust_remote_code=section.runs_remote_code,
                use_safetensors=True,
                output_loading_info=True,
            )
    except UsageError:
        return None  # loading all of it says what is wrong
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
    if loading_info["missing_keys"]:
        return None
    asked = section.device
    device = ("cuda" if torch.cuda.is_available() else "cpu") if asked == "auto" else asked
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("cuda was asked for, but torch sees no GPU; use --device auto or cpu")
    return truncate(model, layer).to(device).eval()


def read_config(name: str) -> Any:
    """The configuration of a model, without its weights; of an adapter folder that of its base.

    Raises:
        UsageError: no such model.
    """
    source = resolve_model_name(name)
    while (base := adapter_base(source)) is not None:
        source = base
    with reading_model(name, source):
        return AutoConfig.from_pretrained(source)


def check_layers(name: str, sites: Sequence[str]) -> None:
    """Refuse sites that a model has not, by its configuration alone.

    Raises:
        UsageError: no such model, no name of a site, or a layer above the last.
    """
    num_layers = read_config(name).get_text_config().num_hidden_layers
    for site in map(read_site, sites):
        if site.layer > num_layers:
            raise UsageError(f"{site}: {name} has {num_layers} layers; give a layer from 0 to {num_layers}")


def weights_hash(name: str) -> str:
    """SHA-256 of the files that hold a model's weights, an adapter's base included; ``""`` where there are no files.

    A checkpoint of a run has them in its manifest; the files of other folders are read (about a second per GB).

    Raises:
        UsageError: no such model.
    """
    source = resolve_model_name(name)
    try:
        folder = Path(source) if Path(source).is_dir() else Path(snapshot_download(source, local_files_only=True))
    except LocalEntryNotFoundError:
        return ""
    digest = hashlib.sha256()
    known = _manifest_hashes(folder)
    files = sorted({file for pattern in _WEIGHTS for file in folder.glob(pattern)})
    for file in files:
        with file.open("rb") as opened:
            sha256 = known.get(file.name) or hashlib.file_digest(opened, "sha256").hexdigest()
        digest.update(f"{file.name} {sha256}\n".encode())
    base = adapter_base(source)
    if base is not None:
        digest.update(weights_hash(base).encode())
    return digest.hexdigest() if files else ""


def tokenizer_hash(tokenizer: Any) -> str:
    """A hash of a tokenizer's vocabulary, by which two models are known to mean the same by the same ids."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()[:16]


def _manifest_hashes(folder: Path) -> dict[str, str]:
    path = folder / _MANIFEST
    if not path.is_file():
        return {}
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["files"]
        return {str(file): str(entry["sha256"]) for file, entry in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}  # a damaged manifest: the files themselves are read
