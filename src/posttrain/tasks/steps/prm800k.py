"""Solutions of competition problems, judged step by step by people: PRM800K (Lightman et al. 2023)."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from posttrain.registry import register
from posttrain.tasks.base import Task
from posttrain.tasks.preferences.rows import is_blank
from posttrain.tasks.reader import Collected, Dropped, Share, Split, reads_rows
from posttrain.tasks.reading import Row, read_file, read_hub_file
from posttrain.tasks.steps.labelled_steps import Neutral, NumClasses, first_error, step_classes, stepwise
from posttrain.types import Example, Message, Response

# PRM800K in its two layouts, both read as labelled solutions: the published files, and one row per candidate step.

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


def read_solutions(rows: Iterable[Row], collected: Collected) -> Iterator[Solution]:
    """The labelled solutions of a file of either layout, told by the first row's keys; ``collected`` counts the rest.

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
    every = chain([first], rows)
    yield from _published(every, collected) if layouts[0] == "the published files" else _one_per_step(every, collected)


def _published(rows: Iterable[Row], collected: Collected) -> Iterator[Solution]:
    for row in rows:
        try:
            solution = read_published(row)
        except Dropped as reason:
            collected.dropped[str(reason)] += 1
        else:
            collected.settle_keys(row, carries=False)
            yield solution


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


def _one_per_step(rows: Iterable[Row], collected: Collected) -> Iterator[Solution]:
    """Rows that follow one another belong to one solution as long as each goes on from, or stands beside, the last.

    The step that the next rows have as the end of their ``responses`` is the chosen one.
    """
    solution: Solution | None = None
    prefix: list[str] = []
    for row in rows:
        try:
            problem, before, candidate = row.text("instruction").strip(), _prefix(row), _next_step(row)
        except Dropped as reason:
            collected.dropped[str(reason)] += 1
            continue
        if solution is None or problem != solution.problem or not _goes_on(solution, prefix, before):
            if solution is not None:
                yield solution
            given = [Step([Candidate(text, None)], 0) for text in before]
            solution, prefix = Solution(row.line, problem, [*given, Step([])]), before
        elif len(before) > len(prefix):
            _choose(solution.steps[-1], before[-1])
            solution.steps.append(Step([]))
            prefix = before
        step = solution.steps[-1]
        if row.data.get("is_preferred_response"):
            step.chosen = len(step.candidates)
        step.candidates.append(candidate)
        collected.settle_keys(row, carries=False)
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


StepPath = Sequence[Candidate]
HUB = "tasksource/PRM800K"  # with the published files of both phases


@register("task", held_out="validation")
@reads_rows
def prm800k(
    *,
    split: Split = "train",
    path: str | None = None,
    validation_share: Share = 0.05,
    num_classes: NumClasses = 2,
    neutral: Neutral | None = None,
) -> Task:
    """PRM800K, from the hub or a local file: an example is one labelled solution of a MATH problem.

    Lightman et al. (2023), "Let's verify step by step". A local file is either as published (``question``, ``label``;
    phase 1 or 2) or has one row per candidate step (``instruction``, ``responses``: the steps before,
    ``next_response``, ``rating``, ``is_preferred_response``, maybe ``answer``), from which solutions are put together.

    The first response follows the chosen candidate of each step. Where none was chosen it ends with the step's
    first candidate, which is the one that was being judged (in phase 2 the first error). Every other rated candidate
    is a response of its own: the steps before it, without labels, and the candidate. So a rated step is trained on
    once: one that was rated before (labellers shared beginnings) has no label again, unless it is wrong and others
    follow it, and a response without labels is left out. A step that the labeller wrote, was flagged or has no
    rating has no label. ``meta["first_error"]``: the first step (from 0) of the first response rated −1, or None.

    Dropped and counted: quality-control and screening solutions, broken problems, solutions that add no rated
    step, repeated and unrated candidates. Where the labeller gave up, what was rated counts.

    Args:
        split: ``validation`` is a part of the training problems chosen by a hash, and ``train`` is the rest; ``test``
            of a local file is the whole file. The test problems are those of MATH-500.
        num_classes: 2 (good, bad) or 3 (negative, neutral, positive); the same as that of the objective ``process``.
        neutral: of two classes, the one of a step that is rated 0, not wrong but of no use; good if nothing is said.

    Raises:
        UsageError: ``neutral`` with three classes.
    """
    source = "test" if split == "test" else "train"
    if path is not None:
        files = {"": read_file(path)}
    else:
        files = {f"phase{phase}/": read_hub_file(HUB, f"phase{phase}_{source}.jsonl") for phase in (1, 2)}
    classes = step_classes(num_classes, (neutral or "good") if num_classes == 2 else neutral)
    collected = Collected()
    maker = ExampleMaker(classes, collected.dropped)
    for name, rows in files.items():
        for solution in read_solutions(rows, collected):
            example = maker.make(solution, f"prm800k/{split}/{name}{solution.line}")
            if example is None:
                collected.dropped["a solution that adds no rated step"] += 1
            else:
                collected.examples.append(example)
    return collected.as_task("prm800k", path or f"hub:{HUB}/{source}", split, validation_share)


