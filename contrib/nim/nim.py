"""Nim against an opponent that makes no mistake, and games of it played at random to learn its form from."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from posttrain import registry
from posttrain.data.base import ExamplesOnDemand, Task
from posttrain.errors import UsageError
from posttrain.option_types import Seed
from posttrain.randomness import derive_key, generator
from posttrain.recipes.document import complete_component
from posttrain.recipes.sections import read_component
from posttrain.registry import register
from posttrain.sampling.environments.contract import opened
from posttrain.sampling.environments.tools import result_text
from posttrain.types import Call, Example, Message, Turn

Move = tuple[str, dict[str, Any]]  # a tool and its arguments


@register("environment")
def nim(
    *,
    max_heap: Annotated[int, Field(ge=1, le=1000)] = 21,
    take: Annotated[int, Field(ge=1, le=9)] = 3,
    held_out: list[int] | None = None,
    adjudicate: bool = False,
) -> Nim:
    """A heap of stones, from which two players take 1 to ``take`` in turn; who takes the last wins. Pays 1 for that.

    The model begins, from a heap that can be won, and its move says how many stones are left. The opponent plays as
    well as can be, and where every move of its own loses, at random. So the best play is paid 1, always, and one slip
    anywhere 0. (Who leaves a multiple of ``take + 1`` each time wins. Bouton 1901, "Nim, a game with a complete
    mathematical theory".)

    Args:
        max_heap: stones at most, in the beginning.
        take: stones at a time, at most.
        held_out: heaps from which games of other splits than ``train`` begin, and those of ``train`` never; by default
            all begin from any.
        adjudicate: a game ends once it is lost, for the opponent then claims it. What each play is paid stays the same.

    Raises:
        UsageError: a heap held out that no game begins from, or none left for training.
    """
    winnable = {heap for heap, wins in enumerate(winning(max_heap, take)) if wins}
    kept = set(held_out or ())
    if not kept <= winnable:
        raise UsageError(
            f"environment nim: held_out: no game begins from {min(kept - winnable)}; games begin from "
            f"{', '.join(map(str, sorted(winnable)))}"
        )
    if kept == winnable:
        raise UsageError("environment nim: held_out: no heap is left to train on; hold out fewer")
    return Nim(max_heap, take, sorted(winnable - kept), sorted(kept or winnable), adjudicate)


def winning(max_heap: int, take: int) -> list[bool]:
    """Return for each heap from 0 on whether the player to move can win it."""
    wins = [False]
    for heap in range(1, max_heap + 1):
        wins.append(not all(wins[heap - stones] for stones in range(1, min(take, heap) + 1)))
    return wins


class TextGame(ABC):
    """A game of turns: draws follow from the seed, moves are tools, ``score`` is the reward at its end.

    A game of your own sets itself up in ``_begin`` and returns its opening; its moves are public methods with
    types and docstrings that call ``_end`` when it is over. ``split`` is that of the episode.
    """

    def __init__(self) -> None:
        self.done, self.score, self.split = False, 0.0, "train"

    def reset(self, *, seed: int, split: str = "train") -> str:
        """Begin a new game."""
        self.done, self.score, self.split = False, 0.0, split
        return self._begin(generator(seed, "game"))

    def get_reward(self) -> float:
        """Return the score; 0 of a game that was not played to its end."""
        return self.score if self.done else 0.0

    @abstractmethod
    def _begin(self, random: np.random.Generator) -> str:
        """Set the game up; return its opening."""

    def _end(self, score: float, message: str) -> str:
        self.done, self.score = True, score
        return message


class Nim(TextGame):
    """See ``nim``. ``wins``: of each heap, whether who is to move can win it."""

    def __init__(
        self, max_heap: int, most: int, trained: Sequence[int], others: Sequence[int], adjudicate: bool
    ) -> None:
        super().__init__()
        self.most, self.trained, self.others, self.adjudicate = most, trained, others, adjudicate
        self.wins = winning(max_heap, most)
        self.heap = max_heap

    @property
    def legal_moves(self) -> list[Move]:
        """Return the heaps that a move may leave."""
        return [("leave", {"stones": stones}) for stones in self._choices()]

    @property
    def best_reward(self) -> float:
        """Return the reward of the best play against every opponent: 1 where the heap can be won, else 0."""
        return float(not self.done and self.wins[self.heap])

    def _begin(self, random: np.random.Generator) -> str:
        self._random = random
        self.heap = int(random.choice(self.trained if self.split == "train" else self.others))
        return f"{self.heap} stones. Take 1 to {self.most}; who takes the last wins."

    def leave(self, stones: int) -> str:
        """Takes stones from the heap until so many are left; says how many the other player leaves.

        Args:
            stones: how many are left.
        """
        if self.done:
            raise ValueError("the game is over")
        if stones not in self._choices():
            raise ValueError(f"of {self.heap} stones leave {self._choices()[0]} to {self._choices()[-1]}")
        self.heap = stones
        if self.heap == 0:
            return self._end(1.0, "you win")
        if self.adjudicate and self.wins[self.heap]:
            return self._end(0.0, f"I win from {self.heap}")
        good = [left for left in self._choices() if not self.wins[left]]
        self.heap = int(self._random.choice(good or self._choices()))
        return f"I leave {self.heap}" if self.heap else self._end(0.0, "I leave 0 and win")

    def _choices(self) -> range:
        return range(max(0, self.heap - self.most), self.heap)


# Games that were played at random: demonstrations of how a game is played, and not of how it is won.

MAX_MOVES = 1000  # of one game


def _complete(options: dict[str, Any], where: str) -> dict[str, Any]:
    """The options with those of the environment filled in and checked."""
    word = complete_component(
        read_component(options["environment"], f"{where}.environment"), "environment", f"{where}.environment"
    )
    return options | {"environment": {"name": word.name, **word.options}}


@register("task", held_out="validation", complete=_complete)
def random_play(
    *,
    environment: dict[str, Any] | str,
    prompt: str = "Let's play.",
    split: Literal["train", "validation", "test"] = "train",
    size: Annotated[int, Field(ge=1)] = 1024,
    seed: Seed = 0,
) -> Task:
    """Demonstrations of a game in which each move is drawn at random from those that are legal: its form, not its art.

    ``environment: {name: "nim:nim", max_heap: 21}``, with the prompt of the ``episodes`` to be played later.

    Args:
        environment: a game that says what its ``legal_moves`` are, as ``nim`` does.
        prompt: what the user says before the environment does.
        split: games of another name, and so of other seeds; a game may hold out beginnings for ``validation``.
        size: how many games there are (they cost nothing until they are read).
        seed: names other games.

    Raises:
        UsageError: an environment that says nothing of its legal moves, or whose game does not end.
    """
    word = read_component(environment, "task.environment")
    make = registry.find("environment", word.name, "task.environment").bind(word.options, "task.environment")
    game = registry.call("environment", make)
    if not isinstance(game, TextGame) or not hasattr(type(game), "legal_moves"):
        raise UsageError(
            f"task.environment: {word.name!r} does not say which moves are legal; choose nim:nim, or a "
            "nim.TextGame of yours with legal_moves"
        )
    return Task("random_play", split, _Games(make, f"random_play/{split}/{seed}", prompt, split, size))


class _Games(ExamplesOnDemand):
    """The game of each item: what it begins with and what is drawn follow from the item's name."""

    def __init__(self, make: Callable[[], Any], name: str, prompt: str, split: str, size: int) -> None:
        super().__init__(size, self._play)
        self.new_game, self.name, self.prompt, self.split = make, name, prompt, split

    def _play(self, item: int) -> Example:
        name = f"{self.name}/{item}"
        game, turns = self.new_game(), list[Turn]()
        example = Example(name, (Message("user", self.prompt),), meta={"split": self.split})
        text = game.reset(seed=derive_key(0, name), split=self.split)
        random = generator(0, f"{name}/moves")
        while not game.done:
            if len(turns) == MAX_MOVES:
                raise UsageError(f"task random_play: game {name} has not ended after {MAX_MOVES:,} moves")
            tool, arguments = game.legal_moves[int(random.integers(len(game.legal_moves)))]
            result = result_text(getattr(game, tool)(**arguments))
            turns.append(Turn("", (Call(tool, json.dumps(arguments), result, "ok"),)))
        return replace(example, messages=tuple(opened(example, text)), turns=tuple(turns))
