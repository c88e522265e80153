"""Names of options elsewhere lead to the key that is meant here."""

from __future__ import annotations

import re

import pytest
from pydantic import BaseModel

from posttrain import registry
from posttrain.cli import main
from posttrain.errors import RecipeError, UnknownComponent
from posttrain.other_names import _COMPONENTS, OTHER_NAMES, answer_other_name
from posttrain.recipes.recipe import COMPONENT_KINDS, Recipe, load_recipe

KEY = re.compile(r"\b(?:[a-z]\w+\.)+[a-z]\w+\b")


def is_key(key: str) -> bool:
    """Return whether a recipe has the key, or an option of some component that may stand there."""
    if key.startswith("--") or key == "tools":
        return True
    model: type[BaseModel] = Recipe
    parts = key.split(".")
    for i, part in enumerate(parts):
        if part.isdigit() or part == "NAME":  # an entry of a list
            continue
        path = ".".join(parts[:i])
        if path in COMPONENT_KINDS or path in ("rewards.0", "rewards.NAME"):
            kind = COMPONENT_KINDS.get(path, "reward")
            found = (part in entry.options_model.model_fields for entry in registry.entries(kind).values())
            return part in ("name", "weight") or any(found)
        if part not in model.model_fields:
            return False
        kinds = [model.model_fields[part].annotation, *getattr(model.model_fields[part].annotation, "__args__", ())]
        model = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), model)
    return True


def test_other_names_lead_to_keys_that_exist() -> None:
    named = {key for answer in OTHER_NAMES.values() for key in (KEY.findall(answer) if " " in answer else [answer])}
    keys = {key for key in named if not key.endswith((".jsonl", ".json"))}
    assert len(keys) > 60
    assert [key for key in sorted(keys) if not is_key(key)] == []


