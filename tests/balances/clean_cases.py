"""Recipes of runs that balance: every objective, advantage, aggregation and correction, and ways to run them."""

from __future__ import annotations

from typing import Any

TRAINER = {"old_logprobs": "trainer"}
SHORT = {"max_tokens": 8}
CUT_OFF = {"max_tokens": 20, "temperature": 1.3, "mask_truncated": True}
SHARED = {"steps": 4, "ppo_epochs": 2, "num_minibatches": 2}
LORA = {"adapter": {"rank": 2}}
TURNS = (" <tool>guess: 4</tool>", " <tool>guess: 2</tool>", " <tool>guess: 6</tool>", " It is <answer> 7 </answer>")
GAME = {
    "task": {"name": "episodes", "size": 16},
    "environment": {"name": "number_guess", "high": 7, "guesses": 3},
    "rewards": ["environment", {"name": "tool_calls", "weight": -0.01}],
    "rollout": {
        "engine": {"name": "choosing_engine:choosing_by_script", "texts": list(TURNS)},
        "num_prompts": 4,
        "group_size": 4,
        "max_tokens": 200,
        "max_turns": 4,
        "show_tools": False,
    },
}
JUDGING = {"label_above": 0.25, "group_size": 6, "max_tokens": 8}
BALANCED = JUDGING | {"select": {"name": "balanced", "threshold": 0.25, "keep": 2}}
PAIRS = SHORT | {"select": {"name": "right_and_wrong", "threshold": 0.25, "num_pairs": 2}}
POLICY = ("dppo_tv", "dppo_kl", "dro", "reinforce", "grpo", "gspo", "gspo_token", "cispo", "sapo", "gmpo")
OF_PAIRS = (
    "dpo",
    "robust_dpo",
    "ipo",
    "hinge",
    "simpo",
    "orpo",
    "cpo",
    "rpo",
    "exo",
    "nca",
    "apo_zero",
    "apo_down",
    "sppo",
    "bco",
    "discopop",
    "f_dpo",
    "ld_dpo",
    "mpo",
    "aot",
)
OF_GROUPS = ("raw", "centered", "leave_one_out", "normalized", "mean_scaled", "batch_normalized", "turn_normalized")
TWO_REWARDS = [{"name": "small_runs:vowel_share", "weight": 2.0}, {"name": "small_runs:digit_share", "weight": -0.3}]
CORRECTIONS = ("token_tis", "sequence_tis", "icepop", "geometric_mask")


def grpo(**changes: Any) -> dict[str, Any]:
    return {"kind": "grpo", **changes}


def quantized(bits: int) -> dict[str, Any]:
    return {"load_bits": bits, **LORA}


def game(**changes: Any) -> dict[str, Any]:
    """Answers of several turns, from a script; what is told between them is not trained."""
    return grpo(**GAME, **changes)


def judged(objective: Any, **changes: Any) -> dict[str, Any]:
    return {"kind": "judged", "objective": objective, **changes}


