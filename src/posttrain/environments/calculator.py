"""A calculator: whole numbers and fractions, exactly, of a bounded size."""

from __future__ import annotations

import ast
import math
import operator
from fractions import Fraction
from typing import Annotated

from pydantic import Field

from posttrain.registry import register

MAX_CHARS = 200
_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@register("environment")
def calculator(*, max_digits: Annotated[int, Field(ge=1, le=1000)] = 30) -> Calculator:
    """A tool ``calculator`` for sums: ``+ - * / // % **``, brackets, whole numbers and decimals, computed exactly.

    The expression is parsed, never evaluated. A result that is no whole number is given as a decimal where that ends
    within ``max_digits``, else as a fraction. Anything else, or too large, is answered with an error.

    Args:
        max_digits: of every number in it, intermediate results included.
    """
    return Calculator(max_digits)


class Calculator:
    """The environment; it has no state."""

    def __init__(self, max_digits: int) -> None:
        self._max_digits = max_digits

    def reset(self) -> None:
        """Prepare nothing."""

    def calculator(self, expression: str) -> str:
        """Computes a sum exactly.

        Args:
            expression: the sum, as in (12 + 7) * 3.
        """
        if len(expression) > MAX_CHARS:
            raise ValueError(f"at most {MAX_CHARS} characters")
        try:
            tree = ast.parse(expression.strip(), mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise ValueError("this is no sum") from None
        return self._show(self._value(tree.body))

    def _value(self, node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            if node.value == math.inf:  # 1e999
                raise self._too_large()
            return self._bounded(Fraction(str(node.value)))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            value = self._value(node.operand)
            return -value if isinstance(node.op, ast.USub) else value
        if isinstance(node, ast.BinOp):
            return self._bounded(self._combine(node.op, self._value(node.left), self._value(node.right)))
        raise ValueError("only numbers, brackets and + - * / // % ** can stand in a sum")

    def _combine(self, kind: ast.operator, left: Fraction, right: Fraction) -> Fraction:
        if isinstance(kind, ast.Pow):
            if right.denominator != 1:
                raise ValueError("an exponent is a whole number")
            if left == 0 and right < 0:
                raise ValueError("division by zero")
            size = max(left.numerator.bit_length(), left.denominator.bit_length()) - 1
            if size * abs(right.numerator) > 4 * self._max_digits or abs(right.numerator) > 10**6:
                raise self._too_large()
            return left**right.numerator
        if type(kind) not in _OPERATIONS:
            raise ValueError("only + - * / // % ** can be computed")
        if isinstance(kind, ast.Div | ast.FloorDiv | ast.Mod) and right == 0:
            raise ValueError("division by zero")
        return Fraction(_OPERATIONS[type(kind)](left, right))

    def _bounded(self, value: Fraction) -> Fraction:
        if max(abs(value.numerator), value.denominator) >= 10**self._max_digits:
            raise self._too_large()
        return value

    def _too_large(self) -> ValueError:
        return ValueError(f"a number has more than {self._max_digits} digits")

    def _show(self, value: Fraction) -> str:
        places = next((n for n in range(1, self._max_digits + 1) if 10**n % value.denominator == 0), None)
        if value.denominator == 1 or places is None:
            return str(value)
        digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
        return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"
