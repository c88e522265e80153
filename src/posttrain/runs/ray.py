"""Ray integration, the only module that imports Ray. Ray Train places, monitors and restarts a run's ranks."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError, get_context
from ray.train.torch import TorchConfig, TorchTrainer
from ray.util.queue import Queue

from posttrain import __version__
from posttrain.errors import PeerFailure, PosttrainError, UsageError, first_line
from posttrain.recipes.recipe import Recipe
from posttrain.recipes.sections import ScaleSection
from posttrain.runs.processes import train_task
from posttrain.training.distributed import Processes, join
from posttrain.training.files import Observer
from posttrain.training.loop import TrainResult

ADDRESS = "RAY_ADDRESS"
CONNECT_SECONDS = 20.0
RESTARTS = 3
STOP = "stop"  # file in the run's folder that tells rank 0 to save and exit
# Environment variables passed to workers, except secrets.
_PASSED = ("POSTTRAIN_", "HF_", "NCCL_", "GLOO_", "TORCH_", "OMP_", "MKL_", "TOKENIZERS_", "VLLM_")
_SECRET = re.compile(r"(^|_)(TOKEN|KEY|SECRET|PASSWORD)(_|$)")


def train_on_cluster(
    task: Mapping[str, Any], recipe: Recipe, observer: Observer, should_stop: Callable[[], bool]
) -> TrainResult:
    """Train a task (``runs/processes.py``) in ``scale.processes`` workers.

    After losing a worker, restart from the last checkpoint, up to ``scale.restarts`` times. ``observer`` gets rank 0's
    events.

    Raises:
        UsageError: no cluster, insufficient resources, or a worker refused the recipe.
        PeerFailure: a process failed, or workers were lost too often.
    """
    folder = Path(task["folder"])
    ends: dict[str, Any] = {}  # "result", the run's first "error", and the "failure" raised by Ray's trainer
    with _joined():
        events = Queue(actor_options={"num_cpus": 0})
        trainer = _make_trainer(task, recipe.scale, recipe.model.device, events)

        def fit() -> None:
            try:
                trainer.fit()
            except (TrainingFailedError, RayError, RuntimeError) as error:
                ends["failure"] = error

        def read() -> None:
            while not events.empty():
                event, info = events.get()
                if event in ("result", "error"):
                    ends.setdefault(event, info)
                    continue
                if event == "start":
                    info = {**info, "recipe": recipe}
                observer(event, info)

        thread = threading.Thread(target=fit, name="ray", daemon=True)
        thread.start()
        while thread.is_alive() and "error" not in ends:
            thread.join(0.2)
            read()
            if should_stop():
                (folder / STOP).touch()
        thread.join(10.0)  # give other ranks time to save; otherwise Ray waits for them and restarts all
        (folder / STOP).unlink(missing_ok=True)
        read()
    if "error" in ends:
        message, code = ends["error"]
        if code == UsageError.exit_code:
            raise UsageError(message)
        raise PeerFailure(message, code)
    if "result" not in ends:
        raise PeerFailure(_cause(ends.get("failure"), recipe.scale.processes))
    return TrainResult(**ends["result"])


def _make_trainer(task: Mapping[str, Any], scale: ScaleSection, device: str, events: Queue) -> TorchTrainer:
    """Configure Ray's trainer for a task: workers, backend, environment, and restarts."""
    passed = {}
    for name, value in os.environ.items():
        if name.startswith(_PASSED) and not _SECRET.search(name):
            passed[name] = value
    restarts = scale.restarts
    if restarts is None:
        restarts = RESTARTS
    on_gpus = _takes_gpus(device, scale.processes)
    backend = "gloo"
    if on_gpus:
        backend = "cpu:gloo,cuda:nccl"
    return TorchTrainer(
        _work,
        train_loop_config={"task": {**task, "version": __version__}, "events": events},
        torch_config=TorchConfig(backend, timeout_s=int(scale.timeout_seconds)),
        scaling_config=ScalingConfig(num_workers=scale.processes, use_gpu=on_gpus),
        run_config=RunConfig(
            name="ray",
            storage_path=str(Path(task["folder"])),
            failure_config=FailureConfig(max_failures=restarts),
            worker_runtime_env={"env_vars": passed, "working_dir": None},
        ),
    )


