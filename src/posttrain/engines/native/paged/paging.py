"""What the native engine needs to sample from pages: how many there are, and what stays from one batch to the next."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from posttrain.engines.base import Sampling
from posttrain.engines.conversation import Conversation
from posttrain.engines.native.lean import LeanDecoder
from posttrain.engines.native.paged.attention import PagedAttention, PageView, attention_for
from posttrain.engines.native.paged.pool import Pool, Reading
from posttrain.engines.native.paged.schedule import PagedSchedule
from posttrain.engines.native.paged.steps import Steps, decode
from posttrain.engines.native.schedule import check_finite
from posttrain.errors import UsageError

SHARE = 0.5  # of a GPU's free memory, where the recipe says nothing: the rest is for updates


class Paging:
    """See ``cache: paged`` of ``native``. ``num_put_back``: how often a row had to be read again for want of pages."""

    def __init__(self, slots: int, cache_tokens: int | None, gpu_memory: float | None, *, eager: bool) -> None:
        self.slots = slots
        self.cache_tokens = cache_tokens
        self.share = SHARE if gpu_memory is None else gpu_memory
        self.eager = eager
        self.num_put_back = 0
        self._bytes: int | None = None  # of a GPU, which may be taken
        self._is_told = False
        self._kept: Steps | None = None

    def sample(
        self, decoder: LeanDecoder, prompts: Sequence[Sequence[int]], rows: Sequence[Conversation], sampling: Sampling
    ) -> None:
        """Bring every row to its end.

        Raises:
            UsageError: the pages do not hold one row, or there is no memory for them.
            RunFailure: the model's logits are not finite.
        """
        longest = max(len(prompts[row.prompt]) + row.limit for row in rows) - 1  # the last token is not fed
        attention, page_size = _attention(decoder)
        a_row = -(-longest // page_size)
        most = self._most_pages(decoder, page_size)
        if most < a_row:
            raise UsageError(
                f"rollout.engine.cache_tokens: a cache of {most * page_size} tokens does not hold one row of prompt "
                f"and answer, {a_row} pages of {page_size}; give {a_row * page_size} or more, or a lower max_tokens"
            )
        # Full pages of a prompt are shared, and one that is not full is kept beside its rows.
        pages = min(min(self.slots, len(rows)) * a_row + len(prompts), most)
        # A failure leaves nothing behind: what a batch that ended half-way has in its pages could be no numbers.
        kept, self._kept = self._kept, None
        if kept is not None and not kept.pool.serves(decoder.shapes, pages, page_size, decoder.device):
            kept = None  # before there are others: there is no memory for both
        pool = self._new_pool(decoder, pages, page_size) if kept is None else kept.pool
        num_rows = min(self.slots, len(rows))
        fits = kept is not None and kept.num_slots >= num_rows and kept.num_pages >= a_row
        if kept is None or not fits or not kept.takes_over(decoder, sampling):
            size: dict[str, Any] = {"num_rows": num_rows, "num_pages": a_row, "graphs": not self.eager}
            kept = None
            kept = Steps(decoder, pool, attention, sampling, **size)
        schedule = PagedSchedule(kept, prompts, rows, sampling, self.slots, pages)
        schedule.run()
        assert pool.num_free == pool.num_pages, "pages that nobody gave back"
        self.num_put_back += schedule.num_put_back
        kept.decoder.drop_workspace()  # of the longest prefill
        for row in rows:
            check_finite(row)
        self._kept = kept

    def take_notices(self) -> list[str]:
        """Once, that there were too few pages."""
        if not self.num_put_back or self._is_told:
            return []
        self._is_told = True
        size = "" if self._kept is None else f" of {self._kept.pool.num_pages * self._kept.pool.page_size} tokens"
        return [
            f"rollout.engine.cache_tokens: {self.num_put_back} rows were put back and read again, for the cache{size} "
            "was full; a larger one (or fewer slots) makes sampling faster"
        ]

    def close(self) -> None:
        """Give the memory back."""
        self._kept = None

    def _new_pool(self, decoder: LeanDecoder, num_pages: int, page_size: int) -> Pool:
        try:
            return Pool(decoder.shapes, num_pages, page_size, decoder.device)
        except torch.OutOfMemoryError:
            size = num_pages * page_size * _bytes_of_token(decoder) / 2**30
            raise UsageError(
                f"rollout.engine.cache_tokens: there is no memory for the {num_pages * page_size} tokens of the cache, "
                f"{size:.1f} GiB; give fewer, or fewer slots"
            ) from None

    def _most_pages(self, decoder: LeanDecoder, page_size: int) -> int:
        """As many as the recipe or a GPU has room for; on a CPU, if the recipe says nothing, as many as are needed."""
        if self.cache_tokens is not None:
            return self.cache_tokens // page_size
        if decoder.device.type != "cuda":
            return sys.maxsize
        if self._bytes is None:  # once: what a run takes later was not there when it was planned
            free, _ = torch.cuda.mem_get_info(decoder.device)
            free += torch.cuda.memory_reserved(decoder.device) - torch.cuda.memory_allocated(decoder.device)
            self._bytes = int(self.share * free)
        return self._bytes // (page_size * _bytes_of_token(decoder)) - 1


def _bytes_of_token(decoder: LeanDecoder) -> int:
    return sum(s.heads * (s.key_dim + s.value_dim) * s.dtype.itemsize for s in decoder.shapes)


def _attention(decoder: LeanDecoder) -> tuple[PagedAttention, int]:
    heads = (decoder.num_queries, decoder.num_keys, decoder.head_dim)
    return attention_for(decoder.device, decoder.dtype, *heads)


def over_pages(decoder: Any, bodies: Sequence[Sequence[int]], steps: int) -> Callable[[Tensor, Tensor], Tensor]:
    """What decodes ``steps`` steps behind prompts without their last tokens; see ``probe``."""
    attention, page_size = _attention(decoder)
    each = -(-(max(map(len, bodies)) + steps) // page_size)
    pool = Pool(decoder.shapes, each * len(bodies), page_size, decoder.device)
    readings = [Reading(body or [0], 0, pool.take(each)) for body in bodies]
    pool.fill(decoder.prefill([reading.ids for reading in readings]), readings)
    table = torch.tensor([reading.pages for reading in readings], dtype=torch.int32, device=decoder.device)

    def step(tokens: Tensor, positions: Tensor) -> Tensor:
        return decode(decoder, tokens, positions, PageView(pool, attention, table, positions))

    return step
