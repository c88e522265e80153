"""Findings of checks, and how two results are compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

from posttrain.errors import PosttrainError

# Equal up to rounding in float64, and in float32 where a function computes in that.
LIMIT, SINGLE_LIMIT = 1e-9, 1e-4
# A larger gap than float64 rounds, and a smaller one than float32 does.
MIXED_LIMIT = 1e-7
MIXED = "rounds to float32 on the way"

# ``convention``: the field has two; ``fails``: it is neither; ``bad``: the function gave nothing to compare.
Status = Literal["ok", "convention", "fails", "bad"]


CheckResult = tuple[Status, float | None, str]  # status, gap and note of a check
TrialT = TypeVar("TrialT")


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check of a function.

    ``gap``: the largest difference that was compared, relative to the size of the numbers; None where there was none.
    ``note``: what is wrong, or the name of the convention.
    """

    function: str
    case: str
    check: str
    status: Status
    gap: float | None = None
    note: str = ""


class BadResult(PosttrainError):
    """A function under test raised, or returned nothing that can be compared."""


class Declined(PosttrainError):
    """A function under test returned ``NotImplemented``: it does not offer this."""


def largest_gap(found: Tensor | Sequence[Tensor], expected: Tensor | Sequence[Tensor]) -> float:
    """Return the largest difference, relative to the largest expected number if that exceeds 1; NaN is infinite."""
    if isinstance(found, Tensor) and isinstance(expected, Tensor):
        if found.numel() == 0:
            return 0.0
        difference = (found.double() - expected.double()).abs()
        size = max(1.0, float(expected.double().abs().amax()))
        largest = float(difference.amax()) / size
        return largest if math.isfinite(largest) else math.inf
    return max((largest_gap(a, b) for a, b in zip(found, expected, strict=True)), default=0.0)


def limit_for(*results: Tensor) -> float:
    """Return the largest gap that counts as rounding: larger where a result is in another precision than float64."""
    return LIMIT if all(one.dtype == torch.float64 for one in results) else SINGLE_LIMIT


def in_precision(answer: CheckResult, result: Tensor) -> CheckResult:
    """Return the answer of a first check; one that is right in another precision than float64 is a convention."""
    status, gap, note = answer
    if status == "fails" or result.dtype == torch.float64:
        return answer
    name = str(result.dtype).removeprefix("torch.")
    remark = f"returns {name} for float64, and is compared to {SINGLE_LIMIT:g}"
    return "convention", gap, f"{note}; {remark}" if note else remark


def describe(value: object) -> str:
    """Return what an adapter returned, in a few words."""
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
        raise BadResult(f"returned a tensor on {value.device}. Return it on the device of the arguments, cpu")
    if not value.is_floating_point():
        raise BadResult(f"returned {describe(value)}. Return floating numbers, float64 as the arguments")
    return value


def run_checks(
    function: str, case: str, checks: Mapping[str, Callable[[TrialT], CheckResult]], trial: TrialT
) -> Iterator[Finding]:
    """Yield what each check of a function finds; nothing where the first one is declined.

    The first finding is the last where the function gave nothing to compare.
    """
    for number, (name, check) in enumerate(checks.items()):
        try:
            status, gap, note = check(trial)
        except Declined as declined:
            if number == 0:
                return
            status, gap, note = "ok", None, str(declined)
        except BadResult as error:
            status, gap, note = "bad", None, str(error)
        yield Finding(function, case, name, status, gap, note)
        if number == 0 and status == "bad":
            return


def worst(findings: Sequence[Finding]) -> Status:
    """Return the gravest status."""
    statuses: Mapping[Status, int] = {"ok": 0, "convention": 1, "fails": 2, "bad": 3}
    return max((one.status for one in findings), key=statuses.__getitem__, default="ok")
