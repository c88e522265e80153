"""Prompts for sampling. Examples generated on demand are created and encoded when drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from posttrain.activity import phase
from posttrain.data.base import ExamplesOnDemand, Task
from posttrain.data.render import Template, encode_prompt
from posttrain.errors import UsageError
from posttrain.types import Example, Tokenizer

NUM_PROBED = 256  # on-demand examples per mixture part


@dataclass(frozen=True, slots=True)
class DrawnPrompt:
    """Drawn prompt. ``index``: example index in the task; ``replaced``: index of the long example it stands in for."""

    index: int
    example: Example
    ids: list[int]
    replaced: int | None = None


class Prompts:
    """Task prompts with at most ``limit`` tokens, addressed by position in ``indices``.

    In-memory examples are all encoded at startup, and long ones are dropped. For on-demand examples, the first
    ``NUM_PROBED`` are encoded. If all of these fit, remaining prompts are checked only when drawn, and a long one is
    replaced by the next prompt that fits (from the same mixture part). If any probed prompt is too long, all examples
    are encoded at startup.

    Args:
        context_tokens: maximum prompt-plus-answer tokens. An answer needs at least one.
        max_prompt_tokens: the recipe's setting, or None.

    Attributes:
        limit: maximum prompt tokens.
        indices: example indices in task order.
        dropped: number of unusable rows and long prompts found at startup, by reason.
        replaced: indices of long examples found when drawn.

    Raises:
        UsageError: no usable prompts. The message suggests a setting.
    """

    def __init__(
        self,
        task: Task,
        tokenizer: Tokenizer,
        template: Template,
        context_tokens: int,
        max_prompt_tokens: int | None = None,
    ) -> None:
        self.task = task
        self.tokenizer = tokenizer
        self.template = template
        self.max_prompt_tokens = max_prompt_tokens
        self.limit = min(max_prompt_tokens or context_tokens, context_tokens - 1)
        self.replaced: set[int] = set()
        self.indices: Sequence[int] = self._fitting()
        self.dropped = dict(task.dropped)
        num_long = len(task.examples) - len(self.indices)
        if num_long:
            self.dropped[f"prompt longer than {self.limit} tokens"] = num_long
        if not self.indices:
            from posttrain.training.sources.remedies import Trial

            dropped = ", ".join(f"{count} × {reason}" for reason, count in self.dropped.items())
            trial = Trial(task.examples, tokenizer, template, context_tokens, max_prompt_tokens)
            way_out = trial.of_prompts()
            raise UsageError(f"task {task.name!r}: no prompts left to sample from; dropped: {dropped}{way_out}")

    def describe_replaced(self) -> str:
        """Build the warning about long prompts found while sampling, at 1, 10, 100, ..."""
        count = 10 ** (len(str(len(self.replaced))) - 1)
        if self.max_prompt_tokens == self.limit:
            key = "prompt.max_prompt_tokens"
        else:
            key = "the model's context minus one token for the answer"
        return (
            f"task {self.task.name!r}: {count:,} prompts drawn so far had more than {self.limit} tokens "
            f"({key}); each was replaced by the next prompt that fits"
        )

    @property
    def parts(self) -> Sequence[object]:
        """Mixture part name for each prompt; without a mixture, prompt indices."""
        examples = self.task.examples
        if not self.task.parts:
            return self.indices
        if isinstance(examples, ExamplesOnDemand) and examples.parts:
            return [examples.parts[index] for index in self.indices]
        return [examples[index].meta["part"] for index in self.indices]

    def draw(self, place: int) -> DrawnPrompt:
        """Create and encode the prompt at ``place``.

        Raises:
            UsageError: as ``encode_prompt``.
        """
        first = self.indices[place]
        for index in self._from(place):
            drawn = self._encoded(index)
            if len(drawn.ids) <= self.limit:
                if index != first:
                    drawn = replace(drawn, replaced=first)
                return drawn
            self.replaced.add(index)
        raise AssertionError("one of the probed prompts fits")

    def at(self, index: int) -> DrawnPrompt:
        """Create and encode the prompt for example ``index``.

        Raises:
            LookupError: unknown example, or prompt too long.
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
        """Yield the index at ``place`` and following ones from the same part, except those known to be too long."""
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
        """List indices that fit or are not yet encoded."""
        examples = self.task.examples
        unread: set[str] = set()  # parts encoded when drawn
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
        """Find on-demand parts that exceed the probe size and whose probed prompts all fit."""
        by_part: dict[str, list[int]] = {}
        for index in range(len(examples)):
            by_part.setdefault(self._part_of(index), []).append(index)
        large = set()
        for part, indices in by_part.items():
            probed = indices[:NUM_PROBED]
            if part not in examples.in_memory and len(probed) < len(indices) and all(map(self._fits, probed)):
                large.add(part)
        return large
