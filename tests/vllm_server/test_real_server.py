"""The client against vLLM itself: the contract, log-probabilities beside transformers', evaluation from end to end."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from closeness import approx
from posttrain.cli import main
from posttrain.sampling.base import Sampling
from posttrain.sampling.native.engine import NativeEngine
from posttrain.sampling.vllm.client import VllmEngine
from sampling.engine_contract import EngineCase, EngineContract, keys_of, tiny_case

pytestmark = pytest.mark.vllm

QUESTIONS = [f"Eva starts with {n} shells. She finds {n // 2 + 1}" for n in range(10, 42)]


def case_for(server, **options) -> EngineCase:
    engine = VllmEngine(server.url, tokenizer=server.loaded.tokenizer, wanted=(server.name,), **options)
    return tiny_case(server.loaded.model, server.loaded.tokenizer, engine, num_draws=1000)


class TestVllmOnTheEmbeddedModel(EngineContract):
    @pytest.fixture
    def case(self, tiny_server) -> EngineCase:
        return case_for(tiny_server)


def worst_difference(case, prompts, groups, temperature):
    return max(
        float(
            (case.distribution(prompt, c.ids, temperature)[range(len(c.ids)), list(c.ids)] - torch.tensor(c.logprobs))
            .abs()
            .max()
        )
        for prompt, group in zip(prompts, groups, strict=True)
        for c in group
    )


def test_many_at_once_are_what_they_are_alone(tiny_server):
    """A completion's random numbers are its own; a token may turn over where two are all but equal."""
    case = case_for(tiny_server)
    prompts = [tiny_server.loaded.tokenizer.encode(text) for text in QUESTIONS]
    sampling = Sampling(32, temperature=0.7, stop_ids=case.stops)
    keys = keys_of([4] * len(prompts))
    together = case.engine.generate(prompts, keys, sampling)
    assert worst_difference(case, prompts, together, 0.7) == approx(0.0, abs=1e-4)
    alone = VllmEngine(tiny_server.url, concurrency=1).generate(prompts[:8], keys[:8], sampling)
    same = [a.ids == b.ids for g, h in zip(alone, together, strict=False) for a, b in zip(g, h, strict=True)]
    assert sum(same) >= 30, f"{sum(same)} of {len(same)}"


def test_greedy_tokens_are_the_native_engines(tiny_server):
    case = case_for(tiny_server)
    prompts = [tiny_server.loaded.tokenizer.encode(text) for text in QUESTIONS]
    greedy, keys = Sampling(40, temperature=0.0, stop_ids=frozenset({0})), [[1]] * len(prompts)
    found = case.engine.generate(prompts, keys, greedy)
    expected = NativeEngine(tiny_server.loaded.model).generate(prompts, keys, greedy)
    assert [(g[0].ids, g[0].finish) for g in found] == [(g[0].ids, g[0].finish) for g in expected]
    assert worst_difference(case, prompts, found, 1.0) == approx(0.0, abs=1e-4)


@pytest.mark.parametrize("engine", ["native", "vllm"])
def test_evaluation_from_end_to_end(tiny_server, tmp_path_factory, engine):
    """``posttrain evaluate`` says the same of both engines: greedy, item by item."""
    out = tmp_path_factory.getbasetemp() / f"evaluated-{engine}"
    command = [sys.executable, "-m", "posttrain.cli", "evaluate", "tiny", "--task", "stories", "--limit", "60"]
    command += ["--template", "plain", "--max-tokens", "48", "--out", str(out), "--quiet", "--engine", engine]
    if engine == "vllm":
        command += ["--engine.url", tiny_server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads((out / "results.json").read_text())["results"]
    other = out.with_name("evaluated-native") / "results.json"
    expected = json.loads(other.read_text())["results"]
    timed = [name for name in expected if "second" in name]
    assert {k: v for k, v in results.items() if k not in timed} == {k: v for k, v in expected.items() if k not in timed}
    assert results["n"] == 60
    assert results["accuracy"] > 0.2


def test_a_sampled_evaluation_without_logprobs(tiny_server, tmp_path):
    """At a temperature and with top-p, which no mode of the server has log-probabilities for."""
    command = ["evaluate", "tiny", "--task", "stories", "--limit", "20", "--template", "plain", "--max-tokens", "48"]
    command += ["--samples", "4", "--temperature", "0.6", "--top-p", "0.9", "--out", str(tmp_path / "out"), "--quiet"]
    command += ["--engine", "vllm", "--engine.url", tiny_server.url]
    assert main(command) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())["results"]
    assert results["accuracy"] > 0.2
    assert results["pass@4"] >= results["accuracy"]
