"""What the trainer and the sampler ask of a GPU: which kernels ran, how often the host waited, how much memory it took.

``POSTTRAIN_GPU_TESTS_ON=cpu`` runs what needs no kernel of a GPU on the CPU, a loop in the place of its attention.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from wide_models import DEVICE, LAUNCHES, PLACE, VOCABULARY, WAITS, check_scores, needs_device, on_cuda, wide_model

from closeness import approx
from looped_attention import looped
from posttrain.models.forward import attention
from posttrain.models.forward.forward import Forward
from posttrain.models.forward.gradient_checkpointing import gradient_checkpointing
from posttrain.models.forward.packing import PackedRun, Packing
from posttrain.models.forward.predictions import gpu_memory_of, max_logit_elements
from posttrain.models.load import load_tokenizer
from posttrain.randomness import derive_key
from posttrain.recipes.recipe import load_recipe
from posttrain.sampling.base import Sampling
from posttrain.sampling.native.engine import NativeEngine
from posttrain.training.build import prepare
from posttrain.training.memory import Memory, estimate_memory
from posttrain.training.step import Method, accumulate
from posttrain.types import Batch, Loss, Sample, collate

pytestmark = [pytest.mark.gpu, needs_device, pytest.mark.usefixtures("full_fp32", "a_kernel")]


@pytest.fixture
def a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the loop for a kernel."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", looped)
        monkeypatch.setattr(attention, "unmasked_kernel", lambda *_: attention.varlen)


def long_batch(longest: int = 900) -> Batch:
    """Prompts of 7, 130 and 300 tokens, each shared by answers of 1 token to ``longest``, and a row alone."""
    rng = torch.Generator().manual_seed(0)

    def draw(n: int) -> list[int]:
        return torch.randint(0, VOCABULARY, (n,), generator=rng).tolist()

    samples = []
    for group, length in enumerate((7, 130, 300)):
        prompt = draw(length)
        for n in (1, longest // 9, longest // 2, longest):
            mask = [False] * length + [True] * n
            samples.append(Sample(prompt + draw(n), mask, group=group, prefix=length))
    samples.append(Sample(draw(600), [False, *[True] * 599], group=9))
    return collate(samples)


def learn(forward: Forward, batch: Batch) -> torch.Tensor:
    """All gradients of a weighted sum of log-probabilities, in fp32 and on the CPU."""
    forward.model.zero_grad(set_to_none=True)
    outputs = forward(batch, "none")
    with forward.backward_context():
        (outputs.logprobs * torch.linspace(0.5, 1.5, batch.mask.shape[1], device=DEVICE)).sum().backward()
    return torch.cat([p.grad.flatten().float().cpu() for p in forward.model.parameters() if p.grad is not None])


def profiled(work: Callable[[], Any]) -> Counter[str]:
    """How often each operation, kernel and call of CUDA was there, by name."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if DEVICE.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=kinds) as profile:
        work()
    return Counter({event.key: event.count for event in profile.key_averages()})


def number_of(events: Counter[str], *names: str) -> int:
    return sum(events[name] for name in names)


# -- attention of the trainer ------------------------------------------------------------------------------------------


