"""Continuous batching over pages: who is in the batch follows from how many pages are free.

A row enters when there are pages for its prompt and its next steps. Before every look all rows in flight get the pages
that they will fill by the next one; where too few are free, the row that entered last gives its own back and waits. It
goes on later from what it has drawn, which is read again like a prompt. Every number that it draws by follows from its
key and its count, so its tokens are those that it would have drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from posttrain.engines.base import Sampling
from posttrain.engines.conversation import Conversation
from posttrain.engines.native import schedule
from posttrain.engines.native.paged.pool import Reading
from posttrain.engines.native.paged.steps import Steps
from posttrain.engines.native.schedule import STEPS_BETWEEN_LOOKS, Schedule


class PagedSchedule(Schedule):
    """One generation over ``steps``. ``num_put_back``: how often a row had to wait again for want of pages.

    Args:
        num_pages: pages that it may fill, though the pool may have more: who enters when does not depend on them.
    """

    def __init__(
        self,
        steps: Steps,
        prompts: Sequence[Sequence[int]],
        rows: Sequence[Conversation],
        sampling: Sampling,
        num_slots: int,
        num_pages: int,
    ) -> None:
        self.steps = steps
        self.pool = steps.pool
        self.num_closed = steps.pool.num_pages - num_pages
        super().__init__(steps.decoder, prompts, rows, sampling, num_slots)
        self.look = 1 if steps.decoder.device.type == "cpu" and sampling.stop_ids else STEPS_BETWEEN_LOOKS
        self.num_put_back = 0
        self.is_seated = False  # the device knows who is in which slot

    def _make_room(self, rows: Sequence[Conversation]) -> None:
        # Of each slot: its pages in order, and how many these are.
        self.table = np.zeros((self.num_slots, self.steps.num_pages), dtype=np.int32)
        self.num_pages = np.zeros(self.num_slots, dtype=np.int64)
        # Rows that have drawn nothing, of each prompt, and the pages of prompts that some of these will need.
        self.new = Counter(row.prompt for row in rows)
        self.read: dict[int, list[int]] = {}

    @property
    def num_free(self) -> int:
        """Pages that may still be filled."""
        return self.pool.num_free - self.num_closed

    def _burst(self) -> int:
        return min(self.look, max(row.limit - len(row.ids) for row in self.batch))

    def _step(self, steps: int) -> tuple[list[list[int]], list[list[float]]]:
        if not self.is_seated:
            self._seat_all()
        rows = len(self.batch)
        return self.steps.run(self.table[:rows, : self.num_pages[:rows].max()], steps)

    def _collect(self, ids: list[list[int]], logprobs: list[list[float]]) -> None:
        for r, row in enumerate(self.batch):
            left = row.limit - len(row.ids)
            self.remaining[r] = left - len(ids)
            row.finish = self._append(r, ids[:left], logprobs[:left])

    def _drop_finished(self) -> None:
        """Give back the pages of finished rows, and see to those of the others."""
        going = [r for r, row in enumerate(self.batch) if row.finish is None]
        if len(going) < len(self.batch):
            for r, row in enumerate(self.batch):
                if row.finish is not None:
                    self.pool.give_back(self._pages(r))
            self.batch = [self.batch[r] for r in going]
            for per_slot in (self.table, self.num_pages):
                per_slot[: len(going)] = per_slot[going]
                per_slot[len(going) :] = 0
            self.is_seated = False
        r = 0
        while r < len(self.batch):
            count = self._needed(self.batch[r]) - int(self.num_pages[r])
            if count <= self.num_free:
                self._add(r, self.pool.take(max(0, count)))
                r += 1
            elif self.read:
                self._forget()
            else:
                self._put_back()

    def _needed(self, row: Conversation) -> int:
        """Pages that hold all that the row will have fed by the next look."""
        fed = len(self.prompts[row.prompt]) + len(row.ids) - 1
        return self.pool.pages_for(fed + min(self.look, row.limit - len(row.ids)))

    def _pages(self, r: int) -> list[int]:
        return [int(page) for page in self.table[r, : self.num_pages[r]]]

    def _add(self, r: int, pages: Sequence[int]) -> None:
        before = self.num_pages[r]
        self.num_pages[r] += len(pages)
        self.table[r, before : self.num_pages[r]] = pages

    def _forget(self) -> None:
        """Give up the prompts that are kept for rows that wait: they are read again."""
        for pages in self.read.values():
            self.pool.give_back(pages)
        self.read.clear()

    def _put_back(self) -> None:
        """Let the row that entered last wait again, before all others."""
        r, row = len(self.batch) - 1, self.batch.pop()
        self.pool.give_back(self._pages(r))
        self.table[r], self.num_pages[r] = 0, 0
        self.waiting.appendleft(row)
        self.num_put_back += 1
        self.is_seated = False

    def _admit(self) -> None:
        """Let rows in as long as there are slots and pages, and read what is new of them."""
        readings: list[Reading] = []
        copies: list[tuple[int, int]] = []
        while self.waiting and len(self.batch) < self.num_slots:
            # What rows in flight will take by the next look, on average, stays free.
            held = self.pool.pages_for(len(self.batch) * self.look)
            row = self.waiting[0]
            pages = (self._enter_again if row.ids else self._enter_new)(row, self.num_free - held, readings, copies)
            if pages is None and not self.batch and self.read:
                self._forget()
                continue
            if pages is None:
                break
            self.batch.append(self.waiting.popleft())
            self._add(len(self.batch) - 1, pages)
            self.is_seated = False
        assert self.batch or not self.waiting, "pages for one row alone have been seen to"
        for chunk in _chunks(readings):
            self.pool.fill(self.decoder.prefill([reading.ids for reading in chunk]), chunk)
        if copies:
            self.pool.copy(*zip(*copies, strict=True))

    def _enter_new(
        self, row: Conversation, num_free: int, readings: list[Reading], copies: list[tuple[int, int]]
    ) -> list[int] | None:
        """The row's pages, or None where fewer than it needs are free.

        Full pages of its prompt are shared with the other rows of that; the last one, filled in part, is copied, but
        for the last of these rows. What is to be read and copied is put into ``readings`` and ``copies``.
        """
        body = self.prompts[row.prompt][:-1]
        full, partly = len(body) // self.pool.page_size, len(body) % self.pool.page_size > 0
        read, needed = self.read.get(row.prompt), self._needed(row)
        alone = self.new[row.prompt] == 1 or (not self.batch and needed + partly > num_free)
        taken = needed + (partly and not alone) if read is None else needed - (len(read) if alone else full)
        if taken > num_free:
            return None
        if read is None:
            read = self.read[row.prompt] = self.pool.take(full + partly)
            if body:
                readings.append(Reading(body, 0, read))
        self.new[row.prompt] -= 1
        if alone:
            pages = self.read.pop(row.prompt)
        else:
            pages = self.pool.share(read[:full])
            if partly:
                pages += self.pool.take(1)
                copies.append((read[full], pages[full]))
        return pages + self.pool.take(needed - len(pages))

    def _enter_again(
        self, row: Conversation, num_free: int, readings: list[Reading], copies: list[tuple[int, int]]
    ) -> list[int] | None:
        """The same for a row that has been in the batch before; it copies nothing."""
        full = (len(self.prompts[row.prompt]) - 1) // self.pool.page_size
        mates = (self._pages(r) for r, other in enumerate(self.batch) if other.prompt == row.prompt)
        shared = self.read.get(row.prompt) or next(mates, [])
        shared, needed = shared[:full], self._needed(row)
        if needed - len(shared) > num_free:
            return None
        pages = self.pool.share(shared) + self.pool.take(needed - len(shared))
        body = [*self.prompts[row.prompt], *row.ids[:-1]]
        readings.append(Reading(body, len(shared) * self.pool.page_size, pages))
        return pages

    def _seat_all(self) -> None:
        """Tell the device where each row of the batch stands."""
        rows = self.batch
        tokens = [row.ids[-1] if row.ids else self.prompts[row.prompt][-1] for row in rows]
        positions = [len(self.prompts[row.prompt]) + len(row.ids) - 1 for row in rows]
        keys = np.array([row.key for row in rows], dtype=np.uint64).view(np.int64)
        drawn, limits = [row.drawn + len(row.ids) for row in rows], [row.drawn + row.limit for row in rows]
        self.steps.seat(np.array([tokens, positions, drawn, limits, keys, [0] * len(rows)], dtype=np.int64))
        self.is_seated = True


def _chunks(readings: Sequence[Reading]) -> Iterator[list[Reading]]:
    """``readings`` in turn, so many at once that they are padded to at most PREFILL_TOKENS."""
    chunk: list[Reading] = []
    for reading in readings:
        if chunk and max(len(r.ids) for r in (*chunk, reading)) * (len(chunk) + 1) > schedule.PREFILL_TOKENS:
            yield chunk
            chunk = []
        chunk.append(reading)
    if chunk:
        yield chunk
