"""Rules about components and sections of a recipe that go together.

A rule is: whether it is broken, the key that it names, and what is wrong with a remedy. No model is loaded.
Rules about sections alone are in ``Recipe.rules``, those about one section in ``recipes/sections``, and those about a
loaded model in ``build``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING

from posttrain import registry
from posttrain.data.base import Task, eval_components
from posttrain.errors import RecipeError
from posttrain.recipes.document import Rule
from posttrain.recipes.recipe import Recipe
from posttrain.recipes.sections import Component, RolloutSection
from posttrain.registry import Entry
from posttrain.training.batch_fields import comes_from_rollouts, fillers, needed_fields, with_their_needs

if TYPE_CHECKING:
    from posttrain.data.render.rows import Shape
    from posttrain.training.step import Level

OWN_TEACHER = "self"
SHARDED_OPTIMIZERS = ("adamw", "muon")


@dataclass(frozen=True)
class Components:
    """A resolved recipe with the registry entries of its components.

    needs: the batch fields that the objective or the recipe reads, and those that these need. level: the unit that the
    objective gives a value for. unit: of the selection, a row or a pair. per_token, per_turn: of the advantages.
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

    @property
    def shape(self) -> Shape:
        """The kind of unit of the data that the objective reads."""
        if "step_labels" in self.needs:
            return "steps"
        if self.level == "pair":
            return "pair"
        return "judged" if "labels" in self.needs else "demonstration"

    @property
    def parts(self) -> frozenset[str]:
        """The models that the batch fields take: ``reference``, ``teacher``, ``critic``, ..."""
        return frozenset(part for entry in fillers(self.needs, "the recipe") for part in entry.provided)

    @property
    def only_scores(self) -> bool:
        """True if a reward model is trained, which writes no answers."""
        return bool(self.objective.traits.get("head") == "score")

    def samples(self, reads: bool | None = None) -> bool:
        """Return whether the trainer's processes sample with the model itself: rollouts, or answers to evaluate.

        ``reads``: whether evaluations read responses instead; by default by the recipe alone.
        """
        rollout, options, engines = self.recipe.rollout is not None, self.recipe.eval, [self.engine]
        if reads is None:
            reads = not rollout and self.shape != "demonstration"
        answers = bool(options.every) and (not reads or bool(options.num_kl_prompts))
        if answers and options.engine is not None:
            engines.append(registry.find("engine", options.engine.name, "eval.engine"))
        in_place = [not engine.traits.get("takes_weights") for engine in engines]
        return (rollout and in_place[0]) or (answers and in_place[-1])

    @property
    def teaches_itself(self) -> bool:
        """True if the model that is trained is its own teacher."""
        return self.recipe.teacher is not None and self.recipe.teacher.name == OWN_TEACHER


def resolve_components(recipe: Recipe) -> Components:
    """Return the components of a resolved recipe, which fit one another.

    Raises:
        RecipeError: they do not fit; the message is that of the first broken rule.
    """
    objective = registry.find("objective", recipe.objective.name, "objective")
    assert recipe.aggregate is not None, "resolved"
    rollout, advantage, selection = recipe.rollout, None, None
    # the evaluation of a supervised recipe samples, too
    engine = rollout.engine if rollout is not None else Component(name="native")
    if recipe.advantage is not None:
        advantage = registry.find("advantage", recipe.advantage.name, "advantage")
    if rollout is not None and rollout.select is not None:
        selection = registry.find("selection", rollout.select.name, "rollout.select")
    kl = recipe.regularize.kl_coef if recipe.regularize is not None else 0.0
    needs = needed_fields(objective, recipe.objective.options, rollout is not None, kl)
    if recipe.kl_in_reward is not None:
        needs |= {"ref_logprobs"}
    if recipe.correction is not None:
        needs |= {"correction"}
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
    )
    if recipe.eval.every:
        eval_components(recipe)
    tables = (_of_objective, _of_engines, _of_rollouts, _of_scale, _of_rewards)
    for broken, key, message in chain(*(table(components) for table in tables)):
        if broken:
            raise RecipeError(f"{key}{message}")
    return components


