"""Tasks: examples with gold answers, dropped row counts, and dataset statistics."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, get_args, overload

from posttrain import registry
from posttrain.activity import Phase, phase
from posttrain.errors import RecipeError, UsageError
from posttrain.randomness import permutation
from posttrain.recipes.sections import EMBEDDED_MODELS, Component, map_tasks, task_components
from posttrain.types import Example, Response

Split = Literal["train", "validation", "test"]
PART = "part"  # meta key naming the mixture part that an example came from


@dataclass(frozen=True, slots=True)
class TaskPart:
    """Name and weight of a mixture part. Examples store the name as ``part`` in ``meta``."""

    name: str
    weight: float


@dataclass(frozen=True)
class Task:
    """A task's examples for one split.

    Attributes:
        examples: possibly generated lazily. Each index always yields the same example.
        dropped: number of dropped rows by reason.
        worked: checks if text shows its working. None if unsupported.
        origin: data file found through the environment variable POSTTRAIN_DATA.
        shares: computes named measures over answered items (``evaluation/items.py``), each a fraction in 0..1 per
            item.
        parts: mixture parts.
        keys: number of rows containing each key, by (key, usage).
        warnings: lines to print at startup.
    """

    name: str
    split: str
    examples: Sequence[Example]
    dropped: dict[str, int] = field(default_factory=dict)
    worked: Callable[[str], bool] | None = None
    origin: str | None = None
    shares: Callable[[Sequence[Any]], Mapping[str, Sequence[float]]] | None = None
    parts: tuple[TaskPart, ...] = ()
    keys: Mapping[tuple[str, str], int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


class ExamplesOnDemand(Sequence[Example]):
    """Lazy sequence of ``size`` examples, supporting list indexing and slicing.

    ``make`` generates example ``item`` (0 .. size - 1) and must be deterministic.

    Args:
        parts: each example's mixture part, if any.
        in_memory: parts whose examples are already loaded instead of generated.
    """

    def __init__(
        self,
        size: int,
        make: Callable[[int], Example],
        *,
        parts: Sequence[str] = (),
        in_memory: Collection[str] = (),
    ) -> None:
        self.size = size
        self.make = make
        self.parts = parts
        self.in_memory = in_memory

    def changed(self, change: Callable[[Example], Example]) -> ExamplesOnDemand:
        """Apply ``change`` lazily to each example."""
        return ExamplesOnDemand(
            self.size, lambda item: change(self.make(item)), parts=self.parts, in_memory=self.in_memory
        )

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self.make(i) for i in range(*index.indices(self.size))]
        return self.make(range(self.size)[index])

    def __iter__(self) -> Iterator[Example]:
        return (self.make(item) for item in range(self.size))


def num_repeated(examples: Sequence[Example]) -> int:
    """Count examples that duplicate an earlier one, ignoring id and meta. Always 0 for lazy examples."""
    if isinstance(examples, ExamplesOnDemand):
        return 0
    distinct = set()
    for e in examples:
        distinct.add((e.messages, e.answer, e.solution, e.demonstration, e.turns, e.responses, e.conversation))
    return len(examples) - len(distinct)


def document_texts(examples: Iterable[Example], count: int) -> Iterator[str]:
    """Yield the first ``count`` examples as plain text: messages followed by demonstration or solution."""
    for example in islice(examples, count):
        answer = example.demonstration or example.solution or ""
        yield " ".join([*(message.content for message in example.messages), answer]).strip()


def build_task(component: Component, where: str = "task") -> Task:
    """Build a recipe's task."""
    with phase(f"reading task {component.name}"):
        bound = registry.find("task", component.name, where).bind(component.options, where)
        task = registry.call(where, bound)
    if not isinstance(task, Task):
        what = "the function must return a posttrain.data.base.Task. To use rows, pass a list or a file"
        raise UsageError(f"{where}: {component.name} returned {registry.describe_result(task)}; {what}")
    return task


def held_out_task(component: Component) -> Component:
    """Choose the evaluation split for a training task. For mixtures, choose a split per part."""
    return map_tasks(component, _held_out)


