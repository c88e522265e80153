"""Several tasks as one: examples of all parts, each of which says what part it is of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from posttrain.errors import PosttrainError, UsageError
from posttrain.option_types import Seed
from posttrain.randomness import permutation
from posttrain.recipes.document import complete_word
from posttrain.recipes.sections import Part, Word, read_parts
from posttrain.registry import register
from posttrain.tasks.base import Answered, ExamplesOnDemand, Task, TaskPart, build_task
from posttrain.tasks.description import is_pair
from posttrain.types import Example

PART = "part"  # the key of ``meta`` that says which part an example is of


def _complete(options: dict[str, Any], where: str) -> dict[str, Any]:
    """The options of a mixture with those of every part's task filled in and checked."""
    parts = read_parts(options["parts"], where)
    tasks = [complete_word(part.task, "task", f"{where}.parts.{i}.task") for i, part in enumerate(parts)]
    plain = [part.model_copy(update={"task": task}).model_dump() for part, task in zip(parts, tasks, strict=True)]
    return options | {"parts": plain}


@register("task", complete=_complete)
def mixture(
    *,
    parts: list[dict[str, Any]],
    split: str | None = None,
    by_weight: bool = False,
    size: Annotated[int, Field(ge=1)] | None = None,
    seed: Seed = 0,
) -> Task:
    """Several tasks in one run; training draws from each by its weight, whatever their sizes.

    ``parts: [{task: {name: gsm8k}, weight: 2}, {task: math, name: hard}]``. A part has a ``task``, a ``weight`` (1)
    and a ``name`` (that of its task), under which its numbers are reported; an example's ``meta`` tells it as ``part``.
    Its task brings the grader of its examples. Parts are of one kind: questions, pairs, judged answers, labelled steps
    or texts to read.

    Args:
        parts: what is mixed.
        split: of every part, in place of what stands there.
        by_weight: only so many examples of each part as go with its weight, the scarcest part whole; the others are
            counted as left out. What is held out for evaluation is taken so.
        size: at most so many examples in all, shared out by weight.
        seed: another seed, other examples, where some are left out.

    Raises:
        RecipeError: no parts, a weight that is not above 0, a name given twice, a mixture in a mixture.
        UsageError: parts of different kinds, or one without examples.
    """
    read = read_parts(parts, "task")
    tasks = [_build(part, number, split) for number, part in enumerate(read)]
    _check_kinds(read, tasks)
    there, weights = [len(task.examples) for task in tasks], [part.weight for part in read]
    order, counts = allot(weights, there, whole=not by_weight, size=size)
    dropped = {
        f"{part.name}: {why}": n for part, task in zip(read, tasks, strict=True) for why, n in task.dropped.items()
    }
    reason = "more than go with the weights" if by_weight else f"beyond task.size={size}"
    dropped |= {f"{p.name}: {reason}": n - count for p, n, count in zip(read, there, counts, strict=True) if n > count}
    chosen = [
        range(n) if count == n else sorted(int(i) for i in permutation(seed, "size", 0, n)[:count])
        for n, count in zip(there, counts, strict=True)
    ]
    return Task(
        name="mixture",
        split="+".join(dict.fromkeys(task.split for task in tasks)),
        examples=Mixed([part.name for part in read], tasks, order, chosen),
        dropped=dropped,
        worked=tasks[0].worked if len({task.worked for task in tasks}) == 1 else None,
        shares=lambda items: _shares(items, read, tasks),
        parts=tuple(TaskPart(part.name, part.weight) for part in read),
        notices=tuple(f"{p.name}: {line}" for p, task in zip(read, tasks, strict=True) for line in task.notices),
    )


def _build(part: Part, number: int, split: str | None) -> Task:
    where = f"task.parts.{number}.task"
    options = part.task.options | ({} if split is None else {"split": split})
    try:
        task = build_task(Word(name=part.task.name, **options), where)
    except PosttrainError as error:  # a file's name or a line says nothing of whose it is
        error.args = (f"part {part.name!r}: {error}",)
        raise
    if len(task.examples) == 0:
        raise UsageError(f"{where}: part {part.name!r} has no examples; leave it out, or give it some")
    return task


