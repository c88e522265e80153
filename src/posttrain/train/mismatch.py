"""Sampler and trainer have to be the same model; this stops a run in which they are not."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from posttrain import registry
from posttrain.errors import EngineMismatch
from posttrain.models.forward.forward import Forward
from posttrain.recipes.recipe import Recipe
from posttrain.train.step import MAX_KL
from posttrain.types import Batch


def check_mismatch(recipe: Recipe, policy: Forward, batch: Batch, metrics: Mapping[str, float], step: int) -> None:
    """Refuse an update whose rows another model sampled.

    Only where both computed the same: before the first update of a rollout batch, in a run without staleness,
    at one temperature, without dropout.

    Raises:
        EngineMismatch: the KL from the sampler to the trainer is above 0.05 nats per token; says which side differs
            from the model's own forward pass.
    """
    options, kl = recipe.rollout, metrics.get("mismatch_kl", 0.0)
    is_first = (step - 1) % (recipe.train.epochs * recipe.train.minibatches) == 0
    if options is None or options.staleness or not is_first or kl <= MAX_KL:
        return
    engine = "native" if options.engine is None else options.engine.name
    samples = (registry.traits_of("engine", engine) or {}).get("samples", True)
    if not samples or policy.temperature != (options.temperature or 1.0) or _has_dropout(policy):
        return
    size = metrics.get("effective_sample_size")
    shown = "" if size is None else f" (effective sample size {size:.2f})"
    raise EngineMismatch(
        f"update {step}: the sampler is not the model that is trained. The KL from sampler to trainer is {kl:.2g} nats "
        f"per token{shown}, at most {MAX_KL} is allowed. {_explain(policy, batch, engine)}The weights were not changed"
    )


def _has_dropout(policy: Forward) -> bool:
    named = policy.model.named_modules()
    return any(".lora_dropout." in name and isinstance(m, torch.nn.Dropout) and m.p > 0 for name, m in named)


@torch.no_grad()
def _explain(policy: Forward, batch: Batch, engine: str) -> str:
    """Say by how much each side differs from the model's own forward pass of the first row."""
    if policy.is_sharded:
        return ""
    row = batch.select(list(range(batch.rows_per_unit)))
    tokens, mask = row.tokens[:, : int(row.lengths[0])].to(policy.device), row.mask[0, : int(row.lengths[0])]
    logits = policy.model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False).logits[0]
    table = (logits[:-1].float() / policy.temperature).log_softmax(-1)
    own = table.gather(1, tokens[0, 1:, None])[:, 0].cpu()

    def gap(logprobs: Tensor) -> float:
        return float((logprobs[0, : len(mask)].cpu().float()[1:] - own)[mask[1:]].abs().mean())

    of_sampler, of_trainer = gap(row.stream("sampler_logprobs")), gap(policy(row, "none").logprobs)
    if of_sampler > of_trainer:
        remedy = "set rollout.engine.name: native" if engine != "native" else "please report this, with the model"
        return (
            f"On the first row the engine ({engine}) differs from the model's own forward pass by {of_sampler:.2g} "
            f"nats per token, and the trainer by {of_trainer:.2g}; {remedy}. "
        )
    return (
        f"On the first row the trainer's forward pass ({policy.path}) differs from the model's own by {of_trainer:.2g} "
        f"nats per token, and the engine by {of_sampler:.2g}; set model.attention: eager and train.precision: fp32. "
    )
