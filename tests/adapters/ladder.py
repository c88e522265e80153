"""A class in TRL's contract, with nothing of this package in it: both packages are given it as it stands."""

from __future__ import annotations

from typing import ClassVar


class Ladder:
    """Climb to the rung that the row names."""

    played: ClassVar[list[Ladder]] = []

    def __init__(self):
        Ladder.played.append(self)

    def reset(self, **row) -> str | None:
        self.goal, self.rung, self.said = row["goal"], 0, []
        return f"The goal is rung {self.goal}."

    def climb(self, rungs: int, note: str = "") -> str:
        """
        Climb up or down.

        Args:
            rungs: How many; down if negative.
            note: What to write on the wall.

        Returns:
            Where you are.
        """
        self.rung += rungs
        self.said.append((rungs, note))
        return f"You are on rung {self.rung}."

    def get_reward(self) -> float:
        return float(self.rung == self.goal)
