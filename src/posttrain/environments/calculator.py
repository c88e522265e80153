"""A calculator: whole numbers and fractions, exactly, of a bounded size."""

from __future__ import annotations

import ast
import math
from fractions import Fraction
from typing import Annotated

from pydantic import Field

from posttrain.registry import register

MAX_CHARS = 200


@register("environment")
def calculator(*, max_digits: Annotated[int, Field(ge=1, le=1000)] = 30) -> Calculator:
    """A tool ``calculator`` for sums: ``+ - * / // % **``, brackets, whole numbers and decimals, computed exactly.

    The expression is parsed, never evaluated. A result that is no whole number is given as a decimal where that ends
    within ``max_digits``, else as a fraction. What is no sum, or too large, is answered with what is wrong.

    Args:
        max_digits: of every number in it, those on the way included.
    """
    return Calculator(max_digits)


class Calculator:
    """The environment; it holds nothing between calls."""

    def __init__(self, max_digits: int) -> None:
        self._max_digits = max_digits

    def reset(self) -> None:
        """Nothing to prepare."""

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

    def _combine(self, operator: ast.operator, left: Fraction, right: Fraction) -> Fraction:
        if isinstance(operator, ast.Add):
            return left + right
        if isinstance(operator, ast.Sub):
            return left - right
        if isinstance(operator, ast.Mult):
            return left * right
        if isinstance(operator, ast.Div | ast.FloorDiv | ast.Mod):
            if right == 0:
                raise ValueError("division by zero")
            if isinstance(operator, ast.Div):
                return left / right
            return Fraction(left // right) if isinstance(operator, ast.FloorDiv) else left % right
        if isinstance(operator, ast.Pow):
            return self._power(left, right)
        raise ValueError("only + - * / // % ** can be computed")

    def _power(self, base: Fraction, exponent: Fraction) -> Fraction:
        if exponent.denominator != 1:
            raise ValueError("an exponent is a whole number")
        if base == 0 and exponent < 0:
            raise ValueError("division by zero")
        size = max(base.numerator.bit_length(), base.denominator.bit_length()) - 1
        if size * abs(exponent.numerator) > 4 * self._max_digits or abs(exponent.numerator) > 10**6:
            raise self._too_large()
        return base**exponent.numerator

    def _bounded(self, value: Fraction) -> Fraction:
        if max(abs(value.numerator), value.denominator) >= 10**self._max_digits:
            raise self._too_large()
        return value

    def _too_large(self) -> ValueError:
        return ValueError(f"a number has more than {self._max_digits} digits")

    def _show(self, value: Fraction) -> str:
        rest, places = value.denominator, 0
        while rest % 10 == 0:
            rest, places = rest // 10, places + 1
        twos = fives = 0
        while rest % 2 == 0:
            rest, twos = rest // 2, twos + 1
        while rest % 5 == 0:
            rest, fives = rest // 5, fives + 1
        places += max(twos, fives)
        if value.denominator == 1 or rest != 1 or places > self._max_digits:
            return str(value)
        digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
        return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"
