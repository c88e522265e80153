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
    "train.micro_batch_tokens": (
        "ppo_max_token_len_per_gpu max_tokens_per_gpu tokens_per_micro max_token_len_per_gpu auto_find_batch_size"
    ),
    "train.save_every": ("save_steps save_freq save_interval checkpoint_interval save_strategy ckpt_interval"),
    "train.keep_checkpoints": (
        "save_total_limit max_ckpt_to_keep keep max_ckpt_num max_actor_ckpt_to_keep max_critic_ckpt_to_keep"
    ),
    "train.schedule": (
        "lr_scheduler_type lr_scheduler lr_schedule scheduler lr_decay_style lr_warmup_style warmup_style"
    ),
    "train.warmup_steps": "warmup_ratio lr_warmup_steps lr_warmup_steps_ratio num_warmup_steps warmup warmup_steps",
    "train.min_lr_ratio": "min_lr lr_min min_lr_rate min_lr_ratio cosine_min_lr_ratio",
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
    "eval.samples": "val_kwargs.n num_generations_eval",
    "eval.temperature": "val_kwargs.temperature",
    "eval.top_p": "val_kwargs.top_p",
    "eval.top_k": "val_kwargs.top_k",
    "eval.best": "metric_for_best_model load_best_model_at_end early_stopping_metric",
    "eval.tasks": "eval_dataset test_datasets val_files eval_tasks",
    "rollout.group_size": (
        "num_generations n group_size num_samples_per_prompt n_samples_per_prompt rollout_n num_return_sequences "
        "n_samples group samples_per_prompt num_completions_to_sample"
    ),
    "rollout.num_prompts": (
        "rollout_batch_size prompts num_prompts train_batch_size prompts_per_step num_groups gen_batch_size"
    ),
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
    "rollout.max_rounds": "max_num_gen_batches",
    "rollout.uniform_by": "filter_groups.metric",
    "rollout.mask_truncated": "mask_truncated_completions overlong_filtering mask_truncated",
    "rollout.staleness": "async_level max_staleness async_steps max_off_policy_steps off_policy_steps",
    "rollout.engine.max_model_len": "vllm_max_model_length",
    "rollout.max_turns": (
        "max_turns max_tool_calling_iterations max_assistant_turns max_steps_per_episode max_user_turns"
    ),
    "prompt.max_prompt_tokens": "max_prompt_length prompt_max_len max_prompt_len",
    "prompt.template": (
        "chat_template prompt_template apply_chat_template template chat_template_path chat_template_jinja"
    ),
    "data.batch_size": "batch_size global_batch_size gradient_accumulation_steps gradient_accumulation accumulation",
    "data.max_length": (
        "max_length max_seq_length sequence_len cutoff_len max_seq_len seq_len max_len seq_length maximum_length "
        "max_packed_sequence_len"
    ),
    "data.train_on": (
        "completion_only_loss assistant_only_loss train_on_inputs train_on_responses_only mask_prompt "
        "roles_to_train train_on_eos"
    ),
    "task": "dataset dataset_name train_dataset datasets train_files dataset_id data_path train_data",
    "task.split": "dataset_split dataset_train_split train_split datasets.split",
    "task.validation_share": "val_set_size test_size eval_split_ratio validation_split",
    "task.prompt_key": "prompt_key dataset_text_field field_instruction input_key question_key",
    "task.response_key": "response_key output_key field_output",
    "task.answer_key": "answer_key label_key",
    "task.size": "max_samples num_samples max_train_samples subset_size dataset_size",
    "environment": "env environment_factory environment_name env_name envs vf_env",
    "tools": "tools tool_config multi_turn",
    "rewards": (
        "reward_funcs reward_function reward_fn custom_reward_function reward_model reward_model_path "
        "reward_funcs_path reward_manager reward_model.model.path"
    ),
    "rewards.0.weight": "reward_weights reward_weight",
    "objective": "loss_type rl loss policy_loss algorithm rl_algorithm loss_fn",
    "objective.clip_low": "epsilon clip_ratio clip_range cliprange clip_ratio_low clip_eps eps_clip ppo_clip clip_coef",
    "objective.clip_high": "epsilon_high clip_ratio_high eps_clip_high clip_high",
    "objective.label_smoothing": "label_smoothing label_smoothing_factor",
    "objective.gamma": "simpo_gamma",
    "objective.odds_weight": "orpo_alpha",
    "objective.centering": "center_rewards_coefficient",
    "objective.tau_positive": "sapo_temperature_pos tau_pos",
    "objective.tau_negative": "sapo_temperature_neg tau_neg",
    "objective.desirable_weight": "desirable_weight",
    "objective.undesirable_weight": "undesirable_weight",
    "objective.nll_weight": "rpo_alpha cpo_alpha sft_weight",
    "advantage": "scale_rewards advantage_estimator adv_estimator advantage_normalization norm_adv_by_std_in_grpo",
    "advantage.gamma": "gamma discount discount_factor",
    "advantage.gae_lambda": "lam gae_lambda lambda lambd",
    "aggregate": "loss_agg_mode loss_aggregation loss_reduction normalize_loss",
    "correction": (
        "vllm_importance_sampling_correction tis_imp_ratio_cap truncated_importance_sampling rollout_is "
        "vllm_importance_sampling_cap rollout_is_threshold rollout_rs rollout_correction "
        "vllm_importance_sampling_mode use_tis"
    ),
    "regularize.kl_coef": "kl_coef kl_loss_coef kl_beta kl kl_penalty use_kl_loss kl_weight",
    "regularize.kl_estimator": "kl_estimator kl_loss_type kl_type",
    "regularize.entropy_coef": "entropy_coef entropy_coeff ent_coef entropy_bonus entropy_loss_coef",
    "kl_in_reward.weight": "init_kl_coef use_kl_in_reward kl_ctrl kl_in_reward_coef",
    "kl_in_reward.estimator": "algorithm.kl_penalty",
    "kl_in_reward.horizon": "horizon kl_horizon",
    "kl_in_reward.target": "target_kl kl_target",
    "model.name": (
        "model_name_or_path model_name pretrained_model_name_or_path model_id base_model pretrain model_path "
        "pretrained base_model_config lora_model_dir model.path"
    ),
    "model.dtype": "torch_dtype dtype model_dtype bnb_4bit_compute_dtype",
    "model.load_bits": "load_in_4bit load_in_8bit quantization bits quantization_config",
    "model.attention": (
        "attn_implementation use_flash_attention_2 flash_attention flash_attn attention_implementation "
        "xformers_attention sdp_attention eager_attention"
    ),
    "model.device": "device device_map",
    "--trust-remote-code": "trust_remote_code",
    "model.adapter": "use_peft peft_config lora peft_type adapter",
    "model.adapter.rank": "lora_r r lora_rank rank max_lora_rank",
    "model.adapter.alpha": "lora_alpha alpha",
    "model.adapter.dropout": "lora_dropout",
    "model.adapter.targets": "target_modules lora_target_modules lora_target lora_target_linear",
    "model.adapter.target_parameters": "lora_target_parameters",
    "model.adapter.init_lora_weights": "init_lora_weights peft_init_lora_weights",
    "model.adapter.use_rslora": "use_rslora",
    "model.adapter.use_dora": "use_dora peft_use_dora",
    "teacher.name": "teacher_model_name_or_path teacher_model teacher_model_path ref_model",
    "scale.processes": "num_processes nproc_per_node world_size num_gpus n_gpus_per_node ngpus num_workers nnodes",
    "scale.timeout_seconds": "ddp_timeout nccl_timeout timeout",
    "scale.sharding": "fsdp deepspeed zero_stage strategy fsdp_config distributed_strategy fsdp_version",
    "track": (
        "report_to logger use_wandb loggers log_with wandb_mode wandb_project project_name use_tensorboard wandb_entity"
    ),
    "--run": "run_name experiment_name wandb_name exp_name wandb_run_name",
    "--runs-dir": "output_dir default_local_dir save_path save_dir checkpoint_dir outputs logging_dir output out",
    "--resume": (
        "resume_from_checkpoint resume_mode resume auto_resume load_checkpoint_path resume_from "
        "auto_resume_from_checkpoints resume_from_path"
    ),
}
# Answers about names that have no key here, or more than one. A name with a section holds there alone.
_ANSWERS = {
    "train.num_epochs (passes over the data) or train.ppo_epochs (over a rollout batch)": "train.epochs",
    "eval.num_examples": "eval.n",
    "data.batch_size": "data.batch",
    "data.max_length": "data.max_tokens",
    (
        "train.micro_batch_rows, the rows of one forward pass, which change no result; the whole batch of an update "
        "is data.batch_size (or rollout.num_prompts x rollout.group_size)"
    ): "per_device_train_batch_size",
    (
        "data.batch_size (or rollout.num_prompts x rollout.group_size), the whole batch of an update; "
        "train.micro_batch_rows divides it, and no result depends on the division"
    ): "gradient_accumulation_steps",
    "rollout.drop_uniform_groups: true": "filter_groups.enable",
    "kl_in_reward.weight, a penalty in the reward; regularize.kl_coef is one in the loss": "kl_ctrl.kl_coef",
    "head.lr_ratio, times train.lr": "critic.optim.lr critic_lr",
    "rollout.engine: native or vllm": "rollout.name",
    "train.num_minibatches, into how many updates a rollout batch is divided": "steps_per_generation",
    "rollout.num_prompts x rollout.group_size, the answers of a rollout batch": "generation_batch_size",
    "objective: grpo for a ratio of each token, gspo for one of the sequence": "importance_sampling_level",
    "an objective without a reference (simpo, cpo or orpo) in place of dpo": "reference_free",
    "not offered: every token of a completion is trained": "top_entropy_quantile",
    "not offered: objectives cispo, icepop (a correction) and sapo bound large ratios in other ways": "delta",
    "not offered: correction icepop and objectives cispo and sapo bound large ratios in other ways": "clip_ratio_c",
    "not offered: dpo is of the reverse KL, and exo, ipo and hinge are other losses": "f_divergence_type",
    "not offered: log-probabilities must be those of the model; a reward can count repetitions": "repetition_penalty",
    "not offered: rollout.top_p and rollout.top_k are": "min_p",
    "scale.processes, and rollout.engine.gpus for a vLLM server": "gpus",
    "task jsonl (or preferences), which reads a file as task.path": "task.path data.path",
    "the reward overlong, with limit and cache": "overlong_buffer overlong_buffer.len",
    "kl_in_reward.target, which adapts the weight of the KL to it": "kl_ctrl.type",
    "head.trunk: separate, which starts as a copy of the policy": "critic.model.path",
    "objective: process, which trains a process reward model": "process_reward_model",
    "objective: on_policy_distillation for samples of the student, distillation for rows": "lmbda seq_kd",
    "`posttrain evaluate`, which trains nothing": "val_only",
    "`posttrain quantize MODEL --bits 4`": "quantization_method",
    "nothing: weights are stored as safetensors": "save_safetensors",
    "not offered: a run has train.steps, and eval.best names the checkpoint to keep": "early_stopping_patience",
    "not offered: a sequence stays on one GPU; scale.sharding divides the model": (
        "context_parallel_size ulysses_sequence_parallel_size sequence_parallel_degree"
    ),
    "not offered: start vLLM with its own options (posttrain serve-command), and give its rollout.engine.url": (
        "max_num_seqs max_num_batched_tokens enable_chunked_prefill load_format"
    ),
    "not offered: no noise is added to embeddings": "neftune_noise_alpha noisy_embedding_alpha",
    "train.save_every, a number of steps": "saves_per_epoch",
    "eval.every, a number of steps": "evals_per_epoch",
    "not offered: an adapter trains linear layers alone; leave model.adapter out to train all": (
        "modules_to_save lora_modules_to_save"
    ),
    "model.adapter: null, which trains all weights": "full_finetuning",
    "model.dtype: bf16": "load_in_16bit",
    "nothing: the tokenizer is the model's own (model.name)": "tokenizer_name tokenizer_type",
    "nothing: the end of an answer is the tokenizer's, or that of its chat template": "eos_token stop_token",
    "nothing: special tokens are the tokenizer's own": "special_tokens",
    "nothing: reference log-probabilities are computed once where the data are fixed": "precompute_ref_log_probs",
    "nothing: rows are read once, before the first step": (
        "dataloader_num_workers dataset_num_proc dataset_prepared_path"
    ),
    "nothing: rows are shuffled anew in every epoch, by train.seed": "shuffle shuffle_dataset",
    "nothing: batches are packed, without padding": "group_by_length pad_to_sequence_len pad_to_multiple_of",
    "nothing: micro-batches have train.micro_batch_tokens at most": "use_dynamic_bsz",
    "nothing: prompts above prompt.max_prompt_tokens are left out and counted": "filter_overlong_prompts",
    "nothing: rows that are too long are left out and counted, never cut": "truncation excess_length_strategy",
    "nothing: the engine fills its batches; eval.num_examples is the number of rows": (
        "eval_batch_size val_batch_size per_device_eval_batch_size"
    ),
    "train.micro_batch_rows, the rows of every forward pass": (
        "log_prob_micro_batch_size_per_gpu log_prob_micro_batch_size local_rollout_forward_batch_size"
    ),
    "nothing: eval.every above 0 evaluates before the first step, too": "val_before_train",
    "nothing: every completion is recorded in the run": (
        "log_completions log_val_generations num_completions_to_print rollout_data_dir"
    ),
    "nothing: log-probabilities and the head are always computed in fp32": "cast_lm_head_to_fp32",
    "nothing: a model's own dropout is off; model.adapter.dropout is the adapter's": "disable_dropout",
    "nothing: a vLLM server on the trainer's own GPU sleeps while it computes": (
        "vllm_enable_sleep_mode free_cache_engine"
    ),
    "scale.sharding: fsdp2, or model.adapter, which take less memory": "param_offload optimizer_offload",
    "`posttrain runs export NAME --to FOLDER`, and the hub's own upload": (
        "hub_model_id push_to_hub hub_strategy save_method"
    ),
    "data.batch_size; where the model samples, rollout.num_prompts x rollout.group_size": "batch_size",
    "rollout.num_prompts (prompts of a batch); data.batch_size in supervised training": "train_batch_size",
    "train.num_minibatches, into how many parts a rollout batch is divided": "ppo_mini_batch_size mini_batch_size",
    "objective.beta for preferences (dpo); where the model samples, the weight of the KL is regularize.kl_coef": (
        "beta rl_beta dpo_beta"
    ),
    "train.warmup_steps, a number of steps": "warmup_ratio",
    "train.precision: bf16, for the products of training; model.dtype is the type of the weights": "bf16",
    "train.precision: bf16 or tf32; fp16 is not offered": "fp16",
    "kl_in_reward.target, which adapts the weight of the KL": "target_kl",
    "model.load_bits: 4, with model.adapter": "load_in_4bit",
    "model.load_bits: 8, with model.adapter": "load_in_8bit",
    "rollout.temperature in training, eval.temperature in evaluation": "temperature",
    "rollout.max_tokens for answers; data.max_length for rows": "max_tokens",
    "data.max_length for rows; rollout.max_total_tokens for a prompt and its answer": "max_length max_seq_length",
    "rollout.engine.gpus, a list: one server divides the model over them": (
        "tensor_parallel_size tensor_model_parallel_size"
    ),
    "task, by name; a file or a data set of the hub is task.path (hf:NAME)": "dataset dataset_name",
    "rewards.0.weight, or rewards.NAME.weight: each reward has its own": "reward_weights",
    "advantage: normalized divides by the standard deviation of the group, centered does not": "scale_rewards",
    "objective (dpo, ipo, grpo, ...) and aggregate (token_mean, sequence_mean, constant)": "loss_type",
    "objective.clip_low, and objective.clip_high above": "epsilon",
    "objective.clip_low and objective.clip_high": "clip_ratio clip_range",
    "optimizer.betas": "betas",
    "nothing: rows are always packed, and never see one another": (
        "packing eval_sample_packing sample_packing padding_free remove_padding use_remove_padding"
    ),
    "nothing: every step is written to metrics.jsonl": (
        "logging_steps log_interval logging_first_step include_tokens_per_second"
    ),
    "--quiet": "disable_tqdm",
    "nothing: torchrun's environment says it": "local_rank",
    "nothing: all keys of a row are kept in its meta": "remove_unused_columns",
    "nothing: batches are packed, and positions follow the lengths": "padding_side",
    "nothing: masks come from lengths, not from a padding token": "pad_token",
    "nothing: layers run as they are": "torch_compile torch_compile_backend",
    "nothing: log-probabilities are computed in pieces, so that logits never exist whole": "use_liger_kernel",
    "objective.value_weight": "vf_coef",
    "objective.value_clip": "cliprange_value",
    "the reward truncated, with a negative weight": "missing_eos_penalty",
    "nothing: a checkpoint holds what resuming needs; `posttrain runs export` gives the model alone": "save_only_model",
    "nothing: the reference is the model that the run started from": (
        "ref_model_mixup_alpha sync_ref_model ref_model_sync_steps"
    ),
    "nothing: sampling always caches": "use_cache",
    "nothing: rows are read once; scale.processes is the number of processes": "num_workers",
    "nothing: log-probabilities are computed where a token is trained": "logits_to_keep",
}
OTHER_NAMES: dict[str, str] = {
    **{name: key for key, names in _CALLED.items() for name in names.split()},
    **{name: answer for answer, names in _ANSWERS.items() for name in names.split()},
}
# Types of numbers as torch calls them, with the names of recipes and options.
_TYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64", "double": "fp64"}
_SECTIONS = {key.partition(".")[0] for key in _CALLED}


