"""The one door to Ray: a cluster is joined, a run's processes and servers are placed on its nodes, watched and ended.

A Ray actor per process starts it on its node as the launcher ``local`` does on this machine (``runs/children.py``), so
that it ends with the actor, and the actor with this process. What goes through Ray is numbers and text: which node,
which command, which exit code. A server has an actor, too, which starts it through its keeper (``engines/vllm/``).
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from posttrain import __version__
from posttrain.engines.vllm.command import ServerOptions, server_command
from posttrain.engines.vllm.server import OwnServer, free_port, interpreter
from posttrain.errors import PeerFailure, RunFailure, StorageError, UsageError
from posttrain.runs.children import FOLLOW, Child, End, end_at_once, how_it_ended, start_child
from posttrain.runs.cluster.servers import PROOF
from posttrain.store.durable import ASIDE, storage_errors
from posttrain.world import local_size

ADDRESS = "RAY_ADDRESS"
CONNECT_SECONDS = 20.0
PLACE_SECONDS = 30.0  # for room that others take, and for a node in place of one that is lost
LOOK_SECONDS = 1.0  # of an actor, before it answers that its process still works
START_SECONDS = 60.0  # for Ray to start a Python on each node
END_SECONDS = 5.0  # for actors to end their processes; those of an actor that is killed end by themselves
SHARED_SECONDS = 10.0  # for a new file to be seen everywhere; network file systems remember what was not there
# What of this process's environment the others get; keys and passwords stay where they are.
_PASSED = ("POSTTRAIN_", "HF_", "NCCL_", "GLOO_", "TORCH_", "OMP_", "MKL_", "TOKENIZERS_", "VLLM_")
_SECRET = re.compile(r"(^|_)(TOKEN|KEY|SECRET|PASSWORD)(_|$)")


class Actor:
    """On a node, in a process of Ray's: starts one process of a run and watches it."""

    child: Child | None = None
    is_stopping = False

    def place(self) -> dict[str, Any]:
        """Where it is, with which GPUs, and which posttrain is there."""
        context = ray.get_runtime_context()
        gpus = [str(gpu) for gpu in context.get_accelerator_ids().get("GPU", [])]
        node = context.get_node_id()
        return {"node": node, "address": ray.util.get_node_ip_address(), "gpus": gpus, "version": __version__}

    def start(self, log: str, proof: tuple[str, str], folder: str, variables: dict[str, str]) -> str:
        """Start the process in the working ``folder``; says what stands against it, else nothing.

        Args:
            log: gets what it says. proof: a file of the run's folder, and what must stand in it.
            variables: of its environment.
        """
        if not _is_shared(*proof):
            return (
                f"the run's folder {Path(log).parent} is not the same folder there. All nodes read it, and one writes "
                "it: give --runs-dir a folder on storage that they share, at the same path"
            )
        try:
            os.chdir(folder)
        except OSError as error:
            return f"the folder {folder}, which the command was given in, cannot be entered there ({error.strerror})"
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ.pop(name, None)  # Ray's own, which would be taken for the user's
        os.environ.update(variables)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # Ray blocks it, and what is started inherits that
        command, threads = [sys.executable, "-m", "posttrain", FOLLOW], (os.cpu_count() or 1) // local_size()
        try:
            self.child = start_child(command, Path(log), f"rank {variables['RANK']}", max(1, threads))
        except StorageError as error:
            return str(error)
        return ""

    def look(self, seconds: float, stop: bool) -> tuple[int, str] | None:
        """Its exit code and how it ended, if it does within ``seconds``. ``stop``: ask it to save and end."""
        assert self.child is not None
        if stop and not self.is_stopping:
            self.is_stopping = True
            self.child.interrupt()
        deadline = time.monotonic() + seconds
        while (code := self.child.poll()) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return None if code is None else (code, how_it_ended(code, self.child))

    def end(self) -> None:
        """Kill it, with what it has started."""
        if self.child is not None:
            end_at_once(self.child)


