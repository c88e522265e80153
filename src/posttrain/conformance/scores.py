"""Checks of log-probabilities computed from logits: temperature, alignment, extremes, and entropy if returned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.conformance.findings import (
    BadResult,
    CheckResult,
    Finding,
    check_tensor,
    in_precision,
    largest_gap,
    limit_for,
    run_checks,
)
from posttrain.conformance.loss_calls import call_safely

Score = Callable[[Tensor, Tensor, float], Any]
ROWS, WIDTH, VOCABULARY = 3, 6, 5
TEMPERATURES = (0.7, 2.0)


@dataclass(frozen=True, slots=True)
class Scores:
    """``[B, T − 1]``: log-probabilities from token 2 on, and distribution entropies if available."""

    logprobs: Tensor
    entropy: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ScoreTrial:
    """A score under test."""

    function: Score

    def run(self, logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Scores:
        """Call the function under test, dropping a column for the first token if present."""
        returned = call_safely(self.function, logits, tokens, temperature)
        parts = (returned,)
        if isinstance(returned, tuple):
            parts = returned
        if len(parts) not in (1, 2):
            raise BadResult(f"returned {len(parts)} values. Return log-probabilities, optionally with the entropy")
        rows, width = tokens.shape
        found = []
        for one in parts:
            has_first = isinstance(one, Tensor) and one.ndim == 2 and one.shape[1] == width
            wanted = f"log-probabilities of shape ({rows}, {width}), or ({rows}, {width - 1}) without the first token"
            if has_first:
                found.append(check_tensor(one, (rows, width), wanted)[:, 1:])
            else:
                found.append(check_tensor(one, (rows, width - 1), wanted))
        return Scores(*found)


def made_logits(rows: int = ROWS, width: int = WIDTH, vocabulary: int = VOCABULARY) -> tuple[Tensor, Tensor]:
    """Build logits ``float64 [B, T, V]``, where those at t predict token t + 1, and tokens ``[B, T]``."""
    random = torch.Generator().manual_seed(5)
    logits = 4.0 * torch.rand(rows, width, vocabulary, generator=random, dtype=torch.float64)
    return logits, torch.randint(vocabulary, (rows, width), generator=random)


def reference_scores(logits: Tensor, tokens: Tensor, temperature: float) -> Scores:
    """Compute log-probabilities and entropies from their definitions."""
    scaled = logits[:, :-1] / temperature
    everything = scaled - scaled.exp().sum(dim=-1, keepdim=True).log()
    logprobs = everything.gather(2, tokens[:, 1:, None]).squeeze(2)
    return Scores(logprobs, -(everything.exp() * everything).sum(dim=-1))


def _judged(found: Tensor, expected: Tensor, wrong: str) -> CheckResult:
    gap = largest_gap(found, expected)
    if gap <= limit_for(found):
        return "ok", gap, ""
    return "fails", gap, wrong


def _check_value(trial: ScoreTrial) -> CheckResult:
    """Temperature 1."""
    logits, tokens = made_logits()
    found, expected = trial.run(logits, tokens).logprobs, reference_scores(logits, tokens, 1.0).logprobs
    return in_precision(_judged(found, expected, "is not log softmax(z)"), found)


def _check_alignment(trial: ScoreTrial) -> CheckResult:
    """Logits at t only affect the token at t + 1."""
    logits, tokens = made_logits()
    plain = trial.run(logits, tokens).logprobs
    for t in range(WIDTH - 1):
        moved = logits.clone()
        moved[:, t] += torch.arange(VOCABULARY, dtype=torch.float64)
        changed = (trial.run(moved, tokens).logprobs != plain).any(dim=0).nonzero().flatten().tolist()
        if changed != [t]:
            places = ", ".join(str(place + 1) for place in changed) or "none"
            return "fails", None, f"the logits at {t} change the scores of tokens {places}, expected {t + 1}"
    return "ok", None, ""


def _check_temperature(trial: ScoreTrial) -> CheckResult:
    """Temperatures 0.7 and 2."""
    logits, tokens = made_logits()
    largest = 0.0
    for temperature in TEMPERATURES:
        found = trial.run(logits, tokens, temperature).logprobs
        gap = largest_gap(found, reference_scores(logits, tokens, temperature).logprobs)
        if gap > limit_for(found):
            return "fails", gap, f"is not log softmax(z / T) at temperature {temperature:g}"
        largest = max(largest, gap)
    return "ok", largest, ""


def _check_gradient(trial: ScoreTrial) -> CheckResult:
    """The gradient by the logits at temperature 0.7: (1 − softmax) / T at the token."""
    logits, tokens = made_logits()
    weights = torch.linspace(0.5, 2.0, ROWS * (WIDTH - 1), dtype=torch.float64).reshape(ROWS, WIDTH - 1)
    gradients = []
    for compute in (trial.run, reference_scores):
        leaf = logits.clone().requires_grad_()
        scores = compute(leaf, tokens, TEMPERATURES[0]).logprobs
        if not scores.requires_grad:
            return "fails", None, "no gradient reaches the logits"
        gradients.append(torch.autograd.grad((scores * weights).sum(), leaf)[0])
    return _judged(gradients[0], gradients[1], "is not (1[v = token] − softmax(z / T)) / T")


def _check_extremes(trial: ScoreTrial) -> CheckResult:
    """Logits of 10,000, whose exponential overflows."""
    logits, tokens = made_logits()
    far = logits * 2500.0
    expected = far[:, :-1].log_softmax(dim=-1).gather(2, tokens[:, 1:, None]).squeeze(2)
    found = trial.run(far, tokens).logprobs
    return _judged(found, expected, "large logits overflow or are clipped")


def _check_impossible_tokens(trial: ScoreTrial) -> CheckResult:
    """Another token's logit of −inf: score and gradient stay finite."""
    logits, tokens = made_logits()
    others = (tokens[:, 1:] + 1) % VOCABULARY
    cut = logits.clone()
    cut[:, :-1] = cut[:, :-1].scatter(2, others[..., None], float("-inf"))
    leaf = cut.requires_grad_()
    scores = trial.run(leaf, tokens).logprobs
    expected = cut[:, :-1].log_softmax(dim=-1).gather(2, tokens[:, 1:, None]).squeeze(2)
    if not bool(scores.isfinite().all()):
        return "fails", None, "an impossible token makes other scores NaN or infinite"
    if scores.requires_grad:
        gradient = torch.autograd.grad(scores.sum(), leaf)[0]
        if not bool(gradient.isfinite().all()):
            return "fails", None, "an impossible token makes the gradient NaN"
    return _judged(scores.detach(), expected.detach(), "an impossible token changes other scores wrongly")


