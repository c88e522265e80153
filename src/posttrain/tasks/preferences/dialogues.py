"""Dialogues written as one text: HH-RLHF's ``Human:`` and ``Assistant:`` behind blank lines."""

from __future__ import annotations

import re
from collections.abc import Sequence

from posttrain.tasks.collect import Dropped
from posttrain.types import Message

# A turn begins at the start of the text or behind a blank line; ``Human:`` anywhere else is part of what is said.
_TURN = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def parse_turns(text: str) -> tuple[Message, ...]:
    """The turns as they stand, without white space around them; one may be blank, or follow one of the same role.

    Raises:
        Dropped: no turn, or text before the first one.
    """
    before, *parts = _TURN.split(text)
    if not parts or before.strip():
        raise Dropped("the text does not begin with a turn ('Human:' or 'Assistant:')")
    return tuple(Message(_ROLES[name], said.strip()) for name, said in zip(parts[0::2], parts[1::2], strict=True))


def merge_turns(turns: Sequence[Message]) -> tuple[Message, ...]:
    """Turns of one role that follow one another as one message, a blank line between what they say.

    Chat templates ask for roles that alternate. A blank turn beside one of its own role disappears in it.

    Raises:
        Dropped: a blank turn that stands alone.
    """
    merged: list[Message] = []
    for turn in turns:
        if merged and merged[-1].role == turn.role:
            said = [text for text in (merged.pop().content, turn.content) if text]
            merged.append(Message(turn.role, "\n\n".join(said)))
        else:
            merged.append(turn)
    if any(not turn.content for turn in merged):
        raise Dropped("a blank turn")
    return tuple(merged)
