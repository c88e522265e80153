"""Respondents whose replies are known beforehand: a function of whom they answer, the turn and what was said in it."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from posttrain.sampling.base import Reply
from posttrain.types import Finish

Script = Callable[[int, int, int, Sequence[int]], Reply]


def wordy(vocab: Sequence[int], longest: int = 5, turns: int = 4) -> Script:
    """Up to ``turns`` turns, fewer for some rows, with replies of 0 to ``longest`` ids out of ``vocab``."""

    def reply(prompt: int, sample: int, turn: int, ids: Sequence[int]) -> Reply:
        if turn + 1 >= 1 + (prompt + 2 * sample) % turns:
            return Reply(finish="ended" if sample % 2 else "out_of_turns")
        seed = zlib.crc32(repr((prompt, sample, turn, tuple(ids))).encode())
        numbers = np.random.default_rng(seed)
        return Reply(tuple(numbers.choice(vocab, numbers.integers(0, longest + 1)).tolist()))

    return reply


class Scripted:
    """Answers by ``script`` and keeps what it heard and answered, by (prompt, sample).

    ``seconds``: how long the n-th reply of all takes to make, in the background.
    """

    def __init__(self, script: Script, seconds: Callable[[int], float] | None = None) -> None:
        self.script = script
        self.seconds = seconds
        self.turns: dict[tuple[int, int], list[tuple[int, ...]]] = {}
        self.finishes: dict[tuple[int, int], list[Finish]] = {}
        self.replies: dict[tuple[int, int], list[Reply]] = {}
        self.order: list[tuple[int, int]] = []
        self.pool = ThreadPoolExecutor(4)
        self.made: dict[tuple[int, int], Future[Reply]] = {}

    def hear(self, prompt: int, sample: int, turn: Sequence[int], finish: Finish) -> None:
        row = (prompt, sample)
        assert row not in self.made, "the turn before has not been answered"
        self.turns.setdefault(row, []).append(tuple(turn))
        self.finishes.setdefault(row, []).append(finish)
        self.order.append(row)
        wait = 0.0 if self.seconds is None else self.seconds(len(self.order))
        self.made[row] = self.pool.submit(self._make, row, len(self.turns[row]) - 1, tuple(turn), wait)

    def reply(self, prompt: int, sample: int) -> Reply:
        answer = self.made.pop((prompt, sample)).result(timeout=120)
        self.replies.setdefault((prompt, sample), []).append(answer)
        return answer

    def _make(self, row: tuple[int, int], number: int, turn: tuple[int, ...], wait: float) -> Reply:
        time.sleep(wait)
        return self.script(*row, number, turn)

    def transcript(self, prompt: int, sample: int) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """Ids and who wrote them; what was replied to the last turn is not said."""
        turns, replies = self.turns[prompt, sample], self.replies[prompt, sample]
        assert len(replies) == len(turns)
        ids: list[int] = []
        own: list[bool] = []
        for turn, reply in zip(turns, [*replies[:-1], Reply()], strict=True):
            ids += [*turn, *reply.ids]
            own += [True] * len(turn) + [False] * len(reply.ids)
        return tuple(ids), tuple(own)
