"""``kill -9`` of a sweep: nothing outlives it, and the same command goes on as if nothing had been."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import killing
import psutil
import pytest
import yaml

pytestmark = pytest.mark.slow

# The grader for mathematics works in processes of its own: grandchildren of the command.
REWARDS = [{"name": "vowels:share_of_vowels"}, {"name": "correct", "mode": "math", "weight": 0.5}]
EVALUATION = {"every": 2, "num_examples": 4, "max_tokens": 8}
TRAIN = {"steps": 4, "lr": 1e-2, "save_every": 1}
ROLLOUT = {"num_prompts": 2, "group_size": 4, "max_tokens": 16}
BASE = killing.grpo_recipe(4) | {"rewards": REWARDS, "rollout": ROLLOUT, "train": TRAIN, "eval": EVALUATION}
METHODS: dict[str, Any] = {
    "base": {key: value for key, value in BASE.items() if key != "objective"},
    "rows": {"grpo": {"objective": "grpo"}, "reinforce": {"objective": "reinforce", "advantage": "centered"}},
    "seeds": 1,
}
ORM: dict[str, Any] = {
    "task": {"name": "stories", "split": "train", "size": 200},
    "rewards": REWARDS,
    "rollout": ROLLOUT | {"num_prompts": 4},
    "objective": {"name": "outcome", "positions": "all"},
    "train": TRAIN | {"lr": 1e-3},
    "eval": {"every": 0},
}
BEST_OF_N: dict[str, Any] = {
    "start": killing.sft_recipe(4, save_every=1) | {"eval": EVALUATION},
    "rows": {"orm": ORM},
    "best_of_n": {"task": {"name": "stories", "split": "validation"}, "n": 4, "samples": 4, "max_tokens": 16},
    "seeds": 1,
}
Moment = Callable[[Path, list[psutil.Process]], bool]


def has_checkpoint(run: Path, processes: list[psutil.Process]) -> bool:
    """Return whether a trial has saved something, so that both are at work."""
    return any(run.glob("cells/*/checkpoints/step-*"))


def is_grading(run: Path, processes: list[psutil.Process]) -> bool:
    """Return whether a worker that grades is there: a grandchild."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if "worker_process" in " ".join(process.cmdline()):
                return True
    return False


def is_sampling(run: Path, processes: list[psutil.Process]) -> bool:
    """Return whether the last trial, an evaluation, is at work."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if "evaluate" in process.cmdline():
                return True
    return False


def start(folder: Path, content: dict[str, Any]) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "file.yaml").write_text(yaml.safe_dump(content))
    command = [sys.executable, "-m", "posttrain.cli", "sweep", "file.yaml", "--run", "x", "--jobs", "2"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    with (folder / "output.txt").open("wb") as output:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)


def differences(left: Path, right: Path) -> list[str]:
    """Return in what two finished sweeps differ, bit for bit; times and places are left out."""
    found = []
    for run in sorted({path.parent.relative_to(root) for root in (left, right) for path in root.rglob("recipe.yaml")}):
        found += [f"{run}: {what}" for what in killing.differences(left / run, right / run)]
    for path in sorted(left.rglob("items.jsonl")):
        if (right / path.relative_to(left)).read_bytes() != path.read_bytes():
            found.append(str(path.relative_to(left)))
    return found


@pytest.mark.parametrize(
    ("content", "moments"),
    [(METHODS, [has_checkpoint, is_grading]), (BEST_OF_N, [is_sampling])],
    ids=["methods", "best of n"],
)
def test_sweep_after_kill_goes_on_bit_for_bit(content: dict[str, Any], moments: list[Moment], tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    assert start(whole, content).wait() == 0, (whole / "output.txt").read_text()
    assert len(list((whole / "runs/x").rglob("metrics.jsonl"))) == 2
    for moment in moments:
        cut = tmp_path / moment.__name__
        process = start(cut, content)
        children: list[psutil.Process] = []
        while process.poll() is None and not moment(cut / "runs/x", children):
            children = psutil.Process(process.pid).children(recursive=True)
            time.sleep(0.01)
        assert process.poll() is None, (cut / "output.txt").read_text()
        assert children  # there was something to outlive it
        process.kill()
        process.wait()
        assert start(cut, content).wait() == 0, (cut / "output.txt").read_text()
        assert [child.pid for child in children if child.is_running()] == []
        assert differences(whole / "runs/x", cut / "runs/x") == []
        assert list(cut.rglob(".tmp-*")) == []
