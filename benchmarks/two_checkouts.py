"""Comparison of two checkouts of the project, bit for bit: losses, metrics, rollouts and weights.

    python benchmarks/two_checkouts.py BEFORE AFTER                  # all workloads, 20 steps; the demo with 3 seeds
    python benchmarks/two_checkouts.py BEFORE AFTER --only dpo --steps 4 --seeds 0
    python benchmarks/two_checkouts.py BEFORE AFTER --only grpo ppo  # with every row in the update, as before

Each workload is the same command with the sources of one checkout and then of the other, on this machine, with one
thread. Metrics and columns of records are compared under the names that they have after: ``RENAMED`` says what was
called otherwise before, and is total, so a name that only one side knows is a difference, as is an entry of the table
that no longer renames anything (once all workloads have run). Numbers are compared by their text or bytes; only those
of ``REGROUPED``, whose sum was regrouped on purpose, may differ by 1e-6 relative. Exit code 1 where anything differs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

COMMAND = "import sys; from posttrain.cli import main; sys.exit(main())"
# A name before -> the name after, of metrics, of columns of records and of tensors.
RENAMED: dict[str, str] = {
    "clip_share": "clip_fraction",
    "value_clip_share": "value_clip_fraction",
    "mismatch_kl": "kl_sampler",
    "kl_from_start": "kl_initial",
}
# Options of a command before -> after.
RENAMED_OPTIONS: dict[str, str] = {}
# Options of a workload that only the later checkout has, at which it computes what the earlier one did.
NEW_OPTIONS: dict[str, list[str]] = {}
REGROUPED: frozenset[str] = frozenset()
TOLERANCE = 1e-6
Argument = Callable[[int], list[str]]


def _short(recipe: str) -> Argument:
    return lambda steps: [
        *("train", recipe, "--run", "it", "--quiet", "--train.steps", str(steps), "--train.save_every", str(steps)),
        *("--eval.num_examples", "32", "--eval.every", str(max(1, steps // 2))),
    ]


WORKLOADS: dict[str, Argument] = {
    "sft": _short("tiny/sft"),
    "grpo": _short("tiny/grpo-demo"),
    "ppo": _short("rl/ppo"),
    "dpo": _short("preference/dpo"),
    "rm": _short("tiny/rm"),
    "sae": lambda steps: [
        *("sae", "train", "tiny/sae", "--run", "it", "--quiet", "--yes", "--train.steps", str(steps)),
        *("--train.save_every", str(steps), "--eval.every", str(steps), "--activations.task.size", "256"),
        *("--train.batch", "512", "--eval.rows", "2048"),
    ],
}


def run(checkout: Path, arguments: Sequence[str], folder: Path, renamed: dict[str, str]) -> None:
    """One command with the sources of a checkout; its runs go to ``folder``."""
    environment = os.environ | {"PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    words = [renamed.get(word, word) for word in arguments]
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *words, "--runs-dir", str(folder)],
        env=environment,
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"{checkout}: {' '.join(words)}\n{done.stderr}")


class Comparison:
    """Collects in what the records of two checkouts differ, and which renamings were needed."""

    def __init__(self) -> None:
        self.used: set[str] = set()
        self.compared = 0

    def new_name(self, name: str) -> str:
        """The name after of a name before; paths such as ``eval/task/name`` by their last part."""
        head, slash, last = name.rpartition("/")
        if last in RENAMED:
            self.used.add(last)
        return f"{head}{slash}{RENAMED.get(last, last)}"

    def records(self, before: dict[str, Any], after: dict[str, Any], place: str) -> list[str]:
        """Names on one side only, and values that differ."""
        old = {self.new_name(name): value for name, value in before.items()}
        lines = [f"{place}: {name} is on one side only" for name in sorted(old.keys() ^ after.keys())]
        for name in sorted(old.keys() & after.keys()):
            self.compared += 1
            if not _same(name, old[name], after[name]):
                lines.append(f"{place}: {name} was {old[name]!r:.80} and is {after[name]!r:.80}")
        return lines

    def runs(self, before: Path, after: Path) -> list[str]:
        """In what two run directories differ; times are left out."""
        lines = []
        for read in (metrics_of, rollouts_of, weights_of):
            old, new = read(before), read(after)
            place = f"{before.name}, {read.__name__.removesuffix('_of')}"
            if len(old) != len(new):
                lines.append(f"{place}: {len(old)} records before, {len(new)} after")
            for row, (ours, theirs) in enumerate(zip(old, new, strict=False)):
                lines += self.records(ours, theirs, f"{place} {row}")
        return lines


def _same(name: str, before: Any, after: Any) -> bool:
    if name.rpartition("/")[2] in REGROUPED:
        return math.isclose(float(before), float(after), rel_tol=TOLERANCE)
    return repr(before) == repr(after)  # equal texts of floats are equal bits; nan equals nan


def metrics_of(run_folder: Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl`` without what the clock measured."""
    lines = (run_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{"step": row["step"]} | row["metrics"] for row in map(json.loads, lines)]


