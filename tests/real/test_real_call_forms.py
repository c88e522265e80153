"""Forms of calls of further families: learnt where they can be written and read again, else ours; hostile answers."""

from __future__ import annotations

import json
import time
from copy import copy
from typing import Any

import pytest
from model_templates import CHATML, QWEN3, tokenizer_of

from posttrain.data.render.calls import HERMES, TAGGED, CallForm, write_calls
from posttrain.data.render.chat_template import render_dicts
from posttrain.data.render.template import build_template
from posttrain.data.render.template_calls import call_form
from posttrain.recipes.sections import Component
from posttrain.sampling.environments.calls import Request, read_calls
from posttrain.types import Call

CHAT = build_template(Component(name="chat"))
JSON = "call.function.arguments | tojson"
KEYWORDS = (
    "{{- call.function.name + '(' }}{% for k, v in call.function.arguments | items %}"
    "{{- k + '=' + v | tojson + (', ' if not loop.last else '') }}{% endfor %}{{- ')' }}"
)


def chat(call: str, begin: str = "", finish: str = "", between: str = "") -> str:
    """A chat template that writes each call so, and these texts around them."""
    return (
        "{% if tools %}{{- tools | tojson }}{% endif %}{% for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}"
        "{{- m.content }}{% if m.tool_calls %}{{- '" + begin + "' }}{% for call in m.tool_calls %}" + call + "{{- '"
        "' if loop.last else '" + between + "' }}{% endfor %}{{- '" + finish + "' }}{% endif %}"
        "{{- '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"
    )


LEARNT = {
    "a name and marks": chat("{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + " + JSON + " }}"),
    "an id behind a mark": chat(
        "{{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]' + " + JSON + " }}"
    ),
    "an id in the object": chat(
        "{{- '{\"name\": \"' + call.function.name + '\", \"arguments\": ' + " + JSON + " }}"
        "{{- ', \"id\": \"' + call.id + '\"}' }}",
        "[TOOL_CALLS] [", "]", ", ",
    ),
    "another key of the name": chat(
        "{{- '  {\"tool_name\": \"' + call.function.name + '\", \"parameters\": ' + " + JSON + " + '}' }}",
        "\nAction: ```json\n[\n", "\n]```", ",\n",
    ),
    "a number in front": chat(
        "{{- '{\"tool_call_id\": \"' + loop.index0 | string + '\", \"tool_name\": \"' + call.function.name }}"
        "{{- '\", \"parameters\": ' + " + JSON + " + '}' }}",
        "<|START_ACTION|>[", "]<|END_ACTION|>", ", ",
    ),
    "an object in another": chat("", "<calls>' + m.tool_calls | tojson + '</calls>"),
    "two marks": chat("{{- '<|action|><|plugin|>\n' + call.function | tojson + '<|end|>' }}"),
    "tags in tags": chat(
        "{{- '<call>' + call.function.name + '<sep>' + " + JSON + " + '</call>' }}", "<calls>", "</calls>"
    ),
    "keys in tags": chat(
        "{{- '<invoke name=\"' + call.function.name + '\">\n' }}{% for k, v in call.function.arguments | items %}"
        "{{- '<parameter name=\"' + k + '\">' + (v if v is string else v | tojson) + '</parameter>\n' }}{% endfor %}"
        "{{- '</invoke>\n' }}",
        "\n<calls>\n", "</calls>",
    ),
    "keys in tags without lines": chat(
        "{{- '<call>\n<function=' + call.function.name + '>\n' }}{% for k, v in call.function.arguments | items %}"
        "{{- '<parameter=' + k + '>' + (v if v is string else v | tojson) + '</parameter>\n' }}{% endfor %}"
        "{{- '</function>\n</call>' }}"
    ),
    "a list of functions": chat(KEYWORDS, "[", "]", ", "),
    "a marked list of functions": chat(KEYWORDS, "<|start|>[", "]<|stop|>", ", "),
    "a function in a block": chat("{{- '```tool_code\n' }}" + KEYWORDS + "{{- '\n```' }}"),
    "a list of objects": chat("{{- call.function | tojson }}", "[", "]", ", "),
    "calls only with tools": chat("{{- '<c>' + call.function.name + ' ' + " + JSON + " + '</c>' if tools }}"),
    "arguments as text": chat("{{- '<c>' + call.function.name + ' ' + call.function.arguments + '</c>' }}"),
}  # fmt: skip
OURS = {
    "a number behind the name": chat("{{- '<c>' + call.function.name + ':' + loop.index0 | string + " + JSON + " }}"),
    "only an id": chat("{{- '<c>' + call.id + " + JSON + " + '</c>' }}"),
    "a changed name": chat("{{- '<c>' + call.function.name | upper + ':' + " + JSON + " + '</c>' }}"),
    "the name as the key": chat(
        "{{- '{\"' + call.function.name + '\": ' + " + JSON + " + '}' }}", "<c>[", "]</c>", ", "
    ),
    "nothing between two": chat("{{- call.function.name + '\n' + " + JSON + " }}", "<|assistant|>"),
    "as Python prints it": chat("{{- '<tool_call>' + call.function.name + call.function.arguments | string }}"),
    "texts in marks": chat(
        "{{- '<c>call:' + call.function.name + '{' }}{% for k, v in call.function.arguments | items %}"
        "{{- k + ':<q>' + v | string + '<q>' }}{% endfor %}{{- '}</c>' }}"
    ),
}
CALL_ARGUMENTS: list[dict[str, Any]] = [
    {"city": "Oslo"},
    {"a": 'a "b" <c> [x]\'s', "n": 3},
    {"t": "two\nlines é", "l": ["a", [1]], "d": {"n": None}},
]


