"""Activations on the disk: safetensors shards beside ``index.json``, written in order and read by row.

A shard holds a tensor ``[rows, width]`` for every site and source (``resid.20@model``), their norms
(``norm.resid.20@model``), and ``tokens``, ``document`` and ``position`` of every row. ``documents.safetensors`` holds
the token ids of all documents, those included whose rows were dropped. ``index.json`` says what was recorded, of which
models, over which texts."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
from pydantic import Field, NonNegativeInt, PositiveInt, StringConstraints, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from posttrain.errors import DataError, UsageError, first_line
from posttrain.registry import suggest
from posttrain.store.durable import replace_file, storage_errors
from posttrain.untrusted import first_fault

INDEX, DOCUMENTS = "index.json", "documents.safetensors"
FORMAT = 1
LAYER_CONVENTION = (
    "layer L (1 .. num_layers) is the output of block index L - 1, which transformers calls hidden_states[L] "
    "(the last one before the final norm); layer 0 is what the first block reads, the embeddings"
)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(slots=True)
class Documents:
    """Token ids of documents, none empty.

    ``prompt_lengths``: how many tokens of each are its prompt (none given: plain texts). ``data`` says where they come
    from, ``dropped`` counts what was left out, by reason: whole documents, or tokens (``..._tokens``).
    """

    ids: list[Sequence[int]] = field(default_factory=list)
    prompt_lengths: list[int] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.ids))


@dataclass(frozen=True, slots=True)
class Source:
    """A model whose activations are stored: ``model``, or ``base`` and ``post`` where there are two."""

    name: str
    model: str
    weights_hash: str


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One shard: its file, how many rows it holds, the hash of its bytes, what was dropped on the way, by reason."""

    file: Annotated[str, StringConstraints(pattern=r"^shard-\d{5,9}\.safetensors$")]
    rows: NonNegativeInt
    sha256: str
    dropped: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Norms:
    """Norms of the rows of one site and source: median, mean, root of the mean square."""

    median: float
    mean: float
    rms: float


@dataclass(slots=True)
class StoreIndex:
    """What ``index.json`` says.

    ``widths`` by site. ``data`` describes the texts, ``settings`` is everything else that decides what the rows are
    (an interrupted recording goes on only under the same). ``limits`` by ``site@source``: rows with a larger norm
    were dropped. ``dropped`` counts by reason: while it is recorded what was left out of the texts, once it is finished
    rows and texts together. ``norms`` by ``site@source`` is of the rows kept.
    """

    widths: Annotated[dict[str, PositiveInt], Field(min_length=1)]
    sources: Annotated[list[Source], Field(min_length=1)]
    dtype: Literal["bf16", "fp32"]
    tokenizer: str
    data: dict[str, Any]
    documents: NonNegativeInt
    documents_sha256: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    rows: int = 0
    shards: list[ShardEntry] = field(default_factory=list)
    norms: dict[str, Norms] = field(default_factory=dict)
    finished: bool = False
    layer_convention: str = LAYER_CONVENTION
    format: int = FORMAT

    @property
    def sites(self) -> tuple[str, ...]:
        return tuple(self.widths)

    @property
    def source_names(self) -> tuple[str, ...]:
        return tuple(source.name for source in self.sources)

    @property
    def columns(self) -> list[str]:
        """``resid.20@model`` for every site and source, as tensors are called in the shards."""
        return [column(site, source) for site in self.sites for source in self.source_names]

    @property
    def row_bytes(self) -> int:
        """What one row takes on the disk: the activations, their norms, and token, document and position."""
        each = torch.empty(0, dtype=DTYPES[self.dtype]).element_size()
        return sum(self.widths.values()) * each * len(self.sources) + 4 * len(self.columns) + 12

    def to_json(self) -> bytes:
        return (json.dumps(asdict(self), indent=1) + "\n").encode()

    def deciding(self) -> dict[str, Any]:
        """All that must be the same for a recording to go on, by name."""
        return {
            "sites": self.widths,
            "dtype": self.dtype,
            "tokenizer": self.tokenizer,
            "data": self.data,
            "documents": self.documents_sha256,
            **{source.name: source.weights_hash for source in self.sources},
            **self.settings,
        }