def _work(given: dict[str, Any]) -> None:
    """Train in a Ray worker. The run's own errors are reported and end it; any other error counts as a lost worker."""
    task = given["task"]
    events = given["events"]
    context = get_context()
    folder = Path(task["folder"])
    try:
        if task["version"] != __version__:
            raise UsageError(f"a node has posttrain {__version__}, but the command uses {task['version']}")
        if not (folder / "recipe.yaml").is_file():
            raise UsageError(
                f"the run folder {folder} is not shared with {socket.gethostname()}. All nodes read it and one writes "
                "it: set --runs-dir to shared storage mounted at the same path"
            )

        def report(event: str, info: Mapping[str, object]) -> None:
            events.put((event, {key: value for key, value in info.items() if key != "recipe"}))

        with join(Processes.attend(), *task["scale"]) as process_group:
            has_begun = process_group.broadcast((folder / "metrics.jsonl").is_file(), "earlier steps")
            observed: dict[str, Any] = {}
            if process_group.is_main:
                observed["observer"] = report
            if process_group.is_main and has_begun and not task["resume"]:
                again = "a process was lost and Ray restarted all workers: continuing from the newest checkpoint"
                report("notice", {"message": again})
            task = {**task, "resume": task["resume"] or has_begun}
            result = train_task(task, process_group, should_stop=(folder / STOP).is_file, **observed)
            if process_group.is_main:
                events.put(("result", asdict(result)))
    except PeerFailure:
        raise  # a peer was lost, or reports the cause
    except PosttrainError as error:
        rank = f"rank {context.get_world_rank()} of {context.get_world_size()}"
        events.put(("error", (f"{rank}: {error}", error.exit_code)))


def _cause(failure: Any, size: int) -> str:
    """Pick the first worker error that is not caused by another worker's failure."""
    if failure is None:
        return "Ray's workers ended without a result"
    by_rank: dict[int, BaseException] = getattr(failure, "worker_failures", {})
    causes = [(rank, getattr(error, "_base_exc", error)) for rank, error in sorted(by_rank.items())]
    causes.sort(key=lambda cause: isinstance(cause[1], PeerFailure))
    if causes:
        return f"rank {causes[0][0]} of {size}: {first_line(causes[0][1])}"
    return first_line(failure)


def _takes_gpus(device: str, size: int) -> bool:
    """Decide if workers use one GPU each. Refuse more workers than the cluster can hold."""
    resources = ray.cluster_resources()
    on_gpus = device.startswith("cuda") or (device == "auto" and resources.get("GPU", 0) >= 1)
    kind = "CPU"
    if on_gpus:
        kind = "GPU"
    if resources.get(kind, 0) < size:
        raise UsageError(
            f"scale.processes: {size} processes need {size} {kind}s, but the cluster at "
            f"{ray.get_runtime_context().gcs_address} has {resources.get(kind, 0):g}"
        )
    return on_gpus


@contextmanager
def _joined() -> Iterator[None]:
    """Connect to the cluster at RAY_ADDRESS for the duration of the block.

    Raises:
        UsageError: RAY_ADDRESS is missing or invalid, or no cluster responds.
    """
    address = os.environ.get(ADDRESS, "")
    if address != "auto" and not re.fullmatch(r"\[?[^\[\]/@]+\]?:[0-9]{1,5}", address):
        state = "is not set"
        if address:
            state = f"is {address!r}"
        raise UsageError(
            f"scale.launcher: ray needs the address of a cluster that includes this machine, but {ADDRESS} {state}. "
            f"Set it to the HOST:PORT printed by `ray start --head`, or to auto for the local cluster "
            "(docs/how-to/several-processes.md)"
        )
    try:
        if address != "auto":
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, OverflowError, RuntimeError, ValueError, RayError) as error:
        raise UsageError(
            f"{ADDRESS}: cannot join a Ray cluster at {address}: {first_line(error)}. Start one with `ray start "
            f"--head`, join from this machine with `ray start --address HOST:PORT`, and set {ADDRESS} to that address"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()
