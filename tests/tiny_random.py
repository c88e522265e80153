"""Small random models of every architecture, for tests."""

from __future__ import annotations

from typing import Any


def build_tiny_random(architecture: str, seed: int = 0, **config: Any) -> Any:
    """A causal language model of two layers, in eval mode, with weights spread wide enough to matter.

    Freshly initialized weights (std 0.02, biases 0, norms 1) give an almost uniform distribution in
    which a wrong rotation or a forgotten bias would not show; noise of 0.15 is added to everything.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": 300,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    if architecture != "gpt2":
        settings |= {
            "intermediate_size": 96,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "pad_token_id": None,
        }
    if architecture in ("qwen3", "gemma2"):
        settings |= {"head_dim": 16}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **(settings | config)))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.15)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.eval()
