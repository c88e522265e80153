"""Patterns of files from elsewhere: those that hang are refused in a few seconds, those of real models are not."""

from __future__ import annotations

import json
import re
import shutil
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model

from posttrain.errors import UsageError
from posttrain.models.load import load_model
from posttrain.models.lora import attach_adapter
from posttrain.models.pattern_worker import FORMS
from posttrain.models.patterns import check_adapter_matches, check_adapter_patterns, check_tokenizer
from posttrain.models.sources import TINY
from posttrain.recipes.sections import ModelSection
from refusing import refuses

LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
UNSLOTH = (
    r"(?:.*?(?:vision|image|language|text).*?(?:layers|blocks).*?(?:self_attn|mlp).*?(?:q_proj|k_proj|up_proj).*?)|"
    r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|up_proj)))"
)
NAMES = [
    f"model.layers.{n}.{part}"
    for n in range(3)
    for part in ("self_attn.q_proj", "self_attn.q_proj.weight", "input_layernorm", "input_layernorm.weight")
]


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": UNSLOTH},
        {"target_modules": r".*\.(q|k|v|o)_proj", "rank_pattern": {r"^model\.layers\.(1|2)\..*": 4}},
        {"target_modules": None, "exclude_modules": r".*vision.*", "layers_pattern": ["h", "layers"]},
    ],
)
def test_adapter_patterns_usual_ones_are_taken(settings: dict[str, Any]) -> None:
    check_adapter_patterns(settings, "x: ")
    check_adapter_matches(settings, NAMES, "x: ")


