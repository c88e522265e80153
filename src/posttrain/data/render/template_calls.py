"""Infer a chat template's call format by rendering short probe conversations."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from posttrain.data.render.calls import HERMES, TAGGED, CallForm, Parameters, Style, object_start, write_calls
from posttrain.data.render.chat_template import probed, render_dicts
from posttrain.data.render.encoding import Tokenizer, markers_of, text_of
from posttrain.data.render.template import Template, ending
from posttrain.errors import UsageError
from posttrain.types import Call

_NAMES = ("zqnamea", "zqnameb")
_KEYS = ("zqkeya", "zqkeyb")
_VALUES = ("zqvaluea", "zqvalueb")
_TEXT = "zqtext"
_QUESTION = "zqquestion"
_SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "description": "a"}}, "required": ["a"]}
_TOOL = {"type": "function", "function": {"name": "a", "description": "a", "parameters": _SCHEMA}}
_DECODER = json.JSONDecoder()
_CUT_TAG = re.compile(r"<[^<>\s]*\Z")
# Call id or index, either an object member or following a marker. Rendered training calls omit it.
_ID = re.compile(
    r'"\w*id"\s*:\s*"?(?:call0000)?\d"?\s*,\s*|\s*,\s*"\w*id"\s*:\s*"?(?:call0000)?\d"?|\[[A-Z_]+\]call0000\d'
)
_EMPTY_THINKING = re.compile(r"\A(?:<think>)?\s*</think>\s*")

Arguments = dict[str, str]
_FIRST_CALL: Arguments = {_KEYS[0]: _VALUES[0]}


def call_form(tokenizer: Tokenizer, template: Template) -> CallForm:
    """Infer the call format: the chat template's if it supports tools and calls, else ``TAGGED``.

    A template that renders no calls but mentions the Hermes tag uses ``HERMES``. An inferred format is rejected if it
    does not reproduce the template's output, or cannot be parsed again.
    """
    if not template.chat or not re.search(r"\btools\b", str(tokenizer.chat_template or "")):
        return TAGGED

    def find(settings: Mapping[str, Any]) -> CallForm:
        """Try conversations without tools, then with tools, since some tokenizers have a separate tool template."""
        if not isinstance(tokenizer.chat_template, dict):
            form = _learn(tokenizer, settings)
            if form.is_native:
                return form
        return _learn(tokenizer, {**settings, "tools": [_TOOL]})

    return probed(tokenizer, "form", template.variables, find)


def call_marks(tokenizer: Tokenizer, template: Template) -> tuple[str, ...]:
    """List special tokens used only by calls, excluding ``<tool_call>`` and ``</tool_call>``."""

    def find(settings: Mapping[str, Any]) -> tuple[str, ...]:
        question = {"role": "user", "content": _QUESTION}
        try:
            plain = render_dicts(tokenizer, [question], settings, prompt=True)
            plain += render_dicts(
                tokenizer, [question, {"role": "assistant", "content": _TEXT}], settings, prompt=False
            )
        except UsageError:
            return ()
        written = "\0".join((form.begin, form.opening, form.middle, form.closing, form.finish))
        marks = {written[start:end].strip() for start, end, _ in markers_of(tokenizer).find(written)}
        return tuple(sorted(mark for mark in marks if mark not in plain and mark not in HERMES.tags))

    form = call_form(tokenizer, template)
    if form.is_native:
        return probed(tokenizer, "call marks", template.variables, find)
    return ()


def _learn(tokenizer: Tokenizer, variables: Mapping[str, object]) -> CallForm:
    """Infer the format under given variables, falling back to ``HERMES`` or ``TAGGED``."""
    default = TAGGED
    if HERMES.tag in str(tokenizer.chat_template):
        default = HERMES
    try:
        prompt = render_dicts(tokenizer, [{"role": "user", "content": _QUESTION}], variables, prompt=True)
    except UsageError:
        return default
    shown = _Shown(tokenizer, variables, prompt)
    one = shown.tail(_FIRST_CALL)
    form = _read_form(shown, one)
    if form is None:
        return _fallback(one, default)
    return form


@dataclass(frozen=True)
class _Shown:
    """Renders calls following one question, which has been rendered as ``prompt``."""

    tokenizer: Tokenizer
    variables: Mapping[str, object]
    prompt: str

    def tail(self, *arguments: Arguments, content: str = "") -> str:
        """Render calls and return all text after the prompt, without call ids and empty thinking."""
        rendered = _render(self.tokenizer, list(arguments), content, self.variables) or ""
        shared = _CUT_TAG.sub("", _common_prefix(self.prompt, rendered))
        behind = rendered[len(shared) :]
        # a template may render the prompt differently if a response follows
        if _QUESTION in behind:
            return ""
        return _ID.sub("", _EMPTY_THINKING.sub("", behind))

    def lead(self, first: str) -> str:
        """Find the separator between turn text and ``first``, which begins a call. Defaults to a newline."""
        _, _, behind_text = self.tail(_FIRST_CALL, content=_TEXT).partition(_TEXT)
        shown = behind_text.partition(_NAMES[0])[0]
        if not shown.endswith(first):
            return "\n"
        return shown[: len(shown) - len(first)]


def _read_form(shown: _Shown, one: str) -> CallForm | None:
    """Infer the format from one call, a call with two arguments, two calls, and text followed by a call.

    None if the template shows calls differently, or if the inferred format does not reproduce them.
    """
    before, named, rest = one.partition(_NAMES[0])
    if not named or _KEYS[0] not in rest:
        return None
    with_two_arguments = shown.tail(dict(zip(_KEYS, _VALUES, strict=True)))
    read = _arguments(rest, with_two_arguments.partition(_NAMES[0])[2])
    if read is None:
        return None
    middle, style, post = read
    end = ending(shown.tokenizer)
    end_text = ""
    if end is not None:
        end_text = end.text
    closing, last = _until_end(shown.tokenizer, post, end_text)
    two = shown.tail(_FIRST_CALL, {_KEYS[1]: _VALUES[1]})
    around = _around_calls(before, closing, _gap(two, middle, style))
    lead = shown.lead(around.begin + around.opening)
    form = _assembled(around, middle, style, lead, last)
    call_end = end_text
    if last is not None:
        call_end = shown.tokenizer.convert_ids_to_tokens(last)
    ends = (end_text, call_end)
    if not form.is_readable or not _writes(form, one, 1, ends):
        return None
    if around.is_repeated and not _writes(form, two, 2, ends):
        return None
    return form


@dataclass(frozen=True)
class _Around:
    """Delimiters around calls, as in ``CallForm``. ``is_repeated``: the template supports multiple calls."""

    opening: str
    closing: str
    begin: str = ""
    between: str = "\n"
    finish: str = ""
    is_repeated: bool = False


def _around_calls(before: str, closing: str, gap: str | None) -> _Around:
    """Separate outer from per-call delimiters using ``gap``, the text between two calls (None: only one is shown)."""
    if gap is None:
        return _Around(before, closing)
    shared = _snapped(_common_suffix(gap, before), before)
    start = min(len(before) - len(shared), object_start(before))
    opening = before[start:]
    gap = gap[: len(gap) - len(opening)]
    own_closing = _CUT_TAG.sub("", _common_prefix(gap, closing))
    length = len(own_closing)
    return _Around(opening, own_closing, before[:start], gap[length:], closing[length:], is_repeated=True)


def _assembled(around: _Around, middle: str, style: Style, lead: str, last: int | None) -> CallForm:
    """Assemble a call format. Newlines before the first call belong in ``lead`` and ``between``."""
    begin = around.begin
    opening = around.opening
    closing = around.closing
    between = around.between
    finish = around.finish
    if style == "python" and not begin:  # each call has a separate block
        between = closing[1:] + between + opening
        finish = closing[1:]
        closing = ")"
        begin = opening
        opening = ""
    # newlines precede the first call only after text
    first = begin or opening
    lines = first[: len(first) - len(first.lstrip("\n"))]
    lead += lines
    if begin:
        begin = begin.lstrip("\n")
    else:
        opening = opening.lstrip("\n")
        if around.is_repeated:
            between += lines
    return CallForm(opening, middle, closing, style, lead, begin, between, finish, last)


def _fallback(shown: str, default: CallForm) -> CallForm:
    """Choose a format if inference fails: ``HERMES`` for JSON calls in its tag, even with reordered keys."""
    if _NAMES[0] not in shown:
        return default
    _, tag, rest = shown.partition(HERMES.tag)
    if not tag:
        return TAGGED
    try:
        call, _ = _DECODER.raw_decode(rest.lstrip())
    except ValueError:
        return TAGGED
    if isinstance(call, dict) and call.keys() >= {"name", "arguments"}:
        return HERMES
    return TAGGED


def _writes(form: CallForm, text: str, count: int, ends: tuple[str, str]) -> bool:
    """Check if the format reproduces rendered calls, ignoring whitespace and the turn's end."""
    calls = []
    for name, key, value in zip(_NAMES, _KEYS, _VALUES, strict=True):
        calls.append(Call(name, json.dumps({key: value}), "", "ok"))
    pieces = write_calls(calls[:count], form, behind_text=False)
    written = "".join(text_of(pieces).split())
    shown = "".join(text.split())
    rest = shown[len(written) :]
    return shown.startswith(written) and (not rest or rest.startswith(ends))


