"""Knights and knaves: who always lies and who never does (Xie et al. 2024)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import Field

from posttrain.errors import DataError
from posttrain.registry import register
from posttrain.tasks.base import Task
from posttrain.tasks.reader import Split, choose_split, reads_rows
from posttrain.tasks.reading import Row, read_file, read_hub
from posttrain.types import Example, Message

MIN_PEOPLE, MAX_PEOPLE = 2, 8  # of the published puzzles
INSTRUCTION = 'Answer with one line for each of them, such as "(1) NAME is a knight" or "(2) NAME is a knave".'

People = Annotated[int, Field(ge=MIN_PEOPLE, le=MAX_PEOPLE)]


@register("task", held_out="validation")
@reads_rows
def knights_and_knaves(
    *,
    split: Split = "train",
    path: str | None = None,
    hub: str = "K-and-K/knights-and-knaves",
    people: list[People] | None = None,
    instruction: str = INSTRUCTION,
    validation_share: Annotated[float, Field(ge=0, lt=1)] = 0.05,
) -> Task:
    """Puzzles with one solution each, graded by the grader of the same name.

    Keys: ``quiz``; ``names``; ``solution``, a list of true (knight) and false (knave) in the same order;
    ``statements`` (optional, kept in meta: what each inhabitant says, as nested tuples). meta holds ``people`` (their
    number), ``names`` and ``solution``.

    Args:
        split: ``validation`` is a part of the training rows chosen by a hash of the prompt, and ``train`` is the rest.
            ``test`` of a local file is the whole file.
        hub: name of the data set on the hub, with the configurations ``train`` and ``test`` and a split for each number
            of people (``2ppl`` to ``8ppl``).
        people: only puzzles with so many people; none: all.
        instruction: follows the puzzle and says how the answer is to be written. May be empty.
        validation_share: share of the training rows that is held out.

    Raises:
        DataError: a missing or malformed file or row, with its line, or no puzzle of that size.

    Source: Xie et al. 2024 (arXiv 2410.23123). Departure: the puzzle is followed by the form of the answer.
    """
    wanted = sorted(set(people)) if people else list(range(MIN_PEOPLE, MAX_PEOPLE + 1))
    source = "test" if split == "test" else "train"
    rows = read_file(path) if path is not None else _read_sizes(hub, source, wanted)
    read = [read_example(row, split, number, instruction) for number, row in enumerate(rows, start=1)]
    examples = [example for example in read if not people or example.meta["people"] in wanted]
    place = path or f"hub:{hub}/{source}"
    if read and not examples:
        there = ", ".join(str(n) for n in sorted({example.meta["people"] for example in read}))
        raise DataError(place, f"no puzzle with {' or '.join(map(str, wanted))} people. There are some with {there}")
    return Task("knights_and_knaves", split, choose_split(examples, split, validation_share, place))


def _read_sizes(hub: str, config: str, sizes: Sequence[int]) -> Iterator[Row]:
    for size in sizes:
        yield from read_hub(hub, config, f"{size}ppl")


def read_example(row: Row, split: str, number: int, instruction: str) -> Example:
    """One row as an example; ``number`` counts the rows of all sizes.

    Raises:
        DataError: a key is missing or of the wrong type, a name stands twice, or names and solution do not match.
    """
    names, solution = (row.entries(key, "with one entry for each inhabitant") for key in ("names", "solution"))
    if not all(isinstance(name, str) and name.strip() for name in names) or len(set(names)) < len(names):
        raise row.fail(f"'names' must be different names; got {names!r}")
    if not all(isinstance(role, bool) for role in solution) or len(solution) != len(names):
        raise row.fail(f"'solution' must be true or false for each of {len(names)} names; got {solution!r}")
    quiz = row.text("quiz").strip()
    meta: dict[str, Any] = {"people": len(names), "names": tuple(names), "solution": tuple(solution)}
    if row.has("statements"):
        meta["statements"] = row.text("statements")
    return Example(
        id=f"knights_and_knaves/{split}/{number}",
        messages=(Message("user", f"{quiz}\n{instruction}" if instruction else quiz),),
        answer=write_answer(names, solution),
        meta=meta,
        grader="knights_and_knaves",
    )


def write_answer(names: Sequence[str], solution: Sequence[bool]) -> str:
    """The answer as the data set writes it: ``(1) Zoey is a knight`` and so on, one line for each."""
    roles = ["knight" if role else "knave" for role in solution]
    return "\n".join(f"({i}) {name} is a {role}" for i, (name, role) in enumerate(zip(names, roles, strict=True), 1))
