"""Keys of a model's files under the names that transformers 4 reads, and programs that follow it.

transformers 5 writes the rotary embedding as ``rope_parameters`` only, and a tokenizer class that 4 does not have; an
older reader then takes 10,000 for ``rope_theta`` without a word.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from posttrain.models.config import read_object

OLDEST = "4.57"  # of transformers, that is tried with these keys
_ROPE = "rope_parameters"
_NEWER_TOKENIZER = "TokenizersBackend"
_OLDER_TOKENIZER = "PreTrainedTokenizerFast"
_EXPERTS = ("num_experts", "num_local_experts")  # of Qwen's mixtures, in 4 and in 5
# Keys that are not part of ``rope_scaling``.
_UNSCALED = ("rope_theta", "partial_rotary_factor")
_NAMES = {"gpt_neox": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}}


def write_older_keys(folder: Path) -> bool:
    """Add the older keys to ``config.json`` and ``tokenizer_config.json`` in ``folder``; False if they do not fit.

    The newer keys stay, and this version reads the same from both; if it would not, ``config.json`` stays as it was.
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
            _write(tokenizer, older)
    return is_readable


def older_rope(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what transformers 4 reads of a configuration's ``rope_parameters``; None: it has no keys for them.

    One set of parameters gives ``rope_theta``, ``rope_scaling`` and ``partial_rotary_factor``. Sets by layer type give
    the keys for full and sliding attention that Gemma 3 and ModernBERT have; others take one base for both.
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
    return keys if bases[0] == bases[1] else None


def older_tokenizer(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``tokenizer_config.json`` with the class and the list of special tokens that transformers 4 knows."""
    older = dict(content)
    if older.get("tokenizer_class") == _NEWER_TOKENIZER:
        older["tokenizer_class"] = _OLDER_TOKENIZER
    if isinstance(older.get("extra_special_tokens"), list):
        older["additional_special_tokens"] = older.pop("extra_special_tokens")
    return older


def _scaling(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``rope_scaling`` of one set of parameters, if it scales or sections positions."""
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
    _write(path, content)
    now = _read(path.parent)
    if read is not None and now is not None and _is_same(read, now):
        return is_known
    path.write_bytes(before)
    return False


def _read(folder: Path) -> dict[str, Any] | None:
    """Return the configuration as this version reads it; None: it is of a model with code, which is not run."""
    try:
        return dict(AutoConfig.from_pretrained(folder, trust_remote_code=False).to_dict())
    except ValueError:
        return None


def _is_same(before: object, now: object) -> bool:
    """Return whether every value of ``before`` is the same now; keys may be more."""
    if isinstance(before, dict) and isinstance(now, dict):
        return all(key in now and _is_same(value, now[key]) for key, value in before.items())
    return before == now


def _is_of_text(key: str, value: object) -> bool:
    return isinstance(value, dict) and any(word in key for word in ("text", "language", "llm"))


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
