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
from posttrain.recipes.older import OLDER_RECIPES
from posttrain.recipes.sections import (
    MIXTURE,
    TURN_DEFAULTS,
    Component,
    Components,
    DataSection,
    EvalSection,
    HeadSection,
    KLInRewardSection,
    ModelSection,
    PromptSection,
    RegularizeSection,
    RewardComponent,
    RolloutSection,
    ScaleSection,
    TeacherSection,
    TrainSection,
    as_list,
    read_parts,
)
from posttrain.untrusted import declare_code, is_declared, without_remote_code

# The components of a recipe by dotted key (one, or a list of them), with their kind.
COMPONENT_KINDS = {
    "task": "task",
    "environment": "environment",
    "objective": "objective",
    "advantage": "advantage",
    "aggregate": "aggregation",
    "correction": "correction",
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
    return {"name": "adamw"} | value if isinstance(value, dict) else value


class Recipe(Content):
    """One experiment. ``rollout`` makes it reinforcement learning, ``data`` supervised training.

    Args:
        description: what it is, and what to watch.
        model: the model that is trained.
        task: examples, with answers or demonstrations.
        prompt: how an example becomes a prompt.
        rewards: rewards of a completion, whose weighted sum is optimized; by default ``correct``.
        environment: what answers between the turns of a completion.
        tools: functions that a completion may call, as ``module:function``.
        rollout: sampling of completions.
        data: supervised rows.
        advantage: advantages from rewards; by default what the objective needs.
        kl_in_reward: a KL penalty in the reward.
        correction: weights for the mismatch of sampler and trainer.
        objective: the loss.
        regularize: KL and entropy terms of the loss.
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
    tools: list[str] | None = None
    rollout: RolloutSection | None = None
    data: DataSection | None = None
    advantage: Component | None = None
    kl_in_reward: KLInRewardSection | None = None
    correction: Component | None = None
    objective: Component
    regularize: RegularizeSection | None = None
    head: HeadSection | None = None
    teacher: TeacherSection | None = None
    aggregate: Component | None = None
    optimizer: Annotated[Component, BeforeValidator(_named_adamw)] = Component(name="adamw")
    train: TrainSection = Field(default_factory=TrainSection)
    eval: EvalSection = Field(default_factory=EvalSection)
    scale: ScaleSection = Field(default_factory=ScaleSection)
    track: Components = Field(default_factory=list)

    @model_validator(mode="after")
    def _reward_rollouts(self) -> Self:
        if self.rollout is not None and not self.rewards:
            self.rewards = [RewardComponent(name="correct")]
        return self

    def rules(self) -> Iterator[Rule]:
        """Yield conditions between sections that need no component; ``training/checks`` has those that do."""
        rollout, data, train = self.rollout, self.data, self.train
        tasks = {"task": self.task, **{f"eval.tasks.{i}": task for i, task in enumerate(self.eval.tasks)}}
        for where, component in tasks.items():
            if component.name == MIXTURE:
                try:
                    read_parts(component.options.get("parts"), where)
                except (RecipeError, UnknownComponent) as error:
                    key, colon, message = str(error).partition(":")
                    yield True, key, colon + message
        one = ": give exactly one of 'rollout' (reinforcement learning) and 'data' (supervised)"
        alone = ": {key!r} belongs to 'rollout'; a supervised recipe has none"
        whole = ": products of weights in fp64 stay in fp64; use fp32, or model.dtype fp32"
        turns = (
            ": {key!r} answers a model that samples; give 'rollout', or leave it out. A recipe with 'rollout' "
            "whose model.name is this run evaluates it in turns before the first step"
        )
        one_turn = ": {key} is for completions of several turns; give 'environment' or 'tools', or leave it out"
        compared = (
            ": it compares the trainer's log-probabilities with the sampler's; set rollout.old_logprobs to trainer"
        )
        reused = ": ppo_epochs and num_minibatches are of a rollout batch; 'data' has none, so leave {key} out"
        in_turns = [] if self.environment is not None or self.tools else [*TURN_DEFAULTS, "max_turn_tokens"]
        broken = [
            ((rollout is None) == (data is None), "rollout" if data is None else "data", one),
            *(
                (data and getattr(self, key) is not None, key, alone)
                for key in ("advantage", "kl_in_reward", "correction")
            ),
            (self.model.dtype == "fp64" and train.precision != "fp32", "train.precision", whole),
            *((data and getattr(self, key), key, turns) for key in ("environment", "tools")),
            *((rollout and getattr(rollout, key) is not None, f"rollout.{key}", one_turn) for key in in_turns),
            (self.correction and rollout and rollout.old_logprobs != "trainer", "correction", compared),
            *((data and getattr(train, key) != 1, f"train.{key}", reused) for key in ("ppo_epochs", "num_minibatches")),
        ]
        yield from ((is_so, key, text.format(key=key.rpartition(".")[2])) for is_so, key, text in broken)

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
            if not to_read and ":" in tool:  # one without a module is refused where it is built
                registry.import_component("tool", tool, f"tools.{index}")
        for path, kind in COMPONENT_KINDS.items():
            above, _, key = path.rpartition(".")
            section = getattr(resolved, above) if above else resolved
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
        if self.aggregate is None:
            self.aggregate = Component(name="token_mean" if level == "token" else "unit_mean")
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
            known = [
                (component.name, f"rewards.{i}")
                for i, component in enumerate(self.rewards)
                if is_declared(component.name)
            ]
            judged = any(registry.find("reward", *component).traits.get("asks_a_model") for component in known)
            is_pulled = judged and self.eval.every > 0 and not self.trains_scorer
            self.eval.num_kl_prompts = min(KL_PROMPTS, self.eval.num_examples) if is_pulled else 0
        if self.rollout is not None:
            for key, value in TURN_DEFAULTS.items() if self.environment is not None or self.tools else ():
                if getattr(self.rollout, key) is None:
                    setattr(self.rollout, key, value)
            if self.rollout.select is None:
                self.rollout.select = Component(name="best_and_worst" if level == "pair" else "every")
            if self.advantage is None and "advantages" in traits.get("needs", ("advantages",)):
                self.advantage = Component(name="gae" if traits.get("head") == "value" else "normalized")

    def within(self, context: int) -> int:
        """Return the limit of a prompt and its answer together, for a model with a context of so many tokens."""
        limit = self.rollout.max_total_tokens if self.rollout is not None else None
        return context if limit is None else min(context, limit)

    @property
    def trains_scorer(self) -> bool:
        """True if a reward model is trained, and no policy.

        Where the objective of a stored recipe may not be imported, its sections decide: a head on data scores.
        """
        traits = registry.traits_of("objective", self.objective.name)
        return self.head is not None and self.data is not None if traits is None else traits.get("head") == "score"


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
    below = Document.load(Recipe, name_or_path).extend()
    after, lines = below.override(overrides).content, []
    for key in dict.fromkeys(key.removesuffix(".name") for key, _ in overrides):
        before, now = _value_at(below.content, key), _value_at(after, key)
        if isinstance(before, Mapping) and "name" in before:
            kept = now if isinstance(now, Mapping) else {"name": now}
            lost = [f"{option} ({before[option]})" for option in before if option not in kept]
            if lost:
                was = f"{kept.get('name')} in place of {before['name']}"
                lines.append(f"{key}: {was}, whose options in the recipe are left out: {', '.join(lost)}")
    tasks = (_value_at(below.content, "eval.tasks"), _value_at(after, "eval.tasks"))
    if tasks[0] and not tasks[1] and not any(key == "eval" or key.startswith("eval.tasks") for key, _ in overrides):
        lines.append("eval.tasks: those of the recipe are left out with its task; evaluation is of the new task")
    return lines


def _value_at(content: Mapping[str, object], key: str) -> object:
    """Return the value under a dotted key; None where there is none."""
    value: object = content
    for part in key.split("."):
        if isinstance(value, list):
            value = value[int(part)] if part.isdigit() and int(part) < len(value) else None
        else:
            value = value.get(part) if isinstance(value, Mapping) else None
    return value


def validate_recipe(data: Mapping[str, object], place: str = "recipe", *, is_own: bool = True) -> Recipe:
    """Return a ``Recipe`` from plain data; errors name ``place`` and the key.

    ``is_own``: the caller has written it, so code that it names is allowed; False for data from a file.
    """
    if is_own:
        declare_code(data)
    return Document(Recipe, Recipe.older.bring_up_to_date(data), place, {}).check()
