"""Recompute objective values from their equations, in float64.

Functions take inputs at trained tokens of B rows (``[B, T]``), or sums over them (``[B]``) for row and pair
objectives, and return a value per token or unit. Pair rows alternate: chosen, rejected. ``stop`` marks quantities the
published equation does not differentiate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from posttrain.balances.record import Fields, Formula

OptionValues = Mapping[str, Any]
LARGEST = 20.0


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Objective inputs, float64 ``[B, T]`` (``[B]`` for per-row numbers).

    mask ``bool [B, T]``; counts ``[B]``: trained tokens per row, if a single entry represents the whole row. scores:
    head outputs, ``[B, T]`` or ``[B, T, C]``. fields: additional batch fields by name.
    """

    mask: Tensor
    logprobs: Tensor
    old: Tensor | None = None
    sampler: Tensor | None = None
    advantages: Tensor | None = None
    reference: Tensor | None = None
    entropy: Tensor | None = None
    scores: Tensor | None = None
    counts: Tensor | None = None
    fields: Fields = field(default_factory=dict)

    @property
    def lengths(self) -> Tensor:
        """Trained tokens per row, float64 ``[B]``."""
        if self.counts is not None:
            return self.counts.double()
        return self.mask.sum(dim=1).double()

    def required(self, name: str) -> Tensor:
        """Look up a batch field in float64.

        Raises:
            KeyError: missing from the record.
        """
        return self.fields[name].double()


@dataclass(frozen=True, slots=True)
class Computed:
    """Values ``[B, T]`` or ``[U]``. clipped ``[B, T]``: 1 if clipping fixes the value; None if never clipped."""

    values: Tensor
    clipped: Tensor | None = None


def expected_values(objective: Formula, inputs: LossInputs) -> Computed | None:
    """Recompute objective values. None for third-party objectives or ones over whole distributions."""
    formula = _TOKENS.get(objective.name)
    if formula is not None:
        return formula(inputs, objective.options)
    of_units = _UNITS.get(objective.name)
    if of_units is None:
        return None
    return Computed(of_units(inputs, objective.options))


def expected_regularizers(inputs: LossInputs, kl_coef: float, estimator: str, entropy_coef: float) -> Tensor:
    """``β · KL(π‖π_ref) − c_H · H`` per token (estimators: Schulman 2020)."""
    values = torch.zeros_like(inputs.logprobs)
    if kl_coef:
        assert inputs.reference is not None
        r = _between(inputs.logprobs, inputs.reference)
        kl = {"k1": r, "k2": r * r / 2}.get(estimator, (-r).expm1() + r)
        if estimator == "k3_weighted":
            kl = _log_rho(inputs).exp() * kl
        values = values + kl_coef * kl
    if entropy_coef:
        assert inputs.entropy is not None
        values = values - entropy_coef * inputs.entropy
    return values


def _between(one: Tensor, other: Tensor) -> Tensor:
    return (one - other).clamp(-LARGEST, LARGEST)


def _a(x: LossInputs) -> Tensor:
    assert x.advantages is not None
    return x.advantages


def _log_rho(x: LossInputs) -> Tensor:
    assert x.old is not None
    return torch.where(x.mask, _between(x.logprobs, x.old), torch.zeros_like(x.logprobs))


def _row_means(x: LossInputs, values: Tensor) -> Tensor:
    sums = torch.where(x.mask, values, torch.zeros_like(values)).sum(dim=1, keepdim=True)
    return sums / x.mask.sum(dim=1, keepdim=True).clamp(min=1)


def _surrogate(rho: Tensor, a: Tensor, o: OptionValues) -> Computed:
    low, high = 1.0 - o.get("clip_low", 0.2), 1.0 + o.get("clip_high", 0.2)
    held_low = (a < 0) & (rho < low)
    held_high = (a > 0) & (rho > high)
    values = torch.where(held_low, -a * low, torch.where(held_high, -a * high, -a * rho))
    held = held_low | held_high
    most = o.get("clip_max")
    if most is not None:  # the dual clip (Ye et al. 2020, eq. 3)
        held_most = (a < 0) & (rho > most)
        values = torch.where(held_most, -a * most, values)
        held = held | held_most
    return Computed(values, held.double())


