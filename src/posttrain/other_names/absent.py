"""Options, methods and tools of the field that are not offered: the nearest way to the same end, and the names."""

from __future__ import annotations

# Options.
OPTIONS = {
    "every token of a completion is trained": "num_loss_tokens_to_skip",
    "every pair weighs the same; objective: robust_dpo is for noisy labels": ("use_weighting dpo_use_weighting"),
    "one objective at a time; objective: rpo adds the likelihood of the chosen answer to DPO": (
        "loss_weights dpo_loss_weights ptx_coef enable_channel_loss preference_loss_weight"
    ),
    "rollout.repetition_penalty is, and a reward can count repetitions": (
        "presence_penalty frequency_penalty no_repeat_ngram_size logit_bias logits_processors "
        "logits_processor bad_words allowed_token_ids encoder_repetition_penalty bad_words_ids "
        "exponential_decay_length_penalty suppress_tokens begin_suppress_tokens sequence_bias"
    ),
    "rollout.top_p, top_k and min_p are": "typical_p eta_cutoff epsilon_cutoff top_a min_tokens_to_keep",
    "rollout.max_tokens and rollout.min_tokens are the limits of a length": (
        "ignore_eos thinking_token_budget max_thinking_tokens reasoning_effort"
    ),
    "rollout.stop takes texts, which stay in the answer": "stop_token_ids include_stop_str_in_output",
    "answers are sampled; rollout.temperature, top_k and top_p say how, and eval.samples how many": (
        "num_beams beam_search num_beam_groups diversity_penalty length_penalty_beam early_stopping_beams best_of "
        "penalty_alpha contrastive_search use_beam_search stop_token_ids_beam eval_num_beams generation_num_beams"
    ),
    "an answer is free text; a reward can ask for a format": (
        "structured_outputs guided_decoding vllm_structured_outputs_regex vllm_guided_decoding_regex guided_regex "
        "guided_json response_format structured_outputs_regex guided_decoding_backend"
    ),
    "sampling has temperature, top_k, top_p, min_p, max_tokens, min_tokens, repetition_penalty and stop": (
        "generation_kwargs generation_config override_generation_config extra_body extra_args prompt_logprobs "
        "sampling_params temp_scheduler sampling.temp_scheduler max_time output_kind cache_config "
        "renormalize_logits remove_invalid_values token_healing guidance_scale watermarking_config "
        "prompt_lookup_num_tokens assistant_model disable_compile gen_kwargs"
    ),
    "an evaluation comes before the first step and after every eval.every steps": (
        "eval_delay eval_first skip_eval_on_resume eval_sequence_len"
    ),
    "what a tool answers is never trained; what the model writes always is": (
        "mask_tool_use mask_env mask_observations"
    ),
    "the distillation objective is trained without another loss": (
        "opd_loss_coef distillation_weight distillation_loss_coef teacher_tau opd_use_task_rewards "
        "use_task_rewards loss_max_clamp log_prob_min_clamp policy_loss_mode kd_ce_alpha kd_ratio kd_loss"
    ),
    "rewards of turns are summed; reward turn_rewards gives each turn its own": "reward_aggregator",
    "a run trains one model": "max_concurrent_runs multi_run",
    "one temperature for the whole run: rollout.temperature": (
        "temperature_schedule start_temperature end_temperature temperature_decay temperature_scheduler"
    ),
    "eval.patience ends a run by its primary metric; in Python on_step= and on_evaluation= stop it by any number": (
        "early_stopping_threshold "
        "loss_watchdog_patience loss_watchdog_threshold min_delta max_kl "
        "early_stopping_min_delta kl_threshold"
    ),
    "the reference is the start model, maybe moving (reference.every); a run may go on from another: model.name RUN": (
        "ref_model_name_or_path ref.model_name_or_path ref_model_revision ref_model_path "
        "ref_adapters ref_adapter_name ref_model_adapters ref_model_quantization_bit ref_model_type "
        "model_adapter_name ref_model_init_kwargs force_use_ref_model ref.model"
    ),
    "train.ema_decay averages after every update, with one decay": "bema bemacallback swa",
    "a teacher is a model in this process, teacher.name": (
        "distillation.n_gpus_per_node teacher_server_urls use_teacher_server teacher_model_server_url "
        "teacher_model_init_kwargs teacher_gpu_ids teacher_key kd_online_server_base_url kd_online_topk "
        "teacher_deepspeed"
    ),
    "a teacher has the student's tokenizer": (
        "use_uld_loss teacher_tokenizer_name_or_path uld_loss uld use_extended_uld"
    ),
    "the entropy term has a constant weight, regularize.entropy_coef": (
        "use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target"
    ),
    "a sequence stays on one GPU; scale.sharding divides the model": (
        "context_parallel_size ulysses_sequence_parallel_size sequence_parallel_degree sequence_parallel_size "
        "ring_attn_size ring_attn_func ring_attn_head_stride heads_k_stride model.cp context_parallel "
        "sequence_parallel ring_attention ulysses ring_head_stride cp_style"
    ),
    "scale.sharding: fsdp2 divides the model; rollout.engine.gpus divides it in vLLM": (
        "pipeline_parallel_size expert_parallel_size model.tp model.ep pipeline_model_parallel_size "
        "enable_expert_parallel ds.tensor_parallel_size tensor_parallel pipeline_parallel expert_parallel "
        "megatron parallelism_config pp_size ep_size tp_size megatron_config model.pp use_mca use_mbridge "
        "mbridge_config use_dist_checkpointing dist_checkpointing_path use_distributed_optimizer "
        "expert_parallel_backend enable_async_tensor_parallel"
    ),
    "start vLLM with its own options (posttrain serve-command), and give its rollout.engine.url": (
        "max_num_seqs max_num_batched_tokens enable_chunked_prefill load_format kv_cache_dtype swap_space "
        "cpu_offload_gb block_size rope_scaling rope_theta hf_overrides disable_log_stats disable_log_requests "
        "distributed_executor_backend vllm_model_impl attention_backend vllm_attention_backend max_loras "
        "lora_modules speculative_config speculative_model num_speculative_tokens speculative_decoding "
        "compilation_config cuda_graph_sizes cudagraph_capture_sizes max_seq_len_to_capture scheduling_policy "
        "num_scheduler_steps tool_call_parser enable_auto_tool_choice reasoning_parser limit_mm_per_prompt "
        "download_dir config_format disable_custom_all_reduce skip_tokenizer_init engine_kwargs "
        "engine_kwargs.vllm worker_extension_cls enable_reasoning float8_kv_cache max_log_len api_key "
        "uvicorn_log_level enable_prompt_embeds response_role quantization_config_file chunked_prefill "
        "layered_summon host port allowed_origins ssl_keyfile detokenize use_token_client max_batch_size "
        "disaggregation tasks_per_minute fast_inference_setup api_server_count skip_model_check dp_rank_count "
        "admin_base_url use_fp8_kv_cache serve_module allowed_local_media_path additional_config "
        "num_gpu_blocks_override preemption_mode async_scheduling enable_log_requests async_engine "
        "update_weight_buffer_size"
    ),
    "an adapter trains linear layers alone; leave model.adapter out to train all": (
        "modules_to_save lora_modules_to_save trainable_token_indices peft_trainable_token_indices "
        "train_embeddings embedding_learning_rate lora_bias bias lora_embedding_kernel additional_target"
    ),
    "an adapter has one rank and one alpha for all layers that model.adapter.targets names": (
        "layers_to_transform layers_pattern rank_pattern alpha_pattern lora_rank_pattern lora_alpha_pattern "
        "peft_layers_to_transform finetune_last_n_layers layer_replication fan_in_fan_out lora_fan_in_fan_out "
        "loraplus_lr_ratio loraplus_lr_embedding loraplus lora+ peft_layers_pattern peft_layer_replication "
        "lora_plus lorap_lr_ratio finetune_first_n_layers"
    ),
    "model.adapter has LoRA with use_dora, use_rslora and init_lora_weights": (
        "loftq_config loftq eva_config corda_config use_qalora lora_ga_config relora lisa_n_layers lisa galore "
        "pissa olora vera ia3 loha lokr adalora oft boft prefix_tuning prompt_tuning p_tuning bottleneck_adapter "
        "merge_adapter_weights relora_prune_ratio loftq_bits lora_on_cpu lora_fa lorafa lora_xs qalora lora_ga "
        "corda eva hra vblora fourierft xlora randlora delora shira task_type lora_task_type inference_mode "
        "auto_mapping peft_version ensure_weight_tying alora_invocation_tokens qalora_group_size runtime_config "
        "megatron_core arrow_config use_bdlora alora qgalore_rank lisa_step_interval lora_pro kasa_config "
        "velora_config s_lora monteclora_config layernorm_tuning adaption_prompt c3a module_dropout "
        "a2a_experimental peft_ensure_weight_tying qlora_sharded_model_loading use_swift_lora use_llama_pro "
        "llamapro reft tiny_lora num_virtual_tokens token_dim num_transformer_submodules prompt_tuning_init "
        "encoder_hidden_size fully_sharded_loras"
    ),
    "all layers are trained, or those of an adapter (model.adapter.targets)": (
        "freeze_visual_encoder freeze_vision_tower "
        "freezing_steps "
        "optim_target_modules finetuned_layers spectrum_top_fraction spectrum_model_name"
    ),
    "models read text only": (
        "freeze_mm_modules image_key images video_key limit_images max_images_per_prompt log_multimodal "
        "processor_type processor_kwargs multimodal vlm vision image_patch_size mm_processor_kwargs "
        "whisper_language whisper_task audio_key visionlanguage vision_language_model finetune_vision_layers "
        "vision_tower image_token use_audio_in_video norm_bbox crop_to_patches media_dir min_pixels max_pixels"
    ),
    "one learning rate, train.lr; a value head's is head.lr_ratio times it": (
        "lr_scheduler_kwargs num_cycles decay_steps "
        "jagged_restart_steps lr_div_factor layerwise_lr_decay cosine_constant_lr_ratio loraplus_lr "
        "lr_quadratic_warmup num_decay_steps wsd lr_warmup_init lr_decay_steps weight_decay_incr_style "
        "use_checkpoint_opt_param_scheduler zero_indexed_step jagged_restart_warmup_steps "
        "jagged_restart_anneal_steps lr_wsd_decay_style lr_wsd_decay_steps decay_ratio"
    ),
    "weight decay is that of every trained weight: optimizer.weight_decay": (
        "set_weight_decay_on_bias_and_norm no_decay_params"
    ),
    "weights of the model in training are fp32 or bf16; `posttrain quantize` makes 8 or 4 bits after it": (
        "load_in_fp8 fp8 fp8_config qat.group_size quantization.group_size qat qat_scheme "
        "quantization_aware_training fp4 mxfp4 nvfp4 "
        "fp8_enable_fsdp_float8_all_gather float8 qat.activation_dtype qat.weight_dtype"
    ),
    "supervised rows are weighed by objective and aggregate; objective.label_smoothing is for dpo": (
        "label_smoothing_factor class_weights focal_loss use_eaft eaft_alpha use_eaft_loss eaft_k"
    ),
    "a model's own loss terms are not trained": ("z_loss mtp"),
    "rewards are used as they are; advantage: normalized or batch_normalized scales them": (
        "reward_clip_range reward.clip_range cliprange_reward normalize_reward reward.normalize_enable "
        "use_score_scaling use_score_norm score_clip reward_scaling reward_clip whiten_rewards reward_shaping "
        "reward_scale reward_normalization ppo_score_norm ppo_whiten_rewards"
    ),
    "every answer of a batch is trained once; train.ppo_epochs passes over it again": (
        "replay_buffer_size replay_buffer replay_recompute_logps reroll_start_fraction buffer experience_replay "
        "hard_fraction easy_fraction use_pf_ppo prioritized_replay skip_rollout skip_dump_dir rollout.skip"
    ),
    "prompts are drawn in turn; rollout.drop_uniform_groups leaves out those that are too easy or too hard": (
        "easy_threshold hard_threshold no_resampling_pass_rate curriculum_sampling curriculum curriculum_learning "
        "dynamic_filtering_range difficulty_filter adaptive_curriculum pass_rate_filter custom_sampler sampler "
        "difficulty_sampling filters dynamic_filtering_reward_range dynamic_sampling_filter_path "
        "buffer_filter_path"
    ),
    "rollouts are prefetched whole: rollout.staleness": (
        "partial_rollout_enable partial_rollout strict_async_level async_queue_size over_sample_rate "
        "cancel_inflight_rollouts_on_eval streaming_partial_batch prefetch_depth queue_maxsize fully_async "
        "over_sampling_batch_size"
    ),
    "rollout.staleness: 1 or more samples while the trainer works": (
        "async_enable async_rl async_prefetch async_training async_train async asynchronous_training use_data_producer"
    ),
    "the trainer waits for value and policy together; head.lr_ratio sets the speed of the value model": (
        "critic_warmup critic_warmup_steps freezing_actor_steps num_critic_only_steps"
    ),
    "a value model is kept in the run's checkpoint": "save_value_network value_head_prefix",
    "checkpoints are written at train.save_every, and kept by train.keep_checkpoints": (
        "keep_interval ckpt.keep_interval save_on_each_node enable_jit_checkpoint async_save ckpt.max_mem "
        "dynamic_checkpoint save_on_sigterm esi_redundant_time del_local_ckpt_after_load default_hdfs_dir "
        "use_flash_ckpt enable_async_checkpointing async_checkpointing save_async ephemeral_save_interval "
        "create_checkpoint_symlink max_ckpt_mem use_fault_tolerance async_mode fault_tolerance"
    ),
    "metrics are in metrics.jsonl, which any monitor may read; `explain tracker` lists what shows them": (
        "heartbeat metrics_server use_otel_metrics prometheus prime_monitor use_comet "
        "hf_mlflow_log_artifacts wandb_run_id comet_mode comet_online "
        "comet_project_name comet_api_key "
        "comet_workspace wandb_watch wandb_log_model trackio_bucket_id "
        "send_slack_alerts enable_queue_dashboard queue_dashboard_port monitor_gpus gpu_monitoring"
    ),
    "times of each step are in metrics.jsonl; a profiler of yours can run the command": (
        "profiler profiler.warmup_steps profiler_steps memory_profiler_path trace_path torch_profiler "
        "profile_steps nsys bench profiling global_profiler.steps"
    ),
    "start the command with your cluster's own tool; scale.launcher: torchrun or ray": (
        "slurm slurm.partition slurm_partition resources_per_worker ray_init try_launch_beaker_eval_jobs "
        "try_auto_save_to_beaker gs_bucket_path oe_eval_tasks oe_eval_max_length hf_metadata_dataset beaker "
        "skypilot placement_strategy num_train_gpus num_infer_gpus enable_resource_pool eval_priority "
        "eval_workspace gs_checkpoint_state_dir"
    ),
    "rows are prepared before: a file of them is task.path": (
        "dataset_exact_deduplication deduplication streaming streaming_dataset push_dataset_to_hub "
        "dataset_config_name dataset_shard_num shards dataset_transform_fn custom_cls data.custom_cls.path "
        "min_sample_len preprocess_fn dataset_mix_dir data_preprocessing formatting_func field_model "
        "message_property_mappings message_field_role message_field_content ds_type dataset_shard_idx "
        "preprocess_shards min_length_filter dataset_config dataset_subset subset partition filter_fn "
        "input_transform input_format conversation shards_idx split_thinking logprobs_field drop_system_message "
        "datasets.skip no_input_format system_format chosen_format rejected_format completion_format "
        "standardize_sharegpt stopping_strategy datagen custom_dataset_info preprocess_iterable buffer_size "
        "shuffle_buffer_size subsets splits dataset.name map_eos_token mapping"
    ),
    "tokens are the model's own; none are added": (
        "resize_token_embeddings_to_32x resize_token_embeddings added_tokens_overrides resize_model_vocab "
        "additional_special_tokens new_special_tokens shrink_embeddings mean_resizing_embeddings "
        "fix_untrained_tokens resize_vocab split_special_tokens add_tokens init_special_tokens"
    ),
    "the model is loaded as its folder says; model.dtype, load_bits and attention change that": (
        "model_init_kwargs override_config additional_model_arguments auto_model use_exact_model_name "
        "model_kwargs hf_config_path external_lib max_memory gpu_memory_limit model.impl use_kernels "
        "device_map_planner_kwargs low_cpu_mem experts_implementation model_type use_shm moe_use_grouped_mm "
        "tiled_mlp unsloth_tiled_mlp deepcompile ds.deepcompile use_onebitllms quantize_moe_experts "
        "scaling_softmax text_only overrides_of_model_config overrides_of_model_kwargs cls_model_config "
        "type_of_model model_quantization_config model_quantization_config_kwargs torchdistx_path "
        "llama4_linearized_experts shift_attn s2_attention mixture_of_depths block_diag_attn load_using_meta "
        "index_cache actor_init_on_gpu init_strategy problem_type base_model_attribute_name use_kt cpu_infer "
        "fast_moe experimental_skip_move_to_device flash_optimum scaling_softmax_factor scaling_softmax_bias "
        "chunk_size check_model temporary_patch past_index tpu_num_cores ignore_mismatched_sizes tp_plan flavor "
        "qkv_format print_after_conversion attention_backend_config"
    ),
    "model.attention: sdpa takes torch's fastest kernel": (
        "xformers_attention flex_attention sage_attention xformers flex_attn sliding_window flash_attention_4 fa4 "
        "flex_attn_compile_kwargs"
    ),
    "metrics are computed by rewards and graders; eval.tasks names what is measured": (
        "compute_metrics preprocess_logits_for_metrics include_for_metrics batch_eval_metrics "
        "prediction_loss_only do_predict do_bench_eval bench_dataset do_causal_lm_eval eval_causal_lm_metrics "
        "generate_during_eval eval_do_concat_batches eval_use_gather_object lm_eval_tasks length_column_name "
        "bench_split num_sample_generations compute_accuracy predict_with_generate eval_metric acc_strategy "
        "eval_use_evalscope eval_dataset_args eval_backend lm_eval_model lm_eval_batch_size metric result_path "
        "write_batch_size return_last_hidden_state cache_requests "
        "check_integrity write_out include_path predict_only"
    ),
    "questions are asked without examples; a file of prompts with examples is task: jsonl": (
        "num_fewshot fewshot_as_multiturn n_shot few_shot num_shots"
    ),
    "a judge has one rubric, an option of the reward judge": "apply_evolving_rubric_reward max_active_rubrics",
    "plain sampling in this process, or vLLM": (
        "use_transformers_paged use_transformers_continuous_batching transformers_continuous_batching_config "
        "use_transformers_continuous paged_attention_hf"
    ),
    "every group counts its own answers; staleness is bounded by rollout.staleness": "use_bias_correction_kl",
    "recipes are YAML files; Python has pt.train": (
        "plugins hydra_config config_overrides external_plugins custom_register_path"
    ),
    "steps keep one checkpoint each; weights are not averaged": (
        "checkpoint_averaging weight_averaging polyak polyak_averaging ema_weights"
    ),
    "rollout.max_turns and rollout.tool_seconds are the limits of tools": (
        "max_parallel_calls max_tool_response_length tool_response_truncate_side tool_max_concurrency "
        "only_reward_good_outputs number_documents_to_search search_api_endpoint code_tool_api_endpoint "
        "tool_format agent_template num_repeat_rollouts"
    ),
    "an advantage has the options that `posttrain explain advantage` lists": (
        "length_weighted_mean length_shaping adv_tau advantage.import_path"
    ),
    "the optimizer makes its step after the whole gradient, whose norm train.max_grad_norm clips": (
        "optimizer_in_bwd optim_in_bwd early_step_in_backward"
    ),
}

