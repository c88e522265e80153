"""Conversations: checking messages, and rendering them by the tokenizer's own chat template.

The template never sees the contents. It renders placeholders, which are then replaced by the
contents as pieces, so that no content can forge a turn marker or change what the template does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from posttrain.errors import UsageError
from posttrain.registry import suggest
from posttrain.render.calls import TAGGED, write_call
from posttrain.render.encoding import Piece, mark_tags, markers_of
from posttrain.types import Call, Message

ROLES = ("system", "user", "assistant", "tool")
# Private-use characters around a placeholder's number. Contents are never rendered, so none can hold
# one; a chat template that holds them would be refused as one that shows a message twice. A placeholder inside of a
# call or a schema holds a quotation mark: where it comes out with a backslash, the template has written JSON.
_OPEN, _CLOSE = "\ue0f1", "\ue0f2"
_MARK = re.compile(f'({_OPEN}|\\\\ue0f1)(\\d+)(\\\\?"|)({_CLOSE}|\\\\ue0f2)')
_PAD = " "
_PROBED: WeakKeyDictionary[Any, dict[tuple[str, ...], Any]] = WeakKeyDictionary()
Dicts = list[dict[str, Any]]
Found = TypeVar("Found")


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
        if not message.content.strip() and not message.calls and message.role != "tool":
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
    shown = with_reasoning(tokenizer, messages, variables or {})
    return render_pieces(tokenizer, shown, system, variables or {}, prompt=True)[0]


def with_reasoning(tokenizer: Any, messages: Sequence[Message], variables: Mapping[str, Any]) -> tuple[Message, ...]:
    """The messages with their reasoning where the chat template shows it: apart, or else in the content."""
    if not any(message.role == "assistant" and _thinks(message) for message in messages):
        return tuple(messages)
    if any(message.role == "assistant" and _closes(message) for message in messages):
        prompt = render_dicts(
            tokenizer,
            [{"role": "user", "content": "a"}],
            {k: v for k, v in variables.items() if k != "tools"},
            prompt=True,
        )
        is_open = re.search(r"<think>\s*\Z", prompt) is not None
        messages = [
            replace(m, content=f"<think>{m.content}") if is_open and m.role == "assistant" and _closes(m) else m
            for m in messages
        ]
    asked = [Message("user", "a"), Message("assistant", "b", reasoning="c")]
    hidden = render_pieces(tokenizer, asked, "", variables, prompt=False)[1]
    return tuple(_with_reasoning(message, apart=not hidden) for message in messages)


def _thinks(message: Message) -> bool:
    return message.reasoning is not None or message.content.lstrip().startswith("<think>") or _closes(message)


def _closes(message: Message) -> bool:
    """Whether the text closes a block of thinking that it has not opened: a prompt may have."""
    before, closed, _ = message.content.partition("</think>")
    return message.reasoning is None and bool(closed) and "<think>" not in before


def _with_reasoning(message: Message, *, apart: bool) -> Message:
    if message.role != "assistant" or not _thinks(message):
        return message
    if not apart:
        return replace(message, content=message.text, reasoning=None)
    thinking, closed, answer = message.content.partition("</think>")
    if message.reasoning is not None or not closed or not answer.strip():
        return message
    reasoning = thinking.partition("<think>")[2].strip("\n")
    return replace(message, content=answer.lstrip("\n"), reasoning=reasoning) if reasoning.strip() else message


def spell(messages: Sequence[Message]) -> list[Message]:
    """The messages for a template that has roles and contents alone.

    Raises:
        UsageError: a message with a name.
    """
    for number, message in enumerate(messages, start=1):
        if message.name is not None and message.role != "tool":
            raise UsageError(
                f"message {number}: the prompt template does not show the name {message.name!r}. Write it into the "
                "content, or leave names out by task.ignore_keys: [name]"
            )
    texts = [message if message.reasoning is None else replace(message, content=message.text) for message in messages]
    return spell_calls(texts, results="user")


def render_pieces(
    tokenizer: Any, messages: Sequence[Message], system: str, variables: Mapping[str, Any], *, prompt: bool
) -> tuple[list[Piece], set[int]]:
    """The pieces of a conversation, and which of its messages have reasoning that the chat template does not show.

    Where the template has no form for calls, they are written into the content, and results, where it has no role for
    them, as messages of the user.

    Raises:
        UsageError: no chat template, or it cannot render these messages.
    """
    if any(message.calls for message in messages):
        messages = _in_its_form(tokenizer, messages, variables)
    return _Sheet(tokenizer, system, variables).render(messages, prompt=prompt)


def _in_its_form(tokenizer: Any, messages: Sequence[Message], variables: Mapping[str, Any]) -> Sequence[Message]:
    """The messages with their calls as the chat template can show them, told by a short conversation of our own."""

    def find(settings: Mapping[str, Any]) -> str:
        calling = Message("assistant", "", calls=(Call("f", '{"a": "b"}', "", "ok"),))
        asked = [Message("user", "q"), calling, Message("tool", "r"), Message("assistant", "s")]
        for name, probe in (("own", asked), ("tool", spell_calls(asked))):
            with suppress(UsageError):
                _Sheet(tokenizer, "", settings).render(probe, prompt=False)
                return name
        return "user"

    form = probed(tokenizer, "calls", variables, find)
    return messages if form == "own" else spell_calls(messages, results=form)


def spell_calls(messages: Sequence[Message], results: str = "tool") -> list[Message]:
    """The messages with their calls in the content; results may become messages of the user, one for each turn."""
    spelled: list[Message] = []
    is_result = False  # of the message before
    for message in messages:
        if message.calls:
            calls = "\n".join("".join(p.text for p in write_call(call, TAGGED)) for call in message.calls)
            content = f"{message.content}\n{calls}" if message.content else calls
            message = replace(message, content=content, calls=())
        elif message.role == "tool" and results != "tool":
            opening, closing = TAGGED.results
            content = f"{opening}{message.content}{closing}"
            before = f"{spelled.pop().content}\n" if is_result else ""
            is_result = True
            spelled.append(Message(results, before + content))
            continue
        is_result = False
        spelled.append(message)
    return spelled


class RowText(str):
    """A text of a row among the variables of a chat template: not trusted, as the recipe's own are."""

    __slots__ = ()


