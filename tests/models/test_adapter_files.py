"""Adapters from disk: every tensor of a file is used, every parameter that the configuration names is in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Embedding as LoraEmbedding
from safetensors.torch import load_file, save_file

from closeness import approx, assert_close
from posttrain.errors import UsageError
from posttrain.models.export_comparison import check_same, read_probe
from posttrain.models.load import LoadedModel, load_model
from posttrain.models.lora import merged_weights
from posttrain.recipes.sections import AdapterSection, ModelSection
from posttrain.sampling.vllm.following import checkpoint_weights
from refusing import refuses

KINDS: dict[str, dict[str, Any]] = {
    "tied embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "tied head": {"target_modules": ["lm_head", "q_proj"]},
    "both tied": {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
    "head saved whole": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "embedding saved whole": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5, 299]},
    "dora": {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
    "bias": {"architecture": "qwen2", "target_modules": ["q_proj"], "lora_bias": True},
    "rslora": {"target_modules": "all-linear", "use_rslora": True},
    "norm saved whole": {"target_modules": ["q_proj"], "modules_to_save": ["norm"]},
}


def load_merged(folder: Path) -> LoadedModel:
    """An adapter that is to get another is merged into its base."""
    return load_model(ModelSection(name=str(folder), device="cpu", adapter=AdapterSection()), seed=0)


@pytest.fixture
def make_adapter(tiny_random: Any, small_tokenizer: Any, tmp_path: Path) -> Any:
    """Write a base and an adapter with made-up weights on it; gives the peft model and its folder."""

    def make(
        architecture: str = "qwen3", rows: int | None = None, tied: bool = True, **settings: Any
    ) -> tuple[Any, Path]:
        base = tiny_random(architecture, tie_word_embeddings=tied)
        base.save_pretrained(tmp_path / "base")
        small_tokenizer.save_pretrained(tmp_path / "base")
        base.name_or_path = str(tmp_path / "base")
        if rows is not None:
            base.resize_token_embeddings(rows, mean_resizing=False)
        torch.manual_seed(0)
        model = get_peft_model(base, LoraConfig(r=2, task_type="CAUSAL_LM", **settings)).eval()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in (p for p in model.parameters() if p.requires_grad):
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        model.save_pretrained(tmp_path / "adapter")
        return model, tmp_path / "adapter"

    return make


def load(folder: Path) -> Any:
    return load_model(ModelSection(name=str(folder), device="cpu"), seed=0).model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_merge_any_kind_of_adapter_equals_the_trained_model(kind: str, make_adapter: Any, tmp_path: Path) -> None:
    model, folder = make_adapter(**KINDS[kind])
    trained = read_probe(model, [3, 5])
    assert_close(trained, read_probe(load(folder), [3, 5]), atol=1e-5, rtol=0)
    merged = load_merged(folder).model
    merged.save_pretrained(tmp_path / "merged")
    (tmp_path / "merged" / "tokenizer_config.json").write_text((tmp_path / "base/tokenizer_config.json").read_text())
    (tmp_path / "merged" / "tokenizer.json").write_text((tmp_path / "base/tokenizer.json").read_text())
    exported = load(tmp_path / "merged")
    assert check_same(trained, read_probe(exported, [3, 5]), kind) == approx(0.0, abs=1e-4)
    is_untied = kind in ("tied embedding", "tied head", "head saved whole", "embedding saved whole")
    assert exported.config.tie_word_embeddings is not is_untied


@pytest.mark.filterwarnings("ignore")
def test_merge_one_adapter_of_both_places_keeps_them_tied_however_its_products_round(
    make_adapter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = make_adapter(**KINDS["both tied"])
    plain = LoraEmbedding.get_delta_weight
    one_up = lambda self, name: torch.nextafter(plain(self, name), torch.tensor(torch.inf))  # noqa: E731
    monkeypatch.setattr(LoraEmbedding, "get_delta_weight", one_up)
    merged = load_merged(folder).model
    assert merged.get_output_embeddings().weight is merged.get_input_embeddings().weight
    assert merged.config.tie_word_embeddings


def rename(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("base_model.model.", "base_model."): tensor for name, tensor in tensors.items()}


DAMAGE: dict[str, tuple[Any, str]] = {
    "renamed prefix": (rename, "has tensors without a place in the model: base_model.model.layers.0.self_attn.k_proj"),
    "one layer": (
        lambda tensors: {n: t for n, t in tensors.items() if ".layers.0." in n},
        r"has no tensors for .*layers\.1\.self_attn\.k_proj\.lora_A.* and 1 more, which adapter_config\.json names",
    ),
    "only lora_A": (
        lambda tensors: {n: t for n, t in tensors.items() if "lora_A" in n},
        r"has no tensors for .*layers\.0\.self_attn\.k_proj\.lora_B",
    ),
    "another rank": (
        lambda tensors: {n: t if "lora_A" in n else t[:, :1].contiguous() for n, t in tensors.items()},
        r"does not fit: size mismatch for .*lora_B.*torch.Size\(\[32, 1\]\)",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_attach_adapter_with_a_file_that_does_not_match_is_refused(damage: str, make_adapter: Any) -> None:
    _, folder = make_adapter(target_modules=["k_proj", "v_proj"], layers_to_transform=[0, 1])
    change, message = DAMAGE[damage]
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    assert len(tensors) == 8
    save_file(change(tensors), path)
    with pytest.raises(UsageError, match=message) as refused:
        load(folder)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"modules_to_save": ["lm_head"]}, "adapter_model.safetensors"),
        ({"use_new_scaling": True}, "'use_new_scaling'"),
        ({"alora_invocation_tokens": [5, 6]}, "alora_invocation_tokens"),
        ({"use_rslora": "no"}, "use_rslora"),
    ],
)
def test_attach_adapter_with_a_configuration_that_does_not_fit_is_refused(
    settings: dict[str, Any], message: str, make_adapter: Any
) -> None:
    _, folder = make_adapter(target_modules=["q_proj"])
    place = folder / "adapter_config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | settings))
    with refuses(UsageError, message):
        load(folder)


def test_attach_adapter_without_its_weights_is_refused(make_adapter: Any) -> None:
    _, folder = make_adapter(target_modules=["q_proj"])
    (folder / "adapter_model.safetensors").write_bytes(b"cut")
    with refuses(UsageError, "adapter_model.safetensors"):
        load(folder)
    (folder / "adapter_model.safetensors").unlink()
    with refuses(UsageError, "adapter_config.json", "adapter_model.safetensors"):
        load(folder)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tied", [True, False])
def test_attach_adapter_of_a_resized_vocabulary_resizes_the_base(tied: bool, make_adapter: Any, tmp_path: Path) -> None:
    """TRL writes the whole embeddings with the adapter after it added tokens."""
    model, folder = make_adapter(rows=308, tied=tied, target_modules=["q_proj"])
    trained = read_probe(model)
    again = load(folder)
    assert again.whole_weights == [*([] if tied else ["lm_head.weight"]), "model.embed_tokens.weight"]
    assert_close(read_probe(again), trained, atol=1e-5, rtol=0)
    assert_close(read_probe(load_merged(folder).model), trained, atol=1e-4, rtol=0)


def test_attach_adapter_whose_embeddings_do_not_fit_states_why(make_adapter: Any) -> None:
    _, folder = make_adapter(target_modules=["q_proj"])
    path = folder / "adapter_model.safetensors"
    save_file(load_file(path) | {"base_model.model.model.embed_tokens.weight": torch.zeros(300, 32)}, path)
    with refuses(UsageError, "embed_tokens.weight", "[300, 32]", "[300, 64]"):
        load(folder)


HANDED_OVER = (
    *(kind for kind in KINDS if "tied" not in kind and "saved whole" not in kind),
    *("norm saved whole", "untied head", "untied head saved whole", "experts"),
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", HANDED_OVER)
def test_checkpoint_weights_of_any_kind_of_adapter_are_the_trained_model(kind: str, make_adapter: Any) -> None:
    """An engine elsewhere gets these weights, in a plain model."""
    untied = {"untied head": {"target_modules": ["lm_head", "embed_tokens"]}}
    untied["untied head saved whole"] = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}
    untied["experts"] = {"architecture": "qwen3_moe", "target_parameters": ["experts.gate_up_proj"]}
    settings = KINDS[kind] if kind in KINDS else {"architecture": "llama", "tied": False} | untied[kind]
    model, folder = make_adapter(**settings)
    trained, weights = read_probe(model, [3, 5]), dict(checkpoint_weights(model))
    plain = load_model(ModelSection(name=str(folder.parent / "base"), device="cpu"), seed=0).model
    assert weights.keys() == dict(plain.named_parameters()).keys()
    plain.load_state_dict(weights, strict=False)
    assert_close(read_probe(plain, [3, 5]), trained, atol=1e-4, rtol=0)
    assert float((read_probe(model, [3, 5]) - trained).abs().max()) == 0, "the trained model was changed"
    with model.disable_adapter():
        off, base = read_probe(model), dict(checkpoint_weights(model))
        plain.load_state_dict(base, strict=False)
        assert_close(read_probe(plain), off, atol=1e-5, rtol=0)
        assert float((off - trained).abs().max()) > 0.01


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["tied embedding", "head saved whole"])
def test_checkpoint_weights_with_an_adapter_on_a_tied_matrix_are_refused(kind: str, make_adapter: Any) -> None:
    model, _ = make_adapter(**KINDS[kind])
    with refuses(UsageError, "parameter of another"):
        list(checkpoint_weights(model))


def test_merge_bias_of_an_adapter_without_a_place_in_the_base_is_refused_by_name(
    make_adapter: Any, tmp_path: Path
) -> None:
    model, folder = make_adapter("qwen3", target_modules=["q_proj", "down_proj"], lora_bias=True)
    with refuses(UsageError, "model.adapter", "lora_bias"):
        list(merged_weights(model))
    with refuses(UsageError, "model.name", "lora_bias"):
        load_merged(folder)
    loaded = load(folder)  # on its base it is what was trained
    check_same(read_probe(model), read_probe(loaded), "the adapter")
