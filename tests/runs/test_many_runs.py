from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_runs import make_run

from posttrain.cli import main
from posttrain.runs.directory import RunDirectory
from posttrain.runs.lineage import find_links_around
from posttrain.runs.listing import list_runs


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sixty runs, started one a minute; each is trained from the one before. The working directory is their home."""
    monkeypatch.chdir(tmp_path)
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
    return names


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
    assert listed(capsys, "--limit", "2", "--sort", "name")[0] == ["r00", "r01"]
    assert listed(capsys, "--limit", "2", "r0*")[0] == ["r00", "r01"]
    assert main(["runs", "--format", "json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 60


def test_list_runs_with_newest_parses_only_these(root: Path, parsed: list[str]) -> None:
    assert [run.name for run in list_runs(root, newest=2)] == ["r58", "r59"]
    assert sorted(parsed) == ["r58", "r59"]


def test_links_around_some_runs_are_those_on_the_way_to_their_ancestors(root: Path) -> None:
    links = find_links_around(root, ["r03"])
    assert [(link.child, link.parent) for link in links] == [("r03", "r02"), ("r02", "r01"), ("r01", "r00")]


def test_a_message_names_a_dozen_runs(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "show", "nothing-like-it"]) == 2
    assert "r10, r11 and 48 more" in capsys.readouterr().err
