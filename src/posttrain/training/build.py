"""Construction of the components of a run from its recipe: model, data, engine, objective, optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from posttrain import registry
from posttrain.activity import phase
from posttrain.algorithms.objectives.surrogate import with_regularizers
from posttrain.balances.record import UpdateFacts
from posttrain.data.base import Task, build_task, document_texts
from posttrain.data.render import end_id, stop_ids
from posttrain.data.render.template import Template, build_template, further_ends
from posttrain.data.rendered import take_rendered
from posttrain.errors import RecipeError, UsageError
from posttrain.models.config import context_length
from posttrain.models.forward.forward import ActorCritic, Forward
from posttrain.models.forward.precision import choose_kernels
from posttrain.models.load import LoadedModel, choose_device, describe_left_out, load_model, quantized_bits
from posttrain.models.lora import apply_adapter, has_adapter, refuse_whole_weights
from posttrain.models.trained_heads import forward_with_head
from posttrain.process_group import SINGLE_PROCESS, ProcessGroup, whole
from posttrain.randomness import derive_key
from posttrain.recipes.inert import describe_inert_options, expected_narrow_bounds, find_inert_options
from posttrain.recipes.recipe import Recipe
from posttrain.recipes.sections import ModelSection
from posttrain.registry import Entry
from posttrain.sampling.base import Engine
from posttrain.sampling.rollout import Grader, Sampler, build_grader
from posttrain.training.advantages import AdvantageEstimator
from posttrain.training.batch_fields import BatchFields, scoring_temperature
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
from posttrain.training.records.facts import describe_run, without_formula
from posttrain.training.step import Method, Objective, same_digest, weights_digest
from posttrain.types import Model, Tokenizer

if TYPE_CHECKING:  # a run imports only what its recipe asks for
    from posttrain.models.reference import Reference
    from posttrain.sampling.episodes import Stage
    from posttrain.training.distributed import Shards
    from posttrain.training.held_out import Evaluator, HeldOut
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
    reference: Reference | None = None  # the model as it was when training began, where something needs it
    evaluator: Evaluator | None = None
    warnings: Sequence[str] = ()  # about what was built in another way than the recipe says

    @property
    def engines(self) -> list[Engine]:
        """The engines of rollouts and of evaluations, which may be the same."""
        evaluating = self.engine if self.evaluator is None else self.evaluator.sampler.engine
        return [self.engine] if evaluating is self.engine else [self.engine, evaluating]

    def take_warnings(self) -> list[str]:
        """Notices of the engines and of the source."""
        return [message for teller in (*self.engines, self.source) for message in teller.take_warnings()]

    def close(self) -> None:
        """Close the engines."""
        for engine in self.engines:
            engine.close()

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

    def whole_parameters(self) -> list[Tensor]:
        """Return the trained parameters that this process has unsharded."""
        if self.shards is not None and not self.shards.keeps_whole:
            return []  # each has another part
        return [p for module in (self.model, *self.heads.values()) for p in module.parameters() if p.requires_grad]


@dataclass(frozen=True, slots=True)
class BuiltModels:
    """The models of one run, as they are before the first step."""

    loaded: LoadedModel  # the model that is trained, with its tokenizer
    policy: Forward  # its forward pass as a language model
    forward: Forward | ActorCritic  # the forward pass that the objective reads
    heads: dict[str, torch.nn.Module]
    reference: Reference | None
    shards: Shards | None

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the trained model."""
        return self.loaded.tokenizer

    @property
    def context_tokens(self) -> int:
        """The number of tokens that the trained model reads at once."""
        return context_length(self.loaded.model.config)


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
    eval_tasks = _tasks_to_evaluate(recipe)
    components = resolve_components(recipe)
    choose_kernels(recipe.model.device, recipe.train.deterministic)
    models = _build_models(components, task, process_group, eval_tasks)
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
    parameters, optimizer = _build_optimizer(recipe, models)
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
        origins=origins_of(recipe, models.loaded),
        shards=models.shards,
        reference=models.reference,
        evaluator=evaluator,
        warnings=warnings,
        facts=facts,
    )


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
        answer_limit(recipe),
        tasks,
        held_out=held_out,
        method=method,
        sampler=sampler,
        policy=models.policy,
        start=models.reference,
        shape=components.shape,
    )


def _tasks_to_evaluate(recipe: Recipe) -> list[Task]:
    """Return the held-out tasks; none for a recipe that does not evaluate."""
    if not recipe.eval.every:
        return []
    from posttrain.training.held_out import build_eval_tasks

    return build_eval_tasks(recipe)


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
    inert = describe_inert_options(find_inert_options(recipe, components.needs))
    warnings = [*of_tasks, *unread_parts(components, tasks[0]), *inert, *expected_narrow_bounds(recipe)]
    if not recipe.trains_scorer:
        warnings += describe_left_out(models.loaded)
    warnings += further_ends(models.tokenizer, template)
    warnings += unused_chat_template(recipe.model.name, models.tokenizer, template)
    warnings += slow_paths(models.policy, recipe.model.attention)
    warnings += without_formula(components)
    return warnings


