"""Evaluation by generation: accuracy with its interval, and what surrounds it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.engines.base import Engine, Sampling
from posttrain.errors import UsageError
from posttrain.randomness import permutation
from posttrain.rewards.grading import FAILURES
from posttrain.rollout import Grader, collect, encode_prompts
from posttrain.tasks.base import Task
from posttrain.types import Rollout

Z_95 = 1.959963984540054  # standard normal quantile at 0.975


@dataclass(frozen=True, slots=True)
class Evaluation:
    """``results`` by name (shares in 0..1, lengths in tokens, seconds) and the graded rollouts."""

    name: str
    results: dict[str, float]
    rollouts: list[Rollout]


def wilson_interval(successes: float, n: int, z: float = Z_95) -> tuple[float, float]:
    """The Wilson score interval of a proportion (Wilson 1927, eq. 4), 95 % by default.

    Raises:
        ValueError: ``n`` is 0.
    """
    if n == 0:
        raise ValueError("no interval for a proportion of nothing")
    share = successes / n
    denominator = 1.0 + z * z / n
    centre = (share + z * z / (2 * n)) / denominator
    half = z * math.sqrt(share * (1.0 - share) / n + z * z / (4 * n * n)) / denominator
    # the interval holds the share itself; rounding may not push a bound past it
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


def held_out_indices(size: int, n: int) -> list[int]:
    """The items that every evaluation of a task uses: all, or a fixed sample of ``n``, in task order."""
    if n >= size:
        return list(range(size))
    return sorted(int(i) for i in permutation(0, "evaluation items", 0, size)[:n])


def evaluate(
    engine: Engine,
    tokenizer: Any,
    grader: Grader,
    task: Task,
    *,
    n: int,
    sampling: Sampling,
    context_tokens: int,
    seed: int = 0,
    step: int = 0,
) -> Evaluation:
    """One completion for each of ``n`` fixed held-out items, graded.

    A prompt without room in the model's context counts as wrong (``prompts_too_long`` says how
    many), so that models with different contexts are measured on the same items.

    Raises:
        UsageError: the task is empty, or no prompt fits.
    """
    started = time.perf_counter()
    if len(task.examples) == 0:
        raise UsageError(f"task {task.name!r}, split {task.split!r}: no example to evaluate on")
    examples = [task.examples[i] for i in held_out_indices(len(task.examples), n)]
    kept, prompts, too_long = encode_prompts(tokenizer, grader.template, examples, context_tokens - 1)
    if not kept:
        raise UsageError(f"task {task.name!r}: no prompt fits into the model's {context_tokens} tokens")
    groups, _ = collect(
        engine,
        tokenizer,
        grader,
        [examples[i] for i in kept],
        prompts,
        1,
        sampling,
        key=(seed, f"evaluation {task.name}", 0),
        step=step,
        prompt_indices=kept,
    )
    rollouts = [g[0] for g in groups]
    results = summarize(rollouts, len(examples), grader, task)
    results["prompts_too_long"] = float(too_long)
    results["seconds"] = time.perf_counter() - started
    return Evaluation(task_label(task), results, rollouts)


def task_label(task: Task) -> str:
    """``name/split``: how a task's results are called."""
    return f"{task.name}/{task.split}"


def summarize(rollouts: Sequence[Rollout], n: int, grader: Grader, task: Task) -> dict[str, float]:
    """Shares over ``n`` items (items without a rollout count as wrong)."""
    correct = sum(r.parts["correct"] == 1.0 for r in rollouts)
    low, high = wilson_interval(correct, n)
    results = {
        "n": float(n),
        "accuracy": correct / n,
        "accuracy_low": low,
        "accuracy_high": high,
        "format": sum(r.parts[grader.format_part] > 0 for r in rollouts) / n,
        "parse_failures": sum(r.outcome == "no_answer" for r in rollouts) / n,
        "grading_failures": sum(r.outcome in FAILURES for r in rollouts) / n,
        "truncated": sum(r.completion.finish == "length" for r in rollouts) / n,
        "num_tokens": statistics.fmean(len(r.completion.ids) for r in rollouts),
        "reward": statistics.fmean(r.reward for r in rollouts),
    }
    if task.worked is not None:
        results["worked"] = sum(task.worked(r.text) for r in rollouts) / n
    return results
