"""Sample and grade completions for both training and evaluation."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from posttrain import registry
from posttrain.activity import phase
from posttrain.data.render import Template, decode_response, encode_prompt, stop_ids
from posttrain.data.render.encoding import decode_ids
from posttrain.errors import RewardFailure
from posttrain.graders.column_rewards import RewardLog, TrainingState
from posttrain.graders.grading import MeasuredReward, Verdict
from posttrain.graders.rewards import (
    BoundReward,
    RewardResult,
    bind_reward,
    check_size,
    format_part,
    grade_together,
    reward_parts,
)
from posttrain.process_group import SINGLE_PROCESS, ProcessGroup
from posttrain.randomness import derive_key
from posttrain.recipes.sections import RewardComponent
from posttrain.sampling.base import NO_RULES, DecodingRules, Engine, Episode, Sampling
from posttrain.store.metric_names import METRICS
from posttrain.types import Completion, Example, Rollout, Turn

if TYPE_CHECKING:  # deferred: imported only when a recipe needs it
    from transformers import PreTrainedTokenizerBase

    from posttrain.sampling.episodes import Stage

SEEDS = 1 << 31  # seed range accepted by any environment's random generator


@dataclass(frozen=True, slots=True)
class Attempt:
    """A completion to grade, including its prompt. ``text``: see ``Rollout.text``."""

    example: Example
    prompt: str
    text: str
    completion: Completion
    turns: tuple[Turn, ...] = ()
    environment_reward: float | None = None
    environment_metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Grade:
    """Unweighted parts, weighted sum, graded answer and grader outcome.

    Other fields match ``Rollout``.
    """

    parts: dict[str, float]
    reward: float
    extracted: str | None
    outcome: str
    skipped: list[str] = field(default_factory=list)
    is_scored: bool = True
    extra: dict[str, Any] = field(default_factory=dict)
    logged: dict[str, list[float]] = field(default_factory=dict)


@dataclass(slots=True)
class RunExtent:
    """Run length, exposed to TRL-style rewards. ``steps_per_epoch``: updates per pass."""

    max_steps: int = 0
    num_epochs: float = 0.0
    steps_per_epoch: float = 0.0

    def state(self, num_updates: int) -> TrainingState:
        """Build a training state after ``num_updates`` updates."""
        epoch = 0.0
        if self.steps_per_epoch:
            epoch = num_updates / self.steps_per_epoch
        # at least 1 in standalone evaluations, because rewards divide by it
        most = max(self.max_steps, num_updates, 1)
        return TrainingState(epoch, num_updates, most, num_train_epochs=math.ceil(self.num_epochs))


@dataclass(frozen=True)
class Grader:
    """Weighted rewards bound to a template's extraction rule.

    ``correct``, and a template's required format, are always measured, with weight 0 unless rewarded by the recipe.
    ``folder``: run folder for rewards that store files. ``num_rewards``: how many leading rewards come from the
    recipe; None means all. ``run_extent``: length of the run.
    """

    template: Template
    rewards: tuple[tuple[str, float, BoundReward], ...]
    format_part: str | None
    folder: Path | None = None
    num_rewards: int | None = None
    run_extent: RunExtent = field(default_factory=RunExtent)

    def grade(self, attempts: Sequence[Attempt], num_updates: int = 0) -> list[Grade]:
        """Grade attempts in order: unweighted parts and weighted sums after ``num_updates`` updates.

        Raises:
            RewardFailure: a reward raised an exception, returned a non-finite number, or closed a foreign file.
        """
        extracted = [self.template.extract(attempt.text) for attempt in attempts]
        available = []
        for attempt, final_answer in zip(attempts, extracted, strict=True):
            available.append(self._arguments(attempt, final_answer))
        ids = [attempt.example.id for attempt in attempts]
        log = RewardLog(len(attempts), self.run_extent.state(num_updates))
        with redirect_stdout(sys.stderr), phase(f"grading {len(attempts):,} answers"):
            columns = grade_together([reward for _, _, reward in self.rewards], available, ids, log)
        _refuse_known_names(log)
        for attempt in attempts:
            self._refuse_names_of_rewards(attempt.environment_metrics)
        grades = []
        for index, final_answer in enumerate(extracted):
            parts = []
            for (name, weight, _), column in zip(self.rewards, columns, strict=True):
                parts.append((name, weight, column[index]))
            grade = _sum_up(parts, final_answer)
            own = [name for name, _, _ in parts[: self.num_rewards]]
            grade.is_scored = not own or not set(own) <= set(grade.skipped)
            grade.extra = {column: values[index] for column, values in log.extra.items()}
            grades.append(grade)
        if grades:
            grades[0].logged = log.metrics
        return grades

    def _refuse_names_of_rewards(self, metrics: Mapping[str, float]) -> None:
        """Refuse ``get_metrics`` names of rewards, whose values would take their place."""
        for name, _, _ in self.rewards:
            if name in metrics:
                raise RewardFailure(f"get_metrics: {name!r} is the name of a reward. Choose another name")

    def _arguments(self, attempt: Attempt, extracted: str | None) -> dict[str, Any]:
        """Build the arguments available to reward functions."""
        return {
            "prompt": attempt.prompt,
            "text": attempt.text,
            "extracted": extracted,
            "answer": attempt.example.answer,
            "num_tokens": attempt.completion.num_own,
            "finish": attempt.completion.finish,
            "tags": self.template.tags,
            "grader": attempt.example.grader,
            "meta": attempt.example.meta,
            "example": attempt.example,
            "folder": self.folder,
            "turns": attempt.turns,
            "environment_reward": attempt.environment_reward,
            "environment_metrics": attempt.environment_metrics,
            "completion_ids": attempt.completion.ids,
        }


def _refuse_known_names(log: RewardLog) -> None:
    """Refuse ``log_metric`` names already used by built-in metrics."""
    for name in log.metrics:
        if name in METRICS or name.startswith("reward/"):
            raise RewardFailure(f"log_metric: {name!r} is a built-in metric. Choose another name")


def _sum_up(parts: Sequence[tuple[str, float, RewardResult | None]], extracted: str | None) -> Grade:
    values: dict[str, float] = {}
    info: dict[str, float] = {}
    outcome = "ungraded"
    total = 0.0
    failure = ""
    skipped: list[str] = []
    for name, weight, reward in parts:
        if reward is None:
            skipped.append(name)
            continue
        if isinstance(reward, float):
            values[name] = reward
        else:
            values[name] = reward.value
            info |= reward.info
        total += weight * values[name]
        if isinstance(reward, MeasuredReward):
            failure = reward.failure or failure
        if isinstance(reward, Verdict) and name == "correct":
            outcome = reward.outcome
            if reward.extracted is not None:
                extracted = reward.extracted
    total = check_size(total, f"weighted reward sum is {total:g}")
    if outcome == "ungraded" and failure:  # judges do not change the grader's outcome
        outcome = failure
    return Grade(info | values, total, extracted, outcome, skipped)


def build_grader(components: Sequence[RewardComponent], template: Template, folder: Path | None = None) -> Grader:
    """Bind a recipe's rewards, numbering duplicate names.

    Raises:
        UsageError: a reward requires unavailable arguments.
    """
    has_tags = bool(template.tags)
    names = reward_parts(components, template.name, has_tags=has_tags)
    bound: list[tuple[str, float, BoundReward]] = []
    for index, (name, component) in enumerate(zip(names, components, strict=False)):
        key = f"rewards.{index}"
        entry = registry.find("reward", component.name, key)
        bound.append((name, component.weight, bind_reward(entry, component.options, key)))
    for name in names[len(components) :]:
        entry = registry.find("reward", name)
        bound.append((name, 0.0, bind_reward(entry, {}, name)))
    of_format = format_part(template.name, has_tags=has_tags)
    return Grader(template, tuple(bound), of_format, folder, len(components))


@dataclass(frozen=True)
class Sampler:
    """Engine, tokenizer, and a grader for one template.

    ``context_tokens`` limits prompt plus answer. Each process in ``process_group`` samples and grades its share of
    prompts, then receives all answers. ``stage``: environment for multi-turn completions, which also determines the
    grader's template.
    """

    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    grader: Grader
    context_tokens: int
    process_group: ProcessGroup = field(default=SINGLE_PROCESS, kw_only=True)
    stage: Stage | None = field(default=None, kw_only=True)

    def sampling(
        self,
        max_tokens: int,
        temperature: float,
        top_k: int | None = None,
        top_p: float = 1.0,
        rules: DecodingRules = NO_RULES,
    ) -> Sampling:
        """Build sampling options, ending completions at the template's stop ids."""
        ends = stop_ids(self.tokenizer, self.grader.template)
        turn = None
        if self.stage is not None:
            turn = self.stage.max_turn_tokens
        return rules.onto(Sampling(max_tokens, temperature, top_k, top_p, ends, self.context_tokens, turn))


