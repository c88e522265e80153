"""Leftovers of killed writes, and their removal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from posttrain.store.durable import remove_asides, remove_leftovers, sync_file

NOBODY = 2**22 + 1  # above the highest number that Linux gives to a process


def test_leftovers_go_and_what_is_being_written_stays(tmp_path: Path) -> None:
    gone = [f".tmp-status.json-{NOBODY}", f"cells/a/evaluation/.tmp-items.jsonl-{NOBODY + 1}"]
    kept = [
        f"cells/a/.tmp-results.json-{os.getppid()}",
        "cells/a/.tmp-of-somebody-else",
        f"cells/a/checkpoints/.tmp-step-000002-{NOBODY}",  # the run's own to repair: it may be a renamed one
        "cells/a/results.json",
    ]
    outside = tmp_path / "outside" / f".tmp-x-{NOBODY}"
    for path in (outside, *(tmp_path / "root" / name for name in [*gone, *kept])):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    os.symlink(outside.parent, tmp_path / "root" / "link")
    assert remove_leftovers(tmp_path / "root") == gone
    assert remove_leftovers(tmp_path / "root") == []
    there = [p for p in (tmp_path / "root").rglob("*") if p.is_file()]
    assert sorted(str(path.relative_to(tmp_path / "root")) for path in there) == sorted(kept)
    assert outside.exists()


def test_a_folder_that_was_begun_for_the_same_place_goes(tmp_path: Path) -> None:
    mine, living = tmp_path / f".tmp-a[1]-{NOBODY}", tmp_path / f".tmp-a[1]-{os.getppid()}"
    for path in (mine, living):
        path.mkdir()
        (path / "weights").write_text("x")
    remove_asides(tmp_path / "a[1]")
    assert os.listdir(tmp_path) == [living.name]


def test_sync_file_waits_for_the_disk_with_the_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_text("x")
    synced: list[bool] = []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: synced.append(os.path.samestat(os.fstat(descriptor), path.stat()))
    )
    sync_file(path)
    assert synced == [True]
