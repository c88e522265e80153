"""Magnitude range of expressions, and comparison where no fixed number of digits suffices.

``10^{60} + x`` and ``10^{60} + 2x`` agree to 60 digits, so evaluating them requires that much extra precision. If too
many digits would be required, values are compared exactly (rationals), by logarithm (products and powers), or
structurally (sums, term by term).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import mpmath
import sympy

MAX_SPAN = 15_000  # max decimal digits between the largest and smallest term
MAX_EXACT_BITS = 2**21
_POINT_DIGITS = 2  # typical magnitude of variables at sample points
_POINT_SIZE = 3.0  # of a variable in an exponent
_UNBOUNDED = 1e9
_DIGITS_PER_BIT = math.log10(2)


def digits_spanned(*expressions: sympy.Basic) -> int:
    """Estimate the digits spanned by an expression's terms; maximum over expressions, capped at ``MAX_SPAN + 1``."""
    return int(min(max(map(_spread, expressions)), MAX_SPAN + 1))


def _spread(node: sympy.Basic) -> float:
    if isinstance(node, sympy.MatrixBase):
        return max(map(_spread, node.flat()), default=0.0)
    if node.is_Rational:
        return max(_log10(abs(node.p)), _log10(node.q))
    if node.is_Pow or isinstance(node, sympy.exp):
        base, exponent = node.as_base_exp()
        if not base.free_symbols:
            digits = _log10_of(base)
        else:
            digits = _POINT_DIGITS
        inner = _spread(base) if base.is_Add or base.free_symbols else 0.0
        return min((digits + inner) * max(1.0, _size(exponent)) + _spread(exponent), _UNBOUNDED)
    if isinstance(node, sympy.factorial | sympy.binomial) and not node.free_symbols:
        return _log10_of(node)
    return float(min(sum(map(_spread, node.args)), _UNBOUNDED))


def _size(exponent: sympy.Basic) -> float:
    """Upper bound for the absolute value of an exponent."""
    if not exponent.args:
        if exponent.free_symbols:
            return _POINT_SIZE
        if exponent.is_Rational:
            return float(min(abs(exponent), _UNBOUNDED))
        return _POINT_SIZE
    sizes = [_size(part) for part in exponent.args]
    if exponent.is_Mul:
        return min(math.prod(sizes), _UNBOUNDED)
    if exponent.is_Pow and not exponent.exp.is_negative:
        too_large = sizes[1] * math.log10(max(sizes[0], 1.0)) > math.log10(_UNBOUNDED)
        if too_large:
            return _UNBOUNDED
        return max(sizes[0], 1.0) ** sizes[1]
    if isinstance(exponent, sympy.factorial):
        if sizes[0] > 12:
            return _UNBOUNDED
        return math.gamma(sizes[0] + 1)
    return min(sum(sizes), _UNBOUNDED)


def _log10(number: int) -> float:
    if number > 1:
        return number.bit_length() * _DIGITS_PER_BIT
    return 0.0


def _log10_of(constant: sympy.Basic) -> float:
    """Absolute logarithm of a constant, however large."""
    value = constant.evalf(15)
    if not value.is_number or not value.is_finite:
        return _UNBOUNDED
    size = sum(abs(part._to_mpmath(53)) for part in value.as_real_imag())
    if size:
        return float(min(abs(mpmath.log10(size)), _UNBOUNDED))
    return 0.0


def same_beyond_digits(left: sympy.Basic, right: sympy.Basic, same: Callable[[sympy.Basic, sympy.Basic], bool]) -> bool:
    """Compare expressions spanning more than ``MAX_SPAN`` digits. ``same`` handles smaller parts."""
    if left == right:
        return True
    exact = exact_value(left), exact_value(right)
    if exact[0] is not None and exact[1] is not None:
        return exact[0] == exact[1]
    first = _logarithm(left)
    second = _logarithm(right)
    if first is not None and second is not None:
        return all(digits_spanned(*pair) <= MAX_SPAN and same(*pair) for pair in zip(first, second, strict=True))
    if left.func is not right.func or len(left.args) != len(right.args):
        return False
    if not (left.is_Add or left.is_Mul):
        return bool(left.args) and all(same(*pair) for pair in zip(left.args, right.args, strict=True))
    rest = list(right.args)
    for one in left.args:
        place = next((place for place, other in enumerate(rest) if same(one, other)), None)
        if place is None:
            return False
        del rest[place]
    return True


def exact_value(node: sympy.Basic) -> Fraction | None:
    """Exact rational value of an expression without variables. None if it is not rational or exceeds the bit limit."""
    if node.is_Rational:
        return Fraction(int(node.p), int(node.q))
    if node.is_Pow:
        base = exact_value(node.base)
        exponent = exact_value(node.exp)
        if base is None or exponent is None or exponent.denominator != 1 or (not base and exponent < 0):
            return None
        bits = max(base.numerator.bit_length(), base.denominator.bit_length()) * abs(exponent)
        if bits <= MAX_EXACT_BITS:
            return base**exponent.numerator
        return None
    if isinstance(node, sympy.factorial):
        number = exact_value(node.args[0])
        if number is None or number.denominator != 1 or number < 0 or number > MAX_EXACT_BITS // 16:
            return None
        return Fraction(math.factorial(number.numerator))
    if not (node.is_Add or node.is_Mul):
        return None
    total = Fraction(0 if node.is_Add else 1)
    for part in node.args:
        value = exact_value(part)
        if value is None or total.numerator.bit_length() + value.numerator.bit_length() > 2 * MAX_EXACT_BITS:
            return None
        if node.is_Add:
            total = total + value
        else:
            total = total * value
    return total


def _logarithm(node: sympy.Basic) -> tuple[sympy.Basic, sympy.Basic] | None:
    """(sign, log magnitude) for a product of powers. None for sums spanning too many digits."""
    if node.is_Mul:
        parts = [_logarithm(part) for part in node.args]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        return sympy.Mul(*(sign for sign, _ in known)), sympy.Add(*(log for _, log in known), evaluate=False)
    if node.is_Pow and node.exp.is_integer and not node.exp.free_symbols:
        inner = _logarithm(node.base)
        if inner is None or node.exp.is_even is None:
            return None
        if node.exp.is_even:
            sign = sympy.Integer(1)
        else:
            sign = inner[0]
        return sign, sympy.Mul(node.exp, inner[1], evaluate=False)
    if isinstance(node, sympy.factorial) and node.args[0].is_nonnegative:
        return sympy.Integer(1), sympy.loggamma(sympy.Add(node.args[0], 1), evaluate=False)
    if digits_spanned(node) > MAX_SPAN or node.is_zero:
        return None
    return sympy.sign(node), sympy.log(sympy.Abs(node), evaluate=False)
