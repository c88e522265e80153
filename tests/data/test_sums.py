"""Sums: true answers, disjoint splits, demonstrations with and without a call."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

from posttrain.data.stories.task import sums
from posttrain.errors import UsageError
from refusing import refuses

QUESTION = re.compile(r"What is (\d+) ([+-]) (\d+)\?")


def test_answers_are_right_and_numbers_lie_within_the_bounds() -> None:
    for example in sums(size=200, min_value=3, max_value=120).examples:
        left, sign, right = QUESTION.fullmatch(example.messages[0].content).groups()
        assert int(example.answer) == (int(left) + int(right) if sign == "+" else int(left) - int(right)) >= 0
        assert all(3 <= int(number) <= 120 for number in (left, right))
        assert example.meta == {"digits": len(str(max(int(left), int(right))))}
        assert example.solution == f"{left} {sign} {right} = {example.answer}."


def test_items_are_functions_of_seed_and_index() -> None:
    assert list(sums(size=40, seed=3).examples) == list(sums(size=90, seed=3).examples)[:40]
    assert list(sums(size=40, seed=3).examples) != list(sums(size=40, seed=4).examples)


def test_no_two_splits_share_numbers_with_their_sign() -> None:
    seen: dict[str, set[tuple[object, ...]]] = {}
    for split in ("train", "validation", "test"):
        for example in sums(split=split, size=600, max_value=20, seed=len(split)).examples:
            left, sign, right = QUESTION.fullmatch(example.messages[0].content).groups()
            summands = tuple(sorted((int(left), int(right)))) if sign == "+" else (int(left), int(right))
            seen.setdefault(split, set()).add((sign, *summands))
    assert all(len(keys) > 20 for keys in seen.values())
    assert not seen["train"] & seen["validation"]
    assert not (seen["train"] | seen["validation"]) & seen["test"]


def test_a_share_of_the_demonstrations_calls_whatever_the_numbers() -> None:
    examples = list(sums(size=1000, called=0.25).examples)
    called = [example for example in examples if example.turns]
    assert 200 < len(called) < 300
    for example in called:
        (turn,), (call,) = example.turns, example.turns[0].calls
        assert (turn.text, call.tool, call.result, call.outcome) == ("", "calculator", example.answer, "ok")
        assert f"What is {json.loads(call.raw_arguments)['expression']}?" == example.messages[0].content
        assert example.solution is None
    plain = [e.messages for e in sums(size=1000).examples]
    assert [e.messages for e in examples] == plain, "who calls does not change what is asked"


def test_bounds_that_hold_nothing_are_refused() -> None:
    with refuses(UsageError, "min_value", "max_value"):
        sums(min_value=9, max_value=5)
    with refuses(UsageError, "max_value"):
        list(sums(split="test", min_value=7, max_value=7).examples)


def test_an_evaluation_tells_what_share_was_computed_by_a_tool() -> None:
    def item(*calls: float | None) -> SimpleNamespace:
        parts = [{"correct": 1.0} | ({} if number is None else {"tool_calls": number}) for number in calls]
        return SimpleNamespace(id="sums/test/0", meta={}, samples=[SimpleNamespace(parts=one) for one in parts])

    output = sums(split="test").shares([item(0.0, 2.0, 1.0, 0.0), item(1.0), item(None), item()])
    assert output == {"called": [0.5, 1.0]}
