"""Prompts to sample from: examples that a task makes on demand are made, and encoded, when they are drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from posttrain.activity import phase
from posttrain.data.base import ExamplesOnDemand, Task
from posttrain.data.render import Template, encode_prompt
from posttrain.types import Example, Tokenizer

NUM_PROBED = 256  # examples made on demand, of each part of a mixture


@dataclass(frozen=True, slots=True)
class DrawnPrompt:
    """A prompt that was drawn; ``index``: of its example in the task."""

    index: int
    example: Example
    ids: list[int]


class Prompts:
    """The prompts of a task that have at most ``limit`` tokens, by their place in ``indices``.

    Examples in memory are all encoded at the start, and those that are too long are left out. Of examples that are
    made on demand the first ``NUM_PROBED`` are. If these fit, the others are taken to fit until they are drawn; one
    that does not is then replaced by the next one that fits, of the same part of a mixture. If one of these is too
    long, all are encoded at the start.

    Attributes:
        indices: of the examples of the task, in its order.
        num_left_out: examples that were found to be too long at the start.
        replaced: indices of examples that were found to be too long when they were drawn.
    """

    def __init__(self, task: Task, tokenizer: Tokenizer, template: Template, limit: int) -> None:
        self.task = task
        self.tokenizer = tokenizer
        self.template = template
        self.limit = limit
        self.replaced: set[int] = set()
        self.indices: Sequence[int] = self._fitting()
        self.num_left_out = len(task.examples) - len(self.indices)

    @property
    def parts(self) -> Sequence[object]:
        """The name of the part of each prompt, in a mixture; else the prompts' indices."""
        examples = self.task.examples
        if not self.task.parts:
            return self.indices
        if isinstance(examples, ExamplesOnDemand) and examples.parts:
            return [examples.parts[index] for index in self.indices]
        return [examples[index].meta["part"] for index in self.indices]

    def draw(self, place: int) -> DrawnPrompt:
        """Make and encode the prompt at ``place``.

        Raises:
            UsageError: as ``encode_prompt``.
        """
        drawn: DrawnPrompt | None = None
        for index in self._from(place):
            drawn = self._encoded(index)
            if len(drawn.ids) <= self.limit:
                return drawn
            self.replaced.add(index)
        raise AssertionError("one of the probed prompts fits")

    def at(self, index: int) -> DrawnPrompt:
        """Make and encode the prompt of example ``index``.

        Raises:
            LookupError: there is no such example, or its prompt is too long.
        """
        prompt = self._encoded(index)
        if len(prompt.ids) > self.limit:
            raise LookupError(index)
        return prompt

    def _encoded(self, index: int) -> DrawnPrompt:
        example = self.task.examples[index]
        ids = encode_prompt(self.tokenizer, self.template, example.messages, example.variables)
        return DrawnPrompt(index, example, ids)

    def _fits(self, index: int) -> bool:
        return len(self._encoded(index).ids) <= self.limit

    def _from(self, place: int) -> Iterator[int]:
        """Yield the index of ``place``, then those that follow it, of the same part and not known to be too long."""
        size = len(self.indices)
        part = self._part_of(self.indices[place])
        for step in range(size):
            index = self.indices[(place + step) % size]
            if index not in self.replaced and self._part_of(index) == part:
                yield index

    def _part_of(self, index: int) -> str:
        examples = self.task.examples
        if isinstance(examples, ExamplesOnDemand) and examples.parts:
            return examples.parts[index]
        return ""

    def _fitting(self) -> Sequence[int]:
        """Return the indices of the examples that fit, or that are not encoded yet."""
        examples = self.task.examples
        unread: set[str] = set()  # parts whose prompts are encoded when they are drawn
        if isinstance(examples, ExamplesOnDemand):
            unread = self._parts_to_draw(examples)
        if unread == {""}:
            return range(len(examples))
        indices = []
        with phase("encoding", len(examples), "prompts") as encoded:
            for index in range(len(examples)):
                if self._part_of(index) in unread or self._fits(index):
                    indices.append(index)
                encoded.num_done += 1
        return indices

    def _parts_to_draw(self, examples: ExamplesOnDemand) -> set[str]:
        """Return the parts that are made on demand, are larger than the probe, and whose probed prompts all fit."""
        by_part: dict[str, list[int]] = {}
        for index in range(len(examples)):
            by_part.setdefault(self._part_of(index), []).append(index)
        large = set()
        for part, indices in by_part.items():
            probed = indices[:NUM_PROBED]
            if part not in examples.in_memory and len(probed) < len(indices) and all(map(self._fits, probed)):
                large.add(part)
        return large
