"""Chat template rendering that separates trusted template text from untrusted contents.

Each conversation is rendered twice. First, placeholders replace all contents: everything around them is written by the
template and trusted, so contents cannot forge turn markers. The second rendering uses real contents. It must match the
first with placeholders filled in, and shows where the template strips or modifies contents.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from posttrain.data.render.chat_template import CLOSING, OPENING, mark, render_dicts
from posttrain.data.render.encoding import (
    END_THINK,
    THINK,
    Markers,
    Piece,
    Tokenizer,
    drop_text,
    mark_tags,
    markers_of,
    text_of,
)
from posttrain.errors import UsageError
from posttrain.types import Call, Message

# Placeholders inside calls or schemas contain a quotation mark. If it is escaped in the output, the template has
# written JSON.
_MARK = re.compile(f'({OPENING}|\\\\ue0f1)(\\d+)(\\\\?"|)({CLOSING}|\\\\ue0f2)')
_PLACEHOLDER = re.compile(f'{OPENING}(\\d+)"?{CLOSING}')
_TAG = re.compile(r"</?(?=\w+>)|\[/?(?=[A-Z]+\])")
_CUT = "\ue0f3"  # breaks up markers, so that templates do not parse them
_LONE = re.compile(f"{THINK}|{END_THINK}")
_MAX_OUTLINES = 512
_OUTLINES: WeakKeyDictionary[Any, dict[tuple[object, ...], Outline]] = WeakKeyDictionary()


class RowText(str):
    """A string from a row among chat template variables. Unlike the recipe's strings, it is untrusted."""

    __slots__ = ()


def as_row_texts(value: Any) -> Any:
    """Convert strings in nested row values to ``RowText``."""
    if isinstance(value, Mapping):
        return {key: as_row_texts(one) for key, one in value.items()}
    if isinstance(value, list):
        return [as_row_texts(one) for one in value]
    if isinstance(value, str):
        return RowText(value)
    return value


@dataclass(frozen=True)
class Placeholder:
    """A placeholder found in rendered output, with its number and escaping."""

    number: int
    is_json: bool
    is_ascii: bool

    def written(self, text: str) -> str:
        """Escape a string like the placeholder: verbatim, JSON, or Python ``repr``."""
        if self.is_json:
            return json.dumps(text, ensure_ascii=self.is_ascii)[1:-1]
        if self.is_ascii:
            return repr(text)[1:-1]
        return text


@dataclass(frozen=True)
class Outline:
    """Template text surrounding the placeholders, with ``len(fixed) == len(places) + 1``."""

    fixed: list[str]
    places: list[Placeholder]


def _outline_of(rendered: str) -> Outline:
    fixed = list[str]()
    places = list[Placeholder]()
    at = 0
    for match in _MARK.finditer(rendered):
        fixed.append(rendered[at : match.start()])
        places.append(Placeholder(int(match[2]), match[3] == '\\"', match[1] != OPENING))
        at = match.end()
    return Outline([*fixed, rendered[at:]], places)


