"""Suggest settings, tried on the data first, if a recipe rejects all rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from posttrain import registry
from posttrain.data.render import encode_prompt
from posttrain.data.render.rows import Shape, TokenRow, TrainOn, rows_of
from posttrain.data.render.template import Template
from posttrain.errors import PosttrainError
from posttrain.recipes.sections import DataSection
from posttrain.types import Example, Tokenizer

MAX_TRIED = 64  # rows
# Tried in order; the first one with the most usable rows is suggested.
_TEMPLATES = ("chat", "plain", "dialogue", "document", "boxed", "r1_zero", "xml_reasoning")
_TRAIN_ON: tuple[TrainOn, ...] = ("assistant", "response", "all")


@dataclass(frozen=True, slots=True)
class Trial:
    """Rejected rows and their limits.

    ``context_tokens``: model context length. ``max_prompt_tokens``: recipe setting. ``data``: section for
    supervised training.
    """

    examples: Sequence[Example]
    tokenizer: Tokenizer
    template: Template
    context_tokens: int
    max_prompt_tokens: int | None
    data: DataSection | None = None

    @property
    def tried(self) -> list[Example]:
        """First rows in the data."""
        return [self.examples[i] for i in range(min(MAX_TRIED, len(self.examples)))]

    def of_rows(self, shape: Shape) -> str:
        """Suggest a key that makes given answers usable; empty if none does."""
        data = self.data
        assert data is not None, "supervised recipe"
        limit = min(data.max_length, self.context_tokens)
        prompt_limit = self.max_prompt_tokens or limit

        def fits(row: TokenRow) -> bool:
            return len(row.ids) <= limit and row.prompt_length <= prompt_limit

        def count(template: Template, train_on: TrainOn | None) -> int:
            return sum(all(map(fits, unit)) for unit in self._units(template, shape, train_on))

        units = list(self._units(self.template, shape, data.train_on))
        if units:
            return self._of_lengths([row for unit in units for row in unit], len(units), limit, prompt_limit)
        by_template = self._best(lambda template: count(template, data.train_on))
        if by_template:
            return by_template
        if shape == "demonstration":
            for train_on in _TRAIN_ON:
                taken = count(self.template, train_on)
                if taken:
                    return f". Set data.train_on: {train_on}, which takes {taken} of the first {len(self.tried)}"
        return self._of_both(shape, limit, prompt_limit)

    def of_prompts(self) -> str:
        """Suggest a key that makes prompts usable; empty if none does."""
        allowed = self.max_prompt_tokens or self.context_tokens
        limit = min(allowed, self.context_tokens - 1)
        lengths = list(self._prompt_lengths(self.template))
        fitting = [n for n in lengths if n < self.context_tokens]
        if fitting:
            n = max(fitting)
            return f". Set prompt.max_prompt_tokens: {n}, which takes {len(fitting)} of the first {len(self.tried)}"
        by_template = self._best(lambda template: sum(n <= limit for n in self._prompt_lengths(template)))
        if by_template:
            return by_template
        shortest = ""
        if lengths:
            shortest = f" (the shortest prompt has {min(lengths):,})"
        return f". The model's context has {self.context_tokens:,} tokens{shortest}; take a longer one"

    def _of_both(self, shape: Shape, limit: int, prompt_limit: int) -> str:
        """Suggest a template together with a length setting."""
        assert self.data is not None
        for name in _TEMPLATES:
            try:
                template = registry.find("template", name).bind({})()
                units = list(self._units(template, shape, self.data.train_on))
            except PosttrainError:
                continue
            rows = [row for unit in units for row in unit]
            if not rows:
                continue
            room = self._of_lengths(rows, len(units), limit, prompt_limit)
            if room.startswith(". Set "):
                return f". Set prompt.template: {name} and{room.removeprefix('. Set')}"
        return ""

    def _of_lengths(self, rows: Sequence[TokenRow], num_units: int, limit: int, prompt_limit: int) -> str:
        longest = max(len(row.ids) for row in rows)
        prompt = max(row.prompt_length for row in rows)
        within = [len(row.ids) for row in rows if len(row.ids) <= self.context_tokens]
        if not within:
            shortest = min(len(row.ids) for row in rows)
            return f". The shortest has {shortest:,} tokens, and the model's context {self.context_tokens:,}"
        keys = []
        if longest > limit:
            keys.append(f"data.max_length: {max(within)}")
        if self.max_prompt_tokens and prompt > prompt_limit:
            keys.append(f"prompt.max_prompt_tokens: {prompt}")
        if not keys:
            return ""
        taken = "which fits"
        if len(rows) == num_units:
            taken = f"which takes {len(within)} of the first {len(rows)} rows"
        return f". Set {' and '.join(keys)}, {taken}"

    def _best(self, count: Callable[[Template], int]) -> str:
        """Suggest the template with the most usable rows."""
        best = ""
        most = 0
        for name in _TEMPLATES:
            if name == self.template.name:
                continue
            try:
                taken = count(registry.find("template", name).bind({})())
            except PosttrainError:  # tokenizer without a chat template, or rows that need a different template
                continue
            if taken > most:
                best = name
                most = taken
        if not best:
            return ""
        return f". Set prompt.template: {best}, which takes {most} of the first {len(self.tried)}"

    def _units(self, template: Template, shape: Shape, train_on: TrainOn | None) -> Iterator[tuple[TokenRow, ...]]:
        for example in self.tried:
            for unit in rows_of(self.tokenizer, template, example, shape, train_on):
                if not isinstance(unit, str):
                    yield unit

    def _prompt_lengths(self, template: Template) -> Iterator[int]:
        for example in self.tried:
            yield len(encode_prompt(self.tokenizer, template, example.messages, example.variables))
