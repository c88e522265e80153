"""The material of an audit: the record of an update, its rows, and the weights before and after it.

Says by name why an update cannot be audited. What is read may be from an untrusted source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.balances.advantages import expected_advantages, own_logprobs
from posttrain.balances.losses import OF_A_HEAD, OF_DISTRIBUTIONS, formulas_of_losses
from posttrain.balances.of_updates import NUM_STEPS
from posttrain.balances.record import SampledAnswer, StepRecord, UpdateFacts
from posttrain.balances.weights import formulas_of_weights
from posttrain.errors import UsageError
from posttrain.models.load import LoadedModel, load_model
from posttrain.models.lora import apply_adapter, has_adapter
from posttrain.randomness import derive_key
from posttrain.recipes.recipe import Recipe
from posttrain.recipes.sections import ModelSection
from posttrain.runs.diagnosis.audit.adam import ratio_of
from posttrain.runs.diagnosis.audit.gradient import AuditedRows
from posttrain.runs.directory import RunDirectory
from posttrain.runs.resume import changed_lines, hard_changes
from posttrain.runs.what_if.plan import read_own_recipe
from posttrain.store.checkpoint_files import checkpoint_steps
from posttrain.store.rollouts import RolloutStore
from posttrain.training.checkpoint import Checkpoint, load_checkpoint
from posttrain.training.records.stored_records import read_facts, read_records
from posttrain.training.sources.stored import read_batch
from posttrain.untrusted import kind_of_file

READ_NO_ADVANTAGE = ("cross_entropy", "dft")
# Read a teacher, answers to other prompts, or tokens drawn at random, of which a run keeps nothing.
READ_MORE = frozenset({"kto", "on_policy_distillation", "clip_cov", "kl_cov"})
NUM_STEPS_SHOWN = 12


@dataclass(frozen=True)
class AuditMaterial:
    """The parts that an update is computed from once more.

    model: with the weights before it, in which those that are trained have ``requires_grad``. state: of the optimizer
    before it, by name as in ``optimizer.safetensors`` (empty before the first update). after: the checkpoint behind
    the update, where there is one, with its weights. reference: see ``gradient.recompute``.
    """

    recipe: Recipe
    record: StepRecord
    rows: AuditedRows
    temperature: float
    model: Any
    state: Mapping[str, Tensor]
    reference: tuple[Any, AbstractContextManager[Any]] | None
    after: tuple[Mapping[str, Tensor], Mapping[str, Tensor]] | None


def open_material(folder: Path, step: int) -> AuditMaterial:
    """Return what an audit of update ``step`` reads.

    Raises:
        UsageError: it cannot be audited; with the reason, and the steps that can be.
        DataError: a file is damaged.
    """
    directory = RunDirectory(folder)
    recipe = read_own_recipe(directory)
    facts = _read_facts(folder)
    _refuse_kind(recipe, facts, step)
    record = _record_of(folder, recipe, step)
    before = _checkpoint_before(directory, recipe, step, knows_length=NUM_STEPS in record.measured)
    section = recipe.model.model_copy(update={"device": "auto", "attention": "sdpa"})
    loaded = _load_before(recipe, section, before)
    rows = _rows_of(recipe, record, loaded, before)
    _compare_rows(record, rows, step)
    model = loaded.model
    for name, parameter in model.named_parameters():
        if ratio_of(recipe.train.lr_ratios, name) == 0:
            parameter.requires_grad_(False)
    state: Mapping[str, Tensor] = {}
    if before is not None:
        state = before.optimizer
    reference: tuple[Any, AbstractContextManager[Any]] | None = None
    if rows.reads_reference:
        reference = _reference(recipe, section, model, before)
    return AuditMaterial(
        recipe, record, rows, _temperature(facts), model, state, reference, _read_after(folder, section, step)
    )


def _refusal(step: int, why: str) -> UsageError:
    return UsageError(f"--audit {step}: {why}")


def _read_facts(folder: Path) -> UpdateFacts:
    path = folder / "rollouts.db"
    facts: UpdateFacts | None = None
    if kind_of_file(path) != "nothing":
        facts = read_facts(RolloutStore(path, read_only=True))
    if facts is None:
        raise UsageError(
            f"--audit: {folder} has no records of its updates, which an audit compares with. Train it again with this "
            "version"
        )
    return facts


def _refuse_kind(recipe: Recipe, facts: UpdateFacts, step: int) -> None:
    """Refuse a run whose gradient plain code cannot compute again.

    Raises:
        UsageError: with the key, and the reason.
    """
    for key, why in _reasons(recipe, facts):
        raise _refusal(step, f"{key}: {why}, so this run cannot be audited. Its balances are checked without --audit")


def _reasons(recipe: Recipe, facts: UpdateFacts) -> Iterator[tuple[str, str]]:
    name = facts.objective.name
    aggregations, corrections = formulas_of_weights()
    if recipe.scale.processes > 1 or recipe.scale.launcher == "ray":
        yield "scale", "its updates are sums of several processes"
    if facts.optimizer is None or facts.optimizer.name != "adamw":
        yield "optimizer", f"{recipe.optimizer.name!r} is not adamw, whose formula the audit has"
    if recipe.model.load_bits is not None:
        yield "model.load_bits", "the base is quantized, and its rounded products are no part of a formula"
    if recipe.model.trust_remote_code:
        yield "model.trust_remote_code", "the model is Python of its own"
    if name in OF_A_HEAD or recipe.head is not None:
        yield "objective", f"{name!r} trains a head or a critic next to the model"
    if name in OF_DISTRIBUTIONS:
        yield "objective", f"{name!r} compares whole distributions, which no record keeps"
    if name in READ_MORE:
        yield "objective", f"{name!r} reads a teacher, a baseline or drawn tokens that no record keeps"
    if name not in formulas_of_losses():
        yield "objective", f"{name!r} is from outside, and has no second formula"
    if facts.aggregation.name not in aggregations:
        yield "aggregate", f"{facts.aggregation.name!r} is from outside, and has no second formula"
    if facts.correction is not None and facts.correction.name not in corrections:
        yield "correction", f"{facts.correction.name!r} is from outside, and has no second formula"
    sampling = facts.sampling
    if facts.masks:
        yield "masks", "tokens are masked by numbers that no record keeps"
    if sampling is not None and sampling.masks_truncated and sampling.divides_all:
        yield "rollout.truncated_divisor", "means are over answers, too, that are not among the rows of the update"
    if sampling is not None and sampling.replays:
        yield "rollout.top_k", "log-probabilities are over the sets of tokens that were sampled from"
    if facts.has_dropout or (recipe.model.adapter is not None and recipe.model.adapter.dropout):
        yield "model.adapter.dropout", "dropout drops numbers at random"


def _record_of(folder: Path, recipe: Recipe, step: int) -> StepRecord:
    store = RolloutStore(folder / "rollouts.db", read_only=True)
    found: StepRecord | None = None
    last = 0
    for record in read_records(store):
        last = record.step
        if record.step == step:
            found = record
            break
    if found is None and step > last:
        raise _refusal(step, f"the records of {folder} end with update {last}. {_shown(folder, recipe)}")
    if found is None or found.rows is None or not len(found.rows):
        raise _refusal(step, "this update trained on nothing, so there is no gradient. Give another step")
    if "changed" in found.measured:
        raise _refusal(step, "rewards or prompts of this update were changed by what-if. Give another step")
    return found


def _shown(folder: Path, recipe: Recipe, but: int = 0) -> str:
    """The updates that can be audited: those behind a checkpoint, and the first of a run that began with a model."""
    last = RolloutStore(folder / "rollouts.db", read_only=True).last_update()
    steps = [step + 1 for step in checkpoint_steps(folder / "checkpoints") if last is not None and step < last.step]
    if recipe.model.init is None:
        steps = [1, *steps]
    shown = ", ".join(str(step) for step in steps[:NUM_STEPS_SHOWN] if step != but)
    if not shown:
        return "No update can be audited: it takes a checkpoint right before it (train.save_every)"
    if len(steps) > NUM_STEPS_SHOWN:
        shown = f"{shown}, ..."
    return f"Updates that can be audited: {shown}"


def _checkpoint_before(directory: RunDirectory, recipe: Recipe, step: int, *, knows_length: bool) -> Checkpoint | None:
    """Return the checkpoint of the step before; None before the first update.

    ``knows_length``: the record has the number of steps that the run had then; a resumed run may be longer.

    Raises:
        UsageError: there is none, or the run went on with another recipe.
        CheckpointError: it is damaged.
    """
    if step == 1 and recipe.model.init is None:
        return None
    folder = directory.folder / "checkpoints"
    if step - 1 not in checkpoint_steps(folder):
        why = f"there is no checkpoint of step {step - 1}, right before it"
        if step == 1:
            why = "model.init: the run began with weights drawn at random, which are in no checkpoint"
        raise _refusal(step, f"{why}. {_shown(directory.folder, recipe, step)}")
    checkpoint = load_checkpoint(folder, step - 1)
    assert checkpoint is not None, "a step was named"
    if checkpoint.state.get("processes", 1) != 1 or not isinstance(checkpoint.optimizer, dict):
        raise _refusal(step, f"the checkpoint of step {step - 1} was saved by several processes. Give another step")
    settings = checkpoint.state.get("settings")
    if isinstance(settings, Mapping):
        changed = directory.changed_keys(recipe, settings)
        if hard_changes(changed) or (changed and not knows_length):
            lines = "; ".join(changed_lines(changed))
            raise _refusal(step, f"the run went on with another recipe than at step {step - 1} ({lines})")
    return checkpoint


def _load_before(recipe: Recipe, section: ModelSection, before: Checkpoint | None) -> LoadedModel:
    """The model with the weights before the update."""
    if before is not None:
        return load_model(_section_of(section, before.path), seed=recipe.train.seed)
    loaded = load_model(section, seed=recipe.train.seed)
    if recipe.model.adapter is None:
        return loaded
    seed = derive_key(recipe.train.seed, "adapter") % (1 << 31)
    wrapped = apply_adapter(loaded.model, recipe.model.adapter, seed)
    return LoadedModel(wrapped.eval(), loaded.tokenizer, loaded.source)


def _section_of(section: ModelSection, path: Path) -> ModelSection:
    return section.model_copy(update={"name": str(path), "adapter": None, "init": None})


def _read_after(
    folder: Path, section: ModelSection, step: int
) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]] | None:
    """The optimizer's state and the weights behind the update, where a checkpoint has them."""
    if step not in checkpoint_steps(folder / "checkpoints"):
        return None
    checkpoint = load_checkpoint(folder / "checkpoints", step)
    assert checkpoint is not None, "a step was named"
    if not isinstance(checkpoint.optimizer, dict):
        return None
    model = load_model(_section_of(section, checkpoint.path), seed=0).model
    return checkpoint.optimizer, {name: p.detach() for name, p in model.named_parameters()}


