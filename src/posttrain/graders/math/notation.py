"""Normalize the notation of mathematical answers across LaTeX, plain text and typographic signs.

``unify`` only rewrites text: ``\\dfrac12``, ``\\tfrac{1}{2}`` and ``\\frac 12`` become ``\\frac{1}{2}``. Pure, linear
in text length.
"""

from __future__ import annotations

import re
import unicodedata

# Sign -> LaTeX. Unambiguous signs only; look-alike letters are unchanged (for digits see ``graders.signs``).
_SIGNS = str.maketrans(
    {
        "\u2212": "-", "\u2013": "-", "\u00a0": " ", "\u202f": " ", "\u2009": " ", "×": "\\cdot ", "⋅": "\\cdot ",
        "·": "\\cdot ", "÷": "/", "⁄": "/", "∕": "/", "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "∞": "\\infty ",
        "π": "\\pi ", "√": "\\sqrt ", "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ", "±": "\\pm ", "°": "^\\circ ",
        "º": "^\\circ ", "∛": "\\sqrt[3] ", "∅": "\\emptyset ", "ℝ": "\\mathbb{R}", "θ": "\\theta ", "α": "\\alpha ",
        "β": "\\beta ", "λ": "\\lambda ", "⟨": "(", "⟩": ")", "≈": "\\approx ",
    }
)  # fmt: skip
_VULGAR = re.compile("[¼½¾⅐-⅞]")
_RAISED = re.compile("([⁰¹²³⁴-⁹⁺⁻⁽⁾ⁿⁱ]+)|([₀-₉₊₋ₐₑₒₓₙ]+)")
_ROOT_OF_DIGITS = re.compile(r"(?:√|(?<![\\A-Za-z])sqrt)\s*(\d+(?:\.\d+)?)")  # √13 differs from √1 times 3
_REPEATING = re.compile(
    r"(?<![\d.,])(?<!\d )(\d{0,20})\.(\d{0,20})\\(?:overline|bar|dot)\s*(?:\{\s*(\d{1,20})\s*\}|(\d))"
)
_COLOURS = re.compile(
    r"\\(?:text)?color\s*\{[^{}]*\}|\\tag\s*\{[^{}]*\}|\\(?:underline|ensuremath|checkmark|blacksquare)(?![a-zA-Z])"
)
_ROW_GAP = re.compile(r"(?<=\\\\)\s*\[\s*-?[\d.]+\s*(?:pt|em|ex|mm|cm)\s*\]")
_CHOOSE = re.compile(r"\{([^{}]*)\\choose(?![a-zA-Z])([^{}]*)\}")
_ORDINAL = re.compile(r"(?<=\d) ?\^?\{? ?\\text\{(?:st|nd|rd|th)\} ?\}?")
_DOUBLED = re.compile(r"\\\\(?=[A-Za-z(){}$%])")  # a double-escaped backslash, or a row break in a matrix
_BOLD = re.compile(r"^(?:\*\*|__)([^*_]+)(?:\*\*|__)(?=[.,]?$)")
_TEXT = re.compile(
    r"\\(?:text(?:bf|it|rm|normal|sf|tt|up)?|mbox|mathrm|mathbf|mathit|mathsf|operatorname\*?)\s*\{([^{}]*)\}"
)
_KEPT_NAMES = ("gcd", "lcm", "arcsin", "arccos", "arctan", "max", "min")
_OLD_FONTS = re.compile(
    r"\\(?:rm|bf|it|displaystyle|textstyle|limits|boldsymbol|bold|mathbf|mathrm|bm|pmb|"
    r"small|normalsize|large|Large|LARGE|huge|Huge)(?![a-zA-Z])"
)
_SIZES = re.compile(r"\\(?:left|right)(?![a-zA-Z])\s*\.?|\\(?:big|Big|bigg|Bigg)[lr]?(?![a-zA-Z])")
_PHANTOM = re.compile(r"\\[hv]?phantom\s*(?:\{[^{}]*\}|.)")
_THOUSANDS = re.compile(r"(?<=\d)(?:\s*\{\s*,\s*\}\s*(?=\d)|\s*,\s*\\!\s*(?=\d{3})|\\[,;:](?=\d{3}(?!\d)))")
_SPACED_THOUSANDS = re.compile(r"(?<![\d.,])(?<!\d )\d{1,3}(?: \d{3})+(?! ?\d)")
_SPACES = re.compile(r"(?<!\\)\\[,;: ]|\\q?quad(?![a-zA-Z])|~|\s+")
_NOTHING = re.compile(r"\\!|(?<!\\)\$|\\hspace\s*\{[^{}]*\}")
_SPELLINGS = (
    (re.compile(r"\\(?:[dtc]|nice|s)frac(?![a-zA-Z])"), r"\\frac "),
    (re.compile(r"\\[dt]binom(?![a-zA-Z])"), r"\\binom "),
    (re.compile(r"\\(?:times|ast|centerdot|cdotp)(?![a-zA-Z])|\*"), r"\\cdot "),
    (re.compile(r"\\div(?![a-zA-Z])"), "/"),
    (re.compile(r"\\le(?:q|qslant)?(?![a-zA-Z])|<=|=<"), r"\\le "),
    (re.compile(r"\\ge(?:q|qslant)?(?![a-zA-Z])|>="), r"\\ge "),
    (re.compile(r"\\neq?(?![a-zA-Z])|!=|\\not\s*="), r"\\ne "),
    (re.compile(r"\\lt(?![a-zA-Z])"), "<"),
    (re.compile(r"\\gt(?![a-zA-Z])"), ">"),
    (re.compile(r"\\(?:[lch]?dots|dots[cbmio])(?![a-zA-Z])|…|(?<=[,;+<-])\s*\.\s?\.\s?\."), r"\\dots "),
    (re.compile(r"\\(?:lbrace)(?![a-zA-Z])"), r"\\{"),
    (re.compile(r"\\(?:rbrace)(?![a-zA-Z])"), r"\\}"),
    (re.compile(r"\\lbrack(?![a-zA-Z])"), "["),
    (re.compile(r"\\rbrack(?![a-zA-Z])"), "]"),
    (re.compile(r"\\(?:langle|lparen)(?![a-zA-Z])"), "("),
    (re.compile(r"\\(?:rangle|rparen)(?![a-zA-Z])"), ")"),
    (re.compile(r"\\(?:[lr]vert|vert|mid)(?![a-zA-Z])"), "|"),
    (re.compile(r"\\(?:colon|ratio)(?![a-zA-Z])"), ":"),
    (re.compile(r"\\(?:degree|deg)(?![a-zA-Z])"), r"^\\circ "),
    (re.compile(r"\\(?:varnothing|O(?![a-zA-Z]))"), r"\\emptyset "),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"\\(?:approxeq|simeq|sim)(?![a-zA-Z])|~="), r"\\approx "),
    (re.compile(r"\\(?:lor|vee)(?![a-zA-Z])"), r"\\text{or}"),
    (re.compile(r"\\(?:land|wedge)(?![a-zA-Z])"), r"\\text{and}"),
    (re.compile(r"\+\s*\\infty"), r"\\infty "),
    (re.compile(r"(?<=[)\]}])\s*U\s*(?=[(\[\\])"), r"\\cup "),
    (re.compile(r"'"), r"\\prime "),
)
_FUNCTIONS = r"\\(?:arc(?:sin|cos|tan)|(?:sin|cos|tan)h?|cot|sec|csc|log|ln|exp)(?![A-Za-z])"
_SCRIPTS = r"\s*(?:[\^_]\{[^{}]*\}\s*){0,2}"
# Without parentheses a function takes all factors behind it: a dot before the next function ends its argument.
_SIMPLE = (
    r"(?:[A-Za-z0-9. ]|\\(?:pi|theta|alpha|beta|lambda)(?![A-Za-z])|"
    r"\\(?:sqrt|frac\{[^{}]*\})\{[^{}]*\}|\^\{[^{}]*\}){1,40}"
)
_UP_TO_FUNCTION = re.compile(rf"({_FUNCTIONS}{_SCRIPTS})({_SIMPLE})(?=\\cdot\s*{_FUNCTIONS})")
_ARGUMENT = re.compile(rf"{_FUNCTIONS}{_SCRIPTS}(?=\{{)")
_PAIRS = re.compile(r"\\.|[{}()]")
# Names that plain text writes without a backslash.
_BARE_NAMES = re.compile(
    r"(?<![\\A-Za-z])(sqrt|arcsin|arccos|arctan|sin|cos|tan|cot|sec|csc|log|ln|exp|pi|theta|alpha|beta|lambda|infty)"
    r"(?![A-Za-z])"
)
_INFINITY = re.compile(r"(?<![\\A-Za-z])(?:infinity|inf|oo)(?![A-Za-z])")
_TOKENS = re.compile(r"\\text\{[^{}]*\}|\\(?:begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+|\\.|[\s\S]")
_POWER = re.compile(r"([\^_])\s*([+-]?[0-9]+)")
_ARGUMENTS = {"\\frac": 2, "\\binom": 2, "\\sqrt": 1, "^": 1, "_": 1}


