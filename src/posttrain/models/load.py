"""Load models: embedded, runs, checkpoints, local folders, hub."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from posttrain.activity import phase
from posttrain.data.render.chat_template import CHAT_TEMPLATE
from posttrain.data.render.foreign import is_failure
from posttrain.errors import PosttrainError, UsageError, first_line
from posttrain.models.config import Config, check_folder, check_sizes, ids_in, note_ties, read_object
from posttrain.models.forward.forward import causal_lm
from posttrain.models.forward.precision import DTYPES, keep_angles_exact
from posttrain.models.sources import (
    ADAPTER_CONFIG,
    EMBEDDED,
    SCORE,
    base_of,
    check_files,
    explain_loading,
    first_names,
    is_adapter,
    refuse_out_of_reach,
    resolve_model_name,
)
from posttrain.option_types import shorten
from posttrain.process_group import local_rank
from posttrain.randomness import derive_key
from posttrain.recipes.sections import InitSection, ModelSection
from posttrain.registry import suggest
from posttrain.store import posix
from posttrain.types import Model
from posttrain.untrusted import kind_of_file, trusts_remote_code

BASE_BITS = "base_quantization.json"
# Low-bit copies inside a checkpoint.
QUANTIZED_FOLDERS: dict[int, str] = {8: "quantized_int8", 4: "quantized_int4"}
INDEX = "model.safetensors.index.json"
_OF_AN_ADAPTER = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
MOST_PER_BYTE = 8  # 1-bit weights
_FREE_WEIGHTS = 2**24
ONE_FILE = {"max_shard_size": "1000TB"}  # of ``save_pretrained``


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model in eval mode, plus tokenizer; ``source`` records its origin."""

    model: Model
    tokenizer: PreTrainedTokenizerFast
    source: str


