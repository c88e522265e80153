"""Checks of a loss: its formula against the reference, and invariance to splits, order and padding.

``value`` to ``zero_advantages`` compare with the reference on equal-length rows in a single micro-batch, where all
aggregations are plain means. Other checks compare the loss with itself, so that each isolates one kind of error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from posttrain.conformance.cases import (
    AGGREGATIONS,
    OBJECTIVES,
    Config,
    Fields,
    FieldTensors,
    MicroBatches,
    acting_options,
    all_configs,
    made_batch,
    read_fields,
    select_rows,
    widened,
    with_empty_rows,
    with_hole,
    with_padding,
)
from posttrain.conformance.findings import (
    MIXED,
    MIXED_LIMIT,
    CheckResult,
    Finding,
    in_precision,
    largest_gap,
    limit_for,
    run_checks,
)
from posttrain.conformance.loss_calls import LossFunction, LossResult, run_loss, run_reference

# Implausible values at padding, to detect if any is read.
STRANGE = 3.0
MEAN_OF_MEANS = "mean of micro-batch means"
FIELD_SHIFT, OPTION_FACTOR = 0.05, 1.3


@dataclass(frozen=True, slots=True)
class LossTrial:
    """A loss under test in one configuration, with batches shared by its checks."""

    loss: LossFunction
    config: Config

    @property
    def each(self) -> int:
        """Rows of a unit."""
        return OBJECTIVES[self.config.objective].rows_per_unit

    def even(self) -> Fields:
        """Four units, equally long."""
        return made_batch([4] * (4 * self.each))

    def uneven(self) -> Fields:
        """Four units, the first two short."""
        if self.each == 2:
            return made_batch([1, 2, 2, 1, 7, 5, 6, 8])
        return made_batch([1, 2, 7, 5])

    def units(self, *numbers: int) -> list[int]:
        """Row indices of some units."""
        return [unit * self.each + row for unit in numbers for row in range(self.each)]

    def run(self, batch: FieldTensors, micro_batches: MicroBatches | None = None, **changed: object) -> LossResult:
        """Run the loss; ``changed`` are options."""
        config = replace(self.config, **changed)  # type: ignore[arg-type]
        return run_loss(self.loss, batch, config, micro_batches)


def same(found: LossResult, expected: LossResult) -> tuple[bool, float]:
    """Check if value and gradient agree up to rounding, and compute the largest gap."""
    of_value = largest_gap(found.value.reshape(1), expected.value.reshape(1))
    gap = max(of_value, largest_gap(found.gradient, expected.gradient))
    return gap <= limit_for(found.value), gap


def judged(found: LossResult, expected: LossResult, wrong: str) -> CheckResult:
    """Build ``ok``, or ``fails`` with a note."""
    is_same, gap = same(found, expected)
    if is_same:
        return "ok", gap, ""
    return failure(gap, wrong)


def failure(gap: float, wrong: str) -> CheckResult:
    """Build ``fails`` with a note; float32-sized gaps count as a convention."""
    if gap <= MIXED_LIMIT:
        return "convention", gap, MIXED
    return "fails", gap, wrong


def _check_value(trial: LossTrial) -> CheckResult:
    """Value on equal-length rows."""
    batch = trial.even()
    found = trial.run(batch).value
    expected = run_reference(batch, trial.config).value
    gap = largest_gap(found.reshape(1), expected.reshape(1))
    if gap <= limit_for(found):
        return in_precision(("ok", gap, ""), found)
    return failure(gap, f"value {float(found):.6g}, expected {float(expected):.6g}")


def _check_gradient(trial: LossTrial) -> CheckResult:
    """Its gradient, the part that trains."""
    batch = trial.even()
    found = trial.run(batch)
    expected = run_reference(batch, trial.config)
    gap = largest_gap(found.gradient, expected.gradient)
    if gap <= limit_for(found.value):
        return "ok", gap, ""
    return failure(gap, _explain_gradient(found, expected))


def _explain_gradient(found: LossResult, expected: LossResult) -> str:
    size = float(found.gradient.norm())
    wanted = float(expected.gradient.norm())
    if size == 0.0:
        return "no gradient reaches the log-probabilities"
    for name, one in expected.gradients.items():
        if bool((one != 0).any()) and not bool((found.gradients[name] != 0).any()):
            return f"no gradient reaches {name}"
    return f"gradient norm {size:.6g}, expected {wanted:.6g}"


def _check_direction(trial: LossTrial) -> CheckResult:
    """A gradient step improves the objective."""
    batch = trial.even()
    found = trial.run(batch).gradients
    expected = run_reference(batch, trial.config).gradients
    for name, one in expected.items():
        product = float((found[name] * one).sum())
        if bool((one != 0).any()) and not product > 0.0:
            return "fails", None, f"the gradient with respect to {name} opposes the equation"
    return "ok", None, ""


def _check_on_policy(trial: LossTrial) -> CheckResult:
    """With sampling weights, where every ratio is 1, the gradient equals REINFORCE's."""
    batch = trial.even()
    batch["old_logprobs"] = batch["logprobs"].clone()
    batch["sampler_logprobs"] = batch["logprobs"].clone()
    expected = run_reference(batch, trial.config)
    return judged(trial.run(batch), expected, "for identical policies the gradient is not −A / N per token")


