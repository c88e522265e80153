"""A game in turns."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from posttrain.errors import UsageError
from posttrain.randomness import generator
from posttrain.registry import register


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


class NumberGuess:
    """See ``number_guess``. The number follows from the seed."""

    def __init__(self, low: int, high: int, guesses: int) -> None:
        self.low, self.high, self.guesses = low, high, guesses
        self.number, self.left = low, guesses
        self.done, self.is_found = False, False

    def reset(self, *, seed: int) -> str:
        """Begin a new game."""
        self.number = int(generator(seed, "game").integers(self.low, self.high + 1))
        self.left, self.done, self.is_found = self.guesses, False, False
        return f"Find a number from {self.low} to {self.high} with {self.guesses} guesses."

    def get_reward(self) -> float:
        """Return 1 if the number was found."""
        return float(self.is_found)

    def guess(self, number: int) -> str:
        """Guesses the number; says whether it is higher, lower or right.

        Args:
            number: the guess.
        """
        if self.done:
            raise ValueError("the game is over")
        self.left -= 1
        self.is_found = number == self.number
        self.done = self.is_found or not self.left
        if self.is_found:
            return "right"
        direction = "higher" if number < self.number else "lower"
        return direction if self.left else f"{direction}; it was {self.number}"
