"""Held-out evaluation during training: sampled answers, objective values, or demonstration loss.

Objective values use given data (pairs, judged answers, labeled steps). Demonstration loss (``eval.loss``) complements
sampled answers. Imported only by recipes with evaluation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from posttrain import registry
from posttrain.data.base import Task, build_task, eval_components
from posttrain.data.render.rows import Shape
from posttrain.errors import NonFiniteLoss, RecipeError, UsageError
from posttrain.evaluation.generation import (
    Evaluation,
    Questions,
    content_of,
    distinct_indices,
    evaluate_sampler,
    held_out,
    held_out_indices,
    task_label,
)
from posttrain.evaluation.items import default_ks
from posttrain.evaluation.kl_from_initial import measure_kl
from posttrain.evaluation.statistics import wilson_interval
from posttrain.models.forward.forward import Forward
from posttrain.models.forward.micro import MicroBatching
from posttrain.models.reference import Reference
from posttrain.process_group import SINGLE_PROCESS, ProcessGroup
from posttrain.recipes.eval_section import EvalSection
from posttrain.recipes.sections import Component, RolloutSection, TrainSection
from posttrain.registry import Entry
from posttrain.sampling.base import DecodingRules, Engine, Sampling
from posttrain.sampling.rollout import Sampler
from posttrain.training.batch_fields import BatchFields
from posttrain.training.checks import Components
from posttrain.training.parts.panel import PromptPanel
from posttrain.training.sources.unit_batches import UnitBatches
from posttrain.training.sources.units import TaskUnits
from posttrain.training.step import Method, accumulate
from posttrain.types import Batch, Example, Rollout, with_float64

# Objective metrics reported with intervals; the first one present is used.
ACCURACIES = ("pair_accuracy", "answer_accuracy", "step_accuracy")
MAX_ANSWER_TOKENS = 256  # default if unspecified
MAX_EXPONENT = 700.0  # larger exponents overflow


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Held-out units, by place. ``num_dropped`` counts unusable examples (too long, no responses, ties)."""

    batches: UnitBatches
    units: Sequence[int]
    num_dropped: int = 0


def build_eval_tasks(trained: Component, options: EvalSection) -> list[Task]:
    """Build evaluation tasks with selected examples. Repeated tasks get distinct names.

    ``trained``: training task.

    Raises:
        RecipeError: training uses all splits, so none remains for evaluation.
    """
    tasks: list[Task] = []
    for index, component in enumerate(eval_components(trained, options.tasks)):
        task = build_task(component, f"eval.tasks.{index}")
        if any((task.name, task.split) == (other.name, other.split) for other in tasks):
            task = replace(task, name=f"{task.name}-{index + 1}")
        if options.items == "first" or options.items_seed:  # otherwise use the standard sample shared by all runs
            n = options.num_examples
            if options.items == "first":
                indices = list(range(min(n, len(task.examples))))
            else:
                indices = distinct_indices(task.examples, n, options.items_seed, content_of)
            task = replace(task, examples=[task.examples[i] for i in indices])
        tasks.append(task)
    return tasks


def choose_held_out(
    read: Callable[[Task], TaskUnits], fields: BatchFields, tasks: Sequence[Task], components: Components
) -> dict[str, HeldOut]:
    """Choose units for objective or demonstration-loss evaluation, by task label.

    Only tasks with responses or demonstrations are included, using the same ``eval.num_examples`` examples as every
    other evaluation. If these give too many units, a fixed sample is used. Other tasks are evaluated only by sampled
    answers. ``read`` encodes a task's examples. ``fields``: batch fields of the objective.

    Raises:
        RecipeError: evaluating a reward model on a task without responses.
        UsageError: empty task, or no usable units.
    """
    n = components.recipe.eval.num_examples
    chosen: dict[str, HeldOut] = {}
    for task in tasks:
        if len(task.examples) == 0:
            raise UsageError(f"task {task.name!r}, split {task.split!r}: no examples to evaluate")
        examples = held_out(task, n, key=content_of)
        if components.shape == "demonstration":
            shown = [example for example in examples if _is_shown(example)]
            if not shown:
                continue
            wants_loss = components.recipe.eval.loss
            if wants_loss is None:  # by default if sampled answers cannot be graded
                wants_loss = all(example.answer is None for example in shown)
            if wants_loss:
                units = read(replace(task, examples=shown, dropped={}))
                chosen[task_label(task)] = _held_out(units, range(len(units)))
        elif any(example.responses for example in examples):
            units = read(replace(task, examples=examples, dropped={}))
            chosen[task_label(task)] = _held_out(units, held_out_indices(len(units), n), fields)
        elif components.only_scores:
            raise RecipeError(
                f"eval.tasks: task {task.name!r} has no responses, and reward models generate no answers to "
                "grade; choose a task with responses, or disable evaluation with eval.every: 0"
            )
    return chosen


