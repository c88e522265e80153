"""The records of updates in ``rollouts.db``: numbers of the update, and columns over its rows.

Columns are packed as little-endian uint16 or int32 (``WHOLE``), or float32; ``columns`` of the facts says which. A file
may be from an untrusted source: sizes are checked before anything is unpacked.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

WHOLE = ("answers", "tokens", "places", "computed")
SIZES = {"H": 2, "i": 4, "f": 4}  # bytes of a number, by its kind
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
    """One row of the table ``updates``.

    update: its number within its batch, from 0. measured: numbers by name. violated: the balances that did not hold.
    rows: columns over the rows of the update, by name; one that is not there was 0 or unknown.
    """

    step: int
    update: int
    measured: Mapping[str, float]
    violated: tuple[str, ...] = ()
    rows: Columns = field(default_factory=dict)


def pack_update(record: RecordedUpdate) -> dict[str, object]:
    """Return the columns of a row of the table."""
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
    """The smallest kind of number that holds a column, as ``struct`` names it."""
    if name not in WHOLE:
        return "f"
    if max(values, default=0) < 1 << 16 and min(values, default=0) >= 0:
        return "H"
    return "i"


def unpack_update(step: int, violated: str, facts: str, rows: bytes) -> RecordedUpdate:
    """Return what ``pack_update`` wrote.

    Raises:
        ValueError, TypeError, KeyError, struct.error: something else.
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
        raise ValueError("a number that is not finite")
    names_of_checks = tuple(name for name in violated.split(",") if name)
    return RecordedUpdate(step, int(stored["update"]), measured, names_of_checks, columns)