def unify(text: str) -> str:
    """Normalize notation. Words in ``\\text{}`` are kept, with single spaces.

    A ``$`` delimiting a formula is dropped; ``\\$`` is the currency and becomes ``$``.
    """
    if "\\begin" not in text:
        text = _DOUBLED.sub(r"\\", text)
    text = _BOLD.sub(r"\1", text.strip())
    text = _RAISED.sub(_lowered, _VULGAR.sub(_fraction, _ROOT_OF_DIGITS.sub(r"\\sqrt{\1}", text)))
    text = text.translate(_SIGNS).replace("**", "^")
    text = _ROW_GAP.sub(" ", _COLOURS.sub(" ", _REPEATING.sub(_repeating, text)))
    text = _CHOOSE.sub(r"\\binom{\1}{\2}", _THOUSANDS.sub("", text))
    text = _PHANTOM.sub("", _NOTHING.sub("", text)).replace("\\$", "$")
    text = _ORDINAL.sub("", _TEXT.sub(_plain_text, text))
    parts = re.split(r"(\\text\{[^{}]*\})", _SIZES.sub("", _OLD_FONTS.sub(" ", text)))
    parts = [part if part.startswith("\\text{") else _respell(part) for part in parts]
    braced = _UP_TO_FUNCTION.sub(r"\1(\2)", _brace_arguments("".join(parts)))
    return _SPACES.sub(" ", _parenthesize_arguments(braced)).strip()


