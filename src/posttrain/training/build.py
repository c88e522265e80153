"""Construction of the components of a run from its recipe: model, data, engine, objective, optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from posttrain import registry
from posttrain.activity import phase
from posttrain.algorithms.objectives.surrogate import with_masks, with_regularizers
from posttrain.balances.record import UpdateFacts
from posttrain.data.base import Task, build_task
from posttrain.data.render import end_id, stop_ids
from posttrain.data.render.template import Template, build_template, further_ends
from posttrain.data.rendered import take_rendered
from posttrain.graders.rewards import refuse_rows
from posttrain.models.forward.actor_critic import ActorCritic
from posttrain.models.forward.forward import Forward
from posttrain.models.forward.precision import choose_kernels
from posttrain.models.written.untrained import describe_other_parts
from posttrain.process_group import SINGLE_PROCESS, ProcessGroup, whole
from posttrain.recipes.inert import option_notes
from posttrain.recipes.other_models import HeadSection
from posttrain.recipes.recipe import Recipe
from posttrain.recipes.sections import Component, TrainSection
from posttrain.registry import Entry
from posttrain.sampling.base import Engine
from posttrain.sampling.rollout import Grader, Sampler, build_grader
from posttrain.training.advantages import build_advantage_estimator
from posttrain.training.batch_fields import BatchFields
from posttrain.training.checkpoint import origins_of
from posttrain.training.checks import (
    Components,
    resolve_components,
    slow_paths,
    unread_parts,
    unused_chat_template,
    vanishing_fields,
)
from posttrain.training.optimizer import build_optimizer
from posttrain.training.parts.averages import EMA, WeightAverage
from posttrain.training.parts.balancing import build_balancing
from posttrain.training.parts.built_models import BuiltModels, build_models
from posttrain.training.records.facts import describe_run, without_formula
from posttrain.training.step import Method, Objective
from posttrain.types import Model, Tokenizer

if TYPE_CHECKING:  # a run imports only what its recipe asks for
    from posttrain.evaluation.generation import Evaluation
    from posttrain.models.reference import Reference
    from posttrain.recipes.reference_sections import ReferenceSection
    from posttrain.sampling.episodes import Stage
    from posttrain.training.distributed import Shards
    from posttrain.training.held_out import Evaluator, HeldOut
    from posttrain.training.parts.averages import Teacher
    from posttrain.training.parts.masks import BoundMask
    from posttrain.training.sources.dataset import SupervisedSource
    from posttrain.training.sources.feedback import Feedback
    from posttrain.training.sources.rollouts import RolloutSource


@dataclass(slots=True)
class TrainerState:
    """The components of one run's loop."""

    model: Model
    tokenizer: Tokenizer
    policy: Forward  # the language model's forward pass
    method: Method
    heads: dict[str, torch.nn.Module]  # heads and critics, trained and saved next to the model
    parameters: list[tuple[str, Parameter]]
    optimizer: torch.optim.Optimizer
    source: SupervisedSource | RolloutSource
    grader: Grader
    engine: Engine
    origins: dict[str, Any]  # where models came from, as checkpoints keep it
    facts: UpdateFacts  # what its updates are meant to do
    shards: Shards | None = None  # the sharded weights that are trained; ``model`` and ``heads`` are unsharded
    reference: Reference | None = None  # where something needs it
    moving: ReferenceSection | None = None  # how the reference moves
    evaluator: Evaluator | None = None
    averages: Mapping[str, WeightAverage] = field(default_factory=dict)  # of the trained weights, by their use
    warnings: Sequence[str] = ()  # about what was built in another way than the recipe says
    stage: Stage | None = None

    @property
    def engines(self) -> list[Engine]:
        """The engines of rollouts and of evaluations, which may be the same."""
        evaluating = self.engine if self.evaluator is None else self.evaluator.sampler.engine
        return [self.engine] if evaluating is self.engine else [self.engine, evaluating]

    def move_reference(self, step: int) -> None:
        """Move the reference after update number ``step``, if it is its turn."""
        if self.moving is not None and self.reference is not None and step % self.moving.every == 0:
            self.reference.move(self.moving.mixing)

    def reference_tensors(self) -> dict[str, Tensor] | None:
        """Return the weights of a reference that moves, for a checkpoint."""
        if self.moving is None or self.reference is None:
            return None
        return self.reference.tensors()

    def take_warnings(self) -> list[str]:
        """Notices of the engines and of the source."""
        return [message for teller in (*self.engines, self.source) for message in teller.take_warnings()]

    def close(self) -> None:
        """Close the engines, and the servers of tools."""
        for engine in self.engines:
            engine.close()
        if self.stage is not None:
            self.stage.close()

    def score_head(self) -> tuple[Tensor, int] | None:
        """Return a reward model's head weight and the id of the token at which an answer is scored; else None."""
        forward = self.method.forward
        if not isinstance(forward, Forward) or forward.head is None or forward.reads == "before":
            return None
        return whole(forward.head.weight), end_id(self.tokenizer, self.grader.template)

    def answer_ends(self) -> frozenset[int]:
        """Return the ids that end an answer."""
        return stop_ids(self.tokenizer, self.grader.template)

    def split_parameters(self) -> tuple[list[Parameter], list[Parameter]]:
        """Return (parameters of the model and a head on it, parameters of a separate critic)."""
        if "critic" not in self.heads:
            return [p for _, p in self.parameters], []
        own = {name for name, _ in self.model.named_parameters()}
        return [p for n, p in self.parameters if n in own], [p for n, p in self.parameters if n not in own]

    def learning(self) -> Method:
        """Return the method over the weights that gradients are computed with."""
        return self.method if self.shards is None else replace(self.method, forward=self.shards.forward)

    def follow_update(self) -> None:
        """Bring what follows the trained weights up to date: unsharded copies, and averages."""
        if self.shards is not None:
            self.shards.gather()
        for average in self.averages.values():
            average.update()

    def evaluate_average(self, step: int) -> list[Evaluation]:
        """Evaluate the averaged weights (``train.ema_decay``) after ``step`` updates, as ``ema/NAME``; else nothing."""
        average = self.averages.get(EMA)
        if average is None or self.evaluator is None or step == 0:
            return []
        with average.open():
            done = self.evaluator(step)
        return [replace(one, name=f"{EMA}/{one.name}") for one in done]

    def whole_parameters(self) -> list[Tensor]:
        """Return the trained parameters that this process has unsharded."""
        if self.shards is not None and not self.shards.keeps_whole:
            return []  # each has another part
        return [p for module in (self.model, *self.heads.values()) for p in module.parameters() if p.requires_grad]