def unread_parts(components: Components, task: Task) -> list[str]:
    """Return lines about margins of rows that the objective does not read, and answers that sampled ones replace."""
    lines = []
    if components.shape == "pair" and "margins" not in components.needs and ("margin", "read") in task.keys:
        name = components.recipe.objective.name
        lines.append(
            f"margin: the rows state margins, and objective {name!r} reads none; bradley_terry does with margin: true"
        )
    samples = components.recipe.rollout is not None and components.shape != "demonstration"
    if samples and any(example.responses for example in islice(task.examples, 1)):
        lines.append(
            f"rollout: the model samples the answers that it is trained on, so those in the rows of task {task.name!r} "
            "are not read; a recipe with data in place of rollout (dpo-preferences) trains on them"
        )
    return lines


def _of_objective(w: Components) -> list[Rule]:
    r, needs, objective = w.recipe, w.needs, f"objective {w.objective.name!r}"
    head, chosen = w.objective.traits.get("head"), r.data.train_on if r.data else None
    weighs = "token" if w.level == "token" else "unit"
    weighed = w.aggregation.traits.get("level", weighs)
    one, blind = f"but {objective} gives one value per {w.level}", "advantages" not in needs
    taught = bool(w.parts & {"teacher", "seen"})
    no_penalty = f": {objective} reads no advantages, so it would see no penalty"
    no_drift = f": {objective} trains no policy that could drift; leave it out"
    mute = ": a reward model writes no answers; leave it out"
    imitates = ": the held-out loss is of demonstrations in 'data'; leave it out"
    valued = f': {objective} reads a critic\'s values; register it with head="value"'
    samples = ": 'self' learns from its own samples; give 'rollout', not 'data'"
    base = ": a new model (model.init) has no base on disk that an adapter could name"
    shares = ": a reward head always shares the model that is trained; leave it out"
    judges = f": {chosen!r} is for demonstrations; {objective} judges answers, so leave it out"
    unread = f": {objective} reads no labels that a threshold could make; leave it out"
    credited = f": a batch field of {objective} needs advantages; give 'advantage'"
    thresholds = r.data and r.data.label_above is not None
    vanishes = w.objective.traits.get("vanishes", ())
    names_fields = isinstance(vanishes, tuple) and needs >= set(vanishes)
    fields = f": {objective} is registered with vanishes={vanishes!r}; give a tuple of batch fields that it needs"
    return [
        (weighed != weighs, "aggregate", f": {w.aggregation.name!r} weighs {weighed}s, {one}"),
        (r.advantage and blind, "advantage", f": {objective} reads no advantages; leave 'advantage' out"),
        (r.kl_in_reward and blind, "kl_in_reward", no_penalty),
        (r.correction and w.level != "token", "correction", f": it weighs tokens, {one}"),
        (r.head and head is None, "head", f": {objective} reads no scores or values; leave 'head' out"),
        (r.eval.num_kl_prompts and w.only_scores, "eval.num_kl_prompts", no_drift),
        (r.eval.samples > 1 and w.only_scores, "eval.samples", mute),
        (r.eval.loss and (r.data is None or w.shape != "demonstration"), "eval.loss", imitates),
        (taught and r.teacher is None, "teacher", f": {objective} learns from a teacher; give teacher.name"),
        (r.teacher and not taught, "teacher", f": {objective} reads no teacher; leave 'teacher' out"),
        ("critic" in w.parts and head != "value", "objective", valued),
        ("correction" in needs and not r.correction, "correction", f": {objective} reads one; give correction.name"),
        (not blind and not r.advantage, "advantage", credited),
        (w.teaches_itself and r.rollout is None, "teacher.name", samples),
        (r.model.adapter and r.model.init, "model.adapter", base),
        (w.only_scores and r.head and r.head.trunk == "shared", "head.trunk", shares),
        (chosen in ("all", "assistant") and w.shape != "demonstration", "data.train_on", judges),
        (thresholds and w.shape != "judged", "data.label_above", unread),
        (not names_fields, "objective", fields),
    ]


