"""Classes of other libraries and terms of the field: the recipe, the key or the command that is meant here."""

from __future__ import annotations

TERMS = {
    "the recipes rl/grpo and tiny/grpo: `posttrain train tiny/grpo`": (
        "grpotrainer grpoconfig grpo_trainer r1_zero_training deepseek_r1_training group_relative_policy_optimization"
    ),
    "the recipes tiny/sft and sft-*: `posttrain train tiny/sft`": (
        "sfttrainer sftconfig sft_trainer sft supervised_fine_tuning supervised_finetuning instruction_tuning "
        "finetuning fine_tuning instruct_tuning"
    ),
    "the recipe preference/dpo: `posttrain train preference/dpo`": (
        "dpotrainer dpoconfig dpo_trainer direct_preference_optimization"
    ),
    "the recipes tiny/rm and rm-*: `posttrain train tiny/rm`": (
        "rewardtrainer rewardconfig reward_trainer rm reward_modelling reward_modeling rm_trainer train_rm"
    ),
    "the recipe preference/kto: `posttrain train preference/kto`": "ktotrainer ktoconfig kto_trainer bcotrainer_kto",
    "the recipe preference/orpo: `posttrain train preference/orpo`": "orpotrainer orpoconfig",
    "the recipes preference/cpo and preference/simpo": "cpotrainer cpoconfig simpotrainer simpoconfig",
    "the recipe rl/ppo: `posttrain train rl/ppo`": (
        "ppotrainer ppoconfig ppo_trainer ppov2trainer ppov2config rayppotrainer proximal_policy_optimization"
    ),
    "the recipe rl/rloo: `posttrain train rl/rloo`": "rlootrainer rlooconfig rloo_trainer",
    "the recipe rl/reinforce-plus-plus": "reinforce++ reinforce_plus_plus reinforcepp rpp reinforce++_baseline",
    "the recipes distillation/*, such as distillation/reverse-kl": (
        "gkdtrainer gkdconfig distillationtrainer distillationconfig gkd knowledge_distillation kd "
        "minillmtrainer generalized_knowledge_distillation"
    ),
    "the recipe distillation/on-policy-distillation": "opd on_policy_distill",
    "the recipe rl/sdpo": "sdpotrainer sdpoconfig self_distillation",
    "the recipe tiny/sdft": "sdft sdfttrainer sdftconfig self_distillation_ft",
    "the recipe tiny/opsd": "opsd opsdtrainer on_policy_self_distillation",
    "the recipe tiny/prm: `posttrain train tiny/prm`": (
        "prmtrainer prmconfig prm process_reward process_reward_modeling step_reward process_supervision"
    ),
    "the recipe tiny/orm: `posttrain train tiny/orm`": "orm outcome_reward outcome_reward_model outcome_supervision",
    "the recipe rl/gmpo": "gmpotrainer gmpoconfig",
    "the recipe rl/dapo": "dapo_trainer decoupled_clip",
    "the recipe rl/rejection-sampling": "rejection_sampling_ft rso rejection_finetuning best_of_n_training",
    "a recipe: `posttrain recipes` lists them, and `posttrain train RECIPE` trains": (
        "trainer trainingarguments training_arguments seq2seqtrainingarguments training_args trl trl_config "
        "scriptarguments modelconfig axolotl llamafactory llama_factory openrlhf verl unsloth prime_rl "
        "open_instruct torchtune ms_swift yaml hyperparameters slime torchtitan nemo_rl verl_config "
        "trl_sft trl_grpo"
    ),
    "pt.Trainer, the parts of a training step for a loop of your own": (
        "training_step custom_trainer own_loop training_loop custom_loop actorrolloutrefworker dataproto tinker"
    ),
    "model.adapter, a LoRA adapter through peft: rank, alpha, dropout, targets": (
        "loraconfig peftmodel get_peft_model peftconfig automodelforcausallmwithvaluehead peft_model "
        "low_rank_adaptation lora_config automodelforpeft adapters parameter_efficient_fine_tuning"
    ),
    "model.load_bits: 4, with model.adapter: the weights in 4 bits (NF4), the adapter in fp32": (
        "qloraconfig 4bit 4_bit k_bit_training prepare_model_for_kbit_training"
    ),
    "model.adapter.use_dora: true": "dora doraconfig",
    "model.adapter.use_rslora: true": "rslora",
    "model.name, a name of the hub, a folder or a run": (
        "automodelforcausallm automodel fastlanguagemodel fastmodel from_pretrained autoconfig base_model_name "
        "huggingface hub huggingface_hub hf_hub checkpoint_path load_model fastvisionmodel_text instruct_model "
        "base_models pretrained_model warm_start cold_start initial_checkpoint checkpoint_files resume_only_model"
    ),
    "the tokenizer of model.name; `posttrain data show TASK --model NAME` counts its tokens": (
        "autotokenizer tokenization bpe fasttokenizer tokenizers"
    ),
    "rollout.temperature, top_k, top_p and max_tokens in training, the same keys of eval in evaluation": (
        "samplingparams generationconfig sampling_parameters sampling decoding_strategy nucleus_sampling "
        "eval_generation_config"
    ),
    "rollout.engine: vllm, and `posttrain serve-command` for a server": (
        "llm engineargs asyncllmengine asyncengineargs vllmclient llmengine vllm_serve trl_vllm_serve"
    ),
    "task: jsonl, a file of rows (.jsonl, .json, .csv, .parquet) or a data set of the hub": (
        "load_dataset parquet csv iterabledataset datasets_library sharegpt alpaca_format dataframe arrow"
    ),
    "data.train_on says which tokens count; rows are packed by themselves": (
        "datacollatorwithpadding datacollatorforlanguagemodeling datacollatorforseq2seq collator collate_fn "
        "dataloader constantlengthdataset"
    ),
    "scale.processes, and scale.sharding: fsdp2": (
        "accelerator accelerate distributed_training multi_gpu multigpu distributeddataparallel zero3 "
        "distributed dp data_parallelism parallelism torchrun_nproc model_parallel sharding_strategy "
        "tensor_model_parallel"
    ),
    "rewards that a program can check: correct with its graders, as in the recipe rl/grpo": (
        "rlvr verifiable_reward verifiable_rewards verifier verifiers verifiable ground_truth "
        "outcome_based_reward rule_based_reward"
    ),
    "`posttrain sweep hh-gpt2`: imitation, reward models, PPO, GRPO and DPO; on two cores the recipes tiny/*": (
        "rlhf reinforcement_learning_from_human_feedback instructgpt"
    ),
    "the reward judge (an LLM judge), or a reward model trained on its preferences": (
        "rlaif ai_feedback constitutional_ai llm_as_judge llm_judge reward_judge"
    ),
    (
        "`posttrain sweep overoptimization` measures it; regularize.kl_coef or kl_in_reward holds the policy near "
        "its start"
    ): (
        "reward_hacking reward_overoptimization overoptimization goodhart reward_gaming specification_gaming "
        "mode_collapse reward_collapse"
    ),
    "regularize.kl_coef (in the loss) or kl_in_reward (in the reward); the metrics kl_ref and kl_initial": (
        "kl_divergence kl_regularization kl_term reverse_kl_penalty kl_control kl_loss"
    ),
    "rollout, the section of sampling: rollout.num_prompts x rollout.group_size completions a batch": (
        "rollouts rollout_worker sampler_config generations completions trajectory trajectories experience "
        "on_policy episode episodes_per_batch"
    ),
    "rollout.staleness, and correction for the mismatch of sampler and trainer": (
        "off_policy asynchronous asynchronous_rl async_rollout policy_lag train_inference_mismatch one_step_off_policy"
    ),
    "advantage: gae, the recipe rl/ppo": "generalized_advantage_estimation value_estimation",
    "advantage, which says what a reward is worth next to its group": (
        "advantage_function group_normalization group_baseline advantages_estimation"
    ),
    "the model that is trained, model": "policy policy_model actor actor_model student student_model policy_network",
    "head, the head of a value or reward model, and advantage: gae": (
        "value_function value_head critic_model value_network"
    ),
    "the metric entropy; regularize.entropy_coef adds a bonus": (
        "policy_entropy entropy_collapse entropy_regularization"
    ),
    "eval.samples (or `posttrain evaluate MODEL --samples N --k K`), with eval.temperature above 0": (
        "pass@k pass_at_k pass_k maj@k majority_voting majority_vote self_consistency avg@k mean@k cons@k "
        "best@k maj_at_k avg_at_k num_evaluations test_time_compute inference_time_scaling inference_scaling "
        "test_time_scaling"
    ),
    "`posttrain evaluate MODEL --samples N --best-of REWARD_MODEL`, and rollout.select: best_of in training": (
        "best_of_n bon best_of_n_sampling reranking bestofnsampler"
    ),
    "`posttrain evaluate MODEL --task NAME`; `posttrain data` lists the tasks": (
        "evaluation benchmark benchmarks lm_eval_harness lm_evaluation_harness lighteval evals leaderboard "
        "contamination"
    ),
    (
        "train.micro_batch_rows and train.micro_batch_tokens divide a batch; train.gradient_checkpointing takes "
        "less memory"
    ): "oom out_of_memory cuda_out_of_memory vram memory_usage gradient_accumulation_fusion",
    "train.micro_batch_rows divides a batch; no result depends on it": "microbatch micro_batch microbatching",
    "a run ends with NonFiniteLoss, and its batch is saved": "nan inf loss_nan nan_loss nonfinite loss_spike",
    "train.seed; the same recipe gives the same run, and a resumed one is exact": (
        "reproducibility reproducible deterministic_training determinism_seed bitwise"
    ),
    "train.lr, train.warmup_steps and train.schedule": (
        "learning_rate_schedule lr_decay cosine_decay cosine_annealing warmup_schedule learning_rate_scheduler "
        "linear_decay constant_with_warmup cosine_with_restarts cosine_with_min_lr"
    ),
    "rollout.drop_uniform_groups: true": "zero_variance_groups zero_advantage group_filtering",
    "rollout.mask_truncated: true, or the reward overlong": "overlong truncated_completions overlong_reward_shaping",
    "rewards: [{name: overlong, limit: 512, cache: 128}]": "length_penalty length_bias length_control token_penalty",
    "rewards: [xml_format], [boxed_format] or [xml_soft]": "format_reward format_rewards formatting_reward",
    "an entry {name: mcp} of tools, with the command that starts the server, or its url": (
        "mcp model_context_protocol fastmcp"
    ),
    "environment (its methods are tools) or tools; contrib/ has adapters": (
        "agent agents agentic multi_turn_rl multiturn_rl function_calling tool_calls_training verifiers_env "
        "gym gymnasium_env agentic_rl multi_turn_training openenv_env"
    ),
    "the grader code_tests and the environment python run code in a sandbox (sandbox: bubblewrap)": (
        "sandbox code_execution code_sandbox e2b docker_sandbox code_interpreter sandboxing"
    ),
    "`posttrain sae train RECIPE`, `posttrain sae features` and `posttrain sae diff`": (
        "sae sparse_autoencoder sparse_autoencoders dictionary_learning interpretability "
        "mechanistic_interpretability saes"
    ),
    "`posttrain generate MODEL --steer FEATURE=FACTOR`": (
        "steering steering_vector activation_steering representation_engineering feature_steering"
    ),
    "`posttrain activations MODEL --layer N`": (
        "activations hidden_states residual_stream hooks activation_recording output_attentions output_hidden_states"
    ),
    "`posttrain quantize MODEL --bits 4` after training, model.load_bits with model.adapter in training": (
        "quantize_model int8 int4 post_training_quantization awq_model gptqconfig llm_int8"
    ),
    "`posttrain runs export NAME --to FOLDER`": (
        "export merge save_model upload model_card save_pretrained deploy_model export_model merged_model to_hf "
        "to_mcore"
    ),
    "`posttrain serve MODEL`, for programs that ask as they ask OpenAI": (
        "serving inference_server openai_api openai_server deployment api_server"
    ),
    "train.save_every and train.keep_checkpoints; `--resume` continues": (
        "checkpointing checkpoints save_checkpoint resuming resume_training checkpointer"
    ),
    "track: wandb": "weights_and_biases weights_biases wandb_logging",
    "recipes rl/expert-iteration and rl/rejection-sampling": (
        "expert_iteration_rl star self_taught_reasoner rest_em filtered_bc sil"
    ),
    "tasks with chosen and rejected answers (preferences, hh_rlhf, ultrafeedback) and the recipes preference/*": (
        "preference_optimization preference_learning preference_tuning preference_data pairwise alignment "
        "human_feedback"
    ),
    "data, the section of supervised rows": "supervised imitation_learning behavior_cloning behaviour_cloning bc",
    "the metric loss (in nats per token); its exponential is the perplexity": "perplexity ppl bits_per_byte",
    "objective: cross_entropy": "nll_loss cross_entropy_loss negative_log_likelihood causal_lm language_modeling mle",
    "architectures of transformers that it loads as causal language models": (
        "moe mixture_of_experts llama mistral qwen qwen2 qwen3 gemma phi deepseek olmo gpt_oss gpt2 causallm"
    ),
    "rollout.temperature: 1.0 by default; objectives that follow the sampler use it, too": "sampling_temp",
    "prompt.template": ("chat_format chatml jinja jinja2 response_format_template prompting"),
    "correction: token_tis or sequence_tis, with rollout.old_logprobs: trainer": (
        "importance_weights importance_ratio is_ratio"
    ),
    "objective.clip_low and objective.clip_high; the metric clip_fraction": (
        "clipping ppo_clipping clip_higher_trick trust_region clipped_surrogate surrogate_objective policy_loss_clip"
    ),
    "scale.launcher: torchrun": "torchrun_launcher elastic",
    "the recipes rl/*: `posttrain recipes` lists them": (
        "policy_gradient policy_gradients reinforcement_learning group_relative ppo_style rl_algorithms r1_zero "
        "reasoning_training"
    ),
    "`posttrain evaluate MODEL --against OTHER`, which gives a win rate": (
        "elo pairwise_comparison head_to_head side_by_side arena"
    ),
    "prompt.template: r1_zero, xml_reasoning or boxed ask for a working": (
        "chain_of_thought cot zero_shot_cot reasoning_format think_tags thinking reasoning zero_shot"
    ),
    "`posttrain generate MODEL PROMPT`, `posttrain chat MODEL` and `posttrain serve MODEL`": "inference",
    "the metrics generate_tokens_per_second and step times in metrics.jsonl": "throughput tokens_per_second mfu speed",
    "train.steps, or train.num_epochs": (
        "epoch step iteration iterations num_updates training_length max_steps_per_epoch"
    ),
    "train.num_minibatches, and train.ppo_epochs": "minibatch mini_batch ppo_minibatch gradient_updates_per_batch",
    "rollout.engine: native, which batches continuously and computes a prompt once, or vllm": (
        "kv_cache continuous_batching paged_attention pagedattention cuda_graphs cuda_graph"
    ),
    "advantage: return_to_go or gae, with advantage.gamma": (
        "return returns discounted_return credit_assignment sparse_reward reward_to_go discounting bootstrapping"
    ),
    "rollout.temperature, and regularize.entropy_coef": "exploration temperature_scaling diversity",
    "the metric grad_norm; train.max_grad_norm clips it": "gradient_norm gradient_noise",
    "eval.every, eval.tasks and task.validation_share; `posttrain runs show NAME` shows the curve": (
        "validation_loss held_out test_set validation_set train_test_split overfitting learning_curve "
        "validation generalization"
    ),
    "keys `chosen` and `rejected` of the rows of task: preferences": (
        "preference_pairs chosen rejected preference_dataset_format comparison_data"
    ),
    "the objective kto, in the recipe preference/kto": "kto_loss",
    "the objective bco, in the recipe preference/bco": "bco_pair",
    "the objective sppo, in the recipe preference/sppo": "sppo_hard",
    "the objective f_dpo, in the recipe preference/f-dpo": "fdpo",
    "the objectives dppo_tv and dppo_kl, in the recipes rl/dppo-tv and rl/dppo-kl": "dppo",
    "the objective dpo, in the recipe preference/dpo": "dpo_loss",
    "the objective grpo, in the recipe rl/grpo": "grpo_loss",
    "`posttrain sweep RECIPE --over KEY=A,B`": (
        "optuna ray_tune wandb_sweep hyperparameter hyperparameter_search hyperparameter_tuning grid_search "
        "hparams ablation_study sweeps"
    ),
    "`posttrain train RECIPE`, which starts its own processes (scale.processes)": (
        "accelerate_launch torchrun_command deepspeed_launcher mpirun srun"
    ),
    "`posttrain sae features`, which shows what each feature reads": (
        "superposition monosemanticity monosemantic polysemanticity feature_visualization"
    ),
    "the task refusals and the grader refusal": "safety harmlessness refusal_training over_refusal",
    "the methods of an environment": "reset done env_step observation",
}
