"""Comparisons of a recomputed update with what a run recorded of it and with the checkpoint behind it.

Distances are of vectors, as shares of the size of the expected one. In fp32 two computations of a gradient differ by
1e-6 to 1e-5 of it; where products or weights are coarser, by a few hundredths.
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
    """The largest shares that rounding explains: of a whole gradient, of one tensor of it, and of a step of weights.

    A step has more, as Adam makes steps of one size from tiny gradients, too.
    """

    gradient: float
    tensor: float
    step: float


FINE, COARSE = (
    AuditLimits(2e-4, 2e-3, 1e-2),
    AuditLimits(0.1, 0.5, 0.5),
)  # where numbers are fp32, and where some are coarser
SMALL = 1e-3  # a tensor with less of the whole gradient is not looked at by itself
OF_STATES = 1e-3  # of what is computed from two stored states: only storing rounds
ROUNDING = 2.0**-24


@dataclass(frozen=True, slots=True)
class AuditedNumber:
    """One number of an audit: it agrees if ``gap`` is at most ``limit``. ``check``: what is compared."""

    check: str
    gap: float
    limit: float
    expected: str
    found: str
    causes: tuple[str, ...]
    decided_by: str

    @property
    def agrees(self) -> bool:
        """True if both numbers are the same but for rounding; NaN never is."""
        return self.gap <= self.limit


@dataclass(frozen=True, slots=True)
class ExpectedStep:
    """The update by the formula, float64 by name: weights before and after, moments before and after.

    ``gradients`` are clipped. ``settings``: of each tensor.
    """

    before: Mapping[str, Tensor]
    after: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    moments: Mapping[str, Moments]
    next_moments: Mapping[str, Moments]
    settings: Mapping[str, AdamSettings]


def expected_step(material: AuditMaterial, computed: Recomputed) -> ExpectedStep:
    """Return the update that the recomputed gradient gives."""
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
        settings[name] = _settings_of(optimizer, weights, rate * ratio_of(material.recipe.train.lr_ratios, name))
        known = read_moments(material.state, name)
        if known is None:
            known = Moments.none(weights)
        moments[name] = known
        gradients[name] = computed.gradients[name] * scale
        following[name] = next_moments(known, gradients[name], settings[name])
        after[name] = next_weights(weights, following[name], settings[name])
    return ExpectedStep(trained, after, gradients, moments, following, settings)


def _settings_of(optimizer: OptimizerFacts, weights: Tensor, rate: float) -> AdamSettings:
    """Weight decay is of matrices, not of norms and biases."""
    decay = 0.0
    if weights.ndim >= 2:
        decay = float(optimizer.options.get("weight_decay", 0.0))
    one, two = optimizer.options.get("betas", (0.9, 0.999))
    return AdamSettings(rate, decay, (float(one), float(two)), float(optimizer.options.get("eps", 1e-8)))


def compare_all(material: AuditMaterial, computed: Recomputed) -> Iterator[AuditedNumber]:
    """Yield what agrees and what does not; what is nearest to a cause comes first."""
    step = expected_step(material, computed)
    limits = FINE
    recipe = material.recipe
    if recipe.model.dtype == "bf16" or recipe.train.precision != "fp32":
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
    """Sums of log-probabilities of each row, against those of the trainer's own forward pass."""
    rows = material.record.rows
    assert rows is not None
    largest = ratio_limit(material.record.facts.trainer_limit) / 4  # the mean of a row
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
            f"log-probabilities as transformers computes them, within {largest:.1e} nats per token",
            f"a row that differs by {worst:.1e}",
            ("the trainer's forward pass reads other positions, rows or weights", "the rows or a model have changed"),
            "score one row with transformers from the checkpoint before the update",
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
        ("the sum has other weights or terms than the recipe says", "advantages or rows are others"),
        "compute the loss of one row by hand with posttrain.losses",
    )


def _of_recorded_gradient(
    material: AuditMaterial, computed: Recomputed, limits: AuditLimits
) -> Iterator[AuditedNumber]:
    """Norm and directions of the gradient as the run recorded them, before it is clipped."""
    measured = material.record.measured
    norm = norm_of(computed.gradients)
    causes = (
        "a micro-batch gives no gradient, or one of another scale",
        "gradients of the update before are still there",
        "a layer gives none",
    )
    decide = "change train.micro_batch_tokens: the gradient of this update must stay"
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
        f"{len(sample):,} sampled numbers of the gradient as they are computed",
        f"a difference of {share:.1e} of their size",
        causes,
        decide,
    )


