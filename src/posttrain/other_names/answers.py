"""Options of other libraries whose value is written otherwise here, or needs more than one key."""

from __future__ import annotations

# What is said in place of a key, and the names.
SAID = {
    "train.num_epochs (passes over the data) or train.ppo_epochs (over a rollout batch)": "train.epochs",
    "eval.num_examples": "eval.n",
    "data.batch_size": "data.batch",
    "data.max_length": "data.max_tokens",
    (
        "train.micro_batch_rows, the rows of one forward pass, which change no result; the whole batch of an "
        "update is data.batch_size (or rollout.num_prompts x rollout.group_size)"
    ): "per_device_train_batch_size per_device_batch_size batch_size_per_gpu batch_size_per_device",
    (
        "data.batch_size (or rollout.num_prompts x rollout.group_size), the whole batch of an update; "
        "train.micro_batch_rows divides it, and no result depends on the division"
    ): (
        "gradient_accumulation_steps gradient_accumulation accumulation accumulation_steps grad_accum_steps grad_accum"
    ),
    "data.batch_size; where the model samples, rollout.num_prompts x rollout.group_size": (
        "batch_size global_batch_size"
    ),
    "rollout.num_prompts (prompts of a batch); data.batch_size in supervised training": (
        "train_batch_size train.batch_size"
    ),
    "train.num_minibatches, into how many parts a rollout batch is divided": "ppo_mini_batch_size mini_batch_size",
    "train.num_minibatches, into how many updates a rollout batch is divided": "steps_per_generation",
    "rollout.num_prompts x rollout.group_size, the answers of a rollout batch": (
        "generation_batch_size oversampling_factor ppo_buffer_size batch_multiplier"
    ),
    "train.steps, each of rollout.num_prompts x rollout.group_size answers": (
        "total_episodes num_episodes total_rollout_steps"
    ),
    "train.micro_batch_rows, the rows of every forward pass": (
        "log_prob_micro_batch_size_per_gpu log_prob_micro_batch_size local_rollout_forward_batch_size "
        "precompute_ref_batch_size forward_micro_batch_size forward_micro_batch_size_per_gpu "
        "rollout.micro_batch_size micro_rollout_batch_size forward_batch_size unsloth_grpo_mini_batch "
        "logprob_batch_size"
    ),
    "train.micro_batch_tokens, the most tokens of a forward pass: lower it if memory is short": (
        "auto_find_batch_size token_batch_size"
    ),
    "train.schedule: constant, linear or cosine, each after train.warmup_steps": (
        "lr_scheduler_type lr_scheduler lr_schedule scheduler lr_decay_style lr_warmup_style warmup_style "
        "scheduler.type lr_scheduler_name decay_type"
    ),
    "train.warmup_steps, a number of steps": (
        "warmup_ratio lr_warmup_steps_ratio lr_warmup_ratio warmup_fraction warmup_proportion warmup_steps_ratio"
    ),
    "train.min_lr_ratio, a share of train.lr": "min_lr lr_min scheduler.min_lr",
    "train.save_every, a number of steps; 0 saves at the end only": (
        "save_strategy checkpointing_steps saves_per_epoch save_every_epoch save_first_step save_every_n_epochs"
    ),
    "eval.patience, a number of evaluations without a better primary metric": (
        "early_stopping early_stop earlystoppingcallback early_stopping_callback early_stopping_patience "
        "early_stop_patience patience"
    ),
    "eval.every, a number of steps; 0 never evaluates": (
        "eval_strategy evaluation_strategy evals_per_epoch do_eval eval_on_start_and_end steps_before_validation"
    ),
    "eval.best, a metric such as accuracy: with eval.every above 0, checkpoints/best is kept, and commands use it": (
        "load_best_model_at_end metric_for_best_model early_stopping_metric best_metric_key "
        "ckpt.best_metric_key save_best_model best_model"
    ),
    "train.precision: bf16, for the products of training; model.dtype is the type of the weights": (
        "bf16 bfloat16 bf16_full_eval"
    ),
    "train.precision: bf16 or tf32; fp16 is not offered": (
        "fp16 float16 fp16_full_eval half_precision_backend fp16_backend fp16_opt_level"
    ),
    "train.precision: bf16, tf32 or fp32": (
        "mixed_precision amp optimization_dtype reduce_dtype float32 autocast mixed_precision_training "
        "grad_accum_dtype accumulate_allreduce_grads_in_fp32 mixed_precision_param mixed_precision_reduce "
        "policy.precision"
    ),
    "train.precision: tf32": "tf32 allow_tf32",
    "train.gradient_checkpointing: true": (
        "use_gradient_checkpointing model.ac model.ac.freq ac selective_checkpointing "
        "gradient_checkpointing_kwargs gradient_checkpointing_reentrant activation_checkpointing_kwargs "
        "entropy_checkpointing recompute_layer_types disable_gradient_checkpointing use_reentrant_gc "
        "use_unsloth_gc ac.mode selective_ac_option activation_checkpoint activation_checkpoint.mode"
    ),
    "optimizer.betas, both in a list: [0.9, 0.95]": "adam_beta1 adam_beta2 beta1 beta2 optim.betas1 optim.betas2",
    "optimizer: adamw, adamw_8bit, adafactor, lion or muon, with their keys (betas, eps, weight_decay, momentum)": (
        "optim_args override_optimizer_config optimizer_kwargs optimizers use_muon optimizer_cls_and_kwargs"
    ),
    "rollout.drop_uniform_groups: true": "filter_groups.enable fill_completions",
    "rollout.temperature in training, eval.temperature in evaluation": "temperature",
    "rollout.temperature above 0 in training; eval.temperature: 0 is greedy, the default": "do_sample greedy",
    "rollout.max_tokens for answers; data.max_length for rows": "max_tokens",
    "data.max_length for rows; rollout.max_total_tokens for a prompt and its answer": (
        "max_length max_seq_length max_sequence_tokens max_context_length context_length model_max_length "
        "context_window max_ctx_len"
    ),
    "rollout.engine: vllm": "use_vllm fast_inference vllm",
    "rollout.engine: native or vllm": "rollout.name infer_backend infer_dtype generation.backend",
    "rollout.staleness: 0 samples and trains in turn, 1 or more at the same time": (
        "rollout.mode trainer_mode staleness_threshold trigger_parameter_sync_step require_batches async_generate "
        "async_barrier"
    ),
    "scale.timeout_seconds, in seconds": "backend_timeout init_timeout_seconds",
    "the hub's own login: `hf auth login`, or the environment variable HF_TOKEN": (
        "token hf_token use_auth_token hf_use_auth_token auth_token hf_hub_token ms_hub_token om_hub_token use_ms "
        "use_hf use_om"
    ),
    "the key of the server in the environment variable JUDGE_API_KEY": "api_key_var judge_api_key",
    "rollout.engine: vllm, which starts a server on the trainer's GPU; with rollout.engine.gpus it has others": (
        "vllm_mode single_gpu_mode colocate colocate_all train.colocate_all hybrid_engine inference_gpu_ids "
        "vllm_colocate colocate_all_models colocate_actor_ref colocate_critic_reward vllm_colocate_mode colocated"
    ),
    "rollout.engine.url, such as http://HOST:8000": "vllm_server_host vllm_server_port",
    "rollout.engine.gpus, a list: one server divides the model over them": (
        "tensor_parallel_size tensor_model_parallel_size vllm_tensor_parallel_size num_engines vllm_num_engines "
        "inference.parallel.tp vllm.num_engines rollout_num_gpus_per_engine"
    ),
    "scale.processes, and rollout.engine.gpus for a vLLM server": (
        "gpus rollout.n_gpus_per_node trainer_gpu_ids num_gpus_per_node actor.num_gpus_per_node num_learners_per_node "
        "critic.num_gpus_per_node ref.num_gpus_per_node num_inference_workers num_training_workers "
        "num_postprocessing_workers rollout_num_gpus gpus_per_node"
    ),
    "scale.processes over all nodes, with scale.launcher: torchrun (which starts each node) or ray": (
        "nnodes num_nodes actor.num_nodes use_ray node_rank multi_node multinode ray_num_workers"
    ),
    "scale.sharding: fsdp2": (
        "fsdp deepspeed zero_stage strategy fsdp_config distributed_strategy fsdp_version "
        "fsdp_transformer_layer_cls deepspeed_stage zero fsdp_size dp_shard_size fsdp_shard_degree ds.zero_stage "
        "fsdp2 fsdp_plugin fully_shard stage deepspeed_config zero_optimization dtensor_cfg "
        "data_parallel_replicate_degree data_parallel_shard_degree"
    ),
    "scale.sharding: fsdp2, or model.adapter, which take less memory": (
        "param_offload optimizer_offload fsdp_cpu_offload optim_cpu_offload cpu_offload ac_offloading offload "
        "activation_offloading deepspeed_offload_param deepspeed_offload_optimizer adam_offload ds.adam_offload "
        "offload_policy layer_offloading enable_activation_offload ref.offload offload_embedding"
    ),
    "prompt.template: chat for the tokenizer's chat template, or one of our own": (
        "chat_template prompt_template apply_chat_template template chat_template_path chat_template_jinja "
        "chat_template_name custom_chat_template tokenizer_chat_template input_template use_chat_template "
        "response_prefix template_backend conv_template"
    ),
    "prompt.template: chat, with variables such as {enable_thinking: false}": (
        "chat_template_kwargs apply_chat_template_kwargs enable_thinking add_non_thinking_prefix enable_thinking_prefix"
    ),
    "prompt.template: chat, with system: TEXT; or a row's key system": (
        "system_prompt default_system_message system_message system_prompt_override_file field_system system "
        "default_system new_system_prompt system_prompt_file system_instruction"
    ),
    "keys of the rows: `system`, `tools`, `reasoning_content` of a message, all read by task: jsonl": (
        "field_tools field_thinking template_thinking_key field_human roles message_field_training_detail "
        "field_input tools_key enable_thinking_key tool_key"
    ),
    "nothing: a row with nothing but `text` is read whole, with prompt.template: document": (
        "dataset_text_field text_field text_column field"
    ),
    "data.train_on: response": (
        "completion_only_loss train_on_responses_only mask_prompt train_on_completions_only response_template "
        "datacollatorforcompletiononlylm mask_inputs"
    ),
    "data.train_on: assistant": (
        "assistant_only_loss roles_to_train train_on_eos train_on_eot multiturn instruction_part response_part"
    ),
    "data.train_on: all trains the prompt, too; response does not": "train_on_inputs train_on_input train_on_prompt",
    "data.train_on: assistant, response or all; a message with weight: 0 is not trained": (
        "data_collator loss_mask data.loss_mask message_field_training completion_mask mask_history "
        "train_on_last_step_only loss_scale is_binary_loss_scale loss_mask_type"
    ),
    "task, by name; a file or a data set of the hub is task.path (hf:NAME); in Python data=": (
        "dataset dataset_name train_dataset datasets train_files custom_cls.name dataset_id train_data "
        "prompt_dataset data.name prompt_data pretraining_dataset data.type data.fake"
    ),
    "task jsonl (or preferences), which reads a file as task.path": (
        "task.path data.path file data_path train_file data_files dataset_path dataset_dir tokenized_path "
        "dataset.source prompt_file"
    ),
    "eval.tasks, a list of task names, or of {name: jsonl, path: FILE}; in Python eval_data=": (
        "eval_dataset test_dataset eval.dataset val_dataset validation_dataset eval_file val_file dataset_val "
        "eval_on_each_dataset eval_prompt_data test_datasets val_files dataset_mixer_eval_list eval.env"
    ),
    "task: mixture, with parts, each a task and its weight": (
        "dataset_mixer dataset_mixer_list dataset_mixture interleave_probs dataset_probs prompt_probs env_ratios "
        "dataset_weights data_mix mix_strategy probabilities interleave_prob prompt_data_probs"
    ),
    "keys `chosen` and `rejected` of the rows, with task: preferences": (
        "chosen_key rejected_key field_chosen field_rejected preference_dataset chosen_column"
    ),
    "keys `completion` and `label` of the rows, with task: preferences": "field_completion field_label",
    "the environment's keys next to its name: environment: {name: number_guess, high: 50}": (
        "env.args env_config env.address extra_env_kwargs"
    ),
    "an entry {name: mcp} of tools, with the command that starts the server, or its url": (
        "mcp_client_config_path mcp_servers mcpservers mcp_config mcp_server mcp_tools mcp_path mcp_url"
    ),
    "tools, a list of module:function, or environment, whose methods are tools": (
        "tools tool_config multi_turn tool_config_path function_tool_path tool_call_names agent_func_path "
        "default_agent_loop tool_use tool_calling multi_turn.format"
    ),
    "rewards, a list of names, or of functions as module:function": (
        "reward_funcs reward_function reward_fn custom_reward_function reward_funcs_path reward_manager "
        "custom_reward_function.path apply_verifiable_reward reward_fn_key remap_verifier reward_fns "
        "reward_kwargs reward_functions reward_processing_classes verification launch_reward_fn_async "
        "use_reward_loop reward_model_plugin rm_type custom_rm_path group_rm"
    ),
    "rewards: {name: reward_model, run: FOLDER}, a run that trained a reward model": (
        "reward_model reward_model_path reward_model.model.path reward_model.model_path "
        "reward.model_name_or_path remote_rm_url reward_pretrain reward_model_name_or_path reward.remote_url rm_path "
        "reward_model_name prm_model "
        "orm_model reward_adapters"
    ),
    "rewards.0.weight, or rewards.NAME.weight: each reward has its own": (
        "reward_weights reward_weight verification_reward r1_style_format_reward"
    ),
    "rewards: [correct, xml_format]": "apply_r1_style_format_reward additive_format_reward",
    "rewards: {name: judge, model: NAME}, with url, temperature, max_tokens and timeout_seconds": (
        "llm_judge_model llm_judge_max_tokens llm_judge_temperature llm_judge_timeout judge_model llm_as_a_judge judge"
    ),
    "rewards: {name: rubric, url: SERVER}, with criteria in each row under rubric": (
        "rubric rubrics rubric_reward rubric_rewards rubrics_as_rewards apply_rubric_reward"
    ),
    "rewards: {name: judge_ranking, url: SERVER}": "ruler group_judge group_relative_judge ranking_reward",
    "task.split, or the split of each part of task: mixture": "dataset_mixer_list_splits",
    "model.adapter.alpha, of LoRA": "alpha",
    "teacher.name, one model": "teacher_models",
    "teacher.weights: live, start or ema, which takes in every update": "teacher_model_kind teacher_sync_steps",
    "teacher.prompt_format, with {question} and {shown} in it": "teacher_prompt_template reprompt_template",
    "train.router_aux_loss_coef; by default the coefficient of a model whose config has output_router_logits": (
        "output_router_logits"
    ),
    "train.ema_decay, such as 0.999": "ema enable_ema use_ema exponential_moving_average model_averaging",
    "train.neftune_noise_alpha, such as 5": "neftune",
    "teacher.ema_decay, which is 1 less the rate, with teacher.weights: ema": "teacher_update_rate",
    "rollout.engine.url, one address": "client.base_url",
    "rollout.tool_seconds, of one call of a tool": "env.timeout",
    "the grader code_tests, with timeout_seconds and memory_megabytes": (
        "sandbox_fusion.max_concurrent code_max_execution_time code_api_url sandbox_fusion sandbox_fusion.url "
        "memory_limit_mb"
    ),
    "the reward overlong, with limit and cache": (
        "overlong_buffer overlong_buffer.len overlong_buffer_len overlong_penalty_factor "
        "max_length_verifier_max_length soft_overlong_punishment soft_max_length soft_cache_length max_resp_len"
    ),
    "the reward truncated, with a negative weight": (
        "missing_eos_penalty non_stop_penalty non_stop_penalty_value stop_properly_penalty_coef penalise_no_eos "
        "reward_penalty"
    ),
    "objective (dpo, ipo, grpo, ...) and aggregate (token_mean, sequence_mean, constant)": (
        "loss_type loss.type dpo_loss_type trainer_cls pref_loss rlhf_type"
    ),
    "objective: module:function, a loss of your own": "loss.import_path custom_loss compute_loss_func loss loss_func",
    "objective.clip_low, and objective.clip_high above": "epsilon eps_clip_low_high",
    "objective.clip_low and objective.clip_high": "clip_ratio clip_range",
    "objective.beta for preferences (dpo); where the model samples, the weight of the KL is regularize.kl_coef": (
        "beta rl_beta dpo_beta model.beta pref_beta reference_policy_kl_penalty"
    ),
    "objective: {name: simpo, gamma: 1.0}, which is absolute, not a ratio to beta": "simpo_gamma dpo_gamma_beta_ratio",
    "objective: {name: rpo, nll_weight: 1.0}, DPO with objective.nll_weight": (
        "rpo_alpha sft_weight nll_loss_coef pref_ftx sft_alpha"
    ),
    'train.lr_ratios: {"*embed_tokens*": 0.0}, which freezes weights by their names': (
        "unfrozen_parameters freeze_layers freeze num_layers_unfrozen freeze_embeddings frozen_layers "
        "trainable_parameters freeze_moe_router freeze_parameters"
    ),
    'train.lr_ratios: {"*embed_tokens*": 0.1}, multiples of train.lr by the names of weights': (
        "embedding_lr embedding_lr_scale lr_groups"
    ),
    "rollout.router_replay: true, with the experts that the sampler chose (R3), not an earlier trainer pass (R2)": (
        "r3 routing_replay use_routing_replay router_replay.mode router_replay_mode"
    ),
    "optimizer: adamw_8bit": "use_8bit_optimizer",
    "objective: ipo": "ipo_enable",
    "objective: {name: grpo, clip_max: 3.0}, the dual clip, or ppo with clip_max": (
        "clip_ratio_c dual_clip eps_clip_c ratio_clip_c delta"
    ),
    "objective: {name: f_dpo, divergence: forward_kl}, or jensen_shannon or alpha": "f_divergence_type",
    "objective: {name: f_dpo, divergence: alpha, alpha: 0.5}": "f_alpha_divergence_coef",
    "objective: {name: discopop, temperature: 0.05}": "discopop_tau",
    "objective: {name: ld_dpo, alpha: 0.5}": "ld_alpha",
    "objective: dft": "use_dft_loss enable_dft_loss",
    "objective: {name: dppo_tv, clip_low: 0.15, clip_high: 0.15}, or dppo_kl": (
        "dppo_divergence_type dppo_divergence_threshold"
    ),
    "objective: {name: bradley_terry, margin: true}": "margin_loss_enable margin_loss",
    "objective: grpo for a ratio of each token, gspo for one of the sequence": (
        "importance_sampling_level loss.ratio_type ratio_type sequence_level_importance_ratios"
    ),
    "an objective without a reference (simpo, cpo or orpo) in place of dpo": "reference_free",
    "objective: process, which trains a process reward model": "process_reward_model",
    "objective: on_policy_distillation for samples of the student, distillation for rows": (
        "lmbda seq_kd opd_enabled distillation.enabled"
    ),
    "objective: {name: distillation, divergence: forward_kl}, or reverse_kl, or jsd with jsd_weight": (
        "distillation_mode distillation_alpha opd_loss_mode distillation_objective distillation_loss.loss_mode "
        "reverse_kl gkd_logits_topk_mode"
    ),
    "advantage: normalized divides by the standard deviation of the group, centered does not": (
        "scale_rewards advantage_normalization norm_adv_by_std_in_grpo advantage_normalization_type no_std_norm "
        "normalize_advantages advantage.type normalize_advantage whiten_advantages no_advantage_std_norm "
        "disable_compute_advantages_and_returns"
    ),
    "masks: [{name: off_policy_sequence, threshold: 0.0001}]": (
        "off_policy_mask_threshold off_policy_sequence_mask_delta opsm_delta opsm use_opsm off_policy_sequence_masking"
    ),
    "masks: [{name: top_entropy, share: 0.2}]; share is the part that is kept": "top_entropy_quantile entropy_quantile",
    "objective: {name: clip_cov, share: 0.0002, cov_low: 1.0, cov_high: 5.0}": (
        "clip_cov_ratio clip_cov_lb clip_cov_ub"
    ),
    "objective: {name: kl_cov, share: 0.0002, penalty: 1.0}": "kl_cov_ratio ppo_kl_coef",
    "reference: {every: 512, mixing: 0.6}, which moves the reference towards the policy": "sync_ref_model tr_dpo trdpo",
    "advantage: gdpo, which normalizes each reward by itself; the other advantages are of the weighted sum": (
        "multi_objective_aggregation sum_then_normalize gdpo_reward_keys"
    ),
    "advantage.gamma, with advantage: gae, return_to_go or turn_normalized": "gamma discount discount_factor",
    "advantage.gae_lambda, with advantage: gae": "lam gae_lambda lambda lambd",
    "aggregate: token_mean, sequence_mean, or {name: constant, length: 1024}": (
        "loss_agg_mode loss_aggregation loss_reduction normalize_loss reduce_loss loss_denominator "
        "loss_scale_factor average_tokens_across_devices masked_mean_axis token_level_loss sequence_level_loss "
        "token_level token_level_aggregation sequence_level masked_mean_denominator"
    ),
    (
        "correction: {name: token_tis, cap: 2.0}, or sequence_tis, geometric_mask, icepop; with "
        "rollout.old_logprobs: trainer"
    ): (
        "vllm_importance_sampling_correction tis_imp_ratio_cap truncated_importance_sampling rollout_is "
        "vllm_importance_sampling_cap rollout_is_threshold rollout_rs rollout_correction tis rollout_rs_threshold "
        "vllm_importance_sampling_mode use_tis truncated_importance_sampling_ratio_cap "
        "vllm_importance_sampling_clip_max is_correction_level is_correction_mode is_correction_threshold "
        "is_correction_gating importance_sampling off_policy_correction enable_vllm_is_correction "
        "vllm_is_truncated_threshold vllm_is_correction rollout_importance_sampling_mode "
        "rollout_importance_sampling_threshold tis_clip use_importance_sampling_correction "
        "truncated_importance_sampling_ratio"
    ),
    (
        "correction: {name: icepop, low: 0.5, high: 5.0}, or geometric_mask for whole answers; with "
        "rollout.old_logprobs: trainer"
    ): (
        "tis_mask_lower tis_mask_upper vllm_importance_sampling_clip_min ipo_mask_low "
        "ipo_mask_high mask_ratio_high mask_ratio_low token_mask_high "
        "token_mask_low geo_mask_high geo_mask_low sequence_mask_high sequence_mask_low sequence_clip_high "
        "dppo_mask_high dppo_mask_low rollout_rs_threshold_lower rollout_token_veto_threshold kl_mask_type "
        "ratio_length_norm use_icepop"
    ),
    "rollout.old_logprobs: sampler": "use_vllm_logprobs bypass_mode calculate_log_probs use_rollout_log_probs",
    (
        "the model that the run starts from: regularize.kl_coef and objectives such as dpo compare with it, and "
        "it stays fixed unless there is a section reference"
    ): "ref_model reference_model reference_policy ref_policy frozen_reference ref_load",
    "regularize.kl_coef above 0": "use_kl_loss load_ref_policy algo.kl.use_loss",
    "regularize.kl_coef, a penalty in the loss; kl_in_reward.weight is one in the reward": (
        "kl_penalty token_level_kl"
    ),
    "regularize.kl_estimator: k1 (kl), k2 (mse) or k3 (low_var_kl)": (
        "kl_estimator kl_loss_type kl_type algo.kl.estimator use_kl_estimator_k3 k3 reference_policy_kl_type "
        "kl_input_clamp_value use_on_policy_kl_approximation"
    ),
    "kl_in_reward.weight above 0": "use_kl_in_reward kl_ctrl kl_in_reward.enable",
    "kl_in_reward.weight, a penalty in the reward; regularize.kl_coef is one in the loss": "kl_ctrl.kl_coef",
    "kl_in_reward.estimator: k1 (kl), k2 (mse) or k3 (low_var_kl)": "algorithm.kl_penalty",
    "kl_in_reward.target, which adapts the weight of the KL to it": "kl_ctrl.type adaptive_kl",
    "kl_in_reward.target, which adapts the weight of the KL": "target_kl",
    "head.lr_ratio, times train.lr": "critic.optim.lr critic_lr critic_learning_rate",
    "head.trunk: separate, which starts as a copy of the policy": (
        "critic.model.path critic.model_name_or_path critic_pretrain critic value_model"
    ),
    "model.load_bits: 4, with model.adapter": "load_in_4bit use_qlora qlora",
    "model.load_bits: 8, with model.adapter": "load_in_8bit",
    "model.load_bits: 4 or 8, with model.adapter": (
        "quantization_config bitsandbytes bnb_config_kwargs quantization bitsandbytesconfig bnb "
        "llm_int8_threshold llm_int8_skip_modules"
    ),
    "model.load_bits: 4, which is NF4 with double quantization": (
        "bnb_4bit_quant_type bnb_4bit_use_double_quant use_bnb_nested_quant bnb_4bit_quant_storage nf4 "
        "quantization_type double_quantization quantize_base"
    ),
    "model.dtype: bf16": "load_in_16bit pure_bf16",
    "model.dtype: bf16 or fp32, the type of the weights": "torch_dtype",
    "model.attention: flash_attention_2": (
        "use_flash_attention_2 flash_attention flash_attn use_flash_attn flashattention flash_attention_2 fa2"
    ),
    "model.attention: sdpa": "sdp_attention",
    "model.attention: eager": "eager_attention",
    "model.device: auto, cpu, cuda or mps; scale.sharding divides a model over GPUs": "device device_map",
    "model.device: cpu": "use_cpu no_cuda",
    "model.device: mps": "use_mps_device",
    "model.adapter: {kind: lora, rank: 16}": (
        "use_peft peft_config lora use_lora enable_lora model.lora peft peft_type peft.backend peft.weight_dtype"
    ),
    "model.adapter.targets: all-linear": "lora_target_linear lora_on_linear",
    "model.adapter.targets, which lists what is trained": (
        "exclude_modules finetune_attention_modules finetune_mlp_modules finetune_language_layers "
        "apply_lora_to_mlp apply_lora_to_output target_regex"
    ),
    "model.adapter.init_lora_weights: default (true elsewhere), gaussian or orthogonal": (
        "init_lora_weights peft_init_lora_weights lora_a_init_method lora_init lora_b_init_method init_weights"
    ),
    "model.adapter: null, which trains all weights": "full_finetuning full_finetune",
    "model.name, a run whose adapter is trained on": (
        "lora_adapter_path adapter_path adapter_name_or_path adapter_folder adapter_checkpoint create_new_adapter "
        "is_trainable"
    ),
    "model.init: {architecture: llama, config: {...}}, for a new model": (
        "config_name reinit_weights random_init model_init from_scratch num_layers hidden_size vocab_size "
        "num_hidden_layers num_attention_heads intermediate_size max_position_embeddings"
    ),
    "model.name, a folder of the revision that you want (`hf download NAME --revision REVISION --local-dir FOLDER`)": (
        "model_revision revision code_revision tokenizer_revision teacher_model_revision "
        "trust_remote_code_revision revision_of_model"
    ),
    "the option --trust-remote-code of a command": "trust_remote_code confirm_run_unsafe_code",
    "track: trackio, wandb, mlflow, swanlab or tensorboard; [] for none": (
        "report_to logger loggers log_with with_tracking tracker trackers logging_backend metric_logger"
    ),
    "track: {name: wandb, project: NAME}, with entity, group and mode": (
        "use_wandb wandb wandb_mode wandb_project project_name wandb_entity wandb_project_name wandb.project "
        "wandb.offline wandb.org wandb.group wandb_group wandb_run_group project wandb_tags wandb_dir "
        "wandb_job_type wandb_enabled"
    ),
    "track: {name: trackio, project: NAME}": "use_trackio trackio_project_name trackio_project",
    "track: {name: trackio, space: NAME}, which shares it on the hub": "trackio_space_id",
    "track: {name: mlflow, uri: URI, experiment: NAME}": (
        "use_mlflow mlflow_tracking_uri mlflow_experiment_name mlflow_tracking mlflow_run_name"
    ),
    "track: {name: swanlab, project: NAME, mode: offline}": "use_swanlab swanlab_project swanlab_mode",
    "track: tensorboard": "use_tensorboard tensorboard_dir tensorboard_enabled enable_tensorboard",
    "--run; in Python run=": "run_name experiment_name wandb_name exp_name wandb_run_name wandb.name job_name",
    "--runs-dir; in Python runs_dir=": (
        "output_dir default_local_dir save_path save_dir checkpoint_dir outputs logging_dir output out "
        "checkpoint_state_dir ckpt.path ckpt_path experiment_dir log_dir dump_folder checkpoint.folder "
        "save_debug_rollout_data_dir"
    ),
    "--resume, with the run's name as --run; in Python resume=True": (
        "resume_from_checkpoint resume_mode resume auto_resume load_checkpoint_path resume_from resume_step "
        "auto_resume_from_checkpoints resume_from_path ckpt.resume_step ckpt.load_enable load_checkpoint "
        "recipe_checkpoint checkpoint.load_step"
    ),
    "--quiet; in Python progress=False": (
        "disable_tqdm quiet silent verbose progress_bar verbosity disable_color_printing"
    ),
    "model; in Python a loaded (model, tokenizer)": "processing_class tokenizer.name",
    "in Python on_step=, on_evaluation=, on_checkpoint=: a function of an event, or a list; each can stop a run": (
        "callbacks callback trainercallback add_callback"
    ),
    "`posttrain evaluate`, which trains nothing": "val_only eval_only",
    "`posttrain quantize MODEL --bits 4`": "quantization_method gptq awq hqq ptq quant_method",
    "`posttrain runs export NAME --push REPOSITORY` (private without --public); in Python push_to_hub of a run": (
        "hub_model_id push_to_hub hub_strategy save_method hub_token hub_private_repo hub_always_push "
        "hub_revision hf_entity hf_repo_id hf_repo_revision hf_repo_url save_to_hub push_to_hub_merged "
        "log_completions_hub_repo hub_repo_id export_path hf_hub_repo_id export_hub_model_id eval.save_to_hf "
        "hf_hub_log_args"
    ),
    "`posttrain runs export NAME --to FOLDER --merge`": (
        "merge_lora merge_and_unload save_pretrained_merged merge_adapter save_merged_model"
    ),
    "`posttrain runs export NAME --to FOLDER --gguf q8_0`": "gguf safetensors_gguf save_pretrained_gguf gguf_export",
    "`posttrain data show TASK --model NAME`, which counts tokens": "preprocess preprocess_only cache_dataset_only",
    "the recipe, the first word after `posttrain train`": "config_path config_file recipe_path config",
    "eval.tasks: [{name: gsm8k, split: test}]": (
        "eval_split dataset_test_split eval.split test_split dataset_mixer_eval_list_splits"
    ),
    "environment, a component that plays the turns; contrib/ has adapters": (
        "rollout_func rollout_function agent_loop custom_rollout multi_turn_scheduler use_gym_env "
        "custom_async_server agent_loop_config_path agent_loop_manager_class interaction_config_path "
        "context_manager custom_generate_function_path rollout_function_path"
    ),
    "model.adapter: {kind: lora}, or null, which trains all weights": (
        "finetuning_type train_type tuner_type tuner_backend"
    ),
    "task.prompt_key, task.messages_key, task.response_key and task.answer_key, which name the rows' keys": (
        "columns column_map prompt_dict_keys response_dict_keys"
    ),
    "task.step_separator, with task: preferences": "step_separator",
    "teacher.name, a model, a folder or a run": "teacher_adapters teacher_checkpointer",
    "rollout.max_turn_tokens for a turn, rollout.max_tokens for all of an answer": "completion_length_limit_scope",
    "--dry-run, which prints the resolved recipe and trains nothing": "dry_run print_config show_config",
    "the hub's own cache: the environment variable HF_HOME": (
        "cache_dir hf_home model_cache_dir local_repo_path download_mode"
    ),
    "`posttrain chat MODEL`, or `posttrain studio`": "gradio gradio_title",
    "advantage: leave_one_out": "use_leave_one_out_baseline",
    "objective.length_normalized: true, with objective: dpo": "preference_average_log_probs",
}