def as_row_texts(value: Any) -> Any:
    """Nested values of a row with each of their texts as ``RowText``."""
    if isinstance(value, Mapping):
        return {key: as_row_texts(one) for key, one in value.items()}
    if isinstance(value, list):
        return [as_row_texts(one) for one in value]
    return RowText(value) if isinstance(value, str) else value


class _Sheet:
    """Texts by the number of their placeholder, for one conversation in one chat template."""

    def __init__(self, tokenizer: Any, system: str, variables: Mapping[str, Any]) -> None:
        self.tokenizer, self.markers = tokenizer, markers_of(tokenizer)
        self.system = system
        self.texts: list[list[Piece]] = []
        self.contents: list[tuple[int, str]] = []  # (number, role) of what must be shown once, in this order
        self.reasoning: dict[int, int] = {}  # number of a placeholder: index of the message
        self.needed: list[tuple[int, str]] = []  # (number, what) that must be shown at least once
        self.variables = {key: self._guard(value) for key, value in variables.items()}

    def render(self, messages: Sequence[Message], *, prompt: bool) -> tuple[list[Piece], set[int]]:
        """See ``render_pieces``."""
        rows, called = [], list[str]()
        if self.system:
            own = [Piece(self.system, trusted=True)]
            if messages[0].role == "system":
                own += [Piece("\n\n", trusted=True), Piece(messages[0].content, trusted=False)]
                messages = messages[1:]
            rows.append({"role": "system", "content": self._content("system", own)})
        rows += [self._message(index, message, called) for index, message in enumerate(messages)]
        try:
            rendered = render_dicts(self.tokenizer, rows, self.variables, prompt=prompt)
        except UsageError:
            if not any(message.calls for message in messages):
                raise
            rendered = render_dicts(self.tokenizer, _arguments_as_text(rows), self.variables, prompt=prompt)
        return self._fill(rendered)

    def _message(self, index: int, message: Message, called: list[str]) -> dict[str, Any]:
        row: dict[str, Any] = {"role": message.role, "content": ""}
        if message.reasoning is not None:
            number = self._add([Piece(message.reasoning.strip("\n"), trusted=False)])
            self.reasoning[number] = index
            row |= dict.fromkeys(("reasoning_content", "thinking"), mark(number))
        if message.content:
            content = [Piece(message.content, trusted=False)]
            row["content"] = self._content(message.role, mark_tags(content) if message.role == "assistant" else content)
        if message.name is not None:
            row["name"] = self._leaf(message.name, None if message.role == "tool" else f"the name {message.name!r}")
        if message.calls:
            row["tool_calls"] = [
                {
                    "id": f"call{len(self.texts):05d}",  # of nine letters and digits, as some templates ask for
                    "type": "function",
                    "function": {
                        "name": self._leaf(call.tool, f"the call of {call.tool!r}"),
                        "arguments": self._leaves(json.loads(call.stated), f"the call of {call.tool!r}"),
                    },
                }
                for call in message.calls
            ]
            called[:] = [call["id"] for call in row["tool_calls"]]
        elif message.role == "tool":
            row["tool_call_id"] = called.pop(0) if called else ""
        return row

    def _add(self, pieces: list[Piece]) -> int:
        self.texts.append(pieces)
        return len(self.texts) - 1

    def _content(self, role: str, pieces: list[Piece]) -> str:
        number = self._add(pieces)
        self.contents.append((number, role))
        quote = '"' if role == "tool" else ""  # some templates write results as JSON
        return f"{_PAD}{_OPEN}{number}{quote}{_CLOSE}{_PAD}"

    def _leaf(self, text: str, needed: str | None) -> str:
        number = self._add([Piece(text, trusted=False)])
        if needed is not None:
            self.needed.append((number, needed))
        return f'{_OPEN}{number}"{_CLOSE}'

    def _leaves(self, value: Any, needed: str) -> Any:
        """Nested values with a placeholder for each text."""
        if isinstance(value, Mapping):
            self._check_names(value)
            return {key: self._leaves(one, needed) for key, one in value.items()}
        if isinstance(value, list):
            return [self._leaves(one, needed) for one in value]
        return self._leaf(value, needed) if isinstance(value, str) else value

    def _guard(self, value: Any) -> Any:
        """Nested values of a variable with a placeholder for each text of a row that holds one of the markers."""
        if isinstance(value, Mapping):
            self._check_names(value)
            return {key: self._guard(one) for key, one in value.items()}
        if isinstance(value, list):
            return [self._guard(one) for one in value]
        return self._leaf(value, None) if isinstance(value, RowText) and any(self.markers.find(value)) else value

    def _check_names(self, value: Mapping[str, Any]) -> None:
        """Refuse names of arguments that could be read as a marker: the chat template writes them itself."""
        bad = next((key for key in value if "<" in key or any(self.markers.find(key))), None)
        if bad is not None:
            raise UsageError(f"the name {bad!r} of an argument could be read as a special token; rename it")

    def _fill(self, rendered: str) -> tuple[list[Piece], set[int]]:
        """The rendered text with the texts in place of their placeholders."""
        matches = list(_MARK.finditer(rendered))
        order = [int(match[2]) for match in matches]
        self._check(order)
        contents = {number for number, _ in self.contents}
        pieces, at = list[Piece](), 0
        for match in matches:
            number, start, end = int(match[2]), match.start(), match.end()
            text = self.texts[number]
            if number in contents and rendered[max(start - 1, at) : start] == rendered[end : end + 1] == _PAD:
                start, end = start - 1, end + 1
            elif number in contents:  # the template strips contents: so do we
                text = _strip_pieces(text)
            pieces.append(Piece(rendered[at:start], trusted=True))
            pieces += [Piece(_as_around(piece.text, match), piece.trusted) for piece in text]
            at = end
        hidden = {index for number, index in self.reasoning.items() if number not in order}
        return [*pieces, Piece(rendered[at:], trusted=True)], hidden

    def _check(self, order: list[int]) -> None:
        wanted = [number for number, _ in self.contents]
        for number, role in self.contents:
            place = [n for n in order if n in wanted]
            if place.count(number) != 1 or place.index(number) != wanted.index(number):
                raise UsageError(
                    f"the tokenizer's chat template does not show the {role} message exactly once, in order; "
                    "choose a prompt.template that needs no chat template (plain, boxed, r1_zero)"
                )
        for number, what in self.needed:
            if number not in order:
                raise UsageError(
                    f"the tokenizer's chat template does not show {what} of a message. Write it into the content, or "
                    "leave it out of the row (a name of all rows: task.ignore_keys: [name])"
                )


