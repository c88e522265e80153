"""Parse answers out of text: numbers with units, the last number, the last box.

Pure text functions, linear in input length. Nothing is evaluated: a fixed grammar turns numbers into exact
``Fraction`` objects.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from fractions import Fraction

from posttrain.graders.grading import Submission, is_blank
from posttrain.graders.signs import fold_signs

# Units and countable nouns. A unit stated by only one side is forgiven, so this list decides correctness. Known units
# are listed; other nouns are recognized as plurals by their ending (``17 storks``) or as singulars by their number (``1
# robot``, ``1/2 pizza``). ``17 maybe``, ``17 no sixteen`` and ``17 wrong`` are not quantities.


def word_set(text: str) -> frozenset[str]:
    """Split a text into words."""
    return frozenset(text.split())


# Words that extend a number or take it back. A number followed by these is not a plain quantity.
CONNECTIVES = frozenset(
    ("and", "or", "plus", "minus", "times", "over", "pi", "half", "halves", "third", "thirds", "quarter",
     "quarters", "fourth", "fourths", "fifth", "fifths", "sixth", "sixths", "seventh", "sevenths", "eighth", "eighths",
     "ninth", "ninths", "tenth", "tenths", "eleventh", "elevenths", "twelfth", "twelfths", "twentieth", "twentieths",
     "hundredth", "hundredths", "thousandth", "thousandths", "point", "squared", "cubed", "mod", "modulo", "choose",
     "factorial", "sqrt", "not", "no", "nor", "non", "never", "neither", "none", "cannot", "is", "isn't", "equals",
     "equal", "unless", "if", "so", "but", "maybe", "possibly", "versus", "vs")
)  # fmt: skip
_NUMBERS = frozenset(
    ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
     "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty", "thirty", "forty",
     "fifty", "sixty", "seventy", "eighty", "ninety")
)  # fmt: skip
SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
# Shorter than three letters and yet a unit: other short words may be variables (5x, 3ab), which are not dropped.
SHORT_UNITS = frozenset(
    ("cm", "mm", "km", "kg", "mg", "ml", "cl", "dl", "mi", "ft", "in", "lb", "oz", "hr", "am", "pm", "°", "th")
)  # fmt: skip
# Named units. Directly attached to a number, only these are units: anything else may be variables (2abc).
KNOWN_UNITS = SHORT_UNITS | frozenset(
    ("m", "g", "s", "h", "l", "k", "%", "cc", "mph", "kph", "sec", "min", "yd", "usd", "km/h", "m/s", "th", "pct",
     "square", "cubic", "sq", "cu", "per", "percent", "dollar", "cent", "euro", "pound", "degree", "deg", "unit",
     "foot", "feet", "inch", "inche", "mile", "yard", "meter", "metre", "centimeter", "centimetre", "millimeter",
     "kilometer", "kilometre", "gram", "kilogram", "liter", "litre", "milliliter", "ounce", "ton", "acre", "gallon",
     "hour", "minute", "second", "day", "week", "month", "year", "people", "person", "point", "million", "billion")
)  # fmt: skip
# Further units, irregular plurals, and mass nouns.
_NOUNS = word_set(
    """
    amp ampere amu atm bar bit bps btu bushel byte calorie cal carat celsius century coulomb cup decade decibel
    decimeter decimetre dyne erg fahrenheit farad fathom fortnight furlong gbp gigabyte hectare henry hertz horsepower
    hundredweight joule kbps kelvin kev khz kilo kilobyte kilojoule kilowatt knot kpa kwh lumen lux mbps megabyte
    megahertz megawatt mev mhz microgram micrometer micron microsecond milligram millilitre millisecond millennium mol
    mole mpa mpg nanometer nanosecond newton ohm pascal pint ppm psi quart rad radian revolution rpm rupee ruble
    siemens stone tablespoon tbsp teaspoon tesla tonne tsp turn volt watt weber yen yuan won franc peso penny pence
    nickel dime shilling buck eur cad aud inr rmb cny jpy krw yrs yr men women children kid teeth mice geese oxen sheep
    fish deer moose elk cattle dice salmon trout shrimp squid aircraft spacecraft series species vertices indices
    matrices radii foci loci data criteria phenomena alumni cacti fungi bacteria larvae formulae police staff money
    cash luggage furniture equipment water milk juice flour sugar butter rice fruit broccoli corn wheat hay grass paper
    chocolate candy food fabric wood gold silver gas gasoline fuel oil paint work homework laundry
    profit revenue income change tax interest discount deposit savings tip pair wpm ones offspring
    """
)
# Words allowed in place of a unit: some by themselves (``17 left``), all of them with more words (``17 per day``).
_ALONE = word_set(
    """
    total altogether overall combined together more fewer less left leftover remaining away apart later earlier ago old
    older younger long longer shorter tall taller high higher lower wide deep heavier lighter bigger larger smaller
    cheaper faster slower closer each all only exactly
    """
)
_STARTS = _ALONE | word_set(
    """
    a an are as at among before after between by during every for from had has have in into of off on out per than
    until was were with within who worth
    """
)
_NOT_PLURAL = re.compile(r".*(?:ss|us|is)|times|does|has|was|always|sometimes|besides|whereas|afterwards")
# They take a number back, wherever they stand behind it.
_HEDGES = word_set(
    """
    wrong false incorrect probable probably possible likely unlikely unsure uncertain unknown guess guesses
    approximately roughly nearly almost sure certain certainly yes yeah nope nah perhaps else otherwise instead
    actually rather though although presumably supposedly seemingly apparently doubt doubtful unclear suppose think
    """
)
MAX_WORDS = 12
MAX_ADJECTIVES = 4
# Alternative spellings of a unit.
_UNIT_NAMES = {
    "cm": "centimeter", "mm": "millimeter", "km": "kilometer", "m": "meter", "kg": "kilogram", "g": "gram",
    "mg": "milligram", "ml": "milliliter", "l": "liter", "mi": "mile", "ft": "foot", "feet": "foot", "in": "inch",
    "inche": "inch", "lb": "pound", "oz": "ounce", "hr": "hour", "h": "hour", "min": "minute", "sec": "second",
    "s": "second", "yd": "yard", "deg": "°", "degree": "°", "usd": "dollar", "metre": "meter",
    "centimetre": "centimeter", "kilometre": "kilometer", "millimetre": "millimeter", "litre": "liter",
    "sq": "square", "cu": "cubic", "mph": "mile per hour", "people": "person", "men": "man", "women": "woman",
}  # fmt: skip


def is_known_unit(word: str) -> bool:
    """Check if a word is a common unit."""
    return word.lower() in KNOWN_UNITS or singular(word) in KNOWN_UNITS


def is_unit(text: str, value: Fraction | None = None) -> bool:
    """Check if words following the number ``value`` name the things counted: ``red marbles left``.

    Requires a noun early on, or a first word such as ``left``, ``per`` or ``in``. No word may take the number back.
    """
    words = [word.strip("'-").lower() for word in re.split(r"[\s/.]+", text.replace("°", " ° "))]
    words = [word for word in words if word]
    if words[:2] == ["u", "s"]:
        words = words[2:]
    times = [place for place in range(1, len(words) - 1) if words[place - 1] in _STARTS]  # per two hours, in one week
    if not words or len(words) > MAX_WORDS or words in (["a", "m"], ["p", "m"]):
        return bool(words) and len(words) == 2
    for place, word in enumerate(words):
        is_number = not {singular(word), singular(word).removesuffix("e")}.isdisjoint(_NUMBERS)
        takes_back = word in CONNECTIVES or word in _HEDGES or (is_number and word != "ones")
        if takes_back and not (place in times and is_number):
            return False
    if words[0] in _STARTS and (len(words) > 1 or words[0] in _ALONE):
        return all(len(word) > 1 or word == "a" for word in words)
    for place, word in enumerate(words[:MAX_ADJECTIVES]):
        if is_known_unit(word) or _is_noun(word.rpartition("-")[2], value):
            return True
        if len(word) <= 2:  # a symbol; with more behind it, it may be a variable
            return word not in _STARTS | {"to"} and (len(words) == 1 or (place == 0 and words[1] in _STARTS))
    return False


def _is_noun(word: str, value: Fraction | None) -> bool:
    single = singular(word)
    if word in _NOUNS or single in _NOUNS or word.endswith(("fish", "children", "people")):
        return True
    if len(word) > 2 and word.endswith("s"):
        return _NOT_PLURAL.fullmatch(word) is None
    return value is not None and 0 < abs(value) <= 1 and len(word) > 2 and not word.endswith("ly")


def canonical_unit(unit: str) -> str:
    """One name for the spellings of a unit: ``sq ft``, ``square feet`` and ``ft^2`` are ``foot^2``."""
    base, _, power = unit.partition("^")
    words: list[str] = []
    for word in base.replace(".", " ").split():
        name = singular(word)
        words += _UNIT_NAMES.get(name, name).split()
    for name, exponent in (("square", "2"), ("cubic", "3")):
        if len(words) > 1 and words[0] == name and not power:
            words = words[1:]
            power = exponent
    canonical = " ".join(words)
    if power:
        canonical += f"^{power}"
    return canonical


def singular(word: str) -> str:
    """Lowercase a word and drop a final s. Single letters stay unchanged."""
    if len(word) > 1:
        lowered = word.lower()
    else:
        lowered = word
    if lowered.endswith("s") and len(lowered) > 2:
        return lowered[:-1]
    return lowered


MAX_NUMBER_CHARS = 400  # longer texts are not numbers; bounds digits and exponents
MAX_EXPONENT = 400

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+(?! ?[0-9/])|[0-9]+)"
_SEPARATORS = re.compile("[, ]")
_PREFIX = re.compile(r"([+-]?)\s*([$€£]?)\s*([+-]?)\s*")
_FRAC = r"\\[dtc]?frac\s*(?:\{\s*([+-]?[0-9]+)\s*\}|([0-9]))\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))"  # \frac{1}{2}, \frac12
_LATEX_FRACTION = re.compile(_FRAC)
_LATEX_MIXED = re.compile(r"([0-9]+)\s*" + _FRAC)
_MIXED = re.compile(r"([0-9]+)\s+([0-9]+)\s*/\s*([0-9]+)")
_FRACTION = re.compile(rf"({_DIGITS}(?:\.[0-9]+)?)\s*/\s*({_DIGITS}(?:\.[0-9]+)?)")
_DECIMAL = re.compile(rf"((?:{_DIGITS}(?:\.[0-9]*)?)|\.[0-9]+)(?:[eE]([+-]?[0-9]+))?")
_POWER_OF_TEN = re.compile(
    r"(?:([0-9]+(?:\.[0-9]+)?)\s*(?:\\times|\\cdot|[*×·x])\s*)?10\s*(?:\^|\*\*)\s*(?:\{\s*([+-]?[0-9]+)\s*\}|([+-]?[0-9]+))"
)
_UNIT = re.compile(r"([A-Za-z°][A-Za-z° .'/-]*)(?:(?:\^\{?([23])\}?)|([²³]))?")
# Match complete numbers in prose, never part of a longer number. Therefore this also matches forms that
# ``parse_quantity`` rejects (2^3, 12:30, 1.2.3): better no number than a wrong one.
_WHOLE = r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]{1,3}(?:[ \u00a0\u202f][0-9]{3})+(?![0-9])|[0-9]+"
_EXPONENT = r"\{[^{}]{1,20}\}|\([^()]{1,20}\)|[+−-]?[0-9]+"
_TIMES_TEN = r"\s{0,2}(?:\\times|\\cdot|[*×·x])\s{0,2}10"
NUMBER = re.compile(
    r"(?=[-−$€£0-9.\\^*])"  # skips most positions quickly
    r"(?:(?<![\w)\]])[-−])?[$€£]?(?:"
    rf"(?<=[A-Za-z)\]}}])(?:\^|\*\*)\s?(?:{_EXPONENT})|"
    r"[0-9]{0,9}\s?\\[dtc]?frac\s?(?:\{[^{}]{1,50}\}|[0-9])\s?(?:\{[^{}]{1,50}\}|[0-9])|"
    r"[0-9]{0,9}\s?\\sqrt\s?\{[^{}]{1,50}\}|"
    rf"(?:(?<![0-9][ \u00a0\u202f])(?:{_WHOLE})|[0-9]+|(?<![0-9])(?=\.[0-9]))"
    r"(?:[.:_][0-9]+)*(?:[eE][+-]?[0-9]+(?![0-9A-Za-z]))?"
    rf"(?:{_TIMES_TEN}(?=\s?(?:\^|\*\*|[⁰-⁹⁻⁺])))?(?:\s?(?:\^|\*\*)\s?(?:{_EXPONENT})|[⁰¹²³⁴-⁹⁻⁺]+|[¼½¾⅐-⅞])?"
    r"(?:(?:\s[0-9]+)?\s?/\s?[0-9]+)?(?:\s(?:hundred|thousand|million|billion|trillion|dozen)s?\b)?"
    r"(?:\s?(?:[ckm]?m|ft|in)\s?(?:\^\s?\{?[23]\}?|[²³]))?%?)"
)
# A box, possibly double-escaped, or around a single number without braces (\boxed 7); an escaped sign; a brace.
_BRACES = re.compile(
    r"\\{1,4}(?:boxed|fbox)(?:\s*\{|\s+(?P<bare>[+-]?[0-9]+(?:[.,][0-9]+)*)(?![\w{^/]))|\\.|[{}]", re.DOTALL
)
_TEXT_COMMAND = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|mbox|mathrm|mathbf)\s*\{([^{}]*)\}")
_QUOTED = re.compile(r"(\*\*|__|`|\"|')(.*)\1[.,]?", re.DOTALL)
_BETWEEN_DIGITS = re.compile(r"(?<=[0-9])\s+(?=[0-9])")
_SPACE = re.compile(r"\s+")
_GROUPING = re.compile(r",\s*\\!\s*")  # 1,\!000

_CURRENCIES = {"$": "dollar", "€": "euro", "£": "pound"}
# How LaTeX and typists dress a number.
_DRESS = (
    ("\u2212", "-"), ("\u2013", "-"), ("\u00a0", " "), ("\u202f", " "), ("\\$", "$"), ("\\%", "%"), ("\\!", ""),
    ("\\,", ""), ("{,}", ","), ("\\left", ""), ("\\right", ""), ("^\\circ", "°"), ("^{\\circ}", "°"), ("\\;", " "),
    ("\\:", " "), ("\\ ", " "), ("~", " "),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number with its unit.

    ``percent``: followed by a % sign; the number is not divided by 100. ``marked``: the unit was marked up as text
    (``5\\text{ m}``), hence cannot be a variable.
    """

    value: Fraction
    percent: bool = False
    unit: str = ""
    marked: bool = field(default=False, compare=False)


