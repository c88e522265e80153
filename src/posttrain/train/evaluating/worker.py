"""What runs in the process that evaluates beside training: the recipe's evaluations, of checkpoints that it loads."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import IO, Any

from posttrain.errors import RunFailure
from posttrain.models.trained_heads import restore_heads
from posttrain.recipes.recipe import Recipe
from posttrain.train.build import Base, prepare_evaluating
from posttrain.train.checkpoint import load_checkpoint, restore_model
from posttrain.train.evaluating.beside import write_evaluations
from posttrain.train.evaluating.held_out import Evaluator
from posttrain.train.files import RunFiles
from posttrain.train.process import Answer, send, serve

KEPT = "beside"  # folder of a run, for what the engine of this process keeps


def main() -> None:
    """Serve until the trainer is gone."""
    serve("while evaluating beside training", _prepare)


def _prepare(recipe: Recipe, settings: dict[str, Any]) -> Answer:
    folder = Path(settings["folder"])
    evaluator, base, notices = prepare_evaluating(recipe, folder / KEPT, settings["servers"])
    return partial(_answer, evaluator, base, RunFiles.within(folder).checkpoints, notices)


def _answer(
    evaluator: Evaluator, base: Base, checkpoints: Path, notices: list[str], message: dict[str, Any], replies: IO[bytes]
) -> None:
    step = message["step"]
    if step:  # the weights of step 0 are those that it began with
        checkpoint = load_checkpoint(checkpoints, step)
        if checkpoint is None:
            raise RunFailure(f"{checkpoints}: the checkpoint of step {step} is gone")
        restore_model(base.loaded.model, checkpoint.path)
        restore_heads(base.heads, checkpoint.heads)
    evaluations = evaluator(step)
    told = [*notices, *evaluator.sampler.engine.take_notices()]
    notices.clear()
    send(replies, {"evaluations": write_evaluations(evaluations), "notices": told})
