"""Every method that is compared learns: minutes of training each, so in the slow suite.

The rows are in two files next to this one. Asserted are means over three seeds of
held-out accuracy (greedy, 200 problems) and, for preferences, of the margin.
"""

from __future__ import annotations

import statistics
from functools import cache
from pathlib import Path

import pytest

from posttrain.runs.launch import RunStart, launch
from posttrain.store.metrics import MetricsLog
from posttrain.sweeps.plan import SweepPlan, load_sweep

HERE = Path(__file__).parent
SEEDS = (0, 1, 2)
STEPS = 20
EVAL = [("eval.every", str(STEPS)), ("eval.num_examples", "200"), ("eval.num_kl_prompts", "0")]
POLICY_GRADIENT = [("train.steps", str(STEPS)), *EVAL]
# half of the pairs, each seen once
PREFERENCE = [
    ("train.steps", str(STEPS)),
    ("train.ppo_epochs", "1"),
    ("train.num_minibatches", str(STEPS)),
    ("rollout.num_prompts", str(24 * STEPS)),
    *EVAL,
]
# of all held-out problems, how many more are right afterwards; measured gains lie well above
GAIN = 0.3
# times as many updates, and the gain then: GSPO's published clip range closes early on answers this short
SLOW_LEARNERS = {"sdpo": (3, 0.2), "gspo": (3, 0.1), "gspo-token": (3, 0.1)}


@cache
def plan_of(name: str) -> SweepPlan:
    overrides = POLICY_GRADIENT if name == "policy_gradient" else PREFERENCE
    plan = load_sweep(str(HERE / f"{name}.yaml"), overrides, folder="unused")
    for trial in plan.trainings:
        if trial.row == "rejection-sampling":  # as many answers as the others, all at once
            trial.recipe.rollout.num_prompts, trial.recipe.train.num_minibatches = 8 * STEPS, STEPS
            trial.recipe.train.ppo_epochs = 1
        trial.recipe.train.steps = STEPS * SLOW_LEARNERS.get(trial.row, (1, GAIN))[0]
    return plan


def methods_of(name: str) -> list[str]:
    return [method.name for method in plan_of(name).rows]


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that all cells start from: it knows the format and mostly guesses."""
    plan = plan_of("policy_gradient")
    assert plan.start is not None
    result = launch(plan.start.recipe, RunStart(root=tmp_path_factory.mktemp("start"), name="start"))
    return result.folder / "checkpoints" / f"step-{result.step:06d}"


def curve_of(plan: SweepPlan, method: str, seed: int, start: Path, root: Path) -> list[dict[str, float]]:
    """The metrics of one cell, row by row."""
    trial = next(trial for trial in plan.trainings if (trial.row, trial.seed) == (method, seed))
    trial.recipe.model.name = str(start)
    result = launch(trial.recipe, RunStart(root=root, name=trial.name))
    assert result.step == trial.recipe.train.steps
    return [row.metrics for row in MetricsLog(result.folder / "metrics.jsonl").read()]


def gain_of(rows: list[dict[str, float]]) -> float:
    found = [row["eval/stories/validation/accuracy"] for row in rows if "eval/stories/validation/accuracy" in row]
    assert found[0] < 0.15  # it could hardly do anything before
    return found[-1] - found[0]


@pytest.mark.slow
@pytest.mark.parametrize("method", methods_of("policy_gradient"))
def test_policy_gradient_raises_held_out_accuracy(method: str, start: Path, tmp_path: Path) -> None:
    plan = plan_of("policy_gradient")
    gains = [gain_of(curve_of(plan, method, seed, start, tmp_path)) for seed in SEEDS]
    assert statistics.fmean(gains) > SLOW_LEARNERS.get(method, (1, GAIN))[1], gains
    assert min(gains) > 0.05, gains


@pytest.mark.slow
@pytest.mark.parametrize("method", methods_of("preference"))
def test_preference_raises_margin_and_accuracy(method: str, start: Path, tmp_path: Path) -> None:
    """Pairs of right and wrong answers of the model itself; each is seen once, so margins are of unseen pairs."""
    plan = plan_of("preference")
    gains, rises = [], []
    for seed in SEEDS:
        rows = curve_of(plan, method, seed, start, tmp_path)
        gains.append(gain_of(rows))
        margins = [row["margin"] for row in rows if "margin" in row]
        assert len(margins) == STEPS
        rises.append(statistics.fmean(margins[-5:]) - statistics.fmean(margins[:5]))
    assert statistics.fmean(gains) > GAIN, gains
    assert min(gains) > 0.05, gains
    assert statistics.fmean(rises) > 0, rises
    assert min(rises) > 0, rises
