"""``index.json`` of a folder of activations: what was recorded, of which models, over which texts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from posttrain.errors import DataError

INDEX, DOCUMENTS = "index.json", "documents.safetensors"
FORMAT = 1
LAYER_CONVENTION = (
    "layer L (1 .. num_layers) is the output of block index L - 1, which transformers calls hidden_states[L] "
    "(the last one before the final norm); layer 0 is what the first block reads, the embeddings"
)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Source:
    """A model whose activations are stored: ``model``, or ``base`` and ``post`` where there are two."""

    name: str
    model: str
    weights_hash: str


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One shard: its file, how many rows it holds, the hash of its bytes, what was dropped on the way, by reason."""

    file: str
    rows: int
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

    widths: dict[str, int]
    sources: list[Source]
    dtype: str
    tokenizer: str
    data: dict[str, Any]
    seed: int
    documents: int
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
            "seed": self.seed,
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
        data = json.loads(path.read_text(encoding="utf-8"))
        return _from_json(data)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(path, f"this is no index of activations that can be read ({error})") from error


def _from_json(data: Mapping[str, Any]) -> StoreIndex:
    if data["format"] != FORMAT:
        raise ValueError(f"format {data['format']}; this posttrain reads {FORMAT}")
    fields = dict(data)
    fields["sources"] = [Source(**source) for source in data["sources"]]
    fields["shards"] = [ShardEntry(**shard) for shard in data["shards"]]
    fields["norms"] = {name: Norms(**norms) for name, norms in data["norms"].items()}
    return StoreIndex(**fields)
