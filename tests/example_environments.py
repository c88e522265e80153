"""Environments and tools of a user's own, right and wrong ones, for the tests."""

from __future__ import annotations

import asyncio
import threading
import time

from posttrain.sampling.environments.contract import EnvironmentFailed

RELEASED = threading.Event()  # what hangs goes on when the tests are over


class Echo:
    """A class as it is written for TRL's ``environment_factory``: nothing of this package in it."""

    def __init__(self):
        self.reward = 0.0

    def reset(self, **kwargs) -> str | None:
        self.reward = 0.0
        self.row = kwargs
        return f"Echo {kwargs['seed'] % 97}."

    def echo(self, message: str, times: int = 1) -> str:
        """
        Echo the message.

        Args:
            message: What to say.
            times: How often.

        Returns:
            The message.
        """
        self.reward += len(message) * times
        return message * times

    def fail(self, reason: str) -> str:
        """Raises an error.

        Args:
            reason: what it says.
        """
        raise ValueError(reason)

    def _private(self, x):
        return x

    def get_reward(self) -> float:
        return self.reward


class Waiting:
    """Async methods, as clients have them."""

    async def reset(self):
        await asyncio.sleep(0)
        self.loop = asyncio.get_running_loop()

    async def wait(self, seconds: float) -> str:
        """Waits, in the loop that reset ran in."""
        await asyncio.sleep(seconds)
        return str(asyncio.get_running_loop() is self.loop)


class Hanging:
    """One tool that never comes back."""

    def reset(self):
        return None

    def hang(self) -> str:
        """Hangs."""
        RELEASED.wait(120)
        return "late"

    def answer(self) -> str:
        """Answers."""
        return "here"


class ShowsNoText:
    """Begins with what only a program reads."""

    def reset(self):
        return {"board": [0, 0, 0]}

    def answer(self) -> str:
        """Answers."""
        return "here"


class Broken:
    """Fails by itself, in every episode whose seed is even."""

    def reset(self, seed: int):
        self.seed = seed

    def use(self) -> str:
        """Uses it."""
        if self.seed % 2 == 0:
            raise EnvironmentFailed("the server is down")
        return "used"


class Untyped:
    def reset(self):
        return None

    def guess(self, number):
        """Guesses."""
        return number


class Undescribed:
    def reset(self):
        return None

    def guess(self, number: int):
        return number


class NoReset:
    def guess(self, number: int) -> str:
        """Guesses."""
        return str(number)


class Drawing:
    """Opens with a text that does not follow from the seed."""

    count = 0

    def reset(self):
        Drawing.count += 1
        return f"Episode {Drawing.count}"

    def answer(self) -> str:
        """Answers."""
        return "here"


def add(a: int, b: int = 0) -> int:
    """Adds two numbers.

    Args:
        a: one of them.
        b: the other.
    """
    return a + b


def slow_or_quick(milliseconds: int) -> str:
    """Waits so long.

    Args:
        milliseconds: how long.
    """
    time.sleep(milliseconds / 1000)
    return f"waited {milliseconds}"
