"""LoRA adapters (Hu et al. 2021) through peft: new ones, those on disk, their merge into the base, their terms."""

from __future__ import annotations

import copy
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from posttrain.errors import RecipeError, UsageError, first_line
from posttrain.models.config import note_ties, read_object
from posttrain.models.sources import ADAPTER_CONFIG, SCORE, first_names
from posttrain.option_types import shorten
from posttrain.randomness import derive_key
from posttrain.recipes.sections import AdapterSection
from posttrain.registry import suggest
from posttrain.types import Model
from posttrain.untrusted import entries_of, fields_of, kind_of_file

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_SCORE = f"base_model.model.{SCORE}"  # a reward model's head in an adapter's file
CLASSIFIER_TASK = "SEQ_CLS"  # for reward-model adapters
_CLASSIFIER_HEADS = ("classifier", "score")  # which peft adds to modules_to_save
_ADAPTER = "default"
MAX_FREE_RANK = 1024  # matrices allocated before comparing their sizes with stored tensors
MAX_STEPS = 1_000  # for approximate singular value decomposition; 16 is typical
MAX_LAYERS = 2_000
MAX_ENTRIES = 10_000  # list length limit, since every entry is compared with every module
_LISTS = ("target_modules", "exclude_modules", "layers_pattern", "modules_to_save", "target_parameters")
# dropping these changed log-probabilities by 5 nats for one adapter
_NEED_PEFTS_OWN_CALL = ("alora_invocation_tokens", "arrow_config")


@dataclass(frozen=True, slots=True)
class LowRank:
    """One adapter for one projection: ``scale * (x down^T) up^T``; down ``[r, in]``, up ``[out, r]``."""

    down: Tensor
    up: Tensor
    scale: float


def apply_adapter(model: Model, section: AdapterSection, seed: int) -> Any:
    """Add a new LoRA adapter to ``model``: W + (alpha / rank) B A on every target, B = 0, base frozen.

    A is uniform in ±1/sqrt(in) (peft's Kaiming initialization), determined by ``seed`` plus the projection's name,
    identical on all devices. ``alpha`` defaults to the rank, giving a scale of 1.

    Raises:
        RecipeError: a target matches no linear layer, or the model was already adapted.
    """
    from peft import LoraConfig, get_peft_model
    from transformers.pytorch_utils import Conv1D

    if has_adapter(model):
        raise RecipeError("model.adapter: this model already has an adapter; leave model.adapter out to train it on")
    kinds = {type(m) for _, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D)}
    _check_targets(model, section, Conv1D)
    init: bool | str = section.init_lora_weights
    is_default = init == "default"
    if is_default:
        init = True
    alpha = section.alpha
    if alpha is None:
        alpha = section.rank
    config = LoraConfig(
        r=section.rank,
        lora_alpha=alpha,
        lora_dropout=section.dropout,
        target_modules=section.targets,
        target_parameters=section.target_parameters or None,
        use_dora=section.use_dora,
        use_rslora=section.use_rslora,
        init_lora_weights=init,
        fan_in_fan_out=Conv1D in kinds,  # GPT-2 stores transposed weights
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):  # peft draws; default initializations are replaced below
        torch.manual_seed(derive_key(seed, "adapter weights") % (1 << 63))
        try:
            wrapped = get_peft_model(model, config)
        except ValueError as error:  # settings that do not go together
            raise RecipeError(f"model.adapter: {first_line(error)}") from error
    if is_default:
        with torch.no_grad():
            for name, parameter in wrapped.named_parameters():
                if ".lora_A." in name:
                    generator = torch.Generator().manual_seed(derive_key(seed, f"adapter {name}") >> 1)
                    uniform = torch.rand(parameter.shape, generator=generator) * 2 - 1
                    parameter.copy_(uniform * (1.0 / sqrt(parameter.shape[1])))
    for written in wrapped.peft_config.values():  # a relative path means something else wherever else it is read
        base = written.base_model_name_or_path
        if base and Path(base).is_dir():
            written.base_model_name_or_path = str(Path(base).absolute())
    return wrapped


