"""Calls of tools as a model writes them, read from the text of one of its turns (forms: ``render.calls``)."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from posttrain.environments.tools import ArgumentText
from posttrain.render.calls import CallForm, Parameters

MAX_CALLS = 16  # of one turn
_TAG = re.compile(r"<[^<>]+>|\[[A-Z_/]+\]")
_BETWEEN_OBJECTS = " \t\n,;"
_HARMONY = "to=functions."  # of gpt-oss: the recipient in the header of a message
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Request:
    """A call as it was written. ``wrong`` says what makes it no call; then there are no arguments.

    ``place``: where it begins and ends in the text, its tags included.
    """

    tool: str
    stated: str
    arguments: Mapping[str, Any] | str = ""
    wrong: str = ""
    place: tuple[int, int] = field(default=(0, 0), compare=False)


@dataclass(frozen=True, slots=True)
class _Region:
    """The text of a call between its tags, its place with them, and whether it was closed."""

    content: str
    place: tuple[int, int]
    is_closed: bool = True


def read_calls(text: str, form: CallForm) -> list[Request]:
    """Return the calls in a turn, in order; the one beyond ``MAX_CALLS`` is refused and no later one is read.

    Thinking (up to the last ``</think>``) calls nothing where the form is the chat template's.
    """
    requests: list[Request] = []
    first = text.rfind("</think>") + len("</think>") if form.is_native and "</think>" in text else 0
    for region in _regions(text, first, form):
        if len(requests) == MAX_CALLS:
            wrong = f"one turn calls at most {MAX_CALLS} tools; call again in the next"
            return [*requests, Request("", "", wrong=wrong, place=region.place)]
        if region.is_closed:
            request = _read(region.content.strip(), form)
        else:
            last = form.finish.strip() if form.arguments == "python" else _last_tag(form)
            request = Request("", region.content, wrong=f"the call does not end with {last}")
        requests.append(replace(request, place=region.place))
    return requests


def _regions(text: str, first: int, form: CallForm) -> Iterator[_Region]:
    opening, closing = _first_tag(form), _last_tag(form)
    if form.arguments == "python":
        yield from _functions(text, first, form)
    elif not opening:
        yield from _objects(text, first, form.begin.strip())
    at = text.find(opening, first) if opening and form.arguments != "python" else -1
    while at >= 0:
        start = at + len(opening)
        again = text.find(opening, start)
        end = text.find(closing, start) if closing else (again if again >= 0 else len(text))
        if end < 0 or 0 <= again < end:  # an opening tag inside begins anew
            end = again if again >= 0 else len(text)
            yield _Region(text[start:end].strip(), (at, end), is_closed=False)
            at = again
        else:
            yield _Region(text[start:end], (at, end + len(closing)))
            at = text.find(opening, end + len(closing))


def _objects(text: str, first: int, begin: str) -> Iterator[_Region]:
    """Objects of JSON one after another, after ``begin``; without one the turn has to begin with such a call."""
    at = text.find(begin, first)
    if at < 0:
        return
    start = at + len(begin)
    if not begin:
        start += len(text[start:]) - len(text[start:].lstrip().removeprefix("<|python_tag|>"))
    start += len(text[start:]) - len(text[start:].lstrip(_BETWEEN_OBJECTS + "["))
    while text[start : start + 1] == "{":
        try:
            value, end = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError):
            value, end = None, len(text)
        if (not begin and not isinstance(value, dict | None)) or (not begin and "name" not in (value or {})):
            return
        yield _Region(text[start:end], (at, end))
        at, start = end, end + len(text[end:]) - len(text[end:].lstrip(_BETWEEN_OBJECTS))


def _functions(text: str, first: int, form: CallForm) -> Iterator[_Region]:
    """Calls of functions in Python, one after another between the two tags."""
    begin, finish = form.begin.strip(), form.finish.strip()
    at = text.find(begin, first)
    end = text.find(finish, at + len(begin)) if at >= 0 else -1
    if at >= 0 and end < 0:
        yield _Region(text[at + len(begin) :].strip(), (at, len(text)), is_closed=False)
    if end < 0:
        return
    source, place = text[at + len(begin) : end].strip(), (at, end + len(finish))
    try:
        parts = [ast.get_source_segment(source, one) or "" for one in ast.parse(source).body]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        parts = [source]
    for number, part in enumerate(parts):
        yield _Region(part, place if number == 0 else (place[1], place[1]))


def _first_tag(form: CallForm) -> str:
    opening = form.tags[0]
    if _HARMONY in opening:
        return _HARMONY
    found = _TAG.match(opening) if form.is_native else None
    return found[0] if found else opening


def _last_tag(form: CallForm) -> str:
    closing = form.tags[1]
    found = _TAG.findall(closing) if form.is_native else []
    return found[-1] if found and closing.endswith(found[-1]) else closing


def _read(content: str, form: CallForm) -> Request:
    """The call between the tags."""
    if form.arguments == "plain":
        name, _, stated = content.partition(":")
        return Request(name.strip(), stated.strip(), stated.strip())
    if form.key is not None:
        return _read_object(content, form.key)
    if form.arguments == "python":
        return _read_function(content)
    content = content.removeprefix(form.tags[0].partition(_first_tag(form))[2].strip())
    if isinstance(form.arguments, Parameters):
        return _read_parameters(content, form, form.arguments)
    middle = form.middle.strip()
    if _HARMONY in form.opening:  # models write what stands between in several orders
        found = re.match(r"([\w.-]+)[^{]*?<\|message\|>", content)
        name, stated = (found[1], content[found.end() :]) if found else ("", content)
    elif middle:
        name, _, stated = content.partition(middle)
    else:
        name, brace, stated = content.partition("{")
        stated = brace + stated
    return _read_json(name.strip(), stated)


def _read_object(content: str, key: str) -> Request:
    try:
        call = json.loads(content)
    except (ValueError, RecursionError) as error:
        return Request("", content, wrong=f"the call is no JSON ({error})")
    arguments = call.get(key, {}) if isinstance(call, dict) else None
    if isinstance(call, dict) and isinstance(call.get("name"), str):
        if isinstance(arguments, str):  # some models write the object as a text
            return _read_json(call["name"], arguments or "{}")
        if isinstance(arguments, dict):
            return Request(call["name"], json.dumps(arguments, ensure_ascii=False), arguments)
    return Request("", content, wrong=f'a call is {{"name": "...", "{key}": {{...}}}}')


class _Constants(ast.NodeTransformer):
    """Replaces JSON's names of constants, which models mix with those of Python."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        named = {"true": True, "false": False, "null": None}
        return ast.Constant(named[node.id]) if node.id in named else node


