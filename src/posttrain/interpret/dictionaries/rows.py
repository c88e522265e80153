"""Rows that a dictionary is trained on, in their order: a function of the seed and the step.

Rows come from a tensor or from recorded activations (``recording``). The last documents are held out for measuring."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from posttrain.errors import UsageError
from posttrain.interpret.activations.shards import ActivationStore
from posttrain.randomness import generator, permutation

# The source of a store with base and post that is neither of them: what training added.
DIFFERENCE = "difference"
SAMPLE_ROWS = 65_536


class Rows(Protocol):
    """Rows of activations that can be read in any order."""

    num_rows: int
    d: int

    def gather(self, rows: Tensor) -> Tensor:
        """float32 [n, d] of the rows ``int64 [n]``."""
        ...

    def boundary(self, row: int) -> int:
        """The first row of the document that ``row`` is of."""
        ...


class StoreRows:
    """Rows of one site of recorded activations.

    Args:
        store: opened.
        site: may be left out where there is one.
        source: ``model``, ``base``, ``post`` or ``difference``: post − base. None where one model was recorded.

    Raises:
        UsageError: there is no such site or source.
    """

    def __init__(self, store: ActivationStore, site: str | None = None, source: str | None = None) -> None:
        self.store, self.site = store, site
        known = [*store.sources, *([DIFFERENCE] if store.sources == ("base", "post") else [])]
        self.source = source if source is not None or len(known) > 1 else known[0]
        if self.source not in known:
            what = "say which" if source is None else f"there is no {source!r}"
            raise UsageError(f"activations.source: {what}; these activations have {', '.join(known)}")
        self.num_rows, self.d = store.num_rows, store.width(site)

    def gather(self, rows: Tensor) -> Tensor:
        if self.source != DIFFERENCE:
            return self.store.gather(rows, self.site, self.source).float()
        base, post = (self.store.gather(rows, self.site, source).float() for source in ("base", "post"))
        return post - base

    def boundary(self, row: int) -> int:
        return bisect_left(range(row), self._document(row), key=self._document)

    def whole_documents(self, limit: int) -> Iterator[tuple[int, int]]:
        """Yield (start, end) of rows that no document crosses: at most ``limit``, but where a document is longer."""
        start = 0
        while start < self.num_rows:
            end = cut = start
            while cut <= start:
                end += limit
                cut = self.boundary(end) if end < self.num_rows else self.num_rows
            yield start, cut
            start = cut

    def _document(self, row: int) -> int:
        return int(self.store.documents(torch.tensor([row]))[0])


def too_few_rows(rows: str, held_out: int, batch: int) -> UsageError:
    """Return the error for rows, as many as ``rows`` says, that leave less than a batch to train on."""
    return UsageError(
        f"{rows} rows of activations, of which {held_out:,} are held out (eval.rows), do not make one "
        f"batch of {batch:,} (train.batch). Record more, or set them lower"
    )


def first_held_out(rows: Rows, held_out: int, batch: int) -> int:
    """Return how many rows are trained on: all but the last ``held_out``, and no document on both sides.

    Raises:
        UsageError: fewer rows than one batch would be left.
    """
    start = rows.num_rows - held_out
    if start > 0:
        start = rows.boundary(start) or start  # one document alone is cut
    if start < batch:
        raise too_few_rows(f"{rows.num_rows:,}", held_out, batch)
    return start


def sample_rows(rows: Rows, num_rows: int, seed: int) -> Tensor:
    """Draw at most ``SAMPLE_ROWS`` of the first ``num_rows`` rows by the seed: float32 [n, d]."""
    chosen = generator(seed, "dictionary sample").integers(0, num_rows, size=min(SAMPLE_ROWS, num_rows))
    return rows.gather(torch.from_numpy(np.sort(chosen)))


class RowBatches:
    """The batches of a training: epochs of shuffled rows, one after the other, without a gap between them.

    Step s takes places s·batch … (s + 1)·batch of that stream, so the state is one number, and ``load_state_dict``
    goes on exactly where another process stopped.
    """

    def __init__(self, rows: Rows, num_rows: int, batch: int, steps: int, seed: int) -> None:
        self.rows, self.num_rows, self.batch, self.steps, self.seed = rows, num_rows, batch, steps, seed
        self.step = 0
        self._order: tuple[int, Tensor] | None = None

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Tensor]:
        while self.step < self.steps:
            step = self.step
            self.step += 1  # before the batch is handed out: a checkpoint is written after its update
            yield self.rows.gather(self.indices(step))

    def indices(self, step: int) -> Tensor:
        """Return the rows of the batch of a step, ``int64 [batch]``."""
        parts: list[Tensor] = []
        position, end = step * self.batch, (step + 1) * self.batch
        while position < end:
            epoch, offset = divmod(position, self.num_rows)
            take = min(self.num_rows - offset, end - position)
            parts.append(self._epoch(epoch)[offset : offset + take])
            position += take
        return torch.cat(parts)

    def _epoch(self, epoch: int) -> Tensor:
        if self._order is None or self._order[0] != epoch:
            order = torch.from_numpy(permutation(self.seed, "dictionary rows", epoch, self.num_rows))
            self._order = (epoch, order)
        return self._order[1]

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["seed"] == self.seed, "the data order of another seed"
        self.step = int(state["step"])