def _score_function(x: LossInputs, o: OptionValues) -> Computed:
    return Computed(-_a(x) * x.logprobs)


def _token_surrogate(x: LossInputs, o: OptionValues) -> Computed:
    return _surrogate(_log_rho(x).exp(), _a(x), o)


def _sequence_surrogate(x: LossInputs, o: OptionValues) -> Computed:
    rho = _row_means(x, _log_rho(x)).exp().expand_as(x.logprobs)
    return _surrogate(rho, _a(x), {"clip_low": 3e-4, "clip_high": 4e-4, **o})


def _sequence_surrogate_of_tokens(x: LossInputs, o: OptionValues) -> Computed:
    mean = _row_means(x, _log_rho(x)).detach()
    own = torch.where(x.mask, x.logprobs - x.logprobs.detach(), torch.zeros_like(x.logprobs))
    return _surrogate((mean + own).exp(), _a(x), {"clip_low": 3e-4, "clip_high": 4e-4, **o})


def _clipped_weights(x: LossInputs, o: OptionValues) -> Computed:
    rho = _log_rho(x).detach().exp()
    low, high = 1.0 - o.get("clip_low", 1.0), 1.0 + o.get("clip_high", 4.0)
    held = (rho < low) | (rho > high)
    return Computed(-rho.clamp(low, high) * _a(x) * x.logprobs, held.double())


def _soft_gate(x: LossInputs, o: OptionValues) -> Computed:
    a = _a(x)
    positive = torch.full_like(a, o.get("tau_positive", 1.0))
    tau = torch.where(a > 0, positive, torch.full_like(a, o.get("tau_negative", 1.05)))
    gate = 4.0 / (tau * (1.0 + torch.exp(-tau * (_log_rho(x).exp() - 1.0))))
    return Computed(-a * gate)


def _geometric_mean(x: LossInputs, o: OptionValues) -> Computed:
    a, rho, limit = _a(x), _log_rho(x), o.get("clip", 0.4)
    held_high = (a > 0) & (rho > limit)
    held_low = (a <= 0) & (rho < -limit)
    edge = torch.full_like(rho, limit)
    kept = torch.where(held_high, edge, torch.where(held_low, -edge, rho))
    clipped = (held_high | held_low) & (a != 0)
    return Computed(-a * _row_means(x, kept).exp().expand_as(a), clipped.double())


def _actor_and_critic(x: LossInputs, o: OptionValues) -> Computed:
    assert x.scores is not None
    policy = _token_surrogate(x, o)
    returns, before = x.required("returns"), x.required("old_values")
    loss = (x.scores - returns).square() / 2
    limit = o.get("value_clip", 0.2)
    if limit is not None:
        near = before + (x.scores - before).clamp(-limit, limit)
        loss = torch.maximum(loss, (near - returns).square() / 2)
    return Computed(policy.values + o.get("value_weight", 0.5) * loss, policy.clipped)


def _within_trust(x: LossInputs, o: OptionValues, *, in_nats: bool) -> Computed:
    """``−ρ A`` with the sampler's ratio, 0 outside the trust region (Qi et al. 2026, eq. 13 and 14)."""
    assert x.sampler is not None
    a = _a(x)
    gap = torch.where(x.mask, _between(x.logprobs, x.sampler), torch.zeros_like(x.logprobs))
    policy, sampler = x.logprobs.detach().exp(), x.sampler.exp()
    distance = (policy - sampler).abs()
    limit = 0.15
    if in_nats:
        rest = [torch.log(-torch.expm1(p.clamp(max=-1e-6))) for p in (x.sampler, x.logprobs.detach())]
        distance = -sampler * gap.detach() + (1.0 - sampler) * (rest[0] - rest[1])
        limit = 0.05
    rises = (a > 0) & (policy > sampler) & (distance > o.get("clip_high", limit))
    falls = (a < 0) & (policy < sampler) & (distance > o.get("clip_low", limit))
    left = rises | falls
    return Computed(torch.where(left, torch.zeros_like(a), -gap.exp() * a), left.double())


def _trust_in_probability(x: LossInputs, o: OptionValues) -> Computed:
    return _within_trust(x, o, in_nats=False)


def _trust_in_nats(x: LossInputs, o: OptionValues) -> Computed:
    return _within_trust(x, o, in_nats=True)


