"""Supervised data source: task rows in an order that depends only on (seed, epoch)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as serialize
from torch import Tensor

from posttrain import registry
from posttrain.activity import phase
from posttrain.balances.record import GivenRow
from posttrain.data.base import Task, num_repeated
from posttrain.data.render import Template
from posttrain.data.render.rows import Shape, TokenRow, rows_of
from posttrain.errors import RecipeError, UsageError
from posttrain.evaluation.generation import held_out_indices
from posttrain.recipes.recipe import Recipe
from posttrain.recipes.sections import DataSection, TrainSection
from posttrain.store.durable import replace_file
from posttrain.training.batch_fields import BatchFields
from posttrain.training.sources import RowOrder, Source, TrainBatch, num_batches
from posttrain.types import Batch, Example, Sample, Tokenizer, collate

FIXED_CHUNK = 256
UNIT_NAMES: dict[Shape, str] = {"demonstration": "rows", "judged": "answers", "pair": "pairs", "steps": "solutions"}


class Labels:
    """Answer labels: 1 desirable, 0 undesirable.

    In pairs, the answer with the higher score is desirable. Other scores are used directly if they equal 0 or 1.
    Ratings require the threshold ``data.label_above``, which then also applies to pairs.
    """

    def __init__(self, label_above: float | None) -> None:
        self.label_above = label_above
        self._scores: list[float] = []
        self._rated: tuple[str, float] | None = None  # first rated answer, if no threshold is set

    def label(self, example: Example, row: TokenRow) -> tuple[TokenRow, ...] | str:
        """Replace an answer's score by a label, or explain why this is impossible."""
        self._scores.append(row.score)
        if self.label_above is not None:
            return (replace(row, score=float(row.score > self.label_above)),)
        scores = [response.score for response in example.responses]
        if len(scores) == 2 and not example.responses[0].steps:
            if scores[0] != scores[1]:
                return (replace(row, score=float(row.score == max(scores))),)
            if scores[0] not in (0.0, 1.0):
                return "both answers in a pair have the same score"
        if row.score not in (0.0, 1.0):
            self._rated = self._rated or (example.id, row.score)
        return (row,)

    def check(self, task: str, labels: Sequence[float], *, needs_both: bool) -> None:
        """Reject ratings without a threshold, and (``needs_both``) identical labels.

        Raises:
            RecipeError: as above, with the score range.
        """
        scale = f"scores in task {task!r} range from {min(self._scores):g} to {max(self._scores):g}"
        if self._rated is not None:
            name, score = self._rated
            raise RecipeError(
                f"data.label_above: {scale} (the first: {score:g} in {name}), so they are ratings, not labels. Set "
                "data.label_above: answers with a higher score are then desirable, all others undesirable"
            )
        if needs_both and len(set(labels)) == 1:
            kind = "desirable" if labels[0] else "undesirable"
            threshold = "" if self.label_above is None else f" with data.label_above {self.label_above:g}"
            raise RecipeError(
                f"task: all {len(labels):,} answers are {kind}{threshold}, but training needs both labels; "
                f"{scale}. Add answers of the other kind, or set data.label_above between their scores"
            )