class ServerActor:
    """On a node, in a process of Ray's: starts a vLLM server there, which ends with it, and watches it."""

    server: OwnServer | None = None
    url = ""

    def serve(self, order: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, Any]:
        """Start it and wait until it is well: its ``url``; or a ``problem`` that the user has to mend, or ``why`` not.

        Args:
            order: of ``PlacedServer``. variables: of the environment, where this node does not have its own.
        """
        if __version__ != order["version"]:
            return {"problem": f"{self._node()} has posttrain {__version__}, and the head {order['version']}"}
        if not _is_shared(str(Path(order["model"]) / PROOF), order["proof"]):
            return {"problem": f"{self._node()} does not see {order['model']}, which all nodes share"}
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ.pop(name, None)  # Ray's own
        os.environ.update({name: value for name, value in variables.items() if name not in os.environ})
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        try:
            self._start(order)
            assert self.server is not None
            self.server.wait()
        except UsageError as error:
            return {"problem": f"{self._node()}: {error}"}
        except (RunFailure, OSError) as error:
            return {"why": f"{self._node()}: {error}"}
        return {"url": self.url}

    def _start(self, order: Mapping[str, Any]) -> None:
        address = ray.util.get_node_ip_address()
        gpus = tuple(ray.get_runtime_context().get_accelerator_ids().get("GPU", []))
        options = ServerOptions(**order["options"])
        port = free_port(options.port, address, order["where"])
        options = replace(options, host=address, port=port, gpus=gpus, interpreter=interpreter())
        self.url = f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
        log = Path(order["model"]).parent / "vllm.log"
        self.server = OwnServer(server_command(order["model"], options), self.url, log)
        self.server.start()

    def look(self, seconds: float) -> dict[str, Any]:
        """``why`` it has ended, if it does within ``seconds``."""
        assert self.server is not None
        deadline = time.monotonic() + seconds
        while self.server.pid is not None and time.monotonic() < deadline:
            time.sleep(0.05)
        ended = f"{self._node()}: the vLLM server at {self.url} has ended. {self.server.tail()}"
        return {} if self.server.pid is not None else {"why": ended}

    def end(self) -> None:
        """End it, with what it has started."""
        if self.server is not None:
            self.server.stop()

    def _node(self) -> str:
        return f"node {ray.util.get_node_ip_address()} of the cluster"


class Placed:
    """A server that an actor has, or is about to start."""

    def __init__(self, actor: Any, order: Mapping[str, Any], variables: Mapping[str, str]) -> None:
        self.actor, self._is_there, self._url = actor, False, ""
        self._deadline = time.monotonic() + PLACE_SECONDS + START_SECONDS
        self._here = actor.end.remote()  # answers as soon as there is an actor
        self._asked = actor.serve.remote(order, variables)

    def look(self) -> dict[str, Any] | None:
        """What is new: its ``url``, the ``problem`` that it cannot be started for, or ``why`` it is gone."""
        if not self._is_there:
            self._is_there = bool(ray.wait([self._here], timeout=0)[0])
            if not self._is_there and time.monotonic() > self._deadline:
                return {"why": f"in {PLACE_SECONDS + START_SECONDS:g} s no node of the cluster had room for it"}
        if not ray.wait([self._asked], timeout=0)[0]:
            return None
        try:
            told: dict[str, Any] = ray.get(self._asked)
        except RayError as error:
            return {"why": f"the node of the server {self._url}, or Ray's worker there, is gone: {_reason(error)}"}
        self._url = told.get("url", self._url)
        self._asked = self.actor.look.remote(LOOK_SECONDS)
        return told or None

    def end(self) -> None:
        """End it, and the actor."""
        ray.wait([self.actor.end.remote()], timeout=END_SECONDS)
        ray.kill(self.actor)


def _is_shared(file: str, content: str) -> bool:
    deadline = time.monotonic() + SHARED_SECONDS
    while True:
        with suppress(OSError):
            if Path(file).read_text(encoding="utf-8") == content:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)


