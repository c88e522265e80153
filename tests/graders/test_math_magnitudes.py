"""Constants far from 1: exact values, logarithms and forms decide where evaluated digits drown them."""

from __future__ import annotations

import pytest
from grader_tables import math_pairs

from posttrain.graders.math.equality import compare_answers
from posttrain.graders.math.magnitudes import MAX_SPAN, digits_spanned, exact_value
from posttrain.graders.math.values import parse_latex


@pytest.mark.parametrize(("gold", "answer"), math_pairs("same huge"))
def test_compare_answers_huge_constants_same_value_is_right(gold: str, answer: str) -> None:
    assert compare_answers([gold, answer, 0.0])
    assert compare_answers([answer, gold, 0.0])


@pytest.mark.parametrize(("gold", "answer"), math_pairs("different huge"))
def test_compare_answers_huge_constants_other_value_is_wrong(gold: str, answer: str) -> None:
    assert not compare_answers([gold, answer, 0.0])
    assert not compare_answers([answer, gold, 0.0])


@pytest.mark.parametrize(("gold", "answer"), math_pairs("say nothing"))
def test_compare_answers_equation_of_equal_sides_is_wrong(gold: str, answer: str) -> None:
    assert not compare_answers([gold, answer, 0.0])


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
