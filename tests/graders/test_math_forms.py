"""The form of an answer: what is a list, a tuple, an interval, a unit; and what is refused."""

from __future__ import annotations

from fractions import Fraction

import pytest
from grader_tables import read_cases

from posttrain.graders.answers import Quantity
from posttrain.graders.math.equality import Statement, is_name, resolve
from posttrain.graders.math.forms import (
    MAX_ITEMS,
    BasedNumber,
    Collection,
    Expression,
    Form,
    Matrix,
    NotUnderstood,
    Relation,
    Union,
    Words,
    read_form,
    split,
    undress,
)
from posttrain.graders.math.notation import unify
from refusing import refuses


def number(value: int | Fraction, unit: str = "", percent: bool = False) -> Quantity:
    return Quantity(Fraction(value), percent, unit)


ONE, TWO, THREE = number(1), number(2), number(3)
X = Expression("x")


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("42", number(42)), ("1,234", number(1234)), ("$\\frac{3}{4}$.", number(Fraction(3, 4))),
        ("5 cm", number(5, "cm")), ("5 \\text{ square units}", number(5, "square unit")),
        ("440\\text{ cm}^2", number(440, "cm^2")), ("28\\%", number(28, percent=True)),
        ("90^\\circ", number(90, "°")), ("101_2", BasedNumber("101", "2")),
        ("\\text{A5}_{11}", BasedNumber("A5", "11")), ("25_{\\text{six}}", BasedNumber("25", "6")), ("x", X),
        ("(x)", X), ("{x}", X), ("10\\pi\\text{ feet}", Expression("10\\pi", "feet")),
        ("10\\pi\\text{ cm}^2", Expression("10\\pi", "cm^2")), ("\\$10\\pi", Expression("10\\pi", "dollar")),
        ("x\\%", Expression("x", percent=True)), ("\\cos 58^\\circ", Expression("\\cos 58^{\\circ}")),
        ("2x abc", Expression("2x abc")), ("\\text{Evelyn}", Words("evelyn")), ("No  solution", Words("no solution")),
        ("\\text{(C)}", Expression("C")), ("\\text{4:30 p.m.}", Words("4:30pm")),
        ("1, 2", Collection("", "", (ONE, TWO))), ("1 and 2", Collection("", "", (ONE, TWO))),
        ("1\\text{, and }2", Collection("", "", (ONE, TWO))),
        ("\\text{A,B}", Collection("", "", (Expression("A"), Expression("B")))),
        ("(1, 2)", Collection("(", ")", (ONE, TWO))), ("\\left[1, 2\\right)", Collection("[", ")", (ONE, TWO))),
        ("\\{1, 2\\}", Collection("{", "}", (ONE, TWO))), ("\\{\\}", Collection("{", "}", ())),
        ("\\pm 1", Collection("", "", (ONE, number(-1)))), ("2, \\pm 1", Collection("", "", (TWO, ONE, number(-1)))),
        ("(\\pm 1, 2)", Collection("", "", tuple(Collection("(", ")", (one, TWO)) for one in (ONE, number(-1))))),
        ("1:2", Collection(":", "", (ONE, TWO))),
        ("(1,2)\\cup[1,2]", Union((Collection("(", ")", (ONE, TWO)), Collection("[", "]", (ONE, TWO))))),
        ("x = 1, 2", Relation(("x", "1, 2"), ("=",))), ("x = 1,000", Relation(("x", "1,000"), ("=",))),
        ("0 \\le x < 1", Relation(("0", "x", "1"), ("<=", "<"))), ("f(1,2) = 3", Relation(("f(1,2)", "3"), ("=",))),
        ("\\begin{pmatrix} 1 & 2 \\\\ 3 & x \\end{pmatrix}", Matrix(((ONE, TWO), (THREE, X)), "")),
    ],
)  # fmt: skip
def test_forms(text: str, form: Form) -> None:
    read = read_form(undress(unify(text)))
    if isinstance(read, Matrix) and isinstance(form, Matrix):
        assert read.rows == form.rows
    else:
        assert read == form


@pytest.mark.parametrize(
    "text",
    ["", "$$", "(1, 2", "1, 2)", "\\{1)", "(1]", "[x)", "{", "}{", "(" * 40 + "1" + ")" * 40, ",".join(["1"] * 200)],
)
def test_refused(text: str) -> None:
    with pytest.raises(NotUnderstood):
        read_form(undress(unify(text)))


def test_pieces_are_separated_outside_of_brackets_only() -> None:
    assert split("a, (b, c), \\{d, e\\}, {f, g}, [h, i)", (",",))[0] == [
        "a",
        "(b, c)",
        "\\{d, e\\}",
        "{f, g}",
        "[h, i)",
    ]
    assert split("sand and band", ("and",)) == (["sand", "band"], ["and"])
    assert len(split(",".join("x" * MAX_ITEMS), (",",))[0]) == MAX_ITEMS
    with refuses(NotUnderstood, "too many"):
        split(",".join("x" * (MAX_ITEMS + 1)), (",",))


def test_what_relations_say() -> None:
    def say(text: str) -> Statement:
        relation = read_form(undress(unify(text)))
        assert isinstance(relation, Relation)
        return resolve(relation)

    infinity, minus = Expression("\\infty"), Expression("-\\infty")
    assert (say("x = 2").name, say("x = 2").content) == ("x", TWO)
    assert say("x = 1 + 1 = 2").content == TWO
    assert (say("x \\approx 2").name, say("x \\approx 2").content) == ("x", TWO)
    assert say("x = 2 \\approx 3").content == TWO
    assert (say("1 + 1 = 2").name, say("1 + 1 = 2").content) == ("", TWO)
    assert say("x + 1 = 2").content is None
    assert say("1 = x + 2").content is None
    assert say("x \\in (1, 2]").content == Collection("(", "]", (ONE, TWO))
    assert say("x > 1") == Statement("x", Collection("(", ")", (ONE, infinity)), ("1", "x"), ("<",))
    assert say("1 \\ge x").content == Collection("(", "]", (minus, ONE))
    assert say("2 > x \\ge 1").content == Collection("[", ")", (ONE, TWO))
    assert say("x \\ne 1").content == Union((Collection("(", ")", (minus, ONE)), Collection("(", ")", (ONE, infinity))))
    assert say("x < y").content is None
    assert say("x + y < 1").content is None
    with pytest.raises(NotUnderstood):
        say("= 2")


@pytest.mark.parametrize(("text", "is_one"), read_cases("answers.txt", "names"))
def test_names(text: str, is_one: bool) -> None:
    assert is_name(text) is is_one