def _build_optimizer(recipe: Recipe, models: BuiltModels) -> tuple[list[tuple[str, Parameter]], torch.optim.Optimizer]:
    """Return the trained parameters by name, and their optimizer: over the shards, where the weights are sharded."""
    model: torch.nn.Module = models.loaded.model
    heads = models.heads
    if models.shards is not None:
        model = models.shards.model
        heads = models.shards.heads
    return build_optimizer(recipe, model, heads)


def _take_rendered(tasks: Sequence[Task], template: Template, tokenizer: Tokenizer) -> list[Task]:
    """Return the tasks, the first of which is trained, with the prompts marked that are rendered already."""
    keys = ["task", *(["eval.tasks"] * (len(tasks) - 1))]
    return [take_rendered(task, template, tokenizer, key) for task, key in zip(tasks, keys, strict=True)]


def _build_models(
    components: Components, task: Task, process_group: ProcessGroup, eval_tasks: Sequence[Task]
) -> BuiltModels:
    """Load the model and build its forward passes, the reference and the shards.

    Where no unsharded model is to stay in main memory, the processes of a machine load one after the other.
    """
    recipe = components.recipe
    device = torch.device("cpu")
    if process_group.size > 1:  # a single process asks for its device when it loads
        device = choose_device(recipe.model.device)
    shards: Shards | None = None
    loads_onto: str | None = None
    if recipe.scale.sharding == "fsdp2" and process_group.size > 1:
        from posttrain.training.distributed import Shards

        shards = Shards(process_group, device, keeps_whole=_samples_answers(components, eval_tasks))
        if not shards.keeps_whole:
            loads_onto = "cpu"  # from where it is sharded
    loads_in_turn = loads_onto is not None or device.type == "cuda"
    digest: list[int] = []
    with process_group.in_turn() if loads_in_turn else nullcontext():
        loaded = _load_trained(recipe, task, loads_onto)
        policy = _build_policy(components, loaded)
        forward, heads = forward_with_head(
            components.objective, recipe.objective.options, recipe.head, policy, recipe.train.seed
        )
        reference: Reference | None = None
        if "reference" in components.parts or recipe.eval.num_kl_prompts:
            from posttrain.models.reference import Reference

            reference = Reference(policy)
        if shards is not None:
            if not shards.keeps_whole:
                modules = [forward.model, *heads.values()]
                digest = weights_digest([p for m in modules for p in m.parameters() if p.requires_grad])
            shards.cut(forward, heads)
            if reference is not None and not shards.keeps_whole:
                reference.shard(shards.part)
    if shards is not None:
        same_digest(digest, process_group, "before training")
        shards.choose_paths(policy)
    return BuiltModels(loaded, policy, forward, heads, reference, shards)


def _samples_answers(components: Components, eval_tasks: Sequence[Task]) -> bool:
    """Return whether the trainer's processes sample with the model itself."""
    if components.recipe.rollout is not None or components.shape == "demonstration" or not eval_tasks:
        return components.samples()
    from posttrain.training.held_out import is_read

    return components.samples(all(is_read(task, components.recipe.eval.num_examples) for task in eval_tasks))


def _build_policy(components: Components, loaded: LoadedModel) -> Forward:
    """Return the language model's forward pass, in ``train.precision``.

    Raises:
        RecipeError: TF32 where no GPU multiplies.
    """
    recipe = components.recipe
    device = next(loaded.model.parameters()).device.type
    coarse = recipe.train.precision != "fp32"
    if recipe.train.precision == "tf32" and device != "cuda":
        raise RecipeError(f"train.precision: tf32 is how a GPU of NVIDIA multiplies; on {device} use fp32 or bf16")
    # of this process: products that stay in fp32 (the LM head's, with bf16) take TF32 on a GPU then, and no others
    torch.set_float32_matmul_precision("high" if coarse and device == "cuda" else "highest")
    return _forward(loaded.model, recipe.train.precision, scoring_temperature(recipe.rollout, components.needs))


def _forward(model: Model, precision: str, temperature: float) -> Forward:
    if precision == "bf16":
        return Forward(model, temperature, precision="bf16")
    return Forward(model, temperature, precision="fp32")  # with tf32 the GPU rounds, not the pass


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
    row_limit = recipe.within(models.context_tokens)
    return Prompting(models.tokenizer, models.context_tokens, row_limit, grader, stage)


