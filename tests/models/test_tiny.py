"""The embedded model as it ships: its size, its layout, what it can do and what it cannot."""

from __future__ import annotations

import re
from importlib import resources
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain.data.render import decode_response, encode_prompt, stop_ids
from posttrain.data.render.templates import r1_zero
from posttrain.data.stories.task import stories
from posttrain.models.tokenizer import train_tokenizer
from posttrain.recipes.recipe import load_recipe
from posttrain.registry import find
from posttrain.sampling.base import Sampling
from posttrain.sampling.native.engine import native

FOLDER = Path(str(resources.files("posttrain") / "models" / "tiny"))


@pytest.fixture(scope="module")
def model() -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> AutoTokenizer:
    return AutoTokenizer.from_pretrained(FOLDER)


def complete(model: AutoModelForCausalLM, tokenizer: AutoTokenizer, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    stops = frozenset({tokenizer.eos_token_id})
    sampled = native(model, tokenizer).generate(prompts, [[0]] * len(prompts), Sampling(96, 0.0, stop_ids=stops))
    return [completions[0].ids for completions in sampled]


def test_size_and_layout(model: AutoModelForCausalLM) -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 4 << 20
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in FOLDER.iterdir()}
    assert model.config.model_type == "qwen3"
    assert 0.8e6 <= sum(p.numel() for p in model.parameters()) <= 3e6


@pytest.mark.slow
def test_shape_and_tokenizer_are_those_of_the_recipe(model: AutoModelForCausalLM, tokenizer: AutoTokenizer) -> None:
    """The package ships what `posttrain train tiny/pretrain` starts from: stories, merges, shape."""
    recipe = load_recipe("tiny/pretrain").resolve()
    assert recipe.model.init is not None
    for key, value in recipe.model.init.config.items():
        assert getattr(model.config, key) == value
    task = find("task", recipe.task.name).bind(recipe.task.options)()
    settings = recipe.model.init.tokenizer
    texts = (example.solution for example in islice(task.examples, settings.num_documents))
    again = train_tokenizer(texts, settings.vocab_size)
    assert again.get_vocab() == tokenizer.get_vocab()
    assert model.config.vocab_size == len(tokenizer) == settings.vocab_size


def test_it_works_out_sums_when_led_to_and_cannot_guess(model: AutoModelForCausalLM, tokenizer: AutoTokenizer) -> None:
    examples = stories(split="validation", max_steps=3, size=120).examples[:]
    correct = {}
    for lead in (" Step by step:", " The answer is"):
        prompts = [tokenizer(e.messages[0].content + lead)["input_ids"] for e in examples]
        texts = [tokenizer.decode(ids) for ids in complete(model, tokenizer, prompts)]
        numbers = [re.findall(r"\d+", text) or [""] for text in texts]
        correct[lead] = sum(n[-1] == e.answer for n, e in zip(numbers, examples, strict=True)) / len(examples)
    assert correct[" Step by step:"] > 0.6
    assert correct[" The answer is"] < 0.2


def test_it_is_a_base_model_and_follows_no_format(model: AutoModelForCausalLM, tokenizer: AutoTokenizer) -> None:
    template = r1_zero(preamble="")
    examples = stories(split="validation", size=60).examples[:]
    prompts = [encode_prompt(tokenizer, template, e.messages) for e in examples]
    texts = [decode_response(tokenizer, template, ids) for ids in complete(model, tokenizer, prompts)]
    assert stop_ids(tokenizer, template) == {0}
    assert sum(template.extract(text) is not None for text in texts) <= 2