def _reference(
    recipe: Recipe, section: ModelSection, model: Any, before: Checkpoint | None
) -> tuple[Any, AbstractContextManager[Any]]:
    """The model that the run began with: the base of a new adapter, or the start once more."""
    if recipe.model.adapter is not None and has_adapter(model):
        return model, model.disable_adapter()
    if before is None:
        return model, nullcontext()
    if recipe.model.init is not None:
        raise UsageError(
            "--audit: model.init: the reference has weights drawn at random, which are in no checkpoint, so this run "
            "cannot be audited"
        )
    start = load_model(section, seed=recipe.train.seed)
    began = before.state.get("model")
    if began not in (None, Path(start.source).name):
        raise UsageError(
            f"--audit: model.name: {recipe.model.name!r} stood for {began} when this run began, and stands for "
            f"{Path(start.source).name} now, so the reference is another one. Give a run whose start is still there"
        )
    return start.model.requires_grad_(False), nullcontext()


def _temperature(facts: UpdateFacts) -> float:
    sampling = facts.sampling
    if sampling is None or not sampling.at_scored_temperature:
        return 1.0
    return sampling.temperature


def _rows_of(recipe: Recipe, record: StepRecord, loaded: LoadedModel, before: Checkpoint | None) -> AuditedRows:
    assert record.rows is not None
    reads_reference = not bool(record.rows.reference.isnan().all())
    if record.facts.sampling is None:
        return _given_rows(recipe, record, loaded, reads_reference)
    chosen = [record.answers[place] for place in record.rows.answers.tolist() if 0 <= place < len(record.answers)]
    if len(chosen) != len(record.rows):
        raise _refusal(record.step, "not all answers of this update are in rollouts.db. Give another step")
    sampler: list[list[float]] | None = None
    if all(answer.logprobs is not None for answer in chosen):
        sampler = [own_logprobs(answer) for answer in chosen]
    old = sampler
    old_is_own = False
    if record.facts.sampling.old_from_trainer:
        old_is_own = record.is_first
        old = None
        if not old_is_own:
            old = _old_of_buffer(record, loaded, before)
    return AuditedRows(
        [[*answer.prompt, *answer.ids] for answer in chosen],
        [answer.places for answer in chosen],
        sampler,
        old,
        _advantages(record, chosen),
        reads_reference,
        old_is_own,
    )