def eval_components(trained: Component, named: Sequence[Component]) -> list[Component]:
    """Choose evaluation tasks: ``named`` ones (``eval.tasks``), else the held-out split of the training task.

    Raises:
        RecipeError: the task defines no held-out split, or training uses all of it.
    """
    if named:
        return list(named)
    component = held_out_task(trained)
    for held, own in zip(task_components(component), task_components(trained), strict=True):
        if own.options.get("split") in (held.options["split"], "all"):
            raise RecipeError(
                f"task.split: training on {own.options['split']!r} leaves no part of task {held.name!r} for "
                "evaluation. Train on a different split, set eval.tasks, or disable evaluation with eval.every: 0"
            )
    return [component]


def _held_out(component: Component) -> Component:
    split = registry.find("task", component.name).traits.get("held_out")
    if split is None:
        raise RecipeError(
            f"eval.tasks: task {component.name!r} defines no held-out split. Set eval.tasks, or eval.every: 0"
        )
    options = {**_without_size(component), "split": split}
    return Component(name=component.name, **options)


def _without_size(component: Component) -> dict[str, object]:
    """Drop options that do not apply to other splits: ``size`` and ``seed`` for tasks that read rows.

    Tasks that generate examples have a default size, and keep it.
    """
    size = registry.find("task", component.name, "--task").options_model.model_fields.get("size")
    reads_rows = size is not None and size.default is None
    if not reads_rows:
        return dict(component.options)
    return {key: value for key, value in component.options.items() if key not in ("size", "seed")}


def choose_task(named: Component | None, model: str, trained: Component | None) -> Component:
    """Choose an evaluation task: the named one, else the run's training task, else stories for ``tiny``.

    Defaults to split ``test``. Uses the held-out part instead if the run trained on test prompts, or on a local file
    without test rows. If ``named`` has options but no name, they apply to the run's task, or to each part of its
    mixture.

    Raises:
        UsageError: the model is not a run, and no task was named.
    """
    options: dict[str, object] = {}
    if named is not None:
        options = dict(named.options)
    if named is not None and named.name:
        name = named.name
    elif trained is not None:
        return map_tasks(trained, lambda component: _own_task(component, options))
    elif model in EMBEDDED_MODELS:
        name = "stories"
    else:
        known = ", ".join(registry.entries("task"))
        raise UsageError(
            f"--task is required, because {model!r} is not a run with a recorded task. Known tasks: {known}"
        )
    return map_tasks(Component(name=name, **options), lambda component: _with_split(component, "test"))


def _own_task(component: Component, options: Mapping[str, object]) -> Component:
    own = {key: value for key, value in _without_size(component).items() if key != "split"}
    traits = registry.find("task", component.name).traits
    learns_from_test = own.get(traits.get("learns_from_test", ""))
    is_of_training = own.get("path") is not None and "path" not in options and not traits.get("splits_file")
    split = "test"
    if is_of_training or learns_from_test:
        split = _held_out(component).options["split"]
    return _with_split(Component(name=component.name, **{**own, **options}), split)


def _with_split(component: Component, split: str) -> Component:
    """Set a default split, for tasks that support splits; the held-out one if a task has no such split."""
    entry = registry.find("task", component.name, "--task")
    field_info = entry.options_model.model_fields.get("split")
    if field_info is None:
        return component
    known = get_args(field_info.annotation)
    if known and split not in known:
        split = entry.traits.get("held_out") or split
    options = {"split": split, **component.options}
    return Component(name=component.name, **options)


MAX_KINDS = 30  # keys with more distinct values, such as titles, are not broken down
PERCENTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


