"""Small runs of reward models, made by the library's own parts without training, for the tests of evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from posttrain.evaluation.reward_models.scoring import RewardModel, load_reward_model
from posttrain.models.trained_heads import head_tensors
from posttrain.recipes.recipe import Recipe, validate_recipe
from posttrain.registry import register
from posttrain.runs.directory import RunDirectory
from posttrain.training.build import TrainerState, prepare
from posttrain.training.checkpoint import save_checkpoint
from posttrain.types import Batch, Loss, Outputs

OBJECTIVES: dict[str, dict[str, Any]] = {
    "pair": {"name": "bradley_terry"},
    "judged": {"name": "outcome"},
    "steps": {"name": "process"},
}


@register("objective", level="token", needs=("labels",), head="score")
def unnamed_scores(outputs: Outputs, batch: Batch) -> Loss:
    """An objective of somebody's own that does not say what its scores mean."""
    return Loss(batch.field("labels")[:, None] * outputs.scores)


def make_recipe(responses: str, **sections: Any) -> Recipe:
    """A resolved recipe of a reward model over stories; further sections are merged in."""
    task = {"name": "stories", "size": 24, "max_steps": 3, "responses": responses}
    data: dict[str, Any] = {
        "task": task,
        "prompt": {"template": {"name": "r1_zero", "preamble": ""}},
        "data": {"batch_size": 2, "max_length": 256},
        "objective": OBJECTIVES[responses],
        "train": {"steps": 2, "lr": 1e-3},
        "eval": {"every": 1, "num_examples": 12, "tasks": [task | {"split": "validation"}]},
    }
    for name, value in sections.items():
        data[name] = data.get(name, {}) | value
    return validate_recipe(data).resolve()


def shake(parts: TrainerState, seed: int = 3) -> None:
    """Weights and a head that nothing but a checkpoint knows, wide enough to give scores apart from 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in parts.parameters:
            spread = float(parameter.std()) or 0.02
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1 * spread)
        for parameter in parts.heads["head"].parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)


def save_step(folder: Path, parts: TrainerState, step: int) -> Path:
    """A checkpoint of the parts as they are; returns its folder."""
    return save_checkpoint(
        folder / "checkpoints",
        step=step,
        model=parts.model,
        tokenizer=parts.tokenizer,
        optimizer={},
        state={},
        heads=head_tensors(parts.heads),
        score=parts.score_head(),
    )


def make_run(folder: Path, recipe: Recipe) -> TrainerState:
    """A run directory with one checkpoint (step 2) of shaken weights; returns the parts that it was saved from."""
    folder.mkdir(parents=True)
    RunDirectory(folder).write_recipe(recipe)
    parts = prepare(recipe)
    shake(parts)
    save_step(folder, parts, 2)
    return parts


def open_run(folder: Path, recipe: Recipe, **options: Any) -> RewardModel:
    """The reward model of such a run."""
    return load_reward_model(recipe, folder / "checkpoints", label=folder.name, **options)
