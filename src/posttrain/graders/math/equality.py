"""Equality of mathematical answers. Workers of ``graders.math`` run ``compare_answers``.

Both sides must agree in kind, order (if meaningful), brackets, names, units stated by both, and values. Optional parts
may be missing on one side: a unit, a name (``x = 3`` and ``3``), parentheses around a list.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

from posttrain.graders.answers import Quantity, canonical_unit, parse_quantity, same_quantity, without_spaces
from posttrain.graders.math.forms import (
    BasedNumber,
    Collection,
    Expression,
    Form,
    Matrix,
    NotUnderstood,
    Relation,
    Union,
    Words,
    all_but,
    is_time,
    read_form,
    undress,
)
from posttrain.graders.math.notation import unify
from posttrain.graders.math.values import constant_ratio, is_near, parse_latex, rational, same_value

# A relation assigns a value to a name, restricts a name to a region, or equates expressions.

_SUBSCRIPT = re.compile(r"_\{(?:\\text\{[^{}]*\}|[^{}])*\}|_\w|\\prime|\^\{-1\}")
_GREEK = re.compile(r"\\(?:alpha|beta|gamma|delta|theta|lambda|mu|phi|rho|sigma|omega|angle)")
_ARGUMENTS = re.compile(r"(?<=[A-Za-z}])\s*\([^()]*\)")
_NAME = re.compile(r"[A-Za-z(){}|,:/ \[\]]+")
_NEGATION = re.compile(r"(?<![A-Za-z])(?:not|no|non|never|neither|none)(?![A-Za-z])")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_BOUND = re.compile(r"\\(?:lim|sum|int|prod)(?![A-Za-z])|\\begin\{[vV]matrix\}")
_FLIPPED = {">": "<", ">=": "<=", "<": ">", "<=": ">="}
_INFINITY = Expression("\\infty")
_MINUS_INFINITY = Expression("-\\infty")
_ELLIPSIS = Expression("\\dots")


@dataclass(frozen=True, slots=True)
class Statement:
    """A parsed relation.

    ``name`` and ``content``: x and 3 for ``x = 3``, x and [1, 2] for ``x \\in [1,2]`` or ``1 \\le x \\le 2``.
    ``name`` is "" if the left side is a calculation (``1+2 = 3``), None for equations and inequalities between
    expressions. ``sides`` and ``operators`` hold the whole chain, with ``>`` and ``>=`` flipped.
    """

    name: str
    content: Form | None
    sides: tuple[str, ...]
    operators: tuple[str, ...]


def resolve(relation: Relation) -> Statement:
    """Parse a relation.

    Raises:
        NotUnderstood: an empty or unreadable side.
    """
    sides, operators = _without_approximation(relation)
    if not all(sides):
        raise NotUnderstood("an empty side")
    if operators and operators[0] in (">", ">="):
        sides = sides[::-1]
        operators = tuple(_FLIPPED.get(operator, operator) for operator in reversed(operators))
    name = ""
    content = None
    if not operators:
        content = read_form(sides[0])
    elif set(operators) == {"="} and len(set(map(without_spaces, sides))) == 1:  # 1 = 1 gives nothing a value
        pass
    elif set(operators) == {"="}:
        if is_name(sides[0]):
            name = plain_name(sides[0])
            content = read_form(sides[-1])
        elif len(sides) == 2 and is_name(sides[1]):  # 3 = x
            name = plain_name(sides[1])
            content = read_form(sides[0])
        elif _BOUND.search(sides[0]) or all(map(_is_constant, sides)):
            content = read_form(sides[-1])
    elif operators == ("in",):
        if is_name(sides[0]):
            name = plain_name(sides[0])
            content = read_form(sides[1])
    else:
        name, content = _read_inequality(sides, operators)
    return Statement(name, content, sides, operators)


def _without_approximation(relation: Relation) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """``x ≈ 11`` says x = 11; of ``1/3 ≈ 0.33`` the exact side counts, and likewise in ``x = 1/3 ≈ 0.33``."""
    sides = relation.sides
    operators = relation.operators
    if "~" not in operators:
        return sides, operators
    place = operators.index("~")
    if place < len(operators) - 1:
        raise NotUnderstood("an approximation in the middle")
    if not sides[-1]:
        raise NotUnderstood("an empty side")
    if place == 0 and (is_name(sides[0]) or not sides[0]):
        if sides[0]:
            return (sides, ("=",))
        return (sides[1:], ())
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
    """Normalize a name: no spaces, braces or fonts."""
    return re.sub(r"\\text|[\s{}]", "", text)


def _is_constant(text: str) -> bool:
    """Check if an expression is free of variables; e and i are constants."""
    return not re.search(r"[A-Za-df-hj-z]", _COMMAND.sub("", re.sub(r"\\text\{[^{}]*\}", "", text)))


def _read_inequality(sides: tuple[str, ...], operators: tuple[str, ...]) -> tuple[str, Form | None]:
    """Parse a name bounded by constants, with its interval."""
    if operators == ("!=",) and is_name(sides[0]) and _is_constant(sides[1]):
        return plain_name(sides[0]), all_but(read_form(sides[1]))
    if not set(operators) <= {"<", "<="} or len(sides) > 3:
        return "", None
    middle = 1
    if len(sides) < 3 and is_name(sides[0]):
        middle = 0
    ends = [side for place, side in enumerate(sides) if place != middle]
    if not is_name(sides[middle]) or not all(map(_is_constant, ends)):
        return "", None
    opening = "("
    closing = ")"
    low: Form = _MINUS_INFINITY
    high: Form = _INFINITY
    if middle == 1:
        low = read_form(sides[0])
        if operators[0] == "<=":
            opening = "["
    if middle + 1 < len(sides):
        high = read_form(sides[middle + 1])
        if operators[-1] == "<=":
            closing = "]"
    return plain_name(sides[middle]), Collection(opening, closing, (low, high))


_UNCHECKED = re.compile(r"\\(?:lim|int)(?![A-Za-z])")  # what may take for ever to evaluate
_PUNCTUATION = re.compile(r"[ .']|(?<=[a-z]{4})-(?=[a-z])|(?<=[a-z])-(?=[a-z]{4})")
_SIGN = re.compile(r"(?<=[\w)}])\s*[+-]")
_COEFFICIENT = re.compile(r"^\d+\s*(?:\\cdot\s*)?(?=[A-Za-z])|\^\{\d+\}$")
_INDEX = re.compile(r"_\d+$")
_ONE_LETTER = re.compile(r"[A-Za-z]")
_LABELLED = re.compile(r"\\text\{\(([A-E])\) ?(?:\} ?(?!or\b|and\b|[;,])(\S.*)|([^{}]+)\})")
_CHOICE = re.compile(r"(?:\\text\{)?\(?([A-E])\)?\}?")
# Equivalent spellings of word answers.
_SAME_WORDS = {"nosolutions": "nosolution", "norealsolutions": "norealsolution", "doesnotexist": "dne",
               "infinity": "\\infty"}  # fmt: skip
_DOLLAR = canonical_unit("dollars")
_CENT = canonical_unit("cents")
_DECIMAL = re.compile(r"[+-]?[0-9]*\.([0-9]+)")


def compare_answers(item: Sequence[Any]) -> bool:
    """Compare ``[gold, answer, relative tolerance]``; True if correct."""
    gold, answer, tolerance = item
    left = undress(unify(gold))
    right = undress(unify(answer))
    if without_spaces(left) == without_spaces(right):
        return bool(left)
    labelled = _LABELLED.fullmatch(right)
    if labelled is not None:  # \\textbf{(C)} 5 is graded according to the gold answer's kind
        value = labelled[2] or labelled[3]
        letter = _CHOICE.fullmatch(left)
        if letter is None:
            right = value
        elif parse_quantity(value) is not None:  # (C) maybe is a hedge
            return letter[1] == labelled[1]
    try:
        gold_form = read_form(left)
        answer_form = read_form(right)
    except NotUnderstood:
        return False
    return FormComparison(float(tolerance)).same(gold_form, answer_form)


@dataclass(frozen=True, slots=True)
class FormComparison:
    """``relative_tolerance``: for plain numbers, accept ``|x − y| ≤ tolerance · |x|``."""

    relative_tolerance: float = 0.0

    def same(self, gold: Form, answer: Form) -> bool:
        """Check if two forms are equivalent. Unreadable parts never match."""
        try:
            return self._same(gold, answer)
        except NotUnderstood:
            return False

    def _same(self, gold: Form, answer: Form) -> bool:
        if isinstance(gold, Relation) or isinstance(answer, Relation):
            return self._same_relation(gold, answer)
        if isinstance(gold, Union) or isinstance(answer, Union):
            are_sets = isinstance(gold, Union | Collection) and isinstance(answer, Union | Collection)
            return are_sets and self._same_unordered(_parts(gold), _parts(answer))
        if {type(gold), type(answer)} == {Matrix, Collection}:  # a vector as a tuple
            return self.same(_as_tuple(gold), _as_tuple(answer))
        if isinstance(gold, Collection) or isinstance(answer, Collection):
            return self._same_collection(gold, answer)
        if isinstance(gold, Matrix) and isinstance(answer, Matrix):
            if [len(row) for row in gold.rows] != [len(row) for row in answer.rows]:
                return False
            return all(self._same_ordered(*pair) for pair in zip(gold.rows, answer.rows, strict=True))
        if isinstance(gold, BasedNumber) or isinstance(answer, BasedNumber):
            return gold == answer
        if _is_empty_set(gold) and _is_empty_set(answer):
            return True
        if isinstance(gold, Words) or isinstance(answer, Words):
            return "" not in (_letters(gold), _letters(answer)) and _letters(gold) == _letters(answer)
        if gold == answer == _ELLIPSIS:
            return True
        if isinstance(gold, Quantity) and isinstance(answer, Quantity):
            return same_quantity(gold, answer, float(abs(gold.value)) * self.relative_tolerance)
        return _same_expression(gold, answer)

    def _same_ordered(self, gold: Sequence[Form], answer: Sequence[Form]) -> bool:
        return len(gold) == len(answer) and all(self.same(*pair) for pair in zip(gold, answer, strict=True))

    def _same_unordered(self, gold: Sequence[Form], answer: Sequence[Form]) -> bool:
        """Check that both sides contain the same items, ignoring repetition."""
        for one in gold:
            if not any(self.same(one, other) for other in answer):
                return False
        return all(any(self.same(one, other) for one in gold) for other in answer)

    def _same_collection(self, gold: Form, answer: Form) -> bool:
        if not (isinstance(gold, Collection) and isinstance(answer, Collection)):
            return self._same_single(gold, answer)
        kinds = (gold.opening, answer.opening)
        if set(kinds) <= {"", "{"} or kinds == ("cases", "cases"):
            first = _grouped(gold, answer)
            second = _grouped(answer, gold)
            is_ordered = _ELLIPSIS in (*first.items, *second.items)
            if kinds == ("", "") and not is_ordered:
                # If only one list names its values (a = 4, b = 5), order matters.
                num_names = sorted((len(_names(first)), len(_names(second))))
                is_ordered = num_names[0] == 0 and num_names[1] > 1
            if is_ordered:
                return self._same_ordered(first.items, second.items)
            return self._same_unordered(first.items, second.items)
        if set(kinds) == {"", "("} and {gold.closing, answer.closing} == {"", ")"}:
            return self._same_ordered(gold.items, answer.items)
        brackets = gold.opening == answer.opening and gold.closing == answer.closing
        if brackets and gold.opening == ":":
            return self._same_ordered(gold.items, answer.items) or _same_ratio(gold.items, answer.items)
        return brackets and self._same_ordered(gold.items, answer.items)

    def _same_single(self, gold: Form, answer: Form) -> bool:
        """Compare a collection with a scalar form: a one-element set is its element, 1:2 is 1/2, x+1 or 1+x is x+1."""
        collection = gold
        other = answer
        if not isinstance(gold, Collection):
            collection = answer
            other = gold
        assert isinstance(collection, Collection)
        if collection.opening == ":" and len(collection.items) == 2:
            return not _is_whole(collection) and not _is_whole(other) and _same_expression(gold, answer)
        if collection.opening == "{" and len(collection.items) <= 1:
            if collection.items:
                return self.same(collection.items[0], other)
            return _is_empty_set(other)
        first, *others = collection.items
        if collection.opening or not any(one != first for one in others):
            return False
        return all(self.same(first, one) for one in others) and self.same(first, other)

    def _same_relation(self, gold: Form, answer: Form) -> bool:
        left = None
        right = None
        gold_content: Form | None = gold
        answer_content: Form | None = answer
        if isinstance(gold, Relation):
            left = resolve(gold)
            gold_content = left.content
        if isinstance(answer, Relation):
            right = resolve(answer)
            answer_content = right.content
        statements = [statement for statement in (left, right) if statement is not None]
        if left is not None and right is not None and _letters_named(left) != _letters_named(right):
            return False  # x = y = 3 states more than x = 3
        names = {statement.name for statement in statements if statement.name}
        agree = False
        if gold_content is not None and answer_content is not None and len(names) < 2:
            agree = self.same(gold_content, answer_content)
        if agree:
            return all(map(self._holds, statements))
        if left is not None and right is not None:
            return self._same_chain(left, right)
        if right is None or right.content is not None or set(right.operators) != {"="}:
            return False
        value = _value_of_names(right)
        if value is not None:  # a + b = 12
            return self.same(gold, read_form(value)) and self._holds(right)
        return all(self.same(gold, read_form(side)) for side in right.sides)  # (x+1)^2 = x^2+2x+1

    def _holds(self, statement: Statement) -> bool:
        """Check that ``x = 3 + 2 = 5`` has no contradicting neighbours. The last one may be rounded.

        Sides without a known value (words, foreign units, integrals) are ignored. A number next to a list, an
        interval or digits with a base counts as a contradiction, since those are not numbers.
        """
        if set(statement.operators) != {"="}:
            return True
        for one, other in pairwise(statement.sides):
            if one.strip() == "e":  # e = 0.6 defines a variable named e
                continue
            if not (_has_value(one) and _has_value(other)):
                if not is_name(one) and self._of_other_kinds(one, other):
                    return False
                continue
            left = read_form(one)
            right = read_form(other)
            left_unit = canonical_unit(_unit_of(left))
            right_unit = canonical_unit(_unit_of(right))
            if left_unit and right_unit and left_unit != right_unit:
                is_angle = "°" in (left_unit, right_unit)
                if is_angle or (left_unit == _DOLLAR and right_unit != _CENT):  # 3 tickets = $5 may be
                    return False
            elif not self.same(left, right) and not _rounds(one, other):
                return False
        return True

    def _of_other_kinds(self, one: str, other: str) -> bool:
        """Check for incomparable kinds: number, digits with a base, list and time of day, or two different lists."""
        sides = {one: read_form(one), other: read_form(other)}
        kinds = {_kind_of(side, form) for side, form in sides.items()}
        if kinds == {"time", ""}:  # names and words may denote a time, calculations may not
            return any(isinstance(form, Expression) and not is_name(side) for side, form in sides.items())
        if len(kinds) == 2:
            return "" not in kinds
        return kinds == {"list"} and not self.same(*sides.values())

    def _same_chain(self, gold: Statement, answer: Statement) -> bool:
        """Compare equations and inequalities: side by side, or through the ratio of their differences."""
        if gold.operators != answer.operators:
            return False
        pairs = list(zip(gold.sides, answer.sides, strict=True))
        if len(pairs) > 2 or gold.operators == ("in",):
            return all(self.same(read_form(one), read_form(other)) for one, other in pairs)
        is_symmetric = gold.operators[0] in ("=", "!=")
        ways = [pairs]
        if is_symmetric:
            ways.append(list(zip(gold.sides, answer.sides[::-1], strict=True)))
        for way in ways:
            if all(self.same(read_form(one), read_form(other)) for one, other in way):
                return True
        for side in (*gold.sides, *answer.sides):
            parse_latex(side)  # in a difference, 0 times some words would be gone
        ratio = constant_ratio(_difference(gold), _difference(answer))
        if ratio is None:
            return False
        return is_symmetric or bool(not ratio.imag and ratio.real > 0)


def _difference(statement: Statement) -> Any:
    """The first side of a relation less the second, as a sympy object."""
    return parse_latex(f"({statement.sides[0]}) - ({statement.sides[1]})")


def _value_of_names(statement: Statement) -> str | None:
    """12 of ``a + b = 12``, ``12 = x_1 - x_2`` and ``a^2 + b^2 = 10 + 2 = 12``: names in a sum, and a constant.

    One name alone (``2x = 12``, ``x^2 + x = 12``) is an equation that waits to be solved.
    """
    sides = statement.sides
    if _is_constant(sides[0]):
        sides = sides[::-1]
    terms = [_COEFFICIENT.sub("", term.strip()) for term in _SIGN.split(sides[0])]
    named = {plain_name(term) for term in terms if is_name(term)}
    if len(terms) < 2 or len(named) != len(terms) or not all(map(_is_constant, sides[1:])):
        return None
    return sides[-1]


def _letters_named(statement: Statement) -> set[str]:
    """Find letters set equal by a chain of equations, if it has at least two."""
    letters = {side.strip() for side in statement.sides if _ONE_LETTER.fullmatch(side.strip())}
    if set(statement.operators) == {"="} and len(letters) > 1 and len(statement.sides) > 2:
        return letters
    return set()


def _same_ratio(gold: Sequence[Form], answer: Sequence[Form]) -> bool:
    """Compare ratios such as 2:4:6 and 1:2:3: equal up to a nonnegative factor."""
    if len(gold) != len(answer):
        return False
    nothing = rational(Fraction(0))
    pairs = [(_value_of(one), _value_of(other)) for one, other in zip(gold, answer, strict=True)]
    vanish = [[same_value(value, nothing) for value in pair] for pair in pairs]
    if any(one != other for one, other in vanish) or all(one for one, _ in vanish):
        return False
    first, other = pairs[[one for one, _ in vanish].index(False)]
    if first.is_number and other.is_number and first.is_negative != other.is_negative:
        return False
    return all(same_value(one * other, two * first) for one, two in pairs)


def _is_whole(form: Form) -> bool:
    """Check for an integer, in any notation."""
    value = _value_of(form)
    return not value.free_symbols and bool(value.is_integer)


def _as_tuple(form: Form) -> Form:
    """Convert a row or column matrix to a tuple. Other forms are unchanged.

    Raises:
        NotUnderstood: a matrix with multiple rows and columns.
    """
    if not isinstance(form, Matrix):
        return form
    if len(form.rows) > 1 and any(len(row) > 1 for row in form.rows):
        raise NotUnderstood("a matrix is no tuple")
    return Collection("(", ")", tuple(entry for row in form.rows for entry in row))


def _parts(form: Form) -> tuple[Form, ...]:
    """List members of a union. Finite sets are split; a list of regions (``x < 1 or x > 2``) is treated as their
    union.
    """
    if isinstance(form, Union):
        return tuple(part for member in form.parts for part in _parts(member))
    if isinstance(form, Collection) and form.opening == "{":
        return tuple(replace(form, items=(item,)) for item in form.items)
    if isinstance(form, Collection) and not form.opening:
        return tuple(part for item in form.items for part in _parts(item))
    if isinstance(form, Relation):
        content = resolve(form).content
        if content is not None:
            return _parts(content)
    return (form,)


def _grouped(named: Collection, other: Collection) -> Collection:
    """Rewrite ``p=5, q=2; p=7, q=2`` as (5, 2), (7, 2) if names repeat in order and the other list holds pairs."""
    tuples = [item for item in other.items if isinstance(item, Collection) and item.opening == "("]
    widths = {len(item.items) for item in tuples}
    if len(tuples) < len(other.items) or len(widths) != 1:
        return named
    (width,) = widths
    if not width or len(named.items) != width * len(tuples):
        return named
    statements = [resolve(item) for item in named.items if isinstance(item, Relation)]
    values = [one.content for one in statements if one.content is not None and one.name]
    names = [one.name for one in statements]
    if len(values) < len(named.items) or len(set(names)) != width or names != names[:width] * len(tuples):
        return named
    grouped = []
    for start in range(0, len(values), width):
        grouped.append(Collection("(", ")", tuple(values[start : start + width])))
    return replace(named, items=tuple(grouped))


def _names(collection: Collection) -> set[str]:
    """Roots ``x_1`` and ``x_2`` have one name: which is which is a matter of taste."""
    named = (resolve(item).name for item in collection.items if isinstance(item, Relation))
    return {_INDEX.sub("", name) for name in named if name}


def _is_empty_set(form: Form) -> bool:
    if isinstance(form, Words):
        return _letters(form) == "nosolution"
    return isinstance(form, Expression) and form.latex.strip() == "\\emptyset" and not form.unit


def _has_value(side: str) -> bool:
    """Check if one side of an equation is a constant that evaluates quickly."""
    if _UNCHECKED.search(side):
        return False
    try:
        form = read_form(side)
        return isinstance(form, Quantity) or not _value_of(form).free_symbols
    except NotUnderstood:
        return False


def _kind_of(side: str, form: Form) -> str:
    """Classify a side by a kind that only equals itself. Empty for letters and words."""
    if isinstance(form, BasedNumber):
        return "digits with a base"
    if isinstance(form, Collection | Union) or _is_empty_set(form):
        return "list"
    if is_time(form):
        return "time"
    if _has_value(side):
        return "number"
    return ""


def _rounds(exact: str, rounded: str) -> bool:
    """Check if the first rounds to the second, a decimal: 1/3 and 0.33."""
    decimal = _DECIMAL.fullmatch(rounded.replace(" ", ""))
    if decimal is None:
        return False
    half = Fraction(1, 2 * 10 ** len(decimal[1]))
    return is_near(_value_of(read_form(exact)), rational(Fraction(decimal[0])), half)


def _letters(form: Form) -> str:
    """Text of a word or letter form without spaces, otherwise empty."""
    if isinstance(form, Words):
        letters = _PUNCTUATION.sub("", form.text)
        return _SAME_WORDS.get(letters, letters)
    if isinstance(form, Expression) and not form.unit:
        return "".join(form.latex.split()).casefold()
    return ""


def _same_expression(gold: Form, answer: Form) -> bool:
    """Compare values with sympy. Units follow ``answers.same_quantity``: if only one side has a unit, it is ignored."""
    units = [canonical_unit(_unit_of(form)) for form in (gold, answer)]
    if units[0] and units[1] and units[0] != units[1]:
        return False
    left = _value_of(gold)
    right = _value_of(answer)
    if same_value(left, right):
        return True
    if _is_percent(gold) == _is_percent(answer):
        return False
    if _is_percent(gold):
        return same_value(left / 100, right)
    return same_value(left, right / 100)


def _unit_of(form: Form) -> str:
    if isinstance(form, Quantity | Expression):
        return form.unit
    return ""


def _is_percent(form: Form) -> bool:
    return isinstance(form, Quantity | Expression) and form.percent


def _value_of(form: Form) -> Any:
    """Convert a value to sympy."""
    if isinstance(form, Quantity):
        return rational(form.value)
    if isinstance(form, Expression | Matrix):
        return parse_latex(form.latex)
    if isinstance(form, Collection) and form.opening == ":" and len(form.items) == 2:
        first, second = (_value_of(item) for item in form.items)
        return first / second
    raise NotUnderstood("no single value")