def _held_out(units: TaskUnits, places: Sequence[int], fields: BatchFields | None = None) -> HeldOut:
    """Prepare the units at ``places`` for evaluation."""
    units.check_labels(needs_both=False)
    batches = UnitBatches(units, fields)
    batches.fill_fixed(places)
    return HeldOut(batches, places, sum(units.dropped.values()))


def answer_limit(options: EvalSection, rollout: RolloutSection | None) -> int:
    """Compute the answer limit for evaluation in tokens: ``eval.max_tokens``, or the training limit."""
    if options.max_tokens:
        return options.max_tokens
    if rollout is not None:
        return rollout.max_tokens
    return MAX_ANSWER_TOKENS


def is_read(task: Task, n: int) -> bool:
    """Check if a task provides responses, so evaluation needs no sampling."""
    size = len(task.examples)
    return size > 0 and any(task.examples[i].responses for i in held_out_indices(size, n))


def _is_shown(example: Example) -> bool:
    """Check if an example has an answer to imitate."""
    texts = (example.answer, example.solution, example.demonstration)
    return texts != (None, None, None) or bool(example.responses or example.turns)


@torch.no_grad()
def evaluate_loss(held_out: HeldOut, task: Task, policy: Forward, micro_batches: MicroBatching) -> dict[str, float]:
    """Compute held-out demonstration loss over trained tokens.

    ``loss``: mean −log π in nats. ``perplexity``: exp(loss). ``token_accuracy``: fraction of tokens ranked first by
    the policy. ``loss_tokens``, ``loss_rows``, ``rows_dropped``: token and demonstration counts.

    Raises:
        NonFiniteLoss: NaN or infinite loss.
    """
    batch = held_out.batches.batch_of(held_out.units)

    def measure(part: Batch) -> tuple[float, float]:
        """Sum log-probabilities over trained tokens and count top-ranked ones."""
        outputs = policy(part, "none")
        candidates, _ = policy.top_candidates(part, 1)
        likeliest = candidates[..., 0]
        mask = part.mask.to(likeliest.device)
        is_correct = likeliest == part.tokens.to(likeliest.device)
        logprob = with_float64(outputs.logprobs[mask]).double().sum()
        return float(logprob), float(is_correct[mask].sum())

    logprob, correct = micro_batches.total(batch, policy, measure, "held-out loss")
    tokens = float(batch.mask.sum())
    loss = -logprob / tokens
    if not math.isfinite(loss):
        raise NonFiniteLoss(f"held-out {task_label(task)}: loss {loss}")
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, MAX_EXPONENT)),
        "token_accuracy": correct / tokens,
        "loss_tokens": tokens,
        "loss_rows": float(len(held_out.units)),
        "rows_dropped": float(held_out.num_dropped),
    }


