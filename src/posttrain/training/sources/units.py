"""Tokenized units of a supervised task: demonstrations, judged answers, pairs, labeled solutions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import overload

from posttrain.activity import phase
from posttrain.data.base import ExamplesOnDemand, Task
from posttrain.data.render import Template
from posttrain.data.render.rows import Shape, TokenRow, rows_of
from posttrain.errors import RecipeError, UsageError
from posttrain.recipes.sections import DataSection
from posttrain.training.sources.prompts import NUM_PROBED
from posttrain.types import Example, Tokenizer

Unit = tuple[TokenRow, ...]
UNIT_NAMES: dict[Shape, str] = {"demonstration": "rows", "judged": "answers", "pair": "pairs", "steps": "solutions"}
MAX_CACHED_TOKENS = 1 << 21  # of units encoded when drawn
MOST_REASONS = 3  # in a warning


class Labels:
    """Answer labels: 1 desirable, 0 undesirable.

    In pairs, the answer with the higher score is desirable. Other scores are used directly if they equal 0 or 1.
    Ratings require the threshold ``data.label_above``, which then also applies to pairs.
    """

    def __init__(self, label_above: float | None) -> None:
        self.label_above = label_above
        self._lowest = 0.0
        self._highest = 0.0
        self._has_scores = False
        self._rated: tuple[str, float] | None = None  # first rated answer, if no threshold is set

    def label(self, example: Example, row: TokenRow) -> Unit | str:
        """Replace an answer's score by a label, or explain why this is impossible."""
        self._note(row.score)
        if self.label_above is not None:
            return (replace(row, score=float(row.score > self.label_above)),)
        scores = [response.score for response in example.responses]
        if len(scores) == 2 and not example.responses[0].steps:
            if scores[0] != scores[1]:
                return (replace(row, score=float(row.score == max(scores))),)
            if scores[0] not in (0.0, 1.0):
                return "both answers in a pair have the same score"
        if row.score not in (0.0, 1.0) and self._rated is None:
            self._rated = (example.id, row.score)
        return (row,)

    def _note(self, score: float) -> None:
        """Extend the score range."""
        if not self._has_scores:
            self._lowest = score
            self._highest = score
        self._has_scores = True
        self._lowest = min(self._lowest, score)
        self._highest = max(self._highest, score)

    def _scale(self, task: str) -> str:
        return f"scores in task {task!r} range from {self._lowest:g} to {self._highest:g}"

    @property
    def has_ratings(self) -> bool:
        """True if a rated answer was labeled without a threshold."""
        return self._rated is not None

    def refuse_ratings(self, task: str) -> None:
        """Reject ratings without a threshold.

        Raises:
            RecipeError: as above, with the score range.
        """
        if self._rated is None:
            return
        name, score = self._rated
        raise RecipeError(
            f"data.label_above: {self._scale(task)} (the first: {score:g} in {name}), so they are ratings, not labels. "
            "Set data.label_above: answers with a higher score are then desirable, all others undesirable"
        )

    def refuse_single(self, task: str, labels: Sequence[float]) -> None:
        """Reject identical labels.

        Raises:
            RecipeError: as above, with the score range.
        """
        if len(set(labels)) != 1:
            return
        kind = "undesirable"
        if labels[0]:
            kind = "desirable"
        threshold = ""
        if self.label_above is not None:
            threshold = f" with data.label_above {self.label_above:g}"
        raise RecipeError(
            f"task: all {len(labels):,} answers are {kind}{threshold}, but training needs both labels; "
            f"{self._scale(task)}. Add answers of the other kind, or set data.label_above between their scores"
        )


@dataclass(frozen=True, slots=True)
class UnitEncoder:
    """Tokenizes examples into training units, within length limits.

    ``shape``: unit type. ``context_tokens``: model context length. ``max_prompt_tokens``: recipe setting, or None.
    """

    tokenizer: Tokenizer
    template: Template
    data: DataSection
    shape: Shape
    context_tokens: int
    max_prompt_tokens: int | None = None

    @property
    def row_limit(self) -> int:
        """Maximum tokens per row."""
        return min(self.data.max_length, self.context_tokens)

    @property
    def trains_all(self) -> bool:
        """True if prompts are trained on too."""
        return self.data.train_on == "all"

    def trained_places(self, row: TokenRow) -> list[int]:
        """Find a row's positions to train on."""
        if self.shape == "steps":
            return sorted(row.step_labels)
        first = row.prompt_length
        if self.trains_all:
            first = 1
        return [t for t in range(first, len(row.ids)) if t not in row.heard]

    def encode(self, example: Example, labels: Labels) -> Iterator[Unit | str]:
        """Tokenize an example: training units, or reasons for dropping them."""
        for unit in rows_of(self.tokenizer, self.template, example, self.shape, self.data.train_on):
            if self.shape == "judged" and not isinstance(unit, str):
                unit = labels.label(example, unit[0])
            if isinstance(unit, str):
                yield unit
                continue
            yield self._too_long(unit) or unit

    def _too_long(self, unit: Unit) -> str | None:
        """Explain which limit a unit exceeds; None if it fits."""
        limit = self.row_limit
        if any(len(row.ids) > limit for row in unit):
            name = "the model's context"
            if limit == self.data.max_length:
                name = "data.max_length"
            return f"longer than {name}={limit}"
        prompt_limit = self.max_prompt_tokens or limit
        if unit[0].prompt_length > prompt_limit:
            return f"prompt longer than {prompt_limit} tokens"
        return None


