"""Whether two mathematical expressions have the same value. The only place where sympy works.

LaTeX is read by the grammar of math-verify's parser (``latex2sympy2_extended``), never by Python. What it
gives is compared by number: both sides are evaluated at the same points, exactly enough to tell integers of thousands
of digits apart. Expressions that differ are so refuted at the first point; simplification, which may take for ever,
is not needed. Runs in the worker processes of ``rewards.math``, because even reading and evaluating may hang.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

import mpmath
import sympy
from antlr4 import Token
from antlr4.atn.PredictionMode import PredictionMode
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, _Latex2Sympy
from sympy.core.function import AppliedUndef

from posttrain.rewards.answers import parse_quantity
from posttrain.rewards.math_reading import NotUnderstood

DIGITS = 60  # of an evaluation; more for large numbers
CLOSE_DIGITS = 50  # two values that agree to this many decimals, and this many digits, are the same
MAX_MAGNITUDE = 5000  # digits before the decimal point of the largest number that is compared
MAX_CANCELLED_DIGITS = 400
BITS_PER_DIGIT = 3  # a little less than log2(10)
MAX_LATEX_CHARS = 1000
MAX_NESTING = 10  # of brackets: reading takes time that grows with their depth, evaluating even doubles with each
MAX_POWERS = 2  # a^{b^c} is a number that can be compared, a^{b^{c^d}} is none; likewise for subscripts
NUM_POINTS = 4  # that must agree
_CONFIG = ConversionConfig(lowercase_symbols=False)
# Two numbers with nothing between them are no product; a^b^c, n!! and many bars are read differently by everyone.
_AMBIGUOUS = re.compile(r"\d\s+\d|\^\{[^{}]*\}\s*\^|!\s*\)*\s*!|(?:\|[^|]*){13}")
_BRACKETS = re.compile(r"\\.|[\^_]\{|[{}()\[\]]")
_OPERATIONS = (sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit, sympy.Derivative, sympy.UnevaluatedExpr)
_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89)


def rational(value: Fraction) -> Any:
    """An exact number of sympy's."""
    return sympy.Rational(value.numerator, value.denominator)


class _Reader(_Latex2Sympy):
    """The parser for one value: lists, sets and relations have been taken apart before."""

    def parse(self, latex_str: str) -> Any:
        """One value and nothing behind it.

        Read first without looking at the context of a rule, which is faster and gives the same tree where it gives
        one (Parr, Harwell and Fisher 2014, section 3.2), and with it where that fails.
        """
        try:
            tree = self._read(latex_str, PredictionMode.SLL)
        except NotUnderstood:
            tree = self._read(latex_str, PredictionMode.LL)
        return self.convert_expr(tree)

    def _read(self, latex: str, mode: Any) -> Any:
        parser = self.create_parser(latex)
        parser._interp.predictionMode = mode
        try:
            tree = parser.expr()
        except (MemoryError, RecursionError):
            raise
        except Exception as error:  # the error listener raises plain Exception
            raise NotUnderstood("no LaTeX of a value") from error
        if parser.getTokenStream().LA(1) != Token.EOF:
            raise NotUnderstood("more than one value")
        return tree

    def convert_binom(self, binom: Any) -> Any:
        """Not evaluated."""
        return sympy.binomial(self.convert_expr(binom.upper), self.convert_expr(binom.lower), evaluate=False)

    def parse_number(self, text: str) -> Any:
        """An exact fraction. The parser's own way evaluates the digits as Python and makes decimals inexact."""
        quantity = parse_quantity(text)
        if quantity is None:
            raise NotUnderstood("a number of too many digits")
        return rational(quantity.value)


