"""Runs that are killed with SIGKILL and resumed, and the comparison with one that nobody disturbed.

Nothing in the package knows about this: a run is a process like any other, and the phase that it
is in is read from its files.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from other_processes import is_alive

_PHASES = ("anywhere", "rollout", "update", "checkpoint", "evaluation", "start")
_POLL_SECONDS = 0.001
_HERE = Path(__file__).parent

MODEL = {
    "init": {
        "architecture": "qwen3",
        "config": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "max_position_embeddings": 512,
            "tie_word_embeddings": True,
        },
        "tokenizer": {"vocab_size": 320, "num_documents": 200},
    }
}
EVALUATION = {"every": 4, "num_examples": 8, "max_tokens": 16}


def grpo_recipe(steps: int, **train: Any) -> dict[str, Any]:
    """A small GRPO recipe with a reward that varies, so that the weights move at every step."""
    return {
        "model": MODEL,
        "task": {"name": "stories", "split": "train", "size": 200},
        "rewards": [{"name": "vowels:share_of_vowels"}, {"name": "xml_format", "weight": 0.5}],
        "rollout": {"num_prompts": 4, "group_size": 4, "max_tokens": 24},
        "objective": "grpo",
        "train": {"steps": steps, "lr": 1e-2, "save_every": 3} | train,
        "eval": EVALUATION,
    }


def sft_recipe(steps: int, **train: Any) -> dict[str, Any]:
    """A small SFT recipe."""
    return {
        "model": MODEL,
        "task": {"name": "stories", "split": "train", "size": 200},
        "data": {"batch_size": 8, "max_length": 512},
        "objective": "cross_entropy",
        "train": {"steps": steps, "lr": 1e-2, "save_every": 3} | train,
        "eval": EVALUATION,
    }


def prefetch_recipe(steps: int, staleness: int = 1, **rollout: Any) -> dict[str, Any]:
    """GRPO that samples ahead, with dropped groups and four updates per batch."""
    recipe = grpo_recipe(steps, ppo_epochs=2, num_minibatches=2)
    drops = {"drop_uniform_groups": True, "max_rounds": 3, "staleness": staleness, "max_tokens": 6}
    rewards = [{"name": "vowels:begins_with_a_vowel"}]
    return recipe | {"rollout": recipe["rollout"] | drops | rollout, "rewards": rewards}


def turns_recipe(environment: str, steps: int) -> dict[str, Any]:
    """GRPO whose completions have several turns, saved at every step; what is said depends on the weights."""
    texts = TURNS[environment]
    recipe = grpo_recipe(steps, save_every=1)
    engine = {"name": "choosing_engine:choosing", "texts": texts}
    limits = {"max_tokens": 300, "max_turns": 3, "show_tools": False}
    return recipe | {
        "environment": PLAYED[environment],
        "rewards": [{"name": "vowels:share_of_vowels"}, {"name": "tool_calls", "weight": -0.1}],
        "rollout": {"num_prompts": 2, "group_size": 4, "engine": engine, **limits},
    }


PLAYED: dict[str, Any] = {
    "calculator": "calculator",
    "python": {"name": "python", "sandbox": "process"},
    "number_guess": {"name": "number_guess", "high": 7},
}
TURNS = {
    "calculator": [" <tool>calculator: 2 + 3</tool>", " <tool>calculator: 1 / 0</tool>", " it is 5"],
    "python": [" <tool>python: print(2 ** 70)</tool>", " <tool>python: open('x')</tool>", " it is done"],
    "number_guess": [" <tool>guess: 4</tool>", " <tool>guess: 6</tool>", " <tool>guess: 2</tool>"],
}


RECIPES: dict[str, Callable[[int], dict[str, Any]]] = {
    "grpo": grpo_recipe,
    "sft": sft_recipe,
    # Four updates per rollout batch, saved after every third: most checkpoints fall inside a batch.
    "grpo in passes": lambda steps: grpo_recipe(steps, ppo_epochs=2, num_minibatches=2),
    "grpo ahead": prefetch_recipe,
    **{f"turns with {name}": partial(turns_recipe, name) for name in PLAYED},
}


@dataclass(frozen=True)
class Kill:
    """One kill: the phase that it aimed at, the one it met, and how far the run had come."""

    aimed: str
    met: str
    step: int
    checkpoint: int | None
    seconds: float


def phases_to_aim_at(kind: str, count: int) -> list[str]:
    """``count`` phases in turn; supervised training has no rollouts."""
    phases = [phase for phase in _PHASES if kind != "sft" or phase != "rollout"]
    return [phases[i % len(phases)] for i in range(count)]


def phases_to_meet(kind: str) -> set[str]:
    """The phases that a good choice of moments met at least once."""
    return {"checkpoint", "evaluation", "update"} | ({"rollout"} if kind != "sft" else set())


class Forking:
    """A ``program`` of this folder that forks as it is told, one at a time: JSON lines in, numbers out."""

    def __init__(self, program: str, variables: Mapping[str, str], folder: Path | None = None) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, str(_HERE / program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment | variables,
            cwd=folder,
        )

    def fork(self, about: Sequence[Any]) -> int:
        """Returns the process id."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(about) + "\n")
        self._process.stdin.flush()
        return self.wait()

    def wait(self) -> int:
        """The exit code of what was forked, negative for a signal."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the starter ended; its error is above"
        return int(line)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Starter(Forking):
    """A process that has imported everything and forks a run whenever it is asked to.

    A fresh interpreter would spend seconds on imports for every kill. The forked run is an ordinary
    process; its Python hash seed is that of this starter, and differs between starters.
    """

    def __init__(self) -> None:
        super().__init__("start_runs.py", {}, _HERE)

    def start(self, recipe: Path, folder: Path, moment: Sequence[str | int] | None = None) -> int:
        """Start or resume the run ``folder``; returns its process id.

        ``moment`` (module, function, "before" or "after", n): it kills itself at the n-th call.
        """
        return self.fork([str(recipe), str(folder), moment])


class Interpreters:
    """Like ``Starter``, but each run is `posttrain train` in an interpreter of its own."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, recipe: Path, folder: Path) -> int:
        command = [sys.executable, "-m", "posttrain.cli", "train", str(recipe), "--quiet", "--run", folder.name]
        command += ["--runs-dir", str(folder.parent)]
        if (folder / "recipe.yaml").exists():
            command.append("--resume")
        self._process = subprocess.Popen(command, cwd=_HERE, stdout=subprocess.DEVNULL)
        return self._process.pid

    def wait(self) -> int:
        assert self._process is not None
        return self._process.wait()

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()


