"""Train each recipe of a method once, with its own settings, for the curve on its page.

    python benchmarks/method_runs.py                       # every recipe of rl/, preference/ and distillation/
    python benchmarks/method_runs.py rl/gspo rl/grpo       # some of them

A page of docs/reference/methods shows the curve, the command and the metrics of exactly one of these runs
(`tools/write_methods.py`). A run is recorded with a hash of its recipe. It is trained again if the recipe changed, or
if its description names a metric that was not recorded. Runs are made one after the other, 15 to 60 CPU-seconds each.
`CONTRASTS` are further runs, whose curve is drawn next to that of the recipe. A recipe with a teacher in `runs/` has
that recipe trained first. Results go to benchmarks/results/method_runs.json.
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
# Recorded of every run that has them.
ALWAYS = ("reward", "clip_fraction", "completion_length", "margin", "chosen_reward", "rejected_reward")


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
    ),
    "preference/discopop": (
        Variant("preference/discopop", "published temperature", (("objective.temperature", "0.05"),)),
    ),
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
        SystemExit: the run was stopped, or a metric that its description names was never logged.
    """
    from training import kind_of_cpu  # takes torch, which the pages do without

    keys: dict[str, object] = {key.replace(".", "__"): float(value) for key, value in variant.overrides}
    recipe = load_recipe(variant.recipe)
    teacher = recipe_of_teacher(recipe)
    if teacher is not None:
        keys["teacher__name"] = str(trained_teacher(teacher, folder, shorter))
    started = time.process_time()
    name = variant.key.replace("/", "-").replace(" ", "-")
    run = posttrain.train(variant.recipe, runs_dir=folder, run=name, progress=False, **keys, **shorter)
    steps = run.recipe["train"]["steps"]
    if run.metrics[-1]["step"] != steps:
        last = run.metrics[-1]["step"]
        raise SystemExit(f"{variant.key}: the run was stopped after step {last:g} of {steps}")
    curve = [
        {"step": int(point["step"])} | {part: _rounded(point[part]) for part in ACCURACY} for point in run.evaluations
    ]
    watched = watched_metrics(recipe.description)
    metrics = {name: series_of(name, run.metrics, run.evaluations) for name in (*watched, *ALWAYS)}
    missing = [name for name in watched if not metrics[name]]
    if missing:
        raise SystemExit(f"{variant.key}: its description says to watch {', '.join(missing)}, which it never logged")
    return {
        "command": variant.command,
        "recipe": variant.fingerprint(),
        "seed": 0,
        "questions": int(run.evaluations[0]["n"]),
        "curve": curve,
        "metrics": {name: series for name, series in metrics.items() if series},
        "cpu_seconds": round(time.process_time() - started, 1),
        "processor": kind_of_cpu(),
        "version": posttrain.__version__,
    }


def series_of(
    name: str, rows: Sequence[Mapping[str, float]], evaluations: Sequence[Mapping[str, float]]
) -> list[list[float]]:
    """Return ``[step, value]`` of a metric: of updates if it changes there, otherwise of evaluations.

    Answers that are sampled once, before training, have the same value at every update.
    """
    found = []
    for source in (rows, evaluations):
        series = [[int(row["step"]), _rounded(row[name])] for row in source if name in row]
        if len({value for _, value in series}) > 1:
            return series
        found.append(series)
    return found[0] or found[1]


def recipe_of_teacher(recipe: Recipe) -> str | None:
    """Return the packaged recipe that trains a recipe's teacher (``runs/tiny-grpo``); None if it needs none."""
    if recipe.teacher is None or not recipe.teacher.name.startswith("runs/"):
        return None
    run = recipe.teacher.name.removeprefix("runs/")
    (name,) = (name for name in recipe_names() if name.replace("/", "-") == run)
    return name


def trained_teacher(name: str, folder: Path, shorter: Mapping[str, object]) -> Path:
    """Return the run of a teacher's recipe below ``folder``, which is trained if it is not there."""
    run = name.replace("/", "-")
    if not (folder / run).is_dir():
        posttrain.train(name, runs_dir=folder, run=run, progress=False, **shorter)
    return folder / run


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def as_text(recorded: Mapping[str, Any]) -> str:
    """Return JSON with the points of a series in one line."""
    text = json.dumps(recorded, indent=1, sort_keys=True)
    return re.sub(r"\[\s*\[.*?\]\s*\]", lambda series: "".join(series[0].split()), text, flags=re.DOTALL) + "\n"


def is_recorded(variant: Variant, run: Mapping[str, Any] | None) -> bool:
    """Check if a recorded run is of the recipe as it is, with the metrics that its description names."""
    if run is None or run["recipe"] != variant.fingerprint():
        return False
    return set(watched_metrics(load_recipe(variant.recipe).description)) <= run["metrics"].keys()


def record_missing(
    wanted: Sequence[Variant], results: Path, *, shorter: Mapping[str, object] | None = None
) -> list[str]:
    """Train those runs that ``results`` does not have for the recipe as it is; return their keys.

    The file is written after each run.
    """
    recorded: dict[str, Any] = {}
    if results.is_file():
        recorded = json.loads(results.read_text(encoding="utf-8"))
    made = []
    with tempfile.TemporaryDirectory() as folder:
        for variant in wanted:
            if is_recorded(variant, recorded.get(variant.key)):
                continue
            recorded[variant.key] = record(variant, Path(folder), shorter or {})
            made.append(variant.key)
            results.write_text(as_text(recorded), encoding="utf-8")
            last = recorded[variant.key]["curve"][-1]
            seconds = recorded[variant.key]["cpu_seconds"]
            print(
                f"{variant.key}: {last['accuracy']:.1%} after {last['step']} steps, {seconds} CPU-seconds", flush=True
            )
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
