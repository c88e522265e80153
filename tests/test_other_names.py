"""Names of other libraries lead to the key that is meant here, and to a value that it takes, or are not offered."""

from __future__ import annotations

import re
from functools import cache

import pytest
import yaml
from pydantic import BaseModel

from names_and_values import BASES, GIVEN_ELSEWHERE, OTHER_VALUES, VALUES
from names_of_configurations import CONFIGURATIONS
from posttrain import registry
from posttrain.api.inputs import overrides_of
from posttrain.cli import main
from posttrain.errors import PosttrainError, RecipeError, UnknownComponent
from posttrain.other_names import OTHER_NAMES, answer_other_name, answer_spelling, answer_value
from posttrain.other_names.absent import METHODS, OPTIONS
from posttrain.other_names.answers import SAID
from posttrain.other_names.command_names import COMPONENTS
from posttrain.other_names.keys import CARRIERS, FAMILIES, KEYS
from posttrain.other_names.not_needed import NOT_NEEDED
from posttrain.other_names.terms import TERMS
from posttrain.recipes.recipe import COMPONENT_KINDS, Recipe, load_recipe
from posttrain.registry import suggest_key

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
    keys = {key for key in named if not key.endswith((".jsonl", ".json")) and not key.startswith("pt.")}
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
dataset_text_field prompt.template: document | importance_sampling_level gspo | use_rslora model.adapter.use_rslora
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
simpo_gamma {name: simpo | orpo_alpha objective.odds_weight | center_rewards_coefficient objective.centering
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

# The same from the documentation of open-instruct, prime-rl, OpenRLHF, vLLM, peft and of classes.
FURTHER = """
load_best_model_at_end checkpoints/best | dataset_mixer_list mixture | num_unique_prompts_rollout rollout.num_prompts
num_samples_per_prompt_rollout rollout.group_size | max_prompt_token_length prompt.max_prompt_tokens
response_length rollout.max_tokens | pack_length rollout.max_total_tokens | total_episodes train.steps
async_steps rollout.staleness | clip_higher objective.clip_high | clip_lower objective.clip_low
truncated_importance_sampling_ratio_cap token_tis | filter_zero_std_samples rollout.drop_uniform_groups
active_sampling rollout.drop_uniform_groups | apply_verifiable_reward rewards | llm_judge_model judge
non_stop_penalty truncated | ground_truths_key task.answer_key | sft_messages_key task.messages_key
vllm_num_engines rollout.engine.gpus | num_learners_per_node scale.processes | deepspeed_stage scale.sharding
local_eval_every eval.every | checkpoint_state_freq train.save_every | keep_last_n_checkpoints train.keep_checkpoints
with_tracking track | max_train_steps train.steps | use_lora model.adapter | use_qlora model.load_bits
reduce_loss aggregate | clip_grad_norm train.max_grad_norm | dpo_beta objective.beta | use_8bit_optimizer adamw_8bit
dpo_loss_type objective | max_async_level rollout.staleness | max_off_policy_steps rollout.staleness
rollouts_per_example rollout.group_size | ckpt.interval train.save_every | ckpt.keep_last train.keep_checkpoints
ckpt.resume_step --resume | model.attn model.attention | model.ac train.gradient_checkpointing | optim.lr train.lr
optim.type optimizer | optim.max_norm train.max_grad_norm | scheduler.type train.schedule | model.cp not offered
eval.interval eval.every | eval.rollouts_per_example eval.samples | env.id environment | model.compile layers run
buffer.online_difficulty_filtering rollout.drop_uniform_groups | max_concurrent rollout.engine.concurrency
sampling.repetition_penalty not offered | seq_len data.max_length | loss.kl_tau regularize.kl_coef
train.micro_batch_size train.micro_batch_rows | rollout.n_samples_per_prompt rollout.group_size
algo.kl.init_coef kl_in_reward.weight | algo.advantage.estimator advantage | actor.eps_clip objective.clip_low
critic.value_clip objective.value_clip | ds.zero_stage scale.sharding | ds.ring_attn_size not offered
data.input_key task.prompt_key | data.label_key task.answer_key | train.enable_ema not offered
reward.remote_url reward_model | algo.dynamic_filtering_enable rollout.drop_uniform_groups
min_tokens not offered | stop_token_ids not offered | presence_penalty not offered | best_of not offered
enable_prefix_caching share | max_num_seqs serve-command | served_model_name rollout.engine.served_name
pipeline_parallel_size not offered | logprobs stored | enable_lora model.adapter | modules_to_save not offered
rank_pattern not offered | loftq_config not offered | layers_to_transform not offered | task_type not offered
sync_ref_model not offered | gradient_checkpointing_kwargs train.gradient_checkpointing
compute_metrics not offered | callbacks on_step= | early_stopping_patience on_evaluation= | hub_token runs export
warmup_ratio train.warmup_steps | label_smoothing_factor not offered | group_by_length packed | use_cpu model.device
GRPOTrainer rl/grpo | SFTTrainer tiny/sft | DPOTrainer preference/dpo | LoraConfig model.adapter | QLoRA model.load_bits
RLVR correct | RLHF hh-gpt2 | early_stopping on_evaluation= | EMA not offered | reward_hacking overoptimization
KL_penalty regularize.kl_coef | prefix_caching share | pass@k eval.samples | trackio not offered | gdpo not offered
SamplingParams rollout.temperature | BitsAndBytesConfig model.load_bits | FastLanguageModel model.name
TrainingArguments posttrain recipes | DataCollatorForCompletionOnlyLM data.train_on | reward_funcs rewards
"""

# The same of families of options, of sections, and of what is not offered, from axolotl, verl, LLaMA-Factory, ms-swift,
# prime-rl and torchtune.
FAMILIES_AND_SECTIONS = """
galore_update_interval not offered | badam_mode not offered | apollo_rank not offered | vera_rank not offered
image_max_pixels text only | video_fps text only | freeze_vit not offered | vit_lr text only | mm_tokens text only
fsdp_sync_module_states scale.sharding | fsdp_config.min_num_params scale.sharding | fsdp_new_option scale.sharding
fsdp_activation_checkpointing train.gradient_checkpointing | deepspeed_autotp_size scale.sharding
actor_rollout_ref.actor.profiler.ranks profiler of yours | global_profiler.tool profiler of yours
actor_rollout_ref.actor.megatron.use_mbridge not offered | actor.megatron.recompute_method gradient_checkpointing
algorithm.rollout_is_level correction | algorithm.pf_ppo.weight_pow not offered | buffer.hash_keys not offered
vllm_top_k rollout.top_k | vllm_max_num_seqs serve-command | vllm_new_option serve-command
vllm.serve_module serve-command | swanlab_workspace not offered | comet_experiment_key not offered | wandb_org track
log.json_logging notices are short | unsloth_rope no kernel | liger_rms_norm no kernel | liger_cross_entropy in pieces
tokenizer._component_ model.name | lr_scheduler._component_ train.schedule | qat.quantize_embedding not offered
export_quantization_bit quantize | pref_beta objective.beta | pref_loss objective
kto_rejected_weight undesirable_weight | quantization_bit model.load_bits | grpo_samples rollout.group_size
max_generated_tokens rollout.max_tokens | dynamic_sample drop_uniform_groups | soft_cache_length overlong
cosine_max_len not offered | chord_mu_peak not offered | finetuning_type model.adapter
reward_model.overlong_buffer.penalty_factor overlong | data.multiturn.enable data.train_on
step_separator task.step_separator | loss.token_mask_high icepop | ckpt.weights_only runs export
client.headers serve-command | strict refused
"""


def answers(table: str) -> dict[str, str]:
    """Return the word of the right answer by name."""
    rows = (row.strip().partition(" ") for row in table.replace("\n", "|").split("|") if row.strip())
    return {name: word for name, _, word in rows}


@pytest.mark.parametrize(
    ("table", "least"), [(KNOWN, 74), (DOCUMENTED, 106), (FURTHER, 115), (FAMILIES_AND_SECTIONS, 50)]
)
def test_names_of_other_libraries_lead_to_the_right_key(table: str, least: int) -> None:
    wanted = answers(table)
    assert len(wanted) >= least
    said = {name: answer_other_name(name) or answer_spelling(name) for name in wanted}
    assert {name: said[name] for name, word in wanted.items() if word not in said[name]} == {}


@pytest.mark.parametrize("library", CONFIGURATIONS)
def test_every_key_of_a_configuration_elsewhere_is_answered(library: str) -> None:
    names = CONFIGURATIONS[library].split()
    assert len(names) > 40
    assert [name for name in names if not (answer_other_name(name) or answer_spelling(name))] == []


def test_families_have_an_answer_and_take_no_key_of_ours() -> None:
    assert [name for name in {**FAMILIES, **CARRIERS} if name not in OTHER_NAMES] == []
    keys = {key.rpartition(".")[2] for key in KEYS} | set(Recipe.model_fields)
    assert {key: answer_other_name(key) for key in keys if key not in OTHER_NAMES and answer_other_name(key)} == {}
    for key in ("model.adapter.nothing", "rollout.engine.nothing", "train.nothing", "eval.nothing"):
        assert answer_other_name(key) == ""


@pytest.mark.parametrize("name", ["strikt", "galor", "log", "client", "weight"])
def test_unknown_name_is_no_beginning_of_a_name_elsewhere(name: str) -> None:
    assert "_" not in suggest_key(name, Recipe.model_fields).partition("Did you mean ")[2].partition("?")[0]


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("train.learning-rate", "This is called train.lr here."),
        ("trainer.total_epochs", "This is called train.num_epochs here."),
        ("actor_rollout_ref.rollout.n", "This is called rollout.group_size here."),
        ("beta", "Here it is objective.beta for preferences (dpo)"),
        ("packing", "There is no such key here, and none is needed: rows are always packed"),
        ("output_dir", "Here it is --runs-dir; in Python runs_dir=."),
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
    assert answer_other_name("train.num_epochs") == answer_other_name("objective") == answer_other_name("qwertz") == ""
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
    first = {
        (kind, re.split(r"[,:]", ours.removeprefix("{name: "))[0]) for kind, rows in COMPONENTS.items() for ours in rows
    }
    assert {(kind, ours) for kind, ours in first if ours not in registry.names(kind)} == set()


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("use_flash_attention", "model.attention: flash_attention_2"),
        ("grad_accumulation", "data.batch_size"),
        ("beta_1", "optimizer.betas"),
        ("ppo_clip_eps", "objective.clip_low"),
        ("actor_num_nodes", "scale.processes"),
        ("entropy_coeffs", "regularize.entropy_coef"),
        ("n_gpus", "scale.processes"),
    ],
)
def test_another_spelling_of_a_name_of_the_table_is_answered(name: str, ours: str) -> None:
    assert name not in OTHER_NAMES
    assert ours in suggest_key(name, Recipe.model_fields)