def describe_reach(model: Model) -> list[str]:
    """Summarize which base matrices are adapted, and which stay untouched."""
    if not has_adapter(model):
        return []
    reached = Counter[str]()
    left = Counter[str]()
    tuner = model.base_model
    targets = {*(f"{name}.weight" for name in tuner.targeted_module_names), *tuner.targeted_parameter_names}
    for name, parameter in model.get_base_model().named_parameters():
        if parameter.ndim < 2 or ".lora_" in name or ".trainable_tokens_" in name or name.endswith("bias"):
            continue
        name = name.replace(".base_layer", "")
        parts = [part for part in name.removesuffix(".weight").split(".") if not part.isdecimal()]
        kind = ".".join(parts[-2:])
        if name in targets or ".token_adapter." in name:  # embedding rows
            reached[kind] += parameter.numel()
        else:
            left[kind] += parameter.numel()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    weights = f"{sum(left.values()):,} of {sum(left.values()) + sum(reached.values()):,} weights"
    line = f"model.adapter: {trained:,} parameters reach {', '.join(sorted(reached))}"
    if left:
        line += f", and leaves out {', '.join(sorted(left))} ({weights})"
    return [line]


def refuse_whole_weights(model: Model, source: str) -> None:
    """Refuse further training of adapters containing whole base weights, which checkpoints would not keep.

    Raises:
        RecipeError: names one such weight.
    """
    if names := getattr(model, "whole_weights", ()):
        raise RecipeError(
            f"model.adapter: the adapter {source} replaces {names[0]} of its base, which a checkpoint of the adapter "
            "would not keep. Give model.adapter.rank: 16, say: the old adapter is merged into its base then, and a new "
            "one is trained"
        )


def _check_targets(model: Model, section: AdapterSection, conv: type) -> None:
    if not isinstance(section.targets, str):
        linear = sorted({n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear | conv)})
        for target in section.targets:
            if target.rpartition(".")[2] not in linear:
                raise RecipeError(
                    f"model.adapter.targets: this model has no linear layer called {target!r}."
                    f"{suggest(target, linear)} It has: {', '.join(linear)}"
                )
    names = [name for name, parameter in model.named_parameters() if 2 <= parameter.ndim <= 3]  # of peft's kinds
    for target in section.target_parameters:
        if not any(f".{name}".endswith(f".{target}") for name in names):
            known = sorted({".".join(name.split(".")[-2:]) for name in names if not name.endswith(".weight")})
            raise RecipeError(
                f"model.adapter.target_parameters: this model has no matrix called {target!r}.{suggest(target, known)} "
                f"Those that are no linear layer's: {', '.join(known) or 'none'}"
            )


def has_adapter(model: Model) -> bool:
    """Check for a peft model."""
    return hasattr(model, "peft_config") and hasattr(model, "disable_adapter")


def low_rank_terms(module: Any) -> tuple[nn.Linear, list[LowRank]] | None:
    """Unwrap the linear layer in ``module`` (``nn.Linear`` or peft's wrapper), plus active adapters.

    None for anything except plain LoRA. Merged adapters contribute no term.
    """
    if type(module) is nn.Linear:
        return module, []
    base = getattr(module, "base_layer", None)
    if type(base) is not nn.Linear or not hasattr(module, "lora_A"):
        return None
    if module.merged:
        if module.disable_adapters:
            return None
        return base, []
    if module.disable_adapters:
        return base, []
    terms = []
    for name in module.active_adapters:
        if name not in module.lora_A:
            continue
        down, up = module.lora_A[name], module.lora_B[name]
        plain = type(down) is nn.Linear and type(up) is nn.Linear and up.bias is None
        if not plain or getattr(module, "lora_variant", {}).get(name) is not None:
            return None
        terms.append(LowRank(down.weight.detach(), up.weight.detach(), float(module.scaling[name])))
    return base, terms


