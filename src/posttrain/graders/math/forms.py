"""The form of a mathematical answer: lists, tuples, intervals, sets, unions, relations, matrices, units, words.

The leaves are numbers (``Quantity``), words, and expressions in LaTeX that ``equality`` compares. Nothing is evaluated
here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.graders.answers import Quantity, is_known_unit, is_unit, parse_quantity

MAX_DEPTH = 30
MAX_ITEMS = 64

_TOKENS = re.compile(r"\\text\{[^{}]*\}|\\(?:begin|end)\{[^{}]*\}|\\[A-Za-z]+|\\.|[A-Za-z]+|[\s\S]")
_LEVELS = {"(": 1, "[": 1, "{": 1, "\\{": 1, ")": -1, "]": -1, "}": -1, "\\}": -1}
_RELATIONS = {"=": "=", "<": "<", ">": ">", "\\le": "<=", "\\ge": ">=", "\\ne": "!=", "\\in": "in", "\\approx": "~"}
_SEPARATORS = (",", ";", "and", "or", "\\text{and}", "\\text{or}", "\\text{, and}", "\\text{, or}", "\\text{,}")
_MATRIX = re.compile(r"\\begin\{((?:[bp]|small)?matrix|cases)\}([\s\S]*)\\end\{\1\}")
_CONDITION = re.compile(r"(?<![\\A-Za-z])(?:if|for|when|where|whenever|is)(?![A-Za-z])", re.IGNORECASE)
_SENTENCE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
_WORDS = re.compile(r"[A-Za-z][A-Za-z .'/-]*")
_CALCULATION = re.compile(r"(?<![A-Za-z]{4})[-/](?![A-Za-z]{4})")  # x-y and a/b are not words; x-axis is
_TEXT_ONLY = re.compile(r"\\text\{([^{}]*)\}\.?")
_BASED = re.compile(r"([0-9A-Z.]+)\s*_\{(?:\\text\{)?([0-9]+|two|three|four|five|six|seven|eight|nine|ten|twelve)\}?\}")
_BASES = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9",
          "ten": "10", "twelve": "12"}  # fmt: skip
_REALS = re.compile(
    r"\\mathbb\{R\}|\\R|(?:\\text\{)?\s*(?:the set of )?(?:all )?real(?: number)?s\s*\}?", re.IGNORECASE
)
# ``\\mathbb{R} \\setminus \\{0\\}``, and ``\\{x : x > 0\\}``, whose condition says it all.
_PUNCTURED = re.compile(r"(?:\\mathbb\{R\}|\\R)\s*(?:\\setminus|\\backslash|-)\s*\\\{([^,;]*)\\\}")
_BUILDER = re.compile(r"\\\{\s*([A-Za-z])\s*(?:\\in\s*(?:\\mathbb\{R\}|\\R)\s*)?[|:]\s*(.*)\\\}")
_LETTER = re.compile(r"\(?\s*([A-Za-z])\s*\)?")
_CLOCK = re.compile(r"(\d{1,2}(?:\s*:\s*[0-5]\d){1,2})\s*((?:\\text\{)?\s*(?:[AaPp])\.?\s*[Mm]\.?\s*\}?)?")
_THOUSANDS = r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])"
_EQUATIONS = re.compile(rf"[^=,;]*=(?:[^,;(\[0-9]|{_THOUSANDS}|[0-9](?![0-9]*,))*")  # no comma but of thousands
_PERCENT = re.compile(
    r"\s*(?:%|\\text\{(?:percent|percentage|pct|per cent)\}|(?<=[\d})\s])(?:percentage|percent|pct|per cent))$"
)
_DEGREES = re.compile(r"\s*\^\{\\circ\}\s*(?:[CF]|\\text\{[CF]\})?$")
_ANGLE_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_UNIT_TEXT = re.compile(r"\s*\\text\{([A-Za-z][A-Za-z .'/-]*)\}\s*(?:\^\{([23])\})?$")
_UNIT_WORDS = re.compile(r"(?<=[\d})\s])\s*([A-Za-z]{2,}(?:[ /-][A-Za-z]{2,})*)\s*(?:\^\{([23])\})?$")


class NotUnderstood(Exception):
    """Unsupported notation; the message says why."""


@dataclass(frozen=True, slots=True)
class Words:
    """A word answer: lowercase, single spaces."""

    text: str


@dataclass(frozen=True, slots=True)
class BasedNumber:
    """Digits with a base, such as ``101_2``. Never equals a plain number, since that is a different representation."""

    digits: str
    base: str


@dataclass(frozen=True, slots=True)
class Expression:
    """LaTeX for a value without its unit. ``percent``: followed by a % sign."""

    latex: str
    unit: str = ""
    percent: bool = False


@dataclass(frozen=True, slots=True)
class Collection:
    """Several values.

    ``opening`` and ``closing``: the brackets of a tuple or an interval, ``{`` and ``}`` of a set, ``:`` of a ratio,
    empty of a bare list, ``cases`` of pairs (value, condition).
    """

    opening: str
    closing: str
    items: tuple[Form, ...]


@dataclass(frozen=True, slots=True)
class Union:
    """Sets joined by ∪."""

    parts: tuple[Form, ...]


@dataclass(frozen=True, slots=True)
class Relation:
    """``sides[0] operators[0] sides[1] ...``; the sides are text, the operators ``= < > <= >= != in ~``."""

    sides: tuple[str, ...]
    operators: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """Cells by row, and the LaTeX of the whole."""

    rows: tuple[tuple[Form, ...], ...]
    latex: str


Form = Words | Quantity | BasedNumber | Expression | Collection | Union | Relation | Matrix


def undress(text: str) -> str:
    """Strip math delimiters, quotes and a final period or comma from unified text."""
    for mark in ("\\(", "\\)", "\\[", "\\]"):
        text = text.replace(mark, "")
    return text.strip(' "`').rstrip(" .,;:\\").strip()


def read_form(text: str, depth: int = 0) -> Form:
    """Parse an answer, given as unified text without math delimiters.

    Raises:
        NotUnderstood: nested too deeply, too many items, unbalanced brackets, or empty.
    """
    text = _unwrap(text.strip())
    if not text:
        raise NotUnderstood("nothing there")
    if depth > MAX_DEPTH:
        raise NotUnderstood("nested too deeply")
    simple = _read_simple(text, depth)
    if simple is not None:
        return simple
    if "," in text and _EQUATIONS.fullmatch(text):
        return _read_equations(text)
    items, separators = split(text, _SEPARATORS)
    if separators:
        return _read_list([item for item in items if item], text, depth)
    sides, operators = split(text, _RELATIONS)
    if operators:
        return Relation(tuple(sides), tuple(_RELATIONS[operator] for operator in operators))
    parts, unions = split(text, ("\\cup",))
    if unions:
        return Union(tuple(read_form(part, depth + 1) for part in parts))
    if ("\\pm" in text or "\\mp" in text) and not text.startswith("\\{"):
        upper = text.replace("\\pm", "+").replace("\\mp", "-").strip().removeprefix("+")
        lower = text.replace("\\pm", "-").replace("\\mp", "+")
        return Collection("", "", tuple(read_form(signed, depth + 1) for signed in (upper, lower)))
    return _read_bracketed(text, depth) or _read_matrix(text, depth) or _read_expression(text, depth)


def _read_equations(text: str) -> Relation:
    """Parse an equation chain whose commas are all thousands separators: ``a = 1,000 = 2*500``."""
    sides = []
    pieces, _ = split(text, ("=",))
    for side in pieces:
        if not parse_quantity(side):
            side = side.replace(",", "")
        sides.append(side)
    return Relation(tuple(sides), ("=",) * (len(sides) - 1))


def split(text: str, marks: Sequence[str] | dict[str, str]) -> tuple[list[str], list[str]]:
    """Split text at marks outside brackets. Returns (pieces, marks).

    Raises:
        NotUnderstood: unbalanced brackets, or too many pieces (``MAX_ITEMS``).
    """
    pieces: list[str] = []
    separators: list[str] = []
    level = 0
    start = 0
    for match in _TOKENS.finditer(text):
        token = match[0]
        if token.startswith("\\begin{"):
            level += 1
        elif token.startswith("\\end{"):
            level -= 1
        elif token in _LEVELS:
            level += _LEVELS[token]
        elif level == 0 and token in marks:
            pieces.append(text[start : match.start()].strip())
            separators.append(token)
            start = match.end()
        if level < 0:
            raise NotUnderstood("a bracket closes that was not opened")
    if level:
        raise NotUnderstood("a bracket does not close")
    if len(separators) >= MAX_ITEMS:
        raise NotUnderstood("too many items")
    return [*pieces, text[start:].strip()], separators


def _unwrap(text: str, opening: str = "{") -> str:
    """Without plain braces (or parentheses) around everything."""
    while text.startswith(opening) and _closing_of(text) == len(text) - 1:
        text = text[1:-1].strip()
    return text


def _closing_of(text: str) -> int | None:
    """Find the closing bracket matching an opening one at position 0."""
    level = 0
    for match in _TOKENS.finditer(text):
        level += _LEVELS.get(match[0], 0)
        if level <= 0:
            return match.start()
    return None


def _read_simple(text: str, depth: int) -> Form | None:
    """Parse numbers, numbers with a base, times of day, real-number sets, words."""
    quantity = parse_quantity(text)
    # 1/2 x does not measure a quantity x
    if quantity is not None and (len(quantity.unit) != 1 or is_known_unit(quantity.unit)):
        return quantity
    digits = text
    if text.startswith("\\text{"):
        digits = _TEXT_ONLY.sub(r"\1", text, count=1)
    if match := _BASED.fullmatch(digits):
        return BasedNumber(match[1], _BASES.get(match[2], match[2]))
    if match := _CLOCK.fullmatch(text):
        time = re.sub(r"\s", "", match[1])
        if match[2]:
            time += re.sub(r"\\text|[^A-Za-z]", "", match[2]).lower()
        return Words(time)
    if _REALS.fullmatch(text):
        return Collection("(", ")", (Expression("-\\infty"), Expression("\\infty")))
    if match := _PUNCTURED.fullmatch(text):
        return all_but(read_form(match[1], depth + 1))
    if match := _BUILDER.fullmatch(text):
        _, operators = split(match[2], _RELATIONS)
        if operators and "=" not in operators:
            return read_form(match[2], depth + 1)
    if match := _TEXT_ONLY.fullmatch(text):
        return _read_text(match[1].strip(), depth)
    if len(text) <= 2 or not _WORDS.fullmatch(text) or _CALCULATION.search(text):
        return None
    if not {"and", "or"}.isdisjoint(text.split()):
        return None
    return Words(" ".join(text.casefold().split()))


def _read_text(text: str, depth: int) -> Form:
    """Parse ``\\text{}`` contents: a letter, a list, a time of day, or words."""
    letter = _LETTER.fullmatch(text)
    if letter is not None:
        return Expression(letter[1])
    if "," in text or _CLOCK.fullmatch(text):
        return read_form(text, depth + 1)
    return Words(" ".join(text.casefold().split()))


def all_but(hole: Form) -> Form:
    """The reals minus a point."""
    ends = ((Expression("-\\infty"), hole), (hole, Expression("\\infty")))
    return Union(tuple(Collection("(", ")", pair) for pair in ends))


def _read_list(items: list[str], text: str, depth: int) -> Form:
    """A bare list; ``n = 1, 2, 3`` is a relation with a list on its right."""
    if not items:
        raise NotUnderstood("separators alone")
    if len(items) == 1:
        return read_form(items[0], depth + 1)
    sides, operators = split(items[0], _RELATIONS)
    if operators == ["="] and not any(split(item, _RELATIONS)[1] for item in items[1:]):
        return Relation((sides[0], text.partition("=")[2].strip()), ("=",))
    forms = tuple(read_form(item, depth + 1) for item in items)
    return Collection("", "", _flatten(forms))


def _flatten(forms: Sequence[Form]) -> tuple[Form, ...]:
    """``±`` inside a list expands to two items."""
    items: list[Form] = []
    for form in forms:
        if isinstance(form, Collection) and not form.opening:
            items += form.items
        else:
            items.append(form)
    return tuple(items)


def _read_bracketed(text: str, depth: int) -> Form | None:
    """Parse a tuple, an interval or a set; brackets around a single value are dropped."""
    opening = next((mark for mark in ("(", "[", "\\{") if text.startswith(mark)), None)
    closing = next((mark for mark in ("\\}", ")", "]") if text.endswith(mark)), None)
    if opening is None or closing is None or _closing_of(text) != len(text) - len(closing):
        return None
    if (opening == "\\{") != (closing == "\\}"):
        raise NotUnderstood("a brace and a bracket")
    inner = text[len(opening) : -len(closing)].strip()
    if opening == "\\{":
        items, separators = split(inner, _SEPARATORS)
        if separators and not any(items):
            raise NotUnderstood("separators alone")
        return Collection("{", "}", _flatten([read_form(item, depth + 1) for item in items if item]))
    items, separators = split(inner, (",", ";"))
    if not separators:
        if (opening, closing) not in (("(", ")"), ("[", "]")):
            raise NotUnderstood("an interval with one end")
        return read_form(inner, depth + 1)
    return Collection(opening, closing, tuple(read_form(item, depth + 1) for item in items))


def _read_matrix(text: str, depth: int) -> Form | None:
    """Parse a matrix. ``cases`` become pairs if each has a condition, otherwise a list."""
    match = _MATRIX.fullmatch(text)
    if match is None or "\\begin{" in match[2]:
        return None
    lines, _ = split(match[2], ("\\\\",))
    rows = [split(line, ("&",))[0] for line in lines if line]
    if not rows:
        raise NotUnderstood("an environment without rows")
    if match[1] != "cases":
        cells = [tuple(read_form(entry, depth + 1) for entry in row) for row in rows]
        return Matrix(tuple(cells), text)
    cases = []
    for row in rows:
        entries = [_read_entry(entry, depth) for entry in row]
        cases.append(tuple(entry for entry in entries if entry is not None))
    if {len(case) for case in cases} == {1}:
        return Collection("", "", tuple(case[0] for case in cases))
    return Collection("cases", "cases", tuple(Collection("(", ")", case) for case in cases))


def _read_entry(text: str, depth: int) -> Form | None:
    """Parse a value or condition, dropping words that introduce conditions. None for empty cells."""
    bare = _CONDITION.sub(" ", re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)).strip(" ,.;")
    if _SENTENCE.search(bare) and not split(bare, _RELATIONS)[1]:
        return Words(" ".join(bare.casefold().split()))
    if bare:
        return read_form(bare, depth + 1)
    return None


def _read_expression(text: str, depth: int) -> Form:
    """Parse a scalar: a ratio, or an expression stripped of its unit."""
    terms, colons = split(text, (":",))
    if colons and all(terms):
        return Collection(":", "", tuple(read_form(term, depth + 1) for term in terms))
    percent = _PERCENT.search(text)
    if percent:
        unit = ""
        body = text[: percent.start()]
    else:
        unit, body = _split_unit(text)
    body = body.strip()
    if unit or percent:
        quantity = parse_quantity(body)
        if quantity is not None and not quantity.unit and not quantity.percent:
            return Quantity(quantity.value, percent is not None, unit, marked=True)
    if not body:
        raise NotUnderstood("a unit alone")
    return Expression(_unwrap(body, "("), unit, percent is not None)


def _split_unit(text: str) -> tuple[str, str]:
    """Split off a trailing unit, or a leading currency."""
    if text.startswith("$"):
        return "dollar", text[1:]
    degrees = _DEGREES.search(text)
    if degrees is not None and not _ANGLE_FUNCTION.search(text):
        return "°", text[: degrees.start()]
    match = _UNIT_TEXT.search(text)
    if match is not None:
        is_known = is_unit(match[1])
    else:
        match = _UNIT_WORDS.search(text)
        is_known = match is not None and all(map(is_known_unit, re.split(r"[ /-]", match[1])))
    if match is None or not is_known or not match.start():
        return "", text
    unit = match[1].strip().lower()
    if match[2]:
        unit += f"^{match[2]}"
    return unit, text[: match.start()]


def is_time(form: Form) -> bool:
    """Check for a time of day: 1:03pm."""
    return isinstance(form, Words) and _CLOCK.fullmatch(form.text) is not None
