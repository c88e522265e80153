"""Levels: values that often accompany problems. They never prove a fault."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from posttrain.runs.diagnosis.findings import RunFinding, level
from posttrain.runs.diagnosis.metric_curves import MetricCurves
from posttrain.store.metric_names import Metric
from posttrain.store.metrics import EvaluationPoint, MetricsRow, learning_warnings

LEAST_ENTROPY_SHARE, MOST_ENTROPY_SHARE = 0.2, 2.0  # relative to the initial entropy
LEAST_ENTROPY, MOST_ENTROPY = 0.05, 1.0  # nats per token; the relative limits apply only below and above these
MOST_TRUNCATED = 0.25
MOST_UNIFORM = 0.5
FORMAT_CHANGE = 0.1
MOST_KL = 0.5  # nats per token from the reference
MOST_MISMATCH = 0.02  # nats per token, for runs without a recorded limit; rounding explains no more
LEAST_SAMPLE_SIZE = 0.5
MOST_CLIPPED, LEAST_CLIPPED = 0.3, 1e-4
MOST_GROWTH = 1.5  # growth in the length of incorrect completions
LEAST_MOVED = 1e-5  # largest relative weight change per step
CLIPPED_GRADIENT = 20.0  # multiple of ``train.max_grad_norm``
MOST_FAILURES = 0.05
CHANCE, TOLD_APART = 0.55, 0.98  # pair accuracy: near chance at the end, or saturated at the start
LEAST_STEPS = 3
SHARE_OF_LOSS = 0.02  # tolerated worsening of a held-out metric that is not a fraction


def read_levels(curves: MetricCurves, primary: Metric) -> Iterator[RunFinding]:
    """Yield levels from training metrics and recorded update measurements.

    ``primary`` ranks held-out evaluations.
    """
    for read in (_entropy, _answers, _format, _lengths, _reward, _distances, _clip, _moved, _pairs, _given, _gradient):
        yield from read(curves)
    yield from _held_out(curves, primary)


def read_warnings(rows: Sequence[MetricsRow]) -> Iterator[RunFinding]:
    """Yield the learning warnings that the run logged during training."""
    for name, text in learning_warnings(rows).items():
        what, _, remedy = text.partition(". ")
        yield level(name, "answers, gradients or weights that vary", what, remedy, 1)


def _entropy(curves: MetricCurves) -> Iterator[RunFinding]:
    ends = curves.ends("entropy")
    if ends is None:
        return
    early, late = ends
    found = f"{early.mean:.3g} nats per token initially, {late.mean:.3g} in the last {late.count} updates"
    if early.mean > LEAST_ENTROPY and late.mean < LEAST_ENTROPY_SHARE * early.mean:
        decide = "sample one prompt 16 times with `posttrain generate`: equal answers give no signal"
        yield level("entropy", f"at least {LEAST_ENTROPY_SHARE:.0%} of the initial entropy", found, decide, late.step)
    elif late.mean > MOST_ENTROPY and late.mean > MOST_ENTROPY_SHARE * early.mean:
        decide = "read recent answers: if they are noise instead of text, train.lr is too high"
        yield level("entropy", f"at most {MOST_ENTROPY_SHARE:g} times the initial entropy", found, decide, late.step)


def _answers(curves: MetricCurves) -> Iterator[RunFinding]:
    """Check fractions of completions or prompts that should be small."""
    most = {
        "truncated": (MOST_TRUNCATED, "read some truncated answers; raise rollout.max_tokens and compare"),
        "uniform_groups": (
            MOST_UNIFORM,
            "such groups provide no signal: use different problems, or a larger rollout.group_size",
        ),
        "grading_failures": (MOST_FAILURES, "see the failures in log.txt; grade one answer with posttrain.grade"),
        "environment_failures": (MOST_FAILURES, "see the failures recorded with the answers in rollouts.db"),
        "tool_failed": (MOST_FAILURES, "read an answer that ended in a tool failure, and call the tool by hand"),
        "failed_calls": (MOST_UNIFORM, "read the failed calls in the recorded answers"),
    }
    for name, (limit, decide) in most.items():
        late = curves.late(name)
        if late is not None and late.mean > limit:
            found = f"{late.mean:.0%} in the last {late.count} batches"
            yield level(name, f"at most {limit:.0%}", found, decide, late.step)


def _format(curves: MetricCurves) -> Iterator[RunFinding]:
    ends = curves.ends("format")
    if ends is None:
        return
    early, late = ends
    found = f"format {early.mean:.0%} initially, {late.mean:.0%} in the last {late.count} batches"
    if curves.falls("format") and late.mean < early.mean - FORMAT_CHANGE:
        decide = "read recent answers; lower train.lr by a factor of 3 and compare"
        yield level("format", "a stable format", found, decide, late.step)
    accuracies = curves.ends("accuracy")
    if accuracies is None:
        return
    first, last = accuracies
    if curves.rises("format") and late.mean > early.mean + FORMAT_CHANGE and not curves.rises("accuracy"):
        found = f"{found}; accuracy {first.mean:.0%}, then {last.mean:.0%}"
        decide = "set the format reward's weight to 0: if accuracy does not change, the model only learned the format"
        yield level("format against accuracy", "accuracy rising with the format", found, decide, late.step)


def _lengths(curves: MetricCurves) -> Iterator[RunFinding]:
    ends = curves.ends("completion_length_wrong")
    if ends is None:
        return
    early, late = ends
    right = curves.late("completion_length_correct")
    is_longer = late.mean > MOST_GROWTH * early.mean and curves.rises("completion_length_wrong")
    if is_longer and (right is None or late.mean > MOST_GROWTH * right.mean):
        found = f"{early.mean:.0f} tokens initially, {late.mean:.0f} in the last {late.count} batches"
        if right is not None:
            found = f"{found}; correct answers {right.mean:.0f}"
        decide = "aggregate by token (`aggregate: token_mean` or `constant`) and compare: averaging per answer "
        decide = f"{decide}gives tokens in long incorrect answers less weight"
        expected = "incorrect answers growing no faster than correct ones"
        yield level("completion_length_wrong", expected, found, decide, late.step)


def _reward(curves: MetricCurves) -> Iterator[RunFinding]:
    ends = curves.change("reward")
    if ends is None or not curves.falls("reward"):
        return
    early, late = ends
    found = f"{early.mean:.3g} initially, {late.mean:.3g} in the last {late.count} batches"
    decide = (
        "repeat the first steps with a third of train.lr; if the reward still falls, its sign or definition is wrong"
    )
    yield level("reward", "a reward that holds or rises", found, decide, late.step)


def _distances(curves: MetricCurves) -> Iterator[RunFinding]:
    """Check distances from the policy to the reference and to the sampler."""
    late = curves.late("kl_ref")
    if late is not None and late.mean > MOST_KL:
        decide = "compare answers with the initial model; lower train.lr or raise regularize.kl_coef"
        found = f"{late.mean:.3g} nats per token in the last {late.count} updates"
        yield level("kl_ref", f"at most {MOST_KL:g} nats per token", found, decide, late.step)
    late = curves.late("kl_sampler")
    if late is not None and not curves.updates.num_records and late.mean > MOST_MISMATCH:
        decide = "score one recorded answer with transformers and compare both log-probabilities"
        found = f"{late.mean:.3g} nats per token in the last {late.count} updates"
        yield level("kl_sampler", f"at most {MOST_MISMATCH:g} nats per token", found, decide, late.step)
    late = curves.late("effective_sample_size")
    if late is not None and late.mean < LEAST_SAMPLE_SIZE:
        decide = "lower rollout.staleness or the updates per batch and compare"
        found = f"{late.mean:.0%} of tokens in the last {late.count} updates"
        yield level("effective_sample_size", f"at least {LEAST_SAMPLE_SIZE:.0%}", found, decide, late.step)


def _clip(curves: MetricCurves) -> Iterator[RunFinding]:
    """Check the clip: rarely active despite several updates per batch, or active on too many tokens."""
    series = curves.series.get("clip_fraction", ())
    per_batch = curves.updates.per_batch
    late = curves.late("clip_fraction")
    if late is not None and late.mean > MOST_CLIPPED:
        found = f"{late.mean:.0%} of tokens in the last {late.count} updates"
        decide = "use fewer updates per batch, or a lower train.lr, and compare"
        yield level("clip_fraction", f"at most {MOST_CLIPPED:.0%}", found, decide, late.step)
    if late is None or per_batch is None or per_batch < 2:
        return
    largest = max(value for _, value in series)
    if largest < LEAST_CLIPPED:
        distances = curves.values("ratio_distance")
        found = f"at most {largest:.2%} in {len(series)} updates"
        if distances:
            found = f"{found}; |ratio − 1| at most {max(distances):.2g}"
        decide = "train without clipping (`objective: reinforce`): if nothing changes, train.lr can be raised"
        yield level("clip_fraction", "clipping in later updates on a batch", found, decide, series[-1][0])


def _moved(curves: MetricCurves) -> Iterator[RunFinding]:
    moved = [(step, value) for step, value in curves.updates.measured.get("moved", ()) if value > 0]
    if len(moved) < LEAST_STEPS:
        return
    largest = max(value for _, value in moved)
    if largest < LEAST_MOVED:
        rates = [value for _, value in curves.updates.measured.get("lr", ())]
        found = f"at most {largest:.2g} in {len(moved)} updates"
        if rates:
            found = f"{found} with a learning rate up to {max(rates):.2g}"
        decide = "raise train.lr by a factor of 10 and compare the reward"
        expected = f"relative weight changes of at least {LEAST_MOVED:g} per step"
        yield level("moved", expected, found, decide, moved[0][0])


def _pairs(curves: MetricCurves) -> Iterator[RunFinding]:
    ends = curves.ends("pair_accuracy")
    if ends is None:
        return
    early, late = ends
    if early.mean > TOLD_APART:
        found = f"{early.mean:.0%} in the first {early.count} steps"
        decide = "inspect the data for giveaways (length, a phrase) with `posttrain data show`"
        yield level("pair_accuracy", "pairs that the initial model cannot separate yet", found, decide, early.step)
    if late.mean < CHANCE:
        found = f"{early.mean:.0%} initially, {late.mean:.0%} in the last {late.count} steps"
        decide = "swap chosen and rejected in a few rows and compare; read them with `posttrain data show`"
        yield level("pair_accuracy", "pairs that the trained model separates", found, decide, late.step)


def _given(curves: MetricCurves) -> Iterator[RunFinding]:
    """Check for a rising likelihood or scoring loss on fixed rows."""
    if curves.has("reward") or curves.updates.per_batch not in (None, 1):
        return
    ends = curves.change("loss")
    if ends is not None and curves.rises("loss"):
        early, late = ends
        found = f"{early.mean:.3g} initially, {late.mean:.3g} in the last {late.count} steps"
        decide = "train repeatedly on a single batch: if the loss does not fall, train.lr is too high"
        yield level("loss", "a loss that falls", found, decide, late.step)


def _gradient(curves: MetricCurves) -> Iterator[RunFinding]:
    max_grad_norm = curves.updates.max_grad_norm
    norms = [value for value in curves.values("grad_norm") if value > 0]
    late = curves.late("grad_norm")
    if max_grad_norm is None or late is None or not norms:
        return
    typical = sorted(norms)[len(norms) // 2]
    if typical > CLIPPED_GRADIENT * max_grad_norm:
        found = f"a median of {typical:.3g} over {len(norms)} updates"
        decide = "raise train.max_grad_norm to this value, lower train.lr, and compare"
        expected = f"at most {CLIPPED_GRADIENT:g} times train.max_grad_norm ({max_grad_norm:g})"
        yield level("grad_norm", expected, found, decide, late.step)


def _held_out(curves: MetricCurves, primary: Metric) -> Iterator[RunFinding]:
    """Check for held-out results that fell below their best, or fell while the training reward rose."""
    for task, points in curves.points.items():
        measured = [(point, value) for point in points if (value := primary.value(point.results)) is not None]
        if len(measured) < 2:
            continue
        first = measured[0]
        last = measured[-1]
        best = max(measured, key=lambda one: primary.goodness(one[1]))
        shown = f"{primary.show(best[1])} after step {best[0].step}, {primary.show(last[1])} after step {last[0].step}"
        if primary.goodness(best[1]) - primary.goodness(last[1]) > _tolerance(primary, best, last):
            decide = "evaluate both checkpoints on more rows (`posttrain evaluate`) and use the better one"
            expected = "stable or improving held-out results"
            yield level(f"held-out {primary.name}", expected, f"{task}: {shown}", decide, best[0].step)
        is_lower = primary.goodness(last[1]) < primary.goodness(first[1])
        rewards = curves.change("reward")
        if is_lower and rewards is not None and curves.rises("reward"):
            early, late = rewards
            held = f"{task}: {primary.show(first[1])} initially, {primary.show(last[1])} finally"
            found = f"{held}; training reward {early.mean:.3g}, then {late.mean:.3g}"
            decide = "read answers with high rewards: they may exploit the reward without being correct"
            expected = f"held-out {primary.label} rising with the training reward"
            yield level("held-out against reward", expected, found, decide, last[0].step)


def _tolerance(primary: Metric, best: tuple[EvaluationPoint, float], last: tuple[EvaluationPoint, float]) -> float:
    """Two standard errors for a difference between fractions; 2 % of the best value for other metrics."""
    if not primary.is_share:
        return SHARE_OF_LOSS * abs(best[1])
    variance = 0.0
    for point, value in (best, last):
        variance += 0.25 / max(1.0, point.results.get("n", 1.0))
        if 0.0 < value < 1.0:
            variance += (value * (1.0 - value) - 0.25) / max(1.0, point.results.get("n", 1.0))
    return 2.0 * math.sqrt(variance)
