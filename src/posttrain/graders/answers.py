"""Reading answers out of text: numbers with their units, the last number, the last box.

Pure text functions, linear in the length of their input. Nothing is ever evaluated: a number is
read by a fixed grammar into an exact ``Fraction``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fractions import Fraction

from posttrain.graders.units import SCALES, SHORT_UNITS, canonical_unit, is_known_unit, is_unit, singular

MAX_NUMBER_CHARS = 400  # a longer text is no number; keeps digits and exponents bounded
MAX_EXPONENT = 400

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_PREFIX = re.compile(r"([+-]?)\s*([$€£]?)\s*([+-]?)\s*")
_FRAC = r"\\[dtc]?frac\s*(?:\{\s*([+-]?[0-9]+)\s*\}|([0-9]))\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))"  # \frac{1}{2}, \frac12
_LATEX_FRACTION = re.compile(_FRAC)
_LATEX_MIXED = re.compile(r"([0-9]+)\s*" + _FRAC)
_MIXED = re.compile(r"([0-9]+)\s+([0-9]+)\s*/\s*([0-9]+)")
_FRACTION = re.compile(rf"({_DIGITS}(?:\.[0-9]+)?)\s*/\s*({_DIGITS}(?:\.[0-9]+)?)")
_DECIMAL = re.compile(rf"((?:{_DIGITS}(?:\.[0-9]*)?)|\.[0-9]+)(?:[eE]([+-]?[0-9]+))?")
_POWER_OF_TEN = re.compile(
    r"(?:([0-9]+(?:\.[0-9]+)?)\s*(?:\\times|\\cdot|[*×·])\s*)?10\s*(?:\^|\*\*)\s*(?:\{\s*([+-]?[0-9]+)\s*\}|([+-]?[0-9]+))"
)
_UNIT = re.compile(r"([A-Za-z°][A-Za-z° .'/-]*)(?:(?:\^\{?([23])\}?)|([²³]))?")
_LAST_NUMBER = re.compile(
    r"(?:(?<![\w)\]])[-−])?[$€£]?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+|(?<![0-9])(?=\.[0-9]))(?:\.[0-9]+)?"
    r"(?:\s?/\s?[0-9]+)?%?"
)
_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_TEXT_COMMAND = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|mbox|mathrm|mathbf)\s*\{([^{}]*)\}")
_BETWEEN_DIGITS = re.compile(r"(?<=[0-9])\s+(?=[0-9])")
_SPACE = re.compile(r"\s+")
_GROUPING = re.compile(r",\s*\\!\s*")  # 1,\!000

_CURRENCIES = {"$": "dollar", "€": "euro", "£": "pound"}
# How LaTeX and typists dress a number.
_DRESS = (
    ("\u2212", "-"), ("\u00a0", " "), ("\u202f", " "), ("\\$", "$"), ("\\%", "%"), ("\\!", ""), ("\\,", ""),
    ("{,}", ","), ("\\left", ""), ("\\right", ""), ("^\\circ", "°"), ("^{\\circ}", "°"), ("\\;", " "), ("\\:", " "),
    ("\\ ", " "), ("~", " "),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number with what stands behind it.

    ``percent``: a % sign, not divided by 100. ``marked``: the unit was marked as text (``5\\text{ m}``), so that it
    cannot be a variable.
    """

    value: Fraction
    percent: bool = False
    unit: str = ""
    marked: bool = field(default=False, compare=False)


