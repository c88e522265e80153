"""Metrics for log-ratio mismatch between trainer and other models, and rejection of mismatched samplers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import reduce
from typing import NoReturn

import torch
from torch import Tensor

from posttrain.algorithms.objectives.primitives import is_clamped, kl_k3, log_ratio
from posttrain.balances.findings import Imbalance
from posttrain.errors import EngineMismatch
from posttrain.models.forward.forward import Forward
from posttrain.models.forward.logit_rules import apply_rules, ids_as_mask, tokens_before
from posttrain.recipes.inert import ROOM, narrow_bounds
from posttrain.recipes.sections import RolloutSection, TrainSection
from posttrain.types import Batch, Outputs

# sampler-to-trainer KL in nats per token, far above usual limits; training on such answers cannot work
HOPELESS_KL = 0.05
CLAMPED = "clamped_log_ratios"  # fraction of trained tokens with a log-ratio beyond ±20


def measure_ratios(outputs: Outputs, part: Batch, of_tokens: bool) -> dict[str, Tensor]:
    """Compute mismatch metrics per token in a micro-batch.

    Includes ``kl_sampler``, importance weights, the correction, and for token objectives (``of_tokens``) an indicator
    for clamped log-ratios to the sampler, reference or teacher.
    """
    metrics: dict[str, Tensor] = {}
    fields = part.fields
    own = outputs.logprobs.detach()
    if "sampler_logprobs" in fields and outputs.entropy is not None:
        # samples come from the sampler μ, so this estimates KL(μ‖π)
        log_weight = log_ratio(own, fields["sampler_logprobs"], part.mask)
        metrics["kl_sampler"] = kl_k3(-log_weight)
        metrics["weight"] = log_weight.exp()
        metrics["weight_squared"] = (2.0 * log_weight).exp()
    if "correction" in fields:
        metrics["correction"] = fields["correction"]
    pairs: list[tuple[Tensor, Tensor]] = []
    for name in ("old_logprobs", "ref_logprobs", "sampler_logprobs"):
        if name in fields:
            pairs.append((own, fields[name]))
    if "teacher_logprobs" in fields and "old_logprobs" in fields:
        pairs.append((fields["teacher_logprobs"], fields["old_logprobs"]))
    if pairs and of_tokens:
        clamped = (is_clamped(one, other, part.mask) for one, other in pairs)
        metrics[CLAMPED] = reduce(torch.maximum, clamped)
    return metrics


def derive_sample_size(means: dict[str, float]) -> dict[str, float]:
    """Add ``effective_sample_size``, E[w]² / E[w²] for importance weights w = π/μ (fraction of tokens)."""
    if "weight_squared" in means:
        mean = means.pop("weight")
        mean_of_squares = means.pop("weight_squared")
        means["effective_sample_size"] = mean**2 / mean_of_squares
    return means


def check_mismatch(
    options: RolloutSection | None,
    policy: Forward,
    batch: Batch,
    found: Sequence[Imbalance],
    metrics: Mapping[str, float],
) -> list[Imbalance]:
    """Explain sampler mismatch findings by comparing sampler and trainer with the model's plain forward pass.

    Raises:
        EngineMismatch: sampler-to-trainer KL above 0.05 nats per token, more than rounding can explain and too much to
            learn from. Weights are unchanged.
    """
    explained: list[Imbalance] = []
    for one in found:
        if one.check != "sampler":
            explained.append(one)
            continue
        engine = "native"
        if options is not None:
            engine = options.engine.name
        which = _explain(policy, batch, engine)
        if not float(one.found) <= HOPELESS_KL:
            _refuse(one, explained, which, metrics)
        explained.append(replace(one, decided_by=f"{one.decided_by}. {which}".removesuffix(". ")))
    return explained


def _refuse(one: Imbalance, earlier: Sequence[Imbalance], which: str, metrics: Mapping[str, float]) -> NoReturn:
    shown = ""
    if "effective_sample_size" in metrics:
        shown = f" (effective sample size {metrics['effective_sample_size']:.2f})"
    first = ""
    if earlier:
        first = f"This may be why: {earlier[0].message}. "
    raise EngineMismatch(
        f"update {one.step}: sampler and trained model differ. The KL from sampler to trainer is "
        f"{float(one.found):.2g} nats per token{shown}, but {one.expected} was expected. {which}{first}The weights "
        "were not changed"
    )


def describe_clamped(metrics: Mapping[str, float], step: int) -> str:
    """Warn about clamped log-ratios; empty if none."""
    share = metrics.get(CLAMPED, 0.0)
    if not share:
        return ""
    return (
        f"{share:.2%} of trained tokens in step {step} have a log-ratio beyond ±20 to the sampler, reference "
        "or teacher. Clamping changes loss and gradient. Check that teacher and "
        "reference match the model and prompts, or lower train.lr"
    )


def describe_narrow_clip(
    bounds: Mapping[str, float],
    rollout: RolloutSection,
    train: TrainSection,
    policy: Forward,
    metrics: Mapping[str, float],
    step: int,
) -> str:
    """Warn about clip ranges narrower than ten times the ratio mismatch; empty if wide enough.

    ``bounds``: distance from 1 for each ratio bound, by key.

    Before the first update on a rollout batch, sampler and trainer share weights, so ratios differ from 1 only by
    rounding and any clipping clips rounding errors.
    """
    mismatch = metrics.get("ratio_distance")
    is_first = (step - 1) % train.updates_per_batch == 0
    if rollout.staleness or not is_first or mismatch is None or has_dropout(policy.model):
        return ""
    narrow = narrow_bounds(bounds, mismatch)
    if not narrow:
        return ""
    remedy = "Set rollout.old_logprobs: trainer"
    if rollout.old_logprobs == "trainer":
        remedy = "Widen the range, or train in fp32 (model.dtype, train.precision)"
    clipped = ""
    if "clip_fraction" in metrics:
        clipped = f" (clip_fraction {metrics['clip_fraction']:.1%})"
    return (
        f"{narrow}: before update {step}, with equal weights, ratios differ from 1 by {mismatch:.2g} on average. The "
        f"clip range is below {ROOM} times that, so it mostly clips rounding errors{clipped}. {remedy}"
    )


def has_dropout(model: torch.nn.Module) -> bool:
    """Check if an adapter applies dropout during training."""
    for name, module in model.named_modules():
        if ".lora_dropout." in name and isinstance(module, torch.nn.Dropout) and module.p > 0:
            return True
    return False


def _ruled(logits: Tensor, row: Batch, length: int) -> Tensor:
    """Apply the sampler's rules to ``[L, V]`` logits for a row's tokens after the first."""
    assert row.rules is not None
    columns = torch.arange(1, length)
    seen = tokens_before(row.tokens[:1, :length].expand(length - 1, -1), columns, logits.shape[1]).to(logits.device)
    barred: Tensor | None = None
    if row.rules.barred_ids:
        ends = ids_as_mask(row.rules.barred_ids, logits.shape[1], logits.device)
        barred = (row.field("barred")[0, 1:length] > 0).to(logits.device)[:, None] & ends
    return apply_rules(row.rules, logits, seen, barred)


def _only_kept(logits: Tensor, kept: Tensor) -> Tensor:
    """Set logits ``[L, V]`` outside the kept sets ``[L, K]`` (padded with -1) to minus infinity."""
    is_member = torch.zeros((len(logits), logits.shape[1] + 1), dtype=torch.bool, device=logits.device)
    is_member.scatter_(1, kept.long().masked_fill(kept < 0, logits.shape[1]), True)
    has_set = (kept >= 0).any(dim=1, keepdim=True)
    return logits.masked_fill(has_set & ~is_member[:, :-1], -torch.inf)


@torch.no_grad()
def _explain(policy: Forward, batch: Batch, engine: str) -> str:
    """Compare sampler and trainer with the model's plain forward pass on the first row."""
    if policy.is_sharded:
        return ""
    row = batch.select(list(range(batch.rows_per_unit)))
    length = int(row.lengths[0])
    tokens = row.tokens[:, :length].to(policy.device)
    mask = row.mask[0, :length]
    routing: AbstractContextManager[object] = nullcontext()
    if policy.replay is not None and row.experts is not None:
        routing = policy.replay.replaying(row.experts[0, :length].to(policy.device))
    with routing:
        outputs = policy.model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False)
    logits = outputs.logits[0, :-1].float()
    if row.rules is not None:
        logits = _ruled(logits, row, length)
    if row.kept is not None:
        columns = torch.zeros_like(row.mask)
        columns[0, 1:length] = True
        logits = _only_kept(logits, row.kept.dense(columns.cpu()).to(logits.device))
    table = (logits / policy.temperature).log_softmax(-1)
    own = table.gather(1, tokens[0, 1:, None])[:, 0].cpu()

    def gap(logprobs: Tensor) -> float:
        theirs = logprobs[0, 1:length].cpu().float()
        differences = (theirs - own)[mask[1:]]
        return float(differences.abs().mean())

    of_sampler = gap(row.field("sampler_logprobs"))
    of_trainer = gap(policy(row, "none").logprobs)
    if of_sampler > of_trainer:
        remedy = "please report this, with the model"
        if engine != "native":
            remedy = "set rollout.engine.name: native"
        return (
            f"On the first row the engine ({engine}) differs from the model's own forward pass by {of_sampler:.2g} "
            f"nats per token, and the trainer by {of_trainer:.2g}; {remedy}. "
        )
    return (
        f"On the first row the trainer's forward pass ({policy.path}) differs from the model's own by {of_trainer:.2g} "
        f"nats per token, and the engine by {of_sampler:.2g}; set model.attention: eager and train.precision: fp32. "
    )
