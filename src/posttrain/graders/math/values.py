"""Whether two mathematical expressions have the same value. Here and in ``math_points`` sympy works.

LaTeX is read by the grammar of math-verify's parser (``latex2sympy2_extended``), never by Python. What it gives is
compared by number: both sides are evaluated at the same points (``math_points``), exactly enough to tell integers of
thousands of digits apart. Expressions that differ are so refuted at the first point; simplification, which may take for
ever, is not needed. Runs in the worker processes of ``rewards.math``, because even reading and evaluating may hang.
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

from posttrain.graders.answers import parse_quantity
from posttrain.graders.math.points import CLOSE_DIGITS, DIGITS, PointComparison, number_at
from posttrain.graders.math.reading import NotUnderstood

MAX_MAGNITUDE = 5000  # digits before the decimal point of the largest number that is compared
MAX_LATEX_CHARS = 1000
MAX_NESTING = 10  # of brackets: reading takes time that grows with their depth, evaluating even doubles with each
MAX_POWERS = 2  # a^{b^c} is a number that can be compared, a^{b^{c^d}} is none; likewise for subscripts
_CONFIG = ConversionConfig(lowercase_symbols=False)
# Two numbers with nothing between them are no product; a^b^c, n!! and many bars are read differently by everyone.
_AMBIGUOUS = re.compile(r"\d\s+\d|\^\{[^{}]*\}\s*\^|!\s*\)*\s*!|(?:\|[^|]*){13}")
_ANGLE = re.compile(r"\\angle\s*\{?\s*([A-Z])\s*([A-Z])\s*([A-Z])(?![A-Za-z])\s*\}?")
# The letter I is no imaginary unit (I_1 and I_2 are currents); not where it stands in a command, a font or an index.
_CAPITAL_I = re.compile(r"\\(?:math|text)[a-z]*\{[^{}]*\}|\\[A-Za-z]+|_\{[^{}]*\}|_.|I")
# Without those that stand for something else in places: the d of dx, e and i.
_POWER_OF_LETTER = re.compile(
    r"(?:(?<![\\A-Za-z_^])[A-Zabcf-hj-z]|\\(?:alpha|beta|lambda|mu|omega|phi|pi|rho|sigma|theta)(?![A-Za-z]))(?=\s*\^)"
)
_BRACKETS = re.compile(r"\\.|[\^_]\{|[{}()\[\]]")
_OPERATIONS = (sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit, sympy.Derivative, sympy.UnevaluatedExpr)


def rational(value: Fraction) -> Any:
    """An exact number of sympy's."""
    return sympy.Rational(value.numerator, value.denominator)


class _Reader(_Latex2Sympy):
    """The parser for one value: lists, sets and relations have been taken apart before."""

    def parse(self, latex_str: str) -> Any:
        """One value and nothing behind it.

        Read first without looking at the context of a rule, which is many times faster and gives the same tree where it
        gives one (Parr, Harwell and Fisher 2014, section 3.2), and with it where that fails. It fails at each letter
        with a power, where the grammar waits for a subscript; ``{x}^2`` says the same and does not.
        """
        try:
            tree = self._read(_POWER_OF_LETTER.sub(r"{\g<0>}", latex_str), PredictionMode.SLL)
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
        parsed = _Reader(convert_degrees=True, config=_CONFIG).parse(_with_letters(latex))
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # the parser raises plain Exception for what it does not know
        raise NotUnderstood(type(error).__name__) from error
    if not isinstance(parsed, sympy.Expr | sympy.MatrixBase):
        raise NotUnderstood("no single value")
    if _vanishes(parsed, 1) or any(_vanishes(node, 2) for node in sympy.preorder_traversal(parsed)):
        raise NotUnderstood("0 times letters, which may be words")  # 0 maybe
    return _as_variables(parsed)


def _vanishes(node: Any, num_letters: int) -> bool:
    """Whether it is 0 times at least so many letters. sympy is asked about numbers only: it is slow with others."""
    if not isinstance(node, sympy.Mul):
        return False
    factors = list(_factors(node))
    numbers = [factor for factor in factors if not factor.free_symbols]
    return len(factors) - len(numbers) >= num_letters and any(number.is_zero for number in numbers)


def _factors(product: Any) -> Iterator[Any]:
    for factor in product.args:
        yield from _factors(factor) if isinstance(factor, sympy.Mul) else (factor,)


def _with_letters(latex: str) -> str:
    """What the parser would take for something else, as letters of its own."""
    latex = _CAPITAL_I.sub(lambda match: r"\mathcal{I}" if match[0] == "I" else match[0], latex)
    return _ANGLE.sub(_as_symbol, latex)