class Sheet:
    """Contents by placeholder number, for one conversation."""

    def __init__(self, tokenizer: Tokenizer, system: str, variables: Mapping[str, object]) -> None:
        self.tokenizer = tokenizer
        self.markers = markers_of(tokenizer)
        self.system = system
        self.texts: list[list[Piece]] = []
        self.contents: dict[int, str] = {}  # number -> role. Each must be shown exactly once, in order.
        self.reasoning: dict[int, int] = {}  # placeholder number -> message index
        self.needed: dict[int, str] = {}  # placeholder number -> description. Each must be shown at least once.
        self.variables = {key: self._leaves(value, None) for key, value in variables.items()}

    def render(self, messages: Sequence[Message], *, prompt: bool) -> tuple[list[Piece], set[int]]:
        """Render a conversation, and list messages whose reasoning was dropped.

        Raises:
            UsageError: missing chat template, rendering fails, or contents were altered.
        """
        rows = list[dict[str, Any]]()
        called = list[str]()
        if self.system:
            own = [Piece(self.system, trusted=True)]
            if messages[0].role == "system":
                own += [Piece("\n\n", trusted=True), Piece(messages[0].content, trusted=False)]
                messages = messages[1:]
            rows.append({"role": "system", "content": self._content("system", own)})
        rows += [self._message(index, message, called) for index, message in enumerate(messages)]
        outline = self._outline(rows, prompt=prompt)
        self._check(outline)
        pieces = self._filled(outline, rows, prompt=prompt)
        if pieces is None:  # a template may write the current time, or tokens may have changed
            outline = self._outline(rows, prompt=prompt, anew=True)
            pieces = self._filled(outline, rows, prompt=prompt)
        if pieces is None:
            pieces = self._as_characters(outline, rows, prompt=prompt)
        if pieces is None:
            pieces = self._as_rendered(outline, rows, prompt=prompt)
        order = {place.number for place in outline.places}
        return pieces, {index for number, index in self.reasoning.items() if number not in order}

    def _message(self, index: int, message: Message, called: list[str]) -> dict[str, Any]:
        row: dict[str, Any] = {"role": message.role, "content": ""}
        if message.reasoning is not None:
            number = self._add([Piece(message.reasoning, trusted=False)])
            self.reasoning[number] = index
            row |= dict.fromkeys(("reasoning_content", "thinking"), mark(number))
        if message.content:
            row["content"] = self._content(message.role, _marked(message.role, message.content))
        if message.name is not None:
            needed = "" if message.role == "tool" else f"the name {message.name!r}"
            row["name"] = self._leaf(message.name, needed)
        if message.calls:
            row["tool_calls"] = [self._call(call) for call in message.calls]
            called[:] = [call["id"] for call in row["tool_calls"]]
        elif message.role == "tool":
            row["tool_call_id"] = ""
            if called:
                row["tool_call_id"] = called.pop(0)
        return row

    def _call(self, call: Call) -> dict[str, Any]:
        what = f"the call of {call.tool!r}"
        name = self._leaf(call.tool, what)
        arguments = self._leaves(json.loads(call.raw_arguments), what)
        id = f"call{len(self.texts):05d}"  # nine alphanumeric characters, required by some templates
        return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}

    def _add(self, pieces: list[Piece]) -> int:
        self.texts.append(pieces)
        return len(self.texts) - 1

    def _content(self, role: str, pieces: list[Piece]) -> str:
        number = self._add(pieces)
        self.contents[number] = role
        # some templates JSON-encode results
        if role == "tool":
            return mark(number).replace(CLOSING, f'"{CLOSING}')
        return mark(number)

    def _leaf(self, text: str, needed: str) -> str:
        number = self._add([Piece(text, trusted=False)])
        if needed:
            self.needed[number] = needed
        return f'{OPENING}{number}"{CLOSING}'

    def _leaves(self, value: object, needed: str | None) -> object:
        """Replace nested strings by placeholders. If ``needed`` is None (variables), only those with markers."""
        if isinstance(value, Mapping):
            for key in value:
                if "<" in key or any(self.markers.find(key)):
                    raise UsageError(f"the name {key!r} in the arguments could be parsed as a special token. Rename it")
            return {key: self._leaves(one, needed) for key, one in value.items()}
        if isinstance(value, list):
            return [self._leaves(one, needed) for one in value]
        if not isinstance(value, str):
            return value
        if needed is not None:
            return self._leaf(value, needed)
        if isinstance(value, RowText) and any(self.markers.find(value)):
            return self._leaf(value, "")
        return value

    def _outline(self, rows: list[dict[str, Any]], *, prompt: bool, anew: bool = False) -> Outline:
        """The conversation with placeholders; of conversations that differ in their texts alone it is rendered once."""
        key = (str(self.tokenizer.chat_template), json.dumps(rows), repr(self.variables), prompt)
        known = _OUTLINES.setdefault(self.tokenizer, {})
        outline = known.pop(key, None)
        if outline is None or anew:
            outline = _outline_of(render_dicts(self.tokenizer, _copied(rows), self.variables, prompt=prompt))
        known[key] = outline
        if len(known) > _MAX_OUTLINES:
            del known[next(iter(known))]
        return outline

    def _check(self, outline: Outline) -> None:
        order = [place.number for place in outline.places]
        shown = [number for number in order if number in self.contents]
        for place, (number, role) in enumerate(self.contents.items()):
            if shown.count(number) != 1 or shown.index(number) != place:
                raise UsageError(
                    f"the tokenizer's chat template must show each {role} message exactly once, in order. "
                    "Choose a prompt.template without chat (plain, boxed, r1_zero)"
                )
        for number, what in self.needed.items():
            if number not in order:
                raise UsageError(
                    f"the tokenizer's chat template drops {what}. Move it into the message content, or remove it from "
                    "the row (to ignore names in every row: task.ignore_keys: [name])"
                )

    def _real(self, rows: list[dict[str, Any]], texts: Sequence[str], *, prompt: bool) -> str:
        """Render with ``texts`` instead of placeholders."""
        fill = partial(_unmasked, texts)
        return render_dicts(self.tokenizer, fill(rows), fill(self.variables), prompt=prompt)

    def _readable(self) -> list[str]:
        """Contents with unpaired thinking tags broken up."""
        texts = [text_of(pieces) for pieces in self.texts]
        for number, role in self.contents.items():
            if role == "assistant" and (THINK in texts[number] or END_THINK in texts[number]):
                parts = []
                for piece in self.texts[number]:
                    text = piece.text
                    if not piece.trusted:
                        text = _LONE.sub(_cut, text)
                    parts.append(text)
                texts[number] = "".join(parts)
        return texts

    def _filled(self, outline: Outline, rows: list[dict[str, Any]], *, prompt: bool) -> list[Piece] | None:
        """Render real contents. None if the output does not match the outline."""
        texts = self._readable()
        try:
            rendered = self._real(rows, texts, prompt=prompt)
        except UsageError:
            if not any(self._is_marked(text) for text in texts):
                raise
            return None
        return self._pieces(outline, texts, rendered)

    def _as_characters(self, outline: Outline, rows: list[dict[str, Any]], *, prompt: bool) -> list[Piece] | None:
        """Render with markers broken up, for templates that parse contents: rows treat markers as characters."""
        texts = [text_of(pieces) for pieces in self.texts]
        broken = [_broken(text, self.markers) for text in texts]
        if broken == texts:
            return None
        return self._pieces(outline, broken, self._real(rows, broken, prompt=prompt))

    def _as_rendered(self, outline: Outline, rows: list[dict[str, Any]], *, prompt: bool) -> list[Piece]:
        """Accept the real rendering, for templates whose output depends on contents.

        Contents must not include markers, and turn markers must be identical to the outline.

        Raises:
            UsageError: otherwise. The message includes the first difference.
        """
        texts = [text_of(pieces) for pieces in self.texts]
        rendered = self._real(rows, texts, prompt=prompt)
        expected = outline.fixed[0]
        for place, behind in zip(outline.places, outline.fixed[1:], strict=True):
            expected += place.written(texts[place.number]) + behind
        has_markers = any(any(self.markers.find(text)) for text in texts)
        if not has_markers and self._turn_markers(rendered) == self._turn_markers("\0".join(outline.fixed)):
            return [Piece(rendered, trusted=True)]
        pairs = enumerate(zip(expected, rendered, strict=False))
        at = next((place for place, (one, other) in pairs if one != other), len(expected))
        around = slice(max(0, at - 40), at + 40)
        raise UsageError(
            "the tokenizer's chat template alters message contents: "
            f"{rendered[around]!r} instead of {expected[around]!r}. "
            "Remove the row, or choose a different prompt.template"
        )

    def _turn_markers(self, text: str) -> list[str]:
        """List markers in order, ignoring tags within turns."""
        found = [text[start:end] for start, end, _ in self.markers.find(text)]
        return [marker for marker in found if not _TAG.match(marker)]

    def _gains_markers(self, outline: Outline, texts: Sequence[str], changed: Sequence[str]) -> bool:
        """Check if rendering added markers to any content."""
        for place, text in zip(outline.places, changed, strict=True):
            if self._count_markers(text) - self._count_markers(texts[place.number]):
                return True
        return False

    def _count_markers(self, text: str) -> Counter[str]:
        return Counter(text[start:end] for start, end, _ in self.markers.find(text))

    def _is_marked(self, text: str) -> bool:
        return _broken(text, self.markers) != text

    def _pieces(self, outline: Outline, texts: Sequence[str], rendered: str) -> list[Piece] | None:
        """Split rendered output into pieces. None if it does not match the outline."""
        shown = self._shown(outline, texts, rendered)
        if shown is None:
            return None
        pieces = [Piece(outline.fixed[0], trusted=True)]
        for own, behind in zip(shown, outline.fixed[1:], strict=True):
            pieces += [*own, Piece(behind, trusted=True)]
        return pieces

    def _shown(self, outline: Outline, texts: Sequence[str], rendered: str) -> list[list[Piece]] | None:
        """Find the pieces shown at each placeholder, including any stripping or modification."""
        stripped = _kept(outline, texts, rendered)
        if stripped is not None:
            found = []
            for place, (before, behind) in zip(outline.places, stripped, strict=True):
                own = _sliced(self.texts[place.number], before, behind)
                found.append([Piece(place.written(piece.text), piece.trusted) for piece in own])
            return found
        changed = _between(outline, rendered)
        if changed is None or self._gains_markers(outline, texts, changed):
            return None
        roles = [self.contents.get(place.number, "") for place in outline.places]
        return [_marked(role, text.replace(_CUT, "")) for role, text in zip(roles, changed, strict=True)]


