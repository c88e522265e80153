"""Schemas from signatures, and calls as models write them."""

from __future__ import annotations

import json

import pytest

import example_environments as mine
from posttrain.data.render.calls import HERMES, TAGGED
from posttrain.sampling.environments.calls import MAX_CALLS, Request, read_calls
from posttrain.sampling.environments.tools import MAX_RESULT_CHARS, describe_tools, make_tool, result_text
from refusing import refuses


def test_the_signature_is_the_schema() -> None:
    tool = make_tool(mine.Echo.echo, "here", method=True)
    assert tool.schema == {
        "type": "function",
        "function": {
            "name": "echo",
            "description": "Echo the message.",
            "parameters": {
                "type": "object",
                "properties": {
                    "message": {"type": "string", "description": "What to say."},
                    "times": {"type": "integer", "default": 1, "description": "How often."},
                },
                "required": ["message"],
            },
        },
    }
    assert describe_tools([tool.schema]).endswith(
        "- echo: Echo the message. It takes: message (string), times (integer)."
    )


@pytest.mark.parametrize(
    ("given_arguments", "arguments"),
    [({"a": 2, "b": 3}, {"a": 2, "b": 3}), ({"a": "2"}, {"a": 2, "b": 0}), ('{"a": 2, "b": 3}', {"a": 2, "b": 3})],
)
def test_arguments_are_of_the_types_requested(given_arguments, arguments) -> None:
    assert make_tool(mine.add, "here").read(given_arguments) == arguments


@pytest.mark.parametrize(
    ("given_arguments", "message"),
    [
        ({"a": "two"}, "a:"),
        ({"b": 1}, "'a'"),
        ({"a": 1, "c": 1}, "'c'"),
        ("2", "give its arguments"),
        ('{"a": 2', "arguments are no"),
    ],
)
def test_what_is_wrong_with_arguments_is_reported(given_arguments, message: str) -> None:
    with refuses(ValueError, message):
        make_tool(mine.add, "here").read(given_arguments)


def test_the_bare_text_of_the_only_argument() -> None:
    assert make_tool(mine.slow_or_quick, "here").read("12") == {"milliseconds": 12}
    assert make_tool(mine.Echo.fail, "here", method=True).read("12") == {"reason": "12"}
    assert make_tool(mine.Hanging.answer, "here", method=True).read("") == {}


def test_calls_in_hermes_form() -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert read_calls(f"so {call} and {call}", HERMES) == [Request("add", '{"a": 1}', {"a": 1})] * 2
    assert read_calls(f"<think>I could {call}</think> no", HERMES) == []
    assert read_calls("nothing", HERMES) == []
    as_text = '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert read_calls(as_text, HERMES) == [Request("add", '{"a": 1}', {"a": 1})]
    for wrong, message in (
        ("<tool_call>add(1)</tool_call>", "no JSON"),
        ('<tool_call>{"tool": "add"}</tool_call>', 'a call is {"name"'),
        ('<tool_call>{"name": "add"}', "does not end with </tool_call>"),
        ("<tool_call>[1]</tool_call>", 'a call is {"name"'),
    ):
        (request,) = read_calls(wrong, HERMES)
        assert message in request.wrong
    assert read_calls("<tool_call>" + "[" * 100_000 + "</tool_call>", HERMES)[0].wrong


def test_calls_in_tagged_form() -> None:
    assert read_calls(" 2 + 3 is <tool>calculator: 2 + 3</tool>", TAGGED) == [Request("calculator", "2 + 3", "2 + 3")]
    assert read_calls("<tool>stop</tool>", TAGGED) == [Request("stop", "", "")]
    assert [r.wrong for r in read_calls("<tool>a: 1 <tool>b: 2</tool>", TAGGED)] == [
        "the call does not end with </tool>",
        "",
    ]
    many = read_calls("<tool>a: 1</tool>" * 100, TAGGED)
    assert len(many) == MAX_CALLS + 1
    assert "at most 16 tools" in many[-1].wrong


def test_results_are_text_of_a_bounded_length() -> None:
    assert result_text({"a": [1, None]}) == '{"a": [1, null]}'
    assert result_text(None) == "null"
    assert result_text({1, 2}) == "{1, 2}"
    assert result_text("\ud800") == "\\ud800"
    assert len(result_text("x" * 10**6)) == MAX_RESULT_CHARS + len(" ... (cut off)")
    assert json.loads(result_text(3)) == 3
