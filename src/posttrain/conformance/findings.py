"""Findings of checks, and how two results are compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

from posttrain.errors import PosttrainError
from posttrain.untrusted import harmless

# Tolerances: rounding in float64, and in float32 for functions that compute in it.
LIMIT, SINGLE_LIMIT = 1e-9, 1e-4
# A larger gap than float64 rounds, and a smaller one than float32 does.
MIXED_LIMIT = 1e-7
MIXED = "rounds to float32 internally"

# ``convention``: the field has two; ``fails``: it is neither; ``bad``: the function gave nothing to compare.
Status = Literal["ok", "convention", "fails", "bad"]
LONGEST_REASON = 300

CheckResult = tuple[Status, float | None, str]  # status, gap and note of a check
TrialT = TypeVar("TrialT")


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check.

    ``gap``: largest difference compared, relative to magnitude; None if nothing was compared. ``note``: the problem,
    or the convention's name.
    """

    function: str
    case: str
    check: str
    status: Status
    gap: float | None = None
    note: str = ""


class BadResult(PosttrainError):
    """The function under test raised, or returned something that cannot be compared."""


class Declined(PosttrainError):
    """The function under test returned ``NotImplemented``: unsupported."""


def largest_gap(found: Tensor | Sequence[Tensor], expected: Tensor | Sequence[Tensor]) -> float:
    """Largest difference, relative to the largest expected value if that exceeds 1. NaN counts as infinite."""
    if isinstance(found, Tensor) and isinstance(expected, Tensor):
        if found.numel() == 0:
            return 0.0
        difference = (found.double() - expected.double()).abs()
        size = max(1.0, float(expected.double().abs().amax()))
        largest = float(difference.amax()) / size
        if math.isfinite(largest):
            return largest
        return math.inf
    return max((largest_gap(a, b) for a, b in zip(found, expected, strict=True)), default=0.0)


def limit_for(*results: Tensor) -> float:
    """Largest gap attributed to rounding; larger if a result is not float64."""
    if all(one.dtype == torch.float64 for one in results):
        return LIMIT
    return SINGLE_LIMIT


def in_precision(answer: CheckResult, result: Tensor) -> CheckResult:
    """Judge a first check. Correct results at lower precision count as a convention."""
    status, gap, note = answer
    if status == "fails" or result.dtype == torch.float64:
        return answer
    name = str(result.dtype).removeprefix("torch.")
    remark = f"returns {name} for float64; tolerance {SINGLE_LIMIT:g}"
    if note:
        remark = f"{note}; {remark}"
    return "convention", gap, remark


def in_one_line(text: str) -> str:
    """Format what a function under test wrote as one line of at most ``LONGEST_REASON`` characters."""
    return " ".join(harmless(text).split())[:LONGEST_REASON]


def describe(value: object) -> str:
    """Summarize what an adapter returned."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}, {str(value.dtype).removeprefix('torch.')}"
    if value is None:
        return "nothing"
    return f"a {type(value).__name__}"


def check_tensor(value: object, shape: Sequence[int], wanted: str) -> Tensor:
    """Return a floating tensor of a shape on the CPU.

    Raises:
        Declined: it is ``NotImplemented``.
        BadResult: it is something else.
    """
    if value is NotImplemented:
        raise Declined("not offered")
    if not isinstance(value, Tensor) or tuple(value.shape) != tuple(shape):
        raise BadResult(f"returned {describe(value)}. Return {wanted}")
    if value.device.type != "cpu":
        raise BadResult(f"returned a tensor on {value.device}. Return it on cpu, like the arguments")
    if not value.is_floating_point():
        raise BadResult(f"returned {describe(value)}. Return floating-point numbers, float64 like the arguments")
    return value


def run_checks(
    function: str, case: str, checks: Mapping[str, Callable[[TrialT], CheckResult]], trial: TrialT
) -> Iterator[Finding]:
    """Yield findings for each check of a function. Nothing if the first check is declined.

    Stops after the first finding if the function returned nothing comparable.
    """
    for number, (name, check) in enumerate(checks.items()):
        try:
            result = check(trial)
        except Declined as declined:
            if number == 0:
                return
            result = ("ok", None, str(declined))
        except BadResult as error:
            result = ("bad", None, str(error))
        yield Finding(function, case, name, *result)
        if number == 0 and result[0] == "bad":
            return


def worst(findings: Sequence[Finding]) -> Status:
    """Most severe status."""
    statuses: Mapping[Status, int] = {"ok": 0, "convention": 1, "fails": 2, "bad": 3}
    return max((one.status for one in findings), key=statuses.__getitem__, default="ok")
