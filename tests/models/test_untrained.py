"""Parts of a model that training leaves alone: vision towers and draft heads stay in checkpoints, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from posttrain.errors import CheckpointError, UsageError
from posttrain.models.load import load_model
from posttrain.models.sources import TINY
from posttrain.models.written.untrained import PARTS, complete_folder, note_untrained
from posttrain.recipes.sections import ModelSection
from posttrain.runs.export import export_run
from posttrain.training.checkpoint import restore_model
from refusing import refuses
from small_runs import Events, make_recipe, watched

TEXT: dict[str, Any] = {
    "vocab_size": 768,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "bos_token_id": 0,
}
LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "patch_size": 4,
}
TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
PROCESSOR = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4}


def qwen35(text: dict[str, Any]) -> Any:
    tied = text.get("tie_word_embeddings", False)
    config = Qwen3_5Config(text_config={**TEXT, **LINEAR, **text}, vision_config=VISION, tie_word_embeddings=tied)
    return Qwen3_5ForConditionalGeneration(config)


def gemma3() -> Any:
    text = {**TEXT, "sliding_window": 64, "query_pre_attn_scalar": 16}
    return Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=TOWER, mm_tokens_per_image=4))


def tensors_of(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        found.update(load_file(file))
    return found


def write(model: Any, folder: Path) -> Path:
    """Write a model with the embedded model's tokenizer and the description of a processor."""
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR), encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def _seeded() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def trained(folder: Path, model: Path, **changes: Any) -> tuple[Path, Events]:
    """Train two steps of SFT; returns the checkpoint's folder and the events."""
    events = Events()
    section = {"name": str(model), "device": "cpu"}
    watched(folder, make_recipe("sft", model=section, train={"steps": 2, "lr": 1e-2}, **changes), events)
    return folder / "checkpoints" / "step-000002", events


