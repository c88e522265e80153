"""Tags: `notes.json` in a run's directory."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fake_runs import make_run, snapshot

from posttrain.errors import DataError, StorageError, UsageError
from posttrain.runs.directory import change_tags, lock_run, read_tags
from posttrain.runs.listing import summarize_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_run(tmp_path / "runs", "a", steps=())


def test_tags_are_added_once_and_taken_away(folder: Path) -> None:
    assert read_tags(folder) == ()
    assert change_tags(folder, ["good", "+v1.2", "good"]) == ("good", "v1.2")
    assert change_tags(folder, ["-good", "+later"]) == ("v1.2", "later")
    assert read_tags(folder) == summarize_run(folder).tags == ("v1.2", "later")
    assert json.loads((folder / "notes.json").read_text()) == {"tags": ["v1.2", "later"]}


@pytest.mark.parametrize("change", ["", "+", "-", "two words", "+a/b", "a\n", "--good", "ü"])
def test_malformed_tags_are_refused(folder: Path, change: str) -> None:
    change_tags(folder, ["good"])
    before = snapshot(folder)
    with pytest.raises(UsageError, match="a tag is made of letters"):
        change_tags(folder, ["fine", change])
    assert snapshot(folder) == before


def test_taking_away_a_tag_that_is_not_there_hinders_nothing(folder: Path) -> None:
    assert change_tags(folder, ["-unsure"]) == ()
    assert change_tags(folder, ["+good", "-unsure", "late"]) == ("good", "late")


def test_remarks_of_earlier_versions_stay_in_the_file(folder: Path) -> None:
    remarks = [{"time": "2026-01-01T00:00:00+00:00", "text": "entropy fell early"}]
    (folder / "notes.json").write_text(json.dumps({"tags": ["good"], "remarks": remarks}))
    assert change_tags(folder, ["+late"]) == ("good", "late")
    assert json.loads((folder / "notes.json").read_text()) == {"tags": ["good", "late"], "remarks": remarks}


def test_many_at_once_lose_nothing(folder: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: change_tags(folder, [f"t{n}"]), range(40)))
    assert sorted(read_tags(folder)) == sorted(f"t{n}" for n in range(40))


def test_a_run_at_work_can_be_tagged(folder: Path) -> None:
    with lock_run(folder):
        assert change_tags(folder, ["watch"]) == ("watch",)


@pytest.mark.parametrize("content", ["{", "[]", '{"tags": 3}', '{"remarks": []}', '{"tags": [1]}'])
def test_damaged_notes_are_named_and_the_run_is_still_listed(folder: Path, content: str) -> None:
    (folder / "notes.json").write_text(content)
    with pytest.raises(DataError, match=r"notes.json: damaged"):
        change_tags(folder, ["good"])
    summary = summarize_run(folder)
    assert summary.state == "damaged"
    assert "notes.json" in str(summary.problem)


def test_a_full_disk_leaves_the_notes_as_they_were(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change_tags(folder, ["good"])

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(StorageError, match="the disk is full"):
            change_tags(folder, ["bad"])
    assert read_tags(folder) == ("good",)
    assert [path.name for path in folder.glob(".tmp-*")] == []
