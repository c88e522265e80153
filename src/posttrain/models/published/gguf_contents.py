"""Contents of GGUF files that transformers ignores silently, and without which the model is a different one."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any

from posttrain.errors import UsageError
from posttrain.models.config import check_sizes
from posttrain.option_types import shorten

# Tensors with factors for rotary frequencies: the scaled rotary embeddings of Llama 3 and Phi 3.
_ROTARY_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# Metadata keys, with the value that changes nothing.
_NEUTRAL: dict[str, object] = {
    "rope.scaling.type": "none",
    "rope.scaling.factor": 1.0,
    "rope.scale_linear": 1.0,
    "attention.scale": 1.0,
    "logit_scale": 1.0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "attention.clamp_kqv": 0.0,
}
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")  # keys, and names in configurations
MOST_PER_BYTE = 8  # the fewest bits of a weight are above 1
_SHOWN = 3


def check_contents(path: Path) -> None:
    """Refuse impossible sizes, and settings that transformers would ignore.

    Raises:
        UsageError: names the key or tensor.
    """
    from gguf import GGUFReader
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = load_gguf_checkpoint(str(path), return_tensors=False)["config"]
    check_sizes(config, f"model.name: {path}: ")  # before anything of these sizes is allocated
    reader = GGUFReader(str(path))
    architecture = str(reader.fields["general.architecture"].contents())
    stored: dict[str, Any] = {}
    for name, field in reader.fields.items():
        if name.startswith(f"{architecture}."):
            stored[name.removeprefix(f"{architecture}.")] = field.contents()
    for key in _ignored_keys(stored, _read_keys(architecture)):
        raise _other_model(path, f"{architecture}.{key} {shorten(stored[key])}")
    for tensor in reader.tensors:
        if tensor.name in _ROTARY_FACTORS and bool((tensor.data != 1).any()):
            raise _other_model(path, f"scaled rotary frequencies ({tensor.name})")


def check_number_of_weights(path: Path, config: Any) -> None:
    """Refuse metadata that describes more weights than the file can hold, before they are allocated.

    Raises:
        UsageError: states both sizes.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy(config))
    count = sum(parameter.numel() for parameter in model.parameters())
    num_bytes = path.stat().st_size
    if count > MOST_PER_BYTE * num_bytes:
        raise UsageError(
            f"model.name: {path}: its metadata describes {count:,} weights, and the file has {num_bytes:,} bytes. "
            "Give a complete file"
        )


def check_loaded(path: Path, config: Any, report: Mapping[str, Any]) -> None:
    """Refuse files that leave weights random, and caps on logits that differ from the configuration's.

    Raises:
        UsageError: names the weights or the key.
    """
    wrong = sorted(name for name, *_ in report.get("mismatched_keys") or ())
    if wrong:
        raise UsageError(
            f"model.name: {path}: {len(wrong)} tensors do not have the sizes that its metadata gives: "
            f"{', '.join(wrong[:_SHOWN])}. Give a complete file"
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise UsageError(
            f"model.name: {path}: {len(missing)} weights are missing or have unknown names: "
            f"{', '.join(missing[:_SHOWN])}. They would be random; give a complete file"
        )
    for key, value in _caps_of(path).items():
        used = getattr(config, key, None) or 0.0
        if abs(value - used) > 1e-3:
            raise _other_model(path, f"{key} {value:g}")


def _ignored_keys(stored: Mapping[str, Any], read: Mapping[str, object]) -> list[str]:
    """List keys that transformers does not read although their values change the model."""
    ignored = []
    for key, neutral in _NEUTRAL.items():
        if key in stored and read.get(key) is None and stored[key] not in (neutral, 0, 0.0):
            ignored.append(key)
    window = stored.get("attention.sliding_window")
    if window and read.get("attention.sliding_window") is None and window < stored.get("context_length", window + 1):
        ignored.append("attention.sliding_window")
    return ignored


def _read_keys(architecture: str) -> Mapping[str, object]:
    """Look up the metadata keys that transformers reads for an architecture."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    read: dict[str, object] = {}
    for name, keys in GGUF_CONFIG_MAPPING.items():
        if name.replace("_", "").replace("-", "") == architecture.replace("_", "").replace("-", ""):
            read.update(keys)
            if name == "gpt_oss":  # read apart from the table
                read |= dict.fromkeys(_NEUTRAL, "rope_scaling") | {"attention.sliding_window": "sliding_window"}
    return read


def _caps_of(path: Path) -> dict[str, float]:
    from gguf import GGUFReader

    fields = GGUFReader(str(path)).fields
    architecture = fields["general.architecture"].contents()
    found = {}
    for key in _CAPS:
        if f"{architecture}.{key}" in fields:
            found[key] = float(fields[f"{architecture}.{key}"].contents())
    return found


def _other_model(path: Path, what: str) -> UsageError:
    return UsageError(
        f"model.name: {path}: it has {what}, which transformers does not read from GGUF files, so it would be another "
        "model; give the model in the Hugging Face layout"
    )
