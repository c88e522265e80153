"""Recorded activations as ``.pt`` files, one tensor each, for and from other programs."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from torch import Tensor

from posttrain.errors import DataError, UsageError, first_line
from posttrain.interpret.activations.shards import ROW_FACTS, ActivationStore, write_tensors
from posttrain.interpret.activations.sites import layer_of
from posttrain.store.durable import storage_errors

ROWS_AT_A_TIME = 65536


def export_pt(store: ActivationStore, folder: str | Path) -> list[Path]:
    """Write a store as ``<site>@<source>-00000.pt`` and ``tokens-``, ``document-``, ``position-00000.pt``.

    Files of the same number hold the same rows (65536, the last one fewer); ``torch.load(..., weights_only=True)``
    reads them.

    Raises:
        UsageError: the folder is there already and not empty.
        StorageError: the disk is full or not writable.
    """
    place = Path(folder)
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise UsageError(f"{place} is not empty; give another folder")
    written: list[Path] = []
    with storage_errors(".pt files", place):
        place.mkdir(parents=True, exist_ok=True)
        for number, start in enumerate(range(0, store.num_rows, ROWS_AT_A_TIME)):
            rows = torch.arange(start, min(start + ROWS_AT_A_TIME, store.num_rows))
            tensors = {
                f"{site}@{source}": store.gather(rows, site, source) for site in store.sites for source in store.sources
            }
            facts = (store.tokens(rows), store.documents(rows), store.positions(rows))
            tensors |= dict(zip(ROW_FACTS, facts, strict=True))
            for name, tensor in tensors.items():
                written.append(place / f"{name}-{number:05d}.pt")
                torch.save(tensor.clone(), written[-1])
    return written


def import_pt(folder: str | Path, site: str, out: str | Path) -> ActivationStore:
    """A store out of ``.pt`` files with one tensor ``[rows, d]`` each, in the order of their names.

    What ``export_pt`` wrote is read with its tokens, positions counted anew (the tokens of rows that were dropped are
    not in the files); files of others (``*.pt``) become one document without tokens.
    The dtype is the files' own (bfloat16 stays, all else becomes float32).

    Raises:
        DataError: no files, or one that holds something else.
        UsageError: the output folder holds something else.
    """
    layer_of(site)
    place = Path(folder)
    own = sorted(place.glob(f"{site}@*-*.pt"))
    sources = sorted({file.name.partition("@")[2].rpartition("-")[0] for file in own})
    if own:
        parts = [[_read(f, 2) for f in own if f.name.startswith(f"{site}@{source}-")] for source in sources]
        documents = _read_documents(place)
    else:
        parts, documents = [[_read(file, 2) for file in sorted(place.glob("*.pt"))]], None
    if not parts[0]:
        raise DataError(place, "no .pt files in this folder")
    widths = {part.shape[1] for each in parts for part in each}
    if len(widths) > 1:
        raise DataError(place, f"the files hold rows of different widths: {sorted(widths)}")
    tensors = [torch.cat(each) for each in parts]
    is_low = all(tensor.dtype == torch.bfloat16 for tensor in tensors)
    return write_tensors(
        out, {site: tensors}, documents=documents, dtype="bf16" if is_low else "fp32", about=place.name
    )


def _read_documents(folder: Path) -> list[list[int]] | None:
    """The tokens of the rows, document by document; None where the files are not there."""
    columns = []
    for name in ROW_FACTS[:2]:
        files = sorted(folder.glob(f"{name}-*.pt"))
        if not files:
            return None
        columns.append(torch.cat([_read(file, 1) for file in files]))
    _, counts = torch.unique_consecutive(columns[1], return_counts=True)
    return [part.tolist() for part in columns[0].split(counts.tolist())]


def _read(file: Path, num_dimensions: int) -> Tensor:
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise DataError(file, f"this .pt file cannot be read as a plain tensor ({first_line(error)})") from error
    if not isinstance(loaded, Tensor) or loaded.dim() != num_dimensions:
        what = f"shape {list(loaded.shape)}" if isinstance(loaded, Tensor) else type(loaded).__name__
        raise DataError(file, f"a tensor with {num_dimensions} dimensions is needed; got {what}")
    return loaded
