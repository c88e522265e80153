"""vLLM servers, one or several, as one engine: it divides a batch, and each has the weights before it answers.

The division is by place in the batch alone, in pieces of a row, so that most answers to one prompt come from one server
and its cache of prompts; a completion's seed belongs to its key, so which server draws it changes no seed. The weights
go to one server after the other, and each is compared with the model afterwards (``follow.py``).

A server of the run's own that fails is started again, while the others go on; what it had answered is kept, and the
rest is asked again with the same seeds. Of several processes that train, rank 0 starts the servers, and one that it has
lost at once; behind every batch all tell which ones they have lost, and it gives these the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from posttrain.engines.base import UNLIMITED_CONTEXT, Engine, Sampling
from posttrain.engines.conversation import Conversation, Groups, Respondent, converse_by_generating
from posttrain.engines.vllm.command import SERVED, ServerOptions
from posttrain.engines.vllm.engine import VllmEngine
from posttrain.engines.vllm.follow import Member, Orders
from posttrain.engines.vllm.placed import SERVERS
from posttrain.engines.vllm.server import check_gpus, free_port, interpreter
from posttrain.errors import EngineMismatch, RunFailure, UsageError
from posttrain.world import Within, World

Result = TypeVar("Result")
LOOK_SECONDS = 1.0


class Lost(Exception):
    """A batch is not complete, because servers of the run's own have failed."""


def following_fleet(
    model: Any, tokenizer: Any, urls: Sequence[str | None], own: dict[str, Any], restarts: int, asking: dict[str, Any]
) -> FollowingFleet:
    """Servers whose weights follow a model in training: those at ``urls``, or one of the run's own for each None.

    ``own``: what of ``ServerOptions`` the recipe says; ``asking``: as of ``Member``.
    """
    options = ServerOptions(**own, follows=True, empty=True, name=SERVED)
    starts = urls[0] is None
    shares = _shared_out(options, len(urls)) if starts else [options] * len(urls)
    members = [Member(model, tokenizer, url, share, **asking) for url, share in zip(urls, shares, strict=True)]
    return FollowingFleet(members, options if starts else None, restarts)


def _shared_out(own: ServerOptions, servers: int) -> list[ServerOptions]:
    """How each of the run's own servers is started: its GPUs, and its port if it is on this machine."""
    each, ports = len(own.gpus) // servers, list[int]()
    while len(ports) < servers:
        port = own.port + len(ports) if own.port else free_port(0)
        ports += [port] if port not in ports else []
    return [replace(own, port=port, gpus=own.gpus[i * each : (i + 1) * each]) for i, port in enumerate(ports)]


