"""Equality of values: exact where digits decide, refuted by one point, silent where nothing is defined."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
import sympy
from antlr4.atn.PredictionMode import PredictionMode
from grader_tables import read_cases
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.graders.math.forms import NotUnderstood
from posttrain.graders.math.values import _CONFIG, _LatexReader, constant_ratio, parse_latex, rational, same_value

x, y, n = sympy.symbols("x y n")


def same(left: str, right: str) -> bool:
    return same_value(parse_latex(left), parse_latex(right))


def test_numbers_are_read_exactly_and_without_python() -> None:
    assert parse_latex("0.1") == sympy.Rational(1, 10)
    assert parse_latex("3.25") == sympy.Rational(13, 4)
    assert parse_latex("007") == sympy.Integer(7)
    assert isinstance(parse_latex("12.0"), sympy.Integer)
    assert same("0.1 + 0.2", "0.3")
    with pytest.raises(NotUnderstood):
        parse_latex("9" * 500)


def test_letters_keep_their_case_and_i_is_the_imaginary_unit() -> None:
    assert parse_latex("X").free_symbols != parse_latex("x").free_symbols
    assert parse_latex("i") == sympy.I
    assert same("i^2", "-1")
    assert same("\\sum_{i=1}^{3} i", "6")


@pytest.mark.parametrize("latex", read_cases("answers.txt", "letters with powers"))
def test_letters_with_powers_are_read_as_the_whole_grammar_reads_them(latex: str) -> None:
    reader = _LatexReader(convert_degrees=True, config=_CONFIG)
    assert repr(reader.parse(latex)) == repr(reader.convert_expr(reader._read(latex, PredictionMode.LL)))


@pytest.mark.parametrize(
    "latex", ["4 2", "a^{b}^{c}", "n!!", "1, 2", "x = 2", "(1,2)", "\\frac{1}{", "", "9^{9^{9^{9}}}", "x_{y_{z_{w}}}"]
)
def test_what_is_ambiguous_or_no_value_is_refused(latex: str) -> None:
    with pytest.raises(NotUnderstood):
        parse_latex(latex)


def test_integers_of_thousands_of_digits_are_distinguished() -> None:
    assert not same("2^{2005}", "2^{2005} + 1")
    assert not same("3^{9000} - 1", "3^{9000}")
    assert same("3^{9000} - 1", "(3^{4500} - 1)(3^{4500} + 1)")
    assert not same("1000!", "1000! + 1")


def test_numbers_that_agree_to_many_digits_are_distinguished() -> None:
    """e^(π√163) is 262537412640768744 less 7.5e-13."""
    assert not same("e^{\\pi \\sqrt{163}}", "262537412640768744")
    assert not same("1", "1 + 10^{-45}")
    assert not same("10^{-45}", "2 \\cdot 10^{-45}")


def test_what_cancels_is_zero() -> None:
    assert same("\\sqrt{2}^2 - 2", "0")
    assert same("\\sin^2 x + \\cos^2 x - 1", "0")
    assert same("x - x", "0")
    assert not same("\\sqrt{2}^2 - 2 + 10^{-30}", "0")
    assert not same("\\sqrt{10^{300} + 1} - 10^{150}", "0"), "it is 5e-151"


def test_what_cancels_further_than_can_be_seen_equals_nothing() -> None:
    assert same("\\pi^{400} + 1 - \\pi^{400}", "1")
    assert same("\\pi^{2000} + 1 - \\pi^{2000}", "1")
    for value in ("0", "3"):
        assert not same("\\pi^{2000} + 1 - \\pi^{2000}", value)
    for value in ("0", "1", "3"):
        assert not same("\\pi^{200000} + 1 - \\pi^{200000}", value)


def test_points_where_one_side_is_not_defined_do_not_decide() -> None:
    assert same("\\frac{x^2 - 1}{x - 1}", "x + 1")
    assert same("\\sqrt{x} \\sqrt{x}", "x")
    assert same("\\log(xy)", "\\log x + \\log y")
    assert not same("\\sqrt{x^2}", "x")
    assert not same("\\sqrt{x}", "\\sqrt{-x}")
    assert not same("\\frac{1}{0}", "\\frac{1}{0} + 1")
    assert not same("\\frac{0}{0}", "1")


def test_other_variables_are_other_functions() -> None:
    assert not same("x", "y")
    assert not same("x + 0 \\cdot y", "y")
    assert same("x + 0 \\cdot y", "x")
    assert not same("f(x)", "g(x)")
    assert same("f(x) + 1", "1 + f(x)")


def test_matrices_by_entry() -> None:
    unit = "\\begin{pmatrix} 1 & 0 \\\\ 0 & 1 \\end{pmatrix}"
    assert same(f"{unit} + {unit}", "2 \\begin{pmatrix} 1 & 0 \\\\ 0 & 1 \\end{pmatrix}")
    assert same("\\begin{vmatrix} 2 & 1 \\\\ 1 & 2 \\end{vmatrix}", "3")
    assert not same(unit, "1")
    assert not same(unit, "\\begin{pmatrix} 1 & 0 & 0 \\\\ 0 & 1 & 0 \\end{pmatrix}")


@pytest.mark.parametrize(
    ("left", "right", "ratio"),
    [
        (x - 1, 2 * x - 2, 0.5),
        (x - 1, 1 - x, -1),
        (x**2 / 4 + y**2 / 3 - 1, x**2 / 16 + y**2 / 12 - sympy.Rational(1, 4), 4),
        (x, x * sympy.I, -1j),
        (x - 1, x - 2, None),
        (x - 1, y - 1, None),
        (x, x**3, None),
        (sympy.Integer(2), sympy.Integer(3), None),
        (x - x, x, None),
        (y - (-1) ** n, y + 1 + 0 * n, None),
    ],
)
def test_a_constant_ratio(left: sympy.Expr, right: sympy.Expr, ratio: complex | None) -> None:
    assert constant_ratio(left, right) == ratio


NUMBERS = st.fractions(min_value=-50, max_value=50, max_denominator=60)


@settings(max_examples=60, deadline=None)
@given(st.lists(NUMBERS, min_size=1, max_size=4), st.integers(0, 2**32))
def test_a_polynomial_equals_its_expansion_and_no_other(roots: list[Fraction], seed: int) -> None:
    """Against sympy's own expansion; with one coefficient changed by 10^-12 it is another polynomial."""
    factors = [x - rational(root) for root in roots]
    product = sympy.Mul(*factors, evaluate=False)
    expanded = sympy.expand(sympy.prod(factors))
    assert same_value(product, expanded)
    power = random.Random(seed).randrange(len(roots) + 1)
    assert not same_value(product, expanded + sympy.Rational(1, 10**12) * x**power)


@settings(max_examples=60, deadline=None)
@given(NUMBERS, NUMBERS)
def test_fractions_as_fractions(left: Fraction, right: Fraction) -> None:
    """Against exact arithmetic."""

    def written(value: Fraction) -> str:
        return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"

    assert same(f"{written(left)} + ({written(right)})", written(left + right))
    assert same(written(left), written(right)) == (left == right)
