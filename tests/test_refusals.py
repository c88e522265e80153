"""Bad input through the command line: one message with place, cause and remedy; nothing lost or overwritten.

Keys, types and names are in ``test_cli.py`` and ``test_recipe.py``, words that do not fit one another in
``test_incompatible_components.py``; here are data, rewards, checkpoints and disks.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from posttrain.cli import main
from posttrain.store.metrics import MetricsLog
from posttrain.store.rollouts import RolloutStore

pytestmark = pytest.mark.usefixtures("no_curves")

REWARDS = '''
from __future__ import annotations
from pathlib import Path

def share_of_digits(text):
    """Varies, so that the weights move; breaks as the file `broken` says."""
    how = Path("broken").read_text() if Path("broken").exists() else ""
    if how == "raise":
        raise KeyError("no such column")
    if how == "nan":
        return float("nan")
    if how == "text":
        return "good"
    return sum(c.isdigit() for c in text) / len(text)
'''
RL: dict[str, Any] = {
    "task": {"name": "stories", "size": 32, "max_steps": 1},
    "prompt": {"template": {"name": "r1_zero", "preamble": ""}},
    "rewards": ["bad_input_rewards:share_of_digits"],
    "rollout": {"num_prompts": 2, "group_size": 4, "max_tokens": 8},
    "objective": "grpo",
    "train": {"steps": 3, "lr": 1e-3, "save_every": 1, "keep_checkpoints": 3},
}
SFT: dict[str, Any] = {
    "task": {"name": "jsonl", "path": "rows.jsonl"},
    "prompt": {"template": {"name": "r1_zero", "preamble": ""}},
    "data": {"batch_size": 2},
    "objective": "cross_entropy",
    "train": {"steps": 2, "lr": 1e-3},
}
GOOD_ROWS = [json.dumps({"prompt": f"What is {i} plus 1?", "answer": str(i + 1)}) for i in range(30)]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with two recipes, good rows, and a reward of the user's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, recipe in (("rl", RL), ("sft", SFT)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(recipe))
    (tmp_path / "bad_input_rewards.py").write_text(REWARDS)
    monkeypatch.delitem(sys.modules, "bad_input_rewards", raising=False)
    write_rows(GOOD_ROWS)
    return tmp_path


def write_rows(lines: list[str]) -> None:
    Path("rows.jsonl").write_text("".join(line + "\n" for line in lines))


def contents(folder: str | Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(Path(folder).rglob("*")) if p.is_file()}


class Command:
    """Runs the command line and looks at how it ended."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def fails(self, code: int, *arguments: str) -> str:
        """The one message of a command that ends with ``code``."""
        assert main(list(arguments)) == code
        error = self.capsys.readouterr().err
        assert "Traceback" not in error
        assert error.count("posttrain: ") == 1
        return error.partition("posttrain: ")[2]

    def works(self, *arguments: str) -> str:
        """Return the output of a command that ends well, of both streams."""
        assert main(list(arguments)) == 0
        captured = self.capsys.readouterr()
        return captured.out + captured.err


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


# --- recipes ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--train.lr", "nan"], "command line: train.lr"),
        (["--aggregate", "{name: constant, length: 0}"], "aggregate.length"),
        (["--rewards", "[nowhere_at_all:f]"], "'nowhere_at_all:f'"),
        (["--rewards", "[bad_input_rewards:f]"], "bad_input_rewards"),
        (["--rewards", "[does_not_parse:f]"], "does_not_parse.py"),
        (["--rewards", "[does_not_start:f]"], "imported (ZeroDivisionError: division"),
        (["--rewards", "[types_unknown:f]"], "'Fraction'"),
        (["--train.num_minibatches", "3"], "train.num_minibatches"),
        (["--model.dtype", "bfloat16"], "model.dtype: "),
        (["--prompt.template", "boxed", "--rewards", "[xml_format]"], "rewards.0"),
    ],
)  # fmt: skip
def test_recipes_that_cannot_be_run_leave_nothing_behind(
    arguments: list[str], message: str, command: Command, place: Path
) -> None:
    (place / "does_not_parse.py").write_text("def f(text)\n    return 1.0\n")
    (place / "does_not_start.py").write_text("1 / 0\n")
    hidden = "from __future__ import annotations\ndef f(text, *, x: Fraction | None = None):\n    return 1.0\n"
    (place / "types_unknown.py").write_text(hidden)
    assert message in command.fails(2, "train", "rl.yaml", *arguments)
    assert contents("runs") == {}


# --- data ---


def test_a_missing_file_and_one_without_rows(command: Command) -> None:
    assert command.fails(2, "train", "sft.yaml", "--task.path", "row.jsonl").startswith(
        "row.jsonl: no such file. Did you mean 'rows.jsonl'?"
    )
    write_rows(["", ""])
    assert "rows.jsonl" in command.fails(2, "train", "sft.yaml")
    evaluation = ["evaluate", "tiny", "--task", "jsonl", "--task.path", "rows.jsonl"]
    assert "rows.jsonl" in command.fails(2, *evaluation)
    assert contents("runs") == {}


