"""The native engine on CUDA: parity with the model's forward there, and with the CPU."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from closeness import approx
from posttrain.models.lora import apply_adapter
from posttrain.randomness import derive_key
from posttrain.recipes.sections import AdapterSection
from posttrain.sampling.base import Sampling
from posttrain.sampling.native.engine import NativeEngine
from sampling.respondents import Scripted, wordy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.usefixtures("full_fp32"),
]

LEAN = ("qwen3", "qwen2", "llama")
STOPS = frozenset(range(8))


def make_work(group=3):
    numbers = np.random.default_rng(1)
    prompts = [numbers.integers(8, 300, n).tolist() for n in (5, 1, 12, 3)]
    keys = [[derive_key(0, "test", i, j) for j in range(group)] for i in range(len(prompts))]
    return prompts, keys


def differences(model, prompts, completions):
    found = []
    for prompt, group in zip(prompts, completions, strict=True):
        for c in group:
            tokens = torch.tensor([[*prompt, *c.ids]], device="cuda")
            with torch.no_grad():
                logits = model(input_ids=tokens).logits[0].float()
            picked = logits.log_softmax(-1)[:-1].gather(1, tokens[0, 1:, None])[:, 0].cpu()
            own = torch.tensor(c.own or (True,) * len(c.ids))
            found.append((picked[len(prompt) - 1 :] * own - torch.tensor(c.logprobs)).abs())
    return torch.cat(found)


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("architecture", [*LEAN, "olmo2", "gpt2"])
def test_logprobs_equal_the_models_forward(tiny_random, architecture, adapter):
    model = tiny_random(architecture).cuda()
    if adapter:
        model = apply_adapter(model, AdapterSection(rank=3), 0).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".lora_B." in name:
                    parameter.fill_(0.03)
    prompts, keys = make_work()
    for path in ("lean", "modules"):
        engine = NativeEngine(model, slots=5, path=path)
        completions = engine.generate(prompts, keys, Sampling(max_tokens=24, stop_ids=STOPS))
        assert engine.path == ("lean" if architecture in LEAN and path == "lean" else "modules")
        assert float(differences(model, prompts, completions).max()) == approx(0.0, abs=1e-5)


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_several_turns(tiny_random, architecture):
    """Tokens are looked at every few steps, so that rows draw past the end of a turn."""
    model, (prompts, keys) = tiny_random(architecture).cuda(), make_work()
    sampling = Sampling(max_tokens=60, stop_ids=frozenset(range(40)))
    engine = NativeEngine(model, slots=5)
    respondent = Scripted(wordy(range(40, 300)))
    completions = engine.converse(prompts, keys, sampling, respondent)
    assert float(differences(model, prompts, completions).max()) == approx(0.0, abs=1e-5)
    for i, group in enumerate(completions):
        for g, c in enumerate(group):
            assert (c.ids, c.own) == respondent.transcript(i, g)
    assert max(map(len, respondent.turns.values())) > 1


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_tokens_are_those_of_the_cpu(tiny_random, architecture):
    model, (prompts, keys) = tiny_random(architecture), make_work()
    sampling = Sampling(max_tokens=24, stop_ids=STOPS, top_p=0.9)
    on_cpu = NativeEngine(copy.deepcopy(model)).generate(prompts, keys, sampling)
    on_gpu = NativeEngine(model.cuda(), slots=5).generate(prompts, keys, sampling)
    assert [[c.ids for c in g] for g in on_gpu] == [[c.ids for c in g] for g in on_cpu]


def test_steps_as_graphs_follow_a_cache_that_grows(tiny_random):
    """More rows than slots, several windows of columns, a cache that is built anew, and fewer and fewer rows."""
    model = tiny_random("qwen3").cuda()
    prompts, keys = make_work(group=9)
    sampling = Sampling(max_tokens=300, stop_ids=frozenset(range(2)))
    completions = NativeEngine(model, slots=20).generate(prompts, keys, sampling)
    assert float(differences(model, prompts, completions).max()) == approx(0.0, abs=1e-5)
    assert len({len(c.ids) for group in completions for c in group}) > 4


def test_a_step_of_the_optimizer_is_seen(tiny_random):
    model, (prompts, keys) = tiny_random("qwen3").cuda(), make_work()
    engine = NativeEngine(model)
    before = engine.generate(prompts, keys, Sampling(max_tokens=8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    model(input_ids=torch.tensor([[9, 10, 11, 12]], device="cuda")).logits.square().mean().backward()
    optimizer.step()
    after = engine.generate(prompts, keys, Sampling(max_tokens=8))
    assert float(differences(model, prompts, after).max()) == approx(0.0, abs=1e-5)
    assert float(differences(model, prompts, before).max()) > 1e-3


def test_half_precision_follows_the_model(tiny_random):
    model, (prompts, keys) = tiny_random("qwen3").cuda().to(torch.bfloat16), make_work()
    engine = NativeEngine(model, slots=5)
    completions = engine.generate(prompts, keys, Sampling(max_tokens=8))
    assert engine.path == "lean"
    assert float(differences(model, prompts, completions).mean()) < 0.02


def test_deterministic_algorithms_are_enough(tiny_random, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    model, (prompts, keys) = tiny_random("llama").cuda(), make_work()
    torch.use_deterministic_algorithms(True)
    try:
        runs = [NativeEngine(model, slots=5).generate(prompts, keys, Sampling(max_tokens=16)) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert runs[0] == runs[1]