# Methods and tools.
METHODS = {
    (
        "the nearest are the objectives grpo, gspo, cispo, gmpo, sapo and ppo, or a function of your own as "
        "objective: module:function"
    ): (
        "tvpo gfpo a2po vespo sgpo srpo gtpo fspo arpo cppo lcpo luspo opo gpg "
        "gspo_plus scaf_grpo treepo cgpo kpo grpo++ grpo_s grpo_lead tpo_rl vineppo vapo prime remax raft raft++ "
        "bnpo async_grpo ftpo drpo gepo gvpo spo_rl dcpo trpo a2c a3c impala sac td3 acer awr qrpo rpg l1_rl apa "
        "pf_ppo crr ripo asppo aspo dapo_plus gapo vppo bapo papo mapo hgpo gigpo pro_grpo soft_grpo ttrl "
        "spiral grpo_care lspo embedding_grpo stpo dgpo tree_grpo rft rlpr intuitor empo tvpo_truncation_cap "
        "vespo_k_pos vespo_k_neg vespo_lambda_pos vespo_lambda_neg "
        "ppg capo tic_grpo mgrpo pgpo ebft gpo simple_gspo chord calculate_sum_pi_squared "
        "sum_pi_squared_checkpointing use_policy_gradient"
    ),
    (
        "the nearest are the objectives dpo, ipo, rpo, robust_dpo, exo, kto, orpo and simpo, or a function of "
        "your own as objective: module:function"
    ): (
        "xpo bcotrainer bcoconfig ntpo dpop tdpo wpo betadpo beta_dpo rdpo r_dpo cal_dpo step_dpo "
        "aot_unpaired sigmoid_norm squarechi kto_pair alphapo alpha_po spin nash_md "
        "nashmd rrhf pro slic_hf cringe chipo chi_po mallows_dpo smaug tpo sft_dpo d2po odpo "
        "dpo_shift focal_po lusdpo kto_zero bpo minor_dpo senpo spo drdpo dr_dpo wdpo ppo_dpo eto mdpo vdpo copo "
        "sdpo_stepwise ropo gpo_preference hdpo iw_dpo dpo_norm_wpo pref_bco_weight prompt_sample_size "
        "min_density_ratio max_density_ratio dpo_norm_loss"
    ),
    "`posttrain sweep` of DPO runs; preference/dpo samples its pairs once, before training": (
        "online_dpo onlinedpo iterative_dpo onlinedpotrainer xpotrainer nashmdtrainer self_rewarding self_play "
        "selfplay oaif rlaif_online"
    ),
    "the nearest are the recipes distillation/*, rl/sdpo (self-distillation) and objective: distillation": (
        "minillm distillm gold iw_opd skd akl dskd taid speculative_kd asft ssd "
        "seqkd abkd goldtrainer goldconfig use_asft_loss "
        "asft_alpha"
    ),
    "a method of unlearning: objective dpo with your own pairs, or a function as objective: module:function": (
        "npo simnpo rmu gradient_ascent unlearning graddiff"
    ),
    "the nearest are adamw, adamw_8bit, adafactor, lion and muon": (
        "sophia shampoo soap sgd rmsprop adagrad adadelta "
        "paged_adamw_32bit apollo galore_adamw schedule_free schedule_free_adamw came stable_adamw "
        "lamb lars nadam radam ademamix adopt prodigy dion lomo adalomo paged_lion_8bit "
        "grokadamw dadaptation optimi_adamw adamw_apex_fused torch_adamw_4bit adamw_torch_4bit "
        "scion kron psgd distributed_shampoo adamw_anyprecision nesterov muonclip mars normuon optim.nesterov "
        "muon.nesterov adam_mini adam_beta3 adam_epsilon2 dion_lr dion_momentum dion_rank_fraction optim.momentum "
        "qgalore q_galore dpo_use_paged_optimizer use_adam_mini dion_rank_multiple_of grokfast"
    ),
    "track: trackio, wandb, mlflow, swanlab or tensorboard; metrics.jsonl has every number for others": (
        "clearml comet comet_ml neptune aim dvclive codecarbon azure_ml flyte dagshub "
        "vemlp_wandb rerun polyaxon sacred aimstack trackio_static_space_id weave "
    ),
    "rollout.engine: native (in this process) or vllm": (
        "sglang tgi llamacpp llama.cpp lmdeploy ollama hf tensorrt_llm trtllm tensorrt mlx exllama exllamav2 "
        "transformers_engine mii deepspeed_mii hf_generate text_generation_inference engine_kwargs.sglang "
        "engine_kwargs.trtllm slime_engine"
    ),
    "`posttrain runs export` writes safetensors, which converters to other formats read": "onnx",
    "task: jsonl takes its rows from a file or the hub (hf:NAME), and names their grader": (
        "gpqa ifeval_bench mmlu_pro livecodebench bigcodebench arc arc_challenge arc_easy hellaswag truthfulqa "
        "winogrande aime26 aime2026 aime humaneval_plus humaneval+ mbpp_plus mbpp+ gsm8k_platinum gpqa_diamond "
        "bbh big_bench_hard boolq piqa triviaqa naturalquestions nq hle swe_bench swebench alpacaeval "
        "alpaca_eval mt_bench mtbench arena_hard ifbench simpleqa super_gpqa supergpqa zebralogic gsm1k "
        "gsm_symbolic mgsm aqua mawps openbookqa commonsenseqa squad wikitext lambada c_eval ceval cmmlu bfcl "
        "tau_bench browsecomp deepscaler dapo_math dapo_17k orz openr1 numinamath tulu tulu3 alpaca dolly oasst "
        "openassistant lima openhermes ultrachat magpie dapo_math_17k big_math skywork_reward helpsteer "
        "helpsteer2 helpsteer3 rewardbench reward_bench shp nectar open_orca slimorca beavertails toxicity "
        "harmbench advbench xstest wildguard countdown amc23 hmmt hmmt25 brumo25 polymath"
    ),
    "a reward reads one answer; a reward of your own is rewards: [module:function]": (
        "length_penalty_reward cosine_scaled_reward get_cosine_scaled_reward repetition_penalty_reward "
        "get_repetition_penalty_reward tag_count_reward reasoning_accuracy_reward len_reward code_reward_e2b "
        "ioi_code_reward length_reward bleu rouge bertscore perplexity_reward sentiment toxicity_reward "
        "repetition_n_grams repetition_max_penalty"
    ),
    "search at inference is best_of of a reward model: `posttrain evaluate MODEL --best-of REWARD_MODEL`": (
        "mcts tree_search tree_of_thoughts lookahead rstar beam_search_prm process_search"
    ),
    "the nearest are `posttrain activations`, `posttrain sae` and `generate --steer`": (
        "activation_patching logit_lens tuned_lens probing linear_probe attribution_patching circuits "
        "causal_tracing transcoder crosscoder path_patching jumprelu gated_sae matryoshka"
    ),
    "merge an adapter with `posttrain runs export NAME --to FOLDER --merge`; models are not merged": (
        "model_merging mergekit slerp merge_method ties_merging dare model_soup task_arithmetic merge_models "
        "mergemodelcallback llmcompressor"
    ),
    "training reads rows of one turn or several, each whole": (
        "fim fill_in_the_middle mlm masked_lm span_corruption pose use_pose long_context_extension yarn"
    ),
    "encoder models are not trained; models are decoders (CausalLM)": (
        "seq2seq seq2seqtrainer is_encoder_decoder bert t5 num_labels sequence_classification "
        "token_classification embedding_model cross_encoder diffusion dllm diffusion.eps"
    ),
    "no kernel is written by hand; torch computes": "triton_kernels flash_infer use_v1_kernels",
}
