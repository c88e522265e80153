"""Sweeps that are killed with SIGKILL and begun again, and what is left of their processes.

All processes that come of a command carry a mark in their environment, by which those that outlive it are found.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import killing
import yaml
from killing import Forking

_HERE = Path(__file__).parent
_MARK = "POSTTRAIN_KILLED"
_POLL_SECONDS = 0.01
_AT_WORK = (": started", ": goes on", "finished already")

# The grader for mathematics works in processes of its own: grandchildren of the command.
REWARDS = [{"name": "vowels:share_of_vowels"}, {"name": "correct", "mode": "math", "weight": 0.5}]
EVALUATION = {"every": 2, "n": 4, "max_tokens": 8}
BASE: dict[str, Any] = killing.grpo_recipe(4) | {
    "rewards": REWARDS,
    "rollout": {"prompts": 2, "group": 4, "max_tokens": 16},
    "train": {"steps": 4, "lr": 1e-2, "save_every": 1},
    "eval": EVALUATION,
}
COMPARISON: dict[str, Any] = {
    "base": {key: value for key, value in BASE.items() if key != "objective"},
    "rows": {"grpo": {"objective": "grpo"}, "reinforce": {"objective": "reinforce", "advantage": "centered"}},
    "seeds": 1,
}
STUDY: dict[str, Any] = {
    "start": killing.sft_recipe(4, save_every=1) | {"eval": EVALUATION},
    "rows": {
        "orm": {
            "task": {"name": "stories", "split": "train", "size": 200},
            "rewards": REWARDS,
            "rollout": {"prompts": 4, "group": 4, "max_tokens": 16},
            "objective": {"name": "outcome", "positions": "all"},
            "train": {"steps": 4, "lr": 1e-3, "save_every": 1},
            "eval": {"every": 0},
        }
    },
    "best_of_n": {"task": {"name": "stories", "split": "validation"}, "n": 4, "samples": 4, "max_tokens": 16},
    "seeds": 1,
}
FILES = {"methods": COMPARISON, "best of n": STUDY}


@dataclass(frozen=True)
class SweepKill:
    """One kill, ``after`` so many seconds, of a command that then had so many ``children``, theirs included.

    ``goes_on``: seconds until the same command was at work again, None where it did not get there. ``said``: what it
    said where it failed. ``orphans``: processes of the first that were there at the end of the second.
    """

    after: float
    children: int
    orphans: list[str]
    goes_on: float | None
    said: str
    differences: list[str]


@dataclass(frozen=True)
class Process:
    """What ``/proc`` says of one: a zombie has no line."""

    parent: int
    born: str
    marked: bool
    line: str


def _process_ids() -> list[int]:
    return [int(place.name) for place in Path("/proc").glob("[0-9]*")]


def _look(pid: int, mark: str) -> Process | None:
    place = Path(f"/proc/{pid}")
    try:
        fields = (place / "stat").read_text().rpartition(")")[2].split()
        marked = f"{_MARK}={mark}".encode() in (place / "environ").read_bytes().split(b"\0")
        line = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return Process(int(fields[1]), fields[19], marked, line)


class Starter(Forking):
    """A process that has imported everything and forks commands and their parts: see ``start_sweeps``."""

    def __init__(self) -> None:
        self.mark = uuid4().hex
        self._seen: set[tuple[int, str]] = set()  # process id and time of birth
        super().__init__("start_sweeps.py", {_MARK: self.mark, "PYTHONPATH": os.pathsep.join([str(_HERE), *sys.path])})

    def start(self, words: Sequence[str], folder: Path, output: Path) -> int:
        """Start ``posttrain`` with these words in ``folder``; returns its process id."""
        return self.fork([list(words), str(folder), str(output)])

    def living(self) -> dict[int, str]:
        """The processes that have come of it and work: command lines by process id.

        The mark is inherited, but a worker that grades is given an environment without it: that one is known as the
        child of a marked process, and once seen stays known, also when its parent has died.
        """
        processes = {pid: found for pid in _process_ids() if (found := _look(pid, self.mark)) is not None}
        parents = {pid for pid, process in processes.items() if process.marked}
        while more := {pid for pid, process in processes.items() if process.parent in parents} - parents:
            parents |= more
        born = {pid: processes[pid].born for pid in parents}
        self._seen |= set(born.items())
        ours = {pid for pid, process in processes.items() if (pid, process.born) in self._seen}
        return {pid: processes[pid].line for pid in ours if processes[pid].line and pid != self._process.pid}


class Sweep:
    """A sweep in a folder of its own."""

    def __init__(self, starter: Starter, kind: str, folder: Path) -> None:
        self.starter, self.kind, self.root = starter, kind, folder
        folder.mkdir(parents=True)
        (folder / "file.yaml").write_text(yaml.safe_dump(FILES[kind]))
        self.target, self.output = folder / "runs" / "x", folder / "output.txt"

    def start(self) -> int:
        return self.starter.start(["sweep", "file.yaml", "--run", "x", "--jobs", "2"], self.root, self.output)

    def finish(self) -> tuple[int, float | None]:
        """The command to its end: exit code, and seconds until it said that a part began or went on, or all are."""
        self.output.write_text("")
        began, goes_on = time.perf_counter(), None
        process = self.start()
        while True:
            ended = not killing._is_alive(process)
            if goes_on is None and any(word in self.output.read_text() for word in _AT_WORK):
                goes_on = time.perf_counter() - began
            if ended:
                return self.starter.wait(), goes_on
            time.sleep(_POLL_SECONDS)

    def leftovers(self) -> list[str]:
        return sorted(f"leftover {path.relative_to(self.root)}" for path in self.root.rglob(".tmp-*"))


def kill_once(whole: Sweep, folder: Path, moment: Callable[[Sweep, float], bool]) -> SweepKill:
    """A fresh one, killed as soon as ``moment`` of it and its seconds, begun again at once, compared with ``whole``."""
    sweep, starter = Sweep(whole.starter, whole.kind, folder), whole.starter
    began, process = time.perf_counter(), sweep.start()
    while not moment(sweep, time.perf_counter() - began) and killing._is_alive(process):
        time.sleep(_POLL_SECONDS)
    after = time.perf_counter() - began
    before = starter.living()
    if killing._is_alive(process):
        os.kill(process, signal.SIGKILL)
    starter.wait()
    code, goes_on = sweep.finish()
    orphans = [line for pid, line in starter.living().items() if pid in before]
    problems = [*differences(whole, sweep), *sweep.leftovers()]
    problems += [f"still at work: {line}" for line in starter.living().values()]
    said = "" if code == 0 else sweep.output.read_text()
    return SweepKill(after, len(before) - 1, orphans, goes_on, said, problems)


def differences(left: Sweep, right: Sweep) -> list[str]:
    """In what two finished ones differ, bit for bit; times and places are left out."""
    found = []
    for name in sorted({*_runs(left), *_runs(right)}):
        if not all((sweep.target / name / "recipe.yaml").is_file() for sweep in (left, right)):
            found.append(f"{name} is missing on one side")
            continue
        found += [f"{name}: {what}" for what in killing.differences(left.target / name, right.target / name)]
    for path in sorted(left.target.rglob("items.jsonl")):
        other = right.target / path.relative_to(left.target)
        if not other.is_file() or other.read_bytes() != path.read_bytes():
            found.append(str(path.relative_to(left.target)))
    return found


def _runs(sweep: Sweep) -> list[str]:
    return [str(path.parent.relative_to(sweep.target)) for path in sweep.target.rglob("recipe.yaml")]


def kill_at_random(kind: str, count: int, seed: int, folder: Path) -> list[SweepKill]:
    """``count`` kills at moments drawn evenly from as long as an undisturbed one takes.

    The second one is timed: during the first the starter still imports, by which many kills would come too late.
    """
    starter = Starter()
    try:
        for name in ("whole", "timed"):
            whole = Sweep(starter, kind, folder / name)
            began = time.perf_counter()
            code, _ = whole.finish()
            assert code == 0, whole.output.read_text()
        seconds = time.perf_counter() - began
        rng = random.Random(seed)
        ends = [rng.uniform(0.0, seconds) for _ in range(count)]
        return [kill_once(whole, folder / str(i), lambda _, now, end=end: now >= end) for i, end in enumerate(ends)]
    finally:
        starter.close()
