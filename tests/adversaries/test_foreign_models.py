"""Folders of strangers whose templates, tokenizers, adapters or configurations never end: one line, in little memory.

All of them are opened by one process, since its start takes most of the time.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model

from posttrain.models.load import load_model
from posttrain.models.sources import TINY
from posttrain.recipes.sections import ModelSection

MAX_SECONDS, MAX_BYTES = 20, 2 * 2**30
# In one process for all folders: what `posttrain generate FOLDER TEXT` says, its exit code, its seconds, its memory.
CHILD = """
import contextlib, io, json, resource, signal, sys, time
from posttrain.cli import main
from posttrain.data.render import foreign
TEXT = "hi there you all are good friends"
foreign.CPU_SECONDS = 1.0
for folder in sys.argv[1:]:
    started, said, code = time.monotonic(), io.StringIO(), None
    signal.alarm(MAX_SECONDS)
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = main(["generate", folder, TEXT, "--template", "chat", "--max-tokens", "2"])
    signal.alarm(0)
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) * 1024
    print(json.dumps([folder, code, said.getvalue(), time.monotonic() - started, peak]), flush=True)
"""


def template(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "chat_template.jinja").write_text(text)


def change(name: str, **changes: Any) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        place = folder / name
        place.write_text(json.dumps(json.loads(place.read_text()) | changes))

    return make


def adapter(**changes: Any) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        shutil.rmtree(folder)
        shutil.copytree(plain_adapter(folder.parent / "adapter"), folder)
        change("adapter_config.json", **changes)(folder)

    return make


@cache
def plain_adapter(folder: Path) -> Path:
    base = load_model(ModelSection(name="tiny"), seed=0).model
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    get_peft_model(base, config).save_pretrained(folder)
    return folder


def instead(name: str, put: Callable[[Path], object]) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        place = folder / name
        place.parent.mkdir(exist_ok=True)
        place.unlink(missing_ok=True)
        put(place)

    return make


def zeros(place: Path) -> None:
    place.symlink_to("/dev/zero")


def number_as_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    change("tokenizer_config.json", chat_template=[{"name": "a", "template": 5}])(folder)


# The change to the embedded model, and what the message names.
HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "template of much text": (template("{{ 'a b c ' * 10 ** 6 }}{{ messages[0]['content'] }}"), "chat"),
    "template that is a number": (number_as_template, "chat_template is '5'"),
    "template that is a pipe": (instead("chat_template.jinja", os.mkfifo), "chat_template.jinja is a pipe"),
    "second template": (instead("additional_chat_templates/a.jinja", zeros), "a.jinja is a device"),
    "rank": (adapter(r=10**6), "adapter_config.json: 'r'"),
    "rank of a module": (adapter(rank_pattern={"q_proj": 10**6}), "adapter_config.json: 'q_proj'"),
    "steps of a start": (adapter(init_lora_weights="pissa_niter_1000000000"), "init_lora_weights"),
    "extra tokens": (change("tokenizer_config.json", extra_ids=10**8, tokenizer_class="T5Tokenizer"), "extra_ids"),
    "copies of layers": (adapter(layer_replication=[[0, 2]] * 10**6), "layer_replication"),
    "modules": (adapter(modules_to_save=["a"] * 10**5), "modules_to_save"),
    "pieces of no length": (
        change("tokenizer.json", pre_tokenizer={"type": "FixedLength", "length": 0}),
        "tokenizer.json",
    ),
    "nothing replaced": (
        change("tokenizer.json", normalizer={"type": "Replace", "pattern": {"String": ""}, "content": "b"}),
        "tokenizer.json: the pattern",
    ),
    "padding": (
        change(
            "tokenizer.json",
            padding={
                "strategy": {"Fixed": 10**9},
                "direction": "Right",
                "pad_to_multiple_of": None,
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "<|endoftext|>",
            },
        ),
        "",
    ),
    "tokenizer of zeros": (instead("tokenizer.json", zeros), "tokenizer.json is a device"),
    "added tokens of zeros": (instead("added_tokens.json", zeros), "added_tokens.json is a device"),
    "configuration that is a pipe": (instead("config.json", os.mkfifo), "config.json is a pipe"),
    "sizes beyond the files": (change("config.json", hidden_size=10**5), "weights, and the files have"),
    "sizes of a model within": (change("config.json", text_config={"num_hidden_layers": 10**9}), "text_config.num_hid"),
    "labels": (change("config.json", num_labels=10**9), "config.json: num_labels"),
    "repeated layers": (change("config.json", attention_types=[[["global"], 10**9]]), "config.json: attention_types"),
    "manifest of zeros": (instead("manifest.json", zeros), "manifest.json is a device"),
    "weights that are a pipe": (instead("model.safetensors", os.mkfifo), "model.safetensors is a pipe"),
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, float, int]]:
    """By name, the exit code, the message, seconds and the peak of memory in bytes."""
    place = tmp_path_factory.mktemp("foreign")
    folders = {str(place / str(number)): name for number, name in enumerate(HOSTILE)}
    for folder, name in folders.items():
        shutil.copytree(TINY, folder)
        HOSTILE[name][0](Path(folder))
    program = CHILD.replace("MAX_SECONDS", str(MAX_SECONDS))
    done = subprocess.run([sys.executable, "-c", program, *folders], capture_output=True, text=True, check=False)
    found = map(json.loads, done.stdout.splitlines())
    return {folders[folder]: (code, text, seconds, peak) for folder, code, text, seconds, peak in found}


@pytest.mark.parametrize("name", HOSTILE)
def test_folder_of_a_stranger_ends_soon_in_little_memory(
    name: str, said: dict[str, tuple[int, str, float, int]]
) -> None:
    assert name in said, "it took longer, or ended the process"
    code, text, seconds, peak = said[name]
    named = HOSTILE[name][1]
    assert code == (2 if named else 0)
    assert named in text
    assert "Traceback" not in text
    assert len(text.strip().splitlines()) <= 1
    assert seconds < MAX_SECONDS
    assert peak < MAX_BYTES
