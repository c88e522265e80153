"""A reward model by the name of its run."""

from __future__ import annotations

import re
from pathlib import Path

from posttrain.commands.generate import ModelSource, find_source
from posttrain.errors import UsageError
from posttrain.models.load import QUANTIZED_FOLDERS
from posttrain.reward_models.scoring import RewardModel, load_reward_model

_STEP = re.compile(r"step-(\d+)")


def open_reward_model(
    name: str | ModelSource, runs_dir: str | Path, *, dtype: str | None = None, device: str | None = None
) -> RewardModel:
    """The reward model of a run, or of one of its checkpoints, with its own template.

    Args:
        name: a run by name or path, or the folder of a checkpoint in it.
        runs_dir: where runs are.
        dtype, device: other than those of the run.

    Raises:
        UsageError: no such run, or one that trained a policy.
        CheckpointError: no checkpoint of it can be used.
    """
    source = find_source(name, runs_dir) if isinstance(name, str) else name
    if source.run is None or source.recipe is None:
        raise UsageError(
            f"{source.name}: a reward model is named by its run, or by a checkpoint in its run, where its head and its "
            "template are; `posttrain runs` lists the runs"
        )
    changes = {key: value for key, value in (("dtype", dtype), ("device", device)) if value is not None}
    recipe = source.recipe.model_copy(update={"model": source.recipe.model.model_copy(update=changes)})
    bits = next((bits for bits, folder in QUANTIZED_FOLDERS.items() if Path(source.path).name == folder), None)
    return load_reward_model(recipe, source.run / "checkpoints", label=source.label, step=_step_of(source), bits=bits)


def _step_of(source: ModelSource) -> int | None:
    """The step of a checkpoint that was named; None for a whole run."""
    path = Path(source.path)
    checkpoint = path.parent if path.name in QUANTIZED_FOLDERS.values() else path
    match = _STEP.fullmatch(checkpoint.resolve().name) if path != source.run else None
    return int(match[1]) if match else None