def parse_quantity(text: str) -> Quantity | None:
    """Parse ``text`` as a single quantity, or None.

    Accepts signs, ``$ € £``, thousands separators, decimals, ``a/b``, ``\\frac{a}{b}``, mixed numbers, exponents and
    powers of ten (up to 400), ``%``, scale words (``3 million``), unit words optionally with a power, a trailing
    period, and enclosing ``$…$`` or ``\\boxed{…}``.
    """
    if len(text) > MAX_NUMBER_CHARS:
        return None
    text = fold_signs(text).strip()
    quoted = _QUOTED.fullmatch(text)
    cleaned = clean_answer(quoted[2] if quoted else text)
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
    """Parse a number at the beginning of ``body``. Returns (number, end position)."""
    if match := _POWER_OF_TEN.match(body):
        exponent = int(match[2] or match[3])
        if abs(exponent) <= MAX_EXPONENT:
            return (Fraction(match[1] or 1) * Fraction(10) ** exponent, match.end())
        return None
    if match := _LATEX_FRACTION.match(body):
        numerator = int(match[1] or match[2])
        denominator = int(match[3] or match[4])
        if denominator:
            return (Fraction(numerator, denominator), match.end())
        return None
    if match := _LATEX_MIXED.match(body):
        numerator = int(match[2] or match[3])
        denominator = int(match[4] or match[5])
        if not 0 <= numerator < denominator:  # 3\\frac{10}{2} is a product
            return None
        return int(match[1]) + Fraction(numerator, denominator), match.end()
    if match := _MIXED.match(body):
        whole, numerator, denominator = (int(part) for part in match.groups())
        if numerator < denominator:
            return (whole + Fraction(numerator, denominator), match.end())
        return None
    if match := _FRACTION.match(body):
        top, bottom = (Fraction(_SEPARATORS.sub("", part)) for part in match.groups())
        if bottom:
            return (top / bottom, match.end())
        return None
    if match := _DECIMAL.match(body):
        digits = _SEPARATORS.sub("", match[1])
        exponent = int(match[2] or 0)
        if abs(exponent) > MAX_EXPONENT:
            return None
        return Fraction(digits.rstrip(".")) * Fraction(10) ** exponent, match.end()
    return None