class SupervisedSource(Source):
    """Task rows, ``data.batch_size`` units per step, in an order that depends only on (seed, epoch).

    ``shape``: unit type (demonstration, judged answer, pair, or answer with step labels). Fixed fields (reference
    log-probabilities) are computed once for units used by the run, and cached in ``cache`` with a hash over rows and
    reference. ``draws``: False for held-out evaluation, which requests units directly.
    """

    def __init__(
        self,
        recipe: Recipe,
        task: Task,
        template: Template,
        tokenizer: Tokenizer,
        context_tokens: int,
        *,
        shape: Shape = "demonstration",
        fields: BatchFields | None = None,
        cache: Path | None = None,
        draws: bool = True,
    ) -> None:
        assert recipe.data is not None
        self.seed = recipe.train.seed
        self.batch = recipe.data.batch_size
        self.shape = shape
        self.batch_fields = fields
        self.train_all = recipe.data.train_on == "all"
        self._objective_traits = registry.traits_of("objective", recipe.objective.name) or {}
        self._scores_all_tokens = recipe.objective.options.get("positions", "all") == "all"
        self.rows_per_unit = 2 if shape == "pair" else 1
        self.dropped = dict(task.dropped)
        self.num_repeated = num_repeated(task.examples)
        self.origin = task.origin
        self.units: list[tuple[TokenRow, ...]] = []
        unit_parts = list[str]()  # in a mixture
        limit = min(recipe.data.max_length, context_tokens)
        prompt_limit = recipe.prompt.max_prompt_tokens or limit
        labels = Labels(recipe.data.label_above)
        for example in _counted(task.examples):
            for unit in rows_of(tokenizer, template, example, shape, recipe.data.train_on):
                if shape == "judged" and not isinstance(unit, str):
                    unit = labels.label(example, unit[0])
                if isinstance(unit, str):
                    reason = unit
                elif any(len(row.ids) > limit for row in unit):
                    reason = f"longer than {self._limit_name(recipe.data, limit)}={limit}"
                elif unit[0].prompt_length > prompt_limit:
                    reason = f"prompt longer than {prompt_limit} tokens"
                else:
                    self.units.append(unit)
                    if task.parts:
                        unit_parts.append(example.meta["part"])
                    continue
                self.dropped[reason] = self.dropped.get(reason, 0) + 1
        if not self.units:
            from posttrain.training.sources.remedies import Trial

            limits = (context_tokens, recipe.prompt.max_prompt_tokens, recipe.data)
            trial = Trial(task.examples, tokenizer, template, *limits)
            raise _nothing_left(task.name, self.dropped, trial.of_rows(shape))
        self.num_examples = len(self.units)
        self.size = self._describe_size(task)
        if shape == "judged":
            labels.check(task.name, [row.score for unit in self.units for row in unit], needs_both=draws)
        self.trained = self._share_of_trained(recipe.data.train_on, task)
        if draws:
            self.order = RowOrder(self.seed, "data", self.batch, task.parts, unit_parts or self.units)
        self._fixed = self._fill_fixed(recipe.train, recipe.eval.num_examples, cache, draws)

    @staticmethod
    def _limit_name(data: DataSection, limit: int) -> str:
        """Name the setting that limits row length."""
        if limit == data.max_length:
            return "data.max_length"
        return "the model's context"

    def _describe_size(self, task: Task) -> str | None:
        """Describe examples with multiple units: solutions per problem, turns per conversation."""
        num_dropped = sum(self.dropped.values()) - sum(task.dropped.values())
        if len(self.units) == len(task.examples) - num_dropped:
            return None
        return f"{len(self.units):,} {UNIT_NAMES[self.shape]} of {len(task.examples):,} examples"

    def __call__(self, step: int) -> TrainBatch:
        """Build the batch for update ``step`` (1-based)."""
        turn = self.order.round_of(step - 1)
        numbers = list(range(len(turn.places)))
        if self.intervention is not None:
            numbers = self.intervention.keep_units(step, numbers)
        given: list[GivenRow] = []
        for number in numbers:
            unit, epoch = turn.places[number], turn.epochs[number]
            given += [GivenRow(unit, epoch, self._trained_places(row), row.score) for row in self.units[unit]]
        batch = self.batch_of([turn.places[number] for number in numbers])
        return TrainBatch(batch, given=given, is_changed=self._is_changed(step))

    def _trained_places(self, row: TokenRow) -> list[int]:
        """Find a row's positions to train on."""
        if self.shape == "steps":
            return sorted(row.step_labels)
        first = row.prompt_length
        if self.train_all:
            first = 1
        return [t for t in range(first, len(row.ids)) if t not in row.heard]

    def length_of(self, epochs: float) -> tuple[int, str]:
        """Compute the number of steps in ``epochs``, rounded up, with a description."""
        steps = num_batches(epochs, self.num_examples, self.batch)
        passes = "pass" if epochs == 1 else "passes"
        over = f"{epochs:g} {passes} over {self.num_examples:,} {UNIT_NAMES[self.shape]}"
        return steps, f"{over} = {steps:,} steps of {self.batch}"

    def batch_of(self, chosen: Sequence[int]) -> Batch:
        """Build a batch with all fields from the given units."""
        batch = self._collated(chosen)
        rows = [index * self.rows_per_unit + k for index in chosen for k in range(self.rows_per_unit)]
        for name, of_row in self._fixed.items():
            self._fill_missing(name, chosen, of_row)  # for a step outside the recipe
            trained = torch.cat([of_row[row] for row in rows])
            batch.fields[name] = torch.zeros(batch.mask.shape).masked_scatter(batch.mask, trained)
        batch.answers = torch.tensor(rows)
        if self.batch_fields is None:
            return batch
        return self.batch_fields.before_step(self.batch_fields(batch))

    def _share_of_trained(self, train_on: str | None, task: Task) -> str:
        """Describe the fraction of trained tokens, and conversations split into multiple examples."""
        rows = [row for unit in self.units for row in unit]
        starts = [1 if self.train_all else row.prompt_length for row in rows]
        trained = sum(len(row.ids) - start - len(row.heard) for row, start in zip(rows, starts, strict=True))
        trained = sum(len(row.step_labels) for row in rows) if self.shape == "steps" else trained
        total = sum(len(row.ids) for row in rows)
        scored = self._describe_scores(trained, len(rows))
        if scored:
            return scored
        share = f"{trained:,} of {total:,} tokens are trained, {trained / total:.1%}"
        if self.shape == "demonstration":
            has_turns = train_on is None and any(example.conversation for example in islice(task.examples, 1000))
            share += f" (data.train_on {train_on or ('assistant' if has_turns else 'response')})"
        if apart := sum(row.is_apart for row in rows):
            what = "examples are single conversation turns, because the template rewrites earlier turns"
            share += f"; {apart:,} {what}"
        return share

    def _describe_scores(self, num_tokens: int, num_rows: int) -> str:
        """Describe how a reward model's loss is averaged; empty for policies, which train on tokens."""
        scores = self._objective_traits.get("scores")
        if scores == "process":
            return f"{num_tokens:,} labelled steps in {num_rows:,} solutions are scored, one score each"
        if scores == "outcome" and self._scores_all_tokens:
            return f"{num_tokens:,} tokens in {num_rows:,} answers are scored, each with its answer's label"
        if scores:
            return f"{num_rows:,} answers are scored, each at its last token"
        return ""

    def _collated(self, indices: Sequence[int]) -> Batch:
        samples: list[Sample] = []
        for slot, index in enumerate(indices):
            unit = self.units[index]
            samples += [self._sample(row, slot, unit) for row in unit]
        return collate(samples, rows_per_unit=self.rows_per_unit)

    def _sample(self, row: TokenRow, slot: int, unit: tuple[TokenRow, ...]) -> Sample:
        n = len(row.ids)
        if self.shape == "steps":
            mask = [t in row.step_labels for t in range(n)]
            fields: dict[str, Any] = {"step_labels": [float(row.step_labels.get(t, 0)) for t in range(n)]}
        else:
            start = 1 if self.train_all else row.prompt_length
            mask = [t >= start and t not in row.heard for t in range(n)]
            difference = unit[0].score - unit[-1].score
            fields = {"labels": row.score, "margins": difference if row.margin is None else row.margin}
        if self.shape == "demonstration":
            fields = {}
        # prompts that are trained on cannot be shared
        prefix = 0 if self.train_all else row.prompt_length
        return Sample(row.ids, mask, group=slot, prefix=prefix, fields=fields)

    def _fill_fixed(
        self, train: TrainSection, num_evaluated: int, cache: Path | None, draws: bool
    ) -> dict[str, list[Tensor]]:
        """Compute fixed batch fields for all rows to draw or evaluate."""
        if self.batch_fields is None or not self.batch_fields.fixed:
            return {}
        if draws:
            seen = self._seen_units(train)
        else:
            seen = held_out_indices(len(self.units), num_evaluated)
        names = self.batch_fields.fixed
        return {name: self._fill_once(name, seen, cache and cache / f"{name}.safetensors") for name in names}

    def _seen_units(self, train: TrainSection) -> list[int]:
        """List units used by the run's steps, in ascending order."""
        steps = train.steps
        if train.num_epochs is not None:
            steps, _ = self.length_of(train.num_epochs)
        assert steps is not None, "a recipe says steps or num_epochs"
        seen: set[int] = set()
        for batch in range(steps):
            seen.update(self.order.round_of(batch).places)
            if len(seen) == len(self.units):
                break
        return sorted(seen)

    def _fill_once(self, name: str, seen: Sequence[int], cache: Path | None) -> list[Tensor]:
        """Compute a batch field at each row's trained tokens; empty for units outside ``seen``.

        Runs resumed with more steps compute only new units.
        """
        assert self.batch_fields is not None
        assert self.batch_fields.reference is not None, "batch fields with a reference build one"
        digest = hashlib.sha256(f"{self.batch_fields.reference.fingerprint()} {self.shape} {self.train_all}".encode())
        for unit in self.units:
            for row in unit:
                digest.update(f"{row.prompt_length} {row.ids} {sorted(row.step_labels)}".encode())
                digest.update(f"{sorted(row.heard) or ''}".encode())
        key = f"rows-{digest.hexdigest()[:32]}"
        is_main = self.batch_fields.process_group.is_main
        stored = _read_cache(cache, key) if cache is not None and is_main else None
        known = self.batch_fields.process_group.broadcast(stored, f"stored {name}")
        if known is None:
            of_row = [torch.zeros(0) for _ in range(len(self.units) * self.rows_per_unit)]
        else:
            of_row = known
        if self._fill_missing(name, seen, of_row) and cache is not None and is_main:
            counts = torch.tensor([len(piece) for piece in of_row])
            replace_file(cache, serialize({"values": torch.cat(of_row), key: counts}))
        return of_row

    def _fill_missing(self, name: str, units: Sequence[int], of_row: list[Tensor]) -> bool:
        """Compute a batch field for ``units`` missing from ``of_row``; returns True if anything was computed."""
        assert self.batch_fields is not None
        each = self.rows_per_unit
        missing = [unit for unit in units if not any(len(x) for x in of_row[unit * each : (unit + 1) * each])]
        if not missing:
            return False
        with phase(f"{name} of the data set", len(missing), UNIT_NAMES[self.shape]) as filled:
            for start in range(0, len(missing), FIXED_CHUNK):
                filled.num_done = start
                chunk = missing[start : start + FIXED_CHUNK]
                batch = self._collated(chunk)
                scored = self.batch_fields.fill(name, batch)
                rows = [unit * each + k for unit in chunk for k in range(each)]
                for b, row in enumerate(rows):
                    of_row[row] = scored[b, batch.mask[b]].clone()
        return True


def _counted(examples: Sequence[Example]) -> Iterator[Example]:
    """Yield examples and count them."""
    with phase("encoding", len(examples), "examples") as encoded:
        for example in examples:
            yield example
            encoded.num_done += 1


def _nothing_left(task: str, dropped: Mapping[str, int], way_out: str) -> UsageError:
    """Build the error for a task whose rows are all unusable; ``way_out`` suggests a setting."""
    reasons = ", ".join(f"{n} × {reason}" for reason, n in dropped.items()) or "none"
    return UsageError(f"task {task!r}: no rows left to train on; dropped: {reasons}{way_out}")


def _read_cache(cache: Path, key: str) -> list[Tensor] | None:
    """Load cached rows under ``key``; rows without computed values are empty.

    None if the file is missing, damaged, or belongs to different rows.
    """
    try:
        stored = load_file(cache) if cache.is_file() else {}
    except SafetensorError:
        return None
    if key not in stored:
        return None
    return list(stored["values"].split(stored[key].tolist()))
