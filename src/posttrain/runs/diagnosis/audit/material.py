"""Load everything that an audit needs: the update's record and rows, and the weights before and after it.

Refuses updates that cannot be audited, naming the cause. Inputs may be untrusted.
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
from posttrain.runs.resume import ChangedKeys, changed_lines, hard_changes
from posttrain.runs.what_if.plan import read_own_recipe
from posttrain.store.checkpoint_files import checkpoint_steps
from posttrain.store.rollouts import RolloutStore
from posttrain.training.checkpoint import Checkpoint, load_checkpoint
from posttrain.training.records.stored_records import read_facts, read_records
from posttrain.training.sources.stored import read_batch
from posttrain.untrusted import kind_of_file

READ_NO_ADVANTAGE = ("cross_entropy", "dft")
# These read a teacher, completions for other prompts, or randomly drawn tokens, none of which a run stores.
READ_MORE = frozenset({"kto", "on_policy_distillation", "clip_cov", "kl_cov"})
NUM_STEPS_SHOWN = 12


@dataclass(frozen=True)
class AuditMaterial:
    """Everything needed to recompute an update.

    model: weights before the update; trained parameters have ``requires_grad``. state: optimizer state before the
    update, named as in ``optimizer.safetensors`` (empty before the first update). after: optimizer state and weights
    from the checkpoint after the update, if present. reference: see ``gradient.recompute``. lr_ratios:
    ``train.lr_ratios``. is_coarse: the trainer computed in less than fp32.
    """

    record: StepRecord
    rows: AuditedRows
    temperature: float
    model: Any
    state: Mapping[str, Tensor]
    reference: tuple[Any, AbstractContextManager[Any]] | None
    after: tuple[Mapping[str, Tensor], Mapping[str, Tensor]] | None
    lr_ratios: Mapping[str, float]
    is_coarse: bool


def open_material(folder: Path, step: int) -> AuditMaterial:
    """Load the material for auditing update ``step``.

    Raises:
        UsageError: it cannot be audited. The message says why, and which steps can be.
        DataError: a file is damaged.
    """
    directory = RunDirectory(folder)
    recipe = read_own_recipe(directory)
    facts = _read_facts(folder)
    for key, why in _reasons(recipe, facts):
        raise _refusal(step, f"{key}: {why}, so this run cannot be audited. Its balances are checked without --audit")
    section = recipe.model.model_copy(update={"device": "auto", "attention": "sdpa"})
    record = _record_of(folder, section, step)
    before = _checkpoint_before(folder, section, step)
    if before is not None and isinstance(before.state.get("settings"), Mapping):
        changed = directory.changed_keys(recipe, before.state["settings"])
        _refuse_changes(changed, step, knows_length=NUM_STEPS in record.measured)
    loaded = _load_before(section, recipe.train.seed, before)
    if record.facts.sampling is None:
        rows = _given_rows(recipe, record, loaded)
    else:
        rows = _sampled_rows(record, loaded, before)
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
        reference = _reference(section, recipe.train.seed, model, before)
    return AuditMaterial(
        record,
        rows,
        _temperature(facts),
        model,
        state,
        reference,
        _read_after(folder, section, step),
        lr_ratios=recipe.train.lr_ratios,
        is_coarse=recipe.model.dtype == "bf16" or recipe.train.precision != "fp32",
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
            f"--audit: {folder} contains no update records to compare with. Retrain the run with this posttrain version"
        )
    return facts


def _reasons(recipe: Recipe, facts: UpdateFacts) -> Iterator[tuple[str, str]]:
    """Yield keys, with the reason why plain code cannot recompute this run's gradients."""
    name = facts.objective.name
    aggregations, corrections = formulas_of_weights()
    if recipe.scale.processes > 1 or recipe.scale.launcher == "ray":
        yield "scale", "updates are summed over several processes"
    if facts.optimizer is None or facts.optimizer.name != "adamw":
        yield "optimizer", f"{recipe.optimizer.name!r} is not adamw, the only supported optimizer"
    if recipe.model.load_bits is not None:
        yield "model.load_bits", "quantized matrix products cannot be reproduced by a formula"
    if recipe.model.trust_remote_code:
        yield "model.trust_remote_code", "the model uses custom Python code"
    if name in OF_A_HEAD or recipe.head is not None:
        yield "objective", f"{name!r} trains an additional head or critic"
    if name in OF_DISTRIBUTIONS:
        yield "objective", f"{name!r} compares full distributions, which are not recorded"
    if name in READ_MORE:
        yield "objective", f"{name!r} uses a teacher, a baseline or random tokens, which are not recorded"
    if name not in formulas_of_losses():
        yield "objective", f"{name!r} is custom and lacks a reference formula"
    if facts.aggregation.name not in aggregations:
        yield "aggregate", f"{facts.aggregation.name!r} is custom and lacks a reference formula"
    if facts.correction is not None and facts.correction.name not in corrections:
        yield "correction", f"{facts.correction.name!r} is custom and lacks a reference formula"
    sampling = facts.sampling
    if facts.masks:
        yield "masks", "token masks depend on values that are not recorded"
    if sampling is not None and sampling.masks_truncated and sampling.divides_all:
        yield "rollout.truncated_divisor", "averages include answers outside the update's rows"
    if sampling is not None and sampling.replays:
        yield "rollout.top_k", "log-probabilities are normalized over sampled token sets"
    if facts.reference is not None:
        yield "reference", "it moves, and audits compare with the initial model"
    if recipe.rollout is not None and recipe.rollout.router_replay:
        yield "rollout.router_replay", "the experts chosen while sampling are not recorded"
    if recipe.train.router_aux_loss_coef or facts.routers is not None:
        yield "train.router_aux_loss_coef", "the routers' loss has no reference formula for its gradient"
    if recipe.train.neftune_noise_alpha is not None:
        yield "train.neftune_noise_alpha", "embedding noise is random"
    if facts.has_dropout or (recipe.model.adapter is not None and recipe.model.adapter.dropout):
        yield "model.adapter.dropout", "dropout is random"


