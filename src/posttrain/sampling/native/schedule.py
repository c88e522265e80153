"""Continuous batching: rows join and leave the batch at any step of one generation.

A row enters with its prompt's keys and values (computed once per prompt, all but the last token), feeds the last prompt
token first and then whatever it drew. The rows in flight are always the first slots. On a GPU the host reads the drawn
tokens only every few steps; tokens past the end of a row are discarded.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from posttrain.errors import RunFailure
from posttrain.randomness import uniforms
from posttrain.sampling.base import Conversation, Sampling
from posttrain.sampling.native.cache import Decoder, Prefix, SharedPrefixes, SlotCache
from posttrain.sampling.native.sampler import draw
from posttrain.types import Finish, with_float64

PREFILL_TOKENS = 16_384  # padded prompt tokens in one prefill pass
FIRST_COLUMNS = 256  # new tokens that the cache has room for before it first grows
STEPS_BETWEEN_LOOKS = 8  # on a GPU, where reading a token waits for the device
LONGEST_BURST = 512
ROWS_WORTH_SHARING = 2  # rows per prompt from which one common copy of its keys and values pays
# Finished rows are dropped, and free slots filled, once they are this share of the batch.
IDLE_SHARE = 1 / 16


class Schedule:
    """One generation over one decoder.

    Args:
        prompts: token ids, none empty.
        rows: the completions to sample, those of one prompt side by side.
        num_slots: rows in flight at most.
    """

    def __init__(
        self,
        decoder: Decoder,
        prompts: Sequence[Sequence[int]],
        rows: Sequence[Conversation],
        sampling: Sampling,
        num_slots: int,
    ) -> None:
        self.decoder, self.prompts, self.sampling = decoder, prompts, sampling
        self.waiting = deque(rows)
        self.num_slots = min(num_slots, len(rows))
        self.batch: list[Conversation] = []
        # Per slot: how many tokens it may still draw.
        self.remaining = np.zeros(self.num_slots, dtype=np.int64)
        self.is_abandoned: Callable[[int], bool] | None = None  # by prompt
        self.kept: tuple[int, Prefix] | None = None  # a prompt some of whose rows still wait
        limit, device = max(row.limit for row in rows), decoder.device
        self.tokens = torch.zeros(self.num_slots, dtype=torch.long, device=device)
        # Per slot: the position of the next token to feed, and the number of tokens drawn.
        self.counters = torch.zeros((2, self.num_slots), dtype=torch.long, device=device)
        self.draws: Tensor | None = None
        if sampling.temperature > 0:
            self.draws = with_float64(torch.zeros((self.num_slots, limit), device=device)).double()
        share = decoder.can_share and len(rows) >= ROWS_WORTH_SHARING * len({row.prompt for row in rows})
        longest = 0 if share else max(map(len, prompts))
        shared = SharedPrefixes(decoder.shapes, self.num_slots, device) if share else None
        size, transposed = longest + min(limit, FIRST_COLUMNS) + 1, decoder.transposed
        self.cache = SlotCache(
            decoder.shapes, self.num_slots, size, device=device, transposed=transposed, shared=shared
        )

    def run(self) -> None:
        """Fill every row's ``ids``, ``logprobs`` and ``finish``."""
        while self.waiting or self.batch:
            self._drop_finished()
            self._admit()
            if self.batch:
                self._collect(*self._step(self._burst()))

    def _burst(self) -> int:
        """Return the steps until the host must look: a row at its limit, or perhaps at a stop token."""
        nearest = int(self.remaining[: len(self.batch)].min())
        if not self.sampling.stop_ids:
            return min(nearest, LONGEST_BURST if self.is_abandoned is None else STEPS_BETWEEN_LOOKS)
        return min(nearest, 1 if self.decoder.device.type == "cpu" else STEPS_BETWEEN_LOOKS)

    def _step(self, steps: int) -> tuple[list[list[int]], list[list[float]]]:
        """Decode and draw ``steps`` times; ids and log-probabilities as ``[steps][rows]``."""
        rows = len(self.batch)
        tokens, counters = self.tokens[:rows], self.counters[:, :rows]
        draws = None if self.draws is None else self.draws[:rows]
        ids, probabilities = [], []
        for _ in range(steps):
            logits = self.decoder.decode(tokens, counters[0], self.cache)
            uniform = None if draws is None else draws.gather(1, counters[1, :, None].to(draws.device))
            tokens, probability = draw(logits, uniform, self.sampling)
            tokens = self._next(tokens)
            ids.append(tokens)
            probabilities.append(probability)
            counters.add_(1)
            self.cache.advance()
        self.tokens[:rows] = tokens
        if steps == 1:
            return [ids[0].tolist()], [probabilities[0].log_().tolist()]
        return torch.stack(ids).tolist(), torch.stack(probabilities).log_().tolist()

    def _next(self, drawn: Tensor) -> Tensor:
        """Return the next id of every row of the batch, ``int64 [R]``: the drawn one."""
        return drawn

    def _collect(self, ids: list[list[int]], logprobs: list[list[float]]) -> None:
        self.remaining[: len(self.batch)] -= len(ids)
        for r, row in enumerate(self.batch):
            if row.finish is None:
                row.finish = self._append(r, ids, logprobs)
                if row.finish is None and self.is_abandoned is not None and self.is_abandoned(row.prompt):
                    row.finish = "length"

    def _append(self, r: int, ids: list[list[int]], logprobs: list[list[float]]) -> Finish | None:
        """Append the tokens of the row in slot ``r``, up to its end; return how it ended."""
        row, stop_ids = self.batch[r], self.sampling.stop_ids
        for step_ids, step_logprobs in zip(ids, logprobs, strict=True):
            row.ids.append(step_ids[r])
            row.logprobs.append(step_logprobs[r])
            if step_ids[r] in stop_ids:
                return "stop"
        return "length" if self.remaining[r] <= 0 else None

    def _drop_finished(self) -> None:
        """Fill the places of finished rows with the batch's last rows, once it is worth it."""
        rows = len(self.batch)
        finished = [r for r in range(rows) if self.batch[r].finish is not None]
        if not finished:
            return
        # A finished row that stays goes on drawing, so none may stay past its limit.
        due = bool((self.remaining[:rows] <= 0).any())
        if not due and len(finished) < max(1.0, rows * IDLE_SHARE):
            return
        alive = rows - len(finished)
        targets = [r for r in finished if r < alive]
        sources = [r for r in range(alive, rows) if self.batch[r].finish is None]
        if targets:
            self._move(targets, sources)
        del self.batch[alive:]
        self.cache.refresh(alive)

    def _move(self, targets: list[int], sources: list[int]) -> None:
        """Put the rows in slots ``sources`` into slots ``targets``."""
        self.cache.move(targets, sources)
        self.tokens[targets] = self.tokens[sources]
        self.counters[:, targets] = self.counters[:, sources]
        if self.draws is not None:
            self.draws[targets] = self.draws[sources]
        self.remaining[targets] = self.remaining[sources]
        for target, source in zip(targets, sources, strict=True):
            self.batch[target] = self.batch[source]

    def _admit(self) -> None:
        """Move waiting rows into free slots; prompts that are new are prefilled."""
        free = self.num_slots - len(self.batch)
        count = min(free, len(self.waiting))
        if count == 0 or (self.batch and count < min(len(self.waiting), max(1.0, self.num_slots * IDLE_SHARE))):
            return
        taken = [self.waiting.popleft() for _ in range(count)]
        self.cache.reserve(max(len(self.prompts[row.prompt]) for row in taken) - 1)
        if self.kept is not None:
            again = [row for row in taken if row.prompt == self.kept[0]]
            self._enter(again, self.kept[1], {self.kept[0]: 0})
            taken = taken[len(again) :]
            self.kept = None if taken or not self._is_waiting(again[-1].prompt) else self.kept
        for chunk in self._chunks(taken):
            order = list(dict.fromkeys(row.prompt for row in chunk))
            prefix = self._prefill(order)
            self._enter(chunk, prefix, {prompt: i for i, prompt in enumerate(order)})
            if self._is_waiting(order[-1]):
                self.kept = (order[-1], prefix.select(len(order) - 1))
        self.cache.refresh(len(self.batch))

    def _is_waiting(self, prompt: int) -> bool:
        return bool(self.waiting) and self.waiting[0].prompt == prompt

    def _prefill(self, order: Sequence[int]) -> Prefix:
        """Compute the prompts without their last tokens, which are fed in the first decode step."""
        bodies = [self.prompts[prompt][:-1] for prompt in order]
        prefix = self.decoder.prefill([body or [0] for body in bodies])  # a prompt of one token has no body
        return Prefix(prefix.keys, prefix.values, [len(body) for body in bodies])

    def _chunks(self, rows: list[Conversation]) -> list[list[Conversation]]:
        """Cut ``rows`` between prompts so that one prefill pads to at most PREFILL_TOKENS."""
        chunks: list[list[Conversation]] = []
        seen: set[int] = set()
        longest = 0
        for row in rows:
            if row.prompt not in seen:
                longest = max(longest, len(self.prompts[row.prompt]))
                if not chunks or longest * (len(seen) + 1) > PREFILL_TOKENS:
                    chunks.append([])
                    seen, longest = set(), len(self.prompts[row.prompt])
                seen.add(row.prompt)
            chunks[-1].append(row)
        return chunks

    def _enter(self, rows: list[Conversation], prefix: Prefix, index: dict[int, int]) -> None:
        """Put ``rows`` into the slots after the batch."""
        if not rows:
            return
        first = len(self.batch)
        slots = slice(first, first + len(rows))
        self.cache.place(prefix, list(index), [index[row.prompt] for row in rows])
        self.batch += rows
        self.remaining[slots] = [row.limit for row in rows]
        lasts = [self.prompts[row.prompt][-1] for row in rows]
        positions = [len(self.prompts[row.prompt]) - 1 for row in rows]
        self._seat(slots, lasts, positions)
        if self.draws is not None:
            table = uniforms([row.key for row in rows], self.draws.shape[1])
            self.draws[slots] = torch.from_numpy(table).to(self.draws.device)

    def _seat(self, slots: slice | list[int], tokens: list[int], positions: list[int]) -> None:
        """Go on in these slots from ``tokens``, which are fed next, with the first uniform number of their keys."""
        device = self.decoder.device
        self.tokens[slots] = torch.tensor(tokens, device=device)
        self.counters[:, slots] = torch.tensor([positions, [0] * len(tokens)], device=device)


def check_finite(row: Conversation) -> None:
    """Refuse the completion of a model whose weights have diverged.

    Raises:
        RunFailure: the model gave log-probabilities that are not finite.
    """
    if not all(map(math.isfinite, row.logprobs)):
        raise RunFailure(
            f"the model's logits are not finite at token {len(row.ids)} of a completion of prompt {row.prompt}; "
            "its weights have diverged (lower train.lr, or go back to an earlier checkpoint)"
        )