def attach_adapter(base: Model, source: str, *, is_trainable: bool) -> Any:
    """Attach the adapter stored in ``source`` to ``base``; reward heads are skipped.

    Whole weights in the adapter file (resized embeddings) replace base weights.

    Raises:
        UsageError: unexpected tensors, or tensors missing despite being listed in the configuration.
    """
    from peft import LoraConfig, PeftModel
    from peft.utils.save_and_load import load_peft_weights, set_peft_model_state_dict

    _check_settings(Path(source) / ADAPTER_CONFIG, LoraConfig)
    from posttrain.models.patterns import check_adapter_matches

    settings = read_object(Path(source) / ADAPTER_CONFIG)
    check_adapter_matches(settings, _names_in(base), f"model.name: {source}: {ADAPTER_CONFIG}: ")
    _check_growth(settings, Path(source))
    changed = _read_whole_weights(base, Path(source) / ADAPTER_WEIGHTS)
    config = LoraConfig.from_pretrained(source)
    is_scorer = config.task_type == CLASSIFIER_TASK
    if is_scorer:
        whole = [name for name in config.modules_to_save or [] if name not in _CLASSIFIER_HEADS]
        config.task_type, config.modules_to_save = "CAUSAL_LM", whole or None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out")  # as on a quantized GPT-2; peft corrects it
        warnings.filterwarnings("ignore", message="Found missing adapter keys")  # refused below
        try:
            model = PeftModel.from_pretrained(base, source, is_trainable=is_trainable, config=config)
            # Load again, to learn which weights matched; from_pretrained hides this.
            report = set_peft_model_state_dict(model, load_peft_weights(source, device="cpu"), adapter_name=_ADAPTER)
        except KeyError as error:  # peft resolves modules_to_save
            raise UsageError(_refusal(source, f"has no tensor {error.args[0]}")) from error
        except RuntimeError as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]  # the first is a heading
            raise UsageError(_refusal(source, f"does not fit: {first_names(lines[1:] or lines)}")) from error
    unused = [name for name in report.unexpected_keys if not (is_scorer and name == ADAPTER_SCORE)]
    if unused:
        raise UsageError(_refusal(source, f"has tensors without a place in the model: {first_names(unused)}"))
    loaded = {name: t for name, t in model.state_dict().items() if name not in report.missing_keys}
    places = {tensor.data_ptr() for tensor in loaded.values()}
    own = {n: t for n, t in model.state_dict().items() if f".{_ADAPTER}." in f"{n}." and n not in loaded}
    missing = [name for name, tensor in own.items() if tensor.data_ptr() not in places]  # tied ones are there once
    if missing:
        raise UsageError(_refusal(source, f"has no tensors for {first_names(missing)}, which {ADAPTER_CONFIG} names"))
    model.whole_weights = sorted(name for name in map(_name_in_base, loaded) if name in changed)
    return model


def refuse_bias_without_place(base: Model, key: str, way_out: str) -> None:
    """Refuse adapter biases on bias-free layers, since merged weights could not hold them.

    ``key``: option naming the adapter.

    Raises:
        UsageError: names the layer, followed by ``way_out``.
    """
    for name, module in base.named_modules():
        biases = getattr(module, "lora_bias", None)
        if isinstance(biases, Mapping) and any(biases.values()) and module.get_base_layer().bias is None:
            raise UsageError(
                f"{key}: the adapter has lora_bias, and {name} has no bias that it could be merged into. {way_out}"
            )


def _names_in(base: Model) -> list[str]:
    """Collect module and parameter names, both in full and relative to each parent."""
    named = (*base.named_modules(remove_duplicate=False), *base.named_parameters(remove_duplicate=False))
    parts = [name.split(".") for name, _ in named]
    return sorted({".".join(part[n:]) for part in parts for n in range(len(part))})


def merge_adapter(model: Model) -> Any:
    """Merge the active adapter into its base with peft's rules, and unwrap the base.

    If only one side of tied matrices is adapted, they are untied first.

    Raises:
        UsageError: an adapter bias on a bias-free layer.
    """
    base = model.get_base_model()
    refuse_bias_without_place(base, "model.name", "Load it as an adapter, or train one without lora_bias")
    tied = tied_adapters(base)
    is_one_adapter = bool(_adapter_memory(base.get_input_embeddings()) & _adapter_memory(base.get_output_embeddings()))
    for name in tied:
        module = base.get_submodule(name.rpartition(".")[0])
        module.weight = nn.Parameter(module.weight.detach().clone(), requires_grad=module.weight.requires_grad)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings")  # see below
        merged = model.merge_and_unload()
    embedding = merged.get_input_embeddings()
    head = merged.get_output_embeddings()
    if head is None:
        return merged
    # Shared adapters are multiplied separately on both sides, so rounding could differ.
    if tied and (is_one_adapter or torch.equal(head.weight, embedding.weight)):
        head.weight = embedding.weight
    note_ties(merged)
    return merged


