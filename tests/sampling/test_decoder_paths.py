"""Choice of the native engine's path: past windows and scales, for states other than keys and values, after errors."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from closeness import OF_TINY_RANDOM, approx, assert_close
from posttrain.errors import EngineMismatch
from posttrain.models.config import find_switches, shortest_window
from posttrain.sampling.base import Sampling
from posttrain.sampling.native.engine import NativeEngine
from posttrain.sampling.native.fast_path import FastDecoder
from posttrain.sampling.native.probe import PROMPT_TOKENS, probe_lengths
from posttrain.sampling.native.reference_path import ModulesDecoder
from refusing import refuses
from sampling.reference import ids_of, make_keys, make_prompts, worst_difference
from sampling.respondents import Scripted, wordy

STOPS = frozenset(range(8))


@pytest.mark.parametrize(("window", "new", "path"), [(200, 20, "lean"), (100, 20, "lean"), (100, 90, "modules")])
def test_native_engine_with_rows_beyond_the_window_of_the_configuration_leaves_the_lean_path(
    tiny_random, window, new, path
):
    """Mistral's attention modules know of no window, which was 1.6 nats off the model."""
    model, prompts = tiny_random("mistral", sliding_window=window), make_prompts()
    engine = NativeEngine(model)
    completions = engine.generate(prompts, make_keys(4, 2), Sampling(max_tokens=new))
    assert {chosen for chosen, _ in engine._chosen.values()} == {path}
    assert worst_difference(model, prompts, completions) == approx(0.0, abs=OF_TINY_RANDOM)
    assert ["sliding window" in notice for notice in engine.take_warnings()] == [True] * (path == "modules")


def test_native_engine_with_a_path_that_is_wrong_past_a_switch_does_not_take_it(tiny_random, monkeypatch):
    """Wrong by a little from position 100 on, which no row of 64 tokens shows."""
    model = tiny_random("llama", rope_parameters=YARN)
    bind = FastDecoder.bind

    def bind_wrongly(model, max_positions):
        decoder = bind(model, max_positions)
        decoder.sin[100:] *= 0.9
        return decoder

    monkeypatch.setattr(FastDecoder, "bind", staticmethod(bind_wrongly))
    engine, (prompt,) = NativeEngine(model), make_prompts((30,))
    for new, path in ((20, "lean"), (100, "modules")):
        completions = engine.generate([prompt], [[1, 2]], Sampling(max_tokens=new))
        assert [chosen for chosen, _ in engine._chosen.values()][-1] == path
        assert worst_difference(model, [prompt], completions) == approx(0.0, abs=OF_TINY_RANDOM)


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 100}


def test_find_switches_names_the_lengths_below_the_reach() -> None:
    config = AutoConfig.for_model("llama", rope_parameters=YARN, max_position_embeddings=400)
    assert find_switches(config, 100) == ()
    assert find_switches(config, 300) == (100,)
    assert find_switches(AutoConfig.for_model("mistral", sliding_window=12), 64) == (12,)
    assert find_switches(AutoConfig.for_model("llama4_text", attention_chunk_size=50, floor_scale=70), 90) == (50, 70)
    assert find_switches(AutoConfig.for_model("qwen2", max_window_layers=28), 64) == ()
    assert find_switches(AutoConfig.for_model("mamba2", chunk_size=16), 64) == (16,)
    gemma = AutoConfig.for_model("gemma3_text", sliding_window=12, sliding_window_pattern=6)
    assert find_switches(gemma, 64) == (12,)
    assert shortest_window(gemma) == 12
    assert shortest_window(AutoConfig.for_model("qwen2", use_sliding_window=True, sliding_window=40)) == 40
    assert probe_lengths((12, 4096), 8192) == [PROMPT_TOKENS, (28, 11, 3), (6144, 4095, 3)]
    assert probe_lengths((4096,), 4100) == [PROMPT_TOKENS, (4096, 4095, 3)]


PLAIN = {
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 16},
    "qwen3_next": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "llama4_text": {"intermediate_size_mlp": 96, "num_local_experts": 2, "attention_chunk_size": 12, "head_dim": 16},
    "rwkv": {},
}


