"""Exercise list, and solution checks in a killable process (``graders.sandbox.workers``).

The file contains the user's own Python code, run at their request. It must define a function named after the exercise,
with the arguments of a case. Tensors are float64, masks bool. Shapes: B rows, T tokens, N prompts, G samples, P pairs.
"""

from __future__ import annotations

import copy
import io
import traceback
from contextlib import redirect_stdout
from typing import TypedDict

import torch
from torch import Tensor

from posttrain.commands.exercises import answers, policy_gradients
from posttrain.commands.exercises.exercise import Exercise, ReturnValue

EXERCISES = {
    "response_mask": answers.RESPONSE_MASK,
    "bradley_terry": answers.BRADLEY_TERRY,
    "policy_gradient_loss": policy_gradients.POLICY_GRADIENT_LOSS,
    "group_advantage": policy_gradients.GROUP_ADVANTAGE,
    "gae": policy_gradients.GAE,
    "clipped_surrogate": policy_gradients.CLIPPED_SURROGATE,
    "tagged_answer": answers.TAGGED_ANSWER,
    "token_tis": policy_gradients.TOKEN_TIS,
    "dpo": answers.DPO,
    "best_of_n": answers.BEST_OF_N,
    "kl_estimators": policy_gradients.KL_ESTIMATORS,
    "pass_at_k": answers.PASS_AT_K,
}

TOLERANCE = 1e-6
MAX_CHARS = 2000  # maximum characters of captured output


class FailedCode(Exception):
    """The user's code raised an error; the message includes error and location."""


class ExerciseFile(TypedDict):
    """Source code submitted for an exercise."""

    name: str
    path: str
    source: str


def check(submission: ExerciseFile) -> dict[str, str]:
    """Run a submission on all cases. Returns ``wrong`` (empty if correct) and the captured output as ``printed``."""
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            wrong = _find_fault(submission)
    except FailedCode as failure:
        wrong = str(failure)
    return {"wrong": wrong, "printed": printed.getvalue()[-MAX_CHARS:]}


def _find_fault(submission: ExerciseFile) -> str:
    name = submission["name"]
    path = submission["path"]
    exercise = EXERCISES[name]
    namespace = {"__name__": name, "__file__": path}
    try:
        exec(compile(submission["source"], path, "exec"), namespace)
    except Exception as error:
        raise FailedCode(f"the file does not run: {_describe(error, path)}") from error
    function = namespace.get(name)
    if not callable(function):
        return f"the file defines no function {name}; begin with `posttrain exercise show {name}`"
    faults = []
    given = list[object]()
    for number, (title, arguments) in enumerate(exercise.cases.items(), 1):
        place = f"case {number} ({title})"
        try:
            given.append(function(*copy.deepcopy(arguments)))
        except Exception as error:
            raise FailedCode(f"{place}: {name} raised {_describe(error, path)}") from error
        fault = differ(exercise.reference(*arguments), given[-1])
        if fault:
            faults.append(f"{place}: {fault}\ninputs: {', '.join(map(show_value, arguments))}")
    if not faults:
        return ""
    return _known_mistake(exercise, given) or faults[0]


def _known_mistake(exercise: Exercise, given: list[object]) -> str:
    """Find a known mistake that gives identical results on all cases; empty if unknown."""
    for message, mistake in exercise.mistakes.items():
        pairs = zip(exercise.cases.values(), given, strict=True)
        if not any(differ(mistake(*arguments), answer) for arguments, answer in pairs):
            return message
    return ""


def differ(expected: ReturnValue, given: object) -> str:
    """Describe a difference from the expected result; empty if equal."""
    if isinstance(expected, tuple):
        if not isinstance(given, tuple | list) or len(given) != len(expected):
            return f"a tuple of {len(expected)} tensors is expected, not {_kind(given)}"
        for number, (part, given_part) in enumerate(zip(expected, given, strict=True), 1):
            fault = differ(part, given_part)
            if fault:
                return f"value {number}: {fault}"
        return ""
    if expected is None or isinstance(expected, str):
        if type(given) is type(expected) and given == expected:
            return ""
        return f"expected {expected!r}, got {given!r}"
    wanted = torch.as_tensor(expected, dtype=torch.float64)
    try:
        got = torch.as_tensor(given, dtype=torch.float64).detach()
    except (TypeError, ValueError, RuntimeError):
        what = "a number"
        if wanted.ndim:
            what = "a tensor"
        return f"{what} is expected, not {_kind(given)}"
    if got.shape != wanted.shape:
        return f"shape {list(wanted.shape)} is expected, not {list(got.shape)}"
    is_close = torch.isclose(got, wanted, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
    if bool(is_close.all()):
        return ""
    where = ""
    if wanted.ndim:
        where = f" at {(~is_close).nonzero()[0].tolist()}"
    first_wanted = show_value(wanted[~is_close][0])
    first_got = show_value(got[~is_close][0])
    return f"expected {first_wanted}, got {first_got}{where}\nall expected: {show_value(wanted)}"


def show_value(value: object) -> str:
    """Format a value for display, with six digits per number."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, list):
        return f"[{', '.join(map(show_value, value))}]"
    if isinstance(value, float):
        return f"{value:.6g}"
    return repr(value)


def _kind(value: object) -> str:
    if value is None:
        return "None; is a `return` missing?"
    return type(value).__name__


def _describe(error: Exception, path: str) -> str:
    lines = []
    if isinstance(error, SyntaxError):
        lines = [error.lineno]
    lines += [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    where = ""
    if lines:
        where = f" (line {lines[-1]})"
    message = str(error)
    if isinstance(error, SyntaxError):
        message = error.msg
    if message:
        message = f": {message}"
    return f"{type(error).__name__}{message}{where}"
