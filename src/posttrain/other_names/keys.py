"""Keys of a recipe by the names of options in other libraries, and families of such options.

A key takes the value that the option takes there.
"""

from __future__ import annotations

KEYS = {
    "train.lr": "learning_rate lr actor_lr optim_lr actor_learning_rate optim.lr adam.lr muon.lr",
    "train.steps": (
        "max_steps total_training_steps total_steps num_steps n_grpo_steps train_iters max_train_steps "
        "num_training_steps training_steps num_train_steps max_iters max_num_steps training.steps num_rollout"
    ),
    "train.num_epochs": "num_train_epochs num_epochs total_epochs epochs n_epochs passes max_epochs max_num_epochs",
    "train.ppo_epochs": "num_iterations ppo_epochs num_ppo_epochs epochs_per_rollout_batch",
    "train.num_minibatches": "num_mini_batches num_minibatches minibatches num_steps_per_rollout",
    "train.micro_batch_rows": (
        "micro_batch_size micro_train_batch_size micro_batch_size_per_gpu per_gpu_train_batch_size "
        "ppo_micro_batch_size ppo_micro_batch_size_per_gpu rows_per_micro local_batch_size"
    ),
    "train.micro_batch_tokens": (
        "ppo_max_token_len_per_gpu max_tokens_per_gpu tokens_per_micro max_token_len_per_gpu token_budget "
        "log_prob_max_token_len_per_gpu forward_max_token_len_per_gpu ppo_infer_max_token_len_per_gpu "
        "rollout_max_tokens_per_gpu train_max_tokens_per_gpu train_mb_tokens"
    ),
    "train.save_every": (
        "save_steps save_freq save_interval checkpoint_interval ckpt_interval ckpt.interval checkpoint_state_freq "
        "save_every_steps checkpoint_every weights.interval save_every_n_steps checkpoint_freq save_period "
        "checkpoint.interval"
    ),
    "train.keep_checkpoints": (
        "save_total_limit max_ckpt_to_keep keep max_ckpt_num max_actor_ckpt_to_keep max_critic_ckpt_to_keep "
        "keep_last_n_checkpoints keep_last ckpt.max_num max_checkpoints keep_top_k keep_latest_k"
    ),
    "train.warmup_steps": "lr_warmup_steps num_warmup_steps warmup warmup_steps lr_warmup num_warmup warm_up_steps",
    "train.min_lr_ratio": "min_lr_rate min_lr_ratio cosine_min_lr_ratio final_lr_ratio min_lr_factor",
    "train.max_grad_norm": (
        "max_grad_norm clip_grad gradient_clipping gradient_clip_val grad_clip max_norm clip_grad_norm "
        "gradient_clip gradient_clip_norm grad_norm_clip max_gradient_norm"
    ),
    "train.gradient_checkpointing": (
        "gradient_checkpointing enable_gradient_checkpointing activation_checkpointing "
        "gradient_checkpointing_enable activation_recomputation"
    ),
    "train.seed": "seed data_seed random_state random_seed data_loader_seed shuffle_seed rollout_seed",
    "train.skip_zero_rows": "skip_zero_advantage_batches",
    "train.deterministic": (
        "full_determinism deterministic full_determinism_enable determinism cudnn_deterministic_mode"
    ),
    "optimizer": "optim optimizer_type optimizer_name optim.type optim.optimizer",
    "optimizer.weight_decay": "weight_decay wd l2 weight_decay_rate",
    "optimizer.betas": "betas adam_betas adam.betas",
    "optimizer.eps": "adam_epsilon adam_eps adam.eps",
    "optimizer.momentum": "muon.momentum optim.mu muon_momentum",
    "optimizer.ns_steps": "muon.ns_steps",
    "eval.every": (
        "eval_steps test_freq eval_interval eval_every val_interval eval.interval val.interval eval.steps "
        "local_eval_every eval_freq val_freq eval_interval_steps eval_every_n_steps run_val_every_n_steps "
        "val_period validation.freq"
    ),
    "eval.num_examples": (
        "max_eval_samples num_eval_samples limit eval_samples val_max_samples val.num_examples eval_limit "
        "val_dataset_sample max_validation_batches_x max_val_samples"
    ),
    "eval.num_kl_prompts": "drift_prompts",
    "eval.prompts": "sample_prompts validation_prompts test_prompts fixed_prompts prompt_panel generation_prompts",
    "eval.samples": (
        "val_kwargs.n num_generations_eval eval.rollouts_per_example eval_pass_at_k eval.n_samples_per_prompt "
        "n_samples_per_eval_prompt eval_n_samples_per_prompt"
    ),
    "eval.temperature": "val_kwargs.temperature eval.sampling.temperature eval_temperature",
    "eval.top_p": "val_kwargs.top_p eval.sampling.top_p eval_top_p",
    "eval.min_p": "val_kwargs.min_p eval.sampling.min_p eval_min_p",
    "eval.min_tokens": "eval.sampling.min_tokens eval_min_tokens",
    "eval.repetition_penalty": "eval.sampling.repetition_penalty eval_repetition_penalty",
    "eval.stop": "eval.sampling.stop eval_stop",
    "eval.top_k": "val_kwargs.top_k eval.sampling.top_k eval_top_k",
    "eval.max_tokens": (
        "eval_response_length eval.sampling.max_tokens eval_max_new_tokens generation_max_length eval_max_response_len"
    ),
    "eval.tasks": "eval_tasks",
    "rollout.group_size": (
        "num_generations n group_size num_samples_per_prompt n_samples_per_prompt rollout_n num_return_sequences "
        "n_samples group samples_per_prompt num_completions_to_sample num_samples_per_prompt_rollout "
        "rollouts_per_example rollouts_per_prompt num_responses num_rollouts_per_prompt num_rollouts grpo_samples "
        "rloo_k num_generations_per_prompt"
    ),
    "rollout.num_prompts": (
        "rollout_batch_size prompts num_prompts prompts_per_step num_groups gen_batch_size "
        "num_unique_prompts_rollout num_prompts_per_step rollout.batch_size num_unique_prompts"
    ),
    "rollout.max_tokens": (
        "max_completion_length max_new_tokens max_response_length response_length max_gen_len generate_max_len "
        "rollout.max_new_tokens sampling.max_tokens generation_max_new_tokens max_output_tokens "
        "max_tokens_to_generate max_gen_toks generate_max_length max_response_tokens max_generated_tokens "
        "rollout_max_response_len"
    ),
    "rollout.max_total_tokens": (
        "max_model_len max_total_length max_sequence_length pack_length packing_length rollout_max_context_len "
        "max_total_sequence_length"
    ),
    "rollout.temperature": "sampling_temperature sampling.temperature generation_temperature rollout_temperature",
    "rollout.top_p": "top_p vllm_top_p generation_top_p rollout_top_p",
    "rollout.top_k": "top_k generation_top_k rollout_top_k",
    "rollout.min_p": "min_p generation_min_p rollout_min_p",
    "rollout.min_tokens": "min_tokens min_new_tokens min_length min_response_length sampling.min_tokens",
    "rollout.repetition_penalty": "repetition_penalty generation_repetition_penalty sampling.repetition_penalty",
    "rollout.stop": "stop_strings stop stop_sequences stop_words rollout_stop sampling.stop",
    "rollout.engine": "generation_backend rollout_engine inference_engine rollout_backend",
    "rollout.engine.url": "vllm_server_base_url base_url server_url",
    "rollout.engine.gpu_memory_utilization": (
        "gpu_memory_utilization vllm_gpu_memory_utilization gpu_memory vllm_gpu_util"
    ),
    "rollout.engine.enforce_eager": "enforce_eager vllm_enforce_eager",
    "rollout.engine.dtype": "vllm.dtype inference.model.dtype rollout.dtype vllm_dtype",
    "rollout.engine.timeout_seconds": "vllm_server_timeout client.timeout request_timeout weight_broadcast.timeout",
    "rollout.engine.concurrency": "max_concurrent max_inflight_rollouts max_concurrency max_inflight_tasks",
    "rollout.engine.served_name": "served_model_name",
    "rollout.drop_uniform_groups": (
        "filter_groups dynamic_sampling filter_zero_std dynamic_filtering filter_zero_std_samples active_sampling "
        "online_difficulty_filtering dynamic_filtering_enable dynamic_sample"
    ),
    "rollout.max_rounds": "max_num_gen_batches max_resample_times dynamic_sampling_max_gen_batches",
    "rollout.uniform_by": "filter_groups.metric",
    "rollout.mask_truncated": (
        "mask_truncated_completions overlong_filtering mask_truncated overlong_mask overlong_filter "
        "zero_truncated_completions"
    ),
    "rollout.router_replay": (
        "router_replay enable_router_replay enable_rollout_routing_replay use_rollout_routing_replay "
        "enable_return_routed_experts rollout_router_replay"
    ),
    "rollout.staleness": (
        "async_level max_staleness async_steps max_off_policy_steps off_policy_steps max_async_level "
        "max_head_offpolicyness"
    ),
    "rollout.engine.max_model_len": "vllm_max_model_length inference.model.max_model_len vllm_maxlen",
    "rollout.max_turns": (
        "max_turns max_tool_calling_iterations max_assistant_turns max_steps_per_episode max_user_turns "
        "max_tool_calls max_tool_turns max_env_steps max_rollout_turns"
    ),
    "rollout.tool_seconds": "tool_timeout",
    "rollout.retries": "max_retries",
    "prompt.max_prompt_tokens": (
        "max_prompt_length prompt_max_len max_prompt_len max_prompt_token_length prompt_length max_input_length "
        "rollout_max_prompt_len max_input_seq_length"
    ),
    "data.max_length": (
        "sequence_len cutoff_len max_seq_len seq_len max_len seq_length maximum_length max_packed_sequence_len "
        "max_token_length max_length_tokens sequence_length model.seq_len data.seq_len"
    ),
    "task.split": (
        "prompt_dataset_split dataset_split dataset_train_split train_split datasets.split prompt_split dataset.split"
    ),
    "task.validation_share": "val_set_size test_size eval_split_ratio validation_split val_size split_dataset_ratio",
    "task.prompt_format": "prompt_format",
    "task.prompt_key": "prompt_key input_key question_key field_instruction prompt_column field_prompt",
    "task.messages_key": "field_messages messages_key sft_messages_key messages_field",
    "task.response_key": "response_key output_key field_output response_column",
    "task.answer_key": "answer_key label_key ground_truths_key ground_truth_key",
    "task.size": (
        "max_samples num_samples max_train_samples subset_size dataset_size train_max_samples data.max_samples"
    ),
    "environment": "env environment_factory environment_name env_name envs vf_env env.id gym_env",
    "objective": "rl policy_loss algorithm rl_algorithm loss_fn policy_loss.loss_mode policy_loss_type",
    "objective.clip_low": (
        "cliprange clip_ratio_low clip_eps eps_clip ppo_clip clip_coef clip_lower clip_range_low clip_epsilon "
        "ratio_clip_min"
    ),
    "objective.clip_high": (
        "epsilon_high clip_ratio_high eps_clip_high clip_high clip_higher clip_range_high ratio_clip_max"
    ),
    "objective.label_smoothing": "label_smoothing dpo_label_smoothing",
    "objective.odds_weight": "orpo_alpha",
    "objective.centering": "center_rewards_coefficient",
    "objective.tau_positive": "sapo_temperature_pos tau_pos",
    "objective.tau_negative": "sapo_temperature_neg tau_neg",
    "objective.desirable_weight": "desirable_weight kto_desirable_weight kto_chosen_weight",
    "objective.undesirable_weight": "undesirable_weight kto_undesirable_weight kto_rejected_weight",
    "objective.nll_weight": "cpo_alpha",
    "objective.value_weight": "vf_coef value_loss_coef vf_loss_coef",
    "objective.value_clip": "cliprange_value value_clip vf_clip",
    "advantage": "advantage_estimator adv_estimator algo.advantage.estimator",
    "reference.mixing": "ref_model_mixup_alpha ref_mixup_alpha",
    "reference.every": "ref_model_sync_steps ref_policy_update_freq ref_update_interval",
    "regularize.kl_coef": "kl_coef kl_loss_coef kl_beta kl kl_weight kl_tau",
    "regularize.entropy_coef": "entropy_coef entropy_coeff ent_coef entropy_bonus entropy_loss_coef entropy_beta",
    "kl_in_reward.weight": "init_kl_coef kl_in_reward_coef algo.kl.init_coef",
    "kl_in_reward.horizon": "horizon kl_horizon",
    "kl_in_reward.target": "kl_target algo.kl.target ppo_target",
    "model.name": (
        "base_model_config model_name_or_path model_name pretrained_model_name_or_path model_id base_model "
        "pretrain model_path pretrained lora_model_dir model.path base_model_name_or_path "
        "actor_model_name_or_path partial_pretrain base_model_path hf_checkpoint hf_assets_path initial_load_path"
    ),
    "model.dtype": "model_dtype dtype bnb_4bit_compute_dtype fsdp_config.dtype param_dtype",
    "model.load_bits": "bits quantization_bit quant_bits",
    "model.attention": "attn_implementation attention_implementation attn model.attn",
    "model.adapter.kind": "adapter",
    "model.adapter.rank": "lora_r r lora_rank rank max_lora_rank lora.rank",
    "model.adapter.alpha": "lora_alpha lora.alpha",
    "model.adapter.dropout": "lora_dropout lora.dropout",
    "model.adapter.targets": "target_modules lora_target_modules lora_target lora_attn_modules",
    "model.adapter.target_parameters": "lora_target_parameters target_parameters",
    "model.adapter.use_rslora": "use_rslora peft_use_rslora",
    "model.adapter.use_dora": "use_dora peft_use_dora",
    "train.router_aux_loss_coef": (
        "router_aux_loss_coef aux_loss_coef load_balancing_loss load_balancing_weight moe_aux_loss aux_loss_alpha "
        "moe_aux_loss_coef"
    ),
    "train.neftune_noise_alpha": "neftune_noise_alpha noisy_embedding_alpha neftune_alpha",
    "train.ema_decay": "ema_decay ema_beta",
    "teacher.name": (
        "teacher_model_name_or_path teacher_model teacher_model_path opd_teacher_model_name_or_path "
        "teacher_model.model_path"
    ),
    "teacher.top_k": "opd_topk distillation_topk loss_top_k teacher_top_k distillation_loss.topk gkd_logits_topk",
    "scale.processes": "num_processes nproc_per_node world_size num_gpus n_gpus_per_node ngpus num_train_workers",
    "scale.timeout_seconds": "ddp_timeout nccl_timeout timeout dist_timeout_seconds",
}

