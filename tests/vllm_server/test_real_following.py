"""Real vLLM servers whose weights follow: clean transfers, transfers with a fault, and training from end to end."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.engine_contract import keys_of
from posttrain.engines.base import Sampling
from posttrain.engines.native.engine import NativeEngine
from posttrain.engines.vllm import training
from posttrain.engines.vllm.engine import vllm
from posttrain.engines.vllm.probe import TOLERANCE, largest_difference
from posttrain.engines.vllm.training import Trained
from posttrain.errors import EngineMismatch
from posttrain.models.load import LoadedModel, load_model
from posttrain.recipes.sections import ModelSection
from posttrain.world import ONE
from small_runs import end_of, recorded, start, steps_of

pytestmark = pytest.mark.vllm
NUM_UPDATES = 40


def update(model: Any, seed: int) -> None:
    """Every number by 1e-5, up or down."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1e-5 * torch.randn(parameter.shape, generator=generator).sign()


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model(ModelSection(), seed=0)


@pytest.fixture(scope="module")
def engine(tiny: LoadedModel, tmp_path_factory: pytest.TempPathFactory, own_servers: None) -> Iterator[Trained]:
    """A server that reads files of this machine's memory."""
    engine = vllm(tiny.model, tiny.tokenizer, enforce_eager=True, timeout_seconds=300.0)
    assert isinstance(engine, Trained)
    engine.settle(tmp_path_factory.mktemp("following"), ONE)
    try:
        engine.sync(0)
        yield engine
    finally:
        engine.close()


def difference(engine: Trained) -> float:
    return largest_difference(engine.model, lambda compute: compute(), engine._session(engine._scores))


def test_clean_updates_are_accepted_and_a_missing_one_would_not_be(engine: Trained) -> None:
    seconds, worst, least = [], 0.0, 1.0
    for version in range(1, NUM_UPDATES + 1):
        update(engine.model, version)
        is_measured = version % 10 == 0
        if is_measured:
            least = min(least, difference(engine))
        started = time.perf_counter()
        engine.sync(version)
        seconds.append(time.perf_counter() - started)
        if is_measured:
            worst = max(worst, difference(engine))
    print(f"\n{NUM_UPDATES} updates, {sorted(seconds)[len(seconds) // 2]:.2f} s in the middle;")
    print(f"the same weights differ by at most {worst:.1e} nats, one update that is missing by at least {least:.1e}")
    assert worst < TOLERANCE / 10 < TOLERANCE < least


def test_answers_are_the_models(engine: Trained, tiny: LoadedModel) -> None:
    prompts = [tiny.tokenizer.encode(f"Eva starts with {n} shells. She finds {n // 2 + 1}") for n in range(10, 26)]
    greedy, keys = Sampling(24, temperature=0.0, stop_ids=frozenset({0})), [[1]] * 16
    found = engine.generate(prompts, keys, greedy)
    expected = NativeEngine(tiny.model).generate(prompts, keys, greedy)
    assert [g[0].ids for g in found] == [g[0].ids for g in expected]
    assert {c.version for g in found for c in g} == {engine.version}


def test_more_prompts_than_are_read_at_once(engine: Trained, tiny: LoadedModel) -> None:
    """With seeds of their own: vLLM 0.32 on a CPU ends at a seeded prompt that it reads in parts."""
    prompts = [tiny.tokenizer.encode(f"Eva starts with {n} shells. She finds {n // 2}") * 24 for n in range(64)]
    assert sum(map(len, prompts)) > 4 * 4096
    groups = engine.generate(prompts, keys_of([2] * 64), Sampling(4))
    assert [len(c.ids) for group in groups for c in group] == [4] * 128


def test_ids_without_a_text_are_never_sampled(engine: Trained) -> None:
    """Below 300 alone: of 64 answers of 16 tokens none has another, and without the mask some have."""
    groups = {}
    for num_tokens in (300, engine.vocab_size):
        engine.num_tokens = num_tokens
        groups[num_tokens] = engine.generate([[9, 10]], keys_of([64]), Sampling(16, temperature=2.0))
    assert max(max(one.ids) for one in groups[300][0]) < 300
    assert max(max(one.ids) for one in groups[engine.vocab_size or 0][0]) >= 300


def one_tensor_scaled(engine: Trained, patch: pytest.MonkeyPatch) -> None:
    sound = engine.weights

    def weights() -> Any:
        for name, weight in sound():
            yield name, weight * 1.01 if name == "model.layers.2.mlp.up_proj.weight" else weight

    patch.setattr(engine, "weights", weights)


def one_layer_left_old(engine: Trained, patch: pytest.MonkeyPatch) -> None:
    old = {name: weight.clone() for name, weight in engine.weights() if name.startswith("model.layers.1.")}
    sound = engine.weights
    patch.setattr(engine, "weights", lambda: ((name, old.get(name, weight)) for name, weight in sound()))


def prefix_cache_kept(engine: Trained, patch: pytest.MonkeyPatch) -> None:
    sound = training.control

    def control(server: Any, method: Any, path: str, *rest: Any, **options: Any) -> Any:
        path = f"{path}&clear_cache=false" if path.startswith("/pause") else path
        return None if path == "/reset_prefix_cache" else sound(server, method, path, *rest, **options)

    patch.setattr(training, "control", control)


@pytest.mark.parametrize("fault", [one_tensor_scaled, one_layer_left_old, prefix_cache_kept])
def test_a_transfer_with_a_fault_is_refused(engine: Trained, fault: Any) -> None:
    """After one update of 1e-5 at every weight; the next transfer is sound again, and accepted."""
    version = engine.version + 1
    with pytest.MonkeyPatch.context() as patch:
        fault(engine, patch)
        update(engine.model, version)
        with pytest.raises(EngineMismatch, match=r"log-probabilities of a fixed batch differ by"):
            engine.sync(version)
    engine.sync(version)


def test_two_processes_train_with_a_server_by_one_command(tmp_path: Path, own_servers: None) -> None:
    """The line of docs/serving.md, in small: every answer is there once, by the version that its batch is due."""
    changes = {"scale.processes": 2, "rollout.engine.name": "vllm", "rollout.engine.enforce_eager": "true"}
    changes |= {"rollout.prompts": 4, "rollout.max_tokens": 32, "train.steps": 4}
    changes |= {"train.warmup_steps": 1, "train.save_every": 0, "eval.every": 4, "eval.n": 8, "eval.max_tokens": 32}
    words = [word for key, value in changes.items() for word in (f"--{key}", str(value))]
    where = ["--runs-dir", str(tmp_path), "--run", "it", "--quiet"]
    code, error = end_of(start([sys.executable, "-m", "posttrain", "train", "tiny/grpo", *words, *where], os.environ))
    assert code == 0, error
    training_rows, evaluated = recorded(tmp_path / "it")
    due = [(step, step - 1) for step in range(1, 5)]
    assert sorted((row.step, row.version) for row in training_rows) == [pair for pair in due for _ in range(32)]
    assert Counter(row.step for row in evaluated) == {0: 8, 4: 8}
    assert max(step["mismatch_kl"] for step in steps_of(tmp_path / "it")) < 1e-3
