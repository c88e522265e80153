"""Multi-process training and FSDP2 sharding. No other module uses torch.distributed.

Processes meet through torch's key-value store on rank 0, located through RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
(torchrun, srun), a loopback port (local launcher), or an existing process group (Ray Train). The first failing process
stores a failure record. Its connections close, the next exchange fails in other processes, and they read the record
for a reason. Objects are pickled between processes within one run, which trust each other.
"""

from __future__ import annotations

import copy
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from posttrain.errors import CheckpointError, PeerFailure, PosttrainError, RunFailure, UsageError, first_line
from posttrain.models.forward.actor_critic import ActorCritic
from posttrain.models.forward.forward import Forward
from posttrain.models.forward.gradient_checkpointing import checkpointed_layers
from posttrain.models.load import choose_device
from posttrain.process_group import ProcessGroup, Within, local_rank, own_part, whole

T = TypeVar("T")
JOIN_SECONDS = 600.0  # torch imports slowly on a busy machine
RECORD_SECONDS = 10.0  # allowed delay between a closed connection and its failure record
TASK, FAILURE, ARRIVED = "task", "failure", "arrived"


class Processes(ProcessGroup):
    """Process group with a shared store; this process has rank ``rank``.

    Exchanges raise ``PeerFailure`` if another process fails, exits or times out. ``noticed``: this process has seen
    another failure and is shutting down.
    """

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self.rank = rank
        self.size = size
        self.store = store
        self.noticed = False

    @classmethod
    def open(cls, size: int, host: str = "127.0.0.1") -> Processes:
        """Create rank 0 with a store on a free port.

        Listens only on ``host``, while torch would listen on all addresses.
        """
        listening = socket.create_server((host, 0))
        port = int(listening.getsockname()[1])
        descriptor = listening.detach()
        store = dist.TCPStore(host, port, size, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
        return cls(0, size, store)

    @classmethod
    def attend(cls) -> Processes:
        """Join through the environment variables, or through an open process group.

        Raises:
            UsageError: missing variables, port in use, or no server listening.
        """
        if dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size(), dist.distributed_c10d._get_default_store())
        named = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if missing := [name for name in named if not os.environ.get(name)]:
            raise UsageError(f"RANK is set, but {', '.join(missing)} missing; torchrun sets all of these")
        try:
            store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=JOIN_SECONDS)))
        except (RuntimeError, ValueError, TimeoutError) as error:
            reason = first_line(error)
            if "EADDRINUSE" in str(error):
                reason = "the port is in use"
            raise UsageError(
                "MASTER_ADDR and MASTER_PORT: processes cannot connect at "
                f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}: {reason}. Use a free port on a machine "
                "reachable from all processes"
            ) from error
        return cls(rank, size, store)

    def give(self, task: Mapping[str, object]) -> None:
        """Publish the task for other ranks (rank 0)."""
        self.store.set(TASK, json.dumps(task))

    def take(self) -> dict[str, Any]:
        """Wait for the task from rank 0."""
        try:
            self.store.wait([TASK], timedelta(seconds=JOIN_SECONDS))
        except RuntimeError as error:
            raise PeerFailure(f"{self}: rank 0 sent no task: {first_line(error)}") from error
        return dict(json.loads(self.store.get(TASK)))

    def fail(self, rank: int, message: str, exit_code: int) -> None:
        """Record a failed rank. Only the first record is kept."""
        with suppress(RuntimeError):  # rank 0 and its store may be gone
            self.store.compare_set(FAILURE, "", json.dumps([f"rank {rank} of {self.size}: {message}", exit_code]))

    def failure(self, seconds: float = 0.0) -> PeerFailure | None:
        """Read the first failure record, waiting up to ``seconds``; None if absent."""
        deadline = time.monotonic() + seconds
        with suppress(RuntimeError):
            while not self.store.check([FAILURE]):
                if time.monotonic() >= deadline:
                    return None
                time.sleep(0.05)
            return PeerFailure(*json.loads(self.store.get(FAILURE)))
        return None

    def wait_for_all(self) -> None:
        """Wait for all processes to join, checking for failures (rank 0).

        Raises:
            PeerFailure: a process failed or did not join in time.
        """
        num_here = self.store.add(ARRIVED, 1)
        deadline = time.monotonic() + JOIN_SECONDS
        while self.is_main and num_here < self.size:
            if (failure := self.failure(0.05)) is not None:
                raise failure
            if time.monotonic() > deadline:
                raise PeerFailure(
                    f"{self.size - num_here} of {self.size} processes did not join within {JOIN_SECONDS:g} s"
                )
            num_here = self.store.add(ARRIVED, 0)

    def gather(self, mine: Sequence[T], what: str) -> list[T]:
        parts: list[Any] = [None] * self.size
        with self._exchange(what):
            dist.all_gather_object(parts, (what, list(mine)))
        for rank, (theirs, _) in enumerate(parts):
            if theirs != what:  # internal bug, or diverging processes
                raise RunFailure(f"rank {self.rank} is at {what!r} while rank {rank} is at {theirs!r}")
        lists = [part for _, part in parts]
        return [lists[i % self.size][i // self.size] for i in range(sum(map(len, lists)))]

    def add(self, tensors: Sequence[Tensor], what: str) -> None:
        with self._exchange(what), torch.no_grad():
            for tensor in tensors:
                total = tensor.contiguous()
                dist.all_reduce(total)
                tensor.copy_(total)

    def broadcast(self, value: T, what: str) -> T:
        self.gather([], what)  # detects mismatched calls early; otherwise both processes would block
        sent: list[Any] = [None]
        if self.is_main:
            sent = [value]
        with self._exchange(what):
            dist.broadcast_object_list(sent, src=0)
        received: T = sent[0]
        return received

    def agree(self, flag: bool, what: str) -> bool:
        return any(self.gather([flag], what))

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        own = local_rank() or 0
        last = max(self.gather([own], "places on a machine"))
        for _ in range(own):
            self.agree(False, "turns to load")
        yield
        for _ in range(last - own + 1):
            self.agree(False, "turns to load")

    def first_failure(self) -> PeerFailure | None:
        """Find the first failure record after a failed exchange, allowing for delays."""
        self.noticed = True
        return self.failure(RECORD_SECONDS)

    @contextmanager
    def _exchange(self, what: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            raise self.first_failure() or PeerFailure(
                f"{self}: the exchange of {what} failed after {time.monotonic() - started:.0f} s: {first_line(error)}. "
                "If another process is just slow, increase scale.timeout_seconds"
            ) from error

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}"


def check_devices(device: str, num_processes: int) -> None:
    """Check that enough GPUs exist for local processes if ``device`` (``model.device``) uses GPUs.

    Raises:
        UsageError: too few GPUs, or Apple GPUs, which cannot exchange tensors.
    """
    kind = choose_device(device).type
    there = torch.cuda.device_count()
    if kind == "mps" and num_processes > 1:
        raise UsageError(
            f"scale.processes: {num_processes}, but a Mac GPU (model.device mps) supports only 1; set 1, or use cpu"
        )
    if kind == "cuda" and num_processes > there:
        raise UsageError(
            f"scale.processes: {num_processes} on this machine, but torch finds {there} "
            f"GPU{'s' if there != 1 else ''}; give at most one process per GPU, or model.device cpu"
        )


@contextmanager
def join(process_group: Processes, device: str, timeout_seconds: float) -> Iterator[Processes]:
    """Join the process group inside the block. An error ends all processes.

    Args:
        device: ``model.device``. Uses NCCL between GPUs and gloo between CPUs.
        timeout_seconds: maximum duration for an exchange.

    Raises:
        UsageError: no GPU for this process.
        PeerFailure: another process failed.
    """
    try:
        _open_group(process_group, device, timeout_seconds)
        try:
            yield process_group
            process_group.agree(False, "end of the run")  # rank 0 holds the store and stops other ranks
        finally:
            dist.destroy_process_group()
    except BaseException as error:
        # FSDP2 gathers layers internally; its errors arrive here unchanged.
        if isinstance(error, RuntimeError):
            failure = process_group.first_failure()
            if failure is not None:
                raise failure from error
        if not isinstance(error, PeerFailure):
            what = f"{type(error).__name__}: {error}"
            if isinstance(error, PosttrainError):
                what = str(error)
            process_group.fail(process_group.rank, what, getattr(error, "exit_code", RunFailure.exit_code))
        raise


def _open_group(process_group: Processes, device: str, timeout_seconds: float) -> None:
    kind = choose_device(device).type
    index = local_rank() or 0
    num_here = index + 1  # lower bound
    backend = "gloo"
    if kind == "mps":
        num_here = process_group.size
    check_devices(device, num_here)
    if kind == "cuda":
        torch.cuda.set_device(index)
        backend = "cpu:gloo,cuda:nccl"
    process_group.wait_for_all()
    if dist.is_initialized():
        return
    try:
        dist.init_process_group(
            backend=backend,
            store=dist.PrefixStore("group", process_group.store),
            rank=process_group.rank,
            world_size=process_group.size,
            timeout=timedelta(seconds=timeout_seconds),
        )
    except RuntimeError as error:
        raise process_group.failure() or PeerFailure(
            f"{process_group} cannot reach other processes: {first_line(error)}"
        ) from error


class Root(torch.nn.Module):
    """FSDP2 root module: a model with its head, if any.

    ``forward`` runs an arbitrary computation, so all computations trigger FSDP2 hooks that gather weights and reduce
    gradients.
    """

    def __init__(self, model: torch.nn.Module, head: torch.nn.Module | None) -> None:
        super().__init__()
        self.model = model
        self.head = head

    def forward(self, compute: Callable[[], T]) -> T:
        return compute()


class Shards:
    """FSDP2-sharded trained weights, gradients and optimizer moments.

    If the trainer samples with the model, shards are used only for gradients, and an unsharded model remains for
    everything else: ``gather`` refreshes it after updates, ``scatter`` refreshes shards after loading. Otherwise
    (``keeps_whole`` False) the model is sharded in place from CPU memory, and forward passes gather it layer by
    layer. ``within`` then runs a computation with gathered weights.
    """

    model: torch.nn.Module
    heads: dict[str, torch.nn.Module]
    forward: Forward | ActorCritic
    within: Within | None = None

    def __init__(self, process_group: ProcessGroup, device: torch.device, *, keeps_whole: bool = True) -> None:
        self._mesh = init_device_mesh(device.type, (process_group.size,))
        self.keeps_whole = keeps_whole
        self._pairs: list[tuple[Tensor, Any]] = []

    def cut(self, whole: Forward | ActorCritic, heads: dict[str, torch.nn.Module]) -> None:
        """Shard the models used by the objective, including heads and critics, without communication."""
        self.model = whole.model
        self.heads = heads
        if self.keeps_whole:
            self.model = copy.deepcopy(whole.model)
            self.heads = {name: copy.deepcopy(module) for name, module in heads.items()}
        if isinstance(whole, ActorCritic):
            critic = self._of_model(whole.critic, self.heads["critic"])
            self.forward = ActorCritic(self._of_model(whole.policy, self.model), critic)
        else:
            self.forward = self._of_model(whole, self.model)
        if not self.keeps_whole:
            return
        modules = [(whole.model, self.model)]
        for name in heads:
            modules.append((heads[name], self.heads[name]))
        for module, sharded in modules:
            pairs = zip(module.parameters(), sharded.parameters(), strict=True)
            self._pairs += [(plain, shard) for plain, shard in pairs if plain.requires_grad]

    def _of_model(self, whole: Forward, model: torch.nn.Module) -> Forward:
        forward = whole
        if self.keeps_whole:
            forward = copy.copy(whole)
        forward.model = model
        if whole.head is not None:
            forward.head = self.heads["head"]  # type: ignore[assignment]
        self.part(forward)
        return forward

    def part(self, forward: Forward) -> None:
        """Shard a model and its head in place."""
        root = Root(forward.model, forward.head)
        for part in (*checkpointed_layers(forward.model), root):
            fully_shard(part, mesh=self._mesh)
            # Plain sum: loss weights already cover the batch across all processes, and gloo supports only sums.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
        forward.root = partial(_within, root)

    def choose_paths(self, policy: Forward) -> None:
        """Choose computation paths again after in-place sharding; ``policy`` is the language model's forward pass."""
        if self.keeps_whole:
            return
        forward = self.forward
        others: list[Forward] = []
        if isinstance(forward, ActorCritic):
            others = [forward.critic]
            forward = forward.policy
        self.within = forward.root
        policy.root = forward.root
        for each in dict.fromkeys([forward, policy, *others]):
            each.choose_path()

    @torch.no_grad()
    def gather(self) -> None:
        """Copy shards into the unsharded model."""
        for plain, shard in self._pairs:
            plain.copy_(shard.full_tensor())

    @torch.no_grad()
    def scatter(self) -> None:
        """Copy the unsharded model into shards."""
        for plain, shard in self._pairs:
            self.fill(shard, plain.detach())

    @torch.no_grad()
    def fill(self, live: Tensor, tensor: Tensor) -> None:
        """Copy an unsharded tensor, identical in all processes, into a model tensor (sharded or not)."""
        own = tensor
        if isinstance(live, DTensor):
            own = part_of(tensor.to(live.device), live)
        own_part(live).copy_(own_part(own))

    @torch.no_grad()
    def whole(self, tensors: Mapping[str, Tensor], is_kept: Callable[[str], bool]) -> dict[str, Tensor]:
        """Gather unsharded tensors on CPU one at a time. Each process keeps only requested tensors."""
        gathered = ((name, whole(tensor)) for name, tensor in tensors.items())
        return {name: full.cpu() for name, full in gathered if is_kept(name)}


def _within(root: Any, compute: Callable[[], T]) -> T:
    """Run a computation in the root's forward. Without gradients, reshard explicitly, because no backward pass will."""
    computed: T = root(compute)
    if not torch.is_grad_enabled():
        root.reshard()
    return computed


def part_of(tensor: Tensor, like: Any) -> DTensor:
    """Shard a tensor, identical in all processes, like an existing one."""
    return distribute_tensor(tensor, like.device_mesh, like.placements)


def save_shards(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write tensors to safetensors collectively. Each process writes its shards.

    Raises:
        OSError: write failed in some process.
    """
    try:
        dcp.save(dict(tensors), storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    except dcp.api.CheckpointException as error:
        causes = (f"rank {rank}: {first_line(cause)}" for rank, (cause, _) in error.failures.items())
        raise OSError("; ".join(causes)) from error


class StoredShards(Mapping[str, Tensor]):
    """Lazy mapping over tensors written by ``save_shards``. Tensors are read unsharded on access.

    Raises:
        CheckpointError: incomplete or unreadable tensor files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with self._explained() as reader:
            self._about: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
        for name, about in self._about.items():
            if about.size.numel() != sum(chunk.sizes.numel() for chunk in about.chunks):
                raise CheckpointError(f"{folder}: rows of {name} are missing; this checkpoint is incomplete")

    @contextmanager
    def _explained(self) -> Iterator[HuggingFaceStorageReader]:
        try:
            yield HuggingFaceStorageReader(str(self._folder))
        except (SafetensorError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, OSError) as error:
            raise CheckpointError(f"{self._folder} contains no optimizer tensors: {first_line(error)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._about))

    def __len__(self) -> int:
        return len(self._about)

    def __getitem__(self, name: str) -> Tensor:
        about = self._about[name]
        tensor = torch.empty(about.size, dtype=about.properties.dtype)
        with self._explained() as reader:
            dcp.load({name: tensor}, storage_reader=reader, no_dist=True)
        return tensor
