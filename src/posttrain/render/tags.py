"""The tags that an assistant writes, in a text of which nothing else may become a special token."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from posttrain.render.encoding import Piece

THINK, END_THINK = "<think>", "</think>"
# Pairs of tags that an assistant writes. The second alone is a tag only where the prompt has opened the block.
_PAIRED = [
    re.compile(f"({re.escape(opening)}).*?({re.escape(closing)})", re.DOTALL)
    for opening, closing in ((THINK, END_THINK), ("[THINK]", "[/THINK]"), ("<tool_call>", "</tool_call>"))
]


def mark_tags(pieces: Sequence[Piece], names: Sequence[str] = (), *, is_open: bool = False) -> list[Piece]:
    """The same text with the tags of an assistant in trusted pieces.

    Args:
        names: of the tags of the prompt template.
        is_open: a block of thinking is open before the text, so that the first closing tag is one.
    """
    marked: list[Piece] = []
    is_first = True
    for piece in pieces:
        if piece.trusted or not piece.text:
            is_open = is_open and END_THINK not in piece.text
            marked.append(piece)
        else:
            spans = list(_tags(piece.text, names, is_open, is_first))
            is_open = is_open and END_THINK not in piece.text
            at = 0
            for start, end in sorted(set(spans)):
                if start >= at:
                    marked += [Piece(piece.text[at:start], trusted=False), Piece(piece.text[start:end], trusted=True)]
                    at = end
            marked.append(Piece(piece.text[at:], trusted=False))
        is_first = is_first and not piece.text.strip()
    return [piece for piece in marked if piece.text]


def _tags(text: str, names: Sequence[str], is_open: bool, is_first: bool) -> Iterator[tuple[int, int]]:
    """Where the tags stand."""
    at = 0
    if is_open and END_THINK in text:
        at = text.index(END_THINK) + len(END_THINK)
        yield at - len(END_THINK), at
    for number, paired in enumerate(_PAIRED):
        for match in paired.finditer(text, 0 if number else at):
            yield from (match.span(1), match.span(2))
    start = len(text) - len(text.lstrip())
    if is_first and not is_open and text.startswith(THINK, start):  # cut off within its thinking
        yield start, start + len(THINK)
    if names:
        known = "|".join(map(re.escape, names))
        yield from (match.span() for match in re.finditer(rf"</?(?:{known})>", text))


def drop_text(pieces: Sequence[Piece], length: int) -> list[Piece]:
    """The pieces behind the first ``length`` characters."""
    rest = []
    for piece in pieces:
        if length < len(piece.text):
            rest.append(Piece(piece.text[length:], piece.trusted))
        length = max(0, length - len(piece.text))
    return rest