def _check_zero_advantages(trial: LossTrial) -> CheckResult:
    """Zero advantages give no gradient."""
    batch = trial.even()
    batch["advantages"] = torch.zeros_like(batch["advantages"])
    batch["row_advantages"] = torch.zeros_like(batch["row_advantages"])
    return judged(trial.run(batch), run_reference(batch, trial.config), "zero advantages give a gradient")


def _check_lengths(trial: LossTrial) -> CheckResult:
    """Unequal lengths: the loss's denominator."""
    batch = trial.uneven()
    found = trial.run(batch)
    expected = run_reference(batch, trial.config)
    is_same, gap = same(found, expected)
    if is_same:
        return "ok", gap, ""
    for name in AGGREGATIONS:
        if trial.each == 1 and same(found, run_reference(batch, replace(trial.config, aggregation=name)))[0]:
            return "convention", gap, f"{name} instead of {trial.config.aggregation}"
    return failure(gap, "rows of unequal length get wrong weights")


def _compare_split(trial: LossTrial, batch: FieldTensors, split: MicroBatches, accumulation: int) -> CheckResult:
    whole = trial.run(batch, accumulation=1)
    found = trial.run(batch, split, accumulation=accumulation)
    is_same, gap = same(found, whole)
    if is_same:
        return "ok", gap, ""
    means = _mean_of_means(trial, batch, split)
    if same(found, means)[0]:
        return "convention", gap, MEAN_OF_MEANS
    by_means = _terms_by_means(found, whole, means)
    if by_means:
        return "convention", gap, f"{MEAN_OF_MEANS} for {', '.join(by_means)}"
    return failure(gap, f"the gradient is {_ratio(found, whole)} times the full-batch gradient")


def _terms_by_means(found: LossResult, whole: LossResult, means: LossResult) -> list[str]:
    """Leaves whose gradient is a mean of micro-batch means, provided all others match the whole batch."""
    limit = limit_for(found.value)
    named = []
    for name, gradient in found.gradients.items():
        if largest_gap(gradient, whole.gradients[name]) <= limit:
            continue
        if largest_gap(gradient, means.gradients[name]) > limit:
            return []
        named.append(name)
    return named


