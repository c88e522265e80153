"""Distributed processes for one run, started locally or by torchrun or srun. Rank 0 sends the task to all ranks."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.errors import INTERRUPTED, RunFailure, UsageError
from posttrain.process_group import SINGLE_PROCESS, ProcessGroup
from posttrain.recipes.recipe import Recipe, validate_recipe
from posttrain.recipes.sections import ScaleSection
from posttrain.runs.children import Child, end_children, start_child, stop_on_signals, threads_per_child
from posttrain.training.files import RunFiles
from posttrain.untrusted import declare_code, declare_from_command_line, declared_code, trusts_remote_code

if TYPE_CHECKING:
    from posttrain.training.distributed import Processes
    from posttrain.training.loop import TrainResult

FOLLOW = "__follow"  # command for ranks other than 0
LAST_SECONDS = 40.0  # grace period to notice that a peer ended while waiting for it


def num_started() -> int | None:
    """Read the world size set by torchrun or srun; None if neither launched this process."""
    world_size = os.environ.get("WORLD_SIZE", "")
    if "RANK" in os.environ and world_size.isdecimal():
        return int(world_size)
    return None


def is_follower() -> bool:
    """Check if torchrun or srun launched this process with a rank other than 0."""
    return num_started() is not None and os.environ["RANK"] != "0"


def check_scale(scale: ScaleSection) -> None:
    """Check that this process can be rank 0 of the run.

    Raises:
        UsageError: torchrun's processes do not match the recipe, or were not started.
    """
    there = num_started()
    if scale.launcher == "ray" and there is not None:
        raise UsageError(
            "scale.launcher: ray starts all processes itself, but torchrun or srun started this one (RANK is set in "
            "the environment); run the command without them, or use launcher torchrun"
        )
    if scale.sharding != "none" and (there or scale.processes) == 1:
        raise UsageError(
            f"scale.sharding: {scale.sharding} shards the model, but this run has a single process; set "
            "scale.processes, or use sharding none"
        )
    if scale.launcher == "torchrun" and there is None:
        raise UsageError(
            "scale.launcher: torchrun did not start this process (RANK is not set in the environment); use "
            "`torchrun --nproc-per-node N -m -- posttrain train ...`, or launcher local"
        )
    if is_follower():
        raise UsageError(
            f"torchrun started {there} processes (this is rank {os.environ.get('RANK')}), but only `posttrain train` "
            "and `posttrain runs resume` support several processes; run this command without torchrun"
        )
    if there is not None and scale.processes not in (1, there):
        raise UsageError(
            f"scale.processes: {scale.processes}, but torchrun started {there}; omit the key, or use the same number"
        )


def task_of(recipe: Recipe, folder: Path, resume: bool, *, path: bool = True) -> dict[str, Any]:
    """Build the task for ranks that read no command line, as plain data. ``path``: include ``sys.path``."""
    places = []
    if path:
        places = list(sys.path)
    return {
        "recipe": recipe.dump(),
        "folder": str(folder.resolve()),
        "resume": resume,
        "scale": (recipe.model.device, recipe.scale.timeout_seconds),
        "code": declared_code(),
        "trust_remote_code": trusts_remote_code(),
        "path": places,
    }


@contextmanager
def join_processes(recipe: Recipe, folder: Path, resume: bool) -> Iterator[ProcessGroup]:
    """Join all ranks for the duration of the block, as rank 0: torchrun's ranks, or locally started ones."""
    started = num_started()
    size = started or recipe.scale.processes
    if size == 1:
        yield SINGLE_PROCESS
        return
    from posttrain.training.distributed import Processes, check_devices, join

    task = task_of(recipe, folder, resume, path=started is None)
    others: AbstractContextManager[None]
    if started is None:
        check_devices(recipe.model.device, size)
        process_group = Processes.open(size)
        others = _start_ranks(process_group, folder)
    else:
        process_group = Processes.attend()
        others = nullcontext()
    process_group.give(task)
    with others, join(process_group, *task["scale"]):
        yield process_group


def follow() -> int:
    """Train as a rank other than 0; returns the exit code.

    Raises:
        PosttrainError: any rank failed.
    """
    from posttrain.training.distributed import Processes, join

    process_group = Processes.attend()
    task = process_group.take()
    with stop_on_signals() as should_stop, join(process_group, *task["scale"]):
        result = train_task(task, process_group, should_stop=should_stop)
    if result.reason == "finished":
        return 0
    return INTERRUPTED


def train_task(task: Mapping[str, Any], process_group: ProcessGroup, **shared: Any) -> TrainResult:
    """Train a ``task`` as one rank. ``shared``: passed to ``posttrain.training.loop``."""
    sys.path += [place for place in task["path"] if place not in sys.path]
    for name, folders in task["code"].items():
        declare_code(name, *folders)
    declare_from_command_line((), trust_remote_code=task["trust_remote_code"])
    recipe = validate_recipe(task["recipe"], is_own=False).resolve()
    from posttrain.training.loop import run_training

    return run_training(
        recipe, RunFiles.within(task["folder"]), resume=task["resume"], process_group=process_group, **shared
    )


@contextmanager
def _start_ranks(process_group: Processes, folder: Path) -> Iterator[None]:
    """Start ranks 1 and up on this machine for the duration of the block; this process is rank 0.

    They hold no state, so they are killed after the block. If a rank ends early, the failure is recorded. Output goes
    to ``log-RANK.txt`` in ``folder``.
    """
    import torch

    num_threads = torch.get_num_threads()
    own = threads_per_child(max(1, num_threads // process_group.size))
    shared = {"LOCAL_WORLD_SIZE": str(process_group.size)}
    if "lo" in (name for _, name in socket.if_nameindex()):
        shared["GLOO_SOCKET_IFNAME"] = "lo"  # communicate only within this machine
    before = {name: os.environ[name] for name in shared if name in os.environ}
    place = {
        "WORLD_SIZE": str(process_group.size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(process_group.store.port),
    }
    children: dict[int, Child] = {}
    ended = threading.Event()
    try:
        os.environ.update(shared)
        torch.set_num_threads(own)
        for rank in range(1, process_group.size):
            settings = {**place, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, "-m", "posttrain", FOLLOW]
            children[rank] = start_child(command, folder / f"log-{rank}.txt", f"rank {rank}", own, settings)
        threading.Thread(target=_watch_ranks, args=(process_group, children, ended), name="ranks", daemon=True).start()
        yield
    finally:
        ended.set()
        end_children(children.values(), 0.0)
        for child in children.values():
            with suppress(OSError):
                if child.log.stat().st_size == 0:
                    child.log.unlink()
        torch.set_num_threads(num_threads)
        for name in shared:
            os.environ.pop(name)
        os.environ.update(before)


def _watch_ranks(process_group: Processes, children: Mapping[int, Child], ended: threading.Event) -> None:
    """Record the first failing rank. If this process then hangs waiting for it, exit."""
    while not ended.wait(0.1):
        for rank, child in children.items():
            code = child.process.poll()
            if not code:
                continue
            process_group.fail(rank, child.describe_end(code), RunFailure.exit_code)
            if ended.wait(LAST_SECONDS) or process_group.noticed:
                return
            failure = process_group.failure()
            if failure:
                os.write(2, f"posttrain: {failure}\n".encode())
                os._exit(failure.exit_code)
            return
