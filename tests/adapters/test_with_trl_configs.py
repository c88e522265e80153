"""The real configurations of TRL and peft, given to ``pt.train``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import posttrain as pt
from posttrain.api.config_objects import read_config_objects
from posttrain.errors import UsageError
from refusing import refuses

pytestmark = pytest.mark.adapters
trl = pytest.importorskip("trl", reason="TRL is not installed")
ON_A_CPU = {"use_cpu": True, "bf16": False, "report_to": []}


@pytest.mark.parametrize("name", ["GRPOConfig", "DPOConfig", "SFTConfig", "RewardConfig", "RLOOConfig", "KTOConfig"])
def test_a_default_configuration_says_nothing(name: str, tmp_path: Path) -> None:
    if not hasattr(trl, name):
        pytest.skip(f"TRL {trl.__version__} has no {name}")
    config = getattr(trl, name)(output_dir=str(tmp_path), **ON_A_CPU)
    keys, notes = read_config_objects({"args": config})
    assert keys == {"model.device": "cpu", "train.precision": "fp32"}
    assert any("runs_dir=" in note for note in notes)


def changed(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return "another"


@pytest.mark.parametrize("name", ["GRPOConfig", "DPOConfig", "SFTConfig"])
def test_no_field_is_ignored_without_a_word(name: str, tmp_path: Path) -> None:
    """Each field with another value is a key, a refusal or a line that names it."""
    config = getattr(trl, name)(output_dir=str(tmp_path), **ON_A_CPU)
    usual, _ = read_config_objects({"args": config})
    silent = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        object.__setattr__(config, field.name, changed(value))
        try:
            keys, notes = read_config_objects({"args": config})
            if keys == usual and not any(field.name in note for note in notes):
                silent.append(field.name)
        except UsageError as error:
            if field.name not in str(error):
                silent.append(field.name)
        object.__setattr__(config, field.name, value)
    # they follow from others, or act with them alone
    follow = {"generation_batch_size", "activation_checkpointing", "accelerator_config", "use_bias_correction_kl"}
    assert set(silent) <= {*follow, "logging_steps", "dataloader_pin_memory", *ON_A_CPU}, silent


def rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"Say {n}.", "answer": str(n)} for n in range(count)]


def short(completions: list[str], **kwargs: Any) -> list[float]:
    return [-len(text) / 100 for text in completions]


def test_training_with_the_configuration_of_a_script_for_trl(tmp_path: Path) -> None:
    from peft import LoraConfig

    config = trl.GRPOConfig(
        output_dir=str(tmp_path / "trl"), learning_rate=1e-4, per_device_train_batch_size=4, num_generations=2,
        max_completion_length=8, max_steps=2, beta=0.01, loss_type="dr_grpo", scale_rewards=False, **ON_A_CPU,
    )  # fmt: skip
    run = pt.train(
        "tiny/grpo", args=config, peft_config=LoraConfig(r=2, target_modules=["q_proj"]), data=rows(8), rewards=short,
        runs_dir=tmp_path, run="mine", progress=False, eval__every=0,
    )  # fmt: skip
    recipe = run.recipe
    assert recipe["rollout"]["num_prompts"] == 2
    assert recipe["rollout"]["group_size"] == 2
    assert recipe["rollout"]["max_tokens"] == 8
    assert recipe["train"]["lr"] == 1e-4
    assert recipe["train"]["steps"] == 2
    assert recipe["regularize"]["kl_estimator"] == "k3_weighted"
    assert recipe["aggregate"] == {"name": "constant", "length": 8}
    assert recipe["advantage"]["name"] == "centered"
    assert len(run.metrics) == 2
    with refuses(UsageError, "GRPOConfig.repetition_penalty", "GRPOConfig.use_vllm", "rollout.engine"):
        read_config_objects(
            {"args": trl.GRPOConfig(output_dir=str(tmp_path), repetition_penalty=1.1, use_vllm=True, **ON_A_CPU)}
        )
