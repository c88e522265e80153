from __future__ import annotations

import math
import os
import resource
import sqlite3
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.errors import DataError, RewardFailure, StorageError
from posttrain.store import database
from posttrain.store.rollouts import RolloutStore, connect
from posttrain.store.schema import MIGRATIONS, SCHEMA_VERSION
from posttrain.types import Completion, Example, Message, Rollout
from refusing import refuses


def make_rollout(step: int, index: int = 0, reward: float = 0.5, text: str = "<think>so</think>", **changes) -> Rollout:
    example = Example(f"stories/train/{index}", (Message("user", f"How many? {index}"),), answer="42")
    completion = changes.pop("completion", Completion((5, 6, 2), (-0.1, -0.2, -0.7), "stop"))
    rollout = Rollout(example, (1, 2), completion, text, {"correct": reward}, reward, step, 3, 11, index)
    for name, value in changes.items():
        setattr(rollout, name, value)
    return rollout


def test_a_rollout_comes_back_with_every_field(tmp_path: Path) -> None:
    rollout = make_rollout(
        7, 4, reward=1.0, advantage=-0.25, parts={"correct": 1.0, "xml_format": 0.1}, extracted="41", outcome="wrong"
    )
    with RolloutStore(tmp_path / "rollouts.db") as store:
        store.record([rollout])
        store.record([rollout], evaluation="stories/validation")
        (row,) = store.training()
        (held_out,) = store.evaluations()
    assert (row.id, row.step, row.epoch, row.prompt_index, row.rollout_index) == (1, 7, 3, 11, 4)
    assert (row.example_id, row.prompt, row.completion) == ("stories/train/4", "How many? 4", "<think>so</think>")
    assert row.parts == {"correct": 1.0, "xml_format": 0.1}
    assert list(row.parts) == ["correct", "xml_format"]
    assert (row.reward, row.advantage, row.num_tokens, row.finish, row.answer) == (1.0, -0.25, 3, "stop", "42")
    assert row.mean_sampler_logprob == math.fsum([-0.1, -0.2, -0.7]) / 3
    assert row.evaluation is None
    assert (row.extracted, row.outcome) == ("41", "wrong")
    assert held_out.evaluation == "stories/validation"
    assert held_out.completion == row.completion


def test_floats_come_back_bit_for_bit(tmp_path: Path) -> None:
    awkward = [0.1 + 0.2, 5e-324, 1.7976931348623157e308, 1 / 3, -2.5e-17, float(2**53 + 2)]
    with RolloutStore(tmp_path / "r.db") as store:
        store.record([make_rollout(1, i, reward=x, advantage=-x, parts={"p": x}) for i, x in enumerate(awkward)])
        rows = store.training()
    bits = [struct.pack("<3d", row.reward, row.advantage, row.parts["p"]) for row in rows]
    assert bits == [struct.pack("<3d", x, -x, x) for x in awkward]


@pytest.mark.parametrize("change", [{"reward": math.nan}, {"reward": math.inf}, {"parts": {"mine": math.nan}}])
def test_record_reward_that_is_not_finite_names_reward_value_and_row(tmp_path: Path, change: dict) -> None:
    name, value = next(iter(change.get("parts", change).items()))
    with RolloutStore(tmp_path / "r.db") as store:
        with pytest.raises(RewardFailure, match=rf"reward '{name}', example 'stories/train/0'.*is {value}"):
            store.record([make_rollout(4, **({"parts": {}} | change))])
        assert store.training() == []


def test_a_conversation_an_empty_completion_and_odd_text_are_recorded(tmp_path: Path) -> None:
    messages = (Message("system", "Be brief."), Message("user", "2+2?"))
    empty = make_rollout(
        1, completion=Completion((), (), "length"), text="a\ud800b\x00c", example=Example("e", messages)
    )
    with RolloutStore(tmp_path / "r.db") as store:
        store.record([empty])
        (row,) = store.training()
    assert row.prompt == "system: Be brief.\n\nuser: 2+2?"
    assert (row.num_tokens, row.mean_sampler_logprob, row.answer, row.advantage) == (0, None, None, None)
    assert row.completion == "a\\ud800b\x00c"