def _render(tokenizer: Tokenizer, calls: list[Arguments], content: str, variables: Mapping[str, Any]) -> str | None:
    """Render a conversation with calls. None if the template refuses."""
    made = []
    for number, (name, arguments) in enumerate(zip(_NAMES, calls, strict=False)):
        function = {"name": name, "arguments": arguments}
        made.append({"id": f"call0000{number}", "type": "function", "function": function})
    called = {"role": "assistant", "content": content, "tool_calls": made}
    with suppress(UsageError):
        return render_dicts(tokenizer, [{"role": "user", "content": _QUESTION}, called], variables, prompt=False)
    return None


def _arguments(rest: str, two: str) -> tuple[str, Style, str] | None:
    """Infer (text before arguments, argument style, text after). ``two`` has a second argument."""
    keyword = f'({_KEYS[0]}="{_VALUES[0]}")'
    if rest.startswith(keyword):
        return "(", "python", rest[len(keyword) - 1 :]
    for match in re.finditer(r'[{"]', rest[: rest.index(_KEYS[0])]):
        place = match.start()
        style: Style = "json"
        try:
            value, end = _DECODER.raw_decode(rest, place)
            if isinstance(value, str):
                style = "quoted"
                value = json.loads(value)
        except ValueError:
            continue
        if value == {_KEYS[0]: _VALUES[0]}:
            return rest[:place], style, rest[end:]
    return _parameters(rest, two)


