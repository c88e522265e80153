"""Record what layers of one model, or of two over the same tokens, compute: the library's way to do it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load
from torch import Tensor

from posttrain.errors import UsageError
from posttrain.interpret.activations.shards import (
    DTYPES,
    FORMAT,
    ActivationStore,
    Documents,
    Source,
    StoreIndex,
    StoreWriter,
    column,
    pack_documents,
    row_norms,
)
from posttrain.interpret.activations.sites import Extractor, load_layers, read_site, tokenizer_hash, weights_hash
from posttrain.models.forward.micro import by_length, split_padded
from posttrain.models.load import LoadedModel, choose_device, load_tokenizer
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


@dataclass(frozen=True, slots=True)
class Size:
    """What a recording takes at most, before rows are dropped: tokens, bytes of one row, bytes in all."""

    rows: int
    row_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.rows * self.row_bytes


@dataclass(frozen=True, slots=True)
class Computed:
    """The rows of some documents: tensors as ``StoreWriter.add`` takes them, norms by ``site@source``, first tokens."""

    tensors: dict[str, Tensor]
    norms: dict[str, Tensor]
    first: Tensor

    def kept(self, limits: Mapping[str, float]) -> tuple[Tensor, dict[str, int]]:
        """Which rows stay, and how many go for each reason; a row that goes for two is counted under the first."""
        broken, outlier = torch.zeros_like(self.first), torch.zeros_like(self.first)
        for name, values in self.norms.items():
            broken |= ~values.isfinite()
            outlier |= values > limits.get(name, float("inf"))
        counts = {
            "first_token": int(self.first.sum()),
            "not_finite": int((broken & ~self.first).sum()),
            "outlier": int((outlier & ~broken & ~self.first).sum()),
        }
        kept = ~(self.first | broken | outlier)
        return kept, {reason: count for reason, count in counts.items() if count}


class Recorder:
    """One recording: the models loaded, the texts known, nothing written yet.

    Args:
        models: one, or two over the same tokens (``base`` and ``post``); names or sections of a recipe.
        documents: none longer than the models' context; or their token ids alone.
        sites: ``resid.20``, ``mlp.20``, ``attn.20``.
        dtype: of what is stored. Norms are taken before rounding.
        outliers: drop rows with a norm above so many times the median of the first shard, in any site and source;
            0 keeps them.
        batch: documents at a time; None: as many as fit into a number of tokens.
        seed: by which the documents were chosen, for the index.
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
        seed: int = 0,
        rows_per_shard: int | None = None,
    ) -> None:
        specs = [models] if isinstance(models, str | ModelSection) else list(models)
        self.texts = Documents.of(documents)
        self.documents = self.texts.ids
        if len(specs) not in (1, 2) or not self.documents or not all(self.documents):
            raise UsageError("a recording needs one model or two, and documents that are not empty")
        sections = [ModelSection(name=model) if isinstance(model, str) else model for model in specs]
        names = [str(site) for site in dict.fromkeys(read_site(name) for name in sites)]
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
        self.index = self._describe(sections, loaded, names, dtype, tokenizers[0], dict(self.texts.data), seed)
        self.index.dropped = {reason: count for reason, count in self.texts.dropped.items() if count}
        rows = rows_per_shard or min(MAX_SHARD_ROWS, max(MIN_SHARD_ROWS, SHARD_BYTES // self.index.row_bytes))
        self.index.settings["rows_per_shard"] = rows
        self.plan = plan_shards([len(ids) for ids in self.documents], rows)

    @property
    def size(self) -> Size:
        """What it will take on the disk, at most."""
        return Size(sum(map(len, self.documents)), self.index.row_bytes)

    def room(self, folder: Path) -> tuple[int, int]:
        """(bytes that are not written yet, at most; bytes that are free where ``folder`` is or will be)."""
        there = sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder.is_dir() else 0
        above = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        return self.size.num_bytes - there, shutil.disk_usage(above).free

    def write(self, folder: str | Path, observe: Callable[[int, int], None] | None = None) -> ActivationStore:
        """Record into a folder; what an interrupted recording has there already is kept.

        A shard is a function of its documents, the settings and the limits alone, so that a recording that goes on
        writes the same bytes. ``observe`` is told (shards done, shards in all).

        Raises:
            UsageError: the folder holds something else, or a recording under other settings.
            StorageError: the disk is full or not writable.
        """
        writer = StoreWriter(folder, self.index, self.texts)
        for number in range(writer.next_shard, len(self.plan)):
            if observe is not None:
                observe(number, len(self.plan))
            shard = self.compute(number)
            if number == 0:
                writer.set_limits(self.limits_of(shard))
            kept, dropped = shard.kept(writer.index.limits)
            writer.add({name: x[kept] for name, x in shard.tensors.items()}, dropped)
        if observe is not None:
            observe(len(self.plan), len(self.plan))
        return writer.finish()

    def limits_of(self, shard: Computed) -> dict[str, float]:
        """By ``site@source``, the norm above which rows are outliers, as the first shard has it."""
        if not self.outliers:
            return {}
        return _limits({name: x[~shard.first] for name, x in shard.norms.items()}, self.outliers)

    def starts(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Which rows are the first tokens of their documents, but for a token that stands for the start."""
        return (positions == 0) & (tokens != (-1 if self.start_id is None else self.start_id))

    def compute(self, number: int) -> Computed:
        """All rows of a shard's documents in their order."""
        documents = self.plan[number]
        lengths = [len(self.documents[number]) for number in documents]
        places = [torch.arange(length) for length in lengths]
        starts = torch.tensor([0, *lengths]).cumsum(0)[:-1].tolist()
        tensors = {
            "tokens": torch.tensor([token for number in documents for token in self.documents[number]]),
            "document": torch.repeat_interleave(torch.tensor(list(documents)), torch.tensor(lengths)),
            "position": torch.cat(places),
        }
        batches = plan_batches(lengths, self.batch, TOKENS_PER_BATCH[self._device.type])
        for source, extract in self.extractors.items():
            for batch in batches:
                activations = extract([self.documents[documents[i]] for i in batch])
                where = torch.cat([starts[i] + places[i] for i in batch])
                for site, values in activations.items():
                    name = column(site, source)
                    if name not in tensors:
                        tensors[name] = values.new_empty((sum(lengths), values.shape[1]))
                    tensors[name][where] = values
        first = self.starts(tensors["tokens"], tensors["position"])
        return Computed(tensors, {name: row_norms(tensors[name]) for name in self.index.columns}, first)

    @property
    def _device(self) -> torch.device:
        return next(iter(self.extractors.values())).device

    def _describe(
        self,
        sections: Sequence[ModelSection],
        loaded: Sequence[LoadedModel],
        sites: Sequence[str],
        dtype: Dtype,
        tokenizer: str,
        data: dict[str, Any],
        seed: int,
    ) -> StoreIndex:
        sources = [
            Source(name, _model_name(section, each), weights_hash(section.name))
            for name, section, each in zip(self.extractors, sections, loaded, strict=True)
        ]
        probes = [extract([[0, 1]]) for extract in self.extractors.values()]
        widths = {site: int(probes[0][site].shape[1]) for site in sites}
        if any(probe[site].shape[1] != width for probe in probes for site, width in widths.items()):
            raise UsageError(f"{sections[0].name} and {sections[-1].name} have different widths")
        settings = {
            "outliers": self.outliers,
            "batch": self.batch,
            "device": self._device.type,
            "weights": [section.dtype for section in sections],
        }
        return StoreIndex(widths, sources, dtype, tokenizer, data, seed, len(self.documents), settings=settings)


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


def recording_key(
    models: Sequence[ModelSection],
    documents: Documents,
    sites: Sequence[str],
    *,
    dtype: Dtype = "bf16",
    outliers: float = OUTLIER_FACTOR,
    batch: int | None = None,
) -> str | None:
    """16 hexadecimal digits of all that decides the rows of a recording; no model is loaded for it.

    The files of the weights (not the model's name), the tokens of the documents and where they come from, the sites,
    the stored dtype, what is left out, and how the model computes: dtype, quantization, kind of device, batch.
    None where a model has no files of weights to tell it by.

    Raises:
        UsageError: no such model.
    """
    hashes = [weights_hash(model.name) for model in models]
    if not all(hashes):
        return None
    facts = {
        "format": FORMAT,
        "weights": hashes,
        "models": [model.model_dump(mode="json", exclude={"name", "device"}) for model in models],
        "devices": [choose_device(model.device).type for model in models],
        "tokenizers": [tokenizer_hash(load_tokenizer(m.name, trust_remote_code=m.runs_remote_code)) for m in models],
        "documents": hashlib.sha256(pack_documents(documents)).hexdigest(),
        "data": documents.data,
        "sites": list(sites),
        "settings": [dtype, outliers, batch],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


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


def _model_name(section: ModelSection, loaded: LoadedModel) -> str:
    return section.name if section.name == "tiny" else loaded.source


def _limits(norms: Mapping[str, Tensor], factor: float) -> dict[str, float]:
    """By ``site@source``, the norm above which rows are dropped: ``factor`` times the median of those given."""
    finite = {name: values[values.isfinite()] for name, values in norms.items()}
    return {name: float(values.median()) * factor for name, values in finite.items() if len(values)}


# Activations as they are made: for training without a recording on the disk.
#
# The documents are cut into chunks, and the rows of a chunk are computed when one of them is read. The last few chunks
# are kept in memory, the others are forgotten and computed again when their turn comes. What a row holds is a function
# of its chunk's documents and of the settings alone, so a training that goes on reads what it would have read.

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
        self._documents = load(pack_documents(recorder.texts))
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
