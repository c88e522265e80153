"""Text architectures of transformers in tiny, and two steps of GRPO and of SFT with each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from posttrain.models.load import load_model
from posttrain.models.sources import TINY
from posttrain.recipes.sections import ModelSection
from small_runs import Events, make_recipe, steps_of, watched

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "reference" / "architectures.md"
# Keys of configurations under whatever name an architecture has them; windows and chunks that rows get past.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "intermediate_size_mlp"), 96),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 512),
    **dict.fromkeys(("head_dim", "v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "hidden_size_per_layer_input"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "num_heads"), 8),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 16),
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), 12),
    **dict.fromkeys(("mamba_expand", "expand", "num_key_value_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("num_experts_per_tok", "attn_layer_period"), 2),
    **dict.fromkeys(("attn_layer_offset", "n_shared_experts"), 1),
    "linear_num_value_heads": 4,
    "mamba_d_ssm": 128,
    "mamba_dt_rank": 8,
    "num_kv_shared_layers": 0,
}
PLAIN = """
afmoe apertus arcee aria_text biogpt bitnet bloom cohere cohere2 cohere2_moe ctrl cwm diffllama doge dots1
ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon falcon_h1 falcon_mamba flex_olmo gemma gemma2 gemma3_text
gemma3n_text gemma4_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neox gpt_oss granite granitemoe
granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe jetmoe lfm2 llama llama4_text mamba mamba2 minimax
minimax_m2 ministral mistral mixtral mpt nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe
openai-gpt opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe
qwen3_next recurrent_gemma seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma xglm
"""
LATENT = "deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite youtu"
# Every architecture that is tried, with what it wants otherwise.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    **{name: {} for name in PLAIN.split()},
    **{name: {"num_key_value_heads": 4} for name in LATENT.split()},  # heads share a latent vector, not keys
    "bamba": {"attn_layer_indices": [1, 3]},
    "codegen": {"rotary_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 12, "num_heads": 4},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"expert_layer_period": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "minicpm3": {"num_key_value_heads": 4, "scale_emb": 1, "dim_model_base": 64},
    "modernbert-decoder": {"pad_token_id": 0, "cls_token_id": 0, "sep_token_id": 0},
    "rwkv": {"context_length": 512},
}


@dataclass(frozen=True)
class Outcome:
    """Result of two steps: ``sampling`` and ``training`` are paths, ``mismatch`` the largest KL of a step in nats."""

    architecture: str
    name: str
    sampling: str
    training: str
    mismatch: float


def row_of(outcome: Outcome) -> str:
    """The row of the table in the document."""
    return f"| `{outcome.architecture}` | {outcome.name} | {outcome.sampling} | {outcome.training} |"


def build(architecture: str, folder: Path) -> Any:
    """Write a tiny model with weights spread wide enough to matter, and the embedded model's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    defaults = AutoConfig.for_model(architecture)
    known = defaults.to_dict().keys() | type(defaults).attribute_map.keys()
    ids = {"vocab_size": len(tokenizer), "bos_token_id": 0, "eos_token_id": tokenizer.eos_token_id}
    settings = SIZES | ids | {"pad_token_id": None} | ARCHITECTURES[architecture]
    if architecture.startswith("gemma"):
        settings |= {"pad_token_id": 0, "vocab_size_per_layer_input": len(tokenizer)}
    wanted = {key: value for key, value in settings.items() if key in known}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **wanted)).float()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def train_two_steps(architecture: str, folder: Path) -> Outcome:
    """Train a tiny model by GRPO and by SFT, two steps each, and load what GRPO saved."""
    model = build(architecture, folder / "model")
    section = {"name": str(folder / "model"), "device": "cpu"}
    events, steps = Events(), {"steps": 2, "lr": 1e-3}
    recipe = make_recipe("grpo", model=section, rewards=["small_runs:vowel_share"], train=steps)
    watched(folder / "grpo", recipe, events)
    rows = steps_of(folder / "grpo")
    watched(folder / "sft", make_recipe("sft", model=section, train=steps), Events())
    for row in (*rows, *steps_of(folder / "sft")):
        assert math.isfinite(row["loss"])
        assert row["grad_norm"] > 0
    load_model(ModelSection(name=str(folder / "grpo" / "checkpoints" / "step-000002"), device="cpu"), seed=0)
    slower = [fact["message"] for fact in events.of("notice") if "takes a slower" in fact["message"]]
    paths = {"modules": "own modules", "own cache": "own cache", "no cache": "no cache"}
    found = next((name for mark, name in paths.items() if slower and mark in slower[0]), "fast")
    training = str(events.of("start")[0]["forward_path"])
    return Outcome(architecture, type(model).__name__, found, training, max(row["kl_sampler"] for row in rows))
