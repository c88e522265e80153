"""Opening ``rollouts.db``, saying what went wrong with it, and its schema as an append-only list of small functions.

``PRAGMA user_version`` counts the migrations that a file has had. A released migration is never
edited: a change of the schema is a new function at the end of the list."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from posttrain.errors import DataError
from posttrain.store.durable import explain_storage
from posttrain.store.reading import refuse_link_out

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
    refuse_link_out(path)
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


Migration = Callable[[sqlite3.Connection], None]

_ROLLOUT_COLUMNS = """
    id INTEGER PRIMARY KEY,
    step INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    prompt_index INTEGER NOT NULL,
    rollout_index INTEGER NOT NULL,
    example_id TEXT NOT NULL,
    prompt TEXT NOT NULL,
    completion TEXT NOT NULL,
    answer TEXT,
    parts TEXT NOT NULL,
    reward REAL NOT NULL,
    advantage REAL,
    num_tokens INTEGER NOT NULL,
    finish TEXT NOT NULL,
    mean_sampler_logprob REAL
"""


def create_rollout_tables(db: sqlite3.Connection) -> None:
    """Version 1: a table for training rollouts, one for those of evaluations, one about the run."""
    db.execute("CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL)")
    db.execute(f"CREATE TABLE rollouts ({_ROLLOUT_COLUMNS})")
    db.execute("CREATE INDEX rollouts_by_step ON rollouts (step)")
    db.execute(f"CREATE TABLE evaluation_rollouts ({_ROLLOUT_COLUMNS}, evaluation TEXT NOT NULL)")
    db.execute("CREATE INDEX evaluation_rollouts_by_step ON evaluation_rollouts (evaluation, step)")


def add_verdicts(db: sqlite3.Connection) -> None:
    """Version 2: the answer that was graded, and what the grader said of it."""
    for table in ("rollouts", "evaluation_rollouts"):
        db.execute(f"ALTER TABLE {table} ADD COLUMN extracted TEXT")
        db.execute(f"ALTER TABLE {table} ADD COLUMN outcome TEXT NOT NULL DEFAULT ''")


def add_token_ids(db: sqlite3.Connection) -> None:
    """Version 3: the tokens as they were sampled, prompt then completion (little-endian int32); NULL in older rows."""
    for table in ("rollouts", "evaluation_rollouts"):
        db.execute(f"ALTER TABLE {table} ADD COLUMN token_ids BLOB")


def add_versions(db: sqlite3.Connection) -> None:
    """Version 4: how many updates the weights had had that drew the tokens; NULL in older rows.

    One number, or packed like the ids, one for each token of the completion, where weights changed in the middle.
    """
    for table in ("rollouts", "evaluation_rollouts"):
        db.execute(f"ALTER TABLE {table} ADD COLUMN version INTEGER")


def add_turns(db: sqlite3.Connection) -> None:
    """Version 5: of completions of several turns who wrote which tokens, the turns with their calls, and what failed.

    ``spans``: lengths, packed like the ids, of what the model wrote and of what it was told, in turn. ``turns`` and
    ``failures``: JSON. All NULL for a completion of one turn.
    """
    for table in ("rollouts", "evaluation_rollouts"):
        db.execute(f"ALTER TABLE {table} ADD COLUMN spans BLOB")
        db.execute(f"ALTER TABLE {table} ADD COLUMN turns TEXT")
        db.execute(f"ALTER TABLE {table} ADD COLUMN failures TEXT")


MIGRATIONS: tuple[Migration, ...] = (create_rollout_tables, add_verdicts, add_token_ids, add_versions, add_turns)


def schema_version(db: sqlite3.Connection) -> int:
    """How many migrations the open file has had."""
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def refuse_newer(version: int, path: Path, migrations: Sequence[Migration] = MIGRATIONS) -> None:
    """Refuses a file that a later posttrain wrote.

    Raises:
        DataError: the file's version is above the newest migration known here.
    """
    if version > len(migrations):
        raise DataError(
            path,
            f"a later posttrain wrote this file (schema version {version}, this one knows up to "
            f"{len(migrations)}); upgrade posttrain to read it. Nothing was changed",
        )


def check_schema(db: sqlite3.Connection, path: Path, migrations: Sequence[Migration] = MIGRATIONS) -> int:
    """The version of a file that has exactly the tables and indexes of its version; nothing in it can run.

    A view, a trigger, a generated column or an index over an expression would be evaluated by whoever reads or
    writes the file, and a stranger may have put it there.

    Raises:
        DataError: a newer file than this posttrain knows, or something else in it.
    """
    db.execute("BEGIN")  # both questions of one state, whoever is writing
    try:
        version = schema_version(db)
        refuse_newer(version, path, migrations)
        query = "SELECT type, name, tbl_name, sql FROM sqlite_master WHERE sql IS NOT NULL LIMIT 1000"
        there = {row for row in db.execute(query) if row[3] not in _STATISTICS}
    finally:
        db.execute("ROLLBACK")
    expected = _schemas(tuple(migrations))
    if version < 0 or there != expected[version]:
        strange = sorted(there - expected[max(version, 0)], key=str)
        what = f"it holds {strange[0][0]} {str(strange[0][1])[:60]!r}" if strange else "something is missing"
        raise DataError(path, f"not a rollout database as posttrain writes it ({what}); move it away and try again")
    return version


# What SQLite's ANALYZE leaves: numbers for its planner.
_STATISTICS = {
    "CREATE TABLE sqlite_stat1(tbl,idx,stat)",
    "CREATE TABLE sqlite_stat4(tbl,idx,neq,nlt,ndlt,sample)",
}


@cache
def _schemas(migrations: tuple[Migration, ...]) -> list[set[tuple[str, str, str, str]]]:
    """What ``sqlite_master`` holds after none, one, two ... of the migrations."""
    db = sqlite3.connect(":memory:", isolation_level=None)
    schemas: list[set[tuple[str, str, str, str]]] = [set()]
    for migration in migrations:
        migration(db)
        rows = db.execute("SELECT type, name, tbl_name, sql FROM sqlite_master WHERE sql IS NOT NULL")
        schemas.append(set(rows.fetchall()))
    db.close()
    return schemas


def migrate(db: sqlite3.Connection, path: Path, migrations: Sequence[Migration] = MIGRATIONS) -> int:
    """Bring an open file to the newest schema; each migration and its count are one transaction.

    ``db`` is in autocommit mode (``isolation_level=None``). Returns the number of migrations run.

    Raises:
        DataError: a newer file than this posttrain knows.
    """
    ran = 0
    refuse_newer(schema_version(db), path, migrations)
    while schema_version(db) < len(migrations):
        db.execute("BEGIN IMMEDIATE")
        try:
            version = schema_version(db)  # read again: another process may have migrated meanwhile
            if version < len(migrations):
                migrations[version](db)
                db.execute(f"PRAGMA user_version = {version + 1}")
                ran += 1
            db.execute("COMMIT")
        finally:
            if db.in_transaction:
                db.execute("ROLLBACK")
    return ran