@lru_cache(maxsize=512)
def parse_latex(latex: str) -> Any:
    """The sympy object, not evaluated. ``i`` is the imaginary unit; letters keep their case.

    Raises:
        NotUnderstood: the grammar does not know it, or it is ambiguous or too long.
    """
    if len(latex) > MAX_LATEX_CHARS or _AMBIGUOUS.search(latex) or _is_too_deep(latex):
        raise NotUnderstood("too long, too deep, or ambiguous")
    try:
        parsed = _Reader(convert_degrees=True, config=_CONFIG).parse(latex)
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # the parser raises plain Exception for what it does not know
        raise NotUnderstood(type(error).__name__) from error
    if not isinstance(parsed, sympy.Expr | sympy.MatrixBase):
        raise NotUnderstood("no single value")
    return _as_variables(parsed)


def _is_too_deep(latex: str) -> bool:
    opened: list[str] = []
    for match in _BRACKETS.finditer(latex):
        if match[0] in ("^{", "_{", "{", "(", "["):
            opened.append(match[0])
            if len(opened) > MAX_NESTING or max(opened.count("^{"), opened.count("_{")) > MAX_POWERS:
                return True
        elif not match[0].startswith("\\") and opened:
            opened.pop()
    return False


def _as_variables(parsed: Any) -> Any:
    """With ``i`` as the imaginary unit, where no sum runs over it, and ``f(x)`` of an unknown f as a variable."""
    bound = {limit[0] for node in parsed.atoms(sympy.Sum, sympy.Product) for limit in node.limits}
    units = {symbol for symbol in parsed.free_symbols if symbol.name in ("i", "imath")} - bound
    unknown = parsed.atoms(AppliedUndef)
    known = dict.fromkeys(units, sympy.I) | {call: sympy.Symbol(str(call)) for call in unknown}
    return parsed.xreplace(known) if known else parsed


def same_value(left: Any, right: Any) -> bool:
    """Whether two sympy objects are equal: numbers, expressions in the same variables, matrices.

    Raises:
        NotUnderstood: sympy cannot work with them.
    """
    try:
        return _same(_evaluated(left), _evaluated(right))
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # sympy raises what it likes on what it cannot do
        raise NotUnderstood(type(error).__name__) from error


def same_ratio(left: Any, right: Any) -> int:
    """The sign of left / right where that is one and the same real number everywhere, else 0.

    The equations ``left = 0`` and ``right = 0`` are then the same. Both must have the same variables, at least one.

    Raises:
        NotUnderstood: sympy cannot work with them.
    """
    try:
        return _constant_ratio(_evaluated(left), _evaluated(right))
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # sympy raises what it likes on what it cannot do
        raise NotUnderstood(type(error).__name__) from error


def _evaluated(parsed: Any) -> Any:
    """With sums, integrals, limits and matrix products carried out."""
    if isinstance(parsed, sympy.MatrixBase):
        return parsed.applyfunc(_evaluated)
    return parsed.doit() if isinstance(parsed, sympy.MatrixExpr) or parsed.has(*_OPERATIONS) else parsed


def _same(left: Any, right: Any) -> bool:
    if left == right:
        return True
    if isinstance(left, sympy.MatrixBase) and isinstance(right, sympy.MatrixBase):
        return left.shape == right.shape and all(map(_same, left.flat(), right.flat()))
    if isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr):
        return _same_at_points(left, right)
    return False


def _same_at_points(left: Any, right: Any) -> bool:
    """Agreement at ``NUM_POINTS`` points where both are defined; a difference at any of them decides.

    Points where both are real come first, because that is what school mathematics means: √x·√x = x.
    """
    names = sorted(left.free_symbols | right.free_symbols, key=str)
    with_imaginary_unit = left.has(sympy.I) or right.has(sympy.I)
    num_real = num_complex = 0
    for point in _points(names):
        values = _number(left, point, DIGITS), _number(right, point, DIGITS)
        if values[0] is None or values[1] is None:
            continue
        real = [not value.imag for value in values]
        if real[0] != real[1] and not with_imaginary_unit and names:
            continue  # outside of the domain of one of them
        if not _close(left, right, values, point):
            return False
        num_real, num_complex = num_real + all(real), num_complex + (not all(real))
        if not names or num_real >= NUM_POINTS or (with_imaginary_unit and num_real + num_complex >= NUM_POINTS):
            return True
    return num_real >= 2 or num_complex >= NUM_POINTS