def parse_quantity(text: str) -> Quantity | None:
    """The quantity that ``text`` states, or None when it states anything else.

    Understood: a sign, ``$ € £``, thousands separators, decimals, ``a/b``, ``\\frac{a}{b}``, mixed numbers
    (``1 1/2``), exponents and powers of ten (up to 400), ``%`` or ``percent``, scale words (``3 million``), a unit
    in words with maybe a power, a trailing period, enclosing ``$…$`` or ``\\boxed{…}``. The whole text must be used.
    """
    if len(text) > MAX_NUMBER_CHARS:
        return None
    cleaned = clean_answer(text)
    prefix = _PREFIX.match(cleaned)
    assert prefix is not None, "every part of the pattern is optional"
    first_sign, currency, second_sign = prefix.groups()
    body = cleaned[prefix.end() :]
    number = _match_number(body)
    if number is None or (first_sign and second_sign):
        return None
    value, end = number
    if "-" in (first_sign, second_sign):
        value = -value
    marked = _TEXT_COMMAND.search(text) is not None
    return _with_unit(value, body[end:], _CURRENCIES.get(currency, ""), marked)


def _match_number(body: str) -> tuple[Fraction, int] | None:
    """The number at the start of ``body`` and where it ends."""
    if match := _POWER_OF_TEN.match(body):
        exponent = int(match[2] or match[3])
        return (
            (Fraction(match[1] or 1) * Fraction(10) ** exponent, match.end()) if abs(exponent) <= MAX_EXPONENT else None
        )
    if match := _LATEX_FRACTION.match(body):
        numerator, denominator = int(match[1] or match[2]), int(match[3] or match[4])
        return (Fraction(numerator, denominator), match.end()) if denominator else None
    if match := _LATEX_MIXED.match(body):
        numerator, denominator = int(match[2] or match[3]), int(match[4] or match[5])
        if numerator < 0 or not denominator:
            return None
        return int(match[1]) + Fraction(numerator, denominator), match.end()
    if match := _MIXED.match(body):
        whole, numerator, denominator = (int(part) for part in match.groups())
        return (whole + Fraction(numerator, denominator), match.end()) if denominator else None
    if match := _FRACTION.match(body):
        top, bottom = (Fraction(part.replace(",", "")) for part in match.groups())
        return (top / bottom, match.end()) if bottom else None
    if match := _DECIMAL.match(body):
        digits, exponent = match[1].replace(",", ""), int(match[2] or 0)
        if abs(exponent) > MAX_EXPONENT:
            return None
        return Fraction(digits.rstrip(".")) * Fraction(10) ** exponent, match.end()
    return None


def _with_unit(value: Fraction, rest: str, currency: str, marked: bool) -> Quantity | None:
    tail = rest.strip()
    if tail in ("%", "percent", "per cent", "percentage", "pct"):
        return None if currency else Quantity(value, percent=True)
    if not currency and tail in _CURRENCIES:
        return Quantity(value, unit=_CURRENCIES[tail])
    if not tail:
        return Quantity(value, unit=currency)
    match = _UNIT.fullmatch(tail)
    if match is None:
        return None
    words = match[1].replace(".", " ").split()
    if not rest[0].isspace() and rest[0] != "°" and not is_known_unit(words[0]):
        return None
    while words and singular(words[0]) in SCALES:
        value *= SCALES[singular(words.pop(0))]
    if words and not is_unit(" ".join(words), value):
        return None
    unit = " ".join(singular(word) for word in words)
    if power := match[2] or {"²": "2", "³": "3"}.get(match[3]):
        unit = f"{unit}^{power}"
    if currency and unit and unit != currency:
        unit = f"{currency} {unit}"
    return Quantity(value, unit=unit or currency, marked=marked)


def same_quantity(gold: Quantity, answer: Quantity, tolerance: float = 0.0) -> bool:
    """Whether two quantities agree, by exact rational arithmetic.

    A unit that only one side states is forgiven, except one that may be a variable (``5x``, ``5 m``);
    two units must agree. A ``%`` that only one side states may mean either reading (50 % = 50 = 0.5).
    """
    if gold.unit and answer.unit:
        if canonical_unit(gold.unit) != canonical_unit(answer.unit):
            return False
    elif (stated := gold.unit or answer.unit) and not (gold.marked or answer.marked):
        symbol = stated.partition("^")[0]
        if len(symbol) < 3 and symbol not in SHORT_UNITS:
            return False
    limit = Fraction(tolerance)
    return any(abs(x - y) <= limit for x in _readings(gold, answer) for y in _readings(answer, gold))


