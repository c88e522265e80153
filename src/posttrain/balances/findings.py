"""Balance readings and violations: expected, found, likely causes, and a decisive test."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reading:
    """A balance for one update. Holds if ``gap`` is at most ``limit``, in the same unit."""

    check: str
    gap: float
    limit: float
    expected: str
    found: str

    @property
    def holds(self) -> bool:
        """True if the books balance; NaN never does."""
        return self.gap <= self.limit


@dataclass(frozen=True, slots=True)
class Imbalance:
    """A violated balance: expected and found values, the update, likely causes, and a decisive test."""

    check: str
    step: int
    expected: str
    found: str
    causes: tuple[str, ...]
    decided_by: str

    @property
    def message(self) -> str:
        """A notice about it."""
        causes = "; ".join(self.causes)
        return (
            f"balance {self.check!r} of update {self.step}: expected {self.expected}, found {self.found}. "
            f"Likely causes: {causes}. To decide: {self.decided_by}"
        )


@dataclass(frozen=True, slots=True)
class Explanation:
    """Causes of a violation, the likeliest first, and the test that tells them apart."""

    causes: tuple[str, ...]
    decided_by: str


EXPLANATIONS = {
    "reward": Explanation(
        ("an unrecorded term was added", "rewards were modified after grading", "a reward part is missing"),
        "compute Σ weight × part for the answers in pt.load_run(RUN).rollouts(STEP)",
    ),
    "rubric": Explanation(
        ("a criterion has another weight or sign", "unjudged criteria count", "the sum is divided by other weights"),
        "compute Σ w y / Σ max(w, 0) from the parts rubric:1, rubric:2, ... of one answer and its row's weights",
    ),
    "correct": Explanation(
        ("reward parts were modified after grading", "the paid reward differs from the verdict"),
        "regrade one of these answers with posttrain.grade",
    ),
    "groups": Explanation(
        ("a group contains answers to different prompts", "answers were lost or reordered across processes"),
        "compare prompt_index and rollout_index for this step in rollouts.db",
    ),
    "prompts": Explanation(
        (
            "the prompt order repeats",
            "data passes are counted incorrectly",
            "resuming drew prompts twice",
        ),
        "list prompt_index per step in rollouts.db",
    ),
    "finish": Explanation(
        ("the sampler uses a different token limit", "the sampler strips or does not know the end tokens"),
        "compare num_tokens and last tokens of these answers with rollout.max_tokens and the template's end token",
    ),
    "version": Explanation(
        ("the sampler missed the last weight update", "batches are sampled out of order"),
        "compare version and step columns in rollouts.db",
    ),
    "samples": Explanation(
        ("answers within a group share a random seed", "an answer was duplicated"),
        "sample this prompt again with a different train.seed",
    ),
    "rows": Explanation(
        ("rows are dropped or duplicated when splitting into minibatches", "an undeclared selection is applied"),
        "set train.num_minibatches: 1 and compare row counts",
    ),
    "tokens": Explanation(
        ("the mask omits the end token", "the mask includes prompt or padding", "the mask is shifted by a position"),
        "compare a row's mask with `posttrain data show`",
    ),
    "advantage": Explanation(
        ("the baseline uses a different group", "wrong sign or scale", "advantages are assigned to the wrong rows"),
        "recompute one group with posttrain.advantages",
    ),
    "weights": Explanation(
        ("the denominator includes padding, or only covers a micro-batch or a single process",),
        "change train.micro_batch_tokens: loss and gradient must not change",
    ),
    "idle": Explanation(
        ("rows with nonzero advantage are skipped",),
        "set train.skip_zero_rows: false and compare the loss",
    ),
    "sampler": Explanation(
        (
            "the sampler's prompt differs from the trainer's",
            "sampler and trainer use different temperatures",
            "the sampler has stale weights, or layers that never get updated",
            "the sampler uses lower precision than the recipe states",
        ),
        "score a recorded answer with transformers' forward pass and compare it with both",
    ),
    "ratio": Explanation(
        ("old log-probabilities come from stale weights", "they use a different temperature or prompt"),
        "switch rollout.old_logprobs and compare",
    ),
    "clip": Explanation(
        ("clip range or side differs from the recipe",),
        "compute the clipped fraction from recorded log-probabilities",
    ),
    "reference": Explanation(
        ("the reference is updated along with the policy", "the reference differs from the initial model"),
        "compare reference weight hashes at two steps",
    ),
    "draws": Explanation(
        (
            "the sampler draws from a different distribution than it reports (temperature, top_p, top_k)",
            "random numbers are reused",
        ),
        "compare mean −log p of drawn tokens with the entropy, batch by batch",
    ),
    "mask": Explanation(
        (
            "the selection threshold only covers a micro-batch or a single process",
            "selection uses values from different weights, rows or tokens",
        ),
        "change train.micro_batch_rows: `masked_tokens` and `cov_fraction` must not change",
    ),
    "correction": Explanation(
        ("the correction ratio is inverted or uses different log-probabilities", "its cap differs"),
        "compute one row's factor from recorded log-probabilities",
    ),
    "loss": Explanation(
        (
            "the mean covers micro-batches, rows or padding instead of the whole batch",
            "a term has the wrong sign or weight",
            "advantages or log-probabilities are assigned to the wrong rows",
        ),
        "change train.micro_batch_tokens: this update's loss must not change",
    ),
    "routed": Explanation(
        (
            "routers also count padding, or a shared prompt only once",
            "a micro-batch or a process is missing from the sums",
            "another number of experts is chosen per token",
        ),
        "change train.micro_batch_rows: `router_aux_loss` must not change",
    ),
    "router_loss": Explanation(
        ("shares and probabilities cover different tokens", "a factor (number of experts) is missing"),
        "compare with transformers' load_balancing_loss_func over the batch",
    ),
    "gradient": Explanation(
        (
            "backward runs on a different value than the logged loss",
            "a micro-batch contributes no gradient, or at the wrong scale",
            "a term is wrongly detached or not detached",
        ),
        "recompute this update from the previous checkpoint: posttrain doctor RUN --audit STEP",
    ),
    "leftover": Explanation(
        ("gradients are not cleared after the update",),
        "print gradient norms before an update's first backward pass",
    ),
    "lr": Explanation(
        ("the schedule counts steps differently", "the learning rate was changed outside the recipe"),
        "compare the metric lr with train.lr, warmup_steps and schedule",
    ),
    "update": Explanation(
        (
            "the optimizer has a different learning rate, or lost its state",
            "gradients are clipped or scaled differently",
            "some weights are not updated",
        ),
        "recompute this update from the previous checkpoint: posttrain doctor RUN --audit STEP",
    ),
    "moved": Explanation(
        ("the learning rate does not reach the optimizer", "it is too small for the weights' precision"),
        "compare the weights of two checkpoints",
    ),
    "kl_weight": Explanation(
        ("the penalty controller reads a different KL", "its state was lost on resume"),
        "compute the next batch's weight from this batch's kl_in_reward and kl_weight",
    ),
}


def imbalance_of(reading: Reading, step: int) -> Imbalance:
    """Describe a violated balance."""
    explained = EXPLANATIONS[reading.check]
    return Imbalance(reading.check, step, reading.expected, reading.found, explained.causes, explained.decided_by)


def tally(check: str, number: float, expected: str, found: str) -> Reading:
    """Build a reading that tolerates no exceptions."""
    return Reading(check, float(number), 0.0, expected, found)


def compared(check: str, found: float, expected: float, size: float, limit: float, unit: str = "") -> Reading:
    """Build a reading for two numbers that may differ by ``limit`` relative to ``size``."""
    gap = math.inf
    difference = abs(found - expected)
    if math.isfinite(difference):
        gap = difference / max(size, 1e-30)
        if difference == 0.0:
            gap = 0.0
    return Reading(check, gap, limit, f"{expected:.9g}{unit}", f"{found:.9g}{unit}")
