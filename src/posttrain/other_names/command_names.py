"""Names of commands, of their options and of components, with what they are called here."""

from __future__ import annotations

# Our command, and our option of a command, by the names that people try.
COMMANDS_BY_NAMES = {
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
COMMAND_OPTIONS = {
    "--max-tokens": "max_new_tokens max_completion_length max_length max_gen_toks response_length num_predict",
    "--temperature": "do_sample greedy sampling_temperature",
    "--limit": "n num_examples num_samples max_samples max_examples num_prompts rows",
    "--samples": (
        "n num_samples num_return_sequences n_samples num_generations group_size num_samples_per_prompt repeats"
    ),
    "--engine": "use_vllm backend inference_engine",
    "--device": "device_map cuda gpu",
    "--dtype": "torch_dtype bf16 fp16 precision",
    "--out": "output_path output_dir output save_dir",
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
    "--state": "status",
}
# What one command says about options of another program, by the command: of lm-eval by ``evaluate``. The
# case of single letters counts.
COMMAND_SAYS = {
    "evaluate": {
        "the model is the word MODEL, with --dtype, --device and --engine": "m M model model_args a",
        "--task A,B, the names between commas": "t tasks",
        "--template chat, for the tokenizer's chat template": "apply_chat_template",
        "--template chat, with --template.system TEXT": "system_instruction",
        "--limit N": "L",
        "--batch N, a number of answers": "b batch_size max_batch_size",
        "--temperature, --top-p, --top-k and --max-tokens; answers end where the template says": "gen_kwargs",
        "--out DIR; the same command goes on there with what was not finished": "use_cache c",
        "--out DIR": "o output_path",
        "nothing: every answer is in items.jsonl, next to results.json": "log_samples s",
        "nothing: prompts are made when they are asked": "cache_requests",
        "nothing: programs run in a sandbox": "confirm_run_unsafe_code",
        "nothing: the settings of an evaluation are in its results.json": "show_config",
        "--quiet prints errors alone": "verbosity v",
        "`posttrain data show TASK` prints examples": "write_out w",
        "`posttrain generate MODEL` answers without grading": "predict_only x",
        "--task module:function, a task of your own": "include_path",
        "--task.KEY VALUE, an option of the task": "metadata",
        '--task.prompt_format "{question} Think briefly."': "question_suffix",
        "not offered: questions are asked without examples; a file of such prompts is --task jsonl": (
            "num_fewshot f fewshot_as_multiturn"
        ),
        "not offered: --limit N takes N rows, the same in every evaluation": "E",
        "not offered: options are words of the command line; `posttrain sweep` reads a file": "config C",
        "not offered: tasks are tested where they are made": "check_integrity",
        "not offered: results.json has every number for other tools": (
            "wandb_args wandb_config_args trackio_args hf_hub_log_args"
        ),
    },
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
COMPONENTS = {
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
        "bco": "bco_pair",
        "sppo": "sppo_hard",
        "on_policy_distillation": "gkd opd iw_opd",
        "grpo, with aggregate: token_mean": "bnpo",
        "grpo, with aggregate: {name: constant, length: 96} and advantage: centered": "dr_grpo",
        "grpo, as in the recipe rl/dapo": "dapo",
        "reinforce, as in the recipe rl/rloo": "rloo",
        "grpo, as in the recipe rl/reinforce-plus-plus": "reinforce_plus_plus reinforce++",
        "dpo, with length_normalized: true": "sigmoid_norm dpo_norm",
        "dpo, with label_smoothing: 0.1": "cdpo",
    },
    "advantage": {
        "normalized": "grpo group group_norm",
        "centered": "dr_grpo no_std",
        "leave_one_out": "rloo loo",
        "batch_normalized": "reinforce_plus_plus reinforce++ reinforce_baseline whiten batch",
        "mean_scaled": "maxrl",
    },
    "optimizer": {
        "adamw": "adam adamw_torch adamw_torch_fused adamw_hf fused_adam adamw_fused",
        "muon": "torch_muon",
        "adamw_8bit": "adam_8bit adamw_bnb_8bit adam8bit adamw8bit adamw_torch_8bit",
        "adamw_8bit, with paged: true": "paged_adamw_8bit paged_adam_8bit",
    },
    "aggregation": {
        "token_mean": "token dapo token_level",
        "sequence_mean": "seq_mean_token_mean sample_mean grpo seq_mean sequence",
        "{name: constant, length: 1024}": "seq_mean_token_sum seq_mean_token_sum_norm dr_grpo",
    },
    "correction": {"token_tis": "tis token_truncate token", "sequence_tis": "sequence_truncate sequence"},
    "tracker": {"wandb": "weights_and_biases wb", "tensorboard": "tb tensorboardx"},
    "grader": {"math": "math_verify latex", "multiple_choice": "choice mcq", "numeric": "number gsm8k"},
    "template": {"r1_zero": "r1 deepseek_r1 think", "plain": "none raw"},
    "task": {"jsonl": "json csv parquet custom local"},
}
