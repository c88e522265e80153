"""Build training components from a recipe: model, data, engine, objective, optimizer."""

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
from posttrain.models.forward.routing.replay import refuse_without_experts
from posttrain.models.load import read_config
from posttrain.models.written.untrained import describe_other_parts
from posttrain.process_group import SINGLE_PROCESS, ProcessGroup, whole
from posttrain.recipes.eval_section import EvalSection
from posttrain.recipes.inert import option_notes
from posttrain.recipes.other_models import HeadSection, TeacherSection
from posttrain.recipes.recipe import Recipe
from posttrain.recipes.sections import Component, DataSection, ModelSection, RolloutSection, TrainSection
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

if TYPE_CHECKING:  # import only modules needed by the recipe
    from posttrain.data.render.rows import Shape
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
    from posttrain.training.sources.units import TaskUnits


@dataclass(slots=True)
class TrainerState:
    """Training loop components."""

    model: Model
    tokenizer: Tokenizer
    policy: Forward  # language model forward pass
    method: Method
    heads: dict[str, torch.nn.Module]  # heads and critics, trained and saved along with the model
    parameters: list[tuple[str, Parameter]]
    optimizer: torch.optim.Optimizer
    source: SupervisedSource | RolloutSource
    grader: Grader
    engine: Engine
    origins: dict[str, Any]  # model origins, stored in checkpoints
    facts: UpdateFacts  # expected update properties
    shards: Shards | None = None  # sharded trained weights; ``model`` and ``heads`` are unsharded
    reference: Reference | None = None  # reference model, if needed
    moving: ReferenceSection | None = None  # moving reference settings
    evaluator: Evaluator | None = None
    averages: Mapping[str, WeightAverage] = field(default_factory=dict)  # weight averages by use
    warnings: Sequence[str] = ()  # differences between the recipe and built components
    stage: Stage | None = None

    @property
    def engines(self) -> list[Engine]:
        """Rollout and evaluation engines, without duplicates."""
        evaluating = self.engine if self.evaluator is None else self.evaluator.sampler.engine
        return [self.engine] if evaluating is self.engine else [self.engine, evaluating]

    def move_reference(self, step: int) -> None:
        """Move the reference after update ``step``, if due."""
        if self.moving is not None and self.reference is not None and step % self.moving.every == 0:
            self.reference.move(self.moving.mixing)

    def reference_tensors(self) -> dict[str, Tensor] | None:
        """Collect moving reference weights for a checkpoint."""
        if self.moving is None or self.reference is None:
            return None
        return self.reference.tensors()

    def take_warnings(self) -> list[str]:
        """Collect pending notices from engines and source."""
        return [message for teller in (*self.engines, self.source) for message in teller.take_warnings()]

    def close(self) -> None:
        """Close all engines and tool servers."""
        for engine in self.engines:
            engine.close()
        if self.stage is not None:
            self.stage.close()

    def score_head(self) -> tuple[Tensor, int] | None:
        """Look up a reward model's head weight and the token id used for scoring; None for other models."""
        forward = self.method.forward
        if not isinstance(forward, Forward) or forward.head is None or forward.reads == "before":
            return None
        return whole(forward.head.weight), end_id(self.tokenizer, self.grader.template)

    def answer_ends(self) -> frozenset[int]:
        """List token ids that end an answer."""
        return stop_ids(self.tokenizer, self.grader.template)

    def split_parameters(self) -> tuple[list[Parameter], list[Parameter]]:
        """Split trained parameters into (model and shared head, separate critic)."""
        if "critic" not in self.heads:
            return [p for _, p in self.parameters], []
        own = {name for name, _ in self.model.named_parameters()}
        return [p for n, p in self.parameters if n in own], [p for n, p in self.parameters if n not in own]

    def learning(self) -> Method:
        """Bind the method to the weights used for gradients."""
        return self.method if self.shards is None else replace(self.method, forward=self.shards.forward)

    def follow_update(self) -> None:
        """Refresh unsharded copies and weight averages after an update."""
        if self.shards is not None:
            self.shards.gather()
        for average in self.averages.values():
            average.update()

    def evaluate_average(self, step: int) -> list[Evaluation]:
        """Evaluate averaged weights (``train.ema_decay``) after ``step`` updates, as ``ema/NAME``, if enabled."""
        average = self.averages.get(EMA)
        if average is None or self.evaluator is None or step == 0:
            return []
        with average.open():
            done = self.evaluator(step)
        return [replace(one, name=f"{EMA}/{one.name}") for one in done]

    def whole_parameters(self) -> list[Tensor]:
        """List trained parameters held unsharded by this process."""
        if self.shards is not None and not self.shards.keeps_whole:
            return []  # each process holds different shards
        return [p for module in (self.model, *self.heads.values()) for p in module.parameters() if p.requires_grad]


