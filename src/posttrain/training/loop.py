"""Training loop shared by all methods.

Update k (1-based) is step k: rollouts and metrics use k, evaluation at step k uses weights after k updates, and
checkpoint ``step-k`` stores the state after them. A killed run resumes from the newest valid checkpoint, drops later
records, and repeats the rest bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.activity import phase
from posttrain.balances.findings import Imbalance
from posttrain.errors import NonFiniteLoss, PosttrainError, UsageError
from posttrain.models.forward.precision import use_threads, with_threads
from posttrain.models.lora import describe_reach
from posttrain.models.trained_heads import head_tensors, restore_heads
from posttrain.process_group import SINGLE_PROCESS, ProcessGroup, peak_resident_bytes
from posttrain.randomness import derive_key
from posttrain.recipes.document import decisive
from posttrain.recipes.eval_section import EvalSection
from posttrain.recipes.inert import ratio_bounds
from posttrain.recipes.panel_prompts import PANEL
from posttrain.recipes.recipe import Recipe
from posttrain.recipes.sections import RolloutSection, TrainSection
from posttrain.store.checkpoint_files import checkpoint_steps, mark_best, prune_checkpoints
from posttrain.store.metric_names import choose_primary_metric
from posttrain.store.metrics import (
    MOVED,
    NUM_STEPS,
    MetricsLog,
    TrackedMetrics,
    TrackedRun,
    Tracker,
    build_trackers,
    learning_warnings,
)
from posttrain.store.rollouts import RolloutStore
from posttrain.training.batch_fields import describe_one_prompt
from posttrain.training.build import TrainerState, prepare, results_of
from posttrain.training.checkpoint import (
    Checkpoint,
    check_origins,
    load_checkpoint,
    names_to_write,
    restore_model,
    save_checkpoint,
)
from posttrain.training.files import NoRecords, Observer, RunFiles
from posttrain.training.idle_rows import choose_idle_rows
from posttrain.training.mismatch import CLAMPED, check_mismatch, describe_clamped, describe_narrow_clip
from posttrain.training.optimizer import optimizer_tensors, restore_optimizer
from posttrain.training.parts.averages import average_tensors, restore_averages
from posttrain.training.parts.ranking import EvaluationRanking
from posttrain.training.records.capture import Capture
from posttrain.training.records.facts import of_steps
from posttrain.training.records.stored_records import FACTS, write_facts
from posttrain.training.records.update_records import UpdateRecords, open_records
from posttrain.training.sources import TrainBatch
from posttrain.training.sources.stored import save_batch
from posttrain.training.step import accumulate, add_gradients, apply_update, learning_rate, noise_of, same_weights
from posttrain.types import Batch


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Training result. ``reason``: ``finished`` or ``interrupted``; ``evaluations``: latest results by task."""

    step: int
    reason: str
    evaluations: dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """Settings used by the loop, taken from a resolved recipe.

    train: with steps filled in. writes_shares: each process writes weight shards to checkpoints. models: model and
    teacher names by key. identity: recipe identity stored in checkpoints. ratio_bounds: distance from 1 for each
    ratio bound, by key.
    """

    train: TrainSection
    eval: EvalSection
    rollout: RolloutSection | None
    writes_shares: bool
    models: Mapping[str, str]
    identity: Mapping[str, object]
    ratio_bounds: Mapping[str, float]


def plan_loop(recipe: Recipe, steps: int) -> LoopPlan:
    """Extract loop settings from a resolved recipe with a given number of steps."""
    models = {"model.name": recipe.model.name}
    if recipe.teacher is not None:
        models["teacher.name"] = recipe.teacher.name
    return LoopPlan(
        train=recipe.train.model_copy(update={"steps": steps}),
        eval=recipe.eval,
        rollout=recipe.rollout,
        writes_shares=recipe.scale.checkpoint == "sharded",
        models=models,
        identity={"recipe": recipe.fingerprint(), "settings": decisive(recipe.dump())},
        ratio_bounds=ratio_bounds(recipe),
    )


