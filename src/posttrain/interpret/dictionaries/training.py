"""Training a dictionary with Lightning; the only module that imports it.

What decides the weights is elsewhere: the rows and their order (``rows``), the steps (``fitting``).
Lightning runs the steps, and keeps optimizer, schedule and place in the data in its checkpoints, so that a run that was
killed goes on bit for bit. Everything that a step changes is a parameter or a buffer of the module.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.errors import CheckpointError, MissingExtra, NonFiniteLoss, UsageError
from posttrain.interpret.dictionaries.dictionary import Dictionary
from posttrain.interpret.dictionaries.exchange import describe_training, save_dictionary
from posttrain.interpret.dictionaries.fitting import Learner, build_dictionary
from posttrain.interpret.dictionaries.measures import Quality, in_batches, measure, recovered_by
from posttrain.interpret.dictionaries.recipe import SaeRecipe
from posttrain.interpret.dictionaries.recording import ACTIVATIONS, open_or_record
from posttrain.interpret.dictionaries.rows import RowBatches, Rows, StoreRows, first_held_out, sample_rows, too_few_rows
from posttrain.recipes.document import decisive
from posttrain.store.checkpoint_files import (
    ASIDE,
    Unverified,
    checkpoint_steps,
    prune_checkpoints,
    rename_into_place,
    seal,
    set_aside_steps,
    step_folder,
    verify,
)
from posttrain.store.durable import replace_file, storage_errors
from posttrain.store.metrics import MetricsLog, TrackedMetrics, TrackedRun, build_trackers
from posttrain.train.files import Observer, RunFiles

try:
    import lightning
    from lightning.pytorch.callbacks import Callback
except ImportError as error:
    raise MissingExtra("lightning", "interpret", "training a dictionary") from error

STATE = "state.ckpt"


@dataclass(frozen=True)
class Trained:
    """How a training ended: ``reason`` is ``finished`` or ``interrupted``; ``quality`` on the rows held out."""

    dictionary: Dictionary
    step: int
    reason: str
    quality: Quality

    @property
    def evaluations(self) -> dict[str, dict[str, float]]:
        """The quality by name, as ``runs.launch`` asks every training for it."""
        return {"held_out": self.quality.numbers()}


def train_dictionary(
    rows: Rows,
    recipe: SaeRecipe,
    *,
    checkpoints: Path,
    metrics: MetricsLog,
    resume: bool = False,
    observer: Observer = lambda event, facts: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Trained:
    """Train as a resolved recipe says, from its newest checkpoint with ``resume``.

    Args:
        rows: activations; the last ``eval.rows`` of them are held out.
        checkpoints: the folder for ``step-000100/``.
        metrics: gets a line every ``train.log_every`` steps; with ``resume``, lines past the checkpoint are dropped.

    Raises:
        UsageError: too few rows.
        NonFiniteLoss: the loss is NaN or infinite; the last checkpoint is as it was.
        CheckpointError: there are checkpoints, and none verifies.
    """
    settings = recipe.train
    num_rows = first_held_out(rows, recipe.eval.rows, settings.batch)
    dictionary = build_dictionary(rows, recipe.dictionary, settings.seed)
    newest = _newest_checkpoint(checkpoints, observer) if resume else None
    if newest is None:
        dictionary.prepare(sample_rows(rows, num_rows, settings.seed))
    metrics.trim(newest or 0)
    module = _Training(dictionary, recipe)
    batches = RowBatches(rows, num_rows, settings.batch, settings.steps, settings.seed)

    def measure_held_out() -> Quality:
        return measure(dictionary, in_batches(rows, num_rows, rows.num_rows))

    watch = _Watch(recipe, checkpoints, metrics, observer, should_stop, measure_held_out)
    facts: dict[str, Any] = {"steps": settings.steps, "num_examples": num_rows, "resumed_from": newest, "dropped": {}}
    observer("start", facts)
    with _quiet():
        trainer = _trainer(recipe, watch, checkpoints.parent)
        place = None if newest is None else str(step_folder(checkpoints, newest) / STATE)
        trainer.fit(module, batches, ckpt_path=place, weights_only=True if place else None)
    step = int(trainer.global_step)
    module.to(_device(settings.device))
    quality = measure_held_out()
    reason = "finished" if step >= settings.steps else "interrupted"
    observer("finish", {"step": step, "reason": reason})
    dictionary.cpu()
    return Trained(dictionary, step, reason, quality)


class _Training(lightning.LightningModule):
    """The steps of a ``Learner``, as Lightning calls them."""

    def __init__(self, dictionary: Dictionary, recipe: SaeRecipe) -> None:
        super().__init__()
        self.dictionary = dictionary
        self.learner = Learner(dictionary, recipe.train)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.learner.loss(batch, self.global_step)

    def configure_optimizers(self) -> Any:
        optimizer, schedule = self.learner.optimizer()
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.learner.clip()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.dictionary.normalize()  # here, so that a checkpoint has it

    def numbers(self) -> dict[str, float]:
        """What the last step saw, for ``metrics.jsonl``."""
        measured, grad_norm = self.learner.measured, self.learner.grad_norm
        assert measured is not None
        metrics = {
            "squared_error": float(measured.squared_error),
            "penalty": float(measured.penalty),
            "auxk": float(measured.auxiliary),
            "l0": float((measured.features > 0).sum()) / len(measured.features),
            "dead": float((self.dictionary.since_fired > self.learner.dead_rows).double().mean()),
            "grad_norm": float("nan") if grad_norm is None else float(grad_norm),
            "lr": float(self.trainer.optimizers[0].param_groups[0]["lr"]),
        }
        return {"loss": metrics["squared_error"] + metrics["penalty"] + metrics["auxk"], **metrics}


class _Watch(Callback):
    """Logs, measures and saves at the steps that are due for it, and stops when asked."""

    def __init__(
        self,
        recipe: SaeRecipe,
        checkpoints: Path,
        metrics: MetricsLog,
        observer: Observer,
        should_stop: Callable[[], bool],
        measure_held_out: Callable[[], Quality],
    ) -> None:
        self.recipe, self.checkpoints, self.metrics = recipe, checkpoints, metrics
        self.observer, self.should_stop, self.measure_held_out = observer, should_stop, measure_held_out
        self._logged_at: tuple[int, float] | None = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step, settings = int(trainer.global_step), self.recipe.train
        last, stop = step >= settings.steps, self.should_stop()
        if step % settings.log_every == 0 or last or step == 1:
            self._log(step, pl_module, len(batch))
        if (self.recipe.eval.every and step % self.recipe.eval.every == 0) or last:
            numbers = self.measure_held_out().numbers()
            self.metrics.append(step, {f"eval/held_out/{name}": value for name, value in numbers.items()})
        if last or stop or (settings.save_every and step % settings.save_every == 0):
            self._save(trainer, step)
        if stop:
            trainer.should_stop = True

    def _log(self, step: int, module: _Training, batch: int) -> None:
        numbers = module.numbers()
        if not all(abs(numbers[name]) < float("inf") for name in ("loss", "grad_norm")):
            raise NonFiniteLoss(
                f"step {step}: the loss is {numbers['loss']}, the gradient norm {numbers['grad_norm']}. A smaller "
                "train.lr may help, or activations without outliers"
            )
        now, timing = time.perf_counter(), {}
        if self._logged_at is not None and step > self._logged_at[0]:
            seconds = (now - self._logged_at[1]) / (step - self._logged_at[0])
            timing = {"step_seconds": seconds, "rows_per_second": batch / seconds}
        self._logged_at = (step, now)
        self.metrics.append(step, numbers, timing)
        self.observer("step", {"step": step, "metrics": numbers, "timing": timing})

    def _save(self, trainer: Any, step: int) -> None:
        final = step_folder(self.checkpoints, step)
        aside = self.checkpoints / f"{ASIDE}{final.name}"
        self.metrics.flush()
        with storage_errors("the checkpoint", final):
            aside.mkdir(parents=True, exist_ok=True)
            trainer.save_checkpoint(aside / STATE)
            replace_file(aside / "state.json", json.dumps(self._standing(), sort_keys=True).encode())
            seal(aside, step)
            rename_into_place(aside, final)
        prune_checkpoints(self.checkpoints, self.recipe.train.keep)
        self.observer("checkpoint", {"step": step, "path": str(final)})

    def _standing(self) -> dict[str, Any]:
        """By what a resumed run notices that its recipe or its records are others by now."""
        settings = decisive(self.recipe.dump())
        return {
            "recipe": self.recipe.fingerprint(),
            "settings": settings,
            "records": {"metrics": self.metrics.num_rows()},
        }


def _newest_checkpoint(folder: Path, observer: Observer) -> int | None:
    """The newest step whose checkpoint verifies; those after it are renamed ``failed-…``. None: from the beginning."""
    steps = checkpoint_steps(folder)
    damaged: list[int] = []
    for step in reversed(steps):
        try:
            verify(step_folder(folder, step), step)
        except Unverified as problem:
            damaged.append(step)
            observer("notice", {"message": f"checkpoint of step {step} is damaged ({problem}); using the one before"})
            continue
        set_aside_steps(folder, damaged)
        return step
    if steps:
        raise CheckpointError(f"{folder}: none of the checkpoints verifies; start again under another name")
    return None


def _trainer(recipe: SaeRecipe, watch: Callback, folder: Path) -> Any:
    device = _device(recipe.train.device)
    return lightning.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=1,
        max_steps=recipe.train.steps,
        max_epochs=1,
        logger=False,
        callbacks=[watch],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
    )


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("train.device: cuda was asked for, but torch sees no GPU; use auto or cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Lightning's remarks on loaders and devices: its arguments here are meant."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        yield


# Training a dictionary as a run: from a recipe to a run directory with a dictionary in it.

DICTIONARY, RESULTS = "dictionary", "dictionary.json"


def train_run(
    recipe: Any, files: RunFiles, *, resume: bool, observer: Observer, should_stop: Any, allow_large: bool
) -> Trained:
    """Record activations if the recipe says so, train, measure, and write the dictionary."""
    assert isinstance(recipe, SaeRecipe)

    def notify(message: str) -> None:
        observer("notice", {"message": message})

    trackers = build_trackers(recipe.track, TrackedRun(files.folder, recipe.dump(), notify))
    asked = recipe.activations

    def check_rows(most: int) -> None:
        if most - recipe.eval.rows < recipe.train.batch:
            raise too_few_rows(f"at most {most:,}", recipe.eval.rows, recipe.train.batch)

    store = open_or_record(asked, files.folder, notify, allow_large=allow_large, check_rows=check_rows)
    rows = StoreRows(store, asked.site, asked.source)
    metrics = TrackedMetrics(files.metrics, trackers)
    try:
        trained = train_dictionary(
            rows,
            recipe,
            checkpoints=files.checkpoints,
            metrics=metrics,
            resume=resume,
            observer=observer,
            should_stop=should_stop,
        )
    except UsageError:
        if not resume:  # so that the run, which came to nothing, can be taken back
            shutil.rmtree(files.folder / ACTIVATIONS, ignore_errors=True)
        raise
    finally:
        metrics.close()
    if trained.reason == "finished":
        save_dictionary(trained.dictionary, files.folder / DICTIONARY, describe_training(rows, recipe, trained.step))
        quality = trained.quality
        results: dict[str, Any] = {"held_out": quality.numbers() | {"rows": quality.rows}}
        if (recovered := recovered_by(rows, recipe, trained.dictionary, notify)) is not None:
            results["recovered"] = recovered
        replace_file(files.folder / RESULTS, json.dumps(results, indent=1).encode() + b"\n")
    return trained
