"""Models by name: the embedded one, a run, a checkpoint, a local folder, or the hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from posttrain.errors import UsageError
from posttrain.models.tokenizer import train_tokenizer
from posttrain.randomness import derive_key
from posttrain.recipe import InitSection, ModelSection
from posttrain.registry import suggest

TINY = Path(__file__).parent / "tiny"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model in eval mode with its tokenizer; ``source`` says where it came from."""

    model: Any
    tokenizer: Any
    source: str


def resolve_model_name(name: str) -> str:
    """The folder or hub name that ``name`` stands for.

    ``tiny`` is the embedded model; a run directory is its best checkpoint, else its newest.

    Raises:
        UsageError: a run without a checkpoint, or a path that does not exist.
    """
    if name == "tiny":
        return str(TINY)
    path = Path(name).expanduser()
    if (path / "recipe.yaml").is_file() and (path / "checkpoints").is_dir():
        return str(_checkpoint_of(path))
    if path.is_dir():
        if not (path / "config.json").is_file() and not (path / "adapter_config.json").is_file():
            raise UsageError(
                f"model.name: {name} is a folder without config.json or adapter_config.json; "
                "give a run directory, or a model in the Hugging Face layout"
            )
        return str(path)
    looks_local = name.startswith((".", "/", "~", "runs/")) or name.count("/") > 1
    if looks_local or not name:
        raise UsageError(f"model.name: there is no folder {name!r}")
    return name


def load_model(section: ModelSection, *, seed: int, texts: Iterator[str] | None = None) -> LoadedModel:
    """Load (or make, with ``section.init``) a model and its tokenizer.

    The model is in eval mode (no dropout), in ``section.dtype``, on ``section.device``. An adapter
    folder loads its base and the adapter; where the recipe asks for a new adapter, the old one is
    merged into the base in memory first. ``texts`` train the tokenizer of a new model.

    Raises:
        UsageError: no such model, a hub that cannot be reached, or not a causal language model.
    """
    if section.init is not None:
        model, tokenizer = _new_model(section.init, seed, texts or iter(()))
        source = f"new {section.init.architecture}"
    else:
        source = resolve_model_name(section.name)
        model, tokenizer = _from_files(section, source)
    device = _device(section.device)
    return LoadedModel(model.to(device).eval(), tokenizer, source)


def _from_files(section: ModelSection, source: str) -> tuple[Any, Any]:
    folder = Path(source)
    adapter = folder / "adapter_config.json"
    options: dict[str, Any] = {
        "dtype": getattr(torch, section.dtype),
        "trust_remote_code": section.trust_remote_code,
        "use_safetensors": True,  # the other format is a pickle
    }
    quiet = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        base = source
        if adapter.is_file():
            base = resolve_model_name(json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"])
        model = AutoModelForCausalLM.from_pretrained(base, **options)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=section.trust_remote_code)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise UsageError(_explain(section.name, source, error)) from error
    finally:
        if quiet:
            transformers_logging.enable_progress_bar()
    if adapter.is_file():
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, source, is_trainable=True)
        if section.adapter is not None:
            model = model.merge_and_unload()
    return model, tokenizer


def _new_model(init: InitSection, seed: int, texts: Iterator[str]) -> tuple[Any, Any]:
    tokenizer = train_tokenizer(texts, init.tokenizer.vocab_size)
    known = AutoConfig.for_model("qwen3").to_dict().keys() if init.architecture == "qwen3" else None
    for key in init.config:
        if known is not None and key not in known:
            raise UsageError(f"model.init.config: {init.architecture} has no key {key!r}.{suggest(key, known)}")
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
    try:
        config = AutoConfig.for_model(
            init.architecture,
            **{"vocab_size": len(tokenizer), **ends, "pad_token_id": tokenizer.pad_token_id, **init.config},
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_key(seed, "model weights") % (1 << 63))
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (ValueError, TypeError) as error:
        raise UsageError(f"model.init: {init.architecture!r} cannot be built: {error}") from error
    return model, tokenizer


def _checkpoint_of(run: Path) -> Path:
    best = run / "checkpoints" / "best"
    if best.is_dir():
        return best.resolve()
    steps = sorted((run / "checkpoints").glob("step-*"))
    if not steps:
        raise UsageError(f"model.name: the run {run} has no checkpoint yet")
    return steps[-1]


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("model.device: cuda was asked for, but torch sees no GPU; use model.device auto or cpu")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def _explain(name: str, source: str, error: Exception) -> str:
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if Path(source).exists():
        return f"model.name: {source} cannot be loaded as a causal language model: {first}"
    return (
        f"model.name: {name!r} is neither tiny, nor a folder or run here, and could not be had from the hub: {first} "
        "Download it beforehand and give its folder, or use the embedded model: --model.name tiny"
    )
