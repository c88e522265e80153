"""From a recipe to the parts that the loop turns: model, data, engine, objective, optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from posttrain import registry
from posttrain.engines.base import Engine
from posttrain.engines.rollout import Grader, build_grader
from posttrain.errors import RecipeError, UsageError
from posttrain.models.forward.forward import Forward
from posttrain.models.load import LoadedModel, load_model, quantized_bits
from posttrain.models.lora import apply_adapter, has_adapter
from posttrain.models.sources import resolve_model_name
from posttrain.models.stated_sizes import context_length
from posttrain.models.trained_heads import forward_with_head
from posttrain.randomness import derive_key
from posttrain.recipes.recipe import Recipe, Word
from posttrain.registry import Entry
from posttrain.render import end_id
from posttrain.render.template import build_template
from posttrain.tasks.base import Task, build_task, held_out_task
from posttrain.train.assemble import (
    OWN_TEACHER,
    add_companions,
    build_annotator,
    build_rollout_source,
    supervised_shape,
)
from posttrain.train.optimizer import mark_input_first
from posttrain.train.step import Method
from posttrain.train.streams import TEACHER_STREAMS, Annotator, needed_streams, scoring_temperature

if TYPE_CHECKING:  # a run imports only what its recipe asks for
    from posttrain.models.reference import Reference
    from posttrain.render.rows import Shape
    from posttrain.train.held_out import Evaluator
    from posttrain.train.sources.dataset import SupervisedSource
    from posttrain.train.sources.rollouts import RolloutSource

REFERENCE_CACHE = "reference_logprobs.safetensors"


@dataclass(frozen=True, slots=True)
class Origins:
    """Where the models of a run came from, by key and name: the last part of a checkpoint, a folder, a hub name."""

    model: tuple[str, str]
    teacher: tuple[str, str] | None
    rewards: dict[str, str]

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {
            "model": self.model[1],
            "teacher": None if self.teacher is None else self.teacher[1],
            "rewards": self.rewards,
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuse if a run that is the start, the teacher or a reward here has a better checkpoint by now.

        Raises:
            UsageError: one does not stand for what a checkpoint's ``state`` says.
        """
        named = [("model.name", *self.model, state.get("model"))]
        if self.teacher is not None:
            named.append(("teacher.name", *self.teacher, state.get("teacher")))
        named += [("rewards", run, now, state.get("rewards", {}).get(run)) for run, now in self.rewards.items()]
        for key, name, now, began in named:
            if began not in (None, now):
                raise UsageError(
                    f"{key}: {name!r} stood for {began} when this run began, and stands for {now} now. Point "
                    f"`checkpoints/best` there back to {began}, or start again under another name with --run NAME"
                )


@dataclass(slots=True)
class Parts:
    """Everything that one run's loop turns."""

    model: Any
    tokenizer: Any
    policy: Forward  # the language model's forward pass
    method: Method
    companions: dict[str, torch.nn.Module]  # heads and critics, trained and saved beside the model
    parameters: list[tuple[str, Parameter]]
    optimizer: torch.optim.Optimizer
    source: SupervisedSource | RolloutSource
    grader: Grader
    engine: Engine
    origins: Origins
    reference: Reference | None = None  # the model as it was when training began, where something needs it
    evaluator: Evaluator | None = None

    def score_head(self) -> tuple[Tensor, int] | None:
        """Of a reward model, the weight of its head and the id of the token at which an answer is scored."""
        forward = self.method.forward
        if not isinstance(forward, Forward) or forward.head is None or forward.reads != "at":
            return None
        return forward.head.weight, end_id(self.tokenizer, self.grader.template)

    def split_parameters(self) -> tuple[list[Parameter], list[Parameter]]:
        """(those of the model, with a head on it; those of a critic that shares nothing with it)."""
        if "critic" not in self.companions:
            return [p for _, p in self.parameters], []
        own = {id(p) for p in self.model.parameters()}
        return [p for _, p in self.parameters if id(p) in own], [p for _, p in self.parameters if id(p) not in own]


