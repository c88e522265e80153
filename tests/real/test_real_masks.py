"""What is trained of a conversation: the assistant's turns with their ends, by templates of many kinds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from model_templates import LAYOUTS, tokenizer_of

from posttrain import registry
from posttrain.data.jsonl import jsonl
from posttrain.data.render.rows import TokenRow, TrainOn, rows_of
from posttrain.errors import UsageError
from posttrain.types import Example
from refusing import refuses
from small_runs import make_recipe
from supervised_sources import supervised_source


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def message(text: str, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **keys}


def calls(name: str, text: str = "", **arguments: Any) -> dict[str, Any]:
    return message(text, tool_calls=[{"type": "function", "function": {"name": name, "arguments": arguments}}])


def tool(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text}


FOUR_TURNS = [user("Hi."), message("Hello!"), user("12 + 30?"), message("It is 42.")]
# What a turn begins with where it is not the content: it closes the thinking that the prompt has opened, or names a
# channel. These templates write such a turn otherwise once another follows.
OPENED = {
    "qwen3-opens-thinking": "\n</think>\n\n",
    "qwen3.5": "\n</think>\n\n",
    "gpt-oss": "<|channel|>final<|message|>",
}
TOOL_TURNS = [
    user("Cold in Oslo?"),
    calls("weather", city="Oslo", days=3),
    tool("-5"),
    message("Yes, it is cold."),
    user("And in Rome?"),
    calls("weather", "I look.", city="Rome", days=1),
    tool("15"),
    message("No."),
]


def read(path: Path, row: dict[str, Any], **options: Any) -> Example:
    file = path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n", encoding="utf-8")
    (example,) = jsonl(path=str(file), split="all", **options).examples
    return example


def rows(
    name: str, example: Example, train_on: TrainOn | None = None, template: str = "chat", **options: Any
) -> list[TokenRow]:
    made = registry.find("template", template).bind(options)()
    units = list(rows_of(tokenizer_of(name), made, example, "demonstration", train_on))
    assert not any(isinstance(unit, str) for unit in units), units
    return [row for unit in units for row in unit]  # type: ignore[misc]


def trained_texts(name: str, row: TokenRow, *, all_of_it: bool = False) -> list[str]:
    """The runs of trained tokens as text."""
    runs: list[list[int]] = []
    before = False
    for t, token in enumerate(row.ids):
        is_trained = t >= (1 if all_of_it else row.prompt_length) and t not in row.heard
        if is_trained and not before:
            runs.append([])
        if is_trained:
            runs[-1].append(token)
        before = is_trained
    return [tokenizer_of(name).decode(run) for run in runs]


@pytest.mark.parametrize("name", LAYOUTS)
def test_mask_of_four_turns_trains_both_answers_with_their_ends(tmp_path: Path, name: str) -> None:
    example, end = read(tmp_path, {"messages": FOUR_TURNS}), LAYOUTS[name].end
    found = rows(name, example)
    texts = [text for row in found for text in trained_texts(name, row)]
    opened = OPENED.get(name, "")
    assert texts == [f"{opened}Hello!{end}", f"{opened}It is 42.{end}"]
    assert len(found) == (2 if name in OPENED else 1)
    assert [row.is_apart for row in found] == [bool(opened)] * len(found)
    (last,) = rows(name, example, "response")
    assert trained_texts(name, last) == [f"{opened}It is 42.{end}"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_row_of_a_conversation_is_the_text_of_the_chat_template(tmp_path: Path, name: str) -> None:
    """Up to the last end token, as the tokenizer encodes it; without the empty thinking of the last turn."""
    tokenizer, system = tokenizer_of(name), {"role": "system", "content": "Be brief."}
    messages = [system, *FOUR_TURNS]
    row = rows(name, read(tmp_path, {"messages": messages}))[-1]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    if name == "qwen3":
        text = text.replace("<think>\n\n</think>\n\n", "")
    assert row.ids == tokenizer.encode(
        text[: text.rindex(LAYOUTS[name].end) + len(LAYOUTS[name].end)], add_special_tokens=False
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_mask_of_all_trains_users_too_and_no_message_of_weight_0(tmp_path: Path, name: str) -> None:
    (row,) = rows(name, read(tmp_path, {"messages": FOUR_TURNS}), "all")
    (text,) = trained_texts(name, row, all_of_it=True)
    assert "Hi." in text
    assert "12 + 30?" in text
    silent = read(tmp_path, {"messages": [user("Hi."), message("Bad.", weight=0), *FOUR_TURNS[2:]]})
    if name in OPENED:
        with refuses(UsageError, "data.train_on"):
            rows(name, silent, "all")
    else:
        (row,) = rows(name, silent, "all")
        assert "Bad." not in "".join(trained_texts(name, row, all_of_it=True))


@pytest.mark.parametrize("name", LAYOUTS)
def test_message_of_weight_0_is_read_and_not_trained(tmp_path: Path, name: str) -> None:
    first, same = (
        read(tmp_path, {"messages": [user("Hi."), message("Bad.", **key), *FOUR_TURNS[2:]]})
        for key in ({"weight": 0}, {"train": False})
    )
    assert first == same
    found = rows(name, first)
    assert "Bad." in tokenizer_of(name).decode(found[0].ids)
    assert [text[-len("It is 42." + LAYOUTS[name].end) :] for row in found for text in trained_texts(name, row)] == [
        f"It is 42.{LAYOUTS[name].end}"
    ]
    only = read(tmp_path, {"system": "Answer in rhyme.", "messages": [user("Hi"), message("Bad", weight=0)]})
    made = registry.find("template", "chat").bind({})()
    assert list(rows_of(tokenizer_of(name), made, only, "demonstration")) == [
        "no trained message (weight 0 or train: false)"
    ]


REASONED = [
    user("Hi."),
    message("Hello!", reasoning_content="greet"),
    user("12 + 30?"),
    message("It is 42.", thinking="add"),
]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("is_inline", [False, True])
def test_reasoning_is_rendered_as_the_template_renders_it(tmp_path: Path, name: str, is_inline: bool) -> None:
    inline = [
        user("Hi."),
        message("<think>\ngreet\n</think>\n\nHello!"),
        REASONED[2],
        message("<think>\nadd\n</think>\n\nIt is 42."),
    ]
    found, end = rows(name, read(tmp_path, {"messages": inline if is_inline else REASONED})), LAYOUTS[name].end
    before, between = {
        "qwen3-opens-thinking": ("", "\n</think>\n\n"),
        "qwen3.5": ("", "\n</think>\n\n"),
        "gpt-oss": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
    }.get(name, ("<think>\n", "\n</think>\n\n"))
    expected = [f"{before}greet{between}Hello!{end}", f"{before}add{between}It is 42.{end}"]
    assert [text for row in found for text in trained_texts(name, row)] == expected
    drops = name in ("qwen3", *OPENED)
    assert len(found) == (2 if drops else 1)
    # the tags are the tokenizer's own tokens, where it has them
    tokenizer = tokenizer_of(name)
    if "</think>" in tokenizer.get_vocab():
        closing = tokenizer.convert_tokens_to_ids("</think>")
        assert [row.ids[row.prompt_length :].count(closing) for row in found] == ([1, 1] if drops else [2])


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells <|im_end|> and <|eot_id|>.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>'
XML = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)
SPELLED = '<tool>weather: {"city": "Oslo", "days": 3}</tool>'
CALLS = {
    "qwen3": HERMES,
    "qwen3-opens-thinking": f"\n</think>\n\n{HERMES}",
    "gpt-oss": "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    '{"city": "Oslo", "days": 3}<|call|>',
    "llama3": '{"name": "weather", "parameters": {"city": "Oslo", "days": 3}}',
    "qwen3-coder": XML,
    "qwen3.5": f"\n</think>\n\n{XML}",
    "olmo3": '<function_calls>weather(city="Oslo", days=3)</function_calls>',
    "smollm3": SPELLED,
    "gemma3": SPELLED,
    "chatml": SPELLED,
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_calls_are_trained_in_the_templates_form_and_results_are_not(tmp_path: Path, name: str) -> None:
    turns = [{**turn, "content": ""} if turn.get("tool_calls") else turn for turn in TOOL_TURNS]
    found, end = rows(name, read(tmp_path, {"messages": turns})), LAYOUTS[name].end
    texts = [text for row in found for text in trained_texts(name, row)]
    opened = OPENED.get(name, "")
    assert texts[0] == CALLS[name] + ("" if name == "gpt-oss" else end)
    assert texts[1::2] == [f"{opened}Yes, it is cold.{end}", f"{opened}No.{end}"]
    assert "Rome" in texts[2]
    assert len(texts) == 4
    assert not any("-5" in text or "15" in text for text in texts)
    assert "-5" in tokenizer_of(name).decode(found[-1].ids)


@pytest.mark.parametrize("name", LAYOUTS)
def test_tools_go_into_the_template_or_are_refused(tmp_path: Path, name: str) -> None:
    row = {"messages": FOUR_TURNS, "tools": [WEATHER]}
    example, tokenizer = read(tmp_path, row), tokenizer_of(name)
    if name in ("gemma3", "chatml"):
        with refuses(UsageError, "example 'jsonl/all/1'", "'tools'", "ignore_keys: [tools]"):
            rows(name, example)
        assert rows(name, read(tmp_path, row, ignore_keys=["tools"]))
        return
    text = tokenizer.decode(rows(name, example)[-1].ids)
    assert "weather" in text
    assert "\ue0f1" not in text.encode("ascii", "backslashreplace").decode()
    ends = [
        token for token in rows(name, example)[-1].ids if token == tokenizer.convert_tokens_to_ids(LAYOUTS[name].end)
    ]
    plain = rows(name, read(tmp_path, {"messages": FOUR_TURNS}))[-1].ids
    more = (
        1 if name in ("qwen3", "qwen3-opens-thinking", "qwen3-coder", "qwen3.5") else 0
    )  # the system turn that tools bring
    assert len(ends) == plain.count(ends[0]) + more, "no text of a schema becomes the end of a turn"
    with refuses(UsageError, "'tools'"):
        rows(name, example, template="plain")


@pytest.mark.parametrize("name", LAYOUTS)
def test_texts_of_a_row_forge_no_marker(tmp_path: Path, name: str) -> None:
    forged = "".join(LAYOUTS[name].specials) + "</think></tool_call>"
    turns = [
        user(f"a {forged} b"),
        calls("weather", city=f"c {forged}"),
        tool(forged),
        message(f"d {forged} e"),
        *FOUR_TURNS,
    ]
    honest = [user("a b"), calls("weather", city="c"), tool("r"), message("d e"), *FOUR_TURNS]
    special = set(tokenizer_of(name).get_added_vocab().values())

    def markers(messages: list[dict[str, Any]]) -> list[list[int]]:
        return [
            [token for token in row.ids if token in special]
            for row in rows(name, read(tmp_path, {"messages": messages}))
        ]

    assert markers(turns) == markers(honest)


@pytest.mark.parametrize("template", ["plain", "dialogue", "boxed", "code"])
def test_other_templates_train_one_example_for_each_turn(tmp_path: Path, template: str) -> None:
    options = {"chat": False} if template == "code" else {}
    found = rows("chatml", read(tmp_path, {"messages": FOUR_TURNS}), template=template, **options)
    texts = [trained_texts("chatml", row) for row in found]
    assert [[text.strip() for text in row] for row in texts] == [["Hello!<|endoftext|>"], ["It is 42.<|endoftext|>"]]
    assert [row.is_apart for row in found] == [True, True]
    (last,) = rows("chatml", read(tmp_path, {"messages": FOUR_TURNS}), "response", template=template, **options)
    assert [text.strip() for text in trained_texts("chatml", last)] == ["It is 42.<|endoftext|>"]


def test_tools_of_several_rounds_are_spelled_where_no_template_shows_them(tmp_path: Path) -> None:
    found = rows("chatml", read(tmp_path, {"messages": TOOL_TURNS}), template="plain")
    texts = [trained_texts("chatml", row) for row in found]
    end = "<|endoftext|>"
    assert texts == [
        [f'<tool>weather: {{"city": "Oslo", "days": 3}}</tool>{end}', f"Yes, it is cold.{end}"],
        [f'I look.\n<tool>weather: {{"city": "Rome", "days": 1}}</tool>{end}', f"No.{end}"],
    ]
    assert "<result>-5</result>" in tokenizer_of("chatml").decode(found[1].ids)


def test_name_that_no_template_shows_is_refused(tmp_path: Path) -> None:
    example = read(tmp_path, {"messages": [{**user("Hi."), "name": "Eva"}, message("Hello!")]})
    with refuses(UsageError, "'Eva'"):
        rows("chatml", example)
    with refuses(UsageError, "'Eva'"):
        rows("chatml", example, template="plain")
    row = {"messages": [{**user("Hi."), "name": "Eva"}, message("Hello!", weight=0), user("q"), message("a")]}
    (found,) = rows("chatml", read(tmp_path, row, ignore_keys=["name", "weight"]))
    assert trained_texts("chatml", found) == ["Hello!<|im_end|>", "a<|im_end|>"]


def test_variables_of_a_row_reach_the_template_or_are_refused(tmp_path: Path) -> None:
    row = {"messages": FOUR_TURNS, "chat_template_kwargs": {"enable_thinking": False}}
    found = rows("smollm3", read(tmp_path, row))
    assert "Reasoning Mode: /no_think" in tokenizer_of("smollm3").decode(found[0].ids)
    assert trained_texts("smollm3", found[0]) == ["Hello!<|im_end|>", "It is 42.<|im_end|>"]
    with refuses(UsageError, "'enable_thinking'", "ignore_keys: [chat_template_kwargs]"):
        rows("chatml", read(tmp_path, row))


def test_content_that_a_template_drops_next_to_a_call_is_refused(tmp_path: Path) -> None:
    with refuses(UsageError, "example 'jsonl/all/1'"):
        rows("llama3", read(tmp_path, {"messages": TOOL_TURNS}))


@pytest.mark.parametrize(
    ("name", "train_on", "share"),
    [
        ("chatml", None, "(data.train_on assistant)"),
        ("chatml", "response", "(data.train_on response)"),
        (
            "qwen3-opens-thinking",
            None,
            "(data.train_on assistant); 2 examples are single conversation turns, because the template "
            "rewrites earlier turns",
        ),
    ],
)
def test_run_states_which_share_of_the_tokens_is_trained(
    tmp_path: Path, name: str, train_on: str | None, share: str
) -> None:
    file = tmp_path / "rows.jsonl"
    silent = {"messages": [user("q"), message("a", weight=0)]}
    file.write_text("\n".join(json.dumps(row) for row in ({"messages": FOUR_TURNS}, silent)), encoding="utf-8")
    recipe = make_recipe("sft", data={"batch_size": 1, "train_on": train_on})
    chat = registry.find("template", "chat").bind({})()
    source = supervised_source(recipe, jsonl(path=str(file), split="all"), chat, tokenizer_of(name), 1024)
    masks = [source.batches.batch_of([i]).mask for i in range(source.num_examples)]
    trained, total = sum(int(mask.sum()) for mask in masks), sum(mask.numel() for mask in masks)
    assert source.trained == f"{trained:,} of {total:,} tokens are trained, {trained / total:.1%} {share}"
    assert source.dropped == {"no trained message (weight 0 or train: false)": 1}
