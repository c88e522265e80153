"""What ends an answer in training ends it for transformers: checkpoints, exports, merged adapters, quantized copies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import posttrain as pt
from posttrain.cli import main
from posttrain.models.answer_end import ends_in, names_of_ends, write_ends
from posttrain.models.load import load_tokenizer
from posttrain.store.checkpoint_files import step_folder, verify

QUESTIONS = ["Eva has 3 shells and finds 4 more. How many?", "Tom has 7 apples and eats 2 of them. How many?"]
MOST = 40  # tokens, more than an answer has


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``whole`` and ``lora``, trained for a few steps under ``chat``; neither ends at the tokenizer's end token."""
    folder = tmp_path_factory.mktemp("runs")
    options = ["--prompt.template", "chat", "--eval.every", "0", "--task.size", "64", "--runs-dir", str(folder)]
    assert main(["train", "tiny/sft", "--run", "whole", "--train.steps", "12", "--train.lr", "0.003", *options]) == 0
    adapter = ["--model.adapter.kind", "lora", "--model.adapter.rank", "8", "--train.lr", "0.02"]
    assert main(["train", "tiny/sft", "--run", "lora", "--train.steps", "12", *adapter, *options]) == 0
    return folder


def answers_of(folder: Path) -> list[str]:
    """Greedy answers by transformers alone, with the token that ended each."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    found = []
    for question in QUESTIONS:
        asked = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        ids = model.generate(**prompt, max_new_tokens=MOST, do_sample=False)[0][prompt["input_ids"].shape[1] :]
        found.append(tokenizer.decode(ids))
    return found


def answers_here(folder: Path) -> list[str]:
    answers = pt.generate(str(folder), QUESTIONS, template="chat", temperature=0, max_tokens=MOST)
    return [answer.text for answer in answers]


@pytest.mark.parametrize("kind", ["checkpoint", "export", "merged", "quantized", "quantized adapter"])
def test_transformers_ends_an_answer_where_training_ended_it(runs: Path, tmp_path: Path, kind: str) -> None:
    where = ["--runs-dir", str(runs)]
    if kind == "checkpoint":
        folder = step_folder(runs / "whole" / "checkpoints", 12)
    elif kind.startswith("quantized"):
        folder = tmp_path / "out"
        name = "lora" if "adapter" in kind else "whole"
        assert main(["quantize", name, "--bits", "8", "--limit", "4", "--out", str(folder), *where]) == 0
    else:
        folder = tmp_path / "out"
        source = ["lora", "--merge"] if kind == "merged" else ["whole"]
        assert main(["runs", "export", *source, "--to", str(folder), *where]) == 0
    settings = json.loads((folder / "generation_config.json").read_text())
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.convert_ids_to_tokens(settings["eos_token_id"]) == ["<|endoftext|>", "<|im_end|>"]
    assert settings["pad_token_id"] == tokenizer.pad_token_id
    if kind.startswith("quantized"):
        return  # transformers loads it with a library of its own
    own = answers_of(folder)
    assert all(text.endswith("<|im_end|>") for text in own), own
    assert [text.count("<|im_end|>") for text in own] == [1, 1]
    assert [text.removesuffix("<|im_end|>") for text in own] == answers_here(folder)


def test_export_of_an_adapter_has_the_ends_and_the_card_says_so(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["runs", "export", "lora", "--to", str(out), "--runs-dir", str(runs)]) == 0
    assert names_of_ends(out) == ["<|endoftext|>", "<|im_end|>"]
    assert "im_end" in (out / "README.md").read_text()
    assert (out / "adapter_config.json").is_file()
    assert verify(step_folder(runs / "lora" / "checkpoints", 12))["generation_config.json"]["bytes"] > 0


def test_checkpoint_of_a_prompt_without_a_chat_ends_at_the_tokenizers_token(tmp_path: Path) -> None:
    options = ["--train.steps", "1", "--eval.every", "0", "--task.size", "16", "--runs-dir", str(tmp_path)]
    assert main(["train", "tiny/sft", "--run", "plain", *options]) == 0
    assert names_of_ends(step_folder(tmp_path / "plain" / "checkpoints", 1)) == ["<|endoftext|>"]


def test_write_ends_keeps_what_else_the_file_says(tmp_path: Path, tokenizer: Any) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"temperature": 0.6, "eos_token_id": 0, "_from_model_config": True, "pad_token_id": 5}))
    write_ends(tmp_path, tokenizer, [2, 0])
    assert json.loads(file.read_text()) == {"temperature": 0.6, "eos_token_id": [0, 2], "pad_token_id": 5}
    first = file.read_bytes()
    write_ends(tmp_path, tokenizer, [0, 2])
    assert file.read_bytes() == first
    write_ends(tmp_path, tokenizer, [2])
    assert ends_in(json.loads(file.read_text())) == [2]
