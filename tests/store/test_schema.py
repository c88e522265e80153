"""``rollouts.db`` of other versions: columns that came since, columns that are gone, migrations, later versions."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from old_runs import VERSION_0_2_0
from posttrain.errors import DataError
from posttrain.store import schema
from posttrain.store.rollouts import RolloutStore
from refusing import refuses
from store.test_rollouts import make_rollout


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """The rollouts of a run of version 0.2.0."""
    path = tmp_path / "rollouts.db"
    path.write_bytes((VERSION_0_2_0 / "rollouts.db").read_bytes())
    return path


def run_sql(path: Path, script: str) -> None:
    db = sqlite3.connect(path)
    db.executescript(f"PRAGMA journal_mode = DELETE; {script}")
    db.close()


def columns_of(path: Path, table: str = "rollouts") -> list[str]:
    db = sqlite3.connect(path)
    names = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
    db.close()
    return names


def statements_of(path: Path) -> set[str]:
    db = sqlite3.connect(path)
    found = {sql for (sql,) in db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}
    db.close()
    return found


# What this version's tables look like to a version that had one column more or one less.
ADDED_SINCE = "".join(f"ALTER TABLE {table} DROP COLUMN failures;" for table in schema.TABLES)
TAKEN_AWAY = """
ALTER TABLE rollouts ADD COLUMN speed REAL;
ALTER TABLE rollouts ADD COLUMN "order" TEXT NOT NULL DEFAULT 'first';
"""


def declare(table: str, column: str) -> str:
    """SQL that declares a further column in the file's text."""
    text = f"failures TEXT, {column}".replace("'", "''")
    change = f"UPDATE sqlite_master SET sql = replace(sql, 'failures TEXT', '{text}') WHERE name = '{table}';"
    return f"DELETE FROM {table}; PRAGMA writable_schema = ON; {change} PRAGMA writable_schema = OFF;"


CHANGES = {"as stored": "", "a column added since": ADDED_SINCE, "columns taken away": TAKEN_AWAY}
CHANGES["taken away, and set in each row"] = declare("evaluation_rollouts", "host TEXT NOT NULL")
CHANGES["an index added since"] = "DROP INDEX rollouts_by_step;"
CHANGES["an index taken away"] = "CREATE INDEX by_example ON rollouts (example_id, step);"


@pytest.mark.parametrize("change", CHANGES)
def test_store_of_an_old_file_reads_it_unchanged_and_records_to_it(old: Path, change: str) -> None:
    run_sql(old, CHANGES[change])
    before = old.read_bytes()
    reader = RolloutStore(old, read_only=True)
    assert reader.count_training() == {1: 16, 2: 16}
    first = reader.training(step=1)[0]
    assert (first.example_id[:14], first.num_tokens, first.failures) == ("stories/train/", 24, ())
    assert old.read_bytes() == before
    with RolloutStore(old) as store:
        store.record([make_rollout(3, failures=("broke",))])
        store.record([make_rollout(3, reward=0.25)], evaluation="stories/test")
        (row,) = store.training(step=3)
        (held_out,) = store.evaluations("stories/test")
        assert (row.failures, row.reward, held_out.reward) == (("broke",), 0.5, 0.25)
        assert store.training(step=1)[0] == first
        assert store.trim(2) == 2
    assert set(columns_of(old)) >= {"id", *schema.COLUMNS}
    assert reader.count_training() == {1: 16, 2: 16}


