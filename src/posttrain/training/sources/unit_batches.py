"""Batches of supervised units. Fields that do not change in a run are computed once and cached."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as serialize
from torch import Tensor

from posttrain.activity import phase
from posttrain.data.render.rows import TokenRow
from posttrain.store.durable import replace_file
from posttrain.training.batch_fields import BatchFields
from posttrain.training.sources.units import UNIT_NAMES, TaskUnits, Unit
from posttrain.types import Batch, Sample, collate

FIXED_CHUNK = 256
DIGEST_BYTES = 16


@dataclass(slots=True)
class FixedField:
    """A field computed once per unit, by place: each row's values at trained tokens, and a digest of the tokens."""

    values: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    digests: dict[int, bytes] = field(default_factory=dict)


class UnitBatches:
    """Batches of ``units``, with all batch fields.

    Fixed fields (reference log-probabilities) are computed once per unit. Caches contain a digest of each unit's
    tokens, so changed units are computed again.
    """

    def __init__(self, units: TaskUnits, fields: BatchFields | None) -> None:
        self.units = units
        self.batch_fields = fields
        self.rows_per_unit = 1
        if units.shape == "pair":
            self.rows_per_unit = 2
        self._fixed: dict[str, FixedField] = {}

    def fill_fixed(self, places: Sequence[int], cache: Path | None = None) -> None:
        """Compute fixed fields for units at ``places``, to be used later; ``cache``: folder.

        Runs resumed with more steps compute only new units.
        """
        if self.batch_fields is None:
            return
        for name in self.batch_fields.fixed:
            file: Path | None = None
            if cache is not None:
                file = cache / f"{name}.safetensors"
            self._fixed[name] = self._fill_once(name, places, file)

    def batch_of(self, places: Sequence[int]) -> Batch:
        """Build a batch with all fields from the units at ``places``."""
        batch = self._collated(places)
        for name, known in self._fixed.items():
            self._fill_missing(name, places, known)  # for a step outside the recipe
            trained = torch.cat([values for place in places for values in known.values[place]])
            batch.fields[name] = torch.zeros(batch.mask.shape).masked_scatter(batch.mask, trained)
        each = self.rows_per_unit
        batch.answers = torch.tensor([place * each + k for place in places for k in range(each)])
        if self.batch_fields is None:
            return batch
        return self.batch_fields.before_step(self.batch_fields(batch))

    def _collated(self, places: Sequence[int]) -> Batch:
        samples: list[Sample] = []
        for slot, place in enumerate(places):
            unit = self.units[place]
            samples += [self._sample(row, slot, unit) for row in unit]
        return collate(samples, rows_per_unit=self.rows_per_unit)

    def _sample(self, row: TokenRow, slot: int, unit: Unit) -> Sample:
        n = len(row.ids)
        encoder = self.units.encoder
        trained = set(encoder.trained_places(row))
        mask = [t in trained for t in range(n)]
        fields: dict[str, Any] = {}
        if encoder.shape == "steps":
            fields = {"step_labels": [float(row.step_labels.get(t, 0)) for t in range(n)]}
        elif encoder.shape != "demonstration":
            margin = row.margin
            if margin is None:
                margin = unit[0].score - unit[-1].score
            fields = {"labels": row.score, "margins": margin}
        prefix = row.prompt_length
        if encoder.trains_all:
            prefix = 0  # prompts that are trained on cannot be shared
        return Sample(row.ids, mask, group=slot, prefix=prefix, fields=fields)

    def _fill_once(self, name: str, places: Sequence[int], cache: Path | None) -> FixedField:
        """Compute a field for units at ``places``, except those in the cache with equal tokens."""
        assert self.batch_fields is not None
        assert self.batch_fields.reference is not None, "batch fields with a reference build one"
        encoder = self.units.encoder
        made_by = f"{self.batch_fields.reference.fingerprint()} {encoder.shape} {encoder.trains_all} {len(self.units)}"
        key = f"units-{hashlib.sha256(made_by.encode()).hexdigest()[:32]}"
        group = self.batch_fields.process_group
        stored: FixedField | None = None
        if cache is not None and group.is_main:
            stored = _read_cache(cache, key, self.rows_per_unit)
        known = group.broadcast(stored, f"stored {name}")
        if known is None:
            known = FixedField()
        for place in places:
            if known.digests.get(place) != _digest(self.units[place]):
                known.values.pop(place, None)
        if self._fill_missing(name, places, known) and cache is not None and group.is_main:
            replace_file(cache, serialize(_tensors_of(known, key)))
        return known

    def _fill_missing(self, name: str, places: Sequence[int], known: FixedField) -> bool:
        """Compute a field for units at ``places`` missing from ``known``; returns True if anything was computed."""
        assert self.batch_fields is not None
        each = self.rows_per_unit
        missing = [place for place in places if place not in known.values]
        if not missing:
            return False
        with phase(f"{name} of the data set", len(missing), UNIT_NAMES[self.units.shape]) as filled:
            for start in range(0, len(missing), FIXED_CHUNK):
                filled.num_done = start
                chunk = missing[start : start + FIXED_CHUNK]
                batch = self._collated(chunk)
                scored = self.batch_fields.fill(name, batch)
                rows = [scored[b, batch.mask[b]].clone() for b in range(batch.num_rows)]
                for slot, place in enumerate(chunk):
                    known.values[place] = tuple(rows[slot * each : (slot + 1) * each])
                    known.digests[place] = _digest(self.units[place])
        return True


def _digest(unit: Unit) -> bytes:
    """Hash the tokens and trained positions of a unit."""
    digest = hashlib.sha256()
    for row in unit:
        digest.update(f"{row.prompt_length} {row.ids} {sorted(row.step_labels)} {sorted(row.heard)};".encode())
    return digest.digest()[:DIGEST_BYTES]


def _tensors_of(known: FixedField, key: str) -> dict[str, Tensor]:
    """Convert a field to tensors for saving: places under ``key``, row lengths, values, digests."""
    places = sorted(known.values)
    rows = [values for place in places for values in known.values[place]]
    digests = b"".join(known.digests[place] for place in places)
    return {
        key: torch.tensor(places),
        "lengths": torch.tensor([len(values) for values in rows]),
        "values": torch.cat(rows),
        "digests": torch.frombuffer(bytearray(digests), dtype=torch.uint8),
    }


def _read_cache(cache: Path, key: str, rows_per_unit: int) -> FixedField | None:
    """Load a field stored by ``_tensors_of``. None if missing, damaged, or from another reference."""
    try:
        stored: Mapping[str, Tensor] = {}
        if cache.is_file():
            stored = load_file(cache)
        places = stored[key].tolist()
        # Pickling a view, for other processes, writes all values.
        rows = [values.clone() for values in stored["values"].split(stored["lengths"].tolist())]
        digests = stored["digests"].numpy().tobytes()
    except (SafetensorError, KeyError, RuntimeError):
        return None
    if len(rows) != len(places) * rows_per_unit or len(digests) != len(places) * DIGEST_BYTES:
        return None
    known = FixedField()
    for number, place in enumerate(places):
        known.values[place] = tuple(rows[number * rows_per_unit : (number + 1) * rows_per_unit])
        known.digests[place] = digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
    return known
