"""vLLM servers that whoever started the processes of a run starts for them, somewhere else (``scale.launcher: ray``).

A process orders one under its name and a mark of that order; the answer is its url, or why there is none. A server that
lives is kept for a process that was started again, and has to be in order for that: not between two versions of its
weights. ``runs/cluster/servers.py`` is the other side.
"""

from __future__ import annotations

import json
import secrets
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from posttrain import registry
from posttrain.engines.vllm.command import ServerOptions
from posttrain.engines.vllm.server import START_SECONDS
from posttrain.errors import RunFailure, UsageError
from posttrain.recipes.recipe import Recipe
from posttrain.recipes.sections import Word
from posttrain.world import World

LOOK_SECONDS = 0.2
ANSWER_SECONDS = 10.0  # for a server that is kept to say that it is in order
PATIENCE_SECONDS = 120.0  # beyond what the server may take: for a place, and for a node that is found to be gone
SERVERS, EVAL_SERVERS = "server", "eval-server"  # of the rollouts, and of what evaluations alone ask


def placed_servers(recipe: Recipe) -> dict[str, int]:
    """The servers that a run's processes order, by name: how many GPUs each is to have (0: as many as a rank has).

    Raises:
        RecipeError: options that are none.
    """
    return dict(_placed(recipe))


def _placed(recipe: Recipe) -> Iterator[tuple[str, int]]:
    rollout, evaluates = recipe.rollout, recipe.eval.engine
    samples = Word(name="native") if rollout is None else rollout.engine
    yield from _fleet(SERVERS, "rollout.engine", samples)
    same = evaluates is None or (evaluates.name, evaluates.options) == (samples.name, samples.options)
    if recipe.eval.every and not same:
        yield from _fleet(EVAL_SERVERS, "eval.engine", evaluates or samples)


def _fleet(name: str, where: str, word: Word) -> Iterator[tuple[str, int]]:
    if word.name != "vllm":
        return
    options = registry.find("engine", "vllm", where).options(word.options, where)
    if options["url"] is not None or options["colocate"]:
        return
    size, gpus = options["servers"], len(options["gpus"] or ())
    yield from ((f"{name}-{number + 1}", gpus // size) for number in range(size))


class PlacedServer:
    """In the place of ``OwnServer``; ``url`` is known when ``wait`` has returned.

    ``model``: the folder of ``follow.Member``, which all nodes see; ``world``: of whom it is ordered. ``where``: see
    ``VllmEngine``. ``place``: name and mark of the order. ``is_kept``: it was there before.
    """

    def __init__(self, world: World, name: str, model: str, options: ServerOptions, where: str) -> None:
        self.url, self.place, self.is_kept = "", "", False
        self._world, self._name = world, name
        self._order = {"model": model, "options": asdict(options), "where": where}

    def start(self, anew: bool = False) -> None:
        """Order it. ``anew``: whatever server of that name is there is ended, however well it is."""
        mark = secrets.token_hex(4)
        self.place = f"{self._name}/{mark}"
        self._world.order(self._name, {**self._order, "mark": mark, "anew": anew})

    def wait(self) -> None:
        """Until it is there and well.

        Raises:
            UsageError: what a node lacks, which the user has to mend.
            RunFailure: it could not be started, or there was no room for it.
        """
        told = self._answer()
        if told.get("is_kept") and not _is_in_order(told["url"]):
            self.start(anew=True)
            told = self._answer()
        if told.get("problem"):
            raise UsageError(told["problem"])
        self.url, self.is_kept = told["url"], told.get("is_kept", False)

    def _answer(self) -> dict[str, Any]:
        deadline = time.monotonic() + START_SECONDS + PATIENCE_SECONDS
        while (told := self._world.delivered(f"server {self.place}")) is None:
            if (lost := loss_of(self._world, self.place)) is not None:
                raise RunFailure(lost)
            if time.monotonic() > deadline:
                raise RunFailure(f"no vLLM server was there after {START_SECONDS + PATIENCE_SECONDS:g} seconds")
            time.sleep(LOOK_SECONDS)
        answer: dict[str, Any] = told
        return answer

    def stop(self) -> None:
        """Nothing: who placed it ends it, for the next order or with the run."""

    def tail(self) -> str:
        """What the other side knows of its end is in the reason already."""
        return ""


def _is_in_order(url: str) -> bool:
    """Whether a server answers and takes requests: one whose weights were being replaced does not."""
    try:
        with urllib.request.urlopen(f"{url}/is_paused", timeout=ANSWER_SECONDS) as answer:
            return json.load(answer)["is_paused"] is False
    except (OSError, ValueError, LookupError, TypeError):
        return False


def loss_of(world: World, place: str) -> str | None:
    """Why the server of an order is gone, if it is."""
    told = world.delivered(f"lost {place}")
    return None if told is None else str(told["why"])
