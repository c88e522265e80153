"""A reward that exits, is interrupted, or returns what cannot be averaged."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from posttrain.errors import RewardFailure
from posttrain.recipes.sections import RewardComponent
from posttrain.registry import find
from posttrain.sampling.rollout import Attempt, build_grader
from posttrain.types import Completion, Example, Message
from posttrain.untrusted import declare_code


def grade(function: Callable[..., object], weight: float, monkeypatch: pytest.MonkeyPatch) -> float:
    module = type(sys)("some_rewards")
    module.reward = function  # type: ignore[attr-defined]
    function.__module__ = "some_rewards"
    monkeypatch.setitem(sys.modules, "some_rewards", module)
    declare_code("some_rewards:reward")
    grader = build_grader(
        [RewardComponent(name="some_rewards:reward", weight=weight)], find("template", "r1_zero").bind({})()
    )
    example = Example("a/1", (Message("user", "?"),), "2")
    return grader.grade([Attempt(example, "?", "2", Completion((1,), (-1.0,), "stop"))])[0].reward


@pytest.mark.parametrize("code", [0, 1, None, "bye"])
def test_a_reward_does_not_end_the_program(code: object, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RewardFailure, match=r"example 'a/1': the function raised SystemExit"):
        grade(lambda text: sys.exit(code), 1.0, monkeypatch)  # type: ignore[arg-type]


def test_control_c_in_a_reward_is_no_failure_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(text: str) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        grade(stopped, 1.0, monkeypatch)


def test_rewards_that_cannot_be_averaged_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert grade(lambda text: 1e15, 1.0, monkeypatch) == 1e15
    for text in ("1e308", "-1e308", "1.1e15", str(sys.float_info.max)):
        with pytest.raises(RewardFailure, match=r"example 'a/1': the function returned .*beyond 1e\+15 nothing can be"):
            grade(eval(f"lambda text: {text}"), 0.0, monkeypatch)
    with pytest.raises(RewardFailure, match=r"the weighted sum of the rewards is 1e\+16; .*beyond 1e\+15"):
        grade(lambda text: 1e15, 10.0, monkeypatch)