def _marked(role: str, text: str) -> list[Piece]:
    pieces = [Piece(text, trusted=False)]
    if role == "assistant":
        return mark_tags(pieces)
    return pieces


def _copied(value: Any) -> Any:
    """Deep copy, because rendering may serialize arguments in place."""
    return _unmasked(None, value)


def _unmasked(texts: Sequence[str] | None, value: Any) -> Any:
    """Fill placeholders in nested values."""
    if isinstance(value, Mapping):
        return {key: _unmasked(texts, one) for key, one in value.items()}
    if isinstance(value, list):
        return [_unmasked(texts, one) for one in value]
    if not isinstance(value, str) or texts is None or OPENING not in value:
        return value
    return _PLACEHOLDER.sub(lambda match: texts[int(match[1])], value)


def _broken(text: str, markers: Markers) -> str:
    """Insert a character inside each marker and tag."""
    starts = {*markers.starts(text), *(match.start() for match in _TAG.finditer(text))}
    for start in sorted(starts, reverse=True):
        text = f"{text[: start + 1]}{_CUT}{text[start + 1 :]}"
    return text


def _cut(match: re.Match[str]) -> str:
    return f"{match[0][0]}{_CUT}{match[0][1:]}"


def _strippings(text: str) -> list[tuple[int, int]]:
    """List (start, end) for the full string and for each common way to strip it."""
    length = len(text)
    found = [(0, length)]
    for characters in (None, "\n", " "):
        left = length - len(text.lstrip(characters))
        right = len(text.rstrip(characters))
        found += [(0, right), (min(left, length), length), (min(left, right), right)]
    return list(dict.fromkeys(found))