@dataclass(slots=True)
class Description:
    """Dataset statistics.

    Attributes:
        lengths: text lengths by part (``prompt``, ``solution``, ``chosen``, ...).
        longest: per example, length of prompt plus longest response.
        repeated_prompts: examples whose prompt occurred before.
        identical_pairs: pairs whose responses differ only in whitespace.
        longer_chosen: pairs whose chosen response is longer. Ties count half.
        margins: score differences between chosen and rejected.
        labels: label counts for scored responses and steps.
        kinds: value counts per meta key.
    """

    num_examples: int
    num_read: int
    lengths: dict[str, list[int]] = field(default_factory=dict)
    longest: list[int] = field(default_factory=list)
    repeated_prompts: int = 0
    num_pairs: int = 0
    identical_pairs: int = 0
    longer_chosen: float = 0.0
    margins: list[float] = field(default_factory=list)
    labels: dict[str, Counter[str]] = field(default_factory=dict)
    answers: Counter[str] = field(default_factory=Counter)
    turns: Counter[int] = field(default_factory=Counter)
    graders: Counter[str] = field(default_factory=Counter)
    kinds: dict[str, Counter[str]] = field(default_factory=dict)

    def over(self, limit: int) -> int:
        """Count examples whose prompt plus longest response exceed ``limit``."""
        return sum(length > limit for length in self.longest)


def describe_task(task: Task, measure: Callable[[str], int], *, n: int) -> Description:
    """Read the first ``n`` examples (or fewer, if the task is smaller). ``measure`` computes text length."""
    stats = Description(len(task.examples), min(n, len(task.examples)))
    with phase("reading", stats.num_read, "examples") as read:
        _describe_examples(stats, task, measure, read)
    return stats


def _describe_examples(stats: Description, task: Task, measure: Callable[[str], int], read: Phase) -> None:
    seen: set[tuple[tuple[str, str], ...]] = set()
    for index in range(stats.num_read):
        example = task.examples[index]
        read.num_done = index
        prompt = tuple((message.role, message.content) for message in example.messages)
        stats.repeated_prompts += prompt in seen
        seen.add(prompt)
        stats.turns[len(example.messages)] += 1
        stats.graders[example.grader] += 1
        if example.answer is not None:
            stats.answers[example.answer] += 1
        for key, value in example.meta.items():
            if isinstance(value, str | int) or value is None:
                stats.kinds.setdefault(key, Counter())[str(value)] += 1
        _add_answers(stats, example, measure)
    stats.kinds = {key: values for key, values in stats.kinds.items() if 1 < len(values) <= MAX_KINDS}


def is_pair(responses: Sequence[Response]) -> bool:
    """Check if these are two complete responses with different scores, including labels 1 and 0."""
    return len(responses) == 2 and responses[0].score != responses[1].score and not responses[0].steps


def _add_answers(stats: Description, example: Example, measure: Callable[[str], int]) -> None:
    lengths: dict[str, list[int]] = {}
    if example.solution is not None:
        lengths["solution"] = [measure(example.solution)]
    if example.demonstration is not None:
        lengths["response"] = [measure(example.demonstration)]
    if is_pair(example.responses):
        better, worse = sorted(example.responses, key=lambda r: r.score, reverse=True)
        chosen = measure(better.text)
        rejected = measure(worse.text)
        lengths |= {"chosen": [chosen], "rejected": [rejected]}
        stats.longer_chosen += 0.5 if chosen == rejected else float(chosen > rejected)
        stats.num_pairs += 1
        stats.identical_pairs += better.text.split() == worse.text.split()
        stats.margins.append(better.score - worse.score)
    elif example.responses:
        lengths["response"] = [measure(response.text) for response in example.responses]
        for response in example.responses:
            if response.steps:
                stats.labels.setdefault("steps", Counter()).update(str(label) for label in response.step_labels)
            stats.labels.setdefault("answers", Counter())[f"{response.score:g}"] += 1
    prompt = sum(measure(message.content) for message in example.messages)
    longest = max((max(values) for values in lengths.values()), default=0)
    stats.longest.append(prompt + longest)
    for part, values in {"prompt": [prompt], **lengths}.items():
        stats.lengths.setdefault(part, []).extend(values)


def percentile(values: Sequence[float], share: float) -> float:
    """Compute the smallest value that at least a fraction ``share`` of all values do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def random_examples(task: Task, n: int, seed: int) -> list[Example]:
    """Draw ``n`` examples without replacement, returned in task order."""
    chosen = permutation(seed, "examples shown", 0, len(task.examples))[:n]
    return [task.examples[int(i)] for i in sorted(chosen)]
