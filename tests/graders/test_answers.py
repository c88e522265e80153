"""Reading numbers, boxes and answers out of text: exact values, and inputs that are meant to hurt."""

from __future__ import annotations

from fractions import Fraction

import pytest
from grader_tables import read_cases
from hypothesis import given
from hypothesis import strategies as st

from posttrain.graders.answers import (
    Quantity,
    answer_region,
    final_response,
    last_boxed,
    last_number,
    parse_quantity,
    same_answer,
    tagged_response,
)
from posttrain.graders.grading import Submission
from posttrain.graders.math.equality import compare_answers
from posttrain.graders.math.grader import compare_quickly
from posttrain.graders.numeric import numeric

NUMBERS = {
    "42": 42, "-7": -7, "\u22127": -7, "+7": 7, " 42. ": 42, "1,234,567": 1234567, "1,234.50": "2469/2",
    "1{,}234": 1234, ".5": "1/2", "5.": 5, "3/4": "3/4", "-3/4": "-3/4", "1.5/2": "3/4", "1 1/2": "3/2",
    "\\frac{3}{4}": "3/4", "-\\dfrac{-3}{4}": "3/4", "\\frac12": "1/2", "2e3": 2000, "1.5E-3": "3/2000", "$42$": 42,
    "\\boxed{42}": 42, "\\(42\\)": 42, "3 million": 3_000_000, "2 dozen": 24,
}  # fmt: skip


@pytest.mark.parametrize(("text", "value"), NUMBERS.items())
def test_a_number_is_read_exactly(text: str, value: str | int) -> None:
    assert parse_quantity(text) == Quantity(Fraction(value))


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("$18", 18, "dollar"), ("-$18.50", -18.5, "dollar"), ("$-5", -5, "dollar"), ("18 dollars.", 18, "dollar"),
        ("$18 dollars", 18, "dollar"), ("18€", 18, "euro"), ("50%", 50, "%"), ("50\\%", 50, "%"),
        ("50 percent", 50, "%"), ("60 miles per hour", 60, "mile per hour"), ("5\\text{ cm}", 5, "cm"),
        ("3 million dollars", 3_000_000, "dollar"), ("90^\\circ", 90, "°"),
    ],
)  # fmt: skip
def test_units_and_percent_are_kept_apart_from_the_value(text: str, value: float, unit: str) -> None:
    assert parse_quantity(text) == Quantity(Fraction(value), unit == "%", unit.removesuffix("%"))


NO_NUMBERS = ["", "-", "$", "abc", "x = 5", "5 or 6", "5 and a half", "2 pi", "3+2", "9**9**9", "9999999!", "5^2",
    "1/0", "\\frac{1}{0}", "1 1/0", "1,2", "1,2345", "(1,2)", "-$-5", "nan", "inf", "1e999999999", "1e-401", "0x10",
    "1.2.3", "9" * 401]  # fmt: skip
NO_MIXED_NUMBERS = ["3 10/2", "3\\frac{10}{2}", "2 2/2", "2\\frac{3}{3}"]  # 3\\frac{10}{2} is a product, 15 and not 8


@pytest.mark.parametrize("text", [*NO_NUMBERS, *NO_MIXED_NUMBERS])
def test_anything_else_is_no_number(text: str) -> None:
    assert parse_quantity(text) is None


@pytest.mark.parametrize(("gold", "given", "same"), read_cases("answers.txt", "same answer"))
def test_same_answer(gold: str, given: str, same: bool) -> None:
    assert same_answer(gold, given) is same
    if same:
        assert same_answer(given, gold)


def test_tolerance_is_absolute_and_inclusive() -> None:
    assert same_answer("3", "3.25", tolerance=0.25)
    assert not same_answer("3", "3.2500001", tolerance=0.25)
    assert not same_answer("0.1", "0.1000000000000000001")


@given(st.integers(-(10**12), 10**12), st.integers(1, 10**6))
def test_a_written_fraction_reads_back(numerator: int, denominator: int) -> None:
    quantity = parse_quantity(f"{numerator}/{denominator}")
    assert quantity == Quantity(Fraction(numerator, denominator))
    assert parse_quantity(f"{numerator:,}") == Quantity(Fraction(numerator))