@dataclass(frozen=True, slots=True)
class Prompting:
    """From an example to a prompt, and from an answer to rewards; sources and evaluations share it.

    ``row_limit``: the most tokens of a prompt and its answer together. ``stage`` is the environment of completions of
    several turns, where the recipe has one.
    """

    tokenizer: Tokenizer
    context_tokens: int
    row_limit: int
    grader: Grader
    stage: Stage | None = None

    def sampler(self, engine: Engine, process_group: ProcessGroup) -> Sampler:
        """Return a sampler of graded answers that an engine writes."""
        limit = self.row_limit
        return Sampler(engine, self.tokenizer, self.grader, limit, process_group=process_group, stage=self.stage)


@dataclass(frozen=True, slots=True)
class EngineBuilder:
    """Builds the engines of a run over its model; ``folder`` is that of the run."""

    models: BuiltModels
    folder: Path | None
    process_group: ProcessGroup

    def __call__(self, entry: Entry, options: dict[str, object], where: str) -> Engine:
        """Return an engine that is ready; ``where`` names its key in the recipe."""
        make = entry.bind(options, where)
        model = self.models.loaded.model
        engine = registry.construct(where, make, Engine, model, self.models.tokenizer)  # type: ignore[type-abstract]
        engine = engine.settle(self.folder, self.process_group)
        shards = self.models.shards
        if shards is not None and shards.within is not None and entry.traits.get("takes_weights"):
            engine.take_parts(shards.within)
        return engine


