"""What killed writes leave behind, and who may take it away."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from posttrain.store.durable import find_leftovers, remove_asides, remove_leftovers, replace_file

NOBODY = 2**22 + 1  # above the highest number that Linux gives to a process


@pytest.fixture
def littered(tmp_path: Path) -> Path:
    """A folder with what two killed processes and a living one have left."""
    for name in (
        f".tmp-status.json-{NOBODY}",
        f"cells/.tmp-a.yaml-{NOBODY}",
        f"cells/a/evaluation/.tmp-items.jsonl-{NOBODY + 1}",
        f"cells/a/.tmp-notes.json-{os.getppid()}",
        f"cells/a/checkpoints/.tmp-step-000002-{NOBODY}",
        "cells/a/.tmp-of-somebody-else",
        "cells/a/notes.json",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    return tmp_path


def test_leftovers_go_and_what_is_being_written_stays(littered: Path) -> None:
    gone = [
        f".tmp-status.json-{NOBODY}",
        f"cells/.tmp-a.yaml-{NOBODY}",
        f"cells/a/evaluation/.tmp-items.jsonl-{NOBODY + 1}",
    ]
    assert [str(path.relative_to(littered)) for path in find_leftovers(littered)] == gone
    assert remove_leftovers(littered) == gone
    assert remove_leftovers(littered) == []
    assert sorted(str(path.relative_to(littered)) for path in littered.rglob("*") if path.is_file()) == [
        "cells/a/.tmp-notes.json-" + str(os.getppid()),
        "cells/a/.tmp-of-somebody-else",
        f"cells/a/checkpoints/.tmp-step-000002-{NOBODY}",  # the run's own to mend: it may be a renamed one
        "cells/a/notes.json",
    ]


def test_links_are_not_followed(littered: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside")
    (outside / f".tmp-x-{NOBODY}").write_text("x")
    os.symlink(outside, littered / "link")
    remove_leftovers(littered)
    assert os.listdir(outside) == [f".tmp-x-{NOBODY}"]


def test_who_writes_a_file_again_takes_away_what_was_begun_for_it(tmp_path: Path) -> None:
    mine, others = tmp_path / f".tmp-a[1].json-{NOBODY}", tmp_path / f".tmp-b.json-{NOBODY}"
    living = tmp_path / f".tmp-a[1].json-{os.getppid()}"
    for path in (mine, others, living):
        path.write_text("x")
    replace_file(tmp_path / "a[1].json", b"new")
    assert sorted(os.listdir(tmp_path)) == sorted([living.name, others.name, "a[1].json"])
    folder = tmp_path / f".tmp-model-{NOBODY}"
    folder.mkdir()
    (folder / "weights").write_text("x")
    remove_asides(tmp_path / "model")
    assert not folder.exists()
