"""Conversations: checking messages, and rendering them by the tokenizer's own chat template.

The template never sees the contents. It renders placeholders, which are then replaced by the
contents as pieces, so that no content can forge a turn marker or change what the template does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import jinja2

from posttrain.errors import UsageError
from posttrain.registry import suggest
from posttrain.render.encoding import Piece, markers_of
from posttrain.types import Message

ROLES = ("system", "user", "assistant")
# Private-use characters around a placeholder's number. Contents are never rendered, so none can hold
# one; a chat template that holds them would be refused as one that shows a message twice.
_OPEN, _CLOSE = "\ue0f1", "\ue0f2"
_PAD = " "
_ENDS: WeakKeyDictionary[Any, tuple[str, int | None]] = WeakKeyDictionary()


def check_messages(messages: Sequence[Message]) -> None:
    """A prompt needs messages, with known roles and some text, and the last is not the assistant's.

    Raises:
        UsageError: otherwise.
    """
    if not messages:
        raise UsageError("an empty prompt: the example has no messages")
    for number, message in enumerate(messages, start=1):
        if message.role not in ROLES:
            raise UsageError(
                f"message {number} has the role {message.role!r}.{suggest(message.role, ROLES)} "
                f"Known: {', '.join(ROLES)}"
            )
        if not message.content.strip():
            raise UsageError(f"an empty prompt: message {number} ({message.role}) has no text")
    if messages[-1].role == "assistant":
        raise UsageError("the last message of a prompt is the assistant's, so nothing is left to answer")


def chat_pieces(
    messages: Sequence[Message], tokenizer: Any, system: str = "", variables: Mapping[str, Any] | None = None
) -> list[Piece]:
    """The conversation by the tokenizer's chat template, up to where the assistant begins to speak.

    ``system`` is the recipe's own (trusted) system message; one from the data follows below it in the
    same message. ``variables`` are passed to the chat template.

    Raises:
        UsageError: no chat template, or it cannot render these messages.
    """
    check_messages(messages)
    contents: list[tuple[str, list[Piece]]] = [(m.role, [Piece(m.content, trusted=False)]) for m in messages]
    if system:
        own = [Piece(system, trusted=True)]
        if contents[0][0] == "system":
            own += [Piece("\n\n", trusted=True), *contents.pop(0)[1]]
        contents.insert(0, ("system", own))
    rendered = _render(tokenizer, [role for role, _ in contents], variables or {}, prompt=True)
    pieces: list[Piece] = []
    for number, (role, content) in enumerate(contents):
        placeholder = mark(number)
        padded = f"{_PAD}{placeholder}{_PAD}"
        trims = padded not in rendered  # the template strips contents: so do we
        before, separator, rendered = rendered.partition(placeholder if trims else padded)
        if not separator or placeholder in rendered:
            raise UsageError(
                f"the tokenizer's chat template does not show the {role} message exactly once, in order; "
                "choose a prompt.template that needs no chat template (plain, boxed, r1_zero)"
            )
        pieces.append(Piece(before, trusted=True))
        pieces += _strip_pieces(content) if trims else content
    return [*pieces, Piece(rendered, trusted=True)]


def _strip_pieces(pieces: list[Piece]) -> list[Piece]:
    first, last = pieces[0], pieces[-1]
    if first is last:
        return [Piece(first.text.strip(), first.trusted)]
    return [Piece(first.text.lstrip(), first.trusted), *pieces[1:-1], Piece(last.text.rstrip(), last.trusted)]


def turn_end(tokenizer: Any) -> int | None:
    """The id of the first special token behind an assistant's message in the chat template, or None.

    Raises:
        UsageError: no chat template.
    """
    template = tokenizer.chat_template
    known = _ENDS.get(tokenizer)
    if known is not None and known[0] == template:
        return known[1]
    rendered = _render(tokenizer, ["user", "assistant"], {}, prompt=False)
    _, _, tail = rendered.partition(mark(1))
    end = next((index for _, _, index in markers_of(tokenizer).find(tail)), None)
    _ENDS[tokenizer] = (template, end)
    return end


def mark(number: int) -> str:
    """A placeholder for a content."""
    return f"{_OPEN}{number}{_CLOSE}"


def _render(tokenizer: Any, roles: Sequence[str], variables: Mapping[str, Any], *, prompt: bool) -> str:
    """The chat template's text for messages whose contents are placeholders."""
    turns = [(role, f"{_PAD}{mark(number)}{_PAD}") for number, role in enumerate(roles)]
    return render_history(tokenizer, turns, variables, prompt=prompt)


def render_history(
    tokenizer: Any, turns: Sequence[tuple[str, str]], variables: Mapping[str, Any], *, prompt: bool
) -> str:
    """The chat template's text for messages, by role and content (trusted, as placeholders are).

    Raises:
        UsageError: no chat template, or it cannot render these roles.
    """
    if not tokenizer.chat_template:
        raise UsageError(
            "the tokenizer has no chat template. Choose a prompt.template that needs none (plain, r1_zero, boxed, "
            "dialogue for several turns, or xml_reasoning with `chat: false`), or a model that has one"
        )
    conversation = [{"role": role, "content": content} for role, content in turns]
    try:
        rendered = tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=prompt, **dict(variables)
        )
    except (jinja2.TemplateError, ValueError, TypeError) as error:
        raise UsageError(
            f"the tokenizer's chat template cannot render the roles {', '.join(role for role, _ in turns)}: {error}. "
            "Leave out the message that it refuses, or choose another prompt.template"
        ) from error
    return str(rendered)
