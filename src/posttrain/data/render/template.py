"""Prompt templates, and conversations as the tokenizer's own chat template renders them.

A chat template never sees the contents. It renders placeholders, which are then replaced by the contents as pieces, so
that no content can forge a turn marker or change what the template does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary

from posttrain import registry
from posttrain.data.render.calls import TAGGED, write_call
from posttrain.data.render.encoding import END_THINK, THINK, Piece, Tokenizer, encode_pieces, mark_tags, markers_of
from posttrain.errors import UsageError
from posttrain.recipes.sections import Component
from posttrain.registry import suggest
from posttrain.types import Call, Example, Message

ROLES = ("system", "user", "assistant", "tool")
# Private-use characters around a placeholder's number. Contents are never rendered, so none can hold
# one; a chat template that holds them would be refused as one that shows a message twice. A placeholder inside of a
# call or a schema holds a quotation mark: where it comes out with a backslash, the template has written JSON.
_OPEN, _CLOSE = "\ue0f1", "\ue0f2"
_MARK = re.compile(f'({_OPEN}|\\\\ue0f1)(\\d+)(\\\\?"|)({_CLOSE}|\\\\ue0f2)')
_PAD = " "
_PROBED: WeakKeyDictionary[Any, dict[tuple[str, ...], Any]] = WeakKeyDictionary()
OPENED = re.compile(r"<think>\s*\Z")
# An empty block of thinking that some chat templates write into the last turn alone.
EMPTY_THINKING = re.compile(r"\A<think>\s*</think>\s*")
Found = TypeVar("Found")


def check_messages(messages: Sequence[Message]) -> None:
    """Refuse a prompt that has no messages, an unknown role or a blank message, or ends with the assistant's.

    Raises:
        UsageError: it is such a prompt.
    """
    if not messages:
        raise UsageError(
            "an empty prompt: the example has no messages; a text to read is trained under prompt.template document"
        )
    for number, message in enumerate(messages, start=1):
        if message.role not in ROLES:
            known = f"{suggest(message.role, ROLES)} Known: {', '.join(ROLES)}"
            raise UsageError(f"message {number} has the role {message.role!r}.{known}")
        if not message.content.strip() and not message.calls and message.role != "tool":
            raise UsageError(f"an empty prompt: message {number} ({message.role}) has no text")
    if messages[-1].role == "assistant":
        raise UsageError("the last message of a prompt is the assistant's, so nothing is left to answer")


def chat_pieces(
    messages: Sequence[Message], tokenizer: Tokenizer, system: str = "", variables: Mapping[str, object] | None = None
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


def with_reasoning(
    tokenizer: Tokenizer, messages: Sequence[Message], variables: Mapping[str, Any]
) -> tuple[Message, ...]:
    """The messages with their reasoning where the chat template shows it: apart, or else in the content."""

    def closes(message: Message) -> bool:
        """Return True if the text closes a block of thinking that it has not opened: a prompt may have."""
        before, closed, _ = message.content.partition(END_THINK)
        return message.role == "assistant" and message.reasoning is None and bool(closed) and THINK not in before

    def thinks(message: Message) -> bool:
        is_inline = message.content.lstrip().startswith(THINK) or closes(message)
        return message.role == "assistant" and (message.reasoning is not None or is_inline)

    def change(message: Message) -> Message:
        if not thinks(message):
            return message
        if hidden:
            return replace(message, content=message.text, reasoning=None)
        thinking, closed, answer = message.content.partition(END_THINK)
        reasoning = thinking.partition(THINK)[2].strip("\n")
        if message.reasoning is not None or not closed or not answer.strip() or not reasoning.strip():
            return message
        return replace(message, content=answer.lstrip("\n"), reasoning=reasoning)

    if not any(map(thinks, messages)):
        return tuple(messages)
    if any(map(closes, messages)):
        plain = {key: value for key, value in variables.items() if key != "tools"}
        if OPENED.search(render_dicts(tokenizer, [{"role": "user", "content": "a"}], plain, prompt=True)):
            messages = [replace(m, content=THINK + m.content) if closes(m) else m for m in messages]
    probe = [Message("user", "a"), Message("assistant", "b", reasoning="c")]
    hidden = render_pieces(tokenizer, probe, "", variables, prompt=False)[1]
    return tuple(map(change, messages))


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
    return spell_calls([replace(m, content=m.text, reasoning=None) for m in messages], results="user")


def render_pieces(
    tokenizer: Tokenizer, messages: Sequence[Message], system: str, variables: Mapping[str, object], *, prompt: bool
) -> tuple[list[Piece], set[int]]:
    """The pieces of a conversation, and which of its messages have reasoning that the chat template does not show.

    Where the template has no form for calls, they are written into the content, and results, where it has no role for
    them, as messages of the user; a short conversation of our own shows it.

    Raises:
        UsageError: no chat template, or it cannot render these messages.
    """

    def find(settings: Mapping[str, Any]) -> str:
        calling = Message("assistant", "", calls=(Call("f", '{"a": "b"}', "", "ok"),))
        probe = [Message("user", "q"), calling, Message("tool", "r"), Message("assistant", "s")]
        for name, written in (("own", probe), ("tool", spell_calls(probe))):
            with suppress(UsageError):
                _Sheet(tokenizer, "", settings).render(written, prompt=False)
                return name
        return "user"

    if any(message.calls for message in messages):
        form = probed(tokenizer, "calls", variables, find)
        messages = messages if form == "own" else spell_calls(messages, results=form)
    return _Sheet(tokenizer, system, variables).render(messages, prompt=prompt)


def spell_calls(messages: Sequence[Message], results: str = "tool") -> list[Message]:
    """The messages with their calls in the content; results may become messages of the user, one for each turn."""
    spelled: list[Message] = []
    for number, message in enumerate(messages):
        if message.calls:
            calls = ["".join(piece.text for piece in write_call(call, TAGGED)) for call in message.calls]
            content = "\n".join([message.content, *calls] if message.content else calls)
            message = replace(message, content=content, calls=())
        elif message.role == "tool" and results != "tool":
            before = f"{spelled.pop().content}\n" if number and messages[number - 1].role == "tool" else ""
            opening, closing = TAGGED.results
            message = Message(results, f"{before}{opening}{message.content}{closing}")
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

    def __init__(self, tokenizer: Tokenizer, system: str, variables: Mapping[str, object]) -> None:
        self.tokenizer, self.markers = tokenizer, markers_of(tokenizer)
        self.system = system
        self.texts: list[list[Piece]] = []
        self.contents: dict[int, str] = {}  # number: role of what must be shown once, in this order
        self.reasoning: dict[int, int] = {}  # number of a placeholder: index of the message
        self.needed: dict[int, str] = {}  # number: what must be shown at least once
        self.variables = {key: self._leaves(value, None) for key, value in variables.items()}

    def render(self, messages: Sequence[Message], *, prompt: bool) -> tuple[list[Piece], set[int]]:
        """See ``render_pieces``."""
        rows, called = list[dict[str, Any]](), list[str]()
        if self.system:
            own = [Piece(self.system, trusted=True)]
            if messages[0].role == "system":
                own += [Piece("\n\n", trusted=True), Piece(messages[0].content, trusted=False)]
                messages = messages[1:]
            rows.append({"role": "system", "content": self._content("system", own)})
        rows += [self._message(index, message, called) for index, message in enumerate(messages)]
        return self._fill(render_dicts(self.tokenizer, rows, self.variables, prompt=prompt))

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
            row["name"] = self._leaf(message.name, "" if message.role == "tool" else f"the name {message.name!r}")
        if message.calls:
            row["tool_calls"] = []
            for call in message.calls:
                what = f"the call of {call.tool!r}"
                name, arguments = self._leaf(call.tool, what), self._leaves(json.loads(call.raw_arguments), what)
                id = f"call{len(self.texts):05d}"  # of nine letters and digits, as some templates ask for
                function = {"name": name, "arguments": arguments}
                row["tool_calls"].append({"id": id, "type": "function", "function": function})
            called[:] = [call["id"] for call in row["tool_calls"]]
        elif message.role == "tool":
            row["tool_call_id"] = called.pop(0) if called else ""
        return row

    def _add(self, pieces: list[Piece]) -> int:
        self.texts.append(pieces)
        return len(self.texts) - 1

    def _content(self, role: str, pieces: list[Piece]) -> str:
        number = self._add(pieces)
        self.contents[number] = role
        quote = '"' if role == "tool" else ""  # some templates write results as JSON
        return f"{_PAD}{_OPEN}{number}{quote}{_CLOSE}{_PAD}"

    def _leaf(self, text: str, needed: str) -> str:
        number = self._add([Piece(text, trusted=False)])
        if needed:
            self.needed[number] = needed
        return f'{_OPEN}{number}"{_CLOSE}'

    def _leaves(self, value: object, needed: str | None) -> object:
        """Nested values with a placeholder for each text; of variables (``needed`` is None) for those with markers."""
        if isinstance(value, Mapping):
            bad = next((key for key in value if "<" in key or any(self.markers.find(key))), None)
            if bad is not None:
                raise UsageError(f"the name {bad!r} of an argument could be read as a special token; rename it")
            return {key: self._leaves(one, needed) for key, one in value.items()}
        if isinstance(value, list):
            return [self._leaves(one, needed) for one in value]
        if not isinstance(value, str):
            return value
        if needed is None and not (isinstance(value, RowText) and any(self.markers.find(value))):
            return value
        return self._leaf(value, needed or "")

    def _fill(self, rendered: str) -> tuple[list[Piece], set[int]]:
        """The rendered text with the texts in place of their placeholders."""
        matches = list(_MARK.finditer(rendered))
        order = [int(match[2]) for match in matches]
        shown = [number for number in order if number in self.contents]
        for place, (number, role) in enumerate(self.contents.items()):
            if shown.count(number) != 1 or shown.index(number) != place:
                raise UsageError(
                    f"the tokenizer's chat template does not show the {role} message exactly once, in order; "
                    "choose a prompt.template that needs no chat template (plain, boxed, r1_zero)"
                )
        missing = next((what for number, what in self.needed.items() if number not in order), None)
        if missing is not None:
            raise UsageError(
                f"the tokenizer's chat template does not show {missing} of a message. Write it into the content, or "
                "leave it out of the row (a name of all rows: task.ignore_keys: [name])"
            )
        pieces, at = list[Piece](), 0
        for match in matches:
            number, start, end = int(match[2]), match.start(), match.end()
            text = self.texts[number]
            if number in self.contents and rendered[max(start - 1, at) : start] == rendered[end : end + 1] == _PAD:
                start, end = start - 1, end + 1
            elif number in self.contents:  # the template strips contents: so do we
                text = [Piece(text[0].text.lstrip(), text[0].trusted), *text[1:]]
                text = [*text[:-1], Piece(text[-1].text.rstrip(), text[-1].trusted)]
            pieces.append(Piece(rendered[at:start], trusted=True))
            pieces += [Piece(_as_around(piece.text, match), piece.trusted) for piece in text]
            at = end
        hidden = {index for number, index in self.reasoning.items() if number not in order}
        return [*pieces, Piece(rendered[at:], trusted=True)], hidden


def _as_around(text: str, match: re.Match[str]) -> str:
    """A text as the template wrote its placeholder: as it is, inside of JSON, or as Python shows it."""
    is_ascii = match[1] != _OPEN
    if match[3] == '\\"':
        return json.dumps(text, ensure_ascii=is_ascii)[1:-1]
    return repr(text)[1:-1] if is_ascii else text


def turn_end(tokenizer: Tokenizer) -> int | None:
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
    tokenizer: Tokenizer, what: str, variables: Mapping[str, object], find: Callable[[Mapping[str, Any]], Found]
) -> Found:
    """The result of ``find`` for the chat template with these variables but the tools, computed once for each."""
    settings = {key: value for key, value in variables.items() if key != "tools"}
    key = (what, str(tokenizer.chat_template), repr(sorted(settings.items(), key=lambda item: item[0])))
    known = _PROBED.setdefault(tokenizer, {})
    if key not in known:
        known[key] = find(settings)
    return known[key]


def mark(number: int) -> str:
    """A placeholder for a content."""
    return f"{_OPEN}{number}{_CLOSE}"


def render_history(
    tokenizer: Tokenizer, turns: Sequence[tuple[str, str]], variables: Mapping[str, object], *, prompt: bool
) -> str:
    """The chat template's text for messages, by role and content (trusted, as placeholders are); see render_dicts."""
    return render_dicts(tokenizer, [{"role": r, "content": content} for r, content in turns], variables, prompt=prompt)


