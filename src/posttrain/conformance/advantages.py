"""Checks of advantages: identify the formula, and test invariance to group order and group sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.conformance.findings import (
    BadResult,
    CheckResult,
    Finding,
    Status,
    check_tensor,
    in_precision,
    largest_gap,
    limit_for,
    run_checks,
)
from posttrain.conformance.loss_calls import call_safely

Advantages = Callable[[Tensor, Tensor], Any]
EPSILONS = (0.0, 1e-8, 1e-6, 1e-5, 1e-4)


@dataclass(frozen=True, slots=True)
class AdvantageFormula:
    """A formula mapping each group's rewards to advantages. ``is_local``: groups are treated independently."""

    name: str
    compute: Callable[[list[Tensor]], list[Tensor]]
    status: Status = "ok"
    is_local: bool = True


def _centered(groups: list[Tensor]) -> list[Tensor]:
    return [one - one.mean() for one in groups]


def _raw(groups: list[Tensor]) -> list[Tensor]:
    return [one.clone() for one in groups]


def _leave_one_out(groups: list[Tensor]) -> list[Tensor]:
    return [(one - one.mean()) * len(one) / max(1, len(one) - 1) for one in groups]


def _mean_scaled(groups: list[Tensor]) -> list[Tensor]:
    return [(one - one.mean()) / one.mean() if float(one.mean()) > 0 else torch.zeros_like(one) for one in groups]


def _normalized(correction: int, epsilon: float) -> Callable[[list[Tensor]], list[Tensor]]:
    def compute(groups: list[Tensor]) -> list[Tensor]:
        return [_divided(one - one.mean(), one, correction, epsilon) for one in groups]

    return compute


def _batch_scaled(correction: int, epsilon: float, *, by_group: bool) -> Callable[[list[Tensor]], list[Tensor]]:
    def compute(groups: list[Tensor]) -> list[Tensor]:
        rewards = torch.cat(groups)
        centred = [one - one.mean() if by_group else one - rewards.mean() for one in groups]
        return [_divided(one, rewards, correction, epsilon) for one in centred]

    return compute


def _batch_normalized_groups(epsilon: float) -> Callable[[list[Tensor]], list[Tensor]]:
    def compute(groups: list[Tensor]) -> list[Tensor]:
        centred = _centered(groups)
        return [_divided(one, torch.cat(centred), 0, epsilon) for one in centred]

    return compute


def _divided(centred: Tensor, rewards: Tensor, correction: int, epsilon: float) -> Tensor:
    if len(rewards) < 2 or float(rewards.amax() - rewards.amin()) == 0.0:
        return torch.zeros_like(centred)
    return centred / (rewards.std(correction=correction) + epsilon)


def known_forms() -> list[AdvantageFormula]:
    """List known formulas, published ones before variants."""
    forms = [
        AdvantageFormula("centered", _centered),
        AdvantageFormula("leave_one_out", _leave_one_out),
        AdvantageFormula("mean_scaled", _mean_scaled),
        AdvantageFormula("raw", _raw),
    ]
    for correction in (1, 0):
        for epsilon in EPSILONS:
            about = f"ddof {correction}, ε {epsilon:g}"
            status: Status = "ok" if correction == 1 and epsilon == 1e-4 else "convention"
            forms.append(AdvantageFormula(f"normalized, std with {about}", _normalized(correction, epsilon), status))
            compute = _batch_scaled(correction, epsilon, by_group=True)
            forms.append(AdvantageFormula(f"group mean, std of the batch with {about}", compute, "convention", False))
            compute = _batch_scaled(correction, epsilon, by_group=False)
            forms.append(AdvantageFormula(f"batch_normalized, std with {about}", compute, "convention", False))
    for epsilon in EPSILONS:
        compute = _batch_normalized_groups(epsilon)
        forms.append(AdvantageFormula(f"batch_normalized after the group mean, ε {epsilon:g}", compute, "ok", False))
    return forms


def _apply(form: AdvantageFormula, rewards: Tensor, group: Tensor) -> Tensor:
    result = torch.empty_like(rewards)
    places = [(group == number).nonzero().flatten() for number in group.unique()]
    for rows, values in zip(places, form.compute([rewards[rows] for rows in places]), strict=True):
        result[rows] = values
    return result


@dataclass(slots=True)
class AdvantagesTrial:
    """Advantages under test, with the identified formula."""

    function: Advantages
    form: AdvantageFormula | None = None

    def run(self, rewards: Sequence[float], group: Sequence[int]) -> Tensor:
        """Call the function under test."""
        given = torch.tensor(list(rewards), dtype=torch.float64)
        numbers = torch.tensor(list(group))
        returned = call_safely(self.function, given, numbers)
        return check_tensor(returned, (len(rewards),), f"one number per reward, a tensor of shape ({len(rewards)},)")

    def expected(self, rewards: Sequence[float], group: Sequence[int]) -> Tensor:
        """Apply the identified formula."""
        assert self.form is not None, "a check that asks for the formula runs after it was found"
        return _apply(self.form, torch.tensor(list(rewards), dtype=torch.float64), torch.tensor(list(group)))


REWARDS = [1.0, 0.0, 0.25, 2.0, 3.5, 0.5, 1.5, 0.6]
GROUP = [0, 0, 0, 0, 1, 1, 1, 1]


def _judged(found: Tensor, expected: Tensor, wrong: str) -> CheckResult:
    gap = largest_gap(found, expected)
    return ("ok", gap, "") if gap <= limit_for(found) else ("fails", gap, wrong)