def prepare(recipe: Recipe, folder: Path | None = None) -> Parts:
    """Build all parts from a resolved recipe; ``folder`` keeps what is computed once for a data set.

    Raises:
        UsageError: words that do not fit one another, no data, a model that cannot be loaded.
    """
    task = build_task(recipe.task)
    eval_tasks = _eval_tasks(recipe) if recipe.eval.every else []
    template = build_template(recipe.prompt.template)
    entry = registry.find("objective", recipe.objective.name, "objective")
    needs = needed_streams(entry, recipe.objective.options, recipe.rollout is not None)
    assert recipe.aggregate is not None, "resolved"
    aggregation = registry.find("aggregation", recipe.aggregate.name, "aggregate")
    _check_words(recipe, entry, needs, entry.traits.get("level", "token"), aggregation)
    loaded = _load_trained(recipe, task)
    model, tokenizer = loaded.model, loaded.tokenizer
    policy = Forward(model, scoring_temperature(recipe, needs))
    forward, companions = forward_with_head(recipe, entry, policy)
    method = Method(
        forward,
        entry.bind(recipe.objective.options, "objective"),
        aggregation.bind(recipe.aggregate.options, "aggregate"),
        level=entry.traits.get("level", "token"),
        entropy="differentiable" if recipe.objective.options.get("entropy_bonus") else "detached",
    )
    grader = build_grader(recipe.rewards, template)
    engine = _build_engine(recipe, model, tokenizer)
    context = context_length(model.config)
    reference = _build_reference(recipe, needs, policy)
    annotate = build_annotator(recipe, needs, forward, policy, reference, tokenizer, context)
    source: SupervisedSource | RolloutSource
    shape = supervised_shape(needs, method.level)
    read: Callable[..., SupervisedSource] | None = None
    if recipe.rollout is None:
        read = _reader(recipe, shape, grader, tokenizer, context, annotate)
        source = read(task, cache=None if folder is None else folder / REFERENCE_CACHE)
    else:
        source = build_rollout_source(recipe, task, grader, tokenizer, engine, context, annotate, method.level)
    evaluator = None
    if eval_tasks:
        from posttrain.train.held_out import Evaluator, choose_held_out

        only_scores = entry.traits.get("head") == "score"
        held_out = choose_held_out(read, eval_tasks, shape, recipe.eval.n, only_scores=only_scores) if read else {}
        answering = (engine, tokenizer, grader, context)
        evaluator = Evaluator(recipe, eval_tasks, held_out, method, *answering, policy, reference)
    named, optimizer = _build_optimizer(recipe, model, companions)
    return Parts(
        model=model,
        tokenizer=tokenizer,
        policy=policy,
        method=method,
        companions=companions,
        parameters=named,
        optimizer=optimizer,
        source=source,
        grader=grader,
        engine=engine,
        origins=_origins(recipe, loaded),
        reference=reference,
        evaluator=evaluator,
    )


def _build_reference(recipe: Recipe, needs: frozenset[str], policy: Forward) -> Reference | None:
    """The model as it is now, where a stream, a penalty or an evaluation reads it."""
    if not (needs & {"ref_logprobs", "kl_baseline"} or recipe.kl_in_reward or recipe.eval.drift_prompts):
        return None
    from posttrain.models.reference import Reference

    return Reference(policy)


def _reader(
    recipe: Recipe, shape: Shape, grader: Grader, tokenizer: Any, context_tokens: int, annotate: Annotator
) -> Callable[..., SupervisedSource]:
    """The recipe's supervised source over whatever task it is given."""
    from posttrain.train.sources.dataset import SupervisedSource

    return partial(
        SupervisedSource,
        recipe,
        template=grader.template,
        tokenizer=tokenizer,
        context_tokens=context_tokens,
        annotate=annotate,
        shape=shape,
    )


def _build_engine(recipe: Recipe, model: Any, tokenizer: Any) -> Engine:
    """What samples: the recipe's engine, or for a supervised recipe's evaluation the one in this process."""
    word = recipe.rollout.engine if recipe.rollout is not None else Word(name="native")
    entry = registry.find("engine", word.name, "rollout.engine")
    if not entry.traits.get("follows_training", True):
        raise RecipeError(
            f"rollout.engine: {word.name!r} samples with weights of its own, which no update reaches; "
            "use native, and this one in `posttrain evaluate`"
        )
    built: Engine = entry.bind(word.options, "rollout.engine")(model, tokenizer)
    return built


def _origins(recipe: Recipe, loaded: LoadedModel) -> Origins:
    teacher = recipe.teacher.name if recipe.teacher is not None and recipe.teacher.name != OWN_TEACHER else None
    rewards: dict[str, str] = {}
    for index, word in enumerate(recipe.rewards):
        option = registry.find("reward", word.name, f"rewards.{index}").traits.get("model_option")
        if option is not None:
            run = str(word.options[option])
            rewards[run] = Path(resolve_model_name(run)).name
    return Origins(
        model=(recipe.model.name, Path(loaded.source).name),
        teacher=None if teacher is None else (teacher, Path(resolve_model_name(teacher)).name),
        rewards=rewards,
    )