def _with_unit(value: Fraction, rest: str, currency: str, marked: bool) -> Quantity | None:
    tail = rest.strip()
    if tail in ("%", "percent", "per cent", "percentage", "pct"):
        if currency:
            return None
        return Quantity(value, percent=True)
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
        marked = marked or (match[3] is not None and is_known_unit(unit.partition("^")[0]))  # m² cannot be a variable
    if currency and unit and unit != currency:
        unit = f"{currency} {unit}"
    return Quantity(value, unit=unit or currency, marked=marked)


def same_quantity(gold: Quantity, answer: Quantity, tolerance: float = 0.0) -> bool:
    """Check if two quantities agree, using exact rational arithmetic.

    A unit stated by only one side is forgiven unless it could be a variable (``5x``, ``5 m``). If both sides have
    units, they must match. A ``%`` stated by only one side allows either reading (50 % = 50 = 0.5).
    """
    if gold.unit and answer.unit:
        if canonical_unit(gold.unit) != canonical_unit(answer.unit):
            return False
    elif (unit := gold.unit or answer.unit) and not (gold.marked or answer.marked):
        symbol = unit.partition("^")[0]
        if len(symbol) < 3 and symbol not in SHORT_UNITS and symbol[0] != "°":  # °C cannot be a variable
            return False
    limit = Fraction(tolerance)
    return any(abs(x - y) <= limit for x in _readings(gold, answer) for y in _readings(answer, gold))