def _as_around(text: str, match: re.Match[str]) -> str:
    """A text as the template wrote its placeholder: as it is, inside of JSON, or as Python shows it."""
    is_ascii = match[1] != _OPEN
    if match[3] == '\\"':
        return json.dumps(text, ensure_ascii=is_ascii)[1:-1]
    return repr(text)[1:-1] if is_ascii else text


def _arguments_as_text(rows: Dicts) -> Dicts:
    """The messages with the arguments of calls as JSON text, which some chat templates ask for."""

    def as_text(call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        return {**call, "function": {**function, "arguments": arguments}}

    return [
        row | ({"tool_calls": [as_text(c) for c in row["tool_calls"]]} if "tool_calls" in row else {}) for row in rows
    ]


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

    def find(settings: Mapping[str, Any]) -> int | None:
        turns = [(role, f"{_PAD}{mark(number)}{_PAD}") for number, role in enumerate(("user", "assistant"))]
        _, _, tail = render_history(tokenizer, turns, settings, prompt=False).partition(mark(1))
        return next((index for _, _, index in markers_of(tokenizer).find(tail)), None)

    return probed(tokenizer, "end", {}, find)


def probed(
    tokenizer: Any, what: str, variables: Mapping[str, Any], find: Callable[[Mapping[str, Any]], Found]
) -> Found:
    """What ``find`` reads off the chat template with these variables but the tools, computed once for each of them."""
    settings = {key: value for key, value in variables.items() if key != "tools"}
    key = (what, str(tokenizer.chat_template), repr(sorted(settings.items(), key=lambda item: item[0])))
    known = _PROBED.setdefault(tokenizer, {})
    if key not in known:
        known[key] = find(settings)
    found: Found = known[key]
    return found


def mark(number: int) -> str:
    """A placeholder for a content."""
    return f"{_OPEN}{number}{_CLOSE}"


def render_history(
    tokenizer: Any, turns: Sequence[tuple[str, str]], variables: Mapping[str, Any], *, prompt: bool
) -> str:
    """The chat template's text for messages, by role and content (trusted, as placeholders are).

    Raises:
        UsageError: no chat template, or it cannot render these roles.
    """
    rows = [{"role": role, "content": content} for role, content in turns]
    return render_dicts(tokenizer, rows, variables, prompt=prompt)


def render_dicts(tokenizer: Any, rows: Dicts, variables: Mapping[str, Any], *, prompt: bool) -> str:
    """The chat template's text for messages as it takes them.

    Raises:
        UsageError: no chat template, or it cannot render these messages.
    """
    if not tokenizer.chat_template:
        raise UsageError(
            "the tokenizer has no chat template. Choose a prompt.template that needs none (plain, r1_zero, boxed, "
            "dialogue for several turns), or a model that has one"
        )
    try:
        rendered = tokenizer.apply_chat_template(rows, tokenize=False, add_generation_prompt=prompt, **dict(variables))
    except Exception as error:  # whatever a template of others raises
        roles, reason = ", ".join(row["role"] for row in rows), str(error)[:500]
        raise UsageError(
            f"the tokenizer's chat template cannot render the roles {roles}: {reason}. "
            "Leave out the message that it refuses, or choose another prompt.template"
        ) from error
    return str(rendered)
