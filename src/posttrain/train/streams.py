"""Annotation: fills exactly the streams that the objective needs.

Once per rollout batch (or dataset): log-probabilities of the old policy and of the reference,
values, what a teacher says, corrections for the sampler's mismatch. Before each optimizer step:
``kl_baseline``, which is about the weights of that step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posttrain import registry
from posttrain.algorithms.objectives.primitives import log_ratio
from posttrain.errors import RecipeError, UsageError
from posttrain.models.forward.forward import ActorCritic, Forward, state_values
from posttrain.models.forward.micro import split_rows
from posttrain.recipes.recipe import Recipe
from posttrain.registry import Entry
from posttrain.types import Batch, Sample, collate

if TYPE_CHECKING:
    from posttrain.models.reference import Reference

FROM_ROLLOUTS = ("advantages", "sampler_logprobs", "old_logprobs", "returns", "old_values", "rewards", "has_feedback")
FROM_MODELS = ("ref_logprobs", "kl_baseline", "teacher_logprobs", "teacher_ids", "teacher_candidate_logprobs")
FROM_DATA = ("labels", "margins", "step_labels")
KNOWN_STREAMS = (*FROM_ROLLOUTS, *FROM_MODELS, *FROM_DATA)
TEACHER_STREAMS = {"teacher_logprobs", "teacher_ids", "teacher_candidate_logprobs"}


def needed_streams(entry: Entry, options: dict[str, Any], has_rollouts: bool, kl: float = 0.0) -> frozenset[str]:
    """The streams that an objective reads, given its options, and the reference where the KL to it has a weight.

    A function of a user's that was not registered states no needs; it gets what costs no extra
    forward pass.

    Raises:
        RecipeError: a supervised recipe with an objective that needs rollouts, or an unknown need.
    """
    default = ("advantages", "old_logprobs") if has_rollouts else ()
    needs = set(entry.traits.get("needs", default))
    needs |= {stream for option, stream in entry.traits.get("optional_needs", {}).items() if options.get(option)}
    if kl > 0:
        needs.add("ref_logprobs")
    unknown = needs - set(KNOWN_STREAMS)
    if unknown:
        raise RecipeError(
            f"objective {entry.name!r} needs {sorted(unknown)}, which nothing fills; known: {KNOWN_STREAMS}"
        )
    from_rollouts = sorted(needs & set(FROM_ROLLOUTS))
    if from_rollouts and not has_rollouts:
        raise RecipeError(
            f"objective {entry.name!r} needs {from_rollouts}, which come from rollouts; give 'rollout', not 'data'"
        )
    return frozenset(needs)


def scoring_temperature(recipe: Recipe, needs: frozenset[str]) -> float:
    """The temperature at which the trainer takes log-probabilities: that of sampling, for a policy gradient.

    There the policy that is improved is the one that sampled, and its ratio to the sampler must be 1 at first. An
    objective that reads nothing of a rollout but its tokens is a likelihood (expert iteration, DPO on own samples):
    it raises the probability of given tokens under the model as it will be used, at temperature 1. At the sampling
    temperature it would fit p^(1/T) to them, and leave a model that is less or more sure than its data.
    """
    if recipe.rollout is None:
        return 1.0
    follows_sampler = bool(needs & set(FROM_ROLLOUTS)) or recipe.correction is not None
    return recipe.rollout.temperature if follows_sampler else 1.0


@dataclass(slots=True)
class Annotator:
    """Computes streams without gradients, in micro-batches.

    forward: the model that is trained (with its critic). reference: as it was at the beginning, where
    something needs it. teacher: another model's forward pass, where one teaches. correct: a correction
    word. ``own_feedback``: the teacher is ``forward`` itself, reading the batch that is passed to it.
    """

    forward: Forward | ActorCritic
    needs: frozenset[str]
    tokens_per_micro: int
    rows_per_micro: int | None = None
    old_from: str = "sampler"
    reference: Reference | None = None
    teacher: Forward | None = None
    top_k: int = 1
    context_tokens: int = 1 << 20
    correct: Callable[[Tensor, Tensor], Tensor] | None = None

    def __call__(self, batch: Batch, teacher_batch: Batch | None = None) -> Batch:
        """``batch`` with its streams filled, in place.

        ``teacher_batch``: the same answers behind the prompts that the teacher sees; by default the
        batch itself.
        """
        needs = self.needs
        if "old_logprobs" in needs or self.correct is not None:
            if self.old_from == "trainer":
                batch.streams["old_logprobs"] = self.score(self.forward, batch)
            else:
                batch.streams["old_logprobs"] = batch.stream("sampler_logprobs")
        if "ref_logprobs" in needs:
            batch.streams["ref_logprobs"] = self.reference_logprobs(batch)
        if self.correct is not None:
            mismatch = log_ratio(batch.stream("old_logprobs"), batch.stream("sampler_logprobs"), batch.mask)
            found = registry.call("correction", self.correct, mismatch, batch.mask)
            if getattr(found, "shape", None) != mismatch.shape:
                raise UsageError(
                    f"correction: the function returned {registry.describe_result(found)} for log-ratios of shape "
                    f"{tuple(mismatch.shape)}; it must give one weight per token"
                )
            batch.streams["correction"] = found
        return self.ask_teacher(batch, teacher_batch)

    def before_step(self, batch: Batch) -> Batch:
        """What depends on the weights of this very step; the batch given stays as it is."""
        if "kl_baseline" not in self.needs:
            return batch
        baseline = self._kl_of_mismatched(batch)
        rows = torch.full((batch.num_rows,), baseline, dtype=torch.float32)
        return replace(batch, streams=batch.streams | {"kl_baseline": rows})

    def reference_logprobs(self, batch: Batch) -> Tensor:
        """``[B, T]``: log-probabilities under the reference."""
        assert self.reference is not None, "the setup makes a reference for whoever needs one"
        with self.reference.open() as reference:
            return self.score(reference, batch)

    def _kl_of_mismatched(self, batch: Batch) -> float:
        """KL(π‖π_ref) on answers to other prompts, over the optimizer batch; never negative.

        KTO (Ethayarajh et al. 2024, section 4.1): ẑ = max(0, mean of the summed log-ratios of y' given x),
        where y' answers another prompt of the batch. 0 where all prompts are the same.
        """
        mismatched = mismatch_answers(batch, self.context_tokens)
        if mismatched is None:
            return 0.0
        ratio = self.score(self.forward, mismatched) - self.reference_logprobs(mismatched)
        return max(0.0, float(ratio.to(torch.float64).sum(dim=1).mean()))

    @torch.no_grad()
    def values(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """``[B, T]`` values of the states before each trained token, ``[B]`` of the state after the last one."""
        values = torch.zeros(batch.tokens.shape, dtype=torch.float32)
        final = torch.zeros(batch.num_rows, dtype=torch.float32)
        for rows in split_rows(batch, self.tokens_per_micro, self.rows_per_micro):
            found, after = state_values(self.forward, batch.select(rows))
            index = torch.as_tensor(rows)
            values[index, : found.shape[1]] = found.cpu()
            final[index] = after.cpu()
        return values, final

    @torch.no_grad()
    def ask_teacher(self, batch: Batch, seen: Batch | None = None) -> Batch:
        """``batch`` with what the teacher says, where one teaches; ``seen`` is what it reads."""
        if self.teacher is None or not self.needs & TEACHER_STREAMS:
            return batch
        seen = batch if seen is None else seen
        assert bool((seen.mask.sum(dim=1) == batch.mask.sum(dim=1)).all()), "the teacher reads the same answers"
        if "teacher_logprobs" in self.needs:
            scored = self.score(self.teacher, seen)
            batch.streams["teacher_logprobs"] = torch.zeros(batch.mask.shape).masked_scatter(
                batch.mask, scored[seen.mask]
            )
        if "teacher_ids" not in self.needs:
            return batch
        pieces_ids, pieces_logprobs = {}, {}
        for rows in split_rows(seen, self.tokens_per_micro, self.rows_per_micro):
            part = seen.select(rows)
            ids, logprobs = (x.cpu() for x in self.teacher.top_candidates(part, self.top_k))
            for place, row in enumerate(rows):
                trained = part.mask[place]
                pieces_ids[row], pieces_logprobs[row] = ids[place][trained], logprobs[place][trained]
        k = pieces_ids[0].shape[-1]
        all_ids = torch.zeros((*batch.mask.shape, k), dtype=torch.long)
        all_logprobs = torch.zeros((*batch.mask.shape, k), dtype=torch.float32)
        for row in range(batch.num_rows):
            all_ids[row, batch.mask[row]] = pieces_ids[row]
            all_logprobs[row, batch.mask[row]] = pieces_logprobs[row]
        batch.streams["teacher_ids"] = all_ids
        batch.streams["teacher_candidate_logprobs"] = all_logprobs
        return batch

    @torch.no_grad()
    def score(self, forward: Forward | ActorCritic, batch: Batch) -> Tensor:
        """``float32 [B, T]``: log-probabilities of the trained tokens, 0 elsewhere."""
        forward = forward.policy if isinstance(forward, ActorCritic) else forward
        scored = torch.zeros(batch.tokens.shape, dtype=torch.float32)
        for rows in split_rows(batch, self.tokens_per_micro, self.rows_per_micro):
            part = batch.select(rows)
            values = forward(part, "none").logprobs.cpu()
            scored[torch.as_tensor(list(rows)), : values.shape[1]] = values
        return scored


def mismatch_answers(batch: Batch, limit: int) -> Batch | None:
    """Every row's prompt with the answer of the next row that has another prompt and fits into ``limit`` tokens.

    Rows for which there is none are left out; None if no row is left. Rows are unpaired in the result,
    whatever they are in ``batch``.
    """
    tokens, lengths, prefixes = batch.tokens.tolist(), batch.lengths.tolist(), batch.prefix.tolist()
    prompts = [tuple(row[:n]) for row, n in zip(tokens, prefixes, strict=True)]
    answers = [row[p:n] for row, p, n in zip(tokens, prefixes, lengths, strict=True)]
    samples = []
    for b, prompt in enumerate(prompts):
        others = (c % len(prompts) for c in range(b + 1, b + len(prompts)))
        fitting = (c for c in others if prompts[c] != prompt and len(prompt) + len(answers[c]) <= limit)
        other = next(fitting, None)
        if other is not None:
            mask = [False] * len(prompt) + [True] * len(answers[other])
            samples.append(Sample([*prompt, *answers[other]], mask, group=b, prefix=len(prompt)))
    return collate(samples) if samples else None
