"""The records of updates in ``rollouts.db``: numbers of the update, and columns over its rows.

Columns are packed as little-endian int32 (``answers``, ``tokens``, ``places``, ``computed``) or float32. A file may be
from an untrusted source: sizes are checked before anything is unpacked.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

WHOLE = ("answers", "tokens", "places", "computed")
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
    facts = {"update": record.update, "measured": dict(record.measured), "columns": list(record.rows)}
    return {
        "step": record.step,
        "violated": ",".join(record.violated),
        "facts": json.dumps(facts, allow_nan=False, separators=(",", ":")),
        "rows": pack_rows(record.rows),
    }


def pack_rows(columns: Columns) -> bytes:
    """Return columns of equal length, one after the other."""
    packed = []
    for name, values in columns.items():
        kind = "f"
        if name in WHOLE:
            kind = "i"
        packed.append(struct.pack(f"<{len(values)}{kind}", *values))
    return b"".join(packed)


def unpack_update(step: int, violated: str, facts: str, rows: bytes) -> RecordedUpdate:
    """Return what ``pack_update`` wrote.

    Raises:
        ValueError, TypeError, KeyError, struct.error: something else.
    """
    stored = json.loads(facts)
    names = [str(name) for name in stored["columns"]]
    if len(set(names)) != len(names) or not set(names) <= set(COLUMN_NAMES):
        raise ValueError("unknown columns")
    if len(rows) % (4 * max(1, len(names))):
        raise ValueError("columns of unequal length")
    count = len(rows) // (4 * max(1, len(names)))
    columns: dict[str, Sequence[int] | Sequence[float]] = {}
    for number, name in enumerate(names):
        kind = "f"
        if name in WHOLE:
            kind = "i"
        columns[name] = struct.unpack_from(f"<{count}{kind}", rows, 4 * count * number)
    measured = {str(name): float(value) for name, value in stored["measured"].items()}
    if not all(math.isfinite(value) for value in measured.values()):
        raise ValueError("a number that is not finite")
    names_of_checks = tuple(name for name in violated.split(",") if name)
    return RecordedUpdate(step, int(stored["update"]), measured, names_of_checks, columns)
