"""Conversations as plain text, for models without turn markers: ``User: …``, one paragraph for each message.

Here the marks of a turn are ordinary characters, so a message could write them, too. A line of a message that
would look like the start of a turn is therefore quoted with ``>``, as mail programs quote a line that begins with
``From``. Quoting can be undone exactly: ``read_dialogue(write_dialogue(messages)) == messages``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from posttrain.render.encoding import Piece
from posttrain.render.turns import check_messages
from posttrain.types import Message

NAMES = {"system": "System", "user": "User", "assistant": "Assistant"}
_ROLES = {name: role for role, name in NAMES.items()}
# What a reader may take for the end of a line, and what he may take for a name at the start of the next.
_BREAK = "[\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]"
_SPACE = rf"(?:(?!{_BREAK})\s)*"
_LOOKS_LIKE_A_TURN = rf">*{_SPACE}(?:{'|'.join(NAMES.values())}){_SPACE}:"
_TO_QUOTE = re.compile(f"({_BREAK})(?={_LOOKS_LIKE_A_TURN})", re.IGNORECASE)
_QUOTED = re.compile(f"({_BREAK})>(?={_LOOKS_LIKE_A_TURN})", re.IGNORECASE)
_TURN = re.compile(rf"(?:\A|\n)({'|'.join(NAMES.values())}): ")


def dialogue_pieces(messages: Sequence[Message]) -> list[Piece]:
    """``User: …`` paragraphs, one per message; the names are trusted, the contents are not.

    Raises:
        UsageError: no messages, a blank one, an unknown role, or one that ends with the assistant's.
    """
    check_messages(messages)
    pieces: list[Piece] = []
    for number, message in enumerate(messages):
        name = Piece(f"{chr(10) if number else ''}{NAMES[message.role]}: ", trusted=True)
        pieces += [name, Piece(quote_turns(message.content), trusted=False)]
    return pieces


def write_dialogue(messages: Sequence[Message]) -> str:
    """The text of ``dialogue_pieces``."""
    return "".join(piece.text for piece in dialogue_pieces(messages))


def read_dialogue(text: str) -> tuple[Message, ...]:
    """Who said what in a text that ``write_dialogue`` wrote.

    Raises:
        ValueError: the text does not begin with a turn.
    """
    starts = list(_TURN.finditer(text))
    if not starts or starts[0].start() != 0:
        raise ValueError(f"a dialogue begins with one of {', '.join(f'{name}: ' for name in _ROLES)}")
    ends = [match.start() for match in starts[1:]] + [len(text)]
    return tuple(
        Message(_ROLES[match[1]], _QUOTED.sub(r"\1", text[match.end() : end]))
        for match, end in zip(starts, ends, strict=True)
    )


def quote_turns(content: str) -> str:
    """``content`` with ``>`` before each line that looks like the start of a turn (``Assistant: …``)."""
    return _TO_QUOTE.sub(r"\1>", content)