@phase("preparing")
def prepare(recipe: Recipe, folder: Path | None = None, process_group: ProcessGroup = SINGLE_PROCESS) -> TrainerState:
    """Build all components of a recipe, in every process; ``folder`` caches what is computed once for a data set.

    Raises:
        UsageError: components that do not fit one another, no data, or a model that cannot be loaded.
    """
    task = build_task(recipe.task)
    eval_tasks: list[Task] = []
    if recipe.eval.every:
        from posttrain.training.held_out import build_eval_tasks

        eval_tasks = build_eval_tasks(recipe.task, recipe.eval)
    components = resolve_components(recipe)
    _refuse_inputs(recipe, [task, *eval_tasks])
    choose_kernels(recipe.model.device, recipe.train.deterministic)
    models = build_models(components, task, process_group, eval_tasks)
    method = _build_method(components, models.forward)
    prompting = _build_prompting(recipe, models, folder)
    template = prompting.grader.template
    task, *eval_tasks = _take_rendered([task, *eval_tasks], template, models.tokenizer)
    build_engine = EngineBuilder(models, folder, process_group)
    engine = build_engine(components.engine, components.engine_options, "rollout.engine")
    fields = _build_batch_fields(components, models, method, process_group)
    source: SupervisedSource | RolloutSource
    read: Callable[..., SupervisedSource] | None = None
    if recipe.rollout is None:
        read = _dataset_reader(components, prompting, fields)
        source = read(task, cache=folder)
    else:
        source = build_rollout_source(components, task, prompting, engine, fields)
    evaluator: Evaluator | None = None
    if eval_tasks:
        from posttrain.training.held_out import build_eval_engine

        sampler = prompting.sampler(build_eval_engine(components, engine, build_engine), process_group)
        evaluator = _build_evaluator(components, models, method, eval_tasks, read, sampler)
    warnings = _build_warnings(components, models, [task, *eval_tasks], template)
    parameters, optimizer = _build_optimizer(recipe.optimizer, recipe.train, recipe.head, models)
    facts = describe_run(components, models.loaded, models.policy, prompting.grader, source.num_examples)
    return TrainerState(
        model=models.loaded.model,
        tokenizer=models.tokenizer,
        policy=models.policy,
        method=method,
        heads=models.heads,
        parameters=parameters,
        optimizer=optimizer,
        source=source,
        grader=prompting.grader,
        engine=engine,
        origins=origins_of(models.loaded.source, recipe.teacher, recipe.rewards),
        shards=models.shards,
        reference=models.reference,
        moving=recipe.reference,
        evaluator=evaluator,
        averages=_averages_of(fields.teacher, recipe.train.ema_decay, models.policy, parameters),
        warnings=warnings,
        facts=facts,
        stage=prompting.stage,
    )


def _refuse_inputs(recipe: Recipe, tasks: Sequence[Task]) -> None:
    """Refuse rows that a reward cannot judge, and a teacher of another tokenizer, before a model is loaded."""
    refuse_rows(recipe.rewards, {f"{task.name}, {task.split}": task.examples for task in tasks})
    if recipe.teacher is not None:
        from posttrain.training.parts.teachers import refuse_other_tokenizer

        refuse_other_tokenizer(recipe.teacher, recipe.model)


def results_of(evaluation: Evaluation) -> dict[str, float]:
    """Return the results of an evaluation without the time that it took."""
    return {name: value for name, value in evaluation.results.items() if name != "seconds"}


def _averages_of(
    teacher: Teacher | None, decay: float | None, policy: Forward, parameters: Sequence[tuple[str, Parameter]]
) -> dict[str, WeightAverage]:
    """Return the averages that updates go on with, by their use: of a teacher, and of the recipe."""
    averages: dict[str, WeightAverage] = {}
    if teacher is not None and teacher.average is not None:
        averages["teacher"] = teacher.average
    if decay is not None:
        averages[EMA] = WeightAverage(policy, parameters, decay)
    return averages


