"""Several tasks as one: examples of all parts, each of which names its part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from posttrain.data.base import PART, ExamplesOnDemand, Task, TaskPart, build_task, is_pair
from posttrain.errors import PosttrainError, UsageError
from posttrain.recipes.document import complete_component
from posttrain.recipes.sections import Part, read_parts
from posttrain.registry import register
from posttrain.types import Example


def _complete(options: dict[str, object], where: str) -> dict[str, object]:
    """The options of a mixture with the options of every part's task filled in and checked."""
    completed = []
    for number, part in enumerate(read_parts(options["parts"], where)):
        task = complete_component(part.task, "task", f"{where}.parts.{number}.task")
        completed.append(part.model_copy(update={"task": task}).model_dump())
    return {**options, "parts": completed}


@register("task", complete=_complete)
def mixture(*, parts: list[dict[str, Any]]) -> Task:
    """Several tasks in one run; training draws from each by its weight, whatever their sizes.

    ``parts: [{task: {name: gsm8k}, weight: 2}, {task: math, name: hard}]``. A part has a ``task``, a ``weight`` (1)
    and a ``name`` (that of its task), under which its numbers are reported; an example's ``meta`` has it as ``part``.
    Its task brings the grader of its examples. Parts are of one kind: questions, pairs, judged answers, labelled steps
    or texts to read. Its examples stand in turns by weight; a part that has none left is passed over.

    Args:
        parts: what is mixed.

    Raises:
        RecipeError: no parts, a weight that is not above 0, a name given twice, a mixture in a mixture.
        UsageError: parts of different kinds, or one without examples.
    """
    read = read_parts(parts, "task")
    tasks = {part.name: _build(part, number) for number, part in enumerate(read)}
    kinds = {name: _kind(task.examples[0]) for name, task in tasks.items()}
    if len(set(kinds.values())) > 1:
        found = "; ".join(f"{name}: {kind}" for name, kind in kinds.items())
        raise UsageError(
            f"task.parts: the parts of a mixture are of one kind, and these are not ({found}). Train on one kind after "
            "the other, with a recipe for each"
        )
    order = take_turns([part.weight for part in read], [len(task.examples) for task in tasks.values()])
    dropped: dict[str, int] = {}
    warnings: list[str] = []
    for name, task in tasks.items():
        dropped |= {f"{name}: {reason}": count for reason, count in task.dropped.items()}
        warnings += [f"{name}: {line}" for line in task.warnings]
    splits = dict.fromkeys(task.split for task in tasks.values())
    ways_to_show_working = {task.worked for task in tasks.values()}
    worked = None
    if len(ways_to_show_working) == 1:
        (worked,) = ways_to_show_working
    return Task(
        name="mixture",
        split="+".join(splits),
        examples=_mixed(tasks, order),
        dropped=dropped,
        worked=worked,
        shares=lambda items: _shares(items, tasks),
        parts=tuple(TaskPart(part.name, part.weight) for part in read),
        warnings=tuple(warnings),
    )


def _build(part: Part, number: int) -> Task:
    where = f"task.parts.{number}.task"
    try:
        task = build_task(part.task, where)
    except PosttrainError as error:  # a file's name or a line does not name the part
        error.args = (f"part {part.name!r}: {error}",)
        raise
    if len(task.examples) == 0:
        raise UsageError(f"{where}: part {part.name!r} has no examples; leave it out, or give it some")
    return task


def _kind(example: Example) -> str:
    if any(response.steps for response in example.responses):
        return "answers with labelled steps"
    if is_pair(example.responses):
        return "pairs of answers"
    if example.responses:
        return "judged answers"
    if example.messages:
        return "questions"
    return "texts to read"


def _mixed(tasks: Mapping[str, Task], order: Sequence[int]) -> ExamplesOnDemand:
    """The examples of all parts in the given order of parts; an id has the part's name before it."""
    names = list(tasks)
    turns = [0] * len(tasks)
    places: list[tuple[str, int]] = []
    for part in order:
        places.append((names[part], turns[part]))
        turns[part] += 1

    def make(item: int) -> Example:
        name, place = places[item]
        example = tasks[name].examples[place]
        if PART in example.meta:
            raise UsageError(
                f"task.parts: rows of part {name!r} have a key {PART!r}, by which a mixture tells its parts "
                "apart; call that key something else"
            )
        return replace(example, id=f"{name}/{example.id}", meta={PART: name, **example.meta})

    in_memory = [name for name, task in tasks.items() if not isinstance(task.examples, ExamplesOnDemand)]
    return ExamplesOnDemand(len(order), make, parts=[name for name, _ in places], in_memory=in_memory)


def _shares(items: Sequence[Any], tasks: Mapping[str, Task]) -> Mapping[str, Sequence[float]]:
    """Return by part the share of right answers of each graded item, and the measures of the part's own task."""
    shares: dict[str, Sequence[float]] = {}
    for name, task in tasks.items():
        own = [item for item in items if item.meta.get(PART) == name]
        if any(item.samples and not item.is_ungraded for item in own):
            shares[f"{name}:accuracy"] = [item.share for item in own if not item.is_ungraded]
        if task.shares is not None:
            shares |= {f"{name}:{measure}": values for measure, values in task.shares(own).items()}
    return shares


def next_turn(weights: Sequence[float], turns: Sequence[int]) -> int:
    """The part whose turn is next, after each had t ``turns``: the largest w / (2 t + 1), of equal ones the first.

    So t_k is the number of seats of a party with w_k votes (Webster 1832, Sainte-Laguë 1910). Wherever n w_k / Σw are
    whole numbers, these are the turns after n; else they are next to them. A part of weight 0 has no turn.
    """
    quotients = [weight / (2 * num_turns + 1) for weight, num_turns in zip(weights, turns, strict=True)]
    return quotients.index(max(quotients))


def take_turns(weights: Sequence[float], sizes: Sequence[int]) -> list[int]:
    """The part of each example, in turns by weight; a part that has none left is passed over."""
    turns = [0] * len(weights)
    left = list(weights)
    order = list[int]()
    while len(order) < sum(sizes):
        part = next_turn(left, turns)
        if turns[part] == sizes[part]:
            left[part] = 0.0
        else:
            turns[part] += 1
            order.append(part)
    return order