def _adapter_memory(module: nn.Module | None) -> set[int]:
    """Locate a module's adapter tensors."""
    if module is None:
        return set()
    named = module.named_parameters()
    return {p.untyped_storage().data_ptr() for name, p in named if name.startswith("lora_")}


def _check_settings(place: Path, config_type: Any) -> None:
    """Refuse settings that peft would ignore or misread (such as strings for booleans).

    Raises:
        UsageError: refused, with path and key.
    """
    defaults = {field.name: field.default for field in fields(config_type)}
    for key, value in read_object(place).items():
        if key not in defaults and value not in (None, False, "", [], {}):
            raise UsageError(
                f"model.name: {place}: this peft has no setting {key!r} ({shorten(value)}), and without it the adapter "
                f"is another model.{suggest(key, defaults)} Update peft, or take the setting out where it does nothing"
            )
        if key in _NEED_PEFTS_OWN_CALL and value:
            raise UsageError(
                f"model.name: {place}: {key} ({shorten(value)}) acts only where peft's own wrapper is called with "
                "a whole prompt, and training and sampling call the model inside; train an adapter without it"
            )
        wanted = "true or false"
        if key in ("r", "lora_alpha"):
            wanted = "a number"
            is_right = isinstance(value, int | float) and not isinstance(value, bool)
        elif isinstance(defaults.get(key), bool):
            is_right = isinstance(value, bool | None) or (key == "init_lora_weights" and isinstance(value, str))
        else:
            is_right = True
        if not is_right:
            raise UsageError(f"model.name: {place}: {key}: {wanted} is needed; got {shorten(value)}")


def _check_growth(settings: Mapping[str, Any], folder: Path) -> None:
    """Refuse adapters for which peft would allocate unstored matrices, or too many layers.

    Raises:
        UsageError: refused, with path and key.
    """
    where = f"model.name: {folder / ADAPTER_CONFIG}: "
    largest = MAX_FREE_RANK
    if kind_of_file(folder / ADAPTER_WEIGHTS) == "file":
        with _open_weights(folder / ADAPTER_WEIGHTS) as file:
            shapes = [file.get_slice(name).get_shape() for name in file.keys() if ".lora_" in name]  # noqa: SIM118
        stored = [min(shape) for shape in shapes if shape]
        largest = max([MAX_FREE_RANK, *stored])
    ranks = {"r": settings.get("r"), **fields_of(settings.get("rank_pattern"))}
    for name, rank in ranks.items():
        if isinstance(rank, int | float) and not rank <= largest:
            raise UsageError(f"{where}{shorten(name)}: a rank of {shorten(str(rank))}, and its file holds none of it")
    copies = settings.get("layer_replication") or []
    spans = [span for span in entries_of(copies) if isinstance(span, list) and len(span) == 2]
    if spans != copies or not sum(last - first for first, last in spans) <= MAX_LAYERS:
        raise UsageError(f"{where}layer_replication: pairs of layers are needed, with at most {MAX_LAYERS:,} in all")
    steps = re.fullmatch(r"\w+_niter_(\d+)", str(settings.get("init_lora_weights")))
    if steps is not None and not (len(steps[1]) < 5 and int(steps[1]) <= MAX_STEPS):
        raise UsageError(f"{where}init_lora_weights: {shorten(steps[0])}: at most {MAX_STEPS} steps are done")
    for key in _LISTS:
        if isinstance(value := settings.get(key), list | dict) and len(value) > MAX_ENTRIES:
            raise UsageError(f"{where}{key}: {len(value):,} entries; at most {MAX_ENTRIES:,}")