@dataclass(frozen=True, slots=True)
class Prompting:
    """Prompt building and grading shared by sources and evaluations.

    ``row_limit``: maximum prompt-plus-answer tokens. ``stage``: environment for multi-turn completions, if configured.
    """

    tokenizer: Tokenizer
    context_tokens: int
    row_limit: int
    grader: Grader
    stage: Stage | None = None

    def sampler(self, engine: Engine, process_group: ProcessGroup) -> Sampler:
        """Build a sampler that generates and grades answers."""
        limit = self.row_limit
        return Sampler(engine, self.tokenizer, self.grader, limit, process_group=process_group, stage=self.stage)


@dataclass(frozen=True, slots=True)
class EngineBuilder:
    """Engine builder for a run's model; ``folder`` is the run folder."""

    models: BuiltModels
    folder: Path | None
    process_group: ProcessGroup

    def __call__(self, entry: Entry, options: dict[str, object], where: str) -> Engine:
        """Build a ready-to-use engine; ``where`` is its recipe key."""
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
    """Build all components in every process; ``folder`` caches fixed dataset computations.

    Raises:
        UsageError: incompatible components, no data, or a model that cannot be loaded.
    """
    task, *eval_tasks = _build_tasks(recipe.task, recipe.eval)
    components = resolve_components(recipe)
    refuse_rows(recipe.rewards, {f"{one.name}, {one.split}": one.examples for one in [task, *eval_tasks]})
    _refuse_models(recipe.model, recipe.teacher, recipe.rollout)
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
    read: Callable[[Task], TaskUnits] | None = None
    if recipe.data is not None:
        read = _unit_reader(recipe.data, recipe.prompt.max_prompt_tokens, components.shape, prompting)
        source = _build_supervised_source(components, read(task), fields, folder)
    else:
        source = build_rollout_source(components, task, prompting, engine, fields)
    evaluator: Evaluator | None = None
    if eval_tasks:
        from posttrain.training.held_out import build_eval_engine, choose_held_out

        sampler = prompting.sampler(build_eval_engine(components, engine, build_engine), process_group)
        held_out: dict[str, HeldOut] = {}
        if read is not None:
            held_out = choose_held_out(read, fields, eval_tasks, components)
        evaluator = _build_evaluator(components, models, method, eval_tasks, held_out, sampler)
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


def _build_tasks(trained: Component, options: EvalSection) -> list[Task]:
    """Build the training task, followed by evaluation tasks."""
    task = build_task(trained)
    if not options.every:
        return [task]
    from posttrain.training.held_out import build_eval_tasks

    return [task, *build_eval_tasks(trained, options)]


def _refuse_models(model: ModelSection, teacher: TeacherSection | None, rollout: RolloutSection | None) -> None:
    """Reject incompatible teacher tokenizers, and router replay without experts, before loading models."""
    if teacher is not None:
        from posttrain.training.parts.teachers import refuse_other_tokenizer

        refuse_other_tokenizer(teacher, model)
    if rollout is None or not rollout.router_replay:
        return
    config = read_config(model)
    if config is not None:
        refuse_without_experts(config)


def results_of(evaluation: Evaluation) -> dict[str, float]:
    """List evaluation results without timing."""
    return {name: value for name, value in evaluation.results.items() if name != "seconds"}