def _parameters(one: str, two: str) -> tuple[str, Parameters, str] | None:
    """Infer (text before parameters, parameter delimiters, text after) from calls with one and two parameters."""
    first, _, rest = one.partition(_KEYS[0])
    inner, valued, post = rest.partition(_VALUES[0])
    again, _, gap = two.partition(_VALUES[0])
    gap, second, _ = gap.partition(_KEYS[1] + inner + _VALUES[1])
    if not valued or not second or again != first + _KEYS[0] + inner:
        return None
    before = _snapped(_common_suffix(gap, first), gap)
    after = gap[: len(gap) - len(before)]
    if not post.startswith(after) or not before or not inner:
        return None
    return first[: len(first) - len(before)], Parameters(before, inner, after), post[len(after) :]


def _gap(text: str, middle: str, style: Style) -> str | None:
    """Extract text between the first call's arguments and the second call's name. None if only one is shown."""
    behind_name = text.partition(_NAMES[0])[2]
    first, found, _ = behind_name.partition(_NAMES[1])
    if not found:
        return None
    behind_value = first.partition(_VALUES[0])[2]
    if style == "python":
        return behind_value.removeprefix('"')
    if isinstance(style, Parameters):
        return behind_value.removeprefix(style.after)
    try:
        _, end = _DECODER.raw_decode(first, len(middle))
    except ValueError:
        return None
    return first[end:]


def _until_end(tokenizer: Tokenizer, post: str, end_text: str) -> tuple[str, int | None]:
    """Split off the turn's ending. Also return the id of the ending if calls use a special one."""
    if end_text and end_text in post:
        return post[: post.index(end_text)], None
    markers = [place for place in markers_of(tokenizer).find(post) if not post.startswith("</", place[0])]
    if not markers:
        return post.rstrip(), None
    start, _, index = markers[-1]
    return post[:start], index


def _snapped(suffix: str, text: str) -> str:
    """Trim a partial tag from the beginning of a suffix."""
    rest = text[: len(text) - len(suffix)]
    if ">" in suffix and _CUT_TAG.search(rest):
        return suffix[suffix.index(">") + 1 :]
    return suffix


def _common_prefix(first: str, second: str) -> str:
    length = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        length += 1
    return first[:length]


def _common_suffix(first: str, second: str) -> str:
    return _common_prefix(first[::-1], second[::-1])[::-1]