def column(site: str, source: str) -> str:
    return f"{site}@{source}"


def read_index(folder: Path) -> StoreIndex:
    """The index of a folder.

    Raises:
        DataError: there is none, or it is of another format.
    """
    path = folder / INDEX
    if not path.is_file():
        raise DataError(folder, f"no recorded activations here (no {INDEX}); `posttrain activations` makes them")
    try:
        content = path.read_bytes()
        kind = json.loads(content).get("format", FORMAT)
        if kind != FORMAT:
            raise ValueError(f"format {kind}; this posttrain reads {FORMAT}")
        index = TypeAdapter(StoreIndex).validate_json(content, strict=True)
    except ValidationError as error:
        raise DataError(path, f"{_NO_INDEX} ({first_fault(error)})") from None
    except (ValueError, AttributeError, RecursionError) as error:
        raise DataError(path, f"{_NO_INDEX} ({error})") from None
    if problem := next((what for broken, what in _contradictions(index) if broken), None):
        raise DataError(path, f"{_NO_INDEX} ({problem})")
    return index


_NO_INDEX = "this is no index of activations that can be read"


def _contradictions(index: StoreIndex) -> Iterator[tuple[Any, str]]:
    """What no recording says; the index may be a stranger's."""
    names = index.source_names
    yield len(set(names)) < len(names), "sources: one twice"
    yield index.finished and index.rows != sum(shard.rows for shard in index.shards), "rows: not those of the shards"
    yield index.finished and not index.shards, "shards: none"
    yield index.finished and set(index.norms) != set(index.columns), "norms: not those of the sites"
    weights = index.settings.get("weights", ["float32"])
    known = isinstance(weights, list) and weights and all(name in ("float32", "bfloat16") for name in weights)
    yield not known, "settings.weights: no dtypes of models"


def check_files(folder: Path, index: StoreIndex, *, contents: bool = True) -> None:
    """Refuse a recording, finished or not, that lost a file; with ``contents`` also one whose bytes were changed.

    Raises:
        DataError: with the file.
    """
    hashes = {DOCUMENTS: index.documents_sha256} | {shard.file: shard.sha256 for shard in index.shards}
    for file, expected in hashes.items():
        if not (folder / file).is_file():
            raise DataError(folder / file, "this file of the recording is missing; record again into a new folder")
        if contents and _hash_file(folder / file) != expected:
            raise DataError(folder / file, "this file was changed after it was recorded; record again")


ROW_FACTS = ("tokens", "document", "position")


