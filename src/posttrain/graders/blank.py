"""Whether a text has anything to see in it: one meaning of "there is an answer" for all graders and rewards."""

from __future__ import annotations

import unicodedata

# Controls, formats (zero-width space, byte order mark), surrogates, private and unassigned characters, separators;
# marks, which are seen only on a letter.
_UNSEEN = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zs", "Zl", "Zp", "Mn", "Mc", "Me"))
# Of other categories and yet without ink: Hangul fillers, the Braille cell without dots, a note without a head, and
# what stands for an object or for bytes that are no text.
_WITHOUT_INK = frozenset("\u115f\u1160\u3164\uffa0\u2800\U0001d159\ufffc\ufffd")


def is_blank(text: str) -> bool:
    """Whether nothing in the text can be seen: no characters, or only spaces, controls, marks and fillers."""
    return all(letter in _WITHOUT_INK or unicodedata.category(letter) in _UNSEEN for letter in text)
