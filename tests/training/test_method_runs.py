"""Every kind of method as a small run: resumed from a checkpoint it equals the undisturbed one, and reports itself."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from closeness import approx
from posttrain.models.sources import resolve_model_name
from posttrain.recipes.sections import ModelSection
from small_runs import (
    one_layer_recipe,
    recorded,
    run,
    same_bits,
    save_perturbed,
    saved_tensors,
    shallow,
    steps_of,
    untimed,
)

# Two minibatches, twice: of the six steps the first four share a rollout batch.
SHARED_BATCH = {"steps": 6, "ppo_epochs": 2, "num_minibatches": 2}
JUDGING = {"label_above": 0.25, "group_size": 6, "max_tokens": 8}
BALANCED = JUDGING | {"select": {"name": "balanced", "threshold": 0.25, "keep": 2}}
SHORT = {"max_tokens": 8}
TEACHER = {"top_k": 5}
LORA = {"adapter": {"rank": 2, "dropout": 0.2}}
DESCRIBED = {"advantage_mean", "advantage_std", "advantage_min", "advantage_max"}
SAMPLED = {"kl_sampler", "effective_sample_size", "entropy"}

# name: (recipe, the step whose checkpoint is gone back to, metrics that every step with a batch has)
RUNS: dict[str, tuple[dict[str, Any], int, set[str]]] = {
    "ppo": (
        {"kind": "grpo", "objective": "ppo", "rollout": SHORT, "train": SHARED_BATCH},
        3,
        SAMPLED | {"value_explained_variance", "value_loss", "value_clip_fraction", "ratio", "clip_fraction"},
    ),
    "ppo, shared trunk, KL in the reward": (
        {
            "kind": "grpo",
            "objective": "ppo",
            "head": {"trunk": "shared", "lr_ratio": 2.0},
            "kl_in_reward": {"weight": 0.1},
            "rollout": SHORT,
        },
        2,
        SAMPLED | DESCRIBED | {"value_explained_variance", "kl_in_reward", "kl_weight"},
    ),
    "ppo, adapters and muon": (
        {"kind": "grpo", "objective": "ppo", "model": LORA, "optimizer": "muon", "rollout": SHORT},
        2,
        SAMPLED | DESCRIBED | {"value_explained_variance"},
    ),
    "dpo from rollouts": (
        {
            "kind": "grpo",
            "objective": "dpo",
            "rollout": SHORT | {"select": {"name": "right_and_wrong", "threshold": 0.25, "num_pairs": 2}},
            "train": SHARED_BATCH,
        },
        3,
        {"margin", "pair_accuracy", "chosen_reward", "rejected_reward"},
    ),
    "kto from rollouts": (
        {"kind": "grpo", "objective": "kto", "rollout": BALANCED, "train": SHARED_BATCH},
        3,
        {"kl_baseline", "answer_accuracy", "implicit_reward", "desirable"},
    ),
    "grpo, KL in the reward with a target": (
        {
            "kind": "grpo",
            "kl_in_reward": {"weight": 0.1, "target": 0.5, "horizon": 40},
            "rollout": SHORT,
            "train": {"steps": 6, "ppo_epochs": 2},
        },
        3,
        SAMPLED | {"ratio", "clip_fraction"},
    ),
    "distillation on rollouts": (
        {
            "kind": "grpo",
            "objective": {"name": "distillation", "divergence": "jsd"},
            "teacher": TEACHER,
            "rollout": SHORT,
            "train": SHARED_BATCH,
        },
        3,
        SAMPLED | {"divergence", "student_mass", "teacher_mass"},
    ),
    "sdpo": (
        {
            "kind": "grpo",
            "objective": "sdpo",
            "teacher": TEACHER | {"name": "self"},
            "rollout": JUDGING,
            "train": SHARED_BATCH,
        },
        3,
        SAMPLED | {"divergence", "feedback_share", "ratio"},
    ),
    "dpo on data": ({"kind": "judged", "objective": "dpo", "model": LORA}, 2, {"margin", "pair_accuracy"}),
    "bradley_terry": (
        {
            "kind": "judged",
            "model": LORA,
            "objective": {"name": "bradley_terry", "margin": True, "centering": 0.01},
        },
        2,
        {"margin", "pair_accuracy", "chosen_score", "rejected_score"},
    ),
    "process, three classes": (
        {
            "kind": "judged",
            "objective": {"name": "process", "num_classes": 3},
            "task": {"name": "small_runs:judged_sums", "best_class": 2},
        },
        2,
        {"step_accuracy", "positive_share"},
    ),
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_perturbed(tmp_path_factory.mktemp("teacher"))


def recipe_of(name: str, teacher: str) -> tuple[Any, int, set[str]]:
    changes, kept_step, expected = RUNS[name]
    if "teacher" in changes:
        changes = changes | {"teacher": {"name": teacher} | changes["teacher"]}
    train = {"steps": 3, "save_every": kept_step, "keep_checkpoints": 9} | changes.get("train", {})
    return one_layer_recipe(**changes | {"train": train}), kept_step, expected


@pytest.mark.parametrize("name", RUNS)
def test_resumed_from_a_checkpoint_equals_undisturbed(name: str, teacher: str, tmp_path: Path) -> None:
    """As after a kill: what was recorded after the checkpoint is dropped, and trained on again."""
    recipe, kept_step, expected = recipe_of(name, teacher)
    whole, cut, steps = tmp_path / "whole", tmp_path / "cut", recipe.train.steps
    assert run(whole, recipe).step == steps
    shutil.copytree(whole, cut)
    for folder in (cut / "checkpoints").iterdir():
        if folder.name != f"step-{kept_step:06d}":
            shutil.rmtree(folder)
    halfway = cut / "checkpoints" / f"step-{kept_step:06d}"
    in_the_middle = kept_step % (recipe.train.ppo_epochs * recipe.train.num_minibatches) != 0
    assert (halfway / "rollout_buffer.safetensors").exists() == in_the_middle
    assert (halfway / "heads.safetensors").exists() == (recipe.head is not None)
    run(cut, recipe, resume=True)
    assert same_bits(saved_tensors(whole, steps), saved_tensors(cut, steps))
    assert untimed(cut) == untimed(whole)
    assert recorded(cut) == recorded(whole)
    assert states(whole, steps) == states(cut, steps)
    # and all of it was trained, and described
    assert_everything_moved(whole, steps, recipe.model)
    rows = steps_of(whole)
    assert all(math.isfinite(value) for row in rows for value in row.values())
    busy = [row for row in rows if row["trained_tokens"] > 0]
    assert len(busy) >= 2
    for row in busy:
        assert expected <= row.keys(), expected - row.keys()
        assert row["grad_norm"] > 0
        if "effective_sample_size" in row:
            assert 0 < row["effective_sample_size"] <= 1 + 1e-6


def states(folder: Path, step: int) -> str:
    return (folder / "checkpoints" / f"step-{step:06d}" / "state.json").read_text()


def assert_everything_moved(folder: Path, step: int, model: ModelSection) -> None:
    """The optimizer has moments for heads and critics, and the weights are not those of the beginning."""
    saved = folder / "checkpoints" / f"step-{step:06d}"
    moments = {name.rpartition(".")[0] for name in load_file(saved / "optimizer.safetensors")}
    if (saved / "heads.safetensors").exists():
        assert set(load_file(saved / "heads.safetensors")) <= moments
    if model.adapter is None:
        start = Path(resolve_model_name(model.name))
        now, before = (load_file(place / "model.safetensors") for place in (saved, start))
        assert any(not torch.equal(now[name], before[name]) for name in before)
    else:
        adapter = load_file(saved / "adapter_model.safetensors")
        assert all(bool(x.any()) for name, x in adapter.items() if "lora_B" in name)


def test_a_critic_of_its_own_is_another_model_by_the_end(tmp_path: Path) -> None:
    """It began as a copy of the policy; what it learns is not what the policy learns."""
    recipe = one_layer_recipe("grpo", objective="ppo", head={"lr_ratio": 3.0}, rollout=SHORT, train={"steps": 2})
    run(tmp_path, recipe)
    saved = tmp_path / "checkpoints" / "step-000002"
    policy, critic = load_file(saved / "model.safetensors"), load_file(saved / "heads.safetensors")
    start = load_file(Path(shallow(1)) / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    moved, critic_moved = (policy[name] - start[name]).abs().max(), (critic[f"critic.{name}"] - start[name]).abs().max()
    assert float(moved) > 1e-4
    assert float(critic_moved) == approx(3 * float(moved), rel=0.2)  # Adam's steps are as long as their rate
    assert critic["head.weight"].shape == (1, 128)
    assert "critic.lm_head.weight" not in critic  # it is tied to the embedding, which is there once
