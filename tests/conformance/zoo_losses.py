"""Wrong losses, each after a public report: the fact was taken from it, and no code."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from zoo import (
    Bug,
    Part,
    clean,
    clipped,
    divergence,
    k3,
    kl,
    log_ratio,
    made,
    made_pairs,
    policy_values,
    right_values,
    row_mean,
    rows_of,
)  # fmt: skip

from posttrain.conformance.cases import Config

GRPO, SFT = Config("grpo"), Config("cross_entropy")
GSPO, GSPO_ROWS = Config("gspo"), Config("gspo", "sequence_mean")
GMPO, GMPO_ROWS = Config("gmpo"), Config("gmpo", "sequence_mean")
GRPO_ROWS = Config("grpo", "sequence_mean")
WITH_KL, WITH_ENTROPY = Config("grpo", kl_coef=0.4), Config("grpo", entropy_coef=0.2)
CORRECTED = Config("grpo", cap=1.2)
DPO, SMOOTHED = Config("dpo", "pair_mean"), Config("dpo", "pair_mean", label_smoothing=0.2)
ORPO = Config("orpo", "pair_mean")
FORWARD, REVERSE, JSD = (Config("distillation", divergence=name) for name in ("forward_kl", "reverse_kl", "jsd"))


# Denominators and accumulation.


def by_generation_batch(mask: Tensor, whole: Tensor, config: Config, num_micro: int) -> Tensor:
    return mask.double() / whole.sum() * num_micro / config.accumulation


def divided_twice(mask: Tensor, whole: Tensor, config: Config, num_micro: int) -> Tensor:
    return mask.double() / whole.sum() / num_micro


def by_configured_accumulation(mask: Tensor, whole: Tensor, config: Config, num_micro: int) -> Tensor:
    return mask.double() / mask.sum() / config.accumulation


def by_own_tokens(mask: Tensor, whole: Tensor, config: Config, num_micro: int) -> Tensor:
    return mask.double() / mask.sum() / num_micro


def by_rows(mask: Tensor, whole: Tensor, config: Config, num_micro: int) -> Tensor:
    return mask.double() / mask.sum(dim=1, keepdim=True).clamp(min=1) / whole.any(dim=1).sum()


def by_all_rows(mask: Tensor, whole: Tensor, config: Config, num_micro: int) -> Tensor:
    return mask.double() / mask.sum(dim=1, keepdim=True).clamp(min=1) / whole.shape[0]


def by_tokens_up_to_the_last(mask: Tensor, whole: Tensor, config: Config, num_micro: int) -> Tensor:
    reached = whole.flip(1).cumsum(dim=1).flip(1) > 0
    return mask.double() / reached.sum()


def summed_means(mask: Tensor, whole: Tensor, config: Config, num_micro: int) -> Tensor:
    return mask.double() / mask.sum()


def without_a_guard(mask: Tensor, whole: Tensor, config: Config, num_micro: int) -> Tensor:
    return mask.double() / mask.sum(dim=1, keepdim=True) / whole.any(dim=1).sum()


def by_length_along_columns(mask: Tensor, whole: Tensor, config: Config, num_micro: int) -> Tensor:
    lengths = mask.sum(dim=1).clamp(min=1)
    return mask.double() / (lengths if mask.shape[0] == mask.shape[1] else lengths[:, None]) / whole.any(dim=1).sum()


def by_whole(mask: Tensor, whole: Tensor, config: Config, num_micro: int) -> Tensor:
    return mask.double() / whole.sum()


def by_width(mask: Tensor, whole: Tensor, config: Config, num_micro: int) -> Tensor:
    return mask.double() / whole.numel()


def last_micro_batch_only(batch: Part, config: Config, micro_batches: list[list[int]]) -> Tensor:
    parts = [made()(batch, config, [rows]) for rows in micro_batches]
    return sum(part.detach() for part in parts[:-1]) + parts[-1]


def whole_batch_always(batch: Part, config: Config, micro_batches: list[list[int]]) -> Tensor:
    return made()(batch, config, [list(range(batch["mask"].shape[0]))])


def entropy_of_the_policys_tokens(part: Part, config: Config) -> Tensor:
    per_row = (part["entropy"] * part["mask"]).sum(dim=1, keepdim=True) / part["mask"].shape[1]
    return policy_values(part, config) - config.entropy_coef * per_row


# Masks and padding.


def with_its_own_padding(part: Part) -> Part:
    return part


def ratio_before_the_mask(part: Part, config: Config) -> Tensor:
    return right_values(part, config) * part["mask"]


def k3_before_the_mask(part: Part, config: Config) -> Tensor:
    plain = policy_values(clean(part), config)
    return plain + config.kl_coef * k3(part) * part["mask"]


def advantage_of_padded_slots(part: Part, config: Config) -> Tensor:
    spread = part["advantages"].mean(dim=1, keepdim=True).expand(part["mask"].shape)
    return policy_values(clean(part) | {"advantages": spread}, config)


def times_the_count_without_a_mask(part: Part, config: Config) -> Tensor:
    values = clipped(log_ratio(part).exp(), part["advantages"], config) + config.kl_coef * k3(part)
    counts = part["mask"].sum(dim=1, keepdim=True)
    return (values.mean(dim=1, keepdim=True) * counts / part["mask"].sum(dim=1, keepdim=True)).expand(values.shape)


def centred_over_the_batch(part: Part, config: Config) -> Tensor:
    centred = log_ratio(part) - log_ratio(part).mean()
    ratio = row_mean(centred.masked_fill(~part["mask"], 0.0), part["mask"]).exp()[:, None]
    return clipped(ratio.expand(part["mask"].shape), part["advantages"], config)


def sequence_ratio_along_columns(part: Part, config: Config) -> Tensor:
    ratio = row_mean(log_ratio(part), part["mask"]).exp()
    is_square = part["mask"].shape[0] == part["mask"].shape[1]
    return clipped((ratio if is_square else ratio[:, None]).expand(part["mask"].shape), part["advantages"], config)


def geometric_mean_along_columns(part: Part, config: Config) -> Tensor:
    right = policy_values(part, config)
    is_square = part["mask"].shape[0] == part["mask"].shape[1]
    return right[:, :1].T.expand(right.shape) if is_square else right


def dropped_sequence_with_weight_one(batch: Part, config: Config, micro_batches: list[list[int]]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for rows in micro_batches:
        part = clean(rows_of(batch, rows))
        ratio = row_mean(log_ratio(part), part["mask"]).exp()
        total = total - (part["row_advantages"] * ratio).sum() / batch["mask"].shape[0]
    return total


# Alignment.


def old_shifted(part: Part) -> Part:
    return clean(part) | {"old_logprobs": clean(part)["old_logprobs"].roll(1, dims=1)}


def mask_one_early(part: Part) -> Part:
    early = torch.cat([part["mask"][:, 1:], part["mask"][:, -1:] & part["mask"][:, :1]], dim=1)
    return clean(part) | {"mask": early}


# Ratios, clips and corrections.


def without_ratio(part: Part, config: Config) -> Tensor:
    return -part["advantages"] * part["logprobs"]


def ratio_of_itself(part: Part, config: Config) -> Tensor:
    return clipped((part["logprobs"] - part["logprobs"].detach()).exp(), part["advantages"], config)


def sampler_overwritten(part: Part, config: Config) -> Tensor:
    return right_values(part | {"sampler_logprobs": part["old_logprobs"]}, config)


def clip_computed_and_not_used(part: Part, config: Config) -> Tensor:
    return -log_ratio(part).exp() * part["advantages"]


def clip_of_both_signs(part: Part, config: Config) -> Tensor:
    return -log_ratio(part).exp().clamp(1 - config.clip_low, 1 + config.clip_high) * part["advantages"]


def dual_clip_of_every_sign(part: Part, config: Config) -> Tensor:
    return -torch.maximum(-clipped(log_ratio(part).exp(), part["advantages"], config), 3.0 * part["advantages"])


def clip_option_swallowed(part: Part, config: Config) -> Tensor:
    return clipped(log_ratio(part).exp(), part["advantages"], Config("grpo"))


def weight_with_gradient(part: Part, config: Config) -> Tensor:
    return -log_ratio(part).exp().clamp(max=1 + config.clip_high) * part["advantages"] * part["logprobs"]


def sequence_ratio_of_sums(part: Part, config: Config) -> Tensor:
    ratio = (log_ratio(part) * part["mask"]).sum(dim=1, keepdim=True).exp()
    return clipped(ratio.expand(part["mask"].shape), part["advantages"], config)


def ratio_inverted(part: Part, config: Config) -> Tensor:
    return clipped((-log_ratio(part)).exp(), part["advantages"], config)


def advantage_negated(part: Part, config: Config) -> Tensor:
    return -policy_values(part, config)


# KL and entropy.


def kl_subtracted(part: Part, config: Config) -> Tensor:
    return policy_values(part, config) - config.kl_coef * k3(part)


def kl_ignored(part: Part, config: Config) -> Tensor:
    return policy_values(part, config)


def kl_weighted_by_the_probability(part: Part, config: Config) -> Tensor:
    return policy_values(part, config) + config.kl_coef * part["logprobs"].detach().exp() * k3(part)


def kl_of_the_other_sign(part: Part, config: Config) -> Tensor:
    away = part["logprobs"] - part["ref_logprobs"]
    return policy_values(part, config) + config.kl_coef * (away.exp() - 1 - away)


def entropy_without_gradient(part: Part, config: Config) -> Tensor:
    return policy_values(part, config) - config.entropy_coef * part["entropy"].detach()


# Preferences and distillation.


def orpo_of(sums: bool = False, bias: float = 0.0, detached: bool = False):
    def pairs(chosen: Part, rejected: Part, config: Config) -> Tensor:
        scores = []
        for one in (chosen, rejected):
            total = (one["logprobs"] * one["mask"]).sum(dim=1)
            scores.append(total if sums else total / one["mask"].sum(dim=1))
        odds = [score - torch.log(1.0 + bias - score.exp()) for score in scores]
        value = -scores[0] - config.beta * logsigmoid(odds[0] - odds[1])
        return value.detach() if detached else value

    return pairs


def rejected_with_the_chosen_mask(chosen: Part, rejected: Part, config: Config) -> Tensor:
    sums = [((one["logprobs"] - one["ref_logprobs"]) * chosen["mask"]).sum(dim=1) for one in (chosen, rejected)]
    return -logsigmoid(config.beta * (sums[0] - sums[1]))


def mask_of_the_chosen_alone(chosen: Part, rejected: Part, config: Config) -> Tensor:
    won = ((chosen["logprobs"] - chosen["ref_logprobs"]) * chosen["mask"]).sum(dim=1)
    lost = (rejected["logprobs"] - rejected["ref_logprobs"]).sum(dim=1)
    return -logsigmoid(config.beta * (won - lost))


def smoothing_dropped(chosen: Part, rejected: Part, config: Config) -> Tensor:
    sums = [((one["logprobs"] - one["ref_logprobs"]) * one["mask"]).sum(dim=1) for one in (chosen, rejected)]
    return -logsigmoid(config.beta * (sums[0] - sums[1]))


def swapped_divergence(part: Part, config: Config) -> Tensor:
    other = {"forward_kl": "reverse_kl", "reverse_kl": "forward_kl"}[config.divergence]
    return divergence(part, Config("distillation", divergence=other))


def jsd_share_of_the_other(part: Part, config: Config) -> Tensor:
    student, teacher = part["student_logits"].log_softmax(-1), part["teacher_logits"].log_softmax(-1)
    share = config.jsd_weight
    mixture = ((1 - share) * teacher.exp() + share * student.exp()).log()
    return share * kl(teacher, mixture) + (1 - share) * kl(student, mixture)


def bug(name: str, function, check: str, config: Config, report: str = "", status: str = "fails") -> Bug:
    return Bug(name, "loss", function, check, report, config, status)


CONVENTION = "convention"
LOSSES = [
    bug("tokens of the generation batch", made(weights=by_generation_batch), "last_window", GRPO,
        "trl#5619"),
    bug("divided by window and accumulation", made(weights=divided_twice), "equal_split", GRPO,
        "ms-swift#10117"),
    bug("last window divided by configured accumulation", made(weights=by_configured_accumulation), "last_window", SFT,
        "ms-swift#10084"),
    bug("distillation divided by micro-batch tokens", made(weights=by_own_tokens), "unequal_split", FORWARD,
        "ms-swift#10165", CONVENTION),
    bug("sample mean instead of token mean", made(weights=by_rows), "lengths", GRPO,
        "open-instruct#1137", CONVENTION),
    bug("mean of each rank, then of ranks", made(weights=by_own_tokens), "unequal_split", SFT,
        "prime-rl#1957", CONVENTION),
    bug("micro-batch means, averaged", made(weights=by_own_tokens), "equal_split", SFT,
        "nanochat#59", CONVENTION),
    bug("micro-batch means, summed", made(weights=summed_means), "equal_split", SFT,
        "transformers#34191"),
    bug("gradients of all but the last micro-batch dropped", last_micro_batch_only, "equal_split", SFT,
        "arXiv:2604.23747"),
    bug("divided by all tokens of a conversation", made(weights=by_tokens_up_to_the_last), "hole", GRPO,
        "slime#365"),
    bug("dead rows in the divisor", made(weights=by_all_rows), "empty_row", GRPO_ROWS, "rllm#508", CONVENTION),
    bug("entropy divided by the policy's token count", made(entropy_of_the_policys_tokens), "width", WITH_ENTROPY,
        "trl#6648"),
    bug("fused loss without the ratio", made(without_ratio), "arguments", GRPO, "Liger-Kernel#1082"),
    bug("sequence advantage over padded slots", made(advantage_of_padded_slots, prepare=with_its_own_padding),
        "padding", GSPO_ROWS, "AReaL#1346"),
    bug("NaN at a masked log-probability", made(ratio_before_the_mask, prepare=with_its_own_padding),
        "nan_padding", GRPO,
        "OpenRLHF#1240"),
    bug("k3 before the mask", made(k3_before_the_mask, prepare=with_its_own_padding), "nan_padding", WITH_KL,
        "ms-swift#9767"),
    bug("times the token count, unmasked", made(times_the_count_without_a_mask, prepare=with_its_own_padding),
        "padding", WITH_KL, "unsloth-zoo#1282"),
    bug("sequences weighted by length", made(weights=by_whole), "lengths", GSPO_ROWS,
        "trl#3823", CONVENTION),
    bug("log-ratios centred before the mask", made(centred_over_the_batch, prepare=with_its_own_padding),
        "padding", GSPO,
        "Soup#723"),
    bug("sequence ratio along the wrong axis", made(sequence_ratio_along_columns), "square", GSPO,
        "EasyR1#596"),
    bug("mean of rows along the wrong axis", made(weights=by_length_along_columns), "square", GRPO_ROWS,
        "OpenRLHF#1250"),
    bug("geometric mean times token weights", made(geometric_mean_along_columns), "square", GMPO,
        "verl#3245"),
    bug("mean over no tokens", made(weights=without_a_guard), "empty_row", GRPO_ROWS, "open-instruct#1625"),
    bug("dropped sequence with weight 1", dropped_sequence_with_weight_one, "empty_row", GMPO_ROWS,
        "trl#6095"),
    bug("ratios of different tokens", made(prepare=old_shifted), "on_policy", GRPO, "prime-rl#1525"),
    bug("mask one position early", made(prepare=mask_one_early), "lengths", GRPO, "verl#1758"),
    bug("clip computed but unused", made(clip_computed_and_not_used), "options", GRPO, "rllm#81"),
    bug("importance weight with a gradient", made(weight_with_gradient), "gradient", Config("cispo"),
        "verl#4105"),
    bug("behaviour log-probabilities unused", made(ratio_of_itself), "arguments", GRPO,
        "torchforge#571"),
    bug("sampling log-probabilities overwritten", made(sampler_overwritten), "arguments", CORRECTED,
        "tinker-cloud#66"),
    bug("dual clip of positive advantages", made(dual_clip_of_every_sign), "gradient", GRPO, "tianshou#433"),
    bug("clip option swallowed", made(clip_option_swallowed), "options", GRPO, "RLinf#316"),
    bug("sequence ratio without length normalization", made(sequence_ratio_of_sums), "value", GSPO, "trl#5814"),
    bug("KL maximised", made(kl_subtracted), "options", WITH_KL, "RAGEN#58"),
    bug("KL coefficient ignored", made(kl_ignored), "options", WITH_KL, "slime#399"),
    bug("KL weighted by the probability", made(kl_weighted_by_the_probability), "value", WITH_KL,
        "marin#1708"),
    bug("entropy bonus without gradient", made(entropy_without_gradient), "gradient", WITH_ENTROPY,
        "trl#6140"),
    bug("ORPO term without gradient", made_pairs(orpo_of(detached=True)), "gradient", ORPO, "mlx-lm-lora#65"),
    bug("ORPO of sums", made_pairs(orpo_of(sums=True)), "value", ORPO, "rlhf-book#243"),
    bug("ORPO of 1.0001 − p", made_pairs(orpo_of(bias=1e-4)), "value", ORPO, "ColossalAI#6407"),
    bug("rejected with the chosen mask", made_pairs(rejected_with_the_chosen_mask), "lengths", DPO,
        "CosyVoice#1449"),
    bug("prompts masked only for chosen answers", made_pairs(mask_of_the_chosen_alone, prepare=with_its_own_padding),
        "padding", DPO, "OpenRLHF#294"),
    bug("label smoothing dropped", made_pairs(smoothing_dropped), "options", SMOOTHED, "trl#7062"),
    bug("mixture weights swapped", made(jsd_share_of_the_other), "value", JSD, "trl#3043"),
    bug("forward and reverse KL swapped", made(swapped_divergence), "value", REVERSE, "twinkle#112"),
    bug("reverse instead of forward KL", made(swapped_divergence), "value", FORWARD, "aprender#2153"),
    bug("divided by the padded size", made(weights=by_width), "width", GRPO),
    bug("whole batch for every micro-batch", whole_batch_always, "arguments", GRPO),
    bug("clip on both sides for both signs", made(clip_of_both_signs), "gradient", GRPO),
    bug("ratio inverted", made(ratio_inverted), "direction", GRPO),
    bug("advantage negated", made(advantage_negated), "direction", GRPO),
    bug("k3 with the wrong sign", made(kl_of_the_other_sign), "value", WITH_KL),
]  # fmt: skip