def test_a_name_has_one_answer() -> None:
    tables = (KEYS, SAID, NOT_NEEDED, OPTIONS, METHODS, TERMS)
    listed = [name for table in tables for names in table.values() for name in names.split()]
    assert len(listed) > 2000
    assert sorted({name for name in listed if listed.count(name) > 1}) == []


def accepts(base: str, key: str, value: str) -> str:
    """Return nothing if a recipe takes the value, else what it says."""
    recipe, before = BASES[base]
    try:
        load_recipe(recipe, [*before.items(), (key, value)]).resolve()
    except PosttrainError as error:
        return str(error)
    return ""


def test_every_key_of_the_table_takes_the_value_that_is_given_elsewhere() -> None:
    assert VALUES.keys() == KEYS.keys()
    named = {(key, OTHER_VALUES[name]) for key, names in KEYS.items() for name in names.split() if name in OTHER_VALUES}
    tried = {*((key, value) for key, (_, value) in VALUES.items()), *named}
    assert {(key, value): said for key, value in tried if (said := accepts(VALUES[key][0], key, value))} == {}
    assert "constant_with_warmup" in accepts("rollout", "train.schedule", "constant_with_warmup")


@cache
def given_elsewhere(key: str, value: str) -> str:
    """Return nothing if a recipe takes the value or says what to give in its place, else what it says."""
    said = accepts(VALUES.get(key, ("rollout", ""))[0], key, value)
    (parsed,) = yaml.safe_load(f"[{value}]")
    answered = answer_value(key, parsed)
    is_answered = re.search(r"This is called|Here it is|not offered|Did you mean|give 'steps' or", said) is not None
    if not said or is_answered or (answered and answered in said):
        return ""
    return said