def _lowered(match: re.Match[str]) -> str:
    """``⁻⁴`` -> ``^{-4}``, ``₁₂`` -> ``_{12}``."""
    plain = unicodedata.normalize("NFKC", match[0]).replace("\u2212", "-")
    return f"{'^' if match[1] else '_'}{{{plain}}} "


def _fraction(match: re.Match[str]) -> str:
    top, bottom = unicodedata.normalize("NFKC", match[0]).split("\u2044")
    return f"\\frac{{{top}}}{{{bottom}}} "


def _repeating(match: re.Match[str]) -> str:
    """``0.1\\overline{6}`` -> ``{\\frac{15}{90}}``, by the geometric series."""
    start = match[1] + match[2]
    period = match[3] or match[4]
    top = int(start + period) - int(start or 0)
    return f"{{\\frac{{{top}}}{{{'9' * len(period) + '0' * len(match[2])}}}}}"


def _plain_text(match: re.Match[str]) -> str:
    """``\\mathrm{E}`` is the letter, ``\\operatorname{lcm}`` the function; all other words are text."""
    words = " ".join(_SPACES.sub(" ", match[1]).split())
    if match[0].startswith(("\\text", "\\mbox")):
        if words:
            return f"\\text{{{words}}}"
        return " "
    if words in _KEPT_NAMES:
        return f"\\{words} "
    if len(words) == 1:
        return words
    if words:
        return f"\\text{{{words}}}"
    return " "


