"""Several sampled solutions per problem, each judged right or wrong: from any file, and GSM8K's published ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from posttrain.registry import register
from posttrain.tasks.base import Task
from posttrain.tasks.own_samples import RESPONSE_IDS, judged_rows
from posttrain.tasks.preferences.rows import read_verdict, require
from posttrain.tasks.reader import Collected, Dropped, Share, Split, answer_text, reads_rows, strip_calculations
from posttrain.tasks.reading import Row, read_file
from posttrain.types import Example, Message, Response

META_KEYS = ("level", "subject", "type")  # of a problem, by which evaluation breaks results down
_ANSWER = re.compile(r"\n(?:A:|####)\s*(\S[^\n]*)\s*\Z")


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
    strip_thinking: bool = False,
) -> Task:
    """A file with one row per solution: the problem, the solution, and whether it is right.

    ``items.jsonl`` of ``posttrain evaluate MODEL --task gsm8k --samples 8`` is read as it is: a model's own solutions,
    with the grader's verdict. What the grader could not judge (a time-out, a problem without a gold answer) is dropped
    and counted; a solution in which no answer was found is wrong. A dialogue's question is there as one text.

    All solutions of a problem, wherever they stand in the file, are the responses of one example (1 right, 0
    wrong), in their order: an outcome model learns every one of them, and is evaluated by which of them it ranks
    first. Equal solutions are kept, as they are draws from a sampler. ``level``, ``subject`` and ``type`` are
    kept in meta.

    Dropped and counted: solutions that are blank or not judged.

    Args:
        problem_key, solution_key: where the texts stand.
        verdict_key: where true, false, 1 or 0 stands.
    """

    def read(row: Row) -> Response:
        require(row, solution_key)
        text = answer_text(row.text(solution_key), strip_thinking=strip_thinking)
        ids = row.plain(RESPONSE_IDS) if row.has(RESPONSE_IDS) else ()
        if not isinstance(ids, list | tuple) or not all(type(token) is int and 0 <= token < 1 << 31 for token in ids):
            raise row.fail(f"{RESPONSE_IDS!r} must be a list of token ids")
        return Response(text, read_verdict(row, verdict_key), ids=tuple(ids))

    collected = Collected()
    rows = judged_rows(read_file(path), problem_key, solution_key, verdict_key, collected.dropped)
    for first, example in group_by_problem(rows, problem_key, read, f"judged_solutions/{split}", collected):
        meta = {key: first.plain(key) for key in META_KEYS if first.has(key)}
        collected.examples.append(replace(example, meta=meta))
    return collected.as_task("judged_solutions", path, split, validation_share)


def group_by_problem(
    rows: Iterable[Row], problem_key: str, read: Callable[[Row], Response], name: str, collected: Collected
) -> Iterator[tuple[Row, Example]]:
    """Each problem in the order of its first row: that row, and an example (``name``/line) with all rows' responses.

    Raises:
        DataError: a malformed row.
    """
    groups: dict[str, tuple[Row, list[Response]]] = {}
    for row in rows:
        try:
            require(row, problem_key)
            response = read(row)
        except Dropped as reason:
            collected.dropped[str(reason)] += 1
        else:
            problem = row.text(problem_key).strip()
            collected.settle_keys(row, carries=False)
            groups.setdefault(problem, (row, []))[1].append(response)
    for problem, (first, responses) in groups.items():
        yield first, Example(f"{name}/{first.line}", (Message("user", problem),), responses=tuple(responses))


@register("task", held_out="validation")
@reads_rows
def gsm8k_solutions(*, path: str, split: Split = "train", validation_share: Share = 0.05) -> Task:
    """``example_model_solutions.jsonl`` of openai/grade-school-math, or the same with one row per solution.

    Cobbe et al. (2021), "Training verifiers to solve math word problems". Keys as published: ``question``,
    ``ground_truth``, and under each model's name (``6B_finetuning``) ``solution`` and ``is_correct``. With one row
    per solution: ``question``, ``ground_truth``, ``model``, ``solution``, ``is_correct``.

    An example is a question with all its solutions (1 right, 0 wrong), reasoning and answer (behind ``A:``) apart, so
    that a template writes them as a policy would; a solution without such a line is all reasoning. Calculator notes
    (``<<48/2=24>>``) are removed. The ground truth is the example's own answer and solution.

    These are GSM8K's test questions: a policy or verifier that learns from them cannot be tested on GSM8K. Dropped
    and counted: solutions that are blank or not judged.
    """

    def read(row: Row) -> Response:
        require(row, "solution")
        reasoning, answer = split_answer(row.text("solution"))
        return Response(reasoning, read_verdict(row, "is_correct"), answer=answer)

    collected = Collected()
    rows, name = _flat(read_file(path)), f"gsm8k_solutions/{split}"
    for first, example in group_by_problem(rows, "question", read, name, collected):
        working, answer = split_answer(first.text("ground_truth")) if first.has("ground_truth") else ("", None)
        solution = (working or None) if answer is not None else None
        collected.examples.append(replace(example, answer=answer, solution=solution))
    return collected.as_task("gsm8k_solutions", path, split, validation_share)


def _flat(rows: Iterable[Row]) -> Iterator[Row]:
    """One row per solution, in either layout.

    Raises:
        DataError: a row without a solution.
    """
    for row in rows:
        by_model = {key: value for key, value in row.data.items() if isinstance(value, Mapping) and "solution" in value}
        if "solution" in row.data:
            yield row
        elif by_model:
            for model, value in by_model.items():
                shared = {key: row.data.get(key) for key in ("question", "ground_truth")}
                yield Row(row.place, row.line, {**shared, "model": model, **value})
        else:
            raise row.fail(
                f"no 'solution', neither in the row nor under a model's name. There are: {', '.join(row.data)}"
            )


def split_answer(text: str) -> tuple[str, str | None]:
    """The reasoning without calculator notes, and what stands in the last line behind ``A:`` (or ``####``).

    Without such a line behind the reasoning, the whole text is returned and no answer.
    """
    text = strip_calculations(text).strip()
    match = _ANSWER.search(text)
    if match is None:
        return text, None
    return text[: match.start()].strip(), match[1].strip()
