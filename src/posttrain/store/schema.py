"""The tables of ``rollouts.db``, and what opens a file of another version.

A column that is added later may be NULL or has a DEFAULT. Then older files need no more: reading takes the default for
their rows, and a resumed run adds the column. A column that is taken away is left where it is in older files. Any other
change raises ``SCHEMA_VERSION`` and has an entry in ``MIGRATIONS``.
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
# SQL that makes a file of version n one of version n + 1, by n. Files older than these are refused.
MIGRATIONS: dict[int, tuple[str, ...]] = {
    6: (
        "CREATE TABLE updates (\n    id INTEGER PRIMARY KEY,\n    step INTEGER NOT NULL,\n    violated TEXT NOT NULL,"
        "\n    facts TEXT NOT NULL,\n    rows BLOB NOT NULL\n)",
    ),
}
# token_ids: prompt, then completion (little-endian int32). version: number of updates of the weights that sampled. Of
# several turns, spans: lengths (int32) of what model and environment wrote, alternating; turns, failures: JSON.
# sampler_logprobs: one for each token of the completion (float32), of training rollouts. kept_sets: where these are
# over the sets that truncation kept, the size of each set, then the ids of all (int32). notes: JSON of what rewards
# said besides numbers (``skipped``, ``is_scored``, ``extra``).
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
# Records of updates (``updates.py``): numbers and columns; violated: names of balances, separated by commas.
UPDATES = {"step": "INTEGER NOT NULL", "violated": "TEXT NOT NULL", "facts": "TEXT NOT NULL", "rows": "BLOB NOT NULL"}
ABOUT = "CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL)"
INDEXES = {
    "rollouts_by_step": "rollouts (step)",
    "evaluation_rollouts_by_step": "evaluation_rollouts (evaluation, step)",
    "updates_by_step": "updates (step)",
}
# Written by SQLite's ANALYZE: numbers for its planner.
_STATISTICS = {"CREATE TABLE sqlite_stat1(tbl,idx,stat)", "CREATE TABLE sqlite_stat4(tbl,idx,neq,nlt,ndlt,sample)"}
# Statements of tables and indexes in which nothing is computed: plain columns, literal defaults.
_NAME = r'"?([a-z][a-z0-9_]*)"?'
_TABLE = re.compile(rf"CREATE TABLE {_NAME} \((.*)\)", re.DOTALL)
_COLUMN = re.compile(
    rf"\s*{_NAME} ((?:INTEGER|REAL|TEXT|BLOB)(?: NOT NULL| PRIMARY KEY)?(?: DEFAULT (?:NULL|-?[0-9.]+|'[^',]*'))?)\s*"
)
_INDEX = re.compile(rf"CREATE INDEX {_NAME} ON {_NAME} \({_NAME}(?:, {_NAME})*\)")
_EMPTY = {"INTEGER": "0", "REAL": "0.0", "TEXT": "''", "BLOB": "x''"}
_VERSION = re.compile(r"[0-9A-Za-z.+]{1,40}")
Columns = Mapping[str, Mapping[str, str]]  # by table, the kind of each column that a file has


def all_tables() -> dict[str, Mapping[str, str]]:
    """Return the columns of every table, but ``id``."""
    return {**TABLES, "updates": UPDATES}


def check_schema(db: sqlite3.Connection, path: Path) -> Columns:
    """Return the columns of a file's tables, none of an empty file; nothing in it can run.

    A view, a trigger, a generated column, a CHECK or an index over an expression would be evaluated when the file is
    read or written, and an untrusted source may have put it there.

    Raises:
        DataError: a file of a later version, of one before 0.2.0, or with something else in it.
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
    """Return the version that wrote the file last, for a message; empty if the file does not say it."""
    if not any(sql == ABOUT for sql, _, _ in statements):
        return ""
    row = db.execute("SELECT value FROM about WHERE key = 'posttrain'").fetchone()
    if row is None or not _VERSION.fullmatch(str(row[0])):
        return ""
    return f", posttrain {row[0]}"


def _columns_of(sql: str) -> dict[str, str] | None:
    """Return the kinds of the columns of one of our tables; None for any other statement."""
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
    """Return whether every table is there, with the columns that have no default."""
    for table, wanted in all_tables().items():
        there = columns.get(table, {})
        if "id" not in there or any(default_of(kind) is None for name, kind in wanted.items() if name not in there):
            return False
    return True


def default_of(kind: str) -> str | None:
    """Return as SQL what a row has that does not set the column; None if each row must set it."""
    _, _, default = kind.partition(" DEFAULT ")
    if default:
        return default
    if "NOT NULL" in kind:
        return None
    return "NULL"


def selection(table: str, there: Mapping[str, str]) -> str:
    """Return what to select for the columns of a table: the default for those that the file does not have."""
    words = ["id"]
    for name, kind in all_tables()[table].items():
        if name in there:
            words.append(name)
        else:
            words.append(f"{default_of(kind)} AS {name}")
    return ", ".join(words)


def insertion(table: str, there: Mapping[str, str]) -> str:
    """Return the statement that adds a row; columns that this version does not write are left empty."""
    values = {name: f":{name}" for name in all_tables()[table]}
    for name, kind in there.items():
        if name != "id" and name not in values and default_of(kind) is None:
            values[name] = _EMPTY[kind.split()[0]]
    names = ", ".join(f'"{name}"' for name in values)
    return f"INSERT INTO {table} ({names}) VALUES ({', '.join(values.values())})"


def version_of(db: sqlite3.Connection) -> int:
    """Return the schema version of a file; 0 of an empty one."""
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def bring_up_to_date(db: sqlite3.Connection, path: Path) -> Columns:
    """Create the tables of an empty file, or change those of an earlier version; return the columns.

    Called in a transaction, and after ``check_schema``.

    Raises:
        DataError: as ``check_schema``.
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
    """Answer all questions of the block from one state, even while another process writes."""
    if db.in_transaction:
        yield
        return
    db.execute("BEGIN DEFERRED")
    try:
        yield
    finally:
        db.execute("ROLLBACK")
