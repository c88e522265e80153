"""Reference losses, written row by row from published equations.

Shares no code with ``posttrain.algorithms``. Rows are cut to trained tokens first, so that no mask can be forgotten.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from posttrain.conformance.cases import OBJECTIVES, Config, FieldTensors

ReferenceRow = dict[str, Tensor]


def reference_loss(batch: FieldTensors, config: Config) -> Tensor:
    """Loss of a whole optimizer batch, regardless of splits."""
    rows = [_trained_part(batch, index) for index in range(batch["mask"].shape[0])]
    if OBJECTIVES[config.objective].rows_per_unit == 2:
        pairs = zip(rows[0::2], rows[1::2], strict=True)
        return torch.stack([_PAIRS[config.objective](chosen, rejected, config) for chosen, rejected in pairs]).mean()
    values = [_token_values(row, config) for row in rows if row["logprobs"].numel() > 0]
    return AGGREGATE[config.aggregation](values, config)


def _trained_part(batch: FieldTensors, index: int) -> ReferenceRow:
    trained = batch["mask"][index]
    return {name: x[index][trained] if x.ndim > 1 else x[index] for name, x in batch.items()}


def _token_mean(values: list[Tensor], config: Config) -> Tensor:
    return torch.cat(values).mean()


def _sequence_mean(values: list[Tensor], config: Config) -> Tensor:
    return torch.stack([one.mean() for one in values]).mean()


def _constant(values: list[Tensor], config: Config) -> Tensor:
    return torch.cat(values).sum() / (len(values) * config.length)


AGGREGATE: dict[str, Callable[[list[Tensor], Config], Tensor]] = {
    "token_mean": _token_mean,
    "sequence_mean": _sequence_mean,
    "constant": _constant,
}


def _token_values(row: ReferenceRow, config: Config) -> Tensor:
    values = _TOKENS[config.objective](row, config)
    if config.cap is not None:
        weight = (row["old_logprobs"] - row["sampler_logprobs"]).exp().clamp(max=config.cap)
        values = values * weight.detach()
    if config.kl_coef:
        towards = row["ref_logprobs"] - row["logprobs"]
        values = values + config.kl_coef * (towards.exp() - 1.0 - towards)
    if config.entropy_coef:
        values = values - config.entropy_coef * row["entropy"]
    return values


def _cross_entropy(row: ReferenceRow, config: Config) -> Tensor:
    return -row["logprobs"]


def _reinforce(row: ReferenceRow, config: Config) -> Tensor:
    return -row["advantages"] * row["logprobs"]


def _clipped(ratio: Tensor, row: ReferenceRow, config: Config) -> Tensor:
    advantages = row["advantages"]
    clipped = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def _grpo(row: ReferenceRow, config: Config) -> Tensor:
    return _clipped((row["logprobs"] - row["old_logprobs"]).exp(), row, config)


def _gspo(row: ReferenceRow, config: Config) -> Tensor:
    mean = (row["logprobs"] - row["old_logprobs"]).mean()
    return _clipped(mean.exp().expand_as(row["logprobs"]), row, config)


def _cispo(row: ReferenceRow, config: Config) -> Tensor:
    weight = (row["logprobs"] - row["old_logprobs"]).detach().exp().clamp(max=1.0 + config.clip_high)
    return -weight * row["advantages"] * row["logprobs"]


def _gmpo(row: ReferenceRow, config: Config) -> Tensor:
    log_ratio = row["logprobs"] - row["old_logprobs"]
    limit = config.clip_high
    pessimistic = torch.where(row["advantages"] > 0, log_ratio.clamp(max=limit), log_ratio.clamp(min=-limit))
    return -row["advantages"] * pessimistic.mean().exp()


def _sapo(row: ReferenceRow, config: Config) -> Tensor:
    ratio = (row["logprobs"] - row["old_logprobs"]).exp()
    positive = row["advantages"] > 0
    tau = torch.where(
        positive, torch.full_like(ratio, config.tau_positive), torch.full_like(ratio, config.tau_negative)
    )
    return -row["advantages"] * torch.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau


def _distillation(row: ReferenceRow, config: Config) -> Tensor:
    student = row["student_logits"].log_softmax(dim=-1)
    teacher = row["teacher_logits"].log_softmax(dim=-1)
    if config.divergence == "forward_kl":
        return _kl(teacher, student)
    if config.divergence == "reverse_kl":
        return _kl(student, teacher)
    share = config.jsd_weight
    mixture = (share * teacher.exp() + (1.0 - share) * student.exp()).log()
    return share * _kl(teacher, mixture) + (1.0 - share) * _kl(student, mixture)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(dim=-1)


_TOKENS: dict[str, Callable[[ReferenceRow, Config], Tensor]] = {
    "cross_entropy": _cross_entropy,
    "reinforce": _reinforce,
    "grpo": _grpo,
    "gspo": _gspo,
    "cispo": _cispo,
    "gmpo": _gmpo,
    "sapo": _sapo,
    "distillation": _distillation,
}


def _margin(chosen: ReferenceRow, rejected: ReferenceRow) -> Tensor:
    to_reference = [(row["logprobs"] - row["ref_logprobs"]).sum() for row in (chosen, rejected)]
    return to_reference[0] - to_reference[1]


def _dpo(chosen: ReferenceRow, rejected: ReferenceRow, config: Config) -> Tensor:
    logit = config.beta * _margin(chosen, rejected)
    flipped = config.label_smoothing
    return -(1.0 - flipped) * logsigmoid(logit) - flipped * logsigmoid(-logit)


def _ipo(chosen: ReferenceRow, rejected: ReferenceRow, config: Config) -> Tensor:
    return (_margin(chosen, rejected) - 1.0 / (2.0 * config.beta)) ** 2


def _simpo(chosen: ReferenceRow, rejected: ReferenceRow, config: Config) -> Tensor:
    return -logsigmoid(config.beta * (chosen["logprobs"].mean() - rejected["logprobs"].mean()) - config.gamma)


def _orpo(chosen: ReferenceRow, rejected: ReferenceRow, config: Config) -> Tensor:
    means = [row["logprobs"].mean() for row in (chosen, rejected)]
    log_odds = [mean - torch.log(-torch.expm1(mean)) for mean in means]
    return -means[0] - config.beta * logsigmoid(log_odds[0] - log_odds[1])


_PAIRS: dict[str, Callable[[ReferenceRow, ReferenceRow, Config], Tensor]] = {
    "dpo": _dpo,
    "ipo": _ipo,
    "simpo": _simpo,
    "orpo": _orpo,
}