def _record_of(folder: Path, section: ModelSection, step: int) -> StepRecord:
    store = RolloutStore(folder / "rollouts.db", read_only=True)
    found: StepRecord | None = None
    last = 0
    for record in read_records(store):
        last = record.step
        if record.step == step:
            found = record
            break
    if found is None and step > last:
        raise _refusal(step, f"{folder} has records only up to update {last}. {_shown(folder, section)}")
    if found is None or found.rows is None or not len(found.rows):
        raise _refusal(step, "the update trained on no rows, so it has no gradient. Choose a different step")
    if "changed" in found.measured:
        raise _refusal(step, "what-if changed rewards or prompts in this step. Choose a different step")
    return found


def _shown(folder: Path, section: ModelSection, but: int = 0) -> str:
    """List auditable updates: one after each checkpoint, and the first if training began from a stored model."""
    last = RolloutStore(folder / "rollouts.db", read_only=True).last_update()
    steps = [step + 1 for step in checkpoint_steps(folder / "checkpoints") if last is not None and step < last.step]
    if section.init is None:
        steps = [1, *steps]
    shown = ", ".join(str(step) for step in steps[:NUM_STEPS_SHOWN] if step != but)
    if not shown:
        return "No update can be audited: each needs a checkpoint from the previous step (train.save_every)"
    if len(steps) > NUM_STEPS_SHOWN:
        shown = f"{shown}, ..."
    return f"Updates that can be audited: {shown}"


def _checkpoint_before(folder: Path, section: ModelSection, step: int) -> Checkpoint | None:
    """Load the checkpoint before ``step``; None before the first update.

    Raises:
        UsageError: no such checkpoint, or several processes saved it.
        CheckpointError: the checkpoint is damaged.
    """
    if step == 1 and section.init is None:
        return None
    checkpoints = folder / "checkpoints"
    if step - 1 not in checkpoint_steps(checkpoints):
        why = f"the checkpoint from step {step - 1} is missing"
        if step == 1:
            why = "model.init: the initial random weights were not saved"
        raise _refusal(step, f"{why}. {_shown(folder, section, step)}")
    checkpoint = load_checkpoint(checkpoints, step - 1)
    assert checkpoint is not None, "a step was named"
    if checkpoint.state.get("processes", 1) != 1 or not isinstance(checkpoint.optimizer, dict):
        raise _refusal(step, f"several processes saved the checkpoint at step {step - 1}. Choose a different step")
    return checkpoint


def _refuse_changes(changed: ChangedKeys, step: int, *, knows_length: bool) -> None:
    """Refuse a step after which the run continued with a different recipe.

    ``knows_length``: the record includes the run's number of steps at that time; a resumed run may be longer.
    """
    if hard_changes(changed) or (changed and not knows_length):
        lines = "; ".join(changed_lines(changed))
        raise _refusal(step, f"the recipe changed after step {step - 1} ({lines})")


def _load_before(section: ModelSection, seed: int, before: Checkpoint | None) -> LoadedModel:
    """Load the model with the weights before the update; ``seed``: ``train.seed``."""
    if before is not None:
        return load_model(_section_of(section, before.path), seed=seed)
    loaded = load_model(section, seed=seed)
    if section.adapter is None:
        return loaded
    wrapped = apply_adapter(loaded.model, section.adapter, derive_key(seed, "adapter") % (1 << 31))
    return LoadedModel(wrapped.eval(), loaded.tokenizer, loaded.source)


def _section_of(section: ModelSection, path: Path) -> ModelSection:
    return section.model_copy(update={"name": str(path), "adapter": None, "init": None})