def _build_method(components: Components, forward: Forward | ActorCritic) -> Method:
    """Return the objective with its options, and with the regularizers where it has a policy term."""
    recipe = components.recipe
    regularizers = recipe.regularize
    objective: Objective = components.objective.bind(recipe.objective.options, "objective")
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
        feedback = Feedback(prompting.tokenizer, template, options.label_above, prompting.context_tokens)
    advantage_estimator = _build_advantage_estimator(components)
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
        keeps_unscored=components.keeps_unscored,
    )


def _build_advantage_estimator(components: Components) -> AdvantageEstimator:
    """Return the estimator of the recipe's ``advantage``; without one it estimates nothing."""
    recipe = components.recipe
    if recipe.advantage is None or components.advantage is None:
        return AdvantageEstimator(None)
    options = recipe.advantage.options
    return AdvantageEstimator(
        components.advantage.bind(options, "advantage"),
        per_token=components.per_token,
        per_turn=components.per_turn,
        bootstrap=bool(options.get("bootstrap", False)),
        kl=recipe.kl_in_reward,
        drops_rounding=recipe.train.skip_zero_rows,
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
    teacher: Forward | None = None
    if recipe.teacher is not None:
        if components.teaches_itself:
            teacher = models.policy
        else:
            teacher = _load_teacher(recipe, models.tokenizer, models.policy.temperature)
        learners: list[Forward | ActorCritic] = [models.policy, method.forward]
        if models.shards is not None:
            learners.append(models.shards.forward)
        _compare_over_shared_ids(learners, teacher, models.tokenizer, is_own=components.teaches_itself)
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
    )


def _compare_over_shared_ids(
    learners: Sequence[Forward | ActorCritic], teacher: Forward, tokenizer: Tokenizer, *, is_own: bool
) -> None:
    """Let student and teacher give probabilities over the ids that the tokenizer and both of them have.

    Embeddings are padded to other sizes within one family, and what is beyond the tokenizer means nothing.
    """
    students = [one.policy if isinstance(one, ActorCritic) else one for one in learners]
    num_ids = min(max(tokenizer.get_vocab().values()) + 1, teacher.num_rows, *(one.num_rows for one in students))
    if not is_own:
        teacher.restrict(num_ids, targets=True)
    for student in students:
        student.restrict(num_ids)


def _load_teacher(recipe: Recipe, tokenizer: Tokenizer, temperature: float) -> Forward:
    assert recipe.teacher is not None
    section = ModelSection(
        name=recipe.teacher.name,
        dtype=recipe.teacher.dtype or recipe.model.dtype,
        device=recipe.model.device,
        trust_remote_code=recipe.teacher.trust_remote_code,
    )
    loaded = load_model(section, seed=0)
    if loaded.tokenizer.get_vocab() != tokenizer.get_vocab():
        raise UsageError(
            f"teacher.name: {recipe.teacher.name!r} has another vocabulary than the student; probabilities of tokens "
            "can only be compared within one. Choose a teacher of the same family"
        )
    return _forward(loaded.model.eval().requires_grad_(False), recipe.train.precision, temperature)


def _load_trained(recipe: Recipe, task: Task, device: str | None = None) -> LoadedModel:
    """Return the model to train, with a new adapter where the recipe has one; ``device``: in place of the recipe's."""
    section = recipe.model if device is None else recipe.model.model_copy(update={"device": device})
    texts: Iterator[str] | None = None
    if recipe.model.init is not None:  # for a new tokenizer
        texts = document_texts(task.examples, recipe.model.init.tokenizer.num_documents)
    loaded = load_model(section, seed=recipe.train.seed, texts=texts)
    model = loaded.model
    if recipe.model.adapter is not None:
        model = apply_adapter(model, recipe.model.adapter, derive_key(recipe.train.seed, "adapter") % (1 << 31))
    elif has_adapter(model):
        refuse_whole_weights(model, loaded.source)
    bits = quantized_bits(model)
    if bits is not None and not has_adapter(model):
        raise RecipeError(
            f"model.adapter: weights in {bits} bits cannot be trained; give an adapter to train on top of them, "
            "such as model.adapter.rank: 16"
        )
    if bits is not None and recipe.scale.sharding != "none":
        raise RecipeError(f"scale.sharding: weights in {bits} bits cannot be sharded; use sharding none")
    if recipe.train.gradient_checkpointing:
        from posttrain.models.forward.gradient_checkpointing import checkpointed_layers

        if not checkpointed_layers(model):
            name = type(model).__name__
            raise RecipeError(f"train.gradient_checkpointing: {name} has no layers that can be recomputed")
    model.eval()  # no dropout; that of an adapter is switched on where gradients are computed
    return replace(loaded, model=model)