def _build_evaluator(
    components: Components,
    models: BuiltModels,
    method: Method,
    tasks: Sequence[Task],
    read: Callable[..., SupervisedSource] | None,
    sampler: Sampler,
) -> Evaluator:
    """Return what evaluates on the held-out tasks; ``read`` makes a source of a supervised recipe's tasks."""
    from posttrain.training.held_out import Evaluator, answer_limit, choose_held_out

    recipe = components.recipe
    held_out: dict[str, HeldOut] = {}
    if read is not None:
        held_out = choose_held_out(read, tasks, components)
    return Evaluator(
        recipe.eval,
        recipe.train,
        answer_limit(recipe.eval, recipe.rollout),
        tasks,
        held_out=held_out,
        method=method,
        sampler=sampler,
        policy=models.policy,
        start=models.start,
        shape=components.shape,
    )


def _dataset_reader(
    components: Components, prompting: Prompting, fields: BatchFields
) -> Callable[..., SupervisedSource]:
    """Return what makes a source of a task's examples, for training and for evaluations."""
    from posttrain.training.sources.dataset import SupervisedSource

    supervised: Callable[..., SupervisedSource] = SupervisedSource
    return partial(
        supervised,
        components.recipe,
        shape=components.shape,
        fields=fields,
        template=prompting.grader.template,
        tokenizer=prompting.tokenizer,
        context_tokens=prompting.context_tokens,
    )


def _build_warnings(
    components: Components, models: BuiltModels, tasks: Sequence[Task], template: Template
) -> list[str]:
    """Return what was built in another way than the recipe says; the first of ``tasks`` is trained."""
    recipe = components.recipe
    of_tasks = dict.fromkeys(line for task in tasks for line in task.warnings)
    notes = option_notes(recipe, components.needs)
    warnings = [*of_tasks, *unread_parts(components, tasks[0]), *notes]
    warnings += describe_other_parts(models.loaded, is_scorer=recipe.trains_scorer)
    warnings += further_ends(models.tokenizer, template)
    warnings += unused_chat_template(recipe.model.name, models.tokenizer, template)
    return [*warnings, *slow_paths(models.policy, recipe.model.attention), *without_formula(components)]


def _build_optimizer(
    component: Component, train: TrainSection, head: HeadSection | None, models: BuiltModels
) -> tuple[list[tuple[str, Parameter]], torch.optim.Optimizer]:
    """Return the trained parameters by name, and their optimizer: over the shards, where the weights are sharded."""
    model: torch.nn.Module = models.loaded.model
    heads = models.heads
    if models.shards is not None:
        model = models.shards.model
        heads = models.shards.heads
    head_lr_ratio = 1.0
    if head is not None:
        head_lr_ratio = head.lr_ratio
    return build_optimizer(component, train, model, heads, head_lr_ratio)


def _take_rendered(tasks: Sequence[Task], template: Template, tokenizer: Tokenizer) -> list[Task]:
    """Return the tasks, the first of which is trained, with the prompts marked that are rendered already."""
    keys = ["task", *(["eval.tasks"] * (len(tasks) - 1))]
    return [take_rendered(task, template, tokenizer, key) for task, key in zip(tasks, keys, strict=True)]


def _build_prompting(recipe: Recipe, models: BuiltModels, folder: Path | None) -> Prompting:
    """Return the grader and the environment of an episode, under one template; ``folder`` is that of the run."""
    template = build_template(recipe.prompt.template)
    stage: Stage | None = None
    if recipe.environment is not None or recipe.tools:
        from posttrain.sampling.episodes import build_stage

        stage = build_stage(recipe, template, models.tokenizer)
        if stage is not None:
            template = stage.template
    grader = build_grader(recipe.rewards, template, folder)
    row_limit = models.context_tokens
    if recipe.rollout is not None:
        row_limit = recipe.rollout.within(row_limit)
    return Prompting(models.tokenizer, models.context_tokens, row_limit, grader, stage)


