"""Counts over a task's data: lengths, duplicates, balance of labels. Nothing is trained or changed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from posttrain.randomness import permutation
from posttrain.tasks.base import Task
from posttrain.types import Example, Response

MAX_KINDS = 30  # a key of meta with more values than this, such as a title, is no breakdown
PERCENTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


@dataclass(slots=True)
class Description:
    """Counts over the examples that were read.

    Attributes:
        lengths: by part (``prompt``, ``solution``, ``chosen``, ...) the length of each text.
        longest: of each example the prompt with its longest answer.
        repeated_prompts: examples whose prompt another example had before.
        identical_pairs: pairs whose answers differ in white space at most.
        longer_chosen: pairs whose chosen answer is the longer one; a tie counts half.
        margins: score differences of pairs.
        labels: of judged answers and of steps.
        kinds: values of meta, by key.
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
        """Examples whose prompt and longest answer do not fit into ``limit``."""
        return sum(length > limit for length in self.longest)


def describe_task(task: Task, measure: Callable[[str], int], *, n: int) -> Description:
    """Read the first ``n`` examples of a task (all, if it has fewer); ``measure`` is the length of a text."""
    stats = Description(len(task.examples), min(n, len(task.examples)))
    seen: set[tuple[tuple[str, str], ...]] = set()
    for index in range(stats.num_read):
        example = task.examples[index]
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
    return stats


def is_pair(responses: Sequence[Response]) -> bool:
    """Say whether these are two whole answers, one better; answers judged 1 and 0 count as such, too."""
    return len(responses) == 2 and responses[0].score != responses[1].score and not responses[0].steps


def _add_answers(stats: Description, example: Example, measure: Callable[[str], int]) -> None:
    lengths: dict[str, list[int]] = {}
    if example.solution is not None:
        lengths["solution"] = [measure(example.solution)]
    if example.demonstration is not None:
        lengths["response"] = [measure(example.demonstration)]
    if is_pair(example.responses):
        better, worse = sorted(example.responses, key=lambda r: r.score, reverse=True)
        chosen, rejected = measure(better.text), measure(worse.text)
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
    stats.longest.append(prompt + max((value for values in lengths.values() for value in values), default=0))
    for part, values in {"prompt": [prompt], **lengths}.items():
        stats.lengths.setdefault(part, []).extend(values)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed (inverse of the empirical distribution).

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("no percentile of nothing")
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def random_examples(task: Task, n: int, seed: int) -> list[Example]:
    """``n`` examples drawn without replacement by the seed, in the task's order."""
    chosen = permutation(seed, "examples shown", 0, len(task.examples))[:n]
    return [task.examples[int(i)] for i in sorted(chosen)]
