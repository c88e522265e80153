"""Which golds mean the same: a table of our own, a witness against graders that call different things right.

``read`` takes an answer apart into what it says (values) and how it says it (facets: unit, brackets, name). Facets
that an answer leaves out are forgiven by the graders' own rules, so two golds that differ only in those are different
for an answer that states them, and not for one that is silent. What the table does not understand it calls unknown;
the share of unknown pairs is reported. Nothing of the graders' is used here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from latex_values import NUM_AGREEING, Unknown, close, compare_formulas, points, read_formula

SAME, DIFFERENT, UNKNOWN = "same", "different", "unknown"

# Ways to say one thing, made by hand from the golds at hand; letters and digits alone count.
CLASSES = (
    ("none", "nosolution", "nosolutions", "norealsolution", "norealsolutions", "emptyset", "dne", "doesnotexist",
     "undefined", "nosuchnumber", "impossible"),
    ("0", "zero"), ("1", "one"), ("2", "two"), ("3", "three"), ("4", "four"), ("5", "five"), ("6", "six"),
    ("7", "seven"), ("8", "eight"), ("9", "nine"), ("10", "ten"), ("11", "eleven"), ("12", "twelve"),
    ("yes", "true"), ("no", "false"),
)  # fmt: skip
_CLASS_OF = {word: words[0] for words in CLASSES for word in words}
UNITS = {
    "cm": "cm", "centimeter": "cm", "centimetre": "cm", "mm": "mm", "millimeter": "mm", "m": "m", "meter": "m",
    "metre": "m", "km": "km", "kilometer": "km", "inch": "inch", "inche": "inch", "in": "inch", "ft": "foot",
    "foot": "foot", "feet": "foot", "mile": "mile", "mi": "mile", "yard": "yard", "yd": "yard", "kg": "kg",
    "kilogram": "kg", "g": "g", "gram": "g", "lb": "lb", "pound": "lb", "oz": "oz", "ounce": "oz", "s": "second",
    "sec": "second", "second": "second", "min": "minute", "minute": "minute", "h": "hour", "hr": "hour",
    "hour": "hour", "day": "day", "week": "week", "month": "month", "year": "year", "dollar": "dollar",
    "usd": "dollar", "cent": "cent", "euro": "euro", "degree": "degree", "deg": "degree", "unit": "unit",
    "square": "square", "sq": "square", "cubic": "cubic", "cu": "cubic", "per": "per", "am": "am",
    "pm": "pm", "mph": "mile per hour", "people": "person", "person": "person", "liter": "liter", "litre": "liter",
    "l": "liter",
    "ml": "ml", "mL": "ml", "gallon": "gallon", "apple": "apple", "marble": "marble", "way": "way",
    "student": "student", "page": "page", "ton": "ton", "acre": "acre", "point": "point",
}  # fmt: skip
_SPACES = re.compile(r"(?<!\\)\\[,;:! ]|~|\\q?quad(?![A-Za-z])|\s+|\\hspace\{[^{}]*\}")
_SPELLINGS = (
    (
        re.compile(r"\\(?:left|right)(?![A-Za-z])\.?|\\(?:big|Big|bigg|Bigg)[lr]?(?![A-Za-z])|\\displaystyle|\\limits"),
        "",
    ),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\leq?(?:slant)?(?![A-Za-z])|≤"), " ≤ "),
    (re.compile(r"\\geq?(?:slant)?(?![A-Za-z])|≥"), " ≥ "),
    (re.compile(r"\\neq?(?![A-Za-z])"), " ≠ "),
    (re.compile(r"\\lt(?![A-Za-z])"), "<"),
    (re.compile(r"\\gt(?![A-Za-z])"), ">"),
    (re.compile(r"\\in(?![A-Za-z])"), " ∈ "),
    (re.compile(r"\\approx(?![A-Za-z])"), " ≈ "),
    (re.compile(r"\\cup(?![A-Za-z])"), " ∪ "),
    (re.compile(r"\\lbrace(?![A-Za-z])"), r"\\{"),
    (re.compile(r"\\rbrace(?![A-Za-z])"), r"\\}"),
    (re.compile(r"\\(?:[lr]?vert|mid)(?![A-Za-z])"), "|"),
    (re.compile(r"\\(?:varnothing)"), r"\\emptyset"),
    (re.compile(r"\\(?:mathbf|mathrm|mathit|textbf|textit|textrm|mbox|textnormal|operatorname)\s*(?=\{)"), r"\\text"),
    (re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree|°"), " \\\\text{degree}"),
    (re.compile(r"\+\s*\\infty"), r"\\infty"),
    (re.compile("\u2212"), "-"),
    (re.compile("∅"), r"\\emptyset"),
    (re.compile("∞|(?<![A-Za-z\\\\])(?:infinity|inf|oo)(?![A-Za-z])"), r"\\infty "),
    (re.compile(r"\\langle(?![A-Za-z])"), "("),
    (re.compile(r"\\rangle(?![A-Za-z])"), ")"),
    (re.compile(r"(?<![\\A-Za-z])(sqrt|sin|cos|tan|cot|sec|csc|log|ln|exp|pi)(?![A-Za-z])"), r"\\\1 "),
)
_OPEN = {"(": ")", "[": "]", "{": "}", "\\{": "\\}"}
_CLOSE = frozenset((")", "]", "}", "\\}"))
_TOKENS = re.compile(r"\\text\s*\{[^{}]*\}|\\(?:begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+|\\.|[\s\S]")
_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+(?!\d)")
_NAME = re.compile(
    r"(?:\\angle\s*)?(?:[A-Za-z]{1,3}|\\[a-z]+)(?:_\{?\w+\}?)?(?:\^\{-1\})?(?:\s*\([A-Za-z0-9,]*\))?|\([a-z](?:,[a-z])+\)"
)
_RELATIONS = ("=", "<", ">", "≤", "≥", "≠", "∈", "≈")


@dataclass(frozen=True)
class Meaning:
    """What an answer says.

    ``kind``: formula, text, list (items), matrix (rows of items joined), relation (sides in ``items``), union, based,
    unknown. ``brackets``: ``()``, ``[)``, ``{}``, ``:``; empty of a bare list. ``unit``, ``name``: as stated.
    """

    kind: str
    text: str
    items: tuple[Meaning, ...] = ()
    brackets: str = ""
    unit: str = ""
    percent: bool = False
    name: str = ""
    operators: tuple[str, ...] = ()


@lru_cache(maxsize=50_000)
def read(text: str) -> Meaning:
    """The meaning of an answer or gold; of kind unknown where there is none that the table knows."""
    try:
        return _read(_clean(text))
    except (Unknown, RecursionError):
        return Meaning("unknown", _letters(text))


def _clean(text: str) -> str:
    text = text.strip().rstrip(".").strip()
    while len(text) > 1 and text[0] == text[-1] == "$" and "$" not in text[1:-1].replace("\\$", ""):
        text = text[1:-1].strip()
    for opening, closing in (("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$")):
        if text.startswith(opening) and text.endswith(closing):
            text = text[2:-2].strip()
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    text = re.sub(r"(?<=\d)\{,\}(?=\d)|(?<=\d),\\!(?=\d)", "", text)
    return _SPACES.sub(" ", text).replace("\\$", "＄").replace("$", "").strip().rstrip(".,;").strip()


def _letters(text: str) -> str:
    bare = "".join(c for c in re.sub(r"\\(?:text|mbox|mathrm|mathbf|textbf)", "", text).casefold() if c.isalnum())
    return _CLASS_OF.get(bare, bare)


def _read(text: str) -> Meaning:
    while text.startswith("{") and _closes(text) == len(text) - 1:
        text = text[1:-1].strip()
    if not text:
        raise Unknown("nothing")
    if matrix := re.fullmatch(r"\\begin\s*\{([bpv]?matrix)\}(.*)\\end\s*\{\1\}", text, re.DOTALL):
        rows = [row for row in re.split(r"\\\\", matrix[2]) if row.strip()]
        entries = tuple(_read(entry.strip()) for row in rows for entry in row.split("&"))
        return Meaning("matrix", text, entries, f"{len(rows)} rows")
    if based := re.fullmatch(r"(-?[0-9A-F]+(?:\.[0-9]+)?)\s*_\s*\{?(?:\\text\{)?\s*(\w+)\s*\}?\}?", text):
        return Meaning("based", f"{based[1]}_{_CLASS_OF.get(based[2].casefold(), based[2].casefold())}")
    if whole := re.fullmatch(r"\\text\s*\{([^{}]*)\}", text):
        inner = whole[1].strip().strip("()")
        if re.search(r"\d|,", inner):
            return _read(inner)
        return Meaning("formula", inner) if re.fullmatch(r"[A-Za-z]", inner) else Meaning("text", _letters(text))
    if figure := re.fullmatch(r"\\(angle|triangle|overline|overrightarrow)\s*\{?\s*([A-Z](?:\s*[A-Z])+)\s*\}?", text):
        points_named = figure[2].replace(" ", "")
        ways = {"angle": min(points_named, points_named[::-1]), "overrightarrow": points_named}
        return Meaning("text", ways.get(figure[1], "".join(sorted(points_named))))
    if re.fullmatch(r"\(?[A-Za-z]\)?", text):
        return Meaning("formula", text.strip("()"))
    if re.fullmatch(r"[A-Za-z]{2,}[A-Za-z' -]*", text) and not re.search(r"\b(?:and|or)\b", text):
        return Meaning("text", _letters(text))
    if re.search(r"\d{1,2}:\d\d", text):
        return Meaning("text", _letters(text))
    pieces, separators = _split(text, (",", ";", "and", "or"))
    sides, operators = _split(pieces[0] if separators else text, _RELATIONS)
    if separators:
        return _read_list([piece for piece in pieces if piece], sides, operators)
    if operators:
        return _read_relation(tuple(sides), tuple(operators))
    parts, unions = _split(text, ("∪",))
    if unions:
        return Meaning("union", text, tuple(map(_read, parts)))
    if text == "\\emptyset":
        return Meaning("list", text, (), "{}")
    if "\\pm" in text and text.count("\\pm") == 1 and not text.startswith(("(", "\\{")):
        signed = (_read(text.replace("\\pm", sign).strip().removeprefix("+")) for sign in "+-")
        return Meaning("list", text, tuple(signed))
    return _read_bracketed(text) or _read_value(text)


def _read_list(pieces: list[str], sides: list[str], operators: list[str]) -> Meaning:
    named = operators == ["="] and _NAME.fullmatch(sides[0]) is not None and len(pieces) > 1
    if named and not any(_split(piece, _RELATIONS)[1] for piece in pieces[1:]):
        return Meaning("list", "", tuple(map(_read, [sides[1], *pieces[1:]])), name=sides[0])
    if len(pieces) == 1:
        return _read(pieces[0])
    items: list[Meaning] = []
    regions = [_read(piece) for piece in pieces]
    if all(region.kind == "list" and region.name and len(region.brackets) == 2 for region in regions):
        return Meaning("union", "", tuple(regions))
    for item in regions:
        items += item.items if item.kind == "list" and not item.brackets else (item,)
    return Meaning("list", "", tuple(items))


def _read_bracketed(text: str) -> Meaning | None:
    opening = next((mark for mark in ("(", "[", "\\{") if text.startswith(mark)), None)
    closing = next((mark for mark in ("\\}", ")", "]") if text.endswith(mark)), None)
    if opening is None or closing is None or _closes(text) != len(text) - len(closing):
        return None
    inner = text[len(opening) : -len(closing)].strip()
    pieces, separators = _split(inner, (",", ";"), thousands=False)
    brackets = (opening + closing).replace("\\", "")
    if not inner:
        return Meaning("list", text, (), brackets)
    if not separators:
        return Meaning("list", text, (_read(inner),), "{}") if opening == "\\{" else None
    items: list[Meaning] = []
    for item in map(_read, [piece for piece in pieces if piece]):
        items += item.items if brackets == "{}" and item.kind == "list" and not item.brackets else (item,)
    return Meaning("list", text, tuple(items), brackets)


def _read_relation(sides: tuple[str, ...], operators: tuple[str, ...]) -> Meaning:
    if not all(sides):
        raise Unknown("an empty side")
    if set(operators) == {"="}:
        if _NAME.fullmatch(sides[0]):
            message = _read(sides[-1])
            if len(sides) > 2 and _all(same(_read(side), message) for side in sides[1:-1]) != SAME:
                return _read_chain(sides[1:])
            return replace(message, name=re.sub(r"[\s{}]|\(.*\)", "", sides[0]))
        return _read_chain(sides)
    if operators == ("∈",):
        return replace(_read(sides[1]), name=sides[0])
    if operators and operators[0] in (">", "≥"):
        flipped = {">": "<", "≥": "≤"}
        sides, operators = sides[::-1], tuple(flipped.get(operator, operator) for operator in reversed(operators))
    middle = 1 if len(sides) == 3 or not _NAME.fullmatch(sides[0]) else 0
    if set(operators) <= {"<", "≤"} and _NAME.fullmatch(sides[middle]):
        low = _read(sides[middle - 1]) if middle else Meaning("formula", "-\\infty")
        high = _read(sides[middle + 1]) if middle + 1 < len(sides) else Meaning("formula", "\\infty")
        if not any(read_formula(end.text).names for end in (low, high) if end.kind == "formula"):
            brackets = ("[" if middle and operators[0] == "≤" else "(") + (
                "]" if middle + 1 < len(sides) and operators[-1] == "≤" else ")"
            )
            return Meaning("list", "", (low, high), brackets, name=sides[middle])
    return Meaning("relation", "", tuple(map(_read, sides)), operators=operators)


def _read_chain(sides: Sequence[str]) -> Meaning:
    """An equation: between constants it is true, and then its last side, or false; else it is a relation."""
    values = tuple(map(_read, sides))
    if not all(map(_is_constant, values)):
        return Meaning("relation", "", values, operators=("=",) * (len(sides) - 1))
    agree = _all(same(values[0], value, facets=True) for value in values[1:])
    if agree == UNKNOWN:
        raise Unknown("whether the equation is true")
    return values[-1] if agree == SAME else Meaning("false", "", values)


def _is_constant(meaning: Meaning) -> bool:
    if meaning.kind == "formula":
        return not read_formula(meaning.text).names
    return meaning.kind in ("list", "matrix", "union", "based") and all(map(_is_constant, meaning.items))


def _read_value(text: str) -> Meaning:
    """One formula, with its unit or percent sign taken away; a ratio is a list."""
    terms, colons = _split(text, (":",))
    if colons and all(terms):
        return Meaning("list", text, tuple(map(_read_value, terms)), ":")
    unit, percent = "", False
    if text.startswith("＄"):
        unit, text = "dollar", text[1:].strip()
    if match := re.search(r"\s*(?:\\?%|\\text\s*\{\s*(?:percent|\\?%)\s*\}|(?<=\d)\s*percent)$", text):
        percent, text = True, text[: match.start()]
    elif match := re.search(r"\s*\\text\s*\{([^{}]*)\}\s*(?:\^\{?([23])\}?)?$", text):
        unit, text = unit_of(match[1], match[2] or ""), text[: match.start()]
    elif match := re.search(r"(?<=[\d})])\s*([A-Za-z]{2,}(?:[ /][A-Za-z]{2,})*)\s*(?:\^\{?([23])\}?)?$", text):
        words = match[1].split()
        if not all(word.casefold() in UNITS or _singular(word) in UNITS for word in words):
            raise Unknown(f"{match[1]!r} is no unit")
        unit, text = unit_of(match[1], match[2] or ""), text[: match.start()]
    text = text.replace("＄", "").strip()
    if re.fullmatch(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?", text):
        text = text.replace(",", "")
    if mixed := re.fullmatch(r"(\d+)\s*(\\frac\s*(?:\{\d+\}|\d)\s*(?:\{\d+\}|\d))", text):
        text = f"{mixed[1]}+{mixed[2]}"
    if mixed := re.fullmatch(r"-\s*(\d+)\s*(\\frac\s*(?:\{\d+\}|\d)\s*(?:\{\d+\}|\d))", text):
        text = f"-({mixed[1]}+{mixed[2]})"
    if mixed := re.fullmatch(r"(\d+) (\d+)/(\d+)", text):
        text = f"{mixed[1]}+{mixed[2]}/{mixed[3]}"
    if scientific := re.fullmatch(r"(-?\d+\.?\d*)[eE]([+-]?\d+)", text):
        text = f"{scientific[1]}*10^{{{int(scientific[2])}}}"
    text = text.replace("**", "^").replace("π", "\\pi ").replace("·", "*").replace("×", "*").replace("−", "-")
    read_formula(text)
    return Meaning("formula", text, unit=unit, percent=percent)


def _singular(word: str) -> str:
    word = word.casefold() if len(word) > 1 else word
    return word[:-1] if word.endswith("s") and len(word) > 2 else word


def unit_of(words: str, power: str = "") -> str:
    """One name for the spellings of a unit; words that the table does not know stand for themselves."""
    names = [UNITS.get(_singular(word), _singular(word)) for word in words.replace(".", " ").split()]
    for name, exponent in (("square", "2"), ("cubic", "3")):
        if len(names) > 1 and names[0] == name:
            names, power = names[1:], exponent
    return " ".join(names) + power


def _closes(text: str) -> int | None:
    level = 0
    for match in _TOKENS.finditer(text):
        level += (match[0] in _OPEN) - (match[0] in _CLOSE)
        if level <= 0:
            return match.start()
    return None


def _split(text: str, marks: Sequence[str], thousands: bool = True) -> tuple[list[str], list[str]]:
    """Pieces between marks outside of brackets, and the marks; ``and`` also in ``\\text{ and }``."""
    pieces: list[str] = []
    found: list[str] = []
    level = start = 0
    words = re.compile(r"\\text\s*\{\s*,?\s*(and|or)\s*\}|(?<![A-Za-z\\])(and|or)(?![A-Za-z])")
    skip = 0
    for match in _TOKENS.finditer(text):
        if match.start() < skip:
            continue
        token, end = match[0], match.end()
        if "and" in marks and (word := words.match(text, match.start())):
            token, end = word[1] or word[2], word.end()
        if thousands and not level and (number := _THOUSANDS.match(text, match.start())):
            skip = number.end()
            continue
        level += token.startswith("\\begin") - token.startswith("\\end")
        level += (token in _OPEN) - (token in _CLOSE)
        if level < 0:
            raise Unknown("a bracket closes")
        if not level and token in marks:
            pieces.append(text[start : match.start()].strip())
            found.append(token)
            start = skip = end
    if level:
        raise Unknown("a bracket does not close")
    return [*pieces, text[start:].strip()], found


def compare(left: str, right: str) -> str:
    """Whether two texts mean the same, every facet that both state taken seriously."""
    return same(read(left), read(right), facets=True)


def golds_differ(left: str, right: str, answer: str) -> str:
    """Whether two golds are different for an answer: in what they say, or in a facet that the answer states."""
    one, other, given = read(left), read(right), read(answer)
    message = same(one, other)
    if message != SAME:
        return message
    facets = [name for name in ("unit", "name", "brackets") if getattr(given, name)]
    differ = any(
        getattr(one, name) and getattr(other, name) and getattr(one, name) != getattr(other, name) for name in facets
    )
    return DIFFERENT if differ else SAME


def same(left: Meaning, right: Meaning, facets: bool = False) -> str:
    """``same``, ``different`` or ``unknown``; ``facets``: units, names and brackets that both state must agree."""
    if facets and (message := _compare_facets(left, right)) is not None:
        return message
    if left.kind == "false" or right.kind == "false":
        return SAME if left == right else DIFFERENT
    if "unknown" in (left.kind, right.kind):
        return SAME if left.text == right.text else UNKNOWN
    if left.kind == right.kind:
        return _KINDS[left.kind](left, right, facets)
    kinds = {left.kind, right.kind}
    if kinds == {"list", "formula"}:
        return _same_list_and_value(*((left, right) if left.kind == "list" else (right, left)), facets)
    if "text" in kinds:
        return _same_text(*((left, right) if left.kind == "text" else (right, left)))
    if "relation" in kinds:
        return _same_relation_and_other(*((left, right) if left.kind == "relation" else (right, left)))
    if kinds == {"list", "matrix"}:  # a vector may be written in a line
        items = len(left.items) == len(right.items) and _all(map(same, left.items, right.items))
        return UNKNOWN if items in (SAME, UNKNOWN) else DIFFERENT
    if kinds == {"list", "union"}:
        union = left if left.kind == "union" else right
        finite = all(part.kind == "list" and part.brackets == "{}" for part in union.items)
        return UNKNOWN if finite else DIFFERENT
    return DIFFERENT


def _compare_facets(left: Meaning, right: Meaning) -> str | None:
    for name in ("unit", "name"):
        given_arguments = getattr(left, name), getattr(right, name)
        if all(given_arguments) and given_arguments[0] != given_arguments[1]:
            known = name == "name" or all(
                set(unit.rstrip("23").split()) <= set(UNITS.values()) for unit in given_arguments
            )
            return DIFFERENT if known else UNKNOWN
    if left.kind == right.kind == "list" and left.brackets and right.brackets and left.brackets != right.brackets:
        return DIFFERENT if len(left.items) > 1 or len(right.items) > 1 else UNKNOWN
    return None


def _same_formula(left: Meaning, right: Meaning, facets: bool) -> str:
    one, other = read_formula(left.text), read_formula(right.text)
    message = compare_formulas(one, other)
    if message == DIFFERENT and left.percent != right.percent:
        scaled = [f"({side.text})/100" if side.percent else side.text for side in (left, right)]
        return compare_formulas(*map(read_formula, scaled))
    return message


def _same_items(left: Meaning, right: Meaning, facets: bool) -> str:
    """Item by item; in any order unless both are ordered."""
    ordered = all(side.brackets not in ("", "{}") for side in (left, right))
    if ordered and ":" in (left.brackets, right.brackets) and left.brackets != right.brackets:
        return UNKNOWN
    if ordered or left.kind == "matrix":
        if left.kind == "matrix" and left.brackets != right.brackets:
            return DIFFERENT
        if len(left.items) != len(right.items):
            return DIFFERENT
        if left.brackets == ":" and (message := _same_ratio(left, right)) is not None:
            return message
        return _all(same(*pair, facets) for pair in zip(left.items, right.items, strict=True))
    return _all(
        _any(same(item, candidate, facets) for candidate in theirs)
        for ours, theirs in ((left.items, right.items), (right.items, left.items))
        for item in ours
    )


def _same_ratio(left: Meaning, right: Meaning) -> str | None:
    if len(left.items) != 2 or any(item.kind != "formula" for item in (*left.items, *right.items)):
        return None
    quotients = [f"({side.items[0].text})/({side.items[1].text})" for side in (left, right)]
    return compare_formulas(*map(read_formula, quotients))


def _all(verdicts: object) -> str:
    found = list(verdicts)  # type: ignore[call-overload]
    return DIFFERENT if DIFFERENT in found else UNKNOWN if UNKNOWN in found else SAME


def _any(verdicts: object) -> str:
    found = list(verdicts)  # type: ignore[call-overload]
    return SAME if SAME in found else UNKNOWN if UNKNOWN in found else DIFFERENT


def _same_list_and_value(collection: Meaning, value: Meaning, facets: bool) -> str:
    if collection.brackets == ":" and len(collection.items) == 2:
        first, second = collection.items
        if not first.kind == second.kind == "formula":
            return UNKNOWN
        return compare_formulas(read_formula(f"({first.text})/({second.text})"), read_formula(value.text))
    if not collection.items:
        return DIFFERENT
    return _all(same(item, value, facets) for item in collection.items)


def _same_text(text: Meaning, other: Meaning) -> str:
    if other.kind == "list" and not other.items:
        return SAME if text.text == "none" else DIFFERENT
    if other.kind == "formula":
        if text.text == _letters(other.text):
            return SAME
        return DIFFERENT if re.fullmatch(r"[-+]?[\d./]+", other.text) or len(text.text) > 3 else UNKNOWN
    return DIFFERENT if other.kind in ("list", "matrix", "based") else UNKNOWN


def _same_relation(left: Meaning, right: Meaning, facets: bool) -> str:
    if left.operators != right.operators or left.operators != ("=",):
        return UNKNOWN
    if any(side.kind != "formula" for side in (*left.items, *right.items)):
        return UNKNOWN
    one, other = (f"({side.items[0].text})-({side.items[1].text})" for side in (left, right))
    names = read_formula(one).names
    if names != read_formula(other).names:
        return DIFFERENT
    return _same_zeros(one, other)


def _same_relation_and_other(relation: Meaning, other: Meaning) -> str:
    """An equation is no value; where one of its sides is the value, someone may have named it."""
    if other.kind == "list" and any(item.kind in ("relation", "unknown") for item in other.items):
        return UNKNOWN
    sides = {same(side, other) for side in relation.items}
    if other.kind == "formula" and relation.operators == ("=",) and all(s.kind == "formula" for s in relation.items):
        difference = f"({relation.items[0].text})-({relation.items[1].text})"
        if other.name:
            return _same_zeros(difference, f"{other.name}-({other.text})")
        if len(read_formula(difference).names) < 2 or read_formula(other.text).names:
            return UNKNOWN
    return DIFFERENT if sides == {DIFFERENT} else UNKNOWN


def _same_zeros(one: str, other: str) -> str:
    """Two equations are the same where the ratio of their differences is one number everywhere; else who knows."""
    ratios = []
    for point in points(read_formula(one).names | read_formula(other).names):
        values = read_formula(one).at(point), read_formula(other).at(point)
        if values[0] and values[1]:
            ratios.append(values[0] / values[1])
    if len(ratios) < NUM_AGREEING:
        return UNKNOWN
    if all(close(ratio, ratios[0]) for ratio in ratios):
        return SAME
    polynomials = all(re.fullmatch(r"[\d\sA-Za-z+*/^{}().-]*", side) for side in (one, other))
    return DIFFERENT if polynomials else UNKNOWN


def _same_words(left: Meaning, right: Meaning, facets: bool) -> str:
    return SAME if left.text == right.text else DIFFERENT


_KINDS = {
    "formula": _same_formula, "list": _same_items, "matrix": _same_items, "union": _same_items, "text": _same_words,
    "based": _same_words, "relation": _same_relation,
}  # fmt: skip


def is_percentage(text: str) -> bool:
    """Whether the answer states a percentage: of 50 % it cannot be told whether 50 or one half is meant."""
    meaning = read(text)
    return meaning.percent or any(item.percent for item in meaning.items)