def _as_symbol(angle: re.Match[str]) -> str:
    """One symbol for ``\\angle ABC`` and ``\\angle CBA``; as a product ``\\angle BAC`` would be the same."""
    one, other = sorted((angle[1], angle[3]))
    return rf"\varpi_{{{one}{angle[2]}{other}}} "


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
    """With ``i`` as the imaginary unit, where no sum runs over it, and ``f(x)`` of an unknown f as a variable.

    Likewise ``\\frac{d y}{d x}``, where y is a letter: sympy takes it for a constant, of which that would be 0.
    """
    bound = {limit[0] for node in parsed.atoms(sympy.Sum, sympy.Product) for limit in node.limits}
    units = {symbol for symbol in parsed.free_symbols if symbol.name in ("i", "imath")} - bound
    unknown = parsed.atoms(AppliedUndef)
    known = dict.fromkeys(units, sympy.I) | {call: sympy.Symbol(str(call)) for call in unknown}
    slopes = (node for node in parsed.atoms(sympy.Derivative) if not node.expr.free_symbols & set(node.variables))
    known |= {slope: sympy.Symbol(str(slope)) for slope in slopes if slope.expr.free_symbols}
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


def constant_ratio(left: Any, right: Any) -> Any | None:
    """left / right as a complex number of mpmath's where that is the same everywhere, else None.

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


def is_near(left: Any, right: Any, tolerance: Fraction) -> bool:
    """Whether two constants differ by at most ``tolerance``.

    Raises:
        NotUnderstood: sympy cannot work with them.
    """
    try:
        values = [number_at(_evaluated(side), {}, DIGITS) for side in (left, right)]
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # sympy raises what it likes on what it cannot do
        raise NotUnderstood(type(error).__name__) from error
    if values[0] is None or values[1] is None:
        return False
    with mpmath.workdps(DIGITS):
        limit = mpmath.mpf(tolerance.numerator) / tolerance.denominator
        return bool(abs(values[0] - values[1]) <= limit + mpmath.mpf(10) ** -CLOSE_DIGITS)


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
        if _has_power_of_zero(left) != _has_power_of_zero(right):  # 0^n is no 0 but a question of n
            return False
        return _same_at_points(left, right)
    return False


def _has_power_of_zero(value: Any) -> bool:
    return any(power.base.is_zero and power.exp.free_symbols for power in value.atoms(sympy.Pow))


def _same_at_points(left: Any, right: Any) -> bool:
    """Agreement at all points that count, and at enough of them; see ``math_points``."""
    names = sorted(left.free_symbols | right.free_symbols, key=str)
    comparison = PointComparison(left, right, names)
    for point, values in comparison:
        if not _close(comparison.left, comparison.right, values, point):
            return False
    return comparison.is_decided


def _constant_ratio(left: Any, right: Any) -> Any | None:
    if left.free_symbols != right.free_symbols or not left.free_symbols:
        return None
    comparison = PointComparison(left, right, sorted(left.free_symbols, key=str), skip_zeros=True)
    first: Any = None
    for _, values in comparison:
        if not values[0] or not values[1]:
            return None  # one holds where the other does not
        with mpmath.workdps(DIGITS):
            ratio = values[0] / values[1]
            if first is not None and abs(ratio / first - 1) > mpmath.mpf(10) ** -CLOSE_DIGITS:
                return None
            if abs(ratio.imag) <= abs(ratio.real) * mpmath.mpf(10) ** -CLOSE_DIGITS:
                ratio = mpmath.mpc(ratio.real)
        first = ratio
    return first if comparison.is_decided else None


def _close(left: Any, right: Any, values: Sequence[Any], point: dict[Any, Any]) -> bool:
    """Agreement to ``CLOSE_DIGITS`` decimals and digits; large numbers are evaluated once more, to the end."""
    if not values[0] or not values[1]:
        return bool(values[0] == values[1])
    magnitude = max(_magnitude(value) for value in values)
    if not _agree(values, magnitude) or magnitude > MAX_MAGNITUDE:
        return False
    if magnitude <= DIGITS - CLOSE_DIGITS:
        return True
    again = [number_at(side, point, DIGITS + magnitude) for side in (left, right)]
    return again[0] is not None and again[1] is not None and _agree(again, 0)


def _agree(values: Sequence[Any], magnitude: int) -> bool:
    with mpmath.workdps(DIGITS + MAX_MAGNITUDE):
        return bool(abs(values[0] - values[1]) <= mpmath.mpf(10) ** (magnitude - CLOSE_DIGITS))


def _magnitude(value: Any) -> int:
    """About the digits before the decimal point; negative of small numbers."""
    return int(mpmath.mag(value) * 0.30103) + 1