@dataclass(frozen=True)
class RolloutRequest:
    """Request for ``group`` completions per prompt, given as token ids in ``prompts``.

    ``key``: (seed, purpose, counter). Combined with slot and sample index, it determines random numbers. ``slots``
    and ``prompt_indices`` default to 0, 1, ...; the latter are recorded. ``epochs`` default to 0. ``num_updates``:
    finished updates, by default ``step``. ``replaced``: see ``Rollout``.
    """

    examples: Sequence[Example]
    prompts: Sequence[Sequence[int]]
    sampling: Sampling
    key: tuple[int, str, int]
    group: int = 1
    step: int = 0
    prompt_indices: Sequence[int] | None = None
    slots: Sequence[int] | None = None
    epochs: Sequence[int] | None = None
    num_updates: int | None = None
    replaced: Sequence[int | None] | None = None

    def keys(self, number: int) -> list[int]:
        """Derive completion keys for prompt ``number``."""
        slot = number
        if self.slots is not None:
            slot = self.slots[number]
        return [derive_key(*self.key, slot, g) for g in range(self.group)]


def collect(sampler: Sampler, request: RolloutRequest) -> tuple[list[list[Rollout]], float]:
    """Sample and grade completions. Returns rollouts grouped by prompt, and seconds spent grading.

    For multi-turn completions, only the last turn is graded.
    """
    group = request.group
    numbers = range(len(request.prompts))
    slots: Sequence[int] = numbers
    if request.slots is not None:
        slots = request.slots
    mine = sampler.process_group.share(numbers)
    episodes = _play(sampler, request, mine, [request.keys(i) for i in mine], [slots[i] for i in mine])
    started = time.perf_counter()
    played = []
    attempts = []
    for i, row in zip(mine, episodes, strict=True):
        for episode in row:
            played.append(episode)
            attempts.append(_attempt(sampler, request.examples[i], episode))
    grades: list[Grade] = []
    num_updates = request.num_updates
    if num_updates is None:
        num_updates = request.step
    if attempts:
        grades = sampler.grader.grade(attempts, num_updates)
    graded = []
    for episode, attempt, grade in zip(played, attempts, grades, strict=True):
        graded.append((episode, attempt.text, grade))
    seconds = time.perf_counter() - started
    own = [graded[start : start + group] for start in range(0, len(mine) * group, group)]
    rollouts = []
    for i, answers in enumerate(sampler.process_group.gather(own, "rollouts")):
        of_prompt = []
        for g, (episode, text, grade) in enumerate(answers):
            of_prompt.append(_rollout_of(request, (i, g), episode, text, grade))
        rollouts.append(of_prompt)
    return rollouts, seconds


