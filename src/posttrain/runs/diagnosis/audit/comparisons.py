"""Compare a recomputed update with the run's record and the next checkpoint.

Distances are between vectors, relative to the norm of the expected one. In fp32, two ways to compute a gradient differ
by 1e-6 to 1e-5. With lower precision products or weights they differ by a few hundredths.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.balances.limits import ratio_limit
from posttrain.balances.of_updates import (
    OF_GRADIENTS,
    OF_STEPS,
    along_directions,
    clip_scale,
    distance_along,
    optimizer_of,
    sampled,
    scheduled_rate,
)
from posttrain.balances.record import OptimizerFacts
from posttrain.runs.diagnosis.audit.adam import (
    AdamSettings,
    Moments,
    gradient_behind,
    next_moments,
    next_weights,
    ratio_of,
    read_moments,
)
from posttrain.runs.diagnosis.audit.gradient import Recomputed, norm_of
from posttrain.runs.diagnosis.audit.material import AuditMaterial


@dataclass(frozen=True, slots=True)
class AuditLimits:
    """Largest relative differences explained by rounding: for the gradient, a single tensor, and the weight step.

    Steps get a larger limit because Adam scales tiny gradients up to full-size steps.
    """

    gradient: float
    tensor: float
    step: float


FINE, COARSE = (
    AuditLimits(2e-4, 2e-3, 1e-2),
    AuditLimits(0.1, 0.5, 0.5),
)  # fp32 everywhere, and partly lower precision
SMALL = 1e-3  # smaller fractions of the gradient norm are not compared tensor by tensor
OF_STATES = 1e-3  # for values computed from two stored states, where only storage rounds
ROUNDING = 2.0**-24


@dataclass(frozen=True, slots=True)
class AuditedNumber:
    """One audited quantity, named by ``check``. It agrees if ``gap`` is at most ``limit``."""

    check: str
    gap: float
    limit: float
    expected: str
    found: str
    causes: tuple[str, ...]
    decided_by: str

    @property
    def agrees(self) -> bool:
        """True if both values agree within rounding; never for NaN."""
        return self.gap <= self.limit


@dataclass(frozen=True, slots=True)
class ExpectedStep:
    """The expected update in float64, by parameter name: weights and moments before and after.

    ``gradients`` are clipped. ``settings``: AdamW settings by parameter name.
    """

    before: Mapping[str, Tensor]
    after: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    moments: Mapping[str, Moments]
    next_moments: Mapping[str, Moments]
    settings: Mapping[str, AdamSettings]


def expected_step(material: AuditMaterial, computed: Recomputed) -> ExpectedStep:
    """Compute the expected update from the recomputed gradient."""
    optimizer = optimizer_of(material.record)
    assert optimizer is not None, "refused before"
    rate = scheduled_rate(optimizer, material.record.step)
    scale = clip_scale(norm_of(computed.gradients), optimizer.max_grad_norm)
    trained = {name: p.detach().cpu().double() for name, p in material.model.named_parameters() if p.requires_grad}
    settings: dict[str, AdamSettings] = {}
    moments: dict[str, Moments] = {}
    following: dict[str, Moments] = {}
    after: dict[str, Tensor] = {}
    gradients: dict[str, Tensor] = {}
    for name, weights in trained.items():
        settings[name] = _settings_of(optimizer, weights, rate * ratio_of(material.lr_ratios, name))
        known = read_moments(material.state, name)
        if known is None:
            known = Moments.none(weights)
        moments[name] = known
        gradients[name] = computed.gradients[name] * scale
        following[name] = next_moments(known, gradients[name], settings[name])
        after[name] = next_weights(weights, following[name], settings[name])
    return ExpectedStep(trained, after, gradients, moments, following, settings)


def _settings_of(optimizer: OptimizerFacts, weights: Tensor, rate: float) -> AdamSettings:
    """Weight decay applies to matrices, not to norms and biases."""
    decay = 0.0
    if weights.ndim >= 2:
        decay = float(optimizer.options.get("weight_decay", 0.0))
    one, two = optimizer.options.get("betas", (0.9, 0.999))
    return AdamSettings(rate, decay, (float(one), float(two)), float(optimizer.options.get("eps", 1e-8)))


def compare_all(material: AuditMaterial, computed: Recomputed) -> Iterator[AuditedNumber]:
    """Yield all comparisons, those closest to a root cause first."""
    step = expected_step(material, computed)
    limits = FINE
    if material.is_coarse:
        limits = COARSE
    yield from _of_scores(material, computed)
    yield _of_loss(material, computed, limits)
    yield from _of_recorded_gradient(material, computed, limits)
    if material.after is not None:
        state, weights = material.after
        yield from _of_checkpoint(step, state, weights, limits)
    else:
        yield from _of_recorded_step(material, step, limits)


def _of_scores(material: AuditMaterial, computed: Recomputed) -> Iterator[AuditedNumber]:
    """Compare log-probability sums per row with the trainer's forward pass."""
    rows = material.record.rows
    assert rows is not None
    largest = ratio_limit(material.record.facts.trainer_limit) / 4  # applies to the mean over a row
    pairs = [("forward", rows.logprob, computed.logprobs)]
    if computed.reference is not None:
        pairs.append(("reference", rows.reference, computed.reference))
    for check, recorded, found in pairs:
        gaps = ((recorded - found).abs() / rows.tokens.clamp(min=1))[rows.computed]
        gaps = gaps[~gaps.isnan()]
        if not len(gaps):
            continue
        worst = float(gaps.max())
        yield AuditedNumber(
            check,
            worst,
            largest,
            f"transformers' log-probabilities, within {largest:.1e} nats per token",
            f"one row differs by {worst:.1e}",
            ("the trainer's forward pass uses wrong positions, rows or weights", "rows or model files changed since"),
            "load the previous checkpoint in transformers and score one row",
        )


