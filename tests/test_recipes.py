"""Every recipe that ships resolves, and trains two steps with a small random model of its family."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import posttrain
from posttrain.recipe import Recipe, load_recipe, recipe_names
from posttrain.runs.launch import launch
from posttrain.store.metrics import MetricsLog
from posttrain.store.rollouts import RolloutStore

PACKAGE = Path(posttrain.__file__).parent
FILES = sorted((PACKAGE / "recipes").rglob("*.yaml"))
NAMES = [str(path.relative_to(PACKAGE / "recipes").with_suffix("")) for path in FILES]
# The family of each model that a recipe names; a new one is entered here with its transformers name.
FAMILIES = {"tiny": "qwen3", "Qwen/Qwen3-14B": "qwen3", "Qwen/Qwen2.5-Math-1.5B": "qwen2"}
NUM_STEPS = 2


def test_the_package_finds_every_file() -> None:
    assert recipe_names() == NAMES
    assert {"grpo-gsm8k", "grpo-math", "sft-math", "tiny/pretrain", "tiny/sft", "tiny/grpo"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_resolves_and_its_dump_is_the_same_recipe(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name).resolve()
    assert len(recipe.description) > 20
    path = tmp_path / "again.yaml"
    path.write_text(recipe.to_yaml())
    assert load_recipe(str(path)).resolve().fingerprint() == recipe.fingerprint()


def test_recipes_of_the_issue_say_what_was_asked() -> None:
    large = load_recipe("grpo-gsm8k")
    assert large.model.name == "Qwen/Qwen3-14B"
    assert large.model.adapter is not None
    assert large.model.adapter.rank == 128
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert large.model.adapter.targets == targets
    assert (large.prompt.template.name, large.train.lr) == ("xml_reasoning", 5e-6)
    assert large.rollout is not None
    assert (large.rollout.prompts, large.rollout.max_tokens) == (4, 1024)
    assert large.train.rows_per_micro == large.rollout.group  # one prompt at a time, four to an update
    for name in ("sft-math", "grpo-math"):
        recipe = load_recipe(name)
        assert (recipe.model.name, recipe.prompt.template.name) == ("Qwen/Qwen2.5-Math-1.5B", "r1_zero")
        assert (recipe.train.lr, recipe.train.steps) == (1e-5, 200)
    grpo = load_recipe("grpo-math")
    assert grpo.rollout is not None
    assert grpo.rollout.group == 8


@pytest.fixture(scope="module")
def random_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder with a small random model of each family, with tiny's tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(PACKAGE / "models" / "tiny")
    folders = {}
    for family in sorted(set(FAMILIES.values())):
        config = AutoConfig.for_model(
            family,
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        torch.manual_seed(0)
        folder = tmp_path_factory.mktemp(family)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        folders[family] = folder
    return folders


@pytest.fixture(scope="module")
def local_data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A few rows in the layouts of GSM8K and MATH."""
    folder = tmp_path_factory.mktemp("data")
    sums = [(a, b) for a in range(2, 8) for b in range(2, 8)]
    rows = {
        "gsm8k": [
            {"question": f"What is {a} plus {b}?", "answer": f"{a} + {b} = {a + b}\n#### {a + b}"} for a, b in sums
        ],
        "math": [{"problem": f"Find ${a}+{b}$.", "solution": f"It is $\\boxed{{{a + b}}}$."} for a, b in sums],
    }
    for name, content in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    return {name: folder / f"{name}.jsonl" for name in rows}


def small(name: str, models: dict[str, Path], data: dict[str, Path]) -> Recipe:
    """The recipe with a random model, little data and two steps; its method stays as it is."""
    recipe = load_recipe(name)
    changes: list[tuple[str, Any]] = [("train.steps", NUM_STEPS), ("train.warmup_steps", 0), ("train.save_every", 0)]
    if recipe.model.init is None:
        changes += [("model.name", str(models[FAMILIES[recipe.model.name]])), ("model.dtype", "float32")]
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        sizes |= {"num_key_value_heads": 1, "head_dim": 16}
        changes += [(f"model.init.config.{key}", value) for key, value in sizes.items()]
        changes += [("model.init.tokenizer.num_documents", 200)]
    if recipe.model.adapter is not None:
        changes.append(("model.adapter.rank", 4))
    if recipe.task.name in data:
        changes += [("task.path", str(data[recipe.task.name])), ("task.validation_share", 0.3)]
    else:
        changes.append(("task.size", 200))
    if recipe.rollout is not None:
        changes += [("rollout.prompts", 2 * recipe.train.minibatches), ("rollout.max_tokens", 6)]
        changes += [("prompt.max_prompt_tokens", 1500)]
    else:
        changes += [("data.batch", 2)]
    changes += [("eval.every", NUM_STEPS), ("eval.n", 3), ("eval.max_tokens", 6), ("eval.tasks", [])]
    return load_recipe(name, [(key, json.dumps(value)) for key, value in changes])


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_trains_two_steps(
    name: str, random_models: dict[str, Path], local_data: dict[str, Path], tmp_path: Path
) -> None:
    recipe = small(name, random_models, local_data)
    result = launch(recipe, root=tmp_path, name="run")
    assert (result.step, result.reason) == (NUM_STEPS, "finished")
    rows = [row for row in MetricsLog(result.folder / "metrics.jsonl").read() if "loss" in row.metrics]
    assert [row.step for row in rows] == [1, 2]
    assert all(math.isfinite(value) for row in rows for value in row.metrics.values())
    assert all(r["n"] == 3.0 for r in result.evaluations.values())
    assert len(result.evaluations) == 1
    store = RolloutStore(result.folder / "rollouts.db", read_only=True)
    if recipe.rollout is None:
        # A random model knows nothing: its loss is the logarithm of the vocabulary's size.
        assert rows[0].metrics["nll"] == pytest.approx(math.log(_vocab_size(result.folder)), rel=0.05)
        assert store.count_training() == {}
    else:
        assert sum(store.count_training().values()) == NUM_STEPS * recipe.rollout.prompts * recipe.rollout.group
        assert {word.name for word in recipe.rewards} <= set(store.training(step=1, limit=1)[0].parts)
        assert abs(rows[0].metrics["kl_sampler"]) < 1e-8  # the trainer scores what the sampler sampled
    saved = result.folder / "checkpoints" / f"step-{NUM_STEPS:06d}"
    weights = "model.safetensors" if recipe.model.adapter is None else "adapter_model.safetensors"
    assert (saved / weights).is_file()


def _vocab_size(folder: Path) -> int:
    config = json.loads((folder / "checkpoints" / f"step-{NUM_STEPS:06d}" / "config.json").read_text())
    return int(config["vocab_size"])