class TaskUnits(Sequence[Unit]):
    """Usable training units of a task, in task order.

    In-memory examples are all encoded at startup, and unusable units are dropped. For on-demand examples, the first
    ``NUM_PROBED`` (per mixture part) are encoded. If all of these are usable and each gives the same number of units,
    remaining examples are made and encoded when drawn, and an unusable unit is replaced by the next usable one (from
    the same part). Otherwise, all examples are encoded at startup.

    Attributes:
        encoder: tokenizes examples.
        dropped: number of unusable rows and units found at startup, by reason.
        encoded: units encoded at startup. All units, if ``is_complete``.
        has_conversations: True if any example encoded at startup is a conversation.

    Raises:
        UsageError: no usable units. The message suggests a setting.
    """

    def __init__(self, task: Task, encoder: UnitEncoder) -> None:
        self.task = task
        self.encoder = encoder
        self.dropped = dict(task.dropped)
        self._labels = Labels(encoder.data.label_above)
        self._known: dict[int, tuple[Unit, ...]] = {}  # example -> usable units, from startup
        self._drawn: dict[int, tuple[Unit, ...]] = {}  # as above; least recently drawn first
        self._num_cached = 0  # tokens
        self.has_conversations = False
        self._replaced: dict[int, int] = {}  # place -> place of the unit drawn instead
        self._reasons: dict[str, None] = {}  # why, in the order found
        self._places = self._find_places()
        if not self._places:
            raise self._nothing_left()
        self.encoded = [self._known[item][number] for item, number in self._places if item in self._known]
        self.is_complete = len(self.encoded) == len(self._places)

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Unit: ...
    @overload
    def __getitem__(self, index: slice) -> list[Unit]: ...
    def __getitem__(self, index: int | slice) -> Unit | list[Unit]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = range(len(self._places))[index]
        if place in self._replaced:
            place = self._replaced[place]
        item, number = self._places[place]
        usable = self._usable(item)
        if number < len(usable):
            return usable[number]
        return self._following(place)

    def _following(self, place: int) -> Unit:
        """Find the next usable unit of the same part, for a place whose unit cannot be trained on."""
        size = len(self._places)
        item, number = self._places[place]
        part = self._part_of(item)
        self._note_reasons(item)
        skipped = [place]
        for step in range(1, size):
            following = (place + step) % size
            item, number = self._places[following]
            if self._part_of(item) != part:
                continue
            usable = self._usable(item)
            if number < len(usable):
                self._replaced |= dict.fromkeys(skipped, following)
                return usable[number]
            skipped.append(following)
        raise AssertionError("a probed unit is usable")

    @property
    def parts(self) -> Sequence[object]:
        """Mixture part name for each unit; without a mixture, unit indices."""
        if not self.task.parts:
            return range(len(self._places))
        examples = self.task.examples
        if isinstance(examples, ExamplesOnDemand) and examples.parts:
            return [examples.parts[item] for item, _ in self._places]
        return [examples[item].meta["part"] for item, _ in self._places]

    @property
    def shape(self) -> Shape:
        """Unit type."""
        return self.encoder.shape

    @property
    def size(self) -> str | None:
        """Describe examples with multiple units: solutions per problem, turns per conversation."""
        num_examples = len(self.task.examples)
        num_dropped = sum(self.dropped.values()) - sum(self.task.dropped.values())
        if len(self) == num_examples - num_dropped:
            return None
        return f"{len(self):,} {UNIT_NAMES[self.shape]} of {num_examples:,} examples"

    def check_labels(self, *, needs_both: bool) -> None:
        """Reject ratings without a threshold, and (``needs_both``) identical labels.

        Raises:
            RecipeError: as above.
        """
        if self.shape != "judged":
            return
        self._labels.refuse_ratings(self.task.name)
        if needs_both:
            self._labels.refuse_single(self.task.name, [row.score for unit in self.encoded for row in unit])

    def describe_replaced(self) -> str | None:
        """Describe units replaced when drawn, at 1, 10, 100, ...; None if there are none."""
        if not self._replaced:
            return None
        count = 10 ** (len(str(len(self._replaced))) - 1)
        reasons = "; ".join(self._reasons)
        name = UNIT_NAMES[self.shape]
        return (
            f"task {self.task.name!r}: {count:,} {name} drawn so far cannot be trained on ({reasons}); each was "
            "replaced by the next usable one"
        )

    def _find_places(self) -> list[tuple[int, int]]:
        """List (example, number within example) for each unit that is usable or not yet encoded."""
        examples = self.task.examples
        per_example: dict[str, int] = {}  # parts encoded when drawn
        if isinstance(examples, ExamplesOnDemand):
            per_example = self._parts_to_draw(examples)
        if "" in per_example:
            return [(item, number) for item in range(len(examples)) for number in range(per_example[""])]
        places: list[tuple[int, int]] = []
        with phase("encoding", len(examples), "examples") as encoded:
            for item in range(len(examples)):
                count = per_example.get(self._part_of(item))
                if count is None:
                    count = len(self._encode_at_start(item))
                places += [(item, number) for number in range(count)]
                encoded.num_done += 1
        return places

    def _parts_to_draw(self, examples: ExamplesOnDemand) -> dict[str, int]:
        """Find on-demand parts whose probed examples are all usable, with their number of units per example."""
        by_part: dict[str, Sequence[int]] = {"": range(len(examples))}
        if examples.parts:
            of_part: dict[str, list[int]] = {}
            for item, part in enumerate(examples.parts):
                of_part.setdefault(part, []).append(item)
            by_part = dict(of_part)
        found: dict[str, int] = {}
        for part, items in by_part.items():
            if part in examples.in_memory or len(items) <= NUM_PROBED:
                continue
            count = self._probe(items[:NUM_PROBED])
            if count is not None:
                found[part] = count
        return found

    def _probe(self, items: Sequence[int]) -> int | None:
        """Encode examples and count units per example; None if counts differ, or anything was dropped."""
        num_dropped = sum(self.dropped.values())
        units = [self._encode_at_start(item) for item in items]
        counts = {len(of_item) for of_item in units}
        labels = {row.score for of_item in units for unit in of_item for row in unit}
        is_doubtful = self.shape == "judged" and (self._labels.has_ratings or len(labels) < 2)
        if sum(self.dropped.values()) > num_dropped or len(counts) != 1 or is_doubtful:
            return None
        return counts.pop()

    def _encode_at_start(self, item: int) -> tuple[Unit, ...]:
        """Encode an example for the whole run, and count what is dropped."""
        if item in self._known:
            return self._known[item]
        example = self.task.examples[item]
        if example.conversation:
            self.has_conversations = True
        units: list[Unit] = []
        for unit in self.encoder.encode(example, self._labels):
            if isinstance(unit, str):
                self.dropped[unit] = self.dropped.get(unit, 0) + 1
            else:
                units.append(unit)
        self._known[item] = tuple(units)
        return self._known[item]

    def _usable(self, item: int) -> tuple[Unit, ...]:
        """Look up or encode an example's usable units."""
        if item in self._known:
            return self._known[item]
        units = self._drawn.pop(item, None)
        if units is None:
            found = self.encoder.encode(self.task.examples[item], self._labels)
            units = tuple(unit for unit in found if not isinstance(unit, str))
            self._labels.refuse_ratings(self.task.name)
            self._num_cached += _num_tokens(units)
        self._drawn[item] = units
        while self._num_cached > MAX_CACHED_TOKENS and len(self._drawn) > 1:
            oldest = next(iter(self._drawn))
            self._num_cached -= _num_tokens(self._drawn.pop(oldest))
        return units

    def _note_reasons(self, item: int) -> None:
        """Note why an example gives fewer units than probed ones, up to ``MOST_REASONS``."""
        found = self.encoder.encode(self.task.examples[item], self._labels)
        reasons = [unit for unit in found if isinstance(unit, str)] or ["fewer rows than the first examples"]
        for reason in reasons:
            if len(self._reasons) < MOST_REASONS:
                self._reasons.setdefault(reason)

    def _part_of(self, item: int) -> str:
        examples = self.task.examples
        if isinstance(examples, ExamplesOnDemand) and examples.parts:
            return examples.parts[item]
        return ""

    def _nothing_left(self) -> UsageError:
        """Build the error for a task without usable units."""
        from posttrain.training.sources.remedies import Trial

        encoder = self.encoder
        limits = (encoder.context_tokens, encoder.max_prompt_tokens, encoder.data)
        way_out = Trial(self.task.examples, encoder.tokenizer, encoder.template, *limits).of_rows(encoder.shape)
        reasons = ", ".join(f"{n} × {reason}" for reason, n in self.dropped.items()) or "none"
        return UsageError(f"task {self.task.name!r}: no rows left to train on; dropped: {reasons}{way_out}")


def _num_tokens(units: Sequence[Unit]) -> int:
    return sum(len(row.ids) for unit in units for row in unit)
