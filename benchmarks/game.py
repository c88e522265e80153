"""A game of two players learnt by reward, next to the best play: nim, from games that were played at random.

    python benchmarks/game.py                        # three seeds, six to twelve minutes each
    python benchmarks/game.py --seeds 0 --sft-steps 150 --grpo-steps 40

For each seed ``posttrain train contrib/nim/sft-nim.yaml``, and from there ``grpo-nim.yaml``. Told is what greedy play
wins of games that begin as those of training did, as none of training did, and with heaps larger than any that was met;
each next to what the best play wins of the same. Writes results/game.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain import registry
from posttrain.recipes.recipe import load_recipe
from posttrain.store.rollouts import RolloutStore

RESULTS = Path(__file__).parent / "results" / "game.json"
NIM = Path(__file__).resolve().parents[1] / "contrib" / "nim"
SFT, GRPO = str(NIM / "sft-nim.yaml"), str(NIM / "grpo-nim.yaml")
COMMAND = "import sys; from posttrain.cli import main; sys.exit(main())"
BEYOND = 49  # stones; training begins from half as many at most
STARTS = {"episodes/train": "trained", "episodes/validation": "held out"}


def train(recipe: str, folder: Path, run: str, words: Sequence[str]) -> float:
    """Seconds of the whole command."""
    started = time.monotonic()
    command = [sys.executable, "-c", COMMAND, "train", recipe, "--runs-dir", str(folder), "--run", run, "--quiet"]
    subprocess.run([*command, *words], check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - started


def played(run: Path, name: str, step: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the games of an evaluation: their number, the rewards of greedy and best play, and the share by heap."""
    store = RolloutStore(run / "rollouts.db", read_only=True)
    rows = [row for row in store.evaluations() if row.evaluation == name and row.step == step]
    game = registry.find("environment", "nim:nim").bind(options)()
    rewards: dict[int, list[float]] = {}
    best = []
    for row in rows:
        heap = int(row.prompt.split("\n\n")[1].split()[0])
        rewards.setdefault(heap, []).append(row.parts["environment"])
        best.append(float(game.wins[heap]))
    paid = [reward for of_heap in rewards.values() for reward in of_heap]
    by_heap = {str(heap): statistics.fmean(rewards[heap]) for heap in sorted(rewards)}
    return {"games": len(rows), "reward": statistics.fmean(paid), "best": statistics.fmean(best), "by_heap": by_heap}


def run_seed(seed: int, folder: Path, sft_steps: int | None, grpo_steps: int | None) -> dict[str, Any]:
    """The facts of one seed."""
    options = load_recipe(GRPO).environment.options
    words = ["--train.seed", str(seed)]
    short = [[] if steps is None else ["--train.steps", str(steps)] for steps in (sft_steps, grpo_steps)]
    seconds = {"sft": train(SFT, folder, "sft", [*words, *short[0]])}
    start = ["--model.name", str(folder / "sft")]
    seconds["grpo"] = train(GRPO, folder, "grpo", [*words, *start, *short[1]])
    last = grpo_steps or load_recipe(GRPO).train.steps
    results = {
        label: {
            "before": played(folder / "grpo", name, 0, options),
            "after": played(folder / "grpo", name, last, options),
        }
        for name, label in STARTS.items()
    }
    larger = [heap for heap in range(options["max_heap"] + 1, BEYOND + 1) if heap % (options["take"] + 1)]
    changed = options | {"max_heap": BEYOND, "held_out": larger}
    # The evaluation before the first step is of the model that it starts with.
    far = ["--environment", json.dumps({"name": "nim:nim", **changed}), "--rollout.max_turns", "12"]
    far += ["--rollout.max_tokens", "512", "--eval.max_tokens", "512", "--train.steps", "1"]
    train(GRPO, folder, "beyond", [*far, "--model.name", str(folder / "grpo")])
    results["larger"] = {"after": played(folder / "beyond", "episodes/validation", 0, changed)}
    return {"seed": seed, "seconds": seconds, "results": results}


def show(info: Mapping[str, Any]) -> str:
    """One line for one seed."""
    parts = []
    for label, result in info["results"].items():
        shares = " -> ".join(f"{one['reward'] / one['best']:.1%}" for one in result.values())
        parts.append(f"{label} {shares} of the best ({result['after']['games']} games)")
    return f"seed {info['seed']}: {'; '.join(parts)}; {sum(info['seconds'].values()):.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--sft-steps", type=int, help="fewer than the recipe has")
    parser.add_argument("--grpo-steps", type=int, help="fewer than the recipe has")
    arguments = parser.parse_args()
    rows = []
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(run_seed(seed, Path(folder), arguments.sft_steps, arguments.grpo_steps))
        print(show(rows[-1]), flush=True)
    content = {"machine": platform.platform(), "python": platform.python_version(), "seeds": rows}
    RESULTS.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
