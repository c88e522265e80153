"""Evaluation by generation: answers are sampled, graded, and counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from posttrain.engines.base import Sampling
from posttrain.engines.rollout import RolloutRequest, Sampler, collect, encode_prompts
from posttrain.errors import UsageError
from posttrain.evals.items import Item, item_of, sample_of, with_scores
from posttrain.evals.measures import Kinds, break_down, graded_items, summarize
from posttrain.randomness import permutation
from posttrain.tasks.base import Task
from posttrain.types import Example, Rollout

SCORES_AT_A_TIME = 256


class Scorer(Protocol):
    """A reward model: one number for each text as the answer to its example; None where it cannot be scored."""

    def score(
        self, examples: Sequence[Example], texts: Sequence[str], finishes: Sequence[str]
    ) -> Sequence[float | None]: ...


@dataclass(frozen=True, slots=True)
class Advance:
    """How far an evaluation has come: items done of all, the sum of their shares of right answers, tokens sampled.

    ``num_right`` is None where nothing that was answered has an answer to be graded against.

    ``phase``: ``sampling`` (grading with it), then ``scoring`` where a reward model is asked.
    """

    phase: str
    num_done: int
    num_items: int
    num_right: float | None
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What was found.

    ``results`` by name (``measures.summarize``; ``seconds`` is the wall time), ``rollouts`` the graded rollouts
    (empty where they were handed to a recorder), ``items`` every item with its answers, ``kinds`` accuracy by
    kind of item, ``timing`` where the time went and the throughput: of this call, without what was known before.
    """

    name: str
    results: dict[str, float]
    rollouts: list[Rollout]
    items: list[Item] = field(default_factory=list)
    kinds: Kinds = field(default_factory=dict)
    timing: dict[str, float] = field(default_factory=dict)


def held_out_indices(size: int, n: int, seed: int = 0) -> list[int]:
    """The items that every evaluation of a task uses: all, or a fixed sample of ``n``, in task order.

    ``seed``: which sample; 0 is everybody's.
    """
    if n >= size:
        return list(range(size))
    return sorted(int(i) for i in permutation(seed, "evaluation items", 0, size)[:n])


def task_label(task: Task) -> str:
    """``name/split``: how a task's results are called."""
    return f"{task.name}/{task.split}"


@dataclass(frozen=True, slots=True)
class Questions:
    """What is asked in an evaluation: ``samples`` completions for each of ``n`` fixed held-out items of a task.

    Args:
        task, sampling: what is asked, how answers are drawn.
        n: items at most.
        samples: completions per item.
        ks: what pass@k, majority@k and best_of@k are computed for.
        seed, step: of the random numbers; under which step rollouts are recorded.
        batch: completions that the engine is asked for at a time (whole items, at least one); None: all.
    """

    task: Task
    sampling: Sampling
    n: int
    samples: int = 1
    ks: Sequence[int] = ()
    seed: int = 0
    step: int = 0
    batch: int | None = None