@pytest.mark.parametrize(
    "architecture", ["mamba2", pytest.param("qwen3_next", marks=pytest.mark.slow), "llama4_text", "rwkv"]
)
def test_native_engine_of_a_model_with_other_states_than_keys_and_values_samples_from_the_model(architecture):
    config = SMALL | PLAIN[architecture]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **config)).eval()
    prompts, engine = make_prompts((6, 4, 9, 6)), NativeEngine(model, slots=3)
    sampling = Sampling(max_tokens=16, stop_ids=STOPS)
    completions = engine.generate(prompts, make_keys(4, 2), sampling)
    assert engine.path == ("reread" if architecture == "rwkv" else "plain")
    assert worst_difference(model, prompts, completions) == approx(0.0, abs=OF_TINY_RANDOM)
    assert [c.finish for g in completions for c in g] == [
        "stop" if c.ids[-1] in STOPS else "length" for g in completions for c in g
    ]
    assert ids_of(NativeEngine(model).generate(prompts, make_keys(4, 2), sampling)) == ids_of(completions)
    (notice,) = engine.take_warnings()
    assert notice.startswith("sampling takes a slower path, ")
    assert engine.take_warnings() == []


SMALL = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 256, "pad_token_id": None}
SMALL |= {"bos_token_id": 0, "eos_token_id": 0}


def test_native_engine_with_a_path_that_raises_anything_takes_the_next(tiny_random, monkeypatch):
    """Frequencies by kind of layer, as OLMo 3 has them, ended in a TypeError."""
    model, prompts = tiny_random("qwen3"), make_prompts()
    model.model.rotary_emb.rope_type = {"full_attention": "yarn"}
    engine = NativeEngine(model)
    completions = engine.generate(prompts, make_keys(4, 1), Sampling(max_tokens=6))
    assert engine.path == "modules"
    monkeypatch.setattr(ModulesDecoder, "prefill", lambda self, prompts: prompts.no_such_thing)
    engine = NativeEngine(model)
    assert ids_of(engine.generate(prompts, make_keys(4, 1), Sampling(max_tokens=6))) == ids_of(completions)
    assert engine.path == "plain"
    assert "it ends in AttributeError: 'list' object has no attribute" in engine.take_warnings()[0]


def test_native_engine_of_a_model_with_other_states_converses_as_the_model() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba2", **SMALL, **PLAIN["mamba2"])).eval()
    prompts, sampling = make_prompts((6, 4)), Sampling(max_tokens=40, stop_ids=frozenset(range(60)))
    completions = NativeEngine(model, slots=3).converse(
        prompts, make_keys(2, 2), sampling, Scripted(wordy(range(60, 90)))
    )
    assert sum(not own for group in completions for c in group for own in c.own) > 3
    for prompt, group in zip(prompts, completions, strict=True):
        for c in group:
            tokens = torch.tensor([[*prompt, *c.ids]])
            with torch.no_grad():
                table = model(input_ids=tokens, use_cache=False).logits[0].log_softmax(-1)
            scored = table[:-1].gather(1, tokens[0, 1:, None])[len(prompt) - 1 :, 0]
            own = torch.tensor(c.own)
            assert_close(torch.tensor(c.logprobs)[own], scored[own], atol=OF_TINY_RANDOM, rtol=0)


def test_native_engine_of_rows_that_cross_a_scale_of_positions_is_refused_with_the_reason(tiny_random):
    """Beyond its first length Phi 3 rotates all tokens otherwise, those before it, too; no cache is the model then."""
    scale = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "rope_theta": 10000.0}
    scale |= {"original_max_position_embeddings": 80, "factor": 4.0}
    model = tiny_random("phi3", rope_parameters=scale, original_max_position_embeddings=80)
    prompts, engine = make_prompts((5,)), NativeEngine(model)
    short = engine.generate(prompts, [[1]], Sampling(max_tokens=60))
    assert worst_difference(model, prompts, short) == approx(0.0, abs=OF_TINY_RANDOM)
    with refuses(EngineMismatch, "rollout.max_tokens"):
        engine.generate(prompts, [[1]], Sampling(max_tokens=150))
