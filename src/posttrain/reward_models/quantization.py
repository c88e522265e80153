"""What quantization changes: a policy's distributions on its own answers, a reward model's held-out verdicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from posttrain.engines.base import Engine, Sampling
from posttrain.engines.rollout import encode_prompts
from posttrain.errors import UsageError
from posttrain.evals.drift import MAX_TOKENS, kl_of_states
from posttrain.evals.generation import held_out_indices
from posttrain.evals.statistics import Z_95, paired_bootstrap
from posttrain.models.forward.forward import Forward
from posttrain.models.forward.micro import split_rows
from posttrain.randomness import derive_key
from posttrain.render import Template
from posttrain.reward_models.evaluation import evaluate_reward_model
from posttrain.reward_models.scoring import RewardModel
from posttrain.tasks.base import Task
from posttrain.types import Batch, Sample, collate


@torch.no_grad()
def compare_policies(
    engine: Engine,
    tokenizer: Any,
    template: Template,
    task: Task,
    *,
    before: Forward,
    after: Forward,
    n: int,
    sampling: Sampling,
    context_tokens: int,
    seed: int = 0,
) -> dict[str, float]:
    """One answer that ``engine`` samples from ``before`` to each of ``n`` fixed prompts of a task, read by both models.

    ``kl_per_token``: KL(before‖after) of the next token's distribution in nats, the mean over generated tokens;
    exact at each state (beyond 1,024 candidates the rest counts as one), so it has no noise but that of which
    states were met. ``kl_max``: of one token. ``top1_agreement``: the share of tokens at which both find the same
    token likeliest. Both means with a 95 % interval (``_low``, ``_high``) in which an answer is the unit of chance.
    ``num_answers``, ``num_tokens``; ``prompts_too_long`` are left out.

    Args:
        engine: samples from the model in ``before``, at the temperature of both.

    Raises:
        UsageError: no prompt that fits into the model.
    """
    examples = [task.examples[i] for i in held_out_indices(len(task.examples), n)]
    kept, prompts, dropped = encode_prompts(tokenizer, template, examples, context_tokens - 1)
    if not kept:
        raise UsageError(f"task {task.name!r}: none of {len(examples)} prompts fits into {context_tokens} tokens")
    keys = [[derive_key(seed, "quantization", index)] for index in kept]
    answers = [group[0].ids for group in engine.generate(prompts, keys, sampling)]
    batch = collate(
        [
            Sample([*prompt, *answer], [False] * len(prompt) + [True] * len(answer), group=index, prefix=len(prompt))
            for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        ]
    )
    kl, agreed, most = [0.0] * len(answers), [0.0] * len(answers), 0.0
    for rows in split_rows(batch, MAX_TOKENS):
        part = batch.select(rows)
        of_states = kl_of_states(part, before, nullcontext(after)).cpu()
        same = _same_choice(part, before, after)
        most = max(most, float(of_states.max()))
        for place, row in enumerate(rows):
            kl[row], agreed[row] = float(of_states[place].sum()), float(same[place].sum())
    lengths = [float(len(answer)) for answer in answers]
    facts = _mean_per_token("kl_per_token", kl, lengths) | {"kl_max": most}
    facts |= _mean_per_token("top1_agreement", agreed, lengths, most=1.0)
    counts = {"num_answers": len(answers), "num_tokens": math.fsum(lengths), "prompts_too_long": dropped}
    return facts | {name: float(count) for name, count in counts.items()}


def compare_scorers(before: RewardModel, after: RewardModel, task: Task, *, n: int) -> dict[str, float]:
    """The accuracy of both on the same ``n`` fixed examples of a task, and how far it moved.

    ``accuracy_before`` and ``accuracy_after`` with their intervals, ``change`` with the interval of the paired
    difference (bootstrap over items), ``same_verdict``: the share of items on which both are right or both wrong.
    ``num_items`` were scored and ``dropped`` were not (``evaluate_reward_model``).

    Raises:
        UsageError: nothing in the task that could be scored.
    """
    both = [evaluate_reward_model(model, task, n=n) for model in (before, after)]
    right = [[float(item["right"]) for item in evaluation.items] for evaluation in both]
    assert [i["id"] for i in both[0].items] == [i["id"] for i in both[1].items], "lengths alone decide what is scored"
    change = paired_bootstrap(*right)
    facts = {"num_items": float(change.n), "dropped": both[0].results["dropped"]}
    for name, evaluation in zip(("before", "after"), both, strict=True):
        for bound in ("", "_low", "_high"):
            facts[f"accuracy_{name}{bound}"] = evaluation.results[f"accuracy{bound}"]
    facts |= {"change": change.difference, "change_low": change.low, "change_high": change.high}
    facts["same_verdict"] = sum(a == b for a, b in zip(*right, strict=True)) / change.n
    return facts


def with_trunk(scorer: RewardModel, model: Any) -> RewardModel:
    """The reward model with its own head on another language model of the same width."""
    forward = scorer.forward
    moved = Forward(model.requires_grad_(False), head=forward.head, reads=forward.reads, scores_only=True)
    return replace(scorer, forward=moved)


def _same_choice(batch: Batch, before: Forward, after: Forward) -> torch.Tensor:
    """``bool [B, T]``: whether both models find the same token likeliest, at trained tokens."""
    first, second = (forward.top_candidates(batch, 1)[0][..., 0].cpu() for forward in (before, after))
    return (first == second) & batch.mask.cpu()


def _mean_per_token(
    name: str, sums: Sequence[float], lengths: Sequence[float], most: float = math.inf
) -> dict[str, float]:
    """``Σ sums / Σ lengths`` and its 95 % interval within 0..``most``.

    A ratio of two random sums: its standard error is that of the mean of ``sum − ratio · length``, divided by the mean
    length (Cochran 1977, "Sampling Techniques", section 6.3).
    """
    total, n = math.fsum(lengths), len(lengths)
    ratio = math.fsum(sums) / total
    spread = math.fsum((part - ratio * length) ** 2 for part, length in zip(sums, lengths, strict=True))
    half = Z_95 * math.sqrt(spread * n / (n - 1)) / total if n > 1 else 0.0
    return {name: ratio, f"{name}_low": max(0.0, ratio - half), f"{name}_high": min(most, ratio + half)}