def _check_formula(trial: AdvantagesTrial) -> CheckResult:
    """Two groups of four match a known formula."""
    found = trial.run(REWARDS, GROUP)
    gaps = []
    for form in known_forms():
        trial.form = form
        gap = largest_gap(found, trial.expected(REWARDS, GROUP))
        if gap <= limit_for(found):
            return in_precision((form.status, gap, form.name), found)
        gaps.append((gap, form.name))
    trial.form = None
    gap, nearest = min(gaps)
    return "fails", gap, f"no known formula; the nearest is {nearest}"


def _check_equal_rewards(trial: AdvantagesTrial) -> CheckResult:
    """A constant group whose mean differs in the last bit, next to a normal group."""
    rewards = [0.1] * 6 + [1.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    group = [0] * 6 + [1] * 6
    found = trial.run(rewards, group)
    if not bool(found.isfinite().all()):
        return "fails", None, "a group of equal rewards gives NaN or infinity"
    if trial.form is None:
        return "ok", None, "no formula to compare with"
    gap = largest_gap(found, trial.expected(rewards, group))
    return ("ok", gap, "") if gap <= 1e-6 else ("fails", gap, "a group of equal rewards gets wrong advantages")


def _check_interleaved(trial: AdvantagesTrial) -> CheckResult:
    """Two groups with interleaved rows."""
    order = [0, 4, 5, 1, 6, 2, 3, 7]
    found = trial.run([REWARDS[row] for row in order], [GROUP[row] for row in order])
    return _judged(found, trial.run(REWARDS, GROUP)[order], "assumes adjacent rows form groups and ignores group")


def _check_group_numbers(trial: AdvantagesTrial) -> CheckResult:
    """Numbers of groups that do not begin at 0, are not consecutive and fall."""
    numbers = [907 if number == 0 else 3 for number in GROUP]
    found = trial.run(REWARDS, numbers)
    return _judged(found, trial.run(REWARDS, GROUP), "group numbering changes the result")


def _check_uneven_groups(trial: AdvantagesTrial) -> CheckResult:
    """Groups of two, three and five."""
    rewards = [1.0, 0.0, 0.5, 2.0, 0.0, 1.0, 4.0, 0.5, 0.25, 3.0]
    group = [0, 0, 1, 1, 1, 2, 2, 2, 2, 2]
    try:
        found = trial.run(rewards, group)
    except BadResult as error:
        return "convention", None, f"unequal group sizes are refused: {error}"
    if trial.form is None:
        return "ok", None, "no formula to compare with"
    return _judged(found, trial.expected(rewards, group), "unequal group sizes change the formula")


def _check_other_groups(trial: AdvantagesTrial) -> CheckResult:
    """Changing rewards in a different group."""
    if trial.form is not None and not trial.form.is_local:
        return "ok", None, "the formula reads the whole batch"
    others = [*REWARDS[:4], 30.0, 0.5, 15.0, 7.5]
    return _judged(trial.run(others, GROUP)[:4], trial.run(REWARDS, GROUP)[:4], "rewards in one group change others")


def _check_single_answer(trial: AdvantagesTrial) -> CheckResult:
    """A group of one next to a group of three."""
    try:
        found = trial.run([5.0, 1.0, 0.0, 0.0], [0, 1, 1, 1])
    except BadResult as error:
        return "convention", None, f"a group of one answer is refused: {error}"
    if not bool(found.isfinite().all()):
        return "fails", None, "a group of one answer gives NaN or infinity"
    return "ok", None, ""


def _check_nan_reward(trial: AdvantagesTrial) -> CheckResult:
    """A NaN reward in one group leaves the other group unchanged."""
    if trial.form is not None and not trial.form.is_local:
        return "ok", None, "the formula reads the whole batch"
    found = trial.run([float("nan"), *REWARDS[1:]], GROUP)
    return _judged(found[4:], trial.run(REWARDS, GROUP)[4:], "a NaN reward changes other groups")


def _check_arguments(trial: AdvantagesTrial) -> CheckResult:
    """Both arguments are used."""
    plain = trial.run(REWARDS, GROUP)
    if largest_gap(trial.run([reward * 2 + row for row, reward in enumerate(REWARDS)], GROUP), plain) == 0.0:
        return "fails", None, "rewards is not used"
    reads_groups = trial.form is None or trial.form.name != "raw"
    mixed = [0, 1, 0, 1, 0, 1, 0, 1]
    moves = trial.form is None or largest_gap(trial.expected(REWARDS, mixed), trial.expected(REWARDS, GROUP)) > 0.0
    if reads_groups and moves and largest_gap(trial.run(REWARDS, mixed), plain) == 0.0:
        return "fails", None, "group is not used"
    return "ok", None, ""


CHECKS: dict[str, Callable[[AdvantagesTrial], CheckResult]] = {
    "formula": _check_formula,
    "equal_rewards": _check_equal_rewards,
    "interleaved": _check_interleaved,
    "group_numbers": _check_group_numbers,
    "uneven_groups": _check_uneven_groups,
    "other_groups": _check_other_groups,
    "single_answer": _check_single_answer,
    "nan_reward": _check_nan_reward,
    "arguments": _check_arguments,
}


def check_advantages(function: Advantages) -> Iterator[Finding]:
    """Yield findings for a function of rewards and groups."""
    yield from run_checks("advantages", "rewards", CHECKS, AdvantagesTrial(function))
