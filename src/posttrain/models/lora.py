"""LoRA adapters (Hu et al. 2021) through peft: attach, switch off for the reference, merge."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.errors import RecipeError, UsageError, first_line
from posttrain.models.config import Model
from posttrain.randomness import derive_key
from posttrain.recipes.sections import AdapterSection
from posttrain.registry import suggest


@dataclass(frozen=True, slots=True)
class LowRank:
    """One adapter of one projection: ``scale * (x down^T) up^T``; down ``[r, in]``, up ``[out, r]``."""

    down: Tensor
    up: Tensor
    scale: float


def apply_adapter(model: Model, section: AdapterSection, seed: int) -> Any:
    """``model`` with a new LoRA adapter: W + (alpha / rank) B A on every target, B = 0, the base frozen.

    A is uniform in ±1/sqrt(in) (peft's Kaiming initialization) and a function of ``seed`` and the projection's name,
    the same on every device. ``alpha`` defaults to the rank, which makes the scale 1.

    Raises:
        RecipeError: a target that no linear layer of the model is called, or a model that has an
            adapter already.
    """
    from peft import LoraConfig, get_peft_model
    from transformers.pytorch_utils import Conv1D

    if has_adapter(model):
        raise RecipeError("model.adapter: this model already has an adapter; leave model.adapter out to train it on")
    kinds = {type(m) for _, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D)}
    _check_targets(model, section, Conv1D)
    init = section.init_lora_weights
    config = LoraConfig(
        r=section.rank,
        lora_alpha=section.rank if section.alpha is None else section.alpha,
        lora_dropout=section.dropout,
        target_modules=section.targets,
        target_parameters=section.target_parameters or None,
        use_dora=section.use_dora,
        use_rslora=section.use_rslora,
        init_lora_weights=True if init == "default" else init,
        fan_in_fan_out=Conv1D in kinds,  # GPT-2 keeps its weights transposed
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):  # peft draws; of the default the numbers are replaced below
        torch.manual_seed(derive_key(seed, "adapter weights") % (1 << 63))
        try:
            wrapped = get_peft_model(model, config)
        except ValueError as error:  # settings that do not go together
            raise RecipeError(f"model.adapter: {first_line(error)}") from error
    if init == "default":
        with torch.no_grad():
            for name, parameter in wrapped.named_parameters():
                if ".lora_A." in name:
                    generator = torch.Generator().manual_seed(derive_key(seed, f"adapter {name}") >> 1)
                    uniform = torch.rand(parameter.shape, generator=generator) * 2 - 1
                    parameter.copy_(uniform * (1.0 / sqrt(parameter.shape[1])))
                elif ".lora_B." in name:
                    parameter.zero_()
    for written in wrapped.peft_config.values():  # a relative path means something else wherever else it is read
        base = written.base_model_name_or_path
        if base and Path(base).is_dir():
            written.base_model_name_or_path = str(Path(base).absolute())
    return wrapped


def describe_reach(model: Model) -> list[str]:
    """A line about the matrices of its base that an adapter reaches and leaves out."""
    if not has_adapter(model):
        return []
    base, reached, left = model.get_base_model(), dict[str, int](), dict[str, int]()
    for name, parameter in base.named_parameters():
        if parameter.ndim < 2 or ".lora_" in name or name.endswith("bias"):
            continue
        place, _, leaf = name.rpartition(".")
        outer = place.partition(".base_layer")[0]
        adapted = set()
        for count in range(place.count(".base_layer") if outer != place else 0):
            wrapper = base.get_submodule(outer + ".base_layer" * count)
            adapted.add(getattr(wrapper, "parameter_name", "weight"))
        layer = outer if leaf == "weight" else f"{outer}.{leaf}"
        short = ".".join([part for part in layer.split(".") if not part.isdecimal()][-2:])
        of = reached if leaf in adapted else left
        of[short] = of.get(short, 0) + parameter.numel()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    weights = f"{sum(left.values()):,} of {sum(left.values()) + sum(reached.values()):,} weights"
    kept = f", and leaves out {', '.join(sorted(left))} ({weights})" if left else ""
    return [f"model.adapter: {trained:,} parameters reach {', '.join(sorted(reached))}{kept}"]


def refuse_whole_weights(model: Model, source: str) -> None:
    """Refuse to train on an adapter with whole weights of its base, which a checkpoint would not keep.

    Raises:
        RecipeError: with the first name.
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
    """Return True if ``model`` is a peft model around a base."""
    return hasattr(model, "peft_config") and hasattr(model, "disable_adapter")


def low_rank_terms(module: Any) -> tuple[nn.Linear, list[LowRank]] | None:
    """The linear layer inside ``module`` (an ``nn.Linear`` or peft's wrapper of one) and its active adapters; None for
    anything but plain LoRA. Merged adapters give no term."""
    if type(module) is nn.Linear:
        return module, []
    base = getattr(module, "base_layer", None)
    if type(base) is not nn.Linear or not hasattr(module, "lora_A"):
        return None
    if module.merged:
        return None if module.disable_adapters else (base, [])
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


def merged_weights(model: Model) -> Iterator[tuple[str, Tensor]]:
    """Every weight under its name in the base's own checkpoint, the active adapters merged by peft's rules, one by one.

    Raises:
        UsageError: an adapter at one of two places of a tied matrix, which would no longer be one.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    base = model.get_base_model()
    if tied := tied_adapters(base):
        raise UsageError(
            f"model.adapter: {tied[0]} has an adapter and is tied to a parameter of another module, so no other "
            "engine can take its merged weight. Leave it out of the adapter's targets, or use the native engine"
        )
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
    """The parameters of the module that a wrapper of peft stands for, by their names in it."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    is_off = wrapper.disable_adapters or getattr(wrapper, "merged", False)
    if not is_off and _is_plain(wrapper):
        for leaf, tensor in wrapper.get_base_layer().named_parameters():
            active = [name for name in wrapper.active_adapters if name in wrapper.scaling and leaf == "weight"]
            terms = (wrapper.get_delta_weight(name) for name in active)
            yield leaf, sum(terms, start=tensor.detach().float()) if active else tensor
    elif is_off:
        is_tuner = isinstance(wrapper, BaseTunerLayer)
        yield from (wrapper.get_base_layer() if is_tuner else wrapper.original_module).named_parameters()
    else:
        copied = copy.deepcopy(wrapper)
        if hasattr(copied, "unload_and_optionally_merge_module"):
            plain = copied.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
        else:
            copied.merge()
            plain = copied.get_base_layer()
        yield from plain.named_parameters()


def _is_plain(wrapper: Any) -> bool:
    """Return True if a wrapper adds nothing but low-rank terms of the weight."""
    if not hasattr(wrapper, "lora_A") or hasattr(wrapper, "parameter_name") or any(wrapper.lora_variant.values()):
        return False
    return not any(wrapper.lora_bias.values())


def tied_adapters(base: Model) -> list[str]:
    """Name the parameters under an adapter that are also a parameter of another module.

    Trained rows of an embedding and its tied head are one adapter, and stay tied.
    """
    places: dict[int, list[str]] = {}
    for name, parameter in base.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append(name)
    tied = [names for names in places.values() if len(names) > 1 and not all(".token_adapter." in n for n in names)]
    return [name for names in tied for name in names if ".base_layer." in name or ".original_module." in name]