@dataclass(slots=True)
class Loop:
    """Active training run. All processes make identical decisions; the main process writes records."""

    plan: LoopPlan
    files: RunFiles
    parts: TrainerState
    metrics: MetricsLog | NoRecords
    rollouts: RolloutStore | NoRecords
    observer: Observer
    steps: int
    process_group: ProcessGroup = SINGLE_PROCESS
    step: int = 0
    ranking: EvaluationRanking = field(init=False)
    evaluations: dict[str, dict[str, float]] | None = None
    warned: set[str] = field(default_factory=set)  # warnings already shown by this process
    unevaluated: bool = False  # evaluation pending for weights at ``step``
    consistent: bool = True  # weights, optimizer and records agree on ``step``
    source_state: dict[str, float] = field(default_factory=dict)  # source state after ``step``
    update_records: UpdateRecords = field(init=False)

    def __post_init__(self) -> None:
        self.ranking = EvaluationRanking(self.plan.eval.patience)
        self.update_records = open_records(
            self.parts, self.rollouts, self.process_group, ends_run=self.plan.train.strict
        )

    def resume(self) -> None:
        """Restore the newest valid checkpoint and drop later records. Without a checkpoint, start over."""
        checkpoint = self._newest_checkpoint()
        if checkpoint is not None:
            for reason in checkpoint.skipped:
                self.observer("notice", {"message": reason})
            self.restore(checkpoint)
            self._tidy()
        # without a checkpoint, even the step 0 evaluation is dropped
        keep = self.step if checkpoint is not None else -1
        again = (keep,) if self.unevaluated else ()
        num_dropped = self.metrics.trim(keep, again)
        self.rollouts.trim(keep, again)
        self.update_records.resume(self.step)
        if checkpoint is None and num_dropped:
            dropped = f"{num_dropped} metrics.jsonl lines and all rollouts were dropped"
            self.observer("notice", {"message": f"no checkpoint to resume from, so training starts over; {dropped}"})

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore weights, optimizer, source and step from a checkpoint of this run or an equivalent one. Records
        stay unchanged.

        Raises:
            CheckpointError: checkpoint does not match the recipe.
            UsageError: an initial model has changed since the run began.
        """
        check_origins(self.plan.models, self.parts.origins, checkpoint.state)
        self._take_threads(checkpoint.state)
        fill = Tensor.copy_ if self.parts.shards is None else self.parts.shards.fill
        restore_model(self.parts.model, checkpoint.path, fill)
        restore_heads(self.parts.heads, checkpoint.heads, fill)
        restore_optimizer(self.parts.optimizer, [n for n, _ in self.parts.parameters], checkpoint.optimizer)
        if self.parts.moving is not None and self.parts.reference is not None:
            self.parts.reference.restore(checkpoint.reference)
        if self.parts.shards is not None:
            self.parts.shards.scatter()
        if self.parts.averages:
            restore_averages(self.parts.averages, checkpoint.averages, checkpoint.path)
        vocabulary = self.parts.model.get_input_embeddings().weight.shape[0]
        self.parts.source.restore(checkpoint.rollout_buffer, checkpoint.state.get("source", {}), vocabulary)
        self.step = checkpoint.step
        self.update_records.forget()
        self.ranking.best, self.ranking.stale = checkpoint.state.get("best"), checkpoint.state.get("stale", 0)
        self.evaluations = checkpoint.state.get("evaluations")
        self.unevaluated = bool(checkpoint.state.get("unevaluated", False))
        self._compare_length(checkpoint.state.get("steps"))
        self.source_state = self.parts.source.state()

    def beginning(self, resumed: bool, length: str | None) -> dict[str, object]:
        """Build the ``start`` event; ``length`` describes passes over the data, if relevant."""
        source = self.parts.source
        return {
            "steps": self.steps,
            "length": length,
            "resumed_from": self.step if resumed else None,
            "num_examples": source.num_examples,
            "size": getattr(source, "size", None),
            "dropped": source.dropped,
            "origin": source.origin,
            "num_repeated": source.num_repeated,
            "trained": source.trained,
            "forward_path": self.parts.method.forward.path,
        }

    def _newest_checkpoint(self) -> Checkpoint | None:
        """Load the newest valid checkpoint in the main process, and the same step in other processes."""
        checkpoint: Checkpoint | None = None
        step: int | None = None
        if self.process_group.is_main:
            checkpoint = load_checkpoint(self.files.checkpoints, set_aside=True)
            if checkpoint is not None:
                step = checkpoint.step
        step = self.process_group.broadcast(step, "step of the checkpoint")
        if self.process_group.is_main or step is None:
            return checkpoint
        return load_checkpoint(self.files.checkpoints, step)

    def _take_threads(self, state: Mapping[str, Any]) -> None:
        """Use the original number of threads, so summation order stays the same, unless processes changed."""
        began = state.get("processes", 1)
        now = self.process_group.size
        own = torch.get_num_threads()
        threads = state.get("num_threads") or own
        if began != now:
            before, after = (f"{n} process{'es' * (n != 1)}" for n in (began, now))
            what = f"resuming with {after}, but the checkpoint was saved with {before}"
            self.observer(
                "notice", {"message": f"{what}: results may differ by rounding, because sums are ordered differently"}
            )
        elif threads != own:
            use_threads(threads)
            line = f"number of threads: {threads}, as at the start of this run (default here: {own})"
            self.observer("notice", {"message": line})

    def _compare_length(self, began: int | None) -> None:
        """Compare the number of steps with the value stored in the checkpoint.

        Raises:
            UsageError: training has already gone further.
        """
        num_epochs = self.plan.train.num_epochs
        if num_epochs is None:
            return
        length = f"train.num_epochs {num_epochs:g} gives {self.steps} steps with the current data"
        if self.step > self.steps:
            raise UsageError(f"{length}, but the newest checkpoint is at step {self.step}; increase train.num_epochs")
        if began not in (None, self.steps):
            self.observer("notice", {"message": f"{length}, but the checkpoint was saved in a run with {began} steps"})

    def run(self, should_stop: Callable[[], bool]) -> TrainResult:
        """Train until finished or stopped, then save a checkpoint."""
        saved = self.step
        same_weights(self.parts.whole_parameters(), self.process_group, "before training")
        if self.unevaluated:  # evaluation failed earlier; save again with its results
            self.evaluate()
            self.save()
        elif self.step == 0 and self.plan.eval.every:
            self.evaluate()
        while not self._is_done() and not self.process_group.agree(should_stop(), "being stopped"):
            with phase(f"step {self.step + 1} of {self.steps}"):
                self.update()
            if self.unevaluated:
                self.evaluate()
            if self._due(self.plan.train.save_every) or self._is_best():
                self.save()
                saved = self.step
        if saved != self.step:
            self.save()
        reason = "finished" if self._is_done() else "interrupted"
        self.observer("finish", {"step": self.step, "reason": reason})
        return TrainResult(self.step, reason, self.evaluations or {})

    def rescue(self, error: Exception) -> None:
        """Save the last completed step after a failure, without pruning.

        Nothing is saved in the middle of a step. If saving fails, a note is added to ``error``.
        """
        if not self.process_group.is_main or not self.consistent or self.step == 0:
            return
        if self.step in checkpoint_steps(self.files.checkpoints):
            return
        if self.parts.shards is not None:
            error.add_note(f"step {self.step} is not saved, because saving shards needs all processes")
            return
        try:
            path = self._write_checkpoint(self._gathered(SINGLE_PROCESS))
            self.observer("checkpoint", {"step": self.step, "path": str(path), "best": self._is_best()})
        except (PosttrainError, OSError, RuntimeError, MemoryError, ValueError) as failure:
            error.add_note(f"step {self.step} could not be saved: {failure}")

    def _due(self, every: int) -> bool:
        return (every > 0 and self.step % every == 0) or self.step == self.steps

    def _is_best(self) -> bool:
        return self.ranking.best is not None and self.ranking.best["step"] == self.step

    def _is_done(self) -> bool:
        return self.step >= self.steps or (not self.unevaluated and self.ranking.has_waited())

    def update(self) -> None:
        """Run one optimizer step and record it."""
        started = time.perf_counter()
        step = self.step + 1
        draw = self.parts.source(step)
        self._pass_on_warnings()
        if draw.rollouts:
            self.rollouts.record(draw.rollouts)
        updating = time.perf_counter()
        tokens, metrics = self._descend(draw, step)
        self.step, self.consistent = step, False
        self.parts.move_reference(step)
        timing = _timing(draw, tokens, started, updating, time.perf_counter())
        device = self.parts.policy.device
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident_bytes()
        timing["peak_memory_bytes"] = float(peak)
        metrics = draw.metrics | metrics | {"trained_tokens": tokens}
        self.metrics.append(step, metrics, timing)
        self._warn(draw.batch, metrics)
        self.unevaluated = bool(self.plan.eval.every) and self._due(self.plan.eval.every)
        self.source_state = self.parts.source.state()
        self.consistent = True
        self.observer("step", {"step": step, "metrics": metrics, "timing": timing})

    def _warn(self, batch: Batch | None, metrics: Mapping[str, float]) -> None:
        """Warn once about clamped losses, narrow clip ranges and failure to learn."""
        warnings = {CLAMPED: describe_clamped(metrics, self.step)}
        if batch is not None:
            warnings["kl_baseline"] = describe_one_prompt(batch, self.step)
        plan = self.plan
        if plan.rollout is not None:
            policy = self.parts.policy
            warnings["clip"] = describe_narrow_clip(
                plan.ratio_bounds, plan.rollout, plan.train, policy, metrics, self.step
            )
        if self.process_group.is_main and self.step <= 4 * NUM_STEPS:
            warnings |= learning_warnings(self.metrics.read())
        for name, message in warnings.items():
            if message and name not in self.warned:
                self.warned.add(name)
                self.observer("notice", {"message": f"{name}: {message}"})

    def _descend(self, draw: TrainBatch, step: int) -> tuple[float, dict[str, float]]:
        """Run the gradient step, if the batch is not empty; returns the number of trained tokens and metrics."""
        options = self.plan.train
        batch = draw.batch
        lr = learning_rate(options, step)
        if batch is None:
            return 0.0, {"loss": 0.0, "grad_norm": 0.0, "lr": lr}
        place = (step, self.process_group.rank) if self.process_group.rank else (step,)
        torch.manual_seed(derive_key(options.seed, "dropout", *place) % (1 << 63))
        idle_rows = choose_idle_rows(options, step, self.steps)
        learning = replace(self.parts.learning(), noise=noise_of(options, step))
        capture = Capture()
        self.update_records.begin()
        loss, metrics = accumulate(
            learning, batch, options, process_group=self.process_group, idle_rows=idle_rows, capture=capture
        )
        captured = capture.collect(batch, learning.level, self.process_group)
        own = loss - learning.balancing_loss(metrics)  # objective part only, as in records
        found = self.update_records.open_record(draw, step, own, metrics, captured, learning.forward)
        found = check_mismatch(self.plan.rollout, self.parts.policy, batch, found, metrics)
        self.update_records.end_if_strict(found)
        if self.parts.shards is None:
            add_gradients([p for _, p in self.parts.parameters], self.process_group)
        try:
            together, apart = self.parts.split_parameters()
            self.update_records.weights.before_update()
            self.consistent = False
            norm = apply_update(self.parts.optimizer, together, lr, options.max_grad_norm, loss, step, apart)
            self.parts.follow_update()
        except NonFiniteLoss as error:
            self.consistent = True
            raise NonFiniteLoss(
                f"{error}. {save_batch(self.files.folder, batch, step, is_main=self.process_group.is_main)}"
            ) from None
        moved, of_step = self.update_records.close_record(lr, norm)
        self._tell_imbalances([*found, *of_step])
        if step <= NUM_STEPS:
            metrics[MOVED] = float(moved > 0.0)
        return float(batch.trained_mask.sum()), metrics | {"loss": loss, "grad_norm": norm, "lr": lr}

    def _tell_imbalances(self, found: Sequence[Imbalance]) -> None:
        """Store the update record and report each violated balance once."""
        self.update_records.keep(found)
        for one in found:
            key = f"balance {one.check}"
            if key in self.warned:
                continue
            self.warned.add(key)
            self.observer("notice", {"message": one.message})

    @phase("held-out evaluation")
    def evaluate(self) -> None:
        """Evaluate all held-out tasks and track the best step by primary metric.

        Records are written after all evaluations finish. On ties, the later step is best.

        Raises:
            UsageError: no evaluation reports the configured metric (``eval.best``).
        """
        assert self.parts.evaluator is not None
        self.parts.source.wait()
        step = self.step
        done = self.parts.evaluator(step)
        answers = self.parts.evaluator.answer_panel(step)
        evaluations = {evaluation.name: results_of(evaluation) for evaluation in done}
        primary = choose_primary_metric(evaluations, named=self.plan.eval.best, samples=self.plan.rollout is not None)
        done = [*done, *self.parts.evaluate_average(step)]
        self._pass_on_warnings()
        self.consistent, self.evaluations = False, evaluations
        if answers:
            self.rollouts.record(answers, evaluation=PANEL)
        for evaluation in done:
            self.rollouts.record(evaluation.rollouts, evaluation=evaluation.name)
            measured = results_of(evaluation) | evaluation.kind_results
            info = {f"eval/{evaluation.name}/{k}": v for k, v in measured.items()}
            self.metrics.append(step, info, {"evaluation_seconds": evaluation.results["seconds"]})
        self.ranking.add(primary, evaluations, step)
        self.unevaluated, self.consistent = False, True
        for evaluation in done:
            about: dict[str, object] = {"step": step, "name": evaluation.name, "primary_metric": primary}
            self.observer("evaluation", about | {"results": dict(evaluation.results), "kinds": evaluation.kinds})
        if self._is_done() and step < self.steps:
            self.observer("notice", {"message": self.ranking.describe(step, self.steps)})

    def _pass_on_warnings(self) -> None:
        for message in self.parts.take_warnings():
            self.observer("notice", {"message": message})

    @phase("saving a checkpoint")
    def save(self) -> None:
        """Write a checkpoint, mark the best one and delete old ones."""
        same_weights(self.parts.whole_parameters(), self.process_group, f"step {self.step} cannot be saved")
        together = self.parts.shards is not None and self.plan.writes_shares
        process_group = self.process_group if together else SINGLE_PROCESS
        tensors = self._gathered(process_group)
        if not self.process_group.is_main:
            if together:
                self._write_checkpoint(tensors, process_group)
            return
        path = self._write_checkpoint(tensors, process_group)
        self._tidy()
        self.observer("checkpoint", {"step": self.step, "path": str(path), "best": self._is_best()})

    def _gathered(self, process_group: ProcessGroup) -> dict[str, Any]:
        """Gather tensors for ``save_checkpoint``, unsharded unless all of ``process_group`` write the optimizer."""
        parts, shards = self.parts, self.parts.shards
        optimizer = optimizer_tensors(parts.optimizer, [n for n, _ in parts.parameters])
        tensors: dict[str, Any] = {"optimizer": optimizer, "heads": head_tensors(parts.heads)}
        tensors["score"] = parts.score_head()
        tensors["reference"] = parts.reference_tensors()
        tensors["averages"] = average_tensors(parts.averages)
        if shards is not None and process_group.size == 1:
            tensors["optimizer"] = shards.whole(optimizer, lambda name: self.process_group.is_main)
        if shards is not None and not shards.keeps_whole:
            names = names_to_write(parts.model) if self.process_group.is_main else set()
            tensors["weights"] = shards.whole(parts.model.state_dict(), names.__contains__)
            tensors["heads"] = shards.whole(tensors["heads"], lambda name: self.process_group.is_main)
        return tensors

    def _write_checkpoint(self, tensors: Mapping[str, Any], process_group: ProcessGroup = SINGLE_PROCESS) -> Path:
        """Flush records, then write a checkpoint together with ``process_group``."""
        self.metrics.flush()
        self.rollouts.flush()
        return save_checkpoint(
            self.files.checkpoints,
            step=self.step,
            model=self.parts.model,
            tokenizer=self.parts.tokenizer,
            ends=self.parts.answer_ends(),
            state=self._state() if process_group.is_main else {},
            rollout_buffer=self.parts.source.rollout_buffer(self.step),
            process_group=process_group,
            **tensors,
        )

    def _state(self) -> dict[str, object]:
        """Build the contents for ``state.json``."""
        state: dict[str, object] = {
            **self.plan.identity,
            "records": {"metrics": self.metrics.num_rows(), **self.rollouts.num_rows(self.step)},
            **self.parts.origins,
            "num_threads": torch.get_num_threads(),
            "best": self.ranking.best,
            "stale": self.ranking.stale,
            "evaluations": self.evaluations,
            "steps": self.steps,
            "processes": self.process_group.size,
            "source": self.source_state,
        }
        if self.unevaluated:
            state["unevaluated"] = True
        return state

    def _tidy(self) -> None:
        """Point ``best`` to the best checkpoint and delete old ones."""
        if not self.process_group.is_main:
            return
        best = int(self.ranking.best["step"]) if self.ranking.best is not None else -1
        if best in checkpoint_steps(self.files.checkpoints):
            mark_best(self.files.checkpoints, best)
        prune_checkpoints(self.files.checkpoints, self.plan.train.keep_checkpoints, {best})


def run_training(
    recipe: Recipe,
    files: RunFiles,
    *,
    resume: bool = False,
    observer: Observer = lambda event, info: None,
    should_stop: Callable[[], bool] = lambda: False,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> TrainResult:
    """Train a resolved recipe, writing to ``files`` from the main process.

    Raises:
        UsageError: incompatible components or missing data, before any training.
        RunFailure: training failed. The newest checkpoint is intact, and the last completed step is saved if possible.
    """
    trackers: list[Tracker] = []
    if process_group.is_main:
        watched = TrackedRun(files.folder, recipe.dump(), lambda message: observer("notice", {"message": message}))
        trackers = build_trackers(recipe.track, watched)
    with open_loop(recipe, files, observer, process_group, trackers) as (loop, length):
        if resume:
            loop.resume()
        observer("start", loop.beginning(resume, length))
        for message in [*describe_reach(loop.parts.model), *loop.parts.warnings]:
            observer("notice", {"message": message})
        try:
            return loop.run(should_stop)
        except Exception as error:
            loop.rescue(error)
            raise


@contextmanager
def open_loop(
    recipe: Recipe,
    files: RunFiles,
    observer: Observer,
    process_group: ProcessGroup = SINGLE_PROCESS,
    trackers: Sequence[Tracker] = (),
) -> Iterator[tuple[Loop, str | None]]:
    """Prepare a run inside the block. Yields the loop and a description of passes over the data.

    Raises:
        UsageError: as ``prepare``.
    """
    with _threads_of_main(process_group):
        parts = prepare(recipe, files.folder, process_group)
        steps, length = recipe.train.steps, None
        if recipe.train.num_epochs is not None:
            steps, length = parts.source.length_of(recipe.train.num_epochs)
        assert steps is not None, "a recipe says steps or num_epochs"
        parts.facts = of_steps(parts.facts, steps)
        about = {"seed": str(recipe.train.seed), "recipe": recipe.fingerprint(), FACTS: write_facts(parts.facts)}
        kept = _records(files, trackers, about, process_group)
        with closing(parts), closing(parts.source), kept as (metrics, rollouts):
            plan = plan_loop(recipe, steps)
            yield Loop(plan, files, parts, metrics, rollouts, observer, steps, process_group), length


@contextmanager
def _threads_of_main(process_group: ProcessGroup) -> Iterator[None]:
    """Use the main process's thread count everywhere, because it affects the last bits in sums."""
    with with_threads(process_group.broadcast(torch.get_num_threads(), "number of threads")):
        yield


@contextmanager
def _records(
    files: RunFiles, trackers: Sequence[Tracker], about: Mapping[str, str], process_group: ProcessGroup
) -> Iterator[tuple[MetricsLog | NoRecords, RolloutStore | NoRecords]]:
    """Open metric and rollout stores in the main process, storing ``about`` with them."""
    if not process_group.is_main:
        yield NoRecords(), NoRecords()
        return
    metrics = TrackedMetrics(files.metrics, trackers)
    with closing(metrics), RolloutStore(files.rollouts, about=about) as rollouts:
        yield metrics, rollouts


def _timing(draw: TrainBatch, tokens: float, started: float, updating: float, finished: float) -> dict[str, float]:
    update, step = finished - updating, finished - started
    timing = {k: v for k, v in draw.timing.items() if k != "generated_tokens"}
    timing |= {"update_seconds": update, "step_seconds": step}
    timing |= {"update_tokens_per_second": tokens / update, "tokens_per_second": tokens / step}
    if draw.fresh and draw.timing.get("generate_seconds"):
        timing["generate_tokens_per_second"] = draw.timing["generated_tokens"] / draw.timing["generate_seconds"]
    return timing
