"""Patterns of files from elsewhere: those that hang are refused in a few seconds, those of real models are not."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import UsageError
from posttrain.models.patterns import check_adapter_patterns, check_tokenizer
from posttrain.models.sources import TINY

LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
UNSLOTH = (
    r"(?:.*?(?:vision|image|language|text).*?(?:layers|blocks).*?(?:self_attn|mlp).*?(?:q_proj|k_proj|up_proj).*?)|"
    r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|up_proj)))"
)


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": UNSLOTH},
        {"target_modules": r".*\.(q|k|v|o)_proj", "rank_pattern": {r"^model\.layers\.(1|2)\..*": 4}},
        {"target_modules": None, "exclude_modules": r".*vision.*", "layers_pattern": ["h", "layers"]},
    ],
)
def test_check_adapter_patterns_usual_ones_are_taken(settings: dict[str, Any]) -> None:
    check_adapter_patterns(settings, "x: ")


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"target_modules": "(.*l)*(.*a)*(.*y)*x"}, "target_modules"),
        ({"rank_pattern": {"(q|q)*k": 4}}, "rank_pattern"),
        ({"layers_pattern": ["(l+)+z"]}, "layers_pattern"),
        ({"target_modules": "q" * 20_000}, "target_modules"),
        ({"target_modules": "(q_proj"}, "target_modules"),
    ],
)
def test_check_adapter_patterns_endless_one_is_refused(settings: dict[str, Any], key: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("posttrain.models.patterns.TRIAL_SECONDS", 1)
    started = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    with pytest.raises(UsageError, match=rf"^x: {key}: "):
        check_adapter_patterns(settings, "x: ")
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - started < 3.0


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"added_tokens": added(200_000)}, "added_tokens: 200,000 tokens"),
        (
            {"normalizer": {"type": "Sequence", "normalizers": [replace("a", "aa")] * 30}},
            "normalizer: its replacements",
        ),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split(r"(\w+\s?)+$")]}}, "does not come to an end"),
    ],
)
def test_check_tokenizer_that_hangs_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
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
