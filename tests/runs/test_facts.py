from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from fake_runs import make_run

from posttrain.cli import main
from posttrain.runs import listing
from posttrain.runs.directory import RunDirectory
from posttrain.runs.lineage import find_links, find_links_around
from posttrain.runs.listing import list_runs
from posttrain.store import reading


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sixty runs, started one a minute; each is trained from the one before. The working directory is their home."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(reading, "SETTLED_SECONDS", 0.0)
    for number in range(60):
        model = f"runs/r{number - 1:02d}" if number else "tiny"
        created = f"2026-01-01T00:{number:02d}:00+00:00"
        make_run(tmp_path / "runs", f"r{number:02d}", model=model, steps=(1,), created=created)
    return tmp_path / "runs"


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs whose recipe was parsed."""
    names: list[str] = []
    read = RunDirectory.read_recipe

    def note(self: RunDirectory) -> dict[str, object]:
        names.append(self.folder.name)
        return read(self)

    monkeypatch.setattr(RunDirectory, "read_recipe", note)
    forget(monkeypatch)
    return names


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a new process."""
    monkeypatch.setattr(listing, "_facts", reading.Remembered("runs"))


def listed(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[list[str], str]:
    assert main(["runs", *options]) == 0
    text = capsys.readouterr().out
    return [line.split()[0] for line in text.splitlines() if line[:1] == "r" and line[1:3].isdigit()], text


def test_a_table_has_the_newest_and_says_how_many_more(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names, text = listed(capsys)
    assert names == [f"r{number}" for number in range(10, 60)]
    assert "and 10 more runs; --limit 0 shows all" in text
    names, text = listed(capsys, "--limit", "3")
    assert names == ["r57", "r58", "r59"]
    assert "and 57 more runs" in text
    names, text = listed(capsys, "--limit", "0")
    assert names == [f"r{number:02d}" for number in range(60)]
    assert "more runs" not in text
    assert listed(capsys, "--limit", "2", "--sort", "name", "--reverse")[0] == ["r59", "r58"]
    assert listed(capsys, "--limit", "2", "r0*")[0] == ["r00", "r01"]
    assert main(["runs", "--format", "json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 60


def test_only_what_is_shown_is_parsed_and_nothing_twice(
    root: Path, parsed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [run.name for run in list_runs(root, newest=2)] == ["r58", "r59"]
    assert sorted(parsed) == ["r58", "r59"]
    list_runs(root)
    assert sorted(parsed) == [f"r{number:02d}" for number in range(60)]
    forget(monkeypatch)
    list_runs(root)
    find_links(root)
    assert len(parsed) == 60


def test_a_changed_file_is_read_again(root: Path, parsed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    before = {run.name: run for run in list_runs(root)}
    path = root / "r05" / "recipe.yaml"
    times = os.stat(path)
    path.write_text(path.read_text().replace("name: grpo", "name: dapo"))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # same size, same time of change
    (root / "r06" / "recipe.yaml").write_text("- broken")
    forget(monkeypatch)
    after = {run.name: run for run in list_runs(root)}
    assert (before["r05"].objective, after["r05"].objective) == ("grpo", "dapo")
    assert after["r06"].state == "damaged"
    assert [name for name in before if before[name] != after[name]] == ["r05", "r06"]


@pytest.mark.parametrize("content", [b"", b"{}", b"0" * 64 + b"\n{}", "an index of another kind\n".encode("utf-16")])
def test_a_damaged_memory_is_made_anew(
    root: Path, parsed: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes
) -> None:
    before = list_runs(root)
    place = tmp_path / "cache" / "posttrain" / "runs.json"
    place.write_bytes(content)
    forget(monkeypatch)
    assert list_runs(root) == before
    assert len(parsed) == 120
    forget(monkeypatch)
    assert list_runs(root) == before
    assert len(parsed) == 120


def test_two_processes_keep_what_either_found(root: Path, parsed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = reading.Remembered("runs"), reading.Remembered("runs")
    for number, memory in [(1, ours), (2, theirs)]:
        assert memory.get(root / f"r{number:02d}" / "recipe.yaml", lambda path: path.parent.name) == f"r{number:02d}"
    ours.save()
    theirs.save()
    later = reading.Remembered("runs")
    for number in (1, 2):
        assert later.get(root / f"r{number:02d}" / "recipe.yaml", lambda path: "again") == f"r{number:02d}"


def test_links_around_some_runs_are_those_on_the_way_to_their_ancestors(root: Path) -> None:
    links = find_links_around(root, ["r03"])
    assert [(link.child, link.parent) for link in links] == [("r03", "r02"), ("r02", "r01"), ("r01", "r00")]


def test_a_message_names_a_dozen_runs(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "show", "nothing-like-it"]) == 2
    assert "r10, r11 and 48 more" in capsys.readouterr().err
