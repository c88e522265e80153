"""Keys for transformers 4 next to the newer ones, and what version 5 reads of both."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from closeness import allclose
from posttrain.models.sources import TINY
from posttrain.models.written.older_readers import older_rope, older_tokenizer, write_older_keys

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}
SIZES: dict[str, Any] = {
    "vocab_size": 768,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
# A Python with transformers 4.57, to read what is written here: ``OLDER_TRANSFORMERS=/path/to/bin/python``.
OLDER = os.environ.get("OLDER_TRANSFORMERS")
READ = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
for folder in sys.argv[1:]:
    ids = AutoTokenizer.from_pretrained(folder)("What is 3 plus 4?<|im_end|>", return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32)
    with torch.no_grad():
        torch.save((ids, model(torch.arange(5, 205)[None]).logits), folder + "/read.pt")
"""


def write(architecture: str, folder: Path, **settings: Any) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(architecture, **SIZES, **settings)
        model = AutoModelForCausalLM.from_config(config).float()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("form", SCALINGS)
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_scaling_is_written_under_both_names_and_reads_the_same(architecture: str, form: str, tmp_path: Path) -> None:
    rope = SCALINGS[form] | {"rope_theta": 500_000.0}
    folder = write(architecture, tmp_path / "model", rope_parameters=rope)
    before = AutoConfig.from_pretrained(folder)
    assert write_older_keys(folder)
    content = json.loads((folder / "config.json").read_text())
    assert content["rope_theta"] == 500_000.0
    expected = SCALINGS[form]
    assert content.get("rope_scaling") == (None if form == "default" else expected)
    assert content["rope_parameters"] == rope
    assert AutoConfig.from_pretrained(folder).rope_parameters == before.rope_parameters
    assert write_older_keys(folder)  # once more changes nothing
    assert json.loads((folder / "config.json").read_text()) == content


def test_older_names_of_families_that_have_their_own() -> None:
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    sliding = {"rope_type": "default", "rope_theta": 1e4}
    by_layer = {"full_attention": full, "sliding_attention": sliding}
    gemma = older_rope({"model_type": "gemma3_text", "rope_parameters": by_layer})
    scaling = {"rope_type": "linear", "factor": 8.0}
    assert gemma == {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": scaling}
    assert older_rope({"model_type": "olmo3", "rope_parameters": by_layer}) is None
    same = {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 1e6}}
    assert older_rope({"model_type": "olmo3", "rope_parameters": same}) == {"rope_theta": 1e6, "rope_scaling": scaling}
    partial = {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.5}
    phi = older_rope({"model_type": "phi", "rope_parameters": partial})
    assert phi == {"rope_theta": 5e4, "partial_rotary_factor": 0.5}
    neox = older_rope({"model_type": "gpt_neox", "rope_parameters": partial})
    assert neox == {"rotary_emb_base": 5e4, "rotary_pct": 0.5}
    sections = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    vision = older_rope({"model_type": "qwen2_vl_text", "rope_parameters": sections})
    assert vision == {"rope_theta": 1e6, "rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]}}


def test_text_part_of_a_vision_configuration_has_the_older_keys(tmp_path: Path) -> None:
    config = AutoConfig.for_model("gemma3", text_config=SIZES)
    config.save_pretrained(tmp_path)
    assert write_older_keys(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    assert content["text_config"]["rope_theta"] == 1e6
    assert content["text_config"]["rope_local_base_freq"] == 1e4
    assert "rope_theta" not in content


def test_tokenizer_under_the_older_class_is_the_same_tokenizer(tmp_path: Path) -> None:
    ours = AutoTokenizer.from_pretrained(TINY)
    ours.save_pretrained(tmp_path)
    write_older_keys(tmp_path)
    content = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert content["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert content["additional_special_tokens"]
    read = AutoTokenizer.from_pretrained(tmp_path)
    text = "What is 3 plus 4?<|im_end|> <think>seven</think>"
    assert read(text).input_ids == ours(text).input_ids
    assert read.get_vocab() == ours.get_vocab()
    assert read.chat_template == ours.chat_template
    assert set(read.all_special_tokens) == set(ours.all_special_tokens)
    assert read.decode(ours(text).input_ids, skip_special_tokens=True) == ours.decode(
        ours(text).input_ids, skip_special_tokens=True
    )
    assert older_tokenizer({"tokenizer_class": "Qwen2Tokenizer"}) == {"tokenizer_class": "Qwen2Tokenizer"}


def test_configuration_that_version_5_would_read_otherwise_stays_as_it_was(tmp_path: Path) -> None:
    """A model type that it does not know is not rewritten."""
    before = json.dumps({"model_type": "of_a_stranger", "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})
    (tmp_path / "config.json").write_text(before, encoding="utf-8")
    assert not write_older_keys(tmp_path)
    assert (tmp_path / "config.json").read_text() == before


@pytest.mark.skipif(OLDER is None, reason="OLDER_TRANSFORMERS names no Python with transformers 4.57")
def test_transformers_457_computes_the_same(tmp_path: Path) -> None:
    folders = {}
    for architecture in ("llama", "qwen2", "qwen3"):
        for form, rope in SCALINGS.items():
            name = f"{architecture}-{form}"
            folders[name] = write(architecture, tmp_path / name, rope_parameters={**rope, "rope_theta": 500_000.0})
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}
    folders["gemma3_text"] = write("gemma3_text", tmp_path / "gemma3", **layers)
    for folder in folders.values():
        assert write_older_keys(folder)
    assert OLDER is not None
    surroundings = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [OLDER, "-c", READ, *map(str, folders.values())]
    subprocess.run(command, check=True, capture_output=True, env=surroundings, timeout=600)
    for name, folder in folders.items():
        ids, logits = torch.load(folder / "read.pt")
        tokenizer = AutoTokenizer.from_pretrained(TINY)
        assert ids[0].tolist() == tokenizer("What is 3 plus 4?<|im_end|>").input_ids, name
        with torch.no_grad():
            expected = AutoModelForCausalLM.from_pretrained(folder)(torch.arange(5, 205)[None]).logits
        assert allclose(logits.log_softmax(-1), expected.log_softmax(-1), atol=1e-5), name
