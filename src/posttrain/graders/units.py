"""What may stand behind a number without changing what it says: units, and the things that are counted.

A unit that only one of two answers states is forgiven, so what counts as a unit decides what is right. Units are a
list. No list holds all that can be counted: of other nouns a plural is known by its form (``17 storks``), a singular by
the number before it (``1 robot``, ``1/2 pizza``). ``17 maybe``, ``17 no sixteen`` and ``17 wrong`` are no quantities.
"""

from __future__ import annotations

import re
from fractions import Fraction


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Words that make a number part of something larger, or that take it back: what they follow is no plain quantity.
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
    ("cm", "mm", "km", "kg", "mg", "ml", "cl", "dl", "mi", "ft", "in", "lb", "oz", "hr", "am", "pm", "°")
)  # fmt: skip
# Units by name. Behind a number without a space only these are units: anything else may be variables (2abc).
KNOWN_UNITS = SHORT_UNITS | frozenset(
    ("m", "g", "s", "h", "l", "k", "%", "cc", "mph", "kph", "sec", "min", "yd", "usd", "km/h", "m/s", "th", "pct",
     "square", "cubic", "sq", "cu", "per", "percent", "dollar", "cent", "euro", "pound", "degree", "deg", "unit",
     "foot", "feet", "inch", "inche", "mile", "yard", "meter", "metre", "centimeter", "centimetre", "millimeter",
     "kilometer", "kilometre", "gram", "kilogram", "liter", "litre", "milliliter", "ounce", "ton", "acre", "gallon",
     "hour", "minute", "second", "day", "week", "month", "year", "people", "person", "point", "million", "billion")
)  # fmt: skip
# More units; nouns whose plural has another form; what is measured without a plural.
_NOUNS = _words(
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
# What may stand instead of a unit: some of these alone (``17 left``), all of them with more (``17 per day``).
_ALONE = _words(
    """
    total altogether overall combined together more fewer less left leftover remaining away apart later earlier ago old
    older younger long longer shorter tall taller high higher lower wide deep heavier lighter bigger larger smaller
    cheaper faster slower closer each all only exactly
    """
)
_STARTS = _ALONE | _words(
    """
    a an are as at among before after between by during every for from had has have in into of off on out per than
    until was were with within who worth
    """
)
_NOT_PLURAL = re.compile(r".*(?:ss|us|is)|times|does|has|was|always|sometimes|besides|whereas|afterwards")
# They take a number back, wherever they stand behind it.
_HEDGES = _words(
    """
    wrong false incorrect probable probably possible likely unlikely unsure uncertain unknown guess guesses
    approximately roughly nearly almost sure certain certainly yes yeah nope nah perhaps else otherwise instead
    actually rather though although presumably supposedly seemingly apparently doubt doubtful unclear suppose think
    """
)
MAX_WORDS = 12
MAX_ADJECTIVES = 4
# Spellings of one unit.
_UNIT_NAMES = {
    "cm": "centimeter", "mm": "millimeter", "km": "kilometer", "m": "meter", "kg": "kilogram", "g": "gram",
    "mg": "milligram", "ml": "milliliter", "l": "liter", "mi": "mile", "ft": "foot", "feet": "foot", "in": "inch",
    "inche": "inch", "lb": "pound", "oz": "ounce", "hr": "hour", "h": "hour", "min": "minute", "sec": "second",
    "s": "second", "yd": "yard", "deg": "°", "degree": "°", "usd": "dollar", "metre": "meter",
    "centimetre": "centimeter", "kilometre": "kilometer", "millimetre": "millimeter", "litre": "liter",
    "sq": "square", "cu": "cubic", "mph": "mile per hour", "people": "person", "men": "man", "women": "woman",
}  # fmt: skip


def is_known_unit(word: str) -> bool:
    """Whether the word is the name of a common unit."""
    return word.lower() in KNOWN_UNITS or singular(word) in KNOWN_UNITS


def is_unit(text: str, value: Fraction | None = None) -> bool:
    """Whether words behind a number say what it counts or measures: ``miles per hour``, ``red marbles in the box``.

    One of the first words is a noun, or the first is one of ``left``, ``per``, ``in``, ...; none takes the number back.
    ``value``: the number before them, if it is known.
    """
    words = [word.strip("'-").lower() for word in re.split(r"[\s/.]+", text.replace("°", " ° "))]
    words = [word for word in words if word]
    words = words[2:] if words[:2] == ["u", "s"] else words
    times = [place for place in range(1, len(words) - 1) if words[place - 1] in _STARTS]  # per two hours, in one week
    if not words or len(words) > MAX_WORDS or words in (["a", "m"], ["p", "m"]):
        return bool(words) and len(words) == 2
    if any(_takes_back(word) and not (place in times and _is_number(word)) for place, word in enumerate(words)):
        return False
    if words[0] in _STARTS and (len(words) > 1 or words[0] in _ALONE):
        return all(len(word) > 1 or word == "a" for word in words)
    for place, word in enumerate(words[:MAX_ADJECTIVES]):
        if is_known_unit(word) or _is_noun(word.rpartition("-")[2], value):
            return True
        if len(word) <= 2:  # a symbol; with more behind it, it may be a variable
            return word not in _STARTS | {"to"} and (len(words) == 1 or (place == 0 and words[1] in _STARTS))
    return False


def _takes_back(word: str) -> bool:
    return word in CONNECTIVES or word in _HEDGES or (_is_number(word) and word != "ones")


def _is_number(word: str) -> bool:
    return singular(word) in _NUMBERS or singular(word).removesuffix("e") in _NUMBERS


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
    words = " ".join(_UNIT_NAMES.get(singular(word), singular(word)) for word in base.replace(".", " ").split()).split()
    for name, exponent in (("square", "2"), ("cubic", "3")):
        if len(words) > 1 and words[0] == name and not power:
            words, power = words[1:], exponent
    return " ".join(words) + (f"^{power}" if power else "")


def singular(word: str) -> str:
    """The word in lower case (one letter stays as it is), without a final s."""
    lowered = word.lower() if len(word) > 1 else word
    return lowered[:-1] if lowered.endswith("s") and len(lowered) > 2 else lowered
