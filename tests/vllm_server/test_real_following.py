"""Real vLLM servers whose weights follow: clean transfers, transfers with a fault, and training from end to end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from posttrain.errors import EngineMismatch
from posttrain.models.load import LoadedModel, load_model
from posttrain.process_group import SINGLE_PROCESS
from posttrain.recipes.sections import ModelSection
from posttrain.sampling.base import Sampling
from posttrain.sampling.native.engine import NativeEngine
from posttrain.sampling.vllm import following
from posttrain.sampling.vllm.engine import vllm
from posttrain.sampling.vllm.following import TOLERANCE, TrainingVllmEngine, largest_difference
from refusing import refuses

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
def engine(
    tiny: LoadedModel, tmp_path_factory: pytest.TempPathFactory, own_servers: None
) -> Iterator[TrainingVllmEngine]:
    """A server that reads files of this machine's memory."""
    engine = vllm(tiny.model, tiny.tokenizer, enforce_eager=True, timeout_seconds=300.0)
    assert isinstance(engine, TrainingVllmEngine)
    engine.settle(tmp_path_factory.mktemp("following"), SINGLE_PROCESS)
    try:
        engine.sync(0)
        yield engine
    finally:
        engine.close()


def difference(engine: TrainingVllmEngine) -> float:
    return largest_difference(engine.model, lambda compute: compute(), engine.server.session(engine._scores))


def test_clean_updates_are_accepted_and_a_missing_one_would_not_be(engine: TrainingVllmEngine) -> None:
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


def test_answers_are_the_models(engine: TrainingVllmEngine, tiny: LoadedModel) -> None:
    prompts = [tiny.tokenizer.encode(f"Eva starts with {n} shells. She finds {n // 2 + 1}") for n in range(10, 26)]
    greedy, keys = Sampling(24, temperature=0.0, stop_ids=frozenset({0})), [[1]] * 16
    found = engine.generate(prompts, keys, greedy)
    expected = NativeEngine(tiny.model).generate(prompts, keys, greedy)
    assert [g[0].ids for g in found] == [g[0].ids for g in expected]
    assert {c.version for g in found for c in g} == {engine.version}


def one_tensor_scaled(engine: TrainingVllmEngine, patch: pytest.MonkeyPatch) -> None:
    sound = engine.weights

    def weights() -> Any:
        for name, weight in sound():
            yield name, weight * 1.01 if name == "model.layers.2.mlp.up_proj.weight" else weight

    patch.setattr(engine, "weights", weights)


def one_layer_left_old(engine: TrainingVllmEngine, patch: pytest.MonkeyPatch) -> None:
    old = {name: weight.clone() for name, weight in engine.weights() if name.startswith("model.layers.1.")}
    sound = engine.weights
    patch.setattr(engine, "weights", lambda: ((name, old.get(name, weight)) for name, weight in sound()))


def prefix_cache_kept(engine: TrainingVllmEngine, patch: pytest.MonkeyPatch) -> None:
    sound = following.control

    def control(server: Any, method: Any, path: str, *rest: Any, **options: Any) -> Any:
        path = f"{path}&clear_cache=false" if path.startswith("/pause") else path
        return None if path == "/reset_prefix_cache" else sound(server, method, path, *rest, **options)

    patch.setattr(following, "control", control)


@pytest.mark.parametrize("fault", [one_tensor_scaled, one_layer_left_old, prefix_cache_kept])
def test_a_transfer_with_a_fault_is_refused(engine: TrainingVllmEngine, fault: Any) -> None:
    """After one update of 1e-5 at every weight; the next transfer is sound again, and accepted."""
    version = engine.version + 1
    with pytest.MonkeyPatch.context() as patch:
        fault(engine, patch)
        update(engine.model, version)
        with refuses(EngineMismatch, "log-probabilities of a"):
            engine.sync(version)
    engine.sync(version)
