"""Update records in ``rollouts.db``: numbers per update, and columns with one entry per row.

Columns are packed as little-endian uint16 or int32 (``WHOLE``) or float32; ``columns`` in ``facts`` names each format.
Databases may be untrusted, so sizes are checked before unpacking.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

WHOLE = ("answers", "tokens", "places", "computed")
SIZES = {"H": 2, "i": 4, "f": 4}  # bytes per number, by struct format
COLUMN_NAMES = (
    *WHOLE,
    "weight",
    "value",
    "logprob",
    "advantage",
    "uneven",
    "old",
    "reference",
    "kl_sampler",
    "kl_reference",
)
Columns = Mapping[str, Sequence[int] | Sequence[float]]


@dataclass(frozen=True, slots=True)
class RecordedUpdate:
    """One row of the ``updates`` table.

    Attributes:
        step: training step.
        update: index within the batch, from 0.
        measured: numbers by name.
        violated: names of violated balances.
        rows: columns by name, with one entry per row. Missing columns are zero or unknown.
    """

    step: int
    update: int
    measured: Mapping[str, float]
    violated: tuple[str, ...] = ()
    rows: Columns = field(default_factory=dict)


def pack_update(record: RecordedUpdate) -> dict[str, object]:
    """Pack an update into table columns."""
    kinds = {name: _kind_of(name, values) for name, values in record.rows.items()}
    packed = [struct.pack(f"<{len(values)}{kinds[name]}", *values) for name, values in record.rows.items()]
    facts = {"update": record.update, "measured": dict(record.measured), "columns": kinds}
    return {
        "step": record.step,
        "violated": ",".join(record.violated),
        "facts": json.dumps(facts, allow_nan=False, separators=(",", ":")),
        "rows": b"".join(packed),
    }


def _kind_of(name: str, values: Sequence[int] | Sequence[float]) -> str:
    """Choose the smallest struct format for a column."""
    if name not in WHOLE:
        return "f"
    if max(values, default=0) < 1 << 16 and min(values, default=0) >= 0:
        return "H"
    return "i"


def unpack_update(step: int, violated: str, facts: str, rows: bytes) -> RecordedUpdate:
    """Unpack ``pack_update`` output.

    Raises:
        ValueError, TypeError, KeyError, struct.error: invalid data.
    """
    stored = json.loads(facts)
    kinds = {str(name): str(kind) for name, kind in stored["columns"].items()}
    if not set(kinds) <= set(COLUMN_NAMES) or not set(kinds.values()) <= SIZES.keys():
        raise ValueError("unknown columns")
    width = sum(SIZES[kind] for kind in kinds.values())
    count = len(rows) // max(1, width)
    if count * width != len(rows):
        raise ValueError("columns of unequal length")
    columns: dict[str, Sequence[int] | Sequence[float]] = {}
    start = 0
    for name, kind in kinds.items():
        columns[name] = struct.unpack_from(f"<{count}{kind}", rows, start)
        start += count * SIZES[kind]
    measured = {str(name): float(value) for name, value in stored["measured"].items()}
    if not all(math.isfinite(value) for value in measured.values()):
        raise ValueError("non-finite number")
    names_of_checks = tuple(name for name in violated.split(",") if name)
    return RecordedUpdate(step, int(stored["update"]), measured, names_of_checks, columns)
