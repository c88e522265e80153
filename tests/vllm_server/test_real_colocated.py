"""vLLM itself in this process: run by the Python of an environment that has both (``make test-vllm``)."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_updates import update

from engines.engine_contract import EngineCase, EngineContract, keys_of, tiny_case
from posttrain.engines.base import Sampling
from posttrain.engines.native.engine import NativeEngine
from posttrain.engines.vllm import colocated
from posttrain.engines.vllm.colocated import ColocatedEngine
from posttrain.engines.vllm.probe import TOLERANCE
from posttrain.errors import EngineMismatch
from posttrain.models.load import LoadedModel, load_model
from posttrain.models.lora import apply_adapter
from posttrain.recipes.sections import AdapterSection, ModelSection
from small_runs import Events, make_recipe, recorded, run, saved_tensors, watched

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="no vllm here; run `make test-vllm`"),
]

NUM_SYNCS = 200
ENGINE = {"name": "vllm", "colocate": True, "eager": True}


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model(ModelSection(), seed=0)


@pytest.fixture(scope="module")
def engine(tiny: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ColocatedEngine]:
    """Tests that build another one close this before, as a process has room for one; it is then built again."""
    engine = ColocatedEngine(tiny.model, tiny.tokenizer, eager=True)
    engine.folder = tmp_path_factory.mktemp("colocated")
    started = time.perf_counter()
    try:
        engine.sync(0)
        print(f"\nbuilt, filled and compared after {time.perf_counter() - started:.1f} s")
        yield engine
    finally:
        engine.close()


class TestContract(EngineContract):
    @pytest.fixture
    def case(self, tiny: LoadedModel, engine: ColocatedEngine) -> EngineCase:
        return tiny_case(tiny.model, tiny.tokenizer, engine, num_draws=1000)


def follow(engine: ColocatedEngine, versions: range) -> None:
    """An update and a sync for each version."""
    for version in versions:
        update(engine.model, version)
        engine.sync(version)


def prompts_of(tiny: LoadedModel, count: int) -> list[list[int]]:
    return [tiny.tokenizer.encode(f"Eva starts with {n} shells. She finds {n // 2 + 1}") for n in range(10, 10 + count)]


def test_greedy_answers_are_the_native_engines(engine: ColocatedEngine, tiny: LoadedModel) -> None:
    prompts, keys = prompts_of(tiny, 128), [[1]] * 128
    greedy = Sampling(24, temperature=0.0, stop_ids=frozenset({0}))
    started = time.perf_counter()
    done = engine.generate(prompts, keys, greedy)
    seconds = time.perf_counter() - started
    expected = NativeEngine(tiny.model).generate(prompts, keys, greedy)
    assert [g[0].ids for g in done] == [g[0].ids for g in expected]
    pairs = [zip(g[0].logprobs, h[0].logprobs, strict=True) for g, h in zip(done, expected, strict=True)]
    apart = max(abs(a - b) for each in pairs for a, b in each)
    print(f"\n128 greedy answers of 24 tokens in {seconds:.2f} s; log-probabilities at most {apart:.1e} apart")
    assert apart < 1e-4


def test_more_prompts_than_are_read_at_once(engine: ColocatedEngine, tiny: LoadedModel) -> None:
    """With seeds of their own: vLLM 0.32 on a CPU ends at a seeded prompt that it reads in parts."""
    prompts = [row * 20 for row in prompts_of(tiny, 64)]
    assert sum(map(len, prompts)) > 4 * 4096
    groups = engine.generate(prompts, keys_of([2] * 64), Sampling(4))
    assert [len(c.ids) for group in groups for c in group] == [4] * 128


def test_clean_syncs_raise_no_alarm_and_an_update_that_did_not_arrive_would(engine: ColocatedEngine) -> None:
    seconds, worst, least = [], 0.0, 1.0
    begin = engine.version + 1
    for version in range(begin, begin + NUM_SYNCS):
        update(engine.model, version)
        if version % 50 == 0:
            least = min(least, engine.score())
        started = time.perf_counter()
        engine.sync(version)
        seconds.append(time.perf_counter() - started)
        if version % 50 == 0:
            worst = max(worst, engine.score())
    print(f"\n{NUM_SYNCS} syncs, {sorted(seconds)[len(seconds) // 2]:.2f} s in the middle, none refused;")
    print(f"the same weights differ by at most {worst:.1e} nats, one update that is missing by at least {least:.1e}")
    assert worst < TOLERANCE / 10 < TOLERANCE < least


def one_tensor_scaled(engine: Any, patch: pytest.MonkeyPatch) -> None:
    sound = engine.weights
    scaled = "model.layers.2.mlp.up_proj.weight"
    patch.setattr(engine, "weights", lambda: ((n, w * 1.01 if n == scaled else w) for n, w in sound()))


def one_layer_left_old(engine: Any, patch: pytest.MonkeyPatch) -> None:
    sound = engine.weights
    patch.setattr(engine, "weights", lambda: ((n, w) for n, w in sound() if not n.startswith("model.layers.1.")))


def tied_head_left_old(engine: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(colocated, "pack_tied_heads", lambda model: None)


def prefix_cache_kept(engine: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine, "_reset_caches", lambda: None)


@pytest.mark.parametrize(
    ("fault", "updates"),
    [(one_tensor_scaled, 1), (one_layer_left_old, 1), (tied_head_left_old, 4), (prefix_cache_kept, 1)],
)
def test_a_sync_with_a_fault_is_caught(engine: ColocatedEngine, fault: Any, updates: int) -> None:
    """After one update of 1e-5 at every weight; the next sync is sound again, and accepted.

    A head alone that is one such update old is about as far off as the tolerance: it is caught a few updates later.
    """
    engine.sync(engine.version if engine.version >= 0 else 0)
    last = engine.version + updates
    with pytest.MonkeyPatch.context() as patch:
        fault(engine, patch)
        with pytest.raises(EngineMismatch, match=r"log-probabilities of a fixed batch differ by") as caught:
            follow(engine, range(engine.version + 1, last + 1))
    print(f"\n{fault.__name__}: {str(caught.value).partition('differ by ')[2].partition(' nats')[0]} nats")
    engine.sync(last + 1)


def test_an_adapter_and_a_head_of_its_own(engine: ColocatedEngine, tmp_path: Path) -> None:
    """Merged weights; and a head that is not tied to the embedding."""
    engine.close()
    loaded: Any = load_model(ModelSection(), seed=0)
    model = loaded.model
    model.lm_head.weight = torch.nn.Parameter(1.1 * model.lm_head.weight.detach())
    model.config.tie_word_embeddings = False
    wrapped = apply_adapter(model, AdapterSection(rank=4, alpha=8.0), 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    other = ColocatedEngine(wrapped, loaded.tokenizer, eager=True)
    other.folder = tmp_path
    try:
        for version in range(3):
            other.sync(version)
            assert other.score() < TOLERANCE / 10
            update(wrapped, version)
        assert other.score() > TOLERANCE
    finally:
        other.close()


def test_answers_that_are_put_back_for_want_of_room_are_the_same(
    engine: ColocatedEngine, tiny: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = (prompts_of(tiny, 16), keys_of([1] * 16), Sampling(600))
    engine.close()
    answers = []
    for size in (256 << 20, 4 << 20):
        monkeypatch.setattr(colocated, "CACHE_BYTES", size)
        other = ColocatedEngine(tiny.model, tiny.tokenizer, eager=True)
        other.folder = tmp_path
        answers.append([group[0].ids for group in other.generate(*asked)])
        said = other.take_notices()
        other.close()
    assert answers[0] == answers[1]
    assert [notice.partition(" for ")[0] for notice in said] == ["vLLM had no room"]
    print(f"\n{said[0]}")


def test_vllm_leaves_the_process_as_it_was(engine: ColocatedEngine) -> None:
    def state() -> list[Any]:
        seeds = [random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()]
        settings = [torch.get_num_threads(), torch.set_num_threads, torch.get_default_dtype(), torch.is_grad_enabled()]
        settings += [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        return [*seeds, dict(os.environ), *settings, torch.get_float32_matmul_precision(), os.sched_getaffinity(0)]

    engine.close()
    before = state()
    engine.generate([[9, 10]], [[1, 2]], Sampling(8))
    assert state() == before
    engine.close()
    assert state() == before
    assert not torch.distributed.is_initialized()


def test_training_and_evaluation_from_end_to_end(engine: ColocatedEngine, tmp_path: Path) -> None:
    """Ended after the second step, and gone on with: the same prompts, seeds and versions as at one stretch."""
    engine.close()
    evaluation = {"every": 2, "n": 8, "max_tokens": 8}
    recipe = make_recipe("grpo", rollout={"engine": ENGINE}, eval=evaluation)
    events = Events()
    result = watched(tmp_path / "whole", recipe, events)
    assert (result.step, result.reason) == (4, "finished")
    timing = [facts["timing"] for facts in events.of("step")][1:]
    mean = {key: sum(each[key] for each in timing) / 3 for key in ("step_seconds", "sync_seconds", "generate_seconds")}
    print("\n" + ", ".join(f"{key} {value:.2f}" for key, value in mean.items()))
    run(tmp_path / "parts", recipe, stop_after=2)
    assert run(tmp_path / "parts", recipe, resume=True).step == 4
    whole, parts = (recorded(tmp_path / name) for name in ("whole", "parts"))
    assert [(row.step, row.version) for row in whole[0]] == [(s, s - 1) for s in (1, 2, 3, 4) for _ in range(16)]
    assert {(row.step, row.version) for row in whole[1]} == {(0, 0), (2, 2), (4, 4)}
    asked = [
        [(r.step, r.prompt_index, r.rollout_index, r.prompt, r.version) for r in each[0]] for each in (whole, parts)
    ]
    assert asked[0] == asked[1]
    same = [a.token_ids == b.token_ids for a, b in zip(whole[0], parts[0], strict=True)]
    tensors = [saved_tensors(tmp_path / name, 4) for name in ("whole", "parts")]
    apart = max(float((tensors[0][name].float() - tensors[1][name].float()).abs().max()) for name in tensors[0])
    print(f"{sum(same)} of {len(same)} answers the same after going on, tensors at most {apart:.1e} apart")
    assert sum(same[:32]) == 32, "with the same weights"
