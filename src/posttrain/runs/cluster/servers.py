"""The vLLM servers of a run whose processes a cluster places: how many, and the orders for them that rank 0 gives.

Rank 0 says which server is wanted, as which generation (``engines/vllm/placed.py``); it is started on a node that has
room, and its url, or why there is none or no longer one, is left in the meeting's store. Whether a lost one is started
again is for the engine to say, which counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from posttrain import registry
from posttrain.errors import RecipeError
from posttrain.recipes.recipe import Recipe

if TYPE_CHECKING:
    from posttrain.runs.cluster.ray import Placed
    from posttrain.train.distributed import Meeting

WHERE = "rollout.engine"
PROOF = "config.json"  # in the folder of a server's model: what a node must see, too


@dataclass(frozen=True, slots=True)
class Fleet:
    """How many servers a run starts itself, and how many GPUs each is to have (0: as many as a rank has)."""

    size: int = 0
    gpus: int = 0


NO_SERVERS = Fleet()


def fleet_of(recipe: Recipe) -> Fleet:
    """The servers that rollouts of a recipe ask and its run starts.

    Of a run that samples ahead they are no matter of the cluster: the process that samples starts them.

    Raises:
        RecipeError: options that are none, or GPUs that cannot be shared out.
    """
    rollout = recipe.rollout
    if rollout is None or rollout.engine.name != "vllm" or rollout.staleness:
        return NO_SERVERS
    options = registry.find("engine", "vllm", WHERE).options(rollout.engine.options, WHERE)
    if options["url"] is not None or options["colocate"]:
        return NO_SERVERS
    size, gpus = options["servers"], len(options["gpus"] or ())
    if gpus % size:
        raise RecipeError(f"{WHERE}.gpus: {gpus} GPUs cannot be shared out among {size} servers (engine.servers)")
    return Fleet(size, gpus // size)


class Servers:
    """Those that work or are being started, by number.

    Args:
        meeting: where rank 0, and the others, find what became of an order.
        place: starts a server of a number on a node, as an order says (``Ranks.place``).
    """

    def __init__(self, meeting: Meeting, place: Callable[[int, Mapping[str, Any]], Placed]) -> None:
        self._meeting, self._place = meeting, place
        self._there: dict[int, tuple[int, Placed]] = {}

    def order(self, facts: Mapping[str, Any]) -> None:
        """Start a server; the one of that number from before is ended."""
        number = int(facts["number"])
        if number in self._there:
            self._there.pop(number)[1].end()
        self._there[number] = (int(facts["generation"]), self._place(number, facts))

    def look(self) -> None:
        """Say what has become of them since."""
        for number, (generation, server) in list(self._there.items()):
            told = server.look()
            if told is not None:
                key = "lost" if "why" in told else "server"
                self._meeting.say(f"{key} {number}/{generation}", told)
            if told is not None and "url" not in told:
                self._there.pop(number)[1].end()