def _of_loss(material: AuditMaterial, computed: Recomputed, limits: AuditLimits) -> AuditedNumber:
    recorded = material.record.measured.get("loss", math.nan)
    gap = abs(recorded - computed.loss) / max(computed.size, 1e-30)
    return AuditedNumber(
        "loss",
        _finite(gap),
        limits.gradient,
        f"a loss of {computed.loss:.7g}",
        f"{recorded:.7g}",
        ("the aggregation or a loss term differs from the recipe", "advantages or rows differ"),
        "compute the loss on a single row with posttrain.losses",
    )


def _of_recorded_gradient(
    material: AuditMaterial, computed: Recomputed, limits: AuditLimits
) -> Iterator[AuditedNumber]:
    """Compare norm and projections of the gradient with the recorded ones, before clipping."""
    measured = material.record.measured
    norm = norm_of(computed.gradients)
    causes = (
        "a micro-batch contributes nothing, or with the wrong scale",
        "gradients were not zeroed after the previous update",
        "a layer contributes nothing",
    )
    decide = "change train.micro_batch_tokens: the gradient must not change"
    if "grad_norm" in measured:
        gap = abs(measured["grad_norm"] - norm) / max(norm, 1e-30)
        if norm == measured["grad_norm"]:
            gap = 0.0
        found = f"{measured['grad_norm']:.7g}"
        yield AuditedNumber(
            "norm", _finite(gap), limits.gradient, f"a gradient of norm {norm:.7g}", found, causes, decide
        )
    sample = _sample_of(computed.gradients)
    distance = distance_along(OF_GRADIENTS, measured, along_directions(OF_GRADIENTS, sample))
    if distance is None:
        return
    size = max(float(sample.square().mean().sqrt()), 1e-30)
    share = distance / size
    yield AuditedNumber(
        "gradient sample",
        _finite(share),
        limits.tensor,
        f"{len(sample):,} recomputed gradient entries",
        f"a relative difference of {share:.1e}",
        causes,
        decide,
    )