def _averages_of(
    teacher: Teacher | None, decay: float | None, policy: Forward, parameters: Sequence[tuple[str, Parameter]]
) -> dict[str, WeightAverage]:
    """Collect weight averages to update, by use: teacher and EMA."""
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
    held_out: Mapping[str, HeldOut],
    sampler: Sampler,
) -> Evaluator:
    """Build the held-out evaluator; ``held_out``: units for supervised tasks."""
    from posttrain.training.held_out import Evaluator, answer_limit
    from posttrain.training.parts.panel import build_panel

    recipe = components.recipe
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
        panel=build_panel(sampler, recipe.eval.prompts, recipe.train.seed),
    )


def _unit_reader(
    data: DataSection, max_prompt_tokens: int | None, shape: Shape, prompting: Prompting
) -> Callable[[Task], TaskUnits]:
    """Build a function that encodes a supervised task, used for training and evaluation."""
    from posttrain.training.sources.units import TaskUnits, UnitEncoder

    template = prompting.grader.template
    limits = (prompting.context_tokens, max_prompt_tokens)
    encoder = UnitEncoder(prompting.tokenizer, template, data, shape, *limits)
    return lambda task: TaskUnits(task, encoder)


def _build_supervised_source(
    components: Components, units: TaskUnits, fields: BatchFields, folder: Path | None
) -> SupervisedSource:
    """Build the supervised source; ``folder`` caches fields that are computed once."""
    from posttrain.training.sources.dataset import ScoredPlaces, SupervisedSource

    recipe = components.recipe
    assert recipe.data is not None, "supervised recipe"
    scores = components.objective.traits.get("scores")
    scored: ScoredPlaces | None = None
    if scores == "process":
        scored = "steps"
    elif scores == "outcome" and recipe.objective.options.get("positions", "all") == "all":
        scored = "tokens"
    elif scores:
        scored = "last tokens"
    return SupervisedSource(recipe.data, recipe.train, units, fields, folder, scored)


def _build_warnings(
    components: Components, models: BuiltModels, tasks: Sequence[Task], template: Template
) -> list[str]:
    """List differences between recipe and built components. The first entry in ``tasks`` is trained on."""
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
    """Collect trained parameters by name and build an optimizer over them (over shards if weights are sharded)."""
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
    """Mark prompts that are already rendered. The first task is trained on."""
    keys = ["task", *(["eval.tasks"] * (len(tasks) - 1))]
    return [take_rendered(task, template, tokenizer, key) for task, key in zip(tasks, keys, strict=True)]


def _build_prompting(recipe: Recipe, models: BuiltModels, folder: Path | None) -> Prompting:
    """Build grader and episode environment with a shared template; ``folder`` is the run folder."""
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
    """Bind objective options, adding masks and regularizers if configured."""
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
    """Build the rollout source.

    Raises:
        UsageError: no usable prompts, or an unknown reward component.
    """
    from posttrain.training.sources.prompts import Prompts
    from posttrain.training.sources.rollouts import LearningInputs, RolloutSource, UnitSelection

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
    kind: Callable[..., RolloutSource] = RolloutSource
    if options.staleness:
        from posttrain.training.sources.prefetch import PrefetchSource

        kind = partial(PrefetchSource, in_thread=bool(components.engine.traits.get("takes_weights")))
    grader = prompting.grader
    longest_prompt = components.recipe.prompt.max_prompt_tokens
    turn_weight = sum(reward.weight for reward in components.recipe.rewards if reward.name == "turn_rewards")
    return kind(
        options,
        components.recipe.train,
        Prompts(task, prompting.tokenizer, grader.template, prompting.row_limit, longest_prompt),
        prompting.sampler(engine, fields.process_group),
        UnitSelection(selection.bind(options.select.options, "rollout.select"), 2 if components.unit == "pair" else 1),
        LearningInputs(build_advantage_estimator(components), fields, feedback, turn_weight),
    )


def _build_batch_fields(
    components: Components, models: BuiltModels, method: Method, process_group: ProcessGroup
) -> BatchFields:
    """Build batch field computation, and load the teacher if it is a separate model."""
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