def evaluate(
    sampler: Sampler,
    asked: Questions,
    *,
    known: Mapping[int, Item] | None = None,
    scorer: Scorer | None = None,
    record: Callable[[list[Rollout]], None] | None = None,
    observe: Callable[[Advance], None] | None = None,
) -> Evaluation:
    """The answers to some questions, graded.

    A prompt without room in the model's context counts as wrong (``prompts_too_long`` says how many), so that
    models with different contexts are measured on the same items. What is sampled for an item is a function of
    (seed, task, its place among the items, number of the sample): neither of ``batch`` nor of what was known.

    Args:
        sampler, asked: who answers and who grades; what.
        known: by index, items that an interrupted evaluation has answered already.
        scorer: a reward model that scores every answer.
        record: takes the rollouts of each batch once they are graded; they are not kept then.
        observe: told how far it has come, after each batch.

    Raises:
        UsageError: the task is empty, or no prompt fits.
    """
    session = _Session(sampler, asked, known or {}, observe)
    for slots in session.batches(None if asked.batch is None else max(1, asked.batch // asked.samples)):
        request = RolloutRequest(
            [session.examples[slot] for slot in slots],
            [session.prompts[slot] for slot in slots],
            asked.sampling,
            key=(asked.seed, f"evaluation {asked.task.name}", 0),
            group=asked.samples,
            step=asked.step,
            prompt_indices=slots,
            slots=slots,
        )
        session.take(slots, *collect(sampler, request), record)
    if scorer is not None:
        session.score(scorer)
    return session.finish()


class _Session:
    """One evaluation under way: its items so far, and what they have cost."""

    def __init__(
        self, sampler: Sampler, asked: Questions, known: Mapping[int, Item], observe: Callable[[Advance], None] | None
    ) -> None:
        self.started = self.mark = time.perf_counter()
        task, limit, self.grader = asked.task, sampler.context_tokens, sampler.grader
        if len(task.examples) == 0:
            raise UsageError(f"task {task.name!r}, split {task.split!r}: no example to evaluate on")
        self.examples = [task.examples[i] for i in held_out_indices(len(task.examples), asked.n)]
        kept, prompts, self.num_too_long = encode_prompts(
            sampler.tokenizer, self.grader.template, self.examples, limit - 1
        )
        if not kept:
            raise UsageError(f"task {task.name!r}: no prompt fits into the model's {limit} tokens")
        self.prompts = dict(zip(kept, prompts, strict=True))
        self.items = [known.get(i) or item_of(example, i) for i, example in enumerate(self.examples)]
        self.asked, self.observe = asked, observe
        self.rollouts: list[Rollout] = []
        self.num_tokens = 0
        self.sampling_seconds = self.grading_seconds = self.scoring_seconds = 0.0

    def batches(self, size: int | None) -> list[list[int]]:
        """The items that are still to be asked, so many at a time (None: all at once)."""
        asked = [slot for slot in self.prompts if not self.items[slot].samples]
        return [asked[span] for span in _spans(len(asked), size or len(asked))]

    def take(
        self,
        slots: Sequence[int],
        groups: Sequence[list[Rollout]],
        grading_seconds: float,
        record: Callable[[list[Rollout]], None] | None,
    ) -> None:
        """Enter the graded answers to some of the items."""
        self.sampling_seconds += self._lap() - grading_seconds
        self.grading_seconds += grading_seconds
        for slot, group in zip(slots, groups, strict=True):
            samples = [sample_of(rollout, self.grader.format_part) for rollout in group]
            self.items[slot] = item_of(self.examples[slot], slot, samples)
            self.num_tokens += sum(r.completion.num_own for r in group)
        graded = [rollout for group in groups for rollout in group]
        if record is None:
            self.rollouts += graded
        else:
            record(graded)
        self._tell("sampling", sum(bool(item.samples) for item in self.items) + self.num_too_long)
        self._lap()

    def score(self, scorer: Scorer) -> None:
        """Have every answer scored, those of known items too."""
        self._lap()
        owners = [(i, sample) for i, item in enumerate(self.items) for sample in item.samples]
        scores: list[list[float | None]] = [[] for _ in self.items]
        for span in _spans(len(owners), SCORES_AT_A_TIME):
            part = owners[span]
            texts, finishes = [sample.text for _, sample in part], [sample.finish for _, sample in part]
            values = scorer.score([self.examples[i] for i, _ in part], texts, finishes)
            for (i, _), value in zip(part, values, strict=True):
                scores[i].append(value)
            self._tell("scoring", part[-1][0] + 1)
        self.items = with_scores(self.items, scores)
        self.scoring_seconds = self._lap()

    def timing(self) -> dict[str, float]:
        timing = {"sampling_seconds": self.sampling_seconds, "grading_seconds": self.grading_seconds}
        timing |= {"scoring_seconds": self.scoring_seconds} if self.scoring_seconds else {}
        timing["generated_tokens"] = float(self.num_tokens)
        if self.sampling_seconds > 0:
            timing["generated_tokens_per_second"] = self.num_tokens / self.sampling_seconds
        return timing

    def finish(self) -> Evaluation:
        """Count."""
        task, samples, own_parts = self.asked.task, self.asked.samples, ("correct", self.grader.format_part or "")
        shares = task.shares(self.items) if task.shares is not None else None
        ks, worked = self.asked.ks, task.worked
        results = summarize(self.items, samples=samples, ks=ks, worked=worked, own_parts=own_parts, shares=shares)
        results["prompts_too_long"] = float(self.num_too_long)
        kinds, timing = break_down(self.items, samples), self.timing()
        results["seconds"] = time.perf_counter() - self.started
        return Evaluation(task_label(task), results, self.rollouts, self.items, kinds, timing)

    def _tell(self, phase: str, num_done: int) -> None:
        if self.observe is not None:
            graded = graded_items(self.items)
            num_right = sum(item.share for item in graded) if graded else None
            self.observe(Advance(phase, num_done, len(self.items), num_right, self.num_tokens))

    def _lap(self) -> float:
        now = time.perf_counter()
        seconds, self.mark = now - self.mark, now
        return seconds


def _spans(total: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, total, max(1, size))]
