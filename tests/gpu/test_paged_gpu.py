"""Sampling from pages on CUDA: the CPU's tokens, graphs against calls, what the host launches and waits for, memory.

``POSTTRAIN_GPU_TESTS_ON=cpu`` runs what counts nothing of a GPU on the CPU.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from wide_models import DEVICE, LAUNCHES, PLACE, WAITS, check_scores, needs_device, on_cuda, wide_model

from posttrain.engines.base import Sampling
from posttrain.engines.native.engine import NativeEngine
from posttrain.engines.native.paged import attention
from posttrain.engines.native.paged.attention import attention_for, gathered, is_right
from posttrain.engines.native.paged.steps import Steps
from posttrain.randomness import derive_key

pytestmark = [pytest.mark.gpu, needs_device, pytest.mark.usefixtures("full_fp32")]
STOPS = frozenset(range(4))


def work(lengths: tuple[int, ...] = (5, 1, 40, 17, 33), group: int = 4) -> tuple[list[list[int]], list[list[int]]]:
    numbers = np.random.default_rng(1)
    prompts = [numbers.integers(8, 300, n).tolist() for n in lengths]
    return prompts, [[derive_key(0, "test", i, j) for j in range(group)] for i in range(len(prompts))]


def said(completions: Any) -> list[list[tuple[Any, str]]]:
    return [[(c.ids, c.finish) for c in group] for group in completions]


def profiled(work: Callable[[], Any]) -> Counter[str]:
    """How often each operation, kernel and call of CUDA was there, by name."""
    torch.cuda.synchronize()
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        work()
    return Counter({event.key: event.count for event in profile.key_averages()})


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama"])
def test_tokens_are_those_of_the_cpu(tiny_random: Any, architecture: str) -> None:
    """In fp32; with pages enough, and with so few that rows are put back."""
    model, (prompts, keys), sampling = tiny_random(architecture), work(), Sampling(60, stop_ids=STOPS)
    expected = NativeEngine(copy.deepcopy(model)).generate(prompts, keys, sampling)
    model.to(DEVICE)
    for slots, tokens in ((64, None), (3, None), (20, 400)):
        engine = NativeEngine(model, slots=slots, cache="paged", cache_tokens=tokens)
        assert said(engine.generate(prompts, keys, sampling)) == said(expected)
        assert engine.paging is not None
        assert (engine.paging.num_put_back > 0) == (tokens is not None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_say_what_calls_say(dtype: torch.dtype) -> None:
    """The same kernels on the same numbers: not a bit differs, in several sizes of batch and after an update."""
    model, (prompts, keys) = wide_model(dtype, layers=4), work((5, 300, 40, 17, 33), 8)
    sampling = Sampling(200, stop_ids=STOPS, top_p=0.95)
    graphs, calls = (NativeEngine(model, slots=32, cache="paged", eager=eager) for eager in (False, True))
    first = graphs.generate(prompts, keys, sampling)
    assert first == calls.generate(prompts, keys, sampling)
    assert graphs.paging is not None
    assert graphs.paging._kept is not None
    recorded = dict(graphs.paging._kept._recorded)
    assert len({size for size, _ in recorded}) > 1
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.02)
    second = graphs.generate(prompts, keys, sampling)
    assert second == calls.generate(prompts, keys, sampling)
    assert second != first
    assert graphs.paging._kept._recorded.items() >= recorded.items()


@on_cuda
def test_launches_and_waits_of_a_token() -> None:
    """64 rows: one launch of a graph for each token, nothing else by the layer, and a few waits every 8 tokens."""
    tokens, found = 128, []
    for layers in (2, 8):
        engine = NativeEngine(wide_model(layers=layers), cache="paged")
        prompts, keys = work(tuple(range(5, 53, 3)), 4)
        engine.generate(prompts, keys, Sampling(tokens))
        events = profiled(lambda e=engine, p=prompts, k=keys: e.generate(p, k, Sampling(tokens)))
        launches, waits = (sum(events[name] for name in names) for names in (LAUNCHES, WAITS))
        print(
            f"{layers} layers, {tokens} tokens, 64 rows: {events['cudaGraphLaunch']} graphs, {launches} launches beside"
        )
        print(f"{waits} waits")
        assert events["cudaGraphLaunch"] == tokens
        assert waits / tokens <= 1.0
        found.append(launches)
    assert (found[1] - found[0]) / 6 / tokens < 1.0, "layers are launched one by one"


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_which_kernel_reads_pages(dtype: torch.dtype, head_dim: int) -> None:
    kernel, page_size = attention_for(DEVICE, dtype, 8, 2, head_dim)
    print(f"torch {torch.__version__}, {dtype}, heads of {head_dim}: {kernel.__name__}, pages of {page_size}")
    assert is_right(kernel, page_size, DEVICE, dtype, 8, 2, head_dim)
    assert is_right(gathered, attention.PAGE_SIZE, DEVICE, dtype, 8, 2, head_dim)
    assert dtype != torch.float32 or kernel is gathered


@pytest.mark.parametrize("tokens", [64, 1200] if PLACE == "cuda" else [64])
def test_long_answers_in_bfloat16_are_scored_as_the_trainer_scores_them(tokens: int) -> None:
    """Beyond 512 tokens; and where pages run out, no further off than where they do not."""
    model, (prompts, keys) = wide_model(layers=4), work((5, 8, 11, 300))
    for cache_tokens in (None, 4096):
        engine = NativeEngine(model, slots=10, cache="paged", cache_tokens=cache_tokens)
        completions = engine.generate(prompts, keys, Sampling(max_tokens=tokens, stop_ids=frozenset({3})))
        check_scores(model, prompts, completions)


@on_cuda
def test_memory_is_a_share_of_what_is_free_and_does_not_grow() -> None:
    """A batch that would need 16 times the share is sampled from it."""
    model, (prompts, keys) = wide_model(layers=4), work((300,) * 8, 8)
    per_token = 4 * 2 * 2 * 128 * 2  # layers, keys and values, heads, numbers, bytes
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    engine = NativeEngine(model, cache="paged", gpu_memory=64 * 500 * per_token / 16 / free)
    first = engine.generate(prompts, keys, Sampling(200))
    assert engine.paging is not None
    assert engine.paging._kept is not None
    pool = engine.paging._kept.pool
    assert sum(t.nbytes for t in (*pool.keys, *pool.values)) <= 64 * 500 * per_token / 16 * 1.05
    assert engine.paging.num_put_back > 0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    assert engine.generate(prompts, keys, Sampling(200)) == first
    assert torch.cuda.memory_allocated() <= before


@on_cuda
def test_graphs_are_made_for_few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: Counter[tuple[int, int]] = Counter()
    step = Steps.step
    monkeypatch.setattr(Steps, "step", lambda self, *size: sizes.update([size]) or step(self, *size))
    engine = NativeEngine(wide_model(layers=4), slots=256, cache="paged")
    engine.generate(*work(tuple(range(3, 35)), 8), Sampling(300, stop_ids=STOPS))
    assert {rows for rows, _ in sizes} <= {8, 16, 32, 64, 128, 256}
    assert set(sizes.values()) == {2}, "each is called once to prepare and once to record"
