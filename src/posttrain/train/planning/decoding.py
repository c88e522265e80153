"""Seconds of continuous batching: what token steps of rows of many lengths take, on one GPU or on several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

Span = tuple[int, int]  # of an answer: what is written already, and up to where it is written now


@dataclass(frozen=True, slots=True)
class Decoder:
    """GPUs that share the prompts out; on each, as soon as one of the ``slots`` rows has ended another one joins.

    A token step takes the larger of reading weights and cache and of computing its rows, and at least ``least``. A row
    that goes on is read anew, with its prompt; the prompt of one that begins once for its group.

    prompt: tokens. weights, cache, row: seconds of reading the weights, of reading one token's keys and values, and of
    computing one token.
    """

    gpus: int
    slots: int
    group: int
    prompt: int
    weights: float
    cache: float
    row: float
    least: float

    def seconds(self, spans: Sequence[Sequence[Span]]) -> float:
        """Until the last of these answers, by prompt, is written as far as it is to be."""
        shares = ([span for of_prompt in spans[i :: self.gpus] for span in of_prompt] for i in range(self.gpus))
        return max(self._alone(share) for share in shares)

    def _alone(self, spans: Sequence[Span]) -> float:
        ends: list[Span] = []  # by token step: the rows in flight, and the context that each has then
        read = sum(self.prompt + begun if begun else self.prompt / self.group for begun, _ in spans)
        seconds, step, context, joined = read * self.row, 0, 0, 0
        while joined < len(spans) or ends:
            while joined < len(spans) and len(ends) < self.slots:
                begun, end = spans[joined]
                heappush(ends, (step + end - begun, self.prompt + end))
                context += self.prompt + begun
                joined += 1
            steps, rows = ends[0][0] - step, len(ends)
            reading = self.weights + self.cache * (context + rows * steps / 2)
            seconds += steps * max(reading, rows * self.row, self.least)
            step, context = step + steps, context + rows * steps
            while ends and ends[0][0] == step:
                context -= heappop(ends)[1]
        return seconds
