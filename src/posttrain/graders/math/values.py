"""Equality of mathematical expressions by value. Only this module and ``magnitudes`` use sympy.

LaTeX is parsed by math-verify's grammar (``latex2sympy2_extended``), never by Python. Both sides are evaluated at
shared sample points, precisely enough to distinguish integers with thousands of digits. No simplification, which
could take forever. Runs in worker processes (``graders.math``), because even parsing and evaluation may hang.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import lru_cache

import mpmath
import sympy
from antlr4 import ParserRuleContext, Token
from antlr4.atn.PredictionMode import PredictionMode
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, _Latex2Sympy
from sympy.core.function import AppliedUndef

from posttrain.graders.answers import parse_quantity
from posttrain.graders.math.forms import NotUnderstood
from posttrain.graders.math.magnitudes import MAX_SPAN, digits_spanned, same_beyond_digits

# Sample points. Expressions are equal if they agree wherever both are real throughout, including every root, logarithm
# and power inside (√x·√x = x, √a·√b = √(ab), 2 ln a + ln b = ln(a²b)). Points where only one side is real are skipped,
# except that |x| and √(x²) imply both signs of x, so a side restricted to one sign differs (ln|x| is not ln x). Odd
# roots are real. Smooth expressions require few points. Powers such as (−1)^n are sampled at integers covering all
# residues modulo 12, positive and negative, and with multiple variables at all parity combinations. Bars, floors and
# domains are also sampled on both sides of each constant, far away and close to 0.

DIGITS = 60  # extra precision, besides digits spanned (``digits_spanned``); higher for large numbers
CLOSE_DIGITS = 50  # values agreeing to this many decimals and digits are equal
MAX_CANCELLED_DIGITS = 400
BITS_PER_DIGIT = 3  # a little less than log2(10)
NUM_POINTS = 4  # that must agree, of smooth sides
MIN_POINTS = 3  # that must agree where the domain is small
NUM_GENERAL = 12
NUM_WHOLE = 22
NUM_FAR = 24
MAX_CONSTANTS = 4
GATE_DIGITS = 15
MAX_BITS = 10_000

_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89)
_BARS = (sympy.Abs, sympy.sign, sympy.Max, sympy.Min)
_STEPS = (sympy.floor, sympy.ceiling, sympy.Mod)
_WHOLE = (*_STEPS, sympy.factorial, sympy.binomial, sympy.gamma, sympy.Sum, sympy.Product)
_GATES = (sympy.log, sympy.asin, sympy.acos, sympy.asec, sympy.acsc, sympy.acosh, sympy.atanh, sympy.acoth, sympy.asech)


Point = dict[sympy.Symbol, sympy.Rational]  # variable values
Values = tuple[mpmath.mpc, mpmath.mpc]  # both sides at a point


class PointComparison:
    """Iterate over (point, both values), skipping points that do not count. ``is_decided`` tells if enough counted.

    ``skip_zeros``: ignore points where both sides are 0.
    """

    def __init__(
        self, left: sympy.Basic, right: sympy.Basic, names: Sequence[sympy.Symbol], *, skip_zeros: bool = False
    ) -> None:
        self.names = names
        self.skip_zeros = skip_zeros
        self.is_decided = False
        self.span = digits_spanned(left, right) * (2 if skip_zeros else 1)  # ratios vary quadratically
        self.whole = False
        self.uneven = False
        self.barred: set[sympy.Symbol] = set()
        self.gates: list[list[sympy.Basic]] = [[], []]
        self.left = _with_real_roots(left)
        self.right = _with_real_roots(right)
        if not names:
            return
        self.gates = [_gates(sympy.preorder_traversal(side)) for side in (self.left, self.right)]
        both = [*sympy.preorder_traversal(left), *sympy.preorder_traversal(right)]
        powers = [node for node in both if node.is_Pow]
        self.barred = {name for node in both if isinstance(node, _BARS) for name in node.free_symbols}
        for node in powers:  # roots of squares
            is_even_root = node.exp.is_Rational and node.exp.q % 2 == 0
            if is_even_root and node.base.is_Pow and node.base.exp.is_even:
                self.barred |= node.free_symbols
        is_alternating = any(node.exp.free_symbols and not node.base.is_positive for node in powers)
        self.whole = is_alternating or any(isinstance(node, _WHOLE) for node in both)
        self.uneven = bool(self.barred or any(self.gates) or any(isinstance(node, _STEPS) for node in both))
        constants = {sympy.Integer(1)}
        if self.uneven:
            constants |= {abs(node) for node in both if node.is_Rational and abs(node) not in (0, 1)}
        self.constants = sorted(constants, reverse=True)[:MAX_CONSTANTS]

    def __iter__(self) -> Iterator[tuple[Point, Values]]:
        enough = NUM_POINTS
        if not self.names:
            enough = 1
        elif self.whole or self.uneven:
            enough = NUM_GENERAL + NUM_WHOLE + NUM_FAR
        undefined: list[tuple[Point, Values]] = []  # nowhere real: compared as complex functions
        counted = 0
        one_sided = False
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
            elif not self.barred.isdisjoint(closed[0] or closed[1] or ()):
                return
            else:
                one_sided = True
        if not counted and not one_sided:
            counted = len(undefined)
            yield from undefined
        self.is_decided = counted >= (MIN_POINTS if self.names else 1)

    def _values(self, point: Point) -> Values | None:
        left = number_at(self.left, point, DIGITS + self.span)
        if left is None:
            return None
        right = number_at(self.right, point, DIGITS + self.span)
        if right is None or (self.skip_zeros and not left and not right):
            return None
        if self.names and min(mpmath.mag(left), mpmath.mag(right)) > MAX_BITS + 4 * self.span:
            return None  # more digits than are compared
        return left, right

    def _points(self) -> Iterator[Point]:
        """Variable values to try. Constants get a single empty point."""
        if not self.names:
            yield {}
            return
        for number in range(NUM_GENERAL):
            yield {name: _general(number, place) for place, name in enumerate(self.names)}
        if self.whole:
            for number in range(NUM_WHOLE):
                yield {name: _whole(number, place, len(self.names)) for place, name in enumerate(self.names)}
        if self.uneven:
            around: list[sympy.Basic] = []
            for constant in self.constants:
                around += _around(constant)
            around += [sympy.Rational(10007, 3), sympy.Rational(-10007, 3), sympy.Rational(3, 10007)]
            for number in range(max(NUM_FAR, len(around))):
                point = {}
                for place, name in enumerate(self.names):
                    point[name] = around[(number * (place + 1) + 7 * place) % len(around)]
                yield point


def _general(number: int, place: int) -> sympy.Rational:
    """The value of variable ``place`` at point ``number``: between 0 and 1, above 1, below 0, mixed, whole."""
    kind = number % 6
    start = 5 * number + 3 * place
    low, high = sorted(_PRIMES[(start + shift) % len(_PRIMES)] for shift in (0, 7))
    if kind == 5:
        return sympy.Integer(2 + number + place)
    if kind in (0, 2):
        value = sympy.Rational(low, high)
    else:
        value = sympy.Rational(high, low)
    if kind in (2, 3) or (kind == 4 and place % 2):
        return -value
    return value


def _whole(number: int, place: int, num_names: int) -> sympy.Integer:
    """1 to 12, and −12 to −1 from 16 on. Bits of ``number`` select parities, two of them the residue modulo 4."""
    bits = [number >> shift & 1 for shift in range(4)]
    modulo_4 = bits[place % 4] + 2 * bits[(place + num_names) % 4]
    modulo_3 = number // 3 ** (place % 3) % 3
    value = (9 * modulo_4 + 4 * modulo_3 + 11) % 12 + 1  # the one number of 1 to 12 with these remainders
    return sympy.Integer(value if number < 16 else -value)


def _around(constant: sympy.Basic) -> tuple[sympy.Basic, ...]:
    near = sympy.Rational(1, 7)
    far = sympy.Rational(7, 5)
    return (constant + near, constant - near, -constant + near, -constant - near, constant * far, constant / 3 / far)


def _is_odd_root(node: sympy.Basic) -> bool:
    if not node.is_Pow or not node.exp.is_Rational:
        return False
    return node.exp.q % 2 == 1 and node.exp.q > 1 and not node.base.has(sympy.I)


def _with_real_roots(expression: sympy.Basic) -> sympy.Basic:
    """With real odd roots, if there are any: x^(1/3) is sign(x)·|x|^(1/3)."""

    def real(node: sympy.Basic) -> sympy.Basic:
        size = sympy.Pow(sympy.Abs(node.base), node.exp, evaluate=False)
        if node.exp.p % 2 == 0:
            return size
        return sympy.Mul(sympy.sign(node.base), size, evaluate=False)

    if not any(map(_is_odd_root, sympy.preorder_traversal(expression))):
        return expression
    return expression.replace(_is_odd_root, real)


def _gates(nodes: Iterable[sympy.Basic]) -> list[sympy.Basic]:
    """The parts in variables that are not real everywhere, without those that contain i."""
    gates = []
    for node in nodes:
        is_gate = isinstance(node, _GATES)
        if node.is_Pow:
            is_gate = not (node.exp.is_Integer or node.base.is_positive or isinstance(node.base, sympy.Abs))
        if is_gate and node.free_symbols and not node.has(sympy.I):
            gates.append(node)
    return gates


def _closed(gates: Sequence[sympy.Basic], point: Point) -> set[sympy.Symbol] | None:
    """The variables of the first part that is not real at a point; None where all are."""
    for gate in gates:
        value = gate.evalf(GATE_DIGITS, subs=point)
        if not (value.is_Float or value.is_Rational):
            return set(gate.free_symbols)
    return None


def number_at(expression: sympy.Basic, point: Point, digits: int) -> mpmath.mpc | None:
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
_MIXED = re.compile(r"([0-9]{1,9})\\frac\{([0-9]{1,9})\}\{([0-9]{1,9})\}")
_OPERATIONS = (sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit, sympy.Derivative, sympy.UnevaluatedExpr)


def rational(value: Fraction) -> sympy.Rational:
    """An exact number of sympy's."""
    return sympy.Rational(value.numerator, value.denominator)