def _readings(quantity: Quantity, other: Quantity) -> tuple[Fraction, ...]:
    if quantity.percent and not other.percent:
        return quantity.value, quantity.value / 100
    return (quantity.value,)


def clean_answer(text: str) -> str:
    """Strip typographic markup: outer ``$…$`` or box, ``\\text{}``, unusual spaces and minus signs."""
    cleaned = _GROUPING.sub(",", fold_signs(text).strip().rstrip(".").rstrip())
    for old, new in _DRESS:
        cleaned = cleaned.replace(old, new)
    if cleaned.startswith(("\\boxed", "\\\\boxed")) and cleaned.endswith("}"):
        cleaned = last_boxed(cleaned) or cleaned
    if cleaned.startswith("\\(") and cleaned.endswith("\\)"):
        cleaned = cleaned[2:-2]
    if len(cleaned) > 2 and cleaned[0] == cleaned[-1] == "$":
        cleaned = cleaned[1:-1]
    cleaned = _TEXT_COMMAND.sub(r" \1", cleaned).strip()
    return cleaned.rstrip(".").rstrip()


def same_text(gold: str, answer: str) -> bool:
    """Exact match for non-numeric answers.

    Both sides are cleaned first (``clean_answer``). Alphabetic answers longer than one letter ignore case and repeated
    spaces. JSON objects are compared by keys and values. Anything else ignores spaces, except between digits.
    """
    if len(answer) > 2 * len(gold) + MAX_NUMBER_CHARS:
        return False
    left = clean_answer(gold)
    right = clean_answer(answer)
    if _is_words(left) and _is_words(right):
        return left.casefold().split() == right.casefold().split()
    if left[:1] == right[:1] == "{" and _same_object(left, right):
        return True
    return without_spaces(left) == without_spaces(right)


