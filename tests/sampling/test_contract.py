"""One contract for every engine: scripted, native, and the client of a vLLM server (here a stand-in)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from engine_contract import EngineCase, EngineContract, keys_of, tiny_case

from closeness import approx
from fake_vllm import FakeVllm, model_answer
from posttrain.errors import UsageError
from posttrain.models.load import load_model
from posttrain.randomness import uniforms
from posttrain.recipes.sections import ModelSection
from posttrain.sampling.base import Sampling
from posttrain.sampling.fake_engine import FakeEngine
from posttrain.sampling.native.engine import NativeEngine
from posttrain.sampling.vllm.client import VllmEngine
from posttrain.types import Completion
from refusing import refuses


@pytest.fixture(scope="module")
def tiny():
    return load_model(ModelSection(), seed=0)


class TestFakeEngine(EngineContract):
    @pytest.fixture
    def case(self) -> EngineCase:
        def recite(prompt: tuple[int, ...], key: int) -> list[int]:
            return [int(u * 30) for u in uniforms([key + len(prompt)], 40)[0]]

        def distribution(prompt: Sequence[int], ids: Sequence[int], temperature: float) -> torch.Tensor:
            return torch.full((len(ids), 30), -0.5)

        engine = FakeEngine(recite, logprob=-0.5)
        return EngineCase(engine, [[9, 10], [11], [12, 13], [14]], frozenset({3}), distribution, is_model=False)


@pytest.fixture(scope="module")
def served_case(tiny) -> Iterator[EngineCase]:
    with FakeVllm(model_answer(tiny.model, "processed"), context=1024) as server:
        engine = VllmEngine(server.url, tokenizer=tiny.tokenizer, concurrency=4)
        yield tiny_case(tiny.model, tiny.tokenizer, engine, num_draws=0)


class TestNative(EngineContract):
    @pytest.fixture
    def case(self, tiny) -> EngineCase:
        return tiny_case(tiny.model, tiny.tokenizer, NativeEngine(tiny.model))


class TestVllm(EngineContract):
    @pytest.fixture
    def case(self, served_case) -> EngineCase:
        return served_case


def test_a_server_with_the_native_engine_behind_it_is_the_native_engine(tiny):
    sampling = Sampling(12, temperature=0.7)
    case = tiny_case(tiny.model, tiny.tokenizer, NativeEngine(tiny.model))
    keys = [[key >> 1 for key in row] for row in keys_of([3, 1, 2, 1])]  # seeds have 63 bits
    expected = case.engine.generate(case.prompts, keys, sampling)
    with FakeVllm(model_answer(tiny.model, "processed"), context=1024) as server:
        found = VllmEngine(server.url).generate(case.prompts, keys, sampling)
    assert [[(c.ids, c.finish) for c in g] for g in found] == [[(c.ids, c.finish) for c in g] for g in expected]
    for ours, theirs in zip(found, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.logprobs == approx(b.logprobs, abs=1e-4)


def test_the_choice_is_the_keys_first_uniform_number():
    choices = [[1], [2, 3], [4]]
    keys = list(range(40))
    (group,) = FakeEngine(choices, logprob=-0.5).generate([[9]], [keys], Sampling(max_tokens=5))
    for key, completion in zip(keys, group, strict=True):
        u = uniforms([key], 1)[0, 0]
        ids = [1] if u < 1 / 3 else [2, 3] if u < 2 / 3 else [4]
        assert completion == Completion(tuple(ids), (-0.5,) * len(ids), "stop")
    assert len({c.ids for c in group}) == 3
    (turned,) = FakeEngine(choices, logprob=-0.5).generate([[9]], [keys[::-1]], Sampling(max_tokens=5))
    assert turned == group[::-1]


def test_choices_by_prompt_and_by_function():
    by_prompt = FakeEngine({(1, 2): [[7]], (3,): [[8]]})
    assert by_prompt.generate([[3], [1, 2]], [[0], [0, 1]], Sampling(max_tokens=4)) == [
        [Completion((8,), (0.0,), "stop")],
        [Completion((7,), (0.0,), "stop")] * 2,
    ]
    assert by_prompt.calls == [([(3,), (1, 2)], [(0,), (0, 1)], Sampling(max_tokens=4))]
    with refuses(UsageError, "prompt [4]"):
        by_prompt.generate([[4]], [[0]], Sampling(max_tokens=4))
    by_key = FakeEngine(lambda prompt, key: [*prompt, key])
    assert by_key.generate([[3]], [[11]], Sampling(max_tokens=4))[0][0].ids == (3, 11)
