"""Options of other libraries that are not needed here, with the reason."""

from __future__ import annotations

# What needs no key: the reason, and the names.
NOT_NEEDED = {
    "weights of an adapter are fp32": "model.lora.dtype",
    "a model has one adapter": "adapter_name",
    "a reward model is in the trainer's process": "reward_model.n_gpus_per_node",
    "weights are stored as safetensors": "save_safetensors safe_serialization save_format use_safetensors",
    "the tokenizer is the model's own (model.name)": (
        "tokenizer_name tokenizer_type tokenizer_name_or_path tokenizer_path tokenizer_config tokenizer_mode "
        "tokenizer_use_fast use_slow_tokenizer disable_fast_tokenizer use_fast tokenizer use_fast_tokenizer "
        "input_tokenizer merges_file get_tokenizer_fn fix_tokenizer"
    ),
    "the end of an answer is the tokenizer's, or that of its chat template": (
        "eos_token stop_token eos_token_id eot_tokens stop_token_id"
    ),
    "rollout.router_replay passes the experts on in memory and in checkpoints": (
        "router_replay.record_file router_replay.replay_file"
    ),
    "with rollout.top_p, top_k or min_p the sets that sampling kept are replayed in training": (
        "keep_sampling_mask sampling_replay sampling_mask return_sampling_mask enable_return_sampling_mask "
        "use_sampling_mask replay_sampling_mask mask_replay keep_sampling_masks"
    ),
    "special tokens are the tokenizer's own": (
        "special_tokens bos_token bos_token_id add_bos unk_token skip_special_tokens add_special_tokens "
        "add_eos_token add_bos_token eos bos spaces_between_special_tokens forced_bos_token_id "
        "forced_eos_token_id"
    ),
    "reference log-probabilities are computed once where data and reference are fixed (without a section reference)": (
        "precompute_ref_log_probs dataset_skip_cache cache_logprobs_only reference_logprobs_cache_path"
    ),
    "rows are read once, before the first step": (
        "dataloader_num_workers dataset_num_proc dataset_prepared_path preprocessing_num_workers "
        "dataset_processes dataloader_pin_memory dataloader_prefetch_factor dataloader_persistent_workers "
        "overwrite_cache dataset_cache_mode dataset_local_cache_dir dataset_config_hash skip_prepare_dataset "
        "dataset_keep_in_memory filter_overlong_prompts_workers dataloader_in_order "
        "dataloader_multiprocessing_context dataset_kwargs packing_num_proc lazy_tokenize cached_dataset "
        "load_from_cache_file preprocessing_batch_size data_shared_file_system num_dataset_shards_to_save "
        "dataset_config_eval_hash sample_packing_mp_start_method eval_num_proc"
    ),
    "rows are read once; scale.processes is the number of processes": "num_workers reward_num_workers",
    "rows are shuffled anew in every epoch, by train.seed": (
        "shuffle shuffle_dataset shuffle_merged_datasets shuffle_before_merging_datasets train_sampling_strategy "
        "dataset_shuffle val_dataset_shuffle train_dataloader_shuffle disable_shuffling shuffle_eval_dataset "
        "validation_shuffle sample_packing_sequentially rollout_shuffle"
    ),
    "batches are packed, without padding": (
        "group_by_length pad_to_sequence_len pad_to_multiple_of pad_to_length pad_mode allow_world_padding"
    ),
    "rows are always packed, and never see one another": (
        "packing eval_sample_packing sample_packing padding_free remove_padding use_remove_padding "
        "packing_strategy eval_packing packing_samples sequence_packing dpo_padding_free pack_sequences bfd "
        "sample_packing_group_size multipack batch_flattening pack_function neat_packing sample_packing_bin_size "
        "multipack_real_batches pretrain_multipack_buffer_size pretrain_multipack_attn "
        "pretraining_sample_concatenation streaming_multipack_buffer_size sample_packing_eff_est dataset.packed "
        "data_flattening"
    ),
    "micro-batches have train.micro_batch_tokens at most": (
        "use_dynamic_bsz log_prob_use_dynamic_bsz dynamic_batch_enable balance_batch use_dynamic_batch "
        "dynamic_batch_size balance_dp_token balance_data make_sequence_length_divisible_by dynamic_batching"
    ),
    "every step has a whole batch; the rest of an epoch goes on with the next": "dataloader_drop_last drop_last",
    "prompts above prompt.max_prompt_tokens are left out and counted": "filter_overlong_prompts",
    "rows that are too long are left out and counted, never cut": (
        "truncation excess_length_strategy truncation_mode truncation_side max_reprompt_len truncation_strategy "
        "truncate_prompt_tokens"
    ),
    "the engine fills its batches; eval.num_examples is the number of rows": (
        "eval_batch_size val_batch_size per_device_eval_batch_size eval_accumulation_steps "
        "vllm_generate_batch_size per_gpu_eval_batch_size batch_size_val max_validation_batches"
    ),
    "eval.every above 0 evaluates before the first step, too": (
        "val_before_train eval_on_start eval_on_step_0 eval_base_model val_at_start"
    ),
    "every completion is recorded in the run; eval.prompts are answered at every evaluation": (
        "log_completions log_val_generations num_completions_to_print rollout_data_dir log_completions_steps "
        "save_traces rollouts_save_path log_extras validation_data_dir log_samples log_unique_prompts trace "
        "eval.save log_extras.samples save_debug_rollout_data num_val_samples_to_print"
    ),
    "every step is written to metrics.jsonl": (
        "logging_steps log_interval logging_first_step include_tokens_per_second logging_strategy "
        "log_every_n_steps include_num_input_tokens_seen logging_nan_inf_filter include_tkps record_entropy "
        "calculate_entropy logging_freq log_freq log_every log_steps log_every_steps logging_interval log_entropy "
        "plot_loss include_effective_tokens_per_second log_rollout_offpolicy_metrics log_peak_memory_stats perf "
        "total_num_tokens total_supervised_tokens print_param_status"
    ),
    "notices are short; POSTTRAIN_TRACEBACK shows where an error arose": (
        "log_level log_level_replica log.level log_on_each_node log.file debug debug_rollout_only debug_train_only"
    ),
    "log-probabilities and the head are always computed in fp32": (
        "cast_lm_head_to_fp32 lm_head_fp32 upcast_logits upcast_layernorm upcast_lmhead_output embeddings_skip_upcast"
    ),
    "a model's own dropout is off; model.adapter.dropout is the adapter's": (
        "disable_dropout attention_dropout hidden_dropout"
    ),
    "a vLLM server on the trainer's own GPU sleeps while it computes": (
        "vllm_enable_sleep_mode free_cache_engine enable_sleep_mode vllm.enable_sleep ds.enable_sleep "
        "multi_stage_wake_up vllm_enable_sleep enable_sleep deepspeed_enable_sleep sleep_mode sleep sleep_level "
        "unsloth_vllm_standby"
    ),
    "weights go to a vLLM server whenever they have changed, over NCCL or files": (
        "weight_broadcast weight_broadcast.type vllm_sync_backend sync_backend weight_sync_steps "
        "vllm_sync_interval parameter_sync_step vllm_group_port vllm_sync_frequency rollout_transport "
        "gather_whole_model ds3_gather_for_generation inflight_updates update_weights_bucket_megabytes "
        "vllm_lora_sync weight_sync move_model_batches wait_for_weights_timeout steps_before_sync "
        "vllm_sync_with_ray transfer_queue checkpoint_engine"
    ),
    "torchrun's environment says it": "local_rank master_addr master_port",
    "all keys of a row are kept in its meta": (
        "remove_unused_columns label_names dataset_target_columns return_raw_input_ids return_raw_chat "
        "return_full_prompt metadata_key"
    ),
    "batches are packed, and positions follow the lengths": "padding_side padding_value padding",
    "masks come from lengths, not from a padding token": (
        "pad_token pad_token_id label_pad_token_id ignore_pad_token_for_loss"
    ),
    "layers run as they are": (
        "torch_compile torch_compile_backend torch_compile_mode use_torch_compile compile model.compile fullgraph "
        "torchdynamo use_ipex jit_mode_eval unsloth_force_compile"
    ),
    "log-probabilities are computed in pieces, so that logits never exist whole": (
        "use_liger_kernel use_liger use_liger_loss use_liger_grpo_loss liger_kernel_config use_fused_kernels "
        "chunked_cross_entropy fused_lm_head_chunk_size entropy_from_logits_with_chunking dpo_use_liger_kernel "
        "entropy_from_logits_chunk_size flash_attn_cross_entropy return_logits liger liger_kernel "
        "unsloth_num_chunks compute_fp32_loss chunked_cross_entropy_num_chunks cut_cross_entropy "
        "liger_fused_linear_cross_entropy liger_cross_entropy num_output_chunks fused_kernel_options "
        "unsloth_logit_chunk_multiplier unsloth_cross_entropy_loss unsloth_return_logits "
        "unsloth_return_hidden_states logprob_chunk_size enable_loss_parallel"
    ),
    "log-probabilities are computed where a token is trained": "logits_to_keep",
    "log-probabilities of the sampler are stored with each answer": (
        "logprobs max_logprobs logprobs_mode top_logprobs output_scores output_logits return_dict_in_generate"
    ),
    "a checkpoint holds what resuming needs; `posttrain runs export` gives the model alone": (
        "save_only_model save_hf save_contents load_contents ckpt.weights save_16bit weights_only "
        "save_weights_only save_adapter_weights_only save_sharded save_adapter_separately skip_optimizer "
        "save_hf_ckpt disable_ds_ckpt use_ds_universal_ckpt maximum_memory_usage temporary_location "
        "state_dict_type final_state_dict_type load_weight save_hf_weights last_save_model_only export_dtype "
        "exclude_from_loading checkpoint.enable"
    ),
    "sampling always caches": "use_cache cache_implementation",
    "prompts share the computation of their beginnings: natively within a group, in vLLM by its default": (
        "enable_prefix_caching vllm_enable_prefix_caching prefix_caching use_prefix_grouper prefix_cache"
    ),
    "a new run has a new folder; nothing is overwritten": (
        "overwrite_output_dir do_not_randomize_output_dir exist_ok add_version clean_output_dir "
        "add_seed_and_date_to_exp_name"
    ),
    "whether a metric is better high or low is known": "greater_is_better higher_is_better",
    "training begins with `posttrain train`": "do_train train_mode",
    "chosen and rejected answers are computed together": "concatenated_forward dpo_concat",
    "a run follows its recipe when it is resumed, bit for bit": (
        "ignore_data_skip skip_dataloader skip_progress restore_callback_states_from_checkpoint skip_scheduler"
    ),
    "torch's allocator manages the memory": (
        "torch_empty_cache_steps gc_steps gc_collect_steps low_cpu_mem_usage skip_memory_metrics gc gc_freq"
    ),
    "adamw runs in its fastest form": "fused_optimizer optimizer_impl fused",
    "processes talk over NCCL on GPUs and gloo on CPUs": (
        "ddp_backend ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp "
        "accelerator_config reshard_after_forward use_orig_params overlap_comm disable_trace_cache "
        "sync_each_batch"
    ),
    "every process has one GPU, and the whole model without scale.sharding": (
        "dp_replicate data_parallel_size dp_replicate_size inference.parallel.dp data_parallel"
    ),
    "unknown keys are always refused": "strict ignore_args_error forbid_unknown",
    "there is one implementation": "use_legacy_worker_impl use_v1",
    "the tokens that were sampled are the tokens that are trained": (
        "tokenization_sanity_check_mode ignore_input_ids_mismatch trajectory_strategy use_inference_chat_template"
    ),
    "the weights of an adapter are fp32, also where the model's are bf16": (
        "lora_dtype autocast_adapter_dtype peft_autocast_adapter_dtype"
    ),
}
