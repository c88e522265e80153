"""Names of options in TRL, transformers, verl, vLLM, peft, Unsloth and Axolotl, with what is called so here.

A recipe that uses one of them is refused with the key that is meant, and ``posttrain explain NAME`` answers.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

# Our key by the names that others give it.
_CALLED = {
    "train.lr": "learning_rate lr actor_lr optim_lr",
    "train.steps": "max_steps total_training_steps total_steps num_steps n_grpo_steps train_iters",
    "train.num_epochs": "num_train_epochs num_epochs total_epochs epochs n_epochs passes",
    "train.ppo_epochs": "num_iterations ppo_epochs num_ppo_epochs epochs_per_rollout_batch",
    "train.num_minibatches": "num_mini_batches num_minibatches minibatches",
    "train.micro_batch_rows": (
        "micro_batch_size micro_train_batch_size per_device_train_batch_size micro_batch_size_per_gpu "
        "ppo_micro_batch_size ppo_micro_batch_size_per_gpu rows_per_micro local_batch_size"
    ),
    "train.micro_batch_tokens": "ppo_max_token_len_per_gpu max_tokens_per_gpu tokens_per_micro max_token_len_per_gpu",
    "train.save_every": ("save_steps save_freq save_interval checkpoint_interval save_strategy ckpt_interval"),
    "train.keep_checkpoints": "save_total_limit max_ckpt_to_keep keep max_ckpt_num max_actor_ckpt_to_keep",
    "train.schedule": "lr_scheduler_type lr_scheduler lr_schedule scheduler lr_decay_style lr_warmup_style",
    "train.warmup_steps": "warmup_ratio lr_warmup_steps lr_warmup_steps_ratio num_warmup_steps warmup",
    "train.min_lr_ratio": "min_lr lr_min min_lr_rate",
    "train.max_grad_norm": "max_grad_norm clip_grad gradient_clipping gradient_clip_val grad_clip max_norm",
    "train.gradient_checkpointing": (
        "gradient_checkpointing use_gradient_checkpointing enable_gradient_checkpointing activation_checkpointing"
    ),
    "train.precision": "bf16 fp16 mixed_precision tf32 amp",
    "train.seed": "seed data_seed random_state random_seed",
    "train.deterministic": "full_determinism deterministic",
    "optimizer": "optim optimizer_type optimizer_name",
    "optimizer.weight_decay": "weight_decay wd",
    "optimizer.betas": "betas adam_betas adam_beta1 adam_beta2 beta1 beta2",
    "optimizer.eps": "adam_epsilon adam_eps",
    "eval.every": ("eval_steps eval_strategy evaluation_strategy test_freq eval_interval eval_every val_interval"),
    "eval.num_examples": "max_eval_samples num_eval_samples limit eval_samples",
    "eval.num_kl_prompts": "drift_prompts",
    "eval.best": "metric_for_best_model load_best_model_at_end early_stopping_metric",
    "eval.tasks": "eval_dataset test_datasets val_files eval_tasks",
    "rollout.group_size": (
        "num_generations n group_size num_samples_per_prompt n_samples_per_prompt rollout_n num_return_sequences "
        "n_samples group samples_per_prompt num_completions_to_sample"
    ),
    "rollout.num_prompts": "rollout_batch_size prompts num_prompts train_batch_size prompts_per_step num_groups",
    "rollout.max_tokens": (
        "max_completion_length max_new_tokens max_response_length response_length max_gen_len generate_max_len"
    ),
    "rollout.max_total_tokens": "max_model_len max_total_length max_sequence_length",
    "rollout.temperature": "temperature sampling_temperature",
    "rollout.top_p": "top_p",
    "rollout.top_k": "top_k",
    "rollout.engine": "use_vllm vllm_mode generation_backend rollout_engine fast_inference inference_engine",
    "rollout.engine.url": "vllm_server_host vllm_server_port vllm_server_base_url base_url server_url",
    "rollout.engine.gpu_memory_utilization": "gpu_memory_utilization vllm_gpu_memory_utilization gpu_memory",
    "rollout.engine.gpus": "tensor_parallel_size tensor_model_parallel_size vllm_tensor_parallel_size num_engines",
    "rollout.engine.enforce_eager": "enforce_eager",
    "rollout.drop_uniform_groups": "filter_groups dynamic_sampling filter_zero_std dynamic_filtering",
    "rollout.mask_truncated": "mask_truncated_completions overlong_filtering mask_truncated",
    "rollout.staleness": "async_level max_staleness async_steps max_off_policy_steps off_policy_steps",
    "rollout.engine.max_model_len": "vllm_max_model_length",
    "rollout.max_turns": "max_turns max_tool_calling_iterations max_assistant_turns max_steps_per_episode",
    "prompt.max_prompt_tokens": "max_prompt_length prompt_max_len max_prompt_len",
    "prompt.template": "chat_template prompt_template apply_chat_template template chat_template_path",
    "data.batch_size": "batch_size global_batch_size gradient_accumulation_steps gradient_accumulation accumulation",
    "data.max_length": "max_length max_seq_length sequence_len cutoff_len max_seq_len seq_len max_len seq_length",
    "data.train_on": "completion_only_loss assistant_only_loss train_on_inputs train_on_responses_only mask_prompt",
    "task": "dataset dataset_name train_dataset datasets train_files dataset_id data_path train_data",
    "task.split": "dataset_split dataset_train_split train_split",
    "task.validation_share": "val_set_size test_size eval_split_ratio validation_split",
    "task.prompt_key": "prompt_key dataset_text_field field_instruction input_key question_key",
    "task.response_key": "response_key output_key field_output",
    "task.answer_key": "answer_key label_key",
    "task.size": "max_samples num_samples max_train_samples subset_size dataset_size",
    "environment": "env environment_factory environment_name env_name envs vf_env",
    "tools": "tools tool_config multi_turn",
    "rewards": (
        "reward_funcs reward_function reward_fn custom_reward_function reward_model reward_model_path "
        "reward_funcs_path reward_manager"
    ),
    "rewards.0.weight": "reward_weights reward_weight",
    "objective": "loss_type rl loss policy_loss algorithm rl_algorithm loss_fn",
    "objective.clip_low": "epsilon clip_ratio clip_range cliprange clip_ratio_low clip_eps eps_clip ppo_clip clip_coef",
    "objective.clip_high": "epsilon_high clip_ratio_high eps_clip_high clip_high",
    "objective.label_smoothing": "label_smoothing label_smoothing_factor",
    "objective.desirable_weight": "desirable_weight",
    "objective.undesirable_weight": "undesirable_weight",
    "objective.nll_weight": "rpo_alpha cpo_alpha sft_weight",
    "advantage": "scale_rewards advantage_estimator adv_estimator advantage_normalization norm_adv_by_std_in_grpo",
    "advantage.gamma": "gamma discount discount_factor",
    "advantage.gae_lambda": "lam gae_lambda lambda lambd",
    "aggregate": "loss_agg_mode loss_aggregation loss_reduction normalize_loss",
    "correction": (
        "vllm_importance_sampling_correction tis_imp_ratio_cap truncated_importance_sampling rollout_is "
        "vllm_importance_sampling_cap"
    ),
    "regularize.kl_coef": "kl_coef kl_loss_coef kl_beta kl kl_penalty use_kl_loss kl_weight",
    "regularize.kl_estimator": "kl_estimator kl_loss_type kl_type",
    "regularize.entropy_coef": "entropy_coef entropy_coeff ent_coef entropy_bonus entropy_loss_coef",
    "kl_in_reward.weight": "init_kl_coef use_kl_in_reward kl_ctrl kl_in_reward_coef",
    "kl_in_reward.target": "target_kl kl_target",
    "model.name": (
        "model_name_or_path model_name pretrained_model_name_or_path model_id base_model pretrain model_path pretrained"
    ),
    "model.dtype": "torch_dtype dtype model_dtype bnb_4bit_compute_dtype",
    "model.load_bits": "load_in_4bit load_in_8bit quantization bits quantization_config",
    "model.attention": "attn_implementation use_flash_attention_2 flash_attention flash_attn attention_implementation",
    "model.device": "device device_map",
    "--trust-remote-code": "trust_remote_code",
    "model.adapter": "use_peft peft_config lora peft_type adapter",
    "model.adapter.rank": "lora_r r lora_rank rank",
    "model.adapter.alpha": "lora_alpha alpha",
    "model.adapter.dropout": "lora_dropout",
    "model.adapter.targets": "target_modules lora_target_modules lora_target lora_target_linear",
    "model.adapter.use_rslora": "use_rslora",
    "model.adapter.use_dora": "use_dora peft_use_dora",
    "teacher.name": "teacher_model_name_or_path teacher_model teacher_model_path ref_model",
    "scale.processes": "num_processes nproc_per_node world_size num_gpus n_gpus_per_node ngpus num_workers nnodes",
    "scale.timeout_seconds": "ddp_timeout nccl_timeout timeout",
    "scale.sharding": "fsdp deepspeed zero_stage strategy fsdp_config distributed_strategy fsdp_version",
    "track": "report_to logger use_wandb loggers log_with wandb_mode wandb_project project_name",
    "--run": "run_name experiment_name wandb_name exp_name wandb_run_name",
    "--runs-dir": "output_dir default_local_dir save_path save_dir checkpoint_dir outputs",
    "--resume": "resume_from_checkpoint resume_mode resume auto_resume load_checkpoint_path resume_from",
}
# What has no key here, or more than one, and why. A name with a section holds there alone.
_ANSWERS = {
    "train.epochs": "train.num_epochs (passes over the data) or train.ppo_epochs (over a rollout batch)",
    "eval.n": "eval.num_examples",
    "data.batch": "data.batch_size",
    "data.max_tokens": "data.max_length",
    "per_device_train_batch_size": (
        "train.micro_batch_rows, the rows of one forward pass, which change no result; the whole batch of an update is "
        "data.batch_size (or rollout.num_prompts x rollout.group_size)"
    ),
    "gradient_accumulation_steps": (
        "data.batch_size (or rollout.num_prompts x rollout.group_size), the whole batch of an update; "
        "train.micro_batch_rows divides it, and no result depends on the division"
    ),
    "filter_groups.enable": "rollout.drop_uniform_groups: true",
    "kl_ctrl.kl_coef": "kl_in_reward.weight, a penalty in the reward; regularize.kl_coef is one in the loss",
    "critic.optim.lr": "head.lr_ratio, times train.lr",
    "rollout.name": "rollout.engine: native or vllm",
    "steps_per_generation": "train.num_minibatches, into how many updates a rollout batch is divided",
    "generation_batch_size": "rollout.num_prompts x rollout.group_size, the answers of a rollout batch",
    "importance_sampling_level": "objective: grpo for a ratio of each token, gspo for one of the sequence",
    "reference_free": "an objective without a reference (simpo, cpo or orpo) in place of dpo",
    "top_entropy_quantile": "not offered: every token of a completion is trained",
    "delta": "not offered: objectives cispo, icepop (a correction) and sapo bound large ratios in other ways",
    "clip_ratio_c": "not offered: correction icepop and objectives cispo and sapo bound large ratios in other ways",
    "f_divergence_type": "not offered: dpo is of the reverse KL, and exo, ipo and hinge are other losses",
    "repetition_penalty": "not offered: log-probabilities must be those of the model; a reward can count repetitions",
    "min_p": "not offered: rollout.top_p and rollout.top_k are",
    "neftune_noise_alpha": "not offered: no noise is added to embeddings",
    "saves_per_epoch": "train.save_every, a number of steps",
    "evals_per_epoch": "eval.every, a number of steps",
    "modules_to_save": "not offered: an adapter trains linear layers alone; leave model.adapter out to train all",
    "lora_modules_to_save": "not offered: an adapter trains linear layers alone; leave model.adapter out to train all",
    "full_finetuning": "model.adapter: null, which trains all weights",
    "load_in_16bit": "model.dtype: bf16",
    "tokenizer_name": "nothing: the tokenizer is the model's own (model.name)",
    "tokenizer_type": "nothing: the tokenizer is the model's own (model.name)",
    "eos_token": "nothing: the end of an answer is the tokenizer's, or that of its chat template",
    "special_tokens": "nothing: special tokens are the tokenizer's own",
    "precompute_ref_log_probs": "nothing: reference log-probabilities are computed once where the data are fixed",
    "dataloader_num_workers": "nothing: rows are read once, before the first step",
    "dataset_num_proc": "nothing: rows are read once, before the first step",
    "dataset_prepared_path": "nothing: rows are read once, before the first step",
    "shuffle": "nothing: rows are shuffled anew in every epoch, by train.seed",
    "shuffle_dataset": "nothing: rows are shuffled anew in every epoch, by train.seed",
    "group_by_length": "nothing: batches are packed, without padding",
    "use_dynamic_bsz": "nothing: micro-batches have train.micro_batch_tokens at most",
    "pad_to_sequence_len": "nothing: batches are packed, without padding",
    "pad_to_multiple_of": "nothing: batches are packed, without padding",
    "filter_overlong_prompts": "nothing: prompts above prompt.max_prompt_tokens are left out and counted",
    "truncation": "nothing: rows that are too long are left out and counted, never cut",
    "eval_batch_size": "nothing: the engine fills its batches; eval.num_examples is the number of rows",
    "val_batch_size": "nothing: the engine fills its batches; eval.num_examples is the number of rows",
    "per_device_eval_batch_size": "nothing: the engine fills its batches; eval.num_examples is the number of rows",
    "log_prob_micro_batch_size_per_gpu": "train.micro_batch_rows, the rows of every forward pass",
    "val_before_train": "nothing: eval.every above 0 evaluates before the first step, too",
    "log_completions": "nothing: every completion is recorded in the run",
    "cast_lm_head_to_fp32": "nothing: log-probabilities and the head are always computed in fp32",
    "disable_dropout": "nothing: a model's own dropout is off; model.adapter.dropout is the adapter's",
    "vllm_enable_sleep_mode": "nothing: a vLLM server on the trainer's own GPU sleeps while it computes",
    "param_offload": "scale.sharding: fsdp2, or model.adapter, which take less memory",
    "hub_model_id": "`posttrain runs export NAME --to FOLDER`, and the hub's own upload",
    "batch_size": "data.batch_size; where the model samples, rollout.num_prompts x rollout.group_size",
    "train_batch_size": "rollout.num_prompts (prompts of a batch); data.batch_size in supervised training",
    "ppo_mini_batch_size": "train.num_minibatches, into how many parts a rollout batch is divided",
    "mini_batch_size": "train.num_minibatches, into how many parts a rollout batch is divided",
    "beta": "objective.beta for preferences (dpo); where the model samples, the weight of the KL is regularize.kl_coef",
    "warmup_ratio": "train.warmup_steps, a number of steps",
    "bf16": "train.precision: bf16, for the products of training; model.dtype is the type of the weights",
    "fp16": "train.precision: bf16 or tf32; fp16 is not offered",
    "target_kl": "kl_in_reward.target, which adapts the weight of the KL",
    "load_in_4bit": "model.load_bits: 4, with model.adapter",
    "load_in_8bit": "model.load_bits: 8, with model.adapter",
    "temperature": "rollout.temperature in training, eval.temperature in evaluation",
    "max_tokens": "rollout.max_tokens for answers; data.max_length for rows",
    "max_length": "data.max_length for rows; rollout.max_total_tokens for a prompt and its answer",
    "max_seq_length": "data.max_length for rows; rollout.max_total_tokens for a prompt and its answer",
    "tensor_parallel_size": "rollout.engine.gpus, a list: one server divides the model over them",
    "tensor_model_parallel_size": "rollout.engine.gpus, a list: one server divides the model over them",
    "dataset": "task, by name; a file or a data set of the hub is task.path (hf:NAME)",
    "dataset_name": "task, by name; a file or a data set of the hub is task.path (hf:NAME)",
    "reward_weights": "rewards.0.weight, or rewards.NAME.weight: each reward has its own",
    "scale_rewards": "advantage: normalized divides by the standard deviation of the group, centered does not",
    "loss_type": "objective (dpo, ipo, grpo, ...) and aggregate (token_mean, sequence_mean, constant)",
    "epsilon": "objective.clip_low, and objective.clip_high above",
    "clip_ratio": "objective.clip_low and objective.clip_high",
    "clip_range": "objective.clip_low and objective.clip_high",
    "betas": "optimizer.betas",
    "packing": "nothing: rows are always packed, and never see one another",
    "eval_sample_packing": "nothing: rows are always packed, and never see one another",
    "sample_packing": "nothing: rows are always packed, and never see one another",
    "padding_free": "nothing: rows are always packed, and never see one another",
    "remove_padding": "nothing: rows are always packed, and never see one another",
    "use_remove_padding": "nothing: rows are always packed, and never see one another",
    "logging_steps": "nothing: every step is written to metrics.jsonl",
    "log_interval": "nothing: every step is written to metrics.jsonl",
    "disable_tqdm": "--quiet",
    "local_rank": "nothing: torchrun's environment says it",
    "push_to_hub": "`posttrain runs export NAME --to FOLDER`, and the hub's own upload",
    "remove_unused_columns": "nothing: all keys of a row are kept in its meta",
    "padding_side": "nothing: batches are packed, and positions follow the lengths",
    "pad_token": "nothing: masks come from lengths, not from a padding token",
    "torch_compile": "nothing: layers run as they are",
    "use_liger_kernel": "nothing: log-probabilities are computed in pieces, so that logits never exist whole",
    "critic_lr": "head.lr_ratio, times train.lr",
    "vf_coef": "objective.value_weight",
    "cliprange_value": "objective.value_clip",
    "missing_eos_penalty": "the reward truncated, with a negative weight",
    "save_only_model": "nothing: a checkpoint holds what resuming needs; `posttrain runs export` gives the model alone",
    "ref_model_mixup_alpha": "nothing: the reference is the model that the run started from",
    "sync_ref_model": "nothing: the reference is the model that the run started from",
    "optimizer_offload": "scale.sharding: fsdp2, or model.adapter, which take less memory",
    "use_cache": "nothing: sampling always caches",
    "num_workers": "nothing: rows are read once; scale.processes is the number of processes",
    "logits_to_keep": "nothing: log-probabilities are computed where a token is trained",
}
OTHER_NAMES: dict[str, str] = {
    **{name: key for key, names in _CALLED.items() for name in names.split()},
    **_ANSWERS,
}
# Types of numbers as torch calls them, with the names of recipes and options.
_TYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64", "double": "fp64"}
_SECTIONS = {key.partition(".")[0] for key in _CALLED}


def short_dtype(value: Any) -> Any:
    """Return ``bf16`` for ``bfloat16`` or ``torch.bfloat16``; any other value as it is."""
    return _TYPES.get(value.removeprefix("torch."), value) if isinstance(value, str) else value


# Our command, and our option of a command, by the names that people try.
_COMMANDS = {
    "train RECIPE": "finetune fine-tune fit tune run launch start sft-train rl distill align",
    "evaluate MODEL": "eval test benchmark bench lm_eval lm-eval measure score validate",
    "generate MODEL": "infer inference sample predict complete completion rollout",
    "chat MODEL": "talk repl",
    "serve MODEL": "server api deploy host",
    "studio": "ui gui web webui app dashboard",
    "sweep NAME": "search hyperparameters grid ablation ablate",
    "quantize MODEL --bits 4": "quant gptq awq",
    "recipes": "list ls configs config methods algorithms models",
    "explain NAME": "info describe doc docs man what",
    "data": "dataset datasets tasks",
    "runs": "status ps jobs experiments",
    "runs show NAME": "log logs report results",
    "runs delete NAME": "remove",
    "runs export NAME --to FOLDER": "merge push upload publish save",
    "activations MODEL --layer N": "record hidden",
    "generate MODEL --steer FEATURE=FACTOR": "steer",
    "new DIR": "init create scaffold project",
    "demo": "quickstart tutorial example",
    "--help": "help",
    "--version": "version",
}
_OPTIONS = {
    "--max-tokens": "max_new_tokens max_completion_length max_length max_gen_toks response_length num_predict",
    "--limit": "n num_examples num_samples max_samples max_examples num_prompts rows",
    "--samples": "n num_return_sequences n_samples num_generations group_size num_samples_per_prompt repeats",
    "--engine": "use_vllm backend inference_engine",
    "--device": "device_map cuda gpu",
    "--dtype": "torch_dtype bf16 fp16 precision",
    "--out": "output_path output_dir output save_dir",
    "--task": "tasks dataset dataset_name",
    "--template": "chat_template prompt_template apply_chat_template",
    "--batch": "batch_size per_device_eval_batch_size",
    "--runs-dir": "runs output_dir",
    "--run": "name run_name",
    "--dry-run": "check print_config cfg",
    "--quiet": "silent disable_tqdm",
    "--host": "ip address",
}
COMMANDS = {name: command for command, names in _COMMANDS.items() for name in names.split()}


def answer_option(name: str, known: Collection[str]) -> str:
    """Return the option that is called otherwise elsewhere, or nothing; ``known``: the command's own."""
    plain = name.strip("-").lower().replace("-", "_")
    return next((option for option, names in _OPTIONS.items() if option in known and plain in names.split()), "")


def answer_other_name(name: str) -> str:
    """Return `` This is called train.lr here.`` for the name of an option elsewhere, or nothing.

    Of a dotted name the last parts count, in a section that is not ours the earlier ones, too
    (``reward_model.enable``); case and ``-`` or ``_`` do not.
    """
    parts = name.strip("-").lower().replace("-", "_").split(".")
    tried = [".".join(parts[start:]) for start in range(len(parts))]
    if parts[0] not in _SECTIONS:
        tried += parts[-2::-1]
    found = next((OTHER_NAMES[one] for one in tried if one in OTHER_NAMES), "")
    if not found or name == found:
        return ""
    if found.startswith("nothing: "):
        return f" There is no such key here, and none is needed: {found.removeprefix('nothing: ')}."
    if found.startswith("not offered: "):
        return f" It is not offered here: {found.removeprefix('not offered: ')}."
    return f" This is called {found} here." if " " not in found else f" Here it is {found}."
