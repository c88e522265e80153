"""Instruction following that programs can verify: IFEval (Zhou et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from posttrain.errors import RecipeError, UnknownWord
from posttrain.graders.ifeval import READ_LANGUAGE, known_languages, read_arguments
from posttrain.registry import register
from posttrain.tasks.base import Task
from posttrain.tasks.reader import Dropped, collect, reads_rows
from posttrain.tasks.reading import Row, read_source
from posttrain.types import Example, Message


@register("task", held_out="test")
@reads_rows
def ifeval(*, split: Literal["test"] = "test", path: str | None = None, hub: str = "google/IFEval") -> Task:
    """Prompts with instructions about the form of the response, such as a number of words; for evaluation only.

    Keys: ``key``, ``prompt``, ``instruction_id_list`` and ``kwargs`` (the arguments of each instruction; those that are
    null are not given). There are no gold answers: the grader ``ifeval`` checks the response itself. meta holds the
    key, the two lists, and ``num_instructions``. Rows with an instruction that is unknown, or whose arguments do
    not fit, are dropped and counted.

    Args:
        split: there is nothing but a test split.
        hub: name of the data set on the hub (where its one split is called ``train``).

    Raises:
        MissingExtra: ``datasets`` or ``pyarrow`` is needed and not installed, or ``langdetect``, which
            instructions about languages need.

    Source: Zhou et al. 2023 (arXiv 2311.07911).
    """

    def read(row: Row) -> Example:
        example, problem = read_example(row)
        if problem is not None:
            raise Dropped(problem)
        return example

    rows, place = read_source(path, hub, None, "train")
    return collect(rows, read, place).as_task("ifeval", place, split)


def read_example(row: Row) -> tuple[Example, str | None]:
    """One row as an example, and why it cannot be graded, if so.

    Raises:
        DataError: a key is missing or of the wrong type.
        MissingExtra: an instruction about languages, and ``langdetect`` is not installed.
    """
    keys, each = ("instruction_id_list", "kwargs"), "with one entry for each instruction"
    identifiers, arguments = (row.entries(key, each) for key in keys)
    if len(arguments) != len(identifiers):
        raise row.fail(f"{len(identifiers)} instructions need as many 'kwargs'; got {len(arguments)}")
    read: list[Mapping[str, Any]] = []
    problem = None
    for identifier, kwargs in zip(identifiers, arguments, strict=True):
        if not isinstance(identifier, str) or not (kwargs is None or isinstance(kwargs, Mapping)):
            raise row.fail("'instruction_id_list' holds texts and 'kwargs' mappings")
        try:
            read.append(read_arguments(identifier, kwargs))
        except (UnknownWord, RecipeError) as error:
            problem = problem or str(error)
            continue
        if identifier in READ_LANGUAGE and read[-1].get("language", "en") not in known_languages():
            problem = problem or f"no detector for the language {read[-1]['language']!r}"
    meta = {
        "key": row.data.get("key"),
        "num_instructions": len(identifiers),
        "instruction_id_list": tuple(identifiers),
        "kwargs": tuple(read),
    }
    prompt = Message("user", row.text("prompt"))
    return Example(id=f"ifeval/test/{row.line}", messages=(prompt,), meta=meta, grader="ifeval"), problem
