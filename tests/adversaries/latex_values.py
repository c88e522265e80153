"""Values of mathematical texts at fixed points, by a reader of our own: nothing of the graders' is used.

A text is read by recursive descent into a function of its variables, and evaluated with mpmath at points of every
kind: fractions, even and odd whole numbers, both signs. What is not understood raises ``Unknown``; a table that
guesses would be no witness.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import mpmath

DIGITS = 60
CLOSE = mpmath.mpf(10) ** -46
NUM_AGREEING = 3  # points at which two sides must be real and agree, to be called the same

Value = Any  # mpmath's number
Point = dict[str, Value]
Node = Callable[[Point], Value]

_TOKEN = re.compile(r"\s+|\d+\.?\d*|\.\d+|\\[A-Za-z]+|\\.|[\s\S]")
_FUNCTIONS: dict[str, Callable[..., Value]] = {
    "sin": mpmath.sin, "cos": mpmath.cos, "tan": mpmath.tan, "cot": mpmath.cot, "sec": mpmath.sec, "csc": mpmath.csc,
    "arcsin": mpmath.asin, "arccos": mpmath.acos, "arctan": mpmath.atan, "sinh": mpmath.sinh, "cosh": mpmath.cosh,
    "tanh": mpmath.tanh, "exp": mpmath.exp, "ln": lambda x: _log(x),
}  # fmt: skip
_LOG_UNIT = mpmath.mpf("1.1371")  # log without a base: no one knows which, so it is that of no base that is written
_GREEK = frozenset(
    ("alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "zeta", "eta", "theta", "kappa", "lambda", "mu", "nu",
     "xi", "rho", "sigma", "tau", "phi", "varphi", "chi", "psi", "omega", "Gamma", "Delta", "Theta", "Lambda", "Sigma",
     "Phi", "Psi", "Omega", "hbar", "ell")
)  # fmt: skip
_OPENING = {"(": ")", "[": "]", "{": "}", "\\{": "\\}", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
_ENDS = frozenset((")", "]", "}", "\\}", "\\rfloor", "\\rceil", "+", "-", "*", "/", "\\cdot", "\\times", "\\div",
    "^",
                   "_", "!", ",", "&", "=", "\\bmod", "\\mod", ""))  # fmt: skip


class Unknown(Exception):
    """The table does not know what the text means."""


class _Reader:
    """Recursive descent over the tokens of one expression."""

    def __init__(self, text: str) -> None:
        self.tokens = [token for token in _TOKEN.findall(text) if not token.isspace()]
        self.place = 0
        self.bars = 0  # open |
        self.names: set[str] = set()
        self.has_bars = self.has_unit = False

    @property
    def next(self) -> str:
        return self.tokens[self.place] if self.place < len(self.tokens) else ""

    def take(self, wanted: str | None = None) -> str:
        token = self.next
        if not token or (wanted is not None and token != wanted):
            raise Unknown(f"{wanted or 'more'} expected")
        self.place += 1
        return token

    def whole(self) -> Node:
        node = self.sum()
        if self.next:
            raise Unknown(f"{self.next!r} is left over")
        return node

    def sum(self) -> Node:
        sign = 1
        while self.next in ("+", "-"):
            sign = -sign if self.take() == "-" else sign
        first = self.product()
        node: Node = first if sign > 0 else lambda p: -first(p)
        while self.next in ("+", "-"):
            node = self._added(node, self.take(), self.product())
        return node

    @staticmethod
    def _added(left: Node, operator: str, right: Node) -> Node:
        return (lambda p: left(p) + right(p)) if operator == "+" else (lambda p: left(p) - right(p))

    def product(self) -> Node:
        node = self.power()
        while True:
            token = self.next
            if token in ("\\bmod", "\\mod"):
                self.take()
                node = self._rest(node, self.power())
                self.has_bars = True
            elif token in ("*", "\\cdot", "\\times", "/", "\\div"):
                self.take()
                sign = -1 if self.next == "-" else 1
                if sign < 0:
                    self.take()
                node = self._multiplied(node, token in ("/", "\\div"), self.power(), sign)
            elif token in _ENDS or (token == "|" and self.bars):
                return node
            else:
                if re.fullmatch(r"[\d.]+", token) and re.fullmatch(r"[\d.]+", self.tokens[self.place - 1]):
                    raise Unknown("two numbers side by side")
                node = self._multiplied(node, False, self.power(), 1)

    @staticmethod
    def _multiplied(left: Node, divides: bool, right: Node, sign: int) -> Node:
        return (lambda p: sign * left(p) / right(p)) if divides else (lambda p: sign * left(p) * right(p))

    @staticmethod
    def _rest(left: Node, right: Node) -> Node:
        return lambda p: mpmath.fmod(_real(left(p)), _real(right(p)))

    def power(self) -> Node:
        return self.raised(self.atom())

    def raised(self, base: Node) -> Node:
        while self.next in ("^", "!"):
            if self.take() == "!":
                inner = base
                base = lambda p, inner=inner: mpmath.factorial(_whole(inner(p)))  # noqa: E731
                continue
            if self.next in ("\\circ", "\\prime", "{") and self._is_circle():
                inner = base
                base = lambda p, inner=inner: inner(p) * mpmath.pi / 180  # noqa: E731
                continue
            exponent = self.argument()
            inner = base
            base = lambda p, inner=inner, exponent=exponent: _power(inner(p), exponent(p))  # noqa: E731
        return base

    def _is_circle(self) -> bool:
        tokens = self.tokens[self.place : self.place + 3]
        if tokens[0] == "\\circ":
            self.place += 1
            return True
        if tokens == ["{", "\\circ", "}"]:
            self.place += 3
            return True
        if "\\prime" in tokens[:2]:
            raise Unknown("a prime")
        return False

    def argument(self) -> Node:
        """What a command applies to: a group, or one token (of a number its first digit; of an exponent all of it)."""
        if self.next == "{":
            return self.group()
        token = self.next
        before = self.tokens[self.place - 1]
        if token == "-" and before == "^":
            self.take()
            inner = self.argument()
            return lambda p: -inner(p)
        if re.fullmatch(r"\d{2,}", token) and before != "^":
            self.tokens[self.place : self.place + 1] = [token[0], token[1:]]
        return self.atom()

    def group(self) -> Node:
        opening = self.take()
        bars, self.bars = self.bars, 0
        node = self.sum()
        self.take(_OPENING[opening])
        self.bars = bars
        if opening in ("\\lfloor", "\\lceil"):
            rounded = mpmath.floor if opening == "\\lfloor" else mpmath.ceil
            inner = node
            self.has_bars = True
            return lambda p: rounded(_real(inner(p)))
        return node

    def atom(self) -> Node:
        token = self.next
        if token in ("(", "[", "{", "\\lfloor", "\\lceil"):
            return self.group()
        self.take()
        if re.fullmatch(r"\d+\.?\d*|\.\d+", token):
            return self.number(token)
        if token == "|":
            self.bars += 1
            inner = self.sum()
            self.take("|")
            self.bars -= 1
            self.has_bars = True
            return lambda p: abs(inner(p))
        if re.fullmatch(r"[A-Za-z]", token):
            return self.letter(token)
        if token.startswith("\\"):
            return self.command(token[1:])
        raise Unknown(f"{token!r}")

    def number(self, token: str) -> Node:
        if self.next == "\\overline":
            self.take()
            self.take("{")
            period = self.take()
            self.take("}")
            if not period.isdigit() or "." not in token:
                raise Unknown("no period")
            return self._periodic(token, period)
        value = mpmath.mpf(token)
        return lambda p: value

    @staticmethod
    def _periodic(token: str, period: str) -> Node:
        decimals = len(token.partition(".")[2])
        value = mpmath.mpf(token) + mpmath.mpf(period) / (10 ** len(period) - 1) / mpmath.mpf(10) ** decimals
        return lambda p: value

    def letter(self, token: str) -> Node:
        if token == "i" and self.next != "_":
            self.has_unit = True
            return lambda p: mpmath.mpc(0, 1)
        if token == "e" and self.next != "_":
            return lambda p: mpmath.e
        name = token
        if self.next == "_":
            self.take()
            name += "_" + self.subscript()
        if name[0] in "fghFGP" and self.next == "(":
            depth, start = 0, self.place
            while True:
                depth += {"(": 1, ")": -1}.get(self.take(), 0)
                if not depth:
                    break
            name += "".join(self.tokens[start : self.place])
        self.names.add(name)
        return lambda p: p[name]

    def subscript(self) -> str:
        if self.next != "{":
            return self.take()
        self.take()
        inside = []
        while self.next != "}":
            inside.append(self.take())
        self.take()
        return "".join(inside)

    def command(self, name: str) -> Node:
        if name == "pi":
            return lambda p: mpmath.pi
        if name == "infty":
            return lambda p: mpmath.inf
        if name in ("min", "max"):
            return self.extreme(min if name == "min" else max)
        if name in ("frac", "binom"):
            top, bottom = self.argument(), self.argument()
            if name == "frac":
                return lambda p: top(p) / bottom(p)
            return lambda p: mpmath.binomial(_whole(top(p)), _whole(bottom(p)))
        if name == "sqrt":
            return self.root()
        if name in ("log", *_FUNCTIONS):
            return self.function(name)
        if name in _GREEK:
            full = name
            if self.next == "_":
                self.take()
                full += "_" + self.subscript()
            self.names.add(full)
            return lambda p: p[full]
        raise Unknown(f"\\{name}")

    def extreme(self, choose: Callable[..., Value]) -> Node:
        self.take("(")
        parts = [self.sum()]
        while self.next == ",":
            self.take()
            parts.append(self.sum())
        self.take(")")
        self.has_bars = True
        return lambda p: choose(_real(part(p)) for part in parts)

    def root(self) -> Node:
        index: Node | None = None
        if self.next == "[":
            self.take()
            index = self.sum()
            self.take("]")
        inner = self.argument()
        if index is None:
            return lambda p: _power(inner(p), mpmath.mpf(1) / 2)
        degree = index
        return lambda p: _root(inner(p), degree(p))

    def function(self, name: str) -> Node:
        if name == "log":
            base: Node | None = None
            if self.next == "_":
                self.take()
                base = self.argument()
            unit = base
            apply: Callable[[Value, Point], Value] = (
                (lambda x, p: _log(x) / _LOG_UNIT) if unit is None else (lambda x, p: _log(x) / _log(unit(p)))
            )
        else:
            function = _FUNCTIONS[name]
            apply = lambda x, p: function(x)  # noqa: E731
        exponent: Node | None = None
        if self.next == "^":
            if name == "exp":
                raise Unknown("exp^")
            self.take()
            if self.tokens[self.place : self.place + 4] == ["{", "-", "1", "}"]:
                raise Unknown("an inverse function")
            exponent = self.argument()
        inner = self.operand()
        if exponent is None:
            return lambda p: apply(inner(p), p)
        power = exponent
        return lambda p: _power(apply(inner(p), p), power(p))

    def operand(self) -> Node:
        """What a function without brackets applies to: ``\\sin 2x``, up to a sign, a dot or another function."""
        if self.next in ("(", "["):
            node = self.group()
            if self.next == "^":
                raise Unknown("what is raised")
            return node
        node = self.power()
        while self.next and self.next not in _ENDS and self.next.lstrip("\\") not in ("log", *_FUNCTIONS, "|"):
            if self.next in ("(", "["):
                raise Unknown("where the function ends")
            node = self._multiplied(node, False, self.power(), 1)
        return node


def _whole(value: Value) -> int:
    real = _real(value)
    if real != int(real) or not 0 <= real <= 3000:
        raise Unknown("no small whole number")
    return int(real)


def _real(value: Value) -> Value:
    if abs(mpmath.im(value)) > CLOSE:
        raise ZeroDivisionError("not real")
    return mpmath.re(value)


def _root(value: Value, degree: Value) -> Value:
    """Real where school mathematics says so: the third root of −8 is −2."""
    if mpmath.im(value) == 0 and mpmath.re(value) < 0 and degree == int(degree) and int(degree) % 2:
        return -mpmath.root(-mpmath.re(value), int(degree))
    return _power(value, 1 / degree)


def _power(base: Value, exponent: Value) -> Value:
    if abs(exponent) > 20000:
        raise Unknown("a large power")
    if exponent == 0:
        if base == 0:
            raise ZeroDivisionError("0^0")
        return mpmath.mpf(1)
    return _checked(mpmath.power(base, exponent), base, exponent)


def _log(value: Value) -> Value:
    if value == 0:
        raise ZeroDivisionError("log 0")
    return _checked(mpmath.log(value), value)


_REAL = [False]  # whether roots and logarithms of negative numbers are not defined, as in school


def _checked(value: Value, *of: Value) -> Value:
    if _REAL[0] and mpmath.im(value) and not any(mpmath.im(one) for one in of):
        raise ZeroDivisionError("not real")
    return value


class Formula:
    """A text with its value as a function of its variables."""

    def __init__(self, text: str) -> None:
        reader = _Reader(text)
        self.node = reader.whole()
        self.names = frozenset(reader.names)
        self.has_bars, self.has_unit = reader.has_bars, reader.has_unit

    def at(self, point: Point, real: bool = False) -> Value | None:
        """The value, or None where it is not defined: among the real numbers, if so wished."""
        _REAL[0] = real
        with mpmath.workdps(DIGITS):
            try:
                value = self.node(point)
            except (ZeroDivisionError, ValueError, OverflowError):
                return None
            return None if mpmath.isnan(value) else value


@lru_cache(maxsize=20_000)
def read_formula(text: str) -> Formula:
    """The formula of a text.

    Raises:
        Unknown: it is not understood.
    """
    try:
        with mpmath.workdps(DIGITS):
            return Formula(text)
    except (RecursionError, KeyError, IndexError, OverflowError) as error:
        raise Unknown(type(error).__name__) from error


def points(names: frozenset[str]) -> list[Point]:
    """Values of the variables: fractions, large and small, even and odd, of both signs, and mixed."""
    if not names:
        return [{}]
    ordered = sorted(names)
    rows: list[Point] = []
    for kind in range(9):  # the values are exact enough: a fraction of seven digits is a value like any other
        row: Point = {}
        for place, name in enumerate(ordered):
            fraction = mpmath.mpf(7 + 3 * place) / (3 + 5 * place + kind)
            row[name] = (
                fraction + 2,
                -fraction,
                fraction * (-1) ** place,
                mpmath.mpf(4 + 2 * place),
                mpmath.mpf(5 + 2 * place),
                mpmath.mpf(-6 - 2 * place),
                mpmath.mpf(-3 - 2 * place),
                mpmath.mpf(1) / (3 + 2 * place),
                31 + fraction * (place + 1),
            )[kind]
        rows.append(row)
    return rows


def close(left: Value, right: Value) -> bool:
    """Equal to 46 decimals, or digits of large numbers."""
    with mpmath.workdps(DIGITS):
        if mpmath.isinf(left) or mpmath.isinf(right):
            return bool(left == right)
        return bool(abs(left - right) <= CLOSE * max(1, abs(left), abs(right)))


def compare_formulas(left: Formula, right: Formula) -> str:
    """``same``, ``different`` or ``unknown``.

    Different: at one point at least, both are defined and real (or one of them names i) and differ; or one takes an
    absolute value or rounds, and is defined where the other is not. Same: they never differ, and agree at three.
    """
    unit = left.has_unit or right.has_unit
    agreed, outside = 0, False
    names = left.names | right.names
    for point in points(names):
        try:
            one, other = (side.at(point, real=bool(names) and not unit) for side in (left, right))
        except Unknown:
            continue
        if one is None or other is None:
            outside = outside or (one is None) != (other is None)
            continue
        real = [abs(mpmath.im(value)) <= CLOSE * max(1, abs(value)) for value in (one, other)]
        if not all(real) and not unit and names:
            outside = outside or real[0] != real[1]
            continue
        if not close(one, other):
            return "different"
        agreed += 1
    if outside and left.has_bars != right.has_bars:
        return "different"
    return "same" if agreed >= (NUM_AGREEING if names else 1) else "unknown"
