"""Small random models of several families, six layers each, and ragged documents for them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from posttrain.interpret.activations.sites import read_rows

NUM_LAYERS = 6
SHAPE: dict[str, Any] = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": SHAPE,
    "llama": {key: value for key, value in SHAPE.items() if key != "head_dim"},
    "gpt2": {
        "vocab_size": 100, "n_embd": 32, "n_layer": NUM_LAYERS, "n_head": 4, "n_positions": 64, "bos_token_id": None,
        "eos_token_id": None,
    },
    "gemma2": SHAPE | {"sliding_window": 5},
    "gemma3_text": SHAPE | {"sliding_window": 5},
    "olmo2": {key: value for key, value in SHAPE.items() if key != "head_dim"},
    "gpt_neox": {key: value for key, value in SHAPE.items() if key not in ("head_dim", "num_key_value_heads")},
    "qwen3_moe": SHAPE | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "granite": {key: value for key, value in SHAPE.items() if key != "head_dim"} | {"residual_multiplier": 0.2},
}  # fmt: skip
DOCUMENTS = [list(range(1, 20)), list(range(30, 42)), [5, 6, 7], [9]]


def activations_of(model: Any, documents: Sequence[Sequence[int]], sites: Sequence[str]) -> dict[str, torch.Tensor]:
    return read_rows(model, sites, documents)


def build(family: str, **changes: Any) -> Any:
    config = AutoConfig.for_model(family, **(FAMILIES[family] | changes))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def disturbed(model: Any, scale: float, seed: int) -> Any:
    """Return a copy that differs in the weights of its first two blocks alone."""
    changed = copy.deepcopy(model)
    torch.manual_seed(seed)
    with torch.no_grad():
        for block in changed.model.layers[:2]:
            block.mlp.down_proj.weight += scale * torch.randn_like(block.mlp.down_proj.weight)
    return changed


def padded(documents: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens padded with 0 on the right, and which are real."""
    tokens = torch.zeros((len(documents), max(map(len, documents))), dtype=torch.long)
    for row, ids in enumerate(documents):
        tokens[row, : len(ids)] = torch.tensor(ids)
    lengths = torch.tensor([len(ids) for ids in documents])
    return tokens, torch.arange(tokens.shape[1]) < lengths[:, None]


@torch.no_grad()
def naive(model: Any, documents: list[list[int]]) -> list[torch.Tensor]:
    """``hidden_states`` of the whole model, rows of real tokens only."""
    tokens, real = padded(documents)
    return [states[real] for states in model(input_ids=tokens, output_hidden_states=True).hidden_states]
