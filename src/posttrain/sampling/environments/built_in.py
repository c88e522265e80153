"""The environments that ship: a calculator, Python in a sandbox, a game in turns, search by BM25 in a folder."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections import Counter
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from pydantic import Field

from posttrain.errors import DataError, RunFailure, UsageError
from posttrain.graders.sandbox.sandbox import Bounds, SandboxKind, choose_sandbox, run
from posttrain.randomness import generator
from posttrain.registry import register
from posttrain.sampling.environments.contract import EnvironmentFailed
from posttrain.sampling.environments.tools import shortened

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
    """A ``calculator`` tool for exact arithmetic: ``+ - * / // % **``, brackets, integers and decimals.

    Expressions are parsed, never evaluated. Non-integer results are decimals if they terminate within ``max_digits``,
    else fractions. Invalid or too large expressions produce an error message.

    Args:
        max_digits: digit limit, including intermediate results.
    """
    return Calculator(max_digits)


class Calculator:
    """Stateless environment for ``calculator``."""

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
            if isinstance(node.op, ast.USub):
                return -value
            return value
        if isinstance(node, ast.BinOp):
            left = self._value(node.left)
            right = self._value(node.right)
            return self._bounded(self._combine(node.op, left, right))
        raise ValueError("only numbers, brackets and + - * / // % ** can stand in a sum")

    def _combine(self, kind: ast.operator, left: Fraction, right: Fraction) -> Fraction:
        if isinstance(kind, ast.Pow):
            if right.denominator != 1:
                raise ValueError("an exponent is a whole number")
            if left == 0 and right < 0:
                raise ValueError("division by zero")
            size = max(left.numerator.bit_length(), left.denominator.bit_length()) - 1
            exponent = abs(right.numerator)
            if size * exponent > 4 * self._max_digits or exponent > 10**6:
                raise self._too_large()
            return left**right.numerator
        if type(kind) not in _OPERATIONS:
            raise ValueError("only + - * / // % ** can be computed")
        if isinstance(kind, ast.Div | ast.FloorDiv | ast.Mod) and right == 0:
            raise ValueError("division by zero")
        return Fraction(_OPERATIONS[type(kind)](left, right))

    def _bounded(self, value: Fraction) -> Fraction:
        largest = max(abs(value.numerator), value.denominator)
        if largest >= 10**self._max_digits:
            raise self._too_large()
        return value

    def _too_large(self) -> ValueError:
        return ValueError(f"a number has more than {self._max_digits} digits")

    def _show(self, value: Fraction) -> str:
        if value.denominator == 1:
            return str(value)
        places = next((n for n in range(1, self._max_digits + 1) if 10**n % value.denominator == 0), None)
        if places is None:
            return str(value)
        shifted = abs(value.numerator) * 10**places // value.denominator
        digits = str(shifted).rjust(places + 1, "0")
        sign = ""
        if value < 0:
            sign = "-"
        return f"{sign}{digits[:-places]}.{digits[-places:]}"


_PROGRAM = "program.py"
_FACTOR = 6  # elapsed time, in units of computing time


@register("environment")
def python(
    *,
    sandbox: SandboxKind | None = None,
    seconds: Annotated[int, Field(ge=1, le=600)] = 5,
    memory_megabytes: Annotated[int, Field(ge=64)] = 512,
    max_output_chars: Annotated[int, Field(ge=100)] = 4000,
) -> Python:
    """A ``python`` tool that runs programs and returns their output, including a final error.

    Each call starts in an empty folder (docs/how-to/code-rewards.md: sandboxes). Programs that exceed their time
    limit are stopped, and the model is informed.

    Args:
        sandbox: ``bubblewrap`` (default), or ``process``, which gives programs access to this user's files.
        seconds: CPU time limit; elapsed time may be up to 6 times longer. Set ``rollout.tool_seconds`` higher.
        memory_megabytes: memory limit for a program including its subprocesses.
        max_output_chars: output is truncated beyond this.

    Raises:
        UsageError: sandbox unavailable on this machine.
    """
    kind = choose_sandbox(sandbox, "environment.sandbox")
    return Python(kind, seconds, memory_megabytes, max_output_chars)


class Python:
    """Stateless environment for ``python``."""

    def __init__(self, kind: SandboxKind, seconds: int, memory_megabytes: int, max_chars: int) -> None:
        self._kind: SandboxKind = kind
        self._seconds = seconds
        self._max_chars = max_chars
        self._bounds = Bounds(cpu_seconds=seconds, memory_bytes=memory_megabytes * 2**20)

    def reset(self) -> None:
        """Prepare nothing."""

    def python(self, code: str) -> str:
        """Runs a Python program and returns what it prints.

        Args:
            code: the program.
        """
        try:
            files = {_PROGRAM: code.encode("utf-8", "replace")}
            seconds = float(_FACTOR * self._seconds)
            ended = run([_PROGRAM], files, kind=self._kind, bounds=self._bounds, seconds=seconds)
        except RunFailure as error:
            raise EnvironmentFailed(str(error)) from error
        output = ended.stdout.decode("utf-8", "replace")
        complaint = ended.stderr.decode("utf-8", "replace")
        if ended.timed_out or ended.code == 137:
            output += f"\nstopped: it took more than {self._seconds} seconds or more memory than it may have"
        elif ended.code:
            complaint = complaint.strip()[-self._max_chars // 2 :]  # errors are reported at the end
            output = f"{shortened(output, self._max_chars - len(complaint))}\n{complaint}"
        return shortened(output.strip("\n"), self._max_chars) or "(nothing was printed)"


@register("environment")
def number_guess(
    *,
    low: Annotated[int, Field(ge=0)] = 1,
    high: Annotated[int, Field(ge=1)] = 20,
    guesses: Annotated[int, Field(ge=1)] | None = None,
) -> NumberGuess:
    """Guess a number with replies ``higher``, ``lower`` or ``right``. Reward 1 if found.

    With k guesses among n numbers, binary search finds ``min(n, 2^k − 1)``, which is optimal.

    Args:
        low, high: inclusive bounds; the number is uniform between them.
        guesses: allowed guesses; defaults to the number required by binary search.

    Raises:
        UsageError: ``low`` is not below ``high``.
    """
    if low >= high:
        raise UsageError(f"environment number_guess: low ({low}) must be below high ({high})")
    if guesses is None:
        guesses = (high - low + 1).bit_length()
    return NumberGuess(low, high, guesses)


class NumberGuess:
    """See ``number_guess``. The seed determines the number."""

    def __init__(self, low: int, high: int, guesses: int) -> None:
        self.low = low
        self.high = high
        self.guesses = guesses

    def reset(self, *, seed: int) -> str:
        """Begin a new game."""
        self.number = int(generator(seed, "game").integers(self.low, self.high + 1))
        self.left = self.guesses
        self.done = False
        self.is_found = False
        return f"Find a number from {self.low} to {self.high} with {self.guesses} guesses."

    def get_reward(self) -> float:
        """Return 1 if the number was found."""
        return float(self.is_found)

    def get_feedback(self) -> str:
        """Reveal the number."""
        return f"The number was {self.number}."

    def guess(self, number: int) -> str:
        """Guesses the number; says whether it is higher, lower or right.

        Args:
            number: the guess.
        """
        if self.done:
            raise ValueError("the game is over")
        self.left -= 1
        self.is_found = number == self.number
        self.done = self.is_found or not self.left
        if self.is_found:
            return "right"
        if number < self.number:
            direction = "higher"
        else:
            direction = "lower"
        if self.left:
            return direction
        return f"{direction}; it was {self.number}"


MAX_BYTES = 1 << 30
_WORD = re.compile(r"\w+")
_SUFFIXES = (".txt", ".md")


@register("environment")
def search(
    *,
    path: str,
    results: Annotated[int, Field(ge=1, le=20)] = 3,
    passage_chars: Annotated[int, Field(ge=100, le=20_000)] = 800,
    k1: Annotated[float, Field(ge=0)] = 1.2,
    b: Annotated[float, Field(ge=0, le=1)] = 0.75,
) -> Search:
    """A ``search`` tool over ``.txt`` and ``.md`` files in a folder, returning the best passages.

    ``score(q, d) = Σ_w idf(w) · f(w, d) (k1 + 1) / (f(w, d) + k1 (1 − b + b |d| / mean |d|))`` over query words, with
    ``idf(w) = ln(1 + (N − n(w) + 0.5) / (n(w) + 0.5))``. Ties keep file order.

    Args:
        path: folder to search.
        results: maximum passages per query.
        passage_chars: paragraphs are joined up to this length.
        k1, b: see the formula.

    Source: Robertson and Zaragoza (2009), "The probabilistic relevance framework", section 3.

    Raises:
        DataError: missing folder, no text files, or too much text.
    """
    return Search(read_passages(path, passage_chars), results, k1, b)


Index = tuple[list[tuple[str, str]], list[Counter[str]]]  # (file, passage), and word counts per passage


@lru_cache(maxsize=4)
def read_passages(path: str, passage_chars: int) -> Index:
    """Load passages from a folder, cached per process."""
    folder = Path(path)
    if not folder.is_dir():
        raise DataError(path, "folder not found; set environment.path to a folder with .txt or .md files")
    passages: list[tuple[str, str]] = []
    size = 0
    files = sorted(file for file in folder.rglob("*") if file.suffix in _SUFFIXES and file.is_file())
    for file in files:
        size += file.stat().st_size
        if size > MAX_BYTES:
            raise DataError(path, f"more than {MAX_BYTES} bytes of text; use a smaller folder")
        name = file.relative_to(folder).as_posix()
        text = file.read_text(encoding="utf-8", errors="replace")
        for part in _split(text, passage_chars):
            passages.append((name, part))
    if not passages:
        raise DataError(path, "no .txt or .md files with text found")
    words = [Counter(_WORD.findall(text.lower())) for _, text in passages]
    return passages, words


class Search:
    """Stateless environment for ``search``."""

    def __init__(self, index: Index, results: int, k1: float, b: float) -> None:
        self._passages, self._words = index
        self._results = results
        self._k1 = k1
        self._b = b
        num_passages = len(self._words)
        self._mean = sum(counts.total() for counts in self._words) / num_passages
        containing = Counter(word for counts in self._words for word in counts)
        self._idf = {}
        for word, n in containing.items():
            self._idf[word] = math.log(1 + (num_passages - n + 0.5) / (n + 0.5))

    def reset(self) -> None:
        """Prepare nothing."""

    def search(self, query: str) -> str:
        """Searches the texts and returns the passages that fit best.

        Args:
            query: words to look for.
        """
        words = list(dict.fromkeys(_WORD.findall(query.lower())))
        scores = []
        for number, counts in enumerate(self._words):
            norm = self._k1 * (1 - self._b + self._b * counts.total() / self._mean)
            score = 0.0
            for word in words:
                if word in counts:
                    score += self._idf[word] * counts[word] * (self._k1 + 1) / (counts[word] + norm)
            if score > 0:
                scores.append((-score, number))
        shown = []
        for _, number in sorted(scores)[: self._results]:
            name, text = self._passages[number]
            shown.append(f"[{name}] {text}")
        return "\n\n".join(shown) or "nothing fits"


def _split(text: str, limit: int) -> list[str]:
    passages: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        rest = paragraph.strip()
        if rest and passages and len(passages[-1]) + len(rest) + 1 <= limit:
            passages[-1] += f"\n{rest}"
            continue
        while rest:
            passages.append(rest[:limit])
            rest = rest[limit:].strip()
    return passages
