"""Train a dictionary as a run: steps from ``fitting``, with metrics and checkpoints.

Checkpoints store weights, optimizer and step, which determines learning rate and data, so an interrupted run resumes
bit for bit. All remaining state is in dictionary buffers.
"""

from __future__ import annotations

import io
import json
import pickle
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from posttrain.activity import phase
from posttrain.errors import CheckpointError, NonFiniteLoss, UsageError
from posttrain.interpret.activations.record import read_documents, record_activations
from posttrain.interpret.activations.shards import INDEX, ActivationStore, read_store_index
from posttrain.interpret.activations.sites import check_layers, layer_of
from posttrain.interpret.saes.fitting import (
    Learner,
    Quality,
    RowBatches,
    StoreRows,
    build_sae,
    first_held_out,
    in_batches,
    measure_quality,
    recover,
    sample_rows,
    too_few_rows,
)
from posttrain.interpret.saes.sae import SparseAutoencoder, save_sae
from posttrain.interpret.saes.sae_recipe import ACTIVATIONS, DIFFERENCE, SaeRecipe
from posttrain.models.load import load_model, load_tokenizer
from posttrain.recipes.document import decisive
from posttrain.recipes.sections import ModelSection
from posttrain.store.checkpoint_files import (
    checkpoint_steps,
    prune_checkpoints,
    read_newest,
    rename_into_place,
    seal,
    set_aside_steps,
    step_folder,
    verify,
)
from posttrain.store.durable import ASIDE, replace_file, storage_errors, write_json
from posttrain.store.metrics import MetricsLog, TrackedMetrics, TrackedRun, build_trackers
from posttrain.training.files import Observer, RunFiles

STATE = "state.ckpt"
# Inside a run.
DICTIONARY = "dictionary"
RESULTS = "dictionary.json"


@dataclass(frozen=True)
class TrainedDictionary:
    """Training result: ``reason`` is ``finished`` or ``interrupted``; ``quality`` on held-out rows."""

    dictionary: SparseAutoencoder
    step: int
    reason: str
    quality: Quality

    @property
    def evaluations(self) -> dict[str, dict[str, float]]:
        """Quality metrics for ``runs.launch``."""
        return {"held_out": self.quality.numbers()}


def train_run(
    recipe: object,
    files: RunFiles,
    *,
    resume: bool,
    observer: Observer,
    should_stop: Callable[[], bool],
    allow_large: bool,
) -> TrainedDictionary:
    """Record activations if configured, train, measure, and save the dictionary."""
    assert isinstance(recipe, SaeRecipe)

    def notify(message: str) -> None:
        observer("notice", {"message": message})

    trackers = build_trackers(recipe.track, TrackedRun(files.folder, recipe.dump(), notify))
    store = open_or_record(recipe, files.folder, notify, allow_large=allow_large)
    rows = StoreRows(store, recipe.activations.site, recipe.activations.source)
    metrics = TrackedMetrics(files.metrics, trackers)
    try:
        trained = train_sae(
            rows,
            recipe,
            checkpoints=files.checkpoints,
            metrics=metrics,
            resume=resume,
            observer=observer,
            should_stop=should_stop,
        )
    except UsageError:
        if not resume:  # allows removing the empty run
            shutil.rmtree(files.folder / ACTIVATIONS, ignore_errors=True)
        raise
    finally:
        metrics.close()
    if trained.reason == "finished":
        about = _describe_training(rows, recipe, trained.step)
        save_sae(trained.dictionary, files.folder / DICTIONARY, about)
        held_out: dict[str, float] = trained.quality.numbers() | {"rows": trained.quality.rows}
        results: dict[str, object] = {"held_out": held_out}
        if recipe.eval.documents:
            notify(f"measuring recovered predictions on {recipe.eval.documents:,} documents")
            results["recovered"] = _recovered(rows, recipe, trained.dictionary)
        write_json(files.folder / RESULTS, results)
    return trained


def open_or_record(
    recipe: SaeRecipe, run: Path, notify: Callable[[str], None], *, allow_large: bool = False
) -> ActivationStore:
    """Open the recipe's activations, or the run's recording, recording it if unfinished.

    Reused recordings are verified by file hash (about a second per GB).
    """
    section = recipe.activations
    place = run / ACTIVATIONS
    if section.folder is not None:
        return ActivationStore(section.folder)
    if (place / INDEX).is_file() and read_store_index(place).finished:
        return ActivationStore(place, verify=True)
    model = section.model
    assert model is not None, "the section's validator"
    assert section.site is not None, "the section's validator"
    check_layers(model.name, [section.site])  # before reading texts
    rollouts = None
    if section.rollouts is not None:
        rollouts = Path(section.rollouts)
    documents = read_documents(
        load_tokenizer(model.name, trust_remote_code=model.runs_remote_code),
        task=section.task,
        template=section.template,
        text=section.text,
        rollouts=rollouts,
        context_tokens=section.context_tokens,
        max_tokens=section.max_rows,
        where="activations.",
    )
    if documents.num_tokens - recipe.eval.rows < recipe.train.batch:
        raise too_few_rows(f"at most {documents.num_tokens:,}", recipe.eval.rows, recipe.train.batch)
    return record_activations(
        model,
        documents,
        [section.site],
        place,
        dtype=section.dtype,
        outliers=section.outliers,
        batch=section.batch,
        allow_large=allow_large,
        fewer="activations.max_rows",
        ready=lambda size: notify(f"recording activations: {size}"),
    )