def _build_method(components: Components, forward: Forward | ActorCritic) -> Method:
    """Return the objective with its options, and with the regularizers where it has a policy term."""
    recipe = components.recipe
    regularizers = recipe.regularize
    objective: Objective = components.objective.bind(recipe.objective.options, "objective")
    if recipe.masks:
        objective = with_masks(objective)
    if regularizers is not None and (regularizers.kl_coef or regularizers.entropy_coef):
        objective = with_regularizers(objective, **regularizers.model_dump())
    aggregate_options: dict[str, Any] = {}
    if recipe.aggregate is not None:
        aggregate_options = recipe.aggregate.options
    has_entropy_term = regularizers is not None and bool(regularizers.entropy_coef)
    return Method(
        forward,
        objective,
        components.aggregation.bind(aggregate_options, "aggregate"),
        level=components.level,
        entropy="differentiable" if has_entropy_term else "detached",
        derive=components.objective.traits.get("derive", dict),
        vanishes=vanishing_fields(components, forward),
        name=recipe.objective.name,
        balancing=build_balancing(recipe.train.router_aux_loss_coef, forward, sharding=recipe.scale.sharding),
    )


def build_rollout_source(
    components: Components, task: Task, prompting: Prompting, engine: Engine, fields: BatchFields
) -> RolloutSource:
    """Return the source of a recipe with ``rollout``.

    Raises:
        UsageError: no prompt is left to sample from, or a part of the reward that there is not.
    """
    from posttrain.training.sources.rollouts import RolloutSource

    options = components.recipe.rollout
    selection = components.selection
    assert options is not None
    assert options.select is not None, "resolved"
    assert selection is not None, "resolved"
    feedback: Feedback | None = None
    if components.teaches_itself:
        from posttrain.training.sources.feedback import Feedback

        template = prompting.grader.template
        own = components.recipe.teacher
        assert own is not None, "the model teaches itself"
        limits = (options.label_above, prompting.context_tokens)
        feedback = Feedback(prompting.tokenizer, template, *limits, own.sees, own.prompt_format)
    advantage_estimator = build_advantage_estimator(components)
    kind: Callable[..., RolloutSource] = RolloutSource
    if options.staleness:
        from posttrain.training.sources.prefetch import PrefetchSource

        kind = partial(PrefetchSource, in_thread=bool(components.engine.traits.get("takes_weights")))
    return kind(
        components.recipe,
        task,
        prompting.grader,
        prompting.tokenizer,
        engine,
        prompting.context_tokens,
        select=selection.bind(options.select.options, "rollout.select"),
        rows_per_unit=2 if components.unit == "pair" else 1,
        advantage_estimator=advantage_estimator,
        fields=fields,
        feedback=feedback,
        stage=prompting.stage,
    )


def _build_batch_fields(
    components: Components, models: BuiltModels, method: Method, process_group: ProcessGroup
) -> BatchFields:
    """Return the filler of batch fields; loads the teacher where another model teaches."""
    recipe = components.recipe
    correct: Callable[..., Any] | None = None
    if recipe.correction is not None:
        entry = registry.find("correction", recipe.correction.name, "correction")
        correct = entry.bind(recipe.correction.options, "correction")
    masks: Sequence[BoundMask] = ()
    if recipe.masks:
        from posttrain.training.parts.masks import bind_masks

        masks = bind_masks(recipe.masks)
    teacher: Teacher | None = None
    if recipe.teacher is not None:
        from posttrain.training.parts.teachers import build_teacher

        teacher = build_teacher(recipe.teacher, recipe.model, models, method.forward)
    return BatchFields(
        components.needs,
        recipe,
        method.forward,
        models.context_tokens,
        models.reference,
        teacher,
        correct,
        process_group,
        vanishes=method.vanishes or (),
        masks=masks,
    )
