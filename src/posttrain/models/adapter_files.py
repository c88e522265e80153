"""LoRA adapters from disk: attached to their base with every tensor in use, or merged into it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn

from posttrain.errors import UsageError
from posttrain.models.config import Model, read_object
from posttrain.models.lora import tied_adapters
from posttrain.models.sources import ADAPTER_CONFIG, SCORE, first_names
from posttrain.option_types import shorten
from posttrain.registry import suggest
from posttrain.untrusted import kind_of_file

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_SCORE = f"base_model.model.{SCORE}"  # a reward model's head in an adapter's file
CLASSIFIER_TASK = "SEQ_CLS"  # of an adapter that is a reward model
_CLASSIFIER_HEADS = ("classifier", "score")  # which peft adds to modules_to_save
_ADAPTER = "default"


def attach_adapter(base: Model, source: str, *, is_trainable: bool) -> Any:
    """Return ``base`` with the adapter in the folder ``source`` on it; of a reward model, without its head.

    Whole weights in its file (embeddings of a resized vocabulary) replace those of the base.

    Raises:
        UsageError: a tensor of the file has no place in the model, or one that the configuration names is not in it.
    """
    from peft import LoraConfig, PeftModel
    from peft.utils.save_and_load import load_peft_weights, set_peft_model_state_dict

    _check_settings(Path(source) / ADAPTER_CONFIG, LoraConfig)
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
            # Once more, for the report of what fitted, which from_pretrained keeps to itself.
            report = set_peft_model_state_dict(model, load_peft_weights(source, device="cpu"), adapter_name=_ADAPTER)
        except KeyError as error:  # peft looks up what the configuration wants saved whole
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


def merge_adapter(model: Model) -> Any:
    """Return the base of a peft model with its active adapter merged by peft's own rules.

    A tied matrix with an adapter at one of its places becomes two matrices first.
    """
    base = model.get_base_model()
    tied = tied_adapters(base)
    for name in tied:
        module = base.get_submodule(name.rpartition(".")[0])
        module.weight = nn.Parameter(module.weight.detach().clone(), requires_grad=module.weight.requires_grad)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings")  # see below
        merged = model.merge_and_unload()
    embedding, head = merged.get_input_embeddings(), merged.get_output_embeddings()
    if head is None:
        return merged
    if tied and head.weight.shape == embedding.weight.shape and head.weight.equal(embedding.weight):
        head.weight = embedding.weight
    is_tied = head.weight is embedding.weight
    for config in (merged.config, merged.config.get_text_config()) if tied or not is_tied else ():
        config.tie_word_embeddings = is_tied
    if not is_tied:
        merged.all_tied_weights_keys = {}
    return merged


def _check_settings(place: Path, config_type: Any) -> None:
    """Refuse settings that peft would leave out, or take for something else (a text for true).

    Raises:
        UsageError: with the file and the key.
    """
    defaults = {field.name: field.default for field in fields(config_type)}
    for key, value in read_object(place).items():
        if key not in defaults and value not in (None, False, "", [], {}):
            raise UsageError(
                f"model.name: {place}: this peft has no setting {key!r} ({shorten(value)}), and without it the adapter "
                f"is another model.{suggest(key, defaults)} Update peft, or take the setting out where it does nothing"
            )
        default, wanted = defaults.get(key), "true or false"
        is_wrong = isinstance(default, bool) and not isinstance(value, bool | None)
        is_wrong = is_wrong and not (key == "init_lora_weights" and isinstance(value, str))
        if key in ("r", "lora_alpha"):
            wanted, is_wrong = "a number", isinstance(value, bool) or not isinstance(value, int | float)
        if is_wrong:
            raise UsageError(f"model.name: {place}: {key}: {wanted} is needed; got {shorten(value)}")


def _read_whole_weights(base: Model, path: Path) -> set[str]:
    """Name the weights of ``base`` that an adapter's file holds whole with other values.

    The embeddings of ``base`` get as many rows as those in the file, where all of them are in it.

    Raises:
        UsageError: there is no such file, or it is damaged.
    """
    if kind_of_file(path) != "file":
        raise UsageError(f"model.name: {path.parent} has {ADAPTER_CONFIG} and no {path.name}. Copy the whole adapter")
    shapes = {name: parameter.shape for name, parameter in base.named_parameters()}
    try:
        with safe_open(path, framework="pt") as file:
            stored = {_name_in_base(name): name for name in file.keys()}  # noqa: SIM118
            whole = {name: file.get_tensor(stored[name]) for name in shapes if name in stored}
    except (OSError, SafetensorError) as error:
        raise UsageError(f"model.name: {path} cannot be read: {error}. Copy the adapter again") from error
    _resize_vocabulary(base, {name: len(tensor) for name, tensor in whole.items()})
    own = dict(base.named_parameters())
    return {
        name
        for name, tensor in whole.items()
        if shapes[name] != tensor.shape or not own[name].equal(tensor.to(own[name]))
    }


def _resize_vocabulary(base: Model, rows: Mapping[str, int]) -> None:
    table, head = base.get_input_embeddings().weight, base.get_output_embeddings()
    weights = [table] if head is None or head.weight is table else [table, head.weight]
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
