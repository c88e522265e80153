"""Drift: how far a model has moved from where it started, and how much chance is left in it."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from posttrain.engines.base import Engine, Sampling
from posttrain.evals.generation import held_out_indices
from posttrain.models.forward import Forward
from posttrain.objectives.primitives import kl_k3, log_ratio
from posttrain.rollout import Grader, collect, encode_prompts
from posttrain.tasks.base import Task
from posttrain.train.micro import split_rows
from posttrain.train.reference import Reference
from posttrain.types import Sample, collate


@torch.no_grad()
def measure_drift(
    engine: Engine,
    tokenizer: Any,
    grader: Grader,
    task: Task,
    *,
    policy: Forward,
    start: Reference,
    n: int,
    sampling: Sampling,
    context_tokens: int,
    seed: int,
    tokens_per_micro: int,
) -> dict[str, float]:
    """One sampled answer to each of ``n`` fixed held-out prompts, read by both models.

    ``kl_from_start``: KL(π‖π_start) of a whole answer in nats, the mean over answers of the sum of k3
    over their tokens (Schulman 2020; unbiased, as each token's k3 is for the KL at its state).
    ``entropy``: nats per token, at the sampling temperature. ``sampled_accuracy`` and
    ``sampled_num_tokens``: of these answers.
    """
    examples = [task.examples[i] for i in held_out_indices(len(task.examples), n)]
    kept, prompts, _ = encode_prompts(tokenizer, grader.template, examples, context_tokens - 1)
    groups, _ = collect(
        engine,
        tokenizer,
        grader,
        [examples[i] for i in kept],
        prompts,
        1,
        sampling,
        key=(seed, f"drift {task.name}", 0),
        step=0,
    )
    rollouts = [g[0] for g in groups]
    samples = []
    for index, rollout in enumerate(rollouts):
        prompt, answer = rollout.prompt_ids, rollout.completion.ids
        mask = [False] * len(prompt) + [True] * len(answer)
        samples.append(Sample([*prompt, *answer], mask, group=index, prefix=len(prompt)))
    batch = collate(samples)
    kl, entropy = 0.0, 0.0
    for rows in split_rows(batch, tokens_per_micro):
        part = batch.select(rows)
        now = policy(part, "detached")
        assert now.entropy is not None
        with start.open() as model:  # which may be the policy itself with its adapter off, so only here
            then = model(part, "none")
        mask_here = part.mask.to(now.logprobs.device)
        ratio = log_ratio(now.logprobs.double(), then.logprobs.double(), mask_here)
        kl += float(torch.where(mask_here, kl_k3(ratio), torch.zeros_like(ratio)).sum())
        entropy += float(torch.where(mask_here, now.entropy, torch.zeros_like(now.entropy)).sum(dtype=torch.float64))
    return {
        "kl_from_start": kl / len(rollouts),
        "entropy": entropy / float(batch.mask.sum()),
        "sampled_accuracy": statistics.fmean(float(r.parts["correct"] == 1.0) for r in rollouts),
        "sampled_num_tokens": statistics.fmean(len(r.completion.ids) for r in rollouts),
    }
