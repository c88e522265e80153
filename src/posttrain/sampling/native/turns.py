"""Several turns in one generation: what was read and written stays in the cache, and a row goes on where it was.

A row that has ended its turn keeps its slot. The reply is fed through the ordinary decode steps, each of its ids in
place of a drawn one. The host looks at every step, so no row goes on past the end of its turn. The batch waits for the
replies, so that the result is a function of the keys and the replies alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttrain.randomness import uniforms
from posttrain.sampling.base import Conversation, Respondent, check_ids, turn_key
from posttrain.sampling.native.cache import Prefix
from posttrain.sampling.native.schedule import Schedule


class Turns(Schedule):
    """One generation over one decoder in which ``respondent`` answers what ends with a stop id.

    Args:
        vocab_size: ids of a reply are below it.
    """

    def __init__(self, *args: Any, respondent: Respondent, vocab_size: int) -> None:
        super().__init__(*args)
        self.respondent = respondent
        self.vocab_size = vocab_size
        self.cut: list[Conversation] = []  # ended for want of room; their last reply is not fed
        # Per slot: the id at each step of its turn (-1: the drawn one), ...
        limit = max(row.limit for row in self.waiting)
        self.forced_ids = torch.full((self.num_slots, limit), -1, dtype=torch.long, device=self.decoder.device)
        # ... and how much of the reply is still to be fed.
        self.unsaid = np.zeros(self.num_slots, dtype=np.int64)

    def run(self) -> None:
        """Bring every row to its end.

        Raises:
            UsageError: a reply has an id outside the vocabulary; and whatever the respondent raises.
        """
        super().run()
        for row in self.cut:
            self.respondent.reply(row.prompt, row.sample)

    def _next(self, drawn: Tensor) -> Tensor:
        rows = len(drawn)
        forced = self.forced_ids[:rows].gather(1, self.counters[1, :rows, None])[:, 0]
        return torch.where(forced < 0, drawn, forced)

    def _burst(self) -> int:
        return 1

    def _collect(self, ids: list[list[int]], logprobs: list[list[float]]) -> None:
        self.remaining[: len(self.batch)] -= 1
        ended_rows = []
        for r, row in enumerate(self.batch):
            if row.finish is not None:
                continue
            if self.unsaid[r]:
                self.unsaid[r] -= 1
                continue
            ended = self._append(r, ids, logprobs)
            if ended is None:
                continue
            self.respondent.hear(row.prompt, row.sample, row.end_turn(), ended)
            if ended == "length":
                row.finish = ended
                self.cut.append(row)
            else:
                ended_rows.append(r)
        for r in ended_rows:
            self._reply(r)

    def _reply(self, r: int) -> None:
        """Feed the reply to the row in slot ``r``, which then goes on or is at its end."""
        row = self.batch[r]
        # A turn's last id is fed when its row goes on.
        self._seat([r], [row.ids[-1]], [len(self.prompts[row.prompt]) + len(row.ids) - 1])
        reply = self.respondent.reply(row.prompt, row.sample)
        if reply.ids:
            check_ids(
                f"the reply to turn {row.num_turns} of a completion of prompt {row.prompt}", reply.ids, self.vocab_size
            )
        row.add_reply(reply)
        if row.finish is not None:
            self.remaining[r] = row.room(None) + 1  # a finished row that stays in the batch has positions too
            return
        count, room = len(reply.ids), row.room(self.sampling.max_turn_tokens)
        self.unsaid[r] = count
        self.remaining[r] = count + room
        self.forced_ids[r].fill_(-1)
        self.forced_ids[r, :count] = torch.tensor(reply.ids, dtype=torch.long)
        if self.draws is not None:
            numbers = uniforms([turn_key(row.key, row.num_turns)], room)[0]
            self.draws[r, count : count + room] = torch.from_numpy(numbers)

    def _move(self, targets: list[int], sources: list[int]) -> None:
        super()._move(targets, sources)
        self.forced_ids[targets] = self.forced_ids[sources]
        self.unsaid[targets] = self.unsaid[sources]

    def _enter(self, rows: list[Conversation], prefix: Prefix, index: dict[int, int]) -> None:
        slots = slice(len(self.batch), len(self.batch) + len(rows))
        super()._enter(rows, prefix, index)
        self.remaining[slots] = [row.room(self.sampling.max_turn_tokens) for row in rows]
        self.forced_ids[slots] = -1
        self.unsaid[slots] = 0
