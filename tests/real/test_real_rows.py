"""Every row of the corpus through every entry that it concerns: no text of it is lost, whatever the template."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from model_templates import LAYOUTS, tokenizer_of
from real_rows import ASK, GIVEN, LEARNT, REFUSED, REPLY

from posttrain import registry
from posttrain.cli import main
from posttrain.data.base import Task
from posttrain.data.jsonl import jsonl
from posttrain.data.preferences import preferences
from posttrain.data.render import encode_prompt
from posttrain.data.render.rows import Shape, TokenRow, rows_of
from posttrain.errors import DataError, UsageError
from posttrain.types import Example
from refusing import refuses

READERS = {"jsonl": jsonl, "preferences": preferences}
TEMPLATES = [*LAYOUTS, "plain", "dialogue", "boxed"]
# Keys whose texts are trained or read; what stands under other keys is carried along or says how to read.
TEXTS = (
    *("prompt", "response", "completion", "completions", "solution", "system", "content", "value", "text"),
    *("instruction", "input", "output", "history", "chosen", "rejected", "reasoning_content", "thinking", "arguments"),
)


def read(path: Path, reader: str, row: Mapping[str, Any], **options: Any) -> Task:
    file = path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n", encoding="utf-8")
    return READERS[reader](path=str(file), split="all", **options)


def texts_of(value: Any, key: str = "") -> Iterator[str]:
    """Every text of a row that is trained or read."""
    if isinstance(value, str):
        if key == "value" and value.startswith("{"):
            yield from texts_of(json.loads(value)["arguments"], "arguments")
        elif key in TEXTS:
            is_object = key == "arguments" and value.startswith("{")
            yield from texts_of(json.loads(value), key) if is_object else [value]
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield from texts_of(one, "arguments" if key == "arguments" else name)
    elif isinstance(value, list):
        for one in value:
            yield from texts_of(one, key)


def encoded(name: str, example: Example, shape: Shape) -> list[TokenRow]:
    """The rows of an example by a layout's chat template, or by a template of ours."""
    layout, template = (name, "chat") if name in LAYOUTS else ("chatml", name)
    made = registry.find("template", template).bind({})()
    units = list(rows_of(tokenizer_of(layout), made, example, shape))
    assert units
    assert not any(isinstance(unit, str) for unit in units), units
    return [row for unit in units for row in unit]  # type: ignore[misc]


def squeezed(text: str) -> str:
    """Without white space, tags of thinking and escapes, in which templates differ."""
    return "".join(text.replace("<think>", "").replace("</think>", "").replace("\\n", "").replace("\\", "").split())


# What a template cannot say, which is then refused and not dropped.
CANNOT = {
    "several calls": ("llama3", "gpt-oss"),
    "tools": ("gemma3", "chatml", "plain", "dialogue", "boxed"),
    "begins": ("gemma3",),
}


def cannot(name: str, row: Mapping[str, Any]) -> bool:
    begins = "messages" in row and row["messages"][0]["role"] == "assistant"
    several = any(len(message.get("tool_calls") or ()) > 1 for message in row.get("messages", ()))
    if several and name in CANNOT["several calls"]:
        return True
    return (bool(row.get("tools")) and name in CANNOT["tools"]) or (begins and name in CANNOT["begins"])


def shape_of(row: Mapping[str, Any]) -> Shape:
    return "pair" if "chosen" in row else "steps" if "labels" in row else "judged" if row in GIVEN.values() else LEARN


LEARN: Shape = "demonstration"
Read = dict[str, tuple[Mapping[str, Any], Example]]  # a row and its example


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Read:
    """Every row of the corpus as its task reads it."""
    path = tmp_path_factory.mktemp("corpus")
    rows = [
        (reader, kind, row)
        for reader, kinds in (("jsonl", LEARNT), ("preferences", GIVEN))
        for kind, row in kinds.items()
    ]
    return {kind: (row, read(path, reader, row).examples[0]) for reader, kind, row in rows}


@pytest.mark.parametrize("name", TEMPLATES)
def test_row_loses_no_text(corpus: Read, name: str) -> None:
    tokenizer = tokenizer_of(name if name in LAYOUTS else "chatml")
    ends = tokenizer.get_added_vocab().values()
    for kind, (row, example) in corpus.items():
        shape = shape_of(row)
        if cannot(name, row):
            with pytest.raises(UsageError, match=r"tools|alternate|one call a message|drops the call of"):
                encoded(name, example, shape)
            continue
        rows = encoded(name, example, shape)
        everything = squeezed("".join(tokenizer.decode(one.ids) for one in rows))
        for text in (part for whole in texts_of(row) for part in whole.split("</think>")):
            assert squeezed(text) in everything, (kind, text)
        if shape == LEARN:
            trained = [[t for t in range(one.prompt_length, len(one.ids)) if t not in one.heard] for one in rows]
            assert all(places and one.ids[places[-1]] in ends for one, places in zip(rows, trained, strict=True)), kind
        else:
            assert len(rows) == (2 if shape == "pair" else 1), kind
        if shape == "pair":  # the same pair as two judged answers
            assert [one.ids for one in encoded(name, example, "judged")] == [one.ids for one in rows], kind
            assert {one.margin for one in rows} == {row.get("margin")}, kind


