"""Adapter for posttrain's own losses, advantages, scores and rows, checked by ``posttrain conformance own``."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from posttrain.api.parts import advantages as parts_advantages
from posttrain.api.parts import aggregations, losses
from posttrain.conformance.cases import Config, FieldTensors, MicroBatches, select_rows
from posttrain.types import Sample, collate

_CLIPS = ("clip_low", "clip_high")
# Option names per objective.
_OPTIONS = {
    "grpo": _CLIPS,
    "gspo": _CLIPS,
    "sapo": ("tau_positive", "tau_negative"),
    "dpo": ("beta", "label_smoothing"),
    "ipo": ("beta",),
    "simpo": ("beta", "gamma"),
    "distillation": ("divergence", "jsd_weight"),
}


def loss(batch: FieldTensors, config: Config, micro_batches: MicroBatches) -> Tensor:
    """Loss of an optimizer batch: weights over the whole batch, then a sum over micro-batches."""
    weights = _weights(batch["mask"], config)
    rows_of_units = 2 if config.aggregation == "pair_mean" else 1
    total = torch.zeros((), dtype=torch.float64)
    for rows in micro_batches:
        values = _values(select_rows(batch, rows), config)
        units = [row // rows_of_units for row in rows[::rows_of_units]]
        total = total + (values * weights[units]).sum()
    return total


def _weights(mask: Tensor, config: Config) -> Tensor:
    if config.aggregation == "pair_mean":
        return aggregations.unit_mean(mask[0::2] | mask[1::2])
    if config.aggregation == "constant":
        return aggregations.constant(mask, length=config.length)
    weights: Tensor = getattr(aggregations, config.aggregation)(mask)
    return weights


def _values(batch: FieldTensors, config: Config) -> Tensor:
    options: dict[str, Any] = {name: getattr(config, name) for name in _OPTIONS.get(config.objective, ())}
    names = {"old_logprobs", "ref_logprobs", "advantages"}
    if config.objective == "cispo":
        options = {"clip_high": config.clip_high}
    elif config.objective == "gmpo":
        options = {"clip": config.clip_high}
    elif config.objective == "orpo":
        options = {"odds_weight": config.beta}
    mask = batch["mask"]
    if config.objective == "distillation":
        # overwrite padding, infinity included, before its gradient can turn into NaN
        outside = ~mask[..., None]
        student = batch["student_logits"].masked_fill(outside, 0.0).log_softmax(dim=-1)
        teacher = batch["teacher_logits"].masked_fill(outside, 0.0).log_softmax(dim=-1)
        return losses.distillation(student, teacher_candidate_logprobs=teacher, mask=mask, tail=False, **options).values
    function = getattr(losses, config.objective)
    tensors = {name: batch[name] for name in names & set(function.__signature__.parameters)}
    found = function(batch["logprobs"], mask=mask, **tensors, **options)
    if config.cap is not None:
        found.values = found.values * _correction(batch, config.cap)
    if config.kl_coef or config.entropy_coef:
        found = losses.regularize(
            found,
            mask=mask,
            logprobs=batch["logprobs"],
            ref_logprobs=batch["ref_logprobs"],
            entropy=batch["entropy"],
            kl_coef=config.kl_coef,
            entropy_coef=config.entropy_coef,
        )
    values: Tensor = found.values
    return values


def _correction(batch: FieldTensors, cap: float) -> Tensor:
    from posttrain.algorithms.correction import token_tis

    return token_tis(batch["old_logprobs"] - batch["sampler_logprobs"], batch["mask"], cap=cap)


def advantages(rewards: Tensor, group: Tensor) -> Tensor:
    """The advantages of ``rl/grpo``."""
    found: Tensor = parts_advantages.normalized(rewards, group)
    return found


def score(logits: Tensor, tokens: Tensor, temperature: float) -> Any:
    """The log-probabilities and entropies that the trainer computes from logits."""
    if find_spec("pydantic") is None:  # models are scored with it
        return NotImplemented
    from posttrain.models.heads import score_logits

    rows, width, vocabulary = logits.shape
    flat = logits[:, :-1].reshape(-1, vocabulary)
    logprobs, entropy, _ = score_logits(flat, tokens[:, 1:].flatten(), temperature, "differentiable")
    assert entropy is not None, "it was asked for"
    return logprobs.view(rows, width - 1), entropy.view(rows, width - 1)


def rows(
    prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], pad: int, end: int
) -> tuple[Tensor, Tensor]:
    """Training rows: prompt, then trained answer."""
    samples = []
    for prompt, answer in zip(prompts, answers, strict=True):
        mask = [False] * len(prompt) + [True] * len(answer)
        samples.append(Sample([*prompt, *answer], mask))
    batch = collate(samples, pad_id=pad)
    return batch.tokens, batch.mask