class _LatexReader(_Latex2Sympy):
    """The parser for one value: lists, sets and relations have been taken apart before."""

    def parse(self, latex_str: str) -> sympy.Basic:
        """One value and nothing behind it.

        Read first without the context of a rule, which is many times faster and gives the same tree where it gives one
        (Parr, Harwell and Fisher 2014, section 3.2). It fails at a letter with a power, but not at ``{x}^2``.
        """
        try:
            tree = self._read(_POWER_OF_LETTER.sub(r"{\g<0>}", latex_str), PredictionMode.SLL)
        except NotUnderstood:
            tree = self._read(latex_str, PredictionMode.LL)
        return self.convert_expr(tree)

    def _read(self, latex: str, mode: int) -> ParserRuleContext:
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

    def convert_postfix_list(self, arr: Sequence[ParserRuleContext], i: int = 0) -> sympy.Basic:
        """A product without a sign; a whole number with a fraction below one behind it is a mixed number.

        The parser's own adds any whole number to what follows it: 9(7) would be 16.
        """
        head = self.convert_postfix(arr[i])
        if not isinstance(head, sympy.Expr | sympy.MatrixBase):  # d/dx
            return super().convert_postfix_list(arr, i)
        rest = i + 1
        if rest < len(arr):
            mixed = _mixed_number(arr[i].getText() + arr[rest].getText())
            if mixed is not None:
                head = mixed
                rest += 1
        if rest == len(arr):
            return head
        tail = self.convert_postfix_list(arr, rest)
        if head.is_Matrix or getattr(tail, "is_Matrix", False):
            return self.mat_mul_flat(head, tail)
        return self.mul_flat(head, tail)

    def convert_postfix(self, postfix: ParserRuleContext) -> sympy.Basic:
        """``A^T`` of a matrix is its transpose; of all else T is an exponent (as the parser has it 2^T would be 2)."""
        value = super().convert_postfix(postfix)
        marks = [op.getText() for op in postfix.postfix_op() if op.transpose()]
        if not marks or not isinstance(value, sympy.Expr) or value.is_Matrix:
            return value
        return sympy.Pow(value, sympy.Symbol(marks[0].strip("^{}")), evaluate=False)

    def convert_func(self, func: ParserRuleContext) -> sympy.Basic:
        """A logarithm to a base is a quotient: of sympy's own with a base e^{\\log_2 5} would be 5."""
        value = super().convert_func(func)
        inner = value
        if isinstance(value, sympy.Pow):
            inner = value.base
        if not isinstance(inner, sympy.log) or len(inner.args) != 2:
            return value
        argument, base = inner.args
        quotient = sympy.log(argument, evaluate=False)
        if base is not sympy.E:
            bottom = sympy.log(base, evaluate=False)
            quotient = sympy.Mul(quotient, sympy.Pow(bottom, -1, evaluate=False), evaluate=False)
        if inner is value:
            return quotient
        return sympy.Pow(quotient, value.exp, evaluate=False)

    def convert_binom(self, binom: ParserRuleContext) -> sympy.Basic:
        """Not evaluated."""
        return sympy.binomial(self.convert_expr(binom.upper), self.convert_expr(binom.lower), evaluate=False)

    def parse_number(self, text: str) -> sympy.Basic:
        """An exact fraction. The parser's own way evaluates the digits as Python and makes decimals inexact."""
        quantity = parse_quantity(text)
        if quantity is None:
            raise NotUnderstood("a number of too many digits")
        return rational(quantity.value)


