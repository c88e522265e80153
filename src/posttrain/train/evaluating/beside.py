"""Evaluation in a process beside the trainer's, from the checkpoint of the step that is evaluated.

Training goes on while it evaluates. What is evaluated, how and with which random numbers is what the trainer would have
done, so the results are the same; only when they are written down depends on the clock. ``main`` runs in that process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from posttrain.errors import RunFailure, UsageError
from posttrain.evals.generation import Evaluation
from posttrain.models.trained_heads import restore_heads
from posttrain.recipes.recipe import Recipe
from posttrain.store.rollouts import Row, to_row
from posttrain.train.checkpoint import load_checkpoint, restore_model
from posttrain.train.files import RunFiles
from posttrain.train.process import Answer, BesideProcess, send, serve

if TYPE_CHECKING:
    from posttrain.train.build import Base
    from posttrain.train.evaluating.held_out import Evaluator

KEPT = "beside"  # folder of a run, for what the engine of the process keeps


@dataclass(frozen=True, slots=True)
class WrittenEvaluation:
    """An evaluation of another process: its rollouts are the rows of a ``RolloutStore``."""

    name: str
    results: dict[str, float]
    rollouts: list[Row]


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What there is to record of a step, and to tell."""

    step: int
    evaluations: list[WrittenEvaluation]
    notices: list[str]


def write_evaluations(evaluations: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """As plain data for JSON; ``read_evaluations`` reads it, to the last bit."""
    return [
        {
            "name": evaluation.name,
            "results": evaluation.results,
            "rows": [[_plain(value) for value in to_row(rollout)] for rollout in evaluation.rollouts],
        }
        for evaluation in evaluations
    ]


def read_evaluations(stated: Sequence[Mapping[str, Any]]) -> list[WrittenEvaluation]:
    """What ``write_evaluations`` wrote."""
    return [
        WrittenEvaluation(
            row["name"], row["results"], [tuple(_stored(value) for value in rollout) for rollout in row["rows"]]
        )
        for row in stated
    ]


class Beside:
    """Has a run's weights evaluated by another process, of one step at a time.

    Args:
        recipe: resolved. It is followed on ``eval.device``, where that is given.
        folder: of the run, where its checkpoints are.
        starts_servers: of the trainer's world.
    """

    def __init__(self, recipe: Recipe, folder: Path | None, starts_servers: bool = False) -> None:
        self.folder = folder
        own = recipe.model_copy(deep=True)
        own.eval.beside, own.eval.device = False, None
        kind, _, number = (recipe.eval.device or recipe.model.device).partition(":")
        own.model.device = cast(Any, kind)
        settings = {"folder": str(folder), "servers": starts_servers}
        self._process = BesideProcess(__name__, own, settings, only_gpu(number) if number else None)
        self._courier: ThreadPoolExecutor | None = None
        self._waiting: tuple[int, Future[Evaluated]] | None = None

    def begin(self, step: int) -> None:
        """Start to evaluate the weights after ``step`` updates, of which there is a checkpoint unless it is 0."""
        assert self._waiting is None, "one at a time"
        assert self.folder is not None, "a run has a folder"
        self._courier = self._courier or ThreadPoolExecutor(1, "evaluation")
        self._waiting = step, self._courier.submit(self._evaluate, step)

    def take(self, *, wait: bool) -> Evaluated | None:
        """What was begun, once; None where nothing was, or it is not done and not waited for.

        Raises:
            PosttrainError: it could not be evaluated.
        """
        if self._waiting is None or not (wait or self._waiting[1].done()):
            return None
        (_, future), self._waiting = self._waiting, None
        return future.result()

    def close(self) -> None:
        """End the process; what it is doing is lost, and still owed."""
        self._process.close()
        if self._courier is not None:
            self._courier.shutdown(cancel_futures=True)

    def _evaluate(self, step: int) -> Evaluated:
        def ask() -> dict[str, Any]:
            pipe, _ = self._process.started()
            send(pipe, {"step": step})
            return self._process.receive()

        instead = "eval.beside: false evaluates without such a process"
        reply = self._process.repeat(ask, f"evaluates step {step}", instead)
        return Evaluated(step, read_evaluations(reply["evaluations"]), reply["notices"])


def only_gpu(number: str, visible: str | None = None) -> dict[str, str]:
    """The environment in which a process has one GPU: number ``number`` of those that this one has (``visible``).

    Raises:
        UsageError: there are not so many.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible
    if visible is None:
        return {"CUDA_VISIBLE_DEVICES": number}
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if int(number) >= len(names):
        raise UsageError(
            f"eval.device: cuda:{number} is one more than there are: CUDA_VISIBLE_DEVICES is {visible!r}, and the "
            "first of these is cuda:0"
        )
    return {"CUDA_VISIBLE_DEVICES": names[int(number)]}


def _plain(value: Any) -> Any:
    return {"hex": value.hex()} if isinstance(value, bytes) else value


def _stored(value: Any) -> Any:
    return bytes.fromhex(value["hex"]) if isinstance(value, dict) else value


# What runs in the process.


def main() -> None:
    """Serve until the trainer is gone."""
    serve("while evaluating beside training", _prepare)


def _prepare(recipe: Recipe, settings: dict[str, Any]) -> Answer:
    from posttrain.train.build import prepare_evaluating  # which builds the trainer's side, too

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
