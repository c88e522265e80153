"""Solutions of GSM8K's test questions by four models, judged by their answers (Cobbe et al. 2021)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated

from pydantic import Field

from posttrain.registry import register
from posttrain.tasks.base import Task
from posttrain.tasks.collect import Collected
from posttrain.tasks.preferences.rows import read_verdict, require
from posttrain.tasks.reader import reads_rows
from posttrain.tasks.reading import Row, read_file
from posttrain.tasks.splits import Split, choose_split
from posttrain.tasks.steps.judged_solutions import group_by_problem
from posttrain.types import Example, Message, Response

_CALCULATION = re.compile(r"<<[^<>]*>>")
_ANSWER = re.compile(r"\n(?:A:|####)\s*(\S[^\n]*)\s*\Z")


@register("task", held_out="validation")
@reads_rows
def gsm8k_solutions(
    *,
    path: str,
    split: Split = "train",
    validation_share: Annotated[float, Field(ge=0, lt=1)] = 0.05,
) -> Task:
    """``example_model_solutions.jsonl`` of openai/grade-school-math, or the same with one row per solution.

    Cobbe et al. (2021), "Training verifiers to solve math word problems". Keys as published: ``question``,
    ``ground_truth``, and under each model's name (``6B_finetuning``) ``solution`` and ``is_correct``. With one row
    per solution: ``question``, ``ground_truth``, ``model``, ``solution``, ``is_correct``.

    An example is a question with all its solutions (1 right, 0 wrong), reasoning and answer (behind ``A:``) apart, so
    that a template writes them as a policy would; a solution without such a line is all reasoning. Calculator notes
    (``<<48/2=24>>``) are removed. The ground truth is the example's own answer and solution.

    These are GSM8K's test questions: a policy or verifier that learns from them cannot be tested on GSM8K. Dropped
    and counted: solutions that are blank or not judged.

    Args:
        path: a ``.jsonl``, ``.jsonl.gz`` or ``.parquet`` file.
        split: ``validation`` is a part of the questions chosen by a hash, and ``train`` is the rest; ``test`` is the
            whole file.
        validation_share: share of the questions that is held out.

    Raises:
        DataError: a missing or malformed file or row, with its line; or no row that can be used.
        MissingExtra: a parquet file, and ``pyarrow`` is not installed.
    """
    collected = Collected()
    for question, first, responses in group_by_problem(_flat(read_file(path)), "question", _read, collected.dropped):
        working, answer = split_answer(first.text("ground_truth")) if first.has("ground_truth") else ("", None)
        example = Example(
            id=f"gsm8k_solutions/{split}/{first.line}",
            messages=(Message("user", question),),
            answer=answer,
            solution=(working or None) if answer is not None else None,
            responses=tuple(responses),
        )
        collected.examples.append(example)
    collected.require_examples(path)
    chosen = choose_split(collected.examples, split, validation_share, path)
    return Task("gsm8k_solutions", split, chosen, dict(collected.dropped))


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
                facts = {key: row.data.get(key) for key in ("question", "ground_truth")}
                yield Row(row.place, row.line, {**facts, "model": model, **value})
        else:
            raise row.fail(
                f"no 'solution', neither in the row nor under a model's name. There are: {', '.join(row.data)}"
            )


def _read(row: Row) -> Response:
    require(row, "solution")
    reasoning, answer = split_answer(row.text("solution"))
    return Response(reasoning, read_verdict(row, "is_correct"), answer=answer)


def split_answer(text: str) -> tuple[str, str | None]:
    """The reasoning without calculator notes, and what stands in the last line behind ``A:`` (or ``####``).

    Without such a line behind the reasoning, the whole text is returned and no answer.
    """
    text = strip_calculations(text).strip()
    match = _ANSWER.search(text)
    if match is None:
        return text, None
    return text[: match.start()].strip(), match[1].strip()


def strip_calculations(text: str) -> str:
    """The text without GSM8K's calculator notes, ``<<48/2=24>>``."""
    return _CALCULATION.sub("", text)