@dataclass
class Cluster:
    """A cluster that this process is a driver of. ``host``: this machine, as the others reach it.

    ``cause``: why processes are placed again; what then stands against it is no longer a matter of what was asked for.
    """

    address: str
    host: str
    cause: str = ""

    @contextmanager
    def room(
        self, size: int, device: str, should_stop: Callable[[], bool], servers: Mapping[str, int]
    ) -> Iterator[Room]:
        """Room inside the block for ``size`` processes, one GPU or CPU each.

        And for ``servers``, by name, each with so many GPUs of one node (0: with what a process has).

        Raises:
            UsageError: the cluster has no room, or none that is free.
        """
        kind = "GPU" if device.startswith("cuda") or (device == "auto" and self.count("GPU")) else "CPU"
        bundles = [{kind: 1}] * size + [{"GPU": gpus} if gpus else {kind: 1} for gpus in servers.values()]
        if any(self.count(what) < number for what, number in _sum(bundles).items()):
            raise self.refusal(size, bundles, "")
        room = Room(self, bundles, tuple(servers))
        if not servers:
            yield room
            return
        with room.group_of(bundles[size:], should_stop) as room.group:
            yield room

    def count(self, kind: str) -> int:
        """How many GPUs or CPUs its nodes have."""
        return int(ray.cluster_resources().get(kind, 0))

    def refusal(self, size: int, bundles: Sequence[dict[str, int]], waited: str) -> UsageError | PeerFailure:
        """That there is no room for what is asked for."""
        needs, servers = _sum(bundles), len(bundles) - size
        kind = next((kind for kind in needs if self.count(kind) < needs[kind]), next(iter(needs)))
        what = f"{size} of them" + (f" and {servers} server{'s' * (servers > 1)} (vLLM)" if servers else "")
        has = f"{self.count(kind)}{f' {kind}s' if len(needs) > 1 else ''}"
        alive = [node for node in ray.nodes() if node["Alive"]]
        rows = [f"{node['NodeManagerAddress']} {node['Resources'].get(kind, 0):g}" for node in alive]
        free = ray.available_resources().get(kind, 0)
        return self.problem(
            f"scale.processes: {what} need {' and '.join(f'{n} {k}s' for k, n in needs.items())}, and the cluster at "
            f"{self.address} has {has} ({free:g} free; by node: {', '.join(rows)}).{waited} Give fewer "
            f"processes{' or servers' if servers else ''}, or add nodes with `ray start --address {self.address}`"
        )

    def problem(self, text: str, is_loss: bool = False) -> UsageError | PeerFailure:
        """What stands against it, as an error; ``is_loss``: the second time and later, trying again may help."""
        again = f"{self.cause}. It cannot start again: {text}"
        return PeerFailure(again, is_loss=is_loss) if self.cause else UsageError(text)


