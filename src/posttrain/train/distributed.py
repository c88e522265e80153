"""The one door to torch.distributed: the world of several processes that train one model together.

Processes find one another through a key-value store that rank 0 holds (``Meeting``): rank 0 says there what is to be
done, and whoever fails leaves its message there before it ends. The first message counts. The connections of a process
that ended close, so an exchange that the others are in, or come to next, fails at once; each then looks into the store
for the reason. A process that still works is waited for, ``scale.timeout_seconds`` at most.

Objects of our own travel pickled between the processes of one run, which trust one another as threads do.
"""

from __future__ import annotations

import copy
import ctypes
import json
import os
import socket
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from posttrain.errors import PeerFailure, PosttrainError, RunFailure, UsageError, first_line
from posttrain.models.forward.forward import ActorCritic, Forward
from posttrain.models.forward.gradient_checkpointing import checkpointed_layers
from posttrain.models.load import choose_device
from posttrain.world import Within, World, free_memory_bytes, local_rank, own_part, peak_resident_bytes, whole

T = TypeVar("T")
LOOPBACK = "127.0.0.1"
JOIN_SECONDS = 600.0  # importing torch on a busy machine takes its time
PATIENCE_SECONDS = 10.0  # for a message to come in behind the closed connection of whoever left it
BUCKET_ELEMENTS = 1 << 24  # tensors travel together, so many elements at a time
SPARED = 0.9  # the share of what is left of main memory that is taken
TASK, FAILURE, ARRIVED, FAREWELL = "task", "failure", "arrived", "farewell"


@dataclass
class Meeting:
    """Where the processes of a run find one another: a store that rank 0 holds, or who has started all of them.

    ``noticed``: this process has come upon the failure of another one, and is on its way out.
    """

    rank: int
    size: int
    store: Any
    noticed: bool = False

    @classmethod
    def open(cls, size: int, host: str = LOOPBACK) -> Meeting:
        """A store that this process holds, reached at ``host``'s address and a port that is free."""
        listening = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        port = int(listening.getsockname()[1])  # of this address alone, where torch would take all of the machine's
        store = dist.TCPStore(
            host, port, size, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        return cls(0, size, store)

    @classmethod
    def attend(cls) -> Meeting:
        """The store of which RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT of the environment tell.

        Raises:
            UsageError: they are incomplete, the port is in use, or nobody answers there.
        """
        named = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in named if not os.environ.get(name)]
        if missing:
            raise UsageError(f"the environment says RANK and no {', '.join(missing)}; torchrun sets all of them")
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        try:
            store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=JOIN_SECONDS)))
        except (dist.DistError, RuntimeError, ValueError, TimeoutError) as error:
            reason = "the port is in use" if "EADDRINUSE" in str(error) else first_line(error)
            raise UsageError(
                f"MASTER_ADDR and MASTER_PORT: the processes of the run cannot meet at {place}: {reason}. Give a "
                "free port of a machine that all of them reach"
            ) from error
        return cls(rank, size, store)

    @classmethod
    def of_group(cls) -> Meeting:
        """The store of the process group that whoever started the processes has opened."""
        return cls(dist.get_rank(), dist.get_world_size(), dist.distributed_c10d._get_default_store())

    @property
    def port(self) -> int:
        return int(self.store.port)

    def give(self, task: Mapping[str, Any]) -> None:
        """Rank 0: say what is to be done."""
        self.store.set(TASK, json.dumps(task))

    def take(self) -> dict[str, Any]:
        """The others: what rank 0 has said; waits for it."""
        try:
            self.store.wait([TASK], timedelta(seconds=JOIN_SECONDS))
        except (dist.DistError, RuntimeError) as error:
            raise PeerFailure(f"rank {self.rank} of {self.size}: rank 0 gives no task: {first_line(error)}") from error
        task: dict[str, Any] = json.loads(self.store.get(TASK))
        return task

    def fail(self, rank: int, message: str, exit_code: int) -> None:
        """Leave why a rank failed (``PeerFailure``); what was left first stays."""
        with suppress(dist.DistError, RuntimeError):  # rank 0, and the store with it, may be gone
            self.store.compare_set(FAILURE, "", json.dumps([f"rank {rank} of {self.size}: {message}", exit_code]))

    def failure(self) -> PeerFailure | None:
        """Why the first rank failed, if one has."""
        with suppress(dist.DistError, RuntimeError):
            if self.store.check([FAILURE]):
                return PeerFailure(*json.loads(self.store.get(FAILURE)))
        return None

    def wait_for_failure(self) -> PeerFailure | None:
        """The same, from a process that an exchange has failed in: what made it fail may take a moment to come in."""
        self.noticed = True
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (failure := self.failure()) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return failure

    def wait_for_all(self) -> None:
        """Until every process has come here; not longer than until one has failed.

        Raises:
            PeerFailure: one did not come.
        """
        deadline = time.monotonic() + JOIN_SECONDS
        num_here = self.store.add(ARRIVED, 1)
        while self.rank == 0 and num_here < self.size:
            failure = self.failure()
            if failure is not None:
                raise failure
            if time.monotonic() > deadline:
                missing = self.size - num_here
                raise PeerFailure(f"{missing} of {self.size} processes have not come in {JOIN_SECONDS:g} s")
            time.sleep(0.05)
            num_here = self.store.add(ARRIVED, 0)


