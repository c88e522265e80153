"""Explain numbers that look like faults but are harmless."""

from __future__ import annotations

import math
from collections.abc import Iterator

from posttrain.runs.diagnosis.findings import RunFinding, explanation
from posttrain.runs.diagnosis.metric_curves import MetricCurves

NEAR_NOTHING = 0.25  # relative to the mean absolute advantage
NO_DISTANCE, SOME_DISTANCE = 1e-9, 1e-6  # nats per token
NEAR_LN2 = 1e-3


def explain_curves(curves: MetricCurves) -> Iterator[RunFinding]:
    """Yield explanations for harmless but suspicious numbers."""
    for explain in (_loss_at_first, _loss_rises, _reference, _clip, _no_gradient, _coin, _both_fall):
        yield from explain(curves)


def _loss_at_first(curves: MetricCurves) -> Iterator[RunFinding]:
    """A surrogate loss is near 0 at the first update on a batch."""
    first = curves.updates.first_losses
    if not first or not curves.has("ratio"):
        return
    useful = [one for one in first if one.advantage > 0]
    near = [one for one in useful if abs(one.loss) <= NEAR_NOTHING * one.advantage]
    if not near or len(near) < len(useful) / 2:
        return
    one = near[0]
    norms = [value for step, value in curves.series.get("grad_norm", ()) if step == one.step]
    found = f"a loss of {one.loss:.2g}"
    if norms:
        found = f"{found} with a gradient of norm {norms[0]:.2g}"
    yield RunFinding(
        "explanation",
        "loss",
        one.step,
        "a loss near 0 at the first update on a batch",
        found,
        "the ratio is 1 there and group advantages sum to 0, so the loss carries no information, only the gradient "
        "does; watch the reward",
        num_updates=len(near),
    )


def _loss_rises(curves: MetricCurves) -> Iterator[RunFinding]:
    if not curves.rises("loss") or not curves.rises("reward"):
        return
    ends = curves.change("loss"), curves.change("reward")
    assert ends[0] is not None
    assert ends[1] is not None
    (loss, last_loss), (reward, last_reward) = ends[0], ends[1]
    found = f"loss {loss.mean:.3g}, then {last_loss.mean:.3g}; reward {reward.mean:.3g}, then {last_reward.mean:.3g}"
    yield explanation(
        "loss",
        "the loss may rise together with the reward",
        found,
        "advantages and KL differ between batches, so losses are not comparable across batches; rewards are",
        last_loss.step,
    )


def _reference(curves: MetricCurves) -> Iterator[RunFinding]:
    series = curves.series.get("kl_ref", ())
    if not series or abs(series[0][1]) > NO_DISTANCE:
        return
    largest = max(value for _, value in series)
    if largest > SOME_DISTANCE:
        yield explanation(
            "kl_ref",
            "0 at the beginning, larger later",
            f"{abs(series[0][1]):.2g}, then up to {largest:.2g} nats per token",
            "the reference is the initial model, so the KL is 0 until the weights change",
            series[0][0],
        )


def _clip(curves: MetricCurves) -> Iterator[RunFinding]:
    series = curves.series.get("clip_fraction", ())
    if series and curves.updates.per_batch == 1 and max(value for _, value in series) == 0.0:
        yield explanation(
            "clip_fraction",
            "0 with a single update per batch",
            f"0 in {len(series)} updates",
            "the ratio is 1 at the only update on each batch, so clipping cannot occur",
            series[0][0],
        )


def _no_gradient(curves: MetricCurves) -> Iterator[RunFinding]:
    uniform = {step for step, value in curves.series.get("uniform_groups", ()) if value == 1.0}
    still = [step for step, value in curves.series.get("grad_norm", ()) if value == 0.0 and step in uniform]
    if still:
        yield RunFinding(
            "explanation",
            "grad_norm",
            still[0],
            "zero gradient if all groups in a batch have uniform rewards",
            "0",
            "advantages are differences within a group, which are all 0 here",
            num_updates=len(still),
        )


def _coin(curves: MetricCurves) -> Iterator[RunFinding]:
    series = curves.series.get("loss", ())
    if not series or not (curves.has("implicit_reward") or curves.has("chosen_reward")):
        return
    step, value = series[0]
    if abs(value - math.log(2)) <= NEAR_LN2:
        yield explanation(
            "loss",
            "ln 2 = 0.693 at the first step of DPO",
            f"{value:.4f}",
            "policy and reference are still identical, so every pair has even odds",
            step,
        )


def _both_fall(curves: MetricCurves) -> Iterator[RunFinding]:
    if not curves.falls("chosen_logprob") or not curves.rises("margin"):
        return
    ends = curves.change("chosen_logprob")
    assert ends is not None, "it falls"
    early, late = ends
    yield explanation(
        "chosen_logprob",
        "chosen answers may become less likely while the margin rises",
        f"{early.mean:.4g} initially, {late.mean:.4g} in the last {late.count} steps",
        "the loss depends only on the difference between both answers; add an NLL term to keep the chosen likelihood",
        late.step,
    )