def _respell(text: str) -> str:
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    text = _INFINITY.sub(r"\\infty ", text)
    text = _BARE_NAMES.sub(r"\\\1 ", text)
    text = _SPACES.sub(" ", text)
    text = _SPACED_THOUSANDS.sub(lambda match: match[0].replace(" ", ""), text)
    return _POWER.sub(r"\1{\2}", text)


def _brace_arguments(text: str) -> str:
    """``\\frac12`` -> ``\\frac{1}{2}``, ``x^2`` -> ``x^{2}``, ``\\sqrt(3)`` -> ``\\sqrt{3}``, x^(n) -> ``x^{n}``.

    Scans tokens once. A frame is a command awaiting arguments: how many are missing, its brace level, and whether a
    brace was opened on its behalf.
    """
    out: list[str] = []
    frames: list[list[int]] = []
    parentheses: list[bool] = []  # per open bracket: did it become a brace
    level = 0
    in_index = False  # in the [n] of a root

    def drop() -> None:
        if frames.pop()[2]:
            out.append("}")

    def complete() -> None:
        """Close an argument of the innermost frame. A completed command then counts as an argument of its parent."""
        while frames and frames[-1][1] == level:
            frames[-1][0] -= 1
            if frames[-1][0]:
                return
            drop()

    for match in _TOKENS.finditer(text):
        token = match[0]
        is_awaited = bool(frames) and frames[-1][1] == level
        if token == "(":
            parentheses.append(is_awaited and out[-1] in ("^", "\\sqrt"))
        becomes_brace = token in "()" and bool(parentheses) and parentheses[-1]
        if token == ")" and parentheses:
            parentheses.pop()
        if token.isspace():
            if not is_awaited:
                out.append(token)
        elif token == "{" or (token == "(" and becomes_brace):
            out.append("{")
            level += 1
        elif token == "}" or (token == ")" and becomes_brace):
            while frames and frames[-1][1] == level:
                drop()
            out.append("}")
            level -= 1
            complete()
        elif token in _ARGUMENTS:
            if is_awaited:
                out.append("{")
            out.append(token)
            frames.append([_ARGUMENTS[token], level, int(is_awaited)])
        elif is_awaited and (in_index or (token == "[" and out[-1] == "\\sqrt")):
            in_index = token != "]"
            out.append(token)
        elif is_awaited:
            out += ["{", token, "}"]
            complete()
        else:
            out.append(token)
    while frames:
        drop()
    return "".join(out)


def _parenthesize_arguments(text: str) -> str:
    """``\\sin{x} y`` and ``\\sin{(x)} y`` -> ``\\sin(x) y``: a braced argument is taken whole."""
    starts = {match.end() for match in _ARGUMENT.finditer(text)}
    if not starts:
        return text
    letters = list(text)
    opened = list[int]()
    inner = (-1, -1)
    for match in _PAIRS.finditer(text):
        if match[0] in "({":
            opened.append(match.start())
        elif match[0] in ")}" and opened:
            start = opened.pop()
            end = match.start()
            if text[start] == "{" and start in starts:
                has_parentheses = text[start + 1 : inner[0]].isspace() or start + 1 == inner[0]
                is_doubled = has_parentheses and not text[inner[1] + 1 : end].strip()
                letters[start] = "("
                letters[end] = ")"
                if is_doubled:
                    letters[start] = ""
                    letters[end] = ""
            inner = (-1, -1)
            if text[start] == "(":
                inner = (start, end)
    return "".join(letters)
