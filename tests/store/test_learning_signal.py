"""A run that cannot learn is recognized by its first metrics."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from posttrain.store.metrics import MetricsRow, learning_warnings

STEP = {"lr": 1e-4, "trained_tokens": 90.0}
EQUAL = STEP | {"reward": 0.0, "uniform_groups": 1.0, "advantage_std": 0.0, "grad_norm": 0.0}
LEARNS = STEP | {"reward": 0.2, "uniform_groups": 0.5, "advantage_std": 0.3, "grad_norm": 1.0}
SUPERVISED = STEP | {"grad_norm": 2.0, "weights_moved": 1.0}


def rows_of(steps: Sequence[dict[str, float]]) -> list[MetricsRow]:
    """An evaluation before the first step, then the steps."""
    evaluation = MetricsRow(0, {"eval/stories/validation/accuracy": 0.0})
    return [evaluation, *(MetricsRow(k, metrics) for k, metrics in enumerate(steps, start=1))]


@pytest.mark.parametrize(
    ("steps", "key", "cause"),
    [
        ([EQUAL | {"format": 0.0, "accuracy": 0.0}] * 3, "uniform_groups", "a model after SFT on this format"),
        ([EQUAL | {"format": 1.0, "accuracy": 0.0}] * 3, "uniform_groups", "Use easier problems"),
        ([EQUAL | {"format": 1.0, "accuracy": 1.0}] * 3, "uniform_groups", "use harder problems"),
        ([EQUAL | {"truncated": 0.95, "format": 0.0}] * 3, "uniform_groups", "raise rollout.max_tokens"),
        ([EQUAL | {"reward": 0.25}] * 3, "uniform_groups", "mean reward 0.250"),
        ([LEARNS | {"grad_norm": 0.0}] * 3, "grad_norm", "objective and reward weights are nonzero"),
        ([SUPERVISED | {"grad_norm": 0.0, "trained_tokens": 0.0}] * 3, "grad_norm", "posttrain data show"),
        ([SUPERVISED | {"weights_moved": 0.0}] * 10, "weights_moved", "The learning rate of 0.0001 is too small"),
    ],
)
def test_learning_warnings_run_that_cannot_learn_names_the_cause(
    steps: Sequence[dict[str, float]], key: str, cause: str
) -> None:
    (found,) = learning_warnings(rows_of(steps)).items()
    assert found[0] == key
    assert cause in found[1]
    assert learning_warnings(rows_of(steps[:-1])) == {}  # too early to say


@pytest.mark.parametrize(
    "steps",
    [
        [EQUAL, LEARNS, EQUAL, EQUAL, EQUAL],
        [LEARNS] * 3 + [EQUAL] * 30,  # later it may have learned everything
        [LEARNS | {"uniform_groups": 1.0}] * 3,  # groups of one answer, or advantages over the batch
        [SUPERVISED | {"weights_moved": 0.0}] * 9 + [SUPERVISED],
        [],
    ],
)
def test_learning_warnings_run_that_may_learn_is_empty(steps: Sequence[dict[str, float]]) -> None:
    assert learning_warnings(rows_of(steps)) == {}
