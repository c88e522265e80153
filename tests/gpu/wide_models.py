"""Where the tests of this folder compute, a model of the shape that people train, and what a profile calls things.

On a machine without a GPU ``POSTTRAIN_GPU_TESTS_ON`` runs those that count nothing that only a GPU does: with ``cpu``
there, with ``fake`` on what stands in for a GPU (``fake_gpu``), where nothing may lie on another device.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from posttrain.models.forward.forward import Forward
from posttrain.types import Completion, Sample, collate

PLACE = os.environ.get("POSTTRAIN_GPU_TESTS_ON", "cuda")
DEVICE = torch.device("cuda" if PLACE == "fake" else PLACE)
needs_device = pytest.mark.skipif(DEVICE.type == "cuda" and not torch.cuda.is_available(), reason="needs CUDA")
on_cuda = pytest.mark.skipif(PLACE != "cuda", reason="counts what a GPU does")
VOCABULARY = 301
# What a launch, a graph's launch and a wait of the host are called in a profile of CUDA.
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def wide_model(dtype: torch.dtype = torch.bfloat16, layers: int = 2, vocabulary: int = VOCABULARY) -> Any:
    """Heads of 128 numbers, four for one head of keys, as the models have that people train."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=256, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=2,
        head_dim=128, intermediate_size=512, max_position_embeddings=4096, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # the default init gives nearly uniform outputs, which would hide errors
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(2.0)
    return model.to(DEVICE, dtype)


def check_scores(model: Any, prompts: Sequence[list[int]], completions: Sequence[Sequence[Completion]]) -> list[int]:
    """In bf16 a sampler and the packed forward pass agree to 0.02 nats in the mean and 0.5 at most.

    Returns:
        The number of tokens of every completion.
    """
    samples, drawn = [], []
    for i, (prompt, group) in enumerate(zip(prompts, completions, strict=True)):
        for c in group:
            mask = [False] * len(prompt) + [True] * len(c.ids)
            samples.append(Sample([*prompt, *c.ids], mask, group=i, prefix=len(prompt)))
            drawn.append(torch.tensor(c.logprobs))
    batch = collate(samples)
    with torch.no_grad():
        scored = Forward(model)(batch, "none").logprobs.cpu()
    differences = (scored[batch.mask] - torch.cat(drawn)).abs()
    assert float(differences.mean()) < 0.02
    assert float(differences.max()) < 0.5
    return [len(row) for row in drawn]
