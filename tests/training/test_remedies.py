"""What is suggested where every row was left out, and that it works."""

from __future__ import annotations

import re
from typing import Any

import pytest
from small_sources import sampled, sums

from posttrain import registry
from posttrain.data.base import Task
from posttrain.errors import UsageError
from posttrain.training.sources.dataset import SupervisedSource
from posttrain.types import Example, Message
from refusing import refuses
from small_runs import make_recipe
from supervised_sources import supervised_source


def demonstrations(size: int, response: str = "Hello.") -> Task:
    examples = [Example(f"d/{i}", (Message("user", f"Hi {i}."),), demonstration=response) for i in range(size)]
    return Task("jsonl", "train", examples)


def supervised(tokenizer, task: Task, template: str, context: int = 512, **changes: Any) -> SupervisedSource:
    form = registry.find("template", template).bind({})()
    return supervised_source(make_recipe("sft", **changes), task, form, tokenizer, context)


def suggested(error: pytest.ExceptionInfo[UsageError]) -> dict[str, str]:
    return dict(re.findall(r"([a-z]+\.[a-z_]+): (\w+)", str(error.value)))


@pytest.mark.parametrize("response", ["Hello.", "Hello. " * 60])
def test_rows_of_another_template_name_the_one_that_takes_them(tokenizer, response: str) -> None:
    task, changes = demonstrations(5, response), {"data": {"max_length": 100}}
    with refuses(UsageError, "left to train") as refused:
        supervised(tokenizer, task, "r1_zero", **changes)
    keys = suggested(refused)
    assert keys["prompt.template"] == "chat"
    assert ("data.max_length" in keys) == (len(response) > 100)
    length = {"data": {"max_length": int(keys.get("data.max_length", 100))}}
    assert supervised(tokenizer, task, keys["prompt.template"], **length).num_examples == 5


def test_rows_that_are_too_long_name_the_length_that_takes_them(tokenizer) -> None:
    task = demonstrations(5, "Hello. " * 20)
    with pytest.raises(UsageError) as refused:
        supervised(tokenizer, task, "chat", data={"max_length": 12})
    length = int(suggested(refused)["data.max_length"])
    assert supervised(tokenizer, task, "chat", data={"max_length": length}).num_examples == 5


def test_rows_that_no_key_takes_suggest_none(tokenizer) -> None:
    with pytest.raises(UsageError) as refused:
        supervised(tokenizer, demonstrations(3, "Hello. " * 300), "chat", context=64, data={"max_length": 12})
    assert suggested(refused) == {}
    assert "the model's context" in str(refused.value)


def test_prompts_that_are_too_long_name_the_limit_that_takes_them(tokenizer, template) -> None:
    with refuses(UsageError, "no prompts left") as refused:
        sampled(tokenizer, template, sums(4), prompt={"max_prompt_tokens": 2})
    limit = int(suggested(refused)["prompt.max_prompt_tokens"])
    assert len(sampled(tokenizer, template, sums(4), prompt={"max_prompt_tokens": limit}).prompts.indices) == 4