class ActivationStore:
    """Recorded activations, memory-mapped; rows are counted over all shards, in the order of the documents."""

    def __init__(self, folder: Path, index: StoreIndex) -> None:
        self.folder, self.index = folder, index
        self.num_rows, self.num_documents = index.rows, index.documents
        self.sites, self.sources = index.sites, index.source_names
        self._shards = [_map_tensors(folder / shard.file) for shard in index.shards]
        rows = [shard.rows for shard in index.shards]
        self._starts = torch.tensor([0, *np.cumsum(rows).tolist()], dtype=torch.long)
        self._documents = _map_tensors(folder / DOCUMENTS)
        self._check()

    def _check(self) -> None:
        """Refuse tensors of other shapes than the index means.

        Raises:
            DataError: with the file.
        """
        widths = {name: self.index.widths[name.partition("@")[0]] for name in self.index.columns}
        for entry, tensors in zip(self.index.shards, self._shards, strict=True):
            wanted = dict.fromkeys((*ROW_FACTS, *(f"norm.{name}" for name in widths)), (entry.rows,))
            _check_shapes(self.folder / entry.file, tensors, wanted | {n: (entry.rows, w) for n, w in widths.items()})
        offsets = {"offsets": (self.num_documents + 1,), "prompt_lengths": (self.num_documents,)}
        _check_shapes(self.folder / DOCUMENTS, self._documents, offsets)
        starts = self._documents["offsets"]
        if int(starts[0]) or (starts.diff() < 0).any() or int(starts[-1]) != len(self._documents.get("ids", ())):
            raise DataError(self.folder / DOCUMENTS, "its documents do not follow one another; record again")

    @classmethod
    def open(cls, folder: str | Path, verify: bool = False) -> Self:
        """Open a finished folder; ``verify`` reads every shard and compares its hash.

        Raises:
            DataError: no recorded activations, an unfinished recording, a missing or damaged shard.
        """
        path = Path(folder)
        index = read_index(path)
        if not index.finished:
            raise DataError(path, "this recording was interrupted; the same command again goes on with it")
        check_files(path, index, contents=verify)
        return cls(path, index)

    def width(self, site: str | None = None) -> int:
        """d of a site."""
        return self.index.widths[self._site(site)]

    def gather(self, rows: Tensor, site: str | None = None, source: str | None = None) -> Tensor:
        """Activations ``[n, d]`` of the given rows ``int64 [n]``, in the order asked for, in the stored dtype.

        ``site`` and ``source`` may be left out where there is only one.

        Raises:
            UsageError: no such site or source, or one of several is needed.
            IndexError: a row that there is not.
        """
        return self._pick(rows, column(self._site(site), self._source(source)))

    def tokens(self, rows: Tensor) -> Tensor:
        """Token ids ``int64 [n]``: the token *at* each row."""
        return self._pick(rows, "tokens").long()

    def documents(self, rows: Tensor) -> Tensor:
        """Which document each row is of, ``int64 [n]``.

        Raises:
            DataError: one that there is not.
        """
        documents = self._pick(rows, "document").long()
        if len(documents) and not 0 <= int(documents.min()) <= int(documents.max()) < self.num_documents:
            raise DataError(self.folder, f"a row says that it is of another document than the {self.num_documents}")
        return documents

    def positions(self, rows: Tensor) -> Tensor:
        """Where in its document each row is, ``int64 [n]``, from 0."""
        return self._pick(rows, "position").long()

    def document_tokens(self, document: int) -> list[int]:
        """All token ids of a document, those of dropped rows too.

        Raises:
            IndexError: there is no such document.
        """
        if not 0 <= document < self.num_documents:
            raise IndexError(f"document {document} of {self.num_documents}")
        start, end = self._documents["offsets"][document : document + 2].tolist()
        ids: list[int] = self._documents["ids"][start:end].tolist()
        return ids

    def prompt_lengths(self, documents: Tensor) -> Tensor:
        """How many leading tokens of the given documents are their prompts, ``int64 [n]``; 0 in a plain text."""
        return self._documents["prompt_lengths"][documents].long()

    def _pick(self, rows: Tensor, name: str) -> Tensor:
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < self.num_rows:
            raise IndexError(f"rows {int(rows.min())} to {int(rows.max())} of {self.num_rows}")
        shards = torch.searchsorted(self._starts, rows, right=True) - 1
        involved = shards.unique().tolist()
        if len(involved) <= 1:  # of no rows, or of no shards, what is left is the shape
            first = involved[0] if involved else 0
            return self._shards[first][name][rows - self._starts[first]]
        out: Tensor | None = None
        for shard in involved:
            here = (shards == shard).nonzero()[:, 0]
            part = self._shards[shard][name][rows[here] - self._starts[shard]]
            out = part.new_empty((len(rows), *part.shape[1:])) if out is None else out
            out[here] = part
        assert out is not None, "at least two shards"
        return out

    def _site(self, site: str | None) -> str:
        return _choose(site, self.sites, "site", self.folder)

    def _source(self, source: str | None) -> str:
        return _choose(source, self.sources, "source", self.folder)


