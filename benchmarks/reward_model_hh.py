"""A reward model small enough for two cores on real preferences: held-out pairs of HH-RLHF, several seeds.

    python benchmarks/reward_model_hh.py --data FOLDER      # with train.jsonl.gz and test.jsonl.gz

Trains ``tiny/lm-hh`` once (a language model of these dialogues, from nothing) and ``tiny/rm-hh`` from it once per seed,
then measures each on all test dialogues: accuracy, and how much better than taking the longer or the shorter answer
(whichever does better on the test pairs themselves). The intervals of the seeds' mean resample test pairs; they say
nothing about other training data. Runs that exist are not made again. Writes benchmarks/results/reward_model_hh.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from pathlib import Path
from typing import Any

from posttrain.cli import main as posttrain
from posttrain.data.base import Task
from posttrain.data.hh_rlhf import hh_rlhf
from posttrain.evaluation.reward_models.measures import evaluate_reward_model
from posttrain.evaluation.reward_models.scoring import open_reward_model
from posttrain.evaluation.statistics import item_interval, paired_bootstrap
from posttrain.runs.models import find_source

RESULTS = Path(__file__).resolve().parent / "results" / "reward_model_hh.json"


def train(recipe: str, run: str, runs_dir: Path, overrides: list[str]) -> None:
    if (runs_dir / run / "results.json").is_file():
        return
    command = ["train", recipe, "--run", run, "--runs-dir", str(runs_dir), "--quiet", *overrides]
    if (runs_dir / run / "recipe.yaml").is_file():
        command.append("--resume")
    if posttrain(command) != 0:
        raise SystemExit(f"training {run} failed")


def measure(run: str, runs_dir: Path, task: Task) -> Any:
    found = evaluate_reward_model(open_reward_model(find_source(run, runs_dir)), task, n=len(task.examples))
    r = found.results
    accuracy = f"{r['pair_accuracy']:.1%} [{r['pair_accuracy_low']:.1%}, {r['pair_accuracy_high']:.1%}]"
    print(f"{run}: {accuracy}, n {r['n']:.0f}", flush=True)
    return found


def summarize(seeds: list[Any]) -> dict[str, float]:
    """The mean of the seeds over the pairs that all of them scored."""
    correct = [{item["id"]: item["right"] for item in found.items} for found in seeds]
    items = {item["id"]: item for item in seeds[0].items}
    shared = sorted(set.intersection(*(set(r) for r in correct)))
    mean = [statistics.fmean(r[i] for r in correct) for i in shared]
    sign = [len(items[i]["chosen"]) - len(items[i]["rejected"]) for i in shared]
    longer = [0.5 if d == 0 else float(d > 0) for d in sign]
    baseline = longer if statistics.fmean(longer) >= 0.5 else [1.0 - x for x in longer]
    gain = paired_bootstrap(baseline, mean)
    low, high = item_interval(mean)
    return {
        "pair_accuracy": statistics.fmean(mean),
        "pair_accuracy_low": low,
        "pair_accuracy_high": high,
        "length_baseline": statistics.fmean(baseline),
        "gain_over_length": gain.difference,
        "gain_over_length_low": gain.low,
        "gain_over_length_high": gain.high,
        "stdev_over_seeds": statistics.stdev(f.results["pair_accuracy"] for f in seeds) if len(seeds) > 1 else 0.0,
        "n": float(len(shared)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of train.jsonl.gz and test.jsonl.gz")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    path = ["--task.path", str(arguments.data / "train.jsonl.gz")]
    train("tiny/lm-hh", "tiny-lm-hh", arguments.runs_dir, path)
    test = hh_rlhf(split="test", path=str(arguments.data / "test.jsonl.gz"))
    base = ["--model.name", str(arguments.runs_dir / "tiny-lm-hh"), *path]
    found = []
    for seed in arguments.seeds:
        run = f"tiny-rm-hh-seed{seed}"
        train("tiny/rm-hh", run, arguments.runs_dir, [*base, "--train.seed", str(seed)])
        found.append(measure(run, arguments.runs_dir, test))
    mean = summarize(found)
    print(json.dumps(mean, indent=1))
    rows = [{"seed": s, "results": f.results, "kinds": f.kinds} for s, f in zip(arguments.seeds, found, strict=True)]
    RESULTS.write_text(json.dumps({"machine": platform.platform(), "mean": mean, "seeds": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
