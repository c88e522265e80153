"""Checks of rows made of prompts and answers: which tokens are there, and which are trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from posttrain.conformance.findings import BadResult, CheckResult, Declined, Finding, describe, run_checks
from posttrain.conformance.loss_calls import call_safely

RowsFunction = Callable[[Sequence[Sequence[int]], Sequence[Sequence[int]], int, int], Any]
PAD, END = 0, 9
# Four rows: a finished answer, a longer one, a truncated one (without end token), and one consisting of the end token.
PROMPTS = [[1, 2, 3], [4], [5, 6], [7, 8, 1, 2, 3]]
ANSWERS = [[3, 4, END], [1, 2, 3, 4, 5, END], [6, 7, 8], [END]]


@dataclass(frozen=True, slots=True)
class RowsTrial:
    """A row-building function under test."""

    function: RowsFunction

    def run(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], pad: int = PAD, end: int = END
    ) -> tuple[Tensor, Tensor]:
        """Return tokens ``int64 [B, T]`` and mask ``bool [B, T]``."""
        returned = call_safely(self.function, [list(one) for one in prompts], [list(one) for one in answers], pad, end)
        if returned is NotImplemented:
            raise Declined("not offered")
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise BadResult(f"returned {describe(returned)}. Return two tensors: tokens and mask, both [B, T]")
        tokens, mask = returned
        for one in (tokens, mask):
            if not isinstance(one, Tensor) or one.ndim != 2 or one.shape[0] != len(prompts):
                raise BadResult(
                    f"returned {describe(one)}. Return two tensors: tokens and mask, both [{len(prompts)}, T]"
                )
        if tokens.shape != mask.shape:
            raise BadResult(f"returned tokens of shape {tuple(tokens.shape)} with a mask of {tuple(mask.shape)}")
        if tokens.is_floating_point():
            raise BadResult(f"returned tokens as {str(tokens.dtype).removeprefix('torch.')}. Return integers")
        if bool(((mask != 0) & (mask != 1)).any()):
            raise BadResult("returned a mask with values besides 0 and 1. Return True for trained tokens")
        return tokens.long(), mask != 0


def _wrong_row(trial: RowsTrial, answers: Sequence[Sequence[int]], pad: int, end: int) -> str:
    """Describe the first row with wrong trained tokens, or return nothing."""
    tokens, mask = trial.run(PROMPTS, answers, pad, end)
    for number, answer in enumerate(answers):
        trained = tokens[number][mask[number]].tolist()
        if trained != list(answer):
            return f"row {number} trains {trained}, but its answer is {list(answer)}"
    return ""


def _judged(wrong: str) -> CheckResult:
    if wrong:
        return "fails", None, wrong
    return "ok", None, ""


def _check_trained_tokens(trial: RowsTrial) -> CheckResult:
    """Exactly the answer with its end token is trained."""
    return _judged(_wrong_row(trial, ANSWERS, PAD, END))


def _check_prompt(trial: RowsTrial) -> CheckResult:
    """The full prompt precedes the answer."""
    tokens, mask = trial.run(PROMPTS, ANSWERS)
    for number, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
        places = mask[number].nonzero().flatten().tolist()
        first = min(places, default=tokens.shape[1])
        before = tokens[number, :first].tolist()[-len(prompt) :]
        if before != prompt:
            return "fails", None, f"row {number} has {before} before its answer {answer}, but the prompt is {prompt}"
    return "ok", None, ""


def _check_pad_is_end(trial: RowsTrial) -> CheckResult:
    """Pad token equal to end token, as in many models: the answer's end is trained, padding is not."""
    return _judged(_wrong_row(trial, ANSWERS, END, END))


def _check_pad_inside(trial: RowsTrial) -> CheckResult:
    """An answer containing the pad token."""
    answers = [[3, PAD, 4, END], *ANSWERS[1:]]
    return _judged(_wrong_row(trial, answers, PAD, END))


def _check_cut_off(trial: RowsTrial) -> CheckResult:
    """Truncated answers get no end token."""
    answers = [[3, 4], [1, 2, 3, 4, 5], [6, 7, 8], [2]]
    return _judged(_wrong_row(trial, answers, PAD, END))


def _check_end_inside(trial: RowsTrial) -> CheckResult:
    """Multi-turn answers with end tokens inside."""
    answers = [[3, END, 4, END], *ANSWERS[1:]]
    return _judged(_wrong_row(trial, answers, PAD, END))


def _check_padding(trial: RowsTrial) -> CheckResult:
    """Everything besides prompt and answer is the pad token."""
    tokens = trial.run(PROMPTS, ANSWERS, 11)[0]
    for number, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
        num_pads = int((tokens[number] == 11).sum())
        if num_pads != tokens.shape[1] - len(prompt) - len(answer):
            return (
                "fails",
                None,
                f"row {number} has {num_pads} pad tokens, {len(prompt)} prompt tokens and {len(answer)} answer tokens",
            )
    return "ok", None, ""


def _check_row_order(trial: RowsTrial) -> CheckResult:
    """Rows keep the order of prompts."""
    order = [2, 0, 3, 1]
    tokens, mask = trial.run([PROMPTS[row] for row in order], [ANSWERS[row] for row in order])
    for place, row in enumerate(order):
        if tokens[place][mask[place]].tolist() != ANSWERS[row]:
            return "fails", None, "rows are reordered, or depend on other rows"
    return "ok", None, ""


def _check_single_row(trial: RowsTrial) -> CheckResult:
    """One row by itself."""
    tokens, mask = trial.run(PROMPTS[:1], ANSWERS[:1])
    trained = tokens[0][mask[0]].tolist()
    if trained != ANSWERS[0]:
        return "fails", None, f"trains {trained}, but the answer is {ANSWERS[0]}"
    return "ok", None, ""


def _check_first_token(trial: RowsTrial) -> CheckResult:
    """A row's first token cannot be predicted, so it is never trained."""
    mask = trial.run(PROMPTS, ANSWERS)[1]
    if bool(mask[:, 0].any()):
        return "fails", None, "a row's first token is trained"
    return "ok", None, ""


CHECKS: dict[str, Callable[[RowsTrial], CheckResult]] = {
    "trained_tokens": _check_trained_tokens,
    "prompt": _check_prompt,
    "pad_is_end": _check_pad_is_end,
    "pad_inside": _check_pad_inside,
    "cut_off": _check_cut_off,
    "end_inside": _check_end_inside,
    "padding": _check_padding,
    "row_order": _check_row_order,
    "single_row": _check_single_row,
    "first_token": _check_first_token,
}


def check_rows(function: RowsFunction) -> Iterator[Finding]:
    """Yield the findings about a function that makes rows."""
    yield from run_checks("rows", "prompts and answers", CHECKS, RowsTrial(function))
