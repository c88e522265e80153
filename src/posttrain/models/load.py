"""Models by name: the embedded one, a run, a checkpoint, a local folder, or the hub."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from posttrain.errors import UsageError
from posttrain.models.scorer import SCORE
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
    if not name:
        raise UsageError("model.name is empty; give tiny, a folder, a run directory or a hub name")
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
    if looks_local:
        raise UsageError(f"model.name: there is no folder {name!r}")
    return name


def load_model(section: ModelSection, *, seed: int, texts: Iterator[str] | None = None) -> LoadedModel:
    """Load (or make, with ``section.init``) a model and its tokenizer.

    The model is in eval mode, in ``section.dtype``, on ``section.device``, and none of its own
    dropouts is active in training mode either: sampler and trainer must see the same model. An
    adapter folder loads its base and the adapter, ready to be trained on; where the recipe asks for
    a new adapter, the old one becomes part of the base (in memory) first. ``texts`` train the
    tokenizer of a new model.

    Raises:
        UsageError: no such model, a hub that cannot be reached, or not a causal language model.
    """
    if section.init is not None:
        model, tokenizer = _new_model(section.init, seed, texts or iter(()))
        model = model.to(getattr(torch, section.dtype))
        source = f"new {section.init.architecture}"
    else:
        source = resolve_model_name(section.name)
        model, tokenizer = _from_files(section, source)
    _switch_off_dropout(model)
    return LoadedModel(model.to(_device(section.device)).eval(), tokenizer, source)


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model (``load_model``'s names), without its weights.

    Raises:
        UsageError: no such model, or it has no tokenizer.
    """
    source = resolve_model_name(name)
    try:
        return _load_tokenizer(source, trust_remote_code)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise UsageError(_explain(name, source, error)) from error


def _load_tokenizer(source: str, trust_remote_code: bool) -> Any:
    """Of an adapter folder without one, that of its base."""
    while _is_adapter(source) and not (Path(source) / "tokenizer_config.json").is_file():
        source = _base_of(source)
    return AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)


def _from_files(section: ModelSection, source: str) -> tuple[Any, Any]:
    quiet, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()  # what its report of the weights says, ``_check_weights`` decides
    try:
        if section.adapter is None and _is_adapter(source):
            from peft import PeftModel

            base = _load_weights(_base_of(source), section)
            model = PeftModel.from_pretrained(base, source, is_trainable=True)
        else:
            model = _load_weights(source, section)
        tokenizer = _load_tokenizer(source, section.trust_remote_code)
    except (OSError, ValueError, ImportError, KeyError, RuntimeError, SafetensorError) as error:
        raise UsageError(_explain(section.name, source, error)) from error
    finally:
        transformers_logging.set_verbosity(verbosity)
        if quiet:
            transformers_logging.enable_progress_bar()
    return model, tokenizer


def _load_weights(source: str, section: ModelSection) -> Any:
    """A plain model; that of an adapter folder has the adapter added to its weights.

    Such a model keeps the folder's name, so an adapter trained on top of it names the folder as its
    base and finds the same weights again.
    """
    if not _is_adapter(source):
        model, found = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=getattr(torch, section.dtype),
            trust_remote_code=section.trust_remote_code,
            use_safetensors=True,  # the other format is a pickle
            output_loading_info=True,
        )
        _check_weights(source, found)
        return model
    from peft import PeftModel

    merged = PeftModel.from_pretrained(_load_weights(_base_of(source), section), source).merge_and_unload()
    merged.name_or_path = merged.config._name_or_path = source
    return merged


def _check_weights(source: str, found: Mapping[str, Any]) -> None:
    """Refuse files that leave weights at random; name those that the model has no place for.

    Raises:
        UsageError: some of the model's weights are not in the files.
    """
    missing = sorted(found["missing_keys"])
    if missing:
        raise UsageError(
            f"model.name: {source} does not hold all weights of a causal language model; missing: "
            f"{', '.join(missing[:3])}{f' and {len(missing) - 3} more' if len(missing) > 3 else ''}. "
            "They would be random; give a complete model"
        )
    unused = sorted(name for name in found["unexpected_keys"] if name != SCORE)  # a reward model's head
    if unused:
        warnings.warn(
            f"{source}: {len(unused)} tensors have no place in the model: {', '.join(unused[:3])}", stacklevel=2
        )


def _is_adapter(source: str) -> bool:
    return (Path(source) / "adapter_config.json").is_file()


def _base_of(adapter: str) -> str:
    """What an adapter folder names as its base.

    The embedded model is found again where another installation of this package wrote its path.
    """
    settings = json.loads((Path(adapter) / "adapter_config.json").read_text(encoding="utf-8"))
    base = str(settings["base_model_name_or_path"])
    if Path(base).parts[-3:] == TINY.parts[-3:]:
        return str(TINY)
    return resolve_model_name(base)


def _switch_off_dropout(model: Any) -> None:
    """Set every dropout probability of a model's own modules to zero; an adapter's stay as asked for."""
    for name, module in model.named_modules():
        if ".lora_dropout." in name:
            continue
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0


def _new_model(init: InitSection, seed: int, texts: Iterator[str]) -> tuple[Any, Any]:
    if init.architecture not in CONFIG_MAPPING:
        hint = suggest(init.architecture, CONFIG_MAPPING.keys())
        raise UsageError(f"model.init.architecture: transformers has no {init.architecture!r}.{hint}")
    defaults = AutoConfig.for_model(init.architecture)
    known = defaults.to_dict().keys() | type(defaults).attribute_map.keys()
    for key in init.config:
        if key not in known:
            raise UsageError(f"model.init.config: {init.architecture} has no key {key!r}.{suggest(key, known)}")
    tokenizer = train_tokenizer(texts, init.tokenizer.vocab_size)
    ids = {name: getattr(tokenizer, name) for name in ("eos_token_id", "bos_token_id", "pad_token_id")}
    try:
        config = AutoConfig.for_model(init.architecture, **{"vocab_size": len(tokenizer), **ids, **init.config})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_key(seed, "model weights") % (1 << 63))
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (ValueError, TypeError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"model.init: {init.architecture!r} cannot be built: {reason}") from error
    if config.vocab_size < len(tokenizer):
        raise UsageError(
            f"model.init.config.vocab_size: {config.vocab_size}, but the tokenizer has {len(tokenizer)} tokens"
        )
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
    first = _first_line(error)
    if Path(source).exists():
        return f"model.name: {source} cannot be loaded as a causal language model: {first}"
    return (
        f"model.name: {name!r} is neither tiny, nor a folder or run here, and could not be had from the hub: {first} "
        "Download it beforehand and give its folder, or use the embedded model: --model.name tiny"
    )


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
