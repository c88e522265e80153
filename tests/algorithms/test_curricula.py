"""Curricula: what is open and what rests, from a step and a recorded history."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain import registry
from posttrain.algorithms.curricula import History, Mix, Tried, choose_mix
from posttrain.errors import RecipeError, RunFailure, UsageError

PARTS = ("easy", "middle", "hard")


def ask(name: str, step: int = 1, history: History | None = None, **options: Any) -> Mix:
    entry = registry.find("curriculum", name)
    return choose_mix(entry.bind(options, "curriculum"), step, history or History(PARTS))


def test_stages_begin_at_their_steps() -> None:
    plan = [
        {"step": 1, "weights": {"easy": 1}},
        {"step": 11, "weights": {"easy": 1, "middle": 3}},
        {"step": 20, "weights": {"hard": 0.5}},
    ]
    expected = {1: (1, 0, 0), 10: (1, 0, 0), 11: (1, 3, 0), 19: (1, 3, 0), 20: (0, 0, 0.5), 10**6: (0, 0, 0.5)}
    for step, factors in expected.items():
        assert ask("stages", step, stages=plan).factors == dict(zip(PARTS, factors, strict=True)), step


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ([{"step": 2, "weights": {"easy": 1}}], r"stages\.0\.step: the first stage begins at step 1.*got 2"),
        ([{"step": 1, "weights": {"easy": 1}}] * 2, r"stages\.1\.step: a stage begins after step 1.*got 1"),
        ([{"step": 1, "weights": {"esay": 1}}], r"stages\.0\.weights: there is no part 'esay'.*Did you mean 'easy'"),
        ([{"step": 1, "weights": {"easy": 0}}], r"stages\.0\.weights\.easy: a weight is a number above 0.*got 0"),
        ([{"step": 1, "weights": {}}], r"stages\.0\.weights: give the weights of the parts that are open"),
        ([{"step": 1, "weigths": {"easy": 1}}], r"stages\.0\.weigths: .*Did you mean 'weights'"),
        ([{"step": "1", "weights": {"easy": 1}}], r"stages\.0\.step: give the number of the step.*got '1'"),
        ([], "stages"),
    ],
)
def test_stages_that_are_none(plan: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        ask("stages", stages=plan)


def history_of(**batches: list[tuple[float, int]]) -> History:
    return History(PARTS, dict(batches))


def test_a_part_opens_when_the_one_before_succeeds_over_the_window() -> None:
    def opened(**batches: list[tuple[float, int]]) -> list[str]:
        mix = ask("by_success_rate", history=history_of(**batches), rate=0.5, window=2)
        return [part for part, factor in mix.factors.items() if factor]

    assert opened() == ["easy"]
    assert opened(easy=[(4, 4)]) == ["easy"], "one batch is no window of two"
    assert opened(easy=[(4, 4), (1, 4), (2, 4)]) == ["easy"], "3 of 8 in the last two"
    assert opened(easy=[(0, 4), (1, 4), (3, 4)]) == ["easy", "middle"], "4 of 8"
    assert opened(easy=[(1, 8), (1, 1)]) == ["easy"], "2 of 9 answers: batches count by their answers"
    assert opened(easy=[(0, 4), (0, 4)], middle=[(0, 4)]) == ["easy", "middle"], "what is open stays open"
    assert opened(easy=[(4, 4)] * 2, middle=[(4, 4)]) == ["easy", "middle"], "each is measured itself"
    assert opened(easy=[(4, 4)] * 2, middle=[(4, 4)] * 2) == list(PARTS)


def test_easier_parts_are_reviewed_and_an_order_may_leave_parts_open() -> None:
    history = history_of(hard=[(4, 4)] * 2)
    mix = ask("by_success_rate", history=history, order=["hard", "easy"], window=2, rate=1.0, review=0.25)
    assert mix.factors == {"hard": 0.25, "easy": 1.0}, "middle is not named, and has its own weight"
    assert ask("by_success_rate", history=history, order=["hard", "easy"], window=2, review=0).factors["hard"] == 0
    for order, says in ((["hard", "hard"], "every part once"), ([], "every part once"), (["hrad"], "mean 'hard'")):
        with pytest.raises(RecipeError, match=rf"curriculum\.order: .*{says}"):
            ask("by_success_rate", order=order)


def test_prompts_outside_of_the_band_rest_for_so_many_passes() -> None:
    tried = {0: Tried(0, 0.0), 1: Tried(0, 0.25), 2: Tried(3, 0.75), 3: Tried(3, 1.0)}
    history = History(PARTS, {}, tried)
    assert ask("difficulty_band", history=history, low=0.25, high=0.75).resting == {0: 2, 3: 5}
    assert ask("difficulty_band", history=history, low=0.0, high=0.5, rest=4).resting == {2: 8, 3: 8}
    with pytest.raises(RecipeError, match=r"curriculum\.low: 0\.5 is not below curriculum\.high, 0\.5"):
        ask("difficulty_band", low=0.5, high=0.5)


@pytest.mark.parametrize(
    ("function", "error", "says"),
    [
        (lambda step, history: {"easy": 1.0}, UsageError, "returned dict; it must return a Mix"),
        (lambda step, history: Mix({"esay": 1.0}), RecipeError, "no part 'esay'.*Did you mean 'easy'"),
        (lambda step, history: Mix({"easy": -1.0}), UsageError, "numbers from 0 on"),
        (lambda step, history: Mix(dict.fromkeys(PARTS, 0.0)), UsageError, "at step 1 it closes every part"),
        (lambda step, history: 1 / 0, RunFailure, "curriculum: the function raised ZeroDivisionError"),
    ],
)
def test_what_a_curriculum_of_ones_own_must_not_say(function: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        choose_mix(function, 1, History(PARTS))
