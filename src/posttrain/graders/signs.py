"""Convert digits and signs from other scripts to ASCII: full-width forms, Arabic-Indic digits, ..."""

from __future__ import annotations

import re
import unicodedata

_OFFSET = 0xFEE0  # from a full-width form to the character of ASCII
# Number signs. Omits the full-width comma, usually a list separator, and the tilde, which denotes ranges.
_SIGNS = str.maketrans(
    {
        **{chr(ord(sign) + _OFFSET): sign for sign in "+-.%/:()$"},
        "\u3000": " ", "\u066a": "%", "\u066b": ".", "\u066c": ",", "\ufe63": "-", "\ufe62": "+", "\ufe6a": "%",
        "\ufe69": "$",
    }
)  # fmt: skip
_LETTERS = str.maketrans({chr(code + _OFFSET): chr(code) for code in range(ord("!"), ord("~"))})
_DIGIT = re.compile("(?![0-9\U0001d7ce-\U0001d7ff])\\d")  # skip ornamental digits such as bold ones
# Between full-width digits, a comma followed by three digits separates thousands. Any other comma separates list items.
_THOUSANDS = re.compile(r"(?<=[０-９])，(?=[０-９]{3}(?![０-９]))")
_COMMA = re.compile("[，،]")


def fold_signs(text: str) -> str:
    """Convert digits of every script and number signs to ASCII. Letters are unchanged."""
    if text.isascii():
        return text
    text = _COMMA.sub(", ", _THOUSANDS.sub(",", text)).translate(_SIGNS)
    return _DIGIT.sub(lambda match: str(unicodedata.decimal(match[0])), text)


def fold_letters(text: str) -> str:
    """Like ``fold_signs``, also converting full-width letters and brackets."""
    if text.isascii():
        return text
    return fold_signs(text).translate(_LETTERS)