def _without_drawn(x: LossInputs, o: OptionValues) -> Computed:
    plain = _token_surrogate(x, o)
    drawn = x.required("clip_cov_tokens") > 0
    return Computed(torch.where(drawn, torch.zeros_like(plain.values), plain.values), plain.clipped)


def _with_penalized(x: LossInputs, o: OptionValues) -> Computed:
    gap = _log_rho(x)
    counts = (x.required("kl_cov_tokens") > 0) & (gap.abs() >= 1e-4)
    penalty = torch.where(counts, o.get("penalty", 1.0) * gap.abs(), torch.zeros_like(gap))
    return Computed(penalty - gap.exp() * _a(x))


def _squared_ratio(x: LossInputs, o: OptionValues) -> Computed:
    rho = _log_rho(x)
    return Computed(o.get("beta", 0.05) * rho * rho / 2 - _a(x) * x.logprobs)


def _own_probability(x: LossInputs, o: OptionValues) -> Computed:
    return Computed(-x.logprobs * x.logprobs.detach().exp())


def _likelihood(x: LossInputs, o: OptionValues) -> Computed:
    return Computed(-x.logprobs)


def _towards_teacher(x: LossInputs, o: OptionValues) -> Computed:
    assert x.old is not None
    a = torch.where(x.mask, _between(x.required("teacher_logprobs"), x.old), torch.zeros_like(x.logprobs))
    rho = _log_rho(x).exp()
    if o.get("clip") is None:
        return Computed(-rho * a)
    return _surrogate(rho, a, {"clip_low": o["clip"], "clip_high": o["clip"]})


def _binary(score: Tensor, label: Tensor) -> Tensor:
    return label * softplus(-score) + (1.0 - label) * softplus(score)


def _outcomes(x: LossInputs, o: OptionValues) -> Computed:
    assert x.scores is not None
    values = _binary(x.scores, x.required("labels")[:, None])
    if o.get("positions", "all") == "last":
        behind = x.mask.flip(1).cumsum(dim=1).flip(1)
        values = torch.where(x.mask & (behind == 1), values, torch.zeros_like(values)) * x.lengths[:, None]
    return Computed(values)


def _steps(x: LossInputs, o: OptionValues) -> Computed:
    assert x.scores is not None
    labels = torch.where(x.mask, x.required("step_labels"), torch.zeros_like(x.required("step_labels")))
    if x.scores.ndim == 2:
        return Computed(_binary(x.scores, labels))
    chosen = x.scores.gather(2, labels.long()[:, :, None]).squeeze(2)
    return Computed(x.scores.logsumexp(dim=2) - chosen)


_TOKENS: dict[str, Callable[[LossInputs, OptionValues], Computed]] = {
    "reinforce": _score_function,
    "grpo": _token_surrogate,
    "gspo": _sequence_surrogate,
    "gspo_token": _sequence_surrogate_of_tokens,
    "cispo": _clipped_weights,
    "sapo": _soft_gate,
    "gmpo": _geometric_mean,
    "ppo": _actor_and_critic,
    "dppo_tv": _trust_in_probability,
    "dppo_kl": _trust_in_nats,
    "clip_cov": _without_drawn,
    "kl_cov": _with_penalized,
    "dro": _squared_ratio,
    "cross_entropy": _likelihood,
    "dft": _own_probability,
    "on_policy_distillation": _towards_teacher,
    "outcome": _outcomes,
    "process": _steps,
}


def _sums(x: LossInputs, values: Tensor) -> Tensor:
    total = torch.where(x.mask, values, torch.zeros_like(values)).sum(dim=1)
    if x.counts is None:
        return total
    return total * x.lengths  # a single entry averages this many


def _ratios(x: LossInputs, o: OptionValues) -> tuple[Tensor, Tensor]:
    """``log π(y)/π_ref(y)`` for chosen and rejected answers; per-token means if so configured."""
    assert x.reference is not None
    rows = _sums(x, x.logprobs - x.reference)
    if o.get("length_normalized"):
        rows = rows / x.lengths
    return rows[0::2], rows[1::2]


def _logit(x: LossInputs, o: OptionValues) -> Tensor:
    chosen, rejected = _ratios(x, o)
    return o.get("beta", 0.1) * (chosen - rejected)


