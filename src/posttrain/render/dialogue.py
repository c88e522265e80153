"""Conversations as plain text, for models without turn markers: ``User: …``, one paragraph for each message.

Here the marks of a turn are ordinary characters, so a message could write them, too. A line of a message that
would look like the start of a turn is therefore quoted with ``>``, as mail programs quote a line that begins with
``From``. Quoting can be undone exactly: ``style.read(style.write(messages)) == messages``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from posttrain.render.encoding import Piece
from posttrain.render.turns import check_messages
from posttrain.types import Message

# What a reader may take for the end of a line, and for space within one.
_BREAK = "[\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]"
_SPACE = rf"(?:(?!{_BREAK})\s)*"


@dataclass(frozen=True)
class Dialogue:
    """How turns are written: the name of each role, and what stands between two turns (it ends a line)."""

    system: str = "System"
    user: str = "User"
    assistant: str = "Assistant"
    separator: str = "\n"

    @property
    def names(self) -> Mapping[str, str]:
        """Role to name."""
        return {"system": self.system, "user": self.user, "assistant": self.assistant}

    @cached_property
    def _looks_like_a_turn(self) -> str:
        return rf">*{_SPACE}(?:{'|'.join(map(re.escape, self.names.values()))}){_SPACE}:"

    def pieces(self, messages: Sequence[Message]) -> list[Piece]:
        """One paragraph per message; the names are trusted, the contents are not.

        Raises:
            UsageError: no messages, a blank one, an unknown role, or the last is the assistant's.
        """
        check_messages(messages)
        pieces: list[Piece] = []
        for number, message in enumerate(messages):
            name = Piece(f"{self.separator if number else ''}{self.names[message.role]}: ", trusted=True)
            pieces += [name, Piece(self.quote(message.content), trusted=False)]
        return pieces

    def write(self, messages: Sequence[Message]) -> str:
        """The text of ``pieces``."""
        return "".join(piece.text for piece in self.pieces(messages))

    def read(self, text: str) -> tuple[Message, ...]:
        """Who said what in a text that ``write`` wrote.

        Raises:
            ValueError: the text does not begin with a turn.
        """
        roles = {name: role for role, name in self.names.items()}
        known = "|".join(map(re.escape, roles))
        starts = list(re.finditer(rf"(?:\A|{re.escape(self.separator)})({known}): ", text))
        if not starts or starts[0].start() != 0:
            raise ValueError(f"a dialogue begins with one of {', '.join(f'{name}: ' for name in roles)}")
        ends = [match.start() for match in starts[1:]] + [len(text)]
        quoted = re.compile(f"({_BREAK})>(?={self._looks_like_a_turn})", re.IGNORECASE)
        return tuple(
            Message(roles[match[1]], quoted.sub(r"\1", text[match.end() : end]))
            for match, end in zip(starts, ends, strict=True)
        )

    def quote(self, content: str) -> str:
        """``content`` with ``>`` before each line that looks like the start of a turn (``Assistant: …``)."""
        return re.sub(f"({_BREAK})(?={self._looks_like_a_turn})", r"\1>", content, flags=re.IGNORECASE)


PARAGRAPHS = Dialogue()
