"""What the zoo's functions are made from, and the right ones beside them: common code of trainers, ours.

A loss is ``made(values, weights, prepare)``: values per token of a micro-batch, the weights of their sum, and what is
done to the batch before. Each wrong one replaces one of the three.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from posttrain.conformance.cases import Config

Part = dict[str, Tensor]


@dataclass(frozen=True)
class Bug:
    """A wrong function, and the check that finds it.

    ``report``: where it was found in public; none for one that is made up. ``status``: ``convention`` where part of the
    field means it so.
    """

    name: str
    kind: Literal["loss", "advantages", "score", "rows"]
    function: Callable[..., Any]
    check: str
    report: str = ""
    config: Config | None = None
    status: str = "fails"


def rows_of(batch: Part, rows: Sequence[int]) -> Part:
    return {name: x[list(rows)] for name, x in batch.items()}


def clean(part: Part) -> Part:
    """0 at every place that is not trained."""
    outside = ~part["mask"]
    cleaned = {}
    for name, x in part.items():
        cleaned[name] = x.masked_fill(outside.view(*outside.shape, *[1] * (x.ndim - 2)), 0.0) if x.ndim > 1 else x
    return cleaned | {"mask": part["mask"]}


def row_mean(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)


def clipped(ratio: Tensor, advantages: Tensor, config: Config) -> Tensor:
    inside = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    return -torch.minimum(ratio * advantages, inside * advantages)


def log_ratio(part: Part) -> Tensor:
    return part["logprobs"] - part["old_logprobs"]


def k3(part: Part) -> Tensor:
    towards = part["ref_logprobs"] - part["logprobs"]
    return towards.exp() - 1 - towards


def divergence(part: Part, config: Config) -> Tensor:
    student, teacher = part["student_logits"].log_softmax(-1), part["teacher_logits"].log_softmax(-1)
    if config.divergence == "forward_kl":
        return kl(teacher, student)
    if config.divergence == "reverse_kl":
        return kl(student, teacher)
    share = config.jsd_weight
    mixture = (share * teacher.exp() + (1 - share) * student.exp()).log()
    return share * kl(teacher, mixture) + (1 - share) * kl(student, mixture)


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)


def policy_values(part: Part, config: Config) -> Tensor:
    advantages, mask = part["advantages"], part["mask"]
    if config.objective == "cross_entropy":
        return -part["logprobs"]
    if config.objective == "distillation":
        return divergence(part, config)
    if config.objective == "grpo":
        return clipped(log_ratio(part).exp(), advantages, config)
    if config.objective == "gspo":
        return clipped(row_mean(log_ratio(part), mask).exp()[:, None].expand(mask.shape), advantages, config)
    if config.objective == "cispo":
        return -log_ratio(part).detach().exp().clamp(max=1 + config.clip_high) * advantages * part["logprobs"]
    assert config.objective == "gmpo"
    limit = config.clip_high
    kept = torch.where(advantages > 0, log_ratio(part).clamp(max=limit), log_ratio(part).clamp(min=-limit))
    return -advantages * row_mean(kept, mask).exp()[:, None]


def right_values(part: Part, config: Config) -> Tensor:
    values = policy_values(part, config)
    if config.cap is not None:
        values = values * (part["old_logprobs"] - part["sampler_logprobs"]).exp().clamp(max=config.cap)
    return values + config.kl_coef * k3(part) - config.entropy_coef * part["entropy"]


def right_weights(mask: Tensor, whole: Tensor, config: Config, num_micro: int) -> Tensor:
    num_rows = whole.any(dim=1).sum()
    if config.aggregation == "sequence_mean":
        return mask.double() / mask.sum(dim=1, keepdim=True).clamp(min=1) / num_rows
    if config.aggregation == "constant":
        return mask.double() / (num_rows * config.length)
    return mask.double() / whole.sum()


def made(
    values: Callable[[Part, Config], Tensor] = right_values,
    weights: Callable[[Tensor, Tensor, Config, int], Tensor] = right_weights,
    prepare: Callable[[Part], Part] = clean,
) -> Callable[..., Tensor]:
    def loss(batch: Part, config: Config, micro_batches: Sequence[Sequence[int]]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for rows in micro_batches:
            part = prepare(rows_of(batch, rows))
            weight = weights(part["mask"], batch["mask"], config, len(micro_batches))
            total = total + (values(part, config) * weight).sum()
        return total

    return loss


def right_pairs(chosen: Part, rejected: Part, config: Config) -> Tensor:
    if config.objective == "orpo":
        means = [row_mean(one["logprobs"], one["mask"]) for one in (chosen, rejected)]
        odds = [mean - torch.log1p(-mean.exp()) for mean in means]
        return -means[0] - config.beta * logsigmoid(odds[0] - odds[1])
    sums = [((one["logprobs"] - one["ref_logprobs"]) * one["mask"]).sum(dim=1) for one in (chosen, rejected)]
    logit = config.beta * (sums[0] - sums[1])
    return -(1 - config.label_smoothing) * logsigmoid(logit) - config.label_smoothing * logsigmoid(-logit)


def made_pairs(
    pairs: Callable[[Part, Part, Config], Tensor] = right_pairs, prepare: Callable[[Part], Part] = clean
) -> Callable[..., Tensor]:
    def loss(batch: Part, config: Config, micro_batches: Sequence[Sequence[int]]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for rows in micro_batches:
            part = prepare(rows_of(batch, rows))
            chosen, rejected = ({name: x[start::2] for name, x in part.items()} for start in (0, 1))
            total = total + pairs(chosen, rejected, config).sum() / (batch["mask"].shape[0] // 2)
        return total

    return loss


def right_advantages(rewards: Tensor, group: Tensor) -> Tensor:
    result = torch.zeros_like(rewards)
    for number in group.unique():
        own = group == number
        spread = rewards[own].amax() - rewards[own].amin()
        if int(own.sum()) > 1 and float(spread) > 0:
            result[own] = (rewards[own] - rewards[own].mean()) / (rewards[own].std() + 1e-4)
    return result


def right_score(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    table = (logits[:, :-1] / temperature).log_softmax(-1)
    entropy = -(table.exp() * table.clamp(min=-1e30)).sum(-1)
    return table.gather(2, tokens[:, 1:, None]).squeeze(2), entropy


def right_rows(
    prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], pad: int, end: int
) -> tuple[Tensor, Tensor]:
    width = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    tokens = torch.full((len(prompts), width), pad)
    mask = torch.zeros(len(prompts), width, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        length = len(prompt) + len(answer)
        tokens[row, :length] = torch.tensor([*prompt, *answer])
        mask[row, len(prompt) : length] = True
    return tokens, mask


RIGHT: dict[str, Callable[..., Any]] = {
    "loss": made(),
    "pairs": made_pairs(),
    "advantages": right_advantages,
    "score": right_score,
    "rows": right_rows,
}