# A name of the tables, and the patterns of names that have its answer. A pattern is compared with a name, and with each
# section of a dotted name (``actor.profiler.steps``), the innermost first; one that ends with a dot only with sections.
FAMILIES = {
    "fsdp": "fsdp_config zero_hpz_* zpg wrap_policy data_parallel_*_dim",
    "tensor_parallel": (
        "megatron megatron_* tensor_parallel_* pipeline_* virtual_pipeline_* expert_parallel_* expert_model_* "
        "expert_tensor_* custom_sharded_*"
    ),
    "context_parallel": "context_parallel_* ring_attn_* ulysses_* sequence_parallel_*",
    "use_gradient_checkpointing": "recompute_* gradient_checkpointing_* activation_checkpointing_*",
    "ddp": "ddp_*",
    "torch_compile": "torch_compile_* compile_*",
    "triton_kernels": "unsloth_* lora_*_kernel flash_attn_* liger_* tiled_mlp_* fused_kernel_* kt_*",
    "fp8": "*fp8* fp4_* mxfp4_* nvfp4_* qat_*",
    "ptq": "quantizer quantizer_* quant_* gptq_* awq_* hqq_* export_quantization_*",
    "bitsandbytes": "bnb_* quantization_device_map",
    "gptq": "quantization",
    "multimodal": (
        "image_* *_images video_* audio_* vit_* aligner_* *_vit *_aligner vision_* *_vision_* *_pixels mm_* "
        "*_multi_modal_* *_multimodal *_multimodal_*"
    ),
    "freeze": "freeze_* *_frozen trainable_*",
    "loftq": (
        "loftq_* pissa_* oft_* boft_* vera_* adalora_* lora_ga_* fourier_* reft_* llamapro_* lisa_* relora_* lokr_* "
        "loha_* hra_* bone_* miss_* randlora_* lorafa_*"
    ),
    "galore": "galore_*",
    "offload": "*offload*",
    "apollo": "apollo_* badam_* lomo_* dion_* adam_mini_* use_badam grokfast_*",
    "loraplus": "loraplus_*",
    "diffusion": "diffusion_*",
    "use_pose": "pose_*",
    "kd": "kd_* distill_* distillation_*",
    "eaft_alpha": "eaft_*",
    "replay_buffer": "replay_buffer_* reroll_* skip_rollout_*",
    "curriculum": "curriculum_*",
    "tvpo": "chord_* vespo_* dppo_* tvpo_* gfpo_* pf_ppo_* vapo_*",
    "multi_objective_aggregation": "gdpo_*",
    "cosine_scaled_reward": "cosine_m*_len* repetition_*",
    "early_stopping": "early_stop* loss_watchdog_*",
    "ema": "ema_* bema_*",
    "r3": "router_replay_*",
    "rollout_is": "rollout_is_* rollout_rs_* rollout_correction",
    "sandbox_fusion": "code_pass_* code_apply_* sandbox_*",
    "llm_judge_model": "llm_judge_* judge_*",
    "overlong_buffer": "overlong_buffer overlong_buffer_*",
    "reward_model": "reward_model_*",
    "reward_manager": "reward_loop_* reward_manager",
    "rollout_func": "agent_loop_* gym_*",
    "sglang": "sglang_* trtllm_* lmdeploy_*",
    "use_wandb": "wandb. wandb_*",
    "comet": "swanlab_* trackio_* mlflow_* comet_* clearml_* neptune_* aim_*",
    "prometheus": "prometheus_* otel_* metrics_server_* queue_dashboard_*",
    "profiler": "*profiler *profiler_* profile_* *_profile nsys_* nsight_*",
    "log_level": "log. log_level_*",
    "log_completions": "trace. trace_*",
    "slurm": "slurm_* ray_* *beaker* oe_eval_* gs_* deployment. modal_* sky_*",
    "gpus": "*_num_nodes *_num_gpus_per_node",
    "gradio": "gradio_*",
    "export": "export_*",
    "hub_model_id": "hub_*",
    "tokenizer_name": "tokenizer_*",
    "model_init_kwargs": "is_*_derived_model",
    "config_path": "*_config_path",
    "max_num_seqs": "client. cudagraph_* cuda_graph_* speculative_* lora_modules_*",
}
# Whose options have the names of other tables behind their beginning: ``vllm_top_k`` is ``top_k``. These patterns count
# where the rest of the name is unknown.
CARRIERS = {"max_num_seqs": "vllm_*", "fsdp": "fsdp_* deepspeed_* ds_*"}
