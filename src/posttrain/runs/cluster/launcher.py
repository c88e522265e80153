"""The launcher ``ray``: all processes of a run are on a cluster; the one that was started places and watches them.

It holds the store in which they meet (``train/distributed.py``), so that a task, what rank 0 reports and why a process
failed outlive each of them, and keeps the run's lock, status and log. Metrics, rollouts and checkpoints are written by
rank 0, wherever that is, which is why the run's folder must be one that all machines share. Ray starts processes and
says which are gone; tensors travel by torch.distributed alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.engines.vllm.placed import placed_servers
from posttrain.errors import PeerFailure, RunFailure, UsageError
from posttrain.recipes.recipe import Recipe
from posttrain.runs.children import End
from posttrain.runs.cluster.reports import Reading
from posttrain.runs.cluster.servers import Servers
from posttrain.store.checkpoint_files import checkpoint_steps
from posttrain.train.distributed import Meeting
from posttrain.train.files import Observer
from posttrain.train.loop import TrainResult

if TYPE_CHECKING:
    from posttrain.runs.cluster.ray import Cluster, Ranks, Room

RESTARTS = 3
LOOK_SECONDS = 0.2
SETTLE_SECONDS = 20.0  # behind the end of one process, for the others to say or to show why; a dead node takes Ray 17


def train_on_cluster(
    cluster: Cluster, task: Mapping[str, Any], recipe: Recipe, observer: Observer, should_stop: Callable[[], bool]
) -> TrainResult:
    """Train as ``task`` (``runs/launch.py``) says, in ``scale.processes`` processes of a cluster; again from the last
    checkpoint where one of them is lost, ``scale.restarts`` times at most. Servers that live are kept for them.

    Args:
        observer: is told what rank 0 reports, as if the loop were in this process.

    Raises:
        UsageError: no room in the cluster, or what a process says of what was asked for.
        PeerFailure: a process failed, with its exit code; or one was lost once too often.
    """
    names = placed_servers(recipe)
    task = {**task, "servers": bool(names)}
    with cluster.room(recipe.scale.processes, recipe.model.device, should_stop, names) as room:
        attempt = partial(_attempt, room, Servers(names, room.start_server))
        return _until_trained(attempt, cluster, task, recipe, observer, should_stop)


def _until_trained(
    attempt: Callable[..., TrainResult],
    cluster: Cluster,
    task: Mapping[str, Any],
    recipe: Recipe,
    observer: Observer,
    should_stop: Callable[[], bool],
) -> TrainResult:
    restarts = RESTARTS if recipe.scale.restarts is None else recipe.scale.restarts
    for lost in range(restarts + 1):
        try:
            return attempt(task, recipe, observer, should_stop)
        except PeerFailure as loss:
            if not loss.is_loss or should_stop():
                raise
            cluster.cause = str(loss)
            if lost == restarts:
                often = f"{restarts} time{'s' * (restarts != 1)}"
                raise PeerFailure(f"{loss}. It was started again {often} (scale.restarts)") from None
        task = {**task, "resume": True}
        saved = max(checkpoint_steps(Path(task["folder"]) / "checkpoints"), default=None)
        where = "the beginning" if saved is None else f"the checkpoint of step {saved}"
        message = f"{cluster.cause}. All processes start again from {where} ({lost + 1} of {restarts} times)"
        observer("notice", {"message": message})
    raise AssertionError("every way out of the loop is above")


def _attempt(
    room: Room,
    servers: Servers,
    task: Mapping[str, Any],
    recipe: Recipe,
    observer: Observer,
    should_stop: Callable[[], bool],
) -> TrainResult:
    size, folder = recipe.scale.processes, Path(task["folder"])
    with room.ranks(should_stop) as ranks:
        meeting = Meeting.open(size, room.cluster.host)
        meeting.give(task)
        ranks.start(folder, meeting.port)
        reading = Reading(meeting, recipe, observer)
        while ranks.working and not ranks.failed and reading.result is None:
            ranks.look(LOOK_SECONDS, should_stop())
            reading.read()
            servers.look(meeting)
        _settle(ranks, meeting, reading)
        if reading.result is not None:  # a process that ends badly behind its work takes nothing back
            return TrainResult(**reading.result)
    if should_stop() and not reading.started:
        raise KeyboardInterrupt
    raise _failure(meeting, ranks.ended, reading.started)


def _settle(ranks: Ranks, meeting: Meeting, reading: Reading) -> None:
    """All is done, or one process has ended badly; wait for the others, which it ends, and for what tells why."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while ranks.working and time.monotonic() < deadline:
        for rank, end in lost_ranks(ranks.ended).items():
            meeting.fail(rank, end.how, RunFailure.exit_code)
        if 0 not in ranks.working and lost_ranks(ranks.ended):  # the others save nothing
            return
        ranks.look(LOOK_SECONDS, False)
        reading.read()


def lost_ranks(ended: Mapping[int, End]) -> dict[int, End]:
    """Those that a signal ended, or whose machine is gone."""
    return {rank: end for rank, end in ended.items() if end.code is None or end.code < 0}


def _failure(meeting: Meeting, ended: Mapping[int, End], started: bool) -> PeerFailure | UsageError:
    """Why it ended: a process that is lost before what the others make of that; the run's own error before its end."""
    failure, size = meeting.failure(), meeting.size
    own = None if failure is None else str(failure)
    for rank, end in lost_ranks(ended).items():
        how = f"rank {rank} of {size}: {end.how}"
        if own is None or own == how or not own.startswith(f"rank {rank} of "):
            return PeerFailure(how, is_loss=True)
    if failure is not None:
        return UsageError(own) if failure.exit_code == UsageError.exit_code else failure
    rank, end = next(((r, e) for r, e in sorted(ended.items()) if e.code), (0, End(0, "it ended without a result")))
    how = f"rank {rank} of {size}: {end.how}"  # an exchange that failed; or a process that cannot be started at all
    return PeerFailure(how, end.code or RunFailure.exit_code, is_loss=started)
