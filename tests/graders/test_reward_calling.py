"""Calling rewards by parameter name, and what is said when one misbehaves."""

from __future__ import annotations

import asyncio
import functools
import math
import sys
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from posttrain import registry
from posttrain.errors import RewardFailure, UnknownComponent, UsageError
from posttrain.graders.rewards import BoundReward, bind_reward
from posttrain.recipes.sections import RewardComponent
from posttrain.registry import Entry, find
from posttrain.sampling.rollout import Attempt, build_grader
from posttrain.types import Completion, Example, Message
from posttrain.untrusted import declare_code
from refusing import refuses


def bound(function: Callable[..., Any], options: Mapping[str, Any] | None = None, where: str = "") -> BoundReward:
    return bind_reward(Entry("reward", function.__name__, function, {}), options, where)


GIVEN: dict[str, Any] = {
    "prompt": "1 + 1?",
    "text": "<think> </think> <answer> 2 </answer>",
    "extracted": "2",
    "answer": "2",
    "num_tokens": 7,
    "finish": "stop",
    "tags": ("think", "answer"),
    "grader": "numeric",
    "example": None,
    "meta": {"level": 3},
    "turns": (),
    "environment_reward": None,
    "environment_metrics": {},
    "folder": None,
}


def test_parameters_are_passed_by_name_in_any_order() -> None:
    def score(num_tokens: int, prompt: str, meta: Mapping[str, int], *, scale: float = 1.0) -> float:
        return scale * (100 * num_tokens + 10 * len(prompt) + meta["level"])

    assert bound(score)(GIVEN) == 763.0
    assert bound(score, {"scale": 2.0})(GIVEN) == 1526.0


def test_a_function_with_open_keywords_gets_everything() -> None:
    def score(num_tokens: int, **rest: Any) -> float:
        return num_tokens + 10 * len(rest)

    assert bound(score)(GIVEN) == 137.0


def test_a_reward_by_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shoutiness.py").write_text(
        "def shout(text, *, bonus: float = 1.0):\n    return bonus * text.isupper()\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    declare_code(["shoutiness:shout", "shoutiness:shuot"])
    reward = bind_reward(registry.find("reward", "shoutiness:shout"), {"bonus": 0.5})
    assert reward({**GIVEN, "text": "HEY"}) == 0.5
    assert reward({**GIVEN, "text": "hey"}) == 0.0
    with refuses(UnknownComponent, "'shout'"):
        registry.find("reward", "shoutiness:shuot")


def _positional_only(text: str, /) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda completion: 0.0, "asks for 'completion', which is not available.*Available: prompt, text, extracted"),
        (lambda extractd: 0.0, "Did you mean 'extracted'"),
        (_positional_only, "parameter 'text' cannot be passed by name"),
        (lambda *text: 0.0, "parameter 'text' cannot be passed by name"),
    ],
)
def test_unknown_parameters_are_refused_when_bound(function: Callable[..., float], message: str) -> None:
    with pytest.raises(UsageError, match=f"rewards.2: reward.*{message}"):
        bound(function, {}, "rewards.2")


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (True, 1.0),
        (3, 3.0),
        (Fraction(1, 4), 0.25),
        (np.float32(0.5), 0.5),
        (np.int64(-2), -2.0),
        (np.bool_(True), 1.0),
        (np.array(0.5), 0.5),
        (torch.tensor(0.5), 0.5),
        (torch.tensor(True), 1.0),
    ],
)
def test_every_kind_of_real_number_is_welcome(value: Any, number: float) -> None:
    def fine(text: str) -> Any:
        return value

    result = bound(fine)(GIVEN)
    assert result == number
    assert type(result) is float


async def waits(text: str) -> float:
    raise TimeoutError("too slow")


async def waits_for_nothing(text: str) -> None:
    await asyncio.sleep(0)


async def ends_later(text: str) -> float:
    sys.exit(3)


def ending(code: int | str | None) -> Callable[[str], float]:
    """A reward that ends the program with a code."""
    return lambda text: sys.exit(code)


