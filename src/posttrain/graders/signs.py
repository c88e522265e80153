"""Digits and signs of other scripts in plain ASCII: full-width forms, Arabic-Indic digits, ..."""

from __future__ import annotations

import re
import unicodedata

_OFFSET = 0xFEE0  # from a full-width form to the character of ASCII
# Signs of numbers. The full-width comma is missing, which mostly parts what is listed, and the tilde, which is a range.
_SIGNS = str.maketrans(
    {
        **{chr(ord(sign) + _OFFSET): sign for sign in "+-.%/:()$"},
        "\u3000": " ", "\u066a": "%", "\u066b": ".", "\u066c": ",", "\ufe63": "-", "\ufe62": "+", "\ufe6a": "%",
        "\ufe69": "$",
    }
)  # fmt: skip
_LETTERS = str.maketrans({chr(code + _OFFSET): chr(code) for code in range(ord("!"), ord("~"))})
_DIGIT = re.compile("(?![0-9\U0001d7ce-\U0001d7ff])\\d")  # ornaments such as bold digits are no script
# A comma between full-width digits parts thousands where three digits follow it; any other parts what is listed.
_THOUSANDS = re.compile(r"(?<=[０-９])，(?=[０-９]{3}(?![０-９]))")
_COMMA = re.compile("[，،]")


def fold_signs(text: str) -> str:
    """Return the text with the digits of every script and the signs of numbers as ASCII; letters stay."""
    if text.isascii():
        return text
    text = _COMMA.sub(", ", _THOUSANDS.sub(",", text)).translate(_SIGNS)
    return _DIGIT.sub(lambda match: str(unicodedata.decimal(match[0])), text)


def fold_letters(text: str) -> str:
    """Return the text as ``fold_signs`` does, with full-width letters and brackets as ASCII, too."""
    if text.isascii():
        return text
    return fold_signs(text).translate(_LETTERS)
