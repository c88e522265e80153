"""Tokenizers of others on real texts: what does not end, or panics, is one error within seconds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from posttrain.data.render import foreign
from posttrain.data.render.encoding import Piece, decode_ids, encode_pieces
from posttrain.data.render.published import PUBLISHED
from posttrain.errors import UsageError
from posttrain.models.load import load_tokenizer
from posttrain.models.sources import TINY
from refusing import refuses

TEXT = "hi there you all are good friends"
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PANICS = r"(?=.*hi)(\w|\w|\s)*!"  # its library gives up a search after ten million steps
ENDLESS = r"(?=\w*aaa)(?:\w|\w){18}[^\w]|\w"  # below that at every place, of which there are many


def tokenizer(folder: Path, **changes: Any) -> Any:
    shutil.copytree(TINY, folder / "model")
    place = folder / "model" / "tokenizer.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | changes))
    return load_tokenizer(str(folder / "model"))


def split(pattern: str) -> dict[str, Any]:
    step = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [step, BYTES]}


@pytest.mark.parametrize("pattern", [PANICS, ENDLESS])
def test_encode_pieces_pattern_that_does_not_end_on_a_text_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], pattern: str
) -> None:
    monkeypatch.setattr(foreign, "CPU_SECONDS", 1.0)
    made = tokenizer(tmp_path, pre_tokenizer=split(pattern))
    harmless = [Piece("ho", trusted=False)]
    assert decode_ids(made, encode_pieces(made, harmless)) == "ho"
    for trusted in (True, False):
        with refuses(UsageError, "model.name", "/model: tokenizer.json: the pattern"):
            encode_pieces(made, [Piece(TEXT + "a" * 2000, trusted=trusted)])
    assert "panicked" not in capfd.readouterr().err


def test_encode_pieces_panic_of_the_library_is_an_error_without_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign, "HAS_WORKERS", False)
    made = tokenizer(tmp_path, pre_tokenizer=split(PANICS))
    for text in (TEXT, TEXT * 1000):
        with refuses(UsageError, "model.name", "/model", "tokenizer.json"):
            encode_pieces(made, [Piece(text, trusted=False)])


def test_decode_ids_pattern_of_a_decoder_that_does_not_end_is_refused(tmp_path: Path) -> None:
    step = {"type": "Replace", "pattern": {"Regex": PANICS}, "content": "x"}
    made = tokenizer(tmp_path, decoder={"type": "Sequence", "decoders": [{**BYTES}, {"type": "Fuse"}, step]})
    ids = made.backend_tokenizer.encode(TEXT).ids
    assert decode_ids(made, ids[:1]) == TEXT[: len(decode_ids(made, ids[:1]))]
    with refuses(UsageError, "model.name", "/model: tokenizer.json: the pattern"):
        decode_ids(made, ids)


def test_encode_pieces_pattern_of_ones_own_gives_the_ids_of_the_library(tmp_path: Path) -> None:
    made = tokenizer(tmp_path, pre_tokenizer=split(r"\p{L}+|\p{N}{2}|."))
    text = "Tom has 1234 apples <|im_end|> and\n\n ß日本"
    pieces = [Piece(text, trusted=True)]
    assert encode_pieces(made, pieces) == made.backend_tokenizer.encode(text, add_special_tokens=False).ids


def test_encode_pieces_long_text_gives_the_ids_of_a_short_one() -> None:
    made, text = load_tokenizer("tiny"), "Tom has 3 apples.\n"
    ids = encode_pieces(made, [Piece(text, trusted=False)])
    assert encode_pieces(made, [Piece(text * 1000, trusted=False)]) == ids * 1000


@pytest.mark.parametrize("pattern", sorted(PUBLISHED))
def test_unknown_pattern_published_one_needs_no_worker(pattern: str) -> None:
    assert foreign.unknown_pattern({"normalizer": {"pattern": {"Regex": pattern}}}) is None
    changed = f"{pattern}|(a+)+$"
    assert foreign.unknown_pattern([{"pattern": {"Regex": changed}}]) == changed


def test_published_patterns_are_those_of_the_files() -> None:
    assert GPT2 in PUBLISHED
    llama = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    qwen = llama.replace("{1,3}", "")
    assert {llama, qwen} <= PUBLISHED
    deepseek = "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    assert deepseek + r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+" in PUBLISHED
    tiny = json.loads((TINY / "tokenizer.json").read_text())
    assert foreign.unknown_pattern(tiny) is None