def _readings(quantity: Quantity, other: Quantity) -> tuple[Fraction, ...]:
    if quantity.percent and not other.percent:
        return quantity.value, quantity.value / 100
    return (quantity.value,)


def clean_answer(text: str) -> str:
    """The text without typographic dress: outer ``$…$`` or box, ``\\text{}``, odd spaces and minus signs."""
    cleaned = _GROUPING.sub(",", text.strip().rstrip(".").rstrip())
    for old, new in _DRESS:
        cleaned = cleaned.replace(old, new)
    if cleaned.startswith("\\boxed") and cleaned.endswith("}"):
        cleaned = last_boxed(cleaned) or cleaned
    if cleaned.startswith("\\(") and cleaned.endswith("\\)"):
        cleaned = cleaned[2:-2]
    if len(cleaned) > 2 and cleaned[0] == cleaned[-1] == "$":
        cleaned = cleaned[1:-1]
    cleaned = _TEXT_COMMAND.sub(r" \1", cleaned).strip()
    return cleaned.rstrip(".").rstrip()


def same_text(gold: str, answer: str) -> bool:
    """Exact match of two answers that are no numbers.

    Both are cleaned (``clean_answer``). Two answers of letters and spaces, each longer than one
    letter, compare without case and with single spaces; all others compare without any space that does not separate
    digits.
    """
    if len(answer) > 2 * len(gold) + MAX_NUMBER_CHARS:
        return False
    left, right = clean_answer(gold), clean_answer(answer)
    if _is_words(left) and _is_words(right):
        return left.casefold().split() == right.casefold().split()
    return without_spaces(left) == without_spaces(right)


def without_spaces(text: str) -> str:
    """The text without white space, except that between two digits, of which a mark stays (``4 2`` is not 42)."""
    return _SPACE.sub("", _BETWEEN_DIGITS.sub("\u2423", text.strip()))


def _is_words(text: str) -> bool:
    letters = text.replace(" ", "")
    return len(letters) > 1 and letters.isalpha()


def same_answer(gold: str, answer: str, tolerance: float = 0.0) -> bool:
    """Numbers compare as quantities; anything else as text."""
    expected = parse_quantity(gold)
    if expected is None:
        return same_text(gold, answer)
    stated = parse_quantity(answer)
    return stated is not None and same_quantity(expected, stated, tolerance)


def last_number(text: str) -> str | None:
    """The last number that stands in ``text``, as it is written there (sign, currency, %), or None."""
    match = None
    for match in _LAST_NUMBER.finditer(text):  # noqa: B007
        pass
    return match[0].replace("\u2212", "-") if match is not None else None


def last_boxed(text: str) -> str | None:
    """The content of the last complete ``\\boxed{…}`` (or ``\\fbox``), with balanced braces, or None.

    Of nested boxes it is the inner one. ``\\{`` and ``\\}`` are text and do not count as braces.
    """
    boxes = find_boxes(text)
    return text[boxes[-1].start : boxes[-1].end].strip() if boxes else None


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """Where a box begins with its backslash, and where its content starts and ends."""

    begin: int
    start: int
    end: int


def find_boxes(text: str) -> list[Box]:
    """All complete boxes, by where they begin; see ``last_boxed``."""
    opened: list[tuple[int, int]] = []  # where a box begins, or -1 of a plain brace; where its content starts
    boxes: list[Box] = []
    for match in _BRACES.finditer(text):
        token = match[0]
        if token == "}":
            if opened:
                begin, start = opened.pop()
                if begin >= 0:
                    boxes.append(Box(begin, start, match.start()))
        elif token.endswith("{") and token != "\\{":
            opened.append((match.start() if token != "{" else -1, match.end()))
    return sorted(boxes)
