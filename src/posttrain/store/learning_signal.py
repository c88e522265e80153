"""Warnings about a run that cannot learn, from its first metrics."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.store.metrics import MetricsRow, is_evaluation

NUM_BATCHES = 3  # without a difference in reward, or without a gradient, before a warning
NUM_STEPS = 10  # in which no weight moved, before a warning
MOVED = "weights_moved"  # 1 where a step changed one of a sample of the weights, else 0; of the first steps alone


def learning_warnings(rows: Sequence[MetricsRow]) -> dict[str, str]:
    """Return by metric why a run does not learn, with likely causes and remedies; empty for a run that may learn.

    ``uniform_groups``: in the first three batches no group differed in reward. ``grad_norm``: the gradient of the
    first three steps was 0. ``weights_moved``: no weight moved in the first ten steps. Of several, which have one
    cause, the first.
    """
    steps = [row.metrics for row in rows if not is_evaluation(row)]
    batches = [metrics for metrics in steps if "uniform_groups" in metrics][:NUM_BATCHES]
    # all rewards of a group are equal, and no other answer gives them an advantage
    is_uniform = [one["uniform_groups"] == 1.0 and one.get("advantage_std", 1.0) == 0.0 for one in batches]
    if len(batches) == NUM_BATCHES and all(is_uniform):
        what = f"in the first {NUM_BATCHES} batches no group of answers differed in reward, so nothing can be learned"
        return {"uniform_groups": f"{what}. {_cause_of_equal_rewards(batches)}"}
    if len(steps) >= NUM_BATCHES and all(metrics.get("grad_norm") == 0.0 for metrics in steps[:NUM_BATCHES]):
        cause = "No token was trained: look at the rows with `posttrain data show`, and at rollout.select"
        if any(metrics.get("trained_tokens") for metrics in steps[:NUM_BATCHES]):
            cause = "Check that the weights of objective and rewards are not 0, and that answers differ"
        return {"grad_norm": f"the gradient of the first {NUM_BATCHES} steps is 0. {cause}"}
    moved = [metrics[MOVED] for metrics in steps[:NUM_STEPS] if MOVED in metrics]
    if len(moved) == NUM_STEPS and not any(moved):
        rate = max(metrics.get("lr", 0.0) for metrics in steps[:NUM_STEPS])
        cause = "is too small for the dtype of the weights: raise train.lr, or set model.dtype fp32"
        return {MOVED: f"no weight has moved in {NUM_STEPS} steps. The learning rate of {rate:g} {cause}"}
    return {}


def _cause_of_equal_rewards(batches: Sequence[dict[str, float]]) -> str:
    def every(name: str, low: float, high: float = 1.0) -> bool:
        return all(low <= metrics.get(name, -1.0) <= high for metrics in batches)

    if every("truncated", 0.9):
        return "Nearly all answers are cut off: raise rollout.max_tokens"
    if every("format", 0.0, 0.0):
        start = "Start from a model after SFT on that format (tiny-sft, or a run)"
        return f"No answer has the format that the reward reads. {start}, or set prompt.template to one that it knows"
    if every("accuracy", 0.0, 0.0):
        more = "Take easier problems, a model after SFT, or a larger rollout.group_size"
        return f"No answer is right. {more}; read some with `posttrain generate`"
    if every("accuracy", 1.0):
        return "Every answer is right: take harder problems"
    more = "Raise rollout.temperature or rollout.group_size, or check the reward"
    return f"Every answer of a group earned the same (mean reward {batches[-1]['reward']:.3f}). {more}"
