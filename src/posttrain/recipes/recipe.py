"""A recipe: YAML plus overrides, strict, with a resolved dump that reruns it.

A recipe names components (objective, advantage, reward, task, ...), whose options are checked against the signature of
the function of that name, and has ``sections`` for everything else. Unknown keys are refused with a suggestion and the
line in the file. No torch is imported here; ``Recipe.resolve`` imports the modules of the components.
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

# The components of a recipe by dotted key (one, or a list of them), with their kind.
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

KL_PROMPTS = 64  # default of eval.num_kl_prompts where a reward model pays
# Documents that are no recipe of one run, by their keys: what they are, and the command that takes them.
_OTHERS = {
    ("rows",): ("is a sweep of several runs", "sweep"),
    ("dictionary",): ("trains a dictionary", "sae train"),
    ("changes",): ("compares two models", "sae diff"),
}


def _named_adamw(value: object) -> object:
    if not isinstance(value, dict):
        return value
    return {"name": "adamw"} | value


class Recipe(Content):
    """One experiment. ``rollout`` makes it reinforcement learning, ``data`` supervised training.

    Args:
        description: what it is, and what to watch.
        model: the model that is trained.
        task: examples, with answers or demonstrations.
        prompt: how an example becomes a prompt.
        rewards: rewards of a completion, whose weighted sum is optimized; by default ``correct``.
        environment: what answers between the turns of a completion.
        tools: functions that a completion may call, as ``module:function``, and servers of tools (``name: mcp``).
        rollout: sampling of completions.
        data: supervised rows.
        advantage: advantages from rewards; by default what the objective needs.
        kl_in_reward: a KL penalty in the reward.
        correction: weights for the mismatch of sampler and trainer.
        masks: tokens that are left out of the policy's term, chosen over the whole batch of an update.
        objective: the loss.
        regularize: KL and entropy terms of the loss.
        reference: makes the reference move; without it the reference is the model at the start.
        head: head of a value or reward model.
        teacher: teacher model, for distillation.
        aggregate: how the values of tokens or pairs are averaged.
        optimizer: ``adamw``, which needs no name next to its options, or ``muon``.
        train: the training loop.
        eval: held-out evaluation.
        scale: number of processes and sharding.
        track: where the metrics are shown in addition to ``metrics.jsonl``.
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
        """Yield conditions between sections that need no component; ``training/checks`` has those that do."""
        yield from self._mixture_rules()
        yield from self._rules_of_weights()
        one = ": give exactly one of 'rollout' (reinforcement learning) and 'data' (supervised)"
        if self.rollout is None:
            yield self.data is None, "rollout", one
        else:
            yield self.data is not None, "data", one
        if self.data is not None:
            for key in ("advantage", "kl_in_reward", "correction", "masks"):
                alone = f": {key!r} belongs to 'rollout'; a supervised recipe has none"
                yield getattr(self, key) not in (None, []), key, alone
        whole = ": products of weights in fp64 stay in fp64; use fp32, or model.dtype fp32"
        yield self.model.dtype == "fp64" and self.train.precision != "fp32", "train.precision", whole
        if self.reference is not None:
            base = ": the reference of an adapter is its base, which cannot move; leave one of the two out"
            yield self.model.adapter, "reference", base
            whole = ": a reference that moves is whole in every process; use scale.sharding none, or leave it out"
            yield self.scale.sharding != "none", "reference", whole
        if self.data is not None:
            yield from self._supervised_rules()
        if self.rollout is not None:
            yield from self._rollout_rules(self.rollout)

    def _rules_of_weights(self) -> Iterator[Rule]:
        """Yield conditions of averages, of routers' loss, and of what a teacher sees."""
        is_sharded = self.scale.sharding != "none"
        whole = ": it is not kept for sharded weights; use scale.sharding none, or leave it out"
        for key in ("router_aux_loss_coef", "ema_decay"):
            yield getattr(self.train, key) and is_sharded, f"train.{key}", whole
        if self.teacher is None:
            return
        yield self.teacher.weights == "ema" and is_sharded, "teacher.weights", whole
        silent = ": there is no environment that says anything of an answer; give 'environment', or another value"
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
                f": {key!r} answers a model that samples; give 'rollout', or leave it out. A recipe with 'rollout' "
                "whose model.name is this run evaluates it in turns before the first step"
            )
            yield getattr(self, key), key, turns
        for key in ("ppo_epochs", "num_minibatches"):
            reused = f": ppo_epochs and num_minibatches are of a rollout batch; 'data' has none, so leave {key} out"
            yield getattr(self.train, key) != 1, f"train.{key}", reused

    def _rollout_rules(self, rollout: RolloutSection) -> Iterator[Rule]:
        noisy = ": noise on the embeddings would train another policy than the one that sampled; it is for 'data'"
        yield self.train.neftune_noise_alpha is not None, "train.neftune_noise_alpha", noisy
        if self.environment is None and not self.tools:
            for key in (*TURN_DEFAULTS, "max_turn_tokens"):
                one_turn = (
                    f": {key} is for completions of several turns; give 'environment' or 'tools', or leave it out"
                )
                yield getattr(rollout, key) is not None, f"rollout.{key}", one_turn
        compared = (
            ": it compares the trainer's log-probabilities with the sampler's; set rollout.old_logprobs to trainer"
        )
        yield self.correction is not None and rollout.old_logprobs != "trainer", "correction", compared

    def resolve(self, *, to_read: bool = False) -> Recipe:
        """Return the recipe with the options of all components checked and completed.

        ``to_read``: nothing is built from it, so a component that is code that nobody allowed stays as it is.

        Raises:
            UnknownComponent, RecipeError: with the key that is wrong.
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
        """Fill in the components that follow from the objective: aggregation, selection, advantage and head."""
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
                f"regularize: objective {self.objective.name!r} has no policy term that a KL or an entropy bonus could "
                "be added to; leave 'regularize' out"
            )
        if self.head is None and traits.get("head") is not None:
            self.head = HeadSection()
        if self.eval.num_kl_prompts is None:
            # A policy that a model rewards may be pulled away from where it began.
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
        """Return the recipe with ``train.seed``."""
        return self.model_copy(update={"train": self.train.model_copy(update={"seed": seed})})

    @property
    def trains_scorer(self) -> bool:
        """True if a reward model is trained, and no policy.

        Where the objective of a stored recipe may not be imported, its sections decide: a head on data scores.
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
    """Return the recipe that a run has stored, to read from: it allows no code, neither its own nor a model's.

    Raises:
        RecipeError: this version does not know its keys.
    """
    return validate_recipe(without_remote_code(stored), place, is_own=False)


