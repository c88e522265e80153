"""Games that were played at random: demonstrations of how a game is played, and not of how it is won."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from posttrain import registry
from posttrain.environments.contract import opened
from posttrain.environments.games import TextGame
from posttrain.environments.tools import result_text
from posttrain.errors import UsageError
from posttrain.option_types import Seed
from posttrain.randomness import derive_key, generator
from posttrain.recipes.document import complete_word
from posttrain.recipes.sections import read_word
from posttrain.registry import register
from posttrain.tasks.base import ExamplesOnDemand, Task
from posttrain.types import Call, Example, Message, Turn

MAX_MOVES = 1000  # of one game


def _complete(options: dict[str, Any], where: str) -> dict[str, Any]:
    """The options with those of the environment filled in and checked."""
    word = complete_word(
        read_word(options["environment"], f"{where}.environment"), "environment", f"{where}.environment"
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

    ``environment: {name: nim, max_heap: 21}``, with the prompt of the ``episodes`` that are to be played afterwards.

    Args:
        environment: a game that says what its ``legal_moves`` are, as ``nim`` and ``number_guess`` do.
        prompt: what the user says before the environment does.
        split: games of another name, and so of other seeds; a game may hold out beginnings for ``validation``.
        size: how many games there are (they cost nothing until they are read).
        seed: names other games.

    Raises:
        UsageError: an environment that says nothing of its legal moves, or whose game does not end.
    """
    word = read_word(environment, "task.environment")
    make = registry.find("environment", word.name, "task.environment").bind(word.options, "task.environment")
    game = registry.call("environment", make)
    if not isinstance(game, TextGame) or type(game).legal_moves is TextGame.legal_moves:
        raise UsageError(
            f"task.environment: {word.name!r} does not say which moves are legal; choose nim or number_guess, or a "
            "posttrain.environments.games.TextGame of yours with legal_moves"
        )
    return Task("random_play", split, _Games(make, f"random_play/{split}/{seed}", prompt, split, size))


class _Games(ExamplesOnDemand):
    """The game of each item: what it begins with and what is drawn follow from the item's name."""

    def __init__(self, make: Callable[[], TextGame], name: str, prompt: str, split: str, size: int) -> None:
        super().__init__(size)
        self.new_game, self.name, self.prompt, self.split = make, name, prompt, split

    def make(self, item: int) -> Example:
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
