"""From examples to graded completions: one function, used by training and by evaluation."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain import registry
from posttrain.activity import phase
from posttrain.data.render import Template, decode_response, encode_prompt, stop_ids
from posttrain.data.render.encoding import decode_ids
from posttrain.graders.grading import Measured, Verdict
from posttrain.graders.rewards import BoundReward, RewardResult, bind_reward, check_size, format_part, reward_parts
from posttrain.process_group import SINGLE_PROCESS, ProcessGroup
from posttrain.randomness import derive_key
from posttrain.recipes.sections import RewardComponent
from posttrain.sampling.base import Engine, Episode, Sampling
from posttrain.types import Completion, Example, Rollout, Turn

if TYPE_CHECKING:  # a run imports only what its recipe asks for
    from transformers import PreTrainedTokenizerBase

    from posttrain.sampling.episodes import Stage

SEEDS = 1 << 31  # of environments: the range of every generator of random numbers


@dataclass(frozen=True, slots=True)
class Attempt:
    """A completion to be graded, with its prompt (``text``: see ``Rollout.text``)."""

    example: Example
    prompt: str
    text: str
    completion: Completion
    turns: tuple[Turn, ...] = ()
    environment_reward: float | None = None


@dataclass(frozen=True, slots=True)
class Grade:
    """Every part unweighted, their weighted sum, the answer that was graded, and the grader's outcome."""

    parts: dict[str, float]
    reward: float
    extracted: str | None
    outcome: str


@dataclass(frozen=True)
class Grader:
    """The rewards of a recipe with their weights, bound to a template's extraction rule.

    ``correct`` and the format of a template that asks for one are always measured, at weight 0 unless the recipe
    rewards them. ``folder``: the run's own, for rewards that store something.
    """

    template: Template
    rewards: tuple[tuple[str, float, BoundReward], ...]
    format_part: str | None
    folder: Path | None = None

    def grade(self, attempts: Sequence[Attempt]) -> list[Grade]:
        """Return every part of every attempt unweighted, and the weighted sums, in order.

        Raises:
            RewardFailure: a reward raised, returned no finite number, or closed a file that is not its own.
        """
        extracted = [self.template.extract(attempt.text) for attempt in attempts]
        available = [
            {
                "prompt": attempt.prompt,
                "text": attempt.text,
                "extracted": final_answer,
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
            }
            for attempt, final_answer in zip(attempts, extracted, strict=True)
        ]
        ids = [attempt.example.id for attempt in attempts]
        with redirect_stdout(sys.stderr), phase(f"grading {len(attempts):,} answers"):
            columns = [(name, weight, reward.grade(available, ids)) for name, weight, reward in self.rewards]
        return [
            _sum_up([(name, weight, column[i]) for name, weight, column in columns], extracted[i])
            for i in range(len(attempts))
        ]


def _sum_up(parts: Sequence[tuple[str, float, RewardResult]], extracted: str | None) -> Grade:
    values: dict[str, float] = {}
    info: dict[str, float] = {}
    outcome, total, failure = "ungraded", 0.0, ""
    for name, weight, reward in parts:
        if isinstance(reward, float):
            values[name] = reward
        else:
            values[name] = reward.value
            info |= reward.info
        total += weight * values[name]
        if isinstance(reward, Measured):
            failure = reward.failure or failure
        if isinstance(reward, Verdict) and name == "correct":
            outcome, extracted = reward.outcome, reward.extracted if reward.extracted is not None else extracted
    total = check_size(total, f"the weighted sum of the rewards is {total:g}")
    if outcome == "ungraded" and failure:  # a judge does not change the grader's outcome
        outcome = failure
    return Grade(info | values, total, extracted, outcome)


def build_grader(components: Sequence[RewardComponent], template: Template, folder: Path | None = None) -> Grader:
    """Bind the rewards of a recipe; a name that occurs twice gets a number.

    Raises:
        UsageError: a reward whose arguments are not there.
    """
    names = reward_parts(components, template.name, has_tags=bool(template.tags))
    bound: list[tuple[str, float, BoundReward]] = []
    for index, (name, component) in enumerate(zip(names, components, strict=False)):
        entry = registry.find("reward", component.name, f"rewards.{index}")
        bound.append((name, component.weight, bind_reward(entry, component.options, f"rewards.{index}")))
    for name in names[len(components) :]:
        bound.append((name, 0.0, bind_reward(registry.find("reward", name), {}, name)))
    return Grader(template, tuple(bound), format_part(template.name, has_tags=bool(template.tags)), folder)