def _same_object(left: str, right: str) -> bool:
    """Check if both sides encode the same JSON object, regardless of key order."""
    try:
        one = json.loads(left)
        other = json.loads(right)
    except (ValueError, RecursionError):
        return False
    return isinstance(one, dict) and json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def without_spaces(text: str) -> str:
    """Remove whitespace. Between two digits a marker is kept, so that ``4 2`` differs from 42."""
    return _SPACE.sub("", _BETWEEN_DIGITS.sub("\u2423", text.strip()))


def _is_words(text: str) -> bool:
    letters = text.replace(" ", "")
    return len(letters) > 1 and letters.isalpha()


def same_answer(gold: str, answer: str, tolerance: float = 0.0) -> bool:
    """Numbers compare as quantities; anything else as text."""
    expected = parse_quantity(gold)
    if expected is None:
        return same_text(gold, answer)
    actual = parse_quantity(answer)
    return actual is not None and same_quantity(expected, actual, tolerance)


def last_number(text: str) -> str | None:
    """The last number that stands in ``text``, as it is written there (sign, currency, %), or None.

    Digits of other scripts become ASCII.

    A power of something else than a number (``x^3``) is taken with what stands before it: its exponent is no answer.
    """
    match = None
    text = fold_signs(text)
    for match in NUMBER.finditer(text):  # noqa: B007
        pass
    if match is None:
        return None
    start = match.start() - (match[0][0] in "^*")
    return text[start : match.end()].replace("\u2212", "-")


