"""``posttrain explain``: every key has a meaning and an answer; keys, metrics, and names of other libraries."""

from __future__ import annotations

from typing import Annotated

import pytest
from pydantic import TypeAdapter

from posttrain.cli import main
from posttrain.commands.explain import (
    all_components,
    component_options,
    example_value,
    keys_with,
    meanings,
    section_options,
    sections,
    without_arguments,
)
from posttrain.recipes.sections import Component
from posttrain.strict_yaml import read_option

DOC = """Loss of a pair.

Args:
    beta: strength,
        as published.
    low, high: bounds.

Raises:
    ValueError: never.
"""


def dotted(section: str, key: str) -> str:
    return key if section == "recipe" else f"{section}.{key}"


def test_every_key_has_a_meaning() -> None:
    keys = {dotted(name, o.name): o.meaning for name, section in sections().items() for o in section_options(section)}
    entries = [entry for group in all_components().values() for entry in group.values()]
    keys |= {f"{entry.kind} {entry.name} {o.name}": o.meaning for entry in entries for o in component_options(entry)}
    assert len(keys) > 400
    assert [key for key, meaning in keys.items() if not meaning] == []


def test_every_key_of_a_section_is_explained() -> None:
    for name, section in sections().items():
        for option in section_options(section):
            key = dotted(name, option.name)
            assert keys_with(key)[key] == option


def test_examples_are_values_of_their_keys() -> None:
    for name, section in sections().items():
        for key, field in section.model_fields.items():
            value = None if field.is_required() else field.get_default(call_default_factory=True)
            if not isinstance(value, Component) and dotted(name, key) not in sections():
                kind = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
                example = read_option(example_value(field.annotation, value), key)
                assert TypeAdapter(kind).validate_python(example) is not None, f"{name}.{key}"


@pytest.mark.parametrize(
    ("name", "answers"),
    [
        ("train.lr", ["train.lr  key of a recipe", "default: 0.0001", "example: --train.lr 0.0001"]),
        ("train.schedule", ["one of constant, linear, cosine", "example: --train.schedule linear"]),
        ("PPO", ["ppo  objective", "clip_low", "a plain squared error"]),
        ("learning_rate", ["This is called train.lr here.", "train.lr  key of a recipe"]),
        ("dynamic sampling", ["rollout.drop_uniform_groups  key of a recipe", "example: --rollout"]),
        ("beta", ["regularize.kl_coef", "dpo"]),
        ("format", ["format  metric, share; better: higher"]),
        ("uniform_groups", ["uniform_groups  metric, share; better: lower", "all equal"]),
        ("kl_ref", ["kl_ref  metric, nats", "KL to the reference model per token"]),
        ("lora", ["model.adapter.kind  key of a recipe"]),
        ("QLoRA", ["model.load_bits: 4, with model.adapter", "model.load_bits  key of a recipe"]),
        ("pass@k", ["eval.samples  key of a recipe"]),
        ("RLHF", ["posttrain sweep hh-gpt2"]),
        ("tvpo", ["not offered", "gspo"]),
        ("rewards.0.weight", ["rewards.0.weight  key of a recipe", "default: 1.0", "example: --rewards.0.weight 1.0"]),
    ],
)
def test_explain_answers(name: str, answers: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", name]) == 0
    printed = " ".join(capsys.readouterr().out.split("\n"))
    assert [answer for answer in answers if answer not in printed] == []


def test_explain_takes_a_term_of_several_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "KL", "penalty"]) == 0
    assert "regularize.kl_coef" in capsys.readouterr().out


def test_meanings_are_those_of_the_docstring() -> None:
    assert meanings(DOC) == {"beta": "strength, as published.", "low": "bounds.", "high": "bounds."}
    assert without_arguments(DOC) == "Loss of a pair.\n\nRaises:\n    ValueError: never."
    assert meanings("Nothing to list.") == {}
