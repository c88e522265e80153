"""Every argument of the Python interface, given a value of a type that it cannot be, is refused in words."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import posttrain as pt
from posttrain.conformance.run import check_module
from posttrain.errors import PosttrainError, RunFailure, UsageError

SHORT: dict[str, Any] = {"steps": 1, "eval__every": 0, "num_prompts": 1, "group_size": 2, "rollout__max_tokens": 4}
SHORT |= {"progress": False}


class Thing:
    """No value, and no component."""


WRONG: dict[str, Any] = {
    "None": None,
    "whole number": 3,
    "number below 0": -1,
    "number": 1.5,
    "flag": True,
    "text": "x y",
    "bytes": b"x",
    "path": Path("nowhere/x"),
    "numbers": [3],
    "nothing": [],
    "list of None": [None],
    "list of bytes": [b"x"],
    "list of paths": [Path("x")],
    "mapping": {"a": 1},
    "mapping by numbers": {1: 2},
    "tuple": (1, 2),
    "object": Thing(),
    "type": int,
    "set": {1},
    "function": lambda: None,
    "not a number": math.nan,
    "tensor": torch.zeros(2),
}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return pt.train("tiny/grpo", run="one", runs_dir=tmp_path_factory.mktemp("runs"), **SHORT)


def refuse_or_take(call: Callable[[Any], object], name: str) -> int:
    """Call with every value; whatever raises must be an error of ours with a text. Return the number of refusals."""
    said = {}
    for kind, value in WRONG.items():
        try:
            call(value)
        except PosttrainError as error:
            said[kind] = str(error)
    assert [(name, kind) for kind, text in said.items() if not text.strip() or " object at 0x" in text] == []
    return len(said)


STATISTICS: dict[str, dict[str, Any]] = {
    "area_under_curve": {"positive": [1.0], "negative": [0.0]},
    "crossed_difference": {"outcomes": [[1.0, 0.0]] * 2, "baseline": [[0.0, 0.0], [1.0, 0.0]]},
    "crossed_mean": {"outcomes": [[1.0, 0.0], [0.0, 0.0]]},
    "detectable_difference": {"n": 3, "num_comparisons": 2, "power": 0.7, "level": 0.1},
    "holm": {"p_values": [0.1, 0.2]},
    "improvement_interval": {"scores": [[1.0, 2.0]], "baseline": [[0.0, 1.0]], "seed": 1, "num_resamples": 10},
    "interquartile_interval": {"scores": [[1.0, 2.0]], "seed": 1, "num_resamples": 10},
    "interquartile_mean": {"scores": [[1.0, 2.0]]},
    "mean_height": {"curve": [(0.0, 1.0), (1.0, 2.0)]},
    "probability_of_improvement": {"scores": [[1.0, 2.0]], "baseline": [[0.0, 1.0]]},
    "seed_difference": {"values": [1.0, 2.0], "baseline": [0.0, 1.0]},
    "steps_to": {"curve": [(0.0, 1.0), (1.0, 2.0)], "threshold": 0.5},
    "best_of_n": {"scores": [1.0, 2.0], "correct": [1.0, 0.0], "k": 1},
    "half_width": {"values": [1.0, 2.0]},
    "item_interval": {"values": [0.5, 1.0], "draws": 2.0},
    "majority_at_k": {"answers": ["1", None], "is_correct": [True, False], "k": 1},
    "mcnemar_p": {"only_a": 1, "only_b": 2},
    "pair_wins": {"chosen": [1.0], "rejected": [0.0]},
    "paired_bootstrap": {"a": [1.0, 0.0], "b": [0.0, 0.0], "seed": 1, "num_resamples": 10},
    "pass_at_k": {"n": 4, "num_correct": 1, "k": 2},
    "standard_error": {"values": [1.0, 2.0]},
    "summarize_seeds": {"values": [1.0, 2.0]},
    "wilson_interval": {"successes": 1, "n": 2, "z": 2.0},
}


def test_statistics_refuse_arguments_of_other_types_by_name() -> None:
    public = {name for name in pt.statistics.__all__ if inspect.isfunction(getattr(pt.statistics, name))}
    assert public == STATISTICS.keys()
    for name, arguments in STATISTICS.items():
        function = getattr(pt.statistics, name)
        function(**arguments)
        for argument in arguments:

            def call(value: Any, named: str = argument, others: Any = arguments, own: Any = function) -> object:
                return own(**{**others, named: value})

            refused = refuse_or_take(call, f"{name} {argument}")
            assert refused >= 12, (name, argument, refused)
        with pytest.raises(UsageError, match=rf"statistics\.{name}: "):
            function(**{**arguments, argument: object()})


def test_statistics_take_arrays_and_tensors_as_lists() -> None:
    values = [0.0, 1.0, 0.5]
    expected = pt.statistics.item_interval(values)
    assert (
        pt.statistics.item_interval(np.array(values)) == pt.statistics.item_interval(torch.tensor(values)) == expected
    )
    assert pt.pass_at_k(np.int64(4), np.int64(1), np.int64(2)) == 0.5
    assert pt.statistics.pair_wins(torch.tensor([1.0, 2.0]), [2.0, 2.0]) == [0.0, 0.5]
    assert pt.statistics.pair_wins([-math.inf], [0.0]) == [0.0]
    assert pt.statistics.item_interval([True, False]) == pt.statistics.wilson_interval(1, 2)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("wilson_interval", {"successes": 5, "n": 3}),
        ("wilson_interval", {"successes": -1, "n": 3}),
        ("item_interval", {"values": [3.0, 4.0]}),
        ("pass_at_k", {"n": 4, "num_correct": 5, "k": 1}),
        ("pass_at_k", {"n": 4, "num_correct": 1, "k": 5}),
        ("majority_at_k", {"answers": ["1"], "is_correct": [True, False], "k": 1}),
        ("mcnemar_p", {"only_a": -1, "only_b": 3}),
        ("paired_bootstrap", {"a": [1.0], "b": [1.0, 2.0]}),
        ("pair_wins", {"chosen": [math.nan], "rejected": [1.0]}),
        ("pair_wins", {"chosen": [1.0], "rejected": [1.0, 2.0]}),
    ],
)
def test_statistics_refuse_numbers_that_nothing_can_have(name: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=rf"statistics\.{name}: "):
        getattr(pt.statistics, name)(**arguments)


PARTS: dict[str, Callable[[Any], object]] = {
    "grade answer": lambda x: pt.grade(x, "1", grader="exact"),
    "grade gold": lambda x: pt.grade("1", x, grader="exact"),
    "grade grader": lambda x: pt.grade("1", "1", grader=x),
    "grade option": lambda x: pt.grade("1", "1", grader="numeric", tolerance=x),
    "losses option": lambda x: pt.losses.grpo(
        torch.zeros(1, 2), old_logprobs=torch.zeros(1, 2), advantages=torch.zeros(1), mask=torch.ones(1, 2), clip_low=x
    ),
    "losses mask": lambda x: pt.losses.grpo(
        torch.zeros(1, 2), old_logprobs=torch.zeros(1, 2), advantages=torch.zeros(1), mask=x
    ),
    "losses regularize": lambda x: pt.losses.regularize(x, mask=torch.ones(1, 2)),
    "conformance": check_module,
    "advantages": lambda x: pt.advantages.normalized(x),
    "aggregations": lambda x: pt.aggregations.constant(torch.ones(1, 2), length=x),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_refuse_arguments_of_other_types(name: str) -> None:
    assert refuse_or_take(PARTS[name], name) >= 10


def test_run_refuses_arguments_of_other_types(run: Any) -> None:
    for name, call in {
        "rollouts step": lambda x: run.rollouts(x),
        "rollouts evaluation": lambda x: run.rollouts(evaluation=x),
        "checkpoint": lambda x: run.checkpoint(x),
        "export weights": lambda x: run.export("", weights=x),
        "export merge": lambda x: run.export("", merge=x),
        "load_run": lambda x: pt.load_run(x),
    }.items():
        assert refuse_or_take(call, name) >= 18, name
    for evaluation in (3, [], b"x", int):
        with pytest.raises(UsageError, match=r"^evaluation: "):
            run.rollouts(evaluation=evaluation)


def test_sweep_refuses_a_specification_of_other_types() -> None:
    assert refuse_or_take(lambda x: pt.sweep(x, progress=False, steps="no number"), "spec") == len(WRONG)


@pytest.mark.parametrize("name", ["on_step", "on_evaluation", "on_checkpoint"])
@pytest.mark.parametrize("given", [int, float, str, dict, 3, [3], [print, dict], Path("x"), b"x", type("Mine", (), {})])
def test_callback_that_is_no_function_is_refused_before_the_run(name: str, given: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"^{name}: "):
        pt.train("tiny/grpo", **SHORT, **{name: given})
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ["optimizer", "prompt__template", "rollout__engine", "track", "task"])
@pytest.mark.parametrize("given", [Thing, lambda: None, lambda *_: 3])
def test_component_that_returns_something_else_is_refused_by_its_key(name: str, given: Any) -> None:
    value = [given] if name == "track" else given
    with pytest.raises((UsageError, RunFailure)) as refused:
        pt.train("tiny/grpo", **{**SHORT, name: value})
    assert str(refused.value).startswith(name.replace("__", "."))
