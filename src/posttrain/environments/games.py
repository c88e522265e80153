"""Games in turns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated

import numpy as np
from pydantic import Field

from posttrain.errors import UsageError
from posttrain.randomness import generator
from posttrain.registry import register


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

    def _end(self, score: float, said: str) -> str:
        self.done, self.score = True, score
        return said


@register("environment")
def number_guess(
    *,
    low: Annotated[int, Field(ge=0)] = 1,
    high: Annotated[int, Field(ge=1)] = 20,
    guesses: Annotated[int, Field(ge=1)] | None = None,
) -> NumberGuess:
    """A number is to be found; each guess is answered with ``higher``, ``lower`` or ``right``. Pays 1 if it is found.

    With k guesses among n numbers, halving finds ``min(n, 2^k − 1)`` of them, and nothing finds more.

    Args:
        low, high: the number is one of these or between them, each as likely.
        guesses: how many there are; by default as many as halving needs.

    Raises:
        UsageError: ``low`` is not below ``high``.
    """
    if low >= high:
        raise UsageError(f"environment number_guess: low ({low}) must be below high ({high})")
    return NumberGuess(low, high, (high - low + 1).bit_length() if guesses is None else guesses)


class NumberGuess(TextGame):
    """See ``number_guess``."""

    def __init__(self, low: int, high: int, guesses: int) -> None:
        super().__init__()
        self.low, self.high, self.guesses = low, high, guesses
        self.number, self.left = low, guesses

    def _begin(self, random: np.random.Generator) -> str:
        self.number, self.left = int(random.integers(self.low, self.high + 1)), self.guesses
        return f"Find a number from {self.low} to {self.high} with {self.guesses} guesses."

    def guess(self, number: int) -> str:
        """Guesses the number; says whether it is higher, lower or right.

        Args:
            number: the guess.
        """
        if self.done:
            raise ValueError("the game is over")
        self.left -= 1
        if number == self.number:
            return self._end(1.0, "right")
        said = "higher" if number < self.number else "lower"
        return said if self.left else self._end(0.0, f"{said}; it was {self.number}")