class AskedFleet(Engine):
    """Servers of one model, which share a batch out."""

    def __init__(self, members: Sequence[VllmEngine]) -> None:
        self.members = members

    @property
    def context_tokens(self) -> int:
        """What the server with the least room takes."""
        return min(member.context_tokens for member in self.members)

    def generate(self, prompts: Sequence[Sequence[int]], keys: Sequence[Sequence[int]], sampling: Sampling) -> Groups:
        """See ``Engine.generate``."""
        return self.ask(prompts, keys, sampling)

    def ask(self, prompts: Sequence[Sequence[int]], keys: Sequence[Sequence[int]], sampling: Sampling) -> Groups:
        """A batch, of all servers; each is told all prompts, so that a message names them by their number."""
        total, size = sum(map(len, keys)), len(self.members)
        shares: list[list[list[int]]] = [[[] for _ in keys] for _ in range(size)]
        n = 0
        for i, row in enumerate(keys):
            for key in row:
                shares[n * size // total][i].append(key)
                n += 1
        work = {
            (piece + self.world.rank) % size: share for piece, share in enumerate(shares) if any(share) or not total
        }
        said = self._side_by_side({i: (prompts, share, sampling) for i, share in work.items()})
        return [[one for i in work for one in said[i][n]] for n in range(len(keys))]

    def _side_by_side(self, work: dict[int, tuple[Any, ...]]) -> dict[int, Groups]:
        """What each member says to its work; the first failure that ends the batch ends all of it."""
        for member in self.members:
            member.is_hung_up = False
        with ThreadPoolExecutor(max(1, len(work)), "servers") as pool:
            try:
                asked = {pool.submit(self.members[i].generate, *what): i for i, what in work.items()}
                waiting: set[Future[Groups]] = set(asked)
                while waiting:
                    done, waiting = wait(waiting, LOOK_SECONDS, FIRST_COMPLETED)
                    self._look()
                    for future in sorted(done, key=asked.__getitem__):
                        if (error := future.exception()) is not None:
                            self._failed(asked[future], error)
            except BaseException:
                for member in self.members:
                    member.hang_up()
                raise
        return {i: future.result() for future, i in asked.items() if future.exception() is None}

    def _look(self) -> None:
        """Called every second while servers are asked."""

    def _failed(self, number: int, error: BaseException) -> None:
        raise error


class FollowingFleet(AskedFleet):
    """Servers whose weights follow; ``own``: how the run's own are started, None for servers that the user started."""

    members: Sequence[Member]

    def __init__(self, members: Sequence[Member], own: ServerOptions | None, most_restarts: int) -> None:
        super().__init__(members)
        self.own, self.restarts, self.most_restarts = own, 0, most_restarts
        self.reader = members[0].reader
        for member in members:
            member.reader = self.reader
        self.version = -1
        self._lost: dict[int, str] = {}

    def settle(self, folder: Path | None, world: World, placed_as: str | None = None) -> Engine:
        """See ``Engine.settle``."""
        if self.own is None:
            return super().settle(folder, world)
        size = len(self.members)
        for number, member in enumerate(self.members):
            name = f"{placed_as or SERVERS}-{number + 1}"
            if folder is not None:
                member.folder = folder if size == world.size == 1 and placed_as is None else folder / name
            if placed_as is not None:
                member.orders = Orders(world, name, self.own.port + number if self.own.port else 0)
        if placed_as is None and world.is_main:
            interpreter()  # missed before anything is trained
            check_gpus(self.own.gpus, self.members[0].where)
            for member in self.members:
                free_port(member.own.port if member.own else 0, where=member.where)
            if size > 1 and not self.own.gpus and next(self.members[0].model.parameters()).device.type == "cuda":
                where = self.members[0].where
                raise UsageError(f"{where}.servers: {size} of them need GPUs of their own; name these in {where}.gpus")
        return super().settle(folder, world)

    def take_parts(self, within: Within) -> None:
        """See ``Engine.take_parts``."""
        self.reader.take_parts(within, self.world)

    @property
    def context_tokens(self) -> int:
        """As the servers said when they were given weights: one that is lost since is found when it is asked."""
        known = [member._served for member in self.members if member._served is not None]
        return min(served.context or UNLIMITED_CONTEXT for served in known) if known else super().context_tokens

    def sync(self, version: int) -> None:
        """See ``Engine.sync``. The first one starts the servers, where the run has its own.

        Raises:
            UsageError: no server at an address, or one of another model or tokenizer, or that takes no weights.
        """
        if version == self.version:
            return
        self.reader.by_main(self.world, lambda: self._hand_over(version, range(len(self.members))))
        self._tell()
        self.version = version

    def generate(self, prompts: Sequence[Sequence[int]], keys: Sequence[Sequence[int]], sampling: Sampling) -> Groups:
        """See ``Engine.generate``."""
        if self.version < 0:
            self.sync(0)
        return self._until_answered(lambda: self.ask(prompts, keys, sampling))

    def close(self) -> None:
        """End the servers, where they are the run's own."""
        for member in self.members:
            member.close()
        self.version = -1

    def _converse(
        self,
        prompts: Sequence[Sequence[int]],
        rows: Sequence[Conversation],
        sampling: Sampling,
        respondent: Respondent,
    ) -> int:
        """See ``Engine._converse``; behind a loss the rows go on with the turn that they were at."""

        def go_on() -> int:
            converse_by_generating(self.ask, prompts, [r for r in rows if r.finish is None], sampling, respondent)
            return self.version

        if self.version < 0:
            self.sync(0)
        return self._until_answered(go_on)

    def _look(self) -> None:
        """Hang up on servers that are gone and whose connections do not show it, as when a machine is."""
        for number, member in enumerate(self.members):
            if number not in self._lost and not member.is_hung_up and member.loss() is not None:
                member.hang_up()

    def _side_by_side(self, work: dict[int, tuple[Any, ...]]) -> dict[int, Groups]:
        said = super()._side_by_side(work)
        if self._lost:
            raise Lost
        return said

    def _failed(self, number: int, error: BaseException) -> None:
        """Note the loss of a server of the run's own, and start it again while the others go on; all else is raised.

        Not where other processes may still ask at the address that it will have: one without weights would answer them.
        """
        if (
            self.own is None
            or self.in_background
            or not isinstance(error, RunFailure)
            or isinstance(error, EngineMismatch)
        ):
            raise error
        self._lost[number] = self.members[number].loss() or str(error)
        if self.world.size == 1 or (self.world.is_main and not self.own.port):
            self._replace(number, self._lost[number])

    def _until_answered(self, work: Callable[[], Result]) -> Result:
        """``work``, again for as long as a process has lost a server on the way."""
        for member in self.members:
            member.answered.clear()
        while True:
            self._lost, result = {}, list[Result]()
            with suppress(Lost):
                result = [work()]
            if self.own is None or self.in_background:
                return result[0]
            lost = {k: why for theirs in self.world.gather([self._lost], "lost servers") for k, why in theirs.items()}
            if not lost:
                return result[0]
            self.reader.by_main(self.world, partial(self._give_back, lost))
            self._tell()

    def _give_back(self, lost: dict[int, str]) -> None:
        """Start lost servers again, with the weights of now."""
        for number, why in sorted(lost.items()):
            if self.members[number].is_current:  # not started again yet, and nobody asks it any more
                self._replace(number, why)
        self._hand_over(self.version, sorted(lost))

    def _hand_over(self, version: int, numbers: Sequence[int]) -> None:
        """Give these servers the weights; those that do not run yet are started, side by side."""
        for number in numbers:
            member = self.members[number]
            if member.folder is not None:
                member.folder.mkdir(exist_ok=True, parents=True)
            if member.own is not None and member.process is None:
                member.launch()
        for number in numbers:
            self._hand_over_to(number, version)

    def _hand_over_to(self, number: int, version: int) -> None:
        while True:
            try:
                return self.members[number].give_weights(version)
            except EngineMismatch:
                raise
            except RunFailure as failure:
                was_there = getattr(self.members[number].process, "is_kept", False)
                if self.own is None or (self.version < 0 and not was_there):
                    raise  # not ours, or one that never worked
                self._replace(number, str(failure))

    def _replace(self, number: int, why: str) -> None:
        """Start a server again, in the place of one that has failed; it is not waited for.

        Raises:
            RunFailure: that was done too often.
        """
        size = len(self.members)
        what = f"{'the vLLM server' if size == 1 else f'vLLM server {number + 1} of {size}'} failed: {why}"
        assert self.own is not None, "a server of the run's own"
        if self.restarts == self.most_restarts:
            raise RunFailure(
                f"{what}. Servers were started again {self.restarts} times already "
                f"({self.members[number].where}.restarts). {self.members[number].tail()}"
            )
        self.restarts += 1
        self._notices += (
            f"{what}; it is started again, given the weights of now, and asked for what it had not answered, with the "
            "same seeds",
        )
        self.members[number].launch(anew=True, moves=not self.own.port)

    def _tell(self) -> None:
        """Which servers there are, from rank 0 to the other processes."""
        places = self.world.tell([member.place for member in self.members], "the servers' weights")
        for member, place in zip(self.members, places, strict=True):
            member.place = place
