"""Made-up trials with numbers that can be checked by hand."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.store.metric_names import ACCURACY, Metric
from posttrain.store.metrics import MetricsRow
from posttrain.sweeps.learning import TrialResult, rank_rows, read_trial, rows_part
from posttrain.sweeps.results import SweepResults

TASK = "stories/validation"


def evaluation(step: int, accuracy: float, **results: float) -> MetricsRow:
    info = {
        "n": 20.0,
        "accuracy": accuracy,
        "reward": accuracy + 0.1,
        "completion_length": 30.0,
        "format": 1.0,
    } | results
    return MetricsRow(step, {f"eval/{TASK}/{name}": value for name, value in info.items()}, {"evaluation_seconds": 3.0})


def trial_rows(accuracies: Sequence[float], step_seconds: float = 2.0) -> list[MetricsRow]:
    """Two updates between evaluations; KL and entropy follow the step."""
    rows = [evaluation(0, accuracies[0], kl_initial=0.0, entropy=1.0)]
    for k, accuracy in enumerate(accuracies[1:], start=1):
        for step in (2 * k - 1, 2 * k):
            timing = {"step_seconds": step_seconds, "generate_seconds": 0.5, "generate_tokens_per_second": 200.0}
            rows.append(MetricsRow(step, {"loss": 0.5, "trained_tokens": 80.0, "margin": 0.1 * step}, timing))
        rows.append(evaluation(2 * k, accuracy, kl_initial=0.05 * k, entropy=1.0 - 0.1 * k))
    return rows


def make_trial(row: str, seed: int, accuracies: Sequence[float], state: str = "finished") -> TrialResult:
    return read_trial(trial_rows(accuracies), row, seed, state)


def make_sweep(trials: Sequence[TrialResult], primary: Metric = ACCURACY, start: str = "tiny/sft") -> SweepResults:
    names = list(dict.fromkeys(trial.row for trial in trials))
    return SweepResults(
        title="sweep-test",
        description="A <test> of | tables.",
        command="posttrain sweep test.yaml --seeds 2",
        parts={"rows": rows_part(rank_rows(trials, names, primary), start, primary, {n: f"rl/{n}" for n in names})},
        file="rows: {a: {}, b: {}}",
        differences=["b (rl/b) differs from the base in: train.lr = 0.1 (base: 0.2)"],
    )


def two_rows() -> SweepResults:
    """``a``: 0.4 and 0.6 at the end, ``b``: 0.7 and 0.7; all start at 0.1."""
    return make_sweep(
        [
            make_trial("a", 0, [0.1, 0.3, 0.4]),
            make_trial("b", 0, [0.1, 0.5, 0.7]),
            make_trial("a", 1, [0.1, 0.5, 0.6]),
            make_trial("b", 1, [0.1, 0.6, 0.7]),
        ]
    )
