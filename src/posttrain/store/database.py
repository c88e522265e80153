"""Opening SQLite files, and saying what went wrong with them."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from posttrain.errors import DataError
from posttrain.store.durable import explain_storage

READ_SECONDS = 300.0  # a search through tens of gigabytes; nothing that is honest takes longer
MAX_CELL_BYTES = 1 << 27
_BUSY_TIMEOUT_SECONDS = 30.0
_INSTRUCTIONS_BETWEEN_LOOKS = 200_000  # of SQLite's machine: some milliseconds
_DAMAGED = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_INTERRUPT)


@contextmanager
def connect(path: Path, *, read_only: bool) -> Iterator[sqlite3.Connection]:
    """A connection in autocommit mode, closed at the end; an open transaction is rolled back.

    Reading leaves no files behind: a database without a write-ahead log is at rest and is opened as
    immutable, which also works on a read-only disk. The file may be a stranger's: what it holds is limited in size,
    its schema may call no function with effects, and reading ends after ``READ_SECONDS``; ``check_schema`` comes first.
    """
    at_rest = not path.with_name(f"{path.name}-wal").exists()
    mode = "rwc" if not read_only else "ro&immutable=1" if at_rest else "ro"
    address = f"{path.resolve().as_uri()}?mode={mode}"
    db = sqlite3.connect(address, uri=True, timeout=_BUSY_TIMEOUT_SECONDS, isolation_level=None)
    try:
        db.execute("PRAGMA trusted_schema = OFF")
        db.execute("PRAGMA cell_size_check = ON")
        db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_CELL_BYTES)
        if read_only:
            end = time.monotonic() + READ_SECONDS
            db.set_progress_handler(lambda: time.monotonic() > end, _INSTRUCTIONS_BETWEEN_LOOKS)
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
        undecodable = "Could not decode to UTF-8" in str(error)
        if code in _DAMAGED or undecodable:
            what = f"not a rollout database, or a damaged one ({error}); move it away and try again"
            raise DataError(path, what) from error
        raise explain_storage("rollouts", path, error) from error
