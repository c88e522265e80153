"""What runs in the process that samples ahead: the recipe's rollouts, with weights that the trainer sends.

It builds task, model, engine and rewards from the recipe as the trainer does.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from posttrain.errors import EngineMismatch
from posttrain.recipes.recipe import Recipe
from posttrain.train.build import prepare_sampling
from posttrain.train.process import Answer, send, serve, weight_sums
from posttrain.train.sources.messages import write_drawn
from posttrain.train.sources.rollouts import RolloutSource

TOLERANCE = 1e-9  # of sums in float64, relative


def main() -> None:
    """Serve until the trainer is gone."""
    serve("while sampling ahead", _prepare)


def _prepare(recipe: Recipe, settings: dict[str, Any]) -> Answer:
    folder = settings["folder"]
    source, model = prepare_sampling(recipe, None if folder is None else Path(folder), settings["servers"])
    return partial(_answer, source, model)


def _answer(source: RolloutSource, model: Any, message: dict[str, Any], replies: IO[bytes]) -> None:
    if "tensors" in message:
        _load(message, model)
        source.engine.sync(message["weights"] * source.updates)
        return
    if "carried" in message:
        from posttrain.train.sources.in_flight import write_version

        asked = (message["version"], message["new"], message["carried"])
        send(replies, {"carried": write_version(source, *asked, lambda told: send(replies, told))})
        return
    drawn = source.draw(message["step"], message["batch"], begins=lambda attempt: send(replies, {"begins": attempt}))
    drawn.version = message["version"]
    send(replies, {"drawn": write_drawn(drawn), "notices": source.engine.take_notices()})


@torch.no_grad()
def _load(message: dict[str, Any], model: Any) -> None:
    """Take the weights of another version.

    Raises:
        EngineMismatch: with them the model is not the trainer's.
    """
    parameters = dict(model.named_parameters())
    for name, tensor in message["tensors"].items():
        parameters[name].copy_(tensor)
    for (name, _), ours, theirs in zip(parameters.items(), weight_sums(model), message["sums"], strict=True):
        both_diverged = ours != ours and theirs != theirs
        if not both_diverged and not abs(ours - theirs) <= TOLERANCE * max(1.0, abs(theirs)):
            raise EngineMismatch(
                f"{name} adds up to {ours!r} in the process that samples and to {theirs!r} in the trainer, at version "
                f"{message['weights']} of the weights; nothing was sampled with it. Is the model on disk still the one "
                "that this run began with?"
            )
