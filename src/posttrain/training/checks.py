"""Compatibility rules between recipe components and sections.

Each rule is (violated, key, message with a remedy). No model is loaded. Rules between sections are in
``Recipe.rules``, rules within a section in ``recipes/sections``, and rules that need a loaded model in ``build``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain import registry
from posttrain.data.base import Task, eval_components
from posttrain.errors import RecipeError
from posttrain.other_names import answer_value
from posttrain.recipes.document import Rule
from posttrain.recipes.recipe import Recipe
from posttrain.recipes.sections import Component, RolloutSection
from posttrain.registry import Entry
from posttrain.sampling.base import MOST_KEPT
from posttrain.training.batch_fields import (
    comes_from_rollouts,
    fillers,
    follows_rules,
    needed_fields,
    replays_sets,
    with_their_needs,
)

if TYPE_CHECKING:
    from posttrain.data.render.rows import Shape
    from posttrain.data.render.template import Template
    from posttrain.models.forward.actor_critic import ActorCritic
    from posttrain.models.forward.forward import Forward
    from posttrain.training.step import Level
    from posttrain.types import Tokenizer

OWN_TEACHER = "self"
SHARDED_OPTIMIZERS = ("adamw", "muon")


@dataclass(frozen=True)
class Components:
    """Resolved recipe with registry entries for its components.

    needs: required batch fields including dependencies. level: unit for objective values. unit: selection unit, row or
    pair. per_token, per_turn, of_parts: advantage inputs.
    """

    recipe: Recipe
    objective: Entry
    needs: frozenset[str]
    level: Level
    aggregation: Entry
    engine: Entry
    engine_options: dict[str, object]
    advantage: Entry | None
    selection: Entry | None
    unit: str
    per_token: bool
    per_turn: bool
    of_parts: bool

    @property
    def keeps_unscored(self) -> bool:
        """True if unscored answers stay in the batch with advantage 0, as in TRL.

        Not possible if rewards drive selection, are assigned to tokens or turns, or are used by the objective.
        """
        if self.selection is None or not self.selection.traits.get("takes_all"):
            return False
        reads_rewards = not {"rewards", "labels", "margins"}.isdisjoint(self.needs)
        return self.advantage is not None and not (self.per_token or self.per_turn or reads_rewards)

    @property
    def shape(self) -> Shape:
        """Data unit expected by the objective."""
        if "step_labels" in self.needs:
            return "steps"
        if self.level == "pair":
            return "pair"
        if "labels" in self.needs:
            return "judged"
        return "demonstration"

    @property
    def parts(self) -> frozenset[str]:
        """Models used by batch fields: ``reference``, ``teacher``, ``critic``, ..."""
        return frozenset(part for entry in fillers(self.needs, "the recipe") for part in entry.provided)

    @property
    def needs_start(self) -> bool:
        """True if any component uses the initial model, or a moving reference that starts there."""
        teacher = self.recipe.teacher
        is_taught_by_start = self.teaches_itself and teacher is not None and teacher.weights == "start"
        return is_taught_by_start or "reference" in self.parts or bool(self.recipe.eval.num_kl_prompts)

    @property
    def only_scores(self) -> bool:
        """True if training a reward model, which generates no answers."""
        return bool(self.objective.traits.get("head") == "score")

    def samples(self, reads: bool | None = None) -> bool:
        """Check if trainer processes sample with the model, for rollouts or evaluation.

        ``reads``: True if evaluations only read given responses; derived from the recipe by default.
        """
        has_rollouts = self.recipe.rollout is not None
        options = self.recipe.eval
        if reads is None:
            reads = not has_rollouts and self.shape != "demonstration"
        if has_rollouts and not self.engine.traits.get("takes_weights"):
            return True
        writes_answers = bool(options.every) and (not reads or bool(options.num_kl_prompts or options.prompts))
        if not writes_answers:
            return False
        engine = self.engine
        if options.engine is not None:
            engine = registry.find("engine", options.engine.name, "eval.engine")
        return not engine.traits.get("takes_weights")

    @property
    def teaches_itself(self) -> bool:
        """True if the trained model is also the teacher."""
        return self.recipe.teacher is not None and self.recipe.teacher.name == OWN_TEACHER


def resolve_components(recipe: Recipe) -> Components:
    """Look up the components for a resolved recipe and check compatibility.

    Raises:
        RecipeError: first violated rule.
    """
    objective = registry.find("objective", recipe.objective.name, "objective")
    assert recipe.aggregate is not None, "resolved"
    rollout = recipe.rollout
    engine = Component(name="native")  # supervised recipes also sample during evaluation
    if rollout is not None:
        engine = rollout.engine
    advantage: Entry | None = None
    if recipe.advantage is not None:
        advantage = registry.find("advantage", recipe.advantage.name, "advantage")
    selection: Entry | None = None
    if rollout is not None and rollout.select is not None:
        selection = registry.find("selection", rollout.select.name, "rollout.select")
    kl = 0.0
    if recipe.regularize is not None:
        kl = recipe.regularize.kl_coef
    needs = needed_fields(objective, recipe.objective.options, rollout is not None, kl)
    if kl > 0 and recipe.regularize is not None and recipe.regularize.kl_estimator == "k3_weighted":
        needs |= {"old_logprobs"}
    if recipe.kl_in_reward is not None:
        needs |= {"ref_logprobs"}
    if recipe.correction is not None:
        needs |= {"correction"}
    if recipe.masks:
        from posttrain.training.parts.masks import fields_of_masks

        needs |= fields_of_masks(recipe.masks)
    components = Components(
        recipe=recipe,
        objective=objective,
        needs=with_their_needs(needs),
        level=objective.traits.get("level", "token"),
        aggregation=registry.find("aggregation", recipe.aggregate.name, "aggregate"),
        engine=registry.find("engine", engine.name, "rollout.engine"),
        engine_options=engine.options,
        advantage=advantage,
        selection=selection,
        unit="row" if selection is None else selection.traits.get("level", "row"),
        per_token=advantage is not None and advantage.traits.get("level") == "token",
        per_turn=advantage is not None and advantage.traits.get("level") == "turn",
        of_parts=advantage is not None and advantage.traits.get("level") == "parts",
    )
    if recipe.eval.every:
        eval_components(recipe.task, recipe.eval.tasks)
    tables = (_of_objective, _of_engines, _of_rollouts, _of_scale, _of_rewards)
    for table in tables:
        for broken, key, message in table(components):
            if broken:
                raise RecipeError(f"{key}{message}")
    return components


def unread_parts(components: Components, task: Task) -> list[str]:
    """List notices about unused margins and unused dataset answers."""
    lines = []
    has_margins = ("margin", "read") in task.keys
    if has_margins and components.shape == "pair" and "margins" not in components.needs:
        name = components.recipe.objective.name
        lines.append(
            f"margin: objective {name!r} ignores the dataset's margins; bradley_terry uses them with margin: true"
        )
    is_sampled = components.recipe.rollout is not None and components.shape != "demonstration"
    teacher = components.recipe.teacher
    is_sampled = is_sampled and (teacher is None or teacher.sees != "response")
    if is_sampled and any(example.responses for example in islice(task.examples, 1)):
        lines.append(
            f"rollout: training uses sampled answers, so dataset answers for task {task.name!r} are ignored; "
            "to train on them, use a recipe with 'data' instead of 'rollout', such as dpo-preferences"
        )
    return lines


def _of_objective(w: Components) -> Iterator[Rule]:
    """Yield rules for the objective and its inputs."""
    recipe = w.recipe
    objective = f"objective {w.objective.name!r}"
    one_value = f"but {objective} gives one value per {w.level}"
    unit = "token" if w.level == "token" else "unit"
    weighed = w.aggregation.traits.get("level", unit)
    yield weighed != unit, "aggregate", f": {w.aggregation.name!r} weighs {weighed}s, {one_value}"
    is_blind = "advantages" not in w.needs
    no_advantages = f": {objective} uses no advantages; remove 'advantage'"
    yield recipe.advantage and is_blind, "advantage", no_advantages
    no_penalty = f": {objective} uses no advantages, so the penalty would have no effect; remove 'kl_in_reward'"
    yield recipe.kl_in_reward and is_blind, "kl_in_reward", no_penalty
    yield recipe.correction and w.level != "token", "correction", f": it weighs tokens, {one_value}"
    is_policy = w.objective.traits.get("policy_term") and w.objective.traits.get("head") is None
    no_term = f": masks exclude tokens from a policy loss, but {objective} has no separate policy loss; use grpo"
    yield recipe.masks and not is_policy, "masks", no_term
    head = w.objective.traits.get("head")
    yield recipe.head and head is None, "head", f": {objective} uses no scores or values; remove 'head'"
    unread = f": {objective} uses no reference, and regularize.kl_coef is 0; remove 'reference'"
    yield recipe.reference and "reference" not in w.parts, "reference", unread
    yield from _of_evaluation(w, objective)
    yield from _of_fields(w, objective)
    yield from _of_data(w, objective)
    weights = w.objective.traits.get("weights", ())
    is_idle = bool(weights) and all(recipe.objective.options.get(name) == 0 for name in weights)
    idle = f": {objective} trains nothing, because {', '.join(weights)} are all 0; set one of them above 0"
    yield is_idle, "objective", idle
    vanishes = w.objective.traits.get("vanishes", ())
    names_fields = isinstance(vanishes, tuple) and w.needs >= set(vanishes)
    fields = f": {objective} is registered with vanishes={vanishes!r}; give a tuple of batch fields that it needs"
    yield not names_fields, "objective", fields


def _of_evaluation(w: Components, objective: str) -> Iterator[Rule]:
    """Yield rules for evaluations unsupported by this objective."""
    options = w.recipe.eval
    no_drift = f": {objective} trains no policy, so KL cannot be measured; remove the key"
    yield options.num_kl_prompts and w.only_scores, "eval.num_kl_prompts", no_drift
    mute = ": reward models generate no answers; remove the key"
    yield options.samples > 1 and w.only_scores, "eval.samples", mute
    yield bool(options.prompts) and w.only_scores, "eval.prompts", mute
    imitates = w.recipe.data is not None and w.shape == "demonstration"
    of_demonstrations = ": held-out loss needs demonstrations in 'data'; remove the key"
    yield options.loss and not imitates, "eval.loss", of_demonstrations


def _of_fields(w: Components, objective: str) -> Iterator[Rule]:
    """Yield rules for sections that provide objective inputs: teacher, critic, correction, advantage."""
    recipe = w.recipe
    is_taught = bool(w.parts & {"teacher", "seen"})
    yield is_taught and recipe.teacher is None, "teacher", f": {objective} needs a teacher; give teacher.name"
    yield recipe.teacher and not is_taught, "teacher", f": {objective} uses no teacher; remove 'teacher'"
    has_values = w.objective.traits.get("head") == "value"
    valued = f': {objective} uses critic values; register it with head="value"'
    yield "critic" in w.parts and not has_values, "objective", valued
    corrected = f": {objective} needs a correction; give correction.name"
    yield "correction" in w.needs and not recipe.correction, "correction", corrected
    credited = f": a batch field of {objective} needs advantages; give 'advantage'"
    yield "advantages" in w.needs and not recipe.advantage, "advantage", credited
    yield from _of_own_teacher(w)


def _of_own_teacher(w: Components) -> Iterator[Rule]:
    """Yield rules for self-teaching."""
    teacher = w.recipe.teacher
    if teacher is None:
        return
    samples = ": 'self' needs sampled answers; give 'rollout' instead of 'data'"
    yield w.teaches_itself and w.recipe.rollout is None, "teacher.name", samples
    of_another = f": only for self-teaching; set teacher.name to {OWN_TEACHER}, or remove the key"
    for key, usual in (("sees", "right_sample"), ("weights", "live"), ("prompt_format", None)):
        is_unusual = getattr(teacher, key) != usual
        yield is_unusual and not w.teaches_itself, f"teacher.{key}", of_another
    single = w.recipe.rollout is not None and w.recipe.rollout.group_size < 2
    others = ": a single-answer group has no other sample to show; increase the group size, or set teacher.sees"
    sees_samples = w.teaches_itself and teacher.sees == "right_sample"
    yield sees_samples and single, "rollout.group_size", others


def _of_data(w: Components, objective: str) -> Iterator[Rule]:
    """Yield rules for the trained model and data units."""
    recipe = w.recipe
    base = ": an adapter needs a base model on disk, but model.init creates a new one; remove one key"
    yield recipe.model.adapter and recipe.model.init, "model.adapter", base
    is_shared = recipe.head is not None and recipe.head.trunk == "shared"
    shares = ": reward heads always share the trained model; remove the key"
    yield w.only_scores and is_shared, "head.trunk", shares
    if recipe.data is None:
        return
    chosen = recipe.data.train_on
    judges = f": {chosen!r} applies to demonstrations, but {objective} judges answers; remove the key"
    yield chosen in ("all", "assistant") and w.shape != "demonstration", "data.train_on", judges
    unread = f": {objective} uses no labels; remove the key"
    yield recipe.data.label_above is not None and w.shape != "judged", "data.label_above", unread


def _of_engines(w: Components) -> Iterator[Rule]:
    """Yield rules for engines, and for tasks without questions."""
    recipe = w.recipe
    elsewhere = ": {!r} samples with fixed weights; use native here, and this engine only to evaluate"
    follows = w.engine.traits.get("follows_training", True)
    yield not follows, "rollout.engine", elsewhere.format(w.engine.name)
    is_unplayed = recipe.environment is None and not recipe.tools
    gives = "give 'environment'"
    if recipe.rollout is None:
        gives = "recipes with 'data' have no environment; choose another task"
    tasks = {"task": recipe.task}
    for index, task in enumerate(recipe.eval.tasks):
        tasks[f"eval.tasks.{index}"] = task
    for key, component in tasks.items():
        traits = registry.traits_of("task", component.name) or {}
        is_played = traits.get("played")
        yield is_played and is_unplayed, key, f": {component.name!r} needs an environment to ask questions; {gives}"
    evaluating = recipe.eval.engine
    if evaluating is not None:
        head = ": reward models generate no answers; remove the key"
        yield w.only_scores, "eval.engine", head
        engine = registry.find("engine", evaluating.name, "eval.engine")
        follows = engine.traits.get("follows_training", True)
        yield not follows, "eval.engine", elsewhere.format(engine.name)
    else:
        engine = w.engine
    options = recipe.eval
    changed = {"min_tokens": options.min_tokens > 0, "repetition_penalty": options.repetition_penalty != 1}
    for key, is_set in (changed | {"stop": bool(options.stop)}).items():
        unknown = f": engine {engine.name!r} does not support this; evaluate with the native engine, or remove the key"
        yield is_set and not engine.traits.get("applies_rules", False), f"eval.{key}", unknown


def _of_rollouts(w: Components) -> Iterator[Rule]:
    """Yield rules for rollouts, groups and advantages."""
    rollout = w.recipe.rollout
    if rollout is None or rollout.select is None or w.selection is None:
        return
    yield from _of_sampler(w, rollout)
    yield from _of_selection(w, rollout, w.selection)
    is_single = rollout.group_size < 2
    two = ": pairs need two answers; increase rollout.group_size"
    yield is_single and w.unit == "pair", "rollout.select", two
    uniform = ": groups with one completion are always uniform; increase rollout.group_size"
    yield is_single and rollout.drop_uniform_groups, "rollout.drop_uniform_groups", uniform
    objective = f"objective {w.recipe.objective.name!r}"
    shown = f": {objective} needs feedback, which requires self-teaching; set teacher.name to {OWN_TEACHER}"
    yield "has_feedback" in w.needs and not w.teaches_itself, "teacher.name", shown
    parts = w.recipe.train.num_minibatches
    divides = f"={parts} does not divide rollout.num_prompts={rollout.num_prompts}"
    yield rollout.num_prompts % parts, "train.num_minibatches", divides


def _of_sampler(w: Components, rollout: RolloutSection) -> Iterator[Rule]:
    """Yield rules for sampler probabilities used as weights."""
    from_trainer = rollout.old_logprobs == "trainer"
    fresh = (
        ": with staleness, the trainer would recompute these with newer weights than the sampler's, which biases the "
        "objective; give 'correction', or set rollout.old_logprobs to sampler"
    )
    is_uncorrected = w.recipe.correction is None
    yield rollout.staleness and from_trainer and is_uncorrected, "rollout.old_logprobs", fresh
    weighs = any(comes_from_rollouts(name) for name in w.needs)
    rounded = (
        ": bf16 rounds trainer probabilities but not sampler probabilities, so ratios would not start at 1; set "
        "rollout.old_logprobs to trainer (and optionally 'correction' to reweight)"
    )
    is_rounded = w.recipe.train.precision == "bf16" and not from_trainer
    yield is_rounded and weighs, "train.precision", rounded
    steps = ": step labels come from data, not rollouts; give 'data'"
    yield "step_labels" in w.needs, "objective", steps
    yield from _of_truncation(w, rollout)
    mute = f": engine {w.engine.name!r} does not report the chosen experts; sample with the native engine, or remove it"
    yield rollout.router_replay and not w.engine.traits.get("keeps_experts"), "rollout.router_replay", mute
    yield from _of_rules(w, rollout)


def _of_truncation(w: Components, rollout: RolloutSection) -> Iterator[Rule]:
    """Yield rules for top-k, top-p and min-p, whose kept sets objectives replay."""
    if not replays_sets(rollout, w.needs):
        return
    cut = "min_p"
    if rollout.top_p < 1:
        cut = "top_p"
    if rollout.top_k is not None:
        cut = "top_k"
    objective = f"objective {w.recipe.objective.name!r}"
    large = (
        f"={rollout.top_k}: {objective} replays token sets kept by the sampler, at most {MOST_KEPT} tokens each; "
        f"set top_k to {MOST_KEPT} or less, or remove it"
    )
    yield rollout.top_k is not None and rollout.top_k > MOST_KEPT, "rollout.top_k", large
    keeps_sets = w.engine.traits.get("keeps_sets", False)
    remedy = "sample with the native engine"
    if isinstance(keeps_sets, str):  # engine option
        remedy = f"set rollout.engine.{keeps_sets}: true (if the server supports it)"
        keeps_sets = w.engine_options.get(keeps_sets, False)
    mute = (
        f": {objective} replays the token sets kept by {cut}, but engine "
        f"{w.engine.name!r} does not report them; {remedy}, or remove {cut}"
    )
    yield not keeps_sets, f"rollout.{cut}", mute


def _of_rules(w: Components, rollout: RolloutSection) -> Iterator[Rule]:
    """Yield rules for ``min_tokens``, ``repetition_penalty`` and ``stop``."""
    key = "rollout.repetition_penalty"
    is_given = rollout.repetition_penalty != 1
    for name, is_set in (("min_tokens", rollout.min_tokens > 0), ("stop", bool(rollout.stop))):
        if is_set and not is_given:
            key, is_given = f"rollout.{name}", True
    knows = w.engine.traits.get("applies_rules", False)
    unknown = f": engine {w.engine.name!r} does not support this; sample with the native engine, or remove the key"
    yield is_given and not knows, key, unknown
    if not follows_rules(rollout, w.needs):
        return
    objective = f"objective {w.recipe.objective.name!r}"
    whole = (
        f": {objective} compares unmodified teacher and student distributions, but this key modifies the "
        "sampling distribution; remove it, or choose an objective that uses only sampled tokens"
    )
    yield "teacher_ids" in w.needs, key, whole
    prefix = ": teacher and student have different prompts, so different tokens would be penalized; remove the key"
    is_other = rollout.repetition_penalty != 1 and w.teaches_itself and "seen" in w.parts
    yield is_other, "rollout.repetition_penalty", prefix


def _of_selection(w: Components, rollout: RolloutSection, selection: Entry) -> Iterator[Rule]:
    """Yield rules for row selection and for advantages computed on selected rows."""
    wanted = "pairs of answers" if w.level == "pair" else "single answers"
    units = f": {selection.name!r} gives {w.unit}s, but objective {w.recipe.objective.name!r} wants {wanted}"
    yield (w.unit == "pair") != (w.level == "pair"), "rollout.select", units
    if w.advantage is not None:
        yield from _of_advantage(w, w.advantage, rollout)
    reads_all = w.per_token or w.per_turn or w.recipe.kl_in_reward
    every = ": kl_in_reward and per-token or per-turn advantages need every completion; remove 'rollout.select'"
    yield reads_all and not selection.traits.get("takes_all"), "rollout.select", every
    assert rollout.select is not None
    threshold = rollout.select.options.get(selection.traits.get("labels_by", ""))
    both = (
        f": {threshold} selects correct answers, but rollout.label_above {rollout.label_above} labels them; "
        "use the same number for both"
    )
    differs = threshold not in (None, rollout.label_above)
    yield "labels" in w.needs and differs, "rollout.select.threshold", both


def _of_advantage(w: Components, advantage: Entry, rollout: RolloutSection) -> Iterator[Rule]:
    """Yield rules for advantages, groups and KL penalties."""
    name = advantage.name
    traits = advantage.traits
    kl = w.recipe.kl_in_reward
    objective = f"objective {w.recipe.objective.name!r}"
    smallest = traits.get("min_group", 1)
    assert w.recipe.advantage is not None
    for option, sizes in traits.get("min_group_if", {}).items():
        smallest = max(smallest, sizes.get(w.recipe.advantage.options[option], 1))
    few = f"={rollout.group_size}: advantage {name!r} compares completions of one prompt and needs at least {smallest}"
    yield rollout.group_size < smallest, "rollout.group_size", few
    values = (
        f": {name!r} needs values, which {objective} does not learn; "
        "use objective ppo (custom objectives need old_values and head 'value'), or an advantage without values"
    )
    reads_values = "old_values" in traits.get("needs", ())
    yield reads_values and "old_values" not in w.needs, "advantage", values
    negative = (
        f": penalties can make rewards negative, but advantage {name!r} divides by their mean; use "
        "regularize.kl_coef instead"
    )
    yield traits.get("wants_positive") and kl, "kl_in_reward", negative
    apart = f": advantage {name!r} uses individual rewards, so a shared penalty does not apply; use regularize.kl_coef"
    yield w.of_parts and kl, "kl_in_reward", apart
    returns = f": {objective} needs returns, but {name!r} gives none; use gae"
    yield "returns" in w.needs and not w.per_token, "advantage", returns
    if kl is not None and kl.target is not None:  # otherwise one batch could drive the adaptive weight to 0
        from posttrain.algorithms.kl_control import MAX_ERROR

        batch = rollout.num_prompts * rollout.group_size
        short = (
            f"={kl.horizon} is too short for batches of {batch} completions: it must exceed "
            f"{MAX_ERROR * batch:g}, and usually covers many batches"
        )
        yield kl.horizon <= MAX_ERROR * batch, "kl_in_reward.horizon", short


def _of_rewards(w: Components) -> Iterator[Rule]:
    """Yield rules for prompt template tags and references to reward components."""
    from posttrain.data.render.template import build_template
    from posttrain.graders.rewards import reward_parts

    template = build_template(w.recipe.prompt.template)
    parts = reward_parts(w.recipe.rewards, template.name, has_tags=bool(template.tags))
    known = ("reward", *parts)
    name: str | None = "reward"
    if w.recipe.rollout is not None:
        name = w.recipe.rollout.uniform_by
    near = registry.suggest(str(name), known)
    unknown = f": no reward component named {name!r}.{near} Known: {', '.join(known)}"
    unknown += answer_value("rollout.uniform_by", name)
    yield name not in known, "rollout.uniform_by", unknown
    if w.recipe.rollout is None:
        return
    yield (
        w.recipe.earns_nothing,
        "rewards",
        (": all weights are 0, so every answer earns the same and no token is trained; set one to another number"),
    )
    size = w.recipe.rollout.group_size
    for index, reward in enumerate(w.recipe.rewards):
        limit = registry.find("reward", reward.name, f"rewards.{index}").traits.get("max_group", size)
        large = f"={size}: reward {reward.name!r} ranks at most {limit} answers in one question; lower it"
        yield size > limit, "rollout.group_size", large


def _of_scale(w: Components) -> Iterator[Rule]:
    """Yield rules for sharding."""
    model = w.recipe.model
    scale = w.recipe.scale
    elsewhere = ": averaged weights can only be sampled in this process; set eval.engine native"
    evaluates = w.recipe.train.ema_decay is not None and bool(w.recipe.eval.every)
    engine = w.engine
    if w.recipe.eval.engine is not None:
        engine = registry.find("engine", w.recipe.eval.engine.name, "eval.engine")
    yield evaluates and engine.traits.get("takes_weights"), "train.ema_decay", elsewhere
    optimizer = w.recipe.optimizer.name
    if scale.sharding == "none":
        alike = ": weights are not sharded; give scale.sharding: fsdp2, or remove 'checkpoint'"
        yield scale.checkpoint == "sharded", "scale.checkpoint", alike
        return
    parts = f": optimizer {optimizer!r} is untested with sharded tensors"
    known = f"{parts}; use {' or '.join(SHARDED_OPTIMIZERS)}, or sharding none"
    yield optimizer not in SHARDED_OPTIMIZERS, "scale.sharding", known
    bits = ": quantized weights (model.load_bits) cannot be sharded; remove one key"
    yield model.load_bits, "scale.sharding", bits
    types = ": an fp32 adapter on a bf16 base cannot be sharded; use model.dtype fp32, or sharding none"
    yield model.adapter and model.dtype == "bf16", "scale.sharding", types


def slow_paths(policy: Forward, attention: str) -> list[str]:
    """Warn about padded batches, and about masked GPU attention unless requested by the recipe.

    ``attention``: the recipe's setting.
    """
    if policy.path == "padded" and attention == "sdpa":
        return ["batches are padded, which is slower, because packing would change this model's outputs"]
    if policy.path == "padded":
        return [f"model.attention: {attention}: batches are padded; sdpa would pack them"]
    if policy.device.type == "cuda" and policy.attention == "mask":
        return [
            "model.attention: variable-length flash attention supports only 16 bits, so the trainer uses padded "
            "rectangles with attention masks; train.precision: bf16 avoids this"
        ]
    return []


def unused_chat_template(model: str, tokenizer: Tokenizer, template: Template) -> list[str]:
    """Notify about an unused chat template in a model from outside, if the recipe uses a different template."""
    from posttrain.models.sources import EMBEDDED, resolve_model_name

    source = Path(resolve_model_name(model))
    is_run = (source.parent.parent / "recipe.yaml").is_file()
    if template.chat or template.name in ("document", "as_is") or is_run or source in EMBEDDED.values():
        return []
    if not getattr(tokenizer, "chat_template", None):
        return []
    return [
        f"prompt.template {template.name}: the tokenizer of {model} has a chat template, which this run "
        "does not use; --prompt.template chat uses it"
    ]


def vanishing_fields(components: Components, forward: Forward | ActorCritic) -> tuple[str, ...] | None:
    """List batch fields whose zeros make a row's loss zero; None if every row must be trained.

    Regularizers apply at every token. Adapter dropout draws masks per micro-batch, so removing rows would change the
    masks for other rows.
    """
    from posttrain.models.forward.forward import causal_lm
    from posttrain.models.forward.routing.routers import configured_coefficient
    from posttrain.training.mismatch import has_dropout

    vanishes: tuple[str, ...] | None = components.objective.traits.get("vanishes")
    if vanishes is None or not components.recipe.train.skip_zero_rows or has_dropout(forward.model):
        return None
    if components.recipe.train.router_aux_loss_coef != 0 and configured_coefficient(causal_lm(forward.model)):
        return None  # router balancing needs all rows
    if components.recipe.train.router_aux_loss_coef:
        return None
    regularizers = components.recipe.regularize
    if regularizers is not None and (regularizers.kl_coef or regularizers.entropy_coef):
        return ()
    return vanishes
