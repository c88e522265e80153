"""Write the equations of docstrings, which are plain text, as TeX.

Docstrings have equations in backticks, as a terminal shows them: ``values = −min(ρ A, clip(ρ, 1 − ε, 1 + ε) A)``.
``with_mathematics`` finds them in a text and writes each as ``$...$``, which GitHub and the site show as mathematics.
"""

from __future__ import annotations

import re

_LETTERS = {
    "α": r"\alpha",
    "β": r"\beta",
    "γ": r"\gamma",
    "δ": r"\delta",
    "Δ": r"\Delta",
    "ε": r"\varepsilon",
    "λ": r"\lambda",
    "μ": r"\mu",
    "π": r"\pi",
    "ρ": r"\rho",
    "σ": r"\sigma",
    "Σ": r"\sum",
    "τ": r"\tau",
    "ω": r"\omega",
}
_SIGNS = {
    "−": "-",
    "·": r"\cdot",
    "×": r"\times",
    "‖": r"\,\Vert\,",
    "±": r"\pm",
    "≤": r"\le",
    "≥": r"\ge",
    "≠": r"\ne",
    "→": r"\to",
    "←": r"\leftarrow",
    "∇": r"\nabla",
    "√": r"\sqrt",
    "⌊": r"\lfloor",
    "⌋": r"\rfloor",
    "≈": r"\approx",
    "∞": r"\infty",
    "∈": r"\in",
    "²": "^2",
    "½": r"\tfrac{1}{2}",
    "₀": "_0",
    "'": "'",
    "|": "|",
}
_FUNCTIONS = {"log": r"\log", "exp": r"\exp", "min": r"\min", "max": r"\max"}
_KNOWN = (*_FUNCTIONS, "KL", "clip", "mean", "odds", "sg", "ref", "old")
_WORD = re.compile(r"[A-Za-z]+")
_POWER = re.compile(r"(\d+(?:\.\d+)?)e([-−]?\d+)")  # 1e-4
_TOKEN = re.compile(
    r"\s+|\d+(?:\.\d+)?e[-−]?\d+|\d+(?:\.\d+)?|[A-Za-z]+|[α-ωΑ-Ω]|[_^]|["
    + re.escape("".join(_SIGNS))
    + r"]|[-+*/=<>()\[\]{},.;:…!?]"
)
# A text in backticks is an equation if it has a sign or a letter of mathematics, and neither a key nor a call of code.
_MARKS = re.compile(
    "["
    + re.escape("".join(_SIGNS).replace("'", "").replace("|", ""))
    + r"α-ωΔΣ]|^[A-Za-z] [=<>] |\b[A-Za-z]_[A-Za-z0-9]\b"
)
_CODE = re.compile(r": |\w\.\w*[a-z_]|[a-z]{2,}_[a-z]{2,}|\"")
_QUOTED = re.compile(r"`([^`\n]+)`")


def with_mathematics(text: str) -> str:
    """Return Markdown in which each equation in backticks is TeX between dollars; other text stays."""
    return _QUOTED.sub(_written, text)


def _written(match: re.Match[str]) -> str:
    if not is_equation(match[1]):
        return match[0]
    return f"${to_tex(match[1])}$"


def is_equation(text: str) -> bool:
    """Return True if a text in backticks is mathematics, not code or the name of a key."""
    if _CODE.search(text):
        return False
    words = _WORD.findall(text)
    is_applied = len(words) > 1 and words[0] in _FUNCTIONS and all(len(word) == 1 or word in _KNOWN for word in words)
    return is_applied or bool(_MARKS.search(text))


def to_tex(text: str) -> str:
    """Return an equation in plain text as TeX.

    Raises:
        ValueError: a character has no TeX here.
    """
    tokens = _TOKEN.findall(text)
    if "".join(tokens) != text:
        unknown = next(char for char in text if not _TOKEN.match(char))
        raise ValueError(f"{unknown!r} in the equation {text!r} has no TeX in tools/equations.py; add it to _SIGNS")
    parts = []
    place = 0
    while place < len(tokens):
        written, place = _read(tokens, place)
        parts.append(written)
    written = re.sub(r"\s+", " ", "".join(parts)).strip()
    written = re.sub(r" (?=[_^,)\]}'|])", "", written)
    return re.sub(r"^\\text\{ ", r"\\text{", written)  # no space before the first word


def _read(tokens: list[str], place: int) -> tuple[str, int]:
    """Return the TeX of the token at ``place`` and the place of the next one."""
    token = tokens[place]
    power = _POWER.fullmatch(token)
    if power is not None:
        factor = ""
        if power[1] != "1":
            factor = rf"{power[1]} \cdot "
        return f"{factor}10^{{{power[2]}}}", place + 1
    if token in "_^":
        below, after = _script(tokens, place + 1)
        return f"{token}{{{below}}}", after
    if token in "{}":
        return f"\\{token}", place + 1
    if _WORD.fullmatch(token):
        return _words(tokens, place)
    if token in _LETTERS:
        return f"{_LETTERS[token]} ", place + 1
    if token == "|" and " " in tokens[place - 1 : place] and " " in tokens[place + 1 : place + 2]:
        return r"\mid ", place + 1
    if token in _SIGNS:
        return f"{_SIGNS[token]} ", place + 1
    return token, place + 1


def _words(tokens: list[str], place: int) -> tuple[str, int]:
    """Return a function, a variable or a stretch of English, and the place after it."""
    word = tokens[place]
    if word in _FUNCTIONS:
        return f"{_FUNCTIONS[word]} ", place + 1
    if len(word) == 1:
        return f"{word} ", place + 1
    is_applied = tokens[place + 1 : place + 2] in (["("], ["["], ["_"])
    is_before_english = tokens[place + 1 : place + 2] == [" "] and is_english("".join(tokens[place + 2 : place + 3]))
    if is_applied or (word in _KNOWN and not is_before_english):
        return rf"\operatorname{{{word}}} ", place + 1
    english = [word]
    place += 1
    while place + 1 < len(tokens) and tokens[place].isspace() and is_english(tokens[place + 1]):
        english.append(tokens[place + 1])
        place += 2
    return rf"\text{{ {' '.join(english)}}}\ ", place


def is_english(token: str) -> bool:
    """Return True for a word of a sentence, not a function or a variable."""
    return len(token) > 1 and bool(_WORD.fullmatch(token)) and token not in _KNOWN


def _script(tokens: list[str], place: int) -> tuple[str, int]:
    """Return what a subscript or an exponent has: a group in parentheses, or a sign and one name or number."""
    if place < len(tokens) and tokens[place] in "({":
        closing = {"(": ")", "{": "}"}[tokens[place]]
        depth = 1
        end = place + 1
        while end < len(tokens) and depth:
            depth += (tokens[end] == tokens[place]) - (tokens[end] == closing)
            end += 1
        return to_tex("".join(tokens[place + 1 : end - 1])), end
    sign = ""
    if tokens[place] in ("-", "−", "<"):
        sign = "-" if tokens[place] != "<" else "<"
        place += 1
    token = tokens[place]
    if _WORD.fullmatch(token) and len(token) > 1:
        return rf"{sign}\text{{{token}}}", place + 1
    written, after = _read(tokens, place)
    return f"{sign}{written.strip()}", after
