"""The files of a model before they are opened: which of them could run code, and what a failure to load them means."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from posttrain.consent import TRUST_REMOTE_CODE
from posttrain.errors import UsageError
from posttrain.models.stated_sizes import read_object

ADAPTER_CONFIG = "adapter_config.json"


def check_files(source: str, base_of: Callable[[str], str]) -> None:
    """Refuse a folder whose files could run code when they are loaded: pickles, and adapters that name modules.

    peft imports what an adapter's ``megatron_core`` names, and other kinds than LoRA bring loaders of their own.
    ``base_of`` an adapter's folder is the model that it stands on.

    Raises:
        UsageError: such a folder, or adapters that stand on one another in a circle.
    """
    seen: list[str] = []
    while is_adapter(source):
        if os.path.realpath(source) in seen:
            raise UsageError(f"model.name: {source}: this adapter stands on itself; {ADAPTER_CONFIG} names its base")
        seen.append(os.path.realpath(source))
        settings = read_object(Path(source) / ADAPTER_CONFIG)
        if settings.get("peft_type") != "LORA" or settings.get("megatron_config") is not None:
            raise UsageError(
                f"model.name: {source}: {ADAPTER_CONFIG} describes something else than a plain LoRA adapter, and that "
                "could run code of its choice; merge it into its base with what made it, and give the merged model"
            )
        _refuse_pickle(Path(source), "adapter_model.safetensors", "adapter_model.bin")
        source = base_of(source)
    _refuse_pickle(Path(source), "model*.safetensors", "pytorch_model*.bin")


def _refuse_pickle(folder: Path, safe: str, pickled: str) -> None:
    other = next(iter(sorted(folder.glob(pickled))), None)
    if other is not None and not any(folder.glob(safe)):
        raise UsageError(
            f"model.name: {other} is a pickle, and loading one can run any code; give the weights as safetensors "
            "(save_pretrained writes them with safe_serialization=True)"
        )


def is_adapter(source: str) -> bool:
    """Whether a folder holds an adapter, which stands on another model."""
    return (Path(source) / ADAPTER_CONFIG).is_file()


def explain_loading(name: str, source: str, error: Exception) -> str:
    """What an error of transformers or peft means for the model called ``name``, which is ``source``."""
    first = _first_line(error)
    if "trust_remote_code" in str(error):
        return (
            f"model.name: {source} comes with Python of its own, which is not run unless you say so: "
            f"{TRUST_REMOTE_CODE}, after you have read it"
        )
    if Path(source).exists():
        return f"model.name: {source} cannot be loaded as a causal language model: {first}"
    return (
        f"model.name: {name!r} is neither tiny, nor a folder or run here, and could not be had from the hub: {first} "
        "Download it beforehand and give its folder, or use the embedded model, tiny"
    )


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__
