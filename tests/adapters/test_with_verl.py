"""The recipe of docs/coming-from/verl.md is verl's default run, key by key; verl's own file is read, no code of it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
import yaml

from closeness import approx
from page_recipes import recipe_of_page

pytestmark = pytest.mark.adapters
PAGE = "docs/coming-from/verl.md"
VERSION = "0.9.1"
CONFIG = "verl/trainer/config/_generated_ppo_trainer.yaml"


@pytest.fixture(scope="module")
def defaults() -> dict[str, Any]:
    try:
        installed = distribution("verl")
    except PackageNotFoundError:
        pytest.skip("verl is not installed")
    assert installed.version == VERSION
    read: dict[str, Any] = yaml.safe_load(Path(str(installed.locate_file(CONFIG))).read_text(encoding="utf-8"))
    return read


def test_recipe_of_the_page_equals_the_default_run_key_by_key(defaults: dict[str, Any]) -> None:
    recipe = recipe_of_page(PAGE, "verl-defaults.yaml")
    ours = recipe.dump()
    actor, critic = defaults["actor_rollout_ref"]["actor"], defaults["critic"]
    rollout, data, algorithm = defaults["actor_rollout_ref"]["rollout"], defaults["data"], defaults["algorithm"]
    optimizer = actor["optim"]
    assert (actor["policy_loss"]["loss_mode"], algorithm["adv_estimator"]) == ("vanilla", "gae")
    assert ours["objective"] == {
        "name": "ppo",
        "clip_low": actor["clip_ratio_low"],
        "clip_high": actor["clip_ratio_high"],
        "clip_max": actor["clip_ratio_c"],
        "value_clip": critic["cliprange_value"],
        "value_weight": 1.0,  # the critic has an optimizer to itself
    }
    assert ours["advantage"] == {
        "name": "gae",
        "gamma": algorithm["gamma"],
        "gae_lambda": algorithm["lam"],
        "whiten": True,  # core_algos.compute_gae_advantage_return
        "bootstrap": False,
    }
    assert ours["aggregate"]["name"] == actor["loss_agg_mode"].replace("-", "_")
    assert (ours["regularize"]["kl_coef"] != 0) == actor["use_kl_loss"]
    assert ("kl_in_reward" in ours) == algorithm["use_kl_in_reward"]
    assert ours["regularize"]["entropy_coef"] == actor["entropy_coeff"]
    assert (optimizer["optimizer"], critic["optim"]["optimizer"]) == ("AdamW", "AdamW")
    for peer in (optimizer, critic["optim"]):
        assert ours["optimizer"]["betas"] == peer["betas"]
        assert ours["optimizer"]["weight_decay"] == peer["weight_decay"]
        assert ours["train"]["schedule"] == peer["lr_scheduler_type"]
        assert ours["train"]["warmup_steps"] == max(0, peer["lr_warmup_steps"]) == peer["lr_warmup_steps_ratio"]
        assert ours["train"]["max_grad_norm"] == peer["clip_grad"]
    assert ours["train"]["lr"] == optimizer["lr"]
    assert ours["head"]["lr_ratio"] * ours["train"]["lr"] == approx(critic["optim"]["lr"], rel=1e-12)
    assert ours["head"]["trunk"] == "separate"
    assert ours["train"]["ppo_epochs"] == actor["ppo_epochs"]
    assert ours["train"]["num_minibatches"] == data["train_batch_size"] // actor["ppo_mini_batch_size"]
    assert ours["train"]["num_epochs"] == defaults["trainer"]["total_epochs"]
    assert ours["train"]["gradient_checkpointing"] == _checkpoints(defaults)
    assert (actor["fsdp_config"]["model_dtype"], actor["fsdp_config"]["dtype"]) == ("fp32", "bfloat16")
    assert (ours["model"]["dtype"], ours["train"]["precision"]) == ("fp32", "bf16")
    assert (ours["train"]["save_every"], defaults["trainer"]["save_freq"]) == (0, -1)
    assert (ours["eval"]["every"], defaults["trainer"]["test_freq"]) == (0, -1)
    assert ours["rollout"]["num_prompts"] == data["train_batch_size"]
    assert ours["rollout"]["group_size"] == rollout["n"]
    assert ours["rollout"]["temperature"] == rollout["temperature"]
    assert ours["rollout"]["top_p"] == rollout["top_p"]
    assert ("top_k" in ours["rollout"]) == (rollout["top_k"] > 0)
    assert ours["rollout"]["max_tokens"] == data["max_response_length"]
    assert ours["prompt"]["max_prompt_tokens"] == data["max_prompt_length"]
    assert ours["rollout"]["drop_uniform_groups"] == algorithm["filter_groups"]["enable"]
    correction = algorithm["rollout_correction"]
    assert (correction["rollout_is"], correction["rollout_rs"], "correction" in ours) == (None, None, False)
    assert (ours["rollout"]["old_logprobs"] == "sampler") == correction["bypass_mode"]


def _checkpoints(defaults: dict[str, Any]) -> bool:
    """Return whether both models compute activations again."""
    models = (defaults["actor_rollout_ref"]["model"], defaults["critic"]["model"])
    return all(model["enable_gradient_checkpointing"] for model in models)
