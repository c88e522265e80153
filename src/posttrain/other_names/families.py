"""Options of other libraries that belong together, by the beginning of their name or by their section."""

from __future__ import annotations

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
    "gdpo": "chord_* vespo_* dppo_* tvpo_* gfpo_* gdpo_* pf_ppo_* vapo_*",
    "cosine_scaled_reward": "cosine_m*_len* repetition_*",
    "early_stopping": "early_stop* loss_watchdog_*",
    "ema": "ema_* bema_*",
    "router_replay": "router_replay_*",
    "rollout_is": "rollout_is_* rollout_rs_* rollout_correction",
    "sandbox_fusion": "code_pass_* code_apply_* sandbox_*",
    "llm_judge_model": "llm_judge_* judge_*",
    "overlong_buffer": "overlong_buffer overlong_buffer_*",
    "reward_model": "reward_model_*",
    "reward_manager": "reward_loop_* reward_manager",
    "rollout_func": "agent_loop_* gym_*",
    "sglang": "sglang_* trtllm_* lmdeploy_*",
    "use_wandb": "wandb. wandb_*",
    "swanlab": "swanlab_* trackio_* mlflow_* comet_* clearml_* neptune_* aim_*",
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
