"""Activation storage: safetensors shards with an ``index.json``, written sequentially and read by row.

Each shard contains a tensor ``[rows, width]`` per site and source (``resid.20@model``), plus ``tokens``, ``document``
and ``position`` per row. ``documents.safetensors`` contains complete documents, including tokens whose rows were
dropped. ``export_pt`` and ``import_pt`` exchange rows with other programs as ``.pt`` files.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, Self

import torch
from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt, ValidationError, model_validator
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from posttrain.errors import DataError, UsageError, first_line
from posttrain.interpret.activations.sites import layer_of
from posttrain.models.forward.precision import DTYPES
from posttrain.option_types import Dtype
from posttrain.registry import suggest
from posttrain.store.checkpoint_files import digest_of
from posttrain.store.durable import replace_file, storage_errors
from posttrain.untrusted import first_fault

INDEX = "index.json"
DOCUMENTS = "documents.safetensors"
LAYER_CONVENTION = (
    "layer L (1 .. num_layers) is the output of block index L - 1, which transformers calls hidden_states[L] "
    "(the last one before the final norm)"
)
ROW_INFO = ("tokens", "document", "position")
ROWS_PER_FILE = 65536


@dataclass(slots=True)
class Documents:
    """Nonempty documents as token ids.

    ``prompt_lengths``: prompt tokens per document (empty list for plain texts). ``data``: describes the origin.
    ``dropped``: counts by reason (documents or tokens).
    """

    ids: list[Sequence[int]] = field(default_factory=list)
    prompt_lengths: list[int] = field(default_factory=list)
    data: dict[str, object] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.ids))

    def pack(self) -> bytes:
        """Serialize to safetensors: concatenated ``ids``, with ``offsets`` and ``prompt_lengths`` per document."""
        sizes = torch.tensor([0, *map(len, self.ids)])
        lengths = torch.tensor(self.prompt_lengths or [0] * len(self.ids), dtype=torch.int32)
        parts = [torch.empty(0, dtype=torch.int32)]
        parts += [torch.as_tensor(ids, dtype=torch.int32) for ids in self.ids]
        return bytes(save({"ids": torch.cat(parts), "offsets": sizes.cumsum(0), "prompt_lengths": lengths}))


class RecordedModel(BaseModel):
    """A recorded model: ``model``, or ``base`` and ``post`` if two were recorded."""

    name: str
    model: str
    weights_hash: str = ""
    dtype: Dtype = "fp32"


class ShardEntry(BaseModel):
    """File name, row count and SHA-256 for one shard."""

    file: Annotated[str, Field(pattern=r"^shard-\d{5,9}\.safetensors$")]
    rows: NonNegativeInt
    sha256: str


class StoreIndex(BaseModel, extra="forbid"):
    """Contents of ``index.json``.

    ``widths`` by site. ``data`` describes the texts, ``settings`` additional options affecting rows; resuming
    requires both unchanged. ``limits`` by ``site@source``: rows with larger norms were dropped. ``dropped``: counts
    by reason, covering texts and rows.
    """

    widths: Annotated[dict[str, PositiveInt], Field(min_length=1)]
    sources: Annotated[list[RecordedModel], Field(min_length=1)]
    dtype: Literal["bf16", "fp32"]
    tokenizer: str = ""
    data: dict[str, object] = {}
    documents: NonNegativeInt = 0
    documents_sha256: str = ""
    settings: dict[str, object] = {}
    limits: dict[str, float] = {}
    dropped: dict[str, int] = {}
    rows: int = 0
    shards: list[ShardEntry] = []
    finished: bool = False
    layer_convention: str = LAYER_CONVENTION
    format: Literal[2] = 2

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(set(self.source_names)) < len(self.sources):
            raise ValueError("sources: duplicate name")
        num_rows = sum(shard.rows for shard in self.shards)
        if self.rows != num_rows or (self.finished and not self.shards):
            raise ValueError("rows: inconsistent with the shards")
        return self

    @property
    def source_names(self) -> tuple[str, ...]:
        return tuple(source.name for source in self.sources)

    @property
    def columns(self) -> list[str]:
        """List tensor names in shards: ``resid.20@model`` for every site and source."""
        return [f"{site}@{source}" for site in self.widths for source in self.source_names]

    @property
    def row_bytes(self) -> int:
        """Compute bytes per row: activations plus token, document and position."""
        num_values = sum(self.widths.values()) * len(self.sources)
        return num_values * DTYPES[self.dtype].itemsize + 12

    def deciding(self) -> dict[str, str]:
        """Collect settings that must match to resume a recording, JSON-encoded."""
        keys: dict[str, object] = {
            "sites": self.widths,
            "dtype": self.dtype,
            "tokenizer": self.tokenizer,
            "data": self.data,
            "documents": self.documents_sha256,
        }
        for source in self.sources:
            keys[source.name] = [source.weights_hash, source.dtype]
        keys |= self.settings
        return {key: json.dumps(value) for key, value in keys.items()}


def read_store_index(folder: Path) -> StoreIndex:
    """Read ``index.json``; ``DataError`` if missing or invalid."""
    path = folder / INDEX
    if not path.is_file():
        raise DataError(folder, f"no recorded activations (missing {INDEX}); create them with `posttrain activations`")
    try:
        return StoreIndex.model_validate_json(path.read_bytes(), strict=True)
    except ValidationError as error:
        raise DataError(path, f"invalid index of activations ({first_fault(error)})") from None


class ActivationStore:
    """Recorded activations, memory-mapped; row indices run across shards in document order.

    ``verify``: check all file hashes. ``DataError``: an unfinished recording, a missing or damaged file.
    """

    def __init__(self, folder: str | Path, *, verify: bool = False) -> None:
        self.folder = Path(folder)
        self.index = read_store_index(self.folder)
        index = self.index
        if not index.finished:
            raise DataError(self.folder, "recording was interrupted; repeat the same command to resume")
        hashes = {DOCUMENTS: index.documents_sha256}
        for shard in index.shards:
            hashes[shard.file] = shard.sha256
        for file, expected in hashes.items():
            if not (self.folder / file).is_file():
                raise DataError(self.folder / file, "missing recording file; record again")
            if verify and digest_of(self.folder / file) != expected:
                raise DataError(self.folder / file, "file was changed after recording; record again")
        self.num_rows = index.rows
        self.num_documents = index.documents
        self.sites = tuple(index.widths)
        self.sources = index.source_names
        self._starts = torch.tensor([0, *(shard.rows for shard in index.shards)]).cumsum(0)
        widths = {name: index.widths[name.partition("@")[0]] for name in index.columns}
        self._shards = []
        for shard in index.shards:
            shapes: dict[str, tuple[int, ...]] = dict.fromkeys(ROW_INFO, (shard.rows,))
            for name, width in widths.items():
                shapes[name] = (shard.rows, width)
            self._shards.append(_map_tensors(self.folder / shard.file, shapes))
        sizes = {"offsets": (self.num_documents + 1,), "prompt_lengths": (self.num_documents,)}
        self._documents = _map_tensors(self.folder / DOCUMENTS, sizes)
        offsets = self._documents["offsets"]
        num_ids = len(self._documents.get("ids", ()))
        if int(offsets[0]) or (offsets.diff() < 0).any() or int(offsets[-1]) != num_ids:
            raise DataError(self.folder / DOCUMENTS, "document offsets are inconsistent; record again")

    def width(self, site: str | None = None) -> int:
        """Look up a site's width."""
        return self.index.widths[self._choose(site, self.sites, "site")]

    def gather(self, rows: Tensor, site: str | None = None, source: str | None = None) -> Tensor:
        """Read activations ``[n, d]`` for rows ``int64 [n]``, keeping order and stored dtype.

        ``site`` and ``source`` are optional if unique. ``UsageError``: no such site or source.
        """
        site = self._choose(site, self.sites, "site")
        source = self._choose(source, self.sources, "source")
        return self._pick(rows, f"{site}@{source}")

    def tokens(self, rows: Tensor) -> Tensor:
        """Read token ids ``int64 [n]``: each row's input token."""
        return self._pick(rows, "tokens").long()

    def documents(self, rows: Tensor) -> Tensor:
        """Read document numbers ``int64 [n]``."""
        documents = self._pick(rows, "document").long()
        if len(documents) and not 0 <= int(documents.min()) <= int(documents.max()) < self.num_documents:
            raise DataError(self.folder, f"row refers to a document outside the {self.num_documents} recorded")
        return documents

    def positions(self, rows: Tensor) -> Tensor:
        """Read positions within the document ``int64 [n]``, from 0."""
        return self._pick(rows, "position").long()

    def document_tokens(self, document: int) -> list[int]:
        """Read a document's complete token ids, including tokens whose rows were dropped."""
        start, end = self._documents["offsets"][document : document + 2].tolist()
        ids = self._documents["ids"][start:end]
        return list(ids.tolist())

    def prompt_lengths(self, documents: Tensor) -> Tensor:
        """Read prompt lengths ``int64 [n]``; 0 for plain texts."""
        return self._documents["prompt_lengths"][documents].long()

    def limit(self, site: str, source: str) -> float:
        """Look up the norm limit used for dropping rows."""
        return self.index.limits.get(f"{site}@{source}", float("inf"))

    def _pick(self, rows: Tensor, name: str) -> Tensor:
        if len(rows):
            lowest = int(rows.min())
            highest = int(rows.max())
            if lowest < 0 or highest >= self.num_rows:
                raise IndexError(f"rows {lowest} to {highest} of {self.num_rows}")
        shards = torch.searchsorted(self._starts, rows, right=True) - 1
        involved = shards.unique().tolist() or [0]
        first = self._shards[involved[0]][name]
        if len(involved) == 1:
            only = involved[0]
            return first[rows - self._starts[only]]
        out = first.new_empty((len(rows), *first.shape[1:]))
        for shard in involved:
            here = shards == shard
            places = rows[here] - self._starts[shard]
            out[here] = self._shards[shard][name][places]
        return out

    def _choose(self, name: str | None, known: Sequence[str], what: str) -> str:
        if name is None and len(known) == 1:
            return known[0]
        if name is None or name not in known:
            if name is None:
                problem = f"say which {what}"
            else:
                problem = f"no {what} {name!r}.{suggest(name, known)}"
            raise UsageError(f"{self.folder}: {problem} Recorded: {', '.join(known)}")
        return name