class StoreWriter:
    """Writes a recording shard by shard; an interrupted one goes on at its first unfinished shard.

    Args:
        folder: made if missing.
        index: what is recorded; its ``settings`` decide whether an interrupted recording may go on.
        documents: all of them.

    Raises:
        UsageError: the folder holds something else, or a recording under other settings (named).
        StorageError: the disk is full or not writable.
    """

    def __init__(
        self,
        folder: str | Path,
        index: StoreIndex,
        documents: Documents,
    ) -> None:
        self.folder = Path(folder)
        content = pack_documents(documents)
        self.index = replace(index, documents=len(documents.ids), documents_sha256=_hash(content))
        if (self.folder / INDEX).is_file():
            stored = read_index(self.folder)
            _refuse_changes(self.folder, stored.deciding(), self.index.deciding())
            self.index = stored
            return
        with storage_errors("activations", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            others = {x.name for x in self.folder.iterdir() if not x.name.startswith(".tmp-")} - {DOCUMENTS}
        if others:
            raise UsageError(f"{self.folder} holds something else than activations; give another folder")
        replace_file(self.folder / DOCUMENTS, content)
        self._write_index()

    @property
    def next_shard(self) -> int:
        """The number of the first shard that is not on the disk yet."""
        return len(self.index.shards)

    def set_limits(self, limits: Mapping[str, float]) -> None:
        """Above which norm rows are dropped; kept in the index, so that a resumed recording drops the same rows."""
        self.index.limits = dict(limits)
        self._write_index()

    def add(self, tensors: Mapping[str, Tensor], dropped: Mapping[str, int]) -> None:
        """Write the next shard: a tensor by ``site@source``, ``tokens``, ``document`` and ``position``.

        Activations may come in any float type; their norms are computed here, before rounding. A shard without rows
        is fine.
        """
        rows = len(tensors["tokens"])
        stored: dict[str, Tensor] = {name: tensors[name].to(torch.int32).contiguous() for name in ROW_FACTS}
        for name in self.index.columns:
            values = tensors[name]
            assert values.shape == (rows, self.index.widths[name.partition("@")[0]]), f"{name}: {values.shape}"
            stored[name] = values.to(DTYPES[self.index.dtype]).contiguous()
            stored[f"norm.{name}"] = row_norms(values)
        content = save(stored)
        file = f"shard-{self.next_shard:05d}.safetensors"
        replace_file(self.folder / file, content)
        self.index.shards.append(ShardEntry(file, rows, _hash(content), dict(dropped)))
        self._write_index()

    def finish(self) -> ActivationStore:
        """Count what was kept and dropped, take the norms, and open what was written."""
        if not self.index.finished:
            index = self.index
            index.rows = sum(shard.rows for shard in index.shards)
            counted = Counter(index.dropped)
            for shard in index.shards:
                counted.update(shard.dropped)
            index.dropped = {reason: count for reason, count in sorted(counted.items()) if count}
            mapped = [_map_tensors(self.folder / shard.file) for shard in index.shards]
            index.norms = {name: _summarize([shard[f"norm.{name}"] for shard in mapped]) for name in index.columns}
            index.finished = True
            self._write_index()
        return ActivationStore.open(self.folder)

    def _write_index(self) -> None:
        replace_file(self.folder / INDEX, self.index.to_json())


def row_norms(values: Tensor) -> Tensor:
    """Euclidean norms ``float32 [n]`` of rows ``[n, d]`` of any float type."""
    return torch.linalg.vector_norm(values, dim=-1, dtype=torch.float32)


def write_tensors(
    folder: str | Path,
    sites: Mapping[str, Tensor | Sequence[Tensor]],
    *,
    documents: Sequence[Sequence[int]] | None = None,
    dtype: Literal["bf16", "fp32"] = "fp32",
    about: str = "tensors",
    rows_per_shard: int = 65536,
) -> ActivationStore:
    """A store of given rows: by site ``[n, d]``, or two of them (base, post).

    Args:
        documents: token ids; all their tokens together are the n rows. None: one document whose ids are 0.
        about: what the index says instead of a model's name.

    Raises:
        UsageError: the numbers of rows differ.
    """
    pairs = {site: [tensors] if isinstance(tensors, Tensor) else list(tensors) for site, tensors in sites.items()}
    counts = {len(x) for tensors in pairs.values() for x in tensors}
    num_rows = counts.pop() if len(counts) == 1 else -1
    texts = [[0] * num_rows] if documents is None else [list(ids) for ids in documents]
    if num_rows != sum(map(len, texts)) or len({len(tensors) for tensors in pairs.values()}) != 1:
        raise UsageError("every site needs as many rows as there are tokens, and all sites the same sources")
    names = ("model",) if len(next(iter(pairs.values()))) == 1 else ("base", "post")
    widths = {site: tensors[0].shape[1] for site, tensors in pairs.items()}
    sources = [Source(name, about, "") for name in names]
    index = StoreIndex(widths, sources, dtype, tokenizer="", data={"source": about}, documents=len(texts))
    writer = StoreWriter(folder, index, Documents([*texts]))
    columns = {column(s, n): x for s, tensors in pairs.items() for n, x in zip(names, tensors, strict=True)}
    columns["tokens"] = torch.tensor([token for ids in texts for token in ids])
    columns["document"] = torch.tensor([number for number, ids in enumerate(texts) for _ in ids])
    columns["position"] = torch.tensor([place for ids in texts for place in range(len(ids))])
    for start in range(writer.next_shard * rows_per_shard, num_rows, rows_per_shard):
        writer.add({name: x[start : start + rows_per_shard] for name, x in columns.items()}, {})
    return writer.finish()


def _choose(name: str | None, known: Sequence[str], what: str, folder: Path) -> str:
    if name is None and len(known) == 1:
        return known[0]
    if name is None or name not in known:
        problem = f"say which {what}" if name is None else f"there is no {what} {name!r}.{suggest(name, known)}"
        raise UsageError(f"{folder}: {problem} Recorded: {', '.join(known)}")
    return name


def _refuse_changes(folder: Path, stored: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    asked = json.loads(json.dumps(asked))  # as it would have been read
    for key in [*stored, *(key for key in asked if key not in stored)]:
        if stored.get(key) != asked.get(key):
            raise UsageError(
                f"{folder} was recorded with another `{key}`: {stored.get(key)!r} there, {asked.get(key)!r} now. "
                "Give another folder, or delete that one"
            )


def pack_documents(documents: Documents) -> bytes:
    """Return the documents as a safetensors file: ``ids`` of all, ``offsets`` and ``prompt_lengths`` of each."""
    sizes = [len(ids) for ids in documents.ids]
    offsets = torch.tensor([0, *np.cumsum(sizes, dtype=np.int64).tolist()], dtype=torch.long)
    flat = [torch.as_tensor(ids, dtype=torch.int32) for ids in documents.ids]
    ids = torch.cat(flat) if flat else torch.empty(0, dtype=torch.int32)
    lengths = torch.as_tensor(documents.prompt_lengths or [0] * len(sizes), dtype=torch.int32)
    return bytes(save({"ids": ids, "offsets": offsets, "prompt_lengths": lengths}))


def _check_shapes(path: Path, tensors: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in wanted.items():
        there = tuple(tensors[name].shape) if name in tensors else "nothing"
        if there != shape:
            raise DataError(path, f"{name} has the shape {there}, but {INDEX} means {shape}; record again")


def _map_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, memory-mapped by the library: pages are read when they are needed.

    Raises:
        DataError: it is no such file, or holds numbers of another kind.
    """
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise DataError(path, f"holds no tensors that can be read ({first_line(error)})") from None


def _summarize(norms: Sequence[Tensor]) -> Norms:
    every = torch.cat([x.double() for x in norms]) if norms else torch.empty(0, dtype=torch.float64)
    if not len(every):
        return Norms(0.0, 0.0, 0.0)
    return Norms(float(every.median()), float(every.mean()), float(every.square().mean().sqrt()))


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