def _advantages(record: StepRecord, chosen: Sequence[SampledAnswer]) -> list[list[float]] | None:
    """The advantages at the trained tokens of each row, from its rewards; else as recorded, where a row has one."""
    facts = record.facts
    if facts.level != "token" or facts.objective.name in READ_NO_ADVANTAGE:
        return None
    rows = record.rows
    assert rows is not None
    known = expected_advantages(record)
    found: list[list[float]] = []
    for row, place in enumerate(rows.answers.tolist()):
        values: list[float] | None = None
        if known is not None:
            values = known[place]
        number = chosen[row].num_own
        if values is None:
            if float(rows.uneven[row]) or bool(rows.advantage[row].isnan()):
                raise _refusal(
                    record.step,
                    f"advantage: {_name(facts)!r} gives each token one, of numbers that no record keeps, so this "
                    "run cannot be audited",
                )
            values = [float(rows.advantage[row])]
        if len(values) == 1:
            values = values * number
        found.append(values)
    return found


def _name(facts: UpdateFacts) -> str:
    if facts.advantage is None:
        return "none"
    return facts.advantage.name


def _old_of_buffer(record: StepRecord, loaded: LoadedModel, before: Checkpoint | None) -> list[list[float]]:
    """The trainer's log-probabilities of the first pass over the batch, which a checkpoint within it has."""
    rows = record.rows
    assert rows is not None
    buffer = before.rollout_buffer if before is not None else None
    try:
        if buffer is None:
            raise KeyError("no batch")
        each = 2 if record.facts.level == "pair" else 1
        batch = read_batch(buffer, each, int(loaded.model.get_input_embeddings().weight.shape[0]))
        assert batch.answers is not None
        at = {place: row for row, place in enumerate(batch.answers.tolist())}
        old = batch.field("old_logprobs")
        return [old[at[place]][batch.mask[at[place]]].tolist() for place in rows.answers.tolist()]
    except (AssertionError, KeyError, ValueError):
        raise _refusal(
            record.step,
            f"the checkpoint of step {record.step - 1} has not the log-probabilities of the batch that this update "
            "goes on with. Give the first update of a batch",
        ) from None


