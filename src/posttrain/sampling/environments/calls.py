"""Parse tool calls from model output (call formats: ``data/render/calls.py``)."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from posttrain.data.render.calls import CallForm, Parameters
from posttrain.sampling.environments.tools import ArgumentText, by_name, properties_of, read_argument

MAX_CALLS = 16  # per turn
_TAG = re.compile(r"<[^<>]+>|\[[A-Z_/]+\]")
_BETWEEN_OBJECTS = " \t\n,;"
_HARMONY = "to=functions."  # gpt-oss: recipient in a message header
_PYTHON_TEXT = r"""(?:"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'?)"""
_PYTHON_CALLS = re.compile(r"\[\s{0,8}[\w.]+\(\s{0,8}(?:\w+\s{0,8}=|\))")
_LISTED = re.compile(r'\[\s{0,8}\{\s{0,8}"\w+"\s{0,8}:\s{0,8}["{]')
_MARK = re.compile(r"\[[A-Z_]+\]")  # some models append a call id after it
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Request:
    """A parsed call. ``wrong``: error message if invalid. ``place``: start and end including tags."""

    tool: str
    raw_arguments: str
    arguments: Mapping[str, Any] | str = ""
    wrong: str = ""
    place: tuple[int, int] = field(default=(0, 0), compare=False)


@dataclass(frozen=True, slots=True)
class _Region:
    """Text between call tags, its position including tags, and a flag for a closing tag."""

    content: str
    place: tuple[int, int]
    is_closed: bool = True


def read_calls(text: str, form: CallForm) -> list[Request]:
    """Parse all calls in a turn, in order. Call ``MAX_CALLS`` + 1 is refused, and later ones are ignored.

    With native call formats, calls within thinking (up to the last ``</think>``) are ignored.
    """
    requests: list[Request] = []
    first = 0
    if form.is_native and "</think>" in text:
        first = text.rfind("</think>") + len("</think>")
    for region in _regions(text, first, form):
        if len(requests) == MAX_CALLS:
            wrong = f"one turn calls at most {MAX_CALLS} tools; call again in the next"
            return [*requests, Request("", "", wrong=wrong, place=region.place)]
        if region.is_closed:
            request = _read(region.content.strip(), form)
        else:
            last = _last_tag(form)
            if form.arguments == "python":
                last = form.finish.strip()
            request = Request("", region.content, wrong=f"the call does not end with {last}")
        requests.append(replace(request, place=region.place))
    return requests


def split_calls(
    text: str, requests: Sequence[Request], schemas: Sequence[Mapping[str, Any]]
) -> tuple[str, list[tuple[str, str]]]:
    """Split a turn into the text around its calls, and (name, arguments as JSON) for each call.

    A call that cannot be parsed remains text.

    Args:
        requests: result of ``read_calls``.
        schemas: tools in OpenAI's format; string parameters are taken verbatim.
    """
    outside = []
    calls = []
    at = 0
    for request in requests:
        arguments = _arguments_as_json(request, schemas)
        if arguments is None:
            continue
        start, end = request.place
        outside.append(text[at:start])
        at = end
        calls.append((request.tool, arguments))
    return "".join([*outside, text[at:]]), calls


def _arguments_as_json(request: Request, schemas: Sequence[Mapping[str, Any]]) -> str | None:
    """Convert call arguments to JSON; None if the call is invalid or the arguments are not an object."""
    if request.wrong or not request.tool:
        return None
    nothing: Mapping[str, object] = {"function": {}}
    schema = next((one for one in schemas if one["function"]["name"] == request.tool), nothing)
    texts = {}
    for name, one in properties_of(schema).items():
        texts[name] = isinstance(one, Mapping) and one.get("type") == "string"
    try:
        raw_arguments = request.arguments
        if isinstance(raw_arguments, str):
            by_key = by_name(request.tool, texts, raw_arguments)
        else:
            by_key = raw_arguments
        return _written({key: read_argument(value, texts.get(key, True)) for key, value in by_key.items()})
    except (ValueError, RecursionError):
        return None


def _regions(text: str, first: int, form: CallForm) -> Iterator[_Region]:
    opening = _first_tag(form)
    if form.arguments == "python":
        yield from _functions(text, first, form)
    elif opening:
        yield from _tagged(text, first, form, opening, _last_tag(form))
    else:
        yield from _objects(text, first, form)


def _tagged(text: str, first: int, form: CallForm, opening: str, closing: str) -> Iterator[_Region]:
    """Find calls between tags. If a closing tag is missing, a call ends at the next opening tag."""
    at = text.find(opening, first)
    while at >= 0:
        start = at + len(opening)
        inside = start
        if form.arguments in ("json", "quoted"):
            inside = _object_end(text, start, closing or opening)
        again = text.find(opening, inside)
        following = len(text)  # start of the next call
        if again >= 0:
            following = again
        end = following
        if closing:
            end = text.find(closing, inside)
        if end < 0 or 0 <= again < end:  # a nested opening tag starts over
            yield _Region(text[start:following].strip(), (at, following), is_closed=False)
            at = again
        else:
            yield _Region(text[start:end], (at, end + len(closing)))
            at = text.find(opening, end + len(closing))


def _object_end(text: str, start: int, tag: str) -> int:
    """Find where a call's JSON object ends, since its strings may contain tags; ``start`` if invalid."""
    brace = text.find("{", start)
    if brace < 0 or tag in text[start:brace]:
        return start
    try:
        _, end = _DECODER.raw_decode(text, brace)
        return end
    except (ValueError, RecursionError):
        return start


def _find_begin(text: str, first: int, form: CallForm) -> int:
    """Find where calls begin, or -1. A lone bracket is ambiguous, so it must be followed by a call."""
    begin = form.begin.strip()
    if begin != "[":
        return text.find(begin, first)
    pattern = _LISTED
    if form.arguments == "python":
        pattern = _PYTHON_CALLS
    found = pattern.search(text, first)
    if found:
        return found.start()
    return -1


def _objects(text: str, first: int, form: CallForm) -> Iterator[_Region]:
    """Find consecutive JSON objects after ``begin``. Without ``begin``, the turn must start with a call."""
    begin = form.begin.strip()
    at = _find_begin(text, first, form)
    while at >= 0:
        start = at + len(begin)
        if not begin:
            start = _skip(text, start, None)
            if text.startswith("<|python_tag|>", start):
                start += len("<|python_tag|>")
        start = _skip(text, start, _BETWEEN_OBJECTS + "[")
        if not text.startswith("{", start):
            return
        while text.startswith("{", start):
            try:
                value, end = _DECODER.raw_decode(text, start)
            except (ValueError, RecursionError):
                value = None
                end = len(text)
            if begin in ("", "["):
                call = _inner(value, form)
                if call is None or form.name_key[1] not in call:
                    return
            yield _Region(text[start:end], (at, end))
            at = end
            start = _skip(text, end, _BETWEEN_OBJECTS)
        if not begin:
            return
        at = _find_begin(text, at, form)


def _skip(text: str, start: int, characters: str | None) -> int:
    """Skip ``characters`` (None: white space) from ``start`` on."""
    return len(text) - len(text[start:].lstrip(characters))


def _functions(text: str, first: int, form: CallForm) -> Iterator[_Region]:
    """Find consecutive Python function calls between two tags."""
    begin = form.begin.strip()
    finish = form.finish.strip()
    at = _find_begin(text, first, form)
    while at >= 0:
        start = at + len(begin)
        end = _end_of_code(text, start, finish)
        if end < 0:
            yield _Region(text[start:].strip(), (at, len(text)), is_closed=False)
            return
        source = text[start:end].strip()
        last = end + len(finish)
        place = (at, last)
        for part in _parts(source):
            yield _Region(part, place)
            place = (last, last)  # the first call covers everything
        at = _find_begin(text, last, form)


def _parts(source: str) -> list[str]:
    """Split Python source into calls, separated by lines or commas."""
    try:
        calls: list[ast.AST] = []
        for statement in ast.parse(source).body:
            line: ast.AST = statement
            if isinstance(statement, ast.Expr):
                line = statement.value
            if isinstance(line, ast.Tuple):
                calls += line.elts
            else:
                calls.append(line)
        return [ast.get_source_segment(source, call) or "" for call in calls]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [source]


def _end_of_code(text: str, start: int, finish: str) -> int:
    """Find ``finish`` outside strings and brackets, else its first occurrence, else -1."""
    depth = 0
    for found in re.finditer(rf"{_PYTHON_TEXT}|(?P<end>{re.escape(finish)})|[\[({{]|[\])}}]", text[start:]):
        if not found["end"]:
            inside = found[0]
        elif depth == 0:
            return start + found.start()
        else:
            inside = found[0][0]
        if inside in "[({":
            depth += 1
        if inside in "])}":
            depth -= 1
    return text.find(finish, start)


def _first_tag(form: CallForm) -> str:
    opening = form.tags[0]
    if _HARMONY in opening:
        return _HARMONY
    if not form.is_native:
        return opening
    found = _TAG.match(opening)
    if found:
        return found[0]
    return opening


def _rest_of_opening(form: CallForm) -> str:
    tag = _first_tag(form)
    if tag:
        return form.tags[0].partition(tag)[2].strip()
    return ""


def _last_tag(form: CallForm) -> str:
    closing = form.tags[1]
    if not form.is_native:
        return closing
    found = _TAG.findall(closing)
    if found and closing.endswith(found[-1]):
        return found[-1]
    return closing


def _read(content: str, form: CallForm) -> Request:
    """Parse the text between call tags."""
    if form.arguments == "plain":
        name, _, raw_arguments = content.partition(":")
        return Request(name.strip(), raw_arguments.strip(), raw_arguments.strip())
    if form.key is not None:
        return _read_object(content, form, form.key)
    if form.arguments == "python":
        return _read_function(content)
    content = content.removeprefix(_rest_of_opening(form))
    if isinstance(form.arguments, Parameters):
        return _read_parameters(content, form, form.arguments)
    middle = form.middle.strip()
    if _HARMONY in form.opening:  # models vary the order of header parts
        name = ""
        raw_arguments = content
        found = re.match(r"([\w.-]+)[^{]*?<\|message\|>", content)
        if found:
            name = found[1]
            raw_arguments = content[found.end() :]
    elif middle:
        name, _, raw_arguments = content.partition(middle)
    else:
        name, brace, raw_arguments = content.partition("{")
        raw_arguments = brace + raw_arguments
    name = _MARK.split(name, maxsplit=1)[0]
    return _read_json(name.strip(), raw_arguments)


def _inner(call: object, form: CallForm) -> dict[str, Any] | None:
    """Select the object containing name and arguments, or None."""
    outer = form.name_key[0]
    inner = call
    if outer and isinstance(call, dict):
        inner = call.get(outer)
    if isinstance(inner, dict):
        return inner
    return None


def _read_object(content: str, form: CallForm, key: str) -> Request:
    name = form.name_key[1]
    try:
        written = json.loads(content.removeprefix(_rest_of_opening(form)))
        call = _inner(written, form)
    except (ValueError, RecursionError) as error:
        return Request("", content, wrong=f"the call is no JSON ({error})")
    if call is not None and isinstance(call.get(name), str):
        arguments = call.get(key, {})
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments)
        return _read_json(call[name], arguments or "{}")
    return Request("", content, wrong=f'a call is {{"{name}": "...", "{key}": {{...}}}}')