def _dpo(x: LossInputs, o: OptionValues) -> Tensor:
    logit, flipped = _logit(x, o), o.get("label_smoothing", 0.0)
    return (1.0 - flipped) * softplus(-logit) + flipped * softplus(logit)


def _transport(x: LossInputs, o: OptionValues) -> Tensor:
    chosen, rejected = _ratios(x, o)
    logit = o.get("beta", 0.1) * (chosen - rejected + x.required("transport_shift")[0::2])
    flipped = o.get("label_smoothing", 0.0)
    return (1.0 - flipped) * softplus(-logit) + flipped * softplus(logit)


def _unbiased_dpo(x: LossInputs, o: OptionValues) -> Tensor:
    logit, flipped = _logit(x, o), o.get("flip_rate", 0.1)
    return ((1.0 - flipped) * softplus(-logit) - flipped * softplus(logit)) / (1.0 - 2.0 * flipped)


def _identity(x: LossInputs, o: OptionValues) -> Tensor:
    chosen, rejected = _ratios(x, o)
    return (chosen - rejected - 1.0 / (2.0 * o.get("beta", 0.1))).square()


def _hinge(x: LossInputs, o: OptionValues) -> Tensor:
    return (o.get("margin", 1.0) - _logit(x, o)).clamp(min=0.0)


def _without_reference(x: LossInputs, o: OptionValues) -> Tensor:
    means = o.get("beta", 2.0) * _sums(x, x.logprobs) / x.lengths
    return softplus(-(means[0::2] - means[1::2] - o.get("gamma", 1.0)))


def _odds(x: LossInputs, o: OptionValues) -> Tensor:
    means = _sums(x, x.logprobs) / x.lengths
    capped = means.clamp(max=-1e-6)
    odds = means - torch.log(-torch.expm1(capped))
    return -means[0::2] + o.get("odds_weight", 0.1) * softplus(-(odds[0::2] - odds[1::2]))


def _contrastive(x: LossInputs, o: OptionValues) -> Tensor:
    sums = _sums(x, x.logprobs)
    likelihood = sums[0::2]
    if o.get("nll_length_normalized", True):
        likelihood = likelihood / x.lengths[0::2]
    logit = o.get("beta", 0.1) * (sums[0::2] - sums[1::2])
    return softplus(-logit) - o.get("nll_weight", 1.0) * likelihood


def _with_likelihood(x: LossInputs, o: OptionValues) -> Tensor:
    likelihood = (_sums(x, x.logprobs) / x.lengths)[0::2]
    return softplus(-_logit(x, o)) - o.get("nll_weight", 1.0) * likelihood


def _exact(x: LossInputs, o: OptionValues) -> Tensor:
    logit, smooth = _logit(x, o), o.get("label_smoothing", 1e-3)
    p = logit.sigmoid()
    return p * (logsigmoid(logit) - math.log(1.0 - smooth)) + (1.0 - p) * (logsigmoid(-logit) - math.log(smooth))


def _rewards(x: LossInputs, o: OptionValues, beta: float) -> tuple[Tensor, Tensor]:
    chosen, rejected = _ratios(x, o)
    return o.get("beta", beta) * chosen, o.get("beta", beta) * rejected


def _noise_contrastive(x: LossInputs, o: OptionValues) -> Tensor:
    chosen, rejected = _rewards(x, o, 0.01)
    return softplus(-chosen) + softplus(chosen) / 2 + softplus(rejected) / 2


def _anchored_at_zero(x: LossInputs, o: OptionValues) -> Tensor:
    chosen, rejected = _rewards(x, o, 0.1)
    return 1.0 - chosen.sigmoid() + rejected.sigmoid()


def _anchored_down(x: LossInputs, o: OptionValues) -> Tensor:
    chosen, rejected = _rewards(x, o, 0.1)
    return chosen.sigmoid() + 1.0 - (chosen - rejected).sigmoid()


def _two_targets(x: LossInputs, o: OptionValues) -> Tensor:
    chosen, rejected = _ratios(x, o)
    target = 0.5 / o.get("beta", 0.1)
    return (chosen - target).square() + (rejected + target).square()


def _two_classes(x: LossInputs, o: OptionValues) -> Tensor:
    chosen, rejected = _rewards(x, o, 0.1)
    return softplus(-chosen) + softplus(rejected)