def _of_engines(w: Components) -> Iterator[Rule]:
    evaluating = w.recipe.eval.engine
    elsewhere = ": {!r} samples with weights of its own, which do not change; use native, and this one to evaluate"
    yield not w.engine.traits.get("follows_training", True), "rollout.engine", elsewhere.format(w.engine.name)
    unplayed = w.recipe.environment is None and not w.recipe.tools
    without = "in a recipe with 'data' nothing answers; take another task"
    gives = without if w.recipe.rollout is None else "give 'environment'"
    tasks = {"task": w.recipe.task} | {f"eval.tasks.{i}": task for i, task in enumerate(w.recipe.eval.tasks)}
    for key, component in tasks.items():
        played = (registry.traits_of("task", component.name) or {}).get("played")
        yield played and unplayed, key, f": {component.name!r} asks nothing by itself; {gives}"
    if evaluating is not None:
        head = ": a reward model writes no answers that an engine could sample; leave it out"
        yield w.only_scores, "eval.engine", head
        engine = registry.find("engine", evaluating.name, "eval.engine")
        yield not engine.traits.get("follows_training", True), "eval.engine", elsewhere.format(engine.name)


def _of_rollouts(w: Components) -> list[Rule]:
    """Rules about rollouts, their groups and their advantages."""
    rollout, kl, objective = w.recipe.rollout, w.recipe.kl_in_reward, f"objective {w.recipe.objective.name!r}"
    if rollout is None or rollout.select is None or w.selection is None:
        return []
    weighs, apart = any(comes_from_rollouts(name) for name in w.needs), rollout.old_logprobs == "trainer"
    cut, is_cut = "top_k" if rollout.top_k is not None else "top_p", rollout.top_k is not None or rollout.top_p < 1
    threshold = rollout.select.options.get(w.selection.traits.get("labels_by", ""))
    wanted = "pairs of answers" if w.level == "pair" else "single answers"
    alone, parts, of_all = rollout.group_size < 2, w.recipe.train.num_minibatches, w.per_token or w.per_turn or kl
    fresh = (
        ": computed again by the trainer they are of newer weights than those that sampled, and nothing tells the "
        "objective; give 'correction', or set rollout.old_logprobs to sampler"
    )
    rounded = (
        ": bf16 rounds the trainer's probabilities and not the sampler's, so that no ratio would begin at 1; set "
        "rollout.old_logprobs to trainer (and 'correction' weighs by the difference)"
    )
    biased = (
        f": {objective} weighs tokens by how likely the sampler drew them from the whole distribution, and {cut} draws "
        f"from a part of it, so that every ratio would be off; leave {cut} out (a lower rollout.temperature is "
        "followed), or choose an objective that learns from given answers"
    )
    units = f": {w.selection.name!r} gives {w.unit}s, but {objective} wants {wanted}"
    every = (
        ": advantages per token and kl_in_reward are computed over every completion, and advantages per turn are too; "
        "leave rollout.select out"
    )
    both = (
        f": {threshold} decides what is chosen as right, and rollout.label_above {rollout.label_above} what is "
        "labelled as right; give both the same number"
    )
    uniform = ": a group of one completion is always uniform; give rollout.group_size"
    shown = (
        f": {objective} learns from feedback, which only the model itself is shown; set teacher.name to {OWN_TEACHER}"
    )
    divides = f"={parts} does not divide rollout.num_prompts={rollout.num_prompts}"
    steps = ": labels of steps come with data, not from rollouts; give 'data'"
    return [
        (rollout.staleness and apart and w.recipe.correction is None, "rollout.old_logprobs", fresh),
        (w.recipe.train.precision == "bf16" and not apart and weighs, "train.precision", rounded),
        ("step_labels" in w.needs, "objective", steps),
        (is_cut and weighs, f"rollout.{cut}", biased),
        ((w.unit == "pair") != (w.level == "pair"), "rollout.select", units),
        *(() if w.advantage is None else _of_advantage(w, w.advantage, rollout)),
        (of_all and not w.selection.traits.get("takes_all"), "rollout.select", every),
        ("labels" in w.needs and threshold not in (None, rollout.label_above), "rollout.select.threshold", both),
        (alone and w.unit == "pair", "rollout.select", ": a pair needs two answers; give rollout.group_size"),
        (alone and rollout.drop_uniform_groups, "rollout.drop_uniform_groups", uniform),
        ("has_feedback" in w.needs and not w.teaches_itself, "teacher.name", shown),
        (rollout.num_prompts % parts, "train.num_minibatches", divides),
    ]