def _describe_training(rows: StoreRows, recipe: SaeRecipe, step: int) -> dict[str, object]:
    """Build metadata for ``save_sae``: model, site and training."""
    index = rows.store.index
    site = rows.site
    used = [source for source in index.sources if rows.source in (source.name, DIFFERENCE)]
    return {
        "model_name": used[-1].model,
        "hook_name": f"blocks.{layer_of(site) - 1}.hook_resid_post",
        "context_size": index.data.get("context_tokens"),
        "site": site,
        "layer": layer_of(site),
        "layer_convention": index.layer_convention,
        "source": rows.source,
        "models": [source.model_dump() for source in used],
        "tokenizer": index.tokenizer,
        "activations": {"data": index.data, "rows": index.rows, "dropped": index.dropped, "dtype": index.dtype},
        "training": {"recipe": recipe.fingerprint(), "steps": step, "rows": step * recipe.train.batch},
    }


def _recovered(rows: StoreRows, recipe: SaeRecipe, sae: SparseAutoencoder) -> dict[str, float]:
    """Splice the dictionary into its model, measuring on the last ``eval.documents`` held-out documents."""
    store = rows.store
    first = first_held_out(rows, recipe.eval.rows, recipe.train.batch)
    held_out = store.documents(torch.arange(first, store.num_rows)).unique().tolist()
    documents = [store.document_tokens(number) for number in held_out[-recipe.eval.documents :]]
    source = next(source for source in store.index.sources if source.name == rows.source)
    section = recipe.activations.model or ModelSection(name=source.model, dtype=source.dtype)
    model = load_model(section, seed=0).model
    return recover(model, sae, rows.site, documents, store.limit(rows.site, source.name))


