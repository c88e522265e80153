"""The weights of a model in training on their way to vLLM servers, by the servers' own routes.

``nccl`` sends them from GPU to GPU. ``gloo`` is the same through the memory of CPUs; vLLM has no such back end,
``contrib/gloo_weight_transfer`` adds it. (The third way, ``files``, is in ``training.py``.)
"""

from __future__ import annotations

import base64
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.cuda import nccl

from posttrain.engines.http import HttpServer, Refused, Unanswered, Unreadable, all_of, run
from posttrain.errors import RunFailure, first_line

Result = TypeVar("Result")
LOOK_SECONDS = 0.001
MOST_WORKERS = 1 << 16
WORKERS = "/get_world_size"


def ask_all(
    servers: Sequence[HttpServer],
    method: Literal["GET", "POST"],
    path: str,
    body: Any = None,
    *,
    read: Callable[[Any], Result] | None = None,
    bodies: Sequence[Any] | None = None,
) -> list[Result]:
    """Ask a route of every server at the same time, once, since these change something.

    ``bodies``: one for each server, in the place of ``body``.

    Raises:
        RunFailure: no answer, or a refusal; the message names server and route.
    """

    async def one(pair: tuple[HttpServer, Any]) -> Result:
        server, content = pair
        try:
            async with server:
                return await server.ask(method, path, content, read=read or (lambda answer: answer), retries=0)
        except (Unanswered, Unreadable) as error:
            raise RunFailure(f"{server.base}: {path.partition('?')[0]}: {error}") from None
        except Refused as error:
            missing = "; it takes no weights: start it with the line that `posttrain serve-command --follows` prints"
            raise RunFailure(
                f"{server.base}: {path.partition('?')[0]}: HTTP {error.status}: {error}"
                f"{missing if error.status == 404 else ''}"
            ) from None

    return run(all_of(one, list(zip(servers, bodies or [body] * len(servers), strict=True))))


