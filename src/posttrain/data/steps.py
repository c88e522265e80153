"""Solutions with a single label, or a label per step: scored samples, Math-Shepherd, PRM800K."""

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

META_KEYS = ("level", "subject", "type")  # problem metadata, used by evaluation breakdowns
_TAG = "ки"  # marks the end of a step in Math-Shepherd's ``input``; ``label`` contains + or − instead
_SIGNS = {"+": 1, "-": 0}
HUB = "tasksource/PRM800K"  # published files for both phases
_BROKEN = "bad_problem"  # finish reason for broken problems, whose steps cannot be rated
# Candidate step and rating (−1, 0, 1). None if written by the labeler, flagged, or unrated.
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
    """File with one row per solution: problem, solution, and verdict.

    Directly reads ``items.jsonl`` from ``posttrain evaluate MODEL --task gsm8k --samples 8``, containing the model's
    solutions and the grader's verdicts. Each problem becomes one example with all solutions as responses (1 correct,
    0 incorrect). ``level``, ``subject`` and ``type`` are kept in meta. Blank or unverified solutions are dropped and
    counted.

    Args:
        problem_key, solution_key: text keys.
        verdict_key: key with true, false, 1 or 0.
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
    """Read a solution's sampled token ids. Empty if missing."""
    if not row.has(RESPONSE_IDS):
        return ()
    ids = row.plain(RESPONSE_IDS)
    are_ids = isinstance(ids, list | tuple) and all(type(i) is int and 0 <= i < 1 << 31 for i in ids)
    row.refuse_if(not are_ids, f"{RESPONSE_IDS!r} must be a list of token ids")
    return tuple(ids)


@register("task", held_out="validation")
@row_task("peiyi9979/Math-Shepherd", share=0.02)
def math_shepherd(row: Row) -> Example:
    """Math-Shepherd: solutions whose steps are labeled by how often they lead to a correct result.

    Keys: ``input``, ``label``, optionally ``task``. ``input`` is the problem followed by its solution, which begins
    with ``Step 1:`` and marks each step's end with ``ки``. ``label`` is the same text with ``+`` (class 1: a
    continuation reached the correct result) or ``-`` (class 0) in place of ``ки``. A solution's score is its final
    label: whether the result is correct. GSM8K rows have calculator annotations (``<<48/2=24>>``) removed.
    ``meta["first_error"]`` is the first step (zero-based) with ``-``, or None.

    Dropped and counted: texts that differ in more than tags, missing steps, blank steps or problems.

    Source: Wang et al. 2023 (arXiv 2312.08935).
    """
    pieces, labels = align(row.text("input"), row.text("label"))
    problem, mark, first = pieces[0].rpartition("Step 1:")
    drop_if(not mark, "missing 'Step 1:' after the problem")
    meta: dict[str, object] = {"first_error": labels.index(0) if 0 in labels else None}
    texts = [problem, mark + first, *pieces[1:]]
    if row.has("task"):
        meta["task"] = row.text("task")
    if meta.get("task") == "GSM8K":
        texts = [strip_calculations(text) for text in texts]
    problem, *steps = (text.strip() for text in texts)
    drop_if(not problem, "blank problem")
    for step in steps:
        drop_if(not re.sub(r"\AStep \d+:", "", step).strip(), "blank step")
    response = stepwise(steps, labels, score=float(labels[-1]))
    return Example("", (Message("user", problem),), responses=(response,), meta=meta)


