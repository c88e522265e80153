"""Continuous batching: rows join and leave at any step of a generation.

A row enters with its prompt's keys and values, computed once per prompt for all except the last token. It is then fed
this last token, followed by sampled ones. Active rows occupy the first slots. On GPU the host reads sampled tokens
only every few steps, and discards tokens after a row's end.

With a respondent, rows keep their slots and cache after a turn. Replies are fed through ordinary decode steps by
forcing ids. The host then checks every step, so rows never continue past their turn. The batch waits for replies, so
results depend only on keys and replies.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttrain.errors import RunFailure
from posttrain.models.forward.logit_rules import apply_rules, ids_as_mask
from posttrain.models.forward.routing.replay import ExpertRecorder
from posttrain.randomness import uniforms
from posttrain.sampling.base import Conversation, Respondent, Sampling, check_ids, turn_key
from posttrain.sampling.native.cache import Decoder, Prefix, SharedPrefixes, SlotCache
from posttrain.sampling.native.recorded import RecordedSteps
from posttrain.sampling.native.sampler import DrawnSets, draw, draw_kept
from posttrain.sampling.stop_texts import StopFinder
from posttrain.types import Finish, with_float64

PREFILL_TOKENS = 16_384  # padded prompt tokens in one prefill pass
FIRST_COLUMNS = 256  # initial room for new tokens
STEPS_BETWEEN_LOOKS = 8  # on a GPU, where reading a token waits for the device
LONGEST_BURST = 512
ROWS_WORTH_SHARING = 2  # minimum rows per prompt for sharing its keys and values
# Drop finished rows and fill free slots once they exceed this fraction of the batch.
IDLE_SHARE = 1 / 16


class DrawnSteps:
    """Draws from several steps on the host: ids and log-probabilities by step and row, optionally with kept sets.

    Args:
        ids: ``int64 [S, R]``; probabilities: ``[S, R]``; sets: ``int32 [S, R, 1 + K]`` from ``draw_kept``, or None;
            experts: ``int16 [S, R, routers, k]`` chosen for each step's input tokens, or None.
    """

    def __init__(self, ids: Tensor, probabilities: Tensor, sets: Tensor | None, experts: Tensor | None = None) -> None:
        self.ids: list[list[int]] = ids.tolist()
        self.logprobs: list[list[float]] = probabilities.log().tolist()
        self.sets: DrawnSets | None = None
        if sets is not None:
            self.sets = DrawnSets(sets)
        self.experts = experts
        if experts is not None:
            self.experts = experts.cpu()

    def append_experts(self, row: Conversation, step: int, place: int) -> None:
        """Append the experts of one step's input token, for the row at ``place``."""
        if self.experts is not None:
            row.experts.append(self.experts[step, place, None])


