"""The process that samples ahead: the trainer's side, which gives it weights and batches, and what runs in it.

It builds task, model, engine and rewards from the recipe as the trainer does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch

from posttrain.errors import EngineMismatch
from posttrain.recipes.recipe import Recipe
from posttrain.train.process import Answer, BesideProcess, Weights, send, send_weights, serve, weight_sums
from posttrain.train.sources.messages import write_drawn

if TYPE_CHECKING:
    from posttrain.train.sources.rollouts import RolloutSource

KEPT = "ahead"  # folder of a run
INSTEAD = "rollout.staleness: 0 samples without such a process"
TOLERANCE = 1e-9  # of sums in float64, relative


class SamplingProcess:
    """A process that draws rollout batches; see ``BesideProcess``.

    One that is started again is given the same batch: its weights and random numbers are the same, so its answers are.
    ``folder``: of the run, where there is one; what engine and rewards keep (what a judge said) has a place there.
    ``starts_servers``: of the trainer's world.
    """

    def __init__(self, recipe: Recipe, folder: Path | None, starts_servers: bool = False) -> None:
        settings = {"folder": None if folder is None else str(folder / KEPT), "servers": starts_servers}
        self._beside = BesideProcess(__name__, recipe, settings)
        self._version: int | None = None  # of the weights that it has
        self.notices: list[str] = []  # of its engine, not passed on yet

    def draw(
        self, batch: int, step: int, weights: Weights, begins: Callable[[int], None], died: Callable[[str], None]
    ) -> Mapping[str, Any]:
        """The drawn batch, as ``messages.write_drawn`` writes it. Waits for it.

        Args:
            begins: told of every round of sampling.
            died: told that the process was lost, before another is started.

        Raises:
            PosttrainError: what the process says that it could not do.
            RunFailure: the process ended, and goes on ending.
        """

        def ask() -> Mapping[str, Any]:
            return self._ask(batch, step, weights, begins)

        return self._beside.repeat(ask, f"samples rollout batch {batch}", INSTEAD, died)

    def write(
        self,
        new: list[int],
        weights: Weights,
        carried: list[dict[str, Any]],
        begins: Callable[[int, int], None],
        ends: Callable[[Mapping[str, Any]], None],
        died: Callable[[str], None],
    ) -> list[dict[str, Any]]:
        """All that one version writes (``in_flight.write_version``); returns what is carried over to the next.

        ``begins`` is told of every round of a batch, ``ends`` of every batch; the rest, and what is raised: ``draw``.
        """

        def ask() -> list[dict[str, Any]]:
            pipe = self._with(weights)
            send(pipe, {"version": weights.version, "new": new, "carried": carried})
            while "carried" not in (reply := self._beside.receive()):
                if "begins" in reply:
                    begins(*reply["begins"])
                else:
                    ends(reply["drawn"])
            left: list[dict[str, Any]] = reply["carried"]
            return left

        return self._beside.repeat(ask, f"samples with version {weights.version}", INSTEAD, died)

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._beside.close()

    def _ask(self, batch: int, step: int, weights: Weights, begins: Callable[[int], None]) -> Mapping[str, Any]:
        pipe = self._with(weights)
        send(pipe, {"batch": batch, "step": step, "version": weights.version})
        while "drawn" not in (reply := self._beside.receive()):
            begins(reply["begins"])
        self.notices += reply["notices"]
        drawn: Mapping[str, Any] = reply["drawn"]
        return drawn

    def _with(self, weights: Weights) -> IO[bytes]:
        """What to write to, of a process that has these weights."""
        pipe, is_new = self._beside.started()
        if is_new or self._version != weights.version:
            send_weights(pipe, weights)
            self._version = weights.version
        return pipe


# What runs in the process.


def main() -> None:
    """Serve until the trainer is gone."""
    serve("while sampling ahead", _prepare)


def _prepare(recipe: Recipe, settings: dict[str, Any]) -> Answer:
    from posttrain.train.build import prepare_sampling  # which builds the trainer's side, too

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
