"""Recording of what layers of one model, or of two over the same tokens, compute: the library's way to do it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from posttrain.errors import UsageError
from posttrain.interpret.activations.shards import (
    ActivationStore,
    Documents,
    Source,
    StoreIndex,
    StoreWriter,
    column,
    row_norms,
)
from posttrain.interpret.activations.sites import Extractor, load_layers, tokenizer_hash, weights_hash
from posttrain.models.forward.micro import by_length, split_padded
from posttrain.models.load import LoadedModel
from posttrain.models.stated_sizes import context_length
from posttrain.recipes.sections import ModelSection

SHARD_BYTES = 1 << 28
MIN_SHARD_ROWS, MAX_SHARD_ROWS = 1024, 1 << 16
# A recording above this is begun only when that was asked for.
LARGE_BYTES = 1 << 30
# Tokens of a batch, padding included, unless a number of documents is asked for.
TOKENS_PER_BATCH = {"cuda": 32768, "cpu": 4096}
OUTLIER_FACTOR = 10.0

Dtype = Literal["bf16", "fp32"]


class Recorder:
    """One recording: the models loaded, the texts known, nothing written yet.

    Args:
        models: one, or two over the same tokens (``base`` and ``post``); names or sections of a recipe.
        documents: none longer than the models' context; or their token ids alone.
        sites: such as ``resid.20``.
        dtype: of what is stored. Norms are taken before rounding.
        outliers: drop rows with a norm above so many times the median of the first shard, in any site and source;
            0 keeps them.
        batch: documents at a time; None: as many as fit into a number of tokens.
        rows_per_shard: None: about 256 MiB.

    Raises:
        UsageError: no documents, or too long ones; a model or a site that there is not; two models that differ in
            tokenizer or width.
    """

    def __init__(
        self,
        models: str | ModelSection | Sequence[str | ModelSection],
        documents: Documents | Sequence[Sequence[int]],
        sites: Sequence[str],
        *,
        dtype: Dtype = "bf16",
        outliers: float = OUTLIER_FACTOR,
        batch: int | None = None,
        rows_per_shard: int | None = None,
    ) -> None:
        specs = [models] if isinstance(models, str | ModelSection) else list(models)
        self.texts = documents if isinstance(documents, Documents) else Documents(list(documents))
        self.documents = self.texts.ids
        if len(specs) not in (1, 2) or not self.documents or not all(self.documents):
            raise UsageError("a recording needs one model or two, and documents that are not empty")
        sections = [ModelSection(name=model) if isinstance(model, str) else model for model in specs]
        names = list(dict.fromkeys(sites))
        self.outliers, self.batch = outliers, batch
        loaded = [load_layers(section, names) for section in sections]
        tokenizers = [tokenizer_hash(each.tokenizer) for each in loaded]
        if len(set(tokenizers)) > 1:
            raise UsageError(
                f"{sections[0].name} and {sections[1].name} have different tokenizers, so no token stands for the same "
                "in both; pair a model with one that was trained from it"
            )
        longest, context = max(map(len, self.documents)), min(context_length(each.model.config) for each in loaded)
        if longest > context:
            raise UsageError(f"a document of {longest} tokens does not fit into the model's {context}; cut it before")
        self.start_id = loaded[0].tokenizer.bos_token_id
        sides = ("model",) if len(loaded) == 1 else ("base", "post")
        self.extractors = {side: Extractor(each.model, names) for side, each in zip(sides, loaded, strict=True)}
        self.device = self.extractors[sides[0]].device.type
        self.index = self._describe(sections, loaded, dtype, tokenizers[0])
        rows = rows_per_shard or min(MAX_SHARD_ROWS, max(MIN_SHARD_ROWS, SHARD_BYTES // self.index.row_bytes))
        self.index.settings["rows_per_shard"] = rows
        self.plan = plan_shards([len(ids) for ids in self.documents], rows)

    @property
    def num_bytes(self) -> int:
        """What it will take on the disk, at most."""
        return self.texts.num_tokens * self.index.row_bytes

    def check_room(self, folder: Path, *, allow_large: bool, fewer: str) -> str:
        """Refuse what does not fit on the disk, and what is large unless that is allowed; return the size as text.

        What an interrupted recording has in the folder already is not counted. ``fewer``: the option for fewer rows.

        Raises:
            UsageError: too little room, or more than 1 GiB.
        """
        there = sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder.is_dir() else 0
        above = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        missing, free = self.num_bytes - there, shutil.disk_usage(above).free
        each, total = self.index.row_bytes, self.num_bytes / 1e6
        size = f"{self.texts.num_tokens:,} tokens x {each:,} bytes = {total:,.1f} MB at most"
        if missing > free:
            raise UsageError(f"{folder}: {size}, but {free / 1e6:,.1f} MB are free; set {fewer} lower")
        if missing > LARGE_BYTES and not allow_large:
            raise UsageError(f"{size}: add --yes to record them, or set {fewer} lower")
        return f"{size}, in {folder}"

    def write(self, folder: str | Path, observe: Callable[[int, int], None] | None = None) -> ActivationStore:
        """Record into a folder; what an interrupted recording has there already is kept.

        A shard is a function of its documents, the settings and the limits alone, so that a recording that goes on
        writes the same bytes. ``observe`` gets (shards done, shards in all).

        Raises:
            UsageError: the folder holds something else, or a recording under other settings.
            StorageError: the disk is full or not writable.
        """
        writer = StoreWriter(folder, self.index, self.texts)
        for number in range(writer.next_shard, len(self.plan)):
            if observe is not None:
                observe(number, len(self.plan))
            tensors = self.compute(number)
            norms = {name: row_norms(tensors[name]) for name in self.index.columns}
            first = (tensors["position"] == 0) & (tensors["tokens"] != (-1 if self.start_id is None else self.start_id))
            if number == 0:
                writer.set_limits(_limits({name: x[~first] for name, x in norms.items()}, self.outliers))
            kept, dropped = keep_rows(norms, first, writer.index.limits)
            writer.add({name: x[kept] for name, x in tensors.items()}, dropped)
        if observe is not None:
            observe(len(self.plan), len(self.plan))
        return writer.finish()

    def compute(self, number: int) -> dict[str, Tensor]:
        """Return all rows of a shard's documents in their order, as tensors that ``StoreWriter.add`` takes."""
        documents = self.plan[number]
        lengths = [len(self.documents[number]) for number in documents]
        places = [torch.arange(length) for length in lengths]
        starts = torch.tensor([0, *lengths]).cumsum(0)[:-1].tolist()
        tensors = {
            "tokens": torch.tensor([token for number in documents for token in self.documents[number]]),
            "document": torch.repeat_interleave(torch.tensor(list(documents)), torch.tensor(lengths)),
            "position": torch.cat(places),
        }
        for source, extract in self.extractors.items():
            for batch in plan_batches(lengths, self.batch, TOKENS_PER_BATCH[self.device]):
                activations = extract([self.documents[documents[i]] for i in batch])
                where = torch.cat([starts[i] + places[i] for i in batch])
                for site, values in activations.items():
                    name = column(site, source)
                    if name not in tensors:
                        tensors[name] = values.new_empty((sum(lengths), values.shape[1]))
                    tensors[name][where] = values
        return tensors

    def _describe(
        self, sections: Sequence[ModelSection], loaded: Sequence[LoadedModel], dtype: Dtype, tokenizer: str
    ) -> StoreIndex:
        sources = [
            Source(side, section.name if section.name == "tiny" else each.source, weights_hash(section.name))
            for side, section, each in zip(self.extractors, sections, loaded, strict=True)
        ]
        probes = [extract([[0, 1]]) for extract in self.extractors.values()]
        widths = [{site: int(values.shape[1]) for site, values in probe.items()} for probe in probes]
        if widths[0] != widths[-1]:
            raise UsageError(f"{sections[0].name} and {sections[-1].name} have different widths")
        settings = {
            "outliers": self.outliers,
            "batch": self.batch,
            "device": self.device,
            "weights": [section.dtype for section in sections],
        }
        index = StoreIndex(
            widths[0], sources, dtype, tokenizer, dict(self.texts.data), len(self.documents), settings=settings
        )
        index.dropped = {reason: count for reason, count in self.texts.dropped.items() if count}
        return index