def load_model(
    section: ModelSection,
    *,
    seed: int,
    texts: Iterator[str] | None = None,
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> LoadedModel:
    """Load (or create, given ``section.init``) a model plus tokenizer, in eval mode without dropout.

    Adapter folders load base plus adapter, ready for further training. If the recipe requests a new adapter, the old
    one is merged first. ``texts`` train a new model's tokenizer. ``tokenizer`` reuses an already loaded one.
    Quantized folders load unchanged; ``section.load_bits`` quantizes full-precision weights. Adapters get their base
    in the precision used during training.

    Raises:
        UsageError: unknown model, unreachable hub, or not a causal language model.
        MissingExtra: quantized weights need a package that is missing.
    """
    name = section.name
    if section.init is not None:
        name = "a new model"
    with phase(f"loading {name}"):
        return _load_model(section, seed, texts, tokenizer)


def _load_model(
    section: ModelSection, seed: int, texts: Iterator[str] | None, known: PreTrainedTokenizerFast | None
) -> LoadedModel:
    if section.init is not None:
        if texts is None:
            texts = iter(())
        model, tokenizer = _new_model(section.init, seed, texts)
        model = model.to(DTYPES[section.dtype])
        source = f"new {section.init.architecture}"
    else:
        source = resolve_model_name(section.name)
        model, tokenizer = _from_files(section, source, known)
    _switch_off_dropout(model)
    if section.dtype == "fp64":
        _keep_norms_exact(model)
    if section.attention != "sdpa":
        _set_attention(model, section.attention)
    device = choose_device(section.device)
    if device.type == "cuda":
        keep_angles_exact(model)
    return LoadedModel(model.to(device).eval(), tokenizer, source)


def _set_attention(model: Model, name: str) -> None:
    """Select a transformers attention implementation.

    Raises:
        UsageError: not installed, or unsupported by this architecture.
    """
    try:
        model.set_attn_implementation(name)
    except (ImportError, ValueError, RuntimeError) as error:
        raise UsageError(f"model.attention: {name!r} is not to be had here: {first_line(error)}; use sdpa") from error
    if model.config._attn_implementation != name:
        raise UsageError(f"model.attention: {type(model).__name__} has no {name!r}; use sdpa")


def read_config(section: ModelSection) -> Any | None:
    """Load the configuration for a section's model (or adapter base); None if unavailable locally.

    Builds nothing, runs no model code, stays offline. New models get the largest vocabulary their tokenizer could
    reach.

    Raises:
        UsageError: unknown model, or an unreadable configuration.
    """
    if section.init is not None:
        _check_architecture(section.init)
        options = {"vocab_size": section.init.tokenizer.vocab_size, **section.init.config}
        with _building(section.init):
            return AutoConfig.for_model(section.init.architecture, **options)
    source = resolve_model_name(section.name)
    while is_adapter(source):
        source = base_of(source)
    place: Any = Path(source) / "config.json"
    if kind_of_file(source) == "nothing":
        try:
            place = try_to_load_from_cache(source, "config.json")
        except HFValidationError:  # not a valid hub name
            return None
    if not isinstance(place, str | Path):
        return None
    check_folder(Path(place).parent)
    with reading_model(section.name, str(Path(place).parent)):
        return AutoConfig.from_pretrained(Path(place).parent, trust_remote_code=False, local_files_only=True)


def _keep_norms_exact(model: Model) -> None:
    """Compute norms in fp64; transformers uses fp32."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            module.__class__ = ExactRMSNorm


def quantized_bits(model: Model) -> Literal[4, 8] | None:
    """Find the bitsandbytes precision of linear layers (plain or adapted)."""
    return _bits_in(causal_lm(model).config)


def _bits_in(config: Config) -> Literal[4, 8] | None:
    declared = getattr(config, "quantization_config", None)
    if declared is None:
        return None
    if not isinstance(declared, dict):
        declared = declared.to_dict()
    if declared.get("load_in_8bit"):
        return 8
    if declared.get("load_in_4bit"):
        return 4
    return None


def num_parameters(model: Model) -> int:
    """Count parameters; tied weights count once."""
    return sum(math.prod(getattr(p, "quant_state", p).shape) for p in model.parameters())


def note_base_bits(model: Model, folder: Path) -> None:
    """Record the base's quantization beside its adapter, since any other base gives a different model."""
    bits = quantized_bits(model)
    if bits is not None:
        (folder / BASE_BITS).write_text(json.dumps({"load_bits": bits}) + "\n", encoding="utf-8")


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> Any:
    """Load only the tokenizer (``load_model``'s names).

    Raises:
        UsageError: unknown model, or tokenizer missing.
    """
    source = resolve_model_name(name)
    with reading_model(name, source):
        source = _checked(source)
        return _load_tokenizer(source, trust_remote_code)


@contextmanager
def reading_model(name: str, source: str) -> Iterator[None]:
    """Turn whatever libraries raise for a model's files into one error.

    Raises:
        UsageError: with the model's name and the reason.
    """
    if kind_of_file(source) == "nothing":
        refuse_out_of_reach(source)
    try:
        yield
    except PosttrainError:
        raise
    except BaseException as error:  # also a panic of the tokenizers' library
        if not isinstance(error, Exception) and not is_failure(error):
            raise
        raise UsageError(explain_loading(name, source, error)) from error


def _load_tokenizer(source: str, trust_remote_code: bool) -> Any:
    """Load a tokenizer. Adapter folders lacking one fall back to their base model."""
    while is_adapter(source) and not (Path(source) / "tokenizer_config.json").is_file():
        source = base_of(source)
    _check_files_of_tokenizer(source)
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code or trusts_remote_code())
    length, template = tokenizer.model_max_length, tokenizer.chat_template
    if not isinstance(length, int | float):  # it is compared with lengths later
        raise TypeError(f"tokenizer_config.json: model_max_length is {shorten(repr(length))}, no number")
    templates = []
    if isinstance(template, dict):
        templates = list(template.values())
    elif template:
        templates = [template]
    for one in templates:
        if not isinstance(one, str):
            raise TypeError(f"tokenizer_config.json: chat_template is {shorten(repr(one))}, no text")
        if one != CHAT_TEMPLATE:  # our own
            from posttrain.models.patterns import check_chat_template

            check_chat_template(one, f"model.name: {source}: ")
    tokenizer.generation_end_ids = _end_ids(source, tokenizer)
    return tokenizer