@on_cuda
@pytest.mark.parametrize("head_dim", [64, 128])
def test_kernel_is_right_on_long_ragged_runs(head_dim: int) -> None:
    """Outputs and gradients, against the scores written out: behind a shared prompt, and beyond 512 tokens."""
    dtype = torch.bfloat16
    assert attention.is_correct(attention.varlen, DEVICE, dtype, 8, 2, head_dim)
    runs, at = [PackedRun(0, 300)], 300
    for length in (1, 700, 33, 128, 900):
        runs.append(PackedRun(at, length, 0, 300))
        at += length
    runs.append(PackedRun(at, 650))
    tokens = torch.zeros(-(-(at + 650) // 128) * 128, dtype=torch.long, device=DEVICE)
    packing = Packing(tokens, tokens, at + 650, tuple(runs), tokens, None, tokens, 0, tokens)
    rng = torch.Generator().manual_seed(0)
    sides = [torch.randn(len(tokens), n, head_dim, generator=rng).to(DEVICE, dtype) for n in (8, 2, 2)]
    expected = attention._outcome(attention.in_rectangles, packing, [x.float() for x in sides])
    found = attention._outcome(attention.varlen, packing, sides)
    for one, other in zip(found, expected, strict=True):
        difference = (one - other)[: packing.num_tokens].abs().max() / other.abs().max()
        assert float(difference) < 0.02


@on_cuda
@pytest.mark.parametrize(("dtype", "kernel"), [(torch.bfloat16, "varlen"), (torch.float32, "mask")])
def test_which_kernel_attends(dtype: torch.dtype, kernel: str) -> None:
    forward = Forward(wide_model(dtype))
    assert (forward.path, forward.attention) == ("packed", kernel)
    learn(forward, long_batch())  # what is compiled is compiled
    events = profiled(lambda: learn(forward, long_batch()))
    assert not [name for name in events if "cudnn" in name.lower() and "attention" in name.lower()]
    by_sdpa = sorted(name for name in events if name.startswith("aten::_scaled_dot_product"))
    if kernel == "varlen":
        assert by_sdpa == []
        assert events["aten::_flash_attention_forward"] == events["aten::_flash_attention_backward"] == 2
        assert [name for name in events if "flash_fwd" in name or "FlashAttnFwd" in name]
    else:
        assert by_sdpa == [f"aten::_scaled_dot_product_efficient_attention{part}" for part in ("", "_backward")]


@pytest.mark.parametrize("precision", ["fp32"] if PLACE == "fake" else ["fp32", "bf16"])  # autocast passes it by
def test_products_in_bfloat16_over_weights_in_fp32(precision: Any) -> None:
    model, batch = wide_model(torch.float32), long_batch()
    forward = Forward(model, precision=precision)
    assert forward.attention == ("mask" if (DEVICE.type, precision) == ("cuda", "fp32") else "varlen")
    exact = Forward(model)
    exact.path = "padded"
    found, expected = learn(forward, batch), learn(exact, batch)
    bound = {"fp32": 1e-4, "bf16": 0.05}[precision]
    assert float((found - expected).norm() / expected.norm()) == approx(0.0, abs=bound)


def test_gradients_in_bfloat16_are_as_good_as_the_modules_own() -> None:
    """Of weights in bfloat16; both ways round, and packing must not round worse. fp32 is the truth."""
    model, batch = wide_model(), long_batch()
    packed, padded = Forward(model), Forward(model)
    assert packed.path == "packed"
    padded.path = "padded"
    found, modules = learn(packed, batch), learn(padded, batch)
    exact = Forward(model.float())
    exact.path = "padded"
    truth = learn(exact, batch)
    ours, theirs = (float((x - truth).norm() / truth.norm()) for x in (found, modules))
    assert 0 < ours < 1.25 * theirs + 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_activations_computed_again_change_no_gradient_and_take_less_memory(dtype: torch.dtype) -> None:
    model, batch = wide_model(dtype, layers=6), long_batch()
    forward = Forward(model)
    learn(forward, batch)
    gradients, peaks = [], []
    for again in (False, True):
        if PLACE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        if again:
            with gradient_checkpointing([model]):
                gradients.append(learn(forward, batch))
        else:
            gradients.append(learn(forward, batch))
        peaks.append(torch.cuda.max_memory_allocated() if PLACE == "cuda" else 1 - again)
    scale = float(gradients[0].abs().max())
    assert float((gradients[0] - gradients[1]).abs().max()) < 0.02 * scale  # sums of shared keys in another order
    assert peaks[1] < peaks[0]


@on_cuda
def test_the_host_does_not_wait_in_a_layer() -> None:
    """As many waits for two layers as for eight: those of the plan and of what is read at the end."""
    waits = []
    for layers in (2, 8):
        forward = Forward(wide_model(layers=layers))
        learn(forward, long_batch())
        waits.append(number_of(profiled(lambda f=forward: f(long_batch(), "none").logprobs.sum().backward()), *WAITS))
    assert waits[0] == waits[1] < 20


def test_logits_are_computed_in_pieces_of_the_devices_size() -> None:
    most = max_logit_elements(gpu_memory_of(DEVICE))
    assert most == 1 << 24 if DEVICE.type == "cpu" else most > 1 << 24


@on_cuda
@pytest.mark.parametrize("checkpointing", [False, True])
def test_memory_of_an_update_is_what_was_planned(checkpointing: bool, tmp_path: Path) -> None:
    """The most that a micro-batch of the longest rows holds, as the allocator counts it."""
    tokenizer = load_tokenizer("tiny")
    model = wide_model(torch.float32, layers=8, vocabulary=len(tokenizer)).cpu()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    keys = {
        "model.name": str(tmp_path), "model.dtype": "bf16", "model.adapter.rank": "8", "model.device": "cuda",
        "rollout.num_prompts": "1", "rollout.group_size": "8", "rollout.max_tokens": "700",
        "prompt.max_prompt_tokens": "300",
        "train.gradient_checkpointing": str(checkpointing).lower(), "eval.every": "0", "task.size": "40",
    }  # fmt: skip
    recipe = load_recipe("tiny/grpo", list(keys.items())).resolve()
    message, parts = estimate_memory(recipe), prepare(recipe)
    assert isinstance(message, Memory)
    mask = [False] * 300 + [True] * 700
    prompt, rng = list(range(300)), torch.Generator().manual_seed(0)
    answers = torch.randint(0, len(tokenizer), (8, 700), generator=rng).tolist()
    batch = collate([Sample(prompt + answer, mask, group=0, prefix=300) for answer in answers])
    method = Method(
        parts.method.forward, lambda outputs, _: Loss(-outputs.logprobs, {}), lambda mask: mask / mask.sum()
    )
    accumulate(method, batch, recipe.train)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    accumulate(method, batch, recipe.train)
    measured = torch.cuda.max_memory_allocated() - before
    print(f"planned {message.activations + message.logits:,}, measured {measured:,} bytes")
    assert message.activations + message.logits == approx(measured, rel=0.3)


# -- the sampler -------------------------------------------------------------------------------------------------------


def work_for(groups: int, size: int) -> tuple[list[list[int]], list[list[int]]]:
    numbers = np.random.default_rng(1)
    prompts = [numbers.integers(8, VOCABULARY, 5 + 3 * i).tolist() for i in range(groups)]
    return prompts, [[derive_key(0, "test", i, j) for j in range(size)] for i in range(groups)]


@on_cuda
def test_launches_and_waits_of_a_token() -> None:
    """With 64 rows: a step is a graph, but for the first in each window of columns; a wait every 8 tokens."""
    layers, tokens = 4, 128
    engine = NativeEngine(wide_model(layers=layers))
    prompts, keys = work_for(16, 4)
    sampling = Sampling(max_tokens=tokens)
    engine.generate(prompts, keys, sampling)
    assert engine.path == "lean"
    events = profiled(lambda: engine.generate(prompts, keys, sampling))
    launches, waits = (number_of(events, *names) / tokens for names in (LAUNCHES, WAITS))
    print(f"{launches:.1f} launches and {waits:.2f} waits a token step, {layers} layers, 64 rows")
    assert 1 <= launches < 6 * layers  # one by one they are more than 20 a layer
    assert waits <= 1.0
    assert not [name for name in events if "cudnn" in name.lower() and "attention" in name.lower()]
    assert not [name for name in events if name == "aten::_scaled_dot_product_attention_math"]


@pytest.mark.parametrize("tokens", [64, 1200] if PLACE == "cuda" else [64])
def test_long_answers_in_bfloat16_are_scored_as_the_trainer_scores_them(tokens: int) -> None:
    """Beyond 512 tokens, rows of several lengths: log-probabilities as drawn, against the packed forward pass."""
    model = wide_model()
    prompts, keys = work_for(4, 4)
    engine = NativeEngine(model, slots=10)
    completions = engine.generate(prompts, keys, Sampling(max_tokens=tokens, stop_ids=frozenset({3})))
    lengths = check_scores(model, prompts, completions)
    assert max(lengths) > tokens * 0.9  # of rows that end by chance
    assert len(set(lengths)) > 1