@pytest.mark.parametrize(
    ("settings", "key"),
    [({"target_modules": "q" * 20_000}, "target_modules"), ({"modules_to_save": ["(q_proj"]}, "modules_to_save")],
)
def test_check_adapter_patterns_that_are_none_is_refused(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(UsageError, match=rf"^x: {key}: "):
        check_adapter_patterns(settings, "x: ")


ENDLESS_PATTERNS = [
    ({"target_modules": "(.*?.*?)*!"}, "target_modules"),
    ({"target_modules": r"(?=.*layernorm)(.*?.*?)*!|q_proj"}, "target_modules"),
    ({"target_modules": r"(?=.*weight)(.*?.*?)*!|q_proj"}, "target_modules"),
    ({"exclude_modules": r"(?=.*layernorm)(\w+\.?)*!"}, "exclude_modules"),
    ({"rank_pattern": {r"([\w.]|[\w.])*!": 4}}, "rank_pattern"),
    ({"alpha_pattern": {r"(?:.|.)" * 30 + "!": 4}}, "alpha_pattern"),
    ({"layers_pattern": [r"(\w+\.?)+z"]}, "layers_pattern"),
    ({"modules_to_save": [r"(\w+\.?)+z"]}, "modules_to_save"),
    ({"target_parameters": [r"(\w+\.?)+z"]}, "target_parameters"),
]


@pytest.mark.parametrize(("settings", "key"), ENDLESS_PATTERNS)
def test_check_adapter_matches_endless_one_is_refused(settings: dict[str, Any], key: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("posttrain.data.render.foreign.CPU_SECONDS", 0.3)
    with pytest.raises(UsageError, match=rf"^x: {key}: .* does not come to an end on the names"):
        check_adapter_matches(settings, NAMES, "x: ")


def test_attach_adapter_what_peft_matches_was_matched_before(tmp_path: Path, monkeypatch: Any) -> None:
    """Patterns of a configuration meet no other strings than those that a worker has matched them with."""
    model = load_model(ModelSection(name="tiny"), seed=0).model
    patterns = {"target_modules": r".*\.(q|k)_proj", "exclude_modules": r".*\.0\..*k_proj"}
    settings: dict[str, Any] = {
        **patterns,
        "r": 2,
        "rank_pattern": {r"layers\.(1|2)\..*": 4},
        "alpha_pattern": {r".*q_pro(j)?": 4},
        "modules_to_save": [r"(lm_head|score)"],
    }
    made = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    made.save_pretrained(tmp_path)
    base = load_model(ModelSection(name="tiny"), seed=0).model
    tried: set[str] = set()
    met: set[str] = set()
    monkeypatch.setattr("posttrain.models.patterns.check_adapter_matches", lambda _, names, where: tried.update(names))
    own = re._compile

    known = [*patterns.values(), *settings["rank_pattern"], *settings["alpha_pattern"], *settings["modules_to_save"]]
    forms = {form.replace("{}", pattern) for form in FORMS for pattern in known}

    def record(pattern: Any, flags: int = 0) -> Any:
        compiled = own(pattern, flags)
        if isinstance(pattern, str) and any(one in pattern for one in known):
            assert pattern in forms
            return Recorder(compiled, met)
        return compiled

    monkeypatch.setattr(re, "_compile", record)
    attach_adapter(base, str(tmp_path), is_trainable=True)
    assert len(met) > 20
    assert met - tried == set()


class Recorder:
    """A compiled pattern that notes what it is matched with."""

    def __init__(self, compiled: re.Pattern[str], met: set[str]) -> None:
        self.compiled = compiled
        self.met = met

    def __getattr__(self, name: str) -> Any:
        def match(text: str, *rest: Any) -> Any:
            self.met.add(text)
            return getattr(self.compiled, name)(text, *rest)

        return match


def tokenizer(folder: Path, **changes: Any) -> Path:
    shutil.copy(TINY / "tokenizer.json", folder)
    place = folder / "tokenizer.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | changes))
    return folder


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def replace(text: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": text}, "content": content}


ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}


def added(count: int) -> list[dict[str, Any]]:
    return [{"id": n, "content": f"<s{n}>", **ADDED} for n in range(count)]


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
CHARSMAP = b64encode(bytes(4) + b"a" * 100_000 + b"\0").decode()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"added_tokens": added(200_000)}, "added_tokens: 200,000 tokens"),
        ({"normalizer": {"type": "Sequence", "normalizers": [replace("a", "aa")] * 30}}, "normalizer"),
        ({"decoder": replace("a", "a" * 1000)}, "decoder"),
        ({"decoder": {"type": "Sequence", "decoders": [replace("a", "a" * 60)] * 4}}, "decoder: its steps"),
        ({"decoder": {"type": "Sequence", "decoders": [{"type": "BPEDecoder", "suffix": ""}] * 30}}, "decoder: its"),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 999}}, "normalizer: 1,000 steps"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": CHARSMAP}}, "normalizer: its steps"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES] * 30}}, "pre_tokenizer: its steps"),
        ({"added_tokens": [{"id": 0, "content": "a" * 100_000, **ADDED}]}, "token is written"),
        ({"added_tokens": [{"id": 0, "content": "a" * 100, **ADDED}], "decoder": replace("a", "a" * 60)}, "a token is"),
        ({"model": {"type": "BPE", "vocab": {"a" * 9999: 0}, "merges": []}}, "token is written"),
        ({"model": {"type": "WordPiece", "max_input_chars_per_word": 10**9}}, "model.max_input_chars_per_word"),
        ({"post_processor": {"type": "TemplateProcessing", "single": [{}] * 9999}}, "post_processor"),
        ({"pre_tokenizer": split(r"(\w+")}, "cannot be used"),
    ],
)
def test_check_tokenizer_that_hangs_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with refuses(UsageError, message):
        check_tokenizer(tokenizer(tmp_path, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"added_tokens": added(65_536), "pre_tokenizer": split(LLAMA)},
        {"pre_tokenizer": split(r"(?<=\d)(?=(?:\d{3})+(?!\d))")},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "_"}, replace(" ", "▁")]}},
    ],
)
def test_check_tokenizer_usual_one_is_taken(tmp_path: Path, changes: dict[str, Any]) -> None:
    check_tokenizer(tokenizer(tmp_path, **changes))