def _constant_ratio(left: Any, right: Any) -> int:
    if left.free_symbols != right.free_symbols or not left.free_symbols:
        return 0
    first: Any = None
    agreed = 0
    for point in _points(sorted(left.free_symbols, key=str)):
        values = _number(left, point, DIGITS), _number(right, point, DIGITS)
        if not values[0] or not values[1]:
            continue  # not defined, or zero
        with mpmath.workdps(DIGITS):
            ratio = values[0] / values[1]
            if ratio.imag or (first is not None and abs(ratio / first - 1) > mpmath.mpf(10) ** -CLOSE_DIGITS):
                return 0
        first, agreed = ratio, agreed + 1
    return int(mpmath.sign(first.real)) if agreed >= NUM_POINTS else 0


def _points(names: Sequence[Any]) -> Iterator[dict[Any, Any]]:
    """Values of the variables: between 0 and 1, above 1, below 0, mixed, whole numbers (for n in an exponent)."""
    for number in range(3 * NUM_POINTS if names else 1):
        yield {name: _coordinate(number, place) for place, name in enumerate(names)}


def _coordinate(number: int, place: int) -> Any:
    """The value of variable ``place`` at point ``number``."""
    kind = number % 6
    low, high = sorted(_PRIMES[(5 * number + 3 * place + shift) % len(_PRIMES)] for shift in (0, 7))
    if kind == 5:
        return sympy.Integer(2 + number + place)
    value = sympy.Rational(low, high) if kind in (0, 2) else sympy.Rational(high, low)
    return -value if kind in (2, 3) or (kind == 4 and place % 2) else value


def _number(expression: Any, point: dict[Any, Any], digits: int) -> Any:
    """The complex number at a point, as mpmath's. None where it is not defined, or cancels too far to be known.

    What cancels to less than 10^-50, and further than 400 digits show, is 0.
    """
    value = expression.evalf(digits, subs=point, maxn=digits + MAX_CANCELLED_DIGITS)
    if not value.is_number or not value.is_finite:
        return None
    parts = []
    with mpmath.workdps(digits):
        for part in value.as_real_imag():
            if not (part.is_Float or part.is_Rational):
                return None
            number = part._to_mpmath(mpmath.mp.prec)
            if part.is_Float and part._prec < CLOSE_DIGITS * BITS_PER_DIGIT:  # lost to cancellation
                if abs(number) > mpmath.mpf(10) ** -CLOSE_DIGITS:
                    return None
                number = mpmath.mpf(0)
            parts.append(number)
        return mpmath.mpc(*parts)


def _close(left: Any, right: Any, values: Sequence[Any], point: dict[Any, Any]) -> bool:
    """Agreement to ``CLOSE_DIGITS`` decimals and digits; large numbers are evaluated once more, to the end."""
    if not values[0] or not values[1]:
        return bool(values[0] == values[1])
    magnitude = max(_magnitude(value) for value in values)
    if not _agree(values, magnitude) or magnitude > MAX_MAGNITUDE:
        return False
    if magnitude <= DIGITS - CLOSE_DIGITS:
        return True
    again = [_number(side, point, DIGITS + magnitude) for side in (left, right)]
    return again[0] is not None and again[1] is not None and _agree(again, 0)


def _agree(values: Sequence[Any], magnitude: int) -> bool:
    with mpmath.workdps(DIGITS + MAX_MAGNITUDE):
        return bool(abs(values[0] - values[1]) <= mpmath.mpf(10) ** (magnitude - CLOSE_DIGITS))


def _magnitude(value: Any) -> int:
    """About the digits before the decimal point; negative of small numbers."""
    return int(mpmath.mag(value) * 0.30103) + 1
