"""Folders of untrusted content: removed and walked without a call for every level."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from posttrain.errors import UsageError
from posttrain.folders import MAX_DEPTH, remove_folder, walk_folder
from posttrain.store.durable import refuse_links, remove_leftovers, remove_tree
from refusing import refuses


def make_deep(folder: Path, depth: int) -> Path:
    """A folder of so many levels, with a file in the last."""
    folder.mkdir()
    place = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("a", dir_fd=place)
        inner = os.open("a", os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = inner
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=place))
    os.close(place)
    return folder


@pytest.mark.parametrize("remove", [remove_folder, remove_tree])
def test_remove_of_a_deep_folder_leaves_nothing(tmp_path: Path, remove) -> None:
    remove(make_deep(tmp_path / "deep", 2000))
    assert os.listdir(tmp_path) == []


def test_remove_folder_removes_links_and_closed_folders_and_follows_none(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("here")
    folder = tmp_path / "gone"
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "b" / "link").symlink_to(kept)
    (folder / "link").symlink_to(kept / "file")
    (folder / ".removed-1-0").mkdir()
    os.mkfifo(folder / "a" / "pipe")
    (folder / "a" / "b").chmod(0)
    (folder / "a").chmod(0)
    remove_folder(folder)
    assert os.listdir(tmp_path) == ["kept"]
    assert (kept / "file").read_text() == "here"


def test_remove_folder_of_a_link_raises_and_keeps_its_target(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (tmp_path / "link").symlink_to(kept)
    with refuses(OSError, "link"):
        remove_folder(tmp_path / "link")
    assert kept.is_dir()


def test_walk_folder_yields_what_os_walk_does(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "file").write_text("")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "loop").symlink_to(tmp_path)
    found = {str(place): (sorted(folders), sorted(files)) for place, folders, files in walk_folder(tmp_path)}
    assert found == {place: (sorted(folders), sorted(files)) for place, folders, files in os.walk(tmp_path)}
    assert len(found) == 4


@pytest.mark.parametrize("read", [refuse_links, remove_leftovers])
def test_folder_deeper_than_any_run_is_refused_by_name(tmp_path: Path, read) -> None:
    folder = make_deep(tmp_path / "deep", MAX_DEPTH + 50)
    with refuses(UsageError, "levels"):
        read(folder)
    remove_folder(folder)