class ExampleMaker:
    """Turns solutions into examples, and remembers which steps have been rated.

    ``dropped`` counts solutions and candidates that are left out, by reason.
    """

    def __init__(self, classes: Mapping[int, int], dropped: Counter[str]) -> None:
        self.classes, self.dropped = classes, dropped
        self._rated: dict[bytes, int] = {}

    def make(self, solution: Solution, id: str) -> Example | None:
        """The example of a solution; None where no step of it gets a label."""
        trunk, branches, ignored = paths_of(solution)
        if ignored:
            self.dropped["a candidate step behind one that nothing goes on from"] += ignored
        labelled = [(trunk, self._new_ratings(solution.problem, trunk, 0))]
        for branch in branches:
            if branch[-1].rating is None:
                self.dropped["a candidate step without a rating"] += 1
            else:
                labelled.append((branch, self._new_ratings(solution.problem, branch, len(branch) - 1)))
        kept = [(path, ratings) for path, ratings in labelled if any(rating is not None for rating in ratings)]
        if not kept:
            return None
        meta = {"first_error": first_error([candidate.rating for candidate in kept[0][0]])}
        return Example(
            id,
            (Message("user", solution.problem),),
            responses=tuple(self._response(path, ratings) for path, ratings in kept),
            meta=meta if solution.finish is None else {**meta, "finish": solution.finish},
        )

    def _response(self, path: StepPath, ratings: Sequence[int | None]) -> Response:
        labels = [None if rating is None else self.classes[rating] for rating in ratings]
        return stepwise([candidate.text for candidate in path], labels)

    def _new_ratings(self, problem: str, path: StepPath, start: int) -> list[int | None]:
        """The ratings of a path from its step ``start`` on, without those that have been given before."""
        ratings: list[int | None] = []
        key = _digest(b"", problem)
        for index, candidate in enumerate(path):
            key = _digest(key, candidate.text)
            rating = candidate.rating if index >= start else None
            before = None if rating is None else self._rated.get(key)
            if before is not None and not (rating == -1 and index < len(path) - 1):
                other = "" if before == rating else ", with another rating"
                self.dropped[f"a candidate step that was rated before{other}"] += 1
                rating = None
            elif rating is not None:
                self._rated[key] = rating
            ratings.append(rating)
        return ratings


def paths_of(solution: Solution) -> tuple[StepPath, list[StepPath], int]:
    """The trunk, the branches, and the number of candidates that stand on neither.

    The trunk follows the chosen candidates up to the first step where none was; of that step it takes the first
    candidate, if it is rated. Every other candidate ends a branch, whose steps before it are the trunk's.
    """
    trunk: list[Candidate] = []
    branches: list[StepPath] = []
    for index, step in enumerate(solution.steps):
        goes_on = step.chosen
        if goes_on is None and step.candidates[0].rating is not None:
            goes_on = 0
        branches += [[*trunk, c] for number, c in enumerate(step.candidates) if number != goes_on]
        if goes_on is not None:
            trunk.append(step.candidates[goes_on])
        if step.chosen is None:
            return trunk, branches, sum(len(later.candidates) for later in solution.steps[index + 1 :])
    return trunk, branches, 0


def _digest(before: bytes, text: str) -> bytes:
    return hashlib.blake2b(before + b"\x1f" + text.encode("utf-8"), digest_size=12).digest()