def evaluate_objective(
    held_out: HeldOut, task: Task, method: Method, options: TrainSection, process_group: ProcessGroup = SINGLE_PROCESS
) -> Evaluation:
    """Compute loss and objective metrics on held-out units, without gradients.

    Objective accuracy (``ACCURACIES``) includes a Wilson interval over n units. Multi-step solutions count once.

    Raises:
        UsageError: objective without an accuracy metric.
        NonFiniteLoss: NaN or infinite loss.
    """
    started = time.perf_counter()
    batch = held_out.batches.batch_of(held_out.units)
    loss, metrics = accumulate(method, batch, options, learns=False, process_group=process_group)
    metrics.pop("padding_share")
    name = next((name for name in ACCURACIES if name in metrics), None)
    if name is None:
        raise UsageError(
            f"eval: objective metrics contain none of {', '.join(ACCURACIES)} to evaluate; add one, "
            "or disable evaluation with eval.every: 0"
        )
    if not (math.isfinite(loss) and math.isfinite(metrics[name])):
        raise NonFiniteLoss(f"held-out {task_label(task)}: loss {loss}, {name} {metrics[name]}")
    n = len(held_out.units)
    low, high = wilson_interval(metrics[name] * n, n)
    results = {"n": float(n), name: metrics[name], f"{name}_low": low, f"{name}_high": high, "loss": loss}
    results |= metrics | {"rows_dropped": float(held_out.num_dropped), "seconds": time.perf_counter() - started}
    return Evaluation(task_label(task), results, [])


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Evaluate all held-out tasks (``eval``).

    options: evaluation settings. train: micro-batch settings and seed. max_tokens: answer limit. held_out: units for
    objective or loss evaluation (``shape`` demonstration), by task label. start: initial model (None if drift is not
    measured). panel: fixed prompts (None without ``eval.prompts``).
    """

    options: EvalSection
    train: TrainSection
    max_tokens: int
    tasks: Sequence[Task]
    held_out: Mapping[str, HeldOut]
    method: Method
    sampler: Sampler
    policy: Forward
    start: Reference | None
    shape: Shape = "demonstration"
    panel: PromptPanel | None = None

    def __call__(self, step: int) -> list[Evaluation]:
        """Evaluate each task after ``step`` updates."""
        self.sampler.engine.sync(step)
        done = [self._with_kl(self._evaluate_on(task, step), task) for task in self.tasks]
        self.sampler.engine.rest()
        return done

    def answer_panel(self, step: int) -> list[Rollout]:
        """Return the answers to the fixed prompts (``eval.prompts``) after ``step`` updates; none without them."""
        if self.panel is None:
            return []
        self.sampler.engine.sync(step)
        answers = self.panel.answer(step, self._answer_sampling())
        self.sampler.engine.rest()
        return answers

    def _answer_sampling(self) -> Sampling:
        """Return the sampling of the answers of evaluations."""
        options = self.options
        rules = DecodingRules(options.min_p, options.min_tokens, options.repetition_penalty, tuple(options.stop))
        return self.sampler.sampling(self.max_tokens, options.temperature, options.top_k, options.top_p, rules)

    def sampling(self, temperature: float) -> Sampling:
        """Sampling options for answers."""
        return self.sampler.sampling(self.max_tokens, temperature)

    def _micro_batches(self) -> MicroBatching:
        """Micro-batching for given answers."""
        return MicroBatching(self.train.micro_batch_tokens, process_group=self.sampler.process_group)

    def _evaluate_on(self, task: Task, step: int) -> Evaluation:
        """Evaluate by the objective if units exist, otherwise by sampled answers and loss."""
        held_out = self.held_out.get(task_label(task))
        if held_out is not None and self.shape != "demonstration":
            return evaluate_objective(held_out, task, self.method, self.train, self.sampler.process_group)
        options = self.options
        sampling = self._answer_sampling()
        questions = Questions(
            task,
            sampling,
            options.num_examples,
            samples=options.samples,
            ks=default_ks(options.samples),
            seed=self.train.seed,
            step=step,
        )
        evaluation = evaluate_sampler(self.sampler, questions)
        if held_out is not None:
            started = time.perf_counter()
            loss = evaluate_loss(held_out, task, self.policy, self._micro_batches())
            evaluation.results.update(loss)
            evaluation.results["seconds"] += time.perf_counter() - started
        return evaluation

    def _with_kl(self, evaluation: Evaluation, task: Task) -> Evaluation:
        """Add entropy and KL from the initial policy, if requested."""
        if not self.options.num_kl_prompts:
            return evaluation
        assert self.start is not None, "measuring KL requires a reference"
        started = time.perf_counter()
        sampling = self.sampling(self.policy.temperature)
        kl = measure_kl(
            self.sampler,
            Questions(task, sampling, self.options.num_kl_prompts, seed=self.train.seed),
            policy=self.policy,
            start=self.start,
            tokens_per_micro=self.train.micro_batch_tokens,
        )
        evaluation.results.update(kl)
        evaluation.results["seconds"] += time.perf_counter() - started
        return evaluation


def build_eval_engine(
    components: Components, engine: Engine, build: Callable[[Entry, dict[str, object], str], Engine]
) -> Engine:
    """Build the evaluation engine: ``eval.engine``, or the rollout engine.

    Raises:
        UsageError: unsupported ``eval.engine``.
    """
    component = components.recipe.eval.engine
    if component is None or (component.name, component.options) == (components.engine.name, components.engine_options):
        return engine
    try:
        return build(registry.find("engine", component.name, "eval.engine"), component.options, "eval.engine")
    except UsageError as error:
        place = "" if str(error).startswith("eval.engine") else "eval.engine: "
        way_out = f"Or remove eval.engine, so evaluation uses {components.engine.name!r}"
        error.args = (f"{place}{str(error).rstrip('.')}. {way_out}", *error.args[1:])
        raise
