"""Describe the work done by a sweep's runs, including command line overrides; rows with equal work share a line.

Sweep descriptions contain no numbers, because command line overrides would invalidate them.
"""

from __future__ import annotations

from posttrain.recipes.recipe import Recipe
from posttrain.sweeps.plan import SweepPlan


def describe_made(plan: SweepPlan) -> list[str]:
    """Describe updates, answers and held-out items for each row's runs."""
    rows: dict[str, list[str]] = {}
    for row in plan.rows:
        rows.setdefault(describe_work(row.recipe), []).append(row.name)
    seeds = f"{plan.num_seeds} seed{'s' * (plan.num_seeds != 1)}"
    lines = [f"{', '.join(names)} ({seeds}): {work}" for work, names in rows.items()]
    if plan.start is not None:
        lines.insert(0, f"start: {describe_work(plan.start.recipe)}")
    return lines


def describe_work(recipe: Recipe) -> str:
    """Describe a resolved recipe's updates, answers or rows, and evaluations."""
    steps = recipe.train.steps
    assert steps is not None, "a sweep's rows name their steps"
    parts = [f"{steps:,} updates at a rate of up to {recipe.train.lr:g}"]
    rollout = recipe.rollout
    if rollout is not None:
        per_batch = recipe.train.updates_per_batch
        batches = -(-steps // per_batch)
        answers = rollout.num_prompts * rollout.group_size
        drawn = "at least " * rollout.drop_uniform_groups
        parts.append(f"{drawn}{batches * answers:,} sampled answers ({per_batch:,} updates on each {answers:,})")
    if recipe.data is not None:
        parts.append(f"{steps * recipe.data.batch_size:,} rows read")
    if recipe.eval.every:
        parts.append(f"{recipe.eval.num_examples:,} held-out items every {recipe.eval.every:,} updates")
    return ", ".join(parts)
