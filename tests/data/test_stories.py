"""The stories task: right answers, disjoint splits, purity, the mix of steps."""

from __future__ import annotations

import hashlib
import json
import re
from fractions import Fraction
from typing import Any

import pytest

from posttrain import registry
from posttrain.data.stories.families import Equation, is_worked
from posttrain.data.stories.task import stories
from posttrain.errors import RecipeError, UsageError
from posttrain.untrusted import declare_code
from refusing import refuses


def evaluate(working: str) -> list[int]:
    """Every result of a working, recomputed apart from the package; fails on a wrong equation."""
    results = []
    for part in working.rstrip(".").split(". "):
        left_side, right_side = part.split(" = ")
        first, sign, second = left_side.split(" ")
        a, b = Fraction(first), Fraction(second)
        value = {"+": a + b, "-": a - b, "*": a * b}[sign] if sign != "/" else a / b
        assert value == int(right_side), part
        results.append(int(value))
    return results


def test_answers_are_what_the_working_gives() -> None:
    task = stories(max_steps=6, size=800)
    for example in task.examples:
        assert example.solution is not None
        results = evaluate(example.solution)
        assert example.answer == str(results[-1])
        assert len(results) == example.meta["steps"] == example.meta["level"]
        assert all(0 <= value <= 99 for value in results)


def test_splits_share_no_working_even_with_other_seeds_and_other_words() -> None:
    seen: dict[str, set[tuple[tuple[object, ...], ...]]] = {}
    for split, size in (("train", 4000), ("validation", 1000), ("test", 1000)):
        found = set()
        for seed in (0, 1):
            for example in stories(split=split, seed=seed, size=size // 2, max_steps=6).examples:
                steps = re.findall(r"(\d+) ([-+*/]) (\d+) =", example.solution)
                found.add(tuple((s, *(sorted((a, b)) if s in "+*" else (a, b))) for a, s, b in steps))
        seen[split] = found
    assert not seen["train"] & seen["validation"]
    assert not seen["train"] & seen["test"]
    assert not seen["validation"] & seen["test"]
    assert len(seen["train"]) > 2700  # the test would be empty if few stories were different


@pytest.mark.parametrize(
    ("options", "digest"),
    [
        ({}, "c6b672f677367c0d"),
        ({"split": "test", "seed": 3, "min_steps": 2, "max_steps": 6, "max_value": 999}, "89f5a24243443f32"),
        ({"worked": 0.5, "families": ["shop", "rate"]}, "7f8edb05538814d8"),
        ({"style": "document"}, "1759872eb33fee3f"),
        ({"responses": "pair"}, "f96d2a02c5d3eeb6"),
        pytest.param({"responses": "judged", "split": "validation"}, "191b6816397f2bdb", marks=pytest.mark.slow),
        ({"responses": "steps", "seed": 2}, "7060f1a27cef9f2d"),
    ],
)
def test_stories_do_not_change_from_one_version_to_the_next(options: dict[str, Any], digest: str) -> None:
    """The weights that ship were trained on these; a change here is a change of the task."""
    rows = [
        [
            *(e.id, [message.content for message in e.messages], e.answer, e.solution),
            [[r.text, r.score, r.answer, r.step_labels] for r in e.responses],
        ]
        for e in stories(size=100, **options).examples
    ]
    assert hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16] == digest


def test_an_item_is_a_function_of_seed_split_and_index() -> None:
    one, other = stories(size=100), stories(size=50_000, worked=0.0)
    forwards = [one.examples[i] for i in range(100)]
    backwards = [one.examples[i] for i in reversed(range(100))][::-1]
    assert forwards == backwards == list(one.examples) == one.examples[:100]
    assert [e.messages for e in forwards] == [other.examples[i].messages for i in range(100)]
    assert one.examples[-1] == forwards[99]
    assert forwards[17].id == "stories/train/17"
    assert stories(seed=1).examples[0].messages != forwards[0].messages
    assert len({e.messages for e in forwards}) == 100
    with pytest.raises(IndexError):
        one.examples[100]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("19 + 12 = 31. 31 - 4 = 27.", True),
        ("Well: 7*3=21", True),
        ("19 + 12 = 32. 8 / 2 = 4.", True),
        ("19 + 12 = 32.", False),
        ("9 / 2 = 4.", False),
        ("The answer is 31.", False),
        ("119 + 12 = 31", False),
        ("1 + 1 = 23", False),
        ("9" * 50 + " + 1 = 2", False),
    ],
)
def test_is_worked_wants_a_true_equation(written: str, expected: bool) -> None:
    assert is_worked(written) is expected
    assert stories().worked is is_worked


def test_summands_may_swap_places_and_nothing_else() -> None:
    assert Equation(12, "+", 19).key == Equation(19, "+", 12).key == "12+19"
    assert Equation(9, "*", 2).key == Equation(2, "*", 9).key == "2*9"
    assert Equation(9, "-", 2).key != Equation(2, "-", 9).key


def test_wrong_options_are_refused() -> None:
    with refuses(UsageError, "min_steps"):
        stories(min_steps=4, max_steps=2)
    declare_code("posttrain.data.stories.task:stories")
    entry = registry.find("task", "posttrain.data.stories.task:stories")
    assert entry.traits["held_out"] == "validation"
    with refuses(RecipeError, "max_steps"):
        entry.options({"max_steps": 7})
    with refuses(RecipeError, "'worked'"):
        entry.options({"worket": 0.5})
