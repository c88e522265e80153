"""Values that options of other libraries have, by our key, with what to give here in their place."""

from __future__ import annotations

# By key: the value to give, or what to do; and the values elsewhere, as patterns.
VALUES: dict[str, dict[str, str]] = {
    "train.steps": {"Leave the key out, and give train.num_epochs": "-1"},
    "train.warmup_steps": {"Give 0 for none": "-*", "Give a number of steps, not a share": "0.?*"},
    "train.save_every": {"Give a number of steps, not a share": "0.?*"},
    "train.keep_checkpoints": {"A large number keeps all": "-1 0 none"},
    "train.max_grad_norm": {"null never clips": "0 0.0 -1 -1.0"},
    "train.gradient_checkpointing": {"Give true": "unsloth offload selective full block"},
    "train.seed": {"Give a whole number, such as 0": "none"},
    "eval.every": {"Give a number of steps, not a share": "0.?*", "0 never evaluates": "none"},
    "eval.num_examples": {"A number above that of the rows takes all": "-1 none"},
    "eval.top_k": {"null draws from all tokens": "-1 0"},
    "rollout.top_k": {"null draws from all tokens": "-1 0"},
    "rollout.max_rounds": {"A large number sets no limit": "0 -1"},
    "rollout.uniform_by": {
        "Give correct": "acc accuracy",
        "Give reward": "score seq_reward seq_final_reward none",
    },
    "task.size": {"null takes all rows": "-1"},
    "task.validation_share": {"Give a share of the rows, such as 0.05": "[1-9]*"},
    "task.split": {"One split; its first rows are task.size": "*[[]*"},
    "model.dtype": {
        "The type is not read from the model's folder: give fp32 or bf16": "auto none",
        "fp16 is not offered: give bf16": "fp16 float16 half",
    },
    "rollout.engine.dtype": {"Give fp32 or bf16": "auto none", "fp16 is not offered: give bf16": "fp16 float16 half"},
    "model.attention": {
        "Give flash_attention_2": "flash_attn fa2 flash",
        "Leave the key out: sdpa takes torch's fastest kernel": "auto none flex* xformers disabled",
    },
    "model.adapter.kind": {
        "Give lora, with model.load_bits: 4": "qlora",
        "Only lora is offered": "llama-adapter longlora oft freeze full prefix ia3 loha lokr boft vera adalora",
    },
    "model.adapter.rank": {"null in place of model.adapter trains all weights": "0"},
    "model.adapter.targets": {"Give all-linear": "all all-linear-layers none", "Give a list: [q_proj, v_proj]": "*,*"},
}
# Last parts of keys that have no default.
WITHOUT_DEFAULT = frozenset({"name", "path", "url", "run"})
