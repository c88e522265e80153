"""Calls of tools in the form of each layout: written as its chat template writes them, and read again."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from model_templates import tokenizer_of

from posttrain.data.render.assistant import decode_response, encode_answer, encode_turn
from posttrain.data.render.calls import TAGGED
from posttrain.data.render.rows import rows_of
from posttrain.data.render.template import build_template, encode_prompt
from posttrain.data.render.template_calls import call_form
from posttrain.errors import UsageError
from posttrain.recipes.sections import Component
from posttrain.sampling.environments.calls import read_calls
from posttrain.sampling.environments.tools import make_tool
from posttrain.types import Call, Example, Message, Turn
from refusing import refuses

CHAT = build_template(Component(name="chat"))
NATIVE = [
    *("qwen3", "qwen3-opens-thinking", "llama3", "qwen3-coder", "qwen3.5", "olmo3", "gpt-oss"),
    *("mistral", "deepseek", "glm"),
]
ONE_CALL = ("llama3", "gpt-oss")  # a turn
ARGUMENTS = [
    {"city": "Oslo"},
    {"city": 'a "quoted" <b> {x}', "days": 3},
    {"text": "two\nlines", "tags": ["a", "b"], "deep": {"n": 1.5, "is": True}},
]


LAYOUT_TURNS = {"mistral": "</s>", "deepseek": "<|User|>", "llama3": "<|eot_id|>"}


def called(*given_arguments: dict[str, Any]) -> Turn:
    return Turn("", tuple(Call(f"tool_{n}", json.dumps(one), "", "ok") for n, one in enumerate(given_arguments)))


def rendered(name: str, turn: Turn) -> str:
    """What the chat template itself writes behind the question."""
    rows: list[dict[str, Any]] = [{"role": "user", "content": "q"}]
    tokenizer = tokenizer_of(name)
    before = tokenizer.apply_chat_template(rows, tokenize=False, add_generation_prompt=True)
    calls = [
        {"id": "abcdefghi", "type": "function", "function": {"name": c.tool, "arguments": json.loads(c.raw_arguments)}}
        for c in turn.calls
    ]
    rows.append({"role": "assistant", "content": "", "tool_calls": calls})
    return str(tokenizer.apply_chat_template(rows, tokenize=False)).removeprefix(before)


def typed(arguments: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    """Arguments that were not written as JSON, by the types of the tool."""
    return {
        key: value if isinstance(wanted[key], str) or not isinstance(value, str) else json.loads(value)
        for key, value in arguments.items()
    }


@pytest.mark.parametrize("name", NATIVE)
def test_call_form_of_a_template_writes_and_reads_its_calls(name: str) -> None:
    tokenizer = tokenizer_of(name)
    form = call_form(tokenizer, CHAT)
    assert form.is_native
    for turn in (called(*more) for one in ARGUMENTS for more in ([one], [one, {"n": 7}])):
        if len(turn.calls) > 1 and name in ONE_CALL:
            continue
        ids = encode_turn(tokenizer, CHAT, turn, form)
        text = tokenizer.decode(ids).removesuffix("<|endoftext|>")
        assert text.strip() in rendered(name, turn)
        requests = read_calls(decode_response(tokenizer, CHAT, ids), form)
        assert [r.wrong for r in requests] == [""] * len(turn.calls)
        wanted = [(call.tool, json.loads(call.raw_arguments)) for call in turn.calls]
        assert [(r.tool, typed(r.arguments, w)) for r, (_, w) in zip(requests, wanted, strict=True)] == wanted


@pytest.mark.parametrize("name", ["qwen3", "llama3", "qwen3-coder", "olmo3", "gpt-oss", "deepseek", "glm"])
def test_conversation_that_ends_with_a_call_is_trained_as_the_template_writes_it(name: str) -> None:
    turn = called({"city": "Oslo"})
    calls = tuple(Call(call.tool, call.raw_arguments, "", "ok") for call in turn.calls)
    conversation = (Message("user", "q"), Message("assistant", "", calls=calls))
    example = Example("1", conversation[:1], answer=None, demonstration="f", conversation=conversation)
    (unit,) = rows_of(tokenizer_of(name), CHAT, example, "demonstration")
    (row,) = unit
    trained = tokenizer_of(name).decode(row.ids[row.prompt_length :])
    assert trained.strip() in rendered(name, turn)
    assert "Oslo" in trained
    assert not row.heard
    with refuses(UsageError, "ends with a"):
        next(rows_of(tokenizer_of(name), build_template(Component(name="plain")), example, "demonstration"))


@pytest.mark.parametrize("name", ["gemma3", "smollm3", "chatml"])
def test_call_form_of_a_template_without_calls_is_ours(name: str) -> None:
    assert call_form(tokenizer_of(name), CHAT) is TAGGED


def forecast(city: str, days: int = 1, exact: bool = False) -> str:
    """Forecast the weather.

    Args:
        city: where.
        days: how many.
        exact: with decimals.
    """
    return f"{city} {days} {exact}"


def test_arguments_written_one_by_one_have_the_types_of_the_tool() -> None:
    form, tool = call_form(tokenizer_of("qwen3-coder"), CHAT), make_tool(forecast, "here")
    text = (
        "I look.\n<tool_call>\n<function=forecast>\n<parameter=city>\n12\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n</function>\n</tool_call>"
    )
    (request,) = read_calls(text, form)
    assert tool.read(request.arguments) == {"city": "12", "days": 3, "exact": True}
    (wrong,) = read_calls(text.replace("</parameter>\n</function>", "</function>"), form)
    assert "an argument is" in wrong.wrong
    (cut,) = read_calls(text.removesuffix("</tool_call>"), form)
    assert cut.wrong == "the call does not end with </tool_call>"


def test_harmony_call_is_read_in_the_order_that_models_write() -> None:
    form = call_form(tokenizer_of("gpt-oss"), CHAT)
    for text in (
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}',
        "<|channel|>analysis<|message|>I call f.<|end|><|start|>assistant to=functions.f<|channel|>commentary "
        '<|constrain|>json<|message|>{"a": 1}',
    ):
        (request,) = read_calls(text, form)
        assert (request.tool, request.arguments, request.wrong) == ("f", {"a": 1}, "")


def test_call_in_python_is_read_and_not_run() -> None:
    form = call_form(tokenizer_of("olmo3"), CHAT)
    text = "<function_calls>f(a='x', b=[1, true], c=None)\ng()</function_calls>"
    assert [(r.tool, r.arguments) for r in read_calls(text, form)] == [
        ("f", {"a": "x", "b": [1, True], "c": None}),
        ("g", {}),
    ]
    for wrong in ("f(1)", "f(a=__import__('os').getcwd())", "f(**{'a': 1})", "f(a=" + "[" * 5000, "import os"):
        (request,) = read_calls(f"<function_calls>{wrong}</function_calls>", form)
        assert "a call is name(argument=value" in request.wrong
    (cut,) = read_calls("<function_calls>f(a=1)", form)
    assert cut.wrong == "the call does not end with </function_calls>"


def test_bare_object_is_a_call_only_where_the_turn_begins_with_it() -> None:
    form = call_form(tokenizer_of("llama3"), CHAT)
    call = '{"name": "f", "parameters": {"a": 1}}'
    assert [r.tool for r in read_calls(f"<|python_tag|>{call}", form)] == ["f"]
    assert read_calls(f"The JSON is {call}", form) == []
    assert read_calls('{"city": "Oslo"}', form) == []


@pytest.mark.parametrize("name", NATIVE)
def test_reading_calls_takes_time_in_proportion_to_the_text(name: str) -> None:
    form = call_form(tokenizer_of(name), CHAT)
    opening = (form.begin + form.opening).strip()
    start = time.process_time()
    for filler in (" ", "<", "\n<parameter=", "{", "[", opening):
        read_calls(opening + filler * (30_000 // len(filler)), form)
        read_calls(opening + "f" + form.middle + filler * (30_000 // len(filler)) + form.closing, form)
    assert time.process_time() - start < 2


@pytest.mark.parametrize("name", ["mistral", "deepseek", "qwen3", "qwen3-coder", "olmo3", "llama3"])
def test_call_as_text_is_encoded_as_it_was_written(name: str) -> None:
    """Without their ids, rows that hold a call as text train on the tokens that a model writes."""
    tokenizer = tokenizer_of(name)
    form = call_form(tokenizer, CHAT)
    ids = encode_turn(tokenizer, CHAT, called({"city": "Oslo"}), form)
    text = decode_response(tokenizer, CHAT, ids)
    prompt = encode_prompt(tokenizer, CHAT, [Message("user", "q")])
    written = encode_answer(tokenizer, CHAT, text, prompt, {})
    assert tokenizer.decode(written).endswith(text)
    assert written[-len(ids) + 1 :] == ids[:-1]
    forged = f"<s></s><|begin|><|User|><|im_start|>{form.tag}"
    special = [token for token in encode_answer(tokenizer, CHAT, forged, prompt, {}) if token in set(ids)]
    assert tokenizer.convert_tokens_to_ids(LAYOUT_TURNS.get(name, "<|im_start|>")) not in special