def _read_after(
    folder: Path, section: ModelSection, step: int
) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]] | None:
    """Load optimizer state and weights after the update; None without a checkpoint."""
    if step not in checkpoint_steps(folder / "checkpoints"):
        return None
    checkpoint = load_checkpoint(folder / "checkpoints", step)
    assert checkpoint is not None, "a step was named"
    if not isinstance(checkpoint.optimizer, dict):
        return None
    model = load_model(_section_of(section, checkpoint.path), seed=0).model
    return checkpoint.optimizer, {name: p.detach() for name, p in model.named_parameters()}


def _reference(
    section: ModelSection, seed: int, model: Any, before: Checkpoint | None
) -> tuple[Any, AbstractContextManager[Any]]:
    """Load the initial model: the base under a new adapter, or the starting weights again."""
    if section.adapter is not None and has_adapter(model):
        return model, model.disable_adapter()
    if before is None:
        return model, nullcontext()
    if section.init is not None:
        raise UsageError(
            "--audit: model.init: the reference model's initial random weights were not saved, so this run cannot be "
            "audited"
        )
    start = load_model(section, seed=seed)
    began = before.state.get("model")
    if began not in (None, Path(start.source).name):
        raise UsageError(
            f"--audit: model.name: {section.name!r} was {began} when this run started, and is now "
            f"{Path(start.source).name}, so the reference differs. Choose a run whose initial model still exists"
        )
    return start.model.requires_grad_(False), nullcontext()


def _temperature(facts: UpdateFacts) -> float:
    sampling = facts.sampling
    if sampling is None or not sampling.at_scored_temperature:
        return 1.0
    return sampling.temperature


def _reads_reference(record: StepRecord) -> bool:
    """Check if the update used reference log-probabilities."""
    assert record.rows is not None
    return not bool(record.rows.reference.isnan().all())


def _sampled_rows(record: StepRecord, loaded: LoadedModel, before: Checkpoint | None) -> AuditedRows:
    """Collect the sampled answers that the update trained on."""
    assert record.rows is not None
    assert record.facts.sampling is not None
    chosen = [record.answers[place] for place in record.rows.answers.tolist() if 0 <= place < len(record.answers)]
    if len(chosen) != len(record.rows):
        raise _refusal(record.step, "rollouts.db is missing answers from this step. Choose a different step")
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
        _reads_reference(record),
        old_is_own,
    )


def _advantages(record: StepRecord, chosen: Sequence[SampledAnswer]) -> list[list[float]] | None:
    """Collect advantages at trained tokens per row, recomputed from rewards if possible, else as recorded."""
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
                    f"advantage: {_name(facts)!r} computes token-level values from numbers that are not recorded, so "
                    "this run cannot be audited",
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
    """Read the trainer's log-probabilities from the first pass over the batch, stored in a mid-batch checkpoint."""
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
            f"the checkpoint at step {record.step - 1} lacks the log-probabilities for the current batch. Choose the "
            "first update on a batch",
        ) from None


def _given_rows(recipe: Recipe, record: StepRecord, loaded: LoadedModel) -> AuditedRows:
    """Encode the rows of a data set exactly as the run did."""
    from posttrain.data.base import build_task
    from posttrain.data.render.template import build_template
    from posttrain.data.rendered import take_rendered
    from posttrain.models.config import context_length
    from posttrain.training.checks import resolve_components
    from posttrain.training.sources.dataset import SupervisedSource
    from posttrain.training.sources.units import TaskUnits, UnitEncoder

    template = build_template(recipe.prompt.template)
    task = take_rendered(build_task(recipe.task), template, loaded.tokenizer)
    context_tokens = context_length(loaded.model.config)
    shape = resolve_components(recipe).shape
    assert recipe.data is not None, "a record without sampling"
    encoder = UnitEncoder(
        loaded.tokenizer, template, recipe.data, shape, context_tokens, recipe.prompt.max_prompt_tokens
    )
    source = SupervisedSource(recipe.data, recipe.train, TaskUnits(task, encoder))
    draw = source(record.step)
    batch = draw.batch
    assert batch is not None, "data sets have rows for each step"
    ids = [row[:length] for row, length in zip(batch.tokens.tolist(), batch.lengths.tolist(), strict=True)]
    return AuditedRows(ids, [one.places for one in draw.given], reads_reference=_reads_reference(record))


def _compare_rows(record: StepRecord, rows: AuditedRows, step: int) -> None:
    """Check that the rows match the record; data or encoding may have changed since.

    Raises:
        UsageError: they do not match.
    """
    assert record.rows is not None
    places = torch.tensor([sum(one) for one in rows.places])
    same = torch.equal(rows.lengths, record.rows.tokens) and torch.equal(places, record.rows.places)
    if not same:
        raise _refusal(
            step,
            "token counts in the record do not match the data: data or template changed since. Restore the original "
            "training data",
        )