def check_devices(device: str, num_processes: int) -> None:
    """Refuse more processes on this machine than it has GPUs, where ``device`` (``model.device``) takes GPUs.

    Raises:
        UsageError: there are fewer, or they are Apple's, between which no tensors travel.
    """
    there = torch.cuda.device_count()
    if (kind := choose_device(device).type) == "mps" and num_processes > 1:
        raise UsageError(f"scale.processes: {num_processes}, and a Mac's GPU (model.device mps) is for 1; or use cpu")
    if kind == "cuda" and num_processes > there:
        raise UsageError(
            f"scale.processes: {num_processes} on this machine, and torch sees {there} "
            f"GPU{'s' if there != 1 else ''}; give at most one process per GPU, or model.device cpu"
        )


@contextmanager
def join(meeting: Meeting, device: str, timeout_seconds: float) -> Iterator[World]:
    """Work together with the others of a meeting, inside the block; what ends it ends the others.

    Args:
        device: ``model.device``. On GPUs tensors travel by NCCL, and on CPUs by gloo.
        timeout_seconds: after which an exchange that does not come about is an error.

    Raises:
        UsageError: there is no GPU for this process.
        PeerFailure: another process failed.
    """
    try:
        world = _join(meeting, device, timeout_seconds)
        try:
            yield world
            world.agree(False, FAREWELL)  # rank 0 holds the store and ends the others
        finally:
            dist.destroy_process_group()
    except BaseException as error:
        # Layers in parts are gathered by torch itself, whose errors of an exchange come here as they are.
        failure = meeting.wait_for_failure() if isinstance(error, RuntimeError) else None
        if failure is not None:
            raise failure from error
        if not isinstance(error, PeerFailure):
            what = str(error) if isinstance(error, PosttrainError) else f"{type(error).__name__}: {error}"
            code = getattr(error, "exit_code", RunFailure.exit_code)
            meeting.fail(meeting.rank, what, code)
        raise


def _join(meeting: Meeting, device: str, timeout_seconds: float) -> Processes:
    chosen = choose_device(device)
    if chosen.type == "mps":
        check_devices(device, meeting.size)
    if chosen.type == "cuda":
        index = local_rank() or 0
        check_devices(device, index + 1)
        torch.cuda.set_device(index)
    meeting.wait_for_all()
    if dist.is_initialized():
        return Processes(meeting, timeout_seconds)
    try:
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo",
            store=dist.PrefixStore("group", meeting.store),
            rank=meeting.rank,
            world_size=meeting.size,
            timeout=timedelta(seconds=timeout_seconds),
        )
    except (dist.DistError, RuntimeError) as error:
        raise meeting.failure() or PeerFailure(
            f"rank {meeting.rank} of {meeting.size} cannot reach the others: {first_line(error)}"
        ) from error
    return Processes(meeting, timeout_seconds)