def test_filters(tmp_path: Path) -> None:
    with RolloutStore(tmp_path / "r.db") as store:
        for step in (1, 2, 3):
            store.record([make_rollout(step, i, reward=i / 4, text=f"text {step}.{i}") for i in range(5)])
        store.record([make_rollout(2, 0)], evaluation="a")
        store.record([make_rollout(2, 1), make_rollout(0, 1)], evaluation="b")

        def indices(**filters) -> list[tuple[int, int]]:
            return [(row.step, row.rollout_index) for row in store.training(**filters)]

        assert indices(step=2) == [(2, i) for i in range(5)]
        assert indices(text="3.4") == [(3, 4)]
        assert indices(text="How many? 2", step=1) == [(1, 2)]
        assert indices(text="TEXT") == []
        assert indices(limit=2, newest_first=True) == [(3, 4), (3, 3)]
        assert [(r.evaluation, r.step) for r in store.evaluations("b")] == [("b", 2), ("b", 0)]
        assert [r.evaluation for r in store.evaluations(step=2)] == ["a", "b"]
        assert store.count_training() == {1: 5, 2: 5, 3: 5}


def rows_of(path: Path) -> list[tuple]:
    with connect(path, read_only=True) as db:
        training = db.execute("SELECT * FROM rollouts ORDER BY id").fetchall()
        return training + db.execute("SELECT * FROM evaluation_rollouts ORDER BY id").fetchall()


def test_trimmed_and_repeated_equals_uninterrupted_in_every_column(tmp_path: Path) -> None:
    def record(store: RolloutStore, steps: range) -> None:
        for step in steps:
            store.record([make_rollout(step, i, reward=step * 0.1) for i in range(3)])
            store.record([make_rollout(step, 9)], evaluation="held out")

    with RolloutStore(tmp_path / "whole.db") as whole:
        record(whole, range(1, 7))
    with RolloutStore(tmp_path / "cut.db") as cut:
        record(cut, range(1, 6))
    with RolloutStore(tmp_path / "cut.db") as cut:
        assert cut.trim(after_step=3) == 8
        assert max(cut.count_training()) == 3
        record(cut, range(4, 7))
    assert rows_of(tmp_path / "cut.db") == rows_of(tmp_path / "whole.db")
    assert len(rows_of(tmp_path / "whole.db")) == 24
    with RolloutStore(tmp_path / "cut.db") as cut:
        assert cut.trim(-1) == 24


def test_record_leaves_nothing_to_a_kill(tmp_path: Path) -> None:
    """The process ends without closing anything; what was recorded is there, in order."""
    child = os.fork()
    if child == 0:
        try:
            store = RolloutStore(tmp_path / "r.db")
            for step in range(1, 41):
                store.record([make_rollout(step, i) for i in range(8)])
            os.kill(os.getpid(), 9)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9
    counts = RolloutStore(tmp_path / "r.db", read_only=True).count_training()
    assert counts == dict.fromkeys(range(1, 41), 8)


def limit_file_size(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def record_until_full(store: RolloutStore) -> None:
    for step in range(2, 500):
        store.record([make_rollout(step, text="x" * 5000)])


def test_a_full_disk_surfaces_as_a_storage_error_and_keeps_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "r.db"
    store = RolloutStore(path)
    store.record([make_rollout(1)])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit_file_size(200_000)  # a real write error from the system
    try:
        with refuses(StorageError, "r.db:", "--resume"):
            record_until_full(store)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    kept = RolloutStore(path, read_only=True).count_training()
    assert kept[1] == 1
    assert set(kept) == set(range(1, len(kept) + 1))


def test_the_first_error_is_shown_and_the_full_disk_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: RolloutStore) -> None:
        raise StorageError("the disk is full")

    def loop() -> None:
        with RolloutStore(tmp_path / "r.db") as store:
            store.record([make_rollout(1)])
            raise KeyError("the loop failed first")

    monkeypatch.setattr(RolloutStore, "close", fail)
    with pytest.raises(KeyError) as caught:
        loop()
    assert "disk is full" in caught.value.__notes__[0]


@pytest.mark.parametrize(("version", "age"), [(SCHEMA_VERSION + 1, "a later"), (min(MIGRATIONS) - 1, "an earlier")])
def test_a_file_of_another_version_is_refused_and_unchanged(tmp_path: Path, version: int, age: str) -> None:
    path = tmp_path / "r.db"
    RolloutStore(path).close()
    with connect(path, read_only=False) as db:
        db.execute(f"PRAGMA user_version = {version}")
    before = path.read_bytes()
    for read_only in (False, True):
        with pytest.raises(
            DataError, match=rf"r\.db: {age} posttrain .*schema version {version}\b.*\b{SCHEMA_VERSION}\b"
        ):
            RolloutStore(path, read_only=read_only)
    assert path.read_bytes() == before


