"""KL from the initial policy, and entropy, measured on fixed held-out prompts."""

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
# Limits memory for candidate probabilities, even if training can afford larger micro-batches.
MAX_TOKENS = 2048


@torch.no_grad()
def measure_kl(
    sampler: Sampler, questions: Questions, *, policy: Forward, start: Reference, tokens_per_micro: int
) -> dict[str, float]:
    """Sample one response per held-out prompt, and evaluate both models on it.

    ``kl_initial``: KL(π‖π_start) per response in nats: the exact per-token KL, summed (tokens outside the 1,024 most
    likely are merged into one). Its variance is far lower than for estimates from sampled tokens. ``entropy``: nats
    per token, at sampling temperature. ``sampled_accuracy``, ``sampled_completion_length``, ``sampled_reward`` and
    ``sampled_reward/<part>`` for additional rewards: means over responses.
    """
    task = questions.task
    limit = sampler.context_tokens - 1
    examples = held_out(task, questions.n, distinct=sampler.stage is None)
    kept, prompts, _ = encode_prompts(sampler.tokenizer, sampler.grader.template, examples, limit)
    key = (questions.seed, f"drift {task.name}", 0)
    groups, _ = collect(sampler, RolloutRequest([examples[i] for i in kept], prompts, questions.sampling, key))
    rollouts = [g[0] for g in groups if not g[0].has_failed]
    if not rollouts:
        raise RunFailure(
            f"evaluation: the environment failed for all answers; first failure: {groups[0][0].failures[0]}"
        )
    batch = answers_as_batch(rollouts)

    def measure(part: Batch) -> tuple[float, float]:
        """Sum KL and entropy over trained tokens."""
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
    for name in rollouts[0].parts:  # only parts present in all answers; ``correct`` is reported as sampled_accuracy
        if name != "correct" and all(name in r.parts for r in rollouts):
            info[f"sampled_reward/{name}"] = statistics.fmean(r.parts[name] for r in rollouts)
    if any(rollout.outcome != "ungraded" for rollout in rollouts):
        info["sampled_accuracy"] = statistics.fmean(float(r.parts["correct"] == 1.0) for r in rollouts)
    return info


def answers_as_batch(rollouts: Sequence[Rollout]) -> Batch:
    """Build one row per answer: prompt followed by response, with the mask on response tokens."""
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
    """Compute KL(π‖π_other) per trained token, 0 elsewhere: ``float64 [B, T]``.

    ``opened`` provides the second model only while needed: it may share the policy's module, with the adapter
    disabled. ``num_ids``: restricts both distributions to the first ``num_ids`` ids; by default the policy's limit.

    Raises:
        UsageError: a likely token is outside the second model's vocabulary.
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
            raise UsageError(f"vocabularies differ: likely token ids exceed the second model's {size} tokens")
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
