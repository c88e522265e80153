"""The SQLite file of rollouts: connections with limits, transactions, and SQLite's errors in our words."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from posttrain.errors import DataError
from posttrain.store.durable import explain_storage
from posttrain.store.reading import refuse_link_out
from posttrain.store.schema import bring_up_to_date

READ_SECONDS = 300.0  # a search through tens of gigabytes; nothing that is honest takes longer
MAX_VALUE_BYTES = 1 << 27
_BUSY_TIMEOUT_SECONDS = 30.0
_INSTRUCTIONS_BETWEEN_LOOKS = 200_000  # of SQLite's machine: some milliseconds
_DAMAGED = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_INTERRUPT)


@contextmanager
def connect(path: Path, *, read_only: bool) -> Iterator[sqlite3.Connection]:
    """Yield a connection in autocommit mode, closed at the end; an open transaction is rolled back.

    Reading leaves no files behind: a database without a write-ahead log is at rest and is opened as immutable, which
    also works on a read-only disk. The file may be from an untrusted source: its values are limited in size, its schema
    may call no function with effects, and reading ends after ``READ_SECONDS``; ``check_schema`` comes first.

    No other code may open a database file or its log while a connection is open. To close a descriptor drops all
    POSIX locks that this process has on the file; the next reader then believes to be the only one and deletes the log.
    """
    refuse_link_out(path)
    at_rest = not path.with_name(f"{path.name}-wal").exists()
    if not read_only:
        mode = "rwc"
    elif at_rest:
        mode = "ro&immutable=1"
    else:
        mode = "ro"
    address = f"{path.resolve().as_uri()}?mode={mode}"
    db = sqlite3.connect(address, uri=True, timeout=_BUSY_TIMEOUT_SECONDS, isolation_level=None)
    try:
        _limit(db, read_only=read_only)
        yield db
    finally:
        db.close()


def _limit(db: sqlite3.Connection, *, read_only: bool) -> None:
    db.execute("PRAGMA trusted_schema = OFF")
    db.execute("PRAGMA cell_size_check = ON")
    db.execute("PRAGMA synchronous = FULL")  # a commit waits for the disk
    db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
    if read_only:
        end = time.monotonic() + READ_SECONDS
        db.set_progress_handler(lambda: time.monotonic() > end, _INSTRUCTIONS_BETWEEN_LOOKS)


@contextmanager
def migrated_copy(db: sqlite3.Connection, path: Path) -> Iterator[sqlite3.Connection]:
    """Yield a file of an earlier version as this version writes it; the file itself stays as it is."""
    copy = sqlite3.connect("", isolation_level=None)  # SQLite removes it with the connection
    try:
        _limit(copy, read_only=True)
        db.backup(copy)
        with transaction(copy):
            bring_up_to_date(copy, path)
        yield copy
    finally:
        copy.close()


@contextmanager
def sqlite_errors(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into ours.

    Raises:
        DataError: the file is no database, or a damaged one.
        StorageError: anything else (disk full, not writable, locked).
    """
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the low byte is the primary code
        if code in _DAMAGED or "Could not decode to UTF-8" in str(error):
            what = f"not a rollout database, or a damaged one ({error}); move it away and try again"
            raise DataError(path, what) from error
        raise explain_storage("rollouts", path, error) from error


@contextmanager
def transaction(db: sqlite3.Connection, kind: str = "IMMEDIATE") -> Iterator[None]:
    """Commit what the block writes, or none of it. A block that only reads (``DEFERRED``) sees one state."""
    db.execute(f"BEGIN {kind}")
    try:
        yield
        db.execute("COMMIT")
    finally:
        if db.in_transaction:
            db.execute("ROLLBACK")