def _kept(outline: Outline, texts: Sequence[str], rendered: str) -> list[tuple[int, int]] | None:
    """Count characters stripped from both ends of each content. None if a content was changed otherwise."""
    at = len(outline.fixed[0])
    spans = list[tuple[int, int]]()
    if not rendered.startswith(outline.fixed[0]):
        return None
    for place, behind in zip(outline.places, outline.fixed[1:], strict=True):
        text = texts[place.number]
        for start, end in _strippings(text):
            shown = place.written(text[start:end]) + behind
            if rendered.startswith(shown, at):
                at += len(shown)
                spans.append((start, len(text) - end))
                break
        else:
            return None
    if at < len(rendered):
        return None
    return spans


def _between(outline: Outline, rendered: str) -> list[str] | None:
    """Extract contents between template text. None if missing or ambiguous."""
    first, *behind = outline.fixed
    if not behind or not rendered.startswith(first) or not rendered.endswith(behind[-1]):
        return None
    last = len(rendered) - len(behind[-1])
    starts = list[int]()
    ends = list[int]()
    at = len(first)
    for text in behind[:-1]:
        starts.append(rendered.find(text, at))
        if starts[-1] < 0:
            return None
        at = starts[-1] + len(text)
    limit = last
    for text in reversed(behind[:-1]):
        ends.append(rendered.rfind(text, len(first), limit))
        limit = ends[-1]
    if starts != ends[::-1] or at > last:
        return None
    begins = [len(first), *(start + len(text) for start, text in zip(starts, behind, strict=False))]
    return [rendered[begin:end] for begin, end in zip(begins, [*starts, last], strict=True)]


def _sliced(pieces: Sequence[Piece], before: int, behind: int) -> list[Piece]:
    """Trim characters from both ends."""
    kept = list[Piece]()
    last = sum(len(piece.text) for piece in pieces) - before - behind
    for piece in drop_text(pieces, before):
        kept.append(Piece(piece.text[: max(0, last)], piece.trusted))
        last -= len(piece.text)
    return kept
