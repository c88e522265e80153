"""SQLite access for rollouts: limited connections, transactions and translated errors."""

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

READ_SECONDS = 300.0  # enough to search tens of gigabytes
MAX_VALUE_BYTES = 1 << 27
_BUSY_TIMEOUT_SECONDS = 30.0
_INSTRUCTIONS_BETWEEN_LOOKS = 200_000  # SQLite virtual machine instructions: a few milliseconds
_DAMAGED = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_INTERRUPT)


@contextmanager
def connect(path: Path, *, read_only: bool) -> Iterator[sqlite3.Connection]:
    """Open a connection in autocommit mode; on exit, roll back any open transaction and close.

    Reading leaves no files behind: without a write-ahead log, a database is opened as immutable, which also works on
    read-only disks. Databases may come from untrusted sources. Therefore value sizes are limited, schemas cannot call
    functions with side effects, and reads stop after ``READ_SECONDS``. Call ``check_schema`` first.

    While a connection is open, access the database and its log only through SQLite in this process. Closing any other
    descriptor releases all POSIX locks of this process; a later reader would then assume exclusive access and delete
    the log.
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
    """Yield a temporary copy migrated to the current schema, leaving the original unchanged."""
    copy = sqlite3.connect("", isolation_level=None)  # SQLite deletes it on close
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
    """Translate SQLite errors.

    Raises:
        DataError: not a database, or damaged.
        StorageError: any other failure (disk full, not writable, locked).
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
    """Commit all writes in the block, or none. With ``DEFERRED``, reads share one snapshot."""
    db.execute(f"BEGIN {kind}")
    try:
        yield
        db.execute("COMMIT")
    finally:
        if db.in_transaction:
            db.execute("ROLLBACK")
