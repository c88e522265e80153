"""Configurations of peft, TRL and transformers, given to ``pt.train`` as objects."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from peft import IA3Config, LoraConfig

import posttrain as pt
from posttrain.api.config_objects import adapter_options, read_config_objects
from posttrain.errors import PosttrainError, UsageError
from refusing import refuses


@dataclass
class SomeGRPOConfig:
    """Some fields of TRL's class of this name, with its defaults."""

    output_dir: str = "out"
    learning_rate: float = 1e-6
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    steps_per_generation: int | None = None
    num_generations: int = 8
    max_completion_length: int = 512
    num_train_epochs: float = 3.0
    max_steps: int = -1
    lr_scheduler_type: str = "linear"
    warmup_steps: float = 0
    optim: str = "adamw_torch_fused"
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    epsilon: float = 0.2
    epsilon_high: float | None = None
    scale_rewards: str | bool = "group"
    loss_type: str = "dapo"
    importance_sampling_level: str = "token"
    reward_weights: list[float] | None = None
    report_to: str | list[str] = "none"
    eval_strategy: str = "no"
    eval_steps: float | None = None
    logging_steps: float = 10
    save_strategy: str = "steps"
    save_steps: float = 500
    bf16: bool | None = None
    fp16: bool = False
    tf32: bool | None = None
    use_cpu: bool = False
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    dataloader_num_workers: int = 0

    def __post_init__(self) -> None:
        if self.steps_per_generation is None:
            self.steps_per_generation = self.gradient_accumulation_steps
        if self.bf16 is None:
            self.bf16 = not self.fp16


@dataclass
class SomeDPOConfig:
    learning_rate: float = 1e-6
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    precompute_ref_log_probs: bool = False
    beta: float = 0.1
    loss_type: list[str] = field(default_factory=lambda: ["sigmoid"])
    label_smoothing: float = 0.0
    max_length: int | None = 1024


@dataclass
class SomeSFTConfig:
    learning_rate: float = 2e-5
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    completion_only_loss: bool | None = None
    assistant_only_loss: bool = False
    packing: bool = False


def keys_of(config: Any) -> dict[str, object]:
    return read_config_objects({"args": config})[0]


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        (SomeGRPOConfig(), {}),
        (SomeGRPOConfig(min_p=0.1), {"rollout.min_p": 0.1}),
        (SomeGRPOConfig(learning_rate=1e-5, max_completion_length=64), {"train.lr": 1e-5, "rollout.max_tokens": 64}),
        (
            SomeGRPOConfig(per_device_train_batch_size=16, num_generations=4),
            {
                "rollout.group_size": 4, "rollout.num_prompts": 4,
                "train.micro_batch_rows": 16, "train.num_minibatches": 1,
            },
        ),
        (
            SomeGRPOConfig(per_device_train_batch_size=8, gradient_accumulation_steps=2, steps_per_generation=4),
            {"rollout.num_prompts": 4, "train.micro_batch_rows": 8, "train.num_minibatches": 2},
        ),
        (SomeGRPOConfig(max_steps=7), {"train.steps": 7}),
        (SomeGRPOConfig(num_train_epochs=1.5), {"train.steps": None, "train.num_epochs": 1.5}),
        (SomeGRPOConfig(lr_scheduler_type="constant_with_warmup", warmup_steps=3),
         {"train.schedule": "constant", "train.warmup_steps": 3}),
        (SomeGRPOConfig(lr_scheduler_type="cosine"), {"train.schedule": "cosine", "train.min_lr_ratio": 0.0}),
        (SomeGRPOConfig(beta=0.04), {"regularize.kl_coef": 0.04, "regularize.kl_estimator": "k3_weighted"}),
        (SomeGRPOConfig(beta=0.04, use_bias_correction_kl=False), {"regularize.kl_coef": 0.04}),
        (SomeGRPOConfig(epsilon=0.1), {"objective.clip_low": 0.1, "objective.clip_high": 0.1}),
        (SomeGRPOConfig(epsilon=0.1, epsilon_high=0.3), {"objective.clip_low": 0.1, "objective.clip_high": 0.3}),
        (SomeGRPOConfig(scale_rewards=False), {"advantage": "centered"}),
        (SomeGRPOConfig(loss_type="dr_grpo"), {"aggregate": {"name": "constant", "length": 512}}),
        (SomeGRPOConfig(loss_type="cispo"), {"objective.name": "cispo", "aggregate": "token_mean"}),
        (SomeGRPOConfig(importance_sampling_level="sequence"), {"objective.name": "gspo"}),
        (SomeGRPOConfig(report_to=["tensorboard"]), {"track": ["tensorboard"]}),
        (SomeGRPOConfig(eval_strategy="steps", eval_steps=5), {"eval.every": 5}),
        (SomeGRPOConfig(save_strategy="no"), {"train.save_every": 0}),
        (SomeGRPOConfig(bf16=False, use_cpu=True), {"train.precision": "fp32", "model.device": "cpu"}),
        (SomeGRPOConfig(adam_beta2=0.95), {"optimizer.betas": [0.9, 0.95]}),
        (SomeDPOConfig(beta=0.5, per_device_train_batch_size=4, gradient_accumulation_steps=2),
         {"objective.beta": 0.5, "data.batch_size": 8, "train.micro_batch_rows": 8}),
        (SomeDPOConfig(loss_type=["ipo"], max_length=256), {"objective.name": "ipo", "data.max_length": 256}),
        (SomeSFTConfig(assistant_only_loss=True, learning_rate=1e-4),
         {"train.lr": 1e-4, "data.train_on": "assistant"}),
    ],
)  # fmt: skip
def test_fields_that_differ_from_their_defaults_are_keys(config: Any, keys: dict[str, object]) -> None:
    assert keys_of(config) == keys


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (SomeGRPOConfig(lr_scheduler_type="polynomial"), ("polynomial", "train.schedule")),
        (SomeGRPOConfig(warmup_steps=0.1), ("warmup_steps", "train.warmup_steps")),
        (SomeGRPOConfig(reward_weights=[1.0, 2.0]), ("reward_weights", "rewards.0.weight")),
        (SomeGRPOConfig(loss_type="vespo"), ("loss_type", "vespo", "objective")),
        (SomeGRPOConfig(scale_rewards="batch"), ("scale_rewards", "advantage")),
        (SomeGRPOConfig(fp16=True), ("fp16", "train.precision")),
        (SomeGRPOConfig(optim="galore_adamw"), ("optim", "galore_adamw")),
        (SomeGRPOConfig(steps_per_generation=3, gradient_accumulation_steps=2), ("steps_per_generation",)),
        (
            SomeGRPOConfig(eval_strategy="epoch", reward_weights=[1.0, 2.0]),
            ("eval_strategy", "eval.every", "reward_weights", "2 SomeGRPOConfig fields"),
        ),
        (SomeGRPOConfig(report_to=["comet_ml"]), ("report_to", "comet_ml", "track")),
        (SomeDPOConfig(loss_type=["sigmoid", "sft"]), ("loss_type",)),
        (SomeSFTConfig(completion_only_loss=False), ("completion_only_loss", "data.train_on")),
    ],
)
def test_fields_that_no_key_takes_are_answered(config: Any, named: tuple[str, ...]) -> None:
    with refuses(UsageError, "args", *named):
        keys_of(config)