@pytest.mark.parametrize("kind", REFUSED)
def test_row_that_cannot_be_used_is_refused_with_its_line(tmp_path: Path, kind: str) -> None:
    reader, row, message = REFUSED[kind]
    with pytest.raises(DataError, match=rf"rows\.jsonl:1: .*{message}"):
        read(tmp_path, reader, row)


def test_prompt_of_a_row_is_sampled_with_its_system_message_and_tools(corpus: Read) -> None:
    """The prompt that a policy or an evaluation asks is what the demonstration stands behind."""
    tokenizer, chat = tokenizer_of("qwen3"), registry.find("template", "chat").bind({})()
    for kind, (row, example) in corpus.items():
        prompt = encode_prompt(tokenizer, chat, example.messages, example.variables)
        last = encoded("qwen3", example, shape_of(row))[-1].ids
        assert last[: len(prompt)] == prompt, kind


def test_reasoning_of_given_answers_is_part_of_their_text(tmp_path: Path) -> None:
    (example,) = read(tmp_path, "preferences", GIVEN["a pair with reasoning"]).examples
    assert [response.text for response in example.responses] == [
        "<think>\nParis.\n</think>\n\nSeine.",
        "<think>\nCairo.\n</think>\n\nNile.",
    ]


def test_keys_that_are_carried_along_are_in_meta_and_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = read(tmp_path, "jsonl", {**LEARNT["further keys"], "created": 7}, ignore_keys=["created"])
    assert task.examples[0].meta == {"source": "web", "prompt_id": "a1", "score": 3, "topic": "rivers"}
    assert task.keys == {
        ("created", "ignored (task.ignore_keys)"): 1,
        ("messages", "read"): 1,
        ("messages[].content", "read"): 1,
        ("messages[].role", "read"): 1,
        ("meta", "read"): 1,
        ("prompt_id", "kept (meta)"): 1,
        ("score", "kept (meta)"): 1,
        ("source", "kept (meta)"): 1,
    }
    assert main(["data", "show", "jsonl", "--task.path", str(tmp_path / "rows.jsonl"), "--task.split", "all"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["source", "kept", "(meta)", "1"] in lines
    assert ["messages[].role", "read", "1"] in lines


def test_keys_of_messages_that_are_ignored_are_left_out(tmp_path: Path) -> None:
    row = {"messages": [{**ASK, "timestamp": 5}, {**REPLY, "timestamp": 6}]}
    task = read(tmp_path, "jsonl", row, ignore_keys=["timestamp"])
    assert task.keys["messages[].timestamp", "ignored (task.ignore_keys)"] == 1
    assert len(task.examples) == 1


def test_margin_is_needed_in_every_row_or_none(tmp_path: Path) -> None:
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in (pair | {"margin": 2}, pair)), encoding="utf-8")
    task = preferences(path=str(file), split="all")
    assert [example.margin for example in task.examples] == [2.0]
    assert task.dropped == {"'margin' is missing, but every row requires a score": 1}
    file.write_text("\n".join(json.dumps(row) for row in (pair, pair | {"margin": 2})), encoding="utf-8")
    with refuses(DataError, "rows.jsonl:2", "'margin'"):
        preferences(path=str(file), split="all")


def test_results_are_put_in_the_order_of_their_calls(tmp_path: Path) -> None:
    (example,) = read(tmp_path, "jsonl", LEARNT["results in another order"]).examples
    assert [message.content for message in example.conversation[2:4]] == ["of aa: 777", "of bb: 406"]
    assert [call.result for call in example.turns[0].calls] == ["of aa: 777", "of bb: 406"]


@pytest.mark.parametrize("template", ["document", "as_is"])
def test_last_message_of_weight_0_is_not_trained_by_any_template(tmp_path: Path, template: str) -> None:
    row = {"messages": [ASK, {**REPLY, "weight": 0}]}
    (example,) = read(tmp_path, "jsonl", row).examples
    made = registry.find("template", template).bind({})()
    units = list(rows_of(tokenizer_of("chatml"), made, example, "demonstration"))
    assert units == ["no trained message (weight 0 or train: false)"]


def test_train_on_assistant_trains_earlier_turns_of_dialogues_with_given_answers(tmp_path: Path) -> None:
    (example,) = read(tmp_path, "preferences", GIVEN["a pair behind two turns"]).examples
    chat = registry.find("template", "chat").bind({})()
    tokenizer = tokenizer_of("chatml")
    (unit,) = rows_of(tokenizer, chat, example, "demonstration", "assistant")
    trained = [t for t in range(unit[0].prompt_length, len(unit[0].ids)) if t not in unit[0].heard]  # type: ignore[union-attr]
    text = tokenizer.decode([unit[0].ids[t] for t in trained])  # type: ignore[union-attr]
    assert text == "The Seine does.<|im_end|>The Tiber.<|im_end|>"
    (unit,) = rows_of(tokenizer, chat, example, "demonstration")
    assert tokenizer.decode(unit[0].ids[unit[0].prompt_length :]) == "The Tiber.<|im_end|>"  # type: ignore[union-attr]


def test_pair_with_a_further_column_of_messages_and_a_score_stays_a_pair(tmp_path: Path) -> None:
    row = {"prompt": "q", "chosen": "a", "rejected": "b", "messages": [ASK, REPLY], "score": 3}
    (example,) = read(tmp_path, "preferences", row).examples
    assert [response.text for response in example.responses] == ["a", "b"]
    assert example.meta["score"] == 3
