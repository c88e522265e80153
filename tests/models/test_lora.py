"""LoRA through peft: the formula, the initialization, and the way back to the base."""

from __future__ import annotations

import copy
import json
import math
import shutil

import pytest
import torch

from closeness import assert_close, logprob_rounding
from posttrain.errors import RecipeError
from posttrain.models.load import load_model
from posttrain.models.lora import apply_adapter, describe_reach, has_adapter, low_rank_terms
from posttrain.models.sources import TINY
from posttrain.recipes.sections import AdapterSection, ModelSection
from posttrain.sampling.base import Sampling
from posttrain.sampling.native.engine import NativeEngine
from refusing import refuses

IDS = torch.tensor([[9, 10, 11, 12]])


def adapter_parameters(model):
    return {n: p for n, p in model.named_parameters() if ".lora_" in n}


def fill_up(model, seed=0):
    with torch.no_grad():
        for index, (name, parameter) in enumerate(sorted(adapter_parameters(model).items())):
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed + index)))


@pytest.mark.parametrize(("alpha", "scale"), [(None, 1.0), (8.0, 2.0)])
def test_a_projection_adds_scale_times_b_a_x(tiny_random, alpha, scale):
    model = tiny_random("qwen3")
    section = AdapterSection(rank=4, alpha=alpha, targets=["q_proj", "down_proj"])
    wrapped = apply_adapter(model, section, seed=0)
    fill_up(wrapped)
    names = {n.split(".self_attn.")[-1].split(".mlp.")[-1].split(".")[0] for n in adapter_parameters(wrapped)}
    assert names == {"q_proj", "down_proj"}
    module = wrapped.get_base_model().model.layers[1].self_attn.q_proj
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(5))
    a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
    assert_close(module(x), x @ module.base_layer.weight.T + scale * (x @ a.T) @ b.T)
    linear, (term,) = low_rank_terms(module)
    assert term.scale == scale
    assert (linear.weight.data_ptr(), term.down.data_ptr(), term.up.data_ptr()) == (
        module.base_layer.weight.data_ptr(),
        a.data_ptr(),
        b.data_ptr(),
    )


def test_a_fresh_adapter_changes_nothing_and_only_it_is_trained(tiny_random):
    model = tiny_random("llama")
    before = model(input_ids=IDS).logits
    wrapped = apply_adapter(model, AdapterSection(rank=4), seed=0)
    assert torch.equal(wrapped(input_ids=IDS).logits, before)
    trained = {n for n, p in wrapped.named_parameters() if p.requires_grad}
    assert trained == set(adapter_parameters(wrapped))
    assert len(trained) == 2 * 2 * 7  # A and B, two layers, q k v o gate up down


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_the_initialization_is_a_function_of_the_seed(tiny_random, architecture):
    torch.manual_seed(1)
    first = adapter_parameters(apply_adapter(tiny_random(architecture), AdapterSection(rank=4), seed=7))
    state = torch.get_rng_state()
    torch.manual_seed(2)
    again = adapter_parameters(apply_adapter(tiny_random(architecture), AdapterSection(rank=4), seed=7))
    other = adapter_parameters(apply_adapter(tiny_random(architecture), AdapterSection(rank=4), seed=8))
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state), "the global generator was used"
    assert first.keys() == again.keys() == other.keys()
    downs = [n for n in first if ".lora_A." in n]
    for name in downs:
        assert torch.equal(first[name], again[name])
        assert not torch.equal(first[name], other[name])
        bound = first[name].shape[1] ** -0.5
        assert 0.9 * bound < first[name].abs().max().item() <= bound
    assert len({tuple(first[n].flatten()[:4].tolist()) for n in downs}) == len(downs), "no two are alike"


def test_an_adapter_switched_off_is_the_base(tiny_random):
    model = tiny_random("qwen2")
    base = copy.deepcopy(model)
    wrapped = apply_adapter(model, AdapterSection(rank=4), seed=0)
    fill_up(wrapped)
    with torch.no_grad():
        adapted, expected = wrapped(input_ids=IDS).logits, base(input_ids=IDS).logits
        assert float((adapted - expected).abs().max()) > 0.1
        with wrapped.disable_adapter():
            assert torch.equal(wrapped(input_ids=IDS).logits, expected)
            assert low_rank_terms(model.model.layers[0].self_attn.q_proj)[1] == []
        assert torch.equal(wrapped(input_ids=IDS).logits, adapted)
    assert has_adapter(wrapped)
    assert not has_adapter(base)


def test_what_is_not_plain_lora_is_not_taken_apart(tiny_random):
    from peft import LoraConfig, get_peft_model

    dora = get_peft_model(tiny_random("qwen3"), LoraConfig(r=2, use_dora=True, target_modules=["q_proj"]))
    layer = dora.get_base_model().model.layers[0]
    assert low_rank_terms(layer.self_attn.q_proj) is None
    assert low_rank_terms(layer.self_attn.k_proj) == (layer.self_attn.k_proj, [])
    assert low_rank_terms(layer.mlp) is None


def test_it_is_saved_in_pefts_own_layout(tiny_random, tmp_path):
    from peft import PeftModel

    model = tiny_random("qwen3")
    base = copy.deepcopy(model)
    wrapped = apply_adapter(model, AdapterSection(rank=4, alpha=8.0), seed=0)
    fill_up(wrapped)
    wrapped.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (settings["peft_type"], settings["r"], settings["lora_alpha"]) == ("LORA", 4, 8.0)
    assert (tmp_path / "adapter_model.safetensors").is_file()
    with torch.no_grad():
        loaded = PeftModel.from_pretrained(base, tmp_path)
        assert torch.equal(loaded(input_ids=IDS).logits, wrapped(input_ids=IDS).logits)