def _load_trained(recipe: Recipe, task: Task) -> LoadedModel:
    """The model to train, with a new adapter where the recipe asks for one."""
    loaded = load_model(recipe.model, seed=recipe.train.seed, texts=_texts(task, recipe))
    model = loaded.model
    if recipe.model.adapter is not None:
        if recipe.model.init is not None:
            raise RecipeError("model.adapter: a new model (model.init) has no base on disk that an adapter could name")
        model = apply_adapter(model, recipe.model.adapter, derive_key(recipe.train.seed, "adapter") % (1 << 31))
    bits = quantized_bits(model)
    if bits is not None and not has_adapter(model):
        raise RecipeError(
            f"model.adapter: weights in {bits} bits cannot be trained; give an adapter to train on top of them, "
            "such as model.adapter.rank: 16"
        )
    if recipe.train.gradient_checkpointing:
        from posttrain.models.forward.gradient_checkpointing import checkpointed_layers

        if not checkpointed_layers(model):
            name = type(model).__name__
            raise RecipeError(f"train.gradient_checkpointing: {name} has no layers that can be recomputed")
    model.eval()  # no dropout; that of an adapter is switched on where gradients are computed
    return replace(loaded, model=model)


def _build_optimizer(
    recipe: Recipe, model: Any, companions: dict[str, torch.nn.Module]
) -> tuple[list[tuple[str, Parameter]], torch.optim.Optimizer]:
    """The trained parameters by name, those of heads and critics included, and their optimizer."""
    for module in (model, *companions.values()):
        mark_input_first(module)
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    _check_precision(named)
    entry = registry.find("optimizer", recipe.optimizer.name, "optimizer")
    build = entry.bind(recipe.optimizer.options, "optimizer")
    optimizer = build(named, recipe.train.lr)
    named += add_companions(optimizer, build, companions, recipe)
    return named, optimizer


def _check_words(recipe: Recipe, entry: Entry, needs: frozenset[str], level: str, aggregation: Entry) -> None:
    """Refuse words that do not fit one another, and options that would do nothing."""
    weighs = "token" if level == "token" else "unit"
    if aggregation.traits.get("level", weighs) != weighs:
        raise RecipeError(
            f"aggregate: {aggregation.name!r} weighs {aggregation.traits['level']}s, "
            f"but objective {entry.name!r} gives one value per {level}"
        )
    if recipe.advantage is not None and "advantages" not in needs:
        raise RecipeError(f"advantage: objective {entry.name!r} reads no advantages; leave 'advantage' out")
    if recipe.kl_in_reward is not None and "advantages" not in needs:
        raise RecipeError(f"kl_in_reward: objective {entry.name!r} reads no advantages, so it would see no penalty")
    if recipe.correction is not None and level != "token":
        raise RecipeError(f"correction: it weighs tokens, but objective {entry.name!r} gives one value per {level}")
    if recipe.head is not None and entry.traits.get("head") is None:
        raise RecipeError(f"head: objective {entry.name!r} reads no scores or values; leave 'head' out")
    if recipe.eval.drift_prompts and entry.traits.get("head") == "score":
        raise RecipeError(
            f"eval.drift_prompts: objective {entry.name!r} trains no policy that could drift; leave it out"
        )
    if bool(needs & TEACHER_STREAMS) != (recipe.teacher is not None):
        missing = recipe.teacher is None
        raise RecipeError(
            f"teacher: objective {entry.name!r} learns from a teacher; give teacher.name"
            if missing
            else f"teacher: objective {entry.name!r} reads no teacher; leave 'teacher' out"
        )


def _eval_tasks(recipe: Recipe) -> list[Task]:
    """What to evaluate on, each under a name of its own: a task may be asked for twice, with other options."""
    words = recipe.eval.tasks
    if not words:
        word = held_out_task(recipe.task)
        if word.options["split"] == recipe.task.options.get("split"):
            raise RecipeError(
                f"task.split: training on {word.options['split']!r} leaves nothing of task {recipe.task.name!r} "
                "to evaluate on; train on another split, give eval.tasks, or switch evaluation off with eval.every: 0"
            )
        words = [word]
    tasks: list[Task] = []
    for index, word in enumerate(words):
        task = build_task(word, f"eval.tasks.{index}")
        if any((task.name, task.split) == (other.name, other.split) for other in tasks):
            task = replace(task, name=f"{task.name}-{index + 1}")
        tasks.append(task)
    return tasks


def _check_precision(named: list[tuple[str, Parameter]]) -> None:
    """Trained weights are fp32: beside a bf16 weight of 0.02 an update of 1e-5 is rounded away."""
    coarse = [name for name, p in named if p.dtype not in (torch.float32, torch.float64)]
    if coarse:
        raise RecipeError(
            f"model.dtype: {len(coarse)} trained weights would be bfloat16, where small updates are rounded away; "
            "use model.dtype float32, or train an adapter (model.adapter), whose weights are float32"
        )


def _texts(task: Task, recipe: Recipe) -> Iterator[str] | None:
    """Texts for a new tokenizer, from the first examples of the task."""
    if recipe.model.init is None:
        return None
    examples = islice(iter(task.examples), recipe.model.init.tokenizer.num_documents)
    return (" ".join([*(m.content for m in e.messages), e.solution or ""]).strip() for e in examples)
