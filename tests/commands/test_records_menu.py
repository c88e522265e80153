"""`posttrain runs manage`: lines in, tables out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from posttrain.cli import main
from posttrain.runs.directory import RunDirectory, RunStatus, lock_run, run_names
from posttrain.store.checkpoint_files import checkpoint_steps, seal

Talk = Callable[..., tuple[str, list[str]]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, steps in (("alpha", 3), ("beta", 1), ("gamma", 2)):
        run = RunDirectory(tmp_path / "runs" / name)
        run.folder.mkdir(parents=True)
        recipe = {"model": {"name": "tiny"}, "task": "stories", "objective": "grpo", "train": {"steps": 9}}
        run.recipe_path.write_text(yaml.safe_dump(recipe))
        run.write_status(RunStatus("finished", steps, 9, 1, "here", 5.0))
        for step in range(1, steps + 1):
            folder = run.folder / "checkpoints" / f"step-{step:06d}"
            folder.mkdir(parents=True)
            (folder / "config.json").write_text("{}")
            seal(folder, step)
    return tmp_path / "runs"


@pytest.fixture
def talk(root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Talk:
    """Types lines into the menu; returns what was printed, and the last lines of the prompts."""

    def say(*typed: str) -> tuple[str, list[str]]:
        lines: Iterator[str] = iter(typed)
        prompts: list[str] = []

        def read(prompt: str = "") -> str:
            prompts.append(prompt.splitlines()[-1])
            line = next(lines, None)
            if line is None:
                raise EOFError
            if line == "^C":
                raise KeyboardInterrupt
            return line

        monkeypatch.setattr("builtins.input", read)
        monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
        assert main(["runs", "manage", "--runs-dir", str(root)]) == 0
        assert next(lines, None) is None, "the menu ended before the lines did"
        return capsys.readouterr().out, prompts

    return say


def test_run_manage_lists_first_shows_mistakes_and_ends_with_quit_alone(root: Path, talk: Talk) -> None:
    lines = ["^C", "", "nonsense", "show nowhere", 'show "', "export alpha", "prune alpha --keep nothing", "show alpha"]
    text, prompts = talk(*lines, "quit")
    assert [line.split()[0] for line in text.splitlines()[1:4]] == ["alpha", "beta", "gamma"]
    assert "3 of 9" in text
    assert prompts == ["runs> "] * 9
    text = " ".join(text.split())
    mistakes = ("there is no action 'nonsense'", "there is no run 'nowhere'", "No closing quotation", "give best")
    for message in (*mistakes, "stopped"):
        assert message in text
    assert run_names(root) == ["alpha", "beta", "gamma"]


def test_run_manage_takes_the_actions_of_the_commands(root: Path, talk: Talk, tmp_path: Path) -> None:
    talk("prune alpha", "n", "q")
    assert checkpoint_steps(root / "alpha" / "checkpoints") == [1, 2, 3]
    talk("prune alpha --keep 2", "y", "q")
    assert checkpoint_steps(root / "alpha" / "checkpoints") == [2, 3]
    talk(f"export gamma --to {tmp_path / 'out'}", "q")
    assert sorted(os.listdir(tmp_path / "out")) == ["README.md", "config.json", "recipe.yaml"]
    _, prompts = talk("delete beta", "", "delete beta", "yes", "q")
    assert prompts[1].startswith("Delete 1 run, ")
    with lock_run(root / "alpha"):
        assert "another process is working" in " ".join(talk("delete alpha", "q")[0].split())
    assert run_names(root) == ["alpha", "gamma"]
