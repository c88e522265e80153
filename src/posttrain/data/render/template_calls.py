"""The form of calls of a chat template, read from short conversations that it renders."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from posttrain.data.render.calls import HERMES, TAGGED, CallForm, Parameters, Style, object_start, write_calls
from posttrain.data.render.chat_template import probed, render_dicts
from posttrain.data.render.encoding import Tokenizer, markers_of
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
# The id of a call, or its number: a member of an object, or behind a mark. Calls are written without.
_ID = re.compile(
    r'"\w*id"\s*:\s*"?(?:call0000)?\d"?\s*,\s*|\s*,\s*"\w*id"\s*:\s*"?(?:call0000)?\d"?|\[[A-Z_]+\]call0000\d'
)
_EMPTY_THINKING = re.compile(r"\A(?:<think>)?\s*</think>\s*")

Arguments = dict[str, str]


def call_form(tokenizer: Tokenizer, template: Template) -> CallForm:
    """The form of calls: the chat template's own, where it shows tools and calls, else ``TAGGED``.

    A template that shows no call and names the tag of the Hermes models means their form. A form of which what is
    written would not be what the template writes, or could not be read again, is not taken.
    """
    if not template.chat or not re.search(r"\btools\b", str(tokenizer.chat_template or "")):
        return TAGGED

    def find(settings: Mapping[str, Any]) -> CallForm:
        """The form in any conversation, or in those with tools (a tokenizer may have a template for them)."""
        if isinstance(tokenizer.chat_template, dict):
            form = TAGGED
        else:
            form = _learn(tokenizer, settings)
        if form.is_native:
            return form
        return _learn(tokenizer, {**settings, "tools": [_TOOL]})

    return probed(tokenizer, "form", template.variables, find)


def call_marks(tokenizer: Tokenizer, template: Template) -> tuple[str, ...]:
    """The tokens with which calls are written and nothing else is, but for ``<tool_call>`` and its end."""

    def find(settings: Mapping[str, Any]) -> tuple[str, ...]:
        rows = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _TEXT}]
        try:
            plain = "".join(render_dicts(tokenizer, rows[:n], settings, prompt=n == 1) for n in (1, 2))
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
    if HERMES.tag in str(tokenizer.chat_template):
        default = HERMES
    else:
        default = TAGGED
    end = ending(tokenizer)
    end_text = end.text if end is not None else ""
    try:
        prompt = render_dicts(tokenizer, [{"role": "user", "content": _QUESTION}], variables, prompt=True)
    except UsageError:
        return default

    def tail(*arguments: Arguments, content: str = "") -> str:
        rendered = _render(tokenizer, list(arguments), content, variables) or ""
        behind = rendered[len(_CUT_TAG.sub("", _common_prefix(prompt, rendered))) :]
        # a template may write the prompt otherwise once an answer follows
        if _QUESTION in behind:
            return ""
        return _ID.sub("", _EMPTY_THINKING.sub("", behind))

    one = tail({_KEYS[0]: _VALUES[0]})
    before, named, rest = one.partition(_NAMES[0])
    fallback = _fallback(one, default)
    if not named or _KEYS[0] not in rest:
        return fallback
    read = _arguments(rest, tail(dict(zip(_KEYS, _VALUES, strict=True))).partition(_NAMES[0])[2])
    if read is None:
        return fallback
    middle, style, post = read
    closing, last = _until_end(tokenizer, post, end_text)
    opening = before
    begin = ""
    between = "\n"
    finish = ""
    second = tail({_KEYS[0]: _VALUES[0]}, {_KEYS[1]: _VALUES[1]})
    gap = _gap(second, middle, style)
    if gap is not None:
        opening = _snapped(_common_suffix(gap, before), before)
        opening = before[min(len(before) - len(opening), object_start(before)) :]
        begin = before[: len(before) - len(opening)]
        gap = gap[: len(gap) - len(opening)]
        finish = closing
        closing = _CUT_TAG.sub("", _common_prefix(gap, closing))
        finish = finish[len(closing) :]
        between = gap[len(closing) :]
    shown = tail({_KEYS[0]: _VALUES[0]}, content=_TEXT).partition(_TEXT)
    lead = shown[2].partition(_NAMES[0])[0] if shown[1] else ""
    if lead.endswith(begin + opening):
        lead = lead[: len(lead) - len(begin + opening)]
    else:
        lead = "\n"
    if style == "python" and not begin:  # each call in a block of its own
        between = closing[1:] + between + opening
        begin, opening, closing, finish = opening, "", ")", closing[1:]
    # the new lines before a call stand before the first one only behind a text
    first = begin or opening
    lines = first[: len(first) - len(first.lstrip("\n"))]
    lead = lead + lines
    if gap is not None and not begin:
        between = between + lines
    begin, opening = begin.lstrip("\n"), opening if begin else opening.lstrip("\n")
    form = CallForm(opening, middle, closing, style, lead, begin, between, finish, last)
    ends = (end_text, tokenizer.convert_ids_to_tokens(last) if last is not None else end_text)
    probes = [(one, 1), *([(second, 2)] if gap is not None else [])]
    if form.is_readable and all(_writes(form, text, count, ends) for text, count in probes):
        return form
    return fallback


def _fallback(shown: str, default: CallForm) -> CallForm:
    """The form where that of a shown call cannot be learnt: that of Hermes, if the call is one with another order."""
    if _NAMES[0] not in shown:
        return default
    _, tag, rest = shown.partition(HERMES.tag)
    try:
        if tag:
            call = _DECODER.raw_decode(rest.lstrip())[0]
        else:
            call = {}
    except ValueError:
        return TAGGED
    if isinstance(call, dict) and call.keys() >= {"name", "arguments"}:
        return HERMES
    return TAGGED


def _writes(form: CallForm, text: str, count: int, ends: tuple[str, str]) -> bool:
    """Return True if these calls, written in the form, are the template's text up to its end; white space aside."""
    arguments = [json.dumps({key: value}) for key, value in zip(_KEYS, _VALUES, strict=True)]
    calls = [Call(name, one, "", "ok") for name, one in zip(_NAMES, arguments, strict=True)][:count]
    written = "".join("".join(piece.text for piece in write_calls(calls, form, behind_text=False)).split())
    shown = "".join(text.split())
    rest = shown[len(written) :]
    return shown.startswith(written) and (not rest or rest.startswith(ends))


