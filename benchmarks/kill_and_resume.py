"""Runs that are killed with SIGKILL and resumed, compared bit for bit with undisturbed ones.

    python benchmarks/kill_and_resume.py              # 20 kills each: GRPO, SFT, GRPO in passes
    python benchmarks/kill_and_resume.py --kind sft --kills 5 --seed 7

Each run is `posttrain train` in an interpreter of its own (`--resume` after a kill). The moments are
random; most are aimed at a phase that the run's files show: rollout, update, checkpoint write,
evaluation, or the first instants after a start. "GRPO in passes" makes four optimizer steps per
rollout batch and saves after every third. Compared are the checkpoints' files (weights, optimizer,
state, rollout buffer), the link to the best one, metrics without times, and every column of every
rollout. Results go to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "crash"))
import killing

RESULTS = Path(__file__).parent / "results"


def measure(kind: str, steps: int, num_kills: int, seed: int, folder: Path) -> dict[str, Any]:
    """One undisturbed and one killed run; prints a line per kill."""
    recipe, whole, cut = folder / "recipe.yaml", folder / "whole", folder / "cut"
    recipe.write_text(yaml.safe_dump(killing.RECIPES[kind](steps)))
    starter = killing.Interpreters()
    try:
        seconds = killing.run_undisturbed(starter, recipe, whole)
        print(f"\n{kind}: {steps} steps, {seconds:.1f} s undisturbed\n")
        print(f"{'kill':>4}  {'aimed at':<12}{'met':<12}{'step':>6}{'newest checkpoint':>20}{'seconds':>10}")
        phases = killing.phases_to_aim_at(kind, num_kills)
        kills = killing.run_with_kills(starter, recipe, cut, phases, seed)
    finally:
        starter.close()
    for number, kill in enumerate(kills, start=1):
        saved = "none" if kill.checkpoint is None else str(kill.checkpoint)
        print(f"{number:>4}  {kill.aimed:<12}{kill.met:<12}{kill.step:>6}{saved:>20}{kill.seconds:>10.1f}")
    found, counts = killing.differences(whole, cut), killing.count_rows(whole)
    print(f"\ncompared {', '.join(f'{count} {name}' for name, count in counts.items())}")
    print("equal bit for bit" if not found else "DIFFERENT: " + ", ".join(found))
    met = dict(sorted(Counter(kill.met for kill in kills).items()))
    info = {"kind": kind, "steps": steps, "kills": len(kills), "met": met, "differences": found, "compared": counts}
    return info | {"moments": [asdict(kill) for kill in kills]}


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill runs at random moments, resume them, compare bit for bit.")
    parser.add_argument("--kind", choices=list(killing.RECIPES), help="only this one")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    results = []
    for kind in [arguments.kind] if arguments.kind else killing.RECIPES:
        with tempfile.TemporaryDirectory() as folder:
            results.append(measure(kind, arguments.steps, arguments.kills, arguments.seed, Path(folder)))
    if arguments.kind is None:
        RESULTS.mkdir(exist_ok=True)
        content = {"machine": platform.platform(), "seed": arguments.seed, "runs": results}
        (RESULTS / "kill_and_resume.json").write_text(json.dumps(content, indent=1) + "\n")
    good = all(not r["differences"] and r["kills"] == arguments.kills for r in results)
    print("\nall equal" if good else "\nNOT ALL EQUAL, or fewer kills than asked for")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