def _sample_of(tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([sampled(x.reshape(-1)) for x in tensors.values()])


def _of_recorded_step(material: AuditMaterial, step: ExpectedStep, limits: AuditLimits) -> Iterator[AuditedNumber]:
    """The step of the weights as the run recorded it along a few directions."""
    steps = {name: after - step.before[name] for name, after in step.after.items()}
    sample = _sample_of(steps)
    measured = material.record.measured
    size = max(float(sample.square().mean().sqrt()), 1e-30)
    causes = (
        "another learning rate, or a lost state of the optimizer",
        "gradients are clipped in another way",
        "weight decay is of other tensors",
        "some weights are not updated",
    )
    distance = distance_along(OF_STEPS, measured, along_directions(OF_STEPS, sample))
    if distance is not None:
        rounded = float(_sample_of(step.before).abs().square().mean().sqrt()) * 2 * ROUNDING
        share = max(0.0, distance - rounded) / size
        yield AuditedNumber(
            "step sample",
            _finite(share),
            limits.step,
            f"{len(sample):,} sampled weights that move by {size:.3e} (root mean square)",
            f"a difference of {share:.1e} of that",
            causes,
            "train with train.save_every 1 up to this update and audit it again: the weights behind it say more",
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
            f"weights that move by {expected:.4e} (root mean square)",
            f"{measured['step_size']:.4e}",
            causes,
            "compare the weights of two checkpoints",
        )


def _of_checkpoint(
    step: ExpectedStep, state: Mapping[str, Tensor], weights: Mapping[str, Tensor], limits: AuditLimits
) -> Iterator[AuditedNumber]:
    """Adam's state and the weights in the checkpoint behind the update."""
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
    seen = "as many in all tensors"
    if wrong:
        state = "none"
        if wrong[0] in found:
            state = f"{found[wrong[0]].count:g} updates"
        seen = f"{len(wrong)} tensors with another state, the first {wrong[0]}: {state}"
    counts = sorted({m.count for m in step.next_moments.values()})
    return AuditedNumber(
        "Adam's count",
        float(len(wrong)),
        0.0,
        f"Adam's state of {' or '.join(f'{one:g}' for one in counts)} updates in {len(step.before):,} tensors",
        seen,
        ("the state was lost", "some weights are not updated, or twice"),
        "compare optimizer.safetensors of both checkpoints",
    )


def _cosine(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The cosine of two vectors that are cut into tensors; 1 of two zeros."""
    product, squares = 0.0, [0.0, 0.0]
    for name, x in one.items():
        product += float((x * other[name]).sum())
        squares[0] += float(x.square().sum())
        squares[1] += float(other[name].square().sum())
    if squares[0] == squares[1] == 0.0:
        return 1.0
    return product / max(math.sqrt(squares[0] * squares[1]), 1e-300)


def _gradients(step: ExpectedStep, found: Mapping[str, Moments], limits: AuditLimits) -> AuditedNumber:
    """The gradient behind the moments, which is clipped, tensor by tensor."""
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
        f"norm {norm_of(behind):.7g}, cosine {cosine:.7f}, worst tensor {at or 'none'} ({worst:.1e} of its size)",
        (
            "a micro-batch gives no gradient, or one of another scale",
            "gradients are clipped in another way, or not at all",
            "gradients of the update before are still there",
            "a layer gives none",
        ),
        "recompute it with another train.micro_batch_tokens: it must stay",
    )


def _second_moments(step: ExpectedStep, found: Mapping[str, Moments]) -> AuditedNumber:
    """The second moments against the squares of the gradient that the first moments have."""
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
        "second moments that take up the square of the gradient",
        f"{at or 'all'} with a difference of {worst:.1e} of it",
        ("β2 is another one", "the state was lost or mixed up"),
        "compare exp_avg_sq of both checkpoints",
    )


def _weights(step: ExpectedStep, found: Mapping[str, Moments], weights: Mapping[str, Tensor]) -> AuditedNumber:
    """The weights against those that the stored moments give: no gradient is needed for that."""
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
    shown = f"all as far as they are stored ({worst:.1e} of a step at most)"
    if worst > OF_STATES:
        shown = f"{at} with a difference of {worst:.1e} of its step (it moved {ratio:.3g} times as far)"
    return AuditedNumber(
        "weights",
        _finite(worst),
        OF_STATES,
        "weights that move by lr (decay w + m̂ / (√v̂ + ε))",
        shown,
        (
            "another learning rate",
            "weight decay is of other tensors",
            "some weights are not updated",
            "the bias of the moments is not corrected",
        ),
        "compute the step of one weight by hand from both checkpoints",
    )


def _whole_step(step: ExpectedStep, weights: Mapping[str, Tensor], limits: AuditLimits) -> AuditedNumber:
    """The whole update: from the recomputed gradient to the weights behind it."""
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
        f"a step of the weights of norm {norm_of(expected):.5e}",
        f"norm {norm_of(found):.5e}, cosine {_cosine(found, expected):.6f}",
        ("what the comparisons before it name",),
        "look at gradient, moments and weights",
    )


def _finite(gap: float) -> float:
    if math.isnan(gap):
        return math.inf
    return gap