def form_of(template: Any) -> CallForm:
    tokenizer = copy(tokenizer_of("chatml"))
    tokenizer.chat_template = template
    return call_form(tokenizer, CHAT)


def written(form: CallForm, *given_arguments: dict[str, Any], behind: bool = False) -> str:
    calls = [Call(f"tool_{n}", json.dumps(one, ensure_ascii=False), "", "ok") for n, one in enumerate(given_arguments)]
    return "".join(piece.text for piece in write_calls(calls, form, behind))


def values(request: Request, wanted: dict[str, Any]) -> dict[str, Any]:
    assert isinstance(request.arguments, dict), request.wrong
    is_text = {key: isinstance(value, str) for key, value in wanted.items()}
    return {k: v if is_text[k] or not isinstance(v, str) else json.loads(v) for k, v in request.arguments.items()}


@pytest.mark.parametrize("name", LEARNT)
def test_form_of_a_family_is_learnt_and_what_it_and_the_template_write_is_read(name: str) -> None:
    form = form_of(LEARNT[name])
    assert form.is_native
    tokenizer = copy(tokenizer_of("chatml"))
    tokenizer.chat_template = LEARNT[name]
    turns: list[list[dict[str, Any]]] = [
        CALL_ARGUMENTS[:1],
        CALL_ARGUMENTS[1:2],
        CALL_ARGUMENTS[2:],
        [{}],
        CALL_ARGUMENTS[1:],
    ]
    for given_arguments in turns:
        is_text = name == "arguments as text"
        calls = [
            {
                "id": "abcdefghi",
                "type": "function",
                "function": {"name": f"tool_{n}", "arguments": json.dumps(one, ensure_ascii=False) if is_text else one},
            }
            for n, one in enumerate(given_arguments)
        ]
        rows: list[dict[str, Any]] = [{"role": "user", "content": "q"}]
        rows.append({"role": "assistant", "content": "I look.", "tool_calls": calls})
        shown = render_dicts(tokenizer, rows, {"tools": [{}]}, prompt=False).partition("assistant\n")[2]
        own = "I look." + written(form, *given_arguments, behind=True)
        if not {"id", "number"} & set(name.split()) and name != "an object in another":
            assert shown == own + "<|im_end|>\n"
        for text in (own, shown.removesuffix("<|im_end|>\n")):
            requests = read_calls(text, form)
            assert [(r.wrong, r.tool) for r in requests] == [("", f"tool_{n}") for n in range(len(given_arguments))]
            assert [values(r, one) for r, one in zip(requests, given_arguments, strict=True)] == given_arguments