def _check_row_order(trial: ScoreTrial) -> CheckResult:
    """The order of the rows."""
    logits, tokens = made_logits()
    order = [2, 0, 1]
    found = trial.run(logits[order], tokens[order], TEMPERATURES[0]).logprobs
    return _judged(found, trial.run(logits, tokens, TEMPERATURES[0]).logprobs[order], "other rows change the result")


def _check_square(trial: ScoreTrial) -> CheckResult:
    """Equal numbers of rows, tokens and vocabulary entries."""
    logits, tokens = made_logits(VOCABULARY, VOCABULARY)
    found = trial.run(logits, tokens, TEMPERATURES[0]).logprobs
    return _judged(found, reference_scores(logits, tokens, TEMPERATURES[0]).logprobs, "wrong result for B = T = V")


def _check_entropy(trial: ScoreTrial) -> CheckResult:
    """Entropy at temperature 0.7, if returned."""
    logits, tokens = made_logits()
    found = trial.run(logits, tokens, TEMPERATURES[0]).entropy
    if found is None:
        return "ok", None, "not returned"
    expected = reference_scores(logits, tokens, TEMPERATURES[0]).entropy
    assert expected is not None, "the reference has an entropy"
    return _judged(found, expected, "is not the entropy of softmax(z / T)")


def _check_entropy_gradient(trial: ScoreTrial) -> CheckResult:
    """Entropy gradient, as used by an entropy bonus."""
    logits, tokens = made_logits()
    gradients = []
    for compute in (trial.run, reference_scores):
        leaf = logits.clone().requires_grad_()
        entropy = compute(leaf, tokens, TEMPERATURES[0]).entropy
        if entropy is None:
            return "ok", None, "not returned"
        if not entropy.requires_grad:
            return "convention", None, "the entropy has no gradient: usable as a metric, not as a bonus"
        gradients.append(torch.autograd.grad(entropy.sum(), leaf)[0])
    return _judged(gradients[0], gradients[1], "wrong entropy gradient")


def _check_arguments(trial: ScoreTrial) -> CheckResult:
    """Tokens and temperature are used."""
    logits, tokens = made_logits()
    plain = trial.run(logits, tokens).logprobs
    if largest_gap(trial.run(logits, tokens, TEMPERATURES[1]).logprobs, plain) == 0.0:
        return "fails", None, "temperature is not used"
    if largest_gap(trial.run(logits, (tokens + 1) % VOCABULARY).logprobs, plain) == 0.0:
        return "fails", None, "tokens is not used"
    if largest_gap(trial.run(logits.flip(2), tokens).logprobs, plain) == 0.0:
        return "fails", None, "logits is not used"
    return "ok", None, ""


CHECKS: dict[str, Callable[[ScoreTrial], CheckResult]] = {
    "value": _check_value,
    "alignment": _check_alignment,
    "temperature": _check_temperature,
    "gradient": _check_gradient,
    "extremes": _check_extremes,
    "impossible_tokens": _check_impossible_tokens,
    "row_order": _check_row_order,
    "square": _check_square,
    "entropy": _check_entropy,
    "entropy_gradient": _check_entropy_gradient,
    "arguments": _check_arguments,
}


def check_scores(function: Score) -> Iterator[Finding]:
    """Yield findings for a function of logits, tokens and a temperature."""
    yield from run_checks("score", "logits", CHECKS, ScoreTrial(function))
