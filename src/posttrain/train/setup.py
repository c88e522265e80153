"""From a recipe to the parts that the loop turns: model, data, engine, objective, optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from posttrain import registry
from posttrain.engines.base import Engine, Sampling
from posttrain.errors import RecipeError, UsageError
from posttrain.evals.generation import task_label
from posttrain.models.forward import Forward, causal_lm
from posttrain.models.load import load_model
from posttrain.models.lora import apply_adapter
from posttrain.randomness import derive_key
from posttrain.recipe import Recipe, Word
from posttrain.render import Template, stop_ids
from posttrain.rollout import Grader, build_grader
from posttrain.tasks.base import Task
from posttrain.train.annotate import Annotator, needed_streams
from posttrain.train.sources import RolloutSource, SupervisedSource
from posttrain.train.update import Objective


@dataclass(slots=True)
class Parts:
    """Everything that one run's loop turns."""

    model: Any
    model_source: str  # the last part of where the weights came from: a checkpoint's step, a folder, a hub name
    tokenizer: Any
    forward: Forward
    parameters: list[tuple[str, Parameter]]
    optimizer: torch.optim.Optimizer
    source: SupervisedSource | RolloutSource
    objective: Objective
    aggregate: Callable[[Tensor], Tensor]
    entropy: Literal["none", "detached", "differentiable"]
    grader: Grader
    engine: Engine
    eval_tasks: list[Task]
    eval_sampling: Sampling
    context_tokens: int


def build_task(word: Word, where: str = "task") -> Task:
    """The task that a recipe names."""
    return registry.find("task", word.name, where).bind(word.options, where)()


def build_template(word: Word, where: str = "prompt.template") -> Template:
    """The prompt template that a recipe names."""
    return registry.find("template", word.name, where).bind(word.options, where)()


def held_out_task(word: Word) -> Word:
    """The evaluation split of a training task, as the task states it (``validation`` or ``test``)."""
    entry = registry.find("task", word.name)
    split = entry.traits.get("held_out")
    if split is None:
        raise RecipeError(f"eval.tasks: task {word.name!r} names no held-out split; give eval.tasks, or eval.every: 0")
    return Word(name=word.name, **(word.options | {"split": split}))


def context_length(model: Any) -> int:
    """The longest sequence that the model's positions reach, in tokens."""
    config = causal_lm(model).config.get_text_config()
    return int(getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", 0) or 1 << 20)


def prepare(recipe: Recipe) -> Parts:
    """Build all parts from a resolved recipe.

    Raises:
        UsageError: words that do not fit one another, no data, a model that cannot be loaded.
    """
    task = build_task(recipe.task)
    eval_tasks = _eval_tasks(recipe) if recipe.eval.every else []
    template = build_template(recipe.prompt.template)
    entry = registry.find("objective", recipe.objective.name, "objective")
    needs = needed_streams(entry, recipe.objective.options, recipe.rollout is not None)
    level = entry.traits.get("level", "token")
    aggregation = registry.find("aggregation", recipe.aggregate.name, "aggregate")
    if aggregation.traits.get("level", level) != level:
        raise RecipeError(
            f"aggregate: {aggregation.name!r} weighs {aggregation.traits['level']}s, "
            f"but objective {entry.name!r} gives one value per {level}"
        )
    loaded = load_model(recipe.model, seed=recipe.train.seed, texts=_texts(task, recipe))
    model, tokenizer = loaded.model, loaded.tokenizer
    if recipe.model.adapter is not None:
        if recipe.model.init is not None:
            raise RecipeError("model.adapter: a new model (model.init) has no base on disk that an adapter could name")
        model = apply_adapter(model, recipe.model.adapter, derive_key(recipe.train.seed, "adapter") % (1 << 31))
    model.eval()  # no dropout; that of an adapter is switched on where gradients are computed
    temperature = recipe.rollout.temperature if recipe.rollout is not None else 1.0
    forward = Forward(model, temperature)
    grader = build_grader(recipe.rewards, template)
    engine_word = recipe.rollout.engine if recipe.rollout is not None else Word(name="native")
    engine = registry.find("engine", engine_word.name).bind(engine_word.options, "rollout.engine")(model, tokenizer)
    source = _source(recipe, task, template, grader, tokenizer, engine, forward, needs)
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    _check_precision(named)
    optimizer_entry = registry.find("optimizer", recipe.optimizer.name, "optimizer")
    optimizer = optimizer_entry.bind(recipe.optimizer.options, "optimizer")(named, recipe.train.lr)
    return Parts(
        model=model,
        model_source=Path(loaded.source).name,
        tokenizer=tokenizer,
        forward=forward,
        parameters=named,
        optimizer=optimizer,
        source=source,
        objective=entry.bind(recipe.objective.options, "objective"),
        aggregate=aggregation.bind(recipe.aggregate.options, "aggregate"),
        entropy="differentiable" if recipe.objective.options.get("entropy_bonus") else "detached",
        grader=grader,
        engine=engine,
        eval_tasks=eval_tasks,
        eval_sampling=Sampling(
            max_tokens=recipe.eval.max_tokens or (recipe.rollout.max_tokens if recipe.rollout else 256),
            temperature=recipe.eval.temperature,
            stop_ids=stop_ids(tokenizer, template),
        ),
        context_tokens=context_length(model),
    )


def _source(
    recipe: Recipe,
    task: Task,
    template: Template,
    grader: Grader,
    tokenizer: Any,
    engine: Engine,
    forward: Forward,
    needs: frozenset[str],
) -> SupervisedSource | RolloutSource:
    if recipe.rollout is None:
        return SupervisedSource(recipe, task, template, tokenizer, context_length(forward.model))
    assert recipe.advantage is not None
    entry = registry.find("advantage", recipe.advantage.name, "advantage")
    smallest = entry.traits.get("min_group", 1)
    if recipe.rollout.group < smallest:
        raise UsageError(
            f"rollout.group={recipe.rollout.group}: advantage {entry.name!r} compares completions of one prompt "
            f"and needs at least {smallest}"
        )
    if recipe.rollout.drop_uniform_groups and recipe.rollout.group < 2:
        raise UsageError("rollout.drop_uniform_groups: a group of one completion is always uniform; give rollout.group")
    annotate = Annotator(
        forward,
        needs,
        old_from=recipe.rollout.old_logprobs,
        tokens_per_micro=recipe.train.tokens_per_micro,
        rows_per_micro=recipe.train.rows_per_micro,
    )
    context = context_length(forward.model)
    advantage = entry.bind(recipe.advantage.options, "advantage")
    return RolloutSource(recipe, task, grader, tokenizer, engine, context, advantage, annotate)


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
        if any(task_label(task) == task_label(other) for other in tasks):
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