# Names that people type, from TRL, transformers, verl, vLLM, peft and Unsloth, and a word of the right answer.
KNOWN = """
learning_rate train.lr | max_steps train.steps | num_train_epochs train.num_epochs | num_epochs train.num_epochs
per_device_train_batch_size train.micro_batch_rows | gradient_accumulation_steps data.batch_size
micro_batch_size train.micro_batch_rows | batch_size data.batch_size | save_steps train.save_every
save_total_limit train.keep_checkpoints | eval_steps eval.every | logging_steps metrics.jsonl
lr_scheduler_type train.schedule | lr_scheduler train.schedule | warmup_ratio train.warmup_steps
weight_decay optimizer.weight_decay | betas optimizer.betas | max_grad_norm train.max_grad_norm
clip_grad train.max_grad_norm | bf16 train.precision | torch_dtype model.dtype | num_generations rollout.group_size
n rollout.group_size | group_size rollout.group_size | num_samples_per_prompt rollout.group_size
max_completion_length rollout.max_tokens | max_new_tokens rollout.max_tokens | max_response_length rollout.max_tokens
max_prompt_length prompt.max_prompt_tokens | max_length data.max_length | max_seq_length data.max_length
beta regularize.kl_coef | kl_coef regularize.kl_coef | epsilon objective.clip_low | epsilon_high objective.clip_high
clip_ratio objective.clip_low | clip_range objective.clip_high | loss_type objective | scale_rewards advantage
num_iterations train.ppo_epochs | ppo_epochs train.ppo_epochs | ppo_mini_batch_size train.num_minibatches
reward_funcs rewards | reward_weights rewards.NAME.weight | lora_r model.adapter.rank | r model.adapter.rank
lora_rank model.adapter.rank | lora_alpha model.adapter.alpha | lora_dropout model.adapter.dropout
target_modules model.adapter.targets | load_in_4bit model.load_bits | load_in_8bit model.load_bits
attn_implementation model.attention | report_to track | output_dir --runs-dir | run_name --run
num_processes scale.processes | nproc_per_node scale.processes | world_size scale.processes | num_gpus scale.processes
fsdp scale.sharding | use_vllm rollout.engine | vllm_mode rollout.engine | tensor_parallel_size rollout.engine.gpus
gpu_memory_utilization rollout.engine.gpu_memory_utilization | dataset task.path | dataset_name task.path
env environment | packing packed | filter_groups rollout.drop_uniform_groups | seed train.seed
dynamic_sampling rollout.drop_uniform_groups | resume_from_checkpoint --resume | model_name_or_path model.name
"""
# The same of names from the documentation of TRL, verl, Unsloth and Axolotl.
DOCUMENTED = """
algorithm.filter_groups.enable rollout.drop_uniform_groups | algorithm.kl_ctrl.kl_coef kl_in_reward.weight
actor_rollout_ref.actor.ppo_mini_batch_size train.num_minibatches | data.train_batch_size rollout.num_prompts
actor_rollout_ref.rollout.n rollout.group_size | actor_rollout_ref.rollout.name rollout.engine
actor_rollout_ref.actor.use_dynamic_bsz train.micro_batch_tokens | critic.optim.lr head.lr_ratio
actor_rollout_ref.actor.fsdp_config.param_offload scale.sharding | trainer.total_epochs train.num_epochs
trainer.test_freq eval.every | trainer.val_before_train before the first step | trainer.project_name track
reward_model.enable rewards | custom_reward_function.path rewards | data.filter_overlong_prompts left out and counted
sequence_len data.max_length | sample_packing packed | lora_target_linear model.adapter.targets
val_set_size task.validation_share | saves_per_epoch train.save_every | datasets task | special_tokens tokenizer
per_device_eval_batch_size eval.num_examples | gradient_checkpointing train.gradient_checkpointing
optim optimizer | adam_beta1 optimizer.betas | push_to_hub runs export | eval_strategy eval.every
ddp_timeout scale.timeout_seconds | deepspeed scale.sharding | dataloader_num_workers before the first step
top_entropy_quantile not offered | mask_truncated_completions rollout.mask_truncated | reference_free simpo
label_smoothing objective.label_smoothing | precompute_ref_log_probs computed once | sync_ref_model reference
vllm_gpu_memory_utilization rollout.engine.gpu_memory_utilization | steps_per_generation train.num_minibatches
generation_batch_size rollout.num_prompts | remove_unused_columns meta | rpo_alpha objective.nll_weight
dataset_text_field task.prompt_key | importance_sampling_level gspo | use_rslora model.adapter.use_rslora
random_state train.seed | full_finetuning model.adapter | fast_inference rollout.engine
actor_rollout_ref.actor.optim.min_lr_ratio train.min_lr_ratio | critic.optim.warmup_style train.schedule
actor_rollout_ref.actor.optim.lr_warmup_steps train.warmup_steps | max_critic_ckpt_to_keep train.keep_checkpoints
algorithm.rollout_correction.rollout_is_threshold correction | algorithm.rollout_correction.rollout_rs correction
actor_rollout_ref.rollout.multi_turn.max_user_turns rollout.max_turns | data.gen_batch_size rollout.num_prompts
algorithm.filter_groups.max_num_gen_batches rollout.max_rounds | algorithm.filter_groups.metric rollout.uniform_by
actor_rollout_ref.rollout.val_kwargs.n eval.samples | actor_rollout_ref.rollout.val_kwargs.temperature eval.temperature
actor_rollout_ref.rollout.val_kwargs.top_p eval.top_p | algorithm.kl_penalty kl_in_reward.estimator
algorithm.kl_ctrl.horizon kl_in_reward.horizon | actor_rollout_ref.model.path model.name
reward_model.model.path rewards
critic.model.path head.trunk | reward_model.overlong_buffer.len overlong | trainer.val_only posttrain evaluate
trainer.resume_from_path --resume | trainer.log_val_generations recorded in the run | trainer.rollout_data_dir recorded
actor_rollout_ref.ref.log_prob_micro_batch_size train.micro_batch_rows | actor_rollout_ref.rollout.max_num_seqs vLLM
actor_rollout_ref.actor.ulysses_sequence_parallel_size not offered | actor_rollout_ref.actor.tau_pos tau_positive
simpo_gamma objective.gamma | orpo_alpha objective.odds_weight | center_rewards_coefficient objective.centering
sapo_temperature_neg objective.tau_negative | num_generations_eval eval.samples | lmbda on_policy_distillation
num_completions_to_print recorded in the run | ref_model_sync_steps reference | vllm_importance_sampling_mode correction
base_model_config model.name | lora_model_dir model.name | max_lora_rank model.adapter.rank | rl_beta objective.beta
peft_init_lora_weights model.adapter.init_lora_weights | lora_target_parameters model.adapter.target_parameters
cosine_min_lr_ratio train.min_lr_ratio | xformers_attention model.attention | chat_template_jinja prompt.template
roles_to_train data.train_on | excess_length_strategy left out and counted | process_reward_model objective: process
use_tensorboard track | wandb_entity track | auto_resume_from_checkpoints --resume | save_method runs export
quantization_method posttrain quantize | early_stopping_patience eval.best | save_safetensors safetensors
noisy_embedding_alpha not offered | logging_dir --runs-dir | datasets.split task.split | data.path task.path
"""


