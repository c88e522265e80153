"""Mixtures of tasks. Examples record which part they belong to."""

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
    """Complete and validate the options of each part's task."""
    completed = []
    for number, part in enumerate(read_parts(options["parts"], where)):
        task = complete_component(part.task, "task", f"{where}.parts.{number}.task")
        completed.append(part.model_copy(update={"task": task}).model_dump())
    return {**options, "parts": completed}


@register("task", complete=_complete)
def mixture(*, parts: list[dict[str, Any]]) -> Task:
    """Trains on multiple tasks, sampled in proportion to weights regardless of size.

    ``parts: [{task: {name: gsm8k}, weight: 2}, {task: math, name: hard}]``. Parts have a ``task``, a ``weight``
    (default 1) and a ``name`` (default: task name), used for reporting and stored in ``meta`` as ``part``. Each
    example uses the grader chosen by its task. All parts must be of the same kind: questions, pairs, scored
    responses, labeled steps or raw text. Examples are interleaved by weight; exhausted parts are skipped.

    Args:
        parts: tasks to mix.

    Raises:
        RecipeError: no parts, a non-positive weight, a duplicate name, or nested mixtures.
        UsageError: parts of different kinds, or without examples.
    """
    read = read_parts(parts, "task")
    tasks = {part.name: _build(part, number) for number, part in enumerate(read)}
    kinds = {name: _kind(task.examples[0]) for name, task in tasks.items()}
    if len(set(kinds.values())) > 1:
        found = "; ".join(f"{name}: {kind}" for name, kind in kinds.items())
        raise UsageError(
            f"task.parts: all parts must be of the same kind, but got {found}. Train on different kinds sequentially, "
            "with separate recipes"
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
    except PosttrainError as error:  # file name and line do not identify the part
        error.args = (f"part {part.name!r}: {error}",)
        raise
    if len(task.examples) == 0:
        raise UsageError(f"{where}: part {part.name!r} contains no examples. Remove it, or add examples")
    return task


def _kind(example: Example) -> str:
    if any(response.steps for response in example.responses):
        return "labeled steps"
    if is_pair(example.responses):
        return "pairs"
    if example.responses:
        return "labeled responses"
    if example.messages:
        return "questions"
    return "raw text"


def _mixed(tasks: Mapping[str, Task], order: Sequence[int]) -> ExamplesOnDemand:
    """Interleave all parts in the given order. Ids are prefixed with part names."""
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
                f"task.parts: rows in part {name!r} contain the key {PART!r}, which mixtures reserve. Rename that key"
            )
        return replace(example, id=f"{name}/{example.id}", meta={PART: name, **example.meta})

    in_memory = [name for name, task in tasks.items() if not isinstance(task.examples, ExamplesOnDemand)]
    return ExamplesOnDemand(len(order), make, parts=[name for name, _ in places], in_memory=in_memory)


def _shares(items: Sequence[Any], tasks: Mapping[str, Task]) -> Mapping[str, Sequence[float]]:
    """Compute each part's accuracy over graded items, plus the measures defined by its task."""
    shares: dict[str, Sequence[float]] = {}
    for name, task in tasks.items():
        own = [item for item in items if item.meta.get(PART) == name]
        if any(item.samples and not item.is_ungraded for item in own):
            shares[f"{name}:accuracy"] = [item.share for item in own if not item.is_ungraded]
        if task.shares is not None:
            shares |= {f"{name}:{measure}": values for measure, values in task.shares(own).items()}
    return shares


def next_turn(weights: Sequence[float], turns: Sequence[int]) -> int:
    """Choose the next part after ``turns`` t: maximize w / (2 t + 1), preferring the first on ties.

    These are Webster's seat allocations (Webster 1832, Sainte-Laguë 1910). Whenever all n w_k / Σw are integers, they
    equal the turns after n draws; otherwise they are rounded up or down. Parts with weight 0 are never chosen.
    """
    quotients = [weight / (2 * num_turns + 1) for weight, num_turns in zip(weights, turns, strict=True)]
    return quotients.index(max(quotients))


def take_turns(weights: Sequence[float], sizes: Sequence[int]) -> list[int]:
    """List the part for each example, interleaved by weight. Exhausted parts are skipped."""
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
