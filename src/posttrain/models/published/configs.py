"""Partial configurations of models used in shipped recipes: everything determining tensor shapes.

If a model is not available locally, these allow memory estimates.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

KEYS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
_QWEN3 = {"vocab_size": 151_936, "head_dim": 128, "max_position_embeddings": 40_960}
_QWEN2 = {"vocab_size": 151_936, "tie_word_embeddings": True, "max_position_embeddings": 4096}
_OLMO2 = {"vocab_size": 100_352, "tie_word_embeddings": False, "max_position_embeddings": 4096}
_SIZES_OF_OLMO = (2048, 16, 16, 16, 8192)
# Architecture, ``KEYS`` values (none: transformers' defaults), other non-default settings.
SHAPES: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "Qwen/Qwen3-0.6B": ("qwen3", (1024, 28, 16, 8, 3072), {**_QWEN3, "tie_word_embeddings": True}),
    "Qwen/Qwen3-0.6B-Base": ("qwen3", (1024, 28, 16, 8, 3072), {**_QWEN3, "tie_word_embeddings": True}),
    "Qwen/Qwen3-1.7B": ("qwen3", (2048, 28, 16, 8, 6144), {**_QWEN3, "tie_word_embeddings": True}),
    "Qwen/Qwen3-4B": ("qwen3", (2560, 36, 32, 8, 9728), {**_QWEN3, "tie_word_embeddings": True}),
    "Qwen/Qwen3-8B": ("qwen3", (4096, 36, 32, 8, 12_288), {**_QWEN3, "tie_word_embeddings": False}),
    "Qwen/Qwen3-14B": ("qwen3", (5120, 40, 40, 8, 17_408), {**_QWEN3, "tie_word_embeddings": False}),
    "Qwen/Qwen2.5-Math-1.5B": ("qwen2", (1536, 28, 12, 2, 8960), _QWEN2),
    "allenai/OLMo-2-0425-1B": ("olmo2", _SIZES_OF_OLMO, _OLMO2),
    "allenai/OLMo-2-0425-1B-SFT": ("olmo2", _SIZES_OF_OLMO, _OLMO2),
    "openai-community/gpt2": ("gpt2", (), {}),
    "smollm2-135m": (
        "llama",
        (576, 30, 9, 3, 1536),
        {"vocab_size": 49_152, "tie_word_embeddings": True, "max_position_embeddings": 8192},
    ),
}


def published_config(name: str) -> PretrainedConfig | None:
    """Look up shapes by hub name; None unless listed in ``SHAPES``."""
    known = SHAPES.get(name)
    if known is None:
        return None
    architecture, sizes, more = known
    return AutoConfig.for_model(architecture, **dict(zip(KEYS, sizes, strict=False)), **more)