class Room:
    """What a run has of a ``cluster``: for servers as long as it works, for processes until one of them is lost.

    The last ``bundles`` are for ``servers``, by name, in a placement ``group`` for which Ray finds another node where
    one is lost; those before are for processes.
    """

    group: Any = None

    def __init__(self, cluster: Cluster, bundles: Sequence[dict[str, int]], servers: Sequence[str]) -> None:
        self.cluster, self.bundles, self.servers = cluster, bundles, servers
        self.size = len(bundles) - len(servers)

    @contextmanager
    def group_of(self, bundles: Sequence[dict[str, int]], should_stop: Callable[[], bool]) -> Iterator[Any]:
        """A placement group of some bundles, inside the block; actors that it still has then end with it.

        Raises:
            UsageError: there is no room. PeerFailure: the same, where the cluster's ``cause`` is known.
        """
        group = placement_group(list(bundles), strategy="PACK")
        try:
            deadline = time.monotonic() + PLACE_SECONDS
            while not group.wait(1):
                if should_stop():
                    raise KeyboardInterrupt
                if time.monotonic() > deadline:
                    waited = f" In {PLACE_SECONDS:g} s they did not become free."
                    raise self.cluster.refusal(self.size, self.bundles, waited)
            yield group
        finally:
            remove_placement_group(group)

    @contextmanager
    def ranks(self, should_stop: Callable[[], bool]) -> Iterator[Ranks]:
        """An actor for each process, inside the block; those of one node have ranks in a row.

        Raises:
            PeerFailure: a node was lost, and there is none in its place.
            UsageError: a node has another posttrain.
        """
        own = self.bundles[: self.size]
        with self.group_of(own, should_stop) as group:
            actors = [_actor(Actor, group, index, needs) for index, needs in enumerate(own)]
            try:
                yield self._ordered(actors)
            finally:
                ray.wait([actor.end.remote() for actor in actors], num_returns=len(actors), timeout=END_SECONDS)
                for actor in actors:
                    ray.kill(actor)

    def start_server(self, name: str, order: Mapping[str, Any]) -> Placed:
        """Start a server as the ``order`` says, wherever there is room for it."""
        proof = Path(order["model"]) / PROOF
        with storage_errors("run", proof):
            told = {**order, "proof": proof.read_text(encoding="utf-8"), "version": __version__}
        index = self.servers.index(name)
        return Placed(_actor(ServerActor, self.group, index, self.bundles[self.size + index]), told, _passed_on())

    def _ordered(self, actors: list[Any]) -> Ranks:
        cluster = self.cluster
        try:
            places = ray.get([actor.place.remote() for actor in actors], timeout=START_SECONDS)
        except (RayError, GetTimeoutError) as error:
            what = f"Ray's workers cannot be started on its nodes: {_reason(error)}. Each needs the same posttrain"
            raise cluster.problem(f"the cluster at {cluster.address}: {what}", is_loss=True) from error
        for place in places:
            if place["version"] != __version__:
                what = f"has posttrain {place['version']}, and this is {__version__}; install the same everywhere"
                raise cluster.problem(f"the node {place['address']} of the cluster {what}")
        first = {place["node"]: index for index, place in reversed([*enumerate(places)])}
        order = sorted(range(len(actors)), key=lambda index: (first[places[index]["node"]], index))
        return Ranks(cluster, [actors[index] for index in order], [places[index] for index in order])


class Ranks:
    """Processes of a run, by rank: those that work, and how the others ended."""

    def __init__(self, cluster: Cluster, actors: Sequence[Any], places: Sequence[dict[str, Any]]) -> None:
        self.actors, self.places = actors, places
        self.working, self.ended = set(range(len(actors))), dict[int, End]()
        self._cluster, self._asked = cluster, dict[Any, int]()

    @property
    def failed(self) -> bool:
        """Whether one of them did not end well."""
        return any(end.code != 0 for end in self.ended.values())

    def start(self, folder: Path, port: int) -> None:
        """Start all, to meet at this machine's ``port``.

        Raises:
            UsageError: a node does not share the run's ``folder`` or this working directory.
            PeerFailure: a node was lost meanwhile.
        """
        content = secrets.token_hex(16)
        proof = folder / f"{ASIDE}{content}-{os.getpid()}"
        with storage_errors("run", folder), proof.open("x", encoding="utf-8") as file:
            file.write(content)
        try:
            asked = [
                actor.start.remote(str(folder / f"log-{rank}.txt"), (str(proof), content), os.getcwd(), variables)
                for (rank, actor), variables in zip(enumerate(self.actors), self._variables(port), strict=True)
            ]
            problems = ray.get(asked, timeout=START_SECONDS)
        except (RayError, GetTimeoutError) as error:
            what = f"a node of the cluster was lost while processes were started: {_reason(error)}"
            raise PeerFailure(what, is_loss=True) from error
        finally:
            proof.unlink(missing_ok=True)
        for place, problem in zip(self.places, problems, strict=True):
            if problem:
                raise self._cluster.problem(f"node {place['address']} of the cluster: {problem}")

    def _variables(self, port: int) -> Iterator[dict[str, str]]:
        """What each process is told of its place, as torchrun tells it."""
        shared = {"MASTER_ADDR": self._cluster.host, "MASTER_PORT": str(port), "WORLD_SIZE": str(len(self.actors))}
        shared["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # rank 0 finds the store there, too, and opens none
        sizes, before = Counter(place["node"] for place in self.places), Counter[str]()
        for rank, place in enumerate(self.places):
            node = place["node"]
            own = {"RANK": rank, "LOCAL_RANK": before[node], "LOCAL_WORLD_SIZE": sizes[node]}
            gpus = [gpu for other in self.places if other["node"] == node for gpu in other["gpus"]]
            before[node] += 1
            seen = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}  # all of its node's; LOCAL_RANK says which
            yield _passed_on() | shared | {name: str(value) for name, value in own.items()} | seen

    def look(self, seconds: float, stop: bool) -> None:
        """See who has ended, for ``seconds`` at most. ``stop``: rank 0 is to save and end, and the others with it."""
        waited = set(self._asked.values())
        for rank in self.working - waited:
            self._asked[self.actors[rank].look.remote(LOOK_SECONDS, stop and rank == 0)] = rank
        ready, _ = ray.wait([*self._asked], num_returns=1, timeout=seconds)
        for asked in ready:
            rank = self._asked.pop(asked)
            try:
                answer = ray.get(asked)
            except RayError as error:
                node = self.places[rank]["address"]
                answer = (None, f"its node {node}, or Ray's worker there, is gone: {_reason(error)}")
            if answer is not None:
                self.ended[rank] = End(*answer)
                self.working.discard(rank)


