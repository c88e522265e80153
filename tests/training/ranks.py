"""Several processes that train the same cases one after the other, for the tests of training in several.

The process of the tests is rank 0; this file is the program of the others. Each case is ``train``, as the launcher
calls it, in the world of all of them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from posttrain.errors import RunFailure
from posttrain.process_group import ProcessGroup
from posttrain.recipes.recipe import validate_recipe
from posttrain.training.build import prepare
from posttrain.training.distributed import Processes, join
from posttrain.training.files import RunFiles
from posttrain.training.loop import TrainResult, run_training
from posttrain.training.step import accumulate, apply_update
from small_runs import Events

SECONDS = 600.0  # a bound for the slowest of machines; no test waits for it


@contextmanager
def process_group_of(size: int) -> Iterator[ProcessGroup]:
    """A world of which this process is rank 0; the others train what ``train_case`` tells them."""
    process_group = Processes.open(size)
    place = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(process_group.store.port)}
    place["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    others = [
        subprocess.Popen(
            [sys.executable, __file__], env={**os.environ, **place, "RANK": str(r)}, start_new_session=True
        )
        for r in range(1, size)
    ]
    try:
        with join(process_group, "cpu", SECONDS):
            yield process_group
            process_group.broadcast(None, "case")
    finally:
        for other in others:
            try:
                other.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(other.pid, signal.SIGKILL)
                other.wait()


def train_case(
    process_group: ProcessGroup, recipe: dict[str, Any], folder: Path, *, resume: bool = False, stop_after: int = 0
) -> Any:
    """Rank 0: train a resolved recipe's plain data; ``stop_after`` so many updates, if it is given. (result, events)"""
    process_group.broadcast((recipe, str(folder), resume, stop_after), "case")
    return _train(process_group, recipe, folder, resume, stop_after)


def shard_case(process_group: ProcessGroup, recipe: dict[str, Any]) -> tuple[list[list[Any]], float]:
    """Rank 0: one update of a resolved recipe. Of every trained parameter the shape, and those of what this process has
    of its gradient, its moment and itself, the types of these three, and what it has in the model that is read by all
    else; and the norm of the gradient.
    """
    process_group.broadcast((recipe,), "case")
    return _shards(process_group, recipe)


def _shards(process_group: ProcessGroup, plain: dict[str, Any]) -> tuple[list[list[Any]], float]:
    recipe = validate_recipe(plain).resolve()
    parts = prepare(recipe, None, process_group)
    batch = parts.source(1).batch
    assert batch is not None
    loss, _ = accumulate(parts.learning(), batch, recipe.train, process_group=process_group)
    gradients = [_own_shape(p.grad) for _, p in parts.parameters]
    kinds = [[str(p.grad.dtype), str(p.dtype)] for _, p in parts.parameters]
    own, apart = parts.split_parameters()
    norm = apply_update(parts.optimizer, own, 1e-4, 1.0, loss, 1, apart)
    kept = [parts.optimizer.state[p] for _, p in parts.parameters]
    moments = [state["momentum" if "momentum" in state else "exp_avg"] for state in kept]
    trained = [p for _, p in parts.parameters]
    for of, moment in zip(kinds, moments, strict=True):
        of.append(str(moment.dtype))
    modules = {"": parts.model, **{f"{name}.": module for name, module in parts.heads.items()}}
    named = {place + n: p for place, module in modules.items() for n, p in module.named_parameters()}
    own_shapes = [_own_shape(named[name]) for name, _ in parts.parameters]
    held = (gradients, map(_own_shape, moments), map(_own_shape, trained), kinds, own_shapes)
    shapes = zip((tuple(p.shape) for p in trained), *held, strict=True)
    return [list(of) for of in shapes], norm


def broadcast_case(process_group: ProcessGroup) -> list[tuple[Any, str]]:
    """Rank 0: broadcast a value; then each process makes a call of its own. What each received, and its error."""
    process_group.broadcast((), "case")
    return _broadcast(process_group)


def _broadcast(process_group: ProcessGroup) -> list[tuple[Any, str]]:
    value = {"rank": process_group.rank, "ids": list(range(process_group.rank, 1000)), "x": torch.ones(2, 3)}
    received = process_group.broadcast(value, "a value")
    try:
        if process_group.is_main:
            process_group.broadcast(value, "the call of rank 0")
        else:
            process_group.gather([1], "the call of the others")
    except RunFailure as error:
        return process_group.gather([(received, str(error))], "what was received")
    return process_group.gather([(received, "")], "what was received")


def _own_shape(tensor: Any) -> tuple[int, ...]:
    return tuple((tensor.to_local() if hasattr(tensor, "to_local") else tensor).shape)


def _train(
    process_group: ProcessGroup, recipe: dict[str, Any], folder: Path, resume: bool, stop_after: int
) -> tuple[TrainResult, Any]:
    events = Events()
    result = run_training(
        validate_recipe(recipe).resolve(),
        RunFiles.within(folder),
        resume=resume,
        observer=events,
        should_stop=lambda: 0 < stop_after <= len(events.of("step")),
        process_group=process_group,
    )
    return result, events


def main() -> None:
    with join(Processes.attend(), "cpu", SECONDS) as process_group:
        while (case := process_group.broadcast(None, "case")) is not None:
            if not case:
                _broadcast(process_group)
            elif len(case) == 1:
                _shards(process_group, *case)
            else:
                _train(process_group, case[0], Path(case[1]), *case[2:])


if __name__ == "__main__":
    main()
