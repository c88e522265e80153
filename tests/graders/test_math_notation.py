"""Different spellings become one, and nothing else changes."""

from __future__ import annotations

import time

import pytest
from grader_tables import read_cases
from hypothesis import given
from hypothesis import strategies as st

from posttrain.graders.math.notation import unify


@pytest.mark.parametrize(
    ("texts", "spelling"),
    [
        (("\\frac12", "\\dfrac{1}{2}", "\\tfrac 1 2", "\\frac{1}2", "\\frac1{2}", "\\cfrac12"), "\\frac{1}{2}"),
        (("\\frac\\sqrt{3}2", "\\frac{\\sqrt3}{2}", "\\frac {\\sqrt 3} 2"), "\\frac{\\sqrt{3}}{2}"),
        (("\\sqrt2", "sqrt(2)", "\\sqrt{2}", "√2", "\\sqrt (2)"), "\\sqrt{2}"),
        (("\\sqrt[3]2", "\\sqrt[3]{2}"), "\\sqrt[3]{2}"),
        (("x^2", "x^{2}", "x^(2)", "x**2", "x²"), "x^{2}"),
        (("2^10", "2^{10}", "2**10"), "2^{10}"),
        (("x^-1", "x^{-1}", "x^(-1)"), "x^{-1}"),
        (("x_1", "x_{1}"), "x_{1}"),
        (("36^\\circ", "36^{\\circ}", "36°", "36\\degree"), "36^{\\circ}"),
        (("\\left( 1, 2 \\right)", "\\bigl( 1, 2 \\bigr)", "( 1, 2 )"), "( 1, 2 )"),
        (("11,\\! 111", "11{,}111", "11\\,111", "11 111", "11 {, }111"), "11111"),
        (("a \\le b", "a \\leq b", "a <= b", "a ≤ b", "a \\leqslant b"), "a \\le b"),
        (("a \\times b", "a \\cdot b", "a × b", "a * b", "a \\ast b"), "a \\cdot b"),
        (("-\\infty", "\u2212∞", "-infinity", "-inf"), "-\\infty"),
        (("\\text{ cm}", "\\mbox{cm}", "\\textrm{cm }", "\\mathrm{cm}"), "\\text{cm}"),
        (("E", "\\mathrm{E}", "\\mathbf{E}"), "E"),
        (("sin x", "\\sin x", "\\sin  x"), "\\sin x"),
        (("2 pi r", "2 \\pi r", "2 π r"), "2 \\pi r"),
        (("$x$", "x", " x ", "**x**"), "x"),
        (("\\$5", "\\$ 5".replace(" ", "")), "$5"),
        (("5\\%", "5%"), "5%"),
        (("\\\\frac{1}{2}",), "\\frac{1}{2}"),
        (("\\{1\\}", "\\lbrace 1\\rbrace".replace(" ", "")), "\\{1\\}"),
    ],
)
def test_one_spelling(texts: tuple[str, ...], spelling: str) -> None:
    assert {unify(text) for text in texts} == {spelling}


@pytest.mark.parametrize("text", read_cases("answers.txt", "stays"))
def test_what_means_something_stays(text: str) -> None:
    assert unify(text) == text


@given(st.text(alphabet="{}[]^_ 12ax", max_size=40))
def test_braces_that_are_added_are_closed(text: str) -> None:
    assert unify(text).count("{") - unify(text).count("}") == text.count("{") - text.count("}")


def test_time_is_in_proportion() -> None:
    start = time.process_time()
    for unit in ("\\frac", "^", "{", "(", "\\sqrt(", "1,", "1 000 ", "\\text{", "\\\\", "' ", "* "):
        unify(unit * 20_000)
    assert time.process_time() - start < 10
