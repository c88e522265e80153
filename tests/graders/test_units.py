"""Units after a number, and words that take the number back."""

from __future__ import annotations

import pytest

from posttrain.graders.answers import parse_quantity, same_answer
from posttrain.graders.grading import Submission
from posttrain.graders.math.equality import compare_answers
from posttrain.graders.math.grader import compare_quickly
from posttrain.graders.numeric import numeric

UNITS = """
students|apples|storks|goldfish|children|people|red marbles|blue ones|right triangles|five-dollar bills|dogs' legs
miles per hour|mph|feet per second|square units|sq in|cubic inches|cm long|inches tall|lbs.|light-years|a.m.
U.S. dollars|degrees Celsius|percentage points|gallons of water|bags of rice
dollars every day at the farmers' market|dollars each
left|apples left|in total|more apples|dollars more than Bob|years old|of the marbles|per hour|in one week|each|cheaper
students in the class|chickens remained|hours jogging|ways to arrange them|boys are left|feet away|hours later
"""
NO_UNITS = """
maybe|no sixteen|or not|not|wrong|perhaps|sixteen|or so|yes|always|if not|any text|approximately|guess|unless|is
apples maybe|apples not|apples probably|eighteens|sixteens|eighths|squared|are wrong|is wrong|to one|in sixteen|x|ab
x apples|never|unsure|to|a|of x|plus one
"""


def names(block: str) -> list[str]:
    return [name for line in block.strip().splitlines() for name in line.split("|")]


@pytest.mark.parametrize("unit", names(UNITS))
def test_a_unit_that_one_side_states_is_forgiven(unit: str) -> None:
    assert same_answer("17", f"17 {unit}")
    assert same_answer(f"17 {unit}", "17")
    assert not same_answer("16", f"17 {unit}")


@pytest.mark.parametrize("words", names(NO_UNITS))
def test_other_words_are_no_units(words: str) -> None:
    given = f"17 {words}"
    assert not same_answer("17", given)
    assert not compare_quickly("17", given)
    assert compare_answers(["17", given, 0.0]) is False
    if words not in ("x", "ab"):  # marked as text, these are symbols of units
        assert compare_answers(["17", f"17\\text{{ {words}}}", 0.0]) is False
    assert numeric(Submission(given, given, "17")).outcome == "wrong"


@pytest.mark.parametrize("text", ["1 robot", "1/2 pizza", "0.5 cake"])
def test_a_singular_behind_one_or_less(text: str) -> None:
    assert parse_quantity(text) is not None


@pytest.mark.parametrize("text", ["1 maybe", "1 wrong", "0.5 probably", "2 robot"])
def test_no_singular(text: str) -> None:
    assert parse_quantity(text) is None


def test_scales_have_plurals() -> None:
    assert same_answer("60", "5 dozens")
    assert same_answer("3000000", "3 millions")
    assert not same_answer("5", "5 dozens")
