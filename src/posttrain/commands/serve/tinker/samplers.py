"""Sampling and log-probabilities with saved weights: a cached model per adapter type, loaded on demand."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.commands.serve.tinker.wire import SampledTokens, SampleResult, TopTokens
from posttrain.data.render.encoding import TextStream
from posttrain.errors import CheckpointError
from posttrain.models.forward.forward import Forward
from posttrain.recipes.sections import ModelSection
from posttrain.sampling.base import Conversation, Sampling, num_tokens_of
from posttrain.sampling.native.engine import NativeEngine
from posttrain.sampling.native.schedule import check_finite
from posttrain.training.checkpoint import load_checkpoint, restore_model
from posttrain.training.stepwise.trainee import AdapterChoice, load_with_adapter
from posttrain.types import Sample, collate

MOST_MODELS = 2  # cached in addition to the base model
MOST_ROWS = 256  # sampled together in a generation
SLOTS = 64


@dataclass(frozen=True, slots=True)
class SampledWeights:
    """Weights used for sampling: a saved state's folder, or None for the base model."""

    folder: Path | None
    adapter: AdapterChoice
    step: int


@dataclass(frozen=True, slots=True)
class SampleJob:
    """A prompt, with a random key per answer.

    ``scores_prompt``: also return prompt log-probabilities. ``top_of_prompt``, ``top_of_answer``: number of top
    tokens per position. ``first_scored``: first prompt position to score, at least 1.
    """

    weights: SampledWeights
    prompt: tuple[int, ...]
    keys: tuple[int, ...]
    sampling: Sampling
    stop_texts: tuple[str, ...] = ()
    scores_prompt: bool = False
    first_scored: int = 1
    top_of_prompt: int = 0
    top_of_answer: int = 0

    @property
    def group(self) -> Hashable:
        """Options that must match for jobs to be sampled together."""
        return self.weights, replace(self.sampling, max_tokens=1)


@dataclass
class LoadedSampler:
    """A model and engine; ``folder``: source of the loaded weights."""

    model: Any
    engine: NativeEngine
    folder: Path | None = None
    forward: Forward | None = None

    def scorer(self) -> Forward:
        """Build a temperature-1 forward pass."""
        if self.forward is None:
            self.forward = Forward(self.model)
        return self.forward


