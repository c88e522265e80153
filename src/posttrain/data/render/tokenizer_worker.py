"""Worker process that runs the patterns of untrusted tokenizers."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

from tokenizers import AddedToken, Tokenizer

from posttrain.data.render.foreign import is_failure

_MAX_REASON = 300  # characters
_MAX_KEPT = 4
_MADE: OrderedDict[str, Tokenizer] = OrderedDict()


def run_patterns(item: dict[str, Any]) -> dict[str, str]:
    """Run a tokenizer's patterns on ``text`` or ``tokens``, and report any ``error``.

    ``item`` contains the tokenizer's ``key``. If this process does not know the key, it replies ``unknown`` and
    expects ``parts`` (``foreign.Parts``).
    """
    key = item["key"]
    if key not in _MADE and "parts" not in item:
        return {"unknown": key}
    try:
        if key not in _MADE:
            _MADE[key] = _make(item["parts"])
            while len(_MADE) > _MAX_KEPT:
                _MADE.popitem(last=False)
        tokenizer = _MADE[key]
        if "text" in item:
            tokenizer.encode_special_tokens = item["split_special"]
            tokenizer.encode(item["text"], add_special_tokens=False)
        if "tokens" in item and tokenizer.decoder is not None:
            tokenizer.decoder.decode(item["tokens"])
    except BaseException as error:
        if not is_failure(error):
            raise
        return {"error": str(error)[:_MAX_REASON]}
    return {}


def _make(parts: dict[str, Any]) -> Tokenizer:
    """Build a tokenizer with an empty vocabulary but all original preprocessing and decoding."""
    empty: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "post_processor": None,
    }
    empty["model"] = {"type": "BPE", "vocab": {}, "merges": []}
    tokenizer = Tokenizer.from_str(json.dumps(empty | parts["steps"]))
    for special in (False, True):
        tokens = [AddedToken(**token) for token in parts["added"] if token["special"] is special]
        if special:
            tokenizer.add_special_tokens(tokens)
        else:
            tokenizer.add_tokens(tokens)
    return tokenizer
