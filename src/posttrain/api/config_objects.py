"""Configurations from other libraries: ``peft.LoraConfig``, and training arguments from TRL or transformers.

Each field is translated to a recipe key with the same meaning. For training arguments, only fields that differ from
their class default are read, since the object does not record which values were set explicitly. Fields without
a matching key are refused, and the message suggests a replacement.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any

from posttrain import registry
from posttrain.api.arguments import reading
from posttrain.errors import UsageError
from posttrain.option_types import shorten
from posttrain.other_names import answer_other_name

_ADAPTER_KEYS = {
    "r": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "target_modules": "targets",
    "target_parameters": "target_parameters",
    "use_dora": "use_dora",
    "use_rslora": "use_rslora",
    "init_lora_weights": "init_lora_weights",
}
_CALLED = re.compile(r" This is called ([\w.]+) here\.")
# These fields do not affect adapter training.
_OF_PEFT = ("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "inference_mode")
# Training-argument fields copied to a recipe key unchanged, although the same name has another meaning here.
_SAME = {
    "temperature": "rollout.temperature",
    "delta": "objective.clip_max",
    "max_length": "data.max_length",
}
# These follow from other fields, or only control output locations and display.
_ELSEWHERE = {
    "output_dir": "use runs_dir= and run= for the run folder",
    "run_name": "use run= for the run name",
    "disable_tqdm": "use progress=False to hide the progress bar",
    "data_seed": "train.seed also sets the data order",
    "generation_batch_size": "",
    "activation_checkpointing": "",
    "accelerator_config": "",
    "use_bias_correction_kl": "",
}
_PREFERENCES = {
    "sigmoid": "dpo",
    "hinge": "hinge",
    "ipo": "ipo",
    "robust": "robust_dpo",
    "exo_pair": "exo",
    "nca_pair": "nca",
    "bco_pair": "bco",
    "sppo_hard": "sppo",
    "apo_zero": "apo_zero",
    "discopop": "discopop",
}
_OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_8bit": "adamw_8bit",
    "adamw_bnb_8bit": "adamw_8bit",
    "adafactor": "adafactor",
}


@dataclass
class ConfigReader:
    """Reads one object: ``keys`` of the recipe, ``notes`` about fields that need none, ``refused`` fields."""

    name: str
    given: Any
    keys: dict[str, object] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return type(self.given).__name__

    def refuse(self, name: str, answer: str = "") -> None:
        """Record that a field cannot be translated; by default with a known answer for the name."""
        if not answer:
            answer = answer_other_name(name).strip()
        if not answer:
            answer = "No recipe key matches."
        self.refused[name] = f"{self.kind}.{name} = {shorten(getattr(self.given, name))}. {answer}"

    def result(self) -> dict[str, object]:
        """Get the translated keys.

        Raises:
            UsageError: a field value has no matching key.
        """
        if self.refused:
            raise UsageError(
                f"{self.name}: {len(self.refused)} {self.kind} fields cannot be read: "
                f"{' '.join(self.refused.values())} Remove them, and pass recipe keys separately"
            )
        return self.keys


def read_config_objects(keys: Mapping[str, object]) -> tuple[dict[str, object], list[str]]:
    """Translate peft, TRL and transformers configurations to recipe keys, with notes about skipped fields.

    Raises:
        UsageError: a field value has no matching key, or a key was given twice.
    """
    plain: dict[str, object] = {}
    notes: list[str] = []
    for name, value in keys.items():
        with reading(name):
            read = _reader_of(name, value)
        if read is None:
            plain[name] = value
            continue
        for key, one in read.result().items():
            if key in plain or key.replace(".", "__") in keys:
                raise UsageError(f"{key}: given twice, also by {name} ({read.kind}). Give it once")
            plain[key] = one
        notes += read.notes
    return plain, notes


def adapter_options(name: str, value: object) -> object:
    """Translate a ``LoraConfig`` to ``model.adapter`` options; return other values unchanged.

    Raises:
        UsageError: see ``read_config_objects``.
    """
    with reading(name):
        if not _is_adapter(value):
            return value
        read = _read_adapter(name, value)
    return {key.removeprefix("model.adapter."): one for key, one in read.result().items()}


def describe_config(value: object) -> str:
    """Explain the right argument for a configuration passed as the recipe; empty for other values."""
    if _is_adapter(value):
        return (
            f'. Give a recipe, and pass this separately: pt.train("tiny/sft", peft_config={type(value).__name__}(...))'
        )
    if _is_arguments(value):
        given = f"args={type(value).__name__}(...)"
        return f'. Give a recipe for the method, and pass this separately: pt.train("tiny/grpo", {given})'
    return ""


def _reader_of(name: str, value: object) -> ConfigReader | None:
    if _is_adapter(value):
        return _read_adapter(name, value)
    if _is_arguments(value):
        return _read_arguments(name, value)
    return None


def _is_object(value: object) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def _is_adapter(value: object) -> bool:
    return _is_object(value) and hasattr(value, "peft_type")


def _is_arguments(value: object) -> bool:
    return _is_object(value) and hasattr(value, "learning_rate") and hasattr(value, "per_device_train_batch_size")


def _changed_fields(value: Any) -> list[str]:
    """List fields whose value differs from the class default."""
    changed = []
    for one in fields(value):
        default: Any = one.default
        if one.default_factory is not MISSING:
            default = one.default_factory()
        if getattr(value, one.name) != default:
            changed.append(one.name)
    return changed


def _text(value: object) -> str:
    """Convert an enum member or a text to plain text."""
    return str(getattr(value, "value", value))


# --- peft ---


def _read_adapter(name: str, config: Any) -> ConfigReader:
    """Translate a ``LoraConfig`` including its default values."""
    read = ConfigReader(name, config)
    if _text(config.peft_type) != "LORA":
        raise UsageError(f"{name}: {read.kind} is not offered. model.adapter trains LoRA; give a LoraConfig")
    for field_name, key in _ADAPTER_KEYS.items():
        value = getattr(config, field_name, None)
        if field_name == "target_modules":
            value = _targets(value)
            if value is None:
                read.refuse(field_name, "model.adapter.targets takes all-linear, or a list of name suffixes.")
        elif field_name == "init_lora_weights":
            if value is True:
                value = "default"
            elif value not in ("gaussian", "orthogonal"):
                read.refuse(field_name)
        elif field_name == "target_parameters":
            value = list(value or [])
        read.keys[f"model.adapter.{key}"] = value
    for changed in _changed_fields(config):
        if changed not in _ADAPTER_KEYS and changed not in _OF_PEFT:
            read.refuse(changed)
    return read


def _targets(value: object) -> object:
    """Translate target modules to recipe form; None if given as a pattern."""
    if value is None or value == "all-linear":
        return "all-linear"
    if isinstance(value, str):
        return None
    return sorted(map(str, value))  # type: ignore[call-overload]


# --- transformers, TRL ---


def _read_arguments(name: str, config: Any) -> ConfigReader:
    read = ConfigReader(name, config)
    changed = _changed_fields(config)
    for field_name in changed:
        if field_name == "steps_per_generation" and config.steps_per_generation == config.gradient_accumulation_steps:
            continue  # follows gradient_accumulation_steps
        convert = _CONVERTED.get(field_name)
        value = getattr(config, field_name)
        if convert is not None:
            convert(read, config)
        elif field_name in _SAME:
            read.keys[_SAME[field_name]] = value
        elif field_name in _ELSEWHERE:
            if _ELSEWHERE[field_name] and value:
                read.notes.append(f"{name}: {read.kind}.{field_name} is not read: {_ELSEWHERE[field_name]}")
        else:
            answer = answer_other_name(field_name)
            called = _CALLED.fullmatch(answer)
            if called is not None:
                read.keys[called[1]] = value
            elif "none is needed" in answer:
                read.notes.append(f"{name}: {read.kind}.{field_name} is not read.{answer}")
            else:
                read.refuse(field_name)
    read.notes.append(
        f"{name}: {read.kind} fields with default values are not read; the recipe decides "
        "(docs/coming-from/trl.md lists GRPOConfig defaults as a recipe)"
    )
    return read


def _samples(config: Any) -> bool:
    return hasattr(config, "num_generations")


def _read_batch(read: ConfigReader, config: Any) -> None:
    """Translate the per-process batch size."""
    rows = config.per_device_train_batch_size
    read.keys["train.micro_batch_rows"] = rows
    if not _samples(config):
        read.keys["data.batch_size"] = rows * config.gradient_accumulation_steps
        if hasattr(config, "precompute_ref_log_probs"):  # its rows are pairs
            read.keys["train.micro_batch_rows"] = 2 * rows
        return
    answers = rows * config.steps_per_generation
    if answers % config.num_generations or config.steps_per_generation % config.gradient_accumulation_steps:
        read.refuse(
            "steps_per_generation",
            "With these gradient_accumulation_steps and per_device_train_batch_size, groups or updates are incomplete. "
            "Give rollout.num_prompts and train.num_minibatches.",
        )
        return
    read.keys["rollout.num_prompts"] = answers // config.num_generations
    read.keys["train.num_minibatches"] = config.steps_per_generation // config.gradient_accumulation_steps


def _read_length(read: ConfigReader, config: Any) -> None:
    if config.max_steps > 0:
        read.keys["train.steps"] = config.max_steps
    else:
        read.keys["train.steps"] = None
        read.keys["train.num_epochs"] = config.num_train_epochs


def _read_schedule(read: ConfigReader, config: Any) -> None:
    schedule = _text(config.lr_scheduler_type).removesuffix("_with_warmup")
    if schedule not in ("constant", "linear", "cosine"):
        read.refuse("lr_scheduler_type")
        return
    read.keys["train.schedule"] = schedule
    if schedule != "constant":
        read.keys["train.min_lr_ratio"] = 0.0


def _read_warmup(read: ConfigReader, config: Any) -> None:
    if 0 < config.warmup_steps < 1:
        read.refuse("warmup_steps", "Fractions are not supported. Give train.warmup_steps as a number of steps.")
    else:
        read.keys["train.warmup_steps"] = int(config.warmup_steps)


def _read_optimizer(read: ConfigReader, config: Any) -> None:
    name = _OPTIMIZERS.get(_text(config.optim))
    if name is None:
        read.refuse("optim")
    else:
        read.keys["optimizer.name"] = name


def _read_betas(read: ConfigReader, config: Any) -> None:
    read.keys["optimizer.betas"] = [config.adam_beta1, config.adam_beta2]


def _read_precision(read: ConfigReader, config: Any) -> None:
    """``bf16`` is True by itself in TRL, so that only False says something."""
    if config.fp16:
        read.refuse("fp16")
    elif config.tf32:
        read.keys["train.precision"] = "tf32"
    elif not config.bf16:
        read.keys["train.precision"] = "fp32"


def _read_device(read: ConfigReader, config: Any) -> None:
    read.keys["model.device"] = "cpu"


def _read_beta(read: ConfigReader, config: Any) -> None:
    if not _samples(config):
        read.keys["objective.beta"] = config.beta
        return
    read.keys["regularize.kl_coef"] = config.beta
    if getattr(config, "use_bias_correction_kl", False):
        read.keys["regularize.kl_estimator"] = "k3_weighted"


def _read_clip(read: ConfigReader, config: Any) -> None:
    read.keys["objective.clip_low"] = config.epsilon
    if config.epsilon_high is None:
        read.keys["objective.clip_high"] = config.epsilon


def _read_scale(read: ConfigReader, config: Any) -> None:
    names = {"group": "normalized", "True": "normalized", "none": "centered", "False": "centered"}
    name = names.get(_text(config.scale_rewards))
    if name is None:
        read.refuse("scale_rewards")
    else:
        read.keys["advantage"] = name


def _read_loss(read: ConfigReader, config: Any) -> None:
    """Translate ``loss_type``: a normalization for GRPO, an objective for DPO."""
    kinds = config.loss_type
    if isinstance(kinds, list | tuple) and len(kinds) == 1:
        kinds = kinds[0]
    kind = _text(kinds)
    if _samples(config):
        by_type: dict[str, dict[str, object]] = {
            "grpo": {"aggregate": "sequence_mean"},
            "dapo": {"aggregate": "token_mean"},
            "bnpo": {"aggregate": "token_mean"},
            "dr_grpo": {"aggregate": {"name": "constant", "length": config.max_completion_length}},
            "cispo": {"objective.name": "cispo", "aggregate": "token_mean"},
            "sapo": {"objective.name": "sapo", "aggregate": "sequence_mean"},
        }
        keys = by_type.get(kind)
    else:
        keys = None
        if kind in _PREFERENCES:
            keys = {"objective.name": _PREFERENCES[kind]}
    if keys is None:
        read.refuse("loss_type")
    else:
        read.keys |= keys


def _read_level(read: ConfigReader, config: Any) -> None:
    if config.importance_sampling_level != "sequence":
        read.refuse("importance_sampling_level")
    else:
        read.keys["objective.name"] = "gspo"


def _read_tracking(read: ConfigReader, config: Any) -> None:
    trackers = config.report_to
    if isinstance(trackers, str):
        trackers = [trackers]
    named = [tracker for tracker in trackers if tracker != "none"]
    known = registry.names("tracker")
    if not named:
        return
    if set(named) <= set(known):
        read.keys["track"] = named
    else:
        read.refuse("report_to")


def _read_evaluation(read: ConfigReader, config: Any) -> None:
    strategy = _text(config.eval_strategy)
    if strategy == "no":
        read.keys["eval.every"] = 0
    elif strategy == "steps":
        read.keys["eval.every"] = int(config.eval_steps or config.logging_steps)
    else:
        read.refuse("eval_strategy")


def _read_saving(read: ConfigReader, config: Any) -> None:
    strategy = _text(config.save_strategy)
    if strategy == "no":
        read.keys["train.save_every"] = 0
    elif strategy == "steps" and config.save_steps >= 1:
        read.keys["train.save_every"] = int(config.save_steps)
    else:
        read.refuse("save_strategy")


def _read_top_k(read: ConfigReader, config: Any) -> None:
    read.keys["rollout.top_k"] = config.top_k or None


def _read_targets(read: ConfigReader, config: Any) -> None:
    if config.assistant_only_loss:
        read.keys["data.train_on"] = "assistant"
    elif config.completion_only_loss:
        read.keys["data.train_on"] = "response"
    elif config.completion_only_loss is not None:
        read.refuse("completion_only_loss")


_CONVERTED: dict[str, Callable[[ConfigReader, Any], None]] = {
    "per_device_train_batch_size": _read_batch,
    "gradient_accumulation_steps": _read_batch,
    "steps_per_generation": _read_batch,
    "max_steps": _read_length,
    "num_train_epochs": _read_length,
    "lr_scheduler_type": _read_schedule,
    "warmup_steps": _read_warmup,
    "optim": _read_optimizer,
    "adam_beta1": _read_betas,
    "adam_beta2": _read_betas,
    "bf16": _read_precision,
    "fp16": _read_precision,
    "tf32": _read_precision,
    "use_cpu": _read_device,
    "beta": _read_beta,
    "epsilon": _read_clip,
    "scale_rewards": _read_scale,
    "loss_type": _read_loss,
    "importance_sampling_level": _read_level,
    "report_to": _read_tracking,
    "eval_strategy": _read_evaluation,
    "eval_steps": _read_evaluation,
    "save_strategy": _read_saving,
    "save_steps": _read_saving,
    "top_k": _read_top_k,
    "completion_only_loss": _read_targets,
    "assistant_only_loss": _read_targets,
}