def load_recipe(
    name_or_path: str | Mapping[str, object], overrides: Sequence[tuple[str, str]] = (), *, is_own: bool = True
) -> Recipe:
    """Read a recipe, apply dotted overrides, validate. Components are checked by ``resolve``.

    A mapping is the recipe itself. ``is_own``: a file of the user's may name code (``untrusted``).

    Raises:
        RecipeError: with file, line and key.
    """
    document = Document.load(Recipe, name_or_path, is_own=is_own)
    for keys, (what, command) in _OTHERS.items():
        if document.content.keys() >= set(keys):
            raise RecipeError(f"{document.place}: this {what}; run it with: posttrain {command} {name_or_path}")
    return document.extend().override(overrides).check()


def lost_options(name_or_path: str | Mapping[str, object], overrides: Sequence[tuple[str, str]]) -> list[str]:
    """Return a line for each component that the command line replaces, with the options of the recipe that go."""
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
            lines.append(f"{key}: {was}, whose options in the recipe are left out: {', '.join(lost)}")
    names_tasks = any(key == "eval" or key.startswith("eval.tasks") for key, _ in overrides)
    if _value_at(below, "eval.tasks") and not _value_at(after, "eval.tasks") and not names_tasks:
        lines.append("eval.tasks: those of the recipe are left out with its task; evaluation is of the new task")
    return lines


def _value_at(content: Mapping[str, object], key: str) -> object:
    """Return the value under a dotted key; None where there is none."""
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
    """Return a ``Recipe`` from plain data; errors name ``place`` and the key.

    ``is_own``: the caller has written it, so code that it names is allowed; False for data from a file.
    """
    if is_own:
        declare_code(data)
    return Document(Recipe, Recipe.older.bring_up_to_date(data), place, {}).check()
