"""Compatibility keys for transformers 4 (tested: 4.57) and programs following it.

transformers 5 writes rotary settings only as ``rope_parameters``, and uses a tokenizer class unknown to version 4.
Older readers then silently use ``rope_theta`` 10,000.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from posttrain.models.config import read_object, write_object

_ROPE = "rope_parameters"
_NEWER_TOKENIZER = "TokenizersBackend"
_OLDER_TOKENIZER = "PreTrainedTokenizerFast"
_EXPERTS = ("num_experts", "num_local_experts")  # of Qwen's mixtures, in 4 and in 5
# Keys excluded from ``rope_scaling``.
_UNSCALED = ("rope_theta", "partial_rotary_factor")
_NAMES = {"gpt_neox": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}}


def write_older_keys(folder: Path) -> bool:
    """Add older keys to ``config.json`` and ``tokenizer_config.json`` in ``folder``; returns False if impossible.

    Newer keys stay. If current transformers would read anything differently, ``config.json`` is left unchanged.
    """
    is_readable = True
    config = folder / "config.json"
    if config.is_file():
        is_readable = _add_rope(config)
    tokenizer = folder / "tokenizer_config.json"
    if tokenizer.is_file():
        content = read_object(tokenizer)
        older = older_tokenizer(content)
        if older != content:
            write_object(tokenizer, older)
    return is_readable


def older_rope(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Convert ``rope_parameters`` to transformers 4 keys; None if inexpressible.

    A single parameter set becomes ``rope_theta``, ``rope_scaling`` and ``partial_rotary_factor``. Sets per layer type
    become Gemma 3's and ModernBERT's keys for full and sliding attention; other models share a base.
    """
    rope = config[_ROPE]
    if not isinstance(rope, dict) or not rope:
        return {}
    if not any(isinstance(value, dict) for value in rope.values()):
        names = _NAMES.get(str(config.get("model_type")), {})
        keys = {names.get(key, key): rope[key] for key in _UNSCALED if key in rope}
        if rope.get("rope_type") == "longrope" and str(config.get("model_type")).startswith("phi"):
            factors = {key: rope.get(key) for key in ("short_factor", "long_factor")}
            return keys | {"rope_scaling": {"type": "longrope", **factors}}  # which takes exactly these
        return keys | _scaling(rope)
    full, sliding = rope.get("full_attention"), rope.get("sliding_attention")
    if not isinstance(full, dict) or not isinstance(sliding, dict) or len(rope) > 2 or _scaling(sliding):
        return None
    bases = (full.get("rope_theta"), sliding.get("rope_theta"))
    kind = str(config.get("model_type"))
    if kind.startswith("modernbert"):
        return {"global_rope_theta": bases[0], "local_rope_theta": bases[1]}
    keys = {"rope_theta": bases[0]} | _scaling(full)
    if kind.startswith("gemma3"):
        return keys | {"rope_local_base_freq": bases[1]}
    if bases[0] == bases[1]:
        return keys
    return None


def older_tokenizer(content: Mapping[str, Any]) -> dict[str, Any]:
    """Convert ``tokenizer_config.json`` to transformers 4's class and special-token list."""
    older = dict(content)
    if older.get("tokenizer_class") == _NEWER_TOKENIZER:
        older["tokenizer_class"] = _OLDER_TOKENIZER
    if isinstance(older.get("extra_special_tokens"), list):
        older["additional_special_tokens"] = older.pop("extra_special_tokens")
    return older


def _scaling(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Extract ``rope_scaling`` if parameters scale or section positions."""
    scaling = {key: value for key, value in rope.items() if key not in _UNSCALED}
    if scaling.get("rope_type", "default") == "default" and len(scaling) <= 1:
        return {}
    return {"rope_scaling": scaling}


def _add_rope(path: Path) -> bool:
    before = path.read_bytes()
    content = read_object(path)
    is_known = True
    for part in (content, *(value for key, value in content.items() if _is_of_text(key, value))):
        if _ROPE in part:
            older = older_rope(part)
            is_known = is_known and older is not None
            if older is not None:
                part.update(older)
        if _EXPERTS[1] in part and str(part.get("model_type")).startswith("qwen"):
            part[_EXPERTS[0]] = part[_EXPERTS[1]]
    if json.loads(before) == content:
        return is_known
    read = _read(path.parent)
    write_object(path, content)
    now = _read(path.parent)
    if read is not None and now is not None and _is_same(read, now):
        return is_known
    path.write_bytes(before)
    return False


def _read(folder: Path) -> dict[str, Any] | None:
    """Read a configuration by current transformers; None for models needing remote code."""
    try:
        return dict(AutoConfig.from_pretrained(folder, trust_remote_code=False).to_dict())
    except ValueError:
        return None


def _is_same(before: object, now: object) -> bool:
    """Check that all values in ``before`` are unchanged; extra keys are allowed."""
    if isinstance(before, dict) and isinstance(now, dict):
        return all(key in now and _is_same(value, now[key]) for key, value in before.items())
    return before == now


def _is_of_text(key: str, value: object) -> bool:
    return isinstance(value, dict) and any(word in key for word in ("text", "language", "llm"))