def _check_kinds(parts: Sequence[Part], tasks: Sequence[Task]) -> None:
    kinds = {part.name: _kind(task.examples[0]) for part, task in zip(parts, tasks, strict=True)}
    if len(set(kinds.values())) > 1:
        told = "; ".join(f"{name}: {kind}" for name, kind in kinds.items())
        raise UsageError(
            f"task.parts: the parts of a mixture are of one kind, and these are not ({told}). Train on one kind after "
            "the other, with a recipe for each"
        )


def _kind(example: Example) -> str:
    """What can be learnt from an example, in words."""
    if any(response.steps for response in example.responses):
        return "answers with labelled steps"
    if is_pair(example.responses):
        return "pairs of answers"
    if example.responses:
        return "judged answers"
    return "questions" if example.messages else "texts to read"


class Mixed(ExamplesOnDemand):
    """The examples of all parts, in turns by weight; each is made when it is asked for.

    ``order``: the part of each; ``chosen``: of each part, which of its examples. An id has the part's name before it.
    """

    def __init__(
        self, names: Sequence[str], tasks: Sequence[Task], order: Sequence[int], chosen: Sequence[Sequence[int]]
    ) -> None:
        super().__init__(len(order))
        self.names, self.tasks, self.chosen = names, tasks, chosen
        self.order, self._place = order, [0] * len(order)
        before = [0] * len(tasks)
        for item, part in enumerate(order):
            self._place[item] = before[part]
            before[part] += 1

    def make(self, item: int) -> Example:
        part = self.order[item]
        example = self.tasks[part].examples[self.chosen[part][self._place[item]]]
        name = self.names[part]
        if PART in example.meta:
            raise UsageError(
                f"task.parts.{part}: rows of part {name!r} have a key {PART!r}, by which a mixture tells its parts "
                "apart; call that key something else"
            )
        return replace(example, id=f"{name}/{example.id}", meta={PART: name, **example.meta})


def _shares(items: Sequence[Answered], parts: Sequence[Part], tasks: Sequence[Task]) -> Mapping[str, Sequence[float]]:
    """By part the share of right answers of each item that can be graded, and what the part's own task tells."""
    shares: dict[str, Sequence[float]] = {}
    for part, task in zip(parts, tasks, strict=True):
        own = [item for item in items if item.meta.get(PART) == part.name]
        answered = [item for item in own if item.samples]
        if any(not item.is_ungraded for item in answered):
            shares[f"{part.name}:accuracy"] = [item.share for item in own if not item.is_ungraded]
        told = task.shares(own) if task.shares is not None else {}
        shares |= {f"{part.name}:{name}": values for name, values in told.items()}
    return shares


def next_turn(weights: Sequence[float], turns: Sequence[int]) -> int:
    """The part whose turn is next, after each had t ``turns``: that of the largest w / (2 t + 1), of equals the first.

    So t_k is the number of seats of a party with w_k votes (Webster 1832, Sainte-Laguë 1910). Wherever n w_k / Σw are
    whole numbers, these are the turns after n; else they are next to them. A part of weight 0 has no turn.
    """
    return max(range(len(weights)), key=lambda k: (weights[k] / (2 * turns[k] + 1), -k))


def allot(
    weights: Sequence[float], there: Sequence[int], *, whole: bool, size: int | None = None
) -> tuple[list[int], list[int]]:
    """Whose turn each of the examples is, and how many each part gives, of those that are ``there``.

    ``whole``: a part that has none left is passed over, so that all are given; else it ends there. ``size``: or at
    that many.
    """
    turns, left, order = [0] * len(weights), list(weights), list[int]()
    limit = sum(there) if size is None else min(size, sum(there))
    while len(order) < limit:
        part = next_turn(left, turns)
        if turns[part] == there[part]:
            if not whole:
                break
            left[part] = 0.0
            continue
        turns[part] += 1
        order.append(part)
    return order, turns