def _mean_of_means(trial: LossTrial, batch: FieldTensors, split: MicroBatches) -> LossResult:
    """Mean of separate micro-batch losses, with gradients over the whole batch."""
    total: LossResult | None = None
    for rows in split:
        own = trial.run(select_rows(batch, rows), accumulation=1)
        spread = {}
        for name, one in own.gradients.items():
            spread[name] = torch.zeros_like(batch[name])
            spread[name][list(rows)] = one
        part = LossResult(own.value / len(split), {name: one / len(split) for name, one in spread.items()})
        if total is None:
            total = part
        else:
            total = total + part
    assert total is not None, "a split has micro-batches"
    return total


def _ratio(found: LossResult, whole: LossResult) -> str:
    wanted = float(whole.gradient.norm())
    if wanted == 0.0:
        return "many"
    return f"{float(found.gradient.norm()) / wanted:.3g}"


def _check_equal_split(trial: LossTrial) -> CheckResult:
    """Two micro-batches with equally many rows but different token counts."""
    split = [trial.units(0, 1), trial.units(2, 3)]
    return _compare_split(trial, trial.uneven(), split, len(split))


def _check_unequal_split(trial: LossTrial) -> CheckResult:
    """Three micro-batches of different numbers of rows."""
    split = [trial.units(0), trial.units(1, 2), trial.units(3)]
    return _compare_split(trial, trial.uneven(), split, len(split))


def _check_last_window(trial: LossTrial) -> CheckResult:
    """An epoch's last step: two micro-batches although four are configured."""
    split = [trial.units(0, 1), trial.units(2, 3)]
    return _compare_split(trial, trial.even(), split, 4)


def _check_row_order(trial: LossTrial) -> CheckResult:
    """The order of the rows."""
    batch = trial.uneven()
    order = trial.units(2, 0, 3, 1)
    found = trial.run(select_rows(batch, order))
    return judged(found, trial.run(batch).of_rows(order), "row order changes the result")


def _check_padding(trial: LossTrial) -> CheckResult:
    """Arbitrary values at untrained positions."""
    batch = trial.uneven()
    found = trial.run(with_padding(batch, STRANGE))
    return judged(found, trial.run(batch), "values at masked positions change the result")


def _check_nan_padding(trial: LossTrial) -> CheckResult:
    """NaN, and log-probabilities of −1e10 and −inf, at untrained positions."""
    batch = trial.uneven()
    expected = trial.run(batch)
    worst_gap = 0.0
    for content in (-1e10, float("-inf"), float("nan")):
        is_same, gap = same(trial.run(with_padding(batch, content)), expected)
        if not is_same:
            return failure(gap, f"{content:g} at a masked position changes the result")
        worst_gap = max(worst_gap, gap)
    return "ok", worst_gap, ""


def _check_width(trial: LossTrial) -> CheckResult:
    """More padding behind all rows."""
    batch = trial.uneven()
    width = batch["mask"].shape[1]
    found = trial.run(widened(batch, 3)).of_columns(range(width))
    return judged(found, trial.run(batch), "extra padding changes the result")


def _check_hole(trial: LossTrial) -> CheckResult:
    """Untrained tokens between trained ones, such as tool output."""
    batch = trial.even()
    found = trial.run(with_hole(batch, 2, 3)).of_columns([0, 1, 5, 6])
    return judged(found, trial.run(batch), "untrained tokens between trained ones change the result")


def _check_empty_row(trial: LossTrial) -> CheckResult:
    """A fully masked row."""
    batch = trial.uneven()
    rows = batch["mask"].shape[0]
    expected = trial.run(batch)
    found = trial.run(with_empty_rows(batch)).of_rows(range(rows))
    is_same, gap = same(found, expected)
    if is_same:
        return "ok", gap, ""
    if same(found, expected.scaled(rows / (rows + 1)))[0]:
        return "convention", gap, "fully masked rows count in the divisor"
    return failure(gap, "a fully masked row changes the result")


def _check_square(trial: LossTrial) -> CheckResult:
    """As many rows as columns, where per-row values can silently broadcast along the wrong axis."""
    rows = 4 * trial.each
    batch = made_batch([rows - 1, rows, *([2, 3] * rows)][:rows], width=rows)
    expected = trial.run(widened(batch, 1)).of_columns(range(rows))
    return judged(trial.run(batch), expected, "wrong result for as many rows as tokens")