def run_undisturbed(starter: Starter | Interpreters, recipe: Path, folder: Path) -> float:
    """Run to the end; returns the seconds from the first sign of work on."""
    before = _status_time(folder)
    process = starter.start(recipe, folder)
    _wait_until_working(process, folder, before)
    began = time.perf_counter()
    code = starter.wait()
    assert code == 0, f"the undisturbed run ended with {code}"
    return time.perf_counter() - began


def run_with_kills(
    starter: Starter | Interpreters, recipe: Path, folder: Path, phases: Sequence[str], seed: int
) -> list[Kill]:
    """Run to the end, killed once for each phase aimed at; resumed after every kill.

    Args:
        phases: what to aim at, in order. A run that ends before its phase comes ends the killing.
        seed: of the moments within the phases.
    """
    rng = random.Random(seed)
    kills: list[Kill] = []
    for aimed in phases:
        began, before = time.perf_counter(), _status_time(folder)
        process = starter.start(recipe, folder)
        _wait_until_working(process, folder, before)
        first_sign = _status_time(folder)
        _wait_for(aimed, folder, process, rng)
        try:
            os.kill(process, 9)
        except ProcessLookupError:
            break
        if starter.wait() == 0:
            break
        seconds = time.perf_counter() - began
        met = "start" if _status_time(folder) == first_sign else describe_moment(folder)
        kills.append(Kill(aimed, met, _step(folder), newest_checkpoint(folder), seconds))
    run_undisturbed(starter, recipe, folder)
    return kills


def _status_time(folder: Path) -> int:
    path = folder / "status.json"
    return path.stat().st_mtime_ns if path.exists() else 0


def _wait_until_working(process: int, folder: Path, before: int) -> None:
    """Sleep until the process writes its first status (or ends): imports are behind it."""
    while is_alive(process) and _status_time(folder) == before:
        time.sleep(_POLL_SECONDS)