def keep_rows(norms: Mapping[str, Tensor], first: Tensor, limits: Mapping[str, float]) -> tuple[Tensor, dict[str, int]]:
    """Return which rows stay, and how many go for each reason; a row that goes for two is counted under the first.

    Args:
        norms: of every row, by ``site@source``.
        first: bool [n], tokens at the start of a document, which are left out.
        limits: by ``site@source``, the norm above which a row is an outlier.
    """
    broken, outlier = torch.zeros_like(first), torch.zeros_like(first)
    for name, values in norms.items():
        broken |= ~values.isfinite()
        outlier |= values > limits.get(name, float("inf"))
    counts = {
        "first_token": int(first.sum()),
        "not_finite": int((broken & ~first).sum()),
        "outlier": int((outlier & ~broken & ~first).sum()),
    }
    return ~(first | broken | outlier), {reason: count for reason, count in counts.items() if count}


def record(
    models: str | ModelSection | Sequence[str | ModelSection],
    documents: Documents | Sequence[Sequence[int]],
    sites: Sequence[str],
    folder: str | Path,
    **options: Any,
) -> ActivationStore:
    """Record activations of documents (token ids) into a folder and open it; ``options`` are those of ``Recorder``.

    Where the folder holds the beginning of the same recording, it goes on; where it holds all of it, nothing is done.

    ::

        store = record("tiny", [[5, 6, 7], [8, 9]], ["resid.2"], "activations/two-lines", dtype="fp32")
        store.gather(torch.arange(3))          # float32 [3, 128]; the first token of each document is left out
        both = record(["runs/tiny-sft", "runs/tiny-grpo"], documents, ["resid.2"], "activations/both")
        both.gather(rows, source="post")

    Raises:
        UsageError, StorageError: see ``Recorder`` and ``Recorder.write``.
    """
    return Recorder(models, documents, sites, **options).write(folder)


def plan_shards(lengths: Sequence[int], rows: int) -> list[range]:
    """Consecutive documents, each group just large enough for ``rows`` tokens (the last may be smaller)."""
    shards: list[range] = []
    start = total = 0
    for number, length in enumerate(lengths):
        total += length
        if total >= rows:
            shards.append(range(start, number + 1))
            start, total = number + 1, 0
    return shards + ([range(start, len(lengths))] if start < len(lengths) else [])


def plan_batches(lengths: Sequence[int], batch: int | None, tokens: int) -> list[list[int]]:
    """Documents of like length together: ``batch`` at a time, else as many as are ``tokens`` when padded (or one)."""
    return split_padded(by_length(lengths), lengths, tokens if batch is None else float("inf"), batch)


def _limits(norms: Mapping[str, Tensor], factor: float) -> dict[str, float]:
    """By ``site@source``, the norm above which rows are dropped: ``factor`` times the median; none for 0."""
    finite = {name: values[values.isfinite()] for name, values in norms.items() if factor}
    return {name: float(values.median()) * factor for name, values in finite.items() if len(values)}