def train_sae(
    rows: StoreRows,
    recipe: SaeRecipe,
    *,
    checkpoints: Path,
    metrics: MetricsLog,
    resume: bool = False,
    observer: Observer = lambda event, info: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> TrainedDictionary:
    """Train from a resolved recipe; with ``resume``, continue from the newest checkpoint. The last rows are held out.

    Raises:
        UsageError: too few rows.
        NonFiniteLoss: loss or gradient norm is not finite; the last checkpoint is unchanged.
        CheckpointError: checkpoints exist, but all fail verification.
    """
    settings = recipe.train
    device = _choose_device(recipe.train.device)
    num_rows = first_held_out(rows, recipe.eval.rows, settings.batch)
    sae = build_sae(rows.d, recipe.dictionary, settings.seed)
    newest = None
    if resume:
        newest = _newest_checkpoint(checkpoints, observer)
    if newest is None:
        sae.prepare(sample_rows(rows, num_rows, settings.seed))
    metrics.trim(newest or 0)

    @phase("measuring the dictionary on held-out rows")
    def measure_held_out() -> Quality:
        return measure_quality(sae, in_batches(rows, num_rows, rows.num_rows))

    learner = Learner(sae.to(device), settings)
    if newest is not None:
        learner.restore(_read_state(step_folder(checkpoints, newest) / STATE))
    records = _Records(learner, recipe, checkpoints, metrics, observer, measure_held_out)
    info: dict[str, object] = {"steps": settings.steps, "num_examples": num_rows, "resumed_from": newest, "dropped": {}}
    observer("start", info)
    batches = RowBatches(rows, num_rows, settings.batch, settings.seed)
    is_stopped = False
    with phase("dictionary", describe=lambda: f"step {learner.step:,} of {settings.steps:,}"):
        while learner.step < settings.steps and not is_stopped:
            learner.update(batches.of_step(learner.step).to(device))
            is_stopped = should_stop()
            records.after_step(is_stopped)
    quality = measure_held_out()
    reason = "interrupted"
    if learner.step >= settings.steps:
        reason = "finished"
    observer("finish", {"step": learner.step, "reason": reason})
    return TrainedDictionary(sae.cpu(), learner.step, reason, quality)


class _Records:
    """Writes metrics, measurements and checkpoints at their scheduled steps."""

    def __init__(
        self,
        learner: Learner,
        recipe: SaeRecipe,
        checkpoints: Path,
        metrics: MetricsLog,
        observer: Observer,
        measure_held_out: Callable[[], Quality],
    ) -> None:
        self.learner = learner
        self.recipe = recipe
        self.checkpoints = checkpoints
        self.metrics = metrics
        self.observer = observer
        self.measure_held_out = measure_held_out
        self._logged_at: tuple[int, float] | None = None

    def after_step(self, is_stopped: bool) -> None:
        """Log, measure and save if due; ``is_stopped``: training stops after this step."""
        step = self.learner.step
        settings = self.recipe.train
        is_last = step >= settings.steps
        if step % settings.log_every == 0 or is_last or step == 1:
            self._log(step)
        every = self.recipe.eval.every
        if is_last or (every and step % every == 0):
            numbers = self.measure_held_out().numbers()
            self.metrics.append(step, {f"eval/held_out/{name}": value for name, value in numbers.items()})
        is_due = settings.save_every and step % settings.save_every == 0
        if is_last or is_stopped or is_due:
            self._save(step)

    def _numbers(self) -> dict[str, float]:
        """Collect metrics for the latest step."""
        measured = self.learner.measured
        terms = {
            "squared_error": float(measured.squared_error),
            "penalty": float(measured.penalty),
            "auxk": float(measured.auxiliary),
        }
        num_active = float((measured.features > 0).sum())
        is_dead = self.learner.dictionary.since_fired > self.learner.dead_rows
        return {
            "loss": sum(terms.values()),
            **terms,
            "l0": num_active / len(measured.features),
            "dead": float(is_dead.double().mean()),
            "grad_norm": float(self.learner.grad_norm),
            "lr": self.learner.rate(),
        }

    def _log(self, step: int) -> None:
        numbers = self._numbers()
        if not all(abs(numbers[name]) < float("inf") for name in ("loss", "grad_norm")):
            raise NonFiniteLoss(
                f"step {step}: the loss is {numbers['loss']}, the gradient norm {numbers['grad_norm']}. A smaller "
                "train.lr may help, or activations without outliers"
            )
        now = time.perf_counter()
        timing = {}
        if self._logged_at is not None:
            last_step, last_time = self._logged_at
            if step > last_step:
                seconds = (now - last_time) / (step - last_step)
                timing = {"step_seconds": seconds, "rows_per_second": self.recipe.train.batch / seconds}
        self._logged_at = (step, now)
        self.metrics.append(step, numbers, timing)
        self.observer("step", {"step": step, "metrics": numbers, "timing": timing})

    def _save(self, step: int) -> None:
        final = step_folder(self.checkpoints, step)
        aside = self.checkpoints / f"{ASIDE}{final.name}"
        self.metrics.flush()
        state = {  # lets a resumed run detect a changed recipe or records
            "recipe": self.recipe.fingerprint(),
            "settings": decisive(self.recipe.dump()),
            "records": {"metrics": self.metrics.num_rows()},
        }
        with storage_errors("the checkpoint", final):
            aside.mkdir(parents=True, exist_ok=True)
            content = io.BytesIO()
            torch.save(self.learner.state(), content)
            replace_file(aside / STATE, content.getvalue())
            replace_file(aside / "state.json", json.dumps(state, sort_keys=True).encode())
            seal(aside, step)
            rename_into_place(aside, final)
        prune_checkpoints(self.checkpoints, self.recipe.train.keep_checkpoints)
        self.observer("checkpoint", {"step": step, "path": str(final)})


def _read_state(path: Path) -> Mapping[str, Any]:
    """Load training state from a checkpoint, without executing code.

    Raises:
        CheckpointError: unexpected contents.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, ValueError) as error:
        raise CheckpointError(f"{path}: not a training state ({type(error).__name__}); start again") from None
    if not isinstance(state, dict) or not state.keys() >= {"global_step", "state_dict", "optimizer_states"}:
        raise CheckpointError(f"{path}: not a training state; start again under another name")
    return state


def _newest_checkpoint(folder: Path, observer: Observer) -> int | None:
    """Find the newest valid checkpoint step, renaming later ones to ``failed-…``; None if no checkpoints exist."""
    steps = checkpoint_steps(folder)
    skipped: list[str] = []
    newest = read_newest(folder, steps, verify, skipped)
    for reason in skipped:
        observer("notice", {"message": f"damaged checkpoint, using an earlier one: {reason}"})
    if newest is not None:
        set_aside_steps(folder, [step for step in steps if step > newest[0]])
        return newest[0]
    if steps:
        raise CheckpointError(f"{folder}: all checkpoints failed verification; start again under another name")
    return None


def _choose_device(name: str) -> torch.device:
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise UsageError("train.device: 'cuda', but torch finds no GPU; use auto or cpu")
    if name != "cpu" and has_gpu:
        return torch.device("cuda")
    return torch.device("cpu")
