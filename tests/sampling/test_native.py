"""The native engine against the model's own forward, and against a reference sampler in NumPy."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from closeness import OF_TINY_RANDOM, approx, logprob_rounding
from posttrain import registry
from posttrain.errors import EngineMismatch, UsageError
from posttrain.models.lora import apply_adapter
from posttrain.randomness import uniforms
from posttrain.recipes.sections import AdapterSection
from posttrain.sampling.base import Sampling
from posttrain.sampling.native import schedule
from posttrain.sampling.native.engine import NativeEngine
from posttrain.sampling.native.fast_path import FastDecoder
from posttrain.sampling.native.reference_path import ModulesDecoder, PlainRows
from refusing import refuses
from sampling.reference import forward_logprobs, ids_of, make_keys, make_prompts, worst_difference

LEAN = ("qwen3", "qwen2", "llama")
ARCHITECTURES = (*LEAN, "olmo2", "gpt2")
STOPS = frozenset(range(8))


def with_adapter(model, seed=0):
    """A LoRA adapter on every linear layer whose B is not zero."""
    wrapped = apply_adapter(model, AdapterSection(rank=3, alpha=6.0), seed)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, parameter in wrapped.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.1)
    return wrapped.eval()


@pytest.mark.parametrize(("adapter", "group"), [(True, 1), (False, 3)])  # copied and shared prompts
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logprobs_equal_the_models_forward(tiny_random, architecture, adapter, group):
    model = tiny_random(architecture)
    if adapter:
        model = with_adapter(model)
    prompts = make_prompts()
    for path in ("lean", "modules"):
        engine = NativeEngine(model, slots=3, path=path)
        completions = engine.generate(prompts, make_keys(4, group), Sampling(max_tokens=16, stop_ids=STOPS))
        assert engine.path == ("lean" if architecture in LEAN and path == "lean" else "modules")
        assert worst_difference(model, prompts, completions) == approx(0.0, abs=OF_TINY_RANDOM)
        assert [len(g) for g in completions] == [group] * 4


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(0.7, None, 1.0), (1.0, None, 0.6), (0.8, 9, 0.7)],
)
def test_tokens_are_the_inverse_cdf_of_the_keys_uniforms(tiny_random, architecture, temperature, top_k, top_p):
    model = tiny_random(architecture)
    prompts, keys = make_prompts(), make_keys(4, 2)
    sampling = Sampling(max_tokens=6, temperature=temperature, top_k=top_k, top_p=top_p)
    completions = NativeEngine(model, slots=5).generate(prompts, keys, sampling)
    for prompt, row_keys, group in zip(prompts, keys, completions, strict=True):
        for key, completion in zip(row_keys, group, strict=True):
            ids = reference_ids(model, prompt, uniforms([key], 6)[0], temperature, top_k, top_p)
            assert completion.ids == tuple(ids)
    assert worst_difference(model, prompts, completions, temperature) == approx(0.0, abs=OF_TINY_RANDOM)


def reference_ids(model, prompt, numbers, temperature, top_k, top_p):
    """Sampling spelt out in float64: sort, cut, renormalize, first id whose cumulative mass exceeds u."""
    ids: list[int] = []
    for u in numbers:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0, -1].double().numpy() / temperature
        p = np.exp(logits - logits.max())
        p /= p.sum()
        order = np.argsort(-p, kind="stable")[: top_k or len(p)]
        top = p[order] / p[order].sum()
        order = order[: int(np.searchsorted(np.cumsum(top), top_p)) + 1] if top_p < 1 else order
        kept = np.zeros_like(p)
        kept[order] = p[order] / p[order].sum()
        ids.append(int(np.argmax(np.cumsum(kept) > u)))
    return ids


def test_sampling_temperature_too_small_for_logits_is_greedy() -> None:
    assert [Sampling(max_tokens=8, temperature=one).temperature for one in (5e-324, 1e-9)] == [0.0, 0.0]
    assert Sampling(max_tokens=8, temperature=1e-5).temperature == 1e-5


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_tokens_do_not_depend_on_the_batch(tiny_random, architecture):
    model = tiny_random(architecture)
    prompts, keys = make_prompts((5, 1, 12, 3, 8)), make_keys(5, 4)
    sampling = Sampling(max_tokens=24, stop_ids=STOPS)
    whole = ids_of(NativeEngine(model, slots=64).generate(prompts, keys, sampling))
    for slots in (1, 7):
        assert ids_of(NativeEngine(model, slots=slots).generate(prompts, keys, sampling)) == whole
    order = [3, 0, 4, 2, 1]
    turned = NativeEngine(model, slots=6).generate(
        [prompts[i] for i in order], [keys[i][::-1] for i in order], sampling
    )
    assert ids_of(turned) == [whole[i][::-1] for i in order]
    assert ids_of(NativeEngine(model).generate([prompts[2]], [[keys[2][3]]], sampling)) == [[whole[2][3]]]


def step_with_optimizer(model):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    model(input_ids=torch.tensor([[9, 10, 11, 12]])).logits.square().mean().backward()
    optimizer.step()


def load_another_state(model):
    model.load_state_dict({name: value * 1.1 for name, value in model.state_dict().items()})


def replace_data(model):
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.1


def replace_parameters(model):
    layer = model.model.layers[0].self_attn if hasattr(model, "model") else model.transformer.h[0].mlp
    old = layer.o_proj if hasattr(layer, "o_proj") else layer.c_fc
    old.weight = torch.nn.Parameter(old.weight.detach() * 1.5)


def convert_and_change(model):
    model.to(torch.float64)
    model.to(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)


CHANGES = (step_with_optimizer, load_another_state, replace_data, replace_parameters, convert_and_change)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_the_weights_are_never_stale(tiny_random, architecture, change):
    model, prompts, keys = tiny_random(architecture), make_prompts(), make_keys(4, 2)
    sampling = Sampling(max_tokens=8)
    engine = NativeEngine(model)
    before = engine.generate(prompts, keys, sampling)
    change(model)
    after = engine.generate(prompts, keys, sampling)
    assert worst_difference(model, prompts, after) == approx(0.0, abs=OF_TINY_RANDOM)
    assert worst_difference(model, prompts, before) > 1e-3, "the change was too small to tell"


def test_a_trained_adapter_is_sampled_from_at_once_and_can_be_switched_off(tiny_random):
    base = tiny_random("qwen3")
    plain, prompts, keys, sampling = copy.deepcopy(base), make_prompts(), make_keys(4, 2), Sampling(max_tokens=8)
    model = with_adapter(base)
    engine = NativeEngine(model)
    engine.generate(prompts, keys, sampling)
    weight = model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight.clone()
    step_with_optimizer(model)
    after = engine.generate(prompts, keys, sampling)
    assert engine.path == "lean"
    assert worst_difference(model, prompts, after) == approx(0.0, abs=OF_TINY_RANDOM)
    assert worst_difference(plain, prompts, after) > 1e-2
    with model.disable_adapter():
        reference = engine.generate(prompts, keys, sampling)
    assert worst_difference(plain, prompts, reference) == approx(0.0, abs=OF_TINY_RANDOM)
    assert torch.equal(model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight, weight)


def test_each_prompt_is_computed_once_for_its_group(tiny_random, monkeypatch):
    model, prompts = tiny_random("qwen3"), make_prompts((6, 4, 9))
    engine = NativeEngine(model, slots=3)
    assert engine.path == "lean"  # the probe's own prefill comes before the count
    seen: list[list[int]] = []
    prefill = FastDecoder.prefill
    monkeypatch.setattr(
        FastDecoder, "prefill", lambda self, given: seen.extend(map(list, given)) or prefill(self, given)
    )
    engine.generate(prompts, make_keys(3, 7), Sampling(max_tokens=5, stop_ids=STOPS))
    assert sorted(seen) == sorted(prompt[:-1] for prompt in prompts)


@pytest.mark.parametrize(("architecture", "group"), [("qwen3", 1), ("qwen3", 4), ("gpt2", 4)])
def test_a_cache_that_grows_and_shifts_gives_the_same(tiny_random, monkeypatch, architecture, group):
    model, prompts, keys = tiny_random(architecture), make_prompts((5, 1, 30, 3, 17)), make_keys(5, group)
    sampling = Sampling(max_tokens=70, stop_ids=frozenset(range(3)))
    roomy = NativeEngine(model, slots=64).generate(prompts, keys, sampling)
    monkeypatch.setattr(schedule, "FIRST_COLUMNS", 1)
    tight = NativeEngine(model, slots=2).generate(prompts, keys, sampling)
    assert ids_of(tight) == ids_of(roomy)
    assert worst_difference(model, prompts, tight) == approx(0.0, abs=OF_TINY_RANDOM)


def test_prefills_are_cut_into_chunks(tiny_random, monkeypatch):
    model, prompts, keys = tiny_random("qwen3"), make_prompts((6, 4, 9, 30, 2)), make_keys(5, 3)
    whole = NativeEngine(model).generate(prompts, keys, Sampling(max_tokens=6))
    monkeypatch.setattr(schedule, "PREFILL_TOKENS", 20)
    chunked = NativeEngine(model).generate(prompts, keys, Sampling(max_tokens=6))
    assert ids_of(chunked) == ids_of(whole)


def test_a_lean_path_that_computes_something_else_is_not_used(tiny_random, monkeypatch):
    model, prompts = tiny_random("qwen3"), make_prompts()
    bind = FastDecoder.bind

    def bind_wrongly(model, max_positions):
        decoder = bind(model, max_positions)
        decoder.scale *= 1.05
        return decoder

    monkeypatch.setattr(FastDecoder, "bind", staticmethod(bind_wrongly))
    engine = NativeEngine(model)
    completions = engine.generate(prompts, make_keys(4, 2), Sampling(max_tokens=6))
    assert engine.path == "modules"
    assert worst_difference(model, prompts, completions) == approx(0.0, abs=OF_TINY_RANDOM)
    (notice,) = engine.take_warnings()
    assert "its log-probabilities differ by" in notice


def test_no_path_at_all_is_a_mismatch(tiny_random, monkeypatch):
    decode = ModulesDecoder.decode
    monkeypatch.setattr(ModulesDecoder, "decode", lambda self, t, positions, c: decode(self, t, positions * 0, c))
    keep = PlainRows.keep

    def keep_wrongly(self, rows):
        keep(self, rows)
        self.logits = self.logits * 1.1

    monkeypatch.setattr(PlainRows, "keep", keep_wrongly)
    with pytest.raises(EngineMismatch, match=r"GPT2LMHeadModel: .*its blocks are not those of(.* differ by){3}"):
        NativeEngine(tiny_random("gpt2")).generate([[9, 10]], [[1]], Sampling(max_tokens=1))


def test_hooks_are_respected(tiny_random):
    model, prompts, keys = tiny_random("qwen3"), make_prompts(), make_keys(4, 2)
    engine = NativeEngine(model)
    engine.generate(prompts, keys, Sampling(max_tokens=2))
    assert engine.path == "lean"
    hook = model.model.layers[0].mlp.register_forward_hook(lambda module, given, output: output * 0.5)
    steered = engine.generate(prompts, keys, Sampling(max_tokens=6))
    assert engine.path == "modules"
    assert worst_difference(model, prompts, steered) == approx(0.0, abs=OF_TINY_RANDOM)
    hook.remove()
    assert engine.path == "lean"


def test_half_precision_follows_the_model(tiny_random):
    model, prompts = tiny_random("qwen3").to(torch.bfloat16), make_prompts()
    engine = NativeEngine(model, slots=3)
    completions = engine.generate(prompts, make_keys(4, 2), Sampling(max_tokens=8))
    assert engine.path == "lean"
    differences = [
        (forward_logprobs(model, prompt, c.ids) - torch.tensor(c.logprobs)).abs().mean()
        for prompt, group in zip(prompts, completions, strict=True)
        for c in group
    ]
    assert float(torch.stack(differences).mean()) < 0.02  # bf16 logits are 2^-8 apart, relative


def test_modes_gradients_and_the_callers_context_are_left_alone(tiny_random):
    model, prompts = tiny_random("gpt2"), make_prompts()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    model.train()
    model.transformer.h[1].eval()
    modes = [m.training for m in model.modules()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        completions = NativeEngine(model).generate(prompts, make_keys(4, 2), Sampling(max_tokens=6))
    assert [m.training for m in model.modules()] == modes
    assert all(p.grad is None and p.requires_grad and not p.is_inference() for p in model.parameters())
    assert worst_difference(model.eval(), prompts, completions) == approx(0.0, abs=OF_TINY_RANDOM)
    step_with_optimizer(model)


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([9, 300], Sampling(max_tokens=4), "vocabulary has 300"),
        ([9], Sampling(max_tokens=0), "sampling.max_tokens is 0"),
        ([9], Sampling(max_tokens=4, top_k=0), "sampling.top_k is 0"),
        ([9], Sampling(max_tokens=4, top_p=0.0), "sampling.top_p is 0.0"),
    ],
)
def test_what_cannot_be_sampled_is_refused(tiny_random, prompt, sampling, message):
    with refuses(UsageError, message):
        NativeEngine(tiny_random("qwen3")).generate([[9], prompt], [[1], [2]], sampling)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("path", ["lean", "modules"])
def test_native_with_padded_embeddings_never_samples_ids_beyond_the_tokenizer(
    tiny_random, small_tokenizer, path, temperature
):
    model = tiny_random("qwen3")
    size = len(small_tokenizer)
    model.resize_token_embeddings(size + 600, mean_resizing=False)
    torch.nn.init.normal_(model.get_input_embeddings().weight, generator=torch.Generator().manual_seed(0))
    prompts, keys = make_prompts(), make_keys(4, 8)
    free = NativeEngine(model, path=path)
    sampling = Sampling(12, temperature=temperature)
    beyond = [i for group in ids_of(free.generate(prompts, keys, sampling)) for ids in group for i in ids if i >= size]
    assert len(beyond) > 30
    engine = registry.find("engine", "native").bind({}, "engine")(model, small_tokenizer)
    engine.wanted = path
    completions = engine.generate(prompts, keys, sampling)
    assert max(i for group in ids_of(completions) for ids in group for i in ids) < size
    with torch.no_grad():
        largest = float(model(torch.tensor([prompts[0]])).logits.log_softmax(-1).abs().max())
    bound = logprob_rounding(2, size=largest)
    assert worst_difference(model, prompts, completions) == approx(0.0, abs=bound), "they are those of all ids"
    message = [line for line in engine.take_warnings() if "never sampled" in line]
    assert message == [
        f"the model has {size + 600:,} ids and its tokenizer text for {size:,}; the others are never sampled"
    ]
    assert not engine.take_warnings()
