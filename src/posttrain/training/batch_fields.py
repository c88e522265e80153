"""Batch fields: numbers per token or row for objectives, each computed by a registered function.

Field functions receive components by name (``PARTS``). Registration traits: ``needs``, required fields; ``fills``,
field names if there are several; ``each_step``, computed before each optimizer step instead of once per source batch;
``rollouts``, available only with rollouts; ``fixed``, depends only on row and reference, so datasets compute it once
and cache it. Objectives list fields in ``needs``; only these fields and their dependencies are computed.
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
from posttrain.recipes.other_models import TeacherSection
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
# Filled in by sources together with rows.
OF_ROLLOUTS = ("advantages", "sampler_logprobs", "returns", "rewards", "has_feedback", "barred")
GIVEN = (*OF_ROLLOUTS, "labels", "margins", "step_labels")

# Arguments for batch field functions. ``seen``: teacher's view, with the same answers but possibly different prompts.
# ``policy``, ``critic``, ``reference`` and ``teacher`` are ``Scorer`` objects; ``correct`` is the recipe's correction;
# ``step`` is the update number (1-based). ``recipe``: the whole recipe, of which built-in fields read only a section:
# ``rollout`` and ``teaching`` (None if absent), ``objective_options`` and ``seed``.
PARTS = (
    *("batch", "seen", "policy", "critic", "reference", "teacher", "correct", "step"),
    *("recipe", "rollout", "teaching", "objective_options", "seed", "context_tokens"),
)


@dataclass(frozen=True, slots=True)
class Scorer:
    """Gradient-free forward pass over a batch, in micro-batches shared across processes.

    Every process gets all results, on CPU. ``rows``: compute only these rows; other results are 0.
    ``replays_experts``: False for other models than the policy, whose routers choose by themselves.
    """

    open: Callable[[], AbstractContextManager[Forward | ActorCritic]]
    micro_batches: MicroBatching
    rows: Sequence[int] | None = None
    replays_experts: bool = True

    @property
    def process_group(self) -> ProcessGroup:
        """Processes sharing the forward passes."""
        return self.micro_batches.process_group

    def _each(self, batch: Batch, compute: Callable[[Any, Batch], T]) -> Iterator[tuple[list[int], T]]:
        """Yield this process's micro-batches as (row indices, results)."""
        if self.rows is not None and not self.rows:
            return
        chosen = batch
        if not self.replays_experts:
            chosen = replace(batch, experts=None)
        if self.rows is not None:
            chosen = chosen.select(self.rows)
        with self.open() as forward, phase("forward passes", chosen.num_rows, "rows") as scored:
            for places, computed in self.micro_batches.each(chosen, forward, partial(compute, forward)):
                scored.num_done += len(places)
                rows = places
                if self.rows is not None:
                    rows = [self.rows[place] for place in places]
                yield rows, computed

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> Tensor:
        """Compute ``float32 [B, T]`` log-probabilities at trained tokens, 0 elsewhere."""
        scored = torch.zeros(batch.tokens.shape, dtype=torch.float32)
        for rows, outputs in self._each(batch, lambda forward, part: forward(part, "none")):
            values = outputs.logprobs.cpu().float()
            scored[torch.as_tensor(rows), : values.shape[1]] = values
        self.process_group.add([scored], "log-probabilities")
        return scored

    @torch.no_grad()
    def entropies(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute log-probabilities and entropies at trained tokens (``float32 [B, T]`` each), 0 elsewhere."""
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
        """Compute ``[B, T]`` state values before each trained token, and ``[B]`` final state values."""
        values = torch.zeros(batch.tokens.shape, dtype=torch.float32)
        final = torch.zeros(batch.num_rows, dtype=torch.float32)
        for rows, (before, after) in self._each(batch, state_values):
            values[torch.as_tensor(rows), : before.shape[1]] = before.cpu().float()
            final[torch.as_tensor(rows)] = after.cpu().float()
        self.process_group.add([values, final], "values")
        return values, final

    @torch.no_grad()
    def candidates(self, batch: Batch, k: int) -> tuple[list[Tensor], list[Tensor]]:
        """Find the most likely tokens ``int64 [N, K]`` and their log-probabilities at each row's trained tokens."""
        return self._of_candidates(batch, k, lambda forward, part: forward.top_candidates(part, k))

    @torch.no_grad()
    def logprobs_of(self, batch: Batch, ids: Sequence[Tensor]) -> list[Tensor]:
        """Compute log-probabilities for given tokens ``int64 [N, K]`` at each row's trained tokens."""
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
        """Collect K-candidate results per row at trained tokens; 0 for skipped rows."""
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
        for table, _ in everywhere.values():
            k = table.shape[-1]  # less than asked for in a small vocabulary
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
def old_logprobs(batch: Batch, policy: Scorer, rollout: RolloutSection | None) -> Tensor:
    """``[B, T]`` log-probabilities under the sampling weights (``rollout.old_logprobs`` sets who computes them)."""
    if rollout is not None and rollout.old_logprobs == "trainer":
        return policy.logprobs(batch)
    return batch.field("sampler_logprobs")


@register("batch_field", fixed=True)
def ref_logprobs(batch: Batch, reference: Scorer) -> Tensor:
    """``[B, T]`` log-probabilities under the reference (initial) model."""
    return reference.logprobs(batch)


@register("batch_field", needs=("old_logprobs", "sampler_logprobs"))
def correction(batch: Batch, correct: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """``[B, T]`` mismatch correction computed from trainer-sampler log-ratios; multiplies objective values."""
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
    """``[B, T]`` teacher log-probabilities at trained tokens."""
    of_seen = teacher.logprobs(seen)[seen.mask]
    return torch.zeros(batch.mask.shape).masked_scatter(batch.mask, of_seen)


@register("batch_field", fills=("teacher_ids", "teacher_candidate_logprobs"))
def teacher_ids(
    batch: Batch, seen: Batch, teacher: Scorer, policy: Scorer, teaching: TeacherSection
) -> dict[str, Tensor]:
    """``int64 [B, T, K]`` most likely tokens, sorted, with the teacher's ``teacher_candidate_logprobs``.

    The ``teacher.top_k`` tokens are ranked by the teacher, or by the student at sampling time (``teacher.support``).
    Under sampling replay they come from the kept set, over which both are normalized; -1 fills up smaller sets.
    """
    most = teaching.top_k
    if batch.kept is not None:
        most = min(most, int(batch.kept.counts.max()))
    if teaching.support == "student":
        ids, _ = policy.candidates(batch, most)
        logprobs = teacher.logprobs_of(seen, ids)
    else:
        ids, logprobs = teacher.candidates(seen, most)
    shape = (*batch.mask.shape, ids[0].shape[-1])
    all_ids = torch.zeros(shape, dtype=torch.long)
    all_logprobs = torch.zeros(shape, dtype=torch.float32)
    for row in range(batch.num_rows):
        all_ids[row, batch.mask[row]] = ids[row]
        all_logprobs[row, batch.mask[row]] = logprobs[row]
    return {"teacher_ids": all_ids, "teacher_candidate_logprobs": all_logprobs}


@register("batch_field", rollouts=True, fills=("old_values", "final_values"))
def old_values(batch: Batch, critic: Scorer) -> dict[str, Tensor]:
    """``[B, T]`` critic values before each trained token at sampling time, and ``[B]`` ``final_values`` at the end."""
    values, final = critic.values(batch)
    return {"old_values": values, "final_values": final}


@register("batch_field", each_step=True)
def kl_baseline(batch: Batch, policy: Scorer, reference: Scorer, context_tokens: int) -> Tensor:
    """``[B]`` KL(π‖π_ref) on mismatched prompt-answer pairs over the optimizer batch; never negative.

    KTO (Ethayarajh et al. 2024, section 4.1): ẑ = max(0, mean summed log-ratio for y' given x), where y' answers a
    different prompt in the batch. Equals 0 if all prompts are identical.
    """
    baseline = 0.0
    mismatched = mismatch_answers(batch, context_tokens)
    if mismatched is not None:
        ratio = policy.logprobs(mismatched) - reference.logprobs(mismatched)
        of_rows = with_float64(ratio).to(torch.float64).sum(dim=1)
        baseline = max(0.0, float(of_rows.mean()))
    return torch.full((batch.num_rows,), baseline, dtype=torch.float32)


def describe_one_prompt(batch: Batch, step: int) -> str:
    """Warn if all prompts are identical and the KL baseline is therefore 0; empty otherwise."""
    rows = zip(batch.tokens.tolist(), batch.prefix.tolist(), strict=True)
    if "kl_baseline" not in batch.fields or len({tuple(ids[:length]) for ids, length in rows}) > 1:
        return ""
    return (
        f"all answers in step {step} share one prompt, so the KL baseline, which needs different ones, "
        "is 0. Set data.batch_size (or rollout.num_prompts) so that batches contain multiple prompts"
    )


def mismatch_answers(batch: Batch, limit: int) -> Batch | None:
    """Combine each row's prompt with the next answer to a different prompt, if both fit into ``limit`` tokens.

    Rows without a match are dropped; None if no rows remain. Result rows are unpaired.
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
    """Find the functions that compute these fields and their dependencies, in dependency order.

    Built-in functions come in source order, then user functions by name. ``reader`` names the consumer in messages.

    Raises:
        RecipeError: unknown field, field filled twice, circular dependency, or unknown argument.
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
                    f"batch field {entry.name!r} fills {name!r}, which is already taken; choose another name"
                )
            known[name] = entry
    ordered: dict[str, Entry] = {}

    def add(requested: Iterable[str], trail: tuple[str, ...]) -> None:
        unknown = sorted(set(requested) - known.keys() - set(GIVEN))
        if unknown:
            names = (*GIVEN, *known)
            raise RecipeError(
                f"{trail[-1]} needs {unknown}, which nothing fills; known: {', '.join(names)}."
                f"{registry.suggest(unknown[0], names)} Or register a batch field with that name"
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
    """List fields needed by an objective with these options, including ``ref_logprobs`` for a positive KL weight.

    Objectives without a ``needs`` trait get the fields that require no extra forward pass.

    Raises:
        RecipeError: unknown field, or rollout fields in a supervised recipe.
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
    """Add dependencies to a set of batch fields."""
    return frozenset(names).union(*(_needs(entry) for entry in fillers(names, "the recipe")))


def comes_from_rollouts(name: str) -> bool:
    """Check if a batch field or any dependency requires rollouts."""
    filling = fillers([name], name)
    read = {name}.union(*(_needs(entry) for entry in filling))
    return bool(read & set(OF_ROLLOUTS)) or any(entry.traits.get("rollouts") for entry in filling)


def scoring_temperature(rollout: RolloutSection | None, needs: frozenset[str]) -> float:
    """Choose the temperature for trainer log-probabilities: the sampling temperature for policy gradients.

    Policy gradients improve the sampling policy itself, so the initial ratio must be 1. Objectives that use only
    rollout tokens (expert iteration, DPO on sampled answers) maximize likelihood at deployment temperature 1;
    training at the sampling temperature would fit p^(1/T) instead.
    """
    if rollout is None:
        return 1.0
    if any(comes_from_rollouts(name) for name in needs):
        return rollout.temperature
    return 1.0


def replays_sets(rollout: RolloutSection | None, needs: frozenset[str]) -> bool:
    """Check if log-probabilities use the token sets kept by truncated sampling (sampling replay).

    This applies to policy gradients only, like ``scoring_temperature``.
    """
    if rollout is None or not rollout.is_truncated:
        return False
    return any(comes_from_rollouts(name) for name in needs)


def replays_experts(rollout: RolloutSection | None, needs: frozenset[str]) -> bool:
    """Check if the policy uses the experts that the sampler chose (router replay), in policy gradients only."""
    if rollout is None or not rollout.router_replay:
        return False
    return any(comes_from_rollouts(name) for name in needs)


def follows_rules(rollout: RolloutSection | None, needs: frozenset[str]) -> bool:
    """Check if log-probabilities apply the sampler's rules (``min_tokens``, ``repetition_penalty``)."""
    if rollout is None or not rollout.has_rules:
        return False
    return any(comes_from_rollouts(name) for name in needs)


@dataclass(slots=True)
class BatchFields:
    """Compute batch fields: exactly ``needs`` and their dependencies.

    forward: trained model (with critic). reference: initial model. teacher: teacher model, possibly the trained
    model. process_group: processes sharing the forward passes. vanishes: same as in ``Method``; idle rows need no
    forward passes. masks: recipe masks.
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
                self._once.append(entry)  # advantages use the reference at sampling time
            if waits and "seen" in entry.provided:
                raise RecipeError(
                    f"batch field {entry.name!r} runs before each step, but teacher prompts are known only once per "
                    "rollout batch; ask for 'batch' instead of 'seen'"
                )
            if waits:
                self._each_step.append(entry)
                late.update(_fills(entry))
            else:
                self._once.append(entry)

    @property
    def policy(self) -> Forward:
        """The trained language model's forward pass."""
        if isinstance(self.forward, ActorCritic):
            return self.forward.policy
        return self.forward

    @property
    def fixed(self) -> list[str]:
        """Fields that datasets compute once; empty for a moving reference."""
        if self.recipe.reference is not None:
            return []
        return [entry.name for entry in self._once if entry.traits.get("fixed")]

    def __call__(self, batch: Batch, seen: Batch | None = None, *, every_row: bool = True) -> Batch:
        """Fill fields in place. Fields with missing dependencies are left for a later call.

        seen: same answers with teacher prompts; defaults to the batch. every_row: False if updates skip idle rows,
        which get zeros and ``unscored`` 1.
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
        """Select rows that updates will compute; None for all.

        User functions may read whole batches, so this requires built-in fields and a built-in correction.
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
        """Copy a batch and add fields that depend on masks or on current weights at this ``step``."""
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
        """Fill a single field and return it."""
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
        """Collect arguments for field functions, except batches. Forward passes compute only ``rows``."""
        train = self.recipe.train
        micro_batches = MicroBatching(train.micro_batch_tokens, train.micro_batch_rows, self.process_group)

        def scorer(
            open_forward: Callable[[], AbstractContextManager[Forward | ActorCritic]], *, replays_experts: bool = True
        ) -> Scorer:
            return Scorer(open_forward, micro_batches, rows, replays_experts)

        policy = self.policy
        parts: dict[str, object] = {
            "policy": scorer(lambda: nullcontext(policy)),
            "critic": scorer(lambda: nullcontext(self.forward)),
            "reference": None,
            "teacher": None,
            "recipe": self.recipe,
            "rollout": self.recipe.rollout,
            "teaching": self.recipe.teacher,
            "objective_options": self.recipe.objective.options,
            "seed": train.seed,
            "context_tokens": self.context_tokens,
            "correct": self.correct,
        }
        if self.reference is not None:
            parts["reference"] = scorer(self.reference.open, replays_experts=False)
        if self.teacher is not None:
            parts["teacher"] = scorer(self.teacher.open, replays_experts=False)
        return parts
