"""A vLLM server that whoever started the processes of a run starts for them, somewhere else (``scale.launcher: ray``).

Rank 0 orders it, under its number and a generation that goes up with every order; the answer is its url, or why there
is none. ``runs/cluster/servers.py`` is the other side.
"""

from __future__ import annotations

import time
from dataclasses import asdict

from posttrain.engines.vllm.command import ServerOptions
from posttrain.engines.vllm.server import START_SECONDS
from posttrain.errors import RunFailure, UsageError
from posttrain.world import World

LOOK_SECONDS = 0.2
PATIENCE_SECONDS = 120.0  # beyond what the server may take: for a place, and for a node that is found to be gone


class PlacedServer:
    """In the place of ``OwnServer``; ``url`` is known when ``wait`` has returned.

    ``model``: the folder of ``FollowingEngine``, which all nodes see; ``world``: of whom it is ordered.
    """

    def __init__(self, world: World, number: int, generation: int, model: str, options: ServerOptions) -> None:
        self.url = ""
        self._world, self._place = world, f"{number}/{generation}"
        self._order = {"number": number, "generation": generation, "model": model, "options": asdict(options)}

    def start(self) -> None:
        """Order it; the one of the generation before is ended."""
        self._world.order(self._order)

    def wait(self) -> None:
        """Until it is there and well.

        Raises:
            UsageError: what a node lacks, which the user has to mend.
            RunFailure: it could not be started, or there was no room for it.
        """
        deadline = time.monotonic() + START_SECONDS + PATIENCE_SECONDS
        while (told := self._world.delivered(f"server {self._place}")) is None:
            if (lost := loss_of(self._world, self._place)) is not None:
                raise RunFailure(lost)
            if time.monotonic() > deadline:
                raise RunFailure(f"no vLLM server was there after {START_SECONDS + PATIENCE_SECONDS:g} seconds")
            time.sleep(LOOK_SECONDS)
        if told.get("problem"):
            raise UsageError(told["problem"])
        self.url = told["url"]

    def stop(self) -> None:
        """Nothing: who placed it ends it, for the next generation or with the run."""

    def tail(self) -> str:
        """What the other side knows of its end is in the reason already."""
        return ""


def loss_of(world: World, place: str) -> str | None:
    """Why the server of a ``number/generation`` is gone, if it is."""
    told = world.delivered(f"lost {place}")
    return None if told is None else str(told["why"])
