"""The processes that train one run: started here, by torchrun or by srun; rank 0 gives the others their task."""

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

FOLLOW = "__follow"  # the command of a process that trains with others
LAST_SECONDS = 40.0  # for this process to notice that another one ended, where it waits for that one


def num_started() -> int | None:
    """Return how many processes torchrun or srun has started for the run; None where none of them did."""
    world_size = os.environ.get("WORLD_SIZE", "")
    if "RANK" in os.environ and world_size.isdecimal():
        return int(world_size)
    return None


def is_follower() -> bool:
    """Return whether this process is one of those, and not the first."""
    return num_started() is not None and os.environ["RANK"] != "0"


def check_scale(scale: ScaleSection) -> None:
    """Refuse a run of which this process cannot be the first.

    Raises:
        UsageError: the processes that torchrun has started are others than the recipe wants, or there are none.
    """
    there = num_started()
    if scale.launcher == "ray" and there is not None:
        raise UsageError(
            "scale.launcher: ray places all processes of a run itself, and torchrun or srun has started this one (RANK "
            "is in the environment); start the command alone, or use launcher torchrun"
        )
    if scale.sharding != "none" and (there or scale.processes) == 1:
        raise UsageError(
            f"scale.sharding: {scale.sharding} spreads a model over several processes, and this is one; give "
            "scale.processes, or sharding none"
        )
    if scale.launcher == "torchrun" and there is None:
        raise UsageError(
            "scale.launcher: torchrun has not started this process (RANK is not in the environment); use "
            "`torchrun --nproc-per-node N -m -- posttrain train ...`, or launcher local"
        )
    if is_follower():
        raise UsageError(
            f"this is process {os.environ.get('RANK')} of {there} that torchrun started, and only `posttrain train` "
            "and `posttrain runs resume` work in several; start this command without it"
        )
    if there is not None and scale.processes not in (1, there):
        raise UsageError(
            f"scale.processes: {scale.processes}, but torchrun has started {there}; leave the key out, or give the same"
        )


def task_of(recipe: Recipe, folder: Path, resume: bool, *, path: bool = True) -> dict[str, Any]:
    """Return the task of processes that read no command line, as plain data; ``path``: with this one's ``sys.path``."""
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
    """Train, inside the block, with all processes of a run, of which this is the first: torchrun's, or own ones."""
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
    """Train as one of the other processes of a run; returns the exit code.

    Raises:
        PosttrainError: this process or another failed.
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
    """Train by the ``task`` of a run as one of several processes; ``shared``: as of ``posttrain.training.loop``."""
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
    """Start ranks 1 and up of a run on this machine, for the time of the block; this process is rank 0.

    They keep nothing, so they are killed behind the block. A rank that ends before leaves its record. Its output is in
    ``log-RANK.txt`` of the ``folder``.
    """
    import torch

    num_threads = torch.get_num_threads()
    own = threads_per_child(max(1, num_threads // process_group.size))
    shared = {"LOCAL_WORLD_SIZE": str(process_group.size)}
    if "lo" in (name for _, name in socket.if_nameindex()):
        shared["GLOO_SOCKET_IFNAME"] = "lo"  # they talk within this machine alone
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
    """Leave a record of the first rank that ends with an error; end this process if it hangs for that reason."""
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
