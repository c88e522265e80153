"""Evaluation by generation: sample answers, grade them, compute results."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from posttrain.activity import each_piece
from posttrain.data.base import Task
from posttrain.errors import UsageError
from posttrain.evaluation.items import (
    Item,
    Kinds,
    break_down,
    graded_items,
    item_of,
    kind_results,
    sample_of,
    summarize,
)
from posttrain.randomness import permutation
from posttrain.sampling.base import Sampling
from posttrain.sampling.rollout import RolloutRequest, Sampler, collect, encode_prompts, logged_metrics
from posttrain.types import Example, Rollout

SCORES_AT_A_TIME = 256
MAX_DRAWS = 20  # examples examined per requested question


class AnswerScorer(Protocol):
    """A reward model: scores texts as answers, one float per text or None if not scorable."""

    def score(
        self, examples: Sequence[Example], texts: Sequence[str], finishes: Sequence[str]
    ) -> Sequence[float | None]: ...


@dataclass(frozen=True, slots=True)
class Advance:
    """Evaluation progress: finished items, summed per-item accuracy, sampled tokens.

    ``num_correct`` is None if nothing was graded. ``phase``: ``sampling``, then ``scoring`` by a reward model.
    """

    phase: str
    num_done: int
    num_items: int
    num_correct: float | None
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Results, rollouts and items of a finished evaluation.

    ``results``: see ``summarize``, plus ``seconds`` of wall time. ``items`` include their answers. ``kinds``:
    accuracy by kind of item.
    """

    name: str
    results: dict[str, float]
    rollouts: list[Rollout]
    items: list[Item] = field(default_factory=list)
    kinds: Kinds = field(default_factory=dict)
    timing: dict[str, float] = field(default_factory=dict)

    @property
    def kind_results(self) -> dict[str, float]:
        """Flatten ``kinds`` to results such as ``level=5:accuracy``."""
        return kind_results(self.kinds)


def held_out_indices(size: int, n: int, seed: int = 0) -> list[int]:
    """Choose a task's evaluation items: all, or a fixed random sample of ``n``, in task order.

    ``seed``: selects the sample; every evaluation uses 0.
    """
    if n >= size:
        return list(range(size))
    return sorted(int(i) for i in permutation(seed, "evaluation items", 0, size)[:n])


def question_of(example: Example) -> Hashable:
    """Build a question's identity: equal keys mean duplicate questions."""
    return example.messages, example.answer, repr(sorted(example.variables.items()))


def content_of(example: Example) -> Hashable:
    """Build an example's identity including given answers."""
    e = example
    return question_of(e), e.solution, e.demonstration, e.turns, e.responses, e.conversation


def distinct_indices(
    examples: Sequence[Example], n: int, seed: int = 0, key: Callable[[Example], Hashable] = question_of
) -> list[int]:
    """Choose ``held_out_indices`` without duplicates: the first drawn example per ``key`` is kept.

    Duplicate questions would count as independent in an interval. Replacements come from the first ``MAX_DRAWS * n``
    draws, so fewer than ``n`` may result.
    """
    size = len(examples)
    seen = set[Hashable]()
    chosen = list[int]()
    order: Iterable[int] = range(size)
    if n < size:
        drawn = permutation(seed, "evaluation items", 0, size)
        order = (int(i) for i in drawn[: MAX_DRAWS * n])
    for index in order:
        own = key(examples[index])
        if own not in seen:
            seen.add(own)
            chosen.append(index)
        if len(chosen) == n:
            break
    return sorted(chosen)


def held_out(
    task: Task, n: int, *, key: Callable[[Example], Hashable] = question_of, distinct: bool = True
) -> list[Example]:
    """Choose up to ``n`` evaluation examples, without duplicates (``distinct_indices``).

    ``distinct``: False if an environment creates the question, which can differ for the same prompt.

    Raises:
        UsageError: the task is empty.
    """
    if len(task.examples) == 0:
        raise UsageError(f"task {task.name!r}, split {task.split!r}: no examples to evaluate")
    if distinct:
        indices = distinct_indices(task.examples, n, key=key)
    else:
        indices = held_out_indices(len(task.examples), n)
    return [task.examples[i] for i in indices]


def task_label(task: Task) -> str:
    """Format ``name/split``, the label used in results."""
    return f"{task.name}/{task.split}"


@dataclass(frozen=True, slots=True)
class Questions:
    """Questions to evaluate: ``samples`` completions for up to ``n`` fixed held-out items.

    Duplicate questions are asked once.

    ``ks``: k values for pass@k and similar measures. ``seed``: for sampling. ``step``: recorded in rollouts.
    ``batch``: completions sampled at a time, rounded to whole items; None: no limit.
    """

    task: Task
    sampling: Sampling
    n: int
    samples: int = 1
    ks: Sequence[int] = ()
    seed: int = 0
    step: int = 0
    batch: int | None = None