def render_dicts(
    tokenizer: Tokenizer, rows: list[dict[str, Any]], variables: Mapping[str, Any], *, prompt: bool
) -> str:
    """The chat template's text for messages as it takes them: with the arguments of calls as JSON text if it asks so.

    Raises:
        UsageError: no chat template, or it cannot render these messages.
    """
    if not tokenizer.chat_template:
        raise UsageError(
            "the tokenizer has no chat template. Choose a prompt.template that needs none (plain, r1_zero, boxed, "
            "dialogue for several turns), or a model that has one"
        )
    try:
        return str(tokenizer.apply_chat_template(rows, tokenize=False, add_generation_prompt=prompt, **dict(variables)))
    except Exception as error:  # whatever a template of others raises
        functions = [call["function"] for row in rows for call in row.get("tool_calls", ())]
        if any(not isinstance(function["arguments"], str) for function in functions):
            for function in functions:
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
            return render_dicts(tokenizer, rows, variables, prompt=prompt)
        roles, reason = ", ".join(row["role"] for row in rows), str(error)[:500]
        raise UsageError(
            f"the tokenizer's chat template cannot render the roles {roles}: {reason}. "
            "Leave out the message that it refuses, or choose another prompt.template"
        ) from error


@dataclass(frozen=True)
class Template:
    """Functions that make of an example a prompt, a demonstration and a graded answer.

    Attributes:
        name: the word in the recipe.
        opening: text at the end of the prompt that belongs to the graded answer (``<think>``).
        tags: names of the reasoning and the answer tag, or empty.
        prompt: the pieces of the prompt, of its messages and the tokenizer; of a chat also with other ``variables``.
        response: the pieces of a demonstration, which follow the opening; without the end token. None at all where a
            given response has nothing that could stand between the tags.
        extract: the answer in a graded text (opening + completion), or None.
        chat: the prompt is written by the tokenizer's chat template: a response ends with the end
            of the turn.
        variables: for the chat template.
        frame: the texts before and behind a reply to a turn, where there is no chat template (trusted).
        quote: makes a text safe to stand there, where it could look like the start of a turn.
        system: the recipe's own system message, of a chat.
        space: the text before an answer that does not itself begin with white space.
        turns: how a conversation is trained: as the chat template renders it (``rendered``), one example for each turn
            of the assistant (``apart``), or its last turn alone (``last``).
    """

    name: str
    opening: str
    tags: tuple[str, ...]
    prompt: Callable[..., list[Piece]]
    response: Callable[[Example], list[Piece]]
    extract: Callable[[str], str | None]
    chat: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    frame: tuple[str, str] = ("\n", "\n")
    quote: Callable[[str], str] = str
    system: str = ""
    space: str = ""
    turns: Literal["rendered", "apart", "last"] = "apart"