def rollouts_of(run_folder: Path) -> list[dict[str, Any]]:
    """Every row of every table that holds answers."""
    path = run_folder / "rollouts.db"
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = []
    base = sqlite3.connect(path)
    base.row_factory = sqlite3.Row
    try:
        for table in ("rollouts", "evaluation_rollouts"):
            rows += [dict(row) for row in base.execute(f"SELECT * FROM {table} ORDER BY id")]
    finally:
        base.close()
    return rows


def weights_of(run_folder: Path) -> list[dict[str, Any]]:
    """The bytes of every tensor of the last checkpoint, the optimizer's included, file by file."""
    newest = max((run_folder / "checkpoints").glob("step-*"), key=lambda path: path.name)
    files = []
    for path in sorted(newest.rglob("*.safetensors")):
        with safe_open(path, framework="np") as tensors:  # type: ignore[no-untyped-call]
            files.append({name: tensors.get_tensor(name).tobytes() for name in tensors.keys()})  # noqa: SIM118
    return files


def compare(before: Path, after: Path, names: Sequence[str], steps: int, seeds: Sequence[int]) -> list[str]:
    """All differences between two checkouts; prints a line for each workload."""
    comparison, lines = Comparison(), []
    tasks = {name: WORKLOADS[name](steps) for name in names if name != "demo"}
    if "demo" in names:
        tasks |= {f"demo, seed {seed}": ["demo", "--seed", str(seed), "--quiet"] for seed in seeds}
    for name, arguments in tasks.items():
        with tempfile.TemporaryDirectory() as scratch:
            sides = [Path(scratch) / side for side in ("before", "after")]
            for checkout, side, renamed in zip((before, after), sides, ({}, RENAMED_OPTIONS), strict=True):
                side.mkdir()
                added = NEW_OPTIONS.get(name, []) if side.name == "after" else []
                run(checkout, [*arguments, *added], side, renamed)
            runs = sorted({path.parent.name for side in sides for path in side.glob("*/metrics.jsonl")})
            assert runs, f"{name} left no run behind"
            count, own = comparison.compared, []
            for run_name in runs:
                own += comparison.runs(sides[0] / run_name, sides[1] / run_name)
        print(f"{name}: {comparison.compared - count:,} values, {len(own)} differences", flush=True)
        lines += [f"{name}: {line}" for line in own]
    if set(names) == {"demo", *WORKLOADS}:
        lines += [f"RENAMED: {name} renames nothing" for name in sorted(RENAMED.keys() - comparison.used)]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a checkout of the project")
    parser.add_argument("after", type=Path, help="another one")
    choices = ["demo", *WORKLOADS]
    parser.add_argument("--only", nargs="+", choices=choices, default=choices)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    before, after = arguments.before.resolve(), arguments.after.resolve()
    lines = compare(before, after, arguments.only, arguments.steps, arguments.seeds)
    print("\n".join(lines[:50]) if lines else "the same numbers, bit for bit")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
