"""Recipe schema: strict YAML plus overrides, with a resolved dump for exact reruns.

Recipes name components (objective, advantage, reward, task, ...) and configure everything else in ``sections``.
Component options are validated against function signatures. Unknown keys are rejected with a suggestion and line
number. Torch is not imported here; ``Recipe.resolve`` imports component modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from posttrain import registry
from posttrain.errors import RecipeError, UnallowedCode, UnknownComponent
from posttrain.recipes.document import Content, Document, Rule, complete_component
from posttrain.recipes.eval_section import EvalSection
from posttrain.recipes.older import OLDER_RECIPES
from posttrain.recipes.other_models import HeadSection, TeacherSection
from posttrain.recipes.panel_prompts import read_panel
from posttrain.recipes.reference_sections import KLInRewardSection, ReferenceSection, RegularizeSection
from posttrain.recipes.sections import (
    MIXTURE,
    TURN_DEFAULTS,
    Component,
    ComponentList,
    DataSection,
    MaskComponent,
    ModelSection,
    PromptSection,
    RewardComponent,
    RolloutSection,
    ScaleSection,
    TrainSection,
    as_list,
    read_parts,
)
from posttrain.recipes.tool_servers import is_function, plain_tools, read_server
from posttrain.untrusted import declare_code, is_declared, prepare_command, without_remote_code

# Component kinds by dotted key (single components and lists).
COMPONENT_KINDS = {
    "task": "task",
    "environment": "environment",
    "objective": "objective",
    "advantage": "advantage",
    "aggregate": "aggregation",
    "correction": "correction",
    "masks": "mask",
    "optimizer": "optimizer",
    "prompt.template": "template",
    "rollout.engine": "engine",
    "rollout.select": "selection",
    "eval.engine": "engine",
    "rewards": "reward",
    "eval.tasks": "task",
    "track": "tracker",
}

KL_PROMPTS = 64  # default eval.num_kl_prompts with a reward model
# Documents other than single-run recipes, detected by key: description and matching command.
_OTHERS = {
    ("rows",): ("is a sweep over multiple runs", "sweep"),
    ("dictionary",): ("trains a dictionary", "sae train"),
    ("changes",): ("compares two models", "sae diff"),
}


def _named_adamw(value: object) -> object:
    if not isinstance(value, dict):
        return value
    return {"name": "adamw"} | value


class Recipe(Content):
    """Single experiment. ``rollout`` selects reinforcement learning, ``data`` supervised training.

    Args:
        description: summary, and metrics to watch.
        model: model to train.
        task: examples with answers or demonstrations.
        prompt: conversion from examples to prompts.
        rewards: reward functions, optimized as a weighted sum. Defaults to ``correct``.
        environment: environment for multi-turn completions.
        tools: functions callable from completions, as ``module:function``, and tool servers (``name: mcp``).
        rollout: sampling settings.
        data: supervised data settings.
        advantage: advantage estimator. Defaults to whatever the objective needs.
        kl_in_reward: KL penalty added to rewards.
        correction: importance weights for sampler-trainer mismatch.
        masks: tokens to exclude from the policy loss, chosen over each optimizer batch.
        objective: loss function.
        regularize: KL and entropy loss terms.
        reference: moving reference updates. Without this section, the reference stays at the initial model.
        head: value or reward head.
        teacher: distillation teacher.
        aggregate: averaging over tokens or pairs.
        optimizer: ``adamw`` (the name may be omitted if options are given) or ``muon``.
        train: training loop settings.
        eval: held-out evaluation.
        scale: processes and sharding.
        track: additional metric trackers besides ``metrics.jsonl``.
    """

    older = OLDER_RECIPES

    description: str = ""
    model: ModelSection = Field(default_factory=ModelSection)
    task: Component
    prompt: PromptSection = Field(default_factory=PromptSection)
    rewards: Annotated[list[RewardComponent], BeforeValidator(as_list)] = Field(default_factory=list)
    environment: Component | None = None
    tools: ComponentList | None = None
    rollout: RolloutSection | None = None
    data: DataSection | None = None
    advantage: Component | None = None
    kl_in_reward: KLInRewardSection | None = None
    correction: Component | None = None
    masks: Annotated[list[MaskComponent], BeforeValidator(as_list)] = Field(default_factory=list)
    objective: Component
    regularize: RegularizeSection | None = None
    reference: ReferenceSection | None = None
    head: HeadSection | None = None
    teacher: TeacherSection | None = None
    aggregate: Component | None = None
    optimizer: Annotated[Component, BeforeValidator(_named_adamw)] = Component(name="adamw")
    train: TrainSection = Field(default_factory=TrainSection)
    eval: EvalSection = Field(default_factory=EvalSection)
    scale: ScaleSection = Field(default_factory=ScaleSection)
    track: ComponentList = Field(default_factory=list)

    @model_validator(mode="after")
    def _reward_rollouts(self) -> Self:
        if self.rollout is not None and not self.rewards:
            self.rewards = [RewardComponent(name="correct")]
        return self

    def rules(self) -> Iterator[Rule]:
        """Yield rules across sections that need no component. ``training/checks`` has the remaining rules."""
        yield from self._mixture_rules()
        yield from self._rules_of_weights()
        one = ": give exactly one of 'rollout' (reinforcement learning) and 'data' (supervised)"
        if self.rollout is None:
            yield self.data is None, "rollout", one
        else:
            yield self.data is not None, "data", one
        if self.data is not None:
            for key in ("advantage", "kl_in_reward", "correction", "masks"):
                alone = f": {key!r} works only with 'rollout', not in supervised recipes; remove it"
                yield getattr(self, key) not in (None, []), key, alone
        one_turn = ": they are answered in one turn; leave them out of a recipe with tools or an environment"
        is_played = self.environment is not None or bool(self.tools)
        yield bool(self.eval.prompts) and is_played, "eval.prompts", one_turn
        whole = ": fp64 weights need fp32 precision here; set it to fp32, or use model.dtype fp32"
        yield self.model.dtype == "fp64" and self.train.precision != "fp32", "train.precision", whole
        if self.reference is not None:
            base = ": adapters use their fixed base as reference; remove 'reference' or 'model.adapter'"
            yield self.model.adapter, "reference", base
            whole = ": moving references are not supported with sharded weights; use scale.sharding none, or remove it"
            yield self.scale.sharding != "none", "reference", whole
        if self.data is not None:
            yield from self._supervised_rules()
        if self.rollout is not None:
            yield from self._rollout_rules(self.rollout)

    @property
    def earns_nothing(self) -> bool:
        """True if advantages come only from rewards with weight 0, and no other term trains the policy."""
        if self.advantage is None or any(reward.weight for reward in self.rewards):
            return False
        if self.kl_in_reward is not None and self.kl_in_reward.weight:
            return False
        terms = self.regularize
        return terms is None or not (terms.kl_coef or terms.entropy_coef)

    def _rules_of_weights(self) -> Iterator[Rule]:
        """Yield rules for weight averages, router losses and self-teaching."""
        is_sharded = self.scale.sharding != "none"
        whole = ": not supported with sharded weights; use scale.sharding none, or remove it"
        for key in ("router_aux_loss_coef", "ema_decay"):
            yield getattr(self.train, key) and is_sharded, f"train.{key}", whole
        replays = self.rollout is not None and self.rollout.router_replay
        yield replays and is_sharded, "rollout.router_replay", whole
        if self.teacher is None:
            return
        yield self.teacher.weights == "ema" and is_sharded, "teacher.weights", whole
        silent = ": no environment can give feedback; set 'environment', or choose another value"
        yield self.teacher.sees == "environment" and self.environment is None, "teacher.sees", silent

    def _mixture_rules(self) -> Iterator[Rule]:
        tasks = {"task": self.task}
        for number, task in enumerate(self.eval.tasks):
            tasks[f"eval.tasks.{number}"] = task
        for where, component in tasks.items():
            if component.name != MIXTURE:
                continue
            try:
                read_parts(component.options.get("parts"), where)
            except (RecipeError, UnknownComponent) as error:
                key, colon, message = str(error).partition(":")
                yield True, key, colon + message

    def _supervised_rules(self) -> Iterator[Rule]:
        for key in ("environment", "tools"):
            turns = (
                f": {key!r} needs sampling; give 'rollout', or remove it. To evaluate this run in multiple turns, "
                "set it as model.name in a recipe with 'rollout', which evaluates before the first step"
            )
            yield getattr(self, key), key, turns
        for key in ("ppo_epochs", "num_minibatches"):
            reused = f": ppo_epochs and num_minibatches apply to rollout batches, not to 'data'; remove {key}"
            yield getattr(self.train, key) != 1, f"train.{key}", reused

    def _rollout_rules(self, rollout: RolloutSection) -> Iterator[Rule]:
        noisy = ": embedding noise would change the policy between sampling and training; use it only with 'data'"
        yield self.train.neftune_noise_alpha is not None, "train.neftune_noise_alpha", noisy
        if self.environment is None and not self.tools:
            for key in (*TURN_DEFAULTS, "max_turn_tokens"):
                one_turn = (
                    f": {key} applies only to multi-turn completions; give 'environment' or 'tools', or remove it"
                )
                yield getattr(rollout, key) is not None, f"rollout.{key}", one_turn
        compared = (
            ": it compares the trainer's log-probabilities with the sampler's; set rollout.old_logprobs to trainer"
        )
        yield self.correction is not None and rollout.old_logprobs != "trainer", "correction", compared

    def resolve(self, *, to_read: bool = False) -> Recipe:
        """Validate component options and fill in defaults.

        ``to_read``: keep unallowed code components unresolved, because nothing will be built.

        Raises:
            UnknownComponent, RecipeError: with the invalid key.
            UnallowedCode: a stored recipe names code.
        """

        def complete(component: object, kind: str, where: str) -> Any:
            try:
                return complete_component(component, kind, where)
            except UnallowedCode:
                if not to_read:
                    raise
                return component

        resolved = self.model_copy(deep=True)
        if not to_read and isinstance(resolved.eval.prompts, str):  # a run keeps them, whatever becomes of the file
            resolved.eval.prompts = read_panel(resolved.eval.prompts)
        if not to_read or is_declared(self.objective.name):
            resolved._fill_defaults()
        for index, tool in enumerate(resolved.tools or ()):
            _check_tool(tool, f"tools.{index}", to_read=to_read)
        for path, kind in COMPONENT_KINDS.items():
            above, _, key = path.rpartition(".")
            section = resolved
            if above:
                section = getattr(resolved, above)
            value = getattr(section, key, None)
            if isinstance(value, list):
                setattr(section, key, [complete(component, kind, f"{path}.{i}") for i, component in enumerate(value)])
            elif value is not None:
                setattr(section, key, complete(value, kind, path))
        return resolved

    def _fill_defaults(self) -> None:
        """Fill in components implied by the objective: aggregation, selection, advantage and head."""
        traits = registry.find("objective", self.objective.name, "objective").traits
        level = traits.get("level", "token")
        if self.aggregate is None and level == "token":
            self.aggregate = Component(name="token_mean")
        elif self.aggregate is None:
            self.aggregate = Component(name="unit_mean")
        if traits.get("policy_term"):
            self.regularize = self.regularize or RegularizeSection()
        elif self.regularize is not None:
            raise RecipeError(
                f"regularize: objective {self.objective.name!r} has no policy term for KL or entropy regularization; "
                "remove 'regularize'"
            )
        if self.head is None and traits.get("head") is not None:
            self.head = HeadSection()
        if self.eval.num_kl_prompts is None:
            # Reward models can pull a policy away from its initial model.
            is_pulled = self._is_rewarded_by_a_model() and self.eval.every > 0 and not self.trains_scorer
            self.eval.num_kl_prompts = 0
            if is_pulled:
                self.eval.num_kl_prompts = min(KL_PROMPTS, self.eval.num_examples)
        if self.rollout is not None:
            self._fill_rollout(self.rollout, traits)

    def _is_rewarded_by_a_model(self) -> bool:
        for number, reward in enumerate(self.rewards):
            if not is_declared(reward.name):
                continue
            if registry.find("reward", reward.name, f"rewards.{number}").traits.get("asks_a_model"):
                return True
        return False

    def _fill_rollout(self, rollout: RolloutSection, traits: Mapping[str, Any]) -> None:
        if self.environment is not None or self.tools:
            for key, value in TURN_DEFAULTS.items():
                if getattr(rollout, key) is None:
                    setattr(rollout, key, value)
        if rollout.select is None:
            rollout.select = Component(name="every")
            if traits.get("level", "token") == "pair":
                rollout.select = Component(name="best_and_worst")
        if self.advantage is None and "advantages" in traits.get("needs", ("advantages",)):
            self.advantage = Component(name="normalized")
            if traits.get("head") == "value":
                self.advantage = Component(name="gae")

    def dump(self) -> dict[str, Any]:
        """Return plain data (``Content.dump``); a tool without options is its name."""
        plain = super().dump()
        if self.tools is not None:
            plain["tools"] = plain_tools(self.tools)
        return plain

    def with_seed(self, seed: int) -> Recipe:
        """Create a recipe copy with a different ``train.seed``."""
        return self.model_copy(update={"train": self.train.model_copy(update={"seed": seed})})

    @property
    def trains_scorer(self) -> bool:
        """True if training a reward model instead of a policy.

        If a stored recipe's objective may not be imported, its sections decide: head plus data means a reward model.
        """
        traits = registry.traits_of("objective", self.objective.name)
        if traits is None:
            return self.head is not None and self.data is not None
        return traits.get("head") == "score"


def _check_tool(tool: Component, where: str, *, to_read: bool) -> None:
    """Refuse a tool that cannot be one, and unless it is only to be read, code that nobody allowed."""
    if is_function(tool, where):
        if not to_read:
            registry.import_component("tool", tool.name, where)
        return
    server = read_server(tool, where)
    if server.command is not None and not to_read:
        prepare_command(server.command, f"{where}.command")


def stored_recipe(stored: Mapping[str, object], place: str) -> Recipe:
    """Load a run's stored recipe for reading. Custom code and remote model code stay disabled.

    Raises:
        RecipeError: unknown keys in this version.
    """
    return validate_recipe(without_remote_code(stored), place, is_own=False)


def load_recipe(
    name_or_path: str | Mapping[str, object], overrides: Sequence[tuple[str, str]] = (), *, is_own: bool = True
) -> Recipe:
    """Load a recipe, apply dotted overrides, and validate. Component options are validated by ``resolve``.

    Mappings are used directly. ``is_own``: written by the user, so custom code is allowed (``untrusted``).

    Raises:
        RecipeError: with file, line and key.
    """
    document = Document.load(Recipe, name_or_path, is_own=is_own)
    for keys, (what, command) in _OTHERS.items():
        if document.content.keys() >= set(keys):
            raise RecipeError(f"{document.place}: this {what}; run it with: posttrain {command} {name_or_path}")
    return document.extend().override(overrides).check()


def lost_options(name_or_path: str | Mapping[str, object], overrides: Sequence[tuple[str, str]]) -> list[str]:
    """List recipe options lost when command line overrides replace a component, one line per component."""
    document = Document.load(Recipe, name_or_path).extend()
    below = document.content
    after = document.override(overrides).content
    lines = []
    for key in dict.fromkeys(key.removesuffix(".name") for key, _ in overrides):
        before = _value_at(below, key)
        if not isinstance(before, Mapping) or "name" not in before:
            continue
        kept = _value_at(after, key)
        if not isinstance(kept, Mapping):
            kept = {"name": kept}
        lost = [f"{option} ({before[option]})" for option in before if option not in kept]
        if lost:
            was = f"{kept.get('name')} in place of {before['name']}"
            lines.append(f"{key}: {was}, dropping recipe options: {', '.join(lost)}")
    names_tasks = any(key == "eval" or key.startswith("eval.tasks") for key, _ in overrides)
    if _value_at(below, "eval.tasks") and not _value_at(after, "eval.tasks") and not names_tasks:
        lines.append("eval.tasks: dropped because the task changed; evaluation uses the new task")
    return lines


def _value_at(content: Mapping[str, object], key: str) -> object:
    """Look up a dotted key; None if missing."""
    value: object = content
    for part in key.split("."):
        if isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        elif isinstance(value, Mapping):
            value = value.get(part)
        else:
            return None
    return value


def validate_recipe(data: Mapping[str, object], place: str = "recipe", *, is_own: bool = True) -> Recipe:
    """Validate plain data as a ``Recipe``. Errors mention ``place`` and the key.

    ``is_own``: data written by the caller, so custom code is allowed; False for data from files.
    """
    if is_own:
        declare_code(data)
    return Document(Recipe, Recipe.older.bring_up_to_date(data), place, {}).check()
