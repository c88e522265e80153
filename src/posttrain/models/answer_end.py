"""Answer-ending token ids in model folders: other programs then stop exactly like training did."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.models.config import ids_in, read_object, write_object
from posttrain.untrusted import entries_of

if TYPE_CHECKING:  # not needed for model cards
    from transformers import PreTrainedTokenizerBase

GENERATION_CONFIG = "generation_config.json"


def write_ends(folder: Path, tokenizer: PreTrainedTokenizerBase, ends: Collection[int] | None = None) -> None:
    """Write answer-ending ids plus the padding token to a saved model's ``generation_config.json``.

    Args:
        folder: model folder. Adapter folders get this file too.
        ends: token ids. Defaults to the tokenizer's ``generation_end_ids`` plus ``eos_token_id``.
    """
    path = folder / GENERATION_CONFIG
    content: dict[str, Any] = {}
    if path.is_file():
        content = read_object(path)
    if ends is None:
        ends = {*getattr(tokenizer, "generation_end_ids", ()), tokenizer.eos_token_id} - {None}
    ids = sorted(int(one) for one in ends)
    if not ids:
        return
    if sorted(set(ends_in(content))) != ids:
        content["eos_token_id"] = ids
        if len(ids) == 1:
            content["eos_token_id"] = ids[0]
        content.pop("_from_model_config", None)  # else transformers takes the model's configuration
    if tokenizer.pad_token_id is not None:
        content.setdefault("pad_token_id", tokenizer.pad_token_id)
    write_object(path, content)


def ends_in(content: dict[str, object]) -> list[int]:
    """Parse ``eos_token_id`` from a generation config."""
    return [one for one in ids_in(content.get("eos_token_id")) if type(one) is int]


def names_of_ends(folder: Path) -> list[str]:
    """Read a model folder's answer-ending token strings; empty if undeclared, or if the folder lacks a tokenizer."""
    path = folder / GENERATION_CONFIG
    file = folder / "tokenizer.json"
    if not path.is_file() or not file.is_file():
        return []
    tokens = entries_of(read_object(file).get("added_tokens"))
    names = {one.get("id"): str(one.get("content")) for one in tokens if isinstance(one, dict)}
    return [names[one] for one in ends_in(read_object(path)) if one in names]
