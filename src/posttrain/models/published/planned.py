"""Determine a recipe's model and configuration before downloading or training anything."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from transformers import PretrainedConfig

from posttrain.errors import UsageError
from posttrain.models.config import read_object
from posttrain.models.load import read_config
from posttrain.models.published.configs import published_config
from posttrain.models.sources import ADAPTER_CONFIG, is_adapter, resolve_model_name
from posttrain.recipes.document import interpretation_names, recipe_names
from posttrain.recipes.recipe import load_recipe
from posttrain.recipes.sections import AdapterSection, ModelSection
from posttrain.untrusted import kind_of_file


def model_to_plan(named: ModelSection, architectures: Collection[str]) -> tuple[ModelSection, PretrainedConfig]:
    """Determine a run's model and tensor shapes, given ``named`` in its recipe. Loaded adapters count as new.

    Raises:
        UsageError: configuration unavailable, or unsupported architecture.
    """
    model = _made_from(named)
    config = None
    if model.init is None and kind_of_file(model.name) == "nothing":
        config = published_config(model.name)  # avoids downloading the model itself
    is_published = config is not None
    if config is None:
        config = read_config(model)
    if config is None:
        raise UsageError(
            f"the config.json of {model.name} is missing. Download it once (`hf download {model.name} config.json`), "
            "or set model.name to a folder that has it"
        )
    if config.model_type not in architectures:
        raise UsageError(
            f"it was not worked out for the architecture {config.model_type} (for {', '.join(architectures)} it was)"
        )
    source = ""
    if not (model.init or model.adapter or is_published):
        source = resolve_model_name(model.name)
    if source and is_adapter(source):
        settings = read_object(Path(source) / ADAPTER_CONFIG)
        try:
            section = AdapterSection(rank=settings["r"], targets=settings["target_modules"])
        except (KeyError, TypeError, ValueError):
            raise UsageError(f"{source}: {ADAPTER_CONFIG} does not say r and target_modules") from None
        model = model.model_copy(update={"adapter": section})
    return model, config


def _made_from(model: ModelSection) -> ModelSection:
    """Resolve sections naming a future shipped-recipe run to that recipe's model."""
    others = interpretation_names()
    makers = {f"runs/{name.replace('/', '-')}": name for name in recipe_names() if name not in others}
    while model.init is None and model.name in makers and kind_of_file(model.name) == "nothing":
        below = load_recipe(makers[model.name]).model
        changes: dict[str, object] = {"name": below.name, "init": below.init}
        if model.adapter is None:
            changes["adapter"] = below.adapter
        model = model.model_copy(update=changes)
    return model