@contextmanager
def _open_weights(path: Path) -> Iterator[Any]:
    """Open an adapter's file.

    Raises:
        UsageError: it is damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise UsageError(f"model.name: {path} cannot be read: {error}. Copy the adapter again") from error


def _read_whole_weights(base: Model, path: Path) -> set[str]:
    """List weights stored whole in an adapter file with values differing from ``base``.

    If the adapter stores complete embeddings, ``base`` is resized to match.

    Raises:
        UsageError: missing or damaged adapter weights.
    """
    if kind_of_file(path) != "file":
        raise UsageError(f"model.name: {path.parent} has {ADAPTER_CONFIG} and no {path.name}. Copy the whole adapter")
    shapes = {name: parameter.shape for name, parameter in base.named_parameters()}
    with _open_weights(path) as file:
        stored = {_name_in_base(name): name for name in file.keys()}  # noqa: SIM118
        whole = {name: file.get_tensor(stored[name]) for name in shapes if name in stored}
    _resize_vocabulary(base, {name: len(tensor) for name, tensor in whole.items()})
    own = dict(base.named_parameters())
    return {
        name
        for name, tensor in whole.items()
        if shapes[name] != tensor.shape or not own[name].equal(tensor.to(own[name]))
    }


def _resize_vocabulary(base: Model, rows: Mapping[str, int]) -> None:
    table = base.get_input_embeddings().weight
    head = base.get_output_embeddings()
    weights = [table]
    if head is not None and head.weight is not table:
        weights.append(head.weight)
    names = [name for name, parameter in base.named_parameters() if any(parameter is weight for weight in weights)]
    sizes = {rows.get(name, len(table)) for name in names}
    if len(sizes) == 1 and sizes != {len(table)}:
        base.resize_token_embeddings(sizes.pop(), mean_resizing=False)


def _name_in_base(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def _refusal(source: str, reason: str) -> str:
    return (
        f"model.name: {source}/{ADAPTER_WEIGHTS} {reason}. The adapter was made for another model or layout: check "
        f"base_model_name_or_path and the target modules in {ADAPTER_CONFIG}, or merge it with the tool that made it"
    )


def merged_weights(model: Model) -> Iterator[tuple[str, Tensor]]:
    """Yield weights under base checkpoint names, merging active adapters one at a time by peft's rules.

    Raises:
        UsageError: an adapter on only one side of tied matrices, which would untie them, or an adapter bias on a
            bias-free layer.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    base = model.get_base_model()
    if tied := tied_adapters(base):
        raise UsageError(
            f"model.adapter: {tied[0]} has an adapter and is tied to a parameter of another module, so no other "
            "engine can take its merged weight. Leave it out of the adapter's targets, or use the native engine"
        )
    refuse_bias_without_place(base, "model.adapter", "Use the native engine, or train an adapter without lora_bias")
    kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    wrappers = {name: module for name, module in base.named_modules() if isinstance(module, kinds)}
    given: set[str] = set()
    for name, weight in base.named_parameters():
        parts = name.split(".")
        place = next((p for p in (".".join(parts[:n]) for n in range(1, len(parts))) if p in wrappers), None)
        if place is None:
            yield name, weight.detach()
        elif place not in given:  # with whatever wraps it inside
            given.add(place)
            yield from ((f"{place}.{leaf}", tensor.detach()) for leaf, tensor in _merged_tensors(wrappers[place]))


def _merged_tensors(wrapper: Any) -> Iterator[tuple[str, Tensor]]:
    """List wrapped parameters by their name inside the original module."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    is_off = wrapper.disable_adapters or getattr(wrapper, "merged", False)
    if not is_off and _is_plain(wrapper):
        for leaf, tensor in wrapper.get_base_layer().named_parameters():
            active = [name for name in wrapper.active_adapters if name in wrapper.scaling and leaf == "weight"]
            if active:
                terms = (wrapper.get_delta_weight(name) for name in active)
                tensor = sum(terms, start=tensor.detach().float())
            yield leaf, tensor
    elif is_off and isinstance(wrapper, BaseTunerLayer):
        yield from wrapper.get_base_layer().named_parameters()
    elif is_off:
        yield from wrapper.original_module.named_parameters()
    else:
        copied = copy.deepcopy(wrapper)
        if hasattr(copied, "unload_and_optionally_merge_module"):
            plain = copied.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
        else:
            copied.merge()
            plain = copied.get_base_layer()
        yield from plain.named_parameters()


def _is_plain(wrapper: Any) -> bool:
    """Check if a wrapper adds only low-rank weight updates."""
    if not hasattr(wrapper, "lora_A") or hasattr(wrapper, "parameter_name") or any(wrapper.lora_variant.values()):
        return False
    return not any(wrapper.lora_bias.values())


def tied_adapters(base: Model) -> list[str]:
    """List adapted parameters shared with other modules.

    Trained embedding rows plus a tied head form a single adapter, and stay tied.
    """
    places: dict[int, list[str]] = {}
    for name, parameter in base.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append(name)
    tied = [names for names in places.values() if len(names) > 1 and not all(".token_adapter." in n for n in names)]
    return [name for names in tied for name in names if ".base_layer." in name or ".original_module." in name]
