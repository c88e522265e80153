"""Supervised sources without batch fields, for tests of rows and batches."""

from __future__ import annotations

from typing import Any

from posttrain import registry
from posttrain.data.base import Task
from posttrain.data.render import Template
from posttrain.data.render.rows import Shape
from posttrain.recipes.recipe import Recipe
from posttrain.training.sources.dataset import ScoredPlaces, SupervisedSource
from posttrain.training.sources.units import TaskUnits, UnitEncoder


def encoder_of(recipe: Recipe, template: Template, tokenizer: Any, context_tokens: int, shape: Shape) -> UnitEncoder:
    """The encoder of a supervised recipe."""
    assert recipe.data is not None
    return UnitEncoder(tokenizer, template, recipe.data, shape, context_tokens, recipe.prompt.max_prompt_tokens)


def supervised_source(
    recipe: Recipe,
    task: Task,
    template: Template,
    tokenizer: Any,
    context_tokens: int,
    shape: Shape = "demonstration",
) -> SupervisedSource:
    """The source of a supervised recipe, without batch fields."""
    assert recipe.data is not None
    units = TaskUnits(task, encoder_of(recipe, template, tokenizer, context_tokens, shape))
    scores = (registry.traits_of("objective", recipe.objective.name) or {}).get("scores")
    kinds: dict[Any, ScoredPlaces | None] = {None: None, "process": "steps", "outcome": "tokens"}
    return SupervisedSource(recipe.data, recipe.train, units, scored=kinds.get(scores, "last tokens"))