def _mixed_number(text: str) -> sympy.Rational | None:
    """The number of ``2\\frac{1}{3}``: a whole number with a fraction below one."""
    match = _MIXED.fullmatch(text)
    if match is None:
        return None
    whole, top, bottom = map(int, match.groups())
    if not 0 < top < bottom:
        return None
    return sympy.Rational(whole * bottom + top, bottom)


@contextmanager
def _understanding() -> Iterator[None]:
    """Inside, whatever the parser and sympy raise on what they cannot do is ``NotUnderstood``."""
    try:
        yield
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # both raise what they like
        raise NotUnderstood(type(error).__name__) from error


@lru_cache(maxsize=512)
def parse_latex(latex: str) -> sympy.Basic:
    """The sympy object, not evaluated. ``i`` is the imaginary unit; letters keep their case.

    Raises:
        NotUnderstood: the grammar does not know it, or it is ambiguous or too long.
    """
    if len(latex) > MAX_LATEX_CHARS or _AMBIGUOUS.search(latex) or _is_too_deep(latex):
        raise NotUnderstood("too long, too deep, or ambiguous")
    with _understanding():
        # what the parser would take for something else, as letters of its own
        lettered = _CAPITAL_I.sub(lambda match: r"\mathcal{I}" if match[0] == "I" else match[0], latex)
        parsed = _LatexReader(convert_degrees=True, config=_CONFIG).parse(_ANGLE.sub(_as_symbol, lettered))
    if not isinstance(parsed, sympy.Expr | sympy.MatrixBase):
        raise NotUnderstood("no single value")
    if _vanishes(parsed, 1) or any(_vanishes(node, 2) for node in sympy.preorder_traversal(parsed)):
        raise NotUnderstood("0 times letters, which may be words")  # 0 maybe
    return _as_variables(parsed)