def _given_rows(recipe: Recipe, record: StepRecord, loaded: LoadedModel, reads_reference: bool) -> AuditedRows:
    """The rows of a data set, encoded as the run encoded them."""
    from posttrain.data.base import build_task
    from posttrain.data.render.template import build_template
    from posttrain.data.rendered import take_rendered
    from posttrain.models.config import context_length
    from posttrain.training.checks import resolve_components
    from posttrain.training.sources.dataset import SupervisedSource

    template = build_template(recipe.prompt.template)
    task = take_rendered(build_task(recipe.task), template, loaded.tokenizer)
    source = SupervisedSource(
        recipe,
        task,
        template,
        loaded.tokenizer,
        context_length(loaded.model.config),
        shape=resolve_components(recipe).shape,
    )
    draw = source(record.step)
    batch = draw.batch
    assert batch is not None, "data have rows for each step"
    ids = [row[:length] for row, length in zip(batch.tokens.tolist(), batch.lengths.tolist(), strict=True)]
    return AuditedRows(ids, [one.places for one in draw.given], reads_reference=reads_reference)


def _compare_rows(record: StepRecord, rows: AuditedRows, step: int) -> None:
    """Refuse rows that are not those of the record: the data, or the code that encodes them, are others now.

    Raises:
        UsageError: they are.
    """
    assert record.rows is not None
    places = torch.tensor([sum(one) for one in rows.places])
    same = torch.equal(rows.lengths, record.rows.tokens) and torch.equal(places, record.rows.places)
    if not same:
        raise _refusal(
            step,
            "the rows of this update are not those that its record counts tokens of: the data or their template have "
            "changed since. Give the run what it was trained on",
        )
