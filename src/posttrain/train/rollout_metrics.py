"""Facts about a batch of rollouts, over all that were sampled (not only those trained on)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from posttrain.graders.grading import FAILURES
from posttrain.types import Rollout


def describe_rollouts(groups: Sequence[Sequence[Rollout]], format_part: str) -> dict[str, float]:
    """Means over all completions; ``uniform_groups`` is the share of prompts whose rewards are equal.

    ``num_tokens_right`` and ``num_tokens_wrong`` are mean lengths of correct and other answers,
    absent when there are none. ``grading_failures``: the share whose grading had to be stopped, if there are any.
    """
    rollouts = [r for group in groups for r in group]
    lengths = [len(r.completion.ids) for r in rollouts]
    right = [len(r.completion.ids) for r in rollouts if r.parts["correct"] == 1.0]
    wrong = [len(r.completion.ids) for r in rollouts if r.parts["correct"] != 1.0]
    facts = {
        "reward": statistics.fmean(r.reward for r in rollouts),
        "accuracy": len(right) / len(rollouts),
        "format": statistics.fmean(float(r.parts[format_part] > 0) for r in rollouts),
        "num_tokens": statistics.fmean(lengths),
        "truncated": statistics.fmean(float(r.completion.finish == "length") for r in rollouts),
        "uniform_groups": statistics.fmean(float(len({r.reward for r in g}) == 1) for g in groups),
    }
    names = [name for name in rollouts[0].parts if all(name in r.parts for r in rollouts)]
    facts |= {f"reward/{name}": statistics.fmean(r.parts[name] for r in rollouts) for name in names}
    failures = sum(r.outcome in FAILURES for r in rollouts)
    if failures:
        facts["grading_failures"] = failures / len(rollouts)
    if right:
        facts["num_tokens_right"] = statistics.fmean(right)
    if wrong:
        facts["num_tokens_wrong"] = statistics.fmean(wrong)
    return facts