def align(tagged: str, signed: str) -> tuple[list[str], list[int]]:
    """Split tagged text into pieces, and read each tag's sign from the second text.

    Text between tags is compared, so a mathematical plus or minus is never mistaken for a sign.

    Raises:
        Dropped: no tags, text after the last tag, or differing text.
    """
    *pieces, rest = tagged.split(_TAG)
    drop_if(not pieces, "missing step tags in 'input'")
    drop_if(rest.strip(), "text after the last step tag")
    labels = list[int]()
    position = 0
    for piece in pieces:
        end = position + len(piece)
        if signed[position:end] != piece or signed[end : end + 1] not in _SIGNS:
            break
        labels.append(_SIGNS[signed[end]])
        position = end + 1
    drop_if(
        len(labels) < len(pieces) or signed[position:].strip(), "'label' differs from 'input' in more than step tags"
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
    """PRM800K from the hub or a local file: each example is a labeled solution to a MATH problem.

    Rows are either in the published format (``question``, ``label``; phase 1 or 2), or contain a single candidate
    step (``instruction``, ``responses``: preceding steps, ``next_response``, ``rating``, ``is_preferred_response``,
    optionally ``answer``). In the latter case, consecutive rows are joined. The first response follows the chosen
    candidates until none was chosen, ending with that step's first candidate. Every other rated candidate, after its
    preceding steps, becomes a separate response. Previously rated steps are not labeled again, unless incorrect and
    followed by more steps. Steps written or flagged by the labeler are unlabeled. ``meta["first_error"]`` is the
    first step rated −1, or None.

    Dropped and counted: quality control and screening solutions, broken problems, solutions without newly rated steps,
    repeated and unrated candidates.

    Args:
        split: ``validation`` is selected from training problems by hash; ``train`` is the rest. For local files,
            ``test`` uses all rows. Test problems are identical to MATH-500.
        num_classes: 2 (good, bad) or 3 (negative, neutral, positive). Must match the objective ``process``.
        neutral: with two classes, the class for steps rated 0 (correct but unhelpful). Defaults to good.

    Raises:
        UsageError: ``neutral`` with three classes.

    Source: Lightman et al. 2023 (arXiv 2305.20050).
    """
    if num_classes == 3 and neutral is not None:
        raise UsageError("task.neutral assigns rating 0 to one of two classes; remove it when using num_classes 3")
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
    """Yield rows in published format, joining rows with single candidate steps.

    Rows are joined while each continues its predecessor or offers an alternative to it. The chosen candidate is the
    one found at the end of ``responses`` in subsequent rows.
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
            raise row.fail("'responses' must be a list of preceding steps")
        if any(step is None or is_only_space(step) for step in (*before, text)):
            collected.dropped["blank step"] += 1
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
    """A solution joined from rows with single candidate steps. ``prefix``: all steps before the last."""

    def __init__(self, first: Row, problem: str, prefix: list[str]) -> None:
        self.first = first
        self.problem = problem
        self.prefix = prefix
        self.steps: list[dict[str, Any]] = []
        for step in prefix:
            self.steps.append({"completions": [{"text": step, "rating": None}], "chosen_completion": 0})
        self.steps.append({"completions": []})

    def takes(self, problem: str, before: list[str]) -> bool:
        """Check if a candidate after these steps is an alternative to the last step, or its continuation."""
        return problem == self.problem and (before == self.prefix or self._is_continued_by(before))

    def add(self, before: list[str], text: str, rating: int | None, is_preferred: object) -> None:
        """Add a candidate following these steps."""
        if before != self.prefix:
            last = self._last_texts()
            chosen = self.steps[-1].get("chosen_completion")
            # among equal texts, prefer the preferred one, else the first
            if chosen is None or last[chosen] != before[-1]:
                self.steps[-1]["chosen_completion"] = last.index(before[-1])
            self.steps.append({"completions": []})
            self.prefix = before
        candidates = self.steps[-1]["completions"]
        if is_preferred:
            self.steps[-1]["chosen_completion"] = len(candidates)
        candidates.append({"text": text, "rating": rating})

    def as_row(self) -> Row:
        """Build a row in published format."""
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
    """Read a published PRM800K line. ``rated`` remembers labeled steps, ``dropped`` counts candidates.

    Raises:
        Dropped: quality control, screening, broken problem, blank step, or nothing to label.
        DataError: missing key or wrong type.
    """
    drop_if(row.data.get("is_quality_control_question"), "quality control solution, shown to every labeler")
    drop_if(row.data.get("is_initial_screening_question"), "screening solution, shown to every labeler")
    question = _object(row, row.data.get("question"), "'question'")
    label = _object(row, row.data.get("label"), "'label'")
    finish = label.get("finish_reason")
    steps = label.get("steps")
    drop_if(finish == _BROKEN, "problem reported as broken by the labeler")
    if not isinstance(steps, list):
        raise row.fail("'label' must contain a list 'steps'")
    problem = Row(row.place, row.line, question).text("problem").strip()
    trunk, branches = _follow(row, steps, dropped)
    labelled = [(trunk, _new_ratings(problem, trunk, 0, rated, dropped))]
    for branch in branches:
        if branch[-1][1] is None:
            dropped["candidate step without rating"] += 1
        else:
            labelled.append((branch, _new_ratings(problem, branch, len(branch) - 1, rated, dropped)))
    kept = [(path, ratings) for path, ratings in labelled if any(rating is not None for rating in ratings)]
    drop_if(not kept, "solution without newly rated steps")
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
    """Build the path of chosen candidates, and a path to each alternative.

    The main path ends at the first step without chosen candidate, including that step's first candidate if rated.
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
        dropped["candidate step after the solution's last step"] += num_behind
    return trunk, branches


def _read_step(row: Row, step: Mapping[str, Any], number: int) -> tuple[list[Candidate], int | None]:
    """Read a step's candidates and the index of the chosen one (None: the solution ends here).

    Steps written by the labeler count as chosen.
    """
    completions = list(step.get("completions") or ())
    written = step.get("human_completion")
    chosen = step.get("chosen_completion")
    row.refuse_if(
        chosen is not None and (not isinstance(chosen, int) or not 0 <= chosen < len(completions)),
        f"step {number}: 'chosen_completion' is {chosen!r}, but 'completions' has length {len(completions)}",
    )
    if chosen is None and written is not None:
        chosen = len(completions)
        if isinstance(written, Mapping):
            written = written.get("text")
        completions.append({"text": written, "rating": None})
    candidates: list[Candidate] = []
    for completion in completions:
        row.refuse_if(
            not isinstance(completion, Mapping), f"step {number}: completions must be objects with text and rating"
        )
        text = completion.get("text")
        rating = completion.get("rating")
        if completion.get("flagged"):
            rating = None
        drop_if(text is None or is_only_space(text), "blank step")
        candidates.append((row.checked(text, f"step {number}"), _rating(row, rating)))
    return candidates, chosen


def _new_ratings(
    problem: str, path: Sequence[Candidate], start: int, rated: dict[bytes, int], dropped: Counter[str]
) -> list[int | None]:
    """Ratings along a path starting at step ``start``, excluding previously used ones."""
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
        reason = "previously rated candidate step"
        if before != own_rating:
            reason += ", with a different rating"
        dropped[reason] += 1
        ratings.append(None)
    return ratings


def _object(row: Row, value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise row.fail(f"{name} must be an object, like in the published files; got {shown_with_type(value)}")
    return value
