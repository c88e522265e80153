"""Estimates of the memory of a recipe: ``train --dry-run --memory`` on stderr, and a table of the documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from closeness import approx
from posttrain.cli import main
from posttrain.commands.recipes import PLANNED_GIB, needs_gpu, planned_gib
from posttrain.models.forward import kept
from posttrain.models.published.configs import SHAPES as SHIPPED
from posttrain.models.published.configs import published_config
from posttrain.recipes.recipe import load_recipe
from posttrain.sweeps.file import training_recipe_names
from posttrain.training.checks import resolve_components
from posttrain.training.memory import Memory, estimate_memory, memory_of, micro_batch, weights_of

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "how-to" / "fit-in-memory.md"
# What the published configurations state.
QWEN3 = {"vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8}
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen/Qwen3-14B": (
        "qwen3",
        QWEN3
        | {"hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40, "intermediate_size": 17408}
        | {"tie_word_embeddings": False},
    ),
    "Qwen/Qwen3-4B": (
        "qwen3",
        QWEN3
        | {"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 9728}
        | {"tie_word_embeddings": True},
    ),
    "Qwen/Qwen3-0.6B": (
        "qwen3",
        QWEN3
        | {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 3072}
        | {"tie_word_embeddings": True},
    ),
    "openai-community/gpt2": ("gpt2", {}),
}
ROWS = {
    "grpo-gsm8k": {},
    "grpo-gsm8k with train.gradient_checkpointing false": {"train.gradient_checkpointing": "false"},
    "grpo-gsm8k-qwen3-4b": {},
    "grpo-gsm8k-qwen3-0.6b": {},
    "rm-hh-qwen3-0.6b": {},
    "orm-gsm8k-own": {},
    "ppo-hh-gpt2": {},
}


def row_of(name: str, overrides: dict[str, str]) -> str:
    recipe = load_recipe(name.partition(" ")[0], list(overrides.items())).resolve()
    architecture, sizes = PUBLISHED[recipe.model.name]
    parts = memory_of(recipe, AutoConfig.for_model(architecture, **sizes), 80 * 2**30)
    held = parts.update - parts.activations - parts.logits
    shown = (held, parts.activations + parts.logits, parts.kv_cache, parts.update)
    numbers = " | ".join(f"{num_bytes / 2**30:.1f}" if num_bytes else "" for num_bytes in shown)
    return f"| `{name.partition(' ')[0]}`{name[len(name.partition(' ')[0]) :]}, {recipe.model.name} | {numbers} |"


def test_the_documents_table_is_what_the_function_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_repeats_keys", lambda: False)  # as since torch 2.12
    page = PAGE.read_text(encoding="utf-8").splitlines()
    assert [row for row in (row_of(*about) for about in ROWS.items()) if row not in page] == []


def test_a_dry_run_states_the_parts_next_to_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "tiny/grpo", "--dry-run", "--memory", "--train.micro_batch_tokens", "2048"]) == 0
    out, err = capsys.readouterr()
    assert "memory" not in out.splitlines()[0]
    assert out.startswith("# tiny/grpo, resolved")
    lines = [line for line in err.splitlines() if not line.startswith("note: ")]
    assert lines[0].startswith("memory of one process")
    parts = {line[:22].strip(): line[22:].strip() for line in lines[1:]}
    assert list(parts) == [
        *("weights", "gradients", "optimizer state", "activations", "logits", "key/value cache", "rollouts"),
        *("most in an update", "most while sampling"),
    ]
    assert (parts["weights"], parts["gradients"]) == ("3.4 MiB", "3.4 MiB")


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_has_the_shapes_of_the_published_configuration(name: str) -> None:
    architecture, sizes = PUBLISHED[name]
    config, given = AutoConfig.for_model(architecture, **sizes), published_config(name)
    assert given is not None
    assert weights_of(given) == weights_of(config)


def test_a_dry_run_of_a_shipped_recipe_without_a_hub_estimates_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "grpo-gsm8k", "--dry-run", "--memory"]) == 0
    assert "in an update" in capsys.readouterr().err
    assert main(["train", "grpo-gsm8k", "--dry-run", "--memory", "--model.name", "nobody/made-this"]) == 0
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("memory: no estimate"))
    assert "config.json of nobody/made-this" in line


def test_every_model_of_the_hub_in_a_shipped_recipe_has_published_shapes() -> None:
    names = {load_recipe(name).model.name for name in training_recipe_names()}
    of_the_hub = {name for name in names if "/" in name and not name.startswith("runs/")}
    assert len(of_the_hub) > 5
    assert of_the_hub <= set(SHIPPED)


def test_other_architectures_and_strange_folders_are_reported_in_words(tmp_path: Path) -> None:
    def of(config: dict[str, Any]) -> Any:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return estimate_memory(load_recipe("tiny/sft", [("model.name", str(tmp_path))]).resolve())

    assert "was not worked out for the architecture gpt_neox" in of({"model_type": "gpt_neox"})
    assert "hidden_size: a whole number from 1" in of({"model_type": "qwen3", "hidden_size": -1})
    own = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert "comes with Python of its own" in of(own)
    assert not (tmp_path / "ran").exists()


def test_a_loaded_adapter_and_few_bits(tmp_path: Path) -> None:
    """The adapter that a folder holds is what is trained; 4 bits take about an eighth of 32."""
    settings = {"peft_type": "LORA", "base_model_name_or_path": "posttrain/models/tiny", "r": 8}
    settings["target_modules"] = ["q_proj", "v_proj"]
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    loaded = estimate_memory(load_recipe("tiny/sft", [("model.name", str(tmp_path))]).resolve())
    options = [("model.adapter.rank", "8"), ("model.adapter.targets", "[q_proj, v_proj]")]
    fresh = estimate_memory(load_recipe("tiny/sft", options).resolve())
    assert not isinstance(fresh, str)
    assert loaded == fresh
    plain = estimate_memory(load_recipe("tiny/sft").resolve())
    few = estimate_memory(load_recipe("tiny/sft", [*options, ("model.load_bits", "4")]).resolve())
    assert not isinstance(plain, str)
    assert not isinstance(few, str)
    adapter = fresh.weights - plain.weights
    assert fresh.gradients == adapter
    embedding = 4 * 768 * 128
    linear = plain.weights - embedding
    assert few.weights - adapter - embedding == approx(linear * 0.516 / 4, rel=0.03)


def test_memory_of_eight_billion_weights_in_four_parts_by_hand() -> None:
    """N = 8,190,735,360: 4 N / 4 bytes of weights, as many of gradients, and twice that of moments.

    Gathered are both embeddings, the last norm, two layers, and the gradients of one.
    """
    changes = [("model.name", "Qwen/Qwen3-8B"), ("eval.every", "0"), ("scale.processes", "4")]
    recipe = load_recipe("sft-math-qwen3-0.6b", [*changes, ("scale.sharding", "fsdp2")]).resolve()
    plan = memory_of(recipe, published_config("Qwen/Qwen3-8B"), 80 * 2**30)
    num_weights, width = 8_190_735_360, 4096
    layer = (2 * 4096 + 2 * 1024) * width + 3 * 12_288 * width + 2 * width + 2 * 128
    outside = num_weights - 36 * layer
    assert outside == 2 * 151_936 * width + width
    assert (plan.weights, plan.gradients) == (num_weights, num_weights)
    assert plan.optimizer == approx(2 * num_weights, rel=1e-6)
    assert plan.gathered == 4 * (outside + 3 * layer)
    with_samples = load_recipe("sft-math-qwen3-0.6b", [*changes[:1], *changes[2:], ("scale.sharding", "fsdp2")])
    copied = memory_of(with_samples.resolve(), published_config("Qwen/Qwen3-8B"), 80 * 2**30)
    assert copied.weights == 5 * num_weights


def test_memory_of_unsharded_processes_has_fewer_rows_each() -> None:
    """Nothing but rows is shared: four processes have a fourth of 8 rows, and of 64 slots of the cache."""
    options = [("train.micro_batch_tokens", "100000"), ("rollout.num_prompts", "8"), ("rollout.group_size", "1")]
    options += [("advantage", "raw"), ("prompt.max_prompt_tokens", "64")]
    recipes = [load_recipe("tiny/grpo", [*options, ("scale.processes", number)]).resolve() for number in ("1", "4")]
    assert [micro_batch(resolve_components(recipe)).rows for recipe in recipes] == [8, 2]
    alone, fourth = (estimate_memory(recipe) for recipe in recipes)
    assert isinstance(alone, Memory)
    assert isinstance(fourth, Memory)
    assert (fourth.weights, fourth.gradients, fourth.optimizer) == (alone.weights, alone.gradients, alone.optimizer)
    assert fourth.kv_cache == alone.kv_cache / 4


def test_recipes_show_the_plan_of_each_recipe_that_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third: the plan of one takes a tenth of a second. `make check` compares all."""
    monkeypatch.setattr(kept, "_repeats_keys", lambda: False)  # as since torch 2.12
    names = [name for name in training_recipe_names() if needs_gpu(name, load_recipe(name).model.name)]
    plans = planned_gib()
    assert list(plans) == names
    for name in (*names[::3], "rm-ultrafeedback-qwen3-0.6b", "grpo-gsm8k-smollm2-135m"):
        plan = estimate_memory(load_recipe(name).resolve(), PLANNED_GIB * 2**30)
        assert isinstance(plan, Memory), plan
        assert plans[name] == approx(max(plan.update, plan.sampling) / 2**30, abs=0.05)
    assert 48 <= plans["rm-ultrafeedback-qwen3-0.6b"] <= 49


