"""Small random models of several families, and a batch that holds every shape of row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    Olmo2Config,
    Qwen2Config,
    Qwen3Config,
)

from closeness import logprob_rounding
from posttrain.models.forward.forward import Forward
from posttrain.models.forward.gradient_checkpointing import gradient_checkpointing
from posttrain.models.lora import apply_adapter
from posttrain.recipes.sections import AdapterSection
from posttrain.types import Batch, Outputs, Sample, collate

SHAPE = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
CONFIGS = {
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**SHAPE),
    "llama": lambda: LlamaConfig(**SHAPE),
    "olmo2": lambda: Olmo2Config(**SHAPE),
    "gpt2": lambda: GPT2Config(
        vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=None, eos_token_id=None
    ),
}
# A model whose logits are not what its LM head gives: it must take the padded path.
SCALED = {"granite": lambda: GraniteConfig(**SHAPE, logits_scaling=3.0)}
# Models whose attention caps its scores, or has sinks, which SDPA has not.
OWN_ATTENTION = {
    "gemma2": lambda: Gemma2Config(**SHAPE, head_dim=8, attn_logit_softcapping=2.0),
    "gpt_oss": lambda: GptOssConfig(**SHAPE, head_dim=8, num_local_experts=2, num_experts_per_tok=1),
}


# Of the models of these families (two layers), whose log-probabilities go down to -7.
LOGPROBS = logprob_rounding(2, size=7.0)


def random_model(family: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config((CONFIGS | SCALED | OWN_ATTENTION)[family]()).eval().to(dtype)
    with torch.no_grad():  # the default init gives nearly uniform outputs, which would hide errors
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0)
    return model


def ragged_batch(seed: int = 0, groups: int = 3) -> Batch:
    """Groups that share prompts of different lengths, answers of 1 to 9 tokens, and rows without a prefix."""
    generator = torch.Generator().manual_seed(seed)

    def draw(n: int) -> list[int]:
        return torch.randint(0, 97, (n,), generator=generator).tolist()

    samples = []
    for group in range(groups):
        prompt = draw(3 + 4 * group)
        for _ in range(3):
            answer = draw(int(torch.randint(1, 10, (1,), generator=generator)))
            n = len(answer)
            samples.append(Sample(prompt + answer, [False] * len(prompt) + [True] * n, group=group, prefix=len(prompt)))
    samples.append(Sample(draw(8), [False, False, True, False, True, True, False, True], group=99))
    samples.append(Sample(draw(2), [False, True], group=100, prefix=1))
    return collate(samples)


def unshared(batch: Batch) -> Batch:
    """The same rows with nothing in common."""
    return collate(
        [
            Sample(batch.tokens[b, :n].tolist(), batch.mask[b, :n].tolist(), group=b)
            for b, n in enumerate(batch.lengths.tolist())
        ]
    )


def add_adapter(model: torch.nn.Module) -> torch.nn.Module:
    """A LoRA adapter on a model that is not what it was without: its second factors are random, not zero."""
    adapted = apply_adapter(model, AdapterSection(rank=4), seed=0)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
    return adapted


def weighted_backward(forward: Forward, batch: Batch, recomputed: Sequence[torch.nn.Module] = ()) -> Outputs:
    """Return a forward pass's outputs, after the backward pass of a sum with another weight for every place.

    ``recomputed``: models whose activations are computed again in the backward pass.
    """
    with gradient_checkpointing(recomputed):
        outputs = forward(batch)
        loss = outputs.logprobs if outputs.scores is None else outputs.logprobs + outputs.scores
        with forward.backward_context():
            (loss * torch.linspace(0.5, 1.5, batch.mask.shape[1])).sum().backward()
    return outputs


def gradients(*modules: torch.nn.Module) -> torch.Tensor:
    """All gradients behind one another; a parameter without one counts as zeros."""
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for m in modules for p in m.parameters()]
    return torch.cat([part.flatten() for part in parts])


def relative_difference(left: torch.Tensor, right: torch.Tensor) -> float:
    """The largest difference, in units of the largest number."""
    assert float(right.abs().max()) > 0
    return float((left - right).abs().max() / right.abs().max())
