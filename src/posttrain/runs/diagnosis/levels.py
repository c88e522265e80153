"""Levels: numbers of a run that are often seen with trouble. None of them proves a fault."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from posttrain.runs.diagnosis.findings import RunFinding, level
from posttrain.runs.diagnosis.metric_curves import MetricCurves
from posttrain.store.metric_names import Metric
from posttrain.store.metrics import EvaluationPoint, MetricsRow, learning_warnings

LEAST_ENTROPY_SHARE, MOST_ENTROPY_SHARE = 0.2, 2.0  # of the first entropy
LEAST_ENTROPY, MOST_ENTROPY = 0.05, 1.0  # nats per token; below and above, a share says something
MOST_TRUNCATED = 0.25
MOST_UNIFORM = 0.5
FORMAT_CHANGE = 0.1
MOST_KL = 0.5  # nats per token, to the reference
MOST_MISMATCH = 0.02  # nats per token, of a run whose record has no limit; more no rounding explains
LEAST_SAMPLE_SIZE = 0.5
MOST_CLIPPED, LEAST_CLIPPED = 0.3, 1e-4
MOST_GROWTH = 1.5  # of the length of wrong answers
LEAST_MOVED = 1e-5  # the largest share by which a step moves the weights
CLIPPED_GRADIENT = 20.0  # times ``train.max_grad_norm``
MOST_FAILURES = 0.05
CHANCE, TOLD_APART = 0.55, 0.98  # accuracy of pairs: none at the end, nothing to learn at the start
LEAST_STEPS = 3
SHARE_OF_LOSS = 0.02  # by which a held-out number that is no share may get worse


def read_levels(curves: MetricCurves, primary: Metric) -> Iterator[RunFinding]:
    """Yield the levels of a run, from its metrics and the measured numbers of its updates.

    ``primary`` ranks its held-out evaluations.
    """
    for read in (_entropy, _answers, _format, _lengths, _reward, _distances, _clip, _moved, _pairs, _given, _gradient):
        yield from read(curves)
    yield from _held_out(curves, primary)


def read_warnings(rows: Sequence[MetricsRow]) -> Iterator[RunFinding]:
    """Yield why a run does not learn, as it said while it trained."""
    for name, text in learning_warnings(rows).items():
        what, _, remedy = text.partition(". ")
        yield level(name, "answers, gradients or weights that differ", what, remedy, 1)


def _entropy(curves: MetricCurves) -> Iterator[RunFinding]:
    early, late = curves.early("entropy"), curves.late("entropy")
    if early is None or late is None:
        return
    found = f"{early.mean:.3g} nats per token at first, {late.mean:.3g} in the last {late.count} updates"
    if early.mean > LEAST_ENTROPY and late.mean < LEAST_ENTROPY_SHARE * early.mean:
        decide = "sample one prompt 16 times with `posttrain generate`: equal answers teach nothing more"
        yield level("entropy", f"at least {LEAST_ENTROPY_SHARE:.0%} of the first entropy", found, decide, late.step)
    elif late.mean > MOST_ENTROPY and late.mean > MOST_ENTROPY_SHARE * early.mean:
        decide = "read answers of the last steps: noise in place of text means that train.lr is too high"
        yield level("entropy", f"at most {MOST_ENTROPY_SHARE:g} times the first entropy", found, decide, late.step)


def _answers(curves: MetricCurves) -> Iterator[RunFinding]:
    """Shares of the answers or prompts that should be small."""
    most = {
        "truncated": (MOST_TRUNCATED, "read answers that were cut off; raise rollout.max_tokens and compare"),
        "uniform_groups": (
            MOST_UNIFORM,
            "such groups teach nothing: take other problems, or a larger rollout.group_size",
        ),
        "grading_failures": (MOST_FAILURES, "log.txt has the failures; grade one answer with posttrain.grade"),
        "environment_failures": (MOST_FAILURES, "the recorded answers of rollouts.db name the failures"),
        "tool_failed": (MOST_FAILURES, "read an answer that the tool ended, and call the tool by hand"),
        "failed_calls": (MOST_UNIFORM, "read calls that failed in the recorded answers"),
    }
    for name, (limit, decide) in most.items():
        late = curves.late(name)
        if late is not None and late.mean > limit:
            found = f"{late.mean:.0%} in the last {late.count} batches"
            yield level(name, f"at most {limit:.0%}", found, decide, late.step)


def _format(curves: MetricCurves) -> Iterator[RunFinding]:
    early, late = curves.early("format"), curves.late("format")
    if early is None or late is None:
        return
    found = f"format {early.mean:.0%} at first, {late.mean:.0%} in the last {late.count} batches"
    if curves.falls("format") and late.mean < early.mean - FORMAT_CHANGE:
        decide = "read answers of the last steps; lower train.lr by a factor of 3 and compare"
        yield level("format", "a format that is kept", found, decide, late.step)
    first, last = curves.early("accuracy"), curves.late("accuracy")
    if first is None or last is None:
        return
    if curves.rises("format") and late.mean > early.mean + FORMAT_CHANGE and not curves.rises("accuracy"):
        found = f"{found}; accuracy {first.mean:.0%}, then {last.mean:.0%}"
        decide = "set the weight of the format's reward to 0: if accuracy stays as it is, only the format was learned"
        yield level("format against accuracy", "accuracy that rises with the format", found, decide, late.step)


def _lengths(curves: MetricCurves) -> Iterator[RunFinding]:
    early, late = curves.early("completion_length_wrong"), curves.late("completion_length_wrong")
    right = curves.late("completion_length_correct")
    if early is None or late is None:
        return
    is_longer = late.mean > MOST_GROWTH * early.mean and curves.rises("completion_length_wrong")
    if is_longer and (right is None or late.mean > MOST_GROWTH * right.mean):
        found = f"{early.mean:.0f} tokens at first, {late.mean:.0f} in the last {late.count} batches"
        if right is not None:
            found = f"{found}; right answers {right.mean:.0f}"
        decide = "aggregate by token (`aggregate: token_mean` or `constant`) and compare: a mean over each answer "
        decide = f"{decide}weighs the tokens of long wrong answers less"
        expected = "wrong answers that grow no more than right ones"
        yield level("completion_length_wrong", expected, found, decide, late.step)


def _reward(curves: MetricCurves) -> Iterator[RunFinding]:
    if not curves.falls("reward"):
        return
    early, late = curves.early("reward"), curves.late("reward")
    assert early is not None
    assert late is not None
    found = f"{early.mean:.3g} at first, {late.mean:.3g} in the last {late.count} batches"
    decide = "train the first steps again with a third of train.lr; a fall that stays is a wrong sign or reward"
    yield level("reward", "a reward that does not fall", found, decide, late.step)


def _distances(curves: MetricCurves) -> Iterator[RunFinding]:
    """Distances of the policy from its reference and from the sampler."""
    late = curves.late("kl_ref")
    if late is not None and late.mean > MOST_KL:
        decide = "compare answers with the initial model's; lower train.lr or raise regularize.kl_coef"
        found = f"{late.mean:.3g} nats per token in the last {late.count} updates"
        yield level("kl_ref", f"at most {MOST_KL:g} nats per token", found, decide, late.step)
    late = curves.late("kl_sampler")
    if late is not None and not curves.updates.num_records and late.mean > MOST_MISMATCH:
        decide = "score one recorded answer with the model's own forward pass and compare both sides with it"
        found = f"{late.mean:.3g} nats per token in the last {late.count} updates"
        yield level("kl_sampler", f"at most {MOST_MISMATCH:g} nats per token", found, decide, late.step)
    late = curves.late("effective_sample_size")
    if late is not None and late.mean < LEAST_SAMPLE_SIZE:
        decide = "lower rollout.staleness or the number of updates of a batch and compare"
        found = f"{late.mean:.0%} of the tokens in the last {late.count} updates"
        yield level("effective_sample_size", f"at least {LEAST_SAMPLE_SIZE:.0%}", found, decide, late.step)


def _clip(curves: MetricCurves) -> Iterator[RunFinding]:
    """A clip that hardly ever acts although a batch has several updates, or acts on a large share."""
    series = curves.series.get("clip_fraction", ())
    per_batch = curves.updates.per_batch
    late = curves.late("clip_fraction")
    if late is not None and late.mean > MOST_CLIPPED:
        found = f"{late.mean:.0%} of the tokens in the last {late.count} updates"
        decide = "take fewer updates of a batch, or a lower train.lr, and compare"
        yield level("clip_fraction", f"at most {MOST_CLIPPED:.0%}", found, decide, late.step)
    if late is None or per_batch is None or per_batch < 2:
        return
    largest = max(value for _, value in series)
    if largest < LEAST_CLIPPED:
        distances = curves.values("ratio_distance")
        found = f"{largest:.2%} at most, in {len(series)} updates"
        if distances:
            found = f"{found}; |ratio − 1| is {max(distances):.2g} at most"
        decide = "train without the clip (`objective: reinforce`): if nothing changes, train.lr can be higher"
        yield level("clip_fraction", "a clip that acts in the later updates of a batch", found, decide, series[-1][0])


def _moved(curves: MetricCurves) -> Iterator[RunFinding]:
    moved = [(step, value) for step, value in curves.updates.measured.get("moved", ()) if value > 0]
    if len(moved) < LEAST_STEPS:
        return
    largest = max(value for _, value in moved)
    if largest < LEAST_MOVED:
        rates = [value for _, value in curves.updates.measured.get("lr", ())]
        found = f"{largest:.2g} at most, in {len(moved)} updates"
        if rates:
            found = f"{found} with a learning rate of {max(rates):.2g} at most"
        decide = "raise train.lr by a factor of 10 and compare the reward"
        expected = f"steps that move the weights by {LEAST_MOVED:g} of their size, or more"
        yield level("moved", expected, found, decide, moved[0][0])


def _pairs(curves: MetricCurves) -> Iterator[RunFinding]:
    early, late = curves.early("pair_accuracy"), curves.late("pair_accuracy")
    if early is None or late is None:
        return
    if early.mean > TOLD_APART:
        found = f"{early.mean:.0%} in the first {early.count} steps"
        decide = "look for what tells the answers apart (length, a phrase) with `posttrain data show`"
        yield level("pair_accuracy", "pairs that the model does not separate from the start", found, decide, early.step)
    if late.mean < CHANCE:
        found = f"{early.mean:.0%} at first, {late.mean:.0%} in the last {late.count} steps"
        decide = "swap chosen and rejected of a few rows and compare; read them with `posttrain data show`"
        yield level("pair_accuracy", "pairs that the model separates at the end", found, decide, late.step)


def _given(curves: MetricCurves) -> Iterator[RunFinding]:
    """A loss that does not fall, where it is a likelihood or a score of given rows."""
    if curves.has("reward") or curves.updates.per_batch not in (None, 1):
        return
    early, late = curves.early("loss"), curves.late("loss")
    if early is not None and late is not None and curves.rises("loss"):
        found = f"{early.mean:.3g} at first, {late.mean:.3g} in the last {late.count} steps"
        decide = "train on one batch of rows again and again: if its loss does not fall, train.lr is too high"
        yield level("loss", "a loss that does not rise", found, decide, late.step)


def _gradient(curves: MetricCurves) -> Iterator[RunFinding]:
    max_grad_norm = curves.updates.max_grad_norm
    norms = [value for value in curves.values("grad_norm") if value > 0]
    late = curves.late("grad_norm")
    if max_grad_norm is None or late is None or not norms:
        return
    typical = sorted(norms)[len(norms) // 2]
    if typical > CLIPPED_GRADIENT * max_grad_norm:
        found = f"{typical:.3g}, the median of {len(norms)} updates"
        decide = "compare with a train.max_grad_norm of that size and a lower train.lr"
        expected = f"at most {CLIPPED_GRADIENT:g} times train.max_grad_norm ({max_grad_norm:g})"
        yield level("grad_norm", expected, found, decide, late.step)


def _held_out(curves: MetricCurves, primary: Metric) -> Iterator[RunFinding]:
    """Held-out results that got worse: against their best, and against the training reward."""
    for task, points in curves.points.items():
        measured = [(point, value) for point in points if (value := primary.value(point.results)) is not None]
        if len(measured) < 2:
            continue
        first, last = measured[0], measured[-1]
        best = max(measured, key=lambda one: primary.goodness(one[1]))
        shown = f"{primary.show(best[1])} after step {best[0].step}, {primary.show(last[1])} after step {last[0].step}"
        if primary.goodness(best[1]) - primary.goodness(last[1]) > _tolerance(primary, best, last):
            decide = "evaluate both checkpoints on more rows (`posttrain evaluate`); take the best one"
            expected = "held-out results that do not get worse"
            yield level(f"held-out {primary.name}", expected, f"{task}: {shown}", decide, best[0].step)
        is_lower = primary.goodness(last[1]) < primary.goodness(first[1])
        if is_lower and curves.rises("reward"):
            early, late = curves.early("reward"), curves.late("reward")
            assert early is not None
            assert late is not None
            held = f"{task}: {primary.show(first[1])} at first, {primary.show(last[1])} at the end"
            found = f"{held}; training reward {early.mean:.3g}, then {late.mean:.3g}"
            decide = "read answers with a high reward: they may please the reward and not be right"
            expected = f"held-out {primary.label} that rises with the training reward"
            yield level("held-out against reward", expected, found, decide, last[0].step)


def _tolerance(primary: Metric, best: tuple[EvaluationPoint, float], last: tuple[EvaluationPoint, float]) -> float:
    """Two standard errors of the difference of two shares; of other numbers 2 % of the best."""
    if not primary.is_share:
        return SHARE_OF_LOSS * abs(best[1])
    variance = 0.0
    for point, value in (best, last):
        variance += 0.25 / max(1.0, point.results.get("n", 1.0))
        if 0.0 < value < 1.0:
            variance += (value * (1.0 - value) - 0.25) / max(1.0, point.results.get("n", 1.0))
    return 2.0 * math.sqrt(variance)