def last_boxed(text: str) -> str | None:
    """The content of the last complete ``\\boxed{…}`` (or ``\\fbox``), with balanced braces, or None.

    Of nested boxes it is the inner one. ``\\{`` and ``\\}`` are text and do not count as braces.
    """
    boxes = find_boxes(text)
    if boxes:
        return text[boxes[-1].start : boxes[-1].end].strip()
    return None


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The place of a box: its backslash, and where its content starts and ends."""

    begin: int
    start: int
    end: int
    stop: int  # behind the closing brace


def find_boxes(text: str) -> list[Box]:
    """All complete boxes, by where they begin; see ``last_boxed``."""
    opened: list[tuple[int, int]] = []  # where a box begins, or -1 of a plain brace; where its content starts
    boxes: list[Box] = []
    for match in _BRACES.finditer(text):
        token = match[0]
        if match["bare"]:
            boxes.append(Box(match.start(), match.start("bare"), match.end(), match.end()))
        elif token == "}":
            if opened:
                begin, start = opened.pop()
                if begin >= 0:
                    boxes.append(Box(begin, start, match.start(), match.end()))
        elif token == "{":
            opened.append((-1, match.end()))
        elif token.endswith("{") and token != "\\{":
            opened.append((match.start(), match.end()))
    return sorted(boxes)


# The response after the thinking, and the part of it that is the answer: for graders that read whole responses.

_THINKING = ("think", "reasoning")


def final_response(text: str) -> str | None:
    """Return what follows the last ``</think>`` or ``</reasoning>``; the whole text where nothing was thought.

    None where thinking begins and never ends: such a text was cut off, and what it mentions is no answer.
    """
    start = 0
    for tag in _THINKING:
        closing = f"</{tag}>"
        if closing in text:
            start = max(start, text.rfind(closing) + len(closing))
    rest = text[start:]
    if any(f"<{tag}>" in rest for tag in _THINKING):
        return None
    return rest


def tagged_response(text: str) -> str | None:
    """Return ``final_response``, or what is between its first ``<answer>`` and the next ``</answer>``, maybe nothing.

    Answer tags that are reversed, or of which one is missing, are text.
    """
    response = final_response(text)
    if response is None:
        return None
    inner = _between_tags(response)
    if inner is None:
        return response
    return inner


def answer_region(submission: Submission) -> tuple[str, bool] | None:
    """Return the text with the answer, and whether it is marked as nothing but the answer.

    Marked are the answer tags, the last box, and what the prompt template found by a rule of its own (not its last
    number). Otherwise it is the final response. None where nothing was written or thinking never ends.
    """
    response = final_response(submission.text)
    if response is None:
        return None
    marked = _between_tags(response) or last_boxed(response)
    if marked is None and submission.extracted is not None and submission.extracted != last_number(response):
        marked = submission.extracted
    if marked is not None:
        return marked, True
    if is_blank(response):
        return None
    return (response, False)


def _between_tags(response: str) -> str | None:
    """Return what is between the answer tags, "" where it is blank; None without complete tags."""
    _, opened, rest = response.partition("<answer>")
    inner, closed, _ = rest.partition("</answer>")
    answer = inner.rpartition("<answer>")[2].strip()
    if not (opened and closed):
        return None
    if is_blank(answer):
        return ""
    return answer
