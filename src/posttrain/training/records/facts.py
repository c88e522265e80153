"""Facts about a run used by balance checks, from its recipe and built components."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from posttrain.balances.advantages import formulas_of_advantages
from posttrain.balances.limits import kl_limit
from posttrain.balances.losses import OF_DISTRIBUTIONS, formulas_of_losses
from posttrain.balances.masks import formulas_of_masks
from posttrain.balances.record import (
    Formula,
    MaskFacts,
    OptimizerFacts,
    PenaltyFacts,
    ReferenceFacts,
    RouterFacts,
    SamplingFacts,
    UpdateFacts,
)
from posttrain.balances.weights import formulas_of_weights
from posttrain.data.render import stop_ids
from posttrain.models.config import context_length
from posttrain.models.forward.forward import Forward, causal_lm
from posttrain.models.forward.routing.routers import configured_coefficient, find_routers
from posttrain.models.load import LoadedModel
from posttrain.recipes.sections import MIXTURE, Component, RolloutSection, TrainSection
from posttrain.sampling.base import MOST_KEPT
from posttrain.sampling.rollout import Grader
from posttrain.training.batch_fields import comes_from_rollouts, replays_sets
from posttrain.training.checks import Components
from posttrain.training.mismatch import has_dropout

TURN_REWARD = "turn_rewards"
RUBRIC = "rubric"  # reward, its part, and the default key of its criteria
UNKNOWN_LAYERS = 32


def describe_run(
    components: Components, loaded: LoadedModel, policy: Forward, grader: Grader, num_rows: int
) -> UpdateFacts:
    """Describe how updates should behave for a resolved recipe.

    Args:
        loaded: trained model and tokenizer; ``policy`` is its forward pass.
        num_rows: number of prompts or data units.
    """
    recipe = components.recipe
    num_examples: int | None = num_rows
    if recipe.task.name == MIXTURE:
        num_examples = None  # mixture parts count passes separately
    trainer, sampler = _kinds(components, policy.device.type)
    sampling: SamplingFacts | None = None
    updates = 1
    if recipe.rollout is not None:
        updates = recipe.train.updates_per_batch
        sampling = replace(
            _describe_sampling(components, recipe.rollout),
            rewards={name: weight for name, weight, _ in grader.rewards},
            stop_ids=tuple(sorted(stop_ids(loaded.tokenizer, grader.template))),
            context=recipe.rollout.within(context_length(loaded.model.config)),
            num_examples=num_examples,
        )
    reference: ReferenceFacts | None = None
    if recipe.reference is not None:
        reference = ReferenceFacts(recipe.reference.every, recipe.reference.mixing)
    regularizers: dict[str, Any] = {}
    if recipe.regularize is not None:
        regularizers = recipe.regularize.model_dump()
    assert recipe.aggregate is not None, "resolved"
    num_layers = getattr(policy.model.config.get_text_config(), "num_hidden_layers", UNKNOWN_LAYERS)
    return UpdateFacts(
        Formula(recipe.objective.name, recipe.objective.options),
        Formula(recipe.aggregate.name, recipe.aggregate.options),
        advantage=_formula(recipe.advantage),
        correction=_formula(recipe.correction),
        masks=tuple(MaskFacts(one.name, one.options, one.divisor) for one in recipe.masks),
        **regularizers,
        reference=reference,
        routers=_describe_routers(recipe.train.router_aux_loss_coef, policy),
        level=components.level,
        sampling=sampling,
        optimizer=_describe_optimizer(recipe.optimizer, recipe.train),
        sampler_limit=kl_limit(num_layers, *trainer, *sampler),
        trainer_limit=kl_limit(num_layers, *trainer),
        updates=updates,
        num_minibatches=recipe.train.num_minibatches,
        has_dropout=has_dropout(policy.model),
        num_given=None if recipe.data is None else num_examples,
    )


def _describe_routers(coefficient: float | None, policy: Forward) -> RouterFacts | None:
    """Describe routers trained with an auxiliary loss; None without one."""
    base = causal_lm(policy.model)
    if coefficient is None:
        coefficient = configured_coefficient(base)
    routers = None
    if coefficient:
        routers = find_routers(base)
    if routers is None:
        return None
    return RouterFacts(len(routers.modules), int(base.config.get_text_config().num_experts_per_tok))


def _formula(component: Component | None) -> Formula | None:
    if component is None:
        return None
    return Formula(component.name, component.options)


def _kinds(components: Components, device: str) -> tuple[list[str], list[str]]:
    """List number formats used by trainer and sampler (``limits.UNITS``)."""
    recipe = components.recipe
    both: list[str] = [recipe.model.dtype]
    if recipe.model.load_bits == 8:
        both.append("int8")  # activations are quantized together with other rows
    trainer = list(both)
    if recipe.train.precision != "fp32":
        trainer.append(recipe.train.precision)
    sampler = list(both)
    if components.engine.name != "native":
        sampler.append(str(components.engine_options.get("dtype", recipe.model.dtype)))
    if recipe.train.precision != "fp32" and device == "cuda":
        sampler.append("tf32")  # process-wide setting, so it also affects sampling
    return trainer, sampler


def _describe_sampling(components: Components, rollout: RolloutSection) -> SamplingFacts:
    recipe = components.recipe
    penalty: PenaltyFacts | None = None
    if recipe.kl_in_reward is not None:
        of_reward = recipe.kl_in_reward
        penalty = PenaltyFacts(of_reward.estimator, of_reward.weight, of_reward.target, of_reward.horizon)
    takes_all = components.selection is not None and bool(components.selection.traits.get("takes_all"))
    reads_samples = any(comes_from_rollouts(name) for name in components.needs)
    replays = replays_sets(rollout, components.needs)
    samples = components.engine.traits.get("samples", True)
    rubrics = [reward for reward in recipe.rewards if reward.name == RUBRIC]
    rubric_key: str | None = None
    if len(rubrics) == 1:
        rubric_key = str(rubrics[0].options.get("key", RUBRIC))
    return SamplingFacts(
        num_prompts=rollout.num_prompts,
        group_size=rollout.group_size,
        max_tokens=rollout.max_tokens,
        takes_all=takes_all,
        keeps_unscored=components.keeps_unscored,
        masks_truncated=rollout.mask_truncated,
        divides_all=rollout.truncated_divisor == "all",
        redraws=rollout.drop_uniform_groups,
        is_cut=(rollout.is_truncated and not replays) or (rollout.has_rules and not reads_samples),
        replays=replays,
        has_stop_texts=bool(rollout.stop),
        ignores_rules=rollout.has_rules and not reads_samples,
        most_kept=min(rollout.top_k or MOST_KEPT, MOST_KEPT) if replays else None,
        has_turns=recipe.environment is not None or bool(recipe.tools),
        turn_weight=sum(reward.weight for reward in recipe.rewards if reward.name == TURN_REWARD),
        staleness=rollout.staleness,
        old_from_trainer=rollout.old_logprobs == "trainer",
        temperature=rollout.temperature,
        at_scored_temperature=(rollout.temperature == 1.0 and not rollout.has_rules) or reads_samples,
        draws=bool(samples),
        penalty=penalty,
        rubric=RUBRIC if rubric_key is not None else None,
        rubric_key=rubric_key,
    )


def _describe_optimizer(component: Component, train: TrainSection) -> OptimizerFacts:
    return OptimizerFacts(
        component.name,
        train.lr,
        train.steps,
        train.warmup_steps,
        train.schedule,
        train.min_lr_ratio,
        train.max_grad_norm,
        component.options,
    )


def of_steps(facts: UpdateFacts, steps: int) -> UpdateFacts:
    """Set the number of steps."""
    assert facts.optimizer is not None
    return replace(facts, optimizer=replace(facts.optimizer, steps=steps))


def without_formula(components: Components) -> list[str]:
    """Notify about custom components that balance checks cannot recompute, if any."""
    recipe = components.recipe
    chosen = {
        "objective": recipe.objective,
        "aggregate": recipe.aggregate,
        "advantage": recipe.advantage,
        "correction": recipe.correction,
    }
    chosen |= {f"masks.{number}": mask for number, mask in enumerate(recipe.masks)}
    aggregations, corrections = formulas_of_weights()
    known = formulas_of_losses() | OF_DISTRIBUTIONS | aggregations | corrections | formulas_of_advantages()
    known |= formulas_of_masks()
    names = []
    for key, component in chosen.items():
        if component is not None and component.name not in known:
            names.append(f"{key} {component.name}")
    if not names:
        return []
    return [f"balances: {', '.join(names)} cannot be recomputed (custom code); recorded values are used unchecked"]
