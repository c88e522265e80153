"""Schema of ``rollouts.db`` and migrations between versions.

Added columns must be nullable or have a DEFAULT. Older files then need no migration: reading substitutes defaults, and
resuming adds missing columns. Removed columns remain in older files. Any other change must increase ``SCHEMA_VERSION``
and add an entry to ``MIGRATIONS``.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from posttrain import __version__
from posttrain.errors import DataError

SCHEMA_VERSION = 7  # PRAGMA user_version
# SQL migrating version n to n + 1, keyed by n. Versions before the smallest key are refused.
MIGRATIONS: dict[int, tuple[str, ...]] = {
    6: (
        "CREATE TABLE updates (\n    id INTEGER PRIMARY KEY,\n    step INTEGER NOT NULL,\n    violated TEXT NOT NULL,"
        "\n    facts TEXT NOT NULL,\n    rows BLOB NOT NULL\n)",
    ),
}
# token_ids: prompt, then completion (little-endian int32). version: number of updates applied to the sampling weights.
# spans: alternating span lengths of sampled and environment tokens (int32). turns, failures: JSON. sampler_logprobs:
# float32 per completion token, only for training rollouts. kept_sets: sizes of kept token sets, then all token ids
# (int32). notes: what few rows have, as JSON (``skipped``, ``is_scored``, ``extra``, ``replaced``).
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
    "sampler_logprobs": "BLOB",
    "notes": "TEXT",
    "kept_sets": "BLOB",
}
TABLES = {"rollouts": COLUMNS, "evaluation_rollouts": {**COLUMNS, "evaluation": "TEXT NOT NULL"}}
# Update records (``updates.py``): numbers and columns. violated: comma-separated balance names.
UPDATES = {"step": "INTEGER NOT NULL", "violated": "TEXT NOT NULL", "facts": "TEXT NOT NULL", "rows": "BLOB NOT NULL"}
ABOUT = "CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL)"
INDEXES = {
    "rollouts_by_step": "rollouts (step)",
    "evaluation_rollouts_by_step": "evaluation_rollouts (evaluation, step)",
    "updates_by_step": "updates (step)",
}
# Query planner statistics written by ANALYZE.
_STATISTICS = {"CREATE TABLE sqlite_stat1(tbl,idx,stat)", "CREATE TABLE sqlite_stat4(tbl,idx,neq,nlt,ndlt,sample)"}
# Allowed statements: plain columns and literal defaults, without expressions.
_NAME = r'"?([a-z][a-z0-9_]*)"?'
_TABLE = re.compile(rf"CREATE TABLE {_NAME} \((.*)\)", re.DOTALL)
_COLUMN = re.compile(
    rf"\s*{_NAME} ((?:INTEGER|REAL|TEXT|BLOB)(?: NOT NULL| PRIMARY KEY)?(?: DEFAULT (?:NULL|-?[0-9.]+|'[^',]*'))?)\s*"
)
_INDEX = re.compile(rf"CREATE INDEX {_NAME} ON {_NAME} \({_NAME}(?:, {_NAME})*\)")
_EMPTY = {"INTEGER": "0", "REAL": "0.0", "TEXT": "''", "BLOB": "x''"}
_VERSION = re.compile(r"[0-9A-Za-z.+]{1,40}")
Columns = Mapping[str, Mapping[str, str]]  # column types by table


def all_tables() -> dict[str, Mapping[str, str]]:
    """Map every table to its columns, except ``id``."""
    return {**TABLES, "updates": UPDATES}


def check_schema(db: sqlite3.Connection, path: Path) -> Columns:
    """Validate a database schema and return its columns by table; empty for a new database.

    Views, triggers, generated columns, CHECK constraints and expression indexes would run code supplied by an
    untrusted source whenever the database is read or written, so they are refused.

    Raises:
        DataError: written by a later version or before 0.2.0, or contains anything unexpected.
    """
    with _one_state(db):
        version = version_of(db)
        query = "SELECT sql, type, name FROM sqlite_master WHERE sql IS NOT NULL LIMIT 1000"
        statements = [row for row in db.execute(query) if row[0] not in _STATISTICS]
        writer = _writer_of(db, statements)
    if version > SCHEMA_VERSION and statements:
        _refuse_version(path, "a later", f"{version}{writer}")
    if 0 < version < min(MIGRATIONS, default=SCHEMA_VERSION) and statements:
        _refuse_version(path, "an earlier", f"{version}{writer}")
    columns: dict[str, dict[str, str]] = {}
    strange = []
    for sql, kind, name in statements:
        of_table = _columns_of(sql)
        if of_table is not None:
            columns[name] = of_table
        elif sql != ABOUT and not _INDEX.fullmatch(sql):
            strange.append(f"{kind} {str(name)[:60]!r}")
    is_whole = version == SCHEMA_VERSION and _is_whole(columns) and any(sql == ABOUT for sql, _, _ in statements)
    is_older = 0 < version < SCHEMA_VERSION
    is_empty = version == 0 and not statements
    if strange or not (is_whole or is_older or is_empty):
        what = "something is missing"
        if strange:
            what = f"it holds {min(strange)}"
        raise DataError(path, f"not a rollout database as posttrain writes it ({what}); move it away and try again")
    return columns


def _refuse_version(path: Path, age: str, version: str) -> None:
    raise DataError(
        path,
        f"{age} posttrain wrote this file (schema version {version}; this is posttrain {__version__}, which reads "
        f"{SCHEMA_VERSION}); use that version to read it. Nothing was changed",
    )


def _writer_of(db: sqlite3.Connection, statements: list[tuple[str, str, str]]) -> str:
    """Format which version last wrote this database, for messages; empty if unknown."""
    if not any(sql == ABOUT for sql, _, _ in statements):
        return ""
    row = db.execute("SELECT value FROM about WHERE key = 'posttrain'").fetchone()
    if row is None or not _VERSION.fullmatch(str(row[0])):
        return ""
    return f", posttrain {row[0]}"


def _columns_of(sql: str) -> dict[str, str] | None:
    """Parse column types from a known CREATE TABLE statement; None for other statements."""
    table = _TABLE.fullmatch(sql)
    if table is None or table[1] not in all_tables():
        return None
    columns = {}
    for text in table[2].split(","):
        column = _COLUMN.fullmatch(text)
        if column is None:
            return None
        columns[column[1]] = column[2]
    return columns


def _is_whole(columns: Columns) -> bool:
    """Check if all tables and required columns exist."""
    for table, wanted in all_tables().items():
        there = columns.get(table, {})
        if "id" not in there or any(default_of(kind) is None for name, kind in wanted.items() if name not in there):
            return False
    return True


def default_of(kind: str) -> str | None:
    """SQL default for a column omitted from an INSERT; None if every row must set it."""
    _, _, default = kind.partition(" DEFAULT ")
    if default:
        return default
    if "NOT NULL" in kind:
        return None
    return "NULL"


def selection(table: str, there: Mapping[str, str]) -> str:
    """Build a SELECT list, substituting defaults for missing columns."""
    words = ["id"]
    for name, kind in all_tables()[table].items():
        if name in there:
            words.append(name)
        else:
            words.append(f"{default_of(kind)} AS {name}")
    return ", ".join(words)


def insertion(table: str, there: Mapping[str, str]) -> str:
    """Build an INSERT statement, filling unknown required columns with empty values."""
    values = {name: f":{name}" for name in all_tables()[table]}
    for name, kind in there.items():
        if name != "id" and name not in values and default_of(kind) is None:
            values[name] = _EMPTY[kind.split()[0]]
    names = ", ".join(f'"{name}"' for name in values)
    return f"INSERT INTO {table} ({names}) VALUES ({', '.join(values.values())})"


def version_of(db: sqlite3.Connection) -> int:
    """Read the schema version; 0 for a new database."""
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def bring_up_to_date(db: sqlite3.Connection, path: Path) -> Columns:
    """Create tables in a new database, or migrate older ones. Returns columns by table.

    Call this in a transaction after ``check_schema``.

    Raises:
        DataError: see ``check_schema``.
    """
    version = version_of(db)
    if version == 0:
        _create(db)
        version = SCHEMA_VERSION
    for number in range(version, SCHEMA_VERSION):
        for statement in MIGRATIONS[number]:
            db.execute(statement)
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    for table, there in check_schema(db, path).items():
        for name, kind in all_tables()[table].items():
            if name not in there:
                db.execute(f"ALTER TABLE {table} ADD COLUMN {name} {kind}")
    for name, place in INDEXES.items():
        db.execute(f"CREATE INDEX IF NOT EXISTS {name} ON {place}")
    return check_schema(db, path)


def _create(db: sqlite3.Connection) -> None:
    db.execute(ABOUT)
    shared = "".join(f",\n    {name} {kind}" for name, kind in COLUMNS.items())
    for table, wanted in TABLES.items():
        further = "".join(f", {name} {kind}" for name, kind in wanted.items() if name not in COLUMNS)
        db.execute(f"CREATE TABLE {table} (\n    id INTEGER PRIMARY KEY{shared}\n{further})")
    of_updates = "".join(f",\n    {name} {kind}" for name, kind in UPDATES.items())
    db.execute(f"CREATE TABLE updates (\n    id INTEGER PRIMARY KEY{of_updates}\n)")


@contextmanager
def _one_state(db: sqlite3.Connection) -> Iterator[None]:
    """Run all queries in the block against one snapshot, even while another process writes."""
    if db.in_transaction:
        yield
        return
    db.execute("BEGIN DEFERRED")
    try:
        yield
    finally:
        db.execute("ROLLBACK")