def _vanishes(node: sympy.Basic, num_letters: int) -> bool:
    """Return whether it is 0 times at least so many letters. sympy is asked about numbers alone, where it is fast."""
    if not isinstance(node, sympy.Mul):
        return False
    factors = list(_factors(node))
    numbers = [factor for factor in factors if not factor.free_symbols]
    return len(factors) - len(numbers) >= num_letters and any(number.is_zero for number in numbers)


def _factors(product: sympy.Basic) -> Iterator[sympy.Basic]:
    for factor in product.args:
        if isinstance(factor, sympy.Mul):
            yield from _factors(factor)
        else:
            yield factor


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


def _as_variables(parsed: sympy.Basic) -> sympy.Basic:
    """With ``i`` as the imaginary unit, where no sum runs over it, and ``f(x)`` of an unknown f as a variable.

    Likewise ``\\frac{d y}{d x}``, where y is a letter: sympy takes it for a constant, of which that would be 0.
    """
    bound = {limit[0] for node in parsed.atoms(sympy.Sum, sympy.Product) for limit in node.limits}
    known: dict[sympy.Basic, sympy.Basic] = {}
    for symbol in parsed.free_symbols - bound:
        if symbol.name in ("i", "imath"):
            known[symbol] = sympy.I
    for call in parsed.atoms(AppliedUndef):
        known[call] = sympy.Symbol(str(call))
    for slope in parsed.atoms(sympy.Derivative):
        letters = slope.expr.free_symbols
        if letters and letters.isdisjoint(slope.variables):
            known[slope] = sympy.Symbol(str(slope))
    if known:
        return parsed.xreplace(known)
    return parsed


@_understanding()
def same_value(left: sympy.Basic, right: sympy.Basic) -> bool:
    """Return whether two sympy objects are equal: numbers, expressions in the same variables, matrices.

    Raises:
        NotUnderstood: sympy cannot work with them.
    """
    return _same(_evaluated(left), _evaluated(right))