@pytest.mark.parametrize("library", CONFIGURATIONS)
def test_key_of_a_name_elsewhere_takes_what_is_given_there_or_says_what_to_give(library: str) -> None:
    found = {}
    for name in CONFIGURATIONS[library].split():
        leads = re.fullmatch(r" This is called (\S+) here\.", answer_other_name(name) or answer_spelling(name))
        if leads is not None:
            found[name] = leads[1]
    assert len(found) > 4
    assert {name: key for name, key in found.items() if key not in GIVEN_ELSEWHERE} == {}
    refused = {}
    for name, key in found.items():
        for value in GIVEN_ELSEWHERE[key].split(" | "):
            refused[name, key, value] = given_elsewhere(key, value)
    assert {one: said for one, said in refused.items() if said} == {}


# Names that are spelled as one of ours and mean something else, with a word of the answer.
OTHER_MEANING = """
qat.group_size not offered | quantization.group_size not offered | profiler.warmup_steps not offered
num_rollout train.steps | alpha of LoRA | adapter_name one adapter | n_shot not offered
prompt_format task.prompt_format
reward_model.sandbox_fusion.max_concurrent code_tests | reward.reward_model.model_path reward_model
distillation.teacher_model.model_path teacher.name | distillation.teacher_models teacher.name
env.timeout tool_seconds
weight_broadcast.timeout rollout.engine.timeout_seconds | reward_model.n_gpus_per_node none is needed
distillation.n_gpus_per_node not offered | actor_rollout_ref.rollout.n_gpus_per_node rollout.engine.gpus
actor_rollout_ref.model.lora.dtype none is needed | vllm.dtype rollout.engine.dtype | client.base_url one address
inference.model.dtype rollout.engine.dtype | trl.skip_zero_advantage_batches train.skip_zero_rows
test_datasets name: jsonl | eval.env name: jsonl | data.val_files name: jsonl | dataset_mixer_list_splits task: mixture
"""


