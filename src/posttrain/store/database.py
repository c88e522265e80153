"""Opening SQLite files, and saying what went wrong with them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from posttrain.errors import DataError
from posttrain.store.durable import explain_storage

_BUSY_TIMEOUT_SECONDS = 30.0


@contextmanager
def connect(path: Path, *, read_only: bool) -> Iterator[sqlite3.Connection]:
    """A connection in autocommit mode, closed at the end; an open transaction is rolled back.

    Reading leaves no files behind: a database without a write-ahead log is at rest and is opened as
    immutable, which also works on a read-only disk.
    """
    at_rest = not path.with_name(f"{path.name}-wal").exists()
    mode = "rwc" if not read_only else "ro&immutable=1" if at_rest else "ro"
    address = f"{path.resolve().as_uri()}?mode={mode}"
    db = sqlite3.connect(address, uri=True, timeout=_BUSY_TIMEOUT_SECONDS, isolation_level=None)
    try:
        yield db
    finally:
        db.close()


@contextmanager
def sqlite_errors(path: Path) -> Iterator[None]:
    """Turns SQLite's errors into ours.

    Raises:
        DataError: the file is no database, or a damaged one.
        StorageError: anything else (disk full, not writable, locked).
    """
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the low byte is the primary code
        if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            what = f"not a rollout database, or a damaged one ({error}); move it away and try again"
            raise DataError(path, what) from error
        raise explain_storage("rollouts", path, error) from error