@dataclass
class Samplers:
    """The models that sample. ``base``: the model without changes."""

    section: ModelSection
    tokenizer: Any
    base: LoadedSampler
    loaded: OrderedDict[AdapterChoice, LoadedSampler] = field(default_factory=OrderedDict)

    @property
    def context(self) -> int:
        """Tokens per forward pass."""
        return self.base.engine.context_tokens

    def draw(self, jobs: Sequence[SampleJob]) -> list[SampleResult]:
        """Sample answers for jobs in the same ``group``.

        Raises:
            PosttrainError: damaged or missing weights, or an engine error.
        """
        sampler = self._with_weights(jobs[0].weights)
        rows, owners = self._rows(jobs)
        self._generate(sampler.engine, jobs, rows, owners)
        drawn = []
        for number, job in enumerate(jobs):
            own = [row for row, owner in zip(rows, owners, strict=True) if owner == number]
            drawn.append(self._describe(sampler, job, own))
        return drawn

    def forget(self, folder: Path) -> None:
        """Reload weights at the next request, because the folder was rewritten or deleted."""
        for sampler in self.loaded.values():
            if sampler.folder == folder:
                sampler.folder = None

    def _rows(self, jobs: Sequence[SampleJob]) -> tuple[list[Conversation], list[int]]:
        rows: list[Conversation] = []
        owners: list[int] = []
        for number, job in enumerate(jobs):
            limit = min(job.sampling.max_tokens, self.context - len(job.prompt))
            for place, key in enumerate(job.keys):
                rows.append(Conversation(number, place, key, limit))
                owners.append(number)
        return rows, owners

    def _generate(
        self, engine: NativeEngine, jobs: Sequence[SampleJob], rows: Sequence[Conversation], owners: Sequence[int]
    ) -> None:
        """Sample all rows; at a stop text, a row ends with the token that completed it."""
        watched = {}
        for number, (row, owner) in enumerate(zip(rows, owners, strict=True)):
            if jobs[owner].stop_texts:
                watched[number] = StopWatch(row, jobs[owner], TextStream(self.tokenizer, jobs[owner].prompt))

        def look() -> bool:
            for number in list(watched):
                watched[number].read()
                if rows[number].finish is not None:
                    del watched[number]
            return False

        longest = max(job.sampling.max_tokens for job in jobs)
        sampling = replace(jobs[0].sampling, max_tokens=longest)
        generation = engine.begin_generation([job.prompt for job in jobs], list(rows), sampling, slots=SLOTS)
        generation.run(look)
        look()
        for row in rows:
            check_finite(row)

    def _describe(self, sampler: LoadedSampler, job: SampleJob, rows: Sequence[Conversation]) -> SampleResult:
        """Build a job's result, including requested log-probabilities."""
        sequences = []
        for row in rows:
            assert row.finish is not None, "it is complete"
            top = None
            if job.top_of_answer and row.ids:
                whole = (*job.prompt, *row.ids)
                top = self._top(sampler, whole, len(job.prompt), job.top_of_answer)
            sequences.append(SampledTokens(row.ids, row.logprobs, row.finish, top))
        first = job.first_scored
        scored: Tensor | None = None
        if job.scores_prompt:
            scored = self._score(sampler, job.prompt, first)
        top_of_prompt = None
        if job.top_of_prompt and len(job.prompt) > 1:
            top_of_prompt = self._top(sampler, job.prompt, first, job.top_of_prompt).behind(first)
        return SampleResult(sequences, scored, top_of_prompt)

    @torch.no_grad()
    def _score(self, sampler: LoadedSampler, ids: Sequence[int], first: int) -> Tensor:
        """Compute token log-probabilities starting at ``first``, at temperature 1: ``[N]``, NaN before."""
        scored = torch.full((len(ids),), float("nan"))
        if first < len(ids):
            batch = collate([Sample(ids, [place >= first for place in range(len(ids))])])
            scored[first:] = sampler.scorer()(batch, "none").logprobs[0, first:].cpu()
        return scored

    @torch.no_grad()
    def _top(self, sampler: LoadedSampler, ids: Sequence[int], first: int, count: int) -> TopTokens:
        """Find top tokens at positions starting at ``first``."""
        batch = collate([Sample(ids, [place >= first for place in range(len(ids))])])
        found, logprobs = sampler.scorer().top_candidates(batch, count)
        return TopTokens(found[0, first:].cpu(), logprobs[0, first:].cpu())

    def _with_weights(self, weights: SampledWeights) -> LoadedSampler:
        """Load a model with the given weights."""
        if weights.folder is None:
            return self.base
        key = weights.adapter.model_copy(update={"seed": None})
        sampler = self.loaded.pop(key, None)
        if sampler is None:
            while len(self.loaded) >= MOST_MODELS:
                self.loaded.popitem(last=False)
            sampler = make_sampler(load_with_adapter(self.section, key).model, self.tokenizer)
        if sampler.folder != weights.folder:
            checkpoint = load_checkpoint(weights.folder)
            if checkpoint is None:
                raise CheckpointError("these weights were deleted; save them again, with a name to keep them")
            sampler.folder = None
            restore_model(sampler.model, checkpoint.path)
            sampler.folder = weights.folder
        self.loaded[key] = sampler
        return sampler


@dataclass
class StopWatch:
    """Ends a row at a stop text."""

    row: Conversation
    job: SampleJob
    decoded: TextStream
    text: str = ""
    num_read: int = 0

    def read(self) -> None:
        """Decode new tokens in a row; truncate after the token that completes a stop text."""
        longest = max(map(len, self.job.stop_texts))
        while self.num_read < len(self.row.ids):
            token = self.row.ids[self.num_read]
            self.num_read += 1
            if token in self.job.sampling.stop_ids:
                return
            self.text += self.decoded.push(token)
            if any(stop in self.text for stop in self.job.stop_texts):
                del self.row.ids[self.num_read :]
                del self.row.logprobs[self.num_read :]
                self.row.finish = "stop"
                return
            self.text = self.text[-longest:]


def make_sampler(model: Any, tokenizer: Any) -> LoadedSampler:
    """Load a model and create an engine."""
    model.requires_grad_(False)
    engine = NativeEngine(model, slots=SLOTS)
    engine.num_tokens = num_tokens_of(tokenizer)
    engine.uses_cache = True
    return LoadedSampler(model, engine)
