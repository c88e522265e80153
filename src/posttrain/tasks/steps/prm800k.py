"""Solutions of competition problems, judged step by step by people: PRM800K (Lightman et al. 2023)."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

from pydantic import Field

from posttrain.registry import register
from posttrain.tasks.base import Task
from posttrain.tasks.collect import Collected
from posttrain.tasks.reader import reads_rows
from posttrain.tasks.reading import Row, read_file, read_hub_file
from posttrain.tasks.splits import Split, choose_split
from posttrain.tasks.steps.labelled_steps import Neutral, NumClasses, classes_of, first_error, rating_classes, stepwise
from posttrain.tasks.steps.prm800k_layouts import Candidate, Solution, read_solutions
from posttrain.types import Example, Message, Response

StepPath = Sequence[Candidate]


@register("task", held_out="validation")
@reads_rows
def prm800k(
    *,
    split: Split = "train",
    path: str | None = None,
    hub: str = "tasksource/PRM800K",
    validation_share: Annotated[float, Field(ge=0, lt=1)] = 0.05,
    num_classes: NumClasses = 2,
    neutral: Neutral | None = None,
    alternatives: bool = True,
    step_separator: str = "\n",
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
        path: a local ``.jsonl``, ``.jsonl.gz`` or ``.parquet`` file instead of the hub.
        hub: name of the data set on the hub, with the published files of both phases.
        validation_share: share of the training problems that is held out.
        num_classes: 2 (good, bad) or 3 (negative, neutral, positive); the same as that of the objective ``process``.
        neutral: of two classes, the one of a step that is rated 0, not wrong but of no use; good if nothing is said.
        alternatives: false leaves only the first response of each solution.
        step_separator: stands between two steps.

    Raises:
        DataError: a missing or malformed file or row, with its line; or no solution that can be used.
        UsageError: ``neutral`` with three classes.
        MissingExtra: a parquet file, and ``pyarrow`` is not installed.
    """
    source = "test" if split == "test" else "train"
    place = path or f"hub:{hub}/{source}"
    if path is not None:
        files = {"": read_file(path)}
    else:
        files = {f"phase{phase}/": read_hub_file(hub, f"phase{phase}_{source}.jsonl") for phase in (1, 2)}
    maker = ExampleMaker(rating_classes(num_classes, neutral), step_separator, alternatives=alternatives)
    collected = maker.read(files, f"prm800k/{split}")
    collected.require_examples(place)
    chosen = choose_split(collected.examples, split, validation_share, place)
    return Task("prm800k", split, chosen, dict(collected.dropped))


class ExampleMaker:
    """Turns solutions into examples, and remembers which steps have been rated.

    ``dropped`` counts solutions and candidates that are left out, by reason.
    """

    def __init__(self, classes: Mapping[int, int], separator: str, *, alternatives: bool = True) -> None:
        self.classes, self.separator, self.alternatives = classes, separator, alternatives
        self.dropped: Counter[str] = Counter()
        self._rated: dict[bytes, int] = {}

    def read(self, files: Mapping[str, Iterable[Row]], id: str) -> Collected:
        """The examples of all files, whose names (may be blank) come into the ids."""
        collected = Collected(dropped=self.dropped)
        for name, rows in files.items():
            for solution in read_solutions(rows, self.dropped):
                example = self.make(solution, f"{id}/{name}{solution.line}")
                if example is None:
                    self.dropped["a solution that adds no rated step"] += 1
                else:
                    collected.examples.append(example)
        return collected

    def make(self, solution: Solution, id: str) -> Example | None:
        """The example of a solution; None where no step of it gets a label."""
        trunk, branches, ignored = paths_of(solution)
        if ignored:
            self.dropped["a candidate step behind one that nothing goes on from"] += ignored
        labelled = [(trunk, self._new_ratings(solution.problem, trunk, 0))]
        for branch in branches if self.alternatives else ():
            if branch[-1].rating is None:
                self.dropped["a candidate step without a rating"] += 1
            else:
                labelled.append((branch, self._new_ratings(solution.problem, branch, len(branch) - 1)))
        kept = [(path, ratings) for path, ratings in labelled if any(rating is not None for rating in ratings)]
        if not kept:
            return None
        meta = {"first_error": first_error([candidate.rating for candidate in kept[0][0]])}
        return Example(
            id=id,
            messages=(Message("user", solution.problem),),
            responses=tuple(self._response(path, ratings) for path, ratings in kept),
            meta=meta if solution.finish is None else {**meta, "finish": solution.finish},
        )

    def _response(self, path: StepPath, ratings: Sequence[int | None]) -> Response:
        return stepwise([candidate.text for candidate in path], classes_of(ratings, self.classes), self.separator)

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