@_understanding()
def constant_ratio(left: sympy.Basic, right: sympy.Basic) -> mpmath.mpc | None:
    """left / right as a complex number of mpmath's where that is the same everywhere, else None.

    The equations ``left = 0`` and ``right = 0`` are then the same. Both must have the same variables, at least one.

    Raises:
        NotUnderstood: sympy cannot work with them.
    """
    left = _evaluated(left)
    right = _evaluated(right)
    if left.free_symbols != right.free_symbols or not left.free_symbols or digits_spanned(left, right) > MAX_SPAN:
        return None
    comparison = PointComparison(left, right, sorted(left.free_symbols, key=str), skip_zeros=True)
    first: mpmath.mpc | None = None
    for _, values in comparison:
        if not values[0] or not values[1]:
            return None  # one holds where the other does not
        with mpmath.workdps(DIGITS + comparison.span):
            ratio = values[0] / values[1]
            close = mpmath.mpf(10) ** -(CLOSE_DIGITS + comparison.span)
            if first is not None and abs(ratio / first - 1) > close:
                return None
            if abs(ratio.imag) <= abs(ratio.real) * close:
                ratio = mpmath.mpc(ratio.real)
        first = ratio
    if comparison.is_decided:
        return first
    return None


@_understanding()
def is_near(left: sympy.Basic, right: sympy.Basic, tolerance: Fraction) -> bool:
    """Return whether two constants differ by at most ``tolerance``.

    Raises:
        NotUnderstood: sympy cannot work with them.
    """
    digits = DIGITS + digits_spanned(left, right)
    values = [number_at(_evaluated(side), {}, digits) for side in (left, right)]
    if values[0] is None or values[1] is None:
        return False
    with mpmath.workdps(digits):
        limit = mpmath.mpf(tolerance.numerator) / tolerance.denominator
        return bool(abs(values[0] - values[1]) <= limit + mpmath.mpf(10) ** -CLOSE_DIGITS)


def _evaluated(parsed: sympy.Basic) -> sympy.Basic:
    """With sums, integrals, limits and matrix products carried out."""
    if isinstance(parsed, sympy.MatrixBase):
        return parsed.applyfunc(_evaluated)
    if isinstance(parsed, sympy.MatrixExpr) or parsed.has(*_OPERATIONS):
        return parsed.doit()
    return parsed


def _same(left: sympy.Basic, right: sympy.Basic) -> bool:
    if left == right:
        return True
    if isinstance(left, sympy.MatrixBase) and isinstance(right, sympy.MatrixBase):
        return left.shape == right.shape and all(map(_same, left.flat(), right.flat()))
    if isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr):
        if _has_power_of_zero(left) != _has_power_of_zero(right):  # 0^n is no 0 but a question of n
            return False
        if digits_spanned(left, right) > MAX_SPAN:
            return same_beyond_digits(left, right, _same)
        comparison = PointComparison(left, right, sorted(left.free_symbols | right.free_symbols, key=str))
        return all(_close(comparison, values, point) for point, values in comparison) and comparison.is_decided
    return False


def _has_power_of_zero(expression: sympy.Basic) -> bool:
    return any(power.base.is_zero and power.exp.free_symbols for power in expression.atoms(sympy.Pow))


def _close(comparison: PointComparison, values: Sequence[mpmath.mpc], point: Point) -> bool:
    """Agreement to ``CLOSE_DIGITS`` decimals and digits; large numbers are evaluated once more, to the end."""
    if not values[0] or not values[1]:
        return bool(values[0] == values[1])
    # about the digits before the decimal point; negative of small numbers
    span = comparison.span
    magnitude = max(int(mpmath.mag(value) * 0.30103) + 1 for value in values)
    if not _agree(values, magnitude - span, span) or magnitude > MAX_MAGNITUDE + 2 * span:
        return False
    if magnitude <= DIGITS + span - CLOSE_DIGITS:
        return True
    again = [number_at(side, point, DIGITS + span + magnitude) for side in (comparison.left, comparison.right)]
    return again[0] is not None and again[1] is not None and _agree(again, 0, span)


def _agree(values: Sequence[mpmath.mpc], magnitude: int, span: int) -> bool:
    with mpmath.workdps(DIGITS + MAX_MAGNITUDE + 3 * span):
        return bool(abs(values[0] - values[1]) <= mpmath.mpf(10) ** (magnitude - CLOSE_DIGITS))
