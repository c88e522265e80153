"""Speed-up of several training processes over one, in tokens per second.

    python benchmarks/processes.py                              # 1 and 2 processes of one thread, in turns
    python benchmarks/processes.py --processes 2 --sharding fsdp2 --rounds 5

The work is supervised training of the embedded model on dialogues of about 130 tokens that this script writes, 32 a
batch; every run is ``posttrain train`` from nothing with ``--scale.processes N``. A run's figure is the median over its
steps, the first three aside, of tokens per second of the wall clock: as many idle cores as processes are needed. One
round is a run of one process and a run of several, one after the other; the ratio is the median over rounds. Equal
losses of the first step are checked in every round. Writes results/processes.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from posttrain.store.metrics import MetricsLog
from training import kind_of_cpu

RESULTS = Path(__file__).parent / "results" / "processes.json"
UNCOUNTED = 3  # steps in which memory is still being asked for
WORDS = ("the", "river", "was", "cold", "and", "we", "walked", "for", "a", "long", "time", "before", "anyone", "said")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


def write_dialogues(path: Path, number: int = 512, num_words: int = 60) -> None:
    """Rows as of a file of demonstrations, of a length each that differs by a third."""
    with path.open("w", encoding="utf-8") as file:
        for i in range(number):
            lines = [
                WORDS[(i * 7 + n * (1 + i % 5)) % len(WORDS)] for n in range(num_words - (i * 13) % (num_words // 3))
            ]
            file.write(json.dumps({"prompt": f"Story {i}:", "response": " ".join(lines)}) + "\n")


def train(folder: Path, name: str, processes: int, sharding: str, steps: int) -> tuple[float, float]:
    """(tokens per second, loss of the first step) of a run."""
    settings: dict[str, Any] = {
        "model.name": "tiny",
        "task.name": "jsonl",
        "task.path": folder / "dialogues.jsonl",
        "data.batch_size": 32,
        "data.max_length": 512,
        "data.train_on": "all",
        "prompt.template": "plain",
        "objective": "cross_entropy",
        "train.steps": steps,
        "train.lr": 1e-4,
        "train.save_every": 0,
        "eval.every": 0,
        "scale.processes": processes,
        "scale.sharding": sharding if processes > 1 else "none",
    }
    recipe = folder / "recipe.yaml"
    recipe.write_text("{}\n", encoding="utf-8")
    words = [sys.executable, "-m", "posttrain", "train", str(recipe), "--quiet", "--run", name]
    for key, value in settings.items():
        words += [f"--{key}", str(value)]
    done = subprocess.run(words, cwd=folder, env=os.environ | ONE_THREAD, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
    rows = [row for row in MetricsLog(folder / "runs" / name / "metrics.jsonl").read() if "loss" in row.metrics]
    rate = statistics.median(row.timing["tokens_per_second"] for row in rows[UNCOUNTED:] or rows)
    return rate, rows[0].metrics["loss"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens per second of several training processes, compared with one.")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--sharding", choices=("none", "fsdp2"), default="none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    arguments = parser.parse_args()
    rounds = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_dialogues(folder / "dialogues.jsonl")
        for number in range(arguments.rounds):
            one, loss = train(folder, f"one-{number}", 1, "none", arguments.steps)
            several, same = train(folder, f"several-{number}", arguments.processes, arguments.sharding, arguments.steps)
            if abs(same - loss) > 1e-5 * abs(loss):
                raise SystemExit(f"the first step's loss is {loss} with one process and {same} with several")
            rounds.append({"one": one, "several": several, "ratio": several / one})
            print(f"one process {one:,.0f} tokens/s, {arguments.processes} processes {several:,.0f}")
    ratio = statistics.median(row["ratio"] for row in rounds)
    print(f"{arguments.processes} processes take {ratio:.2f} times the tokens per second of one")
    result = {
        "machine": platform.platform(),
        "cpu": kind_of_cpu(),
        "cores": os.cpu_count(),
        "unit": "tokens per second of the wall clock",
        **vars(arguments),
        "rounds": rounds,
        "ratio": ratio,
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
