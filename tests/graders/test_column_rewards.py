"""Rewards in TRL's form: what they are given, what they log, and what None in their results means."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from posttrain import registry
from posttrain.errors import RewardFailure
from posttrain.graders.column_rewards import RewardLog, TrainingState, takes_columns
from posttrain.graders.rewards import BoundReward, bind_reward
from posttrain.recipes.sections import RewardComponent
from posttrain.registry import Entry
from posttrain.sampling.rollout import Attempt, Grade, Grader, RunExtent, build_grader
from posttrain.types import Call, Completion, Example, Message, Turn
from refusing import refuses


def reward_of(function: Callable[..., Any], name: str = "mine") -> BoundReward:
    return bind_reward(Entry("reward", name, function, {}))


def grader_of(*functions: Callable[..., Any], run_extent: RunExtent | None = None) -> Grader:
    rewards = [(f"r{number}", 2.0**number, reward_of(function)) for number, function in enumerate(functions)]
    template = registry.find("template", "r1_zero").bind({})()
    return Grader(template, tuple(rewards), None, num_rewards=len(rewards), run_extent=run_extent or RunExtent())


def example(prompt: str = "How many?", **fields: Any) -> Example:
    return Example("e/1", (Message("user", prompt),), **fields)


def attempt(text: str, given: Example | None = None, ids: tuple[int, ...] = (7, 2), **fields: Any) -> Attempt:
    completion = Completion(ids, (-1.0,) * len(ids), "stop")
    return Attempt(given or example(), "the prompt", text, completion, **fields)


def graded(*functions: Callable[..., Any], attempts: list[Attempt], **keys: Any) -> list[Grade]:
    return grader_of(*functions).grade(attempts, **keys)


def test_row_of_texts_gives_texts_with_ids_and_the_columns_of_the_row() -> None:
    seen: dict[str, Any] = {}

    def reward(
        prompts: Any, completions: Any, completion_ids: Any, answer: Any, level: Any, **rest: Any
    ) -> list[float]:
        seen.update(rest, prompts=prompts, completions=completions, ids=completion_ids, answer=answer, level=level)
        return [0.5, 1]

    first = example(answer="4", meta={"level": 3}, columns={"answer": "2 + 2 #### 4"})
    grades = graded(reward, attempts=[attempt("four", first), attempt("five", example(answer="5"), (9, 8, 2))])
    assert seen["prompts"] == ["the prompt"] * 2
    assert seen["completions"] == ["four", "five"]
    assert seen["ids"] == [[7, 2], [9, 8, 2]]
    assert seen["answer"] == ["2 + 2 #### 4", "5"], "as the row has it"
    assert seen["level"] == [3, None]
    assert {"trainer_state", "log_metric", "log_extra", "solution"} <= seen.keys()
    assert [(grade.reward, grade.parts) for grade in grades] == [(0.5, {"r0": 0.5}), (1.0, {"r0": 1.0})]


def test_row_with_messages_gives_messages_and_several_turns_with_their_calls() -> None:
    seen: list[Any] = []

    def reward(prompts: Any, completions: Any, **rest: Any) -> list[float]:
        seen.extend((prompts, completions))
        return [float(len(one[0]["content"])) for one in completions]

    talk = Example("e/1", (Message("system", "Be brief."), Message("user", "Hi")), is_conversation=True)
    calls = (Call("add", '{"a": 1}', "2", "ok"), Call("add", "a = 1", "no JSON", "malformed"))
    turns = (Turn("Let me see.", calls), Turn("Two."))
    grades = graded(reward, attempts=[attempt("Hello.", talk), attempt("Two.", talk, turns=turns)])
    assert [grade.reward for grade in grades] == [6.0, 11.0]
    prompts, completions = seen
    assert prompts[0] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert completions[0] == [{"role": "assistant", "content": "Hello."}]
    functions = [{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": "a = 1"}]
    assert completions[1] == [
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [{"type": "function", "function": function} for function in functions],
        },
        {"role": "tool", "name": "add", "content": "2"},
        {"role": "tool", "name": "add", "content": "no JSON"},
        {"role": "assistant", "content": "Two."},
    ]


@pytest.mark.parametrize(
    "function",
    [
        lambda completions: [0.0],
        lambda completion_ids, **kwargs: [0.0],
        lambda prompts, **kwargs: [0.0],
        lambda trainer_state, **kwargs: [0.0],
        lambda log_metric=None, **kwargs: [0.0],
    ],
)
def test_each_argument_of_trl_makes_the_form(function: Callable[..., Any]) -> None:
    assert takes_columns(function)
    assert [grade.reward for grade in graded(function, attempts=[attempt("x")])] == [0.0]
    assert not takes_columns(lambda text, **rest: 0.0)


def test_none_has_no_part_and_of_all_rewards_no_score() -> None:
    def even(completions: list[str], **columns: Any) -> list[float | None]:
        return [1.0 if len(one) % 2 == 0 else None for one in completions]

    def short(completions: list[str], **columns: Any) -> list[float | None]:
        return [0.25 if len(one) < 3 else None for one in completions]

    grades = graded(even, short, attempts=[attempt("ab"), attempt("abcd"), attempt("a"), attempt("abc")])
    assert [grade.parts for grade in grades] == [{"r0": 1.0, "r1": 0.25}, {"r0": 1.0}, {"r1": 0.25}, {}]
    assert [grade.reward for grade in grades] == [1.5, 1.0, 0.5, 0.0]  # weights 1 and 2, as torch.nansum adds them
    assert [grade.skipped for grade in grades] == [[], ["r1"], ["r0"], ["r0", "r1"]]
    assert [grade.is_scored for grade in grades] == [True, True, True, False]


def test_measures_beside_the_recipes_rewards_score_nothing() -> None:
    registry.name_function(never)
    grader = build_grader(
        [RewardComponent(name=registry.name_function(never))], registry.find("template", "r1_zero").bind({})()
    )
    [grade] = grader.grade([attempt("<think> 4 </think> <answer> 4 </answer>", example(answer="4"))])
    assert grade.parts["correct"] == 1.0
    assert not grade.is_scored


def never(completions: list[str], **columns: Any) -> list[None]:
    return [None] * len(completions)


@pytest.mark.parametrize(
    "values", [(1, 0.5), np.array([1.0, 0.5]), torch.tensor([1.0, 0.5]), (x for x in (1, 0.5)), map(float, (1, 0.5))]
)
def test_results_are_whatever_trl_can_iterate_over(values: Any) -> None:
    grades = graded(lambda completions, **rest: values, attempts=[attempt("a"), attempt("b")])
    assert [grade.reward for grade in grades] == [1.0, 0.5]


def test_asynchronous_rewards_run_at_the_same_time() -> None:
    arrived: list[int] = []
    both: list[asyncio.Event] = []

    def waiting(number: int) -> Callable[..., Any]:
        async def reward(completions: list[str], **columns: Any) -> list[float | None]:
            if not both:
                both.append(asyncio.Event())
            arrived.append(number)
            if len(arrived) == 2:
                both[0].set()
            await asyncio.wait_for(both[0].wait(), 30)  # the first is done only when the second has begun
            return [float(number), None]

        return reward

    async def of_one(text: str) -> float:
        await asyncio.sleep(0)
        return len(text)

    attempts = [attempt("ab"), attempt("abc")]
    grades = grader_of(waiting(3), waiting(5)).grade(attempts)
    assert [grade.parts for grade in grades] == [{"r0": 3.0, "r1": 5.0}, {}]
    assert [grade.reward for grade in graded(of_one, attempts=attempts)] == [2.0, 3.0]

    async def in_a_notebook() -> list[Grade]:
        return graded(of_one, attempts=attempts)

    assert [grade.reward for grade in asyncio.run(in_a_notebook())] == [2.0, 3.0]


def test_asynchronous_reward_that_fails_is_named() -> None:
    async def broken(completions: list[str], **columns: Any) -> list[float]:
        raise ConnectionError("nobody answers")

    async def wrong(completions: list[str], **columns: Any) -> list[float]:
        return [1.0, 2.0]

    async def fine(completions: list[str], **columns: Any) -> list[float]:
        return [1.0]

    with refuses(RewardFailure, "'mine'", "ConnectionError: nobody answers"):
        graded(fine, broken, attempts=[attempt("x")])
    with refuses(RewardFailure, "2 results for 1 completions"):
        graded(wrong, attempts=[attempt("x")])
    with refuses(RewardFailure, "ZeroDivisionError"):
        graded(fine, lambda completions: 1 / 0, attempts=[attempt("x")])  # and nobody warns of the first


def test_trainer_state_counts_finished_updates() -> None:
    seen: list[TrainingState] = []

    def reward(completions: list[str], trainer_state: TrainingState) -> list[float]:
        seen.append(trainer_state)
        return [trainer_state.global_step / trainer_state.max_steps for _ in completions]

    grader = grader_of(reward, run_extent=RunExtent(max_steps=8, num_epochs=1.5, steps_per_epoch=4.0))
    assert [grade.reward for grade in grader.grade([attempt("x")], num_updates=2)] == [0.25]
    assert (seen[0].epoch, seen[0].num_train_epochs, seen[0].log_history) == (0.5, 2, [])
    assert [grade.reward for grade in graded(reward, attempts=[attempt("x")])] == [0.0], "outside of a run"


def test_logged_metrics_and_columns_come_with_the_answers() -> None:
    def reward(completions: list[str], log_metric: Any, log_extra: Any, **columns: Any) -> list[float]:
        log_metric("share", 0.25)
        log_metric("share", np.float32(0.75))
        log_metric("size", torch.tensor(3))
        log_extra("first", [one[0] for one in completions])
        log_extra("what", [{"n": (1, math.nan)}, torch.tensor([1, 2])])
        return [0.0] * len(completions)

    first, second = graded(reward, attempts=[attempt("ab"), attempt("cd")])
    assert first.logged == {"share": [0.25, 0.75], "size": [3.0]}
    assert second.logged == {}
    assert first.extra == {"first": "a", "what": {"n": [1, "nan"]}}
    assert second.extra == {"first": "c", "what": [1, 2]}


@pytest.mark.parametrize(
    ("log", "named"),
    [
        (lambda m, e: m("loss", 1.0), "'loss'"),
        (lambda m, e: m("reward/mine", 1.0), "'reward/mine'"),
        (lambda m, e: m("a\x1b[2J", 1.0), "log_metric"),
        (lambda m, e: m(3, 1.0), "log_metric"),
        (lambda m, e: m("mine", math.inf), "'mine'"),
        (lambda m, e: m("mine", "1"), "'mine'"),
        (lambda m, e: m("mine", None), "'mine'"),
        (lambda m, e: e("mine", ["a"]), "1 values for 2"),
        (lambda m, e: e("mine", "ab"), "'mine'"),
        (lambda m, e: e(None, ["a", "b"]), "log_extra"),
    ],
)
def test_what_cannot_be_logged_is_named(log: Callable[..., None], named: str) -> None:
    def reward(completions: list[str], log_metric: Any, log_extra: Any) -> list[float]:
        log(log_metric, log_extra)
        return [0.0] * len(completions)

    with refuses(RewardFailure, named):
        graded(reward, attempts=[attempt("a"), attempt("b")])


def test_texts_taken_for_messages_and_messages_for_texts_are_answered() -> None:
    talk = Example("e/1", (Message("user", "Hi"),), is_conversation=True)
    with refuses(RewardFailure, '"prompt": [{"role": "user"'):
        graded(lambda completions: [len(one[0]["content"]) for one in completions], attempts=[attempt("a")])
    with refuses(RewardFailure, 'completion[0]["content"]'):
        graded(lambda completions: [float("x" in one.lower()) for one in completions], attempts=[attempt("a", talk)])


def test_column_that_no_row_has_is_named() -> None:
    def reward(completions: list[str], levl: list[int]) -> list[float]:
        return [1.0]

    with refuses(RewardFailure, "levl", "'level'", "completion_ids"):
        reward_of(reward).grade(
            [{"prompt": "p", "text": "t", "example": example(meta={"level": 1}), "completion_ids": (1,), "turns": ()}],
            ["e/1"],
            RewardLog(1),
        )