class _Constants(ast.NodeTransformer):
    """Replaces JSON constants, which models mix with Python constants."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        named = {"true": True, "false": False, "null": None}
        if node.id in named:
            return ast.Constant(named[node.id])
        return node


def _read_function(content: str) -> Request:
    """Parse a Python-style call with keyword arguments. It is never executed."""
    try:
        call = ast.parse(content, mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
            raise ValueError("it is no function with arguments by name")
        arguments = {}
        for keyword in call.keywords:
            arguments[str(keyword.arg)] = ast.literal_eval(_Constants().visit(keyword.value))
        raw_arguments = _written(arguments)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        return Request("", content, wrong=f"a call is name(argument=value, ...) ({error})")
    return Request(ast.unparse(call.func), raw_arguments, arguments)


def _written(arguments: object) -> str:
    """Serialize arguments as JSON.

    Raises:
        ValueError: NaN, infinity, or a lone surrogate.
    """
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    written.encode()
    return written


def _read_json(name: str, raw_arguments: str) -> Request:
    """Parse a call whose arguments are a JSON object, possibly encoded as a string."""
    try:
        arguments, _ = _DECODER.raw_decode(raw_arguments.lstrip())
        if isinstance(arguments, str):
            arguments = json.loads(arguments or "{}")
        written = _written(arguments)
    except (ValueError, RecursionError) as error:
        return Request("", raw_arguments.strip(), wrong=f"the call is no JSON ({error})")
    if not name or not isinstance(arguments, dict):
        return Request("", raw_arguments.strip(), wrong="a call is a name and an object of JSON")
    return Request(name, written, arguments)


def _read_parameters(content: str, form: CallForm, around: Parameters) -> Request:
    """Parse a call with individually tagged arguments."""
    before = _loosely(around.before)
    middle = _loosely(around.middle)
    after = _loosely(around.after)
    rest_of_closing = _loosely(form.tags[1].removesuffix(_last_tag(form)))
    one = f"{before}(?P<key>[^<>\\s]+?){middle}(?P<value>.*?){after}(?=\\s{{0,8}}(?:{before}|{rest_of_closing}\\Z))"
    name = re.match(rf"\s*(?P<name>[^<>\s]+?){_loosely(form.middle)}(?=\s*(?:{before}|{rest_of_closing}\Z))", content)
    if name is None:
        return Request("", content, wrong=f"a call is {form.opening}NAME{form.middle}{around.before}...")
    at = name.end()
    arguments = dict[str, ArgumentText]()
    end = at
    for found in re.finditer(one, content[at:], re.DOTALL):
        arguments[found["key"]] = ArgumentText(found["value"])
        end = at + found.end()
    rest = content[end:]
    if not re.fullmatch(rf"\s*{rest_of_closing}\s*", rest):
        return Request("", content, wrong=f"an argument is {around.before}NAME{around.middle}VALUE{around.after}")
    return Request(name["name"], json.dumps(arguments, ensure_ascii=False), arguments)


def _loosely(text: str) -> str:
    """Build a pattern that tolerates varying white space."""
    words = [re.escape(word) for word in re.split(r"\s+", text)]
    return r"\s{0,8}".join(words)  # bounded, to limit matching time