@dataclass(frozen=True)
class Sampler:
    """An engine with its tokenizer, and a grader under a template.

    ``context_tokens``: the limit of a prompt and its answer together. Each process of a ``process_group`` samples and
    grades its share of the prompts, and has the answers to all. ``stage``: the environment of completions of several
    turns; the grader's template is then the stage's.
    """

    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    grader: Grader
    context_tokens: int
    process_group: ProcessGroup = field(default=SINGLE_PROCESS, kw_only=True)
    stage: Stage | None = field(default=None, kw_only=True)

    def sampling(self, max_tokens: int, temperature: float, top_k: int | None = None, top_p: float = 1.0) -> Sampling:
        """Return the options of sampling; a completion ends at the template's end tokens."""
        ends = stop_ids(self.tokenizer, self.grader.template)
        turn = self.stage.max_turn_tokens if self.stage is not None else None
        return Sampling(max_tokens, temperature, top_k, top_p, ends, self.context_tokens, turn)


@dataclass(frozen=True)
class RolloutRequest:
    """``group`` completions of every prompt, the token ids of which are ``prompts``.

    ``key``: (seed, purpose, counter); with slot and sample it decides a completion's random numbers. ``slots`` of the
    prompts, ``prompt_indices`` under which they are recorded: 0, 1, ... by default. ``epochs``: 0 by default.
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

    def keys(self, number: int) -> list[int]:
        """Return the keys of the completions of prompt ``number``."""
        slot = number if self.slots is None else self.slots[number]
        return [derive_key(*self.key, slot, g) for g in range(self.group)]


def collect(sampler: Sampler, request: RolloutRequest) -> tuple[list[list[Rollout]], float]:
    """Sample completions and grade them; return the rollouts grouped by prompt, and the seconds spent in grading.

    The graded text of a completion of several turns is its last turn.
    """
    grader, group = sampler.grader, request.group
    numbers = range(len(request.prompts))
    slots, indices = (numbers if chosen is None else chosen for chosen in (request.slots, request.prompt_indices))
    mine = sampler.process_group.share(numbers)
    episodes = _play(sampler, request, mine, [request.keys(i) for i in mine], [slots[i] for i in mine])
    started = time.perf_counter()
    numbered = zip(mine, episodes, strict=True)
    played = [(one, _attempt(sampler, request.examples[i], one)) for i, row in numbered for one in row]
    grades = grader.grade([attempt for _, attempt in played]) if played else []
    graded = [(one, attempt.text, grade) for (one, attempt), grade in zip(played, grades, strict=True)]
    seconds = time.perf_counter() - started
    groups = sampler.process_group.gather([graded[k * group : (k + 1) * group] for k in range(len(mine))], "rollouts")
    return [
        [
            Rollout(
                example=replace(request.examples[i], messages=one.messages or request.examples[i].messages),
                prompt_ids=one.prompt,
                completion=one.completion,
                text=text,
                parts=grade.parts,
                reward=grade.reward,
                step=request.step,
                epoch=0 if request.epochs is None else request.epochs[i],
                prompt_index=indices[i],
                rollout_index=g,
                extracted=grade.extracted,
                outcome=grade.outcome,
                turns=one.turns,
                failures=one.failures,
            )
            for g, (one, text, grade) in enumerate(answers)
        ]
        for i, answers in enumerate(groups)
    ], seconds


def _play(
    sampler: Sampler, request: RolloutRequest, mine: Sequence[int], keys: list[list[int]], slots: Sequence[int]
) -> list[list[Episode]]:
    """Return one episode for each key: of one turn, or of several where there is a stage."""
    stage = sampler.stage
    if stage is None:
        prompts = [request.prompts[i] for i in mine]
        completions = sampler.engine.generate(prompts, keys, request.sampling)
        return [[Episode(tuple(p), one) for one in row] for p, row in zip(prompts, completions, strict=True)]
    from posttrain.sampling.episodes import Episodes

    seed, purpose, counter = request.key
    seeds = [derive_key(seed, f"environment {purpose}", counter, slot) % SEEDS for slot in slots]
    room = sampler.context_tokens - 1
    episodes = Episodes(stage, sampler.engine, sampler.tokenizer, request.sampling, room, sampler.process_group)
    return episodes.play([request.examples[i] for i in mine], keys, seeds)


def _attempt(sampler: Sampler, example: Example, episode: Episode) -> Attempt:
    completion, tokenizer, template = episode.completion, sampler.tokenizer, sampler.grader.template
    prompt = decode_ids(tokenizer, episode.prompt)
    has_failed = completion.finish == "environment_failed"  # graded for the record, never trained on
    reward = 0.0 if has_failed and episode.reward is None else episode.reward
    if episode.turns:
        text = episode.turns[-1].text
    else:
        text = decode_response(tokenizer, template, completion.ids, episode.prompt)
    return Attempt(example, prompt, text, completion, episode.turns, reward)


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, template: Template, examples: Sequence[Example], limit: int
) -> tuple[list[int], list[list[int]], int]:
    """Return the indices of the prompts of at most ``limit`` tokens, their ids, and how many were dropped."""
    encoded = [encode_prompt(tokenizer, template, example.messages, example.variables) for example in examples]
    kept = [index for index, ids in enumerate(encoded) if len(ids) <= limit]
    return kept, [encoded[index] for index in kept], len(encoded) - len(kept)
