"""Train each recipe of a method once, with its own settings, for the curve on its page.

    python benchmarks/method_runs.py                       # every recipe of rl/, preference/ and distillation/
    python benchmarks/method_runs.py rl/gspo rl/grpo       # some of them

A page of docs/reference/methods shows the curve, the command and the metrics of exactly one of these runs
(`tools/write_methods.py`). A run is recorded with a hash of its recipe: what is recorded already is not trained again,
and a recipe that changed is. Runs are made one after the other, 15 to 60 CPU-seconds each. `CONTRASTS` are further
runs, whose curve is drawn next to that of the recipe. Results go to benchmarks/results/method_runs.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import posttrain
from posttrain.recipes.document import Document, recipe_names
from posttrain.recipes.recipe import Recipe, load_recipe
from posttrain.store.metric_names import METRICS

RESULTS = Path(__file__).parent / "results" / "method_runs.json"
FAMILIES = ("rl", "preference", "distillation")
DIGITS = 5  # significant, of a recorded number
ACCURACY = ("accuracy", "accuracy_low", "accuracy_high")
ALWAYS = ("reward", "clip_fraction")  # recorded of every run that has them


@dataclass(frozen=True)
class Variant:
    """A recipe with keys of the command line, as one run; ``label`` names it in a picture."""

    recipe: str
    label: str = ""
    overrides: tuple[tuple[str, str], ...] = ()

    @property
    def key(self) -> str:
        """The key of its run in the file of results."""
        return f"{self.recipe} {self.label}".strip()

    @property
    def command(self) -> str:
        """The command that makes the run."""
        keys = [f"--{key} {value}" for key, value in self.overrides]
        return " ".join(["posttrain train", self.recipe, *keys])

    def fingerprint(self) -> str:
        """Return a hash of what the recipe and those it extends say, without their descriptions.

        Defaults are not in it: a key that a later version adds changes no recorded run.
        """
        content = Document.load(Recipe, self.recipe).extend().override(self.overrides).content
        stated = {key: value for key, value in content.items() if key != "description"}
        return hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()[:16]


# Keys of the smallest form, which a test runs.
SMALLEST: dict[str, object] = {
    "train": {"steps": 2, "num_minibatches": 2},
    "rollout": {"num_prompts": 4, "group_size": 2, "max_tokens": 8},
    "eval": {"num_examples": 4, "every": 1, "max_tokens": 8},
}
# Runs that a page shows next to its own, by recipe.
CONTRASTS: dict[str, tuple[Variant, ...]] = {
    "rl/gspo": (
        Variant(
            "rl/gspo",
            "published clip",
            (("objective.clip_low", "3e-4"), ("objective.clip_high", "4e-4")),
        ),
    )
}


def variants(names: Sequence[str]) -> list[Variant]:
    """Return the runs of recipes: each as it is, then its contrasts."""
    return [variant for name in names for variant in (Variant(name), *CONTRASTS.get(name, ()))]


def watched_metrics(description: str) -> list[str]:
    """Return the metrics that a description names in backticks after "What to watch:", in order."""
    watch = description.partition("What to watch:")[2].partition("What goes wrong:")[0]
    return [name for name in dict.fromkeys(re.findall(r"`(\w+)`", watch)) if name in METRICS]


def record(variant: Variant, folder: Path, shorter: Mapping[str, object]) -> dict[str, Any]:
    """Train a run below ``folder`` and return what is kept of it; ``shorter``: keys for a test.

    Raises:
        SystemExit: the run was stopped.
    """
    from training import kind_of_cpu  # takes torch, which the pages do without

    started = time.process_time()
    name = variant.key.replace("/", "-").replace(" ", "-")
    keys: dict[str, object] = {key.replace(".", "__"): float(value) for key, value in variant.overrides}
    run = posttrain.train(variant.recipe, runs_dir=folder, run=name, progress=False, **keys, **shorter)
    rows = run.metrics
    steps = run.recipe["train"]["steps"]
    if rows[-1]["step"] != steps:
        raise SystemExit(f"{variant.key}: the run was stopped after step {rows[-1]['step']:g} of {steps}")
    curve = [
        {"step": int(point["step"])} | {part: _rounded(point[part]) for part in ACCURACY} for point in run.evaluations
    ]
    wanted = [*watched_metrics(load_recipe(variant.recipe).description), *ALWAYS]
    watched = {
        name: [[int(row["step"]), _rounded(row[name])] for row in rows if name in row] for name in dict.fromkeys(wanted)
    }
    return {
        "command": variant.command,
        "recipe": variant.fingerprint(),
        "seed": 0,
        "questions": int(run.evaluations[0]["n"]),
        "curve": curve,
        "metrics": {name: series for name, series in watched.items() if series},
        "cpu_seconds": round(time.process_time() - started, 1),
        "processor": kind_of_cpu(),
        "version": posttrain.__version__,
    }


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def record_missing(
    wanted: Sequence[Variant], results: Path, *, shorter: Mapping[str, object] | None = None
) -> list[str]:
    """Train those runs that ``results`` does not hold for the recipe as it is; return their keys.

    The file is written after each run.
    """
    recorded: dict[str, Any] = {}
    if results.is_file():
        recorded = json.loads(results.read_text(encoding="utf-8"))
    made = []
    for variant in wanted:
        if recorded.get(variant.key, {}).get("recipe") == variant.fingerprint():
            continue
        with tempfile.TemporaryDirectory() as folder:
            recorded[variant.key] = record(variant, Path(folder), shorter or {})
        made.append(variant.key)
        results.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        last = recorded[variant.key]["curve"][-1]
        seconds = recorded[variant.key]["cpu_seconds"]
        print(f"{variant.key}: {last['accuracy']:.1%} after {last['step']} steps, {seconds} CPU-seconds", flush=True)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="RECIPE")
    parser.add_argument("--smallest", action="store_true", help="two updates each, to see that it works")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    names = arguments.names or [name for name in recipe_names() if name.split("/")[0] in FAMILIES]
    shorter: Mapping[str, object] = {}
    if arguments.smallest:
        shorter = SMALLEST
    made = record_missing(variants(names), arguments.out, shorter=shorter)
    print(f"{len(made)} runs recorded in {arguments.out}")


if __name__ == "__main__":
    main()