def prompt_pieces(
    tokenizer: Tokenizer, template: Template, messages: Sequence[Message], variables: Mapping[str, Any]
) -> list[Piece]:
    """The pieces of a prompt; ``variables`` are a row's own for the chat template, such as its tools.

    Raises:
        UsageError: as ``encode_prompt``, or variables where no chat template reads them.
    """
    if not variables:
        return template.prompt(messages, tokenizer)
    names = ", ".join(map(repr, variables))
    wrong = ""
    if not template.chat:
        wrong = f"template {template.name} does not show {names}, which only a chat template can"
    elif "tools" in variables.keys() & template.variables.keys():
        wrong = f"template {template.name} has tools of its own, and the row brings {names}"
    if wrong:
        raise UsageError(f"{wrong}. Choose another, or name {names} in task.ignore_keys")
    read = set(re.findall(r"\w+", str(tokenizer.chat_template or "")))
    unread = [name for name in variables if name not in read]
    if unread:
        key = "tools" if unread == ["tools"] else "chat_template_kwargs"
        raise UsageError(
            f"the tokenizer's chat template does not read {', '.join(map(repr, unread))}. Give it one that does, or "
            f"leave the key out of all rows by task.ignore_keys: [{key}]"
        )
    return template.prompt(messages, tokenizer, {**template.variables, **as_row_texts(variables)})