def _of_advantage(w: Components, advantage: Entry, rollout: RolloutSection) -> Iterator[Rule]:
    name, traits, kl = advantage.name, advantage.traits, w.recipe.kl_in_reward
    objective = f"objective {w.recipe.objective.name!r}"
    smallest, batch = traits.get("min_group", 1), rollout.num_prompts * rollout.group_size
    few = f"={rollout.group_size}: advantage {name!r} compares completions of one prompt and needs at least {smallest}"
    yield rollout.group_size < smallest, "rollout.group_size", few
    values = (
        f": {name!r} needs values, which {objective} does not learn; "
        "use objective ppo (one of your own needs old_values, and head 'value'), or an advantage without values"
    )
    yield "old_values" in traits.get("needs", ()) and "old_values" not in w.needs, "advantage", values
    negative = (
        f": a penalty makes rewards negative, and advantage {name!r} divides by their mean; use the objective's kl "
        "instead"
    )
    yield traits.get("wants_positive") and kl, "kl_in_reward", negative
    returns = f": {objective} learns returns, and {name!r} gives none; use gae"
    yield "returns" in w.needs and not w.per_token, "advantage", returns
    if kl is not None and kl.target is not None:  # or one batch could take the weight of the controller to 0
        from posttrain.algorithms.kl_control import MAX_ERROR

        short = (
            f"={kl.horizon} is too short for batches of {batch} completions: it must be more than "
            f"{MAX_ERROR * batch:g}, and is usually many batches"
        )
        yield kl.horizon <= MAX_ERROR * batch, "kl_in_reward.horizon", short


def _of_rewards(w: Components) -> Iterator[Rule]:
    """Rules about tags of the prompt template, and parts of the reward that are named elsewhere."""
    from posttrain.data.render.template import build_template
    from posttrain.graders.rewards import reward_parts

    template = build_template(w.recipe.prompt.template)
    known = ("reward", *reward_parts(w.recipe.rewards, template.name, has_tags=bool(template.tags)))
    name = w.recipe.rollout.uniform_by if w.recipe.rollout else "reward"
    unknown = f": there is no reward part {name!r}.{registry.suggest(str(name), known)} Known: {', '.join(known)}"
    yield name not in known, "rollout.uniform_by", unknown


def _of_scale(w: Components) -> Iterator[Rule]:
    model, scale, optimizer = w.recipe.model, w.recipe.scale, w.recipe.optimizer.name
    if scale.sharding == "none":
        alike = ": every process has all of it, so one writes it; give scale.sharding: fsdp2, or leave checkpoint out"
        yield scale.checkpoint == "sharded", "scale.checkpoint", alike
        return
    parts = f": it is not known whether optimizer {optimizer!r} works on sharded tensors"
    known = f"{parts}; use {' or '.join(SHARDED_OPTIMIZERS)}, or sharding none"
    yield optimizer not in SHARDED_OPTIMIZERS, "scale.sharding", known
    bits = ": weights in few bits (model.load_bits) cannot be sharded; leave one of the two out"
    yield model.load_bits, "scale.sharding", bits
    types = ": an adapter in fp32 on a base in bf16 cannot be sharded with it; use model.dtype fp32, or none"
    yield model.adapter and model.dtype == "bf16", "scale.sharding", types
