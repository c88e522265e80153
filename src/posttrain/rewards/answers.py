"""Reading answers out of text: numbers with their units, the last number, the last box.

Pure text functions, linear in the length of their input. Nothing is ever evaluated: a number is
read by a fixed grammar into an exact ``Fraction``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_NUMBER_CHARS = 400  # a longer text is no number; keeps digits and exponents bounded
MAX_EXPONENT = 400

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_PREFIX = re.compile(r"([+-]?)\s*([$€£]?)\s*([+-]?)\s*")
_LATEX_FRACTION = re.compile(
    r"\\[dtc]?frac(?:\s*\{\s*([+-]?[0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}|\s*([0-9])\s*([0-9]))"  # \frac{1}{2} and \frac12
)
_MIXED = re.compile(r"([0-9]+)\s+([0-9]+)\s*/\s*([0-9]+)")
_FRACTION = re.compile(rf"({_DIGITS}(?:\.[0-9]+)?)\s*/\s*({_DIGITS}(?:\.[0-9]+)?)")
_DECIMAL = re.compile(rf"((?:{_DIGITS}(?:\.[0-9]*)?)|\.[0-9]+)(?:[eE]([+-]?[0-9]+))?")
_WORDS = re.compile(r"[A-Za-z°][A-Za-z° .'/-]*")
_LAST_NUMBER = re.compile(
    r"(?:(?<![\w)\]])[-−])?[$€£]?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+|(?<![0-9])(?=\.[0-9]))(?:\.[0-9]+)?"
    r"(?:\s?/\s?[0-9]+)?%?"
)
_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_TEXT_COMMAND = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}")

_CURRENCIES = {"$": "dollar", "€": "euro", "£": "pound"}
_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
# Words that make a number part of something larger: what they follow is no plain quantity.
_CONNECTIVES = frozenset(
    ("and", "or", "to", "plus", "minus", "times", "over", "pi", "half", "halves", "third", "thirds", "quarter",
     "quarters", "fourth", "fourths", "fifth", "fifths", "tenth", "tenths", "point", "squared", "cubed", "mod",
     "modulo", "choose", "factorial", "sqrt", "not", "is", "equals")
)  # fmt: skip
# Shorter than three letters and yet a unit: other short words may be variables (5x, 3ab), which are not dropped.
_SHORT_UNITS = frozenset(
    ("cm", "mm", "km", "kg", "mg", "ml", "cl", "dl", "mi", "ft", "in", "lb", "oz", "hr", "am", "pm", "°")
)  # fmt: skip
# How LaTeX and typists dress a number.
_DRESS = (
    ("\u2212", "-"), ("\u00a0", " "), ("\u202f", " "), ("\\$", "$"), ("\\%", "%"), ("\\!", ""), ("\\,", ""),
    ("{,}", ","), ("\\left", ""), ("\\right", ""), ("^\\circ", "°"), ("^{\\circ}", "°"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number with what stands behind it. ``percent``: a % sign, not divided by 100."""

    value: Fraction
    percent: bool = False
    unit: str = ""


def parse_quantity(text: str) -> Quantity | None:
    """The quantity that ``text`` states, or None when it states anything else.

    Understood: a sign, ``$ € £``, thousands separators, decimals, ``a/b``, ``\\frac{a}{b}``, mixed
    numbers (``1 1/2``), exponents (up to 400), ``%`` or ``percent``, scale words (``3 million``), a unit in
    words, a trailing period, enclosing ``$…$`` or ``\\boxed{…}``. The whole text must be used.
    """
    if len(text) > MAX_NUMBER_CHARS:
        return None
    cleaned = clean_answer(text)
    prefix = _PREFIX.match(cleaned)
    assert prefix is not None, "every part of the pattern is optional"
    first_sign, currency, second_sign = prefix.groups()
    body = cleaned[prefix.end() :]
    found = _match_number(body)
    if found is None or (first_sign and second_sign):
        return None
    value, end = found
    if "-" in (first_sign, second_sign):
        value = -value
    return _with_unit(value, body[end:].strip(), _CURRENCIES.get(currency, ""))


def _match_number(body: str) -> tuple[Fraction, int] | None:
    """The number at the start of ``body`` and where it ends."""
    if match := _LATEX_FRACTION.match(body):
        numerator, denominator = int(match[1] or match[3]), int(match[2] or match[4])
        return (Fraction(numerator, denominator), match.end()) if denominator else None
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