def encode_prompt(
    tokenizer: Tokenizer, template: Template, messages: Sequence[Message], variables: Mapping[str, object] | None = None
) -> list[int]:
    """Token ids of the prompt, up to and including the template's opening; ``variables``: see ``prompt_pieces``.

    Raises:
        UsageError: no messages, a blank one, an unknown role, or no chat template where one is needed.
    """
    ids = encode_pieces(tokenizer, prompt_pieces(tokenizer, template, messages, variables or {}))
    # a chat template and a document spell out whatever must come first (BOS)
    leading = [] if template.chat or template.name == "document" else list(markers_of(tokenizer).leading)
    return ids if ids[: len(leading)] == leading else leading + ids


def stop_ids(tokenizer: Tokenizer, template: Template) -> frozenset[int]:
    """Ids that end a completion: the end tokens of tokenizer and model, and, in a chat, the end of the turn.

    Raises:
        UsageError: the tokenizer has no end token.
    """
    own = {end_id(tokenizer, template), tokenizer.eos_token_id} - {None}
    return frozenset(own) | getattr(tokenizer, "generation_end_ids", frozenset())


def further_ends(tokenizer: Tokenizer, template: Template) -> list[str]:
    """A line on the end tokens that only the model's configuration names; none where there are none."""
    end = end_id(tokenizer, template)
    further = sorted(stop_ids(tokenizer, template) - {tokenizer.eos_token_id, end})
    names = [str(tokenizer.convert_ids_to_tokens(i)) for i in (*further, end)]
    line = f"answers also end at {', '.join(names[:-1])}, by the model's configuration; {names[-1]} is trained"
    return [line] if further else []


def end_id(tokenizer: Tokenizer, template: Template) -> int:
    """The id that ends a demonstration: the end of the turn in a chat, else the tokenizer's end token.

    Raises:
        UsageError: the tokenizer has no end token.
    """
    end = turn_end(tokenizer) if template.chat else None
    end = tokenizer.eos_token_id if end is None else end
    if end is None:
        raise UsageError(
            "the tokenizer has no end token (eos_token), so no completion could ever end; set one in its files"
        )
    return int(end)


def build_template(word: Component, where: str = "prompt.template") -> Template:
    """The prompt template that a recipe names."""
    return registry.find("template", word.name, where).bind(word.options, where)()
