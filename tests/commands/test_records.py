"""`posttrain runs` on the command line, over small runs of the embedded model."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from posttrain.cli import main
from posttrain.runs.directory import RunDirectory, lock_run, run_names
from posttrain.store.checkpoint_files import checkpoint_steps
from posttrain.store.metrics import MetricsLog

pytestmark = pytest.mark.usefixtures("no_curves")

SFT = """\
model: {name: tiny}
task: {name: stories, size: 40, max_steps: 1}
prompt: {template: {name: r1_zero, preamble: ""}}
data: {batch_size: 2, max_length: 256}
objective: cross_entropy
train: {steps: 3, lr: 1.0e-4, save_every: 1, keep_checkpoints: 9}
eval: {every: 3, num_examples: 3, max_tokens: 4}
"""
COMPARE = "base: {}\nrows: {plain: {}}\nseeds: 1\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run ``sft``, and ``more``, which was trained from it."""
    folder = tmp_path_factory.mktemp("trained")
    before = Path.cwd()
    os.chdir(folder)
    try:
        Path("sft.yaml").write_text(SFT)
        assert main(["train", "sft.yaml", "--quiet"]) == 0
        more = ["--model.name", "runs/sft", "--run", "more", "--train.lr", "0.001", "--train.steps", "2"]
        assert main(["train", "sft.yaml", "--quiet", *more]) == 0
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def place(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of them to change, with a comparison; the working directory."""
    shutil.copytree(trained, tmp_path / "place", symlinks=True)
    folder = tmp_path / "place"
    shutil.copytree(folder / "runs" / "sft", folder / "runs" / "sweep-x" / "cells" / "plain-seed0", symlinks=True)
    (folder / "runs" / "sweep-x" / "sweep.yaml").write_text(COMPARE)
    (folder / "runs" / "sweep-x" / "table.md").write_text("| method | right |\n| plain | 12 % |\n")
    monkeypatch.chdir(folder)
    return folder


class Out:
    """Runs a command and gives what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *words: str, code: int = 0) -> str:
        self.capsys.readouterr()
        assert main(["runs", *words]) == code
        captured = self.capsys.readouterr()
        return captured.err if code else captured.out

    def json(self, *words: str) -> Any:
        return json.loads(self(*words, "--format", "json"))


@pytest.fixture
def out(capsys: pytest.CaptureFixture[str]) -> Out:
    return Out(capsys)