def _check_arguments(trial: LossTrial) -> CheckResult:
    """Every argument is used: the micro-batches, the mask and each batch field that the equation reads."""
    batch = trial.even()
    whole = trial.run(batch)
    part = trial.run(batch, [trial.units(0, 1)], accumulation=1)
    rest = part.of_rows(trial.units(2, 3))
    if bool((rest.gradient != 0).any()):
        return "fails", None, "micro_batches is not used: rows outside every micro-batch get gradients"
    changed = dict(batch) | {"mask": batch["mask"].clone()}
    changed["mask"][:, 3] = False
    if same(trial.run(changed), whole)[0]:
        return "fails", None, "mask is not used"
    for name in read_fields(trial.config):
        shifted = dict(batch) | {name: batch[name] * (1.0 + FIELD_SHIFT)}
        if name == "advantages":
            shifted["row_advantages"] = batch["row_advantages"] * (1.0 + FIELD_SHIFT)
        if same(trial.run(shifted), whole)[0]:
            return "fails", None, f"{name} is not used"
    return "ok", None, ""


def _check_options(trial: LossTrial) -> CheckResult:
    """Every option acts as in the equation."""
    batch = trial.even()
    whole = trial.run(batch)
    largest = 0.0
    for name in acting_options(trial.config):
        value = getattr(trial.config, name)
        changed = value * OPTION_FACTOR
        if isinstance(value, int):
            changed = value * 2
        option: dict[str, Any] = {name: changed}
        found = trial.run(batch, **option)
        expected = run_reference(batch, replace(trial.config, **option))
        if same(found, whole)[0] and not same(expected, whole)[0]:
            return "fails", None, f"{name} has no effect"
        largest = max(largest, same(found, expected)[1])
        if not same(found, expected)[0]:
            return failure(largest, f"{name} deviates from the equation")
    return "ok", largest, ""


Check = Callable[[LossTrial], CheckResult]
CHECKS: dict[str, Check] = {
    "value": _check_value,
    "gradient": _check_gradient,
    "direction": _check_direction,
    "on_policy": _check_on_policy,
    "zero_advantages": _check_zero_advantages,
    "lengths": _check_lengths,
    "equal_split": _check_equal_split,
    "unequal_split": _check_unequal_split,
    "last_window": _check_last_window,
    "row_order": _check_row_order,
    "padding": _check_padding,
    "nan_padding": _check_nan_padding,
    "width": _check_width,
    "hole": _check_hole,
    "empty_row": _check_empty_row,
    "square": _check_square,
    "arguments": _check_arguments,
    "options": _check_options,
}
OF_POLICY_GRADIENTS = ("on_policy", "zero_advantages")
OF_SINGLE_ROWS = ("empty_row",)  # pairs with an empty answer are not tested


def checks_of(config: Config) -> list[str]:
    """List a configuration's checks in order."""
    about = OBJECTIVES[config.objective]
    left_out: set[str] = set()
    if not about.has_advantages:
        left_out.update(OF_POLICY_GRADIENTS)
    if config.kl_coef or config.entropy_coef:
        left_out.add("zero_advantages")
    if about.rows_per_unit == 2:
        left_out.update(OF_SINGLE_ROWS)
    if not acting_options(config):
        left_out.add("options")
    return [name for name in CHECKS if name not in left_out]


def check_losses(loss: LossFunction) -> Iterator[Finding]:
    """Yield findings for all supported configurations."""
    for config in all_configs():
        yield from check_loss(loss, config)


def check_loss(loss: LossFunction, config: Config) -> Iterator[Finding]:
    """Yield findings for one configuration."""
    checks = {name: CHECKS[name] for name in checks_of(config)}
    yield from run_checks("loss", config.label, checks, LossTrial(loss, config))
