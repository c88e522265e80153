"""Readings of the balances, and what a violated one says: expected, found, likely causes, and the test that decides."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reading:
    """One balance of one update: it holds if ``gap`` is at most ``limit``, in whatever unit both have."""

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
    """A violated balance: what was expected and found at which update, likely causes, and the test that decides."""

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
        ("a term is paid that no part records", "rewards were changed behind the grader", "a part is missing"),
        "compute Σ weight × part of the answers in pt.load_run(RUN).rollouts(STEP)",
    ),
    "correct": Explanation(
        ("parts were changed behind the grader", "a verdict is not the one that was paid"),
        "grade one of these answers again with posttrain.grade",
    ),
    "groups": Explanation(
        ("answers of other prompts were put into a group", "answers were lost or reordered between processes"),
        "compare prompt_index and rollout_index of the rows of this step in rollouts.db",
    ),
    "prompts": Explanation(
        (
            "the order of the prompts repeats",
            "the pass over the data is counted wrong",
            "a resumed run draws again",
        ),
        "list prompt_index by step in rollouts.db",
    ),
    "finish": Explanation(
        ("the sampler has another limit of tokens", "end tokens are cut off or unknown to the sampler"),
        "compare num_tokens and the last token of these answers with rollout.max_tokens and the template's end",
    ),
    "version": Explanation(
        ("the sampler was not given the weights of the last update", "batches are sampled in another order"),
        "compare the column version with the step in rollouts.db",
    ),
    "samples": Explanation(
        ("answers of a group are drawn with one seed", "an answer is copied"),
        "sample the same prompt again with another train.seed",
    ),
    "rows": Explanation(
        ("rows are dropped or trained twice between batch and minibatch", "a selection is applied that nobody named"),
        "set train.num_minibatches: 1 and compare the number of rows",
    ),
    "tokens": Explanation(
        ("the mask leaves out the end token", "the mask covers the prompt or padding", "the mask is shifted"),
        "compare the mask of one row with `posttrain data show`",
    ),
    "advantage": Explanation(
        ("the baseline is not of the own group", "the sign or the scale is wrong", "advantages belong to other rows"),
        "compute them by hand for one group with posttrain.advantages",
    ),
    "weights": Explanation(
        ("the denominator counts padding, rows of one micro-batch or of one process",),
        "change train.micro_batch_tokens: loss and gradient must stay",
    ),
    "idle": Explanation(
        ("rows are skipped that have an advantage",),
        "set train.skip_zero_rows: false and compare the loss",
    ),
    "sampler": Explanation(
        (
            "the sampler's prompt differs from the trainer's",
            "sampler and trainer have other temperatures",
            "the sampler has older weights, or layers that are never updated",
            "the sampler computes in a coarser type than the recipe says",
        ),
        "score one recorded answer with the model's own forward pass and compare both sides with it",
    ),
    "ratio": Explanation(
        ("the old log-probabilities are of older weights", "they are of another temperature or prompt"),
        "set rollout.old_logprobs to the other value and compare",
    ),
    "clip": Explanation(
        ("the clip has another range or side than the recipe says",),
        "compute the share of clipped tokens from the recorded log-probabilities",
    ),
    "reference": Explanation(
        ("the reference moves with the policy", "the reference is another model than the run began with"),
        "compare a hash of the reference's weights at two steps",
    ),
    "draws": Explanation(
        (
            "the sampler draws from another distribution than the one it reports (temperature, top_p, top_k)",
            "random numbers are used twice",
        ),
        "compare the mean of −log p of the drawn tokens with the entropy, batch by batch",
    ),
    "mask": Explanation(
        (
            "the limit between tokens is of a micro-batch or of one process",
            "the numbers that decide are of other weights, rows or tokens",
        ),
        "change train.micro_batch_rows: `masked_tokens` and `cov_fraction` must stay",
    ),
    "correction": Explanation(
        ("the correction's ratio is upside down or of other log-probabilities", "its cap is another one"),
        "compute the factor of one row from its recorded log-probabilities",
    ),
    "loss": Explanation(
        (
            "the mean is taken over micro-batches, rows or padding in place of the whole batch",
            "a term has the wrong sign or weight",
            "advantages or log-probabilities belong to other rows",
        ),
        "change train.micro_batch_tokens: the loss of this update must stay",
    ),
    "gradient": Explanation(
        (
            "backward is called on another number than the loss that is logged",
            "a micro-batch gives no gradient or one of another scale",
            "a term is detached, or one is not that should be",
        ),
        "compute this update again from the checkpoint before it: posttrain doctor RUN --audit STEP",
    ),
    "leftover": Explanation(
        ("gradients are not cleared after the update",),
        "print the norm of the gradients before the first backward pass of an update",
    ),
    "lr": Explanation(
        ("the schedule counts other steps", "the learning rate was changed behind the recipe"),
        "compare the metric lr with train.lr, warmup_steps and schedule",
    ),
    "update": Explanation(
        (
            "the optimizer has another learning rate, or lost its state",
            "gradients are clipped or scaled in another way",
            "some weights are not updated",
        ),
        "compute this update again from the checkpoint before it: posttrain doctor RUN --audit STEP",
    ),
    "moved": Explanation(
        ("the learning rate does not reach the optimizer", "it is too small for the type of the weights"),
        "compare the weights of two checkpoints",
    ),
    "kl_weight": Explanation(
        ("the controller of the penalty reads another KL", "its state was lost when the run was resumed"),
        "compute the weight of the next batch from kl_in_reward and kl_weight of this one",
    ),
}


def imbalance_of(reading: Reading, step: int) -> Imbalance:
    """Return what a violated balance says."""
    explained = EXPLANATIONS[reading.check]
    return Imbalance(reading.check, step, reading.expected, reading.found, explained.causes, explained.decided_by)


def tally(check: str, number: float, expected: str, found: str) -> Reading:
    """Return the reading of a balance that allows no exception."""
    return Reading(check, float(number), 0.0, expected, found)


def compared(check: str, found: float, expected: float, size: float, limit: float, unit: str = "") -> Reading:
    """Return the reading of two numbers that may differ by ``limit`` of ``size``."""
    gap = math.inf
    difference = abs(found - expected)
    if math.isfinite(difference):
        gap = difference / max(size, 1e-30)
        if difference == 0.0:
            gap = 0.0
    return Reading(check, gap, limit, f"{expected:.9g}{unit}", f"{found:.9g}{unit}")