def _actor(kind: type, group: Any, index: int, resources: Mapping[str, int]) -> Any:
    """One that has a bundle of a placement group for itself."""
    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    needs = {"num_cpus": resources.get("CPU", 0), "num_gpus": resources.get("GPU", 0)}
    return ray.remote(kind).options(scheduling_strategy=place, **needs).remote()


def _sum(bundles: Sequence[Mapping[str, int]]) -> dict[str, int]:
    total = Counter[str]()
    for bundle in bundles:
        total.update(bundle)
    return dict(total)


def _passed_on() -> dict[str, str]:
    """What of this process's environment the others get."""
    return {k: v for k, v in os.environ.items() if k.startswith(_PASSED) and not _SECRET.search(k)}


@contextmanager
def joined() -> Iterator[Cluster]:
    """The cluster that RAY_ADDRESS names, inside the block; one that this process has joined before stays.

    Raises:
        UsageError: RAY_ADDRESS names none, or none answers there.
    """
    if ray.is_initialized():
        yield _cluster()
        return
    address = os.environ.get(ADDRESS, "")
    parts = re.fullmatch(r"\[?([^\[\]/@]+?)\]?:([0-9]{1,5})", address)
    if not parts and address != "auto":
        stands = f"is {address!r}" if address else "is not set"
        raise UsageError(
            f"scale.launcher: ray needs the address of a cluster that this machine belongs to, and {ADDRESS} {stands}. "
            f"Set it to the HOST:PORT that `ray start --head` has said, or to auto for the cluster that runs on this "
            "machine (docs/cluster.md)"
        )
    if parts:
        try:
            socket.create_connection((parts[1], int(parts[2])), timeout=CONNECT_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise _unreachable(address, _reason(error)) from None
    _init(address)
    try:
        yield _cluster()
    finally:
        ray.shutdown()


def _init(address: str) -> None:
    """``ray.init``, which waits for minutes where something else answers, and would take our signals in this thread."""
    problems: list[Exception] = []

    def init() -> None:
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (OSError, RuntimeError, ValueError, RayError) as error:
            problems.append(error)

    thread = threading.Thread(target=init, name="ray", daemon=True)
    thread.start()
    thread.join(CONNECT_SECONDS)
    if problems or thread.is_alive() or not ray.is_initialized():
        silence = f"no answer of Ray's in {CONNECT_SECONDS:g} s"
        raise _unreachable(address, _reason(problems[0]) if problems else silence)


def _unreachable(address: str, reason: str) -> UsageError:
    return UsageError(
        f"{ADDRESS}: no Ray cluster can be joined at {address}: {reason}. Start one with `ray start --head`, join it "
        f"from this machine with `ray start --address HOST:PORT`, and set {ADDRESS} to that (docs/cluster.md)"
    )


def _cluster() -> Cluster:
    return Cluster(ray.get_runtime_context().gcs_address, ray.util.get_node_ip_address())


def _reason(error: BaseException) -> str:
    """The first line of what an error says."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]
