"""Activations as they are made: for training without a recording on the disk.

The documents are cut into chunks, and the rows of a chunk are computed when one of them is read. The last few chunks
are kept in memory, the others are forgotten and computed again when their turn comes. What a row holds is a function of
its chunk's documents and of the settings alone, so a training that goes on reads what it would have read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load
from torch import Tensor

from posttrain.errors import UsageError
from posttrain.interpret.activations.record import Computed, Recorder
from posttrain.interpret.activations.shards import DTYPES, ActivationStore, pack_documents

# What is trained on, what the next batch reaches into, and what is held out.
KEPT_CHUNKS = 3


class ActivationStream(ActivationStore):
    """Read like recorded activations; nothing is written.

    Every token but the first of a document has its row, which is known before anything is computed. So that it stays
    so, an outlier (or a row that is not finite) is not left out as in a recording: another row of its chunk stands in
    its place. How many of the first chunk are replaced is told.

    Args:
        recorder: models and documents; its shards are the chunks.
        notify: told what a person should know.

    Raises:
        UsageError: a chunk without any row that could be kept.
    """

    def __init__(self, recorder: Recorder, notify: Callable[[str], None] = lambda message: None) -> None:
        self.recorder, self.index = recorder, recorder.index
        self.folder = Path("what is computed")  # what messages call it
        self._documents = load(pack_documents(recorder.documents, recorder.prompt_lengths, recorder.told))
        sizes = [sum(self._num_rows(recorder.documents[i]) for i in chunk) for chunk in recorder.plan]
        ends = torch.tensor([0, *sizes]).cumsum(0)
        self._starts = ends
        self.chunks = [range(a, b) for a, b in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]
        self.index.rows = int(ends[-1])
        self._computed: OrderedDict[int, dict[str, Tensor]] = OrderedDict()
        first = recorder.compute(0)
        self.index.limits = recorder.limits_of(first)
        self._remember(0, first)
        _, dropped = first.kept(self.index.limits)
        replaced = sum(count for reason, count in dropped.items() if reason != "first_token")
        self.index.dropped = self.index.dropped | {"replaced in the first chunk": replaced}
        about = f"{self.num_rows:,} rows in {len(self.chunks)} chunks, {len(self.chunks[0]):,} in the first"
        outliers = f"of which {replaced} are outliers and replaced"
        notify(f"activations are computed as they are needed, and not recorded: {about}, {outliers}")

    def _num_rows(self, document: Sequence[int]) -> int:
        ids = torch.tensor(list(document))
        return len(ids) - int(self.recorder.starts(ids, torch.arange(len(ids))).sum())

    def _shard(self, number: int) -> Mapping[str, Tensor]:
        if number not in self._computed:
            self._remember(number, self.recorder.compute(number))
        self._computed.move_to_end(number)
        return self._computed[number]

    def _remember(self, number: int, chunk: Computed) -> None:
        """Keep the rows of a chunk in the stored dtype, and forget those that were read longest ago."""
        kept, _ = chunk.kept(self.index.limits)
        wanted, good = (~chunk.first).nonzero()[:, 0], kept.nonzero()[:, 0]
        if not len(good):
            raise UsageError(f"activations.stream_rows: no row of chunk {number} is finite and within the limits")
        bad = (~kept[wanted]).nonzero()[:, 0]
        wanted[bad] = good[bad % len(good)]
        dtype = DTYPES[self.index.dtype]
        self._computed[number] = {
            name: x[wanted].to(dtype) if name in self.index.columns else x[wanted] for name, x in chunk.tensors.items()
        } | {f"norm.{name}": norms[wanted] for name, norms in chunk.norms.items()}
        while len(self._computed) > KEPT_CHUNKS:
            self._computed.popitem(last=False)