@pytest.mark.parametrize("name", ["a function in a block", "an id in the object", "two marks", "keys in tags"])
def test_reading_calls_takes_time_in_proportion_to_the_text(name: str) -> None:
    form = form_of(LEARNT[name])
    begin, call = form.begin + form.opening, written(form, {"a": 1})
    start = time.process_time()
    for filler in (" ", "<", "{", "[", "[{", "f(", '"', '\\"', "'", begin, call):
        text = filler * (30_000 // len(filler))
        for one in (text, begin + text, begin + "f" + form.middle + text + form.closing + form.finish):
            read_calls(one, form)
    assert time.process_time() - start < 4


@pytest.mark.parametrize("name", OURS)
def test_form_that_cannot_be_written_or_read_is_ours(name: str) -> None:
    assert form_of(OURS[name]) is TAGGED


def test_hermes_call_with_its_arguments_first_is_that_of_hermes() -> None:
    call = "{{- {'arguments': call.function.arguments, 'name': call.function.name} | tojson + '\n</tool_call>' }}"
    assert form_of(chat("{{- '<tool_call>\n' }}" + call)) is HERMES
    text = '<tool_call>\n{"arguments": {"a": 1}, "name": "f"}\n</tool_call>'
    assert [(r.tool, r.arguments) for r in read_calls(text, HERMES)] == [("f", {"a": 1})]


def test_form_is_that_of_the_template_for_tools_where_a_tokenizer_has_several() -> None:
    assert form_of({"default": CHATML, "tool_use": QWEN3}) == call_form(tokenizer_of("qwen3"), CHAT)


def test_tags_are_not_cut_in_two() -> None:
    form = form_of(LEARNT["tags in tags"])
    assert (form.begin, form.opening, form.closing, form.finish) == ("<calls>", "<call>", "</call>", "</calls>")


@pytest.mark.parametrize("name", ["an id in the object", "a list of objects", "a list of functions", "two marks"])
def test_calls_of_a_second_list_are_read(name: str) -> None:
    form = form_of(LEARNT[name])
    text = written(form, {"a": 1}) + "\n\n" + written(form, {"b": 2})
    assert [(r.wrong, r.arguments) for r in read_calls(text, form)] == [("", {"a": 1}), ("", {"b": 2})]


@pytest.mark.parametrize("name", ["a list of objects", "a list of functions"])
def test_bracket_in_a_text_calls_nothing(name: str) -> None:
    assert read_calls("As [1] and [Smith (2020)] say, x[0] = [[1, 2], {}].", form_of(LEARNT[name])) == []


def test_tags_in_the_texts_of_an_object_are_text() -> None:
    for given_arguments in ({"a": "</tool_call>"}, {"a": written(HERMES, {"a": 1})}):
        (request,) = read_calls(written(HERMES, given_arguments), HERMES)
        assert (request.wrong, request.arguments) == ("", given_arguments)


@pytest.mark.parametrize("value", ["NaN", "1e999", '"\\ud800"', "1" * 5000, "[" * 5000])
@pytest.mark.parametrize("name", ["a name and marks", "an object in another", "a marked list of functions"])
def test_value_that_cannot_be_kept_makes_no_call(name: str, value: str) -> None:
    form = form_of(LEARNT[name])
    (request,) = read_calls(written(form, {"a": 7777}).replace("7777", value), form)
    assert request.wrong
    assert not request.arguments
