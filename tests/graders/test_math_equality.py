"""Answers that mean the same, by hand: each line is a claim about mathematics or about what people leave out."""

from __future__ import annotations

import pytest
from grader_tables import math_pairs

from posttrain.graders.math.equality import compare_answers


@pytest.mark.parametrize(("gold", "given"), math_pairs("same"))
def test_same(gold: str, given: str) -> None:
    assert compare_answers([gold, given, 0.0]) is True


@pytest.mark.parametrize(("gold", "given"), math_pairs("different"))
def test_different_both_ways(gold: str, given: str) -> None:
    assert compare_answers([gold, given, 0.0]) is False
    assert compare_answers([given, gold, 0.0]) is False


@pytest.mark.parametrize("gold", ["x+y=5", "a+b=12", "x - y = 5"])
def test_a_sum_that_an_answer_names_is_a_value_and_an_equation_that_was_requested_is_none(gold: str) -> None:
    value = gold.partition("=")[2].strip()
    assert compare_answers([value, gold, 0.0]) is True
    assert compare_answers([gold, value, 0.0]) is False


@pytest.mark.parametrize(("gold", "given"), math_pairs("same"))
def test_an_answer_equals_itself_and_no_other_line(gold: str, given: str) -> None:
    assert compare_answers([gold, gold, 0.0]) is True
    assert compare_answers([given, given, 0.0]) is True
    assert compare_answers([gold, "31337 q", 0.0]) is False


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
