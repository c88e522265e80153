"""Forms in which models write calls of tools: the texts around a name and its arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from posttrain.data.render.encoding import Piece
from posttrain.types import Call

# An object of JSON up to a name in it, which may be in another one; and from the arguments to its end.
_OBJECT = re.compile(
    r'\{\s*(?:"\w+"\s*:\s*"[\w.-]*"\s*,\s*)*(?:"(?P<outer>\w+)"\s*:\s*\{\s*)?"(?P<name>\w+)"\s*:\s*"\Z'
)
_END = re.compile(r"\s*\}(?:\s*\})?")
_KEY = re.compile(r'"\s*,\s*"(\w+)"\s*:\s*\Z')


@dataclass(frozen=True)
class Parameters:
    """The texts around each argument, where arguments are written one by one and not as JSON.

    A text is written as it is, another value as JSON.
    """

    before: str
    middle: str
    after: str


Style = Literal["json", "quoted", "python", "plain"] | Parameters  # of arguments


@dataclass(frozen=True)
class CallForm:
    """The texts around calls.

    Attributes:
        opening, middle, closing: before a name, between it and the arguments, and after them.
        arguments: an object of JSON, the text of one as a JSON string (``quoted``), one by one, as keywords of a
            function in Python, or in our own form (``plain``: the value of an only argument, else an object of JSON).
        lead: between the text of a turn and its first call.
        begin, between, finish: before the first call, between two, and after the last.
        end: the id that ends a turn with calls, where it is not the end of other turns.
        results: the tags around a result, where the chat template has none.
        is_native: the chat template shows the tools in the prompt.
    """

    opening: str
    middle: str
    closing: str
    arguments: Style = "json"
    lead: str = "\n"
    begin: str = ""
    between: str = "\n"
    finish: str = ""
    end: int | None = None
    results: tuple[str, str] = ("<tool_response>\n", "\n</tool_response>")
    is_native: bool = True

    @property
    def key(self) -> str | None:
        """The key of the arguments, where a call is one object of JSON with the name in it; else None."""
        if not _OBJECT.search(self.opening) or not _END.match(self.closing):
            return None
        found = _KEY.search(self.middle)
        if found is None:
            return None
        return found[1]

    @property
    def name_key(self) -> tuple[str | None, str]:
        """The key of the object with name and arguments, where it is in another one, and the key of the name."""
        found = _OBJECT.search(self.opening)
        if found:
            return (found["outer"], found["name"])
        return (None, "name")

    @property
    def tags(self) -> tuple[str, str]:
        """The texts around what a call says, without white space at their ends; empty where there is none."""
        if self.key is None:
            return self.opening.strip(), self.closing.strip()
        return _OBJECT.sub("", self.opening).strip(), _END.sub("", self.closing, count=1).strip()

    @property
    def tag(self) -> str:
        """The text with which calls begin."""
        return self.begin.strip() or self.tags[0] or "{"

    @property
    def is_readable(self) -> bool:
        """Return True if calls can be found in a text, and the end of a name."""
        if self.arguments == "python":
            return bool(self.begin.strip() and self.finish.strip())
        tag = self.tags[0]
        return self.key is not None or (bool(tag) and tag[0] not in '{",')


# Our own, for chat templates without one and for prompts without chat.
TAGGED = CallForm("<tool>", ": ", "</tool>", "plain", results=("<result>", "</result>"), is_native=False)
# That of the Hermes models, which many others took over.
HERMES = CallForm('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>")


def object_start(before: str) -> int:
    """The place where the object of JSON with the name behind this text begins; its length where there is none."""
    found = _OBJECT.search(before)
    if found:
        return found.start()
    return len(before)


def write_calls(calls: Sequence[Call], form: CallForm, behind_text: bool) -> list[Piece]:
    """The pieces of the calls of a turn, as they stand behind its text or alone."""
    begin = form.begin
    if behind_text:
        begin = form.lead + begin
    pieces = [Piece(begin, trusted=True)]
    for number, call in enumerate(calls):
        if number:
            pieces.append(Piece(form.between, trusted=True))
        pieces += write_call(call, form)
    return [*pieces, Piece(form.finish, trusted=True)]


def write_call(call: Call, form: CallForm) -> list[Piece]:
    """The pieces of a call as a model writes it; its name and its arguments are not trusted."""
    name = call.tool
    if form.key is not None:
        name = _as_json(call.tool)[1:-1]
    pieces = [Piece(form.opening, trusted=True), Piece(name, trusted=False), Piece(form.middle, trusted=True)]
    if isinstance(form.arguments, Parameters):
        around = form.arguments
        for key, value in json.loads(call.raw_arguments).items():
            text = value if isinstance(value, str) else _as_json(value)
            pieces += [Piece(around.before, trusted=True), Piece(key, trusted=False)]
            pieces += [Piece(around.middle, trusted=True), Piece(text, trusted=False)]
            pieces.append(Piece(around.after, trusted=True))
    else:
        pieces.append(Piece(_arguments_text(call.raw_arguments, form.arguments), trusted=False))
    return [*pieces, Piece(form.closing, trusted=True)]


def _as_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _arguments_text(arguments: str, style: Style) -> str:
    """The arguments, an object of JSON as text, in a style that writes them in one piece."""
    if style == "quoted":
        return _as_json(arguments)
    if style == "python":
        return ", ".join(f"{key}={_as_json(value)}" for key, value in json.loads(arguments).items())
    if style == "plain":
        values = list(json.loads(arguments).values())
        if len(values) == 1 and isinstance(values[0], str | int | float) and not isinstance(values[0], bool):
            return str(values[0])
    return arguments
