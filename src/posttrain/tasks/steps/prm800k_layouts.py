"""PRM800K in its two layouts, both read as labelled solutions: the published files, and one row per candidate step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.tasks.collect import Dropped
from posttrain.tasks.preferences.rows import is_blank
from posttrain.tasks.reading import Row

RATINGS = (-1, 0, 1)
# Why a labeller stopped; no step of a problem that is itself broken can be judged.
BROKEN = "bad_problem"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A step that could come next. ``rating`` is −1, 0 or 1; None: written by the labeller, or not rated."""

    text: str
    rating: int | None


@dataclass(slots=True)
class Step:
    """The candidates for one step, and which of them the solution goes on from (None: it ends here)."""

    candidates: list[Candidate]
    chosen: int | None = None


@dataclass(slots=True)
class Solution:
    """One labelled solution. ``line``: where it begins. ``finish``: why its labeller stopped, where that is known."""

    line: int
    problem: str
    steps: list[Step] = field(default_factory=list)
    finish: str | None = None


def read_solutions(rows: Iterable[Row], dropped: Counter[str]) -> Iterator[Solution]:
    """The labelled solutions of a file of either layout, told by the first row's keys; ``dropped`` counts the rest.

    Raises:
        DataError: a row of neither layout, or a malformed one.
    """
    rows = iter(rows)
    first = next(rows, None)
    if first is None:
        return
    wanted = {"the published files": ("question", "label"), "one row per step": ("instruction", "next_response")}
    layouts = [layout for layout, keys in wanted.items() if all(key in first.data for key in keys)]
    if not layouts:
        known = "; ".join(f"{layout}: {', '.join(keys)}" for layout, keys in wanted.items())
        raise first.fail(
            f"the row has the keys {', '.join(first.data) or 'none'}, of neither layout; one needs {known}"
        )
    every = _chain(first, rows)
    yield from _published(every, dropped) if layouts[0] == "the published files" else _one_per_step(every, dropped)


def _chain(first: Row, rows: Iterator[Row]) -> Iterator[Row]:
    yield first
    yield from rows


def _published(rows: Iterable[Row], dropped: Counter[str]) -> Iterator[Solution]:
    for row in rows:
        try:
            yield read_published(row)
        except Dropped as reason:
            dropped[str(reason)] += 1


def read_published(row: Row) -> Solution:
    """One line of ``phase1_train.jsonl`` and its like.

    A step that the labeller wrote in place of the candidates is the one that the solution goes on from, and has no
    rating; nor has a candidate that was flagged (the labeller could not tell).

    Raises:
        Dropped: quality control, screening, a broken problem, or a blank step.
        DataError: a key is missing or of the wrong type.
    """
    for key, reason in (
        ("is_quality_control_question", "a quality-control solution, given to every labeller"),
        ("is_initial_screening_question", "a screening solution, given to every labeller"),
    ):
        if row.data.get(key):
            raise Dropped(reason)
    question, label = _mapping(row, "question"), _mapping(row, "label")
    finish = label.data.get("finish_reason")
    if finish == BROKEN:
        raise Dropped("a problem that the labeller found broken")
    steps = label.data.get("steps")
    if not isinstance(steps, Sequence) or isinstance(steps, str):
        raise row.fail("'label' needs 'steps', a list")
    solution = Solution(row.line, question.text("problem").strip(), finish=finish)
    for number, raw_step in enumerate(steps, start=1):
        if not isinstance(raw_step, Mapping):
            raise row.fail(f"'label.steps' {number} must be an object")
        step = _published_step(Row(row.place, row.line, raw_step), number)
        if step.candidates:
            solution.steps.append(step)
    return solution


def _published_step(row: Row, number: int) -> Step:
    step = Step([_candidate(row, completion, number) for completion in row.data.get("completions") or ()], None)
    chosen = row.data.get("chosen_completion")
    written = row.data.get("human_completion")
    if chosen is not None:
        if not isinstance(chosen, int) or not 0 <= chosen < len(step.candidates):
            raise row.fail(f"step {number}: 'chosen_completion' is {chosen!r} of {len(step.candidates)} completions")
        step.chosen = chosen
    elif written is not None:
        text = written.get("text") if isinstance(written, Mapping) else written
        step.chosen = len(step.candidates)
        step.candidates.append(_candidate(row, {"text": text, "rating": None}, number))
    return step


def _candidate(row: Row, completion: Any, number: int) -> Candidate:
    if not isinstance(completion, Mapping):
        raise row.fail(f"step {number}: a completion must be an object with text and rating")
    rating = None if completion.get("flagged") else completion.get("rating")
    return Candidate(_step_text(row, completion.get("text"), number), _rating(row, rating))


def _one_per_step(rows: Iterable[Row], dropped: Counter[str]) -> Iterator[Solution]:
    """Rows that follow one another belong to one solution as long as each goes on from, or stands beside, the last.

    The step that the next rows have as the end of their ``responses`` is the chosen one.
    """
    solution: Solution | None = None
    prefix: list[str] = []
    for row in rows:
        try:
            problem, before, candidate = row.text("instruction").strip(), _prefix(row), _next_step(row)
        except Dropped as reason:
            dropped[str(reason)] += 1
            continue
        if solution is None or problem != solution.problem or not _goes_on(solution, prefix, before):
            if solution is not None:
                yield solution
            solution, prefix = Solution(row.line, problem, [_given(text) for text in before]), before
            solution.steps.append(Step([]))
        elif len(before) > len(prefix):
            _choose(solution.steps[-1], before[-1])
            solution.steps.append(Step([]))
            prefix = before
        step = solution.steps[-1]
        if row.data.get("is_preferred_response"):
            step.chosen = len(step.candidates)
        step.candidates.append(candidate)
    if solution is not None:
        yield solution


def _goes_on(solution: Solution, prefix: list[str], before: list[str]) -> bool:
    return before == prefix or (
        before[:-1] == prefix and any(c.text == before[-1] for c in solution.steps[-1].candidates)
    )


def _choose(step: Step, text: str) -> None:
    """Mark what the next rows go on from; of equal texts it is the preferred one, or the first."""
    if step.chosen is None or step.candidates[step.chosen].text != text:
        step.chosen = next(i for i, candidate in enumerate(step.candidates) if candidate.text == text)


def _given(text: str) -> Step:
    """A step of which only the text is known."""
    return Step([Candidate(text, None)], 0)


def _prefix(row: Row) -> list[str]:
    steps = row.data.get("responses")
    if not isinstance(steps, Sequence) or isinstance(steps, str):
        raise row.fail("'responses' must be a list of the steps before")
    return [_step_text(row, step, number) for number, step in enumerate(steps, start=1)]


def _next_step(row: Row) -> Candidate:
    """The candidate, with the answer behind it as the published files have it."""
    text = _step_text(row, row.data.get("next_response"), len(row.data["responses"]) + 1)
    if row.has("answer"):
        text = f"{text}\n\n# Answer\n\n{row.answer('answer')}"
    return Candidate(text, _rating(row, row.data.get("rating")))


def _step_text(row: Row, value: Any, number: int) -> str:
    if value is None or is_blank(value):
        raise Dropped("a blank step")
    return row.checked(value, f"step {number}")


def _rating(row: Row, value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or value not in RATINGS):
        raise row.fail(f"'rating' must be −1, 0, 1 or null; got {value!r}")
    return None if value is None else int(value)


def _mapping(row: Row, key: str) -> Row:
    value = row.data.get(key)
    if not isinstance(value, Mapping):
        raise row.fail(f"{key!r} must be an object; got {value!r}"[:200])
    return Row(row.place, row.line, value)
