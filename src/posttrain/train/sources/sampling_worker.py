"""What runs in the process that samples ahead: the recipe's rollouts, with weights that the trainer sends.

It builds task, model, engine and rewards from the recipe as the trainer does, so that nothing is shared with a trainer
at work: no random state, no mode of a module, no file. It ends when the trainer's end of its pipe closes, also in the
middle of a batch.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from typing import IO, Any

import torch

from posttrain.consent import declare_code, declare_from_command_line
from posttrain.errors import EngineMismatch, PosttrainError
from posttrain.models.forward.linear import use_products
from posttrain.recipes.recipe import Recipe
from posttrain.train.build import prepare_sampling
from posttrain.train.sources.messages import receive, send, weight_sums, write_drawn
from posttrain.train.sources.rollouts import RolloutSource

TOLERANCE = 1e-9  # of sums in float64, relative


def main() -> None:
    """Serve until the trainer is gone."""
    requests, replies = _take_pipes()
    settings = receive(requests)
    if settings is None:
        return
    torch.set_num_threads(settings["num_threads"])
    use_products(settings["products"])
    declare_code(settings["recipe"])  # the trainer has imported all of it, and its sys.path came along
    declare_from_command_line((), trust_remote_code=settings["trust_remote_code"])
    try:
        source, model = prepare_sampling(Recipe.model_validate(settings["recipe"]))
        send(replies, {"ready": True})
        asked: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=_listen, args=(requests, asked), name="listener", daemon=True).start()
        while True:
            _answer(asked.get(), source, model, replies)
    except PosttrainError as error:
        send(replies, {"error": type(error).__name__, "message": str(error)})


def _answer(message: dict[str, Any], source: RolloutSource, model: Any, replies: IO[bytes]) -> None:
    if "tensors" in message:
        _load(message, model)
        source.engine.sync(message["weights"] * source.updates)
        return
    drawn = source.draw(message["step"], message["batch"], begins=lambda attempt: send(replies, {"begins": attempt}))
    drawn.version = message["version"]
    send(replies, {"drawn": write_drawn(drawn)})


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


def _listen(requests: IO[bytes], asked: queue.SimpleQueue[dict[str, Any]]) -> None:
    while (message := receive(requests)) is not None:
        asked.put(message)
    os._exit(0)  # the trainer is gone; nobody waits for what is being sampled


def _take_pipes() -> tuple[IO[bytes], IO[bytes]]:
    """Move the pipes away from standard input and output; what is printed goes where the trainer's errors go."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the trainer, which still wants the batch, then closes
    requests, replies = os.dup(0), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return os.fdopen(requests, "rb", 1 << 20), os.fdopen(replies, "wb", 1 << 20)
