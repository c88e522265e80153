"""Mathematical answers: correct if equivalent to the gold answer, in any notation."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Annotated

from posttrain.errors import UsageError
from posttrain.graders.answers import parse_quantity, same_answer, same_quantity
from posttrain.graders.grading import Outcome, Submission, Verdict
from posttrain.graders.math.extraction import find_answer, is_bare, read_solution
from posttrain.graders.sandbox.workers import Limits, WorkerResult, count_cpus, shared_pool
from posttrain.graders.signs import fold_signs
from posttrain.registry import register
from posttrain.signatures import Range

COMPARE = "posttrain.graders.math.equality:compare_answers"
PARSERS = ("sympy", "latex2sympy2-extended")  # names on PyPI
MAX_ANSWER_CHARS = 1500  # longer answers are compared as text
MIN_SOLUTION_CHARS = 200  # for gold answers that are sentences
MAX_WORKERS = 4
WALL_FACTOR = 12  # wall-clock limit per item, as a multiple of CPU time


@register("grader", batched=True)
def math(
    submissions: Sequence[Submission],
    *,
    timeout_seconds: Annotated[float, Range(gt=0)] = 5.0,
    memory_megabytes: Annotated[int, Range(ge=64)] = 512,
    num_workers: Annotated[int, Range(ge=1)] | None = None,
    relative_tolerance: Annotated[float, Range(ge=0, lt=1)] = 0.0,
) -> list[Verdict]:
    """Correct if the answer is equivalent to the gold answer.

    Uses the answer found by the prompt template's tags or box. Otherwise searches text following the thinking for the
    last ``\\boxed{}``, "the answer is", a final formula or number (see ``graders.math.extraction``).

    Equal: numbers (2/4 = 1/2, .5 = 50%, 1,000 = 10^{3}, 2 1/2 = 5/2), expressions of equal value (√12 = 2√3, (r+5)^2
    = (r+5)(r+5)), sets and lists in any order, tuples and matrices in order, intervals with identical brackets (x
    \\in [1,2] = 1 \\le x \\le 2), equivalent equations, ``x = 3`` and ``3``, words regardless of case. A unit stated
    by only one side is forgiven. Not equal: different variables, brackets or units, digits with a different base,
    multiple answers where one is expected, approximate decimals (see ``relative_tolerance``).

    Cases beyond exact arithmetic go to killable worker processes. Answers that exceed time or memory limits give
    ``timeout`` or ``crash``; both count as incorrect.

    Args:
        timeout_seconds: CPU time per answer. The wall-clock limit is 12 times higher.
        memory_megabytes: memory per answer.
        num_workers: worker processes; defaults to one per processor, at most 4. Verdicts do not depend on it.
        relative_tolerance: numbers x (gold) and y are equal if ``|x − y| ≤ relative_tolerance · |x|``.

    Source: LaTeX parsing uses math-verify (Hugging Face, 2025). Departure: comparison is implemented here, by kind
    and with exact and high-precision arithmetic, since math-verify's own accepts wrong answers.
    """
    verdicts = [Verdict("ungraded") for _ in submissions]
    places: dict[tuple[str, str], list[int]] = {}  # by gold and given answer, which are compared once
    for place, one in enumerate(submissions):
        gold = _read_gold(one.answer)
        if gold is None:
            continue
        verdicts[place] = Verdict("no_answer")
        answer = _find_answer(one)
        if answer is not None:
            places.setdefault((gold, answer), []).append(place)
    outcomes: dict[tuple[str, str], Outcome] = {}
    undecided = []
    for pair in sorted(places):
        is_correct = compare_quickly(*pair, relative_tolerance)
        if is_correct is None:
            undecided.append(pair)
        else:
            outcomes[pair] = "right" if is_correct else "wrong"
    if undecided:
        _require_parser()
        limits = Limits(timeout_seconds, WALL_FACTOR * timeout_seconds, memory_megabytes * 2**20)
        pool = shared_pool(COMPARE, num_workers or min(count_cpus(), MAX_WORKERS), limits)
        results = pool.run([[*pair, relative_tolerance] for pair in undecided])
        outcomes.update(zip(undecided, map(_outcome_of, results), strict=True))
    for pair, own in places.items():
        for place in own:
            verdicts[place] = Verdict(outcomes[pair], extracted=pair[1])
    return verdicts


def _outcome_of(result: WorkerResult) -> Outcome:
    """The outcome of a comparison in a worker."""
    if result.kind != "value":
        return result.kind
    return "right" if result.value else "wrong"


def _find_answer(submission: Submission) -> str | None:
    extracted = submission.extracted
    if extracted is not None:
        extracted = fold_signs(extracted)
    return find_answer(fold_signs(submission.text), extracted)


def _require_parser() -> None:
    """Fail early if the packages for comparing expressions are missing."""
    absent = [package for package in PARSERS if find_spec(package.replace("-", "_")) is None]
    if absent:
        raise UsageError(
            f"grader math: answers that are no plain numbers are compared with {' and '.join(absent)}, which cannot be "
            f"imported. Install with: python -m pip install {' '.join(absent)}"
        )


def compare_quickly(gold: str, answer: str, relative_tolerance: float = 0.0) -> bool | None:
    """Decide cheaply by numbers or spelling; None if undecided. Never slow."""
    if gold.strip() == answer.strip() != "":
        return True
    if len(answer) > MAX_ANSWER_CHARS or len(gold) > MAX_ANSWER_CHARS:
        return False
    if same_answer(gold, answer):
        return True
    expected = parse_quantity(gold)
    actual = parse_quantity(answer)
    if expected is None or actual is None:
        return None
    return same_quantity(expected, actual, float(abs(expected.value)) * relative_tolerance)


def _read_gold(answer: str | None) -> str | None:
    """Extract the answer if gold is a whole solution, boxed or following "the answer is"."""
    if answer is None:
        return None
    gold = fold_signs(answer)
    if "\\boxed" in gold or (len(gold) > MIN_SOLUTION_CHARS and not is_bare(gold)):
        return read_solution(gold)
    return gold
