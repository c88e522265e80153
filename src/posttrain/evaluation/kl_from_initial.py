"""KL of a policy from its start, and its entropy, on fixed held-out prompts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from posttrain.algorithms.objectives.primitives import categorical_kl, with_tail
from posttrain.errors import RunFailure, UsageError
from posttrain.evaluation.generation import Questions, held_out
from posttrain.models.forward.forward import Forward
from posttrain.models.forward.micro import MicroBatching
from posttrain.models.reference import Reference
from posttrain.sampling.rollout import RolloutRequest, Sampler, collect, encode_prompts
from posttrain.types import Batch, Rollout, Sample, collate, with_float64

NUM_CANDIDATES = 1024
# Probabilities of all candidates exist for so many tokens at a time, whatever training can afford.
MAX_TOKENS = 2048


@torch.no_grad()
def measure_kl(
    sampler: Sampler, questions: Questions, *, policy: Forward, start: Reference, tokens_per_micro: int
) -> dict[str, float]:
    """Sample one answer to each of the fixed held-out prompts, and read it with both models.

    ``kl_initial``: KL(π‖π_start) of a whole answer in nats: per token exact over the two distributions (beyond the
    1,024 likeliest tokens the rest counts as one), which varies far less than an estimate from sampled tokens.
    ``entropy``: nats per token, at the sampling temperature. ``sampled_accuracy``, ``sampled_completion_length``,
    ``sampled_reward`` and ``sampled_reward/<part>`` for every other part of the reward: means over these answers.
    """
    task = questions.task
    limit = sampler.context_tokens - 1
    examples = held_out(task, questions.n, distinct=sampler.stage is None)
    kept, prompts, _ = encode_prompts(sampler.tokenizer, sampler.grader.template, examples, limit)
    key = (questions.seed, f"drift {task.name}", 0)
    groups, _ = collect(sampler, RolloutRequest([examples[i] for i in kept], prompts, questions.sampling, key))
    rollouts = [g[0] for g in groups if not g[0].has_failed]
    if not rollouts:
        raise RunFailure(f"evaluation: the environment failed in every answer; the first: {groups[0][0].failures[0]}")
    batch = answers_as_batch(rollouts)

    def measure(part: Batch) -> tuple[float, float]:
        """Return the sums of KL and entropy over the trained tokens."""
        now = policy(part, "detached")
        assert now.entropy is not None
        apart = kl_of_states(part, policy, start.open())
        trained = part.mask.to(now.entropy.device)
        chances = torch.where(trained, now.entropy, torch.zeros_like(now.entropy))
        return float(apart.sum()), float(with_float64(chances).sum(dtype=torch.float64))

    micro_batches = MicroBatching(min(tokens_per_micro, MAX_TOKENS), process_group=sampler.process_group)
    kl, entropy = micro_batches.total(batch, policy, measure, "drift")
    info = {
        "kl_initial": kl / len(rollouts),
        "entropy": entropy / float(batch.mask.sum()),
        "sampled_completion_length": statistics.fmean(r.completion.num_own for r in rollouts),
    }
    scored = [r.reward for r in rollouts if r.is_scored]
    if scored:
        info["sampled_reward"] = statistics.fmean(scored)
    for name in rollouts[0].parts:  # those that every answer has; the mean of ``correct`` has a name of its own
        if name != "correct" and all(name in r.parts for r in rollouts):
            info[f"sampled_reward/{name}"] = statistics.fmean(r.parts[name] for r in rollouts)
    if any(rollout.outcome != "ungraded" for rollout in rollouts):
        info["sampled_accuracy"] = statistics.fmean(float(r.parts["correct"] == 1.0) for r in rollouts)
    return info


def answers_as_batch(rollouts: Sequence[Rollout]) -> Batch:
    """One row for each answer behind its prompt, the tokens of the answer trained."""
    samples = []
    for index, rollout in enumerate(rollouts):
        prefix = len(rollout.prompt_ids)
        ids = [*rollout.prompt_ids, *rollout.completion.ids]
        mask = [False] * prefix + list(rollout.completion.written)
        samples.append(Sample(ids, mask, group=index, prefix=prefix))
    return collate(samples)


@torch.no_grad()
def kl_of_states(
    batch: Batch, policy: Forward, opened: AbstractContextManager[Forward], num_ids: int | None = None
) -> Tensor:
    """``float64 [B, T]``: KL(π‖π_other) of the next token's distribution at each trained token, 0 elsewhere.

    ``opened`` gives the other model for the time that it is read: it may be the policy's own module with its
    adapter off. ``num_ids``: both distributions are over so many first ids, which the models share; None: over the
    policy's.

    Raises:
        UsageError: the other model's vocabulary is smaller, and lacks a likely token.
    """
    was = policy.num_ids
    if num_ids is not None:
        policy.restrict(num_ids)
    vocabulary = policy.num_ids
    if vocabulary is None:
        vocabulary = policy.num_rows
    ids, own = policy.top_candidates(batch, NUM_CANDIDATES)
    policy.restrict(was)
    batch.fields["teacher_ids"] = ids.cpu()
    with opened as model:
        size = model.num_rows
        if int(ids.max()) >= size:
            raise UsageError(f"a likely token of one model is none of the other's {size}; their vocabularies differ")
        before = model.num_ids
        model.restrict(vocabulary)
        theirs = model(batch, "none", with_candidates=True).candidate_logprobs
        model.restrict(before)
    assert theirs is not None
    p = with_float64(own).double()
    q = with_float64(theirs).double()
    if ids.shape[-1] < vocabulary:
        p = with_tail(p)
        q = with_tail(q)
    mask = batch.mask.to(p.device)
    kl: Tensor = categorical_kl(p, q)
    return torch.where(mask, kl, torch.zeros_like(kl))
