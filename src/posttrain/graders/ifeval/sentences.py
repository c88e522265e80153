"""How many words, capital words and sentences a text has, by rules without dictionaries. Linear in its length."""

from __future__ import annotations

import re

_WORD = re.compile(r"\w+")
_TOKEN = re.compile(r"[^\W_]+(?:[-.][^\W_]+)*")
# Marks that end a sentence, with what closes behind them. Full-width marks need no space behind.
_END = re.compile(r"(?<![.!?…])[.!?…]++[\"'”’»)\]*_]*+(?=\s|$)|(?<![。！？｡।؟۔])[。！？｡।؟۔]++[\"'”’»)\]」』]*+")
_NEXT = re.compile(r"\s*[\"'“‘«(\[*_]*(\S)")
_LAST_WORD = re.compile(r"(\S+)$")
_LIST_NUMBER = re.compile(r"(?:^|\n)[ \t]*(?:[-*•][ \t]+)?\(?(?:[0-9]{1,3}|[A-Za-z]|[ivxIVX]{1,4})$")
# Those behind which a sentence does not end even if a capital follows.
_ABBREVIATIONS = frozenset(
    ("mr", "mrs", "ms", "dr", "prof", "st", "mt", "rev", "hon", "gen", "col", "capt", "lt", "sgt", "gov", "sen", "rep",
     "pres", "vs", "cf", "approx", "dept", "fig", "figs", "eq", "nos", "vol", "pp", "ed", "eds", "jan", "feb", "aug",
     "sept", "oct", "nov", "dec")
)  # fmt: skip
_CONTEXT_CHARS = 40


def count_words(text: str) -> int:
    """Runs of letters, digits and underscores: "don't" is two, "well-known" is two."""
    return sum(1 for _ in _WORD.finditer(text))


def count_capital_words(text: str) -> int:
    """Words all of whose letters are capitals. An apostrophe parts a word, a hyphen or full stop inside does not."""
    return sum(match[0].isupper() for match in _TOKEN.finditer(text))


def count_sentences(text: str) -> int:
    """Sentences, by the marks that end them.

    A sentence ends at ``.``, ``!``, ``?`` or ``…`` (any number, with closing quotes and brackets) before white space
    or at the end, and at a full-width mark (``。``) anywhere. It goes on where a small letter follows; behind a
    known abbreviation (``Dr.``), a single capital (``J. Smith``), letters with stops (``U.S.``) before a word,
    and the number of a list's item (``1.`` at the start of a line). New lines end nothing, as in the tokenizer of the
    IFEval reference. What stands behind the last mark is a sentence, if it has a letter or digit.
    """
    count, scanned, begun = 0, 0, False
    for match in _END.finditer(text):
        begun = begun or _WORD.search(text, scanned, match.start()) is not None
        scanned = match.end()
        if begun and not _goes_on(text, match):
            count, begun = count + 1, False
    return count + (begun or _WORD.search(text, scanned) is not None)


def _goes_on(text: str, match: re.Match[str]) -> bool:
    """Whether the mark does not end its sentence."""
    following = _NEXT.match(text, match.end(), match.end() + _CONTEXT_CHARS)
    if following is None:
        return False
    if following[1].islower():
        return match[0][0] in ".…" or match[0][-1] not in "!?"  # '"Stop!" he said.' is one sentence
    if match[0] != ".":
        return False
    before = text[max(0, match.start() - _CONTEXT_CHARS) : match.start()]
    if _LIST_NUMBER.search(before):
        return True
    last = _LAST_WORD.search(before)
    word = last[1].strip("\"'“‘«([*_") if last is not None else ""
    if len(word) == 1 and word.isupper():
        return word != "I"
    if "." in word and all(len(part) == 1 for part in word.split(".")):
        return True
    return word.lower() in _ABBREVIATIONS
