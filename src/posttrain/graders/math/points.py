"""Where two expressions are compared, and which of these points count.

**Equal means equal wherever both sides are real throughout**, every root, logarithm and power of them: the common
domain, as school mathematics has it (√x·√x = x, √a·√b = √(ab), 2 ln a + ln b = ln(a²b)). Where only one side is real
the other has no say, with one exception. Whoever writes |x| says that x takes both signs, so a side that allows only
one of them says something else: ln|x| is not ln x. So it is with √(x²), another way to write |x|. Odd roots are real.

Two sides that are smooth need few points. Signs, parity and steps need more: powers such as (−1)^n are compared at
whole numbers of all residues modulo 12, positive and negative, in several variables at all combinations of parities;
bars, floors and domains also on both sides of every number that stands in the expressions, far out and close to 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import mpmath
import sympy

DIGITS = 60  # of an evaluation; more for large numbers
CLOSE_DIGITS = 50  # two values that agree to this many decimals, and this many digits, are the same
MAX_CANCELLED_DIGITS = 400
BITS_PER_DIGIT = 3  # a little less than log2(10)
NUM_POINTS = 4  # that must agree, of smooth sides
MIN_POINTS = 3  # that must agree where the domain is small
NUM_GENERAL, NUM_WHOLE, NUM_FAR = 12, 22, 24
MAX_CONSTANTS = 4
GATE_DIGITS = 15
MAX_BITS = 10_000

_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89)
_BARS = (sympy.Abs, sympy.sign, sympy.Max, sympy.Min)
_STEPS = (sympy.floor, sympy.ceiling, sympy.Mod)
_WHOLE = (*_STEPS, sympy.factorial, sympy.binomial, sympy.gamma, sympy.Sum, sympy.Product)
_GATES = (sympy.log, sympy.asin, sympy.acos, sympy.asec, sympy.acsc, sympy.acosh, sympy.atanh, sympy.acoth, sympy.asech)


class PointComparison:
    """Iterates over (point, values of both sides) where both count. ``is_decided`` afterwards: there were enough.

    ``skip_zeros``: points at which both are 0 say nothing.
    """

    def __init__(self, left: Any, right: Any, names: Sequence[Any], *, skip_zeros: bool = False) -> None:
        self.names, self.skip_zeros, self.is_decided = names, skip_zeros, False
        self.whole = self.uneven = False
        self.barred: set[Any] = set()
        self.gates: list[list[Any]] = [[], []]
        nodes = [list(sympy.preorder_traversal(side)) for side in (left, right)]
        roots = [any(_is_odd_root(node) for node in side) for side in nodes]
        self.left, self.right = (
            _with_real_roots(side) if rooted else side for side, rooted in zip((left, right), roots, strict=True)
        )
        if names:
            self.gates = [_gates(sympy.preorder_traversal(side)) for side in (self.left, self.right)]
            self._look_at([*nodes[0], *nodes[1]])

    def _look_at(self, nodes: Sequence[Any]) -> None:
        """What decides which points are needed."""
        self.barred = _barred(nodes)
        self.whole = any(isinstance(node, _WHOLE) or _is_alternating(node) for node in nodes)
        self.uneven = bool(self.barred or any(self.gates) or any(isinstance(node, _STEPS) for node in nodes))
        constants = (
            {abs(node) for node in nodes if node.is_Rational and abs(node) not in (0, 1)} if self.uneven else set()
        )
        self.constants = sorted(constants | {sympy.Integer(1)}, reverse=True)[:MAX_CONSTANTS]

    def __iter__(self) -> Iterator[tuple[dict[Any, Any], tuple[Any, Any]]]:
        enough = len(self.names) and (
            NUM_POINTS if not self.whole and not self.uneven else NUM_GENERAL + NUM_WHOLE + NUM_FAR
        )
        undefined: list[tuple[dict[Any, Any], tuple[Any, Any]]] = []  # nowhere real: compared as complex functions
        counted, one_sided = 0, False
        for point in self._points():
            values = self._values(point)
            if values is None:
                continue
            closed = [_closed(gates, point) for gates in self.gates]
            if closed[0] is None and closed[1] is None:
                counted += 1
                yield point, values
                if counted >= enough:
                    break
            elif closed[0] is not None and closed[1] is not None:
                undefined.append((point, values))
            elif self.barred & (closed[0] or closed[1] or set()):
                return
            else:
                one_sided = True
        if not counted and not one_sided:
            counted = len(undefined)
            yield from undefined
        self.is_decided = counted >= (MIN_POINTS if self.names else 1)

    def _values(self, point: dict[Any, Any]) -> tuple[Any, Any] | None:
        left = number_at(self.left, point, DIGITS)
        right = number_at(self.right, point, DIGITS) if left is not None else None
        if left is None or right is None or (self.skip_zeros and not left and not right):
            return None
        if self.names and min(mpmath.mag(left), mpmath.mag(right)) > MAX_BITS:
            return None  # more digits than are compared
        return left, right

    def _points(self) -> Iterator[dict[Any, Any]]:
        """Values of the variables; one point without any for constants."""
        for number in range(NUM_GENERAL if self.names else 1):
            yield {name: _general(number, place) for place, name in enumerate(self.names)}
        if self.whole and self.names:
            for number in range(NUM_WHOLE):
                yield {name: _whole(number, place, len(self.names)) for place, name in enumerate(self.names)}
        if self.uneven and self.names:
            around = [value for constant in self.constants for value in _around(constant)]
            around += [sympy.Rational(10007, 3), sympy.Rational(-10007, 3), sympy.Rational(3, 10007)]
            for number in range(max(NUM_FAR, len(around))):
                yield {
                    name: around[(number * (place + 1) + 7 * place) % len(around)]
                    for place, name in enumerate(self.names)
                }


def _general(number: int, place: int) -> Any:
    """Of variable ``place`` at point ``number``: between 0 and 1, above 1, below 0, mixed, whole."""
    kind = number % 6
    low, high = sorted(_PRIMES[(5 * number + 3 * place + shift) % len(_PRIMES)] for shift in (0, 7))
    if kind == 5:
        return sympy.Integer(2 + number + place)
    value = sympy.Rational(low, high) if kind in (0, 2) else sympy.Rational(high, low)
    return -value if kind in (2, 3) or (kind == 4 and place % 2) else value


def _whole(number: int, place: int, num_names: int) -> Any:
    """1 to 12 and, from 16 on, −12 to −1. The bits of ``number`` are the parities; two of them make it modulo 4."""
    bits = [number >> shift & 1 for shift in range(4)]
    modulo_4 = bits[place % 4] + 2 * bits[(place + num_names) % 4]
    modulo_3 = number // 3 ** (place % 3) % 3
    value = (9 * modulo_4 + 4 * modulo_3 + 11) % 12 + 1  # the one number of 1 to 12 with these remainders
    return sympy.Integer(value if number < 16 else -value)


def _around(constant: Any) -> tuple[Any, ...]:
    near, far = sympy.Rational(1, 7), sympy.Rational(7, 5)
    return (constant + near, constant - near, -constant + near, -constant - near, constant * far, constant / 3 / far)


def _is_odd_root(node: Any) -> bool:
    return (
        node.is_Pow and node.exp.is_Rational and node.exp.q % 2 == 1 and node.exp.q > 1 and not node.base.has(sympy.I)
    )


def _with_real_roots(expression: Any) -> Any:
    """With real odd roots: x^(1/3) is sign(x)·|x|^(1/3)."""

    def real(node: Any) -> Any:
        size = sympy.Pow(sympy.Abs(node.base), node.exp, evaluate=False)
        return size if node.exp.p % 2 == 0 else sympy.Mul(sympy.sign(node.base), size, evaluate=False)

    return expression.replace(_is_odd_root, real)


def _gates(nodes: Iterable[Any]) -> list[Any]:
    """The parts in variables that are not real everywhere, without those that contain i."""
    return [
        node
        for node in nodes
        if (isinstance(node, _GATES) or _is_open_power(node)) and node.free_symbols and not node.has(sympy.I)
    ]


def _is_open_power(node: Any) -> bool:
    return (
        node.is_Pow and not node.exp.is_Integer and not node.base.is_positive and not isinstance(node.base, sympy.Abs)
    )


def _is_alternating(node: Any) -> bool:
    return node.is_Pow and bool(node.exp.free_symbols) and not node.base.is_positive


def _barred(nodes: Iterable[Any]) -> set[Any]:
    """The variables between bars, and in roots of squares."""
    return {
        name
        for node in nodes
        if isinstance(node, _BARS) or (_is_even_root(node) and node.base.is_Pow and node.base.exp.is_even)
        for name in node.free_symbols
    }


def _is_even_root(node: Any) -> bool:
    return node.is_Pow and node.exp.is_Rational and node.exp.q % 2 == 0


def _closed(gates: Sequence[Any], point: dict[Any, Any]) -> set[Any] | None:
    """The variables of the first part that is not real at a point; None where all are."""
    for gate in gates:
        value = gate.evalf(GATE_DIGITS, subs=point)
        if not (value.is_Float or value.is_Rational):
            return set(gate.free_symbols)
    return None


def number_at(expression: Any, point: dict[Any, Any], digits: int) -> Any:
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
