"""Early stopping by the primary metric: when it ends a run, and that a resumed run ends at the same step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import posttrain as pt
from posttrain.errors import RecipeError, UsageError
from posttrain.store.metric_names import ACCURACY, metric_of
from posttrain.training.parts.ranking import EvaluationRanking
from refusing import refuses
from small_runs import Events, make_recipe, run, steps_of, watched

LOSS = metric_of("loss")


@pytest.mark.parametrize(
    ("metric", "values", "best", "stale"),
    [
        (ACCURACY, [0.1, 0.2, 0.3], 3, [0, 0, 0]),
        (ACCURACY, [0.3, 0.2, 0.1, 0.4, 0.3], 4, [0, 1, 2, 0, 1]),
        (ACCURACY, [0.3, 0.3, 0.3], 3, [0, 1, 2]),  # of equal steps the later is the best, and none is better
        (LOSS, [2.0, 1.0, 1.5], 2, [0, 0, 1]),
    ],
)
def test_stale_evaluations_are_counted_since_the_last_better_one(
    metric: Any, values: list[float], best: int, stale: list[int]
) -> None:
    ranking = EvaluationRanking(patience=2)
    counted, ended = [], []
    ranking.add(metric, {"t": {metric.name: 0.9}}, 0)  # the start is not ranked
    assert ranking.best is None
    for step, value in enumerate(values, start=1):
        ranking.add(metric, {"t": {metric.name: value}}, step)
        counted.append(ranking.stale)
        ended.append(ranking.has_waited())
    assert (ranking.best, counted) == ({"step": float(best), metric.name: values[best - 1]}, stale)
    assert ended == [count >= 2 for count in stale]
    assert not EvaluationRanking(None, ranking.best, 99).has_waited()


def test_patience_without_a_primary_metric_is_refused() -> None:
    with refuses(UsageError, "eval.patience", "eval.best"):
        EvaluationRanking(patience=1).add(None, {"t": {}}, 0)
    EvaluationRanking().add(None, {"t": {}}, 1)


def recipe_of(patience: int | None) -> Any:
    """SFT at a rate that changes nothing, so that every evaluation after the first is stale."""
    evaluation = {"every": 1, "num_examples": 4, "max_tokens": 8, "patience": patience}
    return make_recipe("sft", train={"steps": 8, "lr": 1e-12, "save_every": 2}, eval=evaluation)


def test_run_ends_after_patience_and_a_resumed_one_at_the_same_step(tmp_path: Path) -> None:
    events = Events()
    whole = watched(tmp_path / "whole", recipe_of(2), events)
    assert (whole.step, whole.reason) == (3, "finished")
    lines = [fact["message"] for fact in events.of("notice") if fact["message"].startswith("eval.patience")]
    assert len(lines) == 1
    assert "step 3 of 8" in lines[0]
    for stop in (1, 2):
        folder = tmp_path / f"stopped-{stop}"
        assert run(folder, recipe_of(2), stop_after=stop).reason == "interrupted"
        again = run(folder, recipe_of(2), resume=True)
        assert (again.step, again.reason) == (3, "finished")
        assert steps_of(folder) == steps_of(tmp_path / "whole")
        state = json.loads((folder / "checkpoints" / "step-000003" / "state.json").read_text())
        assert state["stale"] == 2
    done = run(tmp_path / "whole", recipe_of(2), resume=True)  # of a run that has ended: it stays so
    assert (done.step, done.reason) == (3, "finished")
    assert run(tmp_path / "long", recipe_of(None)).step == 8


def test_patience_without_evaluations_is_refused_before_a_model_is_loaded() -> None:
    for every in (0, -1):
        with refuses(RecipeError, "eval", "patience", "every"):
            make_recipe("sft", eval={"every": every, "patience": 3}, model={"name": "/nowhere"})
    with refuses(RecipeError, "patience"):
        make_recipe("sft", eval={"every": 1, "patience": 0})


def test_names_of_other_libraries_lead_to_patience() -> None:
    for name in ("early_stopping_patience", "early_stopping"):
        with refuses(RecipeError, "patience"):
            make_recipe("sft", eval={name: 3})


def test_several_callbacks_are_called_in_order_and_any_of_them_stops(tmp_path: Path) -> None:
    called: list[tuple[str, int]] = []

    def first(event: Any) -> None:
        called.append(("first", event.step))

    def second(event: Any) -> None:
        called.append(("second", event.step))
        if event.step == 2:
            event.stop()

    keys: dict[str, Any] = {"steps": 4, "eval__every": 0, "data__batch_size": 2}
    done = pt.train("tiny/sft", runs_dir=tmp_path, progress=False, on_step=[first, second], **keys)
    assert done.status.state == "stopped"
    assert called == [("first", 1), ("second", 1), ("first", 2), ("second", 2)]
