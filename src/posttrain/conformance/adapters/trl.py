"""Adapter for TRL's ``GRPOTrainer`` losses and scores; recorded with TRL 1.16."""

from collections import defaultdict

from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import selective_log_softmax_and_entropy

MEANS = {"token_mean": "dapo", "sequence_mean": "grpo", "constant": "dr_grpo"}
TYPES = {"grpo": MEANS, "gspo": MEANS, "cispo": {"token_mean": "cispo"}, "sapo": {"sequence_mean": "sapo"}}
OFF = "delta off_policy_mask_threshold aux_loss_enabled use_adaptive_entropy sync_gradients use_bias_correction_kl"
MASKS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")


def loss(batch, config, micro_batches):
    """Sum ``_compute_loss`` over a generation batch's micro-batches, using a trainer without model."""
    me = GRPOTrainer.__new__(GRPOTrainer)
    vars(me).update(dict.fromkeys(OFF.split()), top_entropy_quantile=1.0, num_processes=1, training=True)
    me.args = me.model = me.accelerator = me  # one object in four roles: their attribute names do not overlap
    me.loss_type, me.beta = TYPES.get(config.objective, {}).get(config.aggregation), config.kl_coef
    me.sapo_temperature_pos, me.sapo_temperature_neg = config.tau_positive, config.tau_negative
    me.epsilon_low, me.epsilon_high = config.clip_low, config.clip_high + (config.objective == "cispo")
    me.importance_sampling_level = "sequence" if config.objective == "gspo" else "token"
    me.entropy_coef, me._entropy_bonus_enabled = config.entropy_coef, config.entropy_coef > 0
    me.use_vllm = me.vllm_importance_sampling_correction = config.cap is not None
    me.max_completion_length, me.gather, me.reduce = config.length, lambda x: x, lambda x, reduction: x
    me.steps_per_generation = me.current_gradient_accumulation_steps = len(micro_batches)
    me._get_per_token_logps_and_entropies = lambda rows, *_, **__: (rows["logprobs"], rows["entropy"], None)
    me._metrics, total = {"train": defaultdict(list)}, {"num_items_in_batch": batch["mask"].sum()}
    data = dict(batch, advantages=batch["row_advantages"]) | {name: batch["mask"].long() for name in MASKS}
    data |= {f"{name}_per_token_logps": batch[f"{name}_logprobs"] for name in ("old", "ref")}
    data["importance_sampling_ratio"] = (
        (data["old_logprobs"] - data["sampler_logprobs"]).exp().clamp(max=config.cap or 1)
    )
    parts = [{name: x[rows] for name, x in data.items()} | total for rows in micro_batches]
    return sum(me._compute_loss(part, part) for part in parts) if me.loss_type else NotImplemented


def score(logits, tokens, temperature):
    """Log-probabilities and entropies of TRL's helper."""
    return selective_log_softmax_and_entropy(logits[:, :-1], tokens[:, 1:], temperature=temperature)