def _check_files_of_tokenizer(source: str) -> None:
    """Check tokenizer files where transformers finds them: in a folder or the hub cache."""
    if Path(source) in EMBEDDED.values():
        return
    from posttrain.models.patterns import check_tokenizer, check_tokenizer_config

    for name, check in (("tokenizer.json", check_tokenizer), ("tokenizer_config.json", check_tokenizer_config)):
        place = find_file(source, name)
        if place is not None:
            check(place.parent)


def _end_ids(source: str, tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    """Read end tokens from ``generation_config.json``, falling back to ``config.json`` like transformers.

    Ordinary tokens come from defaults; they are skipped.

    Raises:
        UsageError: unreadable, or not token ids.
    """
    while is_adapter(source) and not (Path(source) / "generation_config.json").is_file():
        source = base_of(source)
    place = find_file(source, "generation_config.json") or find_file(source, "config.json")
    if place is None:
        return frozenset()
    declared = read_object(place).get("eos_token_id")
    ids = ids_in(declared)
    if not all(type(index) is int for index in ids):
        raise UsageError(
            f"model.name: {place}: eos_token_id: an id or a list of ids is needed; got {shorten(declared)}"
        )
    return frozenset(ids) & tokenizer.added_tokens_decoder.keys()


def find_file(source: str, name: str) -> Path | None:
    """Find a file of a model where transformers does, in a folder or on the hub; None if missing or unreachable."""
    place = cached_file(
        source, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    if place is None:
        return None
    return Path(place)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars plus its reports about missing or unexpected weights."""
    bars, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def _from_files(section: ModelSection, source: str, known: PreTrainedTokenizerFast | None) -> tuple[Any, Any]:
    # ``_check_weights`` decides on reported weights
    with quiet_transformers(), reading_model(section.name, source):
        source = _checked(source)
        if section.adapter is None and is_adapter(source):
            from posttrain.models.lora import attach_adapter

            base = _load_weights(base_of(source), _section_of_base(source, section))
            model = attach_adapter(base, source, is_trainable=True)
        else:
            model = _load_weights(source, section)
        if known is not None:
            return model, known
        return model, _load_tokenizer(source, section.runs_remote_code)


def _checked(source: str) -> str:
    """Check model files before any library reads them; returns the source, or a local folder for hub adapters.

    Raises:
        UsageError: refused, with path and key.
    """
    if ADAPTER_CONFIG in _descriptions_on_hub(source):
        from huggingface_hub import snapshot_download

        source = snapshot_download(source, allow_patterns=_OF_AN_ADAPTER)
    check_files(source)
    return source


def _descriptions_on_hub(source: str) -> list[str]:
    """List a hub model's description files, checked like a folder's; empty for local models."""
    if kind_of_file(source) != "nothing":
        return []
    found = []
    for name in ("config.json", INDEX, ADAPTER_CONFIG):
        place = find_file(source, name)
        if place is not None:
            check_folder(place.parent)
            found.append(name)
    return found


def weight_files(source: str) -> list[Path]:
    """Find safetensors files, fetching from the hub if needed; empty if any is missing."""
    if kind_of_file(source) != "nothing":
        return [place for place in Path(source).glob("*.safetensors") if kind_of_file(place) == "file"]
    index = find_file(source, INDEX)
    names = {"model.safetensors"}
    if index is not None:
        names = set(read_object(index)["weight_map"].values())
    places = []
    for name in sorted(names):
        place = find_file(source, name)
        if place is None:
            return []
        places.append(place)
    return places


def _load_weights(source: str, section: ModelSection) -> Any:
    """Load a model without adapters, merging adapter folders into their base."""
    if is_adapter(source):
        merged = _merge_adapter(source, section)
        if section.load_bits is None:
            return merged
        with TemporaryDirectory(prefix="posttrain-") as folder:  # quantized as any other model: on its way from disk
            merged.save_pretrained(folder)
            del merged
            model = _load_weights(folder, section)
        model.name_or_path = model.config._name_or_path = source
        return model
    _descriptions_on_hub(source)  # checks adapter bases, too
    config = AutoConfig.from_pretrained(source, trust_remote_code=section.runs_remote_code)
    stored = _bits_in(config)
    if stored is not None and section.load_bits not in (None, stored):
        raise UsageError(f"model.load_bits: {source} is quantized to {stored} bits already; leave load_bits out")
    if not section.runs_remote_code:
        _check_size_of_files(source, config)
    options: dict[str, Any] = {
        "dtype": DTYPES[section.dtype],
        "trust_remote_code": section.runs_remote_code,
        "use_safetensors": True,  # other formats are pickles
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # ``_check_weights`` names them
    }
    if stored is None and section.load_bits is None:
        model, loading_info = AutoModelForCausalLM.from_pretrained(source, **options)
    else:
        if section.device == "mps":
            raise UsageError("model.device: mps cannot multiply quantized weights; use cpu, or leave load_bits out")
        from posttrain.models.quantize import load_quantized

        bits = None
        if stored is None:
            bits = section.load_bits
        model, loading_info = load_quantized(source, bits, choose_device(section.device), options)
    _check_weights(source, loading_info)
    if model.config.get_text_config().tie_word_embeddings:  # files may contain a separate head
        note_ties(model)
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")  # some transformers releases choose a variant lacking the cap
    return model


def _check_size_of_files(source: str, config: Config) -> None:
    """Refuse configurations describing far more weights than stored, which would all be allocated first.

    Raises:
        UsageError: states both sizes.
    """
    places = weight_files(source)
    if not places:
        return
    num_bytes = sum(place.stat().st_size for place in places)
    with torch.device("meta"):
        count = num_parameters(AutoModelForCausalLM.from_config(copy(config)))
    if count > MOST_PER_BYTE * num_bytes + _FREE_WEIGHTS:
        raise UsageError(
            f"model.name: {source}: config.json describes {count:,} weights, and the files have {num_bytes:,} bytes. "
            "They are of another model; give both of one"
        )


def _merge_adapter(source: str, section: ModelSection) -> Any:
    """Load an adapter folder's base in full precision, then merge."""
    base = _load_weights(base_of(source), _section_of_base(source, section, load_bits=None))
    if quantized_bits(base) is not None:
        from posttrain.models.quantize import dequantize

        base = dequantize(base)
    from posttrain.models.lora import attach_adapter, merge_adapter

    merged = merge_adapter(attach_adapter(base, source, is_trainable=False))
    merged.name_or_path = merged.config._name_or_path = source
    return merged


def _section_of_base(adapter: str, section: ModelSection, **changes: Any) -> ModelSection:
    """Resolve the section for an adapter's base, using requested bits or else recorded bits."""
    wanted = section.model_copy(update=changes)
    note = Path(adapter) / BASE_BITS
    if wanted.load_bits is not None or not note.is_file():
        return wanted
    return wanted.model_copy(update={"load_bits": json.loads(note.read_text(encoding="utf-8"))["load_bits"]})


def _check_weights(source: str, loading_info: Mapping[str, Any]) -> None:
    """Refuse files that leave weights random; list unexpected weights.

    Raises:
        UsageError: model weights missing from these files.
    """
    shapes = [f"{n} is {list(a)}, not {list(b)}" for n, a, b in sorted(loading_info.get("mismatched_keys") or ())]
    if shapes:
        raise UsageError(
            f"model.name: {source}: the weights do not have the sizes that config.json names: {first_names(shapes)}. "
            "They are of another model; give both of one"
        )
    if missing := loading_info["missing_keys"]:
        raise UsageError(
            f"model.name: {source} does not hold all weights of a causal language model; missing: "
            f"{first_names(missing)}. They would be random; give a complete model"
        )
    unused = sorted(name for name in loading_info["unexpected_keys"] if name != SCORE)  # see ``describe_other_parts``
    if unused:
        warnings.warn(
            f"{source}: {len(unused)} tensors have no place in the model: {', '.join(unused[:3])}", stacklevel=2
        )


def _switch_off_dropout(model: Model) -> None:
    """Set every dropout probability of a model's own modules to zero, not an adapter's."""
    for name, module in model.named_modules():
        if ".lora_dropout." in name:
            continue
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0


class ExactRMSNorm(torch.nn.Module):
    """RMS norm ``w · x / sqrt(mean(x²) + ε)`` in x's dtype. With transformers' fp32, gradients differ by 1e-9."""

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(hidden, self.weight.shape, self.weight, self.variance_epsilon)


def _check_architecture(init: InitSection) -> None:
    """Refuse unknown architectures, unknown keys, impossible sizes."""
    if init.architecture not in CONFIG_MAPPING:
        hint = suggest(init.architecture, CONFIG_MAPPING.keys())
        raise UsageError(f"model.init.architecture: transformers has no {init.architecture!r}.{hint}")
    defaults = AutoConfig.for_model(init.architecture)
    known = defaults.to_dict().keys() | type(defaults).attribute_map.keys()
    for key in init.config:
        if key not in known:
            raise UsageError(f"model.init.config: {init.architecture} has no key {key!r}.{suggest(key, known)}")
    check_sizes(init.config, "model.init.config.")


@contextmanager
def _building(init: InitSection) -> Iterator[None]:
    """Turn whatever libraries raise for the settings of a new model into one error.

    Raises:
        UsageError: names the architecture.
    """
    try:
        yield
    except PosttrainError:
        raise
    except Exception as error:  # libraries raise anything for settings that do not fit
        reason = " ".join(str(error).split())[:300]
        raise UsageError(f"model.init: {init.architecture!r} cannot be built: {reason}") from error


def _new_model(init: InitSection, seed: int, texts: Iterator[str]) -> tuple[Any, Any]:
    _check_architecture(init)
    from posttrain.models.tokenizer import train_tokenizer  # of a new model alone

    tokenizer = train_tokenizer(texts, init.tokenizer.vocab_size)
    ids = {name: getattr(tokenizer, name) for name in ("eos_token_id", "bos_token_id", "pad_token_id")}
    with _building(init):
        config = AutoConfig.for_model(init.architecture, **{"vocab_size": len(tokenizer), **ids, **init.config})
        _check_room(init, config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_key(seed, "model weights") % (1 << 63))
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if config.vocab_size < len(tokenizer):
        raise UsageError(
            f"model.init.config.vocab_size: {config.vocab_size}, but the tokenizer has {len(tokenizer)} tokens"
        )
    return model, tokenizer


def _check_room(init: InitSection, config: Config) -> None:
    """Refuse new models whose weights exceed this machine's memory."""
    with torch.device("meta"):
        num_bytes = 4 * num_parameters(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    room = posix.memory_bytes()
    if room is not None and num_bytes > room:
        raise UsageError(
            f"model.init.config: this {init.architecture} takes {num_bytes / 2**30:,.0f} GiB, and the machine has "
            f"{room / 2**30:,.0f}; give smaller sizes"
        )


def choose_device(name: str) -> torch.device:
    """Resolve ``model.device``. On multi-process machines, each process gets a separate GPU.

    ``auto`` prefers NVIDIA GPUs; Apple GPUs need an explicit ``mps``.

    Raises:
        UsageError: GPU unavailable.
    """
    if name == "mps":
        if torch.backends.mps.is_available():
            return torch.device("mps")
        why = "this torch sees no Apple GPU"
        if not torch.backends.mps.is_built():
            why = "this torch was built without it (it is for Macs)"
        raise _no_device(name, why)
    if name == "cpu" or not torch.cuda.is_available():  # which starts the driver
        if name == "cuda":
            raise _no_device(name, "torch sees no GPU")
        return torch.device("cpu")
    rank = local_rank()
    if rank is None:
        return torch.device("cuda")
    return torch.device("cuda", rank)


def _no_device(name: str, why: str) -> UsageError:
    return UsageError(f"model.device: {name} was asked for, but {why}; use model.device auto or cpu")
