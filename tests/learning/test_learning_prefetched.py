"""GRPO on answers sampled one batch or two ago learns as much as with fresh ones (minutes).

`posttrain sweep staleness` is the same with three seeds and more updates.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.runs.launch import RunStart, launch
from posttrain.store.metrics import MetricsLog
from posttrain.sweeps.plan import load_sweep

EVALUATION = "eval/stories/validation"


@pytest.mark.slow
def test_staleness_reaches_the_synchronous_accuracy(tmp_path: Path) -> None:
    plan = load_sweep(
        "staleness", [("train.steps", "24"), ("eval.every", "24"), ("eval.num_examples", "200")], folder="unused"
    )
    assert plan.start is not None
    start = launch(plan.start.recipe, RunStart(root=tmp_path, name="start"))
    last: dict[str, dict[str, float]] = {}
    for method in ("synchronous", "one-behind", "two-behind"):
        trial = next(trial for trial in plan.trainings if (trial.row, trial.seed) == (method, 0))
        assert trial.recipe.rollout is not None
        trial.recipe.model.name = str(start.folder / "checkpoints" / f"step-{start.step:06d}")
        result = launch(trial.recipe, RunStart(root=tmp_path, name=method))
        rows = [row.metrics for row in MetricsLog(result.folder / "metrics.jsonl").read()]
        evaluations = [row for row in rows if f"{EVALUATION}/accuracy" in row]
        assert evaluations[-1][f"{EVALUATION}/accuracy"] - evaluations[0][f"{EVALUATION}/accuracy"] > 0.3
        last[method] = evaluations[-1]
    low, high = (last["synchronous"][f"{EVALUATION}/accuracy_{end}"] for end in ("low", "high"))
    for method in ("one-behind", "two-behind"):
        ahead = [last[method][f"{EVALUATION}/accuracy_{end}"] for end in ("low", "high")]
        assert ahead[1] >= low, f"sampled ahead ({method}): {ahead}, taking turns: {(low, high)}"