def test_files_that_are_missing_or_no_database_are_refused(tmp_path: Path) -> None:
    with refuses(StorageError, "cannot write rollouts"):
        RolloutStore(tmp_path / "no-such-folder" / "r.db")
    with refuses(DataError, "such rollout database"):
        RolloutStore(tmp_path / "none.db", read_only=True)
    assert not (tmp_path / "none.db").exists()
    (tmp_path / "text.db").write_text("this is no database, whatever its name says\n" * 50)
    with refuses(DataError, "a rollout database"):
        RolloutStore(tmp_path / "text.db")
    assert (tmp_path / "text.db").read_text().startswith("this is no database")


def test_reading_while_another_connection_writes(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path / "r.db")
    store.record([make_rollout(1)])
    reader = RolloutStore(tmp_path / "r.db", read_only=True)
    assert reader.count_training() == {1: 1}
    store.record([make_rollout(2)])
    assert reader.count_training() == {1: 1, 2: 1}
    store.close()
    assert sorted(os.listdir(tmp_path)) == ["r.db"]  # closing folds the write-ahead log into the file


READERS = {
    "count": "db.execute('select count(*) from rollouts').fetchone()",
    "vacuum": "db.execute('VACUUM')",
    "checkpoint": "db.execute('PRAGMA wal_checkpoint(TRUNCATE)')",
    "analyze": "db.execute('ANALYZE')",
    "integrity": "db.execute('PRAGMA integrity_check').fetchall()",
}


@pytest.mark.parametrize("reader", READERS)
def test_record_beside_another_process_that_opens_and_closes_the_file_goes_on(tmp_path: Path, reader: str) -> None:
    path = tmp_path / "r.db"
    opening = "import sqlite3, sys; db = sqlite3.connect(sys.argv[1], isolation_level=None)"
    program = f"{opening}; {READERS[reader]}; db.close()"
    with RolloutStore(path) as store:
        for step in range(1, 4):
            store.record([make_rollout(step)])
            subprocess.run([sys.executable, "-c", program, str(path)], check=True)
            assert path.with_name("r.db-wal").exists()
    assert RolloutStore(path, read_only=True).count_training() == {1: 1, 2: 1, 3: 1}


def test_record_waits_for_the_disk_in_every_connection(tmp_path: Path) -> None:
    RolloutStore(tmp_path / "r.db").close()
    with connect(tmp_path / "r.db", read_only=False) as db:
        assert db.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL: a commit syncs the write-ahead log
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_record_beside_a_reader_that_keeps_an_old_state_goes_on(tmp_path: Path) -> None:
    """A browser of databases keeps its transaction open for minutes; it sees one state, and the run writes on."""
    path = tmp_path / "r.db"
    with RolloutStore(path) as store:
        store.record([make_rollout(1)])
        browser = sqlite3.connect(path, isolation_level=None)
        browser.execute("BEGIN")
        assert browser.execute("SELECT count(*) FROM rollouts").fetchone() == (1,)
        for step in range(2, 5):
            store.record([make_rollout(step, text="x" * 100_000)])
        assert browser.execute("SELECT count(*) FROM rollouts").fetchone() == (1,)
    browser.close()
    assert RolloutStore(path, read_only=True).count_training() == {1: 1, 2: 1, 3: 1, 4: 1}


def test_record_while_another_program_holds_the_write_lock_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_BUSY_TIMEOUT_SECONDS", 0.1)
    path = tmp_path / "r.db"
    store = RolloutStore(path)
    store.record([make_rollout(1)])
    browser = sqlite3.connect(path, isolation_level=None)
    browser.execute("BEGIN IMMEDIATE")
    with refuses(StorageError, "program is writing") as caught:
        store.record([make_rollout(2)])
    assert "disk" not in str(caught.value)
    browser.close()
    store.record([make_rollout(2)])
    store.close()
    assert RolloutStore(path, read_only=True).count_training() == {1: 1, 2: 1}


def test_record_after_a_kill_beside_a_reader_keeps_every_row(tmp_path: Path) -> None:
    path = tmp_path / "r.db"
    waiting, ready = os.pipe()
    child = os.fork()  # before this process opens the file: SQLite's state is not to be carried across a fork
    if child == 0:
        try:
            os.read(waiting, 1)
            store = RolloutStore(path)
            for step in range(2, 10):
                store.record([make_rollout(step)])
            os.kill(os.getpid(), 9)
        finally:
            os._exit(1)
    with RolloutStore(path) as store:
        store.record([make_rollout(1)])
    reader = sqlite3.connect(path, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM rollouts").fetchone()
    os.write(ready, b"!")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9
    reader.close()
    with RolloutStore(path) as store:
        store.record([make_rollout(10)])
    assert RolloutStore(path, read_only=True).count_training() == dict.fromkeys(range(1, 11), 1)