class GroupTransfer:
    """Weights by broadcasts to all workers of all servers, in a group of which this process is rank 0.

    The group is one of its own: the others are no processes that train. It is made anew for servers that were started
    anew. ``timeout_seconds``: for every step, after which a worker that is gone is given up.

    Raises:
        RunFailure: a server has no such routes, or its workers do not come.
    """

    def __init__(self, servers: Sequence[HttpServer], kind: type[Nccl | Gloo], timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        workers = ask_all(servers, "GET", WORKERS, read=num_workers)
        size = 1 + sum(workers)
        self.group = kind(servers[0].host, size, timeout_seconds)
        about = [
            self.group.about | {"world_size": size, "rank_offset": 1 + sum(workers[:i])} for i in range(len(servers))
        ]
        bodies = [{"init_info": one} for one in about]
        asked = _begin(partial(ask_all, servers, "POST", "/init_weight_transfer_engine", bodies=bodies))
        joined = _begin(self.group.join)
        self._wait(joined.done, asked)
        joined.result()
        self._wait(asked.done, asked)
        asked.result()

    def send(
        self,
        servers: Sequence[HttpServer],
        weights: Iterator[tuple[str, Tensor]],
        dtype: torch.dtype,
        announced: Sequence[tuple[str, torch.Size]],
    ) -> None:
        """Replace the weights of the servers, which are paused; ``announced``: their names and shapes, in order."""
        about = {
            "names": [name for name, _ in announced],
            "dtype_names": [str(dtype).removeprefix("torch.")] * len(announced),
            "shapes": [list(shape) for _, shape in announced],
        }
        ask_all(servers, "POST", "/start_weight_update")
        asked = _begin(partial(ask_all, servers, "POST", "/update_weights", {"update_info": about}))
        self._wait(self.group.begin(), asked)
        for (name, weight), expected in zip(weights, announced, strict=True):
            assert (name, weight.shape) == expected, "weights come in the order in which they were announced"
            try:
                sent = weight.to(dtype).contiguous()
                self._wait(self.group.broadcast(sent), asked)
            except RuntimeError as error:
                raise RunFailure(f"a worker was lost at {name}: {first_line(error)}") from None
        self._wait(asked.done, asked)
        asked.result()
        ask_all(servers, "POST", "/finish_weight_update", {})

    def _wait(self, is_done: Callable[[], bool], asked: Future[Any]) -> None:
        """Wait until something is done; a request that fails meanwhile is why it never will be."""
        deadline = time.monotonic() + self.timeout_seconds
        while not is_done():
            if asked.done() and asked.exception() is not None:
                asked.result()
            if time.monotonic() > deadline:
                raise RunFailure(f"a worker did not take part within {self.timeout_seconds:g} seconds")
            time.sleep(LOOK_SECONDS)


class Nccl:
    """A NCCL communicator. Its workers take the identifier from the request (``nccl_unique_id_b64``)."""

    def __init__(self, host: str, size: int, timeout_seconds: float) -> None:
        self.size, self.device, self.identifier = size, torch.cuda.current_device(), nccl.unique_id()
        self.about = {"nccl_unique_id_b64": base64.b64encode(self.identifier).decode()}

    def join(self) -> None:
        """Enter the group; workers add up one number first."""
        torch.cuda.set_device(self.device)  # in a thread of its own
        self.communicator = nccl.init_rank(self.size, self.identifier, 0)
        nccl.all_reduce([torch.zeros(1, device=self.device)], comms=[self.communicator])
        torch.cuda.synchronize(self.device)

    def begin(self) -> Callable[[], bool]:
        """Begin an update; returns what tells whether all take part, as far as it can be known."""
        return lambda: True

    def broadcast(self, tensor: Tensor) -> Callable[[], bool]:
        """Start to send a tensor; returns what tells whether all have it."""
        nccl.broadcast([tensor], 0, comms=[self.communicator])
        event = torch.cuda.Event()
        event.record()
        return event.query


class Gloo:
    """A gloo group, through the memory of CPUs."""

    def __init__(self, host: str, size: int, timeout_seconds: float) -> None:
        family, _, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing, and tells which address of this machine leads there
            self.address = str(probe.getsockname()[0])
        listening = socket.create_server((self.address, 0), family=family)
        port = int(listening.getsockname()[1])
        self.size, self.num_updates, self.timeout = size, 0, timedelta(seconds=timeout_seconds)
        self.store = dist.TCPStore(
            self.address, port, size, True, self.timeout, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        self.about = {"master_address": self.address, "master_port": port}

    def join(self) -> None:
        """Enter the group."""
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self.address)]
        options._timeout = self.timeout
        self.group = dist.ProcessGroupGloo(self.store, 0, self.size, options)

    def begin(self) -> Callable[[], bool]:
        """See ``Nccl.begin``. A broadcast that nobody takes would hold this process up, so workers say that they do."""
        self.num_updates += 1
        return partial(self.store.check, [f"update {self.num_updates} of {rank}" for rank in range(1, self.size)])

    def broadcast(self, tensor: Tensor) -> Callable[[], bool]:
        """See ``Nccl.broadcast``."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        work = self.group.broadcast([tensor.cpu()], options)  # type: ignore[attr-defined]
        return lambda: work.is_completed() and work.wait() is not None  # which raises what went wrong


def _begin(work: Callable[[], Result]) -> Future[Result]:
    """The work in a thread that keeps no process alive: a worker that never comes lets it wait for ever."""
    future: Future[Result] = Future()

    def fill() -> None:
        try:
            future.set_result(work())
        except (RunFailure, RuntimeError, OSError, ValueError) as error:
            future.set_exception(error)

    threading.Thread(target=fill, daemon=True).start()
    return future


def num_workers(answer: Any) -> int:
    """Read the answer of ``WORKERS``."""
    count = answer["world_size"]
    if type(count) is not int or not 0 < count <= MOST_WORKERS:
        raise Unreadable(f"a world_size of {count!r:.80}")
    return count