def test_fields_that_need_no_key_and_defaults_are_lines() -> None:
    _, notes = read_config_objects({"args": SomeGRPOConfig(dataloader_num_workers=4, output_dir="there")})
    text = "\n".join(notes)
    assert "dataloader_num_workers" in text
    assert "runs_dir=" in text
    assert "defaults" in text


def test_lora_config_is_the_adapter_with_all_it_says() -> None:
    keys, notes = read_config_objects(
        {"lr": 1e-4, "peft_config": LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj"])}
    )
    assert notes == []
    assert keys == {
        "lr": 1e-4,
        "model.adapter.rank": 4,
        "model.adapter.alpha": 8,
        "model.adapter.dropout": 0.1,
        "model.adapter.targets": ["q_proj"],
        "model.adapter.target_parameters": [],
        "model.adapter.use_dora": False,
        "model.adapter.use_rslora": False,
        "model.adapter.init_lora_weights": "default",
    }
    assert adapter_options("model.adapter", LoraConfig(target_modules="all-linear"))["targets"] == "all-linear"  # type: ignore[index]
    assert adapter_options("model.adapter", {"rank": 3}) == {"rank": 3}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (LoraConfig(bias="all"), ("bias", "'all'")),
        (LoraConfig(target_modules=r".*\.q_proj"), ("target_modules", "model.adapter.targets")),
        (LoraConfig(modules_to_save=["lm_head"]), ("modules_to_save",)),
        (LoraConfig(init_lora_weights="pissa"), ("init_lora_weights", "pissa")),
        (LoraConfig(rank_pattern={"q_proj": 4}), ("rank_pattern",)),
        (IA3Config(), ("IA3Config", "model.adapter")),
    ],
)
def test_adapter_that_no_key_takes_is_answered(config: Any, named: tuple[str, ...]) -> None:
    with refuses(UsageError, "peft_config", *named):
        read_config_objects({"peft_config": config})


def test_key_that_is_given_twice_and_a_configuration_as_recipe_are_refused() -> None:
    with refuses(UsageError, "train.lr", "args"):
        read_config_objects({"train.lr": 1e-3, "args": SomeGRPOConfig(learning_rate=1e-4)})
    with refuses(PosttrainError, "train.lr"):
        pt.train("tiny/sft", lr=1e-3, args=SomeSFTConfig(learning_rate=1e-4))
    with refuses(UsageError, "recipe", "args=SomeGRPOConfig"):
        pt.train(SomeGRPOConfig())  # type: ignore[arg-type]
    with refuses(PosttrainError, "objective.clip_low"):
        pt.train("tiny/sft", args=SomeGRPOConfig(epsilon=0.1))


def test_training_reads_both(tmp_path: Any) -> None:
    run = pt.train(
        "tiny/sft",
        args=SomeSFTConfig(learning_rate=3e-4, per_device_train_batch_size=2, gradient_accumulation_steps=2),
        peft_config=LoraConfig(r=2, target_modules=["q_proj"]),
        model="tiny",
        task__size=8,
        steps=1,
        eval__every=0,
        runs_dir=tmp_path,
        run="mine",
        progress=False,
    )
    train, adapter = run.recipe["train"], run.recipe["model"]["adapter"]
    assert (train["lr"], run.recipe["data"]["batch_size"], train["micro_batch_rows"]) == (3e-4, 4, 2)
    assert (adapter["rank"], adapter["alpha"], adapter["targets"]) == (2, 8.0, ["q_proj"])
