"""The packed forward pass against the modules' own, for every family; and the split of a batch."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Qwen2Config,
    Qwen3Config,
)

from posttrain.models.forward import MAX_LOGIT_ELEMENTS, Forward, score_logits
from posttrain.models.packing import pack
from posttrain.types import Batch, Sample, collate

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


def random_model(family: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family]()).eval().to(dtype)
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


def reference_logprobs(
    model: torch.nn.Module, batch: Batch, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row alone through the model, float64 softmax."""
    logprobs = torch.zeros(batch.tokens.shape, dtype=torch.float64)
    entropy = torch.zeros_like(logprobs)
    for b in range(batch.num_rows):
        n = int(batch.lengths[b])
        logits = model(batch.tokens[b : b + 1, :n], use_cache=False).logits[0].double() / temperature
        table = logits.log_softmax(-1)
        for t in range(1, n):
            if batch.mask[b, t]:
                logprobs[b, t] = table[t - 1, batch.tokens[b, t]]
                entropy[b, t] = -(table[t - 1].exp() * table[t - 1]).sum()
    return logprobs, entropy


@pytest.mark.parametrize("family", CONFIGS)
@torch.no_grad()
def test_packed_equals_each_row_alone(family: str):
    model = random_model(family)
    batch = ragged_batch()
    expected, entropy = reference_logprobs(model, batch, temperature=0.7)
    forward = Forward(model, temperature=0.7)
    assert forward.path == "packed"
    outputs = forward(batch)
    assert float((outputs.logprobs - expected).abs().max()) < 1e-5
    assert float((outputs.entropy - entropy).abs().max()) < 1e-5
    assert expected.abs().max() > 3, "the model must not be near uniform"


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
@torch.no_grad()
def test_padded_path_agrees(family: str):
    model = random_model(family)
    batch = ragged_batch()
    forward = Forward(model)
    packed = forward(batch).logprobs
    forward.path = "padded"
    assert float((forward(batch).logprobs - packed).abs().max()) < 1e-5


def test_a_shared_prompt_is_computed_once():
    batch = ragged_batch()
    packing = pack(batch)
    prompts = 3 + 7 + 11
    answers = int(sum(n - 1 - p for n, p in zip(batch.lengths[:9], batch.prefix[:9], strict=True)))
    assert packing.num_tokens == prompts + answers + 7 + 1
    assert pack(batch, share_prefixes=False).num_tokens == int((batch.lengths - 1).sum())


def gradient(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    forward = Forward(model)
    weights = torch.linspace(0.5, 2.0, batch.num_rows, dtype=torch.float64)[:, None]
    model.zero_grad()
    (forward(batch).logprobs.double() * weights).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_gradients_do_not_depend_on_sharing_prompts(family: str):
    model = random_model(family, torch.float64)
    batch = ragged_batch()
    shared = gradient(model, batch)
    batch.prefix = torch.zeros_like(batch.prefix)
    alone = gradient(model, batch)
    # Qwen3's norms and rotary embedding compute in fp32 whatever the weights are.
    tolerance = {"gpt2": 1e-12, "qwen3": 1e-6}[family]
    assert float((shared - alone).abs().max() / alone.abs().max()) < tolerance


@torch.no_grad()
def test_generation_still_works_with_the_packed_attention_installed():
    model = random_model("qwen3")
    tokens = torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]])
    attends = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    before = model(tokens, attention_mask=attends).logits
    Forward(model)
    assert torch.allclose(model(tokens, attention_mask=attends).logits, before, atol=1e-6)


def test_the_head_in_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch):
    model = random_model("gpt2", torch.float64)
    batch = ragged_batch()
    whole = gradient(model, batch)
    assert 97 * int(batch.mask.sum()) < MAX_LOGIT_ELEMENTS
    monkeypatch.setattr("posttrain.models.forward.MAX_LOGIT_ELEMENTS", 97 * 5)
    chunked = gradient(model, batch)
    assert float((whole - chunked).abs().max() / whole.abs().max()) < 1e-12


def test_logprobs_are_fp32_for_bf16_weights():
    logits = torch.tensor([[300.0, 299.0, 0.0]], dtype=torch.bfloat16)
    logprobs, _ = score_logits(logits, torch.tensor([0]), 1.0, "none")
    assert logprobs.dtype == torch.float32
    gap = 300.0 - float(logits[0, 1])  # what bf16 made of 299
    assert logprobs.item() == pytest.approx(-torch.tensor(-gap).exp().log1p().item(), abs=1e-7)


@torch.no_grad()
def test_rows_longer_than_the_attention_window_take_the_padded_path():
    """Packing knows no sliding window; within it both are the same."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MistralConfig(**SHAPE, sliding_window=6)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0)
    batch = ragged_batch()
    short = batch.select([9, 10])  # rows of 8 and 2 tokens
    assert int(batch.lengths.max()) > 8
    expected = {id(b): reference_logprobs(model, b)[0] for b in (batch, short)}
    model.config.sliding_window = None  # what the window changes, so that the test can fail
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
    unlimited = reference_logprobs(model, batch)[0]
    assert float((unlimited - expected[id(batch)]).abs().max()) > 0.1
    model.config.sliding_window = 6
    for layer in model.model.layers:
        layer.self_attn.sliding_window = 6
    forward = Forward(model)
    assert forward.path == "packed"
    for b in (batch, short):
        assert float((forward(b).logprobs - expected[id(b)]).abs().max()) < 1e-5


@torch.no_grad()
def test_slots_and_tokens_of_the_last_pass():
    model = random_model("gpt2")
    batch = collate([Sample([1] * 9, [False] + [True] * 8), Sample([2] * 4, [False] + [True] * 3, group=1)])
    forward = Forward(model)
    forward(batch)
    assert (forward.last_slots, forward.last_tokens) == (2 * 8, 8 + 3)  # the last token of a row predicts nothing
    forward.path = "padded"
    forward(batch)
    assert (forward.last_slots, forward.last_tokens) == (2 * 9, 9 + 4)