def _map_tensors(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Memory-map a safetensors file; ``DataError``: unreadable or unexpected shapes."""
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError) as error:
        raise DataError(path, f"contains no readable tensors ({first_line(error)})") from None
    for name, shape in shapes.items():
        there: object = "nothing"
        if name in tensors:
            there = tuple(tensors[name].shape)
        if there != shape:
            raise DataError(path, f"{name} has shape {there}, but {INDEX} expects {shape}; record again")
    return tensors


class StoreWriter:
    """Write recordings shard by shard, resuming at the first unfinished shard.

    Raises:
        UsageError: the folder contains something else, or a recording with different settings.
        StorageError: writing failed, for example on a full disk.
    """

    def __init__(self, folder: str | Path, index: StoreIndex, documents: Documents) -> None:
        self.folder = Path(folder)
        content = documents.pack()
        digest = hashlib.sha256(content).hexdigest()
        size = {"documents": len(documents.ids), "documents_sha256": digest}
        self.index = index.model_copy(deep=True, update=size)
        if (self.folder / INDEX).is_file():
            stored = read_store_index(self.folder)
            old = stored.deciding()
            new = self.index.deciding()
            for key in {**old, **new}:
                if old.get(key) != new.get(key):
                    raise UsageError(
                        f"{self.folder} was recorded with another `{key}`: stored {old.get(key)}, requested "
                        f"{new.get(key)}. Give a different folder, or delete it"
                    )
            self.index = stored
            return
        with storage_errors("activations", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            there = {path.name for path in self.folder.iterdir() if not path.name.startswith(".tmp-")}
            others = there - {DOCUMENTS}
        if others:
            raise UsageError(f"{self.folder} contains something other than activations; give a different folder")
        replace_file(self.folder / DOCUMENTS, content)
        self._write_index()

    def set_limits(self, limits: Mapping[str, float]) -> None:
        """Store the norm limits, so a resumed recording drops the same rows."""
        self.index.limits = dict(limits)
        self._write_index()

    def add(self, tensors: Mapping[str, Tensor], dropped: Mapping[str, int]) -> None:
        """Write the next shard: a float tensor for each name in ``index.columns``, and ``ROW_INFO``."""
        index = self.index
        rows = len(tensors["tokens"])
        stored: dict[str, Tensor] = {name: tensors[name].to(torch.int32).contiguous() for name in ROW_INFO}
        for name in index.columns:
            width = index.widths[name.partition("@")[0]]
            assert tensors[name].shape == (rows, width), name
            stored[name] = tensors[name].to(DTYPES[index.dtype]).contiguous()
        content = save(stored)
        file = f"shard-{len(index.shards):05d}.safetensors"
        replace_file(self.folder / file, content)
        digest = hashlib.sha256(content).hexdigest()
        index.shards.append(ShardEntry(file=file, rows=rows, sha256=digest))
        index.rows += rows
        counts = Counter(index.dropped) + Counter(dropped)
        index.dropped = dict(sorted(counts.items()))
        self._write_index()

    def finish(self) -> ActivationStore:
        """Mark the recording finished, and open it."""
        if not self.index.finished:
            self.index.finished = True
            self._write_index()
        return ActivationStore(self.folder)

    def _write_index(self) -> None:
        text = self.index.model_dump_json(indent=1)
        replace_file(self.folder / INDEX, text.encode() + b"\n")


def describe_rows(documents: Sequence[Sequence[int]], numbers: Sequence[int]) -> dict[str, Tensor]:
    """Build ``ROW_INFO`` for selected documents, in order."""
    lengths = torch.tensor([len(documents[number]) for number in numbers], dtype=torch.long)
    tokens = [token for number in numbers for token in documents[number]]
    return {
        "tokens": torch.tensor(tokens, dtype=torch.long),
        "document": torch.tensor(list(numbers), dtype=torch.long).repeat_interleave(lengths),
        "position": torch.cat([torch.arange(int(length)) for length in lengths]),
    }


def write_tensors(
    folder: str | Path,
    sites: Mapping[str, Tensor | Sequence[Tensor]],
    *,
    documents: Sequence[Sequence[int]] | None = None,
    dtype: Literal["bf16", "fp32"] = "fp32",
    about: str = "tensors",
    rows_per_shard: int = ROWS_PER_FILE,
) -> ActivationStore:
    """Store given rows: ``[n, d]`` per site, or a (base, post) pair.

    ``documents``: token ids, n in total (None: one document with all ids 0). ``about`` replaces the model name in the
    index. ``UsageError``: row counts differ.
    """
    of_sites: dict[str, list[Tensor]] = {}
    for site, tensors in sites.items():
        if isinstance(tensors, Tensor):
            of_sites[site] = [tensors]
        else:
            of_sites[site] = list(tensors)
    first = next(iter(of_sites.values()))
    texts: list[Sequence[int]] = [[0] * len(first[0])]
    if documents is not None:
        texts = list(documents)
    num_rows = sum(map(len, texts))
    for own in of_sites.values():
        if not own or len(own) != len(first) or any(len(x) != num_rows for x in own):
            raise UsageError("every site needs one row per token, and the same sources at all sites")
    sources = [RecordedModel(name=name, model=about) for name in choose_source_names(len(first))]
    widths = {site: own[0].shape[1] for site, own in of_sites.items()}
    index = StoreIndex(widths=widths, sources=sources, dtype=dtype, data={"source": about})
    writer = StoreWriter(folder, index, Documents(texts))
    columns = {}
    for site, own in of_sites.items():
        for source, x in zip(sources, own, strict=True):
            columns[f"{site}@{source.name}"] = x
    columns |= describe_rows(texts, range(len(texts)))
    for start in range(len(writer.index.shards) * rows_per_shard, num_rows, rows_per_shard):
        writer.add({name: x[start : start + rows_per_shard] for name, x in columns.items()}, {})
    return writer.finish()


def choose_source_names(num_models: int) -> tuple[str, ...]:
    """Choose source names for one or two recorded models."""
    if num_models == 1:
        return ("model",)
    return ("base", "post")


def export_pt(store: ActivationStore, folder: str | Path) -> list[Path]:
    """Export a store as ``<site>@<source>-00000.pt`` and ``tokens-``, ``document-``, ``position-00000.pt``.

    Files with the same number contain the same rows (``ROWS_PER_FILE`` each, fewer in the last), one tensor per file.
    ``UsageError``: the folder is not empty.
    """
    place = Path(folder)
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise UsageError(f"{place} is not empty; give a different folder")
    written: list[Path] = []
    with storage_errors(".pt files", place):
        place.mkdir(parents=True, exist_ok=True)
        for number, start in enumerate(range(0, store.num_rows, ROWS_PER_FILE)):
            rows = torch.arange(start, min(start + ROWS_PER_FILE, store.num_rows))
            tensors = {name: store.gather(rows, *name.split("@")) for name in store.index.columns}
            tensors["tokens"] = store.tokens(rows)
            tensors["document"] = store.documents(rows)
            tensors["position"] = store.positions(rows)
            for name, tensor in tensors.items():
                file = place / f"{name}-{number:05d}.pt"
                torch.save(tensor.clone(), file)
                written.append(file)
    return written


def import_pt(folder: str | Path, site: str, out: str | Path) -> ActivationStore:
    """Import rows from ``.pt`` files, each with one tensor ``[rows, d]``, sorted by file name.

    Files from ``export_pt`` keep sources and tokens, but positions are renumbered; any other ``*.pt`` files become
    one document without tokens. bfloat16 is kept if used throughout, else float32. ``DataError``: unexpected file
    contents.
    """
    layer_of(site)
    place = Path(folder)
    sources = sorted({file.name.rpartition("-")[0] for file in place.glob(f"{site}@*-*.pt")})
    if sources:
        parts = [_read_pt(place, f"{source}-*.pt", 2) for source in sources]
    else:
        parts = [_read_pt(place, "*.pt", 2)]
    widths = {part.shape[1] for each in parts for part in each}
    if not widths:
        raise DataError(place, "no .pt files in this folder")
    if len(widths) > 1:
        raise DataError(place, f"files contain rows with different widths: {sorted(widths)}")
    documents = None
    if sources:
        tokens = _read_pt(place, "tokens-*.pt", 1)
        if tokens:
            numbers = torch.cat(_read_pt(place, "document-*.pt", 1))
            _, sizes = numbers.unique_consecutive(return_counts=True)
            documents = [part.tolist() for part in torch.cat(tokens).split(sizes.tolist())]
    tensors = [torch.cat(each) for each in parts]
    dtype: Literal["bf16", "fp32"] = "fp32"
    if all(x.dtype == torch.bfloat16 for x in tensors):
        dtype = "bf16"
    return write_tensors(out, {site: tensors}, documents=documents, dtype=dtype, about=place.name)


def _read_pt(folder: Path, pattern: str, num_dimensions: int) -> list[Tensor]:
    tensors = []
    for file in sorted(folder.glob(pattern)):
        try:
            loaded = torch.load(file, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
            raise DataError(file, f"cannot be read as a plain tensor ({first_line(error)})") from error
        if not isinstance(loaded, Tensor):
            what = type(loaded).__name__
            raise DataError(file, f"expected a tensor with {num_dimensions} dimensions; got {what}")
        if loaded.dim() != num_dimensions:
            shape = list(loaded.shape)
            raise DataError(file, f"expected a tensor with {num_dimensions} dimensions; got shape {shape}")
        tensors.append(loaded)
    return tensors