def evaluate_sampler(
    sampler: Sampler,
    questions: Questions,
    *,
    scorer: AnswerScorer | None = None,
    observe: Callable[[Advance], None] = lambda advance: None,
) -> Evaluation:
    """Sample answers and grade them.

    A prompt exceeding the context counts as wrong (``prompts_too_long``), so models with different contexts are
    compared on the same items. Duplicate questions are asked once, so n and intervals refer to distinct questions
    (``repeated_prompts`` counts duplicates). Answers depend on (seed, task, item index, sample index), not on
    ``batch``.

    Args:
        scorer: reward model to score all answers.
        observe: called after each batch.

    Raises:
        UsageError: the task is empty, or all prompts are too long.
    """
    started = time.perf_counter()
    task = questions.task
    samples = questions.samples
    examples, prompts = _read_questions(sampler, questions)
    num_too_long = len(examples) - len(prompts)
    rollouts = list[Rollout]()
    num_repeated = min(questions.n, len(task.examples)) - len(examples)
    items = [item_of(example, i) for i, example in enumerate(examples)]
    timing = {"generate_seconds": 0.0, "score_seconds": 0.0, "generated_tokens": 0.0}

    def tell(phase: str, num_done: int) -> None:
        graded = graded_items(items)
        num_correct = None
        if graded:
            num_correct = sum(item.share for item in graded)
        observe(Advance(phase, num_done, len(items), num_correct, int(timing["generated_tokens"])))

    for slots in each_piece(f"evaluation on {task.name}", _batches(list(prompts), questions), "items"):
        groups = _ask(sampler, questions, {slot: (examples[slot], prompts[slot]) for slot in slots}, timing)
        for slot, group in zip(slots, groups, strict=True):
            answers = [sample_of(rollout, sampler) for rollout in group]
            items[slot] = item_of(examples[slot], slot, answers)
            rollouts += group
        num_answered = sum(bool(item.samples) for item in items)
        tell("sampling", num_answered + num_too_long)
    if scorer is not None:
        before = time.perf_counter()
        items = _scored(items, examples, scorer, lambda num_done: tell("scoring", num_done))
        timing["reward_model_seconds"] = time.perf_counter() - before
    if timing["generate_seconds"] > 0:
        timing["generate_tokens_per_second"] = timing["generated_tokens"] / timing["generate_seconds"]
    results = summarize(items, task, samples=samples, ks=questions.ks, format_part=sampler.grader.format_part)
    results |= logged_metrics(rollouts)
    results |= {"prompts_too_long": float(num_too_long), "repeated_prompts": float(num_repeated)}
    results["seconds"] = time.perf_counter() - started
    return Evaluation(task_label(task), results, rollouts, items, break_down(items, samples), timing)


def _batches(slots: list[int], questions: Questions) -> list[list[int]]:
    """Group slots into batches for sampling."""
    size = len(slots)
    if questions.batch is not None:
        size = max(1, questions.batch // questions.samples)
    return [slots[start : start + size] for start in range(0, len(slots), size)]


def _ask(
    sampler: Sampler, questions: Questions, batch: Mapping[int, tuple[Example, list[int]]], timing: dict[str, float]
) -> list[list[Rollout]]:
    """Sample and grade one batch, given examples and prompts by slot; adds to ``timing``."""
    before = time.perf_counter()
    slots = list(batch)
    request = RolloutRequest(
        [example for example, _ in batch.values()],
        [prompt for _, prompt in batch.values()],
        questions.sampling,
        key=(questions.seed, f"evaluation {questions.task.name}", 0),
        group=questions.samples,
        step=questions.step,
        prompt_indices=slots,
        slots=slots,
    )
    groups, score_seconds = collect(sampler, request)
    timing["generate_seconds"] += time.perf_counter() - before - score_seconds
    timing["score_seconds"] += score_seconds
    timing["generated_tokens"] += sum(rollout.completion.num_own for group in groups for rollout in group)
    return groups


def _read_questions(sampler: Sampler, questions: Questions) -> tuple[list[Example], dict[int, list[int]]]:
    """Choose examples, and encode prompts by slot, skipping those that are too long."""
    examples = held_out(questions.task, questions.n, distinct=sampler.stage is None)
    limit = sampler.context_tokens
    kept, prompts, _ = encode_prompts(sampler.tokenizer, sampler.grader.template, examples, limit - 1)
    if not kept:
        raise UsageError(f"task {questions.task.name!r}: all prompts exceed the model's {limit} tokens")
    return examples, dict(zip(kept, prompts, strict=True))


def _scored(
    items: Sequence[Item], examples: Sequence[Example], scorer: AnswerScorer, tell: Callable[[int], None]
) -> list[Item]:
    """Score all answers, adding scores to the items."""
    owners = []
    for index, item in enumerate(items):
        for sample in item.samples:
            owners.append((index, sample))
    values: list[float | None] = []
    for start in range(0, len(owners), SCORES_AT_A_TIME):
        part = owners[start : start + SCORES_AT_A_TIME]
        texts = [sample.text for _, sample in part]
        finishes = [sample.finish for _, sample in part]
        values += scorer.score([examples[i] for i, _ in part], texts, finishes)
        tell(part[-1][0] + 1)
    scores = iter(values)
    scored = []
    for item in items:
        samples = tuple(replace(sample, score=next(scores)) for sample in item.samples)
        scored.append(replace(item, samples=samples))
    return scored
