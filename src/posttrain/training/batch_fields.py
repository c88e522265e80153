"""Batch fields: the numbers per token or row that an objective reads, each filled by one registered function.

Such a function takes components by name (``PARTS``). Its registration has: ``needs``, the fields that it reads;
``fills``, their names where it fills several; ``each_step``, filled before each optimizer step instead of once per
batch of its source; ``rollouts``, of samples alone; ``fixed``, a function of the row and the reference, which a data
set computes once and keeps. An objective names fields in its own ``needs``; exactly these are filled, with what they
need.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from posttrain import registry
from posttrain.activity import phase
from posttrain.algorithms.objectives.primitives import log_ratio
from posttrain.errors import RecipeError, UsageError
from posttrain.models.forward.actor_critic import ActorCritic, state_values
from posttrain.models.forward.forward import Forward
from posttrain.models.forward.micro import MicroBatching
from posttrain.process_group import SINGLE_PROCESS, ProcessGroup
from posttrain.recipes.recipe import Recipe
from posttrain.recipes.sections import RolloutSection
from posttrain.registry import Entry, is_built_in, register
from posttrain.training.idle_rows import UNSCORED, split_idle_rows
from posttrain.types import COUNTED, LEFT_OUT, UNMASKED, Batch, Sample, collate, with_float64

if TYPE_CHECKING:
    from posttrain.models.reference import Reference
    from posttrain.training.parts.averages import Teacher
    from posttrain.training.parts.masks import BoundMask

T = TypeVar("T")
# Filled by the sources, with the rows.
OF_ROLLOUTS = ("advantages", "sampler_logprobs", "returns", "rewards", "has_feedback", "barred")
GIVEN = (*OF_ROLLOUTS, "labels", "margins", "step_labels")

# Arguments of the function of a batch field. ``seen`` is the batch as the teacher reads it: the same answers, maybe
# after other prompts. ``policy``, ``critic``, ``reference`` and ``teacher`` are each a ``Scorer``; ``correct`` is the
# recipe's correction. ``step``: the number of the update (1-based).
PARTS = ("batch", "seen", "policy", "critic", "reference", "teacher", "recipe", "context_tokens", "correct", "step")


@dataclass(frozen=True, slots=True)
class Scorer:
    """A model's forward pass over a batch, in micro-batches, without gradients, shared by the processes; all get all
    results, on the CPU. ``rows``: only these rows are computed, the results of the others are 0."""

    open: Callable[[], AbstractContextManager[Forward | ActorCritic]]
    micro_batches: MicroBatching
    rows: Sequence[int] | None = None

    @property
    def process_group(self) -> ProcessGroup:
        """The processes that share the passes."""
        return self.micro_batches.process_group

    def _each(self, batch: Batch, compute: Callable[[Any, Batch], T]) -> Iterator[tuple[list[int], T]]:
        """Yield the rows of each micro-batch of this process, with what is computed of them."""
        if self.rows is not None and not self.rows:
            return
        chosen = batch
        if self.rows is not None:
            chosen = batch.select(self.rows)
        with self.open() as forward, phase("forward passes", chosen.num_rows, "rows") as scored:
            for places, computed in self.micro_batches.each(chosen, forward, partial(compute, forward)):
                scored.num_done += len(places)
                rows = places
                if self.rows is not None:
                    rows = [self.rows[place] for place in places]
                yield rows, computed

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> Tensor:
        """``float32 [B, T]``: log-probabilities of the trained tokens, 0 elsewhere."""
        scored = torch.zeros(batch.tokens.shape, dtype=torch.float32)
        for rows, outputs in self._each(batch, lambda forward, part: forward(part, "none")):
            values = outputs.logprobs.cpu().float()
            scored[torch.as_tensor(rows), : values.shape[1]] = values
        self.process_group.add([scored], "log-probabilities")
        return scored

    @torch.no_grad()
    def entropies(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Two ``float32 [B, T]``: log-probabilities and entropies at the trained tokens, 0 elsewhere."""
        logprobs = torch.zeros(batch.tokens.shape, dtype=torch.float32)
        entropies = torch.zeros_like(logprobs)
        for rows, outputs in self._each(batch, lambda forward, part: forward(part, "detached")):
            places = torch.as_tensor(rows)
            width = outputs.logprobs.shape[1]
            logprobs[places, :width] = outputs.logprobs.cpu().float()
            entropies[places, :width] = outputs.entropy.cpu().float()
        self.process_group.add([logprobs, entropies], "entropies")
        return logprobs, torch.where(batch.mask, entropies, torch.zeros_like(entropies))

    @torch.no_grad()
    def values(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """``[B, T]`` values of the states before each trained token, ``[B]`` of the state after the last one."""
        values = torch.zeros(batch.tokens.shape, dtype=torch.float32)
        final = torch.zeros(batch.num_rows, dtype=torch.float32)
        for rows, (before, after) in self._each(batch, state_values):
            values[torch.as_tensor(rows), : before.shape[1]] = before.cpu().float()
            final[torch.as_tensor(rows)] = after.cpu().float()
        self.process_group.add([values, final], "values")
        return values, final

    @torch.no_grad()
    def candidates(self, batch: Batch, k: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return for each row, at its trained tokens, the likeliest tokens ``int64 [N, K]`` and their
        log-probabilities."""
        return self._of_candidates(batch, k, lambda forward, part: forward.top_candidates(part, k))

    @torch.no_grad()
    def logprobs_of(self, batch: Batch, ids: Sequence[Tensor]) -> list[Tensor]:
        """Return for each row, at its trained tokens, the log-probabilities of tokens ``int64 [N, K]``."""
        k = ids[0].shape[-1]
        table = torch.zeros((*batch.mask.shape, k), dtype=torch.long)
        for row, own in enumerate(ids):
            table[row, batch.mask[row]] = own
        asked = replace(batch, fields={"teacher_ids": table})

        def compute(forward: Forward, part: Batch) -> tuple[Tensor, Tensor]:
            given = forward(part, "none", with_candidates=True).candidate_logprobs
            assert given is not None, "asked for"
            return part.field("teacher_ids"), given

        return self._of_candidates(asked, k, compute)[1]

    def _of_candidates(
        self, batch: Batch, k: int, compute: Callable[[Forward, Batch], tuple[Tensor, Tensor]]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return what is computed of K tokens for each row, at its trained tokens; 0 of rows that are not computed."""
        of_row: dict[int, tuple[Tensor, Tensor]] = {}
        for rows, both in self._each(batch, compute):
            likeliest = both[0].cpu()
            their_logprobs = both[1].cpu().float()
            for place, row in enumerate(rows):
                trained = batch.mask[row, : likeliest.shape[1]]
                of_row[row] = (likeliest[place][trained], their_logprobs[place][trained])
        everywhere: dict[int, tuple[Tensor, Tensor]] = {}
        for of_process in self.process_group.gather([of_row], "candidates"):
            everywhere.update(of_process)
        ids: list[Tensor] = []
        logprobs: list[Tensor] = []
        for row in range(batch.num_rows):
            if row in everywhere:
                row_ids, row_logprobs = everywhere[row]
            else:
                shape = (int(batch.mask[row].sum()), k)
                row_ids = torch.zeros(shape, dtype=torch.long)
                row_logprobs = torch.zeros(shape)
            ids.append(row_ids)
            logprobs.append(row_logprobs)
        return ids, logprobs


@register("batch_field", needs=("sampler_logprobs",))
def old_logprobs(batch: Batch, policy: Scorer, recipe: Recipe) -> Tensor:
    """``[B, T]``: log-probabilities under the weights that sampled, by the sampler or the trainer
    (``rollout.old_logprobs``)."""
    if recipe.rollout is not None and recipe.rollout.old_logprobs == "trainer":
        return policy.logprobs(batch)
    return batch.field("sampler_logprobs")


@register("batch_field", fixed=True)
def ref_logprobs(batch: Batch, reference: Scorer) -> Tensor:
    """``[B, T]``: log-probabilities under the reference, the model as it was when training began."""
    return reference.logprobs(batch)


@register("batch_field", needs=("old_logprobs", "sampler_logprobs"))
def correction(batch: Batch, correct: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """``[B, T]``: the recipe's correction for the log-ratio of trainer and sampler; a factor of the values."""
    mismatch = log_ratio(batch.field("old_logprobs"), batch.field("sampler_logprobs"), batch.mask)
    weights: Tensor = registry.call("correction", correct, mismatch, batch.mask)
    if getattr(weights, "shape", None) != mismatch.shape:
        raise UsageError(
            f"correction: the function returned {registry.describe_result(weights)} for log-ratios of shape "
            f"{tuple(mismatch.shape)}; it must give one weight per token"
        )
    return weights


@register("batch_field")
def teacher_logprobs(batch: Batch, seen: Batch, teacher: Scorer) -> Tensor:
    """``[B, T]``: log-probabilities of the trained tokens under the teacher."""
    of_seen = teacher.logprobs(seen)[seen.mask]
    return torch.zeros(batch.mask.shape).masked_scatter(batch.mask, of_seen)


@register("batch_field", fills=("teacher_ids", "teacher_candidate_logprobs"))
def teacher_ids(batch: Batch, seen: Batch, teacher: Scorer, policy: Scorer, recipe: Recipe) -> dict[str, Tensor]:
    """``int64 [B, T, K]``: the likeliest tokens (``teacher.top_k``) of the teacher, or of the student when the batch
    was made (``teacher.support``), likeliest first, with the teacher's ``teacher_candidate_logprobs`` of them."""
    assert recipe.teacher is not None
    if recipe.teacher.support == "student":
        ids, _ = policy.candidates(batch, recipe.teacher.top_k)
        logprobs = teacher.logprobs_of(seen, ids)
    else:
        ids, logprobs = teacher.candidates(seen, recipe.teacher.top_k)
    shape = (*batch.mask.shape, ids[0].shape[-1])
    all_ids = torch.zeros(shape, dtype=torch.long)
    all_logprobs = torch.zeros(shape, dtype=torch.float32)
    for row in range(batch.num_rows):
        all_ids[row, batch.mask[row]] = ids[row]
        all_logprobs[row, batch.mask[row]] = logprobs[row]
    return {"teacher_ids": all_ids, "teacher_candidate_logprobs": all_logprobs}


@register("batch_field", rollouts=True, fills=("old_values", "final_values"))
def old_values(batch: Batch, critic: Scorer) -> dict[str, Tensor]:
    """``[B, T]``: the critic's values of the states before each trained token, when the batch was sampled; and
    ``final_values`` ``[B]``, of the state after the last one."""
    values, final = critic.values(batch)
    return {"old_values": values, "final_values": final}


@register("batch_field", each_step=True)
def kl_baseline(batch: Batch, policy: Scorer, reference: Scorer, context_tokens: int) -> Tensor:
    """``[B]``: KL(π‖π_ref) on answers to other prompts, over the optimizer batch; never negative.

    KTO (Ethayarajh et al. 2024, section 4.1): ẑ = max(0, mean of the summed log-ratios of y' given x),
    where y' answers another prompt of the batch. 0 where all prompts are the same.
    """
    baseline = 0.0
    mismatched = mismatch_answers(batch, context_tokens)
    if mismatched is not None:
        ratio = policy.logprobs(mismatched) - reference.logprobs(mismatched)
        of_rows = with_float64(ratio).to(torch.float64).sum(dim=1)
        baseline = max(0.0, float(of_rows.mean()))
    return torch.full((batch.num_rows,), baseline, dtype=torch.float32)


def describe_one_prompt(batch: Batch, step: int) -> str:
    """Return a warning where the KL baseline has no answers to other prompts; empty if it has, or none is read."""
    rows = zip(batch.tokens.tolist(), batch.prefix.tolist(), strict=True)
    if "kl_baseline" not in batch.fields or len({tuple(ids[:length]) for ids, length in rows}) > 1:
        return ""
    return (
        f"all answers of step {step} have the same prompt, so the KL baseline, which takes answers to other prompts, "
        "is 0. Set data.batch_size (or rollout.num_prompts) so that a batch has several prompts"
    )


def mismatch_answers(batch: Batch, limit: int) -> Batch | None:
    """Return every row's prompt with the next row's answer to another prompt that fits into ``limit`` tokens.

    Rows for which there is none are left out; None if no row is left. Rows are unpaired in the result.
    """
    prompts: list[list[int]] = []
    answers: list[list[int]] = []
    masks: list[list[bool]] = []
    columns = (batch.tokens.tolist(), batch.mask.tolist(), batch.prefix.tolist(), batch.lengths.tolist())
    for ids, mask, prefix, length in zip(*columns, strict=True):
        prompts.append(ids[:prefix])
        answers.append(ids[prefix:length])
        masks.append(mask[prefix:length])
    samples: list[Sample] = []
    for row, prompt in enumerate(prompts):
        for step in range(1, len(prompts)):
            other = (row + step) % len(prompts)
            if prompts[other] == prompt or len(prompt) + len(answers[other]) > limit:
                continue
            mask = [False] * len(prompt) + masks[other]
            samples.append(Sample([*prompt, *answers[other]], mask, group=row, prefix=len(prompt)))
            break
    if not samples:
        return None
    return collate(samples)


def _needs(entry: Entry) -> tuple[str, ...]:
    return tuple(entry.traits.get("needs", ()))


def _fills(entry: Entry) -> tuple[str, ...]:
    return tuple(entry.traits.get("fills", (entry.name,)))


def fillers(names: Collection[str], reader: str) -> tuple[Entry, ...]:
    """Return the functions that fill these fields and those that they need, each after what it needs.

    The package's own come in the order of their source, then users' by name. ``reader`` names who reads them.

    Raises:
        RecipeError: a field that nothing fills, two functions that fill one, or one that needs itself or takes an
            unknown part.
    """
    entries = registry.entries("batch_field")
    own = registry.built_in("batch_field")
    known: dict[str, Entry] = {}
    of_others = sorted(entries.keys() - own)
    for entry_name in (*own, *of_others):
        entry = entries[entry_name]
        for name in _fills(entry):
            if name in known or name in (*GIVEN, UNMASKED, COUNTED, LEFT_OUT):
                raise RecipeError(
                    f"batch field {entry.name!r} fills {name!r}, as something else does; give it another name"
                )
            known[name] = entry
    ordered: dict[str, Entry] = {}

    def add(requested: Iterable[str], trail: tuple[str, ...]) -> None:
        unknown = sorted(set(requested) - known.keys() - set(GIVEN))
        if unknown:
            names = (*GIVEN, *known)
            raise RecipeError(
                f"{trail[-1]} needs {unknown}, which nothing fills; known: {', '.join(names)}."
                f"{registry.suggest(unknown[0], names)} Or register a batch field of that name"
            )
        filling = {known[name].name: known[name] for name in known if name in requested}
        for entry in filling.values():
            label = f"batch field {entry.name!r}"
            if label in trail:
                raise RecipeError(f"{' needs '.join((*trail, label))}; a batch field cannot need itself")
            for part in entry.provided:
                if part in PARTS:
                    continue
                near = registry.suggest(part, PARTS)
                raise RecipeError(f"{label} asks for {part!r}.{near} It may ask for {', '.join(PARTS)}")
            add(_needs(entry), (*trail, label))
            ordered.setdefault(entry.name, entry)

    add(names, (reader,))
    return tuple(ordered.values())


def needed_fields(entry: Entry, options: Mapping[str, object], has_rollouts: bool, kl: float = 0.0) -> frozenset[str]:
    """Return the fields that an objective reads, given its options; with ``ref_logprobs`` where the KL has a weight.

    A function that was not registered gets those that cost no extra forward pass.

    Raises:
        RecipeError: a supervised recipe with an objective that needs rollouts, or an unknown need.
    """
    default: tuple[str, ...] = ()
    if has_rollouts:
        default = ("advantages", "old_logprobs")
    needs = set(entry.traits.get("needs", default))
    for option, field_name in entry.traits.get("optional_needs", {}).items():
        if options.get(option):
            needs.add(field_name)
    if kl > 0:
        needs.add("ref_logprobs")
    objective = f"objective {entry.name!r}"
    fillers(needs, objective)
    from_rollouts = sorted(name for name in needs if comes_from_rollouts(name))
    if from_rollouts and not has_rollouts:
        raise RecipeError(f"{objective} needs {from_rollouts}, which come from rollouts; give 'rollout', not 'data'")
    return frozenset(needs)


def with_their_needs(names: Collection[str]) -> frozenset[str]:
    """Return these batch fields, and those that they need."""
    return frozenset(names).union(*(_needs(entry) for entry in fillers(names, "the recipe")))


def comes_from_rollouts(name: str) -> bool:
    """Return whether this batch field, or one that it needs, comes from rollouts alone."""
    filling = fillers([name], name)
    read = {name}.union(*(_needs(entry) for entry in filling))
    return bool(read & set(OF_ROLLOUTS)) or any(entry.traits.get("rollouts") for entry in filling)


def scoring_temperature(rollout: RolloutSection | None, needs: frozenset[str]) -> float:
    """Return the temperature of the trainer's log-probabilities: that of sampling, for a policy gradient.

    There the policy that is improved is the one that sampled, and its ratio to the sampler must be 1 at first. An
    objective that reads nothing of a rollout but its tokens is a likelihood (expert iteration, DPO on own samples) of
    the model as it will be used, at temperature 1; at the sampling temperature it would fit p^(1/T).
    """
    if rollout is None:
        return 1.0
    if any(comes_from_rollouts(name) for name in needs):
        return rollout.temperature
    return 1.0


def replays_sets(rollout: RolloutSection | None, needs: frozenset[str]) -> bool:
    """Return whether log-probabilities are over the sets that truncated sampling kept (sampling replay).

    They are for a policy gradient, as its temperature is (``scoring_temperature``).
    """
    if rollout is None or not rollout.is_truncated:
        return False
    return any(comes_from_rollouts(name) for name in needs)


def follows_rules(rollout: RolloutSection | None, needs: frozenset[str]) -> bool:
    """Return whether log-probabilities are under the sampler's rules (``min_tokens``, ``repetition_penalty``)."""
    if rollout is None or not rollout.has_rules:
        return False
    return any(comes_from_rollouts(name) for name in needs)


@dataclass(slots=True)
class BatchFields:
    """Fills the fields of batches: exactly ``needs``, and what these need.

    forward: the trained model (with its critic). reference: the model at the beginning. teacher: the model that
    teaches, maybe the trained one itself. process_group: the processes that share the passes. vanishes: as of the
    method; rows that it makes idle need no passes. masks: of the recipe.
    """

    needs: frozenset[str]
    recipe: Recipe
    forward: Forward | ActorCritic
    context_tokens: int
    reference: Reference | None = None
    teacher: Teacher | None = None
    correct: Callable[[Tensor, Tensor], Tensor] | None = None
    process_group: ProcessGroup = SINGLE_PROCESS
    vanishes: tuple[str, ...] = ()
    masks: Sequence[BoundMask] = ()
    _once: list[Entry] = field(init=False, default_factory=list)
    _each_step: list[Entry] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        late: set[str] = set()
        for entry in fillers(self.needs, "the recipe"):
            moves = entry.traits.get("fixed") and self.recipe.reference is not None
            waits = entry.traits.get("each_step") or late.intersection(_needs(entry)) or moves
            if moves and self.recipe.kl_in_reward is not None:
                self._once.append(entry)  # advantages are of the reference at sampling
            if waits and "seen" in entry.provided:
                raise RecipeError(
                    f"batch field {entry.name!r} is filled before each step, and what a teacher sees is known once per "
                    "rollout batch; ask for 'batch' instead of 'seen'"
                )
            if waits:
                self._each_step.append(entry)
                late.update(_fills(entry))
            else:
                self._once.append(entry)

    @property
    def fixed(self) -> list[str]:
        """The fields that a data set computes once; none if the reference moves."""
        if self.recipe.reference is not None:
            return []
        return [entry.name for entry in self._once if entry.traits.get("fixed")]

    def __call__(self, batch: Batch, seen: Batch | None = None, *, every_row: bool = True) -> Batch:
        """Fill the fields of ``batch`` in place; one that needs what is not there yet is left to a later call.

        seen: the same answers after the prompts that the teacher sees; by default the batch itself. every_row: False
        if updates skip idle rows; these get zeros, and the field ``unscored`` is then 1 for them.
        """
        if seen is None:
            seen = batch
        elif batch.kept is not None:
            seen.kept = batch.kept.moved(batch.mask, seen.mask)
        if seen is not batch and batch.rules is not None:
            seen.rules = batch.rules
            if "barred" in batch.fields:
                moved = batch.field("barred")[batch.mask]
                seen.fields["barred"] = torch.zeros(seen.mask.shape).masked_scatter(seen.mask, moved)
        has_same_answers = seen.mask.sum(dim=1) == batch.mask.sum(dim=1)
        assert bool(has_same_answers.all()), "the teacher reads the same answers"
        rows: list[int] | None = None
        if not every_row:
            rows = self._rows_to_score(batch)
        if rows is not None:
            unscored = torch.ones(batch.num_rows)
            unscored[rows] = 0.0
            batch.fields[UNSCORED] = unscored
        for entry in self._once:
            is_missing = batch.fields.keys().isdisjoint(_fills(entry))
            if is_missing and batch.fields.keys() >= set(_needs(entry)):
                self._fill(entry, batch, seen, rows)
        return batch

    def _rows_to_score(self, batch: Batch) -> list[int] | None:
        """Return the rows that updates will compute; None for all.

        Functions of others may read whole batches, so that all fields and the correction must be the package's.
        """
        is_known = all(name in batch.fields for name in self.vanishes)
        if not self.vanishes or not is_known or not all(is_built_in(entry) for entry in self._once):
            return None
        if self.recipe.correction is not None:
            correction = registry.find("correction", self.recipe.correction.name, "correction")
            if not is_built_in(correction):
                return None
        rows, idle = split_idle_rows(batch, self.vanishes)
        if not idle:
            return None
        return rows

    def before_step(self, batch: Batch, step: int = 0) -> Batch:
        """Return a copy of the batch with the fields that depend on the weights of this ``step``, and on masks."""
        if not self._each_step and not self.masks:
            return batch
        batch = replace(batch, fields=dict(batch.fields))
        for entry in self._each_step:
            self._fill(entry, batch, batch, step=step)
        if self.masks:
            from posttrain.training.parts.masks import apply_masks

            batch.fields |= apply_masks(self.masks, batch)
        return batch

    def fill(self, name: str, batch: Batch) -> Tensor:
        """Fill the field ``name`` of ``batch`` and return it."""
        self._fill(registry.find("batch_field", name), batch, batch)
        return batch.field(name)

    @torch.no_grad()
    def _fill(self, entry: Entry, batch: Batch, seen: Batch, rows: list[int] | None = None, step: int = 0) -> None:
        label = f"batch field {entry.name!r}"
        parts = {"batch": batch, "seen": seen, "step": step} | self._parts(rows)
        filled = registry.call(label, entry.function, *(parts[name] for name in entry.provided))
        tensors = {entry.name: filled}
        if isinstance(filled, dict):
            tensors = filled
        shapes = (tuple(batch.mask.shape), (batch.num_rows,))
        fits = all(isinstance(x, Tensor) and x.shape[:2] in shapes for x in tensors.values())
        if not fits or set(tensors) != set(_fills(entry)):
            got = ", ".join(f"{name}: {registry.describe_result(x)}" for name, x in tensors.items())
            raise UsageError(
                f"{label}: the function returned {got or 'nothing'} for a batch of shape {shapes[0]}; it must give "
                f"{', '.join(_fills(entry))}, with one number per row or per token"
            )
        batch.fields |= tensors

    def _parts(self, rows: list[int] | None) -> dict[str, object]:
        """Return by name what the function of a batch field may ask for, but the batches; passes compute ``rows``."""
        train = self.recipe.train
        micro_batches = MicroBatching(train.micro_batch_tokens, train.micro_batch_rows, self.process_group)

        def scorer(open_forward: Callable[[], AbstractContextManager[Forward | ActorCritic]]) -> Scorer:
            return Scorer(open_forward, micro_batches, rows)

        policy = self.forward
        if isinstance(policy, ActorCritic):
            policy = policy.policy
        parts: dict[str, object] = {
            "policy": scorer(lambda: nullcontext(policy)),
            "critic": scorer(lambda: nullcontext(self.forward)),
            "reference": None,
            "teacher": None,
            "recipe": self.recipe,
            "context_tokens": self.context_tokens,
            "correct": self.correct,
        }
        if self.reference is not None:
            parts["reference"] = scorer(self.reference.open)
        if self.teacher is not None:
            parts["teacher"] = scorer(self.teacher.open)
        return parts