@pytest.mark.parametrize("is_tied", [False, True])
def test_checkpoint_of_a_vision_model_keeps_every_tensor_and_the_architecture(is_tied: bool, tmp_path: Path) -> None:
    source = write(qwen35({"tie_word_embeddings": is_tied}), tmp_path / "model")
    checkpoint, events = trained(tmp_path / "run", source)
    before, after = tensors_of(source), tensors_of(checkpoint)
    visual = {name for name in before if name.startswith("model.visual.")}
    assert len(visual) == 21
    assert after.keys() == before.keys()
    for name in before:
        assert torch.equal(before[name], after[name]) == (name in visual), name
    config = json.loads((checkpoint / "config.json").read_text())
    stored = json.loads((source / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    assert config["vision_config"] == stored["vision_config"]
    for key, value in stored["text_config"].items():
        assert config["text_config"][key] == value, key
    assert json.loads((checkpoint / "preprocessor_config.json").read_text()) == PROCESSOR
    whole = AutoModelForImageTextToText.from_pretrained(checkpoint)
    text = AutoModelForCausalLM.from_pretrained(checkpoint)
    ids = torch.arange(5, 45)[None]
    assert torch.equal(whole(input_ids=ids).logits, text(input_ids=ids).logits)
    notices = [fact["message"] for fact in events.of("notice") if "21 tensors" in fact["message"]]
    assert len(notices) == 1
    assert "Qwen3_5ForConditionalGeneration" in notices[0]


def test_restore_model_of_a_vision_checkpoint_fills_the_language_model(tmp_path: Path) -> None:
    source = write(qwen35({}), tmp_path / "model")
    checkpoint, _ = trained(tmp_path / "run", source)
    section = ModelSection(name=str(source), device="cpu")
    live = load_model(section, seed=0).model
    restore_model(live, checkpoint)
    again = load_model(section.model_copy(update={"name": str(checkpoint)}), seed=0).model
    assert all(torch.equal(a, b) for a, b in zip(live.state_dict().values(), again.state_dict().values(), strict=True))
    # a run that starts from the checkpoint keeps the parts as well
    child, _ = trained(tmp_path / "child", checkpoint)
    assert tensors_of(child).keys() == tensors_of(source).keys()
    visual = "model.visual.pos_embed.weight"
    assert torch.equal(tensors_of(child)[visual], tensors_of(source)[visual])


def test_merged_export_of_an_adapter_on_a_vision_model_keeps_every_tensor(tmp_path: Path) -> None:
    source = write(qwen35({}), tmp_path / "model")
    adapter = {"name": str(source), "device": "cpu", "adapter": {"rank": 2, "alpha": 64}}
    root = tmp_path / "runs"
    watched(root / "a", make_recipe("sft", model=adapter, train={"steps": 2, "lr": 1e-1}), Events())
    recipe = make_recipe("sft", model=adapter, train={"steps": 2})
    (root / "a" / "recipe.yaml").write_text(recipe.resolve().to_yaml(), encoding="utf-8")
    export_run(root, root / "a", tmp_path / "out", merge=True)
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    assert after.keys() == before.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all(name.startswith("model.language_model.layers.") for name in changed)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5ForConditionalGeneration"]


def test_checkpoint_of_a_model_that_loads_whole_keeps_its_processor(tmp_path: Path) -> None:
    source = write(gemma3(), tmp_path / "model")
    checkpoint, _ = trained(tmp_path / "run", source)
    assert tensors_of(checkpoint).keys() == tensors_of(source).keys()
    assert len(tensors_of(checkpoint)) == 62
    assert json.loads((checkpoint / "preprocessor_config.json").read_text()) == PROCESSOR
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["architectures"] == ["Gemma3ForConditionalGeneration"]


@pytest.mark.parametrize("head", ["mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight", "model.layers.2.eh_proj.weight"])
def test_checkpoint_of_a_text_model_keeps_draft_heads(head: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**TEXT, **LINEAR))
    source = write(model, tmp_path / "model")
    more = {head: torch.randn(4, 8, dtype=torch.bfloat16)}
    save_file(load_file(source / "model.safetensors") | more, source / "model.safetensors", {"format": "pt"})
    checkpoint, events = trained(tmp_path / "run", source)
    after = tensors_of(checkpoint)
    assert after.keys() == tensors_of(source).keys()
    assert after[head].dtype == torch.bfloat16
    assert torch.equal(after[head], more[head])
    assert any("1 tensors" in fact["message"] for fact in events.of("notice"))
    assert json.loads((checkpoint / "config.json").read_text())["architectures"] == ["Qwen3_5ForCausalLM"]
    live = load_model(ModelSection(name=str(source), device="cpu"), seed=0).model
    restore_model(live, checkpoint)
    assert torch.equal(live.lm_head.weight, after["lm_head.weight"])


def test_head_of_a_tied_model_is_not_kept_as_it_was(tmp_path: Path) -> None:
    """A file may hold the head of a tied model once more; what is trained is the embedding."""
    model = Qwen3ForCausalLM(Qwen3Config(**TEXT, tie_word_embeddings=True))
    source = write(model, tmp_path / "model")
    stored = load_file(source / "model.safetensors")
    again = {"lm_head.weight": stored["model.embed_tokens.weight"].clone()}
    save_file(stored | again, source / "model.safetensors", {"format": "pt"})
    checkpoint, _ = trained(tmp_path / "run", source)
    after = tensors_of(checkpoint)
    head = after.get("lm_head.weight", after["model.embed_tokens.weight"])
    assert torch.equal(head, after["model.embed_tokens.weight"])
    assert not torch.equal(head, stored["model.embed_tokens.weight"])


def test_vision_model_in_a_layout_that_cannot_be_restored_is_refused(tmp_path: Path) -> None:
    source = write(qwen35({}), tmp_path / "model")
    renamed = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        renamed[name.replace("lm_head", "language_model.lm_head")] = tensor
    loaded = load_model(ModelSection(name=str(source), device="cpu"), seed=0)
    save_file(renamed, source / "model.safetensors", {"format": "pt"})
    with refuses(UsageError, "model.name", "Qwen3_5ForConditionalGeneration", "lm_head.weight", "model.adapter"):
        note_untrained(loaded.model, loaded.source)


def test_source_that_has_gone_fails_the_checkpoint_by_name(tmp_path: Path) -> None:
    source = write(qwen35({}), tmp_path / "model")
    loaded = load_model(ModelSection(name=str(source), device="cpu"), seed=0)
    note_untrained(loaded.model, loaded.source)
    (source / "model.safetensors").unlink()
    loaded.model.save_pretrained(tmp_path / "out")
    with refuses(CheckpointError, "model.safetensors", "gone"):
        complete_folder(tmp_path / "out", loaded.model)


def test_plain_model_has_no_other_parts(tmp_path: Path) -> None:
    loaded = load_model(ModelSection(name="tiny", device="cpu"), seed=0)
    note_untrained(loaded.model, loaded.source)
    assert getattr(loaded.model, PARTS) is None


def small_llava() -> Any:
    text = {"model_type": "llama", **TEXT}
    vision = {"model_type": "clip_vision_model", **TOWER}
    return LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision))


def small_mistral3() -> Any:
    text = {"model_type": "mistral", **TEXT}
    vision = {"model_type": "pixtral", **TOWER, "head_dim": 8}
    return Mistral3ForConditionalGeneration(Mistral3Config(text_config=text, vision_config=vision))


def small_qwen2_audio() -> Any:
    audio = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16}
    text = {"model_type": "qwen2", **{key: value for key, value in TEXT.items() if key != "head_dim"}}
    config = Qwen2AudioConfig(text_config=text, audio_config={"model_type": "qwen2_audio_encoder", **audio})
    return Qwen2AudioForConditionalGeneration(config)


@pytest.mark.parametrize(
    ("build", "kind"),
    [(small_llava, "LlavaConfig"), (small_mistral3, "Mistral3Config"), (small_qwen2_audio, "Qwen2AudioConfig")],
)
def test_model_without_a_causal_language_model_is_refused_by_its_kind(build: Any, kind: str, tmp_path: Path) -> None:
    source = write(build(), tmp_path / "model")
    with refuses(UsageError, "model.name", kind, "language model"):
        load_model(ModelSection(name=str(source), device="cpu"), seed=0)
