"""Solutions with a verdict, or with a label for each step: judged samples, Math-Shepherd, PRM800K."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from posttrain.data.base import Split, Task
from posttrain.data.preferences import CLASSES, RESPONSE_IDS, NumClasses, judged_rows, read_verdict, require, stepwise
from posttrain.data.reader import CollectedExamples, Dropped, Share, drop_if, reads_rows, row_task, strip_calculations
from posttrain.data.reading import Row, is_only_space, read_file
from posttrain.errors import UsageError
from posttrain.option_types import shown_with_type
from posttrain.registry import register
from posttrain.types import Example, Message, Response

META_KEYS = ("level", "subject", "type")  # of a problem, by which evaluation breaks results down
_TAG = "ки"  # ends a step in Math-Shepherd's ``input``, where ``label`` has + or −
_SIGNS = {"+": 1, "-": 0}
HUB = "tasksource/PRM800K"  # with the published files of both phases
_BROKEN = "bad_problem"  # why a labeller of PRM800K stopped: no step of a broken problem can be judged
# A step that could come next, and its rating: −1, 0 or 1; None: written by the labeller, flagged or not rated.
Candidate = tuple[str, int | None]


@register("task", held_out="validation")
@reads_rows
def judged_solutions(
    *,
    path: str,
    split: Split = "train",
    validation_share: Share = 0.05,
    problem_key: str = "question",
    solution_key: str = "response",
    verdict_key: str = "is_correct",
) -> Task:
    """A file with one row per solution: the problem, the solution, and whether it is right.

    ``items.jsonl`` of ``posttrain evaluate MODEL --task gsm8k --samples 8`` is read as it is: a model's own solutions
    with the grader's verdict. All solutions of a problem are the responses of one example (1 right, 0 wrong).
    ``level``, ``subject`` and ``type`` are kept in meta. Dropped and counted: solutions that are blank or were not
    judged.

    Args:
        problem_key, solution_key: where the texts stand.
        verdict_key: where true, false, 1 or 0 stands.
    """
    collected = CollectedExamples()
    groups: dict[str, tuple[Row, list[Response]]] = {}
    for row in judged_rows(read_file(path), problem_key, solution_key, verdict_key, collected.dropped):
        try:
            require(row, problem_key)
            require(row, solution_key)
            ids = _response_ids(row)
            response = Response(row.text(solution_key), read_verdict(row, verdict_key), ids=ids)
        except Dropped as reason:
            collected.dropped[str(reason)] += 1
            continue
        problem = row.text(problem_key).strip()
        collected.settle_keys(row, carries=False)
        groups.setdefault(problem, (row, []))[1].append(response)
    for problem, (first, responses) in groups.items():
        meta = {key: first.plain(key) for key in META_KEYS if first.has(key)}
        id = f"judged_solutions/{split}/{first.line}"
        messages = (Message("user", problem),)
        collected.examples.append(Example(id, messages, responses=tuple(responses), meta=meta))
    return collected.as_task("judged_solutions", path, split, validation_share)


def _response_ids(row: Row) -> tuple[int, ...]:
    """The token ids of a solution as it was sampled; none if the row has none."""
    if not row.has(RESPONSE_IDS):
        return ()
    ids = row.plain(RESPONSE_IDS)
    are_ids = isinstance(ids, list | tuple) and all(type(i) is int and 0 <= i < 1 << 31 for i in ids)
    row.refuse_if(not are_ids, f"{RESPONSE_IDS!r} must be a list of token ids")
    return tuple(ids)


@register("task", held_out="validation")
@row_task("peiyi9979/Math-Shepherd", share=0.02)
def math_shepherd(row: Row) -> Example:
    """Math-Shepherd: solutions whose steps were judged by how often they lead to the right answer.

    Keys: ``input``, ``label`` and maybe ``task``. ``input`` is the problem and its solution from ``Step 1:`` on, with
    ``ки`` at the end of each step; ``label`` is the same text with ``+`` (class 1: a continuation from here reached the
    right answer) or ``-`` (class 0) in its place. A solution has the score of its last step: whether its answer is
    right. In rows of GSM8K the calculator notes (``<<48/2=24>>``) are removed. ``meta["first_error"]`` is the first
    step (from 0) with ``-``, or None.

    Dropped and counted: texts that differ in more than the tags, no step, a blank step or problem.

    Source: Wang et al. 2023 (arXiv 2312.08935).
    """
    pieces, labels = align(row.text("input"), row.text("label"))
    problem, mark, first = pieces[0].rpartition("Step 1:")
    drop_if(not mark, "no 'Step 1:' behind the problem")
    meta: dict[str, object] = {"first_error": labels.index(0) if 0 in labels else None}
    texts = [problem, mark + first, *pieces[1:]]
    if row.has("task"):
        meta["task"] = row.text("task")
    if meta.get("task") == "GSM8K":
        texts = [strip_calculations(text) for text in texts]
    problem, *steps = (text.strip() for text in texts)
    drop_if(not problem, "a blank problem")
    for step in steps:
        drop_if(not re.sub(r"\AStep \d+:", "", step).strip(), "a blank step")
    response = stepwise(steps, labels, score=float(labels[-1]))
    return Example("", (Message("user", problem),), responses=(response,), meta=meta)


def align(tagged: str, signed: str) -> tuple[list[str], list[int]]:
    """The pieces of a text that end with a tag, and the signs that stand in place of the tags in the other text.

    The texts between are compared, so that a plus or minus of the mathematics is never taken for a sign.

    Raises:
        Dropped: no tag, text behind the last one, or another text between the signs.
    """
    *pieces, rest = tagged.split(_TAG)
    drop_if(not pieces, "no step tag in 'input'")
    drop_if(rest.strip(), "text behind the last step tag")
    labels = list[int]()
    position = 0
    for piece in pieces:
        end = position + len(piece)
        if signed[position:end] != piece or signed[end : end + 1] not in _SIGNS:
            break
        labels.append(_SIGNS[signed[end]])
        position = end + 1
    drop_if(
        len(labels) < len(pieces) or signed[position:].strip(), "'label' is not 'input' with signs for the step tags"
    )
    return pieces, labels


@register("task", held_out="validation")
@reads_rows
def prm800k(
    *,
    split: Split = "train",
    path: str | None = None,
    validation_share: Share = 0.05,
    num_classes: NumClasses = 2,
    neutral: Literal["good", "bad"] | None = None,
) -> Task:
    """PRM800K, from the hub or a local file: an example is one labelled solution of a MATH problem.

    A row is as published (``question``, ``label``; phase 1 or 2), or one candidate step (``instruction``,
    ``responses``: the steps before, ``next_response``, ``rating``, ``is_preferred_response``, maybe ``answer``), of
    which those that follow one another are put together. The first response follows the chosen candidates, up to the
    first step without one, of which it has the first candidate. Every other rated candidate, behind the steps before
    it, is a response of its own. A step that was rated before has no label again, unless it is wrong and others follow;
    one that the labeller wrote or flagged has none. ``meta["first_error"]``: the first step rated −1, or None.

    Dropped and counted: quality-control and screening solutions, broken problems, solutions that add no rated step,
    repeated and unrated candidates.

    Args:
        split: ``validation`` is a part of the training problems chosen by a hash, and ``train`` is the rest; ``test``
            of a local file is the whole file. The test problems are those of MATH-500.
        num_classes: 2 (good, bad) or 3 (negative, neutral, positive); the same as that of the objective ``process``.
        neutral: of two classes, the one of a step that is rated 0, not wrong but of no use; good by default.

    Raises:
        UsageError: ``neutral`` with three classes.

    Source: Lightman et al. 2023 (arXiv 2305.20050).
    """
    if num_classes == 3 and neutral is not None:
        raise UsageError(
            "task.neutral says what a rating of 0 is where there are two classes; with num_classes 3 leave it out"
        )
    classes = CLASSES[3]
    if num_classes == 2:
        classes = {-1: 0, 0: int(neutral != "bad"), 1: 1}
    source = "test" if split == "test" else "train"
    files = {f"phase{n}/": f"hf:{HUB}/phase{n}_{source}.jsonl" for n in (1, 2)}
    if path is not None:
        files = {"": path}
    collected = CollectedExamples()
    rated = dict[bytes, int]()
    for name, place in files.items():
        for row in _join_steps(read_file(place), collected):
            try:
                example = read_rated_solution(row, classes, rated, collected.dropped)
            except Dropped as reason:
                collected.dropped[str(reason)] += 1
                continue
            collected.settle_keys(row, carries=False)
            collected.examples.append(replace(example, id=f"prm800k/{split}/{name}{row.line}"))
    return collected.as_task("prm800k", path or f"hub:{HUB}/{source}", split, validation_share)


def _join_steps(rows: Iterable[Row], collected: CollectedExamples) -> Iterator[Row]:
    """Yield rows as published: those of one candidate step each become one row for each solution.

    Such rows belong together as long as each continues, or is an alternative to, the one before. The step that the next
    rows have at the end of their ``responses`` is the chosen one.
    """
    solution: _JoinedSolution | None = None
    for row in rows:
        if "next_response" not in row.data:
            if solution is not None:
                yield solution.as_row()
            solution = None
            yield row
            continue
        before = row.data.get("responses")
        text = row.data["next_response"]
        if not isinstance(before, list):
            raise row.fail("'responses' must be a list of the steps before")
        if any(step is None or is_only_space(step) for step in (*before, text)):
            collected.dropped["a blank step"] += 1
            continue
        before = [row.checked(step, f"step {number}") for number, step in enumerate(before, start=1)]
        text = row.checked(text, f"step {len(before) + 1}")
        if row.has("answer"):
            text += f"\n\n# Answer\n\n{row.answer('answer')}"
        problem = row.text("instruction").strip()
        if solution is None or not solution.takes(problem, before):
            if solution is not None:
                yield solution.as_row()
            solution = _JoinedSolution(row, problem, before)
        solution.add(before, text, _rating(row, row.data.get("rating")), row.data.get("is_preferred_response"))
        collected.settle_keys(row, carries=False)
    if solution is not None:
        yield solution.as_row()


class _JoinedSolution:
    """Rows of one candidate step each that make up one solution; ``prefix``: the steps before the last one."""

    def __init__(self, first: Row, problem: str, prefix: list[str]) -> None:
        self.first = first
        self.problem = problem
        self.prefix = prefix
        self.steps: list[dict[str, Any]] = []
        for step in prefix:
            self.steps.append({"completions": [{"text": step, "rating": None}], "chosen_completion": 0})
        self.steps.append({"completions": []})

    def takes(self, problem: str, before: list[str]) -> bool:
        """Return whether a candidate behind these steps is an alternative to the last one, or continues it."""
        return problem == self.problem and (before == self.prefix or self._is_continued_by(before))

    def add(self, before: list[str], text: str, rating: int | None, is_preferred: object) -> None:
        """Add a candidate that stands behind these steps."""
        if before != self.prefix:
            last = self._last_texts()
            chosen = self.steps[-1].get("chosen_completion")
            if chosen is None or last[chosen] != before[-1]:  # of equal texts the preferred one, or the first
                self.steps[-1]["chosen_completion"] = last.index(before[-1])
            self.steps.append({"completions": []})
            self.prefix = before
        candidates = self.steps[-1]["completions"]
        if is_preferred:
            self.steps[-1]["chosen_completion"] = len(candidates)
        candidates.append({"text": text, "rating": rating})

    def as_row(self) -> Row:
        """The solution as it is published, in one row."""
        return replace(self.first, data={"question": {"problem": self.problem}, "label": {"steps": self.steps}})

    def _is_continued_by(self, before: list[str]) -> bool:
        return before[:-1] == self.prefix and before != [] and before[-1] in self._last_texts()

    def _last_texts(self) -> list[str]:
        return [candidate["text"] for candidate in self.steps[-1]["completions"]]


def _rating(row: Row, value: Any) -> int | None:
    if value is None:
        return None
    row.refuse_if(
        isinstance(value, bool) or value not in CLASSES[3], f"'rating' must be −1, 0, 1 or null; got {value!r}"
    )
    return int(value)


def read_rated_solution(
    row: Row, classes: Mapping[int, int], rated: dict[bytes, int], dropped: Counter[str]
) -> Example:
    """One published line of PRM800K; ``rated`` remembers the steps that had a label, ``dropped`` counts candidates.

    Raises:
        Dropped: quality control, screening, a broken problem, a blank step, or no step that gets a label.
        DataError: a key is missing or of the wrong type.
    """
    drop_if(row.data.get("is_quality_control_question"), "a quality-control solution, given to every labeller")
    drop_if(row.data.get("is_initial_screening_question"), "a screening solution, given to every labeller")
    question = _object(row, row.data.get("question"), "'question'")
    label = _object(row, row.data.get("label"), "'label'")
    finish = label.get("finish_reason")
    steps = label.get("steps")
    drop_if(finish == _BROKEN, "a problem that the labeller found broken")
    if not isinstance(steps, list):
        raise row.fail("'label' needs 'steps', a list")
    problem = Row(row.place, row.line, question).text("problem").strip()
    trunk, branches = _follow(row, steps, dropped)
    labelled = [(trunk, _new_ratings(problem, trunk, 0, rated, dropped))]
    for branch in branches:
        if branch[-1][1] is None:
            dropped["a candidate step without a rating"] += 1
        else:
            labelled.append((branch, _new_ratings(problem, branch, len(branch) - 1, rated, dropped)))
    kept = [(path, ratings) for path, ratings in labelled if any(rating is not None for rating in ratings)]
    drop_if(not kept, "a solution that adds no rated step")
    responses = []
    for path, ratings in kept:
        labels = [None if rating is None else classes[rating] for rating in ratings]
        responses.append(stepwise([text for text, _ in path], labels))
    first_path = kept[0][0]
    all_ratings = [rating for _, rating in first_path]
    meta: dict[str, object] = {"first_error": all_ratings.index(-1) if -1 in all_ratings else None}
    if finish is not None:
        meta["finish"] = finish
    return Example("", (Message("user", problem),), responses=tuple(responses), meta=meta)


def _follow(row: Row, steps: list[object], dropped: Counter[str]) -> tuple[list[Candidate], list[list[Candidate]]]:
    """The path of the chosen candidates, and a path to each other candidate.

    It ends at the first step without a chosen candidate, of which it has the first one if this is rated.
    """
    trunk = list[Candidate]()
    branches = list[list[Candidate]]()
    is_over = False
    num_behind = 0
    for number, step in enumerate(steps, start=1):
        candidates, chosen = _read_step(row, _object(row, step, f"'label.steps' {number}"), number)
        if is_over or not candidates:
            num_behind += len(candidates)
            continue
        followed = chosen
        if chosen is None and candidates[0][1] is not None:
            followed = 0
        for place, candidate in enumerate(candidates):
            if place != followed:
                branches.append([*trunk, candidate])
        if followed is not None:
            trunk.append(candidates[followed])
        is_over = chosen is None
    if num_behind:
        dropped["a candidate step behind one that nothing goes on from"] += num_behind
    return trunk, branches


def _read_step(row: Row, step: Mapping[str, Any], number: int) -> tuple[list[Candidate], int | None]:
    """The candidates of a step, and the place of the one that the solution goes on from (None: it ends here).

    A step that the labeller wrote in place of the candidates is that one.
    """
    completions = list(step.get("completions") or ())
    written = step.get("human_completion")
    chosen = step.get("chosen_completion")
    row.refuse_if(
        chosen is not None and (not isinstance(chosen, int) or not 0 <= chosen < len(completions)),
        f"step {number}: 'chosen_completion' is {chosen!r} of {len(completions)} completions",
    )
    if chosen is None and written is not None:
        chosen = len(completions)
        if isinstance(written, Mapping):
            written = written.get("text")
        completions.append({"text": written, "rating": None})
    candidates: list[Candidate] = []
    for completion in completions:
        row.refuse_if(
            not isinstance(completion, Mapping), f"step {number}: a completion must be an object with text and rating"
        )
        text = completion.get("text")
        rating = completion.get("rating")
        if completion.get("flagged"):
            rating = None
        drop_if(text is None or is_only_space(text), "a blank step")
        candidates.append((row.checked(text, f"step {number}"), _rating(row, rating)))
    return candidates, chosen


def _new_ratings(
    problem: str, path: Sequence[Candidate], start: int, rated: dict[bytes, int], dropped: Counter[str]
) -> list[int | None]:
    """The ratings of a path from its step ``start`` on, without those that have been given before."""
    ratings: list[int | None] = []
    key = problem.encode()
    for index, (text, own_rating) in enumerate(path):
        key = hashlib.blake2b(key + b"\x1f" + text.encode(), digest_size=12).digest()
        if index < start or own_rating is None:
            ratings.append(None)
            continue
        before = rated.get(key)
        is_wrong_amid = own_rating == -1 and index < len(path) - 1
        if before is None or is_wrong_amid:
            rated[key] = own_rating
            ratings.append(own_rating)
            continue
        reason = "a candidate step that was rated before"
        if before != own_rating:
            reason += ", with another rating"
        dropped[reason] += 1
        ratings.append(None)
    return ratings


def _object(row: Row, value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise row.fail(f"{name} must be an object, as in the published files; got {shown_with_type(value)}")
    return value