def lines_of(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_the_list_shows_runs_and_sweeps(place: Path, out: Out) -> None:
    lines = lines_of(out())
    assert lines[0] == ["run", "state", "step", "model", "objective", "held-out", "size"]
    assert [line[:5] for line in lines[1:3]] == [
        ["sft", "finished", "3/3", "tiny", "cross_entropy"],
        ["more", "finished", "2/2", "runs/sft", "cross_entropy"],
    ]
    assert lines[3][:4] == ["sweep-x", "sweep", "1/1", "runs"]
    shown = out("show", "sweep-x")
    assert "sweep-x: not running, 1 of 1 run finished" in shown
    assert "| plain | 12 % |" in shown
    assert [run["name"] for run in out.json("show", "sweep-x")["runs"]] == ["sweep-x/cells/plain-seed0"]
    assert "and 1 more runs" in out("--limit", "1")
    assert "runs of these" in out("--state", "failed")
    assert "'finshed'" in out("--state", "finshed", code=2)
    for gone in (["--families"], ["--tag", "x"], ["--cells"], ["tag", "sft", "+good"], ["note", "sft", "x"]):
        assert "was removed" in out(*gone, code=2)


def test_one_run_in_full(place: Path, out: Out) -> None:
    lines = out("show", "sft").splitlines()
    info = {line.split()[0]: line.split()[1:] for line in lines if line.split()}
    assert info["checkpoints"] == ["1,", "2,", "3", "(best)"]
    assert info["used"] == ["by", "more", "(start)"]
    assert ["start", "sft,", "step", "3"] in lines_of(out("show", "more"))
    assert out.json("show", "runs/more/")["links"][0]["parent"] == "sft"
    assert "'mroe'" in out("show", "mroe", code=2)


def test_runs_side_by_side(place: Path, out: Out) -> None:
    lines = lines_of(out("compare", "sft", "more"))
    assert lines[0] == ["outcome", "sft", "more"]
    assert lines[1][:2] == ["stories/validation,", "last"]  # what came out, then what differs
    assert ["step", "3", "of", "3", "2", "of", "2"] in lines
    at = lines.index(["recipe", "sft", "more"])
    assert lines[at + 1 : at + 4] == [
        ["model.name", "tiny", "runs/sft"],
        ["train.lr", "0.0001", "0.001"],
        ["train.steps", "3", "2"],
    ]
    data = out.json("compare", "sft", "m*")
    assert data["names"] == ["sft", "more"]
    assert data["recipe"]["train.lr"] == {"sft": 0.0001, "more": 0.001}
    assert len(data["last"]["stories/validation"]) == 2
    assert "the recipes are equal in" in out("compare", "sft", "sweep-x/cells/plain-seed0")
    assert "give two or more runs" in out("compare", "sft", "sft", code=2)


def test_pruning_asks_first(place: Path, out: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = place / "runs" / "sft" / "checkpoints"
    with lock_run(place / "runs" / "sft"):
        assert "process is using" in out("prune", "sft", "--yes", code=2)
        assert "left out: runs/sft: another process is using" in out("prune", "--all", "--dry-run")
    message = out("prune", "--all", "--dry-run")
    assert "sft:" in message
    assert "delete 5 checkpoints" in message
    assert "--yes" in out("prune", "sft", code=2)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda question: "n")
    assert out("prune", "sft").endswith("nothing was changed\n")
    assert checkpoint_steps(folder) == [1, 2, 3]
    monkeypatch.setattr("builtins.input", lambda question: "y")
    assert "deleted 2 checkpoints of 1 run" in out("prune", "sft")
    assert checkpoint_steps(folder) == [3]
    assert out("prune", "sft") == "there is nothing to prune\n"
    (folder / "failed-step-000002").mkdir()
    assert "sft: delete failed-step-000002 (0 B); keep 3" in out("prune", "sft")
    assert not (folder / "failed-step-000002").exists()
    assert checkpoint_steps(place / "runs" / "sweep-x" / "cells" / "plain-seed0" / "checkpoints") == [1, 2, 3]
    assert "--all" in out("prune", code=2)
    assert "give best, last" in out("prune", "sft", "--keep", "worst", code=2)


def test_deleting_asks_and_refuses_what_others_stand_on(place: Path, out: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    message = out("delete", "sft", "--yes", code=2)
    assert "more:" in message
    assert "--force" in message
    assert "terminal to ask" in out("delete", "more", code=2)
    assert "would delete 1 run" in out("delete", "more", "--dry-run")
    assert "missing run names" in out("delete", "--yes", code=2)
    assert "'x*'" in out("delete", "x*", "--yes", code=2)
    with lock_run(place / "runs" / "more"):
        assert "process is using" in out("delete", "more", "--yes", code=2)
    assert run_names("runs") == ["more", "sft"]
    assert "sweep-x: a sweep with 1 run" in out("delete", "sweep-*", "sweep-x/cells/*", "--dry-run")
    out("delete", "sweep-x", "sweep-x/cells/plain-seed0", "--yes")
    assert sorted(os.listdir("runs")) == ["more", "sft"]
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda question: "no")
    assert out("delete", "sft", "more").endswith("nothing was changed\n")
    monkeypatch.setattr("builtins.input", lambda question: " Yes ")
    assert "deleted 1 run" in out("delete", "sft", "--force")
    assert run_names("runs") == ["more"]
    assert ["start", "sft,", "step", "3", "(deleted)"] in lines_of(out("show", "more"))


def test_exports_are_counted_and_take_no_place_of_others(place: Path, out: Out) -> None:
    assert "out: the weights after step 2" in out("export", "more", "--to", "out")
    assert "already exists" in out("export", "more", "--to", "out", code=2)
    assert "no weights" in out("export", "sft", "--weights", "none", "--to", "records")


def test_manage_takes_the_actions_line_by_line_and_shows_mistakes(
    place: Path, out: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["^C", "", "nonsense", "show nowhere", 'show "', "export sft", "prune sft --keep nothing", "show sft"]
    lines += ["prune sft", "n", "prune sft --keep 2", "y", "delete more", "yes", "quit"]
    prompts: list[str] = []

    def read(prompt: str = "") -> str:
        prompts.append(prompt.splitlines()[-1])
        if (line := lines.pop(0)) == "^C":
            raise KeyboardInterrupt
        return line

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    text = " ".join(out("manage").split())
    assert text.startswith("run state step model")
    mistakes = ("unknown action 'nonsense'", "no run 'nowhere'", "No closing quotation", "give best")
    assert [message for message in (*mistakes, "stopped", "nothing was changed") if message not in text] == []
    assert prompts[:9] == ["runs> "] * 9
    assert prompts[-2].startswith("Delete 1 run, ")
    assert checkpoint_steps("runs/sft/checkpoints") == [2, 3]
    assert (lines, run_names("runs")) == ([], ["sft"])


@pytest.mark.parametrize("end", ["q", "exit", None])
def test_manage_ends_with_a_letter_and_at_the_end_of_input(
    end: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def read(prompt: str) -> str:
        asked.append(prompt)
        assert len(asked) == 1, "it had ended"
        if end is None:
            raise EOFError
        return end

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    assert main(["runs", "manage", "--runs-dir", str(tmp_path)]) == 0
    assert len(asked) == 1


def test_resuming_goes_on_by_the_runs_own_recipe(place: Path, out: Out) -> None:
    assert out("resume", "sft", "--quiet") == "run:    runs/sft\n"  # it had finished
    out("resume", "sft", "--steps", "5", "--quiet")
    rows = MetricsLog("runs/sft/metrics.jsonl").read()
    assert [row.step for row in rows if "loss" in row.metrics] == [1, 2, 3, 4, 5]
    environment = RunDirectory("runs/sft").read_environment()
    assert (environment["recipe"], len(environment["starts"])) == ("sft.yaml", 3)
    assert "step 5 of the newest checkpoint" in out("resume", "sft", "--steps", "2", code=2)
    with lock_run(Path("runs/sweep-x")):
        assert "process is using" in out("resume", "sweep-x/cells/plain-seed0", code=2)