def test_store_of_a_column_with_a_default_gives_it_to_older_rows(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, expected in (("REAL", None), ("REAL NOT NULL DEFAULT 1.5", 1.5), ("TEXT DEFAULT 'a b'", "a b")):
        monkeypatch.setitem(schema.TABLES, "rollouts", {**schema.COLUMNS, "entropy": kind})
        db = sqlite3.connect(old)
        selected = schema.selection("rollouts", schema.check_schema(db, old)["rollouts"])
        values = db.execute(f"SELECT entropy FROM (SELECT {selected} FROM rollouts)").fetchall()
        db.close()
        assert values == [(expected,)] * 32


def test_store_of_a_column_that_each_row_must_set_is_refused_in_an_older_file(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a column takes a migration."""
    RolloutStore(old).close()
    monkeypatch.setitem(schema.TABLES, "rollouts", {**schema.COLUMNS, "entropy": "REAL NOT NULL"})
    with refuses(DataError, "missing"):
        RolloutStore(old, read_only=True)


def test_store_of_an_earlier_version_is_migrated_when_written_and_in_a_copy_when_read(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = old.read_bytes()
    assert {row.finish for row in RolloutStore(old, read_only=True).training()} == {"length", "stop"}
    change = "UPDATE rollouts SET finish = 'limit' WHERE finish = 'length'"
    monkeypatch.setattr(schema, "SCHEMA_VERSION", schema.SCHEMA_VERSION + 1)
    monkeypatch.setattr("posttrain.store.rollouts.SCHEMA_VERSION", schema.SCHEMA_VERSION)
    later = "UPDATE rollouts SET finish = 'end' WHERE finish = 'stop'"
    monkeypatch.setattr(schema, "MIGRATIONS", {6: (*schema.MIGRATIONS[6], change), 7: (later,)})
    reader = RolloutStore(old, read_only=True)
    assert {row.finish for row in reader.training()} == {"limit", "end"}
    assert reader.count_training() == {1: 16, 2: 16}
    assert old.read_bytes() == before
    assert sorted(path.name for path in old.parent.iterdir()) == ["rollouts.db"]
    RolloutStore(old).close()
    db = sqlite3.connect(old)
    assert schema.version_of(db) == 8
    assert {finish for (finish,) in db.execute("SELECT finish FROM rollouts")} == {"limit", "end"}
    db.close()
    assert {row.finish for row in reader.training()} == {"limit", "end"}


def test_store_of_a_migration_that_fails_leaves_the_file_as_it_was(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "SCHEMA_VERSION", 7)
    monkeypatch.setattr(schema, "MIGRATIONS", {6: ("DELETE FROM rollouts", "DELETE FROM no_such_table")})
    with refuses(Exception, "no_such_table"):
        RolloutStore(old)
    db = sqlite3.connect(old)
    assert (schema.version_of(db), db.execute("SELECT COUNT(*) FROM rollouts").fetchone()) == (6, (32,))
    db.close()


def test_store_of_a_later_version_is_refused_with_both_versions_in_one_line(old: Path) -> None:
    RolloutStore(old).close()
    run_sql(old, "UPDATE about SET value = '0.9.1' WHERE key = 'posttrain'; PRAGMA user_version = 12;")
    before = old.read_bytes()
    for read_only in (True, False):
        with pytest.raises(DataError) as caught:
            RolloutStore(old, read_only=read_only)
        said = str(caught.value)
        assert len(said.splitlines()) == 1
        assert {"rollouts.db", "12", "0.9.1", str(schema.SCHEMA_VERSION)} <= set(
            re.findall(r"[\w.]*\w", said.replace("/", " "))
        )
    assert old.read_bytes() == before


def test_store_that_is_new_with_the_columns_of_version_0_2_0_has_its_tables(old: Path, tmp_path: Path) -> None:
    """Version 0.2.0 compares them letter by letter, so it reads new files until a column is added."""
    RolloutStore(tmp_path / "new.db").close()
    if columns_of(tmp_path / "new.db") == columns_of(old):
        assert statements_of(tmp_path / "new.db") == statements_of(old)
    assert {"step", "reward", "token_ids"} <= set(columns_of(tmp_path / "new.db", "evaluation_rollouts"))


STRANGE: dict[str, str] = {
    "a default that is computed": declare("rollouts", "g TEXT DEFAULT (lower('X'))"),
    "a check": "ALTER TABLE rollouts ADD COLUMN g INTEGER CHECK (g > 0);",
    "a collation": "ALTER TABLE rollouts ADD COLUMN g TEXT COLLATE NOCASE;",
    "a reference": "ALTER TABLE rollouts ADD COLUMN g INTEGER REFERENCES about (key);",
    "a generated column": "ALTER TABLE rollouts ADD COLUMN g INTEGER AS (step + 1);",
    "a comment with a comma": "ALTER TABLE rollouts ADD COLUMN g TEXT /* , h TEXT */;",
    "an index over an expression": "CREATE INDEX i ON rollouts (lower(prompt));",
    "a partial index": "CREATE INDEX i ON rollouts (step) WHERE step > 1;",
    "a further table": "CREATE TABLE more (a TEXT);",
    "a trigger": "CREATE TRIGGER t AFTER INSERT ON rollouts BEGIN DELETE FROM about; END;",
}


@pytest.mark.parametrize("strange", STRANGE)
def test_store_with_something_that_is_computed_is_refused(old: Path, strange: str) -> None:
    run_sql(old, STRANGE[strange])
    before = old.read_bytes()
    attempts: list[Callable[[], object]] = [lambda: RolloutStore(old), lambda: RolloutStore(old, read_only=True)]
    for attempt in attempts:
        with refuses(DataError, "a rollout database"):
            attempt()
    assert old.read_bytes() == before
