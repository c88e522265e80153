"""Tool call formats: delimiters around function names and arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from posttrain.data.render.encoding import Piece
from posttrain.types import Call

# Match a JSON object's beginning up to its name, possibly inside an outer object, then match closing braces.
_OBJECT = re.compile(
    r'\{\s*(?:"\w+"\s*:\s*"[\w.-]*"\s*,\s*)*(?:"(?P<outer>\w+)"\s*:\s*\{\s*)?"(?P<name>\w+)"\s*:\s*"\Z'
)
_END = re.compile(r"\s*\}(?:\s*\})?")
_KEY = re.compile(r'"\s*,\s*"(\w+)"\s*:\s*\Z')


@dataclass(frozen=True)
class Parameters:
    """Delimiters around each argument, if arguments are written individually instead of as a JSON object.

    Strings are written verbatim; other values are JSON-encoded.
    """

    before: str
    middle: str
    after: str


Style = Literal["json", "quoted", "python", "plain"] | Parameters  # of arguments


@dataclass(frozen=True)
class CallForm:
    """Delimiters of a tool call format.

    Attributes:
        opening, middle, closing: text before a name, between name and arguments, after arguments.
        arguments: JSON object (``json``), JSON object encoded as a JSON string (``quoted``), separate parameters
            (``Parameters``), Python keyword arguments (``python``), or posttrain's format (``plain``: a sole scalar
            argument verbatim, else a JSON object).
        lead: separator between a turn's text and its first call.
        begin, between, finish: text before all calls, between two calls, after all calls.
        end: token id ending a turn with calls, if it differs from other turns.
        results: result delimiters, used if a chat template adds none.
        is_native: the chat template lists tools in the prompt.
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
        """Key holding arguments, if calls are single JSON objects that include the name; else None."""
        if not _OBJECT.search(self.opening) or not _END.match(self.closing):
            return None
        found = _KEY.search(self.middle)
        if found is None:
            return None
        return found[1]

    @property
    def name_key(self) -> tuple[str | None, str]:
        """Key of an enclosing object, or None, and the key holding the name."""
        found = _OBJECT.search(self.opening)
        if found:
            return (found["outer"], found["name"])
        return (None, "name")

    @property
    def tags(self) -> tuple[str, str]:
        """Delimiters around a single call, stripped, without JSON syntax. May be empty."""
        if self.key is None:
            return self.opening.strip(), self.closing.strip()
        return _OBJECT.sub("", self.opening).strip(), _END.sub("", self.closing, count=1).strip()

    @property
    def tag(self) -> str:
        """Prefix used to detect calls."""
        return self.begin.strip() or self.tags[0] or "{"

    @property
    def is_readable(self) -> bool:
        """Check if calls, and where their names end, can be recognized in generated text."""
        if self.arguments == "python":
            return bool(self.begin.strip() and self.finish.strip())
        tag = self.tags[0]
        return self.key is not None or (bool(tag) and tag[0] not in '{",')


# posttrain's format, used without a chat template, or if it defines no calls.
TAGGED = CallForm("<tool>", ": ", "</tool>", "plain", results=("<result>", "</result>"), is_native=False)
# Format of the Hermes models, adopted by many others.
HERMES = CallForm('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>")


def object_start(before: str) -> int:
    """Find where the JSON object containing the following name begins, or ``len(before)`` if not found."""
    found = _OBJECT.search(before)
    if found:
        return found.start()
    return len(before)


def write_calls(calls: Sequence[Call], form: CallForm, behind_text: bool) -> list[Piece]:
    """Build the pieces for a turn's calls, with the separator if they follow text."""
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
    """Build a call. Name and arguments are untrusted."""
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
    """Format a JSON object of arguments in a style that writes all arguments together."""
    if style == "quoted":
        return _as_json(arguments)
    if style == "python":
        return ", ".join(f"{key}={_as_json(value)}" for key, value in json.loads(arguments).items())
    if style == "plain":
        values = list(json.loads(arguments).values())
        if len(values) == 1 and isinstance(values[0], str | int | float) and not isinstance(values[0], bool):
            return str(values[0])
    return arguments