class Processes(World):
    """A world of several processes, of which this one is ``rank``.

    Every method raises ``PeerFailure`` if another process failed, ended, or did not come in time; the message names it.
    """

    def __init__(self, meeting: Meeting, timeout_seconds: float) -> None:
        self._meeting = meeting
        self.rank, self.size, self._timeout_seconds = meeting.rank, meeting.size, timeout_seconds
        self._num_exchanges = self._num_turns = 0

    def gather(self, mine: Sequence[T], what: str) -> list[T]:
        """See ``World.gather``."""
        parts: list[Any] = [None] * self.size
        with self._exchange(what):
            dist.all_gather_object(parts, (what, list(mine)))
        for rank, (theirs, _) in enumerate(parts):
            if theirs != what:  # our own bug, or processes that decided differently
                raise RunFailure(f"rank {self.rank} is at {what!r} while rank {rank} is at {theirs!r}")
        lists = [part for _, part in parts]
        return [lists[i % self.size][i // self.size] for i in range(sum(map(len, lists)))]

    def add(self, tensors: Sequence[Tensor], what: str) -> None:
        """See ``World.add``."""
        with self._exchange(what), torch.no_grad():
            for bucket in _buckets(tensors):
                flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
                dist.all_reduce(flat)
                for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                    tensor.copy_(part.view_as(tensor))

    def tell(self, value: T, what: str) -> T:
        """See ``World.tell``."""
        return self.gather([value if self.is_main else None], what)[0]  # type: ignore[return-value]

    def agree(self, flag: bool, what: str) -> bool:
        """See ``World.agree``."""
        return any(self.gather([flag], what))

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """See ``World.in_turn``. On each machine the first goes alone: by what it took, so many others go at a time."""
        self._num_turns += 1
        everywhere, store = f"turn {self._num_turns}", self._meeting.store
        here = f"{everywhere} of {socket.gethostname()}"
        with self._exchange("turns to load"):
            place = store.add(f"{here}: came", 1)
            self._count_on(f"{here}: left", lambda left: place - left <= (store.add(f"{here}: width", 0) or 1))
            store.set(f"at {self.rank}", json.dumps([self._num_exchanges - 1, "its turn"]))  # others wait for it
        try:
            yield
        finally:  # what this one fails of the next may fail of, too, and say itself
            with self._exchange("turns to load"):
                if place == 1:
                    width = int(SPARED * free_memory_bytes() / peak_resident_bytes())
                    store.add(f"{here}: width", max(1, width))
                store.add(f"{here}: left", 1)
        with self._exchange("the last turn to load"):
            store.add(everywhere, 1)
            self._count_on(everywhere, lambda left: left == self.size)

    def _count_on(self, key: str, is_enough: Callable[[int], bool]) -> None:
        """Wait until a count is enough, as long as it goes on within ``timeout_seconds``."""
        before, since = -1, time.monotonic()
        while True:
            failure = self._meeting.failure()  # asked for first: who fails has counted before
            if is_enough(count := self._meeting.store.add(key, 0)):
                return
            if count != before:
                before, since = count, time.monotonic()
            if failure is not None or time.monotonic() - since > self._timeout_seconds:
                raise TimeoutError
            time.sleep(0.02)

    @contextmanager
    def _exchange(self, what: str) -> Iterator[None]:
        self._num_exchanges += 1
        started = time.monotonic()
        try:
            self._meeting.store.set(f"at {self.rank}", json.dumps([self._num_exchanges, what]))
            yield
        except (dist.DistError, RuntimeError, TimeoutError) as error:
            raise self._explain(what, error, time.monotonic() - started) from error

    def _explain(self, what: str, error: Exception, seconds: float) -> PeerFailure:
        """Why an exchange failed: what the one that failed has left, or who has not come."""
        failure = self._meeting.wait_for_failure()
        if failure is not None:
            return failure
        here = f"rank {self.rank} of {self.size}"
        if seconds < self._timeout_seconds:
            return PeerFailure(f"{here}: another process ended during the exchange of {what}: {first_line(error)}")
        behind = [rank for rank in range(self.size) if self._at(rank) < self._num_exchanges]
        missing = ", ".join(map(str, behind)) or "none by now"
        return PeerFailure(
            f"{here}: the exchange of {what} did not come about in {seconds:.0f} s; not there: rank {missing}. If they "
            "only are slower, give a larger scale.timeout_seconds"
        )

    def _at(self, rank: int) -> int:
        with suppress(dist.DistError, RuntimeError):
            if self._meeting.store.check([f"at {rank}"]):
                return int(json.loads(self._meeting.store.get(f"at {rank}"))[0])
        return 0


class Root(torch.nn.Module):
    """What is sharded as a whole: a model, with the head that reads its states where there is one.

    Its forward is whatever is computed with them, so that nothing goes past the hooks that gather their weights and
    add up their gradients.
    """

    def __init__(self, model: torch.nn.Module, head: torch.nn.Module | None) -> None:
        super().__init__()
        self.model, self.head = model, head

    def forward(self, compute: Callable[[], Any]) -> Any:
        return compute()


class Shards:
    """The weights that are trained, in parts: each process has its part of every tensor, of its gradient and of its
    moments (FSDP2, ``fully_shard`` of each layer and of the root).

    Where something samples with the model, gradients are computed with the parts alone, and the whole model stays
    beside them for all else: sampling, scoring, evaluation and checkpoints are those of an unsharded run. ``gather``
    brings it up to date after an update, ``scatter`` the shards after it was loaded. Elsewhere the parts are the model
    (``keeps_whole`` False): it is cut in place, layer by layer, from main memory, and every pass gathers it.

    Args:
        device: where the parts are to be.
    """

    model: torch.nn.Module
    heads: dict[str, torch.nn.Module]
    forward: Forward | ActorCritic
    within: Within | None = None  # gathers the model, where there is no whole one

    def __init__(self, world: World, device: torch.device, *, keeps_whole: bool = True) -> None:
        self._mesh = init_device_mesh(device.type, (world.size,))
        self.keeps_whole = keeps_whole
        self._pairs: list[tuple[Tensor, Any]] = []

    def cut(self, whole: Forward | ActorCritic, heads: dict[str, torch.nn.Module]) -> None:
        """Make the parts, without an exchange.

        Args:
            whole: the forward pass that the objective reads, over the whole model.
            heads: heads and critics that are trained beside it.
        """
        self.model, self.heads = whole.model, heads
        if self.keeps_whole:
            self.model = copy.deepcopy(whole.model)
            self.heads = {name: copy.deepcopy(module) for name, module in heads.items()}
        self.forward = self._sharded(whole)
        if not self.keeps_whole:
            return
        own = {"": (whole.model, self.model), **{f"{n}.": (heads[n], self.heads[n]) for n in heads}}
        self._pairs = [
            (plain, shard)
            for module, sharded in own.values()
            for plain, shard in zip(module.parameters(), sharded.parameters(), strict=True)
            if plain.requires_grad
        ]

    def choose_paths(self, policy: Forward) -> None:
        """Of parts that are the model; ``policy``: the language model's pass, which may be another one."""
        if self.keeps_whole:
            return
        forward = self.forward.policy if isinstance(self.forward, ActorCritic) else self.forward
        self.within = policy.root = forward.root
        critics = [self.forward.critic] if isinstance(self.forward, ActorCritic) else []
        for each in dict.fromkeys([forward, policy, *critics]):
            each.choose_path()  # again, where the parts are

    @property
    def notices(self) -> list[str]:
        """A line where a process needs more memory than for its part."""
        told = (
            "scale.sharding: the trainer's processes sample, so each keeps a whole model beside its part of it; "
            "a vLLM server that answers (rollout.engine, eval.engine) leaves the part alone"
        )
        return [told] if self.keeps_whole else []

    def _sharded(self, whole: Forward | ActorCritic) -> Forward | ActorCritic:
        """The same pass over models in shards; which path it takes was found out for the whole model."""
        if isinstance(whole, ActorCritic):
            critic = self._of_model(whole.critic, self.heads["critic"])
            return ActorCritic(self._of_model(whole.policy, self.model), critic)
        return self._of_model(whole, self.model)

    def _of_model(self, whole: Forward, model: torch.nn.Module) -> Forward:
        forward = copy.copy(whole) if self.keeps_whole else whole
        forward.model, forward.head = model, None if whole.head is None else self.heads["head"]  # type: ignore[assignment]
        self.part(forward)
        return forward

    def part(self, forward: Forward) -> None:
        """Cut the model of a pass, with its head, into parts, in place."""
        root = Root(forward.model, forward.head)
        for part in (*checkpointed_layers(forward.model), root):
            fully_shard(part, mesh=self._mesh)
            # A plain sum: the weights of the loss are those of the batch of all processes; and gloo has no other one.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
        forward.root = partial(_within, root)

    @torch.no_grad()
    def gather(self) -> None:
        """The whole model becomes what the shards are."""
        for plain, shard in self._pairs:
            plain.copy_(shard.full_tensor())

    @torch.no_grad()
    def scatter(self) -> None:
        """The shards become parts of what the whole model is."""
        for plain, shard in self._pairs:
            self.fill(shard, plain.detach())

    @torch.no_grad()
    def fill(self, live: Tensor, tensor: Tensor) -> None:
        """Copy a whole tensor, the same in all processes, into one of the model's, which may lie in parts."""
        own_part(live).copy_(own_part(part_of(tensor.to(live.device), live) if isinstance(live, DTensor) else tensor))

    @torch.no_grad()
    def whole(self, tensors: Mapping[str, Tensor], kept: Container[str]) -> dict[str, Tensor]:
        """Whole tensors of parts, on the CPU, gathered one by one; those alone that this process has a use for."""
        device = self._mesh.device_type  # parts of an optimizer that is offloaded lie elsewhere
        placed = ((n, t.to(device) if isinstance(t, DTensor) else t) for n, t in tensors.items())
        gathered = ((name, whole(tensor)) for name, tensor in placed)
        return {name: full.cpu() for name, full in gathered if name in kept}

    def rows(self, tensors: Mapping[str, Tensor], rank: int) -> tuple[dict[str, Tensor], dict[str, tuple[int, int]]]:
        """What this process has of each tensor, and of those in parts the row that it begins at, of how many.

        What is in no parts is rank 0's, and what has no row here is left out.
        """
        own, rows = {}, {}
        for name, tensor in tensors.items():
            if isinstance(tensor, DTensor):
                local, total = tensor.to_local(), tensor.shape[0]
                most = -(-total // self._mesh.size())
                first = min(rank * most, total)
                assert len(local) == min(most, total - first), "FSDP2 cuts along rows, and the last parts are smaller"
                if len(local):
                    own[name], rows[name] = local, (first, total)
            elif rank == 0:
                own[name] = tensor
        return own, rows


def _within(root: Any, compute: Callable[[], T]) -> T:
    """``compute`` inside the pass of a root; without gradients no backward pass would let its own weights go again."""
    computed: T = root(compute)
    if not torch.is_grad_enabled():
        root.reshard()
    return computed


def part_of(tensor: Tensor, like: Any) -> Any:
    """A whole tensor, the same in all processes, in parts as ``like`` is."""
    return distribute_tensor(tensor, like.device_mesh, like.placements)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors in order, in pieces of one type and device and of a bounded size."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        alike = bucket and (tensor.dtype, tensor.device) == (bucket[0].dtype, bucket[0].device)
        if bucket and (not alike or size + tensor.numel() > BUCKET_ELEMENTS):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel()
    if bucket:
        yield bucket


def fail_thread(thread: int, failure: PeerFailure) -> None:
    """Let a thread of this process raise ``failure`` as soon as it runs Python."""

    class Ended(PeerFailure):  # Python makes the exception itself, of a class alone
        def __init__(self) -> None:
            super().__init__(str(failure), failure.exit_code)

    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Ended))