def _render(tokenizer: Tokenizer, calls: list[Arguments], content: str, variables: Mapping[str, Any]) -> str | None:
    """The conversation with these calls; None where the template refuses it."""
    made = [
        {"id": f"call0000{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(zip(_NAMES, calls, strict=False))
    ]
    called = {"role": "assistant", "content": content, "tool_calls": made}
    with suppress(UsageError):
        return render_dicts(tokenizer, [{"role": "user", "content": _QUESTION}, called], variables, prompt=False)
    return None


def _arguments(rest: str, two: str) -> tuple[str, Style, str] | None:
    """(text after the name, style of the arguments, text after them) of a call with one, of which ``two`` has two."""
    keyword = f'({_KEYS[0]}="{_VALUES[0]}")'
    if rest.startswith(keyword):
        return "(", "python", rest[len(keyword) - 1 :]
    for place in [m.start() for m in re.finditer(r'[{"]', rest[: rest.index(_KEYS[0])])]:
        try:
            value, end = _DECODER.raw_decode(rest, place)
            is_quoted = isinstance(value, str)
            if (json.loads(value) if is_quoted else value) == {_KEYS[0]: _VALUES[0]}:
                return rest[:place], "quoted" if is_quoted else "json", rest[end:]
        except ValueError:
            continue
    return _parameters(rest, two)


def _parameters(one: str, two: str) -> tuple[str, Parameters, str] | None:
    """(text after the name, texts around an argument, text after the last) of a call with one and with two."""
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
    """The text between the arguments of the first of two calls and the name of the second; None where it shows one."""
    between = text.partition(_NAMES[0])[2].partition(_NAMES[1])
    if not between[1]:
        return None
    if style == "python" or isinstance(style, Parameters):
        return between[0].partition(_VALUES[0])[2].removeprefix('"' if style == "python" else style.after)
    try:
        return between[0][_DECODER.raw_decode(between[0], len(middle))[1] :]
    except ValueError:
        return None


def _until_end(tokenizer: Tokenizer, post: str, end_text: str) -> tuple[str, int | None]:
    """The text after the arguments up to the end of the turn, and the id of that end where it is another one."""
    if end_text and end_text in post:
        return post[: post.index(end_text)], None
    markers = [place for place in markers_of(tokenizer).find(post) if not post.startswith("</", place[0])]
    if not markers:
        return post.rstrip(), None
    start, _, index = markers[-1]
    return post[:start], index


def _snapped(suffix: str, text: str) -> str:
    """The suffix of a text without the end of a tag with which it begins."""
    is_cut = _CUT_TAG.search(text[: len(text) - len(suffix)]) and ">" in suffix
    if is_cut:
        return suffix[suffix.index(">") + 1 :]
    return suffix


def _common_prefix(first: str, second: str) -> str:
    pairs = zip(first, second, strict=False)
    return first[: next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))]


def _common_suffix(first: str, second: str) -> str:
    return _common_prefix(first[::-1], second[::-1])[::-1]
