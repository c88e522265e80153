"""Weights to the workers of a vLLM server by torch.distributed, and the server's weight-transfer routes over HTTP.

The group of trainer (rank 0) and workers is one of its own, beside whatever processes train together: the one other
place than ``train/distributed.py`` that opens torch.distributed, since the other members are no trainers.
``plugin/posttrain_vllm.py`` is the other side, and says what both must do alike.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor
from torch import distributed as dist

from posttrain.engines.vllm.http import HttpServer, Refused, Unanswered
from posttrain.engines.vllm.plugin.posttrain_vllm import address_towards, broadcast, join
from posttrain.engines.vllm.protocol import Unreadable
from posttrain.errors import RunFailure, first_line

Collectives = Literal["gloo", "nccl"]
NamedWeights = Iterable[tuple[str, Tensor]]
LOOK_SECONDS = 0.002
MOST_WORKERS = 1 << 16


class WeightSender:
    """The trainer's place in the group with a server's workers; made anew for a server that was started anew.

    Args:
        server: asked over HTTP. host: its name or address.
        collectives: what the tensors travel by; gloo takes them through the memory of the CPU.
        timeout_seconds: for every single step, after which a worker that is gone is given up.

    Raises:
        RunFailure: the server has no such routes, or its workers do not come.
    """

    pause = "/pause?mode=abort&clear_cache=true"

    def __init__(self, server: HttpServer, host: str, collectives: Collectives, timeout_seconds: float) -> None:
        self.collectives, self.updates = collectives, 0
        timeout = timedelta(seconds=timeout_seconds)
        size = 1 + ask(server, "GET", "/get_world_size", read=_num_workers)
        address = address_towards(_address_of(host))
        listening = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        port = int(listening.getsockname()[1])
        self.workers = range(1, size)
        self.store = dist.TCPStore(
            address, port, size, True, timeout, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        about = {"address": address, "port": port, "world_size": size, "collectives": collectives}
        about["timeout_seconds"] = timeout_seconds
        with _meanwhile(server, "/init_weight_transfer_engine", {"init_info": about}) as asked:
            self._wait_for("here", asked)
            self.group = join(self.store, collectives, 0, size, timeout, address)

    def send(self, server: HttpServer, weights: Callable[[], NamedWeights], dtype: torch.dtype, label: str) -> None:
        """Replace the server's weights; generation is paused meanwhile and its caches are emptied afterwards.

        Args:
            weights: gives the named weights, in the same order whenever it is called.
            dtype: in which they travel.
            label: what the server is to call them (``/weight_info``).

        Raises:
            RunFailure: the server refused them, or was lost on the way. Its weights are then neither old nor new.
        """
        named = [(name, tuple(weight.shape)) for name, weight in weights()]
        self.updates += 1
        info = {
            "update": self.updates,
            "names": [name for name, _ in named],
            "dtypes": [str(dtype).removeprefix("torch.")] * len(named),
            "shapes": [list(shape) for _, shape in named],
        }
        ask(server, "POST", self.pause)
        ask(server, "POST", "/start_weight_update")
        with _meanwhile(server, "/update_weights", {"update_info": info}) as asked:
            self._wait_for(f"ready/{self.updates}", asked)
            self._broadcast(weights(), named, dtype)
        ask(server, "POST", "/finish_weight_update", {"weight_version": label})
        ask(server, "POST", "/resume")
        self.reset_caches(server)

    def reset_caches(self, server: HttpServer) -> None:
        """Forget keys and values of prompts that the weights before have computed; finishing an update does not."""
        ask(server, "POST", "/reset_prefix_cache")

    def _broadcast(
        self, weights: NamedWeights, named: Sequence[tuple[str, tuple[int, ...]]], dtype: torch.dtype
    ) -> None:
        device = None if self.collectives == "nccl" else torch.device("cpu")
        for (name, weight), announced in zip(weights, named, strict=True):
            assert (name, tuple(weight.shape)) == announced, "weights come in the order in which they were announced"
            try:
                broadcast(self.group, weight.detach().to(device=device, dtype=dtype).contiguous()).wait()
            except RuntimeError as error:
                raise RunFailure(f"a worker was lost at {name}: {first_line(error)}") from None

    def _wait_for(self, key: str, asked: Future[Any]) -> None:
        """Until every worker has set its key; an answer before that is what went wrong."""
        keys = [f"{key}/{worker}" for worker in self.workers]
        while not self.store.check(keys):
            if asked.done():
                asked.result()
                raise RunFailure("the server answered before its workers were ready for weights")
            time.sleep(LOOK_SECONDS)


def ask(
    server: HttpServer,
    method: Literal["GET", "POST"],
    path: str,
    body: Any = None,
    read: Callable[[Any], Any] = lambda answer: None,
) -> Any:
    """What ``read`` makes of a route's answer; asked once, for these change something.

    Raises:
        RunFailure: no answer, or a refusal.
    """
    route = path.partition("?")[0]
    try:
        return server.call(method, path, body, read=read, retries=0)
    except (Unanswered, Unreadable) as error:
        raise RunFailure(f"{route}: {error}") from None
    except Refused as error:
        missing = "; it takes no weights: start it with the line that `posttrain serve-command --follows` prints"
        raise RunFailure(f"{route}: HTTP {error.status}: {error}{missing if error.status == 404 else ''}") from None


@contextmanager
def _meanwhile(server: HttpServer, path: str, body: Any) -> Iterator[Future[Any]]:
    """The request under way while the block runs; whatever fails in either ends the other."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, server, "POST", path, body)
        try:
            yield asked
            asked.result()
        except BaseException:
            server.close()  # the request, if it waits for an answer, stops waiting
            raise


def _num_workers(answer: Any) -> int:
    count = answer["world_size"]
    if type(count) is not int or not 0 < count <= MOST_WORKERS:
        raise Unreadable(f"a world_size of {count!r:.80}")
    return count


def _address_of(host: str) -> str:
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return str(socket.getaddrinfo(host, None)[0][4][0])
