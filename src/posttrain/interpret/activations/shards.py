"""Activations on the disk: safetensors shards beside ``index.json``, written in order and read by row.

A shard holds a tensor ``[rows, width]`` for every site and source (``resid.20@model``), their norms
(``norm.resid.20@model``), and ``tokens``, ``document`` and ``position`` of every row. ``documents.safetensors`` holds
the token ids of all documents, those included whose rows were dropped.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from posttrain.errors import DataError, UsageError
from posttrain.interpret.activations.store_index import (
    DOCUMENTS,
    DTYPES,
    INDEX,
    Norms,
    ShardEntry,
    Source,
    StoreIndex,
    column,
    read_index,
)
from posttrain.registry import suggest
from posttrain.store.durable import replace_file, storage_errors

ROW_FACTS = ("tokens", "document", "position")
_TORCH_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "I32": torch.int32, "I64": torch.int64}


class ActivationStore:
    """Recorded activations, memory-mapped; rows are counted over all shards, in the order of the documents."""

    def __init__(self, folder: Path, index: StoreIndex) -> None:
        self.folder, self.index = folder, index
        self._shards = [_map_tensors(folder / shard.file) for shard in index.shards]
        rows = [shard.rows for shard in index.shards]
        self._starts = torch.tensor([0, *np.cumsum(rows).tolist()], dtype=torch.long)
        self._documents = _map_tensors(folder / DOCUMENTS)

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
        hashes = {DOCUMENTS: index.documents_sha256} | {shard.file: shard.sha256 for shard in index.shards}
        for file, expected in hashes.items():
            if not (path / file).is_file():
                raise DataError(path / file, "this file of the recording is missing; record again into a new folder")
            if verify and _hash_file(path / file) != expected:
                raise DataError(path / file, "this file was changed after it was recorded; record again")
        return cls(path, index)

    @property
    def num_rows(self) -> int:
        return self.index.rows

    @property
    def num_documents(self) -> int:
        return self.index.documents

    @property
    def sites(self) -> tuple[str, ...]:
        """As ``resid.20``."""
        return self.index.sites

    @property
    def sources(self) -> tuple[str, ...]:
        """``("model",)``, or ``("base", "post")``."""
        return self.index.source_names

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

    def norms(self, rows: Tensor, site: str | None = None, source: str | None = None) -> Tensor:
        """Norms ``float32 [n]`` of the given rows, computed before they were rounded to the stored dtype."""
        return self._pick(rows, f"norm.{column(self._site(site), self._source(source))}")

    def tokens(self, rows: Tensor) -> Tensor:
        """Token ids ``int64 [n]``: the token *at* each row."""
        return self._pick(rows, "tokens").long()

    def documents(self, rows: Tensor) -> Tensor:
        """Which document each row is of, ``int64 [n]``."""
        return self._pick(rows, "document").long()

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
        if len(involved) == 1:
            return self._shards[involved[0]][name][rows - self._starts[involved[0]]]
        out: Tensor | None = None
        for shard in involved:
            here = (shards == shard).nonzero()[:, 0]
            part = self._shards[shard][name][rows[here] - self._starts[shard]]
            out = part.new_empty((len(rows), *part.shape[1:])) if out is None else out
            out[here] = part
        return self._empty(name) if out is None else out

    def _empty(self, name: str) -> Tensor:
        width = self.index.widths.get(name.partition("@")[0])
        if width is None:
            return torch.empty(0, dtype=torch.float32 if name.startswith("norm.") else torch.int32)
        return torch.empty((0, width), dtype=DTYPES[self.index.dtype])

    def _site(self, site: str | None) -> str:
        return _choose(site, self.sites, "site", self.folder)

    def _source(self, source: str | None) -> str:
        return _choose(source, self.sources, "source", self.folder)


class StoreWriter:
    """Writes a recording shard by shard; an interrupted one goes on at its first unfinished shard.

    Args:
        folder: made if missing.
        index: what is recorded; its ``settings`` decide whether an interrupted recording may go on.
        documents: token ids of all documents.
        prompt_lengths: how many of each document's tokens are its prompt (default: none).

    Raises:
        UsageError: the folder holds something else, or a recording under other settings (named).
        StorageError: the disk is full or not writable.
    """

    def __init__(
        self,
        folder: str | Path,
        index: StoreIndex,
        documents: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int] | None = None,
    ) -> None:
        self.folder = Path(folder)
        content = _pack_documents(documents, prompt_lengths or [0] * len(documents))
        self.index = replace(index, documents=len(documents), documents_sha256=_hash(content))
        if (self.folder / INDEX).is_file():
            found = read_index(self.folder)
            _refuse_changes(self.folder, found.deciding(), self.index.deciding())
            self.index = found
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
    dtype: str = "fp32",
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
    pairs = {site: [given] if isinstance(given, Tensor) else list(given) for site, given in sites.items()}
    counts = {len(x) for given in pairs.values() for x in given}
    num_rows = counts.pop() if len(counts) == 1 else -1
    texts = [[0] * num_rows] if documents is None else [list(ids) for ids in documents]
    if num_rows != sum(map(len, texts)) or len({len(given) for given in pairs.values()}) != 1:
        raise UsageError("every site needs as many rows as there are tokens, and all sites the same sources")
    names = ("model",) if len(next(iter(pairs.values()))) == 1 else ("base", "post")
    widths = {site: given[0].shape[1] for site, given in pairs.items()}
    sources = [Source(name, about, "") for name in names]
    index = StoreIndex(widths, sources, dtype, tokenizer="", data={"source": about}, seed=0, documents=len(texts))
    writer = StoreWriter(folder, index, texts)
    columns = {column(s, n): x for s, given in pairs.items() for n, x in zip(names, given, strict=True)}
    columns["tokens"] = torch.tensor([token for ids in texts for token in ids])
    columns["document"] = torch.tensor([number for number, ids in enumerate(texts) for _ in ids])
    columns["position"] = torch.tensor([place for ids in texts for place in range(len(ids))])
    for start in range(writer.next_shard * rows_per_shard, num_rows, rows_per_shard):
        writer.add({name: x[start : start + rows_per_shard] for name, x in columns.items()}, {})
    return writer.finish()


def _choose(given: str | None, known: Sequence[str], what: str, folder: Path) -> str:
    if given is None and len(known) == 1:
        return known[0]
    if given is None or given not in known:
        problem = f"say which {what}" if given is None else f"there is no {what} {given!r}.{suggest(given, known)}"
        raise UsageError(f"{folder}: {problem} Recorded: {', '.join(known)}")
    return given


def _refuse_changes(folder: Path, found: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    asked = json.loads(json.dumps(asked))  # as it would have been read
    for key in [*found, *(key for key in asked if key not in found)]:
        if found.get(key) != asked.get(key):
            raise UsageError(
                f"{folder} was recorded with another `{key}`: {found.get(key)!r} there, {asked.get(key)!r} now. "
                "Give another folder, or delete that one"
            )


def _pack_documents(documents: Sequence[Sequence[int]], prompt_lengths: Sequence[int]) -> bytes:
    offsets = torch.tensor([0, *np.cumsum([len(ids) for ids in documents], dtype=np.int64).tolist()], dtype=torch.long)
    flat = [torch.as_tensor(ids, dtype=torch.int32) for ids in documents]
    ids = torch.cat(flat) if flat else torch.empty(0, dtype=torch.int32)
    lengths = torch.as_tensor(prompt_lengths, dtype=torch.int32)
    return bytes(save({"ids": ids, "offsets": offsets, "prompt_lengths": lengths}))


def _map_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, memory-mapped copy-on-write: pages are read when they are needed.

    No file stays open for it, so that there may be thousands of shards.
    """
    raw = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    size = int.from_bytes(bytes(raw[:8].tolist()), "little")
    header = json.loads(bytes(raw[8 : 8 + size].numpy()))
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = (8 + size + offset for offset in entry["data_offsets"])
            found[name] = raw[start:end].view(_TORCH_DTYPES[entry["dtype"]]).view(entry["shape"])
    return found


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