def _sample_of(tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([sampled(x.reshape(-1)) for x in tensors.values()])


def _of_recorded_step(material: AuditMaterial, step: ExpectedStep, limits: AuditLimits) -> Iterator[AuditedNumber]:
    """Compare the weight step with its recorded projections."""
    steps = {name: after - step.before[name] for name, after in step.after.items()}
    sample = _sample_of(steps)
    measured = material.record.measured
    size = max(float(sample.square().mean().sqrt()), 1e-30)
    causes = (
        "wrong learning rate, or lost optimizer state",
        "gradients are clipped differently",
        "weight decay applies to the wrong tensors",
        "some weights were not updated",
    )
    distance = distance_along(OF_STEPS, measured, along_directions(OF_STEPS, sample))
    if distance is not None:
        rounded = float(_sample_of(step.before).abs().square().mean().sqrt()) * 2 * ROUNDING
        share = max(0.0, distance - rounded) / size
        yield AuditedNumber(
            "step sample",
            _finite(share),
            limits.step,
            f"a root-mean-square change of {size:.3e} in {len(sample):,} sampled weights",
            f"a relative difference of {share:.1e}",
            causes,
            "retrain up to here with train.save_every 1 and repeat the audit: it then compares full weights",
        )
    elif "step_size" in measured:
        moving = sample[sample != 0]
        expected = 0.0
        if len(moving):
            expected = float(moving.square().mean().sqrt())
        gap = abs(measured["step_size"] - expected) / max(expected, 1e-30)
        yield AuditedNumber(
            "step size",
            _finite(gap),
            limits.step,
            f"a root-mean-square weight change of {expected:.4e}",
            f"{measured['step_size']:.4e}",
            causes,
            "compare weights between two checkpoints",
        )


def _of_checkpoint(
    step: ExpectedStep, state: Mapping[str, Tensor], weights: Mapping[str, Tensor], limits: AuditLimits
) -> Iterator[AuditedNumber]:
    """Compare Adam's state and the weights in the checkpoint after the update."""
    found: dict[str, Moments] = {}
    for name in step.before:
        known = read_moments(state, name)
        if known is not None:
            found[name] = known
    yield _counts(step, found)
    yield _gradients(step, found, limits)
    yield _second_moments(step, found)
    yield _weights(step, found, weights)
    yield _whole_step(step, weights, limits)


def _counts(step: ExpectedStep, found: Mapping[str, Moments]) -> AuditedNumber:
    wrong = [n for n, m in step.next_moments.items() if n not in found or found[n].count != m.count]
    seen = "the same count in all tensors"
    if wrong:
        state = "none"
        if wrong[0] in found:
            state = f"{found[wrong[0]].count:g} updates"
        seen = f"{len(wrong)} tensors with a different state, first {wrong[0]}: {state}"
    counts = sorted({m.count for m in step.next_moments.values()})
    return AuditedNumber(
        "Adam's count",
        float(len(wrong)),
        0.0,
        f"Adam's state after {' or '.join(f'{one:g}' for one in counts)} updates in {len(step.before):,} tensors",
        seen,
        ("the state was lost", "some weights were skipped or updated twice"),
        "compare optimizer.safetensors between both checkpoints",
    )


def _cosine(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Cosine similarity across two sets of tensors; 1 if both are zero."""
    product, squares = 0.0, [0.0, 0.0]
    for name, x in one.items():
        product += float((x * other[name]).sum())
        squares[0] += float(x.square().sum())
        squares[1] += float(other[name].square().sum())
    if squares[0] == squares[1] == 0.0:
        return 1.0
    return product / max(math.sqrt(squares[0] * squares[1]), 1e-300)


def _gradients(step: ExpectedStep, found: Mapping[str, Moments], limits: AuditLimits) -> AuditedNumber:
    """Compare the clipped gradient recovered from the moments, per tensor."""
    behind = {
        name: gradient_behind(step.moments[name], found.get(name, step.moments[name]), step.settings[name])
        for name in step.before
    }
    whole = max(norm_of(step.gradients), 1e-30)
    worst, at = 0.0, ""
    squares = 0.0
    for name, gradient in step.gradients.items():
        rounding = 2 * ROUNDING * float(step.moments[name].first.norm()) / (1.0 - step.settings[name].betas[0])
        distance = max(0.0, float((behind[name] - gradient).norm()) - rounding)
        squares += distance**2
        size = max(float(gradient.norm()), SMALL * whole)
        if not distance / size <= worst:
            worst, at = distance / size, name
    gap = max(math.sqrt(squares) / whole, worst * limits.gradient / limits.tensor)
    cosine = _cosine(behind, step.gradients)
    return AuditedNumber(
        "gradient",
        _finite(gap),
        limits.gradient,
        f"a clipped gradient of norm {norm_of(step.gradients):.7g}",
        f"norm {norm_of(behind):.7g}, cosine {cosine:.7f}, worst tensor {at or 'none'} (off by {worst:.1e})",
        (
            "a micro-batch contributes nothing, or with the wrong scale",
            "gradients are clipped differently, or never",
            "gradients were not zeroed after the previous update",
            "a layer contributes nothing",
        ),
        "recompute with a different train.micro_batch_tokens: it must not change",
    )


def _second_moments(step: ExpectedStep, found: Mapping[str, Moments]) -> AuditedNumber:
    """Compare second moments with the squared gradient recovered from the first moments."""
    worst, at = 0.0, ""
    for name, after in found.items():
        settings, before = step.settings[name], step.moments[name]
        gradient = gradient_behind(before, after, settings)
        share = 1.0 - settings.betas[1]
        squares = (after.second - settings.betas[1] * before.second) / share
        noise = 2 * ROUNDING * (float(after.second.norm() + before.second.norm()) / share)
        noise += 4 * ROUNDING * float((gradient * before.first).norm()) / (1.0 - settings.betas[0])
        expected = gradient.square()
        gap = max(0.0, float((squares - expected).norm()) - noise) / max(float(expected.norm()), noise, 1e-300)
        if not gap <= worst:
            worst, at = gap, name
    return AuditedNumber(
        "second moments",
        _finite(worst),
        10 * OF_STATES,
        "second moments updated with the squared gradient",
        f"{at or 'all'} with a relative difference of {worst:.1e}",
        ("wrong β2", "the state was lost or mixed up"),
        "compare exp_avg_sq between both checkpoints",
    )


def _weights(step: ExpectedStep, found: Mapping[str, Moments], weights: Mapping[str, Tensor]) -> AuditedNumber:
    """Compare the weights with a step computed from the stored moments, which needs no gradient."""
    worst, at, ratio = 0.0, "", 1.0
    for name, before in step.before.items():
        after = found.get(name, step.next_moments[name])
        expected = next_weights(before, after, step.settings[name])
        now = weights[name].cpu().double()
        rounded = (before.abs() + expected.abs()) * ROUNDING
        distance = float(((now - expected).abs() - rounded).clamp(min=0.0).norm())
        size = float((expected - before).norm())
        gap = distance / max(size, 1e-30)
        if distance == 0.0:
            gap = 0.0
        if not gap <= worst:
            worst, at, ratio = gap, name, float((now - before).norm()) / max(size, 1e-30)
    shown = f"all equal within rounding (at most {worst:.1e} of a step)"
    if worst > OF_STATES:
        shown = f"{at} deviates by {worst:.1e} of the expected step (it moved {ratio:.3g} times as far)"
    return AuditedNumber(
        "weights",
        _finite(worst),
        OF_STATES,
        "steps equal to lr (decay w + m̂ / (√v̂ + ε))",
        shown,
        (
            "wrong learning rate",
            "weight decay applies to the wrong tensors",
            "some weights were not updated",
            "missing bias correction",
        ),
        "pick a weight and compute its step from both checkpoints by hand",
    )


def _whole_step(step: ExpectedStep, weights: Mapping[str, Tensor], limits: AuditLimits) -> AuditedNumber:
    """Compare the complete update, from the recomputed gradient to the new weights."""
    expected = {name: after - step.before[name] for name, after in step.after.items()}
    found = {name: weights[name].cpu().double() - before for name, before in step.before.items()}
    size = max(norm_of(expected), 1e-30)
    rounding = ROUNDING * norm_of(step.before)
    distance = norm_of({name: found[name] - expected[name] for name in expected})
    gap = max(0.0, distance - rounding) / size
    return AuditedNumber(
        "update",
        _finite(gap),
        limits.step,
        f"a weight step with norm {norm_of(expected):.5e}",
        f"norm {norm_of(found):.5e}, cosine {_cosine(found, expected):.6f}",
        ("see the preceding comparisons",),
        "check gradient, moments and weights",
    )


def _finite(gap: float) -> float:
    if math.isnan(gap):
        return math.inf
    return gap
