"""Answers that mean the same, by hand: each line is a claim about mathematics or about what people leave out."""

from __future__ import annotations

import pytest
from grader_tables import math_pairs

from posttrain.graders.math.equality import compare_answers
from posttrain.graders.math.magnitudes import MAX_SPAN, digits_spanned, exact_value
from posttrain.graders.math.values import parse_latex


def differing(section: str, expected: bool, *, both_ways: bool = True) -> list[tuple[str, str]]:
    """The pairs of a section whose verdict is another than ``expected``."""
    pairs = math_pairs(section)
    pairs += [pair[::-1] for pair in pairs] if both_ways else []
    return [pair for pair in pairs if compare_answers([*pair, 0.0]) is not expected]


def test_answers_that_mean_the_same_are_equal() -> None:
    assert differing("same", True, both_ways=False) == []


def test_answers_that_mean_other_things_differ_both_ways() -> None:
    assert differing("different", False) == []


def test_huge_constants_are_told_apart_where_digits_drown_them() -> None:
    assert differing("same huge", True) == []
    assert differing("different huge", False, both_ways=False) == []


def test_an_equation_of_equal_sides_says_nothing() -> None:
    assert differing("say nothing", False, both_ways=False) == []


@pytest.mark.parametrize("gold", ["x+y=5", "a+b=12", "x - y = 5"])
def test_a_sum_that_an_answer_names_is_a_value_and_an_equation_that_was_requested_is_none(gold: str) -> None:
    value = gold.partition("=")[2].strip()
    assert compare_answers([value, gold, 0.0]) is True
    assert compare_answers([gold, value, 0.0]) is False


def test_an_answer_equals_itself_and_no_other_line() -> None:
    for gold, given in math_pairs("same"):
        assert compare_answers([gold, gold, 0.0]) is True, gold
        assert compare_answers([given, given, 0.0]) is True, given
        assert compare_answers([gold, "31337 q", 0.0]) is False, gold


@pytest.mark.parametrize(
    ("gold", "given", "tolerance", "same"),
    [
        ("3.14", "3.1", 0.0, False),
        ("3.14", "3.1", 0.02, True),
        ("100", "101", 0.01, True),
        ("100", "101.1", 0.01, False),
        ("(1, 100)", "(1, 101)", 0.01, True),
        ("4.2e-10", "4.3e-10", 0.01, False),
        ("4.2e-10", "4.2 \\times 10^{-10}", 0.0, True),
    ],
)
def test_the_tolerance_is_relative_to_the_gold_number(gold: str, given: str, tolerance: float, same: bool) -> None:
    assert compare_answers([gold, given, tolerance]) is same


@pytest.mark.parametrize(
    ("latex", "low", "high"),
    [("x+1", 0, 8), ("10^{60}+x", 60, 66), ("10^{-60}x", 60, 66), ("50!", 64, 66), ("(x-a)^{6000}", 12_000, 12_010)],
)
def test_digits_spanned_bounds_the_distance_of_terms(latex: str, low: int, high: int) -> None:
    assert low <= digits_spanned(parse_latex(latex)) <= high


def test_exact_value_beyond_its_limit_is_none() -> None:
    assert exact_value(parse_latex("2^{20}+1")) == 2**20 + 1
    assert exact_value(parse_latex("2^{10^{9}}")) is None
    assert digits_spanned(parse_latex("2^{10^{9}}")) > MAX_SPAN