def _with_unit(value: Fraction, tail: str, currency: str) -> Quantity | None:
    if tail in ("%", "percent", "per cent"):
        return None if currency else Quantity(value, percent=True)
    if not currency and tail in _CURRENCIES:
        return Quantity(value, unit=_CURRENCIES[tail])
    if not tail:
        return Quantity(value, unit=currency)
    if not _WORDS.fullmatch(tail):
        return None
    words = tail.replace(".", " ").split()
    if any(word.lower() in _CONNECTIVES for word in words):
        return None
    while words and words[0].lower() in _SCALES:
        value *= _SCALES[words.pop(0).lower()]
    unit = " ".join(_singular(word) for word in words)
    if currency and unit and unit != currency:
        unit = f"{currency} {unit}"
    return Quantity(value, unit=unit or currency)


def _singular(word: str) -> str:
    lowered = word.lower() if len(word) > 1 else word
    return lowered[:-1] if lowered.endswith("s") and len(lowered) > 2 else lowered


def same_quantity(gold: Quantity, given: Quantity, tolerance: float = 0.0) -> bool:
    """Whether two quantities agree, by exact rational arithmetic.

    A unit that only one side states is forgiven, except one that may be a variable (``5x``, ``5 m``);
    two units must agree. A ``%`` that only one side states may mean either reading (50 % = 50 = 0.5).
    """
    if gold.unit != given.unit:
        stated = gold.unit or given.unit
        if (gold.unit and given.unit) or (len(stated) < 3 and stated not in _SHORT_UNITS):
            return False
    limit = Fraction(tolerance)
    return any(abs(x - y) <= limit for x in _readings(gold, given) for y in _readings(given, gold))


def _readings(quantity: Quantity, other: Quantity) -> tuple[Fraction, ...]:
    if quantity.percent and not other.percent:
        return quantity.value, quantity.value / 100
    return (quantity.value,)


def clean_answer(text: str) -> str:
    """The text without typographic dress: outer ``$…$`` or box, ``\\text{}``, odd spaces and minus signs."""
    cleaned = text.strip().rstrip(".").rstrip()
    for old, new in _DRESS:
        cleaned = cleaned.replace(old, new)
    if cleaned.startswith("\\boxed") and cleaned.endswith("}"):
        cleaned = last_boxed(cleaned) or cleaned
    if cleaned.startswith("\\(") and cleaned.endswith("\\)"):
        cleaned = cleaned[2:-2]
    if len(cleaned) > 2 and cleaned[0] == cleaned[-1] == "$":
        cleaned = cleaned[1:-1]
    cleaned = _TEXT_COMMAND.sub(r"\1", cleaned).strip()
    return cleaned.rstrip(".").rstrip()


def same_text(gold: str, given: str) -> bool:
    """Exact match of two answers that are no numbers.

    Both are cleaned (``clean_answer``). Two answers of letters and spaces, each longer than one
    letter, compare without case and with single spaces; all others compare without any space.
    """
    if len(given) > 2 * len(gold) + MAX_NUMBER_CHARS:
        return False
    left, right = clean_answer(gold), clean_answer(given)
    if _is_words(left) and _is_words(right):
        return left.casefold().split() == right.casefold().split()
    return "".join(left.split()) == "".join(right.split())


def _is_words(text: str) -> bool:
    letters = text.replace(" ", "")
    return len(letters) > 1 and letters.isalpha()


def same_answer(gold: str, given: str, tolerance: float = 0.0) -> bool:
    """Numbers compare as quantities; anything else as text."""
    expected = parse_quantity(gold)
    if expected is None:
        return same_text(gold, given)
    stated = parse_quantity(given)
    return stated is not None and same_quantity(expected, stated, tolerance)


def last_number(text: str) -> str | None:
    """The last number that stands in ``text``, as it is written there (sign, currency, %), or None."""
    found = None
    for found in _LAST_NUMBER.finditer(text):  # noqa: B007
        pass
    return found[0].replace("\u2212", "-") if found is not None else None


def last_boxed(text: str) -> str | None:
    """The content of the last complete ``\\boxed{…}`` (or ``\\fbox``), with balanced braces, or None.

    Of nested boxes it is the inner one. ``\\{`` and ``\\}`` are text and do not count as braces.
    """
    opened: list[tuple[bool, int]] = []
    best: tuple[int, int] | None = None
    for match in _BRACES.finditer(text):
        token = match[0]
        if token == "}":
            if opened:
                is_box, start = opened.pop()
                if is_box and (best is None or start > best[0]):
                    best = (start, match.start())
        elif token.endswith("{") and token != "\\{":
            opened.append((token != "{", match.end()))
    return text[best[0] : best[1]].strip() if best is not None else None
