"""Sources: what one optimizer step trains on, as a function of the step.

A source owns no state that would have to be saved: rows and random numbers are functions of
(seed, step). The rollout source keeps the batch that it is in the middle of (several optimizer
steps per rollout batch); a checkpoint saves that batch, because its samples came from weights that
no longer exist.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from posttrain.engines.base import Engine, Sampling
from posttrain.errors import RunFailure, UsageError
from posttrain.randomness import draw_indices, permutation
from posttrain.recipe import Recipe
from posttrain.render import Template, encode_prompt, encode_response, stop_ids
from posttrain.rollout import Grader, collect, encode_prompts
from posttrain.tasks.base import Task
from posttrain.train.rollout_metrics import describe_rollouts
from posttrain.types import Batch, Rollout, Sample, collate


@dataclass(slots=True)
class Draw:
    """What a source gives for one step.

    ``fresh``: the batch was made for this step (and not kept from an earlier one). ``rollouts``
    are those to record, ``metrics`` facts about them, ``timing`` seconds by phase.
    """

    batch: Batch
    fresh: bool = True
    rollouts: list[Rollout] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    timing: dict[str, float] = field(default_factory=dict)


class SupervisedSource:
    """Rows of a task: prompt and demonstration, in an order that is a function of (seed, epoch)."""

    def __init__(self, recipe: Recipe, task: Task, template: Template, tokenizer: Any, context_tokens: int) -> None:
        assert recipe.data is not None
        self.seed, self.batch = recipe.train.seed, recipe.data.batch
        self.dropped = dict(task.dropped)
        self.rows: list[tuple[list[int], int]] = []
        limit, train_all = min(recipe.data.max_tokens, context_tokens), recipe.data.train_on == "all"
        named = "data.max_tokens" if limit == recipe.data.max_tokens else "the model's context"
        prompt_limit = recipe.prompt.max_prompt_tokens or limit
        for example in task.examples:
            prompt = encode_prompt(tokenizer, template, example.messages)
            ids = prompt + encode_response(tokenizer, template, example)
            if len(ids) > limit:
                reason = f"longer than {named}={limit}"
            elif len(prompt) > prompt_limit:
                reason = f"prompt longer than {prompt_limit} tokens"
            else:
                self.rows.append((ids, 1 if train_all else len(prompt)))
                continue
            self.dropped[reason] = self.dropped.get(reason, 0) + 1
        if not self.rows:
            raise UsageError(f"task {task.name!r}: no row is left to train on; dropped: {self.dropped or 'none'}")
        self.num_examples = len(self.rows)

    def __call__(self, step: int) -> Draw:
        """The rows of update number ``step`` (1-based)."""
        chosen = draw_indices(self.seed, "data", (step - 1) * self.batch, self.batch, len(self.rows))
        samples = []
        for slot, index in enumerate(chosen):
            ids, start = self.rows[index]
            samples.append(Sample(ids=ids, mask=[False] * start + [True] * (len(ids) - start), group=slot))
        return Draw(collate(samples))

    def pending(self, step: int) -> dict[str, Tensor] | None:
        """Nothing: the next batch follows from the step."""
        return None

    def restore(self, pending: dict[str, Tensor] | None) -> None:
        """Nothing to restore."""
        assert pending is None


class RolloutSource:
    """Samples and grades completions with the current weights; one batch serves U updates.

    U = ``train.epochs`` × ``train.minibatches``; prompts are split into minibatches by an order
    that is a function of (seed, rollout batch, epoch).
    """

    def __init__(
        self,
        recipe: Recipe,
        task: Task,
        grader: Grader,
        tokenizer: Any,
        engine: Engine,
        context_tokens: int,
        advantage: Callable[[Tensor], Tensor],
        annotate: Callable[[Batch], Batch],
    ) -> None:
        assert recipe.rollout is not None
        self.options, self.seed = recipe.rollout, recipe.train.seed
        self.minibatches = recipe.train.minibatches
        self.updates = recipe.train.epochs * recipe.train.minibatches
        if self.options.prompts % self.minibatches:
            raise UsageError(
                f"train.minibatches={self.minibatches} does not divide rollout.prompts={self.options.prompts}"
            )
        self.task, self.grader, self.tokenizer, self.engine = task, grader, tokenizer, engine
        self.advantage, self.annotate = advantage, annotate
        limit = min(recipe.prompt.max_prompt_tokens or context_tokens, context_tokens - 1)
        self.kept, self.prompts, too_long = encode_prompts(tokenizer, grader.template, task.examples, limit)
        self.dropped = dict(task.dropped)
        if too_long:
            self.dropped[f"prompt longer than {limit} tokens"] = too_long
        if not self.kept:
            raise UsageError(f"task {task.name!r}: no prompt is left to sample from; dropped: {self.dropped}")
        self.num_examples = len(self.kept)
        self.sampling = Sampling(
            max_tokens=self.options.max_tokens,
            temperature=self.options.temperature,
            top_k=self.options.top_k,
            top_p=self.options.top_p,
            stop_ids=stop_ids(tokenizer, grader.template),
        )
        self._batch: Batch | None = None

    def __call__(self, step: int) -> Draw:
        """The rows of update number ``step`` (1-based); samples when a new rollout batch is due."""
        cycle, update = divmod(step - 1, self.updates)
        if update == 0:
            draw = self._collect(step, cycle)
            self._batch = draw.batch
        else:
            assert self._batch is not None, "a checkpoint inside a rollout batch carries the batch"
            draw = Draw(self._batch, fresh=False)
        if self.minibatches > 1:
            draw.batch = self._minibatch(draw.batch, cycle, *divmod(update, self.minibatches))
        return draw

    def pending(self, step: int) -> dict[str, Tensor] | None:
        """The rollout batch that updates after ``step`` still train on, as tensors to save."""
        if step % self.updates == 0 or self._batch is None:
            return None
        b = self._batch
        fixed = {"tokens": b.tokens, "lengths": b.lengths, "mask": b.mask, "group": b.group, "prefix": b.prefix}
        return fixed | {f"stream.{name}": x for name, x in b.streams.items()}

    def restore(self, pending: dict[str, Tensor] | None) -> None:
        """Take back what ``pending`` gave."""
        if pending is None:
            return
        streams = {name.removeprefix("stream."): x for name, x in pending.items() if name.startswith("stream.")}
        fixed = {name: x for name, x in pending.items() if not name.startswith("stream.")}
        self._batch = Batch(**fixed, streams=streams)

    def _minibatch(self, batch: Batch, cycle: int, epoch: int, part: int) -> Batch:
        prompts = self.options.prompts
        order = permutation(self.seed, f"minibatch {epoch}", cycle, prompts)
        size = prompts // self.minibatches
        chosen = sorted(int(i) for i in order[part * size : (part + 1) * size])
        group = self.options.group
        return batch.select([g * group + i for g in chosen for i in range(group)])

    def _collect(self, step: int, cycle: int) -> Draw:
        options = self.options
        started = time.perf_counter()
        sampled: list[list[Rollout]] = []
        chosen: list[list[Rollout]] = []
        grading = 0.0
        rounds = options.max_rounds if options.drop_uniform_groups else 1
        for attempt in range(rounds):
            start = (cycle * rounds + attempt) * options.prompts
            groups, seconds = self._sample(start, step, attempt)
            grading += seconds
            sampled += groups
            fitting = [g for g in groups if not options.drop_uniform_groups or _varies(g)]
            chosen += fitting[: options.prompts - len(chosen)]
            if len(chosen) == options.prompts:
                break
        generating = time.perf_counter() - started - grading
        accepted = len(chosen) / len(sampled)
        if len(chosen) < options.prompts:  # the bound is reached: fill up with uniform groups, which add no gradient
            rest = [g for g in sampled if not _varies(g)]
            chosen += rest[: options.prompts - len(chosen)]
        scored = time.perf_counter()
        self._set_advantages(chosen)
        batch = self._batch_of(chosen)
        grading += time.perf_counter() - scored
        scored = time.perf_counter()
        batch = self.annotate(batch)
        metrics = describe_rollouts(sampled, self.grader.format_part)
        metrics["advantage_std"] = float(torch.tensor([r.advantage for g in chosen for r in g]).std(correction=0))
        if options.drop_uniform_groups:
            metrics["accepted_groups"] = accepted
        timing = {
            "generate_seconds": generating,
            "score_seconds": grading,
            "annotate_seconds": time.perf_counter() - scored,
            "generated_tokens": float(sum(len(r.completion.ids) for g in sampled for r in g)),
        }
        return Draw(batch, True, [r for g in sampled for r in g], metrics, timing)

    def _sample(self, start: int, step: int, attempt: int) -> tuple[list[list[Rollout]], float]:
        places = draw_indices(self.seed, "prompts", start, self.options.prompts, len(self.kept))
        groups, seconds = collect(
            self.engine,
            self.tokenizer,
            self.grader,
            [self.task.examples[self.kept[p]] for p in places],
            [self.prompts[p] for p in places],
            self.options.group,
            self.sampling,
            key=(self.seed, f"rollout {attempt}", step),
            step=step,
            prompt_indices=[self.kept[p] for p in places],
        )
        for position, group in enumerate(groups, start=start):  # a batch may reach into the next epoch
            for rollout in group:
                rollout.epoch = position // len(self.kept)
        return groups, seconds

    def _set_advantages(self, groups: Sequence[Sequence[Rollout]]) -> None:
        rewards = torch.tensor([[r.reward for r in g] for g in groups], dtype=torch.float64)
        try:
            advantages = self.advantage(rewards)
        except Exception as error:  # a user's function may raise anything; the cause is kept
            raise RunFailure(f"advantage: the function raised {type(error).__name__}: {error}") from error
        if advantages.shape != rewards.shape:
            raise UsageError(
                f"advantage: the function returned shape {tuple(advantages.shape)} for rewards of shape "
                f"{tuple(rewards.shape)}; it must give one number per completion"
            )
        for group, row in zip(groups, advantages.tolist(), strict=True):
            for rollout, value in zip(group, row, strict=True):
                rollout.advantage = value

    def _batch_of(self, groups: Sequence[Sequence[Rollout]]) -> Batch:
        samples = []
        for index, group in enumerate(groups):
            for r in group:
                prompt, answer = list(r.prompt_ids), list(r.completion.ids)
                before = [0.0] * len(prompt)
                assert r.advantage is not None
                samples.append(
                    Sample(
                        ids=prompt + answer,
                        mask=[False] * len(prompt) + [True] * len(answer),
                        group=index,
                        prefix=len(prompt),
                        streams={
                            "advantages": before + [r.advantage] * len(answer),
                            "sampler_logprobs": before + list(r.completion.logprobs),
                        },
                    )
                )
        return collate(samples)


def _varies(group: Sequence[Rollout]) -> bool:
    return len({r.reward for r in group}) > 1