def short_dtype(value: object) -> Any:
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
    "runs delete NAME": "remove rm del",
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
    "--temperature": "do_sample greedy",
    "--limit": "n num_examples num_samples max_samples max_examples num_prompts rows",
    "--samples": (
        "n num_samples num_return_sequences n_samples num_generations group_size num_samples_per_prompt repeats"
    ),
    "--engine": "use_vllm backend inference_engine",
    "--device": "device_map cuda gpu",
    "--dtype": "torch_dtype bf16 fp16 precision",
    "--out": "output_path output_dir output save_dir log_samples",
    "--task": "tasks dataset dataset_name",
    "--task.path": "path file data_files dataset_path data_path train_file",
    "--task.split": "split dataset_split",
    "--model": "tokenizer tokenizer_name",
    "--bits": "load_in_4bit load_in_8bit w_bit quantization",
    "--engine.gpu_memory_utilization": "gpu_memory_utilization",
    "--engine.max_model_len": "max_model_len",
    "--engine.gpus": "tensor_parallel_size",
    "--to": "out output output_dir",
    "--template": "chat_template prompt_template apply_chat_template",
    "--batch": "batch_size per_device_eval_batch_size",
    "--runs-dir": "runs output_dir",
    "--run": "name run_name",
    "--dry-run": "check print_config cfg",
    "--quiet": "silent disable_tqdm",
    "--host": "ip address share",
}
# What a command takes as a word without an option, by the options that people try.
WORDS = {
    "model": "model model_name model_path model_name_or_path checkpoint pretrained",
    "models": "model models model_name model_path model_name_or_path checkpoint pretrained",
    "prompt": "prompt question message input text",
    "recipe": "recipe config config_file config_path cfg c",
    "name": "name task dataset",
    "names": "name names run",
    "folder": "dir folder output out",
}
# Components by their names elsewhere.
_COMPONENTS = {
    "reward": {
        "correct": "accuracy_reward accuracy exact_match correctness correctness_reward correctness_reward_func",
        "xml_format": "format think_format_reward format_reward strict_format_reward strict_format_reward_func",
        "xml_soft": "soft_format_reward soft_format_reward_func",
        "xml_count": "xmlcount_reward xmlcount_reward_func",
        "is_number": "int_reward int_reward_func",
        "overlong": "soft_overlong_punishment get_soft_overlong_punishment overlong_buffer length_penalty",
        "judge": "llm_judge llm_as_judge",
    },
    "objective": {
        "dpo": "sigmoid",
        "cross_entropy": "sft nll ce",
        "bradley_terry": "reward_model rm reward_modeling",
        "robust_dpo": "robust",
        "exo": "exo_pair",
        "nca": "nca_pair",
        "hinge": "slic",
        "on_policy_distillation": "gkd opd",
    },
    "advantage": {
        "normalized": "grpo group group_norm",
        "centered": "dr_grpo",
        "leave_one_out": "rloo",
        "batch_normalized": "reinforce_plus_plus reinforce++",
    },
    "optimizer": {"adamw": "adam adamw_torch adamw_torch_fused"},
    "grader": {"math": "math_verify latex", "multiple_choice": "choice mcq", "numeric": "number gsm8k"},
    "template": {"r1_zero": "r1 deepseek_r1 think", "plain": "none raw"},
    "task": {"jsonl": "json csv parquet custom local"},
}
COMMANDS = {name: command for command, names in _COMMANDS.items() for name in names.split()}


def answer_option(name: str, known: Collection[str]) -> str:
    """Return the options that are called otherwise elsewhere, or nothing; ``known``: the command's own and sections."""
    plain = name.strip("-").lower().replace("-", "_")
    found = [o for o, names in _OPTIONS.items() if o.partition(".")[0] in known and plain in names.split()]
    return " or ".join(found)


def answer_component(kind: str, name: str) -> str:
    """Return `` This is called correct here.`` for the name of a component elsewhere, or nothing."""
    plain = name.lower().replace("-", "_")
    found = next((ours for ours, names in _COMPONENTS.get(kind, {}).items() if plain in names.split()), "")
    return f" This is called {found} here." if found else ""


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
