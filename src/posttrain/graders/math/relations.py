"""What a relation says: the value of a name, the region of a name, or an equation between expressions."""

from __future__ import annotations

import re
from dataclasses import dataclass

from posttrain.graders.math.reading import (
    Collection,
    Expression,
    Form,
    NotUnderstood,
    Relation,
    Union,
    read_form,
)

_SUBSCRIPT = re.compile(r"_\{[^{}]*\}|_\w|\\prime|\^\{-1\}")
_GREEK = re.compile(r"\\(?:alpha|beta|gamma|delta|theta|lambda|mu|phi|rho|sigma|omega|angle)")
_ARGUMENTS = re.compile(r"(?<=[A-Za-z}])\s*\([^()]*\)")
_NAME = re.compile(r"[A-Za-z(){}|,:/ \[\]]+")
_NEGATION = re.compile(r"(?<![A-Za-z])(?:not|no|non|never|neither|none)(?![A-Za-z])")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_BOUND = re.compile(r"\\(?:lim|sum|int|prod)(?![A-Za-z])|\\begin\{[vV]matrix\}")
_FLIPPED = {">": "<", ">=": "<=", "<": ">", "<=": ">="}
_INFINITY = Expression("\\infty")
_MINUS_INFINITY = Expression("-\\infty")


@dataclass(frozen=True, slots=True)
class Statement:
    """What a relation says.

    ``name`` and ``said``: x and 3 of ``x = 3``, x and [1, 2] of ``x \\in [1,2]`` or ``1 \\le x \\le 2``. The name is
    empty where the left side is a calculation (``1+2 = 3``), ``said`` is None of an equation or inequality between
    expressions. ``sides`` and ``operators``: the whole, never with ``>`` or ``>=``.
    """

    name: str
    said: Form | None
    sides: tuple[str, ...]
    operators: tuple[str, ...]


def resolve(relation: Relation) -> Statement:
    """What the relation says.

    Raises:
        NotUnderstood: a side is empty or cannot be read.
    """
    sides, operators = _without_approximation(relation)
    if not all(sides):
        raise NotUnderstood("an empty side")
    if operators and operators[0] in (">", ">="):
        sides, operators = sides[::-1], tuple(_FLIPPED.get(operator, operator) for operator in reversed(operators))
    name, said = "", None
    if not operators:
        said = read_form(sides[0])
    elif set(operators) == {"="}:
        if is_name(sides[0]):
            name, said = plain_name(sides[0]), read_form(sides[-1])
        elif len(sides) == 2 and is_name(sides[1]):  # 3 = x
            name, said = plain_name(sides[1]), read_form(sides[0])
        elif _BOUND.search(sides[0]) or all(map(_is_constant, sides)):
            said = read_form(sides[-1])
    elif operators == ("in",):
        if is_name(sides[0]):
            name, said = plain_name(sides[0]), read_form(sides[1])
    else:
        name, said = _read_inequality(sides, operators)
    return Statement(name, said, sides, operators)


def _without_approximation(relation: Relation) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """``x ≈ 11`` says x = 11; of ``1/3 ≈ 0.33`` the exact side counts, and likewise in ``x = 1/3 ≈ 0.33``."""
    sides, operators = relation.sides, relation.operators
    if "~" not in operators:
        return sides, operators
    place = operators.index("~")
    if place < len(operators) - 1:
        raise NotUnderstood("an approximation in the middle")
    if not sides[-1]:
        raise NotUnderstood("an empty side")
    if place == 0 and (is_name(sides[0]) or not sides[0]):
        return (sides, ("=",)) if sides[0] else (sides[1:], ())
    return sides[: place + 1], operators[:place]


def is_name(text: str) -> bool:
    """``x``, ``f(x)``, ``x_{1}``, ``AB``, ``\\angle ABC``, ``(p,q)``, ``\\frac{NO}{BO}``: letters, no calculation."""
    bare = _ARGUMENTS.sub("", _SUBSCRIPT.sub("", text))
    rest = _COMMAND.sub("", bare)
    if _NEGATION.search(rest):
        return False
    has_letter = re.search(r"[A-Za-z]", rest) or _GREEK.search(bare)
    return has_letter is not None and (not rest or _NAME.fullmatch(rest) is not None)


def plain_name(text: str) -> str:
    """A name without blanks, braces and fonts, so that spellings of it agree."""
    return re.sub(r"\\text|[\s{}]", "", text)


def _is_constant(text: str) -> bool:
    """Whether no variable stands there; e and i are none."""
    return not re.search(r"[A-Za-df-hj-z]", _COMMAND.sub("", re.sub(r"\\text\{[^{}]*\}", "", text)))


def _read_inequality(sides: tuple[str, ...], operators: tuple[str, ...]) -> tuple[str, Form | None]:
    """The name between constants, and its interval."""
    if operators == ("!=",) and is_name(sides[0]) and _is_constant(sides[1]):
        hole = read_form(sides[1])
        below, above = (Collection("(", ")", ends) for ends in ((_MINUS_INFINITY, hole), (hole, _INFINITY)))
        return plain_name(sides[0]), Union((below, above))
    if not set(operators) <= {"<", "<="} or len(sides) > 3:
        return "", None
    middle = 1 if len(sides) == 3 or not is_name(sides[0]) else 0
    ends = [side for place, side in enumerate(sides) if place != middle]
    if not is_name(sides[middle]) or not all(map(_is_constant, ends)):
        return "", None
    low = read_form(sides[middle - 1]) if middle else _MINUS_INFINITY
    high = read_form(sides[middle + 1]) if middle + 1 < len(sides) else _INFINITY
    opening = "[" if middle and operators[0] == "<=" else "("
    closing = "]" if middle + 1 < len(sides) and operators[-1] == "<=" else ")"
    return plain_name(sides[middle]), Collection(opening, closing, (low, high))