def test_name_that_means_something_else_is_answered_by_its_section() -> None:
    wanted = answers(OTHER_MEANING)
    assert {name: answer_other_name(name) for name, word in wanted.items() if word not in answer_other_name(name)} == {}


# A key with its value in a sentence: ``model.load_bits: 4``, ``track: {name: wandb, project: NAME}``.
SET = re.compile(
    r"\b((?:[a-z]\w*\.)*[a-z]\w*): (\{.*?\}(?=[,;) ]|$)|\[.*?\]|(?:true|null|\d+|[a-z0-9][\w.-]*\w)\b)(?!:)"
)
# Values that need a second key, which the refusal names.
INCOMPLETE = {("task", "jsonl"): "task.path", ("task", "preferences"): "task.path", ("task", "mixture"): "task.parts"}


def test_every_value_in_a_sentence_of_the_table_is_taken_by_a_recipe() -> None:
    answers = {*OTHER_NAMES.values(), *(ours for rows in COMPONENTS.values() for ours in rows)}
    pairs = {pair for answer in answers for pair in SET.findall(answer) if pair[0].split(".")[0] in Recipe.model_fields}
    pairs = {(key, value) for key, value in pairs if "module:function" not in value and value not in ("module", "the")}
    assert len(pairs) > 60
    refused = {}
    for pair in pairs:
        said = [accepts(base, *pair) for base in BASES]
        if all(said) and INCOMPLETE.get(pair, "?") not in " ".join(said):
            refused[pair] = said[0]
    assert refused == {}


# Methods, optimizers, trackers and engines of 2026 that we do not have, by the kind of component.
ABSENT = {
    "objective": "gdpo gfpo a2po vespo opsd sdft xpo tdpo dpop r-dpo beta-dpo wpo spin npo simnpo",
    "advantage": "gdpo vapo opo gpg remax",
    "optimizer": "sophia shampoo soap sgd schedule_free apollo came",
    "tracker": "mlflow trackio clearml swanlab comet_ml neptune aim dvclive",
    "engine": "sglang tgi lmdeploy ollama llamacpp hf trtllm",
    "reward": "cosine_scaled_reward get_repetition_penalty_reward tag_count_reward rouge",
    "task": "gpqa mmlu_pro livecodebench aime26 gsm8k_platinum humaneval_plus arc hellaswag",
}
# Names that no table has, similar to a name of ours.
UNHEARD = {
    "objective": "gxpo hgrpo zdpo grpo2 gqpo rapo ktpx",
    "optimizer": "muonx adakron",
    "tracker": "dashx",
    "task": "gsm9",
}


@pytest.mark.parametrize("kind", ABSENT)
def test_component_that_we_do_not_have_is_not_offered(kind: str) -> None:
    for name in ABSENT[kind].split():
        with pytest.raises(UnknownComponent, match="not offered") as caught:
            registry.find(kind, name)
        assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize("kind", UNHEARD)
def test_unknown_component_gets_no_look_alike(kind: str) -> None:
    for name in UNHEARD[kind].split():
        with pytest.raises(UnknownComponent) as caught:
            registry.find(kind, name)
        assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize("name", ["sync_ref_model", "num_generations", "sglang", "GRPOTrainer", "learnig_rate"])
def test_a_name_has_the_same_answer_in_recipe_command_python_and_explain(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = answer_other_name(name) or answer_other_name("learning_rate")
    with pytest.raises(RecipeError) as in_recipe:
        load_recipe("tiny/grpo", [(name, "1")])
    with pytest.raises(RecipeError) as in_python:
        overrides_of({name: 1})
    assert main(["train", "tiny/grpo", f"--{name}", "1"]) == 2
    command = " ".join(capsys.readouterr().err.split())
    main(["explain", name])
    captured = capsys.readouterr()
    explained = " ".join((captured.out + captured.err).split())
    said = [str(in_recipe.value), str(in_python.value), command, explained]
    assert [one for one in said if answer.strip() not in one] == []
