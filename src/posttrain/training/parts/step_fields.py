"""Batch fields computed with pre-update weights: for masks, and for tokens or pairs selected across the whole batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from posttrain.algorithms.objectives.primitives import log_ratio
from posttrain.randomness import derive_key, uniforms
from posttrain.registry import register
from posttrain.training.batch_fields import Scorer
from posttrain.types import Batch


@register("batch_field", each_step=True, fills=("policy_logprobs", "policy_entropy"))
def policy_logprobs(batch: Batch, policy: Scorer) -> dict[str, Tensor]:
    """``[B, T]`` log-probabilities under pre-update weights, plus ``policy_entropy`` at each token."""
    logprobs, entropies = policy.entropies(batch)
    return {"policy_logprobs": logprobs, "policy_entropy": entropies}


@register("batch_field", each_step=True, needs=("policy_logprobs", "old_logprobs", "advantages"))
def clip_cov_tokens(batch: Batch, objective_options: Mapping[str, Any], seed: int, step: int) -> Tensor:
    """``[B, T]`` indicator for tokens drawn by ``clip_cov`` from unclipped tokens.

    The draw depends only on (seed, step, row).
    """
    from posttrain.algorithms.masks import draw_in_range, number_of, token_covariance

    options = objective_options
    mask = batch.trained_mask
    advantages = batch.field("advantages")
    ratio = log_ratio(batch.field("policy_logprobs"), batch.field("old_logprobs"), mask).exp()
    falls = (ratio < 1.0 - options["clip_low"]) & (advantages < 0)
    rises = (ratio > 1.0 + options["clip_high"]) & (advantages > 0)
    keys = [derive_key(seed, "clip_cov", step, row) for row in range(batch.num_rows)]
    draws = torch.from_numpy(uniforms(keys, batch.mask.shape[1]))
    covariance = token_covariance(batch.field("policy_logprobs"), advantages, mask)
    number = number_of(options["share"], mask)
    chosen = draw_in_range(covariance, mask & ~falls & ~rises, draws, number, options["cov_low"], options["cov_high"])
    return chosen.float()


@register("batch_field", each_step=True, needs=("policy_logprobs", "advantages"))
def kl_cov_tokens(batch: Batch, objective_options: Mapping[str, Any]) -> Tensor:
    """``[B, T]`` indicator for tokens with the largest covariance, penalized by ``kl_cov``."""
    from posttrain.algorithms.masks import largest, number_of, token_covariance

    mask = batch.trained_mask
    covariance = token_covariance(batch.field("policy_logprobs"), batch.field("advantages"), mask)
    return largest(covariance, mask, number_of(objective_options["share"], mask)).float()


@register("batch_field", each_step=True, needs=("policy_logprobs", "ref_logprobs"))
def transport_shift(batch: Batch) -> Tensor:
    """``[B]`` reference margin for each pair minus the reference margin at the policy margin's rank (``aot``)."""
    from posttrain.algorithms.masks import shift_by_rank

    margins = []
    for name in ("policy_logprobs", "ref_logprobs"):
        rows = torch.where(batch.mask, batch.field(name).double(), 0.0).sum(dim=1)
        margins.append(rows[0::2] - rows[1::2])
    return shift_by_rank(*margins).repeat_interleave(2).float()
