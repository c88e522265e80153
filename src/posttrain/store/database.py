"""The schema of ``rollouts.db``, and connections to such a file, which may be from an untrusted source."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from posttrain.errors import DataError
from posttrain.store.durable import explain_storage
from posttrain.store.reading import refuse_link_out

READ_SECONDS = 300.0  # a search through tens of gigabytes; nothing that is honest takes longer
MAX_VALUE_BYTES = 1 << 27
_BUSY_TIMEOUT_SECONDS = 30.0
_INSTRUCTIONS_BETWEEN_LOOKS = 200_000  # of SQLite's machine: some milliseconds
_DAMAGED = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_INTERRUPT)
SCHEMA_VERSION = 6  # PRAGMA user_version; files of another version are refused
# token_ids: prompt, then completion (little-endian int32). version: number of updates of the weights that sampled. Of
# several turns, spans: lengths (int32) of what model and environment wrote, alternating; turns, failures: JSON.
COLUMNS = {
    "step": "INTEGER NOT NULL",
    "epoch": "INTEGER NOT NULL",
    "prompt_index": "INTEGER NOT NULL",
    "rollout_index": "INTEGER NOT NULL",
    "example_id": "TEXT NOT NULL",
    "prompt": "TEXT NOT NULL",
    "completion": "TEXT NOT NULL",
    "answer": "TEXT",
    "parts": "TEXT NOT NULL",
    "reward": "REAL NOT NULL",
    "advantage": "REAL",
    "num_tokens": "INTEGER NOT NULL",
    "finish": "TEXT NOT NULL",
    "mean_sampler_logprob": "REAL",
    "extracted": "TEXT",
    "outcome": "TEXT NOT NULL",
    "token_ids": "BLOB NOT NULL",
    "version": "INTEGER NOT NULL",
    "spans": "BLOB",
    "turns": "TEXT",
    "failures": "TEXT",
}
TABLES = {"rollouts": COLUMNS, "evaluation_rollouts": {**COLUMNS, "evaluation": "TEXT NOT NULL"}}
_ROWS = ",\n    ".join(["\n    id INTEGER PRIMARY KEY", *(f"{name} {kind}" for name, kind in COLUMNS.items())]) + "\n"
_SCHEMA = (
    "CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    f"CREATE TABLE rollouts ({_ROWS})",
    "CREATE INDEX rollouts_by_step ON rollouts (step)",
    f"CREATE TABLE evaluation_rollouts ({_ROWS}, evaluation TEXT NOT NULL)",
    "CREATE INDEX evaluation_rollouts_by_step ON evaluation_rollouts (evaluation, step)",
)
# Written by SQLite's ANALYZE: numbers for its planner.
_STATISTICS = {"CREATE TABLE sqlite_stat1(tbl,idx,stat)", "CREATE TABLE sqlite_stat4(tbl,idx,neq,nlt,ndlt,sample)"}


@contextmanager
def connect(path: Path, *, read_only: bool) -> Iterator[sqlite3.Connection]:
    """Yield a connection in autocommit mode, closed at the end; an open transaction is rolled back.

    Reading leaves no files behind: a database without a write-ahead log is at rest and is opened as immutable, which
    also works on a read-only disk. The file may be from an untrusted source: its values are limited in size, its schema
    may call no function with effects, and reading ends after ``READ_SECONDS``; ``check_schema`` comes first.
    """
    refuse_link_out(path)
    at_rest = not path.with_name(f"{path.name}-wal").exists()
    mode = "rwc" if not read_only else "ro&immutable=1" if at_rest else "ro"
    address = f"{path.resolve().as_uri()}?mode={mode}"
    db = sqlite3.connect(address, uri=True, timeout=_BUSY_TIMEOUT_SECONDS, isolation_level=None)
    try:
        db.execute("PRAGMA trusted_schema = OFF")
        db.execute("PRAGMA cell_size_check = ON")
        db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
        if read_only:
            end = time.monotonic() + READ_SECONDS
            db.set_progress_handler(lambda: time.monotonic() > end, _INSTRUCTIONS_BETWEEN_LOOKS)
        yield db
    finally:
        db.close()


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
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Commit what the block writes, or none of it."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    finally:
        if db.in_transaction:
            db.execute("ROLLBACK")


def create_schema(db: sqlite3.Connection) -> None:
    """Create the tables in an empty file; another process may have been faster."""
    with transaction(db):
        if _version_of(db) == 0:
            for statement in _SCHEMA:
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def check_schema(db: sqlite3.Connection, path: Path) -> bool:
    """Return whether the file has the tables of this version, False of an empty one; nothing in it can run.

    A view, a trigger, a generated column or an index over an expression would be evaluated when the file is read or
    written, and an untrusted source may have put it there.

    Raises:
        DataError: a file of another version, or with something else in it.
    """
    db.execute("BEGIN")  # both questions of one state, even while another process writes
    try:
        version = _version_of(db)
        query = "SELECT sql, type, name FROM sqlite_master WHERE sql IS NOT NULL LIMIT 1000"
        there = {sql: f"{kind} {str(name)[:60]!r}" for sql, kind, name in db.execute(query) if sql not in _STATISTICS}
    finally:
        db.execute("ROLLBACK")
    if 0 < version != SCHEMA_VERSION and there:
        age = "a later" if version > SCHEMA_VERSION else "an earlier"
        raise DataError(
            path,
            f"{age} posttrain wrote this file (schema version {version}, this one reads {SCHEMA_VERSION}); use that "
            "version to read it. Nothing was changed",
        )
    if version < 0 or there.keys() != (set(_SCHEMA) if version else set()):
        strange = sorted(what for sql, what in there.items() if sql not in _SCHEMA)
        what = f"it holds {strange[0]}" if strange else "something is missing"
        raise DataError(path, f"not a rollout database as posttrain writes it ({what}); move it away and try again")
    return version != 0


def _version_of(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])
