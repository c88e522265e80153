"""Metrics for rollout batches and selection."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import torch

from posttrain.algorithms.selection import Units
from posttrain.graders.grading import FAILURES
from posttrain.sampling.rollout import logged_metrics
from posttrain.types import Rollout


def describe_rollouts(groups: Sequence[Sequence[Rollout]], format_part: str | None) -> dict[str, float]:
    """Compute means over all completions. ``uniform_groups``: fraction of prompts with equal rewards.

    ``accuracy``, ``completion_length_correct`` and ``completion_length_wrong`` cover only answers with a gold answer.
    ``grading_failures``: fraction with interrupted grading. Lengths count only model tokens. ``truncated``: fraction
    cut off by a limit; environments divide it into ``out_of_turns`` and ``tool_failed`` and add ``num_turns``,
    ``num_calls``, ``failed_calls`` (fraction of calls), ``environment_failures`` and ``played_again`` (fractions of
    completions).
    """
    everything = [r for group in groups for r in group]
    played = [[r for r in group if not r.has_failed] for group in groups]
    groups = [group for group in played if group]
    rollouts = [r for group in groups for r in group]
    graded = [r for r in rollouts if r.outcome != "ungraded"]
    correct = [r.completion.num_own for r in graded if r.parts["correct"] == 1.0]
    wrong = [r.completion.num_own for r in graded if r.parts["correct"] != 1.0]
    scored = [r for r in rollouts if r.is_scored]
    info: dict[str, float] = {}
    if scored:
        info["reward"] = fmean(r.reward for r in scored)
    if len(scored) < len(rollouts):
        info["no_reward"] = 1 - len(scored) / len(rollouts)
    if graded:
        info["accuracy"] = len(correct) / len(graded)
    if format_part:
        info["format"] = fmean(float(r.parts[format_part] > 0) for r in rollouts)
    info["completion_length"] = fmean(r.completion.num_own for r in rollouts)
    info["truncated"] = fmean(float(r.completion.is_truncated) for r in rollouts)
    info["uniform_groups"] = fmean(float(len({r.reward for r in g if r.is_scored}) <= 1) for g in groups)
    names = dict.fromkeys(name for r in rollouts for name in r.parts)
    for name in names:
        values = [r.parts[name] for r in rollouts if name in r.parts]
        if all(name in r.parts or name in r.skipped for r in rollouts):
            info[f"reward/{name}"] = fmean(values)
    info |= logged_metrics(rollouts)
    failures = sum(r.outcome in FAILURES for r in rollouts)
    if failures:
        info["grading_failures"] = failures / len(rollouts)
    if correct:
        info["completion_length_correct"] = fmean(correct)
    if wrong:
        info["completion_length_wrong"] = fmean(wrong)
    return info | _describe_sets(rollouts) | _describe_turns(rollouts, everything)


def _describe_sets(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Compute metrics for kept sets, if truncated sampling is used."""
    sets = [r.completion.kept for r in rollouts if r.completion.kept is not None]
    num_drawn = sum(r.completion.num_own for r in rollouts)
    if not sets or not num_drawn:
        return {}
    num_kept = sum(len(kept.ids) for kept in sets)
    return {"kept_tokens": num_kept / num_drawn, "kept_sets_cut": sum(kept.num_cut for kept in sets) / num_drawn}


def _describe_turns(played: Sequence[Rollout], everything: Sequence[Rollout]) -> dict[str, float]:
    """Compute metrics for turns and tool calls, if present."""
    info: dict[str, float] = {}
    if any(r.turns for r in played):
        calls = [call for r in played for turn in r.turns for call in turn.calls]
        info["num_turns"] = fmean(len(r.turns) for r in played)
        info["num_calls"] = len(calls) / len(played)
        info["failed_calls"] = sum(call.outcome != "ok" for call in calls) / max(1, len(calls))
        for finish in ("out_of_turns", "tool_failed"):
            info[finish] = fmean(float(r.completion.finish == finish) for r in played)
    if any(r.failures for r in everything):
        info["environment_failures"] = fmean(float(r.has_failed) for r in everything)
        info["played_again"] = fmean(float(bool(r.failures)) for r in everything)
    return info


def describe_choice(
    groups: Sequence[Sequence[Rollout]], units: Units, is_filtered: bool, accepted: float
) -> dict[str, float]:
    """Compute selection metrics."""
    info = {"selected": sum(len(unit) for unit in units) / max(1, sum(len(g) for g in groups))}
    advantages = torch.tensor([r.advantage for g in groups for r in g if r.advantage is not None])
    if len(advantages):
        info["advantage_mean"] = float(advantages.mean())
        info["advantage_std"] = float(advantages.std(correction=0))
        info["advantage_min"] = float(advantages.min())
        info["advantage_max"] = float(advantages.max())
    if is_filtered:
        info["accepted_groups"] = accepted
    return info