def answers(table: str) -> dict[str, str]:
    """Return the word of the right answer by name."""
    rows = (row.strip().partition(" ") for row in table.replace("\n", "|").split("|") if row.strip())
    return {name: word for name, _, word in rows}


@pytest.mark.parametrize(("table", "least"), [(KNOWN, 74), (DOCUMENTED, 106)])
def test_names_of_other_libraries_lead_to_the_right_key(table: str, least: int) -> None:
    wanted = answers(table)
    assert len(wanted) >= least
    assert {n: answer_other_name(n) for n, word in wanted.items() if word not in answer_other_name(n)} == {}


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("train.learning-rate", "This is called train.lr here."),
        ("trainer.total_epochs", "This is called train.num_epochs here."),
        ("actor_rollout_ref.rollout.n", "This is called rollout.group_size here."),
        ("beta", "Here it is objective.beta for preferences (dpo)"),
        ("packing", "There is no such key here, and none is needed: rows are always packed"),
        ("output_dir", "This is called --runs-dir here."),
    ],
)
def test_unknown_key_with_a_name_of_others_is_answered(
    name: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer in answer_other_name(name)
    with pytest.raises(RecipeError, match=re.escape(answer)):
        load_recipe("tiny/grpo", [(name.replace("-", "_"), "1")])
    assert main(["train", "tiny/grpo", f"--{name}", "1"]) == 2
    assert answer in " ".join(capsys.readouterr().err.split())


def test_name_that_is_ours_is_not_answered() -> None:
    assert answer_other_name("train.num_epochs") == answer_other_name("objective") == answer_other_name("nothing") == ""
    assert answer_other_name("model.adapter.nothing") == "", "a key of ours, whose section is no name of others"


@pytest.mark.parametrize(
    ("kind", "name", "ours"),
    [
        ("reward", "accuracy_reward", "correct"),
        ("reward", "think_format_reward", "xml_format"),
        ("objective", "sigmoid", "dpo"),
        ("advantage", "RLOO", "leave_one_out"),
        ("task", "json", "jsonl"),
    ],
)
def test_component_that_is_called_otherwise_elsewhere_is_answered_by_name(kind: str, name: str, ours: str) -> None:
    with pytest.raises(UnknownComponent, match=f"This is called {ours} here"):
        registry.find(kind, name)


def test_components_of_the_table_exist() -> None:
    assert {
        (kind, ours) for kind, rows in _COMPONENTS.items() for ours in rows if ours not in registry.names(kind)
    } == set()