def ends(text: str) -> float:
    sys.exit(3)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda text: 1 / 0, r"raised ZeroDivisionError: division by zero\. Correct it \(--traceback"),
        *((ending(code), "raised SystemExit") for code in (0, 1, None, "bye")),
        (lambda text: float("nan"), r"returned nan \(float\), which is not finite; have it return a number there"),
        (lambda text: 10**400, r"returned an integer of 1329 bits \(int\), which is not finite"),
        (lambda text: 1j, r"returned 1j \(complex\), which is no number"),
        (lambda text: "x" * 1000, r"returned 'x{79}\.\.\. \(str\)"),
        (lambda text: "1", r"returned '1' \(str\), which is no number; return a float$"),
        (lambda text: torch.ones(2), r"returned tensor.*, which is no number; return a float, such as value\.item\(\)"),
        (waits, r"raised TimeoutError: too slow\. Correct it"),
        (waits_for_nothing, r"returned None.*, which is no number; a path through it ends without return"),
        (ends_later, "raised SystemExit"),
    ],
)
def test_reward_that_fails_is_named_with_what_to_do(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(RewardFailure, match=f"^reward '.*', example 'a/1': the function {message}"):
        bound(function).grade([{"text": "x"}], ["a/1"])


@pytest.mark.parametrize("values", [[1.0, 2.0], (1, 2), np.array([1.0, 2.0]), torch.tensor([1.0, 2.0])])
def test_batched_reward_list_and_array_are_taken(values: Any) -> None:
    reward = BoundReward("mine", lambda text: values, ("text",), batched=True)
    assert reward.grade([{"text": "x"}] * 2, ["a", "b"]) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0], "returned 1 results for 2 completions; give one each"),
        (1.0, r"returned 1\.0 \(float\); 2 completions need a list of 2"),
        ("ab", r"returned 'ab' \(str\); 2 completions need a list of 2"),
        (np.ones((2, 2)), "which is no number"),
    ],
)
def test_batched_reward_of_another_length_is_named(values: Any, message: str) -> None:
    with pytest.raises(RewardFailure, match=f"reward 'mine'.*: the function {message}|{message}"):
        BoundReward("mine", lambda text: values, ("text",), batched=True).grade([{"text": "x"}] * 2, ["a", "b"])


def weighted(function: Callable[..., object], weight: float, monkeypatch: pytest.MonkeyPatch) -> float:
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


def test_control_c_in_a_reward_is_no_failure_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(text: str) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        weighted(stopped, 1.0, monkeypatch)


def test_rewards_that_cannot_be_averaged_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert weighted(lambda text: 1e15, 1.0, monkeypatch) == 1e15
    for text in ("1e308", "-1e308", "1.1e15", str(sys.float_info.max)):
        with refuses(RewardFailure, "example 'a/1'"):
            weighted(eval(f"lambda text: {text}"), 0.0, monkeypatch)
    with refuses(RewardFailure, "beyond 1e+15"):
        weighted(lambda text: 1e15, 10.0, monkeypatch)


def test_reward_in_the_form_of_trl_that_cannot_be_called_says_why():
    def levels(completions: list[str], levl: list[int]) -> list[float]:
        return [1.0] * len(completions)

    def messages(completions: list[Any], **columns: Any) -> list[float]:
        return [float(len(one[0]["content"])) for one in completions]

    given = {
        "prompt": "p",
        "text": "t",
        "example": Example("x", (Message("user", "q"),), answer="1", meta={"level": 3}),
        "completion_ids": (5, 6),
        "turns": (),
    }
    for function, message in [
        (levels, "'levels'"),
        (messages, "Prompts and completions"),
    ]:
        with refuses(RewardFailure, message):
            bind_reward(Entry("reward", "mine", function, {})).grade([given], ["x"])


def scaled(text: str, scale: float) -> float:
    return scale * len(text)


def scaled_columns(completions: list[str], scale: float, **columns: Any) -> list[float]:
    return [scale * len(one) for one in completions]


def keyword_columns(completions: list[str], *, scale: float) -> list[float]:
    return [scale * len(one) for one in completions]


class Scaled:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, text: str) -> float:
        return self.scale * len(text)

    def of_columns(self, completions: list[str], **columns: Any) -> list[float]:
        return [self.scale * len(one) for one in completions]


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        return function(*arguments, **keywords)

    return wrapper


TWO = 2.0


@pytest.mark.parametrize(
    "function",
    [
        functools.partial(scaled, scale=2.0),
        functools.partial(functools.partial(scaled), scale=2.0),
        functools.partial(scaled_columns, scale=2.0),
        functools.partial(keyword_columns, scale=2.0),
        functools.partial(lambda scale, text: scale * len(text), 2.0),
        Scaled(2.0),
        Scaled(2.0).of_columns,
        logged(functools.partial(scaled, scale=2.0)),
        lambda text, scale=TWO: scale * len(text),
    ],
)
def test_reward_whose_options_are_bound_asks_for_no_more(function: Callable[..., Any]) -> None:
    reward = bind_reward(Entry("reward", "mine", function, {}))
    example = Example("x", (Message("user", "q"),))
    given = {"prompt": "p", "example": example, "completion_ids": (1,), "turns": ()}
    assert reward.grade([given | {"text": text} for text in ("a", "abc")], ["x", "x"]) == [2.0, 6.0]


def test_reward_partial_that_is_not_finite_is_named() -> None:
    for function in (functools.partial(scaled, scale=math.nan), functools.partial(scaled_columns, scale=math.inf)):
        reward = bind_reward(Entry("reward", "mine", function, {}))
        given = {"prompt": "p", "text": "t", "example": Example("x", (Message("user", "q"),))}
        given |= {"completion_ids": (1,), "turns": ()}
        with pytest.raises(RewardFailure, match=r"reward 'mine', example 'a/1': the function returned (nan|inf)"):
            reward.grade([given], ["a/1"])


def test_reward_class_is_refused_with_its_object_and_a_slip_with_a_default_by_its_name() -> None:
    with refuses(UsageError, "rewards.0", "'Scaled'"):
        bound(Scaled, {}, "rewards.0")
    with refuses(UsageError, "'answer'"):
        bound(lambda text, anwser=None: 0.0)
