"""Preserve tensors and files outside the causal language model: vision towers, draft heads.

transformers loads only the language model from ``...ForConditionalGeneration`` folders, and drops multi-token
prediction heads (``mtp.*``). After training, saved folders get both back bit for bit, restoring the original
architecture.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.core_model_loading import revert_weight_conversion

from posttrain.errors import CheckpointError, UsageError
from posttrain.models.config import Config, read_object, write_object
from posttrain.models.load import INDEX, LoadedModel, find_file, weight_files
from posttrain.models.sources import SCORE, base_of, first_names, is_adapter
from posttrain.option_types import shorten
from posttrain.types import Model
from posttrain.untrusted import kind_of_file

PARTS = "untrained_parts"  # attribute set on trained models
# The files of a processor, without which a vision or audio model cannot be asked.
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_DRAFT_HEAD = re.compile(r"(^|\.)mtp[._]")
_LAYER = re.compile(r"\.layers\.([0-9]+)\.")


@dataclass(frozen=True, slots=True)
class UntrainedParts:
    """Parts of ``source`` outside its causal language model.

    Args:
        source: folder or hub name.
        architecture: full model class, or the language model's class if merely extra tensors exist.
        tensors: file name per tensor.
        config: ``config.json`` content if it describes a larger model; None: a plain language model.
        text_key: ``config`` key describing the language model.
        files: processor files.
    """

    source: str
    architecture: str
    tensors: Mapping[str, Path]
    config: Mapping[str, Any] | None = None
    text_key: str = ""
    files: tuple[Path, ...] = ()


def find_untrained(model: Model, source: str) -> UntrainedParts | None:
    """Find parts of ``source`` (or an adapter's base) missing from ``model``; None if complete.

    Args:
        model: causal language model loaded from ``source``, without peft wrapper.

    Raises:
        UsageError: the language model's tensor names differ from stored names.
    """
    while is_adapter(source):
        source = base_of(source)
    place = find_file(source, "config.json")
    stored = _stored_names(source)
    if place is None or not stored:
        return None
    raw = read_object(place)
    found = [find_file(source, name) for name in PROCESSOR_FILES]
    files = tuple(file for file in found if file is not None)
    is_part = raw.get("model_type") != model.config.model_type
    written, required = _names_on_disk(model)
    kept = {name: file for name, file in stored.items() if not _is_written(name, written) and name != SCORE}
    absent = sorted(required - stored.keys())
    kind = str(next(iter(raw.get("architectures") or ()), raw.get("model_type")))
    if absent and is_part:
        raise UsageError(
            f"model.name: {source} is a {kind}, of which the language model is trained. Its tensors have other names "
            f"there ({first_names(absent)}), so a checkpoint would lose the rest. Train an adapter (model.adapter.rank "
            "16), or give a folder with the language model only"
        )
    if absent:  # older layout, whose tensor names differ from checkpoints
        kept = {name: file for name, file in kept.items() if _is_draft(name, model.config)}
    if not kept and not is_part and not files:
        return None
    if not is_part:
        return UntrainedParts(source, type(model).__name__, kept, files=files)
    return UntrainedParts(source, kind, kept, raw, _text_key(raw, source), files)


def describe_other_parts(loaded: LoadedModel, *, is_scorer: bool) -> list[str]:
    """Describe model parts left untrained, a line each.

    Args:
        loaded: annotated by ``note_untrained``.
        is_scorer: reward-model training, saving text classifiers.
    """
    model = loaded.model
    kinds = [one for one in model.config.architectures or () if one.endswith("SequenceClassification")]
    left_out = f"its head ({SCORE}) is left out, and the language model below it is used"
    lines = []
    if not is_scorer:
        lines = [f"model.name: {loaded.source} is a reward model ({kind}); {left_out}" for kind in kinds]
    parts: UntrainedParts | None = getattr(model, PARTS, None)
    if parts is None or not parts.tensors:
        return lines
    groups = first_names(set(map(_group, parts.tensors)))
    what = f"{len(parts.tensors)} tensors ({groups}) are not trained"
    if is_scorer:
        what += ", and are not in a checkpoint that is a text classifier"
    else:
        what += ", and are in every checkpoint as they were"
    if parts.config is not None:
        what = f"its language model ({type(model).__name__}) is trained; {what}"
    return [*lines, f"model.name: {parts.source} is a {parts.architecture}; {what}"]


def note_untrained(model: Model, source: str) -> None:
    """Record missing parts for ``complete_folder``; raises like ``find_untrained``."""
    setattr(model, PARTS, find_untrained(model, source))


def complete_folder(folder: Path, model: Model) -> None:
    """Add tensors and files recorded by ``note_untrained`` to a saved model, restoring its full architecture.

    Raises:
        CheckpointError: the original folder disappeared.
    """
    parts: UntrainedParts | None = getattr(model, PARTS, None)
    if parts is None:
        return
    written = sorted(folder.glob("model*.safetensors"))
    names = {name: file for file in written for name in _names_in(file)}
    kept = {name: file for name, file in parts.tensors.items() if name not in names}
    if kept:
        _add_shard(folder, written, names, _read(kept))
    for file in parts.files:
        if not (folder / file.name).exists():
            shutil.copyfile(file, folder / file.name)
    if parts.config is not None:
        _restore_config(folder, parts.config, parts.text_key)


def _read(kept: Mapping[str, Path]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(kept.values())):
        try:
            with safe_open(file, framework="pt") as opened:
                tensors |= {name: opened.get_tensor(name) for name in kept if kept[name] == file}
        except FileNotFoundError:
            raise CheckpointError(
                f"{file}: the file has gone since the run began, and a checkpoint needs its tensors that are not "
                "trained. Put it back and resume"
            ) from None
    return tensors


def _add_shard(folder: Path, files: list[Path], names: Mapping[str, Path], tensors: dict[str, Tensor]) -> None:
    """Write ``tensors`` to an additional weight file, updating the index."""
    count = len(files) + 1
    places = {}
    for number, file in enumerate(files, start=1):
        places[file] = f"model-{number:05}-of-{count:05}.safetensors"
        file.rename(folder / f"{places[file]}.renamed")
    for name in places.values():
        (folder / f"{name}.renamed").rename(folder / name)
    last = f"model-{count:05}-of-{count:05}.safetensors"
    save_file(tensors, folder / last, {"format": "pt"})
    weight_map = {name: places[file] for name, file in names.items()} | dict.fromkeys(tensors, last)
    num_bytes = sum((folder / name).stat().st_size for name in {*places.values(), last})
    index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    write_object(folder / INDEX, index)


def _restore_config(folder: Path, whole: Mapping[str, Any], text_key: str) -> None:
    """Insert the language model's configuration into the full configuration."""
    text = read_object(folder / "config.json")
    content = dict(whole)
    for key in ("dtype", "transformers_version"):
        content[key] = text.get(key)
    content.pop("torch_dtype", None)  # the older name of dtype
    if "tie_word_embeddings" in content:
        content["tie_word_embeddings"] = text.get("tie_word_embeddings", False)
    content[text_key] = {key: value for key, value in text.items() if key not in ("architectures", "auto_map")}
    content[text_key].pop("transformers_version", None)
    write_object(folder / "config.json", content)


def _stored_names(source: str) -> dict[str, Path]:
    """Map each weight tensor to its file."""
    files = weight_files(source)
    if kind_of_file(source) != "nothing":  # checkpoints also contain optimizer files
        files = [file for file in files if file.name.startswith("model")]
    return {name: file for file in files for name in _names_in(file)}


def _names_in(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as opened:
        return list(opened.keys())


def _names_on_disk(model: Model) -> tuple[set[str], set[str]]:
    """List tensor names ``model`` writes: everything, then everything untied."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in model.state_dict().items()}
    own = {name: tensor for name, tensor in shapes.items() if name not in tied}
    return set(dict(revert_weight_conversion(model, shapes))), set(dict(revert_weight_conversion(model, own)))


def _is_written(name: str, written: Collection[str]) -> bool:
    """Check if a model writes this tensor, or its parent tensor (for quantization scales)."""
    if name in written:
        return True
    ends = [index for index, letter in enumerate(name) if letter in "._"]
    return any(name[:end] in written for end in ends if name[:end].endswith(("weight", "bias")))


def _is_draft(name: str, config: Config) -> bool:
    """Check if a tensor name belongs to a multi-token prediction head."""
    layer = _LAYER.search(name)
    depth = getattr(config.get_text_config(), "num_hidden_layers", None)
    is_beyond = layer is not None and isinstance(depth, int) and int(layer[1]) >= depth
    return is_beyond or _DRAFT_HEAD.search(name) is not None


def _text_key(raw: Mapping[str, Any], source: str) -> str:
    """Find the configuration key describing the language model.

    Raises:
        UsageError: not found.
    """
    kind = raw.get("model_type")
    if kind in CONFIG_MAPPING:
        config = AutoConfig.for_model(kind)
        text = config.get_text_config()
        for key in config.sub_configs:
            if key in raw and getattr(config, key, None) is text:
                return str(key)
    raise UsageError(
        f"model.name: {source}: config.json ({shorten(kind)}) names no language model, so a checkpoint could not be of "
        "the same architecture. Give a folder with the language model only"
    )


def _group(name: str) -> str:
    """Extract a tensor name's leading components, which locate it."""
    parts = name.split(".")
    depth = 1
    if parts[0] == "model":
        depth = 2
    return ".".join(parts[:depth])