def _read_function(content: str) -> Request:
    """A call written as one of a function in Python, with keywords; its source is read and never run."""
    try:
        call = ast.parse(content, mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
            raise ValueError("it is no function with arguments by name")
        arguments = {str(k.arg): ast.literal_eval(_Constants().visit(k.value)) for k in call.keywords}
        stated = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        return Request("", content, wrong=f"a call is name(argument=value, ...) ({error})")
    return Request(ast.unparse(call.func), stated, arguments)


def _read_json(name: str, stated: str) -> Request:
    """A call whose arguments are an object of JSON, or the text of one."""
    try:
        arguments = _DECODER.raw_decode(stated.lstrip())[0]
        if isinstance(arguments, str):
            arguments = json.loads(arguments or "{}")
    except (ValueError, RecursionError) as error:
        return Request("", stated.strip(), wrong=f"the call is no JSON ({error})")
    if not name or not isinstance(arguments, dict):
        return Request("", stated.strip(), wrong="a call is a name and an object of JSON")
    return Request(name, json.dumps(arguments, ensure_ascii=False), arguments)


def _read_parameters(content: str, form: CallForm, around: Parameters) -> Request:
    """A call whose arguments are written one by one."""
    before, middle, after = (_loosely(text) for text in (around.before, around.middle, around.after))
    rest_of_closing = _loosely(form.tags[1].removesuffix(_last_tag(form)))
    one = f"{before}(?P<key>[^<>\\s]+?){middle}(?P<value>.*?){after}(?={before}|{rest_of_closing}\\Z)"
    name = re.match(rf"\s*(?P<name>[^<>\s]+?){_loosely(form.middle)}(?=\s*(?:{before}|{rest_of_closing}\Z))", content)
    if name is None:
        return Request("", content, wrong=f"a call is {form.opening}NAME{form.middle}{around.before}...")
    at, arguments = name.end(), dict[str, ArgumentText]()
    for found in re.finditer(one, content[at:], re.DOTALL):
        arguments[found["key"]] = ArgumentText(found["value"])
        end = at + found.end()
    rest = content[end:] if arguments else content[at:]
    if not re.fullmatch(rf"\s*{rest_of_closing}\s*", rest):
        return Request("", content, wrong=f"an argument is {around.before}NAME{around.middle}VALUE{around.after}")
    return Request(name["name"], json.dumps(arguments, ensure_ascii=False), arguments)


def _loosely(text: str) -> str:
    """A pattern for the text in which white space may be more or less."""
    return r"\s{0,8}".join(re.escape(word) for word in re.split(r"\s+", text))  # bounded, so that no text takes long