def _rollout_of(request: RolloutRequest, place: tuple[int, int], episode: Episode, text: str, grade: Grade) -> Rollout:
    """Build a rollout at ``place`` (prompt index, sample index)."""
    number, sample = place
    example = request.examples[number]
    if episode.messages:
        example = replace(example, messages=episode.messages)
    epoch = 0
    if request.epochs is not None:
        epoch = request.epochs[number]
    index = number
    if request.prompt_indices is not None:
        index = request.prompt_indices[number]
    replaced = None
    if request.replaced is not None:
        replaced = request.replaced[number]
    return Rollout(
        example=example,
        prompt_ids=episode.prompt,
        completion=episode.completion,
        text=text,
        parts=grade.parts,
        reward=grade.reward,
        step=request.step,
        epoch=epoch,
        prompt_index=index,
        rollout_index=sample,
        extracted=grade.extracted,
        outcome=grade.outcome,
        turns=episode.turns,
        failures=episode.failures,
        skipped=grade.skipped,
        is_scored=grade.is_scored,
        extra=grade.extra,
        logged=grade.logged,
        feedback=episode.feedback,
        replaced=replaced,
    )


def logged_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Average metrics logged by rewards across rollouts."""
    values: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, numbers in rollout.logged.items():
            values.setdefault(name, []).extend(numbers)
    return {name: fmean(numbers) for name, numbers in values.items()}


def _play(
    sampler: Sampler, request: RolloutRequest, mine: Sequence[int], keys: list[list[int]], slots: Sequence[int]
) -> list[list[Episode]]:
    """Sample one episode per key, with several turns if a stage is set."""
    stage = sampler.stage
    if stage is None:
        prompts = [request.prompts[i] for i in mine]
        completions = sampler.engine.generate(prompts, keys, request.sampling)
        episodes_of = []
        for prompt, row in zip(prompts, completions, strict=True):
            episodes_of.append([Episode(tuple(prompt), completion) for completion in row])
        return episodes_of
    from posttrain.sampling.episodes import Episodes

    seed, purpose, counter = request.key
    seeds = [derive_key(seed, f"environment {purpose}", counter, slot) % SEEDS for slot in slots]
    room = sampler.context_tokens - 1
    episodes = Episodes(stage, sampler.engine, sampler.tokenizer, request.sampling, room, sampler.process_group)
    return episodes.play([request.examples[i] for i in mine], keys, seeds)


def _attempt(sampler: Sampler, example: Example, episode: Episode) -> Attempt:
    completion = episode.completion
    tokenizer = sampler.tokenizer
    template = sampler.grader.template
    prompt = decode_ids(tokenizer, episode.prompt)
    has_failed = completion.finish == "environment_failed"  # graded for the record but never trained on
    reward = episode.reward
    if has_failed and reward is None:
        reward = 0.0
    if episode.turns:
        text = episode.turns[-1].text
    else:
        text = decode_response(tokenizer, template, completion.ids, episode.prompt)
    return Attempt(example, prompt, text, completion, episode.turns, reward, episode.metrics)


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, template: Template, examples: Sequence[Example], limit: int
) -> tuple[list[int], list[list[int]], int]:
    """Encode prompts and drop any longer than ``limit`` tokens. Returns kept indices, ids, and the number dropped."""
    indices = []
    prompts = []
    for index, example in enumerate(examples):
        ids = encode_prompt(tokenizer, template, example.messages, example.variables)
        if len(ids) <= limit:
            indices.append(index)
            prompts.append(ids)
    return indices, prompts, len(examples) - len(indices)
