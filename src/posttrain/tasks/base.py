"""What a task is: examples with answers, and what had to be dropped to get them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, overload

from posttrain import registry
from posttrain.errors import RecipeError, UsageError
from posttrain.recipes.recipe import Recipe
from posttrain.recipes.sections import MIXTURE, Word, map_tasks, task_words
from posttrain.types import Example


class AnsweredSample(Protocol):
    """A graded answer: the unweighted rewards and the facts of its grader."""

    @property
    def parts(self) -> Mapping[str, float]: ...


class Answered(Protocol):
    """An item of an evaluation (``evals/items.py``), as far as a task looks at it."""

    @property
    def id(self) -> str: ...
    @property
    def meta(self) -> Mapping[str, Any]: ...
    @property
    def samples(self) -> Sequence[AnsweredSample]: ...
    @property
    def share(self) -> float: ...
    @property
    def is_ungraded(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class TaskPart:
    """A part of a mixture: its name (``part`` in the ``meta`` of its examples) and how much it counts."""

    name: str
    weight: float


@dataclass(frozen=True)
class Task:
    """Examples of one split of a task.

    ``examples`` may be made on demand; the same index always gives the same example. ``dropped``
    counts rows that were left out, by reason. ``worked`` says whether a text shows written
    working, where the task can tell (evaluation then reports the share of such answers).
    ``origin``: the file, where the environment said where it is. ``shares``: what else the task wants to be told of its
    items once they are answered, by name, one share in 0..1 per item (or pair of items). ``parts``: of a mixture.
    ``keys``: how many rows had a key, by the key and what was done with it. ``notices``: what a run says at its start,
    such as the grader that the task has chosen.
    """

    name: str
    split: str
    examples: Sequence[Example]
    dropped: dict[str, int] = field(default_factory=dict)
    worked: Callable[[str], bool] | None = None
    origin: str | None = None
    shares: Callable[[Sequence[Answered]], Mapping[str, Sequence[float]]] | None = None
    parts: tuple[TaskPart, ...] = ()
    keys: Mapping[tuple[str, str], int] = field(default_factory=dict)
    notices: tuple[str, ...] = ()


class ExamplesOnDemand(Sequence[Example]):
    """A sequence of ``size`` examples, each made when it is asked for; index and slice as in a list."""

    def __init__(self, size: int) -> None:
        self.size = size

    @abstractmethod
    def make(self, item: int) -> Example:
        """Example ``item`` (0 .. size - 1); the same item always gives the same example."""

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self.make(i) for i in range(*index.indices(self.size))]
        if not -self.size <= index < self.size:
            raise IndexError(index)
        return self.make(index % self.size)

    def __iter__(self) -> Iterator[Example]:
        return (self.make(item) for item in range(self.size))


def num_repeated(examples: Sequence[Example]) -> int:
    """How many examples say the same as an earlier one: prompt, answer, solution, demonstration and given answers.

    0 for examples that are made on demand.
    """
    if isinstance(examples, ExamplesOnDemand):
        return 0
    return len(examples) - len(
        {(e.messages, e.answer, e.solution, e.demonstration, e.turns, e.responses, e.conversation) for e in examples}
    )


def build_task(word: Word, where: str = "task") -> Task:
    """The task that a recipe names."""
    return registry.find("task", word.name, where).bind(word.options, where)()


def held_out_task(word: Word) -> Word:
    """The evaluation split of a training task, as the task states it (``validation`` or ``test``).

    Of a mixture those of its parts, by weight.
    """
    return _by_weight(map_tasks(word, _held_out))


def eval_words(recipe: Recipe) -> list[Word]:
    """The tasks that a run is evaluated on: those of ``eval.tasks``, else the held-out split of its own task.

    Raises:
        RecipeError: the task names no such split, or training leaves nothing of it.
    """
    if recipe.eval.tasks:
        return list(recipe.eval.tasks)
    word = held_out_task(recipe.task)
    for held, trained in zip(task_words(word), task_words(recipe.task), strict=True):
        if held.options["split"] == (recipe.task.options.get("split") or trained.options.get("split")):
            raise RecipeError(
                f"task.split: training on {held.options['split']!r} leaves nothing of task {held.name!r} to "
                "evaluate on; train on another split, give eval.tasks, or switch evaluation off with eval.every: 0"
            )
    return [word]


def _by_weight(word: Word) -> Word:
    """A mixture as it is measured on: so many examples of each part as go with its weight."""
    if word.name != MIXTURE:
        return word
    kept = {key: value for key, value in word.options.items() if key not in ("split", "size", "seed")}
    return Word(name=word.name, **(kept | {"by_weight": True}))


def _held_out(word: Word) -> Word:
    entry = registry.find("task", word.name)
    split = entry.traits.get("held_out")
    if split is None:
        raise RecipeError(f"eval.tasks: task {word.name!r} names no held-out split; give eval.tasks, or eval.every: 0")
    return Word(name=word.name, **(_without_size(word) | {"split": split}))


def _without_size(word: Word) -> dict[str, Any]:
    """The options of a task; of one that reads rows without those that say how many there are to train on.

    A task that makes its examples says by its size how many there are, and has it always.
    """
    size = registry.find("task", word.name).options_model.model_fields.get("size")
    reads_rows = size is not None and size.default is None
    return {key: value for key, value in word.options.items() if not (reads_rows and key in ("size", "seed"))}


def choose_task(named: Word | None, model: str, recipe: Recipe | None) -> Word:
    """What to measure on: the task named, else the run's own, else stories for ``tiny``.

    The split is ``test`` unless named. Of a run's own local file, which was trained on, and of a run that learnt
    from test prompts too, it is the part that was held out.

    Raises:
        UsageError: a model that is no run, and no task named.
    """
    options: dict[str, Any] = dict(named.options) if named is not None else {}
    if named is not None and named.name:
        name = named.name
    elif recipe is not None:
        own = _by_weight(map_tasks(recipe.task, lambda word: _own_task(word, options)))
        return Word(name=own.name, **(own.options | options))
    elif model == "tiny":
        name = "stories"
    else:
        known = ", ".join(registry.entries("task"))
        raise UsageError(f"--task is needed: {model!r} is no run that would tell its own. Known tasks: {known}")
    return _with_split(name, options, "test")


def _own_task(word: Word, asked: Mapping[str, Any]) -> Word:
    """What a run that learnt a task is measured on, but for the options that are ``asked`` for."""
    own = {key: value for key, value in _without_size(word).items() if key != "split"}
    mixes = own.get(registry.find("task", word.name, "--task").traits.get("learns_from_test", ""))
    split = "test"
    if (own.get("path") is not None and "path" not in asked) or mixes:
        split = _held_out(word).options["split"]
    return _with_split(word.name, own, split)


def _with_split(name: str, options: Mapping[str, Any], split: str) -> Word:
    """A task with a split, unless one is named already; of a mixture the parts, by weight."""
    if name == MIXTURE:
        mixture = map_tasks(Word(name=name, **options), lambda word: _with_split(word.name, word.options, split))
        return Word(name=name, **({"by_weight": True} | mixture.options))
    if "split" in registry.find("task", name, "--task").options_model.model_fields:
        return Word(name=name, **({"split": split} | dict(options)))
    return Word(name=name, **options)
