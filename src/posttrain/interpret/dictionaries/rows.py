"""Which rows a dictionary is trained on, in which order: a function of the seed and the step.

Rows come from a tensor or from recorded activations (``recording``). The last documents are held out for measuring."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from posttrain.errors import UsageError
from posttrain.interpret.activations.shards import ActivationStore
from posttrain.randomness import generator, permutation

# What is read of a store with the sources base and post: one of them, what training added, or both at once.
DIFFERENCE, BOTH = "difference", "both"
SAMPLE_ROWS = 65_536


class Rows(Protocol):
    """Rows of activations that can be read in any order."""

    num_rows: int
    d: int
    sources: int
    has_targets: bool
    chunks: Sequence[range] | None  # rows that are read together; None: any are

    def gather(self, rows: Tensor) -> Tensor:
        """float32 [n, M, d] of the rows ``int64 [n]``; with targets [n, 2, d], what is read and what is written."""
        ...

    def boundary(self, row: int) -> int:
        """The first row of the document that ``row`` is of."""
        ...


class StoreRows:
    """Rows of one site of recorded activations.

    Args:
        store: opened.
        site: may be left out where there is one.
        source: ``model``, ``base`` or ``post``: an autoencoder of one model; ``difference``: post − base; ``both``:
            a crosscoder's two sources. None where one model was recorded.
        target: another site of the same model and width, which a transcoder writes.

    Raises:
        UsageError: there is no such site or source, or the target does not fit.
    """

    def __init__(
        self, store: ActivationStore, site: str | None = None, source: str | None = None, target: str | None = None
    ) -> None:
        self.store, self.site, self.target, self.chunks = store, site, target, store.chunks
        self.has_targets = target is not None
        paired = store.sources == ("base", "post")
        known = [*store.sources, *((DIFFERENCE, BOTH) if paired else ())]
        self.source = source if source is not None or len(known) > 1 else known[0]
        if self.source not in known:
            what = "say which" if source is None else f"there is no {source!r}"
            raise UsageError(f"activations.source: {what}; these activations have {', '.join(known)}")
        self.num_rows, self.d = store.num_rows, store.width(site)
        self.sources = 2 if self.source == BOTH else 1
        if target is not None and (self.source in (DIFFERENCE, BOTH) or store.width(target) != self.d):
            raise UsageError(
                f"activations.target: {target}: a transcoder is of one model (activations.source), and reads and "
                "writes activations of the same width"
            )

    def gather(self, rows: Tensor) -> Tensor:
        if self.target is not None:
            pair = (self.store.gather(rows, site, self.source).float() for site in (self.site, self.target))
            return torch.stack(list(pair), dim=1)
        if self.source not in (DIFFERENCE, BOTH):
            return self.store.gather(rows, self.site, self.source).float().unsqueeze(1)
        base, post = (self.store.gather(rows, self.site, source).float() for source in ("base", "post"))
        return (post - base).unsqueeze(1) if self.source == DIFFERENCE else torch.stack([base, post], dim=1)

    def boundary(self, row: int) -> int:
        return bisect_left(range(row), self._document(row), key=self._document)

    def _document(self, row: int) -> int:
        return int(self.store.documents(torch.tensor([row]))[0])


def too_few_rows(rows: str, held_out: int, batch: int) -> UsageError:
    """What to say where the rows, as many as ``rows`` says, leave less than a batch to train on."""
    return UsageError(
        f"{rows} rows of activations, of which {held_out:,} are held out (eval.rows), do not make one "
        f"batch of {batch:,} (train.batch). Record more, or set them lower"
    )


def first_held_out(rows: Rows, held_out: int, batch: int) -> int:
    """How many rows are trained on: all but the last ``held_out``, and no document on both sides.

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
    """At most ``SAMPLE_ROWS`` of the first ``num_rows`` rows, drawn by the seed: float32 [n, M, d].

    Where rows come in chunks, they are of the first one.
    """
    if rows.chunks is not None:
        num_rows = min(num_rows, rows.chunks[0].stop)
    chosen = generator(seed, "dictionary sample").integers(0, num_rows, size=min(SAMPLE_ROWS, num_rows))
    return rows.gather(torch.from_numpy(np.sort(chosen)))


class RowBatches:
    """The batches of a training: epochs of shuffled rows, one after the other, without a gap between them.

    Where rows come in chunks, an epoch goes through these in a shuffled order, and shuffles the rows of each.
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
        """Which rows the batch of a step has, ``int64 [batch]``."""
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
            self._order = (epoch, torch.from_numpy(self._shuffled(epoch)))
        return self._order[1]

    def _shuffled(self, epoch: int) -> NDArray[np.int64]:
        if self.rows.chunks is None:
            return permutation(self.seed, "dictionary rows", epoch, self.num_rows)
        chunks = [range(c.start, min(c.stop, self.num_rows)) for c in self.rows.chunks if c.start < self.num_rows]
        order = permutation(self.seed, "dictionary chunks", epoch, len(chunks))
        return np.concatenate(
            [chunks[i].start + permutation(self.seed, f"rows of chunk {i}", epoch, len(chunks[i])) for i in order]
        )

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["seed"] == self.seed, "the data order of another seed"
        self.step = int(state["step"])