# --- rewards ---


BROKEN = {
    "raise": "the function raised KeyError: 'no such column'",
    "nan": "the function returned nan (float), which is not finite",
    "text": "the function returned 'good' (str), which is no number",
}


def test_a_broken_reward_ends_the_run_which_goes_on_once_it_is_mended(
    finished: Path, command: Command, place: Path
) -> None:
    command.works("train", "rl.yaml", "--run", "a", "--train.steps", "1", "--quiet")
    saved = contents("runs/a/checkpoints")
    resume = ["train", "rl.yaml", "--run", "a", "--resume", "--quiet"]
    for how, message in BROKEN.items():
        (place / "broken").write_text(how)
        error = command.fails(1, *resume)
        assert error.startswith("reward 'bad_input_rewards:share_of_digits', example 'stories/train/")
        assert message in error
        assert contents("runs/a/checkpoints") == saved
        assert json.loads(Path("runs/a/status.json").read_text())["state"] == "failed"
    (place / "broken").unlink()
    command.works(*resume)
    assert_same_run("runs/a", str(finished))


def assert_same_run(left: str, right: str) -> None:
    """Equal weights, records and metrics."""
    ours, theirs = (load_file(Path(run) / "checkpoints/step-000003/model.safetensors") for run in (left, right))
    assert ours.keys() == theirs.keys()
    assert all(bool((ours[name] == theirs[name]).all()) for name in ours)
    rows = [[(r.step, r.metrics) for r in MetricsLog(Path(run) / "metrics.jsonl").read()] for run in (left, right)]
    assert rows[0] == rows[1]
    assert [step for step, _ in rows[0]] == [1, 2, 3]
    stores = [RolloutStore(Path(run) / "rollouts.db", read_only=True).training() for run in (left, right)]
    assert stores[0] == stores[1]


@pytest.mark.parametrize(
    ("option", "word", "message"),
    [
        ("--objective", "raises", "objective"),
        ("--objective", "gives_none", "objective"),
        ("--advantage", "raises_too", "advantage"),
        ("--advantage", "gives_text", "advantage"),
        ("--rollout.select", "gives_text", "rollout.select"),
        ("--rollout.select", "too_far", "rollout.select"),
        ("--aggregate", "gives_text", "aggregate"),
        ("--correction", "raises_too", "correction"),
    ],
)
def test_other_functions_of_the_users(option: str, word: str, message: str, command: Command, place: Path) -> None:
    (place / "bad_input_words.py").write_text(
        "def raises(outputs, batch):\n    raise RuntimeError('so it goes')\n"
        "def gives_none(outputs, batch):\n    return None\n"
        "def raises_too(rewards):\n    raise ValueError('not today')\n"
        "def gives_text(rewards):\n    return 'all of them'\n"
        "def too_far(rewards):\n    return [((0, 9),)]\n"
    )
    trainer = ["--rollout.old_logprobs", "trainer"]
    assert main(["train", "rl.yaml", option, f"bad_input_words:{word}", *trainer]) in (1, 2)
    error = command.capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


# --- what a run leaves ---


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of rl.yaml with three checkpoints."""
    root = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setattr(sys, "path", list(sys.path))
        (root / "rl.yaml").write_text(yaml.safe_dump(RL))
        (root / "bad_input_rewards.py").write_text(REWARDS)
        assert main(["train", "rl.yaml", "--run", "a", "--quiet"]) == 0
    return root / "runs" / "a"


def test_rows_that_stand_there_twice_are_counted_and_reported(command: Command) -> None:
    write_rows([*GOOD_ROWS, *GOOD_ROWS[:5], GOOD_ROWS[0]])
    task = ["--task", "{name: jsonl, path: rows.jsonl, split: all}", "--train.steps", "1"]
    shown = command.works("train", "sft.yaml", *task)
    assert "36 examples; 6 duplicate rows, which are kept" in shown
    assert "6 duplicate rows, which are kept" in Path("runs/sft/log.txt").read_text()
    assert "6 examples repeat an earlier one" in command.works(
        "data", "show", "jsonl", "--task.path", "rows.jsonl", "--task.split", "all"
    )


def test_what_a_kill_left_of_a_file_being_written_is_swept(command: Command, place: Path) -> None:
    train = ["train", "rl.yaml", "--run", "a", "--train.steps", "1"]
    command.works(*train)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()  # its number is nobody's now
    names = (f".tmp-status.json-{ended.pid}", f".tmp-recipe.yaml-{ended.pid}", "checkpoints/.tmp-x")
    litter = [place / "runs/a" / name for name in names]
    for path in litter:
        path.write_text("half")
    output = command.works(*train, "--resume")
    assert f".tmp-recipe.yaml-{ended.pid}, .tmp-status.json-{ended.pid}, .tmp-x" in " ".join(output.split())
    assert not any(path.exists() for path in litter)
    (place / f".tmp-out-{ended.pid}").mkdir()
    command.works("runs", "export", "a", "--to", "out")
    assert not (place / f".tmp-out-{ended.pid}").exists()
