"""`posttrain runs manage`: lines in, tables out."""

from __future__ import annotations

import io
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from posttrain.cli import main
from posttrain.commands.runs import menu as records_menu
from posttrain.commands.runs.menu import Menu
from posttrain.runs.directory import RunDirectory, RunStatus, lock_run, run_names
from posttrain.runs.notes import read_notes
from posttrain.store.checkpoint_files import checkpoint_steps, seal


def make_run(root: Path, name: str, steps: int) -> None:
    run = RunDirectory(root / name)
    run.folder.mkdir(parents=True)
    recipe = {"model": {"name": "tiny"}, "task": "stories", "objective": "grpo", "train": {"steps": 9}}
    run.recipe_path.write_text(yaml.safe_dump(recipe))
    run.write_status(RunStatus("finished", steps, 9, 1, "here", 5.0))
    for step in range(1, steps + 1):
        folder = run.folder / "checkpoints" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        seal(folder, step)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, steps in (("alpha", 3), ("beta", 1), ("gamma", 2)):
        make_run(tmp_path / "runs", name, steps)
    return tmp_path / "runs"


class Talk:
    """Feeds lines to a menu; keeps the prompts and what was printed."""

    def __init__(self, root: Path, *lines: str) -> None:
        self.lines: Iterator[str] = iter(lines)
        self.prompts: list[str] = []
        console = Console(file=io.StringIO(), width=140, highlight=False)
        Menu(str(root), console, self.read).serve()
        assert next(self.lines, None) is None, "the menu ended before the lines did"
        self.text = console.file.getvalue()  # type: ignore[attr-defined]

    def read(self, prompt: str) -> str:
        self.prompts.append(prompt)
        line = next(self.lines, None)
        if line is None:
            raise EOFError
        return line


def test_the_runs_are_numbered_and_opened(root: Path) -> None:
    talk = Talk(root, "2", "b", "q")
    assert [line.split()[:2] for line in talk.text.splitlines()[1:4]] == [["1", "alpha"], ["2", "beta"], ["3", "gamma"]]
    assert talk.prompts[1].endswith("beta> ")
    assert "1 of 9" in talk.text


def test_a_number_means_what_the_last_list_showed(root: Path) -> None:
    talk = Talk(root, "s step", "1", "b", "f mm", "1", "b", "f", "1", "b", "q")
    opened = [prompt.splitlines()[-1] for prompt in talk.prompts if not prompt.endswith("runs> ")]
    assert opened == ["alpha> ", "gamma> ", "alpha> "]


def test_mistakes_are_said_and_the_menu_goes_on(root: Path) -> None:
    talk = Talk(root, "", "7", "nonsense", "s nonsense", "c 1 2", "d", 'x "', "one two three", "1", "zz", "b", "q")
    for said in (
        "there is no number 7 in the list; it has 3 runs",
        "there is no run 'nonsense'",
        "there is no 'nonsense' to sort by",
        "there is no 'c 1 2' in this menu",
        "name the runs to delete, such as: d 1 2",
        "this cannot be read",
        "there is no 'one two three' in this menu",
        "there is no 'zz' in this menu",
    ):
        assert said in talk.text
    assert run_names(root) == ["alpha", "beta", "gamma"]


def test_tags(root: Path) -> None:
    Talk(root, "alpha", "t", "+good later", "t", "-later", "b", "q")
    assert read_notes(root / "alpha").tags == ("good",)


def test_pruning_one_and_all(root: Path) -> None:
    Talk(root, "1", "p", "", "n", "b", "q")
    assert checkpoint_steps(root / "alpha" / "checkpoints") == [1, 2, 3]
    Talk(root, "1", "p", "2", "y", "b", "q")
    assert checkpoint_steps(root / "alpha" / "checkpoints") == [2, 3]
    talk = Talk(root, "p", "last", "y", "q")
    assert "deleted 2 checkpoints of 2 runs" in talk.text
    assert checkpoint_steps(root / "alpha" / "checkpoints") == [3]


def test_deleting_asks_and_comes_back_to_the_list(root: Path) -> None:
    talk = Talk(root, "2", "d", "", "d", "yes", "d 1 2", "y", "q")
    assert next(prompt for prompt in talk.prompts if prompt.endswith("[y/N] ")).startswith("Delete 1 run, ")
    assert run_names(root) == []
    assert f"no runs in {root}" in Talk(root, "l", "q").text


def test_a_run_at_work_is_not_deleted(root: Path) -> None:
    with lock_run(root / "alpha"):
        assert "a process is working there" in Talk(root, "d 1", "q").text
    assert run_names(root) == ["alpha", "beta", "gamma"]


def test_exporting_and_resuming(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resumed: list[Any] = []
    monkeypatch.setattr(records_menu, "resume", lambda root, place: resumed.append((root, place.name)))
    target = tmp_path / "out"
    Talk(root, "3", "e", "", "e", str(target), "r", "b", "q")
    assert sorted(os.listdir(target)) == ["README.md", "config.json", "recipe.yaml"]
    assert resumed == [(str(root), "gamma")]


def test_ctrl_c_in_an_action_and_the_end_of_the_input(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(records_menu, "resume", stop)
    talk = Talk(root, "1", "r")
    assert "stopped" in talk.text
    assert talk.prompts[-1].endswith("alpha> ")


def test_without_a_terminal_it_is_refused(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "manage", "--runs-dir", str(root)]) == 2
    assert "`posttrain runs --help` lists the commands" in capsys.readouterr().err


def test_in_a_real_terminal(root: Path) -> None:
    """Typed as a person would, through a pseudo-terminal."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "posttrain.cli", "runs", "manage", "--runs-dir", str(root)]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, close_fds=True)
    os.close(theirs)
    seen = b""

    def until(text: bytes) -> None:
        nonlocal seen
        deadline = time.monotonic() + 60
        while text not in seen and time.monotonic() < deadline:
            if select.select([ours], [], [], 1)[0]:
                seen += os.read(ours, 4096)
        assert text in seen, seen.decode(errors="replace")
        seen = b""

    for line, answer in ((b"d 2", b"[y/N] "), (b"y", b"runs> "), (b"q", b"")):
        until(b"runs> " if line == b"d 2" else b"")
        os.write(ours, line + b"\n")
        until(answer)
    assert process.wait(timeout=60) == 0
    os.close(ours)
    assert run_names(root) == ["alpha", "gamma"]