CASES: dict[str, dict[str, Any]] = {
    **{f"objective {name}": grpo(objective=name, train=SHARED) for name in POLICY},
    **{f"objective {name}": judged(name) for name in (*OF_PAIRS, "kto", "bradley_terry", "outcome", "process")},
    **{f"advantage {name}": grpo(advantage=name, rollout=SHORT) for name in OF_GROUPS},
    **{f"correction {name}": grpo(correction=name, rollout=SHORT | TRAINER, train=SHARED) for name in CORRECTIONS},
    "objective cross_entropy": {"kind": "sft"},
    "objective dft": {"kind": "sft", "objective": "dft"},
    "objective f_dpo, forward": judged({"name": "f_dpo", "divergence": "forward_kl"}),
    "objective f_dpo, alpha": judged({"name": "f_dpo", "divergence": "alpha", "alpha": 0.3}),
    "dual clip": grpo(objective={"name": "grpo", "clip_max": 1.01}, train=SHARED),
    "kl k3_weighted": grpo(regularize={"kl_coef": 0.1, "kl_estimator": "k3_weighted"}, rollout=SHORT, train=SHARED),
    "objective ppo": grpo(objective="ppo", rollout=SHORT, train=SHARED),
    "objective distillation": grpo(objective="distillation", teacher={"name": "tiny", "top_k": 5}, rollout=SHORT),
    "objective on_policy_distillation": grpo(
        objective="on_policy_distillation", teacher={"name": "tiny"}, rollout=SHORT, train=SHARED
    ),
    "objective sdpo": grpo(objective="sdpo", teacher={"name": "self", "top_k": 5}, rollout=JUDGING),
    "objective dpo, smoothed means": judged({"name": "dpo", "label_smoothing": 0.1, "length_normalized": True}),
    "objective bradley_terry, margins": judged({"name": "bradley_terry", "margin": True, "centering": 0.01}),
    "objective outcome, last": judged({"name": "outcome", "positions": "last"}, aggregate="sequence_mean"),
    "objective process, three classes": judged(
        {"name": "process", "num_classes": 3}, task={"name": "small_runs:judged_sums", "best_class": 2}
    ),
    "advantage gae": grpo(
        objective="ppo", advantage={"name": "gae", "whiten": False}, rollout=SHORT, kl_in_reward={"weight": 0.1}
    ),
    "advantage gae, bootstrapped": grpo(objective="ppo", advantage={"name": "gae", "bootstrap": True}, rollout=SHORT),
    "advantage return_to_go": grpo(
        objective="reinforce", advantage="return_to_go", kl_in_reward={"weight": 0.1}, rollout=SHORT
    ),
    "advantage batch_normalized by group": grpo(advantage={"name": "batch_normalized", "center": "group"}),
    "advantage normalized, penalty with a target": grpo(
        kl_in_reward={"weight": 0.1, "target": 0.5, "horizon": 40, "estimator": "k3"}, rollout=SHORT
    ),
    "objective clip_cov": grpo(
        objective={"name": "clip_cov", "share": 0.1, "cov_low": 0.01, "clip_high": 0.002}, train=SHARED
    ),
    "objective kl_cov": grpo(objective={"name": "kl_cov", "share": 0.1}, train=SHARED),
    "mask top_entropy": grpo(masks="top_entropy", train=SHARED, regularize={"kl_coef": 0.1}),
    "mask off_policy_sequence": grpo(masks={"name": "off_policy_sequence", "threshold": 1e-3}, train=SHARED),
    "masks that divide by what they keep": grpo(
        masks=[
            {"name": "top_entropy", "share": 0.4, "divisor": "kept"},
            {"name": "off_policy_sequence", "threshold": 1e-3},
        ],
        aggregate="sequence_mean",
        train=SHARED | {"micro_batch_rows": 3},
        regularize={"kl_coef": 0.1},
    ),
    "masked truncated, all divided by": grpo(
        whole=True,
        model={"name": "tiny-sft"},
        rollout=CUT_OFF | {"truncated_divisor": "all"},
        aggregate="sequence_mean",
        train={"steps": 4, "num_minibatches": 2},
    ),
    "masked truncated, returns, all divided by": grpo(
        objective="reinforce",
        advantage="return_to_go",
        whole=True,
        model={"name": "tiny-sft"},
        rollout=CUT_OFF | {"truncated_divisor": "all"},
        masks=[{"name": "top_entropy", "divisor": "kept"}],
    ),
    "objective aot of a data set": judged({"name": "aot", "label_smoothing": 0.1}, train={"steps": 4, "lr": 1e-2}),
    "hard reference": grpo(
        rollout=SHORT,
        regularize={"kl_coef": 0.1},
        reference={"every": 2, "mixing": 1.0},
        train={"steps": 6, "num_minibatches": 2, "ppo_epochs": 2},
    ),
    "soft reference of pairs": judged("dpo", reference={"every": 2, "mixing": 0.6}, train={"steps": 5}),
    "hard reference of pairs from rollouts": grpo(
        objective="dpo", rollout=PAIRS, reference={"every": 1, "mixing": 1.0}, train=SHARED
    ),
    "advantage gdpo": grpo(advantage="gdpo", rollout=SHORT, rewards=TWO_REWARDS),
    "advantage gdpo, rewards without a value": grpo(
        advantage="gdpo", rollout=SHORT, rewards=[*TWO_REWARDS, "small_runs:silent_of_some"], train=SHARED
    ),
    "advantage gdpo, uniform groups": grpo(
        advantage="gdpo", rollout=SHORT | {"drop_uniform_groups": True}, rewards=["small_runs:many_vowels", "correct"]
    ),
    "aggregation sequence_mean": grpo(aggregate="sequence_mean"),
    "aggregation constant": grpo(aggregate={"name": "constant", "length": 10}),
    "correction geometric_mask of sequences": grpo(
        correction={"name": "geometric_mask", "low": 0.9, "high": 1.1, "weigh": "sequence"}, rollout=SHORT | TRAINER
    ),
    "kl k1": grpo(regularize={"kl_coef": 0.1, "kl_estimator": "k1"}, rollout=SHORT),
    "kl k2": grpo(regularize={"kl_coef": 0.1, "kl_estimator": "k2"}, rollout=SHORT, train=SHARED),
    "kl k3 and entropy": grpo(regularize={"kl_coef": 0.1, "entropy_coef": 0.01}, rollout=SHORT, train=SHARED),
    "corrected kl": grpo(correction="token_tis", regularize={"kl_coef": 0.1}, rollout=SHORT | TRAINER),
    "narrow clip": grpo(objective={"name": "grpo", "clip_low": 0.001, "clip_high": 0.002}, train=SHARED),
    "trainer's log-probabilities": grpo(rollout=SHORT | TRAINER, train=SHARED),
    "ahead of the sampler": grpo(rollout=SHORT | {"staleness": 1}, train={"steps": 4}),
    "ahead, corrected": grpo(
        correction="token_tis", rollout=SHORT | TRAINER | {"staleness": 2}, train={"steps": 6, "num_minibatches": 2}
    ),
    "masked truncated": grpo(whole=True, model={"name": "tiny-sft"}, rollout=CUT_OFF),
    "masked truncated, returns": grpo(
        objective="reinforce", advantage="return_to_go", whole=True, model={"name": "tiny-sft"}, rollout=CUT_OFF
    ),
    "dropped uniform groups": grpo(rollout=SHORT | {"drop_uniform_groups": True}, rewards=["small_runs:many_vowels"]),
    "idle rows": grpo(rewards=["small_runs:many_vowels"], train={"steps": 6}),
    "every row": grpo(rewards=["small_runs:many_vowels"], train={"skip_zero_rows": False}),
    "expert iteration": grpo(
        objective="cross_entropy", rollout={"select": {"name": "best_of"}, "temperature": 1.3, "max_tokens": 8}
    ),
    "likelihood of nuclei": grpo(objective="cross_entropy", rollout={"top_p": 0.9, "temperature": 0.8}),
    "dpo from rollouts": grpo(objective="dpo", rollout=PAIRS, train=SHARED),
    "kto from rollouts": grpo(objective="kto", rollout=BALANCED, train=SHARED),
    "cold": grpo(rollout={"temperature": 0.7}),
    "lora": grpo(model=LORA, regularize={"kl_coef": 0.1}),
    "lora with dropout": grpo(model={"adapter": {"rank": 2, "dropout": 0.3}}, train=SHARED),
    "lora, weights in bf16": grpo(model=LORA | {"dtype": "bf16"}, regularize={"kl_coef": 0.1}),
    "bf16 products": grpo(rollout=SHORT | TRAINER, train={"precision": "bf16"}, regularize={"kl_coef": 0.1}),
    "fp64": grpo(model={"dtype": "fp64"}, train=SHARED),
    "muon": grpo(optimizer="muon"),
    "decay and warm-up": grpo(
        optimizer={"name": "adamw", "weight_decay": 0.1, "betas": [0.8, 0.95]},
        train={"steps": 6, "warmup_steps": 2, "schedule": "cosine", "min_lr_ratio": 0.1},
    ),
    "no clip of gradients": grpo(train={"max_grad_norm": None}),
    "micro-batches of two": grpo(train={"micro_batch_rows": 2}, regularize={"kl_coef": 0.1}),
    "micro-batches of tokens": judged("dpo", train={"micro_batch_tokens": 60}),
    "recomputed activations": {"kind": "sft", "train": {"gradient_checkpointing": True, "micro_batch_tokens": 100}},
    "shared trunk": grpo(objective="ppo", head={"trunk": "shared", "lr_ratio": 2.0}, rollout=SHORT),
    "padded attention": grpo(model={"attention": "eager"}),
    "several passes": grpo(task={"name": "stories", "size": 6, "max_steps": 1}, train={"steps": 6}),
    "several passes over data": {"kind": "sft", "task": {"name": "stories", "size": 6}, "train": {"steps": 6}},
    "mixture": grpo(
        task={
            "name": "mixture",
            "parts": [{"name": f"{n}", "task": {"name": "stories", "size": 8, "max_steps": n}} for n in (1, 2)],
        },
        train={"steps": 6},
    ),
    "all tokens": {"kind": "sft", "data": {"train_on": "all"}},
    "turns": game(regularize={"kl_coef": 0.1}, train=SHARED),
    "turns, turn_normalized": game(advantage={"name": "turn_normalized", "gamma": 0.9}),
    "turns, gae": game(objective="ppo", advantage="gae", train=SHARED),
    "turns, return_to_go": game(objective="reinforce", advantage="return_to_go", kl_in_reward={"weight": 0.1}),
    "turns, lora": game(advantage="turn_normalized", model=LORA, train=SHARED),
    **{
        f"qlora of {bits} bits": grpo(model=quantized(bits), regularize={"kl_coef": 0.1}, train=SHARED)
        for bits in (8, 4)
    },
    "qlora, trainer's log-probabilities": grpo(model=quantized(4), rollout=SHORT | TRAINER, train=SHARED),
    "qlora in bf16": grpo(model=quantized(4) | {"dtype": "bf16"}, train=SHARED),
    "qlora of pairs": judged("dpo", model=quantized(8)),
    "qlora of demonstrations": {"kind": "sft", "model": quantized(4)},
    "qlora, ahead of the sampler": grpo(model=quantized(8), rollout=SHORT | {"staleness": 1}, train={"steps": 4}),
    "two rewards": grpo(
        rewards=[{"name": "small_runs:vowel_share", "weight": 2.0}, {"name": "xml_format", "weight": -0.3}]
    ),
}
# One of each kind, for the fast suite.
FAST = (
    "objective gspo_token",
    "objective dpo",
    "objective cross_entropy",
    "objective ppo",
    "objective bradley_terry, margins",
    "advantage return_to_go",
    "advantage gdpo, rewards without a value",
    "objective clip_cov",
    "masks that divide by what they keep",
    "masked truncated, all divided by",
    "hard reference",
    "correction geometric_mask of sequences",
    "kl k3 and entropy",
    "ahead of the sampler",
    "dropped uniform groups",
    "idle rows",
    "lora",
    "decay and warm-up",
    "micro-batches of two",
    "mixture",
    "turns, turn_normalized",
    "qlora of 4 bits",
)
