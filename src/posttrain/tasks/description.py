"""What a task's data are like: counts, lengths, duplicates, balance of labels. Nothing is trained or changed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.randomness import permutation
from posttrain.tasks.base import Task
from posttrain.types import Example, Response

MAX_KINDS = 30  # a key of meta with more values than this, such as a title, is no breakdown
PERCENTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
Measure = Callable[[str], int]


@dataclass(slots=True)
class Description:
    """Counts over the examples that were read.

    lengths: by part (``prompt``, ``solution``, ``chosen``, ...) one length for each text, in the unit of the
        measure. longest: for each example the prompt with its longest answer.
    repeated_prompts: examples whose prompt another example had before. identical_pairs: pairs whose answers
        differ in white space at most. longer_chosen: pairs whose chosen answer is the longer one, a tie counts half.
    labels: of judged answers and of steps, how often each occurs. margins: score differences of pairs.
    kinds: by key of meta, how often each value occurs.
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


def describe_task(task: Task, measure: Measure, *, n: int) -> Description:
    """Read the first ``n`` examples of a task (all, if it has fewer).

    Args:
        task: what to read.
        measure: the length of a text, such as its number of tokens.
        n: examples at most; a task that makes its examples on demand may have very many.
    """
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
        _measure(stats, example, measure)
        _count_labels(stats, example)
        _count_kinds(stats, example.meta)
    stats.kinds = {key: values for key, values in stats.kinds.items() if 1 < len(values) <= MAX_KINDS}
    return stats


def is_pair(responses: Sequence[Response]) -> bool:
    """Two whole answers, of which one is better; answers judged 1 and 0 count as such, too."""
    return len(responses) == 2 and responses[0].score != responses[1].score and not responses[0].steps


def _measure(stats: Description, example: Example, measure: Measure) -> None:
    lengths = {"prompt": [sum(measure(message.content) for message in example.messages)]}
    if example.solution is not None:
        lengths["solution"] = [measure(example.solution)]
    if example.demonstration is not None:
        lengths["response"] = [measure(example.demonstration)]
    if is_pair(example.responses):
        better, worse = sorted(example.responses, key=lambda r: r.score, reverse=True)
        lengths |= {"chosen": [measure(better.text)], "rejected": [measure(worse.text)]}
        stats.longer_chosen += _half_step(lengths["chosen"][0] - lengths["rejected"][0])
    elif example.responses:
        lengths["response"] = [measure(response.text) for response in example.responses]
    for part, values in lengths.items():
        stats.lengths.setdefault(part, []).extend(values)
    answers = [value for part, values in lengths.items() if part != "prompt" for value in values]
    stats.longest.append(lengths["prompt"][0] + max(answers, default=0))


def _half_step(difference: float) -> float:
    return 0.5 if difference == 0 else float(difference > 0)


def _count_labels(stats: Description, example: Example) -> None:
    responses = example.responses
    if is_pair(responses):
        stats.num_pairs += 1
        stats.identical_pairs += responses[0].text.split() == responses[1].text.split()
        stats.margins.append(abs(responses[0].score - responses[1].score))
        return
    for response in responses:
        counts = Counter(str(label) for label in response.step_labels)
        if response.steps:
            stats.labels.setdefault("steps", Counter()).update(counts)
        stats.labels.setdefault("answers", Counter())[f"{response.score:g}"] += 1


def _count_kinds(stats: Description, meta: Mapping[str, Any]) -> None:
    for key, value in meta.items():
        if isinstance(value, str | int) or value is None:
            stats.kinds.setdefault(key, Counter())[str(value)] += 1


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed (inverse of the empirical distribution).

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("no percentile of nothing")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def random_examples(task: Task, n: int, seed: int) -> list[Example]:
    """``n`` examples drawn without replacement by the seed, in the task's order."""
    size = len(task.examples)
    chosen = sorted(int(i) for i in permutation(seed, "examples shown", 0, size)[:n])
    return [task.examples[i] for i in chosen]