def _wait_for(aimed: str, folder: Path, process: int, rng: random.Random) -> None:
    """Sleep until a moment in the phase ``aimed`` at, or until the process ends."""
    if aimed == "start":
        _sleep_alive(process, rng.uniform(0.0, 0.1))
        return
    if aimed == "anywhere":  # so many steps on, whatever the machine's speed
        resumed, target = _status_time(folder), (newest_checkpoint(folder) or 0) + rng.randrange(9)
        while is_alive(process) and (_status_time(folder) == resumed or _step(folder) < target):
            time.sleep(_POLL_SECONDS)
        _sleep_alive(process, rng.uniform(0.0, 0.1))
        return
    occasions = rng.randrange(1, 4)  # not always the first one after a start
    before = describe_moment(folder)
    while is_alive(process):
        now = describe_moment(folder)
        if now == aimed and now != before:
            occasions -= 1
            if occasions == 0:
                _sleep_alive(process, rng.uniform(0.0, 0.003 if aimed == "update" else 0.02))  # an update is short
                return
        before = now
        time.sleep(_POLL_SECONDS)


def _sleep_alive(process: int, seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end and is_alive(process):
        time.sleep(_POLL_SECONDS)


def describe_moment(folder: Path) -> str:
    """The phase that a run's files show: what was written last says what comes next."""
    if not (folder / "rollouts.db").exists():
        return "start"
    if any((folder / "checkpoints").glob(".tmp-*")):
        return "checkpoint"
    lines = _lines(folder / "metrics.jsonl")
    last = lines[-1] if lines else {"step": 0, "metrics": {}}
    evaluated = any(key.startswith("eval/") for key in last["metrics"])
    if not evaluated and last["step"] % EVALUATION["every"] == 0:
        return "evaluation"
    if "\ndata:" in (folder / "recipe.yaml").read_text():
        return "update"  # supervised training has no rollouts
    return "update" if _last_rollout_step(folder) > last["step"] else "rollout"


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def _step(folder: Path) -> int:
    lines = _lines(folder / "metrics.jsonl")
    return int(lines[-1]["step"]) if lines else 0


def _last_rollout_step(folder: Path) -> int:
    try:
        db = sqlite3.connect(f"file:{folder / 'rollouts.db'}?mode=ro", uri=True)
        try:
            return int(db.execute("SELECT COALESCE(MAX(step), 0) FROM rollouts").fetchone()[0])
        finally:
            db.close()
    except sqlite3.OperationalError:  # not yet written, or busy: the next look will tell
        return 0


def newest_checkpoint(folder: Path) -> int | None:
    """The newest checkpoint under a final name."""
    return max((int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*")), default=None)


def differences(left: Path, right: Path) -> list[str]:
    """In what two runs differ, bit for bit; times are left out. Empty if they are the same."""
    found: list[str] = []
    ours, theirs = _checkpoint_hashes(left), _checkpoint_hashes(right)
    found += [f"checkpoints/{name}" for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
    if _untimed_metrics(left) != _untimed_metrics(right):
        found.append("metrics.jsonl")
    for table in ("rollouts", "evaluation_rollouts"):
        if _rows(left, table) != _rows(right, table):
            found.append(f"rollouts.db: {table}")
    for folder in (left, right):
        leftovers = [path.name for path in (folder / "checkpoints").glob(".tmp-*")]
        found += [f"{folder.name}: leftover {name}" for name in leftovers]
    return found


def _checkpoint_hashes(folder: Path) -> dict[str, str]:
    root = folder / "checkpoints"
    files = {p for p in root.glob("step-*/**/*") if p.is_file()}
    hashes = {p.relative_to(root).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
    link = root / "best"
    return hashes | {"best": os.readlink(link) if link.is_symlink() else "none"}


def _untimed_metrics(folder: Path) -> list[str]:
    return [json.dumps({k: v for k, v in line.items() if k != "timing"}) for line in _lines(folder / "metrics.jsonl")]


def _rows(folder: Path, table: str, columns: str = "*") -> list[tuple[Any, ...]]:
    db = sqlite3.connect(folder / "rollouts.db")
    try:
        return db.execute(f"SELECT {columns} FROM {table} ORDER BY id").fetchall()
    finally:
        db.close()


def count_rows(folder: Path) -> dict[str, int]:
    """How much there was to compare."""
    return {
        "checkpoint files": len(_checkpoint_hashes(folder)),
        "metrics lines": len(_untimed_metrics(folder)),
        "training rollouts": len(_rows(folder, "rollouts")),
        "evaluation rollouts": len(_rows(folder, "evaluation_rollouts")),
    }