def _blend(x: LossInputs, o: OptionValues) -> Tensor:
    logit = _logit(x, {"beta": 0.05, **o})
    share = (logit / o.get("temperature", 0.05)).sigmoid()
    return (1.0 - share) * softplus(-logit) + share * torch.exp(-logit.clamp(min=-LARGEST))


def _other_divergence(x: LossInputs, o: OptionValues) -> Tensor:
    kind = o.get("divergence", "jensen_shannon")
    power = 1.0
    if kind == "alpha":
        power = o.get("alpha", 0.5)
    slopes = []
    for z in _ratios(x, {}):
        slope = -torch.exp((-power * z).clamp(-LARGEST, LARGEST)) / power
        if kind == "jensen_shannon":
            slope = -softplus(-z)
        slopes.append(slope)
    return softplus(-o.get("beta", 0.1) * (slopes[0] - slopes[1]))


def _common_length(x: LossInputs, o: OptionValues) -> Tensor:
    """Tokens beyond the other answer's length are weighted by α (Liu et al. 2024, eq. 9 and 10)."""
    assert x.reference is not None
    lengths = x.lengths
    common = torch.minimum(lengths[0::2], lengths[1::2]).repeat_interleave(2)[:, None]
    beyond = x.mask.cumsum(dim=1) > common
    gap = x.logprobs - x.reference
    rows = _sums(x, torch.where(beyond, o.get("alpha", 0.5) * gap, gap))
    return softplus(-o.get("beta", 0.1) * (rows[0::2] - rows[1::2]))


def _mixed(x: LossInputs, o: OptionValues) -> Tensor:
    likelihood = (_sums(x, x.logprobs) / x.lengths)[0::2]
    preference = o.get("preference_weight", 0.8) * softplus(-_logit(x, o))
    return preference + o.get("quality_weight", 0.2) * _two_classes(x, o) - o.get("nll_weight", 1.0) * likelihood


def _prospect(x: LossInputs, o: OptionValues) -> Tensor:
    assert x.reference is not None
    beta = o.get("beta", 0.1)
    gain = beta * (_sums(x, x.logprobs - x.reference) - x.required("kl_baseline"))
    labels = x.required("labels")
    wanted = o.get("desirable_weight", 1.0) * labels * (1.0 - gain.sigmoid())
    return wanted + o.get("undesirable_weight", 1.0) * (1.0 - labels) * (1.0 - (-gain).sigmoid())


def _bradley_terry(x: LossInputs, o: OptionValues) -> Tensor:
    assert x.scores is not None
    behind = x.mask.flip(1).cumsum(dim=1).flip(1)
    last = torch.where(x.mask & (behind == 1), x.scores, torch.zeros_like(x.scores)).sum(dim=1)
    gap = last[0::2] - last[1::2]
    if o.get("margin"):
        gap = gap - x.required("margins")[0::2]
    return softplus(-gap) + o.get("centering", 0.0) * (last[0::2] + last[1::2]).square()


_UNITS: dict[str, Callable[[LossInputs, OptionValues], Tensor]] = {
    "dpo": _dpo,
    "aot": _transport,
    "robust_dpo": _unbiased_dpo,
    "ipo": _identity,
    "hinge": _hinge,
    "simpo": _without_reference,
    "orpo": _odds,
    "cpo": _contrastive,
    "rpo": _with_likelihood,
    "exo": _exact,
    "nca": _noise_contrastive,
    "apo_zero": _anchored_at_zero,
    "apo_down": _anchored_down,
    "sppo": _two_targets,
    "bco": _two_classes,
    "discopop": _blend,
    "f_dpo": _other_divergence,
    "ld_dpo": _common_length,
    "mpo": _mixed,
    "kto": _prospect,
    "bradley_terry": _bradley_terry,
}
# Divergences over whole distributions: recorded, but not recomputed.
OF_DISTRIBUTIONS = frozenset({"distillation", "sdpo"})
# Depend on head scores, which files do not store.
OF_A_HEAD = frozenset({"ppo", "outcome", "process", "bradley_terry"})


def formulas_of_losses() -> frozenset[str]:
    """List recomputable objectives."""
    return frozenset(_TOKENS) | frozenset(_UNITS)
