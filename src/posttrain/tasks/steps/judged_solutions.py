"""Several sampled solutions per problem, each judged right or wrong, from any file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated

from pydantic import Field

from posttrain.registry import register
from posttrain.tasks.base import Task
from posttrain.tasks.collect import Collected, Dropped
from posttrain.tasks.own_samples import judged_rows
from posttrain.tasks.preferences.rows import read_verdict, require
from posttrain.tasks.reader import reads_rows
from posttrain.tasks.reading import Row, read_file
from posttrain.tasks.splits import Split, choose_split
from posttrain.tasks.thinking import answer_text
from posttrain.types import Example, Message, Response

# Facts about a problem that evaluation breaks results down by.
META_KEYS = ("level", "subject", "type")


@register("task", held_out="validation")
@reads_rows
def judged_solutions(
    *,
    path: str,
    split: Split = "train",
    validation_share: Annotated[float, Field(ge=0, lt=1)] = 0.05,
    problem_key: str = "question",
    solution_key: str = "response",
    verdict_key: str = "is_correct",
    strip_thinking: bool = False,
) -> Task:
    """A file with one row per solution: the problem, the solution, and whether it is right.

    ``items.jsonl`` of ``posttrain evaluate MODEL --task gsm8k --samples 8`` is read as it is: a model's own solutions,
    with the grader's word. What the grader could not judge (a time-out, a problem without a gold answer) is dropped and
    counted; a solution in which no answer was found is wrong. A dialogue's question is there as one text.

    All solutions of a problem, wherever they stand in the file, are the responses of one example (1 right, 0
    wrong), in their order: an outcome model learns every one of them, and is evaluated by which of them it ranks
    first. Equal solutions are kept, as they are draws from a sampler. ``level``, ``subject`` and ``type`` are
    kept in meta.

    Dropped and counted: solutions that are blank or not judged.

    Args:
        path: a ``.jsonl``, ``.jsonl.gz`` or ``.parquet`` file, or the ``items.jsonl`` of an evaluation.
        split: ``validation`` is a part of the problems chosen by a hash, and ``train`` is the rest; ``test`` is the
            whole file.
        validation_share: share of the problems that is held out.
        problem_key, solution_key: where the texts stand.
        verdict_key: where true, false, 1 or 0 stands.
        strip_thinking: leave ``<think>`` … ``</think>`` out of the solutions.

    Raises:
        DataError: a missing or malformed file or row, with its line; or no row that can be used.
        MissingExtra: a parquet file, and ``pyarrow`` is not installed.
    """

    def read(row: Row) -> Response:
        require(row, solution_key)
        text = answer_text(row.text(solution_key), strip_thinking=strip_thinking)
        return Response(text, read_verdict(row, verdict_key))

    collected = Collected()
    rows = judged_rows(read_file(path), problem_key, solution_key, verdict_key, collected.dropped)
    for problem, first, responses in group_by_problem(rows, problem_key, read, collected.dropped):
        example = Example(
            id=f"judged_solutions/{split}/{first.line}",
            messages=(Message("user", problem),),
            responses=tuple(responses),
            meta={key: first.plain(key) for key in META_KEYS if first.has(key)},
        )
        collected.examples.append(example)
    collected.require_examples(path)
    chosen = choose_split(collected.examples, split, validation_share, path)
    return Task("judged_solutions", split, chosen, dict(collected.dropped))


def group_by_problem(
    rows: Iterable[Row], problem_key: str, read: Callable[[Row], Response], dropped: Counter[str]
) -> Iterator[tuple[str, Row, list[Response]]]:
    """Each problem in the order of its first row, with that row and the responses of all its rows.

    Raises:
        DataError: a malformed row.
    """
    groups: dict[str, tuple[Row, list[Response]]] = {}
    for row in rows:
        try:
            require(row, problem_key)
            response = read(row)
        except Dropped as reason:
            dropped[str(reason)] += 1
        else:
            groups.setdefault(row.text(problem_key).strip(), (row, []))[1].append(response)
    for problem, (first, responses) in groups.items():
        yield problem, first, responses