class Schedule:
    """One generation over one decoder.

    Args:
        prompts: nonempty token id sequences.
        rows: completions to sample, grouped by prompt.
        num_slots: maximum rows in flight.
        respondent: replies to turns with ids below ``vocab_size``. None for single-turn completions.
        limit: maximum tokens of rows that join later; None if none can join.
        stop_texts: finder for ``sampling.stop``.
        recorder: records expert choices, for ``sampling.keeps_experts``.

    If a caller sets ``finish`` between steps, the row leaves the batch or never enters it.
    """

    def __init__(
        self,
        decoder: Decoder,
        prompts: Sequence[Sequence[int]],
        rows: Sequence[Conversation],
        sampling: Sampling,
        num_slots: int,
        respondent: Respondent | None = None,
        vocab_size: int | None = None,
        limit: int | None = None,
        stop_texts: StopFinder | None = None,
        recorder: ExpertRecorder | None = None,
    ) -> None:
        self.stop_texts, self.recorder = stop_texts, recorder
        self.prompt_experts: dict[int, Tensor] = {}  # of prompts without their last token, by prompt
        self.decoder, self.prompts, self.sampling = decoder, list(prompts), sampling
        self.respondent, self.vocab_size = respondent, vocab_size
        self.waiting = deque(rows)
        if limit is None:
            num_slots = min(num_slots, len(rows))
            limit = max(row.limit for row in rows)
        self.num_slots = num_slots
        self.longest_burst = LONGEST_BURST
        self.batch: list[Conversation] = []
        self.cut: list[Conversation] = []  # rows without room; their last reply is not fed
        self.recorded: RecordedSteps | None = None
        self.kept: tuple[int, Prefix] | None = None  # a prompt with rows still waiting
        self.limit = limit
        device = decoder.device
        # Per slot: tokens left to feed, and reply ids left among them; ...
        self.remaining, self.unsaid = np.zeros((2, num_slots), dtype=np.int64)
        # ... next token, its position, and number of draws; ...
        self.tokens = torch.zeros(num_slots, dtype=torch.long, device=device)
        self.counters = torch.zeros((2, num_slots), dtype=torch.long, device=device)
        self.per_slot: list[Any] = [self.remaining, self.unsaid, self.tokens, self.counters.T]
        self.draws: Tensor | None = None  # ... uniform number per step; ...
        if sampling.temperature > 0:
            self.draws = with_float64(torch.zeros((num_slots, limit), device=device)).double()
            self.per_slot.append(self.draws)
        self.forced_ids: Tensor | None = None  # ... forced id per step of the turn (-1: use the draw).
        if respondent is not None:
            self.forced_ids = torch.full((num_slots, limit), -1, dtype=torch.long, device=device)
            self.per_slot.append(self.forced_ids)
        self.rules = sampling.rules
        # Reply ids at the start of a turn; tokens seen so far.
        self.num_said = torch.zeros(num_slots, dtype=torch.long, device=device)
        self.per_slot.append(self.num_said)
        self.seen: Tensor | None = None
        if self.rules is not None and self.rules.repetition_penalty != 1.0:
            assert vocab_size is not None, "a penalty is of the tokens of a vocabulary"
            self.seen = torch.zeros((num_slots, vocab_size), dtype=torch.bool, device=device)
            self.per_slot.append(self.seen)
        self.ends: Tensor | None = None  # ids barred by ``min_tokens``
        if self.rules is not None and self.rules.barred_ids:
            assert vocab_size is not None, "stop ids are of a vocabulary"
            self.ends = ids_as_mask(self.rules.barred_ids, vocab_size, device)
        share = decoder.can_share and len(rows) >= ROWS_WORTH_SHARING * len({row.prompt for row in rows})
        shared = SharedPrefixes(decoder.shapes, num_slots, device) if share else None
        size = (0 if share else max(map(len, prompts))) + min(limit, FIRST_COLUMNS) + 1
        self.cache = SlotCache(decoder, num_slots, size, shared)

    def run(self) -> None:
        """Fill ``ids``, ``logprobs`` and ``finish`` for all rows.

        Raises:
            UsageError: a reply contains unknown ids. Respondent errors also propagate.
        """
        while not self.is_done:
            self.step()
        if self.respondent is not None:
            for row in self.cut:
                self.respondent.reply(row.prompt, row.sample)

    @property
    def is_done(self) -> bool:
        """True once all rows have finished."""
        return not self.waiting and not self.batch

    @property
    def num_free(self) -> int:
        """Number of rows that can join without waiting for a slot."""
        return self.num_slots - len(self.batch) - len(self.waiting)

    def step(self) -> None:
        """Drop finished rows, admit waiting ones, and sample the batch."""
        self._drop_finished()
        self._admit()
        if self.batch:
            self._collect(self._step(self._burst()))

    def join(self, prompts: Sequence[Sequence[int]], rows: Sequence[Conversation]) -> None:
        """Add rows for additional ``prompts``, renumbering each row's ``prompt``."""
        assert all(row.limit <= self.limit for row in rows), "the random numbers of a slot end there"
        first = len(self.prompts)
        self.prompts += prompts
        for row in rows:
            row.prompt += first
        self.waiting += rows

    def _burst(self) -> int:
        """Count steps until the host must check for a length limit or a possible stop token."""
        nearest = int(self.remaining[: len(self.batch)].min())
        if self.respondent is not None:
            return 1
        if not self.sampling.stop_ids and self.stop_texts is None:
            return min(nearest, self.longest_burst)
        if self.decoder.device.type == "cpu":
            return min(nearest, 1)
        return min(nearest, STEPS_BETWEEN_LOOKS)

    def _step(self, steps: int) -> DrawnSteps:
        """Decode and draw ``steps`` times."""
        rows = len(self.batch)
        if self.recorded is not None:
            return DrawnSteps(*self.recorded.run(self, rows, steps))
        tokens, counters = self.tokens[:rows], self.counters[:, :rows]
        ids, probabilities, sets = list[Tensor](), list[Tensor](), list[Tensor]()
        experts = list[Tensor]()
        for _ in range(steps):
            logits = self.decoder.decode(tokens, counters[0], self.cache)
            if self.recorder is not None:
                experts.append(self.recorder.take())
            tokens, probability, kept = self.draw_next(logits, counters[1])
            ids.append(tokens)
            probabilities.append(probability)
            if kept is not None:
                sets.append(kept)
            counters.add_(1)
            self.cache.advance()
        self.tokens[:rows] = tokens
        of_steps = torch.stack(ids), torch.stack(probabilities)
        return DrawnSteps(*of_steps, _stacked(sets), _stacked(experts))

    def draw_next(self, logits: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Draw the next token for the first R slots. Returns ids, probabilities, and kept sets if enabled
        (``draw_kept``).

        ``drawn [R]``: number of earlier draws.
        """
        rows, uniform, forced_ids = len(drawn), None, self.forced_ids
        if self.draws is not None:
            uniform = self.draws[:rows].gather(1, drawn[:, None].to(self.draws.device))
        if self.rules is not None:
            barred: Tensor | None = None
            if self.ends is not None:
                is_early = drawn - self.num_said[:rows] < self.sampling.min_tokens
                barred = is_early[:, None] & self.ends
            seen = None if self.seen is None else self.seen[:rows]
            logits = apply_rules(self.rules, logits, seen, barred)
        kept: Tensor | None = None
        if self.sampling.keeps_sets and uniform is not None:
            tokens, probability, kept = draw_kept(logits, uniform, self.sampling)
        else:
            tokens, probability = draw(logits, uniform, self.sampling)
        if forced_ids is not None:
            forced = forced_ids[:rows].gather(1, drawn[:, None])[:, 0]
            tokens = torch.where(forced < 0, tokens, forced)
        if self.seen is not None:
            self.seen[:rows].scatter_(1, tokens[:, None], True)
        return tokens, probability, kept

    def _collect(self, drawn: DrawnSteps) -> None:
        self.remaining[: len(self.batch)] -= len(drawn.ids)
        answered = []
        for r, row in enumerate(self.batch):
            if row.finish is not None:
                continue
            if self.unsaid[r]:
                self.unsaid[r] -= 1
                drawn.append_experts(row, 0, r)
                continue
            ended = self._append(r, drawn)
            if ended is None:
                continue
            if self.respondent is None:
                row.finish = ended
            else:
                self.respondent.hear(row.prompt, row.sample, row.end_turn(), ended)
                if ended == "length":
                    row.finish = ended
                    self.cut.append(row)
                else:
                    answered.append(r)
        for r in answered:
            self._reply(r)

    def _append(self, r: int, drawn: DrawnSteps) -> Finish | None:
        """Append drawn tokens for slot ``r`` until its end, and return the finish reason if any."""
        row, stop_ids = self.batch[r], self.sampling.stop_ids
        for step, (step_ids, step_logprobs) in enumerate(zip(drawn.ids, drawn.logprobs, strict=True)):
            row.ids.append(step_ids[r])
            row.logprobs.append(step_logprobs[r])
            if drawn.sets is not None:
                drawn.sets.append_to(row, step, r)
            drawn.append_experts(row, step, r)
            if step_ids[r] in stop_ids or (self.stop_texts is not None and self.stop_texts.ends(row.turn)):
                return "stop"
        return "length" if self.remaining[r] <= 0 else None

    def _reply(self, r: int) -> None:
        """Feed a reply to slot ``r``, which then continues or finishes."""
        assert self.respondent is not None, "it was asked"
        assert self.forced_ids is not None, "it was asked"
        row = self.batch[r]
        # A turn's last id is fed when its row goes on.
        self._seat([r], [row.ids[-1]], [len(self.prompts[row.prompt]) + len(row.ids) - 1])
        reply = self.respondent.reply(row.prompt, row.sample)
        if reply.ids:
            what = f"the reply to turn {row.num_turns} of a completion of prompt {row.prompt}"
            check_ids(what, reply.ids, self.vocab_size)
        row.add_reply(reply)
        if row.finish is not None:
            self.remaining[r] = row.room(None) + 1  # a finished row that stays in the batch has positions too
            return
        count, room = len(reply.ids), row.room(self.sampling.max_turn_tokens)
        self.unsaid[r] = count
        self.num_said[r] = count
        self.remaining[r] = count + room
        self.forced_ids[r].fill_(-1)
        self.forced_ids[r, :count] = torch.tensor(reply.ids, dtype=torch.long)
        if self.draws is not None:
            numbers = uniforms([turn_key(row.key, row.num_turns)], room)[0]
            self.draws[r, count : count + room] = torch.from_numpy(numbers)

    def _drop_finished(self) -> None:
        """Move the batch's last rows into finished slots, once enough have finished."""
        rows = len(self.batch)
        finished = [r for r in range(rows) if self.batch[r].finish is not None]
        # A finished row that stays goes on drawing, so none may stay past its limit.
        due = bool((self.remaining[:rows] <= 0).any())
        if not finished or (not due and len(finished) < max(1.0, rows * IDLE_SHARE)):
            return
        alive = rows - len(finished)
        targets = [r for r in finished if r < alive]
        sources = [r for r in range(alive, rows) if self.batch[r].finish is None]
        if targets:
            self.cache.move(targets, sources)
            for state in self.per_slot:
                state[targets] = state[sources]
            for target, source in zip(targets, sources, strict=True):
                self.batch[target] = self.batch[source]
        del self.batch[alive:]
        self.cache.refresh(alive)

    def _admit(self) -> None:
        """Move waiting rows into free slots, prefilling new prompts."""
        if any(row.finish is not None for row in self.waiting):
            self.waiting = deque(row for row in self.waiting if row.finish is None)
            if self.kept is not None and not self._is_waiting(self.kept[0]):
                self.kept = None
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
            if taken or not self._is_waiting(again[-1].prompt):
                self.kept = None
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
        """Compute prompts without their last tokens, which are fed in the first decode step."""
        bodies = [self.prompts[prompt][:-1] for prompt in order]
        prefix = self.decoder.prefill([body or [0] for body in bodies])  # single-token prompts have an empty body
        if self.recorder is not None:
            of_prompts = self.recorder.take().unflatten(0, (len(order), -1)).cpu()
            for number, prompt in enumerate(order):
                self.prompt_experts[prompt] = of_prompts[number, : len(bodies[number])].clone()
        return Prefix(prefix.keys, prefix.values, [len(body) for body in bodies])

    def _chunks(self, rows: list[Conversation]) -> list[list[Conversation]]:
        """Split ``rows`` between prompts so that each prefill pads to at most PREFILL_TOKENS."""
        chunks: list[list[Conversation]] = []
        longest = count = 0  # for the last chunk
        for prompt, group in groupby(rows, lambda row: row.prompt):
            length = len(self.prompts[prompt])
            if not chunks or max(longest, length) * (count + 1) > PREFILL_TOKENS:
                chunks.append([])
                longest = count = 0
            longest, count = max(longest, length), count + 1
            chunks[-1] += group
        return chunks

    def _enter(self, rows: list[Conversation], prefix: Prefix, index: dict[int, int]) -> None:
        """Assign ``rows`` to slots after the batch."""
        if not rows:
            return
        slots = slice(len(self.batch), len(self.batch) + len(rows))
        self.cache.place(prefix, list(index), [index[row.prompt] for row in rows])
        self.batch += rows
        if self.recorder is not None:
            for row in rows:
                row.experts.append(self.prompt_experts[row.prompt])
        turn_limit = None if self.respondent is None else self.sampling.max_turn_tokens
        self.remaining[slots] = [row.room(turn_limit) for row in rows]
        self.unsaid[slots] = 0
        self.num_said[slots] = 0
        if self.seen is not None:
            self.seen[slots] = False
            for slot, row in enumerate(rows, slots.start):
                self.seen[slot, torch.tensor(list(self.prompts[row.prompt]), device=self.decoder.device)] = True
        lasts = [self.prompts[row.prompt][-1] for row in rows]
        positions = [len(self.prompts[row.prompt]) - 1 for row in rows]
        self._seat(slots, lasts, positions)
        if self.draws is not None:
            table = uniforms([row.key for row in rows], self.draws.shape[1])
            self.draws[slots] = torch.from_numpy(table).to(self.draws.device)
        if self.forced_ids is not None:
            self.forced_ids[slots] = -1

    def _seat(self, slots: slice | list[int], tokens: list[int], positions: list[int]) -> None:
        """Continue these slots from ``tokens``, restarting their uniform numbers."""
        device = self.decoder.device
        self.tokens[slots] = torch.tensor(tokens, device=device)
        self.counters[:, slots] = torch.tensor([positions, [0] * len(tokens)], device=device)


def _stacked(steps: list[Tensor]) -> Tensor | None:
    """Stack one tensor per step; None without any."""
    if steps:
        return torch.stack(steps)
    return None


def check_finite(row: Conversation) -> None:
    """Refuse completions from diverged weights.

    Raises:
        RunFailure: non-finite log-probabilities.
    """
    if not all(map(math.isfinite, row.logprobs)):
        raise RunFailure(
            f"the model's logits are not finite at token {len(row.ids)} of a completion of prompt {row.prompt}; "
            "its weights have diverged (lower train.lr, or go back to an earlier checkpoint)"
        )
