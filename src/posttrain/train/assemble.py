"""The parts of a run that follow from the objective: head, critic, annotator, source of rollouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.nn import Module, Parameter
from torch.optim import Optimizer

from posttrain import registry
from posttrain.engines.base import Engine
from posttrain.engines.rollout import Grader
from posttrain.errors import RecipeError, UsageError
from posttrain.models.forward.forward import ActorCritic, Forward
from posttrain.models.load import load_model
from posttrain.recipes.recipe import ModelSection, Recipe, RolloutSection
from posttrain.registry import Entry
from posttrain.tasks.base import Task
from posttrain.train.credit import Credit
from posttrain.train.step import Level
from posttrain.train.streams import Annotator

if TYPE_CHECKING:
    from posttrain.models.reference import Reference
    from posttrain.render.rows import Shape
    from posttrain.train.sources.rollouts import RolloutSource

OWN_TEACHER = "self"


def add_companions(
    optimizer: Optimizer,
    build_optimizer: Callable[..., Optimizer],
    companions: dict[str, Module],
    recipe: Recipe,
) -> list[tuple[str, Parameter]]:
    """Let the optimizer train heads and critics too; returns their parameters by name."""
    if not companions:
        return []
    assert recipe.head is not None
    named = [
        (f"{name}.{n}", p)
        for name, module in companions.items()
        for n, p in module.named_parameters()
        if p.requires_grad
    ]
    of_parameter = {id(p): n for n, p in named}
    for group in build_optimizer(named, recipe.train.lr).param_groups:
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        settings["lr_ratio"] = settings.get("lr_ratio", 1.0) * recipe.head.lr_ratio
        optimizer.add_param_group({"params": [(of_parameter[id(p)], p) for p in group["params"]], **settings})
    return named


def build_annotator(
    recipe: Recipe,
    needs: frozenset[str],
    forward: Forward | ActorCritic,
    policy: Forward,
    reference: Reference | None,
    tokenizer: Any,
    context_tokens: int,
) -> Annotator:
    """What fills the streams; loads the teacher where another model teaches."""
    correct = None
    if recipe.correction is not None:
        entry = registry.find("correction", recipe.correction.name, "correction")
        correct = entry.bind(recipe.correction.options, "correction")
    teacher: Forward | None = None
    if recipe.teacher is not None:
        if recipe.teacher.name == OWN_TEACHER:
            if recipe.rollout is None:
                raise RecipeError("teacher.name: 'self' learns from its own samples; give 'rollout', not 'data'")
            teacher = policy
        else:
            teacher = _load_teacher(recipe, tokenizer, policy.temperature)
    return Annotator(
        forward,
        needs,
        tokens_per_micro=recipe.train.tokens_per_micro,
        rows_per_micro=recipe.train.rows_per_micro,
        old_from=recipe.rollout.old_logprobs if recipe.rollout is not None else "sampler",
        reference=reference,
        teacher=teacher,
        top_k=recipe.teacher.top_k if recipe.teacher is not None else 1,
        context_tokens=context_tokens,
        correct=correct,
    )


def _load_teacher(recipe: Recipe, tokenizer: Any, temperature: float) -> Forward:
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
    return Forward(loaded.model.eval().requires_grad_(False), temperature)


def supervised_shape(needs: frozenset[str], level: Level) -> Shape:
    """What a unit of the data is for an objective."""
    if "step_labels" in needs:
        return "steps"
    if level == "pair":
        return "pair"
    return "judged" if "labels" in needs else "demonstration"


def build_rollout_source(
    recipe: Recipe,
    task: Task,
    grader: Grader,
    tokenizer: Any,
    engine: Engine,
    context_tokens: int,
    annotate: Annotator,
    level: Level,
) -> RolloutSource:
    """The source of a recipe with ``rollout``.

    Raises:
        UsageError: words that do not fit the group, or one another.
    """
    from posttrain.train.sources.rollouts import RolloutSource

    options = recipe.rollout
    assert options is not None
    assert options.select is not None, "resolved"
    if "step_labels" in annotate.needs:
        raise RecipeError("objective: labels of steps come with data, not from rollouts; give 'data'")
    selection = registry.find("selection", options.select.name, "rollout.select")
    unit = selection.traits.get("level", "row")
    if (unit == "pair") != (level == "pair"):
        raise RecipeError(
            f"rollout.select: {selection.name!r} gives {unit}s, but objective {recipe.objective.name!r} wants "
            + ("pairs of answers" if level == "pair" else "single answers")
        )
    credit = _build_credit(recipe, annotate.needs)
    if credit.needs_batch and not selection.traits.get("takes_all"):
        raise RecipeError(
            "rollout.select: advantages per token and kl_in_reward are computed over every completion; "
            "leave rollout.select out"
        )
    _check_labels(options, selection, annotate.needs)
    smallest = 2 if unit == "pair" or options.drop_uniform_groups else 1
    if options.group < smallest:
        what = "a pair needs two answers" if unit == "pair" else "a group of one completion is always uniform"
        key = "rollout.select" if unit == "pair" else "rollout.drop_uniform_groups"
        raise UsageError(f"{key}: {what}; give rollout.group")
    feedback = None
    if recipe.teacher is not None and recipe.teacher.name == OWN_TEACHER:
        from posttrain.train.feedback import Feedback

        feedback = Feedback(tokenizer, grader.template, options.label_above, context_tokens)
    elif "has_feedback" in annotate.needs:
        raise RecipeError(
            f"teacher.name: objective {recipe.objective.name!r} learns from feedback, which only the model itself is "
            f"shown; set teacher.name to {OWN_TEACHER}"
        )
    return RolloutSource(
        recipe,
        task,
        grader,
        tokenizer,
        engine,
        context_tokens,
        select=selection.bind(options.select.options, "rollout.select"),
        rows_per_unit=2 if unit == "pair" else 1,
        credit=credit,
        annotate=annotate,
        feedback=feedback,
    )


def _check_labels(options: RolloutSection, selection: Entry, needs: frozenset[str]) -> None:
    """Refuse two opinions about what is right; a selection says which of its options is one (``labels_by``)."""
    assert options.select is not None, "resolved"
    key = selection.traits.get("labels_by")
    threshold = options.select.options.get(key) if key is not None else None
    if "labels" in needs and threshold is not None and threshold != options.label_above:
        raise RecipeError(
            f"rollout.select.threshold: {threshold} decides what is chosen as right, and rollout.label_above "
            f"{options.label_above} what is labelled as right; give both the same number"
        )


def _build_credit(recipe: Recipe, needs: frozenset[str]) -> Credit:
    if recipe.advantage is None:
        return Credit(None)
    assert recipe.rollout is not None
    entry = registry.find("advantage", recipe.advantage.name, "advantage")
    smallest = entry.traits.get("min_group", 1)
    if recipe.rollout.group < smallest:
        raise UsageError(
            f"rollout.group={recipe.rollout.group}: advantage {entry.name!r} compares completions of one prompt "
            f"and needs at least {smallest}"
        )
    if "old_values" in entry.traits.get("needs", ()) and "old_values" not in needs:
        raise RecipeError(
            f"advantage: {entry.name!r} needs values, which objective {recipe.objective.name!r} does not learn; "
            "use objective ppo (one of your own needs old_values, and head 'value'), or an advantage without values"
        )
    if entry.traits.get("wants_positive") and recipe.kl_in_reward is not None:
        raise RecipeError(
            f"kl_in_reward: a penalty makes rewards negative, and advantage {entry.name!r} divides by their mean; "
            "use the objective's kl instead"
        )
    per_token = entry.traits.get("level") == "token"
    if "returns" in needs and not per_token:
        raise RecipeError(
            f"advantage: objective {recipe.objective.name!r} learns returns, and {entry.name!r} gives none; use gae"
        )
    _check_horizon(recipe)
    bound = entry.bind(recipe.advantage.options, "advantage")
    bootstrap = bool(recipe.advantage.options.get("bootstrap", False))
    return Credit(bound, per_token=per_token, bootstrap=bootstrap, kl=recipe.kl_in_reward)


def _check_horizon(recipe: Recipe) -> None:
    """Refuse a controller so fast that one batch could take its weight to 0."""
    kl, rollout = recipe.kl_in_reward, recipe.rollout
    assert rollout is not None
    batch = rollout.prompts * rollout.group
    if kl is None or kl.target is None:
        return
    from posttrain.algorithms.kl_control import MAX_ERROR

    if kl.horizon <= MAX_ERROR * batch:
        raise RecipeError(
            f"kl_in_reward.horizon={kl.horizon} is too short for batches of {batch} completions: it must be more than "
            f"{MAX_ERROR * batch:g}, and is usually many batches"
        )