@given(st.text(max_size=60))
def test_any_text_equals_itself_or_is_read_without_error(text: str) -> None:
    assert same_answer(text, text)


@pytest.mark.parametrize(("text", "number"), read_cases("answers.txt", "last number"))
def test_last_number(text: str, number: str | None) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize(("text", "content"), read_cases("answers.txt", "last boxed"))
def test_last_boxed(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


def test_megabytes_are_read_in_one_pass() -> None:
    """Each of these took hours (or raised) in a reader with backtracking, recursion or eval."""
    assert last_number("1," * 200_000) == "1"
    assert last_number("9" * 1_000_000) == "9" * 1_000_000
    for part in ("1 ", "1.1", "1 000", "1^{", "1 x 10 ", "\\frac{", "1_"):
        assert last_number(part * 50_000 + " 7 ") is not None
    assert last_boxed("\\" * 1_000_000 + "boxed 7") == "7"
    assert last_boxed("\\boxed{" * 100_000 + "5}") == "5"
    assert last_boxed("{" * 500_000 + "}" * 500_000) is None
    assert not same_answer("5", "5" * 1_000_000)
    assert not same_answer("abc", " abc" * 300_000)
    assert not same_answer("1", "1e999999999")


# Units after a number, and words that take the number back.

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


def test_a_unit_that_one_side_states_is_forgiven() -> None:
    for unit in names(UNITS):
        assert same_answer("17", f"17 {unit}"), unit
        assert same_answer(f"17 {unit}", "17"), unit
        assert not same_answer("16", f"17 {unit}"), unit


def test_other_words_are_no_units() -> None:
    for words in names(NO_UNITS):
        given = f"17 {words}"
        assert not same_answer("17", given), words
        assert not compare_quickly("17", given), words
        assert compare_answers(["17", given, 0.0]) is False, words
        if words not in ("x", "ab"):  # marked as text, these are symbols of units
            assert compare_answers(["17", f"17\\text{{ {words}}}", 0.0]) is False, words
        assert numeric(Submission(given, given, "17")).outcome == "wrong", words


def test_a_singular_stands_behind_one_or_less_and_scales_have_plurals() -> None:
    assert None not in [parse_quantity(text) for text in ("1 robot", "1/2 pizza", "0.5 cake")]
    assert {parse_quantity(text) for text in ("1 maybe", "1 wrong", "0.5 probably", "2 robot")} == {None}
    assert same_answer("60", "5 dozens")
    assert same_answer("3000000", "3 millions")
    assert not same_answer("5", "5 dozens")


# The response after the thinking, and the part of it that is the answer.


@pytest.mark.parametrize(("text", "expected"), read_cases("answers.txt", "final response"))
def test_thinking_is_over_at_the_last_closing_tag(text: str, expected: str | None) -> None:
    assert final_response(text) == expected


@pytest.mark.parametrize(("text", "expected"), read_cases("answers.txt", "tagged response"))
def test_answer_tags_are_no_part_of_the_response(text: str, expected: str | None) -> None:
    assert tagged_response(text) == expected


@pytest.mark.parametrize(
    ("text", "extracted", "expected"),
    [
        ("<think>B</think> <answer> C </answer>", "C", ("C", True)),
        ("<think>\\boxed{A}</think> It is $\\boxed{B}$.", "B", ("B", True)),
        ("It is $\\boxed{4}$, not 5.", "5", ("4", True)),
        ("It is B, since 2 + 2 = 4.", "4", ("It is B, since 2 + 2 = 4.", False)),  # the last number is no mark
        ("It is B, since 2 + 2 = 4.", None, ("It is B, since 2 + 2 = 4.", False)),
        ("<think>x</think> FINAL: B!", "B", ("B", True)),  # a rule of the template's own
        ("", "B", ("B", True)),
        ("  ", None, None),
        ("<think>so B", "B", None),
    ],
)
def test_the_region_of_the_answer(text: str, extracted: str | None, expected: tuple[str, bool] | None) -> None:
    assert answer_region(Submission(text, extracted, "B")) == expected