@pytest.fixture
def base_and_adapter(tmp_path, monkeypatch, tiny_random):
    """``runs/sft`` and, trained on it by that relative name, ``runs/rl``."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(TINY, "runs/sft")
    loaded = load_model(ModelSection(name="runs/sft", device="cpu"), seed=0)
    wrapped = apply_adapter(loaded.model, AdapterSection(rank=2), seed=0)
    fill_up(wrapped)
    wrapped.save_pretrained("runs/rl")
    return tmp_path / "runs", wrapped(input_ids=IDS).logits


def load_logits(folder):
    return load_model(ModelSection(name=str(folder), device="cpu"), seed=0).model(input_ids=IDS).logits


def test_an_adapter_of_a_relative_base_loads_from_elsewhere(base_and_adapter, tmp_path, monkeypatch):
    runs, logits = base_and_adapter
    settings = json.loads((runs / "rl" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(runs / "sft")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert_close(load_logits(runs / "rl"), logits)
    # one that others wrote, with a relative path: found from the folders above it
    settings["base_model_name_or_path"] = "runs/sft"
    (runs / "rl" / "adapter_config.json").write_text(json.dumps(settings))
    assert_close(load_logits(runs / "rl"), logits)


EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
BOTH = ["experts.gate_up_proj", "experts.down_proj"]


def test_describe_reach_names_what_an_adapter_leaves_out(tiny_random):
    (line,) = describe_reach(apply_adapter(tiny_random("gpt_oss", **EXPERTS), AdapterSection(rank=2), seed=0))
    assert "model.adapter: 1,792 parameters reach self_attn.k_proj, self_attn.o_proj, self_attn.q_proj" in line
    assert "and leaves out experts.down_proj, experts.gate_up_proj, mlp.router, model.embed_tokens (" in line
    section = AdapterSection(rank=2, target_parameters=BOTH)
    (line,) = describe_reach(apply_adapter(tiny_random("gpt_oss", **EXPERTS), section, seed=0))
    assert "reach experts.down_proj, experts.gate_up_proj, self_attn.k_proj" in line
    assert "and leaves out mlp.router, model.embed_tokens (" in line
    assert describe_reach(tiny_random("qwen3")) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_parameters": ["experts.gate_up_porj"]}, "'experts.gate_up_porj'"),
        ({"target_parameters": BOTH, "use_dora": True}, "adapter"),
    ],
)
def test_apply_adapter_with_parameters_that_it_cannot_reach_is_refused(tiny_random, settings, message):
    with refuses(RecipeError, message):
        apply_adapter(tiny_random("gpt_oss", **EXPERTS), AdapterSection(rank=2, **settings), seed=0)


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("gpt_oss", {"target_parameters": BOTH}),
        ("qwen3", {"use_dora": True}),
        ("qwen3", {"use_rslora": True, "alpha": 3.0}),
        ("qwen3", {"init_lora_weights": "orthogonal"}),
    ],
)
def test_apply_adapter_of_any_kind_is_sampled_saved_and_loaded_again(
    tiny_random, small_tokenizer, tmp_path, architecture, settings
):
    base = tiny_random(architecture, **(EXPERTS if architecture == "gpt_oss" else {}))
    base.save_pretrained(tmp_path / "base")
    small_tokenizer.save_pretrained(tmp_path / "base")
    section = AdapterSection(rank=4, **settings)

    def fresh(seed):
        model = load_model(ModelSection(name=str(tmp_path / "base"), device="cpu"), seed=0).model
        torch.manual_seed(seed)
        return apply_adapter(model, section, seed=3)

    model, again = fresh(0), fresh(1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    scaling = {m.scaling["default"] for m in model.modules() if hasattr(m, "lora_A")}
    assert scaling == ({3.0 / 2} if section.use_rslora else {1.0})
    with torch.no_grad():
        for name, parameter in adapter_parameters(model).items():
            if ".lora_B." in name or "magnitude" in name:
                parameter.add_(0.05)
        expected = model(input_ids=IDS).logits
    model.save_pretrained(tmp_path / "adapter")
    loaded = load_model(ModelSection(name=str(tmp_path / "adapter"), device="cpu"), seed=0).model
    bound = logprob_rounding(2, size=float(expected.abs().max()))
    assert_close(loaded(input_ids=IDS).logits, expected, atol=bound, rtol=0)
    (group,) = NativeEngine(model).generate([[9, 10, 11]], [[1]], Sampling(max_tokens=8))
    rows = torch.tensor([[9, 10, 11, *group[0].ids]])
    own = model(input_ids=rows).logits[0].log_softmax(-1)[2:-1].gather(1, rows[0, 3:, None])[:, 0]
    largest = float(model(input_ids=rows).logits.log_softmax(-1).abs().max())
    sharpest = math.sqrt(16) * 1.15**2  # norms of 16 numbers of each head, with weights of about 1.15
    bound = logprob_rounding(2, size=largest, largest_score=sharpest)
    assert_close(torch.tensor(group[0].logprobs), own, atol=bound, rtol=0)