def test_a_dry_run_of_several_processes_states_the_memory_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    scale = ["--scale.processes", "4", "--scale.sharding", "fsdp2", "--eval.every", "0"]
    plan = ["--dry-run", "--memory", "--gpu-memory", "80"]
    assert main(["train", "sft-math-qwen3-0.6b", *plan, *scale]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("note: ")]
    assert lines[0].startswith("memory of each of 4 processes with a GPU of 80 GiB")
    assert "  weights              568.4 MiB" in lines
    assert any(line.startswith("  gathered layers") for line in lines)
    assert main(["train", "tiny/grpo", "--gpu-memory", "80"]) == 2
    assert "--gpu-memory" in capsys.readouterr().err


def test_a_run_that_is_yet_to_be_made_has_the_shapes_of_its_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = estimate_memory(load_recipe("tiny/grpo", [("model.name", "runs/tiny-sft-calculator")]).resolve())
    assert made == estimate_memory(load_recipe("tiny/grpo").resolve())
    options = [("model.name", "runs/smollm2-grpo-sums")]
    adapted = estimate_memory(load_recipe("smollm2/grpo-sums", options).resolve())
    assert adapted == estimate_memory(load_recipe("smollm2/grpo-sums").resolve())
    assert "there is no folder 'runs/nothing'" in str(
        estimate_memory(load_recipe("tiny/grpo", [("model.name", "runs/nothing")]).resolve())
    )
